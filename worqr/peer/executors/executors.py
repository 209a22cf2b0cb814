"""`Executors`: chooses where a handler runs (on the loop, in threads, on an asyncio loop, in processes), and holds the limits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import trio

from worqr.child_processes import EndForks, refuse_while_importing
from worqr.handler_options import AsyncRunsIn, RunsIn, check_runs_in, is_async
from worqr.peer.executors.offloaded import (
    Handler,
    OffloadedRun,
    check_handler,
    describe,
    is_unrun,
    name_of,
    named_after,
    no_abort,
    not_started,
    thread_frames,
    unrun_remedy,
)
from worqr.peer.run import check_thread
from worqr.peer.scheduler import Pool, Scheduler
from worqr.tracebacks import is_a

if TYPE_CHECKING:
    from worqr.peer.executors.asyncio_loop import AsyncioLoop
    from worqr.peer.executors.processes.pool import ProcessPool
    from worqr.peer.options import PeerSettings


# `Threads`: runs plain functions in threads.
#
# A thread cannot be stopped. Its function can check for a cancellation (`Context.check_cancelled`,
# ``trio.from_thread.check_cancelled``). Its claim is settled when the thread has really ended. A run that is cancelled before
# its thread begins never begins. Trio's threads are daemons, so a stuck one delays neither the end of the peer nor that of the
# process.
#
# A function that a handler runs on the loop with ``trio.from_thread.run`` is not cancelled together with the handler. Trio runs
# it in a separate task, because the thread may be left behind.


AroundThread = Callable[[], AbstractContextManager[object]]


class Threads:
    """The threads of one peer.

    Args:
        limit: how many run at the same time. Stuck threads are replaced; at most `limit` replacements exist.
        around_thread: entered around each call, in its thread. An error that it raises is a failure of the task.
    """

    def __init__(self, limit: int, around_thread: AroundThread | None = None) -> None:
        self.limiter: trio.CapacityLimiter = trio.CapacityLimiter(limit)
        self.max_threads: int = 2 * limit
        self._around_thread = around_thread

    def prepare(self, handler: Callable[[Any], object], max_result: int | None = None) -> Handler:
        """Return a plain function as an async function that a slot can await.

        With `max_result`, what it returns is encoded in its thread.
        """
        call, name = self._call(handler), f"worqr {name_of(handler)}"

        async def in_thread(task: bytes) -> object:
            return await _ThreadRun(self, call, task, max_result).run(name)

        return named_after(handler, in_thread)

    def _call(self, handler: Callable[[Any], object]) -> Callable[[Any], object]:
        around_thread = self._around_thread

        def call(task: Any) -> object:
            with EndForks():
                result = handler(task)
            return refuse_awaitable(handler, result)

        if around_thread is None:
            return call

        def call_inside(task: Any) -> object:
            with around_thread():
                return call(task)
            return None  # the context manager swallowed an error

        return call_inside


def refuse_awaitable(handler: object, result: object) -> object:
    """Return `result`, unless it is a coroutine or generator that was never run."""
    if is_unrun(result):
        raise TypeError(
            f"{handler!r} is a plain function that returned {type(result).__name__}, not run yet: {unrun_remedy(result)}"
        )
    return result


class _ThreadRun(OffloadedRun):
    """One call in a thread. `_begun` is acquired by its thread, or by a slot that was cancelled before the thread began."""

    __slots__ = ("_begun", "_call", "_ident", "_max_result", "_replaced", "_task", "_threads")

    overdue_remedy = (
        "Python cannot stop a thread: call worqr.current().check_cancelled() in the handler now and then, or declare it with "
        'runs_in="process"'
    )
    stoppable = False

    def __init__(
        self, threads: Threads, call: Callable[[Any], object], task: bytes, max_result: int | None = None
    ) -> None:
        super().__init__()
        self._threads = threads
        self._max_result = max_result
        self._call = call
        self._task = task
        self._begun = threading.Lock()
        self._ident: int | None = None
        self._replaced = False

    async def run(self, name: str) -> object:
        """Wait for the thread; called in the slot."""
        try:
            await self._wait(name)
        finally:
            if self._replaced and self._ended:
                self._threads.limiter.total_tokens -= 1
        return self._outcome()

    async def _wait(self, name: str) -> None:
        try:
            await trio.to_thread.run_sync(
                self._in_thread, thread_name=name, abandon_on_cancel=True, limiter=self._threads.limiter
            )
        except trio.Cancelled:
            if self._begun.acquire(blocking=False):
                raise  # it has not begun and will not
            await self._wait_ended(no_abort)
            if not self._ended or is_a(self._error, trio.Cancelled):
                self._error = None
                raise
        except RuntimeError as error:  # the thread handles all errors of its own
            raise not_started("thread", error, "threads") from error

    def _in_thread(self) -> None:
        if not self._begun.acquire(blocking=False):
            return
        self._ident = threading.get_ident()
        try:
            self._note_value(self._call(self._task), self._max_result)
        except BaseException as error:  # SystemExit too, which would end only this thread
            self._note_error(error)
        self._has_ended()

    def check_cancelled(self) -> None:
        check_thread()

    def allow_replacement(self) -> bool:
        limiter = self._threads.limiter
        if not self._replaced and not self._ended and limiter.total_tokens < self._threads.max_threads:
            self._replaced = True
            limiter.total_tokens += 1
        return self._replaced

    def current_stack(self) -> str:
        if self._ended or self._ident is None:
            return ""
        return describe(thread_frames(self._ident, below=_ThreadRun._in_thread.__code__))


class Executors:
    """The places in which one peer runs handlers. A place that not every peer needs is made for the first handler that runs
    there.

    Set once: `threads`, and the settings of the others. Changed only in the loop: the rest. The scheduler
    dispatches when a blocked asyncio loop turns again.

    Raises:
        UsageError: this is a worker process that imports a script without a guard.
    """

    def __init__(self, settings: PeerSettings, scheduler: Scheduler) -> None:
        refuse_while_importing("join()")
        self.threads: Threads = Threads(settings.threads, settings.around_thread)
        self._settings = settings
        self._scheduler = scheduler
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
            self._nursery.start_soon(
                self._asyncio.watch_forever, self._settings.block_limit, self._scheduler.dispatch_soon
            )

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
            from worqr.peer.executors.processes.pool import ProcessPool, Renewal

            self._pool = ProcessPool(
                self._settings.processes,
                process_lifespan=self._settings.process_lifespan,
                around_thread=self._settings.around_thread,
                memory_limit=self._settings.process_memory,
                renewal=Renewal(self._settings.runs_per_process, self._settings.memory_per_process),
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
