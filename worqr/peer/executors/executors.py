"""`Executors`: chooses where a handler runs (on the loop, in threads, on an asyncio loop, in processes), and holds the limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import trio

from worqr.handler_checks import check_runs_in, is_async
from worqr.handler_options import AsyncRunsIn, RunsIn
from worqr.import_guard import refuse_while_importing
from worqr.peer.executors.threads import Threads
from worqr.peer.handlers import Handler, check_handler
from worqr.peer.scheduler import Pool

if TYPE_CHECKING:
    from worqr.peer.executors.asyncio_loop import AsyncioLoop
    from worqr.peer.executors.processes.pool import ProcessPool
    from worqr.peer.settings import PeerSettings


class Executors:
    """The places in which one peer runs handlers. A place that not every peer needs is made for the first handler that runs
    there.

    Set once: `threads`, and the settings of the others. Changed only in the loop: the rest. `turns` is called when a blocked
    asyncio loop turns again.

    Raises:
        UsageError: this is a worker process that imports a script without a guard.
    """

    def __init__(self, settings: PeerSettings, turns: Callable[[], object]) -> None:
        refuse_while_importing("join()")
        self.threads: Threads = Threads(settings.threads, settings.around_thread)
        self._settings = settings
        self._turns = turns
        self._thread_limit = Pool(settings.threads)
        self._process_limit = Pool(settings.processes)
        self._asyncio: AsyncioLoop | None = settings.asyncio_loop
        self._pool: ProcessPool | None = None
        self._nursery: trio.Nursery | None = None

    @property
    def children(self) -> int:
        """How many worker processes there are; from any thread."""
        return 0 if self._pool is None else len(self._pool.pids)

    async def run_forever(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Hold the places outside the loop until cancelled. Then end them, in bounded time."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                self._watch_asyncio()
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._nursery = None
            if self._asyncio is not None and self._asyncio is not self._settings.asyncio_loop:
                with trio.CancelScope(shield=True):
                    await self._asyncio.end()

    @property
    def asyncio_lag(self) -> float:
        """Seconds for which the asyncio loop of the handlers has had no turn; from any thread."""
        return 0.0 if self._asyncio is None else self._asyncio.lag

    @property
    def why_not_ready(self) -> str:
        """Why some handlers cannot run now; empty if all can. From any thread."""
        return "" if self._asyncio is None else self._asyncio.why_blocked

    def _watch_asyncio(self) -> None:
        """Watch the asyncio loop of this peer; that of an application is watched by its host."""
        if self._nursery is not None and self._asyncio is not None and not self._asyncio.owned_by_application:
            self._nursery.start_soon(self._asyncio.watch_forever, self._settings.block_limit, self._turns)

    def _asyncio_loop(self) -> AsyncioLoop:
        """Return the peer's asyncio loop. Only peers that need it import asyncio."""
        if self._asyncio is None:
            from worqr.peer.executors.asyncio_loop import AsyncioLoop

            self._asyncio = AsyncioLoop(self._settings.hosting)
            self._watch_asyncio()
        return self._asyncio

    def _processes(self) -> ProcessPool:
        """Return the peer's worker processes. None of them is started here."""
        if self._pool is None:
            from worqr.peer.executors.processes.pool import ProcessPool

            self._pool = ProcessPool(
                self._settings.processes,
                process_lifespan=self._settings.process_lifespan,
                around_thread=self._settings.around_thread,
                memory_limit=self._settings.process_memory,
                max_result=self._settings.max_payload,
                relocation=self._settings.relocation,
                tracing=self._settings.tracing,
            )
            assert self._nursery is not None
            self._nursery.start_soon(self._pool.run_forever)
        return self._pool

    def prepare(self, handler: Callable[[Any], object], runs_in: RunsIn | None) -> tuple[Handler, Pool | None]:
        """Return `handler` as an async function for a slot, and the limit of its simultaneous runs.

        Raises:
            UsageError: it cannot be called with a task, or does not run in such a place.
        """
        handler = getattr(handler, "__worqr_handler__", handler)
        check_runs_in(handler, runs_in)
        check_handler(handler)
        # middleware receives what the handler returned; without one, that is encoded where the handler ran
        max_result = None if self._settings.middleware else self._settings.max_payload
        match self.resolve_runs_in(handler, runs_in):
            case "process":
                return self._processes().prepare(handler), self._process_limit
            case "asyncio":
                loop = self._asyncio_loop()
                return loop.prepare(cast("Handler", handler), max_result), loop.pool
            case "loop":
                return cast("Handler", handler), None
            case "thread":
                return self.threads.prepare(handler, max_result), self._thread_limit

    def resolve_runs_in(self, handler: object, runs_in: RunsIn | None) -> RunsIn:
        """Return where `handler` runs in this peer."""
        return resolve_runs_in(handler, runs_in, self._settings.runs_in)

    def state_in(self, place: RunsIn) -> object:
        """Return the lifespan's state for handlers that run in `place`."""
        settings = self._settings
        return settings.asyncio_state if place == "asyncio" else settings.state


def resolve_runs_in(handler: object, runs_in: RunsIn | None, default: AsyncRunsIn) -> RunsIn:
    """Return where `handler` runs: as it declares, else by its kind.

    `default` is the mesh's choice for async handlers.
    """
    return runs_in or (default if is_async(handler) else "thread")
