"""What a link must know before it does anything: the server's address and the timeouts.

Here: `LinkSettings` and the parsing of the server's URL, strict, so that a typing error is found before a byte is sent.
Not here: any I/O, and redis-py (`connection` turns an `Address` into a connection).

A password lives in `Address.password` and in `LinkSettings.url` and is printed by nothing: both are kept out of every
``repr``, and messages name `Address.redacted`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from worqr.errors import UsageError

_SCHEMES: Mapping[str, Literal["tcp", "tls", "unix"]] = {"redis": "tcp", "rediss": "tls", "unix": "unix"}
_TLS_OPTIONS = frozenset(
    {"ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname"}
)
_SECRET = "***"  # noqa: S105 - what stands in a message where the password was
_PORT = 6379


@dataclass(frozen=True, slots=True)
class Address:
    """Where the server is, and as whom we go there."""

    kind: Literal["tcp", "tls", "unix"]
    redacted: str
    host: str = ""
    port: int = 0
    path: str = ""
    db: int = 0
    username: str = ""
    password: str = field(default="", repr=False)
    tls: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, url: str) -> Address:
        """The parts of a ``redis://``, ``rediss://`` or ``unix://`` URL; UsageError names what is wrong with it."""
        shown = redact(url)
        try:
            parts = urlsplit(url)
            if "@" in parts.path + parts.query or parts.fragment:
                raise UsageError(
                    f"cannot read the server's URL {shown}: in a password write / as %2F, ? as %3F, # as %23, @ as %40"
                )
            port = parts.port
        except UsageError:
            raise
        except ValueError:  # its text may hold a piece of a password
            raise UsageError(
                f"cannot read the server's URL {shown}: its host or its port (a number up to 65535) is wrong"
            ) from None
        kind = _SCHEMES.get(parts.scheme)
        if kind is None:
            raise UsageError(f"cannot read the server's URL {shown}: it must begin with redis://, rediss:// or unix://")
        options = _options(parts.query, kind, shown)
        if kind == "unix" and not parts.path:
            raise UsageError(f"the server's URL {shown} names no socket: write unix:///path/to/socket")
        return cls(
            kind=kind,
            redacted=shown,
            host="" if kind == "unix" else unquote(parts.hostname or "localhost"),
            port=0 if kind == "unix" else (_PORT if port is None else port),
            path=unquote(parts.path) if kind == "unix" else "",
            db=_database(parts, options.pop("db", None), kind, shown),
            username=unquote(parts.username or ""),
            password=unquote(parts.password or ""),
            tls=tuple(options.items()),
        )


def redact(url: str) -> str:
    """The URL with no password in it and no option but the database, whatever shape it has (it may be a wrong one)."""
    scheme, separator, rest = url.rpartition("://") if "://" not in url else url.partition("://")
    userinfo, at, place = rest.rpartition("@")  # the last one: a password may contain @
    user, colon, _ = userinfo.partition(":")
    shown = re.split("[/?#]", user)[0] + (f":{_SECRET}" if colon else "") + at
    place, _, query = place.partition("#")[0].partition("?")
    if not at:
        host, bracket, port = place.rpartition("]")  # the colons of an IPv6 address are no port's
        place = host + bracket + re.sub(r":(?!\d*(/|$))[^/]*", f":{_SECRET}", port)  # no number: it may be a password
    db = [value for name, value in parse_qsl(query) if name == "db" and value.isdigit()]
    return f"{scheme}{separator}{shown}{place}" + (f"?db={db[0]}" if db else "")


def _options(query: str, kind: str, shown: str) -> dict[str, str]:
    options = dict(parse_qsl(query, keep_blank_values=True))
    known = {"db", *_TLS_OPTIONS} if kind == "tls" else {"db"}
    for name in options:
        if name not in known:
            raise UsageError(
                f"the server's URL {shown} has an option {name!r} that is not one of {', '.join(sorted(known))}"
            )
    if options.get("ssl_cert_reqs", "required") not in ("none", "optional", "required"):
        raise UsageError(f"the server's URL {shown}: ssl_cert_reqs must be required, optional or none")
    return options


def _database(parts: SplitResult, option: str | None, kind: str, shown: str) -> int:
    text = option if option is not None else ("" if kind == "unix" else parts.path.strip("/"))
    if not text:
        return 0
    if not (text.isascii() and text.isdigit()):
        raise UsageError(
            f"the server's URL {shown} names no database: {text!r} should be a number, as in redis://localhost:6379/0"
        )
    return int(text)


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Everything that is set once for a link. All times in seconds.

    Attributes:
        url: the server.
        prefix: the mesh's prefix; names our connections when there is no `app`.
        app: the application's name, for CLIENT LIST.
        patience: how long a call waits for an answer, by default.
        connect_timeout: for the TCP (or TLS) handshake alone.
        socket_timeout: a server that answers nothing for so long while it owes an answer is gone.
        ping_every: how long a subscription's connection may be silent before it is tried.
        pong_timeout: and how long after that until it is given up (any traffic counts as an answer).
        address: the parsed `url`.
    """

    url: str = field(repr=False)
    prefix: str = "worqr"
    app: str = ""
    patience: float = 30.0
    connect_timeout: float = 2.0
    socket_timeout: float = 5.0
    ping_every: float = 2.5
    pong_timeout: float = 2.0
    address: Address = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "address", Address.parse(self.url))
        for name in ("patience", "connect_timeout", "socket_timeout", "ping_every", "pong_timeout"):
            value: float = getattr(self, name)
            if not value > 0 or (math.isinf(value) and name != "patience"):
                raise UsageError(f"{name}={value!r}: it must be a positive number of seconds")

    def client_name(self, purpose: str) -> str:
        """What CLIENT LIST shows: ``worqr:APP:PURPOSE``. The server takes printable ASCII without blanks."""
        label = "".join(c if "!" <= c <= "~" else "-" for c in self.app or self.prefix)
        return f"worqr:{label}:{purpose}"
