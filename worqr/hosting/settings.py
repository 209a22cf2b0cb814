"""The settings of the workers of a mesh, and their checks.

`worqr.Mesh` is a `WorkerSettings`: its public attributes are these settings. Those of its connections are in
`worqr.client.settings`; the options of one join are in `worqr.peer.options`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Generic, TypeVar

from worqr.errors import UsageError
from worqr.handler_options import RUNS_IN, AsyncRunsIn
from worqr.peer.lifespans import check_lifespan
from worqr.peer.middleware import Middleware, checked_middleware
from worqr.validation import Seconds, seconds

S = TypeVar("S")


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
    ) -> None:
        self.block_limit = seconds(block_limit, "block_limit", positive=True)
        self.lifespan, self.asyncio_lifespan = lifespan, asyncio_lifespan
        self.middleware = checked_middleware(middleware)
        self.runs_in = _checked_runs_in(runs_in)
        self.around_thread, self.process_lifespan = around_thread, process_lifespan
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
