"""The dashboard as a program of its own: the doors that its address needs, in front of Hypercorn on Trio."""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import logging
import re
import secrets
import signal
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http.cookies import CookieError, SimpleCookie
from ipaddress import ip_address
from typing import Any, Final, Literal
from urllib.parse import parse_qs, urlsplit

import anyio
import trio
from hypercorn.config import Config
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio import serve as serve_asgi  # pyright: ignore[reportUnknownVariableType]
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse

from worqr.dashboard.access import (
    BY_TOKEN,
    HOW_TO_LOG_IN,
    LOOPBACK,
    SECURITY_HEADERS,
    Message,
    Receive,
    Refused,
    Scope,
    Viewer,
    address_of,
    admin,
    check_host,
    header,
    host_name,
    operator,
    reader,
)
from worqr.dashboard.app import Dashboard
from worqr.dashboard.payloads import SECRET_NAMES, Mode
from worqr.errors import UsageError
from worqr.mesh import Mesh

# Doors of the standalone dashboard: ASGI applications in front of it that find out who made a request.
#
# A door puts the viewer into the scope, where `viewer_at_door` finds it. In an application of your own, ``access=`` does this.


Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
MakeViewer = Callable[[str], Viewer]
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

VIEWER: Final = "worqr.viewer"
HOW: Final = (
    "The address that `worqr dashboard` prints logs you in. It works once, and for a day in the same browser. "
    "For a new one, start the dashboard again."
)
COOKIE: Final = "worqr_dashboard"
COOKIE_LASTS: Final = 86400
"""Seconds. Cookies know no ports, so each program on the same host name that the browser visits gets this one, too."""
WRONG_PASSWORD_TAKES: Final = 1.0
MOST_ATTEMPTS: Final = 5
"""Passwords of one address that are checked at the same time; further requests from there get status 429."""
KNOWN: Final = 256
"""Passwords that were right, of which the door remembers a keyed hash, because scrypt takes 50 ms."""
NETWORK_BITS: Final = 64
"""Addresses of IPv6 that one visitor may have are those with the same first bits."""
_SCRYPT: Final = {"n": 2**14, "r": 8, "p": 1}


def viewer_at_door(scope: Scope) -> Viewer | None:
    """Return the viewer that a door has found: the ``access`` of the standalone dashboard."""
    viewer: Viewer | None = scope.get(VIEWER)
    return viewer


def http1_only(app: App) -> App:
    """Return the application behind a door that refuses HTTP/2, and to change to it.

    In a connection that has changed to HTTP/2, a proxy sees no more requests. So it neither checks their paths nor sets the
    header that names the viewer.
    """

    async def door(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _is_http2(scope):
            why = "This dashboard speaks HTTP/1.1 only. Let the proxy not forward the header Upgrade.\n"
            await PlainTextResponse(why, 505)(scope, receive, with_headers(send, SECURITY_HEADERS))
        else:
            await app(scope, receive, send)

    return door


def _is_http2(scope: Scope) -> bool:
    if not scope.get("http_version", "1.1").startswith("1"):
        return True
    return any(name.lower() == b"upgrade" and b"h2" in value.lower() for name, value in scope["headers"])


class TokenDoor:
    """Lets in who has the one-time token of this process, and afterwards the cookie that it was swapped for.

    Args:
        app: the dashboard.
        viewer: who comes through this door.
        hosts: the host names that are accepted.
        place: the address and the path of the dashboard. Cookies know no ports, so those of two dashboards have two names.
    """

    def __init__(self, app: App, viewer: Viewer, hosts: frozenset[str], place: str = "") -> None:
        self._app = app
        self._viewer = viewer
        self._hosts = hosts
        self._key = secrets.token_bytes(32)
        self._token: str | None = secrets.token_urlsafe(16)
        # The machine, too: dashboards of two machines may be forwarded to ports of a third one.
        self._cookie = f"{COOKIE}_{hashlib.sha256(f'{socket.gethostname()} {place}'.encode()).hexdigest()[:8]}"

    @property
    def token(self) -> str:
        """The token for the first visit."""
        return self._token or ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "http":
            root = scope.get("root_path", "")
            if scope["path"] in {"/login", f"{root}/login"} and (response := self._login(scope)) is not None:
                await response(scope, receive, with_headers(send, SECURITY_HEADERS))
                return
            if self._has_cookie(scope):
                scope[VIEWER] = self._viewer
            else:
                scope[HOW_TO_LOG_IN] = HOW
        await self._app(scope, receive, send)

    def _login(self, scope: Scope) -> RedirectResponse | None:
        """Swap the token for a cookie; None for a wrong token, so that the page says what is missing."""
        try:
            check_host(scope, self._hosts)
        except Refused:
            return None
        given = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [""])[0]
        if self._token is None or not hmac.compare_digest(given.encode(), self._token.encode()):
            return None
        self._token = None
        response = RedirectResponse(f"{scope.get('root_path', '')}/", 303)
        value = self._signed(str(int(time.time()) + COOKIE_LASTS))
        response.set_cookie(self._cookie, value, max_age=COOKIE_LASTS, httponly=True, samesite="strict")
        return response

    def _has_cookie(self, scope: Scope) -> bool:
        try:
            cookies = SimpleCookie(header(scope, b"cookie") or "")
        except (CookieError, Refused):
            return False
        value = cookies[self._cookie].value if self._cookie in cookies else ""
        until, _, _ = value.partition(".")
        # The signature first: what is signed here is a short number.
        return hmac.compare_digest(value.encode(), self._signed(until).encode()) and int(until) > time.time()

    def _signed(self, until: str) -> str:
        return f"{until}.{hmac.new(self._key, until.encode(), 'sha256').hexdigest()}"


class PasswordDoor:
    """Asks for a name and a password, as browsers know it (HTTP Basic).

    A password that was right before is let in at once. All others are counted by the address that they come from, so that
    wrong passwords from one address do not keep out people at others.

    Args:
        app: the dashboard.
        passwords: hashes by name, as `hash_password` makes them.
        viewer: makes the viewer of a name.
        proxies: the addresses of proxies, which add the address of their client to ``X-Forwarded-For``.
    """

    def __init__(
        self, app: App, passwords: Mapping[str, str], viewer: MakeViewer, proxies: Sequence[Network] = ()
    ) -> None:
        self._app = app
        self._passwords = dict(passwords)
        self._viewer = viewer
        self._proxies = tuple(map(_plain_network, proxies))
        self._key = secrets.token_bytes(32)
        self._known: dict[bytes, None] = {}
        self._attempts: Counter[str] = Counter()
        """By address. Those that are checked at this moment only, so it has no more entries than there are connections."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = _basic(scope)
        if given is not None:
            mark = hmac.new(self._key, repr(given).encode(), "sha256").digest()
            right = mark in self._known
            if not right:
                visitor = _visitor(scope, self._proxies)
                if self._attempts[visitor] >= MOST_ATTEMPTS:
                    busy = PlainTextResponse("Too many passwords at once: try again in a second.\n", 429)
                    await busy(scope, receive, with_headers(send, SECURITY_HEADERS))
                    return
                right = await self._is_right(*given, mark, visitor)
            if right:
                scope[VIEWER] = self._viewer(given[0])
        challenge = ((b"www-authenticate", b'Basic realm="worqr", charset="UTF-8"'),)
        await self._app(scope, receive, with_headers(send, challenge, status=401))

    async def _is_right(self, name: str, password: str, mark: bytes, visitor: str) -> bool:
        self._attempts[visitor] += 1
        try:
            stored = self._passwords.get(name, _NO_PASSWORD)
            right = await anyio.to_thread.run_sync(check_password, password, stored)
            if right and name in self._passwords:
                if len(self._known) >= KNOWN:
                    del self._known[next(iter(self._known))]
                self._known[mark] = None
                return True
            await anyio.sleep(WRONG_PASSWORD_TAKES)
            return False
        finally:
            self._attempts[visitor] -= 1
            if not self._attempts[visitor]:
                del self._attempts[visitor]


class ProxyDoor:
    """Believes the name in a header, if the request comes from the proxy.

    Args:
        app: the dashboard.
        name: the header.
        proxies: the addresses of the proxy.
        viewer: makes the viewer of a name.
    """

    def __init__(self, app: App, name: str, proxies: Sequence[Network], viewer: MakeViewer) -> None:
        self._app = app
        self._name = name.lower().encode("latin-1")
        self._proxies = tuple(map(_plain_network, proxies))
        self._viewer = viewer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "http" and _is_of(self._proxies, address_of(_peer(scope))):
            try:
                name = header(scope, self._name)
            except Refused:
                name = None
            if name:
                scope[VIEWER] = self._viewer(name)
        await self._app(scope, receive, send)


def _peer(scope: Scope) -> str:
    """Return the address of the program that has connected."""
    return (scope.get("client") or ("", 0))[0] or ""


def _plain_network(network: Network) -> Network:
    """Return the network of IPv4 that a network of IPv6 stands for, as ``::ffff:10.0.0.0/104`` does; any other as it is."""
    mapped = network.network_address.ipv4_mapped if isinstance(network, ipaddress.IPv6Network) else None
    return (
        network if mapped is None or network.prefixlen < 96 else ipaddress.ip_network((mapped, network.prefixlen - 96))
    )


def _is_of(networks: Sequence[Network], address: ipaddress.IPv4Address | ipaddress.IPv6Address | None) -> bool:
    return address is not None and any(address in network for network in networks)


def _visitor(scope: Scope, proxies: Sequence[Network]) -> str:
    """Return where a request comes from: an address, or a network of IPv6.

    Of the addresses in ``X-Forwarded-For``, proxies that are trusted have added the last ones. The visitor's is the last one that
    is not theirs; what stands before it may be anything.
    """
    peer = _peer(scope)
    address = address_of(peer)
    if _is_of(proxies, address):
        forwarded = b",".join(value for name, value in scope["headers"] if name.lower() == b"x-forwarded-for")
        for text in reversed(forwarded.decode("latin-1").split(",")):
            found = address_of(text.strip())
            if found is None:
                break
            address = found
            if not _is_of(proxies, found):
                break
    if isinstance(address, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((int(address), NETWORK_BITS), strict=False))
    return peer if address is None else str(address)


class OpenDoor:
    """Lets in everyone, as the same viewer."""

    def __init__(self, app: App, viewer: Viewer) -> None:
        self._app = app
        self._viewer = viewer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        scope[VIEWER] = self._viewer
        await self._app(scope, receive, send)


def hash_password(password: str) -> str:
    """Return a salted scrypt hash: ``scrypt$SALT$HASH``, both in base64."""
    salt = secrets.token_bytes(16)
    made = hashlib.scrypt(password.encode(), salt=salt, **_SCRYPT)
    return f"scrypt${base64.b64encode(salt).decode()}${base64.b64encode(made).decode()}"


_NO_PASSWORD: Final = f"scrypt${base64.b64encode(bytes(16)).decode()}${base64.b64encode(bytes(64)).decode()}"
"""Checked for names that do not exist, so that they take as long as others."""


def check_password(password: str, stored: str) -> bool:
    """Return True if the hash is that of the password."""
    _, salt, made = stored.split("$")
    found = hashlib.scrypt(password.encode(), salt=base64.b64decode(salt), **_SCRYPT)
    return hmac.compare_digest(found, base64.b64decode(made))


def read_passwords(text: str) -> dict[str, str]:
    """Return the names and hashes of a password file.

    Raises:
        UsageError: a line is not ``NAME:scrypt$SALT$HASH``, a name is there twice, or there is no line.
    """
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, _, stored = line.strip().partition(":")
        parts = stored.split("$")
        if not name or len(parts) != 3 or parts[0] != "scrypt" or not all(map(_is_base64, parts[1:])):
            raise UsageError(
                f"line {number} of the password file is not NAME:HASH; make one with `worqr dashboard --hash NAME`"
            )
        if name in found:
            raise UsageError(
                f"line {number} of the password file has the name {name!r} a second time; remove one of them"
            )
        found[name] = stored
    if not found:
        raise UsageError("the password file is empty; make a line for it with `worqr dashboard --hash NAME`")
    return found


def _is_base64(text: str) -> bool:
    try:
        return len(base64.b64decode(text, validate=True)) >= 16
    except ValueError:
        return False


def _basic(scope: Scope) -> tuple[str, str] | None:
    try:
        kind, _, rest = (header(scope, b"authorization") or "").partition(" ")
        name, colon, password = base64.b64decode(rest, validate=True).decode("utf-8").partition(":")
    except (Refused, ValueError):
        return None
    return (name, password) if kind.lower() == "basic" and colon else None


def with_headers(send: Send, more: Sequence[tuple[bytes, bytes]], *, status: int | None = None) -> Send:
    """Return `send` with more headers on the response; with `status`, on responses with this status only."""

    async def sending(message: Any) -> None:
        if message["type"] == "http.response.start" and status in (None, message["status"]):
            message = {**message, "headers": [*message.get("headers", ()), *more]}
        await send(message)

    return sending


# Tokens for programs, such as Prometheus, KEDA and scripts: `TokenFileDoor` stands in front of the dashboard's other doors.
#
# A program sends ``Authorization: Bearer TOKEN``. The file has a hash of each token, and what its program may do. Tokens are
# made here, from 256 random bits. So a fast hash without salt is enough, and guessing needs no brake.


_LINE: Final = re.compile(r"(?P<name>[^:]+):(?P<rights>[a-z]+):sha256\$(?P<hash>[0-9a-f]{64})")


class TokenFileDoor:
    """Lets in programs by their token, and sends all other requests on to the next door.

    Args:
        app: the dashboard.
        door: the next door.
        tokens: viewers by the hash of their token, as `read_tokens` returns them.
    """

    def __init__(self, app: App, door: App, tokens: Mapping[str, Viewer]) -> None:
        self._app = app
        self._door = door
        self._tokens = dict(tokens)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        token = _bearer(scope) if scope["type"] == "http" else None
        if token is None:
            await self._door(scope, receive, send)
        elif (viewer := self._viewer(token)) is not None:
            scope[VIEWER], scope[BY_TOKEN] = viewer, True
            await self._app(scope, receive, send)
        else:
            why = "The token is not in the token file. Make one: worqr dashboard --new-token NAME --token-file FILE"
            refusal = JSONResponse({"error": why}, 401, {"www-authenticate": 'Bearer realm="worqr"'})
            await refusal(scope, receive, with_headers(send, SECURITY_HEADERS))

    def _viewer(self, token: str) -> Viewer | None:
        given, found = hash_token(token), None
        for known, viewer in self._tokens.items():  # all of them, so that the time tells nothing
            if hmac.compare_digest(known, given):
                found = viewer
        return found


def new_token() -> str:
    """Return a token of 256 random bits."""
    return secrets.token_urlsafe(32)


def hash_token(token: str) -> str:
    """Return the hash of a token, in hexadecimal digits."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def token_line(name: str, rights: str, token: str) -> str:
    """Return the line of a token file for a token."""
    return f"{name}:{rights}:sha256${hash_token(token)}"


def read_tokens(text: str, viewers: Mapping[str, Callable[[str], Viewer]]) -> dict[str, Viewer]:
    """Return the viewers of a token file, by the hashes of their tokens.

    Args:
        text: the file.
        viewers: makes a viewer of a name, by the name of its rights.

    Raises:
        UsageError: a line is not ``NAME:RIGHTS:sha256$HASH``, a token is there twice, or there is no line.
    """
    found: dict[str, Viewer] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None or match["rights"] not in viewers:
            raise UsageError(
                f"line {number} of the token file is not NAME:RIGHTS:sha256$HASH, with the rights {', '.join(viewers)}; "
                "make one with `worqr dashboard --new-token NAME --token-file FILE`"
            )
        if match["hash"] in found:
            raise UsageError(f"line {number} of the token file has the same token as a line before; remove one of them")
        found[match["hash"]] = viewers[match["rights"]](match["name"])
    if not found:
        raise UsageError(
            "the token file is empty; make a line for it with `worqr dashboard --new-token NAME --token-file FILE`"
        )
    return found


def _bearer(scope: Scope) -> str | None:
    """Return the token of a request; None if it has none."""
    try:
        kind, _, token = (header(scope, b"authorization") or "").partition(" ")
    except Refused:
        return None
    return token.strip() if kind.lower() == "bearer" else None


STOPS_WITHIN: Final = 3.0
_ROOT_PATH: Final = re.compile(r"(?:/[A-Za-z0-9_.~-]+)*")
Rights = Literal["reader", "operator", "admin"]
VIEWERS: Final[dict[str, Callable[[str], Viewer]]] = {"reader": reader, "operator": operator, "admin": admin}


@dataclass(frozen=True, slots=True)
class Settings:
    """How the dashboard is served.

    Attributes:
        host: the address to listen at.
        port: its port.
        hosts: further host names that requests may have, besides those of this machine and of `origins`.
        origins: public origins, as for `Dashboard`.
        passwords: the text of a password file.
        trust_header: the header in which a proxy names the viewer.
        proxies: the addresses of that proxy; with `passwords`, of a proxy that adds its client to ``X-Forwarded-For``.
        tokens: the text of a token file, for programs.
        open_to_all: no login; viewers may only look.
        rights: what viewers may do; on loopback with a token, all.
        read_only: viewers may only look.
        allow_enqueue: as for `Dashboard`.
        root_path: the path below which a proxy serves it, such as /worqr.
        payloads, redact, trace_url: as for `Dashboard`. An empty `redact` is the default.
    """

    host: str = "127.0.0.1"
    port: int = 9090
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    passwords: str | None = None
    trust_header: str = ""
    proxies: tuple[Network, ...] = ()
    tokens: str | None = None
    open_to_all: bool = False
    rights: Rights = "operator"
    read_only: bool = False
    allow_enqueue: bool = False
    root_path: str = ""
    payloads: Mode = "redacted"
    redact: str = ""
    trace_url: str = ""

    @property
    def is_loopback(self) -> bool:
        """True if only programs on this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return False


def check_settings(settings: Settings) -> None:
    """Raise UsageError if the address would be open to others without a login, or the settings contradict each other."""
    doors = [settings.passwords is not None, bool(settings.trust_header), settings.open_to_all]
    if sum(doors) > 1:
        raise UsageError("choose one of --password-file, --trust-header and --i-know-it-is-open")
    if not _ROOT_PATH.fullmatch(settings.root_path):
        raise UsageError(
            f"--root-path must be a path such as /worqr, without a slash at its end, got {settings.root_path!r}"
        )
    if settings.trust_header and not settings.proxies:
        raise UsageError(
            "--trust-header and --trusted-proxy belong together: name the addresses of the proxy whose header is true"
        )
    if settings.proxies and not settings.trust_header and settings.passwords is None:
        raise UsageError(
            "--trusted-proxy belongs together with --trust-header or --password-file: name the header that the proxy sets, "
            "or the file of passwords"
        )
    if not settings.is_loopback and not any(doors) and settings.tokens is None:
        raise UsageError(
            f"{settings.host} can be reached from other machines, so viewers must log in. Add --password-file FILE (made with "
            "`worqr dashboard --hash NAME`), or --trust-header NAME --trusted-proxy ADDRESS behind a proxy that knows them. For "
            "programs only: --token-file FILE. "
            "For a page that everyone may read, and where nothing can be changed: --i-know-it-is-open"
        )


def build(mesh: Mesh[Any], settings: Settings) -> tuple[App, str]:
    """Return the application behind its door, and the address for a browser.

    Raises:
        UsageError: see `check_settings`; or the password file is not valid.
    """
    check_settings(settings)
    read_only = settings.read_only or settings.open_to_all
    hosts = _hosts_of(settings)
    inner = Dashboard(
        mesh,
        access=viewer_at_door,
        hosts=hosts,
        origins=settings.origins,
        read_only=read_only,
        allow_enqueue=settings.allow_enqueue,
        payloads=settings.payloads,
        redact=settings.redact or SECRET_NAMES,
        trace_url=settings.trace_url,
    )
    door, login = _door(inner, settings, hosts)
    if settings.tokens is not None:
        door = TokenFileDoor(inner, door, read_tokens(settings.tokens, VIEWERS))
    return http1_only(door), f"http://{settings.host}:{settings.port}{settings.root_path}/{login}"


def _hosts_of(settings: Settings) -> frozenset[str]:
    """Return the host names that requests may have.

    They are checked at each address and each door. A page of a foreign name that points here could act for a proxy on this
    machine, read what everyone may read, or guess passwords from inside a network.
    """
    names = [settings.host, *settings.hosts, *(urlsplit(origin).netloc for origin in settings.origins)]
    bracketed = [f"[{name}]" if name.count(":") > 1 and not name.startswith("[") else name for name in names]
    return frozenset({*LOOPBACK, *map(host_name, bracketed)} - {""})


def _door(inner: App, settings: Settings, hosts: frozenset[str]) -> tuple[App, str]:
    """Return the dashboard behind its door for people, and the rest of the address of their first visit."""
    viewers = VIEWERS[settings.rights]
    if settings.passwords is not None:
        return PasswordDoor(inner, read_passwords(settings.passwords), viewers, settings.proxies), ""
    if settings.trust_header:
        return ProxyDoor(inner, settings.trust_header, settings.proxies, viewers), ""
    if settings.open_to_all:
        return OpenDoor(inner, reader("everyone")), ""
    if not settings.is_loopback:
        return inner, ""  # for programs with tokens only
    place = f"{settings.host}:{settings.port}{settings.root_path}"
    door = TokenDoor(inner, admin("you"), hosts, place)
    return door, f"login?token={door.token}"


async def serve(app: App, settings: Settings, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    """Serve until SIGINT or SIGTERM, or until it is cancelled.

    Raises:
        OSError: the address is in use.
    """
    _check_free(settings)
    _keep_to_http1()
    config = Config()
    config.bind = [f"{settings.host}:{settings.port}"]
    config.root_path = settings.root_path
    config.accesslog = None
    config.errorlog = logging.getLogger("worqr.dashboard.http")
    config.include_server_header = False
    config.graceful_timeout = STOPS_WITHIN
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:

        async def stopped() -> None:
            await anext(signals)

        async with trio.open_nursery() as nursery:
            await nursery.start(partial(serve_asgi, app, config, shutdown_trigger=stopped))  # type: ignore[arg-type]
            task_status.started()


def _keep_to_http1() -> None:
    """Let Hypercorn, in this process, answer a request to change to HTTP/2 by HTTP/1.1. It has no setting for it.

    `http1_only` refuses what comes through nevertheless.
    """

    async def stay(_protocol: H11Protocol, _request: object) -> None:
        await trio.lowlevel.checkpoint()

    H11Protocol._check_protocol = stay  # type: ignore[method-assign, assignment]  # pyright: ignore[reportPrivateUsage]


def _check_free(settings: Settings) -> None:
    """Raise OSError if the address cannot be used, before Hypercorn does, which would leave its socket open."""
    host = settings.host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    socket.create_server((host, settings.port), family=family).close()
