"""Open and check one connection to the server, and convert its exceptions, so that only worqr's own errors leave this module.

Here: `open_connection`, which blocks, and `Wire`, a thin layer over ONE raw redis-py connection. The threads of the dialer,
the keepalive, the topology and the Sentinels open connections. Not here: any decision about what to do after an error.

redis-py does what it is good at: addresses, TLS, authentication, packing (hiredis) and parsing. Its own retries and
announcements are switched off. Retries would resend scripts silently. Its connections change their timeouts when the server
announces a maintenance. CLIENT SETINFO costs two round trips per connection.

The protocol is pinned to RESP2. There, no push frame can come between two replies, and messages arrive as plain arrays that
the same parser reads. worqr's scripts reply in the same shape in RESP3. RESP2 also needs no HELLO, which some proxies do not
support.

A blocking read is cut into slices of 0.1 s, so that the caller can give up a silent server (`Wire.on_silence`).
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, Protocol, cast

import hiredis

from worqr.errors import RefusedByServer, Unavailable, WorqrError
from worqr.link.endpoints import EndpointResolver, StaticEndpoint
from worqr.link.reasons import cause_of, no_server, plain_reply, speaks_tls
from worqr.link.redis_py import redis_py
from worqr.link.server_errors import ConnectionLost, ErrorReply, as_connect_error, as_connection_lost, as_error_reply
from worqr.link.server_info import INFO_SECTIONS, ServerInfo, read_server_info
from worqr.link.settings import Address, Endpoint, LinkSettings
from worqr.link.tls import check_tls_files, is_silent_handshake
from worqr.lua import Script
from worqr.stored_values import as_bytes

MOVED = "the primary is another server now"
_PROTOCOL = 2
_SLICE: Final = 0.1  # seconds: how late an expiry may be noticed while the server is silent
_HEARD = 200  # bytes to keep of an invalid reply


_pack = cast("Callable[[tuple[Any, ...]], bytes]", vars(hiredis)["pack_command"])  # its stub: tuples of one element


def pack(command: tuple[bytes | str | int, ...]) -> bytes:
    """Return the bytes of one command; raises TypeError, UnicodeError for an argument that cannot be sent.

    hiredis does it. redis-py's own way there looks at every argument in Python first, which takes three times as long. A name
    that is not UTF-8 is sent as the bytes that the server returned (`stored_values.exact`).
    """
    try:
        return _pack(command)
    except UnicodeEncodeError:
        return _pack(tuple([as_bytes(part) if isinstance(part, str) else part for part in command]))


def loading(scripts: Iterable[Script]) -> list[bytes]:
    """Return the commands that load these scripts."""
    return [pack(("SCRIPT", "LOAD", script.source)) for script in scripts]


class _Raw(Protocol):
    """The part of redis-py's connection that worqr uses; its own types are incomplete."""

    def connect(self) -> None: ...
    def disconnect(self) -> None: ...
    def send_packed_command(self, command: list[bytes], check_health: bool = True) -> None: ...
    def read_response(self, *, timeout: float, disconnect_on_error: bool) -> Any: ...
    def _get_socket(self) -> socket.socket | None: ...


class Wire:
    """An open connection. One thread at a time may use it, except for `interrupt`.

    Attributes:
        endpoint: the server's address.
        facts: the server's INFO at the time of connecting.
        on_silence: called every 0.1 s while a reply is awaited; may raise `ConnectionLost` to give it up.
    """

    __slots__ = ("_patience", "_raw", "_read", "_slice", "endpoint", "facts", "on_silence")

    def __init__(self, raw: _Raw, patience: float, endpoint: Endpoint) -> None:
        self.endpoint: Endpoint = endpoint
        self._raw = raw
        self._read = raw.read_response
        self._patience = patience
        self._slice = min(_SLICE, patience)
        self.on_silence: Callable[[], None] | None = None
        self.facts: ServerInfo = ServerInfo()

    def send(self, pieces: list[bytes]) -> None:
        """Write commands that are packed; raises `ConnectionLost`."""
        try:
            self._raw.send_packed_command([b"".join(pieces)], check_health=False)
        except redis_py().errors as exc:
            raise as_connection_lost(exc) from exc

    def read(self) -> Any:
        """Return the next reply. The parser keeps the part of a reply that has arrived.

        Raises:
            ErrorReply: it is an error reply.
            ConnectionLost: there will be none, or nothing has arrived for `patience`.
        """
        silent_since: float | None = None
        while True:
            began = time.monotonic()
            if silent_since is not None and began - silent_since > self._patience:
                raise ConnectionLost(f"no answer for {self._patience:g} s")
            try:
                return self.read_within(self._slice)
            except BlockingIOError:
                now = time.monotonic()
                if silent_since is None or now - began > 1.5 * self._slice:  # bytes came before it fell silent
                    silent_since = now
            if self.on_silence is not None:
                self.on_silence()

    def read_within(self, seconds: float) -> Any:
        """As `read`; raise BlockingIOError if no whole reply arrives within this time."""
        try:
            return self._read(timeout=seconds, disconnect_on_error=False)
        except redis_py().timeout:
            raise BlockingIOError from None
        except redis_py().response_error as exc:
            raise as_error_reply(exc) from exc
        except redis_py().errors as exc:
            raise as_connection_lost(exc) from exc

    def load(self, scripts: Sequence[Script]) -> None:
        """Run SCRIPT LOAD for each script. A refused one is missing later: its calls get NOSCRIPT, and then the reason."""
        self.send(loading(scripts))
        for _ in scripts:
            with suppress(ErrorReply):
                self.read()

    def exchange(self, commands: Sequence[tuple[bytes | str, ...]]) -> list[Any]:
        """Send some commands together and return their replies in order. An error reply is returned too.

        Raises:
            ErrorReply: the server sent only this error and then closed the connection, as in protected mode.
        """
        self.send([pack(command) for command in commands])
        replies: list[Any] = []
        for _ in commands:
            try:
                replies.append(self.read())
            except ErrorReply as refused:
                replies.append(refused)
            except ConnectionLost:
                if replies and all(isinstance(reply, ErrorReply) for reply in replies):
                    raise replies[0] from replies[0].__cause__
                raise
        return replies

    def heard(self) -> bytes:
        """Return the beginning of the last input, as far as redis-py still has it; for messages about invalid replies."""
        buffer: object = getattr(getattr(self._raw, "_parser", None), "_buffer", b"")
        return bytes(buffer[:_HEARD]).partition(b"\0")[0] if isinstance(buffer, bytearray) else b""

    def interrupt(self) -> None:
        """From another thread: make a pending read or write of the connection fail at once. The using thread closes the
        connection.

        Not SSLSocket.shutdown: that would free the TLS state while the other thread still uses it.
        """
        try:
            sock = self._socket()
            if sock is not None:
                socket.socket.shutdown(sock, socket.SHUT_RDWR)
        except OSError:
            pass  # it was gone already

    def abandon(self) -> None:
        """In a forked child: close its copy of the socket without sending anything; the parent continues to use the
        connection.
        """
        try:
            sock = self._socket()
            if sock is not None:
                socket.socket.close(sock)
        except OSError:
            pass  # it was gone already

    def hand_over(self) -> socket.socket:
        """Return the socket, which no longer blocks: from now on a `Transport` sends and reads. `close` still ends it."""
        sock = self._socket()
        if sock is None:
            raise ConnectionLost("the connection was closed before it was used", innocent=True)
        sock.setblocking(False)
        return sock

    def _socket(self) -> socket.socket | None:
        return self._raw._get_socket()  # pyright: ignore[reportPrivateUsage] - there is no public way

    def close(self) -> None:
        with suppress(*redis_py().errors):  # it may be gone already
            self._raw.disconnect()


def open_connection(
    settings: LinkSettings,
    resolver: EndpointResolver,
    purpose: str,
    *,
    timeout: float | None = None,
    scripts: Iterable[Script] = (),
    on_silence: Callable[[], None] | None = None,
    replica: bool = False,
    sentinel: bool = False,
    first: bool = False,
) -> Wire:
    """Connect, authenticate, check the server and load the scripts that it does not have.

    Args:
        settings: credentials, timeouts and TLS options.
        resolver: finds the server's address.
        purpose: ``data``, ``subscribe``, ``beat``...; names the connection in CLIENT LIST.
        timeout: for connecting and for each reply, if the timeouts of the settings are too long.
        scripts: to load if they are missing. A script that the server refuses is skipped: its calls get NOSCRIPT, and then
            the reason.
        on_silence: see `Wire`; used from the first reply on. Before that, the resolver is asked for a new address.
        replica: accept a replica.
        sentinel: the server is a Sentinel, which has other users; skip the checks.
        first: no server has ever replied there. If none does now, find out whether TLS is missing, or enabled by mistake.

    Raises:
        UsageError: a TLS file named by the URL cannot be used, or `credentials` returned an invalid value; nothing was sent.
        RefusedByServer, WrongVersion: waiting does not help.
        Unavailable: try again; the text is the cause alone.
    """
    if settings.address.kind == "tls":
        check_tls_files(dict(settings.address.tls), settings.address.redacted)
    endpoint = resolver.resolve(on_silence)
    address = settings.address.of_sentinels if sentinel else settings.address
    login = _login(settings, address, sentinel=sentinel)
    raw = _raw(settings, address, endpoint, timeout)
    wire = Wire(raw, timeout or settings.socket_timeout, endpoint)
    wire.on_silence = partial(_while_silent, resolver, endpoint, on_silence)
    try:
        raw.connect()
        if settings.address.kind == "tls":
            with suppress(BlockingIOError):
                # reads the server's reason to refuse the certificate; a write to the closed connection would lose it
                wire.read_within(0)
        _enter(wire, login)
        if sentinel:
            wire.exchange([("CLIENT", "SETNAME", settings.client_name(purpose))])
        else:
            wire.load(_greet(wire, settings.client_name(purpose), resolver.name, scripts, replica=replica))
    except BaseException as exc:
        wire.close()
        resolver.invalidate()
        stranger = _stranger(wire, exc, settings, resolver.name, first=first)
        error = stranger or _why_not(exc, settings, resolver, endpoint)
        if error is None:
            raise
        raise error from exc
    return wire


def _while_silent(resolver: EndpointResolver, endpoint: Endpoint, on_silence: Callable[[], None] | None) -> None:
    if not resolver.is_current(endpoint):
        raise ConnectionLost(MOVED, innocent=True)
    if on_silence is not None:
        on_silence()


def _why_not(
    error: BaseException, settings: LinkSettings, resolver: EndpointResolver, endpoint: Endpoint
) -> WorqrError | None:
    """Return worqr's error for a failed attempt to connect; None if the error is one already, or not caused by the server."""
    ours = settings.credentials is not None
    if isinstance(error, ConnectionLost | ErrorReply):
        refused = as_connect_error(error.__cause__, resolver.name, ours=ours) if error.__cause__ else None
        return refused or Unavailable(str(error))
    if cause := cause_of(error, endpoint):
        return Unavailable(cause if isinstance(resolver, StaticEndpoint) else f"{endpoint}: {cause}")
    if isinstance(error, redis_py().errors):
        return as_connect_error(error, resolver.name) or Unavailable(as_connection_lost(error).cause)
    return None


def _stranger(
    wire: Wire, error: BaseException, settings: LinkSettings, name: str, *, first: bool
) -> RefusedByServer | None:
    """Return the error for another program at the port, or for TLS that is missing or not expected; else None."""
    if isinstance(error.__cause__, redis_py().exceptions.InvalidResponse):
        return RefusedByServer(no_server(name, wire.heard(), str(error)))
    kind = settings.address.kind
    if not first or kind == "unix":
        return None
    if kind == "tls" and is_silent_handshake(error) and (reply := plain_reply(wire.endpoint)):
        return RefusedByServer(
            f"the server at {name} speaks no TLS at this port (it replied {reply!r} in plain text); write redis:// instead of "
            "rediss://"
        )
    hung_up = isinstance(error, ConnectionLost) and error.__cause__ is not None and not wire.heard()
    if kind == "tcp" and hung_up and speaks_tls(wire.endpoint):
        return RefusedByServer(
            f"the server at {name} speaks TLS at this port, and hung up without it; write rediss:// instead of redis://"
        )
    return None


def _login(settings: LinkSettings, address: Address, *, sentinel: bool) -> list[tuple[str, ...]]:
    """Return the commands that authenticate and choose the database."""
    if settings.credentials is not None and not sentinel:
        who = settings.credentials.get(address.redacted)
    elif address.username:
        who = (address.username, address.password)
    else:
        who = (address.password,) if address.password else ()
    login: list[tuple[str, ...]] = [("AUTH", *who)] if who else []
    return [*login, ("SELECT", str(address.db))] if address.db else login


def _enter(wire: Wire, login: list[tuple[str, ...]]) -> None:
    """Log in, and choose the database. Raises `ConnectionLost`, `ErrorReply`."""
    for reply in wire.exchange(login) if login else ():
        if isinstance(reply, ErrorReply):
            raise reply from reply.__cause__


def _greet(wire: Wire, client_name: str, name: str, scripts: Iterable[Script], *, replica: bool) -> list[Script]:
    """Name the connection, check the server, and return those of `scripts` that it does not have.

    If the user may not ask, the server's version is assumed to be right and the scripts to be missing.
    """
    asked: list[tuple[str, ...]] = [("CLIENT", "SETNAME", client_name), *(("INFO", part) for part in INFO_SECTIONS)]
    wanted = list(scripts)
    if not wanted:
        _, *answers = wire.exchange(asked)
        wire.facts = read_server_info(answers, name, replica=replica)
        return []
    _, *answers, known = wire.exchange([*asked, ("SCRIPT", "EXISTS", *(script.sha for script in wanted))])
    wire.facts = read_server_info(answers, name, replica=replica)
    if not isinstance(known, list) or len(cast("list[int]", known)) != len(wanted):
        return wanted
    return [script for script, there in zip(wanted, cast("list[int]", known), strict=True) if not there]


def _raw(settings: LinkSettings, address: Address, endpoint: Endpoint, timeout: float | None) -> _Raw:
    options: dict[str, Any] = {
        "socket_connect_timeout": min(timeout or settings.connect_timeout, settings.connect_timeout),
        "socket_timeout": timeout or settings.socket_timeout,
        "decode_responses": False,
        "protocol": _PROTOCOL,
        "driver_info": None,
        **redis_py().options,
    }
    make = redis_py().connections[address.kind]
    if address.kind == "unix":
        return cast("_Raw", make(path=endpoint.path, **options))
    return cast("_Raw", make(host=endpoint.host, port=endpoint.port, **options, **_tls(address)))


def _tls(address: Address) -> dict[str, Any]:
    options: dict[str, Any] = dict(address.tls)
    if "ssl_check_hostname" in options:
        options["ssl_check_hostname"] = options["ssl_check_hostname"].lower() not in ("0", "f", "n", "no", "false")
    return options
