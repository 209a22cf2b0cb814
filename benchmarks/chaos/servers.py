"""The servers of a run: one, or a cluster of three primaries with a replica each, all with append-only files on loopback."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from benchmarks.chaos.clock import ServerClock
from benchmarks.nodes import SLOTS, free_port
from worqr.embedded import EmbeddedServer

SETTINGS: Final = {"appendfsync": "always", "enable-debug-command": "local"}
NODE_TIMEOUT_MS: Final = 2000
SETTLES_WITHIN: Final = 120.0
ANSWERS_WITHIN: Final = 10.0


class Node:
    """One server process on a unix socket and a port. Its data, its socket and its port survive `kill` and `start`.

    `state`: up, down, or frozen.
    """

    def __init__(self, program: Path, folder: Path, clock: ServerClock | None, settings: dict[str, str]) -> None:
        folder.mkdir()
        self.port = free_port()
        self.bus = int(settings.get("cluster-port", 0))
        self.state = "down"
        self._program = program
        self._folder = folder
        self._clock = clock
        self._settings = settings
        self._server: EmbeddedServer | None = None
        self._client = self.new_client()

    def new_client(self) -> redis.Redis:
        """One that never sends anything again."""
        return redis.Redis(
            unix_socket_path=os.fspath(self._folder / "s"),
            protocol=2,
            socket_timeout=ANSWERS_WITHIN,
            retry=Retry(NoBackoff(), 0),
        )

    def start(self) -> None:
        """Start it and wait until it has loaded its append-only file."""
        server = EmbeddedServer(
            program=self._program,
            port=self.port,
            appendonly=True,
            dir=self._folder,
            socket=self._folder / "s",
            settings=self._settings,
        )
        if self._clock is None:
            self._server = server.__enter__()
        else:
            with self._clock.preloaded():
                self._server = server.__enter__()
        until(self._is_loaded, "a server that has loaded its data")
        self.state = "up"

    def _is_loaded(self) -> bool:
        try:
            return bool(self._client.ping())
        except redis.RedisError:
            return False

    def stop(self) -> None:
        """End it in good order."""
        server, self._server, self.state = self._server, None, "down"
        if server is not None:
            server.__exit__(None, None, None)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.stop()

    def freeze(self) -> None:
        self.signal(signal.SIGSTOP)
        self.state = "frozen"

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)
        self.state = "up"

    def signal(self, number: int) -> None:
        if self._server is not None:
            os.kill(self._server.pid, number)

    def ask(self, *command: str | int | bytes) -> Any:
        """The raw reply to a command."""
        pool = self._client.connection_pool
        connection = pool.get_connection()
        try:
            connection.send_command(*command)
            return connection.read_response()
        except (redis.ConnectionError, redis.TimeoutError):
            connection.disconnect()
            raise
        finally:
            pool.release(connection)

    def facts(self, section: str) -> dict[str, Any]:
        return dict(self._client.info(section))

    @property
    def id(self) -> str:
        return str(self.ask("CLUSTER", "MYID").decode())

    @property
    def is_primary(self) -> bool:
        return bool(self.ask("ROLE")[0] == b"master")

    def close(self) -> None:
        self._client.close()
        if self.state == "frozen":
            self.thaw()
        self.stop()


class Servers:
    """A single server."""

    clustered = False

    def __init__(self, program: Path, folder: Path, clock: ServerClock | None = None) -> None:
        self.clock = clock
        self.nodes = [Node(program, folder / "server", clock, dict(SETTINGS))]

    def start(self) -> None:
        self.nodes[0].start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.nodes[0].port}/0"

    @property
    def primaries(self) -> list[Node]:
        """The nodes that reply and have data."""
        return [node for node in self.nodes if node.state == "up"]

    def owner(self, key: str) -> Node:
        """The node that has `key`."""
        return self.nodes[0]

    def is_well(self) -> bool:
        return self.nodes[0].state == "up"

    def keys(self, pattern: str) -> Iterator[tuple[Node, bytes]]:
        """All keys that match, with their nodes."""
        for node in self.primaries:
            cursor = b"0"
            while True:
                cursor, found = node.ask("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
                for key in found:
                    yield node, key
                if cursor == b"0":
                    break

    def close(self) -> None:
        for node in self.nodes:
            with suppress(OSError, redis.RedisError):
                node.close()


class Cluster(Servers):
    """Three primaries, then a replica of each."""

    clustered = True

    def __init__(self, program: Path, folder: Path) -> None:
        self.clock = None
        self.nodes = [
            Node(
                program,
                folder / f"node{number}",
                None,
                {
                    **SETTINGS,
                    "cluster-enabled": "yes",
                    "cluster-port": str(free_port()),
                    "cluster-node-timeout": str(NODE_TIMEOUT_MS),
                    "cluster-announce-ip": "127.0.0.1",
                    "repl-diskless-sync-delay": "0",
                },
            )
            for number in range(6)
        ]

    def start(self) -> None:
        for node in self.nodes:
            node.start()
        leading, replicas = self.nodes[:3], self.nodes[3:]
        for number, node in enumerate(leading):
            begin, end = (SLOTS * each // 3 for each in (number, number + 1))
            node.ask("CLUSTER", "ADDSLOTSRANGE", begin, end - 1)
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for node in self.nodes[1:]:
            node.ask("CLUSTER", "MEET", "127.0.0.1", self.nodes[0].port, self.nodes[0].bus)
        until(lambda: all(self._knows_all(node) for node in self.nodes), "nodes that have met")
        for replica, primary in zip(replicas, leading, strict=True):
            replica.ask("CLUSTER", "REPLICATE", primary.id)
        until(self.is_well, "a cluster that is well")

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    @property
    def primaries(self) -> list[Node]:
        return [node for node in self.nodes if node.state == "up" and node.is_primary]

    def owner(self, key: str) -> Node:
        asked = next(node for node in self.nodes if node.state == "up")
        slot = asked.ask("CLUSTER", "KEYSLOT", key)
        return self.owner_of_slot(slot)

    def owner_of_slot(self, slot: int) -> Node:
        asked = next(node for node in self.nodes if node.state == "up")
        for first, last, primary, *_ in asked.ask("CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return next(node for node in self.nodes if node.port == primary[1])
        raise LookupError(f"no node has slot {slot}")

    def replica_of(self, primary: Node) -> Node:
        return next(
            node
            for node in self.nodes
            if node.state == "up" and node.ask("ROLE")[:3] == [b"slave", b"127.0.0.1", primary.port]
        )

    def is_well(self) -> bool:
        """All nodes are up, agree on the slots, and every replica is in step with its primary."""
        try:
            return all(node.state == "up" and self._is_well(node) for node in self.nodes)
        except (redis.RedisError, OSError):
            return False

    def _knows_all(self, node: Node) -> bool:
        lines = node.ask("CLUSTER", "NODES").splitlines()
        return len([line for line in lines if b"handshake" not in line]) == len(self.nodes)

    def _is_well(self, node: Node) -> bool:
        role, info = node.ask("ROLE"), node.ask("CLUSTER", "INFO")
        in_step = role[3] == b"connected" if role[0] == b"slave" else len(role[2]) == 1
        return in_step and b"cluster_state:ok" in info and b"cluster_size:3" in info


def until(condition: Callable[[], object], what: str, within: float = SETTLES_WITHIN) -> None:
    """Wait until `condition` holds; TimeoutError names `what` was waited for."""
    end = time.monotonic() + within
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {within:g} s in vain for {what}")
        time.sleep(0.02)
