"""How real nodes may be named and reached: by host name, by port alone, over TLS, by the URL of one server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trustme

from tests.link.conftest import LinkTo
from tests.link.scripts import append
from tests.link.test_subscriptions import listener
from tests.support.clusters import Cluster, Node, cluster, cluster_of_module, move_slot, wait
from tests.support.servers import programs
from worqr.errors import RefusedByServer
from worqr.link.session import slot_of

assert cluster, cluster_of_module  # fixtures

QUEUES = ("Q0", "Q2", "Q1")
"""One on each node."""


def places(node: Node) -> set[Any]:
    """The hosts of the primaries, as a node tells them."""
    return {primary[0] for _, _, primary, *_ in node.ask("CLUSTER", "SLOTS")}


@contextmanager
def named(cluster: Cluster, kind: str, hostname: str, told: bytes | None) -> Iterator[None]:
    """For the length of a block the nodes tell their places so."""
    try:
        for node in cluster.nodes:
            node.ask("CONFIG", "SET", "cluster-announce-hostname", hostname)
            node.ask("CONFIG", "SET", "cluster-preferred-endpoint-type", kind)
        wait(lambda: all(places(node) == {told} for node in cluster.nodes), f"nodes that are at {told!r}")
        yield
    finally:
        for node in cluster.nodes:
            node.ask("CONFIG", "SET", "cluster-preferred-endpoint-type", "ip")
            node.ask("CONFIG", "SET", "cluster-announce-hostname", "")
        wait(lambda: all(places(node) == {b"127.0.0.1"} for node in cluster.nodes), "nodes that are at their addresses")


@pytest.mark.parametrize(
    ("kind", "hostname", "told"),
    [("hostname", "localhost", b"localhost"), ("hostname", "", b"?"), ("unknown-endpoint", "", None)],
)
async def test_nodes_are_found_however_they_are_named(
    cluster: Cluster, link_to: LinkTo, kind: str, hostname: str, told: bytes | None
) -> None:
    source, target = cluster.owner("t:{Q0}"), cluster.owner("t:{Q1}")
    slot = slot_of("t:{Q0}")
    with named(cluster, kind, hostname, told):
        link = await link_to(cluster.url)
        listening = {queue: await listener(link, f"t:{{{queue}}}") for queue in QUEUES}
        for queue in QUEUES:
            assert (await link.call(append("t", "x", queue)))[1] == 1
        await trio.to_thread.run_sync(move_slot, cluster, slot, target)
        try:
            assert (await link.call(append("t", "y", "Q0")))[1] == 2
            await listening["Q0"].wait_confirmations(2)
            assert target.ask("SPUBLISH", "t:{Q0}", "x") == 1
            await listening["Q0"].wait(1)
        finally:
            await trio.to_thread.run_sync(move_slot, cluster, slot, source)
    assert {pipe.port for pipe in link._client._clients} <= {node.port for node in cluster.nodes}  # type: ignore[union-attr]


# TLS


class TlsCluster(Cluster):
    """Nodes that speak TLS alone: with clients, and among each other."""

    folder: Path

    def start(self) -> None:
        authority = trustme.CA()
        authority.cert_pem.write_to_path(self.folder / "ca.pem")
        certificate = authority.issue_cert("127.0.0.1", "localhost")
        certificate.private_key_pem.write_to_path(self.folder / "key.pem")
        certificate.cert_chain_pems[0].write_to_path(self.folder / "cert.pem")
        super().start()

    def new_node(self) -> Node:
        node = super().new_node()
        node.settings |= {
            "port": "0",
            "tls-port": str(node.port),
            "tls-cluster": "yes",
            "tls-replication": "yes",
            "tls-cert-file": f"{self.folder}/cert.pem",
            "tls-key-file": f"{self.folder}/key.pem",
            "tls-ca-cert-file": f"{self.folder}/ca.pem",
            "tls-auth-clients": "no",
        }
        return node


@pytest.mark.skipif(
    "redis" not in programs(), reason="no redis-server is installed, and the embedded server has no TLS"
)
async def test_a_cluster_over_tls(link_to: LinkTo, tmp_path: Path) -> None:
    cluster = TlsCluster("redis", replicas=0)
    cluster.folder = tmp_path
    try:
        cluster.start()
        url = cluster.url.replace("redis+", "rediss+")
        with pytest.raises(RefusedByServer, match="name the certificate authority"):
            await (await link_to(url, ready=False)).wait_ready()
        link = await link_to(f"{url}?ssl_ca_certs={tmp_path}/ca.pem")
        for queue in QUEUES:
            await listener(link, f"t:{{{queue}}}")
            assert (await link.call(append("t", "x", queue)))[1] == 1
    finally:
        cluster.close()
