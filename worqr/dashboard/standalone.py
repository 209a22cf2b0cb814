"""The dashboard as a program of its own: which doors an address needs, and Hypercorn on Trio to serve it."""

from __future__ import annotations

import logging
import re
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import trio
from hypercorn.config import Config
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio import serve as serve_asgi  # pyright: ignore[reportUnknownVariableType]

from worqr.dashboard.access import LOOPBACK, Viewer, admin, host_name, operator, reader
from worqr.dashboard.app import Dashboard
from worqr.dashboard.logins import (
    App,
    Network,
    OpenDoor,
    PasswordDoor,
    ProxyDoor,
    TokenDoor,
    TokenFileDoor,
    http1_only,
    read_passwords,
    read_tokens,
    viewer_at_door,
)
from worqr.dashboard.payloads import SECRET_NAMES, Mode
from worqr.errors import UsageError
from worqr.mesh import Mesh

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
