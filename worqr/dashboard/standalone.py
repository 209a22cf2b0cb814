"""The dashboard as a program of its own: which doors an address needs, and Hypercorn on Trio to serve it."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import trio
from hypercorn.config import Config
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio import serve as serve_asgi  # pyright: ignore[reportUnknownVariableType]
from starlette.responses import JSONResponse

from worqr.dashboard.access import Scope, Viewer, admin, operator, reader
from worqr.dashboard.app import Dashboard
from worqr.dashboard.doors import (
    VIEWER,
    App,
    Network,
    OpenDoor,
    PasswordDoor,
    ProxyDoor,
    Send,
    TokenDoor,
    http1_only,
    read_passwords,
    viewer_at_door,
    with_headers,
)
from worqr.dashboard.guard import BY_TOKEN, LOOPBACK, SECURITY_HEADERS, Receive, Refused, header, host_name
from worqr.dashboard.payloads import SECRET_NAMES, Mode
from worqr.errors import UsageError
from worqr.mesh import Mesh

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
