"""The settings of a link: the server's address and the timeouts.

Here: `LinkSettings` and the strict parser of the server's URL, which reports a typing error before anything is sent. Not
here: I/O, and redis-py (`opening` turns an `Address` into a connection).

`Address.password` and `LinkSettings.url` contain passwords. Both are left out of every ``repr``, and messages use
`Address.redacted`.
"""

from __future__ import annotations

import inspect
import logging
import math
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, cast
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from worqr.errors import Unavailable, UsageError, WorqrError
from worqr.log_events import emit

# Credentials that change: the value of ``Mesh(credentials=...)``, which is called anew for each connection.
#
# Here: `Credentials`, which calls the provider and checks the result. Not here: sending it to the server (`opening`). A
# password is never logged, printed or kept.


logger: logging.Logger = logging.getLogger(__name__)


class CredentialProvider(Protocol):
    """The interface of redis-py's ``CredentialProvider``."""

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Return ``(username, password)``, or ``(password,)`` for the user ``default``."""
        ...


GivenCredentials = Callable[[], tuple[str, str]] | CredentialProvider
"""The value of ``credentials=``: a function that returns ``(username, password)``, or a provider of redis-py."""


class Credentials:
    """Calls the provider, in the thread that connects. Several threads may call it at once.

    Raises:
        UsageError: `given` cannot be asked.
    """

    def __init__(self, given: GivenCredentials) -> None:
        provider = getattr(given, "get_credentials", None)
        ask = provider if callable(provider) and not isinstance(given, type) else given
        if not callable(ask) or isinstance(ask, type):
            raise UsageError(
                "credentials= must be a function that returns (username, password), or a CredentialProvider of redis-py, "
                f"not {_kind(given)}"
            )
        self._name: str = getattr(given, "__qualname__", type(given).__qualname__)
        if inspect.iscoroutinefunction(ask):
            raise UsageError(
                f"credentials={self._name} is async: give a plain function, which may block; worqr calls it in a thread"
            )
        self._ask = cast("Callable[[], object]", ask)
        self._lock = threading.Lock()
        self._failing = False

    def __repr__(self) -> str:
        return f"<Credentials {self._name}>"

    def get(self, address: str) -> tuple[str, ...]:
        """Return ``(username, password)`` or ``(password,)`` for a new connection to `address`.

        Logs the first of several failures in a row, directly: this thread has just run the application's code anyway.

        Raises:
            Unavailable: it raised an error; the next connection asks again.
            UsageError: it returned something else.
        """
        raised = ""
        try:
            found = self._ask()
        except BaseException as error:  # including SystemExit: this is not the application's thread
            raised, found = f"{type(error).__name__}: {one_line(str(error))}", None
        if raised:  # outside of the block: its unknown host must not count as an unknown server
            failure: WorqrError = Unavailable(f"credentials={self._name} raised {raised}")
        else:
            parts = _parts(found)
            wrong = _what_is_wrong(found, parts)
            if not wrong:
                self._failing = False
                return parts if len(parts) == 1 or parts[0] else parts[1:]
            failure = UsageError(f"credentials={self._name} returned {wrong}")
        self._tell(address, str(failure))
        raise failure

    def _tell(self, address: str, cause: str) -> None:
        with self._lock:
            told, self._failing = self._failing, True
        if not told:
            text = "could not connect to %(server)s: %(error)s; asking again for the next attempt"
            emit(logger, "link.credentials", text, server=address, error=cause)


def _parts(found: object) -> tuple[str, ...]:
    """The strings that were returned; none if it was something else."""
    parts = cast("tuple[object, ...]", found) if isinstance(found, tuple | list) else ()
    texts = tuple(part for part in parts if isinstance(part, str))
    return texts if len(texts) == len(parts) else ()


def _what_is_wrong(found: object, parts: tuple[str, ...]) -> str:
    """Empty if these are credentials."""
    if inspect.iscoroutine(found):
        found.close()
    if len(parts) not in (1, 2):
        return f"{_shape(found)}; it must return (username, password), two strings"
    if not parts[-1]:
        return "an empty password"
    try:
        "".join(parts).encode()
    except UnicodeEncodeError:
        return "text that is not valid Unicode"
    return ""


def _kind(value: object) -> str:
    return f"the class {value.__qualname__}" if isinstance(value, type) else type(value).__name__


def _shape(found: object) -> str:
    """Return the type of the value and of its parts, never their content."""
    if not isinstance(found, tuple | list):
        return type(found).__name__
    parts = cast("tuple[object, ...]", found)
    return f"{type(parts).__name__}({', '.join(type(part).__name__ for part in parts)})"


def one_line(text: str, longest: int = 300, instead: str = " ") -> str:
    """Return text that others have written as one line of printable characters."""
    text = "".join(c if c.isprintable() else instead for c in text)
    return text if len(text) <= longest else text[:longest] + "..."


Kind = Literal["tcp", "tls", "unix"]
Topology = Literal["single", "sentinel", "cluster"]
_SCHEMES: Mapping[str, tuple[Kind, Topology]] = {
    "redis": ("tcp", "single"),
    "rediss": ("tls", "single"),
    "unix": ("unix", "single"),
    "redis+cluster": ("tcp", "cluster"),
    "rediss+cluster": ("tls", "cluster"),
    "redis+sentinel": ("tcp", "sentinel"),
    "rediss+sentinel": ("tls", "sentinel"),
}
_TLS_OPTIONS = frozenset(
    {
        *("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile", "ssl_password"),
        *("ssl_cert_reqs", "ssl_check_hostname"),
    }
)
_SENTINEL_OPTIONS = frozenset({"sentinel_username", "sentinel_password"})
_SECRET = "***"  # noqa: S105 - the replacement of the password in messages
_PORT = 6379
_SENTINEL_PORT = 26379
_LOCAL = ("localhost", "127.0.0.1", "::1")
GIVEN = "the URL of the mesh"
DEFAULT = "the default URL"
"""Sources of a URL: the application, or the default."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where one connection goes: a host and a port, or the path of a socket.

    Attributes:
        moved: how to connect there, if the mesh has moved there from the address of the settings.
    """

    host: str = ""
    port: int = 0
    path: str = ""
    moved: Address | None = None

    def __str__(self) -> str:
        return self.path or (f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}")


@dataclass(frozen=True, slots=True)
class Address:
    """The address of the server, or of the servers that know it, and the user.

    Attributes:
        kind: the transport.
        redacted: the URL without its secrets, for messages.
        topology: one server, a server behind Sentinels, or the nodes of a cluster.
        seeds: the server, or Sentinels, or some nodes of the cluster. At least one.
        service: the name of the server in the Sentinels' configuration.
    """

    kind: Kind
    redacted: str
    topology: Topology = "single"
    seeds: tuple[Endpoint, ...] = ()
    service: str = ""
    db: int = 0
    username: str = field(default="", repr=False)  # without a password, it may be one
    password: str = field(default="", repr=False)
    sentinel_username: str = ""
    sentinel_password: str = field(default="", repr=False)
    tls: tuple[tuple[str, str], ...] = field(default=(), repr=False)  # one of them is a password

    @property
    def host(self) -> str:
        return self.seeds[0].host

    @property
    def port(self) -> int:
        return self.seeds[0].port

    @property
    def path(self) -> str:
        return self.seeds[0].path

    @property
    def of_sentinels(self) -> Address:
        """Return the address for connections to Sentinels, which have their own users and no databases."""
        return replace(self, db=0, username=self.sentinel_username, password=self.sentinel_password)

    def moved_to(self, url: str) -> Address:
        """Return the address of a mesh that has moved from here. What `url` does not say is as it was here: user, password
        and files of TLS. Databases keep their numbers.

        Raises:
            UsageError: the URL is invalid, or not that of one server.
        """
        new = Address.parse(url)
        if new.topology != "single" or new.kind == "unix":
            raise UsageError(
                f"a mesh moves to one server: write redis://HOST:PORT or rediss://HOST:PORT, got {new.redacted}"
            )
        if not (new.username or new.password):
            new = replace(new, username=self.username, password=self.password)
        own = self.tls if new.kind == self.kind else ()
        return replace(new, db=self.db, tls=tuple((dict(new.tls) | dict(own)).items()))

    @classmethod
    def parse(cls, url: str) -> Address:
        """Parse a URL: ``redis://``, ``rediss://``, ``unix://``, ``redis+cluster://``, ``redis+sentinel://`` (and
        ``rediss+...``).

        Raises:
            UsageError: the URL is invalid; the text names the part.
        """
        shown = redact(url, user=False)
        try:
            parts = urlsplit(url)
        except ValueError:  # its text may hold a piece of a password
            raise _wrong_place(shown) from None
        if "@" in parts.path + parts.query or parts.fragment:
            raise UsageError(
                f"cannot read the server's URL {shown}: in a password write / as %2F, ? as %3F, # as %23, @ as %40"
            )
        kind, topology = _SCHEMES.get(parts.scheme, (None, None))
        if kind is None or topology is None:
            raise UsageError(
                f"cannot read the server's URL {shown}: it must begin with redis://, rediss://, unix://, embedded:, "
                "redis+cluster://, rediss+cluster://, redis+sentinel:// or rediss+sentinel://"
            )
        userinfo, _, places = parts.netloc.rpartition("@")
        username, _, password = userinfo.partition(":")
        options = _options(parts.query, kind, topology, shown)
        if kind == "unix" and not parts.path:
            raise UsageError(f"the server's URL {shown} names no socket: write unix:///path/to/socket")
        service, database = _path_of(parts, topology, shown)
        return cls(
            kind=kind,
            redacted=redact(url),
            topology=topology,
            seeds=(Endpoint(path=unquote(parts.path)),) if kind == "unix" else _places(places, topology, shown),
            service=service,
            db=_database(database, options.pop("db", None), topology, shown),
            username=unquote(username),
            password=unquote(password),
            sentinel_username=options.pop("sentinel_username", ""),
            sentinel_password=options.pop("sentinel_password", ""),
            tls=tuple(options.items()),
        )


def redact(url: str, *, user: bool = True) -> str:
    """Return the URL without its password and options, except for the database. Works for invalid URLs too.

    Args:
        url: the URL.
        user: show the name of the user. In an invalid URL, it may be a part of the password. So may a name without a password.
    """
    scheme, separator, rest = url.rpartition("://") if "://" not in url else url.partition("://")
    userinfo, at, place = rest.rpartition("@")  # the last one: a password may contain @
    name, _, password = userinfo.partition(":")
    if at and user and password and not re.search("[/?#]", name):
        at = f"{name}:{_SECRET}@"
    elif at:
        at = f"{_SECRET}@"
    place, _, query = place.partition("#")[0].partition("?")
    place = ",".join(_without_secret(each) for each in place.split(","))
    db = [value for name, value in parse_qsl(query) if name == "db" and value.isdigit()]
    return f"{scheme}{separator}{at}{place}" + (f"?db={db[0]}" if db else "")


def _without_secret(place: str) -> str:
    """Redact an invalid port: it may be part of a password with a missing @."""
    host, bracket, port = place.rpartition("]")  # the colons of an IPv6 address are no port's
    return host + bracket + re.sub(r":(?!\d{0,5}(/|$))[^/]*", f":{_SECRET}", port)


def _wrong_place(shown: str) -> UsageError:
    return UsageError(f"cannot read the server's URL {shown}: its host or its port (a number up to 65535) is wrong")


def _places(text: str, topology: Topology, shown: str) -> tuple[Endpoint, ...]:
    """``host:port``, or several of them with commas between where there may be several."""
    several = topology != "single"
    if not several and "," in text:
        raise UsageError(
            f"cannot read the server's URL {shown}: several hosts are for redis+cluster:// and redis+sentinel://"
        )
    found: list[Endpoint] = []
    for place in text.split(","):
        try:
            parts = urlsplit(f"//{place}")
            port = parts.port
        except ValueError:
            raise _wrong_place(shown) from None
        if several and not parts.hostname and len(text) > len(place):
            raise UsageError(f"cannot read the server's URL {shown}: one of its hosts is empty")
        default = _SENTINEL_PORT if topology == "sentinel" else _PORT
        found.append(Endpoint(unquote(parts.hostname or "localhost"), default if port is None else port))
    return tuple(dict.fromkeys(found))


def _path_of(parts: SplitResult, topology: Topology, shown: str) -> tuple[str, str]:
    """Parse the path: the service at the Sentinels, and the database."""
    path = "" if parts.scheme == "unix" else parts.path.strip("/")
    if topology != "sentinel":
        return "", path
    service, _, database = path.partition("/")
    if not service:
        raise UsageError(
            f"the server's URL {shown} names no service: write redis+sentinel://host:26379/SERVICE/DB, with the name that "
            "the Sentinels know the server by"
        )
    return unquote(service), database


def _options(query: str, kind: Kind, topology: Topology, shown: str) -> dict[str, str]:
    options = dict(parse_qsl(query, keep_blank_values=True))
    known = {"db"}
    known |= _TLS_OPTIONS if kind == "tls" else set()
    known |= _SENTINEL_OPTIONS if topology == "sentinel" else set()
    for name in options:
        if name not in known:
            raise UsageError(f"unknown URL option {name!r} in {shown}{_why_not(name, known, shown)}")
    if options.get("ssl_cert_reqs", "required") not in ("none", "optional", "required"):
        raise UsageError(f"the server's URL {shown}: ssl_cert_reqs must be required, optional or none")
    return options


def _why_not(name: str, known: set[str], shown: str) -> str:
    """The remedy for an option that a URL of this scheme does not have."""
    scheme = shown.partition("://")[0]
    if name in _TLS_OPTIONS:
        if scheme == "unix":
            return ": a unix socket has no TLS"
        return f": it is for TLS, so write {scheme.replace('redis', 'rediss', 1)}:// instead of {scheme}://"
    if name in _SENTINEL_OPTIONS:
        return f": it is for Sentinels, so write redis+sentinel:// instead of {scheme}://"
    return f"; {scheme}:// accepts: {', '.join(sorted(known))}. Options of redis-py's client do not belong into the URL"


def _database(text: str, option: str | None, topology: Topology, shown: str) -> int:
    text = text if option is None else option
    if not text:
        return 0
    if not (text.isascii() and text.isdigit()):
        raise UsageError(
            f"the server's URL {shown} names no database: {text!r} should be a number, as in redis://localhost:6379/0"
        )
    if topology == "cluster" and int(text):
        raise UsageError(f"the server's URL {shown} names database {int(text)}: a cluster has database 0 only")
    return int(text)


def checked_credentials(given: GivenCredentials | None, url: str | None) -> Credentials | None:
    """Check and wrap the `credentials` of a mesh.

    Raises:
        UsageError: `given` is neither a function nor a provider, or `url` has a user or a password, too.
    """
    if given is None:
        return None
    credentials = Credentials(given)
    if url is not None and _SCHEMES.get(
        url.partition(":")[0]
    ):  # a wrong one, or embedded:, is an error when it connects
        _check_only_one(Address.parse(url), credentials)
    return credentials


def _check_only_one(address: Address, credentials: Credentials | None) -> None:
    if credentials is not None and (address.username or address.password):
        raise UsageError(
            f"the server's URL {address.redacted} has a user or a password, and the mesh has credentials=: remove one of them"
        )


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """All fixed settings of a link. Times are in seconds.

    Attributes:
        url: the server.
        prefix: the mesh's prefix; names the connections when there is no `app`.
        app: the application's name, for CLIENT LIST.
        patience: how long a call waits for a reply, by default.
        connect_timeout: for the TCP (or TLS) handshake alone.
        socket_timeout: a connection without input for this time is lost, if a reply is pending.
        ping_every: how long a subscription's connection may be silent before a PING is sent.
        pong_timeout: how long after the PING the connection is lost, if no input arrives.
        slowest: the longest time that a reply may take: none of the timeouts above is shorter.
        source: the origin of the URL, for messages, for example ``WORQR_URL``.
        credentials: called for user and password at each new connection.
        address: the parsed `url`.

    Raises:
        UsageError: a value is invalid, or the URL has credentials as well.
    """

    url: str = field(repr=False)
    prefix: str = "worqr"
    app: str = ""
    patience: float = 30.0
    connect_timeout: float = 2.0
    socket_timeout: float = 5.0
    ping_every: float = 2.5
    pong_timeout: float = 2.0
    slowest: float = 0.0
    source: str = GIVEN
    credentials: Credentials | None = None
    address: Address = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "address", Address.parse(self.url))
        _check_only_one(self.address, self.credentials)
        for name in ("patience", "connect_timeout", "socket_timeout", "ping_every", "pong_timeout"):
            value: float = getattr(self, name)
            if not value > 0 or (math.isinf(value) and name != "patience"):
                raise UsageError(f"{name}={value!r}: it must be a positive number of seconds")
        for name in ("connect_timeout", "socket_timeout", "pong_timeout"):
            object.__setattr__(self, name, max(getattr(self, name), self.slowest))

    @property
    def clustered(self) -> bool:
        """The server is a cluster of several."""
        return self.address.topology == "cluster"

    @property
    def is_default(self) -> bool:
        """Return True if neither the application nor the environment has named a server."""
        return self.source == DEFAULT

    @property
    def can_be_started_here(self) -> bool:
        """``worqr server`` can be the server that is meant: on this machine, without password or TLS."""
        address = self.address
        secret = address.username or address.password or self.credentials
        return not secret and address.kind == "tcp" and address.topology == "single" and address.host in _LOCAL

    def client_name(self, purpose: str) -> str:
        """Return the name for CLIENT LIST: ``worqr:APP:PURPOSE``. The server accepts printable ASCII without blanks."""
        label = "".join(c if "!" <= c <= "~" else "-" for c in self.app or self.prefix)
        return f"worqr:{label}:{purpose}"
