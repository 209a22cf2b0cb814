"""`AsyncioLoop`: one asyncio loop in a thread of the peer, for handlers whose libraries need asyncio.

Each run is a task on that loop. To cancel it, the peer calls ``task.cancel()`` once, and the slot waits until the task has ended.
The loop exists as long as the peer, so connection pools that one run makes can be used by the next. The first run starts the
loop. When the peer leaves, tasks that handlers left behind are cancelled.

Runs are passed to the loop in batches, and so are their outcomes: one wake-up of either loop handles all that have arrived. A
handler that blocks the asyncio loop blocks neither the peer nor its keepalive. The peer checks the loop periodically. It logs a
loop that is blocked, and requests no tasks for it until it turns again. Not here: a peer that an asyncio program has
joined runs them on the loop of that program (`host_loop`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, nullcontext, suppress
from contextvars import Context as Variables
from contextvars import copy_context
from enum import Enum, auto
from typing import Any, ClassVar, Final

import trio

from worqr.child_processes import EndForks
from worqr.errors import UsageError
from worqr.log_events import emit
from worqr.peer.executors.offloaded import (
    Handler,
    OffloadedRun,
    awaited_frames,
    describe,
    name_of,
    named_after,
    thread_frames,
    with_trio_remedy,
)
from worqr.peer.lifespans import ASYNCIO_LIFESPAN, enter_lifespan
from worqr.peer.scheduler import Pool
from worqr.tracebacks import is_a

logger: logging.Logger = logging.getLogger(__name__)

END_WAIT = 1.0
"""Seconds that the asyncio loop has to end its remaining tasks when its peer has left."""
LEAVE_SOON = 3.0
"""Seconds that a run waits for its peer to leave, after other code has cancelled its task. A program that ends cancels all
tasks.
"""
MAX_TASKS_SHOWN = 5
"""Limit of tasks that do not end and are shown in the log."""
CHECK_EVERY: Final = 0.5
"""Seconds between two checks of the loop."""
BLOCKED_AFTER: Final = 1.0
"""Seconds without a turn of the loop after which it counts as blocked."""
UNLIMITED: Final = 1_000_000
"""Limit of runs on a loop that is not blocked; a peer has fewer units."""


Hosting = Callable[[object], AbstractContextManager[None]]
"""Makes the context manager, in the asyncio loop's thread, in which that loop runs."""


class _Gate(Pool):
    """The limit of runs on the loop: none while it runs, 0 while it is blocked."""

    __slots__ = ()

    def close(self) -> None:
        """Prevent further runs from beginning."""
        self.limit: int = 0

    def open(self) -> None:
        """Permit any number of runs to begin."""
        self.limit = UNLIMITED


class AsyncioLoop:
    """The asyncio loop of one peer. `hosting` is the block in which it runs, which connects it to the mesh.

    Set once, by the first run: `_token`, `_loop`, `_thread`. The Trio loop fills `_new`, and sets `_start_scheduled` when it
    schedules a wake-up. The asyncio loop clears `_start_scheduled`, then empties `_new`. `_ended` and `_wake_scheduled` do the
    same in the other direction. `watch_forever` changes `_checked_at`, `_blocked_since` and `_reported`, and sets
    `_probe_sent_at`; the asyncio loop sets it to None.

    Attributes:
        pool: the limit of handlers that run at the same time: 0 while the loop is blocked.
    """

    owned_by_application: ClassVar[bool] = False
    """The loop is the application's, which stops it and cancels the tasks on it."""
    whose: ClassVar[str] = "this worker's"

    def __init__(self, hosting: Hosting | None = None) -> None:
        self._hosting: Hosting = hosting or (lambda _loop: nullcontext())
        self._token: trio.lowlevel.TrioToken | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._new: deque[AsyncioRun] = deque()
        self._ended: deque[AsyncioRun] = deque()
        self._start_scheduled = False
        self._wake_scheduled = False
        self._ending = False
        self._gone = trio.Event()
        self.pool: _Gate = _Gate(UNLIMITED)
        self._probe_sent_at: float | None = None
        self._checked_at = time.monotonic()
        self._blocked_since: float | None = None
        self._reported = False

    def prepare(self, handler: Callable[[Any], Awaitable[object]], max_result: int | None = None) -> Handler:
        """Return an async function written for asyncio as an async function that a slot can await.

        With `max_result`, what it returns is encoded on the asyncio loop.
        """
        name = name_of(handler)

        async def in_asyncio(task: bytes) -> object:
            return await AsyncioRun(self, handler, task, name, max_result).run()

        return named_after(handler, in_asyncio)

    # In the Trio loop

    def start(self, run: AsyncioRun) -> None:
        """Let `run` begin on the asyncio loop."""
        loop = self._loop or self._open()
        self._new.append(run)
        if not self._start_scheduled:
            self._start_scheduled = True
            loop.call_soon_threadsafe(self._start_new)

    def call_or_open(self, callback: Callable[[], None]) -> None:
        """Run `callback` on the asyncio loop; start the loop if it does not run yet."""
        loop = self._loop or self._open()
        loop.call_soon_threadsafe(callback)

    def call_if_open(self, callback: Callable[[], None]) -> bool:
        """Run `callback` on the asyncio loop; return False if the loop has ended."""
        if self._loop is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(callback)
                return True
        return False

    def _open(self) -> asyncio.AbstractEventLoop:
        self._token = trio.lowlevel.current_trio_token()
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._run_loop, args=(loop,), name="worqr asyncio", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the process is at its limit of threads; the next run tries again
            loop.close()
            raise
        self._loop, self._thread = loop, thread
        return loop

    async def end(self) -> None:
        """End the loop and its remaining tasks within `END_WAIT`, even if a task blocks it.

        Nothing is run on the loop afterwards.
        """
        loop = self._loop
        if loop is None:
            return
        self.call_if_open(self._stop)
        with trio.move_on_after(END_WAIT) as patience:
            await self._gone.wait()
        if patience.cancelled_caught:
            text = "the asyncio loop has not ended within %(duration)g s, and the worker leaves without it; it is at\n%(where)s"
            emit(logger, "asyncio.stuck", text, duration=END_WAIT, where=self._describe(loop))

    def _describe(self, loop: asyncio.AbstractEventLoop) -> str:
        """Describe what delays the end of the loop: the code that it runs, or the code for which its tasks wait."""
        if asyncio.current_task(loop) is not None:
            return self.current_stack()
        tasks = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())[:MAX_TASKS_SHOWN]
        return "\n".join(describe(awaited_frames(task.get_coro())) for task in tasks) or self.current_stack()

    async def watch_forever(self, block_limit: float, turns: Callable[[], object]) -> None:
        """Check the loop periodically, until it has ended.

        Args:
            block_limit: seconds without a turn after which the log asks for a restart.
            turns: called when a blocked loop runs again, because runs may begin.
        """
        while not self._has_ended():
            if self._loop is not None:
                self._check(block_limit, turns)
            await trio.sleep(CHECK_EVERY)

    def _has_ended(self) -> bool:
        """Return True if nothing runs on the loop any more. A loop that the first run will start has not ended."""
        return self._ending

    def _check(self, block_limit: float, turns: Callable[[], object]) -> None:
        """Evaluate the last probe, and send the next one if the loop has replied to it."""
        now = time.monotonic()
        overslept, self._checked_at = now - self._checked_at - CHECK_EVERY, now
        probe_sent_at = self._probe_sent_at
        if probe_sent_at is None:
            if self._blocked_since is not None:
                self._report_running(now - self._blocked_since)
                turns()
            self._probe_sent_at = now
            if not self.call_if_open(self._on_reply):
                self._probe_sent_at = None
        elif overslept > BLOCKED_AFTER:
            self._probe_sent_at = probe_sent_at + overslept  # this thread could not run, and perhaps the loop could not
        elif now - probe_sent_at > BLOCKED_AFTER:
            self._report_blocked(now - probe_sent_at, block_limit)

    def _report_blocked(self, seconds: float, limit: float) -> None:
        if self._blocked_since is None:
            self._blocked_since = time.monotonic() - seconds
            self.pool.close()
            text = (
                f"{self.whose} asyncio loop has not turned for %(duration).1f s, and this worker takes no tasks for it until it "
                "does; run blocking code in a thread: declare the function with a plain def, or await asyncio.to_thread(...); it "
                "is at\n%(where)s"
            )
            emit(logger, "asyncio.blocked", text, duration=seconds, where=self.current_stack())
        elif seconds > limit and not self._reported:
            self._reported = True
            text = (
                f"{self.whose} asyncio loop has not turned for %(duration).1f s, and the tasks on it stay with this worker; "
                "restart the process if it does not end; it is at\n%(where)s"
            )
            emit(logger, "asyncio.blocked", text, level=logging.ERROR, duration=seconds, where=self.current_stack())

    def _report_running(self, seconds: float) -> None:
        self._blocked_since, self._reported = None, False
        text = f"{self.whose} asyncio loop turns again, after %(duration).1f s"
        emit(logger, "asyncio.turns", text, duration=seconds)
        self.pool.open()

    def _wake_ended(self) -> None:
        self._wake_scheduled = False
        while self._ended:
            self._ended.popleft().wake()

    # From any thread

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """None before the first run."""
        return self._loop

    @property
    def why_blocked(self) -> str:
        """Empty while the loop turns, or has had no turn for less than `BLOCKED_AFTER` seconds."""
        return "" if self._blocked_since is None else f"{self.whose} asyncio loop is blocked"

    @property
    def lag(self) -> float:
        """Seconds for which the loop has had no turn."""
        probe_sent_at = self._probe_sent_at
        if probe_sent_at is None or threading.current_thread() is self._thread:
            return 0.0
        return time.monotonic() - probe_sent_at

    def current_stack(self) -> str:
        """Return the present stack of the loop's thread."""
        ident = None if self._thread is None else self._thread.ident
        return "" if ident is None else describe(thread_frames(ident, below=asyncio.events.Handle._run.__code__))

    # In the asyncio loop

    def _run_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run the loop; the function of its thread."""
        _announce_asyncio()
        with self._hosting(loop):
            while not self._ending:
                try:
                    loop.run_forever()
                except BaseException as error:  # SystemExit and KeyboardInterrupt of a task that a handler left behind
                    text = "a task that a handler left on the asyncio loop raised an error; the loop goes on"
                    emit(logger, "asyncio.raised", text, exc_info=error)
            try:
                _close_loop(loop)
            except BaseException as error:
                emit(logger, "asyncio.raised", "ending the asyncio loop raised an error", exc_info=error)
        self.call_in_trio(self._gone.set)

    def call_in_trio(self, callback: Callable[[], None]) -> None:
        """Run `callback` in the Trio loop, unless that has ended."""
        assert self._token is not None
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(callback)

    def _on_reply(self) -> None:
        self._probe_sent_at = None

    def _stop(self) -> None:
        self._ending = True
        asyncio.get_running_loop().stop()

    def _start_new(self) -> None:
        self._start_scheduled = False
        while self._new:
            self._new.popleft().begin()

    def ended(self, run: AsyncioRun) -> None:
        """Wake the slot of a run whose task has ended."""
        self._ended.append(run)
        if not self._wake_scheduled:
            self._wake_scheduled = True
            self.call_in_trio(self._wake_ended)


def _announce_asyncio() -> None:
    """Set asyncio as the event loop of this thread, for libraries that use sniffio (httpx, anyio). It may be set to another
    one.
    """
    try:
        from sniffio import thread_local  # a dependency of Trio, for now
    except ImportError:
        return
    vars(thread_local)["name"] = "asyncio"


def _retrieve(task: asyncio.Task[None]) -> None:
    """Retrieve the error of a task. Otherwise asyncio logs that it was never retrieved."""
    task.exception()


def _was_cancelled(error: BaseException) -> bool:
    """Return True if `error` is the cancellation of the running task itself, and not that of a task that it has awaited."""
    task = asyncio.current_task()
    return is_a(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def _close_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel the remaining tasks on the loop, wait for their end, and close it."""
    try:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


class AsyncioRunState(Enum):
    """The phases of a run on an asyncio loop, changed on that loop.

    | state       | meaning                                             | leaves it by                       |
    |-------------|-----------------------------------------------------|------------------------------------|
    | NEW         | its task has not begun                              | `begin`, and a turn of the loop    |
    | STARTED     | its handler runs                                    | the end of the handler             |
    | INTERRUPTED | its handler has ended, cancelled by other code      | never                              |
    | ENDED       | its handler has ended otherwise                     | never                              |
    """

    NEW = auto()
    STARTED = auto()
    INTERRUPTED = auto()
    ENDED = auto()


class AsyncioRun(OffloadedRun):
    """One run.

    Changed only in the asyncio loop: `_state`, `_running`. Changed only in the Trio loop: `_raise_cancel`, which is not None
    after the run was cancelled.
    """

    __slots__ = (
        *("_handler", "_max_result", "_name", "_owner", "_raise_cancel", "_running", "_state", "_task", "_variables"),
    )

    overdue_remedy = (
        "it swallows asyncio.CancelledError, or blocks its event loop: let that error pass, and run blocking code in a "
        "thread"
    )

    def __init__(
        self,
        owner: AsyncioLoop,
        handler: Callable[[Any], Awaitable[object]],
        task: bytes,
        name: str,
        max_result: int | None = None,
    ) -> None:
        super().__init__()
        self._owner = owner
        self._max_result = max_result
        self._handler = handler
        self._name = name
        self._task = task
        self._variables: Variables = copy_context()
        self._running: asyncio.Task[None] | None = None
        self._state = AsyncioRunState.NEW
        self._raise_cancel: Callable[[], Any] | None = None

    # In the Trio loop

    async def run(self) -> object:
        """Wait for the task; called in the slot."""
        await trio.lowlevel.checkpoint_if_cancelled()
        self._owner.start(self)
        await self._wait_ended(self._cancel)
        if self._state is AsyncioRunState.INTERRUPTED:
            # if the program ends, the peer leaves in this time, and the task goes back without counting a failure
            await trio.sleep(LEAVE_SOON)
        if is_a(self._error, KeyboardInterrupt) and self._owner.owned_by_application:
            raise self._error  # Python raised Ctrl-C in this handler by chance: the peer ends, and the task goes back
        if self._raise_cancel is not None and (not self._ended or is_a(self._error, asyncio.CancelledError)):
            self._error = None
            self._raise_cancel()
        return self._outcome()

    def _cancel(self, raise_cancel: Callable[[], Any]) -> trio.lowlevel.Abort:
        self._raise_cancel = raise_cancel
        if self._owner.call_if_open(self._cancel_task):
            return trio.lowlevel.Abort.FAILED
        self._waiting = None  # the loop has ended, and the run with it
        return trio.lowlevel.Abort.SUCCEEDED

    @property
    def detachable(self) -> bool:
        return super().detachable and self._raise_cancel is not None

    def wake(self) -> None:
        """Wake the slot, because the task has ended."""
        self._wake()

    def current_stack(self) -> str:
        task = self._running
        if task is None or task.done():
            return ""
        busy = asyncio.current_task(self._owner.loop)
        if busy is task:
            return self._owner.current_stack()
        waits = describe(awaited_frames(task.get_coro()))
        return (
            waits
            if busy is None
            else f"{waits}\nand its asyncio loop is busy with another task, at\n{self._owner.current_stack()}"
        )

    # In the asyncio loop

    def begin(self) -> None:
        """Make the task."""
        loop = self._owner.loop
        assert loop is not None
        self._running = loop.create_task(self._run(), name=self._name, context=self._variables)

    async def _run(self) -> None:
        self._state = AsyncioRunState.STARTED
        try:
            if self._raise_cancel is not None:
                raise asyncio.CancelledError
            with EndForks():
                value = await self._handler(self._task)
            self._note_value(value, self._max_result)
        except KeyboardInterrupt as error:
            self._error = error
            if self._owner.owned_by_application:  # the program must receive Ctrl-C too
                self._end()
                if self._running is not None:
                    self._running.add_done_callback(_retrieve)
                raise
        except BaseException as error:  # SystemExit too, which would end the loop
            if self._owner.owned_by_application and self._raise_cancel is None and _was_cancelled(error):
                self._error = error
                self._end(AsyncioRunState.INTERRUPTED)
                return
            self._note_error(with_trio_remedy(error))
        self._end()

    def _end(self, state: AsyncioRunState = AsyncioRunState.ENDED) -> None:
        self._state = state
        self._ended = True
        self._owner.ended(self)

    def _cancel_task(self) -> None:
        if self._state is AsyncioRunState.STARTED and self._running is not None:
            self._running.cancel()  # a task that has not begun is cancelled when it begins

    def check_cancelled(self) -> None:
        if self._raise_cancel is not None:
            raise asyncio.CancelledError


# `HostLoop`: the application's own asyncio loop, on which the handlers of its peer run: for ``async with mesh.join():`` under
# asyncio.
#
# The peer's Trio loop runs in a thread of its own. So a handler or a route that blocks the asyncio loop does not delay the
# heartbeat. If the loop ends inside the block, the peer leaves.


class HostLoop(AsyncioLoop):
    """The asyncio loop in which this object is made.

    Set once, by `attach`: `_token`. Changed in the Trio loop: `_ended_inside`.
    """

    owned_by_application: ClassVar[bool] = True
    whose: ClassVar[str] = "the application's"

    def __init__(self, is_exiting: Callable[[], bool]) -> None:
        """`is_exiting` returns True after the interpreter has begun to exit: then no loop of the main thread runs again."""
        super().__init__()
        self._is_exiting = is_exiting
        self._loop = asyncio.get_running_loop()
        self._thread = threading.current_thread()
        self._ended_inside = False

    # In the Trio loop

    def attach(self) -> None:
        """Connect this Trio loop, so that its runs can begin on the asyncio loop."""
        self._token = trio.lowlevel.current_trio_token()

    def start(self, run: AsyncioRun) -> None:
        """Begin `run` on the loop.

        On a closed loop it never begins. The peer then cancels it, and its task returns to the queue.
        """
        with suppress(RuntimeError):
            super().start(run)

    async def end(self) -> None:
        """Do nothing: the loop is the application's, and does not end with the peer."""
        await trio.lowlevel.checkpoint()

    def call_if_open(self, callback: Callable[[], None]) -> bool:
        """Run `callback` on the asyncio loop; return False if the loop has ended."""
        return not self._has_ended() and super().call_if_open(callback)

    async def watch_until_ended(
        self, block_limit: float, ended: Callable[[], object], turns: Callable[[], object]
    ) -> None:
        """Check the loop periodically, and call `ended` when it has ended; otherwise as `watch_forever`."""
        await self.watch_forever(block_limit, turns)
        self._ended_inside = True
        ended()

    def raise_if_ended(self) -> None:
        """Raise UsageError if the loop ended while the peer was there."""
        if self._ended_inside:
            raise UsageError(
                "the asyncio loop ended inside `async with mesh.join():`; leave the block before the loop ends"
            )

    def _has_ended(self) -> bool:
        """Return True if nothing runs on the loop any more.

        A loop that is only stopped may run again, unless the interpreter exits.
        """
        loop = self._loop
        return loop is None or loop.is_closed() or (self._is_exiting() and not loop.is_running())


# The lifespan on the asyncio loop of a peer: ``Mesh(asyncio_lifespan=...)``.
#
# It is one task of that loop, from before the peer takes any task until the peer has left. Here is that task, as seen from Trio,
# and the block of `join` around the peer.


LEAVE_WITHIN: Final = 5.0
"""Seconds that the lifespan has to end when its peer has left; then the peer ends without it."""


@asynccontextmanager
async def inside_lifespan(
    loop: AsyncioLoop, lifespan: Callable[[], AbstractAsyncContextManager[object]]
) -> AsyncGenerator[object]:
    """Enter the lifespan on the loop of a peer, around the peer, and yield its state. The loop ends with it.

    A lifespan that ends by itself cancels the block, which then raises the lifespan's error.
    """
    block = trio.CancelScope()
    life = _LifespanTask(loop, lifespan, block.cancel)
    with block:
        try:
            yield await life.enter()
        except BaseException:
            life.raises = block.cancel_called
            raise
        finally:
            with trio.CancelScope(shield=True):
                await life.leave()
                await loop.end()
    life.raise_error()


class _LifespanTask:
    """The task of one lifespan. Set in the asyncio loop: `_state`, `_error`, `_task`, `_leave`, `_inside`; in the Trio loop: the
    rest.

    Attributes:
        raises: the task that entered the lifespan raises its error; otherwise the error is logged.
    """

    def __init__(
        self,
        loop: AsyncioLoop,
        lifespan: Callable[[], AbstractAsyncContextManager[object]],
        on_early_end: Callable[[], object],
    ) -> None:
        self._loop = loop
        self._lifespan = lifespan
        self._on_early_end = on_early_end
        self._state: object = None
        self._error: BaseException | None = None
        self._task: asyncio.Task[None] | None = None
        self._leave: asyncio.Event | None = None
        self._inside = False
        self._left = False
        self.raises: bool = True
        self._entered = trio.Event()
        self._ended = trio.Event()

    # In the Trio loop

    async def enter(self) -> object:
        """Wait until the lifespan has been entered, and return what it yielded. Raises what it raised."""
        variables = copy_context()

        def begin() -> None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name=ASYNCIO_LIFESPAN, context=variables)

        self._loop.call_or_open(begin)
        await self._entered.wait()
        self.raise_error()
        return self._state

    async def leave(self) -> None:
        """Wait until the lifespan has ended; within `LEAVE_WITHIN`."""
        self._left = True
        if not self._loop.call_if_open(self._request_exit):
            return
        with trio.move_on_after(LEAVE_WITHIN):
            await self._ended.wait()
            if self._error is not None and not self.raises:
                text = f"{ASYNCIO_LIFESPAN} raised an error while its worker left"
                emit(logger, "asyncio.raised", text, exc_info=self._error)
            return
        text = f"{ASYNCIO_LIFESPAN} has not ended within %(duration)g s after its worker had left; the worker ends without it"
        emit(logger, "asyncio.stuck", text, duration=LEAVE_WITHIN)

    def raise_error(self) -> None:
        """Raise the error that ended the lifespan, if there was one; once."""
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error

    def _has_ended(self) -> None:
        """Handle the end of the task. If the peer has not left yet, end the peer."""
        ended_early = self._entered.is_set() and not self._left
        self._entered.set()
        self._ended.set()
        if ended_early:
            text = f"{ASYNCIO_LIFESPAN} has ended by itself, and the worker leaves; let it run until its block ends"
            emit(logger, "asyncio.ended", text)
            self._on_early_end()

    # In the asyncio loop

    async def _run(self) -> None:
        self._leave = asyncio.Event()
        try:
            async with enter_lifespan(ASYNCIO_LIFESPAN, self._lifespan) as self._state:
                self._inside = True
                self._loop.call_in_trio(self._entered.set)
                await self._leave.wait()
        except asyncio.CancelledError as error:
            if not self._left:
                self._error = UsageError(f"something on its asyncio loop has cancelled the task of {ASYNCIO_LIFESPAN}")
                self._error.__cause__ = error
        except BaseException as error:  # SystemExit too, which would end the loop
            self._error = error
        self._loop.call_in_trio(self._has_ended)

    def _request_exit(self) -> None:
        """End the block of the lifespan; a lifespan that is still being entered is cancelled."""
        if self._inside and self._leave is not None:
            self._leave.set()
        elif self._task is not None:
            self._task.cancel()
