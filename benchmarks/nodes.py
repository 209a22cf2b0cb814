"""A cluster for a benchmark: primaries and replicas on loopback, ended with the block that opened it."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import redis

from worqr.embedded import EmbeddedServer

SLOTS = 16384
NODE_TIMEOUT_MS = 1000
"""Time after which a node that does not reply counts as gone; the election comes on top."""
SETTLES_WITHIN = 60.0
_given: set[int] = set()


@dataclass(frozen=True, slots=True)
class Node:
    server: EmbeddedServer
    port: int
    bus: int
    client: redis.Redis

    def ask(self, *command: str | int) -> Any:
        """The raw reply to a command."""
        pool = self.client.connection_pool
        connection = pool.get_connection()
        try:
            connection.send_command(*command)
            return connection.read_response()
        finally:
            pool.release(connection)


class Nodes:
    """The nodes of one cluster: the primaries, then a replica of each."""

    def __init__(self, nodes: list[Node], primaries: int) -> None:
        self.nodes = nodes
        self._primaries = primaries
        leading, first = nodes[:primaries], nodes[0]
        for number, node in enumerate(leading):
            begin, end = (SLOTS * each // primaries for each in (number, number + 1))
            node.ask("CLUSTER", "ADDSLOTSRANGE", begin, end - 1)
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for node in nodes[1:]:
            node.ask("CLUSTER", "MEET", "127.0.0.1", first.port, first.bus)
        until(lambda: all(self._knows_all(node) for node in nodes))
        for node, primary in zip(nodes[primaries:], leading, strict=True):
            node.ask("CLUSTER", "REPLICATE", primary.ask("CLUSTER", "MYID").decode())
        self.settle()

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def settle(self, but: Node | None = None) -> None:
        """Wait until all nodes but one report that the cluster is well, and all replicas are in step."""
        until(lambda: all(self._is_well(node) for node in self.nodes if node is not but))

    def pair(self, key: str) -> tuple[Node, Node]:
        """The primary that has `key`, and its replica. A replica that the others count as gone is waited for."""
        slot = self.nodes[0].ask("CLUSTER", "KEYSLOT", key)
        until(lambda: bool(self._pairs(slot)))
        return self._pairs(slot)[0]

    def _pairs(self, slot: int) -> list[tuple[Node, Node]]:
        """The primary of a slot with each replica that the first node lists."""
        by_port = {node.port: node for node in self.nodes}
        return [
            (by_port[primary[1]], by_port[replica[1]])
            for first, last, primary, *replicas in self.nodes[0].ask("CLUSTER", "SLOTS")
            for replica in replicas
            if first <= slot <= last
        ]

    def _knows_all(self, node: Node) -> bool:
        lines = node.ask("CLUSTER", "NODES").splitlines()
        return len([line for line in lines if b"handshake" not in line]) == len(self.nodes)

    def _is_well(self, node: Node) -> bool:
        role = node.ask("ROLE")
        info = node.ask("CLUSTER", "INFO")
        in_step = role[0] != b"slave" or role[3] == b"connected"
        return b"cluster_state:ok" in info and b"cluster_size:%d" % self._primaries in info and in_step


@contextmanager
def open_cluster(primaries: int = 3) -> Iterator[Nodes]:
    """A cluster with a replica for each primary, for the length of a block."""
    with ExitStack() as stack:
        nodes: list[Node] = []
        for _ in range(2 * primaries):
            port, bus = free_port(), free_port()
            settings = {
                "cluster-enabled": "yes",
                "cluster-port": str(bus),
                "cluster-node-timeout": str(NODE_TIMEOUT_MS),
                "cluster-announce-ip": "127.0.0.1",
                "repl-diskless-sync-delay": "0",
            }
            server = stack.enter_context(EmbeddedServer(port=port, settings=settings))
            client = redis.Redis(unix_socket_path=server.socket_path, protocol=2)
            nodes.append(Node(server, port, bus, client))
        yield Nodes(nodes, primaries)


def free_port() -> int:
    """A port that stays free until a server listens at it, and while that server is down.

    The system assigns no port below 32768 by itself, and tests take theirs from 20000 on. Each process that measures has ports of
    its own, of which there are 500, and gives none twice.
    """
    while True:
        port = random.randrange(10_000 + os.getpid() % 20, 20_000, 20)
        if port in _given:
            continue
        try:
            with socket.create_server(("127.0.0.1", port)):
                _given.add(port)
                return port
        except OSError:
            continue  # taken


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SETTLES_WITHIN
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("the cluster does not come to rest")
        time.sleep(0.02)
