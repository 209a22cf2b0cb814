"""Whether a request is allowed: by the rights of its `Viewer`, its host, its origin, its size.

The application decides who made a request. The routes in `worqr.dashboard.app` say which right each request needs.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, Final, Literal, cast, get_args
from urllib.parse import parse_qsl

from worqr.errors import UsageError, did_you_mean
from worqr.escaping import escape

Right = Literal[
    "look", "payloads", "cancel", "retry", "drop", "delete", "pause", "send", "schedules", "workers", "enqueue"
]
"""``look``: every page, with the beginning of payloads, redacted. ``payloads``: download a whole payload. ``cancel``, ``retry``,
``drop`` (delete dead-letter records), ``delete`` (all waiting tasks of a queue), ``pause`` (queues and lanes; also resume,
limits and weights), ``send`` (a value to a workflow, which may be a decision such as an approval), ``schedules`` (pause, run now,
other times), ``workers`` (quiet, drain, concurrency, evict) and ``enqueue`` (by hand, if the dashboard allows it): the acts.
"""
RIGHTS: Final[tuple[str, ...]] = get_args(Right)
_OPERATOR: Final = ("look", "cancel", "retry", "drop", "pause", "schedules")

Scope = MutableMapping[str, Any]
"""The scope of an ASGI request."""


@dataclass(frozen=True)
class Viewer:
    """A person who uses the dashboard, and what they may do.

    Args:
        name: The name, for the page and for the reasons of cancels and pauses.
        may: The rights; ``look`` is needed for every page. `reader`, `operator` and `admin` return the usual ones.
        queues: Patterns of queue names, such as ``"mail.*"``. For this viewer, other queues do not exist.

    Raises:
        UsageError: A right does not exist, or an argument has the wrong type.
    """

    name: str
    may: Collection[str] = ("look",)
    queues: Collection[str] = ("*",)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):  # pyright: ignore[reportUnnecessaryIsInstance] - applications may be untyped
            raise UsageError(f"Viewer(name=...) must be a str, not {self.name!r}")
        for field in ("may", "queues"):
            value = getattr(self, field)
            if isinstance(value, str) or not all(isinstance(each, str) for each in value):
                raise UsageError(f"Viewer({field}=...) must be a collection of str, such as ({value!r},)")
        for right in self.may:
            if right not in RIGHTS:
                hint = did_you_mean(right, RIGHTS, f"there are {', '.join(RIGHTS)}")
                raise UsageError(f"there is no right {right!r}; {hint}")

    def sees(self, queue: str) -> bool:
        """Return True if one of the patterns matches the name of the queue."""
        return any(fnmatchcase(queue, pattern) for pattern in self.queues)

    @property
    def sees_all(self) -> bool:
        """True if no queue is hidden from this viewer."""
        return "*" in self.queues

    def without(self, right: Right) -> Viewer:
        """Return the same viewer without a right."""
        return Viewer(self.name, tuple(each for each in self.may if each != right), self.queues)

    def without_acts(self) -> Viewer:
        """Return the same viewer with the right to look only."""
        return Viewer(self.name, ("look",) if "look" in self.may else (), self.queues)


Access = Callable[[Scope], "Viewer | Awaitable[Viewer | None] | None"]
"""The application's function: it returns the viewer who made the request, or None."""


def reader(name: str, queues: Collection[str] = ("*",)) -> Viewer:
    """Return a viewer who may look, and change nothing.

    Args:
        name: The name of the viewer.
        queues: As in `Viewer`.
    """
    return Viewer(name, ("look",), queues)


def operator(name: str, queues: Collection[str] = ("*",)) -> Viewer:
    """Return a viewer who may cancel, retry, drop, pause and resume, and who sees payloads redacted.

    Args:
        name: The name of the viewer.
        queues: As in `Viewer`.
    """
    return Viewer(name, _OPERATOR, queues)


def admin(name: str, queues: Collection[str] = ("*",)) -> Viewer:
    """Return a viewer with all rights, who may also download whole payloads.

    Args:
        name: The name of the viewer.
        queues: As in `Viewer`.
    """
    return Viewer(name, get_args(Right), queues)


THREE_WAYS: Final = """Dashboard(mesh, access=...) is required: without it, everyone could cancel your tasks. \
Pass a function of the request that returns a Viewer, or None. Three ways:

    # 1. The login of your application:
    async def access(scope):
        user = await my_login(scope)
        return operator(user.name) if user and user.is_staff else None

    # 2. A header that your proxy sets, if nothing but the proxy can reach this program:
    def access(scope):
        name = dict(scope["headers"]).get(b"x-forwarded-user", b"").decode()
        return reader(name) if name else None

    # 3. On your own machine only, for a while:
    def access(scope):
        return admin("me") if scope["client"][0] == "127.0.0.1" else None
"""


def checked_access(access: object) -> Access:
    """Return `access`, or raise the UsageError that shows what to pass."""
    if not callable(access):
        raise UsageError(THREE_WAYS)
    return cast("Access", access)


async def viewer_of(access: Access, scope: Scope) -> Viewer | None:
    """Call the application's `access`. Raises: what it raises; TypeError if it returns neither a `Viewer` nor None."""
    found = access(scope)
    if inspect.isawaitable(found):
        found = await found
    if found is not None and not isinstance(found, Viewer):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"access(scope) must return a worqr.dashboard.Viewer or None, not {type(found).__name__}")
    return found


# What a request must satisfy before any handler runs: its host, its origin, its size. Pure but for reading the body.
#
# A change needs proof that it comes from a page of the dashboard itself. Browsers send ``Sec-Fetch-Site`` to addresses that they
# trust (https, loopback); to others they send ``Origin`` only. Neither can be set by a foreign page. So no token and no session
# is needed.


MAX_BODY: Final = 64 * 1024
MAX_QUERY: Final = 8 * 1024
MAX_FIELDS: Final = 1100
"""Fields of a form: 1,000 ids, and some more."""
BY_TOKEN: Final = "worqr.by_token"  # noqa: S105 - a key
"""The key of a scope that says that a program made the request, with a token."""
HOW_TO_LOG_IN: Final = "worqr.how_to_log_in"
"""The key of a scope with a sentence for visitors without a login."""
LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "[::1]"})
FORM: Final = "application/x-www-form-urlencoded"

SECURITY_HEADERS: Final = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        b"form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)
"""On every response. With ``no-referrer``, a form would send ``Origin: null``, which could not be told from a foreign one."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]


class Refused(Exception):
    """The request is refused.

    Attributes:
        status: the status of the response.
        why: a sentence for the page.
        headers: further headers of the response.
    """

    def __init__(self, status: int, why: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(why)
        self.status: int = status
        self.why: str = why
        self.headers: dict[str, str] = headers or {}


class Disconnected(Exception):
    """The client has gone while it sent the request."""


def header(scope: MutableMapping[str, Any], name: bytes) -> str | None:
    """Return a header; None if it is missing. Raise Refused if it is there twice, because servers and proxies may differ."""
    found = [value for key, value in scope["headers"] if key.lower() == name]
    if len(found) > 1:
        raise Refused(400, f"The request has the header {name.decode()} {len(found)} times.")
    return found[0].decode("latin-1") if found else None


def host_name(host: str) -> str:
    """Return the name in a Host header, without the port."""
    name = host.strip().lower()
    if name.startswith("["):
        return name.partition("]")[0] + "]"
    return name.partition(":")[0].rstrip(".")


def address_of(text: str) -> IPv4Address | IPv6Address | None:
    """Return an IP address; None for a name. ``::ffff:10.0.0.1``, as a socket for IPv6 shows it, is an address of IPv4."""
    try:
        found = ip_address(text.strip("[]"))
    except ValueError:
        return None
    return (found.ipv4_mapped if isinstance(found, IPv6Address) else None) or found


def check_host(scope: MutableMapping[str, Any], hosts: Collection[str] | None) -> None:
    """Raise Refused if the browser names another host: a foreign page may have pointed its own name at this address.

    A program with a token may name any, because no page can add a token. The address at which the request arrived is accepted:
    only names can be pointed elsewhere.
    """
    if hosts is None or scope.get(BY_TOKEN):
        return
    host = host_name(header(scope, b"host") or "")
    if host in hosts:
        return
    address = address_of(host)
    if address is None or address != address_of((scope.get("server") or ("",))[0] or ""):
        shown = escape(host)[:100]
        raise Refused(
            421,
            f"This dashboard does not know the host name {shown!r} of your request. If it is the name of this dashboard, start "
            "it with --host NAME; a mounted dashboard takes hosts=(NAME,).",
        )


def check_origin(scope: MutableMapping[str, Any], origins: Collection[str]) -> None:
    """Raise Refused if the request comes neither from a page of the dashboard nor from a program with a token.

    A browser never adds a token by itself, so a foreign page cannot send a request that has one.
    """
    if scope.get(BY_TOKEN):
        return
    site = header(scope, b"sec-fetch-site")
    if site == "same-origin":
        return
    origin = header(scope, b"origin")
    if site is None and origin is not None:
        own = f"{scope.get('scheme', 'http')}://{header(scope, b'host') or ''}".lower()
        if origin.lower() in {own, *origins}:
            return
    raise Refused(
        403,
        "The request does not come from a page of this dashboard, so nothing was changed. Reload the page and try again. "
        "Behind a proxy that changes the host name, name the public origin: origins=('https://ops.example.org',).",
    )


def check_query(scope: MutableMapping[str, Any]) -> dict[str, str]:
    """Return the fields of the query; of a repeated one, the last."""
    query: bytes = scope.get("query_string", b"")
    if len(query) > MAX_QUERY:
        raise Refused(400, f"The query of the address is longer than {MAX_QUERY // 1024} KiB.")
    return dict(_parsed(query, "query"))


async def read_form(scope: MutableMapping[str, Any], receive: Receive) -> list[tuple[str, str]]:
    """Return the fields of the form in the body, in their order."""
    kind = (header(scope, b"content-type") or "").partition(";")[0].strip().lower()
    if kind != FORM:
        raise Refused(400, f"The body must be a form ({FORM}).")
    body = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > MAX_BODY:
            raise Refused(
                413,
                f"The form is larger than {MAX_BODY // 1024} KiB. Choose fewer tasks, or enqueue the payload by a program.",
            )
    return _parsed(bytes(body), "form")


def _parsed(data: bytes, what: str) -> list[tuple[str, str]]:
    try:
        return parse_qsl(
            data.decode("ascii"), keep_blank_values=True, encoding="utf-8", errors="strict", max_num_fields=MAX_FIELDS
        )
    except ValueError:
        raise Refused(400, f"The {what} is not valid: it must be ASCII with percent-encoded UTF-8.") from None
