"""The settings of the workers of a mesh, and their checks.

`worqr.Mesh` is a `WorkerSettings`: its public attributes are these settings. Those of its connections are in
`worqr.client.settings`; the options of one join are in `worqr.peer.options`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Final, Generic, TypeVar

from worqr.errors import UsageError
from worqr.handler_options import RUNS_IN, AsyncRunsIn
from worqr.peer.lifespans import check_lifespan
from worqr.peer.middleware import Middleware, checked_middleware
from worqr.validation import Seconds, seconds

S = TypeVar("S")

MAX_HISTORIES: Final = 1000
"""The largest `history_queues`: that many take 230 MB of the server's memory."""


class WorkerSettings(Generic[S]):
    """What surrounds the handlers of a mesh in each of its workers."""

    block_limit: float
    """Seconds that a handler may block the event loop."""
    lifespan: Callable[[], AbstractAsyncContextManager[S]] | None
    """The async context manager around each `join`."""
    asyncio_lifespan: Callable[[], AbstractAsyncContextManager[object]] | None
    """The async context manager around each `join`, on the asyncio loop of handlers."""
    middleware: tuple[Middleware, ...]
    """The functions around every run, the first outermost."""
    runs_in: AsyncRunsIn | None
    """Where ``async def`` handlers run by default; None: on the loop of the program that has joined."""
    around_thread: Callable[[], AbstractContextManager[object]] | None
    """The context manager around each call of a plain function."""
    process_lifespan: Callable[[], AbstractContextManager[object]] | None
    """The context manager around the life of each process."""
    history_queues: int
    """How many queues have a history; 0: none."""

    def __init__(
        self,
        *,
        block_limit: Seconds,
        lifespan: Callable[[], AbstractAsyncContextManager[S]] | None,
        asyncio_lifespan: Callable[[], AbstractAsyncContextManager[object]] | None,
        middleware: Collection[Middleware],
        runs_in: AsyncRunsIn | None,
        around_thread: Callable[[], AbstractContextManager[object]] | None,
        process_lifespan: Callable[[], AbstractContextManager[object]] | None,
        history: bool,
        history_queues: int,
    ) -> None:
        self.block_limit = seconds(block_limit, "block_limit", positive=True)
        self.lifespan, self.asyncio_lifespan = lifespan, asyncio_lifespan
        self.middleware = checked_middleware(middleware)
        self.runs_in = _checked_runs_in(runs_in)
        self.around_thread, self.process_lifespan = around_thread, process_lifespan
        self.history_queues = _checked_history(history, history_queues)
        for name in ("lifespan", "asyncio_lifespan", "around_thread", "process_lifespan"):
            check_lifespan(name, getattr(self, name))


def _checked_runs_in(value: object) -> AsyncRunsIn | None:
    """Return `value` if all async handlers of a mesh may run there, else raise UsageError."""
    if value is None or value in ("loop", "asyncio"):
        return value
    hint = ""
    if value in RUNS_IN:
        hint = f"; it is the place of async handlers: for a plain function say runs_in={value!r} in @mesh.task"
    raise UsageError(f"runs_in of a mesh must be 'loop' or 'asyncio', not {value!r}{hint}")


def _checked_history(history: object, queues: object) -> int:
    """Return how many queues have a history, or raise UsageError."""
    if not isinstance(history, bool):
        raise UsageError(f"history must be True or False, not {history!r}; history_queues=... says for how many queues")
    if isinstance(queues, bool) or not isinstance(queues, int) or not 0 <= queues <= MAX_HISTORIES:
        raise UsageError(f"history_queues must be a whole number from 0 (none) to {MAX_HISTORIES}, not {queues!r}")
    return queues if history else 0
