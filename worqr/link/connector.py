"""`Connector`: keeps one connection to a server open: attempts, the pauses between them, and the end. `ReadyWaiters`: the
callers that wait until a connection is open.

Each attempt has a thread, because name resolution and a handshake can block for long. Not here: the requests on the open
connection (`session`, `subscriptions`).

States and their transitions:

==========  ================================================  =====================================================
state       meaning                                           leads to
==========  ================================================  =====================================================
NEW         nothing was dialled yet                           DIALLING by `dial`
DIALLING    no connection; an attempt is being made           READY, or WAITING when it fails
WAITING     no connection; the next attempt has a time        DIALLING when the time has come
READY       connected                                         HELD, DIALLING or WAITING when the connection is lost
HELD        connected; the server cannot work at the moment   READY when a batch was answered, DIALLING or WAITING
ENDED       no connection any more                            -
==========  ================================================  =====================================================
"""

from __future__ import annotations

import enum
import logging
import random
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, Protocol, cast

import hiredis
import msgspec

from worqr.errors import RefusedByServer, Unavailable, UsageError, WorqrBug, WorqrError, WrongVersion
from worqr.keys import RegistryKeys
from worqr.link.driver import Alarm, Driver, Waiter, Watch, settle_soon
from worqr.link.failures import (
    ConnectionLost,
    ErrorReply,
    as_connect_error,
    as_connection_lost,
    as_error_reply,
    cause_of,
    is_silent_handshake,
    is_unknown_host,
    redis_errors,
    redis_py,
    remedy_for,
)
from worqr.link.log_thread import LogThread
from worqr.link.settings import Address, Endpoint, Kind, LinkSettings, one_line
from worqr.lua import Script
from worqr.stored_values import as_bytes

# Open one connection to the server with blocking calls, and check it, so that only worqr's own errors leave this module.
#
# Here: `open_connection`, and `Wire`, a thin layer over ONE raw redis-py connection. Also the threads of the link that have
# such connections of their own: the keepalive, and those that ask for addresses. Not here: any decision about what to do
# after an error.
#
# redis-py does what it is good at: addresses, TLS, authentication, packing (hiredis) and parsing. Its own retries and
# announcements are switched off. Retries would resend scripts silently. Its connections change their timeouts when the server
# announces a maintenance. CLIENT SETINFO costs two round trips per connection.
#
# The protocol is pinned to RESP2. There, no push frame can come between two replies, and messages arrive as plain arrays that
# the same parser reads. worqr's scripts reply in the same shape in RESP3. RESP2 also needs no HELLO, which some proxies do
# not support.
#
# A blocking read is cut into slices of 0.1 s, so that the caller can give up a silent server (`Wire.on_silence`).

# Check the files of a ``rediss://`` URL before anything is sent. OpenSSL's errors do not name the file, and OpenSSL asks for the
# password of a private key on the terminal. redis-py reads the files again for each connection, so you can replace them while the
# program runs.


def check_tls_files(options: Mapping[str, str], shown: str) -> None:
    """Check that the certificates and the key of these options exist, are readable, and belong together.

    Args:
        options: of the URL: ``ssl_ca_certs``, ``ssl_ca_path``, ``ssl_certfile``, ``ssl_keyfile``, ``ssl_password``.
        shown: the URL without its secrets, for messages.

    Raises:
        UsageError: an option is invalid; the text names it, its value and the reason.
    """
    for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
        if name in options:
            _check_readable(name, options[name], shown)
    folder = options.get("ssl_ca_path")
    if folder is not None and not Path(folder).is_dir():
        raise UsageError(f"the server's URL {shown}: ssl_ca_path={folder!r} is not a directory")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if "ssl_ca_certs" in options:
        try:
            context.load_verify_locations(cafile=options["ssl_ca_certs"])
        except ssl.SSLError as error:
            raise _wrong("ssl_ca_certs", options["ssl_ca_certs"], "holds no certificate", error, shown) from error
    _check_own_certificate(context, options, shown)


def _check_readable(name: str, path: str, shown: str) -> None:
    try:
        with Path(path).open("rb") as file:
            file.read(1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"the server's URL {shown}: {name}={path!r} cannot be read: {why}") from error


def _check_own_certificate(context: ssl.SSLContext, options: Mapping[str, str], shown: str) -> None:
    certificate, key, password = (options.get(name) for name in ("ssl_certfile", "ssl_keyfile", "ssl_password"))
    if certificate is None:
        if key is not None:
            raise UsageError(f"the server's URL {shown}: ssl_keyfile={key!r} needs its certificate, ssl_certfile, too")
        return

    def secret() -> str:
        if password is None:
            raise UsageError(
                f"the server's URL {shown}: the private key in {key or certificate!r} is encrypted: give ssl_password"
            )
        return password

    try:
        context.load_cert_chain(certificate, key, secret)
    except ssl.SSLError as error:
        place, what = ("ssl_certfile", certificate) if key is None else ("ssl_keyfile", key)
        why = "holds no private key that can be read" + ("" if password is None else " with ssl_password")
        if b"-----BEGIN CERTIFICATE-----" not in Path(certificate).read_bytes():
            place, what, why = "ssl_certfile", certificate, "holds no certificate"
        elif error.reason == "KEY_VALUES_MISMATCH":
            why = f"is not the key of ssl_certfile={certificate!r}"
        raise _wrong(place, what, why, error, shown) from error


def _wrong(name: str, path: str, why: str, error: ssl.SSLError, shown: str) -> UsageError:
    return UsageError(f"the server's URL {shown}: {name}={path!r} {why} ({error.reason or error})")


# Another program at the port: HTTP, TLS, or a server without TLS. This check is only for the first connection of a link: at a
# port that worked before, the same signs come from a proxy whose server is away.


_PATIENCE = 1.0  # seconds for connecting and for each reply
_MOST = 100  # characters of the program's output in a message
_HTTP = ("HTTP/", "<!DOCTYPE", "<html")


def first_line(heard: bytes) -> str:
    """Return the first line of a program's output as printable text; empty if there is none."""
    line = heard.strip().splitlines()[0] if heard.strip() else b""
    return one_line(line.decode("utf-8", "replace"), _MOST, "?")


def no_server(name: str, heard: bytes, error: str) -> str:
    """Return the message for a program that does not speak the Redis protocol.

    Args:
        name: its address.
        heard: its output.
        error: the parser's error.
    """
    line = first_line(heard)
    said = f"the program there replied {line!r}" if line else f"the reply there cannot be read ({error})"
    http = ", which is HTTP" if line.startswith(_HTTP) else ""
    return f"no Redis or Valkey server at {name}: {said}{http}; check host and port in its URL"


def plain_reply(endpoint: Endpoint) -> str:
    """Return the first line that a server without TLS replies to PING; empty if it is none. Sends nothing that is secret."""
    with suppress(OSError), _reach(endpoint) as plain:
        plain.sendall(b"PING\r\n")
        line = first_line(plain.recv(_MOST))
        return line if line.startswith(("+", "-")) else ""
    return ""


def speaks_tls(endpoint: Endpoint) -> bool:
    """Return True if the program accepts a TLS handshake. Sends only the handshake, and checks no certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # nothing is sent after the handshake, which only detects TLS
    try:
        with _reach(endpoint) as plain, context.wrap_socket(plain):
            return True
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")  # it has its own demands, and states them in TLS
    except OSError:
        return False


def _reach(endpoint: Endpoint) -> socket.socket:
    return socket.create_connection((endpoint.host, endpoint.port), _PATIENCE)


# Check that the server is one that worqr can use. No I/O: reads the replies to INFO and returns or raises the reason.
#
# worqr needs shebang flags for scripts, which Redis has since 7.0. Valkey forked later; 7.2 is its first release.


INFO_SECTIONS = ("server", "replication", "memory", "clients")
_SAFE_POLICIES = ("noeviction", "")  # some providers hide the policy
_OLDEST = {"Redis": (7, 0), "Valkey": (7, 2)}


class ServerInfo(msgspec.Struct, frozen=True):
    """The facts from INFO; empty where the user's permissions do not allow it."""

    server: str = ""
    version: str = ""
    run_id: str = ""
    role: str = ""
    eviction: str = ""
    primary: str = ""  # ``host:port`` of the server that it replicates
    paused: str = ""  # why it executes no writes now: ``client_pause``, ``failover_in_progress``...

    @property
    def evicts(self) -> bool:
        return self.eviction not in _SAFE_POLICIES


def read_server_info(answers: Sequence[Any], address: str) -> ServerInfo:
    """Return the facts from the replies to INFO.

    Raises:
        WrongVersion: the server is too old.
        RefusedByServer: it is a Sentinel.
    """
    info: dict[str, str] = {}
    for answer in answers:
        info |= info_fields(answer)
    server, version = server_version(info)
    # during a hand-over it may still become the primary again
    is_settled = info.get("master_failover_state", "no-failover") == "no-failover"
    primary = f"{info['master_host']}:{info.get('master_port', '')}" if "master_host" in info and is_settled else ""
    eviction = info.get("maxmemory_policy", "")
    paused = (
        info.get("paused_reason", "") if info.get("paused_actions", "none") != "none" else ""
    )  # old servers hide it
    facts = ServerInfo(server, version, info.get("run_id", ""), info.get("role", ""), eviction, primary, paused)
    if version and _numbers(version) < _OLDEST[server]:
        wanted = " or ".join(f"{name} {major}.{minor}" for name, (major, minor) in _OLDEST.items())
        raise WrongVersion(f"the server at {address} is {server} {version}; worqr needs {wanted}, or newer")
    if "sentinel" in (info.get("redis_mode"), info.get("server_mode")):  # the latter is Valkey's
        raise RefusedByServer(
            f"{address} is a Sentinel, which holds no data: write redis+sentinel://HOST:PORT/SERVICE, with its place and "
            "the name that it knows the server by"
        )
    return facts


def info_fields(reply: Any) -> dict[str, str]:
    """Return the fields of a reply to INFO; none if the user may not ask."""
    if not isinstance(reply, bytes):
        return {}
    lines = (line.partition(":") for line in reply.decode("utf-8", "replace").splitlines())
    return {name: value.strip() for name, _, value in lines}


def server_version(info: Mapping[str, str]) -> tuple[str, str]:
    """Return whether it is ``Redis`` or ``Valkey``, and its version; that is empty if it is hidden."""
    server = "Valkey" if "valkey_version" in info or info.get("server_name") == "valkey" else "Redis"
    return server, info.get("valkey_version") or info.get("redis_version", "")


def _numbers(version: str) -> tuple[int, ...]:
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    return (int(major) if major.isdigit() else 0, int(minor) if minor.isdigit() else 0)


# The address for the next connection: fixed for a standalone server, looked up for the others.
#
# Here: the `EndpointResolver` protocol, and `StaticEndpoint`. Not here: the resolvers that ask servers: Sentinels (`sentinel`),
# a cluster (`topology`).


OnSilence = Callable[[], None]
"""Called every 0.1 s while a caller waits for a server; may raise `ConnectionLost` to give up."""


class EndpointResolver(Protocol):
    """Finds the address of one server. Several threads may use it."""

    @property
    def name(self) -> str:
        """The server's name for messages: its URL without secrets, or its address."""
        ...

    def resolve(self, on_silence: OnSilence | None = None) -> Endpoint:
        """Return the current address. May ask servers for a second or two.

        Raises:
            Unavailable: no server could report the address.
            RefusedByServer: waiting does not help.
        """
        ...

    def is_current(self, endpoint: Endpoint) -> bool:
        """Return True if the server is still there, by the latest known address. Does not block."""
        ...

    def invalidate(self) -> None:
        """A connection was lost, refused or redirected: the server may have moved. Returns at once."""
        ...


class StaticEndpoint:
    """The address of a server that stays where it is."""

    __slots__ = ("_endpoint", "name")

    def __init__(self, name: str, endpoint: Endpoint) -> None:
        self.name: str = name
        self._endpoint = endpoint

    def resolve(self, on_silence: OnSilence | None = None) -> Endpoint:
        return self._endpoint

    def is_current(self, endpoint: Endpoint) -> bool:
        return True

    def invalidate(self) -> None:
        pass


class MovableEndpoint(StaticEndpoint):
    """The address of a server that stands alone, until `worqr move` has made it a replica of another server.

    A replica names its primary, once the hand-over to that is complete. The mesh's key ``moved`` has the URL of it. So a replica
    that was set up otherwise is never left for another server.

    Args:
        settings: those of the link.
        moved: called with the URLs before and after, without secrets, in the thread that connects.
    """

    __slots__ = ("_moved", "_settings")

    def __init__(self, settings: LinkSettings, moved: Callable[[str, str], None]) -> None:
        super().__init__(settings.address.redacted, settings.address.seeds[0])
        self._settings = settings
        self._moved = moved

    def is_current(self, endpoint: Endpoint) -> bool:
        return endpoint == self._endpoint

    def follow(self, wire: Wire) -> None:
        """Use the server that the mesh has moved to from the replica at the other end, if it has.

        Raises:
            RefusedByServer: the stored URL cannot be used.
        """
        (url,) = wire.exchange([("HGET", RegistryKeys(self._settings.prefix).moved, wire.facts.primary)])
        if not isinstance(url, bytes) or wire.endpoint != self._endpoint:
            return
        try:
            address = (self._endpoint.moved or self._settings.address).moved_to(url.decode("utf-8", "replace"))
        except UsageError as error:
            raise RefusedByServer(f"the mesh has moved to a URL that cannot be used: {error}") from error
        self._endpoint = Endpoint(address.host, address.port, moved=address)
        before = self.name
        self.name: str = address.redacted
        self._moved(before, self.name)


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


@cache
def _connection_class(kind: str) -> Callable[..., Any]:
    """Return the class of redis-py for this kind of address."""
    connections = redis_py().connection

    class TlsConnection(connections.SSLConnection):  # type: ignore[misc, name-defined]
        """Use the connect timeout for the handshake, not the longer one of a reply: without TLS a server stays silent."""

        def _wrap_socket_with_ssl(self, sock: Any) -> Any:
            sock.settimeout(self.socket_connect_timeout)
            parent: Any = super()
            wrapped = parent._wrap_socket_with_ssl(sock)
            wrapped.settimeout(self.socket_timeout)
            return wrapped

    classes = {"tcp": connections.Connection, "tls": TlsConnection, "unix": connections.UnixDomainSocketConnection}
    return cast("Callable[..., Any]", classes[kind])


class Wire:
    """An open connection. One thread at a time may use it, except for `interrupt`.

    Attributes:
        endpoint: the server's address.
        facts: the server's INFO at the time of connecting.
        on_silence: called every 0.1 s while a reply is awaited; may raise `ConnectionLost` to give it up.
    """

    def __init__(self, raw: Any, patience: float, endpoint: Endpoint) -> None:
        self.endpoint: Endpoint = endpoint
        self._raw = raw
        self._patience = patience
        self._slice = min(_SLICE, patience)
        self.on_silence: Callable[[], None] | None = None
        self.facts: ServerInfo = ServerInfo()

    def send(self, pieces: list[bytes]) -> None:
        """Write commands that are packed; raises `ConnectionLost`."""
        try:
            self._raw.send_packed_command([b"".join(pieces)], check_health=False)
        except redis_errors() as exc:
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
            return self._raw.read_response(timeout=seconds, disconnect_on_error=False)
        except redis_py().TimeoutError:
            raise BlockingIOError from None
        except redis_py().ResponseError as exc:
            raise as_error_reply(exc) from exc
        except redis_errors() as exc:
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
        self._ask(b"".join([pack(command) for command in commands]))
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

    def _ask(self, packed: bytes) -> None:
        """Write commands. A server that has hung up may have said why: redis-py would close the socket before that is read."""
        sock = self._socket()
        try:
            if sock is None:
                raise ConnectionLost(_CLOSED)
            sock.sendall(packed)
        except OSError as exc:
            with suppress(BlockingIOError):
                self.read_within(0)
            raise as_connection_lost(exc) from exc

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
        sock: socket.socket | None = self._raw._get_socket()  # there is no public way
        return sock

    def close(self) -> None:
        with suppress(*redis_errors()):  # it may be gone already
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
    endpoint = resolver.resolve(on_silence)
    address = endpoint.moved or (settings.address.of_sentinels if sentinel else settings.address)
    if address.kind == "tls":
        check_tls_files(dict(address.tls), address.redacted)
    login = _login(settings, address, sentinel=sentinel)
    raw = _raw(settings, address, endpoint, timeout)
    wire = Wire(raw, timeout or settings.socket_timeout, endpoint)
    wire.on_silence = partial(_while_silent, resolver, endpoint, on_silence)
    try:
        raw.connect()
        if address.kind == "tls":
            with suppress(BlockingIOError):
                # reads the server's reason to refuse the certificate; a write to the closed connection would lose it
                wire.read_within(0)
        _enter(wire, login)
        if sentinel:
            wire.exchange([("CLIENT", "SETNAME", settings.client_name(purpose))])
        else:
            wire.load(_greet(wire, settings.client_name(purpose), resolver, scripts, replica=replica))
    except BaseException as exc:
        wire.close()
        resolver.invalidate()
        stranger = _stranger(wire, exc, address.kind, resolver.name, first=first)
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
        fixed = isinstance(resolver, StaticEndpoint) and endpoint.moved is None
        return Unavailable(cause if fixed else f"{endpoint}: {cause}")
    if isinstance(error, redis_errors()):
        return as_connect_error(error, resolver.name) or Unavailable(as_connection_lost(error).cause)
    return None


def _stranger(wire: Wire, error: BaseException, kind: Kind, name: str, *, first: bool) -> RefusedByServer | None:
    """Return the error for another program at the port, or for TLS that is missing or not expected; else None."""
    if isinstance(error.__cause__, redis_py().exceptions.InvalidResponse):
        return RefusedByServer(no_server(name, wire.heard(), str(error)))
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
    if settings.credentials is not None and not sentinel and not address.password:
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


def _greet(
    wire: Wire, client_name: str, resolver: EndpointResolver, scripts: Iterable[Script], *, replica: bool
) -> list[Script]:
    """Name the connection, check the server, and return those of `scripts` that it does not have.

    If the user may not ask, the server's version is assumed to be right and the scripts to be missing.
    """
    asked: list[tuple[str, ...]] = [("CLIENT", "SETNAME", client_name), *(("INFO", part) for part in INFO_SECTIONS)]
    wanted = list({script.sha: script for script in scripts}.values())
    if wanted:
        asked.append(("SCRIPT", "EXISTS", *(script.sha for script in wanted)))
    replies = wire.exchange(asked)
    wire.facts = read_server_info(replies[1 : len(INFO_SECTIONS) + 1], resolver.name)
    if wire.facts.role == "slave" and not replica:
        if isinstance(resolver, MovableEndpoint):
            resolver.follow(wire)
        raise Unavailable("READONLY this server is a replica; only its primary can work")
    if wire.facts.paused and wanted:  # a request would only wait, and seem to be what makes the server silent
        raise Unavailable(f"the server executes no writes at the moment ({wire.facts.paused})")
    known = replies[-1]
    if not isinstance(known, list) or len(cast("list[int]", known)) != len(wanted):
        return wanted
    return [script for script, there in zip(wanted, cast("list[int]", known), strict=True) if not there]


def _raw(settings: LinkSettings, address: Address, endpoint: Endpoint, timeout: float | None) -> Any:
    redis = redis_py()
    options: dict[str, Any] = {
        "socket_connect_timeout": min(timeout or settings.connect_timeout, settings.connect_timeout),
        "socket_timeout": timeout or settings.socket_timeout,
        "decode_responses": False,
        "protocol": _PROTOCOL,
        "driver_info": None,
        "retry": redis.retry.Retry(redis.backoff.NoBackoff(), 0),
        "maint_notifications_config": redis.maint_notifications.MaintNotificationsConfig(enabled=False),
    }
    if address.kind == "unix":
        options["path"] = endpoint.path
    else:
        options |= {"host": endpoint.host, "port": endpoint.port, **_tls(address)}
    return _connection_class(address.kind)(**options)


def _tls(address: Address) -> dict[str, Any]:
    options: dict[str, Any] = dict(address.tls)
    if "ssl_check_hostname" in options:
        options["ssl_check_hostname"] = options["ssl_check_hostname"].lower() not in ("0", "f", "n", "no", "false")
    return options


# Threads of the link that have connections of their own: the keepalive, and those that ask for addresses.
#
# Here: `ConnectionThread`, which can be ended from another thread, and `WireHolder`, the place of a connection of such a
# thread.


_END_WAIT: Final = 0.2  # seconds that ending waits for the thread; a thread that is connecting takes longer


class WireHolder:
    """The place of one connection. Only its thread opens and closes it.

    Attributes:
        wire: the open connection.
    """

    def __init__(self) -> None:
        self.wire: Wire | None = None

    def hold(self, wire: Wire) -> Wire:
        """Keep a connection that was just opened, and return it."""
        self.wire = wire
        return wire

    def close(self) -> None:
        """Close the connection, if there is one."""
        wire, self.wire = self.wire, None
        if wire is not None:
            wire.close()

    def interrupt(self) -> None:
        """From another thread: make a pending read fail at once."""
        wire = self.wire
        if wire is not None:
            wire.interrupt()

    def abandon(self) -> None:
        """In a forked child: the connection is the parent's."""
        wire, self.wire = self.wire, None
        if wire is not None:
            wire.abandon()


class ConnectionThread:
    """A daemon thread that works until it is ended.

    Attributes:
        ended: set when the thread must end.
        woken: set when the thread must not pause any longer.
        refused: why it cannot be used: it exists in the parent process only.

    Args:
        name: of the thread.
        run: its work.
        holders: returns the connections of the thread.
    """

    def __init__(self, name: str, run: Callable[[], object], holders: Callable[[], Iterable[WireHolder]]) -> None:
        self.ended: threading.Event = threading.Event()
        self.woken: threading.Event = threading.Event()
        self.refused: WorqrError | None = None
        self.holders: Callable[[], Iterable[WireHolder]] = holders
        self._thread = threading.Thread(target=run, name=name, daemon=True)

    @property
    def is_started(self) -> bool:
        return self._thread.ident is not None

    def start(self) -> None:
        """Start it. Raises RuntimeError if the system cannot start a thread."""
        if self.refused is not None:
            raise self.refused
        self._thread.start()

    def end(self) -> None:
        """End it. The thread has ended afterwards, unless it is connecting."""
        self.ended.set()
        self.woken.set()
        for holder in self.holders():
            holder.interrupt()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_END_WAIT)

    def check(self) -> None:
        """In the thread, while a server is silent: raise ConnectionLost if it must end."""
        if self.ended.is_set():
            raise ConnectionLost("the link was closed", innocent=True)

    def poison(self, error: WorqrError) -> None:
        """In a forked child: the thread does not exist here, and the sockets belong to the parent."""
        self.refused = error
        for holder in self.holders():
            holder.abandon()


class EndpointWatcher(ConnectionThread):
    """The pace of the questions.

    Args:
        name: of the thread.
        look: asks once; must not raise. Returns the seconds to wait in any case, and those to wait further unless an address
            is invalidated.
        holders: returns the connections of the thread.
    """

    def __init__(
        self, name: str, look: Callable[[], tuple[float, float]], holders: Callable[[], Iterable[WireHolder]]
    ) -> None:
        super().__init__(name, self._run, holders)
        self._look = look

    def invalidate(self) -> None:
        """An address was wrong: ask soon."""
        self.woken.set()

    def _run(self) -> None:
        while not self.ended.is_set():
            self.woken.clear()
            pause, longest = self._look()
            if not self.ended.wait(pause) and longest > 0:  # `end` may have been called before `woken` was cleared
                self.woken.wait(longest)
        for holder in self.holders():
            holder.close()


def error_of(errors: Sequence[WorqrError]) -> WorqrError:
    """Return why no server could be asked: a refusal if all refuse, because waiting does not help then; else Unavailable."""
    if not errors:
        return Unavailable("the link was closed")
    refusals = [error for error in errors if not isinstance(error, Unavailable)]
    if len(refusals) == len(errors):
        return refusals[0]
    first = next(iter(refusals), None) or min(errors, key=is_unknown_host)  # a name may be wrong only if all are
    error = Unavailable(str(first))
    error.__cause__ = None if refusals else first
    return error


# `Connector`: keeps one connection to a server open: attempts, the pauses between them, and the end.

# An outage of the server: its begin, its cause, and its two log lines.
#
# One WARNING when it begins and one INFO when it ends, regardless of the number of attempts. Not here: the attempts
# (`connector`), threads and sockets.


_WORTH_TELLING = 0.1  # seconds


class Outage(msgspec.Struct):
    """The outage of one server, if there is one now.

    Attributes:
        address: the server's, for messages.
        since: when it began (monotonic); None: the server works.
        cause, remedy: of the last attempt.
        stood: there has been a connection.
        answers: the server is connected, but replies that it cannot work.
    """

    log_thread: LogThread
    logger: logging.Logger
    address: str
    since: float | None = None
    cause: str = ""
    remedy: str = ""
    stood: bool = False
    answers: bool = False
    _told: bool = False

    def begin(
        self, cause: str, *, waiting: int = 0, quiet: bool = False, remedy: str = "", answers: bool = False
    ) -> None:
        """The server cannot be used, or still cannot.

        Args:
            cause: why.
            waiting: the number of pending requests.
            quiet: the server may only have closed an idle connection; do not log before the next attempt.
            remedy: sentences about what to do.
            answers: the server is connected, and replies that it cannot work.
        """
        now = time.monotonic()
        if self.since is None:
            self.since = now
        self.cause, self.remedy, self.answers = cause.removesuffix("."), remedy, answers
        if not self._told and not quiet:
            self._told = True
            self.log_thread.watchers.lost(id(self), self.address, cause)
            pending = f", {waiting} requests pending" if waiting or self.stood else ""
            text = f"{self._what()}; retrying{pending}.{self._hint()}".replace("%", "%%")
            self.log_thread.emit(self.logger, "link.lost", text, server=self.address, error=self.cause, pending=waiting)

    def failed_to_connect(self, error: WorqrError, settings: LinkSettings, *, waiting: int) -> WorqrError | None:
        """An attempt failed. Requests wait as long as their patience allows.

        Returns:
            The error for callers that are connecting, if waiting does not help; None: they wait as well.
        """
        cause = str(error).removeprefix(f"the server at {self.address} refused the connection: ")
        self.begin(cause, waiting=waiting, remedy=remedy_for(error, settings, stood=self.stood))
        if not isinstance(error, Unavailable):
            return error
        if self.stood or settings.clustered or not is_unknown_host(error):
            return None  # a host name that resolved before comes back; the nodes of a cluster name each other
        unknown = Unavailable(self.text(time.monotonic()))
        unknown.__cause__ = error.__cause__
        return unknown

    def connected(self, address: str) -> None:
        """There is a connection, to this server. The outage ends when that works."""
        self.stood, self.address = True, address

    def forget(self) -> None:
        """The server is not needed any more."""
        self.log_thread.watchers.back(id(self))

    def end(self) -> None:
        """The server works again."""
        self.forget()
        if self.since is not None and self._told:
            gone = time.monotonic() - self.since
            text = "connected to %(server)s after %(duration).1f s"
            self.log_thread.emit(self.logger, "link.back", text, server=self.address, duration=gone)
        self.since, self.cause, self.remedy = None, "", ""
        self.answers = self._told = False

    def text(self, now: float) -> str:
        """Return the text of an Unavailable: server, duration, cause and remedy. Ends with a full stop."""
        if self.since is None:
            return f"The server at {self.address} has not replied."
        gone = now - self.since
        what = self._what(f" for {gone:.1f} s" if gone >= _WORTH_TELLING else "", lost="no connection")
        return f"{what[0].upper()}{what[1:]}.{self._hint()}"

    def _what(self, how_long: str = "", *, lost: str = "lost connection") -> str:
        if self.answers:
            return f"the server at {self.address} has not been able to work{how_long}: {self.cause}"
        return f"{lost if self.stood else 'could not connect'} to {self.address}{how_long}: {self.cause}"

    def _hint(self) -> str:
        return f" {self.remedy}" if self.remedy else ""


# `Transport`: drives an open, encrypted and authenticated connection without blocking.
#
# Here: sending as much as the socket accepts, keeping the rest, and reading, also through TLS. Not here: the meaning of the
# bytes (`session`), opening connections (`opening`), waiting (the drivers).


_READ: Final = 64 * 1024
_READ_AT_ONCE: Final = 1024 * 1024
"""Bytes that are read in one turn of the loop, so that other tasks have their turn."""

_JOINED: Final = 64 * 1024  # bytes: smaller pieces are sent together
_PIECE: Final = 256 * 1024  # bytes per send

_WAITS = (BlockingIOError, ssl.SSLWantReadError)
_CLOSED = "Connection closed by server."


class Transport:
    """The socket of one connection. All methods belong to the driver's loop.

    Attributes:
        wire: the connection.
        watch: how the driver waits for its socket.

    Args:
        wire: the connection; no other code may use it from now on.
        driver: waits for the socket.
        readable: called when the socket has input; calls `read`.
        progress: called after a part of the remaining bytes was sent, or with the reason if the connection was lost.
    """

    def __init__(
        self,
        wire: Wire,
        driver: Driver,
        readable: Callable[[], object],
        progress: Callable[[ConnectionLost | None], object],
    ) -> None:
        self.wire: Wire = wire
        self._socket: socket.socket = wire.hand_over()
        self._is_tls = isinstance(self._socket, ssl.SSLSocket)
        self._out: deque[bytes | memoryview] = deque()
        self._driver = driver
        self._readable = readable
        self._progress = progress
        self._closed = False
        self.watch: Watch = driver.watch(self._socket, readable, self._writable)

    def send(self, pieces: list[bytes]) -> None:
        """Send bytes, and keep those that the socket does not accept yet. Raises `ConnectionLost`."""
        self._out += pieces if len(pieces) == 1 and len(pieces[0]) <= _PIECE else _sendable(pieces)
        if not self.watch.wants_write:
            self._flush()

    def _flush(self) -> None:
        out, send = self._out, self._socket.send
        try:
            while out:
                piece = out[0]
                sent = send(piece)
                if sent == len(piece):
                    del out[0]
                else:
                    out[0] = memoryview(piece)[sent:]
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            pass
        except OSError as error:
            out.clear()
            self.watch.want_write(False)
            raise as_connection_lost(error) from error
        if bool(out) != self.watch.wants_write:
            self.watch.want_write(bool(out))

    def _writable(self) -> None:
        try:
            self._flush()
        except ConnectionLost as lost:
            self._progress(lost)
        else:
            self._progress(None)

    def read(self, feed: Callable[[bytes], object]) -> int:
        """Read the input, and pass it on in pieces; return how many bytes there were. Raises `ConnectionLost`."""
        size = 0
        receive, closed = self._socket.recv, False
        try:
            while size < _READ_AT_ONCE:
                data = receive(_READ)
                if not data:
                    closed = True
                    break
                feed(data)
                read = len(data)
                size += read
                if read < _READ and not self._is_tls:  # TLS may have decrypted more than it returned
                    break
        except _WAITS:
            pass
        except ssl.SSLWantWriteError:
            self.watch.want_write(True)
        except OSError as error:
            if not size:
                raise as_connection_lost(error) from error
        if closed and not size:
            raise ConnectionLost(_CLOSED)
        if size >= _READ_AT_ONCE and self._is_tls:  # decrypted data does not make the socket readable
            self._driver.soon(self._readable)
        return size

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if not self._closed:
            self._closed = True
            self.watch.close()
            self.wire.close()

    def abandon(self) -> None:
        """In a forked child: close its copy of the socket; the parent continues to use the connection."""
        self._closed = True
        self.wire.abandon()


def _sendable(pieces: list[bytes]) -> list[bytes | memoryview]:
    """Return few pieces of moderate size: small ones joined (a send each would be slow), large ones cut without a copy."""
    if sum(map(len, pieces)) <= _JOINED:
        return [b"".join(pieces)]
    out: list[bytes | memoryview] = []
    small: list[bytes] = []
    waiting = 0
    for piece in pieces:
        if waiting + len(piece) > _JOINED:
            out.append(b"".join(small))
            small, waiting = [], 0
        if len(piece) <= _JOINED:
            small.append(piece)
            waiting += len(piece)
        else:
            view = memoryview(piece)
            out += [view[start : start + _PIECE] for start in range(0, len(view), _PIECE)]
    out.append(b"".join(small))
    return out


_FIRST_PAUSE = 0.05  # seconds before the third attempt in a row; the second is made at once
_LONGEST_PAUSE = 1.0
_REFUSED_PAUSE = 2.0  # a wrong password: trying often fills the server's log and mends nothing


def pause_after(attempts: int, *, refused: bool = False) -> float:
    """Return the seconds to wait after this number of failures in a row: 0, then doubling, with jitter against herds."""
    if attempts <= 1 and not refused:
        return 0.0
    longest = _REFUSED_PAUSE if refused else min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(attempts - 2, 10))
    return longest * random.uniform(0.5, 1.0)


Connect = Callable[..., Wire]
"""`open_connection` for one server, without the argument `on_silence`."""


class State(enum.Enum):
    """The state of a connection; see the module."""

    NEW = "nothing was dialled yet"
    DIALLING = "an attempt to connect is being made"
    WAITING = "until the next attempt to connect"
    READY = "connected"
    HELD = "the server cannot work at the moment"
    ENDED = "no connection any more"


class Connector:
    """The attempts to keep one connection open. All methods belong to the driver's loop, except `_attempt`.

    Attributes:
        state: see the module.
        resolver: finds the server's address.
        attempts: failed attempts and lost connections in a row.

    Args:
        connect: connects, in a thread.
        connected: gets an open connection.
        failed: gets the error of an attempt.
        dialling: called when an attempt begins.
    """

    def __init__(
        self,
        driver: Driver,
        resolver: EndpointResolver,
        connect: Connect,
        connected: Callable[[Wire], object],
        *,
        failed: Callable[[WorqrError], object] = lambda _: None,
        dialling: Callable[[], object] = lambda: None,
    ) -> None:
        self.state: State = State.NEW
        self.resolver: EndpointResolver = resolver
        self.attempts: int = 0
        self._driver = driver
        self._connect = connect
        self._connected = connected
        self._failed = failed
        self._dialling = dialling
        self._alarm = Alarm(driver, lambda _: self.dial())
        self._next_try = 0.0
        self._number = 0  # of the latest attempt; the results of older ones are discarded

    # The states

    def dial(self) -> None:
        """Begin an attempt. The result of an earlier one is discarded."""
        self._alarm.cancel()
        self._dialling()
        self.state = State.DIALLING
        self._number += 1
        self._start(partial(self._attempt, self._number))

    def works(self) -> None:
        """The connection is of use: the next loss begins a new row of attempts."""
        self.state, self.attempts = State.READY, 0

    def hold(self) -> None:
        """The server replied that it cannot work at the moment."""
        self.state = State.HELD

    def lost(self) -> None:
        """The connection was lost. `retry` continues."""
        self._count()
        self.resolver.invalidate()

    def retry(self) -> None:
        """Dial at once or after a pause, if the connection was lost."""
        if self.state is State.WAITING:
            if self._next_try <= time.monotonic():
                self.dial()
            else:
                self._alarm.set(self._next_try)

    def redial(self) -> None:
        """The server may be elsewhere: begin an attempt at once, unless one has just begun."""
        if self.state is State.WAITING:
            self.dial()

    def close(self) -> None:
        """End: make no more attempts."""
        self.state = State.ENDED
        self._alarm.cancel()

    def poison(self) -> None:
        """In a forked child: the timers are the parent's."""
        self.state = State.ENDED

    def _count(self, *, refused: bool = False) -> None:
        self.state = State.WAITING
        self.attempts += 1
        self._next_try = time.monotonic() + pause_after(self.attempts, refused=refused)

    # One attempt

    def transport(
        self, wire: Wire, readable: Callable[[], object], progress: Callable[[ConnectionLost | None], object]
    ) -> Transport | None:
        """Return the transport of a connection that was just opened; None if it is lost already."""
        try:
            return Transport(wire, self._driver, readable, progress)
        except (ConnectionLost, Unavailable) as exc:
            wire.close()
            self._give_up(Unavailable(str(exc)))
        return None

    def _start(self, attempt: Callable[[], None]) -> None:
        try:
            threading.Thread(target=attempt, name="worqr-dial", daemon=True).start()
        except RuntimeError:  # the system is out of threads: block here, and expire requests late
            attempt()

    def _attempt(self, number: int) -> None:
        """Connect. Runs in the attempt's thread."""
        wire: Wire | None = None
        error: WorqrError | None = None
        try:
            wire = self._connect(on_silence=self._check)
        except WorqrError as exc:
            error = exc
        except BaseException as exc:
            error = WorqrBug(f"connecting failed ({type(exc).__name__}: {exc}); please report this")
            error.__cause__ = exc
        if self.state is State.ENDED and wire is not None:
            wire.close()
        else:
            self._driver.post(partial(self._end, number, wire, error))

    def _check(self) -> None:
        """Called every 0.1 s while the server is silent."""
        if self.state is State.ENDED:
            raise ConnectionLost("the link was closed", innocent=True)

    def _end(self, number: int, wire: Wire | None, error: WorqrError | None) -> None:
        """In the loop: the attempt has ended."""
        if number != self._number or self.state is State.ENDED:
            if wire is not None:
                wire.close()
        elif wire is not None:
            self.state = State.READY
            self._connected(wire)
        else:
            assert error is not None, "an attempt ends with a connection or an error"
            self._give_up(error)

    def _give_up(self, error: WorqrError) -> None:
        self._count(refused=not isinstance(error, Unavailable))
        self._failed(error)
        self.retry()


class ReadyWaiters:
    """Callers of ``wait_ready``.

    Attributes:
        waiting: each with its deadline (monotonic).
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.waiting: list[tuple[Waiter, float]] = []

    def add(self, waiter: Waiter, deadline: float) -> None:
        """Add a caller that waits until the deadline (monotonic)."""
        self.waiting.append((waiter, deadline))

    def take(self) -> list[tuple[Waiter, float]]:
        """Remove and return all callers."""
        waiting, self.waiting = self.waiting, []
        return waiting

    def take_late(self, now: float) -> list[Waiter]:
        """Remove and return the callers whose deadline has passed."""
        late = [waiter for waiter, deadline in self.waiting if deadline <= now]
        if late:
            self.waiting = [each for each in self.waiting if each[1] > now]
        return late

    def tell(self, error: WorqrError | None) -> None:
        """Settle all callers; without an error, a connection is open."""
        settle_soon(self._driver, [waiter for waiter, _ in self.take()], error)
