"""A small HTTP server in a thread of its own, for probes and metrics; it replies while the event loop of the process is blocked.

It answers GET and HEAD, one request per connection. One thread serves all connections, so a client that is slow, or that hangs,
does not delay the others. Not here: what is served (`worqr.hosting.service`, the command ``worqr metrics``).
"""

from __future__ import annotations

import errno
import os
import re
import selectors
import socket
import stat
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from typing import Final

import msgspec

from worqr.errors import UsageError

MOST_CONNECTIONS: Final = 8
"""Connections that are served at once. One more replaces the oldest."""
TIMEOUT: Final = 2.0
"""Seconds in which a client must send its request, and accept another part of the reply."""
MOST_BYTES: Final = 8192
"""The longest request, with its headers."""
_UNIX: Final = "unix:"


class BindAddress(msgspec.Struct, frozen=True):
    """Where a server listens: a unix socket at `path`, or a TCP port. `host` empty: all addresses of the machine."""

    host: str = ""
    port: int = 0
    path: str = ""

    @classmethod
    def parse(cls, given: object, name: str) -> BindAddress:
        """Return the address ``[HOST:]PORT`` or ``unix:PATH``.

        Args:
            given: a text, or a port.
            name: of the argument, for the error.

        Raises:
            UsageError: it is neither.
        """
        text = str(given) if isinstance(given, str | int) and not isinstance(given, bool) else ""
        if text.startswith(_UNIX) and len(text) > len(_UNIX):
            return cls(path=text.removeprefix(_UNIX))
        found = re.fullmatch(r"(?:(\[[^\]]+\]|[^:\s]*):)?(\d{1,5})", text, re.ASCII)
        if found is None or int(found[2]) > 65535:
            raise UsageError(f"{name} must be [HOST:]PORT or unix:PATH, for example 9465, not {given!r}")
        return cls((found[1] or "").strip("[]"), int(found[2]))

    def __str__(self) -> str:
        if self.path:
            return f"{_UNIX}{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class HttpRequest(msgspec.Struct, frozen=True):
    """A GET or HEAD request. `path` is without the query; `accept` is the header of this name."""

    path: str
    accept: str = ""


class HttpReply(msgspec.Struct, frozen=True):
    """A reply: its status, its body, and the type of the body."""

    status: HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    headers: tuple[str, ...] = ()

    @classmethod
    def of(cls, status: HTTPStatus, text: str, *headers: str) -> HttpReply:
        """Return a reply with one line of text."""
        return cls(status, f"{text}\n".encode("utf-8", "backslashreplace"), headers=headers)

    def encoded(self, *, with_body: bool) -> bytes:
        """Return the bytes to send."""
        lines = (
            f"HTTP/1.1 {self.status.value} {self.status.phrase}",
            f"Content-Type: {self.content_type}",
            f"Content-Length: {len(self.body)}",
            "Cache-Control: no-store",
            "X-Content-Type-Options: nosniff",
            "Connection: close",
            *self.headers,
        )
        head = "\r\n".join(lines).encode("ascii") + b"\r\n\r\n"
        return head + self.body if with_body else head


Respond = Callable[[HttpRequest], HttpReply]
"""Makes the reply; called in the server's thread."""


class HttpServer:
    """Serves `respond` at an address, from its creation to `close`.

    Raises:
        UsageError: The address cannot be used; the text says why.

    Attributes:
        address: where it listens; the port is the real one if 0 was asked for.
    """

    def __init__(self, bind: BindAddress, respond: Respond) -> None:
        self._listener = _listen(bind)
        self.address: BindAddress = bind
        if not bind.path:
            self.address = BindAddress(bind.host, self._listener.getsockname()[1])
        self._respond = respond
        self._waker, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._connections: list[_Connection] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="worqr-http", daemon=True)
        self._thread.start()
        _servers.add(self)

    def close(self) -> None:
        """Stop serving. Idempotent. The port is free afterwards."""
        _servers.discard(self)
        if not self._closing:
            self._closing = True
            self._waker.send(b"\0")
            self._thread.join(TIMEOUT)
            for each in (self._waker, self._woken):  # not in the thread, which may end before the byte is sent
                each.close()
            if self.address.path:
                with suppress(OSError):
                    os.unlink(self.address.path)

    def forget_in_child(self) -> None:
        """In a forked child: the thread exists in the parent only. An open copy of the socket would keep the port in use."""
        self._closing = True
        for each in (
            self._listener,
            self._waker,
            self._woken,
            *(connection.socket for connection in self._connections),
        ):
            each.close()

    # In the thread

    def _run(self) -> None:
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        while not self._closing:
            ready = self._selector.select(self._until_next_deadline())
            now = time.monotonic()  # before the replies: what they cost is no delay of the other clients
            for key, _ in ready:
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.data, _Connection) and key.data in self._connections:
                    self._advance(key.data)
            for late in [each for each in self._connections if each.deadline <= now]:
                self._drop(late)
        for connection in tuple(self._connections):
            self._drop(connection)
        self._listener.close()
        self._selector.close()

    def _until_next_deadline(self) -> float | None:
        first = min((each.deadline for each in self._connections), default=None)
        return None if first is None else max(0.0, first - time.monotonic())

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError:  # the process has no file descriptor left: try again, but do not spin
            time.sleep(0.1)
            return
        client.setblocking(False)
        if len(self._connections) >= MOST_CONNECTIONS:
            self._drop(self._connections[0])
        connection = _Connection(client)
        self._connections.append(connection)
        self._selector.register(client, selectors.EVENT_READ, connection)

    def _advance(self, connection: _Connection) -> None:
        """The client has sent something, has left, or can take more of its reply."""
        try:
            goes_on = connection.send() if connection.outgoing else connection.receive(self._respond)
        except BlockingIOError:
            return
        except OSError:
            goes_on = False
        if goes_on:
            wanted = selectors.EVENT_WRITE if connection.outgoing else selectors.EVENT_READ
            self._selector.modify(connection.socket, wanted, connection)
        else:
            self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        self._connections.remove(connection)
        self._selector.unregister(connection.socket)
        connection.socket.close()


class _Connection:
    """One client. Its request is read, the reply is sent, then its end of the connection is awaited."""

    def __init__(self, client: socket.socket) -> None:
        self.socket: socket.socket = client
        self.deadline: float = time.monotonic() + TIMEOUT
        self.outgoing: memoryview = memoryview(b"")
        self._incoming = b""
        self._replied = False

    def receive(self, respond: Respond) -> bool:
        """Read what the client has sent; return False when the connection is over."""
        data = self.socket.recv(65536)
        if not data:
            return False
        if not self._replied:  # bytes behind the request are dropped: a close with unread bytes would cut off the reply
            self._incoming += data
            reply = _reply_to(self._incoming, respond)
            if reply is not None:
                self._replied = True
                self.outgoing = memoryview(reply)
                return self.send()
        return True

    def send(self) -> bool:
        """Send as much of the reply as the client takes."""
        self.deadline = time.monotonic() + TIMEOUT
        with suppress(BlockingIOError):
            self.outgoing = self.outgoing[self.socket.send(self.outgoing) :]
        if not self.outgoing:
            self.socket.shutdown(socket.SHUT_WR)
        return True


def _reply_to(data: bytes, respond: Respond) -> bytes | None:
    """Return the reply to a request; None if it has not arrived as a whole."""
    head, end, _ = data.partition(b"\r\n\r\n")
    if not end:
        if len(data) <= MOST_BYTES:
            return None
        status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        return HttpReply.of(status, f"the request is longer than {MOST_BYTES} bytes").encoded(with_body=True)
    first, *lines = head.decode("latin-1").split("\r\n")
    found = re.fullmatch(r"([A-Z]+) (/\S*) HTTP/1\.[01]", first)
    if found is None:
        return HttpReply.of(HTTPStatus.BAD_REQUEST, "this is not an HTTP/1.1 request").encoded(with_body=True)
    method, target = found.groups()
    if method not in {"GET", "HEAD"}:
        refused = HttpReply.of(HTTPStatus.METHOD_NOT_ALLOWED, "use GET or HEAD", "Allow: GET, HEAD")
        return refused.encoded(with_body=True)
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    request = HttpRequest(target.partition("?")[0], headers.get("accept", ""))
    try:
        reply = respond(request)
    except Exception as error:  # the next request may find it well
        reply = HttpReply.of(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__} in the server")
    return reply.encoded(with_body=method == "GET")


# Listening


def _listen(bind: BindAddress) -> socket.socket:
    """Return a listening socket."""
    try:
        return _listen_at_path(bind.path) if bind.path else _listen_at_port(bind)
    except (OSError, UnicodeError) as error:
        number = error.errno if isinstance(error, OSError) else None
        reason = (
            os.strerror(number) if number is not None and number > 0 else getattr(error, "strerror", None) or str(error)
        )
        raise UsageError(f"cannot listen at {bind}: {reason.lower()}; choose another address") from error


def _listen_at_port(bind: BindAddress) -> socket.socket:
    if not bind.host and socket.has_dualstack_ipv6():
        with suppress(OSError):  # IPv6 may be switched off
            return _listen_on_both(bind.port)
    family, _, _, _, place = socket.getaddrinfo(
        bind.host or "0.0.0.0",  # noqa: S104 - probes come from outside of the container
        *(bind.port, 0, socket.SOCK_STREAM, 0, socket.AI_PASSIVE),
    )[0]
    return socket.create_server(place[:2], family=family, backlog=32)


def _listen_on_both(port: int) -> socket.socket:
    return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=32)


def _listen_at_path(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_stale(path):
            os.unlink(path)
        listener.bind(path)
        listener.listen(32)
    except BaseException:
        listener.close()
        raise
    return listener


def _is_stale(path: str) -> bool:
    """Return True if a process that was killed has left this socket behind."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(TIMEOUT)
            client.connect(path)
    except OSError as error:
        return error.errno == errno.ECONNREFUSED
    return False


_servers: weakref.WeakSet[HttpServer] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for server in tuple(_servers):
        server.forget_in_child()
    _servers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
