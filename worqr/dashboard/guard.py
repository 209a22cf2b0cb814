"""What a request must satisfy before any handler runs: its host, its origin, its size. Pure but for reading the body.

A change needs proof that it comes from a page of the dashboard itself. Browsers send ``Sec-Fetch-Site`` to addresses that they
trust (https, loopback); to others they send ``Origin`` only. Neither can be set by a foreign page. So no token and no session
is needed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, MutableMapping
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, Final
from urllib.parse import parse_qsl

from worqr.escaping import escape

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
