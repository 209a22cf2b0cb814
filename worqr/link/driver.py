"""The interface between the link and its caller's event loop or threads, which drive the sockets.

Here: `Waiter` (a call that will be settled), the `Driver` protocol, and `Signal`, an event that works with each driver. Also
here: the driver for Trio. The others are in `asyncio_driver` and `thread_driver`; `link` chooses. Not here: requests and sockets.

The link has no thread for requests. A driver runs its callbacks in the caller's loop: when a socket is ready, at a certain
time, or when another thread posts a callback. Without a loop, one of the threads that wait for a reply drives the sockets for
all of them.

Two rules prevent a double wake-up and a crashed loop:

* `Waiter.wake` is set, taken and called in the loop only, and is taken (set to None) before it is called. A caller that gives
  up sets it to None too, so a later reply wakes no task.
* Each callback of a driver is guarded: an error is logged, and neither ends the loop nor reaches other callbacks.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import socket
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, ClassVar, Final, Protocol, TypeVar

import outcome
import trio

from worqr.errors import WorqrError
from worqr.log_events import emit

# Callbacks that run at a certain time.
#
# `Timers` keeps the callbacks of the drivers for Trio and for plain threads, and tells them until when to wait. The asyncio
# driver uses the timers of its loop. `Alarm` plans one callback with the timers of any driver.


LATE: Final = 0.05
"""Seconds: a callback that comes later was held up by a blocked loop."""


class _HeapTimer:
    """A timer of `Timers`. When cancelled, it stays in the heap without its callback."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        self.callback = None


class Timers:
    """Callbacks by their time. Times are those of the monotonic clock. `call` runs a callback, and handles its errors."""

    def __init__(self, call: Callable[[Callable[[], object]], object]) -> None:
        self._times: list[tuple[float, int, _HeapTimer]] = []
        self._numbers = itertools.count()
        self._call = call

    def add(self, when: float, callback: Callable[[], object]) -> Timer:
        timer = _HeapTimer(callback)
        heapq.heappush(self._times, (when, next(self._numbers), timer))
        return timer

    def next(self) -> float:
        """Return when the next callback is due; infinity if there is none. Callbacks that were cancelled do not count."""
        times = self._times
        while times and times[0][2].callback is None:
            heapq.heappop(times)
        return times[0][0] if times else math.inf

    def run(self) -> None:
        """Run the callbacks that are due. One that Ctrl-C interrupts stays due: without it an `Alarm` would never ring again."""
        times = self._times
        if times and times[0][0] <= (now := time.monotonic()):
            while times and times[0][0] <= now:
                due = times[0]
                try:
                    heapq.heappop(times)
                    if due[2].callback is not None:
                        self._call(due[2].callback)
                except BaseException:
                    if due not in times:
                        heapq.heappush(times, due)
                    raise

    def clear(self) -> None:
        self._times.clear()


class Alarm:
    """Runs `callback` at the earliest of the times for which it was set. All methods belong to the driver's loop.

    Attributes:
        at: the monotonic time for which it is set; infinity: not set.

    Args:
        driver: has the timers.
        callback: gets the number of seconds by which it was late.
    """

    def __init__(self, driver: Driver, callback: Callable[[float], object]) -> None:
        self.at: float = math.inf
        self._driver = driver
        self._callback = callback
        self._timer: Timer | None = None

    def set(self, when: float) -> None:
        """Run the callback at `when`, unless it runs earlier anyway."""
        if when < self.at:
            self.cancel()
            self.at = when
            self._timer = self._driver.call_at(when, self._ring)

    def cancel(self) -> None:
        """Do not run the callback."""
        self.at = math.inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self) -> None:
        late = time.monotonic() - self.at
        self.at, self._timer = math.inf, None
        self._callback(late)


T = TypeVar("T")
E = TypeVar("E", bound=Exception)

logger: logging.Logger = logging.getLogger(__name__)

BUG = "a callback failed, the others go on; this is a bug of worqr, please report it"


class Waiter:
    """A call that waits, or will wait, until it is settled.

    Attributes:
        ends_with_run: in a thread of a handler, the wait ends when the run is cancelled.
        settled: the call has its outcome.
        abandoned: the caller has given up. Set by the caller only.
        wake: runs in the loop when the waiter is settled. Changed in the loop only, once it is submitted.
        error: the outcome, if the call failed.

    `fail` is used before `settle`: the outcome of a request is known when its reply is parsed, and the request is settled with
    all others of that read.
    """

    __slots__ = ("abandoned", "error", "settled", "wake")

    ends_with_run: ClassVar[bool] = False

    def __init__(self) -> None:
        self.settled: bool = False
        self.abandoned: bool = False
        self.wake: Callable[[], object] | None = None
        self.error: Exception | None = None

    def when_settled(self, wake: Callable[[], object]) -> None:
        """Have `wake` called when the waiter is settled."""
        self.wake = wake

    def settle(self) -> None:
        """The call has its outcome. `wake_all` wakes its caller."""
        self.settled = True

    def fail(self, error: Exception) -> None:
        """Set the error that is the outcome."""
        self.error = error

    def fail_with_copy(self, error: WorqrError) -> None:
        """Set a copy of an error that ends several calls."""
        self.error = copy_of(error)

    def abandon(self) -> None:
        """The caller has given up: a later outcome wakes no task."""
        self.wake, self.abandoned = None, True

    def raise_error(self) -> None:
        """Raise the error, if the call failed. Also forget it, so that its traceback keeps no objects alive."""
        error, self.error = self.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error


class SignalWaiter(Waiter):
    """A call that waits for something that others do. A request is not one: it takes its time, also to clean up."""

    __slots__ = ()

    ends_with_run = True


class TimeLimit(Protocol):
    """A block with a time limit."""

    @property
    def cancelled_caught(self) -> bool:
        """True if the limit ended the block."""
        ...


class Timer(Protocol):
    """A callback that runs at some time."""

    def cancel(self) -> None:
        """Prevent the callback from running, if it has not run yet."""
        ...


class Driver(Protocol):
    """How the link waits: one implementation per event loop, and one for plain threads.

    Attributes:
        entered: a block in which the link's state may be used. A loop needs no lock; plain threads enter one at a time.
    """

    entered: AbstractContextManager[object] = nullcontext()

    def post(self, deliver: Callable[[], object]) -> None:
        """Run `deliver` in the loop soon. Callable from any thread; never raises, even if the loop has ended."""
        ...

    def submits(self, send: Callable[[Any], Watch | None]) -> Callable[[Any], Watch | None]:
        """Return what calls `send` with requests where the link's state may be used: here, or in the thread that is using it."""
        return send

    def soon(self, callback: Callable[[], object]) -> None:
        """In the loop: run `callback` when the other tasks have had their turn."""
        ...

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        """In the loop: run `callback` at a time of the monotonic clock."""
        ...

    def watch(self, sock: socket.socket, readable: Callable[[], object], writable: Callable[[], object]) -> Watch:
        """In the loop: call `readable` whenever something can be read, until the watch is closed. It returns True if more is to
        come soon.
        """
        ...

    def close(self) -> None:
        """The link has ended: free the driver's resources. Idempotent."""
        return

    def interrupted(self, error: Exception) -> None:
        """The link has ended in the middle of a change: settle all waiters with this error, including those that the link has
        lost. Only plain threads need it: no signal handler raises in a callback of an event loop.
        """
        return

    def poison(self) -> None:
        """In a forked child: forget the parent's resources without touching them. A loop of the parent never runs here."""
        return

    async def checkpoint(self) -> None:
        """Let other tasks run; raise the caller's pending cancellation."""
        ...

    async def prepare(self, request: Waiter) -> None:
        """Call this before you submit `request`. Raises the caller's pending cancellation; then send nothing."""
        ...

    async def wait(self, request: Waiter) -> None:
        """Wait until `request` is settled. When cancelled, abandon it: it is withdrawn, or its reply is dropped."""
        ...

    async def exchange(self, request: Waiter, submit: Callable[[Any], Watch | None]) -> None:
        """Prepare `request`, submit it, and wait until it is settled."""
        await self.prepare(request)
        submit(request)
        await self.wait(request)

    def move_on_after(self, seconds: float, *, shield: bool = False) -> AbstractContextManager[TimeLimit]:
        """Return a block with a time limit, like ``trio.move_on_after``.

        Args:
            seconds: the limit.
            shield: Let a task wait in the block that was cancelled before it. Under Trio, a cancellation during the block has
                to wait, too.
        """
        ...

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run a blocking function in a thread until it returns.

        A caller that is cancelled meanwhile gets the cancellation then, or at its next wait.
        """
        ...


class Watch:
    """A socket that a driver watches. Each driver has a class of its own, which implements `_watch_write` and `_unwatch`.

    Attributes:
        wants_write: the driver waits until more can be sent.
    """

    def __init__(self, sock: socket.socket, readable: Callable[[], object], writable: Callable[[], object]) -> None:
        self.wants_write: bool = False
        self._socket = sock
        self._readable = readable
        self._writable = writable
        self._closed = False

    def want_write(self, wanted: bool) -> None:
        """Call `writable` when more can be sent, or no longer."""
        if wanted != self.wants_write and not self._closed:
            self.wants_write = wanted
            self._watch_write(wanted)

    def expect(self) -> None:
        """Replies will come that no task of a call reads by itself."""
        return

    def close(self) -> None:
        """Stop watching. Call it before the socket is closed."""
        if not self._closed:
            self._closed, self.wants_write = True, False
            with suppress(KeyError, ValueError, OSError, RuntimeError):  # the loop or its selector was closed first
                self._unwatch()

    def _watch_write(self, wanted: bool) -> None:
        raise NotImplementedError

    def _unwatch(self) -> None:
        raise NotImplementedError


class Signal:
    """An event for one waiting task at a time. Call `set` in the loop, or, without a loop, in any thread."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._is_set = False
        self._waiter: Waiter | None = None

    def set(self) -> None:
        """Set the event, and wake the task that waits for it."""
        self._is_set = True
        waiter = self._waiter
        if waiter is not None:
            wake_all((waiter,))

    async def wait(self) -> None:
        """Wait until the event is set."""
        waiter = SignalWaiter()
        await self._driver.prepare(waiter)
        # set the waiter before checking; `set` works in the opposite order, so one of the two sees the other
        self._waiter = waiter
        if not self._is_set:
            await self._driver.wait(waiter)


def guarded(deliver: Callable[[], T]) -> T | None:
    """Run `deliver` and log its exceptions, even a BaseException, which would end the program's event loop."""
    try:
        return deliver()
    except BaseException as error:
        emit(logger, "link.deliver", BUG, exc_info=error)
    return None


def run_callback(callback: Callable[[], object]) -> None:
    """Run a callback and log its error. A BaseException, for example from a signal handler, propagates."""
    try:
        callback()
    except Exception as error:
        emit(logger, "link.deliver", BUG, exc_info=error)


def copy_of(error: E) -> E:
    """Return a copy of an error for another task: a traceback belongs to one task."""
    another = type(error)(*error.args)
    another.__cause__ = error.__cause__
    return another


def settle_all(waiters: Iterable[Waiter], error: WorqrError | None = None) -> None:
    """Settle the waiters, each with its own copy of the error if there is one."""
    for waiter in waiters:
        if error is not None:
            waiter.fail_with_copy(error)
        waiter.settle()


def wake_all(waiters: Iterable[Waiter]) -> None:
    """In the loop: wake each waiter once. An error in one callback is logged, and the others run."""
    rest = iter(waiters)
    for waiter in rest:
        wake = waiter.wake
        if wake is not None:
            waiter.wake = None
            try:
                wake()
            except Exception as error:
                emit(logger, "link.deliver", BUG, exc_info=error)
            except BaseException:  # Ctrl-C, where `wake` began: the end of the link wakes the caller
                waiter.wake = wake
                wake_all(rest)
                raise


def settle_soon(driver: Driver, waiters: Iterable[Waiter], error: WorqrError | None = None) -> None:
    """Settle waiters, and wake them in a later turn of the loop."""
    settled = list(waiters)
    settle_all(settled, error)
    if settled:
        driver.post(partial(wake_all, settled))


# `TrioDriver`: the link in the Trio run of its caller. System tasks wait for sockets and times, so it needs no nursery.
#
# While calls come one at a time, the task of each call reads its own reply: see `_Watch`.


_ALONE: Final = 3
"""Calls in a row that have the connection for themselves, until their tasks read their replies."""
_UNREAD: Final = 0.25
"""Seconds until a connection is read again that the tasks of calls have read before."""


class TrioDriver(Driver):
    """The driver for the current Trio run. Its tasks start when they are first needed, and end with the run at the latest."""

    def __init__(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._closed = False
        self._callbacks = _Callbacks()
        self._alarm = _Alarm()

    def post(self, deliver: Callable[[], object]) -> None:
        with suppress(trio.RunFinishedError):  # no task is left that waits
            self._token.run_sync_soon(guarded, deliver)

    def soon(self, callback: Callable[[], object]) -> None:
        self._callbacks.add(callback)

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        return self._alarm.add(when, callback)

    def watch(self, sock: socket.socket, readable: Callable[[], object], writable: Callable[[], object]) -> _Watch:
        return _Watch(self, sock, readable, writable)

    def submits(self, send: Callable[[Any], Watch | None]) -> Callable[[Any], Watch | None]:
        @trio.lowlevel.enable_ki_protection
        def submit(requests: Any) -> Watch | None:
            watch: Any = send(requests)
            if watch is not None:
                watch.expect()
            return watch  # type: ignore[no-any-return]

        self._send = send
        return submit

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.post(self._close)

    def _close(self) -> None:
        self._callbacks.close()
        self._alarm.close()

    def poison(self) -> None:
        self._closed = True  # the tasks are the parent's, and never run here

    async def checkpoint(self) -> None:
        await trio.lowlevel.checkpoint()

    async def prepare(self, request: Waiter) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()

    @trio.lowlevel.enable_ki_protection
    async def exchange(self, request: Waiter, submit: Callable[[Any], Watch | None]) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        watch: Any = self._send(request)
        if watch is not None:
            await watch.read_for(request)
            if request.settled:
                return
        if request.settled:
            await trio.lowlevel.cancel_shielded_checkpoint()
        else:
            await trio.lowlevel.wait_task_rescheduled(_wakes_this_task(request))

    @trio.lowlevel.enable_ki_protection
    async def wait(self, request: Waiter) -> None:
        if request.settled:  # at once, as at the end of the link
            await trio.lowlevel.cancel_shielded_checkpoint()
        else:
            await trio.lowlevel.wait_task_rescheduled(_wakes_this_task(request))

    def move_on_after(self, seconds: float, *, shield: bool = False) -> AbstractContextManager[TimeLimit]:
        return trio.move_on_after(seconds, shield=shield)

    async def in_thread(self, work: Callable[[], T]) -> T:
        with trio.CancelScope(shield=True):
            return await trio.to_thread.run_sync(work)
        raise AssertionError("the scope is never cancelled")


class _Woken(outcome.Outcome[None]):
    """What a task gets that is woken. It has no state, so that one object serves all of them, unlike an ``outcome.Value``."""

    def unwrap(self) -> None:
        return

    def send(self, gen: Generator[T, None, object]) -> T:
        return gen.send(None)

    async def asend(self, agen: AsyncGenerator[T, None]) -> T:
        return await agen.asend(None)


_WOKEN: Final = _Woken()


def _wakes_this_task(request: Waiter) -> Callable[[object], trio.lowlevel.Abort]:
    """Let the running task go on when the request is settled. Return what abandons the request if the task is cancelled."""
    request.wake = partial(trio.lowlevel.reschedule, trio.lowlevel.current_task(), _WOKEN)

    def abandon(_: object) -> trio.lowlevel.Abort:
        request.abandon()
        return trio.lowlevel.Abort.SUCCEEDED

    return abandon


class _Watch(Watch):
    """A task that waits until the socket is readable; and one that waits until it is writable, while that is wanted.

    While calls come one at a time, the task of each call reads its own reply (`read_for`), which saves a switch between tasks
    and a turn of the loop per call. The reading task is parked meanwhile. It goes on when other replies are expected, and when
    the connection was idle for `_UNREAD`.
    """

    def __init__(
        self, driver: TrioDriver, sock: socket.socket, readable: Callable[[], object], writable: Callable[[], object]
    ) -> None:
        super().__init__(sock, readable, writable)
        self._driver = driver
        self._descriptor = sock.fileno()
        self._alone = 0  # calls in a row that had the connection for themselves
        self._is_read = False  # by the task of a call
        self._handles = False  # that task is awake, and handles what it has read
        self._was_read = False  # by the task of a call, since the last look
        self._parked: trio.lowlevel.Task | None = None
        trio.lowlevel.spawn_system_task(self._read, name="worqr.link.read")

    # Read by the tasks of calls

    def expect(self) -> None:
        self._alone = 0
        if self._parked is not None and not self._is_read:
            self._go_on()

    @trio.lowlevel.enable_ki_protection
    async def read_for(self, request: Waiter) -> None:
        """The only request on the connection: read until it is settled, unless another task reads. Return earlier if the
        connection is closed.
        """
        self._alone += 1
        if self._parked is None or self._is_read:
            return
        self._is_read = self._was_read = more = True
        request.wake = self._interrupt
        try:
            while not (request.settled or self._closed):
                self._handles = False
                await trio.lowlevel.wait_readable(self._descriptor)
                self._handles = True
                more = self._readable()  # type: ignore[assignment]
        except (trio.ClosedResourceError, OSError):
            pass  # settled by something else than a reply; or the connection was closed
        except BaseException:
            request.abandon()
            raise
        finally:
            self._is_read = False
            if more or not self._alone:
                self._go_on()

    def _interrupt(self) -> None:
        """Wake the task that reads, unless it is awake. A cancel scope around each call would cost more."""
        if not self._handles:
            trio.lowlevel.notify_closing(self._descriptor)

    def _go_on(self) -> None:
        """Let the reading task go on."""
        task, self._parked = self._parked, None
        if task is not None:
            trio.lowlevel.reschedule(task)

    def _look(self) -> None:
        """Let the reading task go on if no call has read lately."""
        if self._was_read and not self._closed:
            self._was_read = False
            self._driver.call_at(time.monotonic() + _UNREAD, self._look)
        elif not self._is_read:
            self._go_on()
        else:
            self._driver.call_at(time.monotonic() + _UNREAD, self._look)

    async def _park(self) -> None:
        self._parked, self._was_read = trio.lowlevel.current_task(), True
        self._look()
        await trio.lowlevel.wait_task_rescheduled(self._unpark)

    def _unpark(self, _: object) -> trio.lowlevel.Abort:
        self._parked = None
        return trio.lowlevel.Abort.SUCCEEDED

    def _watch_write(self, wanted: bool) -> None:
        if wanted:
            trio.lowlevel.spawn_system_task(self._write, name="worqr.link.write")

    def _unwatch(self) -> None:
        trio.lowlevel.notify_closing(self._descriptor)
        self._go_on()

    async def _read(self) -> None:
        with suppress(trio.ClosedResourceError, OSError):
            while not self._closed:
                await trio.lowlevel.wait_readable(self._descriptor)
                if not self._closed and not guarded(self._readable) and self._alone >= _ALONE and not self._closed:
                    await self._park()

    async def _write(self) -> None:
        with suppress(trio.BusyResourceError, OSError):
            while self.wants_write:
                with suppress(trio.ClosedResourceError):  # closed; or a task that reads was interrupted
                    await trio.lowlevel.wait_writable(self._descriptor)
                if self.wants_write:
                    guarded(self._writable)


class _Callbacks:
    """A task that runs callbacks when the tasks that are ready now have had their turn."""

    def __init__(self) -> None:
        self._added: list[Callable[[], object]] = []
        self._task: trio.lowlevel.Task | None = None
        self._parked = False
        self._closed = False

    def add(self, callback: Callable[[], object]) -> None:
        self._added.append(callback)
        if self._parked:
            self._wake()
        elif self._task is None:
            self._task = trio.lowlevel.spawn_system_task(self._run, name="worqr.link.soon")

    def close(self) -> None:
        self._closed = True
        if self._parked:
            self._wake()

    def _wake(self) -> None:
        self._parked = False
        assert self._task is not None, "only a task that exists is parked"
        trio.lowlevel.reschedule(self._task)

    async def _run(self) -> None:
        while not self._closed:
            if not self._added:
                self._parked = True
                await trio.lowlevel.wait_task_rescheduled(self._cancelled)
            callbacks, self._added = self._added, []
            for callback in callbacks:
                guarded(callback)

    def _cancelled(self, _: object) -> trio.lowlevel.Abort:
        self._parked = False
        return trio.lowlevel.Abort.SUCCEEDED


class _Alarm:
    """A task that runs the callbacks of `Timers` when their time has come."""

    def __init__(self) -> None:
        self._timers = Timers(guarded)
        self._wakes_at = math.inf
        self._scope: trio.CancelScope | None = None
        self._closed = False

    def add(self, when: float, callback: Callable[[], object]) -> Timer:
        timer = self._timers.add(when, callback)
        if self._scope is None:
            self._scope = trio.CancelScope()
            trio.lowlevel.spawn_system_task(self._run, name="worqr.link.driver")
        elif self._timers.next() != self._wakes_at:
            self._set()
        return timer

    def _set(self) -> None:
        """Move the end of the task's wait. The task does not wake up for it, so timers that are cancelled cost no turn."""
        assert self._scope is not None, "the task has begun"
        self._wakes_at = self._timers.next()
        self._scope.deadline = trio.current_time() + self._wakes_at - time.monotonic()

    def close(self) -> None:
        self._closed = True
        self._timers.clear()
        if self._scope is not None:
            self._scope.cancel()

    async def _run(self) -> None:
        while not self._closed:
            self._timers.run()
            if self._closed:
                return
            with trio.CancelScope() as self._scope:
                self._set()
                await trio.sleep_forever()
