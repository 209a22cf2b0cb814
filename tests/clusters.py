"""A real cluster on loopback: primaries and replicas, each a server process with a bus, made without any tool."""

from __future__ import annotations

import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import redis

from tests.patience import PATIENCE
from tests.servers import SETTINGS, Server

SLOTS = 16384
NODE_TIMEOUT = 2000
"""Milliseconds after which a node that does not answer counts as gone; the election comes on top."""


class Node(Server):
    """One node. Its other end, the bus, is on a port of its own."""

    def __init__(self, kind: str, **settings: str) -> None:
        port, bus = _two_ports()
        super().__init__(
            kind,
            port=port,
            settings={
                **SETTINGS,
                "cluster-enabled": "yes",
                "cluster-port": str(bus),
                "cluster-node-timeout": str(NODE_TIMEOUT),
                "cluster-announce-ip": "127.0.0.1",
                "repl-diskless-sync-delay": "0",
                **settings,
            },
        )
        self.bus = bus

    @property
    def id(self) -> str:
        return cast("bytes", self.ask("CLUSTER", "MYID")).decode()

    def ask(self, *command: str | int) -> Any:
        return self.look.execute_command(*command)


@dataclass
class Cluster:
    """Some primaries, each with as many replicas. The slots are shared out evenly.

    Attributes:
        nodes: the primaries, then the replicas, in the order of their primaries.
    """

    kind: str
    primaries: int = 3
    replicas: int = 1
    nodes: list[Node] = field(default_factory=list[Node])

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def start(self) -> None:
        self.nodes = [Node(self.kind) for _ in range(self.primaries * (1 + self.replicas))]
        for node in self.nodes:
            node.start()
        first = self.nodes[0]
        for node in self.nodes[1:]:
            node.ask("CLUSTER", "MEET", "127.0.0.1", first.port, first.bus)
        for number, node in enumerate(self.nodes[: self.primaries]):
            ends = [SLOTS * each // self.primaries for each in (number, number + 1)]
            node.ask("CLUSTER", "ADDSLOTSRANGE", ends[0], ends[1] - 1)
        wait(lambda: all(len(self.seen_by(node)) == len(self.nodes) for node in self.nodes), "nodes that know each other")
        for number, node in enumerate(self.nodes[self.primaries :]):
            node.ask("CLUSTER", "REPLICATE", self.nodes[number % self.primaries].id)
        self.settle()

    def stop(self) -> None:
        for node in self.nodes:
            node.close_clients()
            node.stop()
            shutil.rmtree(node.folder, ignore_errors=True)

    def settle(self) -> None:
        """Wait until every node that runs says that all is well, and every replica is in step."""
        wait(lambda: all(_is_well(node) for node in self.running), "a cluster that is well")

    @property
    def running(self) -> list[Node]:
        return [node for node in self.nodes if node.running]

    def seen_by(self, node: Node) -> list[list[str]]:
        """What CLUSTER NODES says, line by line, word by word."""
        answer: Any = node.ask("CLUSTER", "NODES")
        text = answer.decode() if isinstance(answer, bytes) else None
        if text is None:  # redis-py has parsed it
            return [[place, facts["flags"], facts["master_id"]] for place, facts in answer.items()]
        return [line.split() for line in text.splitlines()]

    def owner(self, key: str) -> Node:
        """The node that has the slot of `key`, by its own account."""
        slot = int(self.running[0].ask("CLUSTER", "KEYSLOT", key))
        for node in self.running:
            for first, last, primary, *_ in node.ask("CLUSTER", "SLOTS"):
                if first <= slot <= last and primary[1] == node.port:
                    return node
        raise LookupError(f"nobody has slot {slot}")

    def replica_of(self, primary: Node) -> Node:
        """A replica of `primary` that runs."""
        wanted = primary.id
        for node in self.running:
            role = node.ask("ROLE")
            if role[0] == b"slave" and role[2] == primary.port:
                return node
        raise LookupError(f"{wanted} has no replica")


def _is_well(node: Node) -> bool:
    try:
        info = node.ask("CLUSTER", "INFO")
        role = node.ask("ROLE")
    except redis.RedisError:
        return False
    state = info["cluster_state"] if isinstance(info, dict) else "ok" if b"cluster_state:ok" in info else "fail"
    return state == "ok" and (role[0] != b"slave" or role[3] == b"connected")


def wait(condition: Callable[[], bool], what: str) -> None:
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
        cluster.stop()


def _two_ports() -> tuple[int, int]:
    """Two free ports."""
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return cast("int", one.getsockname()[1]), cast("int", other.getsockname()[1])


_ = Path, tempfile
