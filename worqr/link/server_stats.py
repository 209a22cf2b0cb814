"""The memory and the clients of the server, from INFO, for metrics. One short connection each time, which blocks its thread."""

from __future__ import annotations

from dataclasses import dataclass

from worqr.errors import Unavailable
from worqr.link.connection import open_connection
from worqr.link.endpoints import EndpointResolver
from worqr.link.server_errors import ConnectionLost
from worqr.link.settings import LinkSettings

_SECTIONS = ("memory", "clients")


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
        if isinstance(reply, bytes):
            lines = (line.partition(":") for line in reply.decode("utf-8", "replace").splitlines())
            found |= {name: value.strip() for name, _, value in lines}
    policy = found.get("maxmemory_policy", "")
    return ServerStats(
        memory=_number(found, "used_memory"),
        max_memory=_number(found, "maxmemory"),
        keeps_everything=policy == "noeviction" if policy else None,
        clients=_number(found, "connected_clients"),
    )


def _number(found: dict[str, str], name: str) -> int | None:
    value = found.get(name, "")
    return int(value) if value.isdecimal() else None
