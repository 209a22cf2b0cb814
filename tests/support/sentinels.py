"""Sentinels: real ones, which watch a primary and its replica; and a fake one, whose replies a test sets."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import redis

from tests.support.patience import PATIENCE
from tests.support.resp import frame_end, words
from tests.support.servers import SETTINGS, Server, programs, started
from worqr.embedded import EmbeddedServer

SERVICE = "orders"
DOWN_AFTER = 1000
"""Milliseconds after which a server that does not answer counts as down."""
FAILOVER_TIMEOUT = 2000
"""Milliseconds; when Sentinels have split their votes, they try again after twice that."""
_TILT = ("tilt-period", "3000")
"""For how long a Sentinel only looks on after the machine stood still. By default 30 s: if a primary dies meanwhile, it would
find its replicas out of step for too long afterwards, and promote none.
"""
_EAGER = ("info-period", "200", "publish-period", "200", "ask-period", "200", *_TILT)
_USUAL = ("info-period", "10000", "publish-period", "2000", "ask-period", "1000", *_TILT)


class Sentinel(Server):
    """One real Sentinel."""

    def start(self) -> None:
        """Its configuration is a file that it writes to; its program is that of a server, called otherwise."""
        (self.folder / "sentinel.conf").touch()
        program = self.folder / "sentinel"
        program.write_text(f'#!/bin/sh\nexec "{programs()[self.kind]}" "{self.folder}/sentinel.conf" --sentinel "$@"\n')
        program.chmod(0o700)
        process = EmbeddedServer(program=program, port=self.port, dir=self.folder, socket=self.folder / "s")
        self._process = process.__enter__()

    def ask(self, *command: str | int) -> Any:
        """The raw answer to a command for Sentinels."""
        return raw(self, "SENTINEL", *command)


def raw(server: Server, *command: str | int) -> Any:
    """The answer to a command, as the server sends it. A Sentinel that changes a server's role kills its connections."""
    connection = server.look.connection_pool.get_connection()
    try:
        for _ in range(10):
            try:
                connection.send_command(*command)
                return connection.read_response()
            except redis.ConnectionError:
                connection.disconnect()
        raise AssertionError(f"ten connections in a row were killed, with {command}")
    finally:
        server.look.connection_pool.release(connection)


@dataclass
class Watched:
    """A primary with a replica, and three Sentinels that watch it.

    Attributes:
        servers: the two; which of them is the primary changes.
    """

    kind: str
    servers: list[Server] = field(default_factory=list[Server])
    sentinels: list[Sentinel] = field(default_factory=list[Sentinel])

    @property
    def url(self) -> str:
        return f"redis+sentinel://{','.join(f'127.0.0.1:{each.port}' for each in self.sentinels)}/{SERVICE}"

    @property
    def primary(self) -> Server:
        """As most Sentinels say."""
        ports = [self.port_by(each) for each in self.sentinels if each.running]
        port = max(set(ports), key=ports.count)
        return next(server for server in self.servers if server.port == port)

    @property
    def replica(self) -> Server:
        return next(server for server in self.servers if server is not self.primary)

    def port_by(self, sentinel: Sentinel) -> int:
        """The primary's port, as a Sentinel says."""
        return int(sentinel.ask("GET-MASTER-ADDR-BY-NAME", SERVICE)[1])

    def start(self) -> None:
        settings = {**SETTINGS, "repl-diskless-sync-delay": "0"}
        for _ in range(2):
            self.servers.append(started(lambda: Server(self.kind, settings=settings)))
        for _ in range(3):
            self.sentinels.append(started(lambda: Sentinel(self.kind, appendonly=False)))
        raw(self.servers[1], "REPLICAOF", "127.0.0.1", self.servers[0].port)
        wait(self.in_step, "a replica in step")
        for sentinel in self.sentinels:
            self.eager(sentinel)
            sentinel.ask("MONITOR", SERVICE, "127.0.0.1", self.servers[0].port, 2)
            sentinel.ask("SET", SERVICE, "down-after-milliseconds", DOWN_AFTER, "failover-timeout", FAILOVER_TIMEOUT)
        self.settle()

    def eager(self, sentinel: Sentinel, *, eager: bool = True) -> None:
        """Have it look around often, as it does while something is wrong; or as it usually does."""
        sentinel.ask("DEBUG", *(_EAGER if eager else _USUAL))

    def stop(self) -> None:
        for each in (*self.servers, *self.sentinels):
            each.close()

    def settle(self) -> None:
        """Have everything run, and wait until all is well: each knows the others, and the replica is in step."""
        for each in (*self.servers, *self.sentinels):
            if not each.running:
                each.start()
            each.resume()
        for sentinel in self.sentinels:
            self.eager(sentinel)
        wait(lambda: all(map(self._sees_all_well, self.sentinels)), "Sentinels that see that all is well")
        wait(self.in_step, "a replica in step")

    def _sees_all_well(self, sentinel: Sentinel) -> bool:
        facts = _pairs(sentinel.ask("MASTER", SERVICE))
        replicas = [_pairs(each) for each in sentinel.ask("REPLICAS", SERVICE)]
        return (
            (facts["flags"], facts["num-other-sentinels"], len(replicas)) == ("master", "2", 1)
            and replicas[0]["flags"] == "slave"
            and replicas[0]["master-link-status"] == "ok"
            and self.port_by(sentinel) == self.primary.port
        )

    def in_step(self) -> bool:
        """Has the replica all that the primary has?"""
        roles: list[Any] = [raw(server, "ROLE") for server in self.servers if server.running]
        primaries = [role for role in roles if role[0] == b"master"]
        replicas = [role for role in roles if role[0] == b"slave" and role[3] == b"connected"]
        return len(primaries) == len(replicas) == 1 and replicas[0][4] >= primaries[0][1]


def _pairs(flat: list[bytes]) -> dict[str, str]:
    texts = [each.decode() for each in flat]
    return dict(zip(texts[::2], texts[1::2], strict=True))


def run_id(server: Server) -> str:
    """Which process it is."""
    lines = raw(server, "INFO", "server").decode().splitlines()
    return next(line.partition(":")[2] for line in lines if line.startswith("run_id:"))


def wait(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.02)


@contextmanager
def watched(kind: str) -> Iterator[Watched]:
    """Servers and Sentinels for the length of a block."""
    servers = Watched(kind)
    try:
        servers.start()
        yield servers
    finally:
        servers.stop()


class FakeSentinel:
    """Replies as a Sentinel would, with what a test sets. Everything may be changed while it runs.

    Attributes:
        primary: the port it names, on 127.0.0.1.
        epoch: the number of the decision that made it the primary.
        others: the ports of the Sentinels it says it knows.
        users: the users that may ask, with their passwords; by default all may.
        failing_over: it is about to promote another one.
        tls: its certificate, if it has one.
        asked: how often it was asked for the primary.
    """

    def __init__(self, primary: int, epoch: int = 1, port: int = 0, **users: str) -> None:
        self.primary = primary
        self.epoch = epoch
        self.others: list[int] = []
        self.users = users
        self.failing_over = False
        self.tls: ssl.SSLContext | None = None
        self.asked = 0
        self.port = port
        self._connections: list[socket.socket] = []
        self.open()

    def open(self) -> None:
        """Listen (again), always on the same port."""
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def close(self) -> None:
        """Be gone: connections are cut, and new ones refused."""
        if self._listener.fileno() < 0:
            return
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    @property
    def url(self) -> str:
        return f"redis+sentinel://127.0.0.1:{self.port}/{SERVICE}"

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        data, known = bytearray(), not self.users
        try:
            if self.tls is not None:
                connection = self.tls.wrap_socket(connection, server_side=True)
                self._connections.append(connection)
            while more := connection.recv(65536):
                data += more
                while data and (end := frame_end(data)):
                    command = [word.decode() for word in words(bytes(data[:end]))]
                    del data[:end]
                    if command[0] == "AUTH":
                        known = self.users.get(command[1]) == command[2]
                        connection.sendall(b"+OK\r\n" if known else b"-WRONGPASS invalid username-password pair\r\n")
                    else:
                        connection.sendall(self._answer(command) if known else b"-NOAUTH Authentication required.\r\n")
        except OSError:
            pass  # the client is gone, or we are

    def _answer(self, command: list[str]) -> bytes:
        flags = "master,failover_in_progress" if self.failing_over else "master"
        facts = ["name", SERVICE, "port", str(self.primary), "flags", flags, "config-epoch", str(self.epoch)]
        match [command[0], *(word.upper() for word in command[1:2]), *command[2:]]:
            case ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", service]:
                self.asked += 1
                return _array(["127.0.0.1", str(self.primary)]) if service == SERVICE else b"*-1\r\n"
            case ["SENTINEL", "MASTER", service]:
                return _array(facts) if service == SERVICE else b"-ERR No such master with that name\r\n"
            case ["SENTINEL", "SENTINELS", service] if service == SERVICE:
                return _array([["ip", "127.0.0.1", "port", str(port)] for port in self.others])
            case ["SENTINEL", "MASTERS"]:
                return _array([facts])
            case ["SENTINEL", *_]:
                return b"-ERR No such master with that name\r\n"
            case _:
                return b"+OK\r\n"


def _array(items: list[Any]) -> bytes:
    pieces = [
        _array(each) if isinstance(each, list) else b"$%d\r\n%s\r\n" % (len(each), each.encode()) for each in items
    ]
    return b"*%d\r\n" % len(items) + b"".join(pieces)
