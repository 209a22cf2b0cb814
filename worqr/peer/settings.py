"""`PeerSettings`: the settings with which a peer is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from worqr.client.shard_directory import ShardDirectory
from worqr.cron import Definition
from worqr.embedded import Relocation
from worqr.handler_options import AsyncRunsIn
from worqr.peer.context import Context
from worqr.peer.lifespans import Middleware
from worqr.tracing import Tracing

if TYPE_CHECKING:
    from worqr.peer.executors.asyncio_loop import AsyncioLoop, Hosting

HISTORY_QUEUES: Final = 100
"""How many queues have a history, unless the mesh sets it. The history of a queue takes 230 KB of the server's memory."""

RunObserver = Callable[[Context, BaseException], None]
"""A test's callback: called for each run that did not return, with the handler's error or with the timeout."""


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """The arguments with which `Mesh.join` makes a peer. Times are in seconds. If `keepalive` is None, the peer never counts as
    dead.
    """

    prefix: str
    app: str
    concurrency: int | Literal["auto"]
    grace: float
    keepalive: float | None
    block_limit: float
    max_payload: int
    schedules: Mapping[str, Definition]
    stuck_after: float = 30.0
    history_queues: int = HISTORY_QUEUES
    """How many queues have a history; 0: none."""
    threads: int = 40
    processes: int = 1
    process_memory: int | None = None
    state: object = None
    why_idle: str = ""
    """Why this peer serves nothing unless the program calls `serve` or `work`; empty if it serves something."""
    middleware: tuple[Middleware, ...] = ()
    tracing: Tracing | None = None
    """Continues traces in worker processes. Its spans of runs are made by the first middleware."""
    around_thread: Callable[[], AbstractContextManager[object]] | None = None
    process_lifespan: Callable[[], AbstractContextManager[object]] | None = None
    sharding: ShardDirectory | None = None
    """The number of shards of each queue that has several; None: no queue has several."""
    observer: RunObserver | None = None
    """Set if a test drives this peer. Then schedules fire only when the test moves the clock."""
    relocation: Relocation | None = None
    """Where a test has moved the mesh to, for the worker processes."""
    runs_in: AsyncRunsIn = "loop"
    """Where async handlers run that do not declare it."""
    hosting: Hosting | None = None
    """Connects the asyncio loop of the peer to the mesh. None: that loop has no connection of its own."""
    asyncio_loop: AsyncioLoop | None = None
    """The loop of the application, or the loop in which the asyncio lifespan was entered. None: it is made when it is needed."""
    asyncio_state: object = None
    """The value that the asyncio lifespan yielded; without one, the same as `state`."""
