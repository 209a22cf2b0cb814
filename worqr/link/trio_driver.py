"""`TrioDriver`: the link in the Trio run of its caller. System tasks wait for sockets and times, so it needs no nursery.

While calls come one at a time, the task of each call reads its own reply: see `_Watch`.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, Final, TypeVar

import trio

from worqr.link.driver import Driver, TimeLimit, Timer, Timers, Waiter, Watch, guarded

T = TypeVar("T")

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

    async def exchange(self, request: Waiter, submit: Callable[[Any], Watch | None]) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        watch: Any = self._send(request)
        if watch is not None:
            await watch.read_for(request)
            if request.settled:
                return
        await self.wait(request)

    async def wait(self, request: Waiter) -> None:
        if request.settled:  # at once, as at the end of the link
            await trio.lowlevel.cancel_shielded_checkpoint()
            return
        request.when_settled(partial(trio.lowlevel.reschedule, trio.lowlevel.current_task()))

        def abandon(_: object) -> trio.lowlevel.Abort:
            request.abandon()
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abandon)

    def move_on_after(self, seconds: float, *, shield: bool = False) -> AbstractContextManager[TimeLimit]:
        return trio.move_on_after(seconds, shield=shield)

    async def in_thread(self, work: Callable[[], T]) -> T:
        with trio.CancelScope(shield=True):
            return await trio.to_thread.run_sync(work)
        raise AssertionError("the scope is never cancelled")


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
        """Replies will come for which no task reads."""
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
        request.when_settled(self._interrupt)
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
            if more:
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
