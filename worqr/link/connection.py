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

import concurrent.futures.thread  # noqa: F401  # pyright: ignore[reportUnusedImport] - it has hooks for forks, as below
import enum
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Protocol, cast

import hiredis

from worqr.errors import RefusedByServer, Unavailable, UsageError, WorqrError, WrongVersion
from worqr.link.settings import Address, Endpoint, LinkSettings
from worqr.lua import Script
from worqr.stored_values import as_bytes

# Check the files of a ``rediss://`` URL before anything is sent, and explain failed TLS handshakes.
#
# OpenSSL's errors do not name the file, and OpenSSL asks for the password of a private key on the terminal. Not here: the
# connection (redis-py reads the files again for each one, so you can replace them while the program runs).


_AUTHORITY = "name the certificate authority: rediss://...?ssl_ca_certs=/path/to/ca.pem"
_VERIFICATION = {  # by OpenSSL's code
    9: "the server's certificate is not valid yet; are the clocks right?",
    10: "the server's certificate has expired",
    62: "the server's certificate is for another name than the URL's",
    64: "the server's certificate is for another address than the URL's",
}
_OWN = "the server asks for a client certificate that it trusts: rediss://...?ssl_certfile=...&ssl_keyfile=..."
_NO_TLS = "no TLS is spoken at this port; is it redis://?"
_REASONS = {
    "WRONG_VERSION_NUMBER": _NO_TLS,
    "RECORD_LAYER_FAILURE": _NO_TLS,
    "SSLV3_ALERT_BAD_CERTIFICATE": _OWN,
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": _OWN,
    "SSLV3_ALERT_CERTIFICATE_REVOKED": _OWN,
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": _OWN,
    "SSLV3_ALERT_HANDSHAKE_FAILURE": _OWN,
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": _OWN,
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": _OWN,
    "TLSV1_ALERT_ACCESS_DENIED": _OWN,
    "TLSV1_ALERT_UNKNOWN_CA": _OWN,
}


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """An error, and the errors that caused it."""
    inner: BaseException | None = error
    while inner is not None:
        yield inner
        inner = inner.__cause__ or inner.__context__


def tls_hint(error: BaseException) -> str | None:
    """Return the remedy for a failed handshake that waiting does not help; None for every other error."""
    inner = next((each for each in chain_of(error) if isinstance(each, ssl.SSLError)), None)
    if isinstance(inner, ssl.SSLCertVerificationError):
        return _VERIFICATION.get(inner.verify_code, _AUTHORITY)
    return None if inner is None else _REASONS.get(inner.reason)


def is_silent_handshake(error: BaseException) -> bool:
    """Return True if the other side accepted the first bytes and sent nothing, as a server without TLS does: it waits for
    more.
    """
    return any("handshake operation timed out" in str(each) for each in chain_of(error))


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


# Explain why the server cannot be reached, in terms that people search for, and suggest a remedy.
#
# Here: the cause of a failed attempt to connect, its remedy, and the check for another program at the port: HTTP, TLS, or a
# server without TLS. That check is only for the first connection of a link: at a port that worked before, the same signs come
# from a proxy whose server is away. Not here: error replies of a server, certificates.


_PORT = 6379  # that of `worqr server`
_NO_SUCH_HOST = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))
_PATIENCE = 1.0  # seconds for connecting and for each reply
_MOST = 100  # characters of the program's output in a message
_HTTP = ("HTTP/", "<!DOCTYPE", "<html")


def is_unknown_host(error: BaseException) -> bool:
    """Return True if the name service reports that the host does not exist, or if the name is invalid.

    Return False if the name service could not be reached (EAI_AGAIN): a network that is just starting recovers without help.
    """
    for each in chain_of(error):
        if isinstance(each, UnicodeError) or (isinstance(each, socket.gaierror) and each.errno in _NO_SUCH_HOST):
            return True
    return False


def cause_of(error: BaseException, endpoint: Endpoint) -> str:
    """Return why a connection to `endpoint` failed, or an empty string if the error's own text is the best explanation."""
    if is_unknown_host(error):
        return f"the host name {endpoint.host!r} does not resolve ({_words(error, socket.gaierror, UnicodeError)})"
    for each in chain_of(error):
        match each:
            case socket.gaierror():
                return f"the host name {endpoint.host!r} cannot be resolved at the moment ({each.strerror})"
            case ConnectionRefusedError():
                return "connection refused"
            case FileNotFoundError():
                return f"there is no socket {endpoint.path}"
            case _:
                pass
    return ""


def _words(error: BaseException, *kinds: type[BaseException]) -> str:
    """The text of the first error of these kinds in the chain."""
    first = next(each for each in chain_of(error) if isinstance(each, kinds))
    return first.strerror if isinstance(first, OSError) and first.strerror else str(first)


def remedy_for(error: BaseException, settings: LinkSettings, *, stood: bool = False) -> str:
    """Return the remedy for a failed attempt to connect; an empty string if waiting is the only one.

    Args:
        error: the error of the attempt.
        settings: the settings of the link.
        stood: there was a connection before, so the address is right.
    """
    address, source = settings.address, settings.source
    if is_unknown_host(error):
        return f"Check the host name in {source}."
    if any(isinstance(each, TimeoutError) for each in chain_of(error)):
        return "" if stood else f"Check host and port in {source}, and the firewall."
    if not any(isinstance(each, ConnectionRefusedError | FileNotFoundError) for each in chain_of(error)):
        return ""
    running = "Is the server running?" if address.topology == "single" else "Are the servers running?"
    if stood:
        return running
    if not settings.can_be_started_here:
        return f"{running} Check {'the path' if address.kind == 'unix' else 'host and port'} in {source}."
    port = "" if address.port == _PORT else f" --port {address.port}"
    other = "set WORQR_URL" if settings.is_default else f"correct {source}"
    return f"{running} Start one with 'worqr server{port}', or {other}."


# Another program at the port


def first_line(heard: bytes) -> str:
    """Return the first line of a program's output as printable text; empty if there is none."""
    line = heard.strip().splitlines()[0] if heard.strip() else b""
    text = "".join(c if c.isprintable() else "?" for c in line.decode("utf-8", "replace"))
    return text if len(text) <= _MOST else text[:_MOST] + "..."


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


# The parts of redis-py that worqr uses, imported when the first connection is made.
#
# Importing redis-py takes as long as importing the rest of worqr, Trio included. A program that only declares functions, or
# prints its help, should not wait for it.


class RedisPy:
    """The classes of redis-py.

    Attributes, set once:
        exceptions: its module of errors.
        errors: the errors of a broken connection (OSError: before redis-py has wrapped it).
        timeout: the error of a timeout.
        response_error: the error of an error reply.
        connections: its connection classes by worqr's names: tcp, tls, unix.
        options: the options that switch off a connection's automatic actions.
        key_slot: the hash slot of a key on a cluster.
    """

    __slots__ = ("connections", "errors", "exceptions", "key_slot", "options", "response_error", "timeout")

    def __init__(self) -> None:
        from redis import exceptions
        from redis.backoff import NoBackoff
        from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection
        from redis.crc import key_slot
        from redis.maint_notifications import MaintNotificationsConfig
        from redis.retry import Retry

        class TlsConnection(SSLConnection):
            """Use the connect timeout for the handshake, not the longer one of a reply: without TLS a server stays silent."""

            def _wrap_socket_with_ssl(self, sock: Any) -> Any:
                sock.settimeout(self.socket_connect_timeout)
                wrapped: Any = super()._wrap_socket_with_ssl(sock)  # type: ignore[no-untyped-call]  # pyright: ignore[reportUnknownMemberType]
                wrapped.settimeout(self.socket_timeout)
                return wrapped

        self.exceptions: ModuleType = exceptions
        self.errors: tuple[type[Exception], ...] = (exceptions.RedisError, OSError)
        self.timeout: type[Exception] = exceptions.TimeoutError
        self.response_error: type[Exception] = exceptions.ResponseError
        self.connections: dict[str, Callable[..., Any]] = {
            "tcp": Connection,
            "tls": TlsConnection,
            "unix": UnixDomainSocketConnection,
        }
        self.options: dict[str, Any] = {
            "retry": Retry(NoBackoff(), 0),
            "maint_notifications_config": MaintNotificationsConfig(enabled=False),
        }
        self.key_slot: Callable[[bytes], int] = key_slot


_importing = threading.RLock()
"""Held while redis-py is imported, and during each fork. Otherwise a child could have half of a module for ever.

What is imported must not register hooks for forks that belong together, because a fork may have begun that waits for the import.
So the module that does so is imported above.
"""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_importing.acquire,
        after_in_parent=_importing.release,
        after_in_child=_importing.release,
    )


@cache
def redis_py() -> RedisPy:
    """Return the parts of redis-py, imported at the first call."""
    with _importing:
        import encodings.idna  # noqa: F401  # pyright: ignore[reportUnusedImport] - for the first look-up of a host

        return RedisPy()


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


# Failures between worqr and the server, classified by their remedy. redis-py's exceptions end here.
#
# Here: `ConnectionLost` and `ErrorReply`, which the rest of the link uses, and the classification of redis-py's exceptions. Not
# here: the reaction to a failure (`node`, `session`, `subscriptions`, `heartbeat`).
#
# An error reply begins with a code. redis-py keeps the codes of some classes in ``status_code`` and leaves those of others in
# the text. A script's error may have the code of an inner error in its text ("ERR Error running script: -OOM ..."). All three
# places are checked. Possible arguments are removed from error texts before they are logged or raised.


class ErrorAction(enum.Enum):
    """The reaction that an error reply needs."""

    NOSCRIPT = "load the script and send this request again"
    MOVED = "another node of the cluster has these keys: send it there"
    MOVING = "these keys are just being moved: send it again soon, and the others meanwhile"
    FULL = "out of memory: nothing was stored"
    DROP = "this connection leads to a server that cannot work: connect again, then resend"
    HOLD = "the server cannot work for the moment: wait on this connection, then resend"
    REFUSED = "this request will never work"


_ACTIONS = {
    "NOSCRIPT": ErrorAction.NOSCRIPT,
    "OOM": ErrorAction.FULL,
    "READONLY": ErrorAction.DROP,
    "LOADING": ErrorAction.DROP,
    "MASTERDOWN": ErrorAction.DROP,
    "CLUSTERDOWN": ErrorAction.DROP,
    "MOVED": ErrorAction.MOVED,
    "ASK": ErrorAction.MOVING,
    "TRYAGAIN": ErrorAction.MOVING,
    "NOAUTH": ErrorAction.DROP,
    "WRONGPASS": ErrorAction.DROP,
    "MISCONF": ErrorAction.HOLD,
    "NOREPLICAS": ErrorAction.HOLD,
    "BUSY": ErrorAction.HOLD,
}
_WRAPPED = re.compile(rf"(?:^|[\s:])-({'|'.join(_ACTIONS)})\b")
_ARGUMENTS = re.compile(r",? with args beginning with:.*", re.DOTALL)
_SCRIPT_PLACE = re.compile(r"\s*script:[ 0-9a-f,]*on @user_script:\d+\.?")
_DENIED = re.compile(r"ACL failure in script|The user executing the script can't ")
_PASSWORD = "check user and password in its URL"  # noqa: S105 - not one
_PROTECTED = "give the server a password (requirepass) and put it into the URL, as redis://:PASSWORD@HOST:PORT/0"
_LONGEST_TEXT = 300  # more than any of the server's own messages; a payload that got in is cut


class ConnectionLost(Exception):
    """The connection is lost or useless; the outcome of requests in flight is unknown.

    `innocent`: no request can have caused it.
    """

    def __init__(self, cause: str, *, innocent: bool = False) -> None:
        super().__init__(cause)
        self.cause = cause
        self.innocent = innocent


class ErrorReply(Exception):
    """The server replied to one request with an error; the connection still works.

    Attributes:
        action: the reaction that the error needs.
        word: the error's code.
        text: the rest of the message.
    """

    def __init__(self, action: ErrorAction, word: str, text: str) -> None:
        super().__init__(f"{word} {text}".strip())
        self.action = action
        self.word = word
        self.text = text


def as_error_reply(error: BaseException) -> ErrorReply:
    """Classify an error reply that redis-py has read."""
    text = _clean(str(error))
    word: str | None = getattr(error, "status_code", None)
    return _sorted(word, text)


def error_reply(text: str) -> ErrorReply:
    """Classify an error reply in the server's own text."""
    return _sorted(None, _clean(text))


def _sorted(word: str | None, text: str) -> ErrorReply:
    if word is None:
        first, _, rest = text.partition(" ")
        word, text = (first, rest) if first.isupper() else ("ERR", text)
    denied = word == "NOPERM" or _DENIED.search(text)
    # except for start_work, some servers name neither the command nor the key
    if denied and not text.startswith("the user may not: "):
        text += "; ACL LOG on the server names what is missing, and the page Permissions of the docs has complete rules"
    action = _ACTIONS.get(word)
    if action is None:
        wrapped = _WRAPPED.search(text)
        action = _ACTIONS[wrapped[1]] if wrapped else ErrorAction.REFUSED
    return ErrorReply(action, word, text)


def is_no_longer_primary(refused: ErrorReply) -> bool:
    """Return True if WAIT failed because the server is no primary any more."""
    return refused.word == "UNBLOCKED" or "replica instances" in refused.text


def as_connection_lost(error: BaseException) -> ConnectionLost:
    """Convert an exception that ended a connection."""
    word = getattr(error, "status_code", None)
    text = _clean(str(error)) or type(error).__name__
    redis_errors = redis_py().exceptions
    innocent = isinstance(error, redis_errors.BusyLoadingError | redis_errors.AuthenticationError)
    if "Too many open files" in text:
        text += " (raise the limit of this process: ulimit -n)"
    if is_silent_handshake(error):
        text += " (is TLS spoken at this port?)"
    return ConnectionLost(f"{word} {text}" if word else text, innocent=innocent)


def as_connect_error(error: BaseException, address: str, *, ours: bool = False) -> WorqrError | None:
    """Return RefusedByServer if an attempt to connect failed for a reason that waiting does not remove; else None.

    `ours`: user and password come from the application's ``credentials=``, not from the URL.
    """
    redis_errors = redis_py().exceptions
    if isinstance(error, redis_errors.AuthenticationError | redis_errors.AuthorizationError):
        hint: str | None = "check what credentials= returns" if ours else _PASSWORD
    elif isinstance(error, redis_errors.ResponseError):
        if as_error_reply(error).action in (ErrorAction.DROP, ErrorAction.HOLD):
            return None
        hint = (
            _PROTECTED
            if as_error_reply(error).word == "DENIED"
            else "check the rights of the user and the database number"
        )
    elif (hint := tls_hint(error)) is None:
        return None
    return RefusedByServer(f"the server at {address} refused the connection: {as_connection_lost(error).cause}; {hint}")


def _clean(text: str) -> str:
    """Return one line of printable text, without the parts of a request that the server quotes."""
    text = _SCRIPT_PLACE.sub("", _ARGUMENTS.sub("", text))
    text = "".join(c if c.isprintable() else " " for c in text)
    return text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + "..."


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
