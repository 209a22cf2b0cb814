"""Nodes of a cluster that say and do what a test has them: what real ones do too seldom, or too briefly, to be waited for."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tests.support.resp import frame_end, words
from worqr.link.settings import Endpoint

ALL = (0, 16383)
HALVES = ((0, 8191), (8192, 16383))
SILENT = b""
"""An answer that never comes, nor any other on this connection."""

Slots = list[tuple[int, int, str | None, int]]
"""As CLUSTER SLOTS tells them: first, last, host and port."""


class Refusal(Exception):
    """What a node raises to answer with an error."""


NUMBERED = 6
"""The words of a numbered call from KEYS on: the base, the key that never exists, producer, number, lowest, and a text."""


class FakeNode:
    """Answers as a node would. Everything may be changed while it runs.

    Attributes:
        host, port: where it is.
        slots: what it says of the cluster; by default what all say.
        works: and whether that works.
        does: what it does with a call (its words from KEYS on); None: carries it out.
        answers: what it answers to other commands, by their first word or two; instead of what a node would.
        ran: the calls that it was sent.
        heard: the other commands.
    """

    def __init__(self, fakes: Fakes, host: str = "127.0.0.1") -> None:
        self.fakes = fakes
        self.host = host
        self.slots: Slots | None = None
        self.works = True
        self.does: Callable[[list[str]], Any] | None = None
        self.answers: dict[str, Callable[[list[str]], Any]] = {}
        self.ran: list[list[str]] = []
        self.heard: list[list[str]] = []
        self.port = 0
        self._connections: list[socket.socket] = []
        self._listening: list[socket.socket] = []
        self.open()

    @property
    def place(self) -> str:
        return str(Endpoint(self.host, self.port))

    def open(self) -> None:
        """Listen (again), always on the same port."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        self._listener = socket.create_server((self.host, self.port), family=family)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def close(self) -> None:
        """Be gone: connections are cut, and new ones refused."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Cut all connections."""
        connections, self._connections, self._listening = self._connections, [], []
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def push(self, *words: str | int) -> None:
        """Say something that nobody asked for, on every connection that listens to something."""
        for connection in self._listening:
            with suppress(OSError):  # it is gone
                connection.sendall(encoded(list(words)))

    def said(self, *command: str) -> int:
        """How often it was told something that begins so."""
        return len([words for words in self.heard if words[: len(command)] == list(command)])

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        data, mute = bytearray(), False
        with suppress(OSError), connection:  # the client is gone, or we are
            while more := connection.recv(65536):
                data += more
                while data and (end := frame_end(data)):
                    command = [word.decode() for word in words(bytes(data[:end]))]
                    del data[:end]
                    answer = self._reply(command)
                    mute = mute or answer == SILENT
                    if command[0] in ("SUBSCRIBE", "SSUBSCRIBE") and connection not in self._listening:
                        self._listening.append(connection)
                    if not mute:
                        connection.sendall(answer)

    def _reply(self, command: list[str]) -> bytes:
        try:
            if command[0] == "EVALSHA":
                self.ran.append(command[3:])
                return encoded((self.does or self.fakes.run)(command[3:]))
            self.heard.append(command)
            for name in (" ".join(command[:2]), command[0]):
                if name in self.answers:
                    return encoded(self.answers[name](command))
            return encoded(self._usual(command))
        except Refusal as error:
            return b"-%s\r\n" % str(error).encode()

    def _usual(self, command: list[str]) -> Any:
        match command:
            case ["CLUSTER", "SLOTS"]:
                slots = self.fakes.slots if self.slots is None else self.slots
                return [[first, last, [host, port, "id"]] for first, last, host, port in slots]
            case ["CLUSTER", "INFO"]:
                return f"cluster_state:{'ok' if self.works else 'fail'}\r\n"
            case ["INFO", *_]:
                return "redis_version:7.4.0\r\nrole:master\r\n"
            case ["SUBSCRIBE" | "SSUBSCRIBE" | "UNSUBSCRIBE" | "SUNSUBSCRIBE" as verb, *channels]:
                return b"".join(encoded([verb.lower(), channel, 1]) for channel in channels)
            case _:
                return "OK"


class Fakes:
    """Some nodes; they agree on `slots`.

    Attributes:
        stored: what was carried out, by base, producer and number.
    """

    def __init__(self, count: int, host: str = "127.0.0.1") -> None:
        self.slots: Slots = []
        self.stored: dict[tuple[str, ...], list[Any]] = {}
        self.nodes = [FakeNode(self, host) for _ in range(count)]

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(node.place for node in self.nodes)

    def give(self, *shares: tuple[tuple[int, int], FakeNode]) -> None:
        """From now on these have these slots."""
        self.slots = [(first, last, node.host, node.port) for (first, last), node in shares]

    def run(self, call: list[str]) -> Any:
        """What `scripts.append` and `scripts.echo` do, whichever node they are sent to."""
        if len(call) < NUMBERED:
            return ["ok", call[-1]]
        base, _, producer, number, lowest, text = call
        kept = self.stored.get((base, producer, number))
        if kept is None:
            self.stored[(base, producer, number)] = kept = ["ok", text, int(number), int(lowest)]
        return kept


@contextmanager
def fakes_of(count: int, host: str = "127.0.0.1") -> Iterator[Fakes]:
    """Fakes for the length of a block; the first has all slots."""
    fakes = Fakes(count, host)
    fakes.give((ALL, fakes.nodes[0]))
    try:
        yield fakes
    finally:
        for node in fakes.nodes:
            node.close()


def encoded(value: Any) -> bytes:
    """The bytes of a reply; bytes are bytes already."""
    match value:
        case bytes():
            return value
        case None:
            return b"$-1\r\n"
        case int():
            return b":%d\r\n" % value
        case str():
            text = value.encode()
            return b"$%d\r\n%s\r\n" % (len(text), text)
        case _:
            return b"*%d\r\n%s" % (len(value), b"".join(map(encoded, value)))


def errs(text: str) -> Callable[[list[str]], Any]:
    """Answers with an error."""

    def answer(_: list[str]) -> Any:
        raise Refusal(text)

    return answer
