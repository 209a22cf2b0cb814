"""Open one connection to the server with blocking calls, and check it, so that only worqr's own errors leave this module.

Here: `open_connection`, and `Wire`, a thin layer over ONE raw redis-py connection. Also the threads of the link that have such
connections of their own: the keepalive, and those that ask for addresses. Not here: any decision about what to do after an error.

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
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, Protocol, cast

import hiredis

from worqr.errors import RefusedByServer, Unavailable, UsageError, WorqrError, WrongVersion
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
)
from worqr.link.settings import Address, Endpoint, LinkSettings, one_line
from worqr.lua import Script
from worqr.stored_values import as_bytes

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


INFO_SECTIONS = ("server", "replication", "memory")
_SAFE_POLICIES = ("noeviction", "")  # some providers hide the policy
_OLDEST = {"Redis": (7, 0), "Valkey": (7, 2)}


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The facts from INFO; empty where the user's permissions do not allow it."""

    server: str = ""
    version: str = ""
    run_id: str = ""
    role: str = ""
    eviction: str = ""

    @property
    def evicts(self) -> bool:
        return self.eviction not in _SAFE_POLICIES


def read_server_info(answers: Sequence[Any], address: str, *, replica: bool = False) -> ServerInfo:
    """Return the facts from the replies to INFO.

    Raises:
        WrongVersion: the server is too old.
        RefusedByServer: it is a Sentinel.
        Unavailable: it is a replica, unless `replica`.
    """
    info: dict[str, str] = {}
    for answer in answers:
        info |= info_fields(answer)
    server, version = server_version(info)
    facts = ServerInfo(server, version, info.get("run_id", ""), info.get("role", ""), info.get("maxmemory_policy", ""))
    if version and _numbers(version) < _OLDEST[server]:
        wanted = " or ".join(f"{name} {major}.{minor}" for name, (major, minor) in _OLDEST.items())
        raise WrongVersion(f"the server at {address} is {server} {version}; worqr needs {wanted}, or newer")
    if "sentinel" in (info.get("redis_mode"), info.get("server_mode")):  # the latter is Valkey's
        raise RefusedByServer(
            f"{address} is a Sentinel, which holds no data: write redis+sentinel://HOST:PORT/SERVICE, with its place and "
            "the name that it knows the server by"
        )
    if facts.role == "slave" and not replica:
        raise Unavailable("READONLY this server is a replica; only its primary can work")
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


def resolver_for(settings: LinkSettings) -> EndpointResolver:
    """Return the resolver for the server of the settings."""
    return StaticEndpoint(settings.address.redacted, settings.address.seeds[0])


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
    if isinstance(error, redis_errors()):
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
    wanted = list({script.sha: script for script in scripts}.values())
    if not wanted:
        _, *answers = wire.exchange(asked)
        wire.facts = read_server_info(answers, name, replica=replica)
        return []
    _, *answers, known = wire.exchange([*asked, ("SCRIPT", "EXISTS", *(script.sha for script in wanted))])
    wire.facts = read_server_info(answers, name, replica=replica)
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
            self.ended.wait(pause)
            if longest > 0:
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
