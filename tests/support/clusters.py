"""A real cluster on loopback: primaries and replicas, each a server process with a bus of its own, put together by hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import redis

from tests.support.patience import PATIENCE
from tests.support.servers import SETTINGS, Server, free_port, started

SLOTS = 16384
ASK_AGAIN = 6.0
"""Seconds after which a planned failover has failed."""
NODE_TIMEOUT_MS = 2000
"""After which a node that does not answer counts as gone; an election comes on top."""


class Node(Server):
    """One node of a cluster."""

    def __init__(self, kind: str) -> None:
        self.bus = free_port()
        super().__init__(
            kind,
            settings={
                **SETTINGS,
                "cluster-enabled": "yes",
                "cluster-port": str(self.bus),
                "cluster-node-timeout": str(NODE_TIMEOUT_MS),
                "cluster-announce-ip": "127.0.0.1",
                "repl-diskless-sync-delay": "0",
            },
        )

    def ask(self, *command: str | int) -> Any:
        """The raw answer to a command."""
        connection = self.look.connection_pool.get_connection()
        try:
            connection.send_command(*command)
            return connection.read_response()
        finally:
            self.look.connection_pool.release(connection)

    @property
    def id(self) -> str:
        return cast("bytes", self.ask("CLUSTER", "MYID")).decode()

    @property
    def role(self) -> str:
        return cast("bytes", self.ask("ROLE")[0]).decode()

    @property
    def primary_port(self) -> int:
        """Of which a replica is one."""
        return cast("int", self.ask("ROLE")[2])


@dataclass
class Cluster:
    """Some primaries, each with as many replicas; the slots are shared out evenly.

    `nodes`: the primaries, then their replicas in the same order.
    """

    kind: str
    primaries: int = 3
    replicas: int = 1
    nodes: list[Node] = field(default_factory=list[Node])

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    @property
    def running(self) -> list[Node]:
        return [node for node in self.nodes if node.running]

    def start(self) -> None:
        self.nodes = [started(self.new_node) for _ in range(self.primaries * (1 + self.replicas))]
        first, leading = self.nodes[0], self.nodes[: self.primaries]
        for number, node in enumerate(leading):
            begin, end = (SLOTS * each // self.primaries for each in (number, number + 1))
            node.ask("CLUSTER", "ADDSLOTSRANGE", begin, end - 1)
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for node in self.nodes[1:]:
            node.ask("CLUSTER", "MEET", "127.0.0.1", first.port, first.bus)
        wait(lambda: all(len(self.known_to(node)) == len(self.nodes) for node in self.nodes), "nodes that have met")
        for number, node in enumerate(self.nodes[self.primaries :]):
            node.ask("CLUSTER", "REPLICATE", leading[number % self.primaries].id)
        self.settle()

    def new_node(self) -> Node:
        return Node(self.kind)

    def close(self) -> None:
        for node in self.nodes:
            node.close()

    def settle(self) -> None:
        """Wait until each running node reports that all is well, `primaries` have slots, and every replica is in step."""
        wait(lambda: all(self._is_well(node) for node in self.running), "a cluster that is well")

    def known_to(self, node: Node) -> list[list[str]]:
        """CLUSTER NODES, line by line, word by word, without those whose handshake goes on."""
        lines = cast("bytes", node.ask("CLUSTER", "NODES")).decode().splitlines()
        return [words for words in map(str.split, lines) if "handshake" not in words[2]]

    def owner(self, key: str) -> Node:
        """The node that has the slot of `key`."""
        slot = cast("int", self.running[0].ask("CLUSTER", "KEYSLOT", key))
        found: Node | None = None

        def look() -> bool:
            nonlocal found
            for first, last, primary, *_ in self.running[0].ask("CLUSTER", "SLOTS"):
                if first <= slot <= last:
                    found = next((node for node in self.running if node.port == primary[1]), None)
            return found is not None and found.role == "master"

        wait(look, f"an owner of slot {slot}")
        assert found is not None
        return found

    def replica_of(self, primary: Node) -> Node:
        return next(node for node in self.running if node.role == "slave" and node.primary_port == primary.port)

    def get(self, command: str, key: str, *words: str | int) -> Any:
        """The answer of whichever node has `key`."""
        return self.owner(key).ask(command, key, *words)

    def all_keys(self) -> set[str]:
        """All keys of all primaries."""
        found: set[str] = set()
        for node in self.running:
            if node.role == "master":
                found |= {key.decode() for key in cast("list[bytes]", node.ask("KEYS", "*"))}
        return found

    def clear(self) -> None:
        """Until no node has any key. A replica that takes over before it has heard of it would bring old keys back."""

        def is_empty() -> bool:
            full = [node for node in self.running if node.ask("DBSIZE")]
            for node in full:
                if node.role == "master":
                    node.ask("FLUSHALL")
            return not full

        wait(is_empty, "a cluster without keys")

    def _is_well(self, node: Node) -> bool:
        try:
            info = cast("bytes", node.ask("CLUSTER", "INFO"))
            role = cast("list[Any]", node.ask("ROLE"))
        except (redis.RedisError, OSError):
            return False
        well = b"cluster_state:ok" in info and b"cluster_size:%d" % self.primaries in info
        return well and (role[0] != b"slave" or role[3] == b"connected")


def fail_over(replica: Node) -> None:
    """Let a replica take its primary's place, as planned. It gives up after 5 s, on a busy machine: then it is asked again."""
    asked = -ASK_AGAIN

    def is_done() -> bool:
        nonlocal asked
        if replica.role == "master":
            return True
        if time.monotonic() - asked >= ASK_AGAIN:
            asked = time.monotonic()
            with suppress(redis.ResponseError):  # it has just become the primary
                replica.ask("CLUSTER", "FAILOVER")
        return False

    wait(is_done, "a failover")


def wait(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.02)


@contextmanager
def cluster_of(kind: str, primaries: int = 3, replicas: int = 1) -> Iterator[Cluster]:
    """A cluster for the length of a block."""
    cluster = Cluster(kind, primaries, replicas)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


@contextmanager
def open_node(kind: str) -> Iterator[Node]:
    """A cluster of one node, which has all slots, for the length of a block."""
    with cluster_of(kind, primaries=1, replicas=0) as cluster:
        yield cluster.nodes[0]


def move_slot(cluster: Cluster, slot: int, target: Node) -> None:
    """Move a slot key by key, as resharding tools do; the keys stay for a while where one would not look."""
    [source] = [
        node
        for node in cluster.running
        if node.role == "master"
        and any(
            first <= slot <= last and primary[1] == node.port
            for first, last, primary, *_ in node.ask("CLUSTER", "SLOTS")
        )
    ]
    target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", source.id)
    source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", target.id)
    while keys := cast("list[bytes]", source.ask("CLUSTER", "GETKEYSINSLOT", slot, 1)):
        source.ask("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *[key.decode() for key in keys])
        time.sleep(0.02)  # so that requests meet a slot of which each node has a part
    others = [node for node in cluster.running if node not in (source, target)]
    # Each once: Redis takes the slot's subscribers away when it tells a node, also the owner itself.
    for node in (target, source, *others):
        if node.role == "master":
            node.ask("CLUSTER", "SETSLOT", slot, "NODE", target.id)


@pytest.fixture(scope="module")
def cluster_of_module(server_kind: str) -> Iterator[Cluster]:
    with cluster_of(server_kind) as cluster:
        yield cluster


@pytest.fixture
def cluster(cluster_of_module: Cluster) -> Iterator[Cluster]:
    """Three primaries, three replicas, no keys; everything that a test does to it is undone."""
    cluster_of_module.clear()
    yield cluster_of_module
    for node in cluster_of_module.nodes:
        if not node.running:
            node.start()
    cluster_of_module.settle()
    for node in cluster_of_module.nodes:
        node.close_clients()
