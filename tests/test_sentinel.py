"""A mesh behind real Sentinels: it goes on when the primary is killed, frozen or replaced, and nobody is restarted or swept."""

from __future__ import annotations

import logging
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import pytest
import trio

import worqr
from tests.peer.tools import Held, eventually, until
from tests.support.patience import PATIENCE
from tests.support.sentinels import SERVICE, FakeSentinel, Watched, raw, run_id, watched
from tests.support.servers import Server
from tests.test_tls import Certificates, TlsServer, certificates, made_once, tls

_FIXTURES = (certificates, made_once, tls)

PRODUCERS = 6

measured = logging.getLogger("measured")
"""Figures, for whoever runs this with ``-o log_cli=true --log-cli-level=INFO``."""


@pytest.fixture(scope="module")
def watched_of_module(server_kind: str) -> Iterator[Watched]:
    with watched(server_kind) as servers:
        yield servers


@pytest.fixture
def servers(watched_of_module: Watched) -> Iterator[Watched]:
    """A primary, its replica, and three Sentinels: all of them run, and all is well."""
    watched_of_module.settle()
    raw(watched_of_module.primary, "FLUSHALL")
    yield watched_of_module
    for each in (*watched_of_module.servers, *watched_of_module.sentinels):
        each.close_clients()


class Load:
    """Producers and two peers at work, one handler that runs all the time; knows what was acknowledged, and what ran."""

    def __init__(self, servers: Watched) -> None:
        self.servers = servers
        self.meshes = [worqr.Mesh(servers.url, patience=4 * PATIENCE) for _ in range(3)]
        self.acknowledged: dict[bytes, float] = {}
        self.runs: Counter[bytes] = Counter()
        self.held = Held()
        self.peers: list[worqr.Peer] = []
        self.ids: list[str] = []
        self.stopped = False

    async def handle(self, task: bytes) -> None:
        await trio.sleep(0.001)
        self.runs[task] += 1

    async def produce(self, name: int) -> None:
        number = 0
        while not self.stopped:
            number += 1
            task = b"%d-%d" % (name, number)
            await self.meshes[0].queue("Q1").enqueue(task)
            self.acknowledged[task] = time.monotonic()
            await trio.sleep(0.001)

    async def more(self, count: int = 100) -> None:
        """Until so many more have run."""
        wanted = self.runs.total() + count
        await until(lambda: self.runs.total() >= wanted, what="more runs")

    async def replicated(self) -> set[bytes]:
        """What was acknowledged so far; returns when the replica has it."""
        known = set(self.acknowledged)
        offset = raw(self.servers.primary, "ROLE")[1]
        replica = self.servers.replica
        await until(lambda: raw(replica, "ROLE")[4] >= offset, what="a replica in step")
        return known

    @asynccontextmanager
    async def going_on(self) -> AsyncIterator[None]:
        """For the length of a block; then all that is there is worked off. Nobody is restarted or swept."""
        async with AsyncExitStack() as stack:
            self.peers = [await stack.enter_async_context(mesh.join(grace=0)) for mesh in self.meshes[1:]]
            self.ids = [peer.id for peer in self.peers]
            await stack.enter_async_context(self.meshes[0].connect())
            async with trio.open_nursery() as nursery:
                for peer in self.peers:
                    await nursery.start(partial(peer.serve, "Q1", self.handle))
                await nursery.start(partial(self.peers[0].serve, "Q2", self.held))
                await self.meshes[0].queue("Q2").enqueue(b"long")
                await self.held.wait(1)
                async with trio.open_nursery() as producers:
                    for name in range(PRODUCERS):
                        producers.start_soon(self.produce, name)
                    await self.more()
                    yield
                    await self.more()
                    self.stopped = True
                await eventually(self.left, 0)
                assert [peer.id for peer in self.peers] == self.ids, "nobody was swept"
                assert not self.held.cancelled
                self.held.gate.set()
                await self.held.wait_for(lambda: self.held.done == [b"long"])
                nursery.cancel_scope.cancel()

    async def left(self) -> int:
        info = await self.meshes[0].queue("Q1").info()
        return info.waiting + info.running + info.scheduled

    def lost(self) -> set[bytes]:
        return self.acknowledged.keys() - self.runs.keys()

    def until_first_answer(self, since: float) -> float:
        """Seconds from then to the first acknowledgement of what the new primary has answered."""
        return min(at for at in self.acknowledged.values() if at > since) - since

    async def moved(self, to: Server) -> float:
        """When the producers' requests went to this server."""
        wanted = run_id(to)
        await until(
            lambda: self.meshes[0]._client.link.run_id == wanted, 2 * PATIENCE, what="a link to the new primary"
        )
        return time.monotonic()


async def test_a_killed_primary_costs_seconds_and_nothing_that_was_replicated(servers: Watched) -> None:
    load = Load(servers)
    old, new = servers.primary, servers.replica
    async with load.going_on():
        safe = await load.replicated()
        await trio.to_thread.run_sync(old.kill)
        killed = time.monotonic()
        moved = await load.moved(new)
        await load.more()
        measured.info("%s: %.4g", "seconds from the kill to the first answer", load.until_first_answer(killed))
        await trio.to_thread.run_sync(old.start)  # as a primary, by its own account, until a Sentinel sees it
        await until(lambda: raw(old, "ROLE")[0] == b"slave", what="the old primary as a replica")
        await load.replicated()
    measured.info("%s: %.4g", "acknowledged", len(load.acknowledged))
    measured.info("%s: %.4g", "lost", len(load.lost()))
    safe |= {task for task, at in load.acknowledged.items() if at > moved}
    assert not load.lost() & safe


@pytest.mark.one_server
async def test_a_frozen_primary_is_left_behind_while_one_sentinel_is_down(servers: Watched) -> None:
    load = Load(servers)
    old, new = servers.primary, servers.replica
    await trio.to_thread.run_sync(servers.sentinels[0].stop)
    async with load.going_on():
        safe = await load.replicated()
        old.pause()
        frozen = time.monotonic()
        moved = await load.moved(new)
        await load.more()
        measured.info("%s: %.4g", "seconds from the freeze to the first answer", load.until_first_answer(frozen))
        safe |= {task for task, at in load.acknowledged.items() if at > moved}
        old.resume()  # it takes itself for the primary, and what stood in its sockets is executed there, for nothing
        await until(lambda: raw(old, "ROLE")[0] == b"slave", what="the old primary as a replica")
        await load.more()
    assert not load.lost() & safe


@pytest.mark.one_server
@pytest.mark.parametrize("replicas", [0, 1], ids=["any", "min-replicas-to-write"])
async def test_a_planned_failover_is_noticed_by_looking(servers: Watched, replicas: int) -> None:
    load = Load(servers)
    old, new = servers.primary, servers.replica
    for server in (old, new):
        raw(server, "CONFIG", "SET", "min-replicas-to-write", replicas)
    try:
        async with load.going_on():
            safe = await load.replicated()
            for sentinel in servers.sentinels:
                servers.eager(sentinel, eager=False)  # so they leave the old primary alone for ten seconds
            servers.sentinels[1].ask("FAILOVER", SERVICE)
            asked = time.monotonic()
            moved = await load.moved(new)
            measured.info("%s: %.4g", "seconds from the command to the new primary", moved - asked)
            if replicas:
                raw(new, "CONFIG", "SET", "min-replicas-to-write", 0)  # its replica will come late
            await load.more()
            assert raw(old, "ROLE")[0] == b"master", "nobody has told it"
    finally:
        for server in (old, new):
            raw(server, "CONFIG", "SET", "min-replicas-to-write", 0)
    lost = load.lost()
    measured.info(
        "%s: %.4g", "acknowledged meanwhile", len([at for at in load.acknowledged.values() if asked <= at <= moved])
    )
    measured.info("%s: %.4g", "lost", len(lost))
    assert not lost & safe
    assert not [task for task in lost if load.acknowledged[task] > moved]
    if replicas:
        assert len(lost) <= 3 * PRODUCERS, "what the old primary did before it saw that its replica was gone"


async def test_tls_holds_for_the_sentinels_and_for_the_server(tls: TlsServer, certificates: Certificates) -> None:
    sentinel = FakeSentinel(tls.tls_port)
    sentinel.tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=certificates.path("ca.pem"))
    sentinel.tls.load_cert_chain(certificates.path("server.pem"), certificates.path("server.key"))
    sentinel.tls.verify_mode = ssl.CERT_REQUIRED
    url = sentinel.url.replace("redis+", "rediss+")
    try:
        mesh = worqr.Mesh(url + certificates.options())
        async with mesh.connect():
            assert await mesh.queue("Q1").enqueue(b"a") == 1
            assert await mesh.queue("Q1").tasks() == [b"a"]
        with pytest.raises(worqr.RefusedByServer, match="certificate"):
            async with worqr.Mesh(url + certificates.options(ssl_ca_certs="stranger.pem")).connect():
                pass
    finally:
        sentinel.close()
