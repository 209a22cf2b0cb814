"""What the server reports of itself: numbers for metrics, and everything for people. One short connection each time, which blocks
its thread.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from worqr.errors import Unavailable, WorqrError
from worqr.link.connection import Wire, open_connection
from worqr.link.endpoints import EndpointResolver
from worqr.link.server_errors import ConnectionLost, ErrorReply
from worqr.link.server_info import info_fields
from worqr.link.settings import LinkSettings

_SECTIONS = ("memory", "clients")
MOST_CLIENTS: Final = 2000
"""Connections that are listed. The list of more of them would occupy the server for milliseconds."""
_CLIENT_NAME: Final = re.compile(r"(?:^| )name=(\S*)")


@dataclass(frozen=True, slots=True)
class ServerStats:
    """Numbers of one server; None where the user may not ask, or the provider hides them.

    Attributes:
        memory: bytes that its data take.
        max_memory: the limit; 0: there is none.
        keeps_everything: it refuses writes when its memory is full, and evicts nothing.
        clients: open connections.
    """

    memory: int | None = None
    max_memory: int | None = None
    keeps_everything: bool | None = None
    clients: int | None = None


def read_server_stats(settings: LinkSettings, resolver: EndpointResolver, timeout: float) -> ServerStats:
    """Ask the server; see `Link.server_stats`."""
    wire = open_connection(settings, resolver, "metrics", timeout=timeout, replica=True)
    try:
        replies = wire.exchange([("INFO", section) for section in _SECTIONS])
    except ConnectionLost as error:
        raise Unavailable(str(error)) from error
    finally:
        wire.close()
    found: dict[str, str] = {}
    for reply in replies:
        found |= info_fields(reply)
    policy = found.get("maxmemory_policy", "")
    return ServerStats(
        memory=_number(found, "used_memory"),
        max_memory=_number(found, "maxmemory"),
        keeps_everything=policy == "noeviction" if policy else None,
        clients=_number(found, "connected_clients"),
    )


@dataclass(frozen=True, slots=True)
class ServerReport:
    """What one server reports of itself.

    Attributes:
        address: the server, without secrets.
        info: the fields of INFO.
        clients: the number of connections by their names; empty if they were not read.
        problem: why something is missing; empty if nothing is.
    """

    address: str
    info: Mapping[str, str] = field(default_factory=dict[str, str])
    clients: Mapping[str, int] = field(default_factory=dict[str, int])
    problem: str = ""


def read_server_report(settings: LinkSettings, resolver: EndpointResolver, timeout: float) -> ServerReport:
    """Ask one server for everything; see `Link.server_reports`. An error is a part of the report."""
    try:
        wire = open_connection(settings, resolver, "report", timeout=timeout, replica=True)
    except WorqrError as error:
        return ServerReport(resolver.name, problem=str(error))
    try:
        return _report(wire, resolver.name)
    except ConnectionLost as error:
        return ServerReport(resolver.name, problem=str(error))
    finally:
        wire.close()


def _report(wire: Wire, address: str) -> ServerReport:
    (reply,) = wire.exchange([("INFO",)])
    if isinstance(reply, ErrorReply):
        return ServerReport(address, problem=str(reply))
    info = info_fields(reply)
    if (_number(info, "connected_clients") or 0) > MOST_CLIENTS:
        return ServerReport(address, info)
    (listed,) = wire.exchange([("CLIENT", "LIST")])
    if isinstance(listed, ErrorReply):
        return ServerReport(address, info, problem=str(listed))
    names = (_CLIENT_NAME.search(line) for line in listed.decode("utf-8", "replace").splitlines())
    return ServerReport(address, info, Counter(name.group(1) for name in names if name is not None))


def _number(found: dict[str, str], name: str) -> int | None:
    value = found.get(name, "")
    return int(value) if value.isdecimal() else None
