"""What a peer is told when it is made."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from worqr.cron import Definition
from worqr.peer.context import Context
from worqr.peer.options import AsyncRunsIn
from worqr.peer.runners import Hosting, Middleware
from worqr.sharding import Sharding

if TYPE_CHECKING:
    from worqr.peer.aio import AsyncioLoop

Onlooker = Callable[[Context, BaseException], None]
"""A test, which is told of each run that was not simply done: of what its handler raised, or that it took too long."""


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """What `Mesh.join` knows when it makes a peer. Seconds; keepalive None: never swept by others."""

    prefix: str
    app: str
    concurrency: int | Literal["auto"]
    grace: float
    keepalive: float | None
    block_limit: float
    max_payload: int
    schedules: Mapping[str, Definition]
    stuck_after: float = 30.0
    threads: int = 40
    processes: int = 1
    process_memory: int | None = None
    state: object = None
    nothing: str = ""
    """Why this peer would serve nothing by itself, if so."""
    middleware: tuple[Middleware, ...] = ()
    around_thread: Callable[[], AbstractContextManager[object]] | None = None
    process_lifespan: Callable[[], AbstractContextManager[object]] | None = None
    sharding: Sharding | None = None
    """Which queues have several shards; None: none has."""
    onlooker: Onlooker | None = None
    """A test looks on: then schedules fire when it says so, not by themselves."""
    runs_in: AsyncRunsIn = "loop"
    """Where async handlers run that have no place of their own."""
    hosting: Hosting | None = None
    """Connects the asyncio loop of the peer to the mesh; None: that loop has no connection by itself."""
    asyncio_loop: AsyncioLoop | None = None
    """The loop of the application, or the loop in which the lifespan for asyncio was entered; None: made when it is needed."""
    asyncio_state: object = None
    """What that lifespan yielded; without one, the same as `state`."""


def usable_cpus() -> int:
    """How many CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
