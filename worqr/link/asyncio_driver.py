"""`AsyncioDriver`: the link in the asyncio loop of its caller, including uvloop. Imported at first use.

asyncio delivers a cancellation as one exception, and the task counts the cancellations that were requested. Three rules follow:

* A cancellation that was requested but not delivered yet is detected by the task's count, before anything is sent.
* A time limit requests a cancellation as well, and withdraws its request when its block ends. It ends its block only if no
  other code has requested a cancellation meanwhile. So the caller's cancellation is never mistaken for that of a time limit.
* When a task is cancelled, its future is cancelled at once, but the task resumes one loop iteration later. A request that is
  settled in between wakes no task.
"""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from worqr.link.driver import Driver, TimeLimit, Waiter, Watch, guarded

T = TypeVar("T")


class AsyncioDriver(Driver):
    """The driver of the asyncio loop it is made in."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def post(self, deliver: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop is closed: no task is left that waits
            self._loop.call_soon_threadsafe(guarded, deliver)

    def soon(self, callback: Callable[[], object]) -> None:
        self._loop.call_soon(guarded, callback)

    def call_at(self, when: float, callback: Callable[[], object]) -> asyncio.TimerHandle:
        return self._loop.call_later(max(when - time.monotonic(), 0), guarded, callback)

    def watch(self, sock: socket.socket, readable: Callable[[], object], writable: Callable[[], object]) -> _Watch:
        return _Watch(self._loop, sock, readable, writable)

    async def checkpoint(self) -> None:
        await asyncio.sleep(0)

    async def prepare(self, request: Waiter) -> None:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            await asyncio.sleep(
                0
            )  # raises a pending cancellation; a task that was cancelled before and cleans up may continue

    async def wait(self, request: Waiter) -> None:
        if request.settled:  # at once, as at the end of the link
            return
        future = self._loop.create_future()
        request.when_settled(partial(_settle, future))
        try:
            await future
        except BaseException:  # cancelled; or thrown away, with a loop that was closed
            request.abandon()
            raise

    def move_on_after(self, seconds: float, *, shield: bool = False) -> AbstractContextManager[TimeLimit]:
        return _Limit(self._loop, seconds)

    async def in_thread(self, work: Callable[[], T]) -> T:
        running = self._loop.run_in_executor(None, work)
        cancelled: asyncio.CancelledError | None = None
        while not running.done():
            try:
                await asyncio.wait((running,))
            except asyncio.CancelledError as error:
                cancelled = error
        try:
            result = running.result()
            if cancelled is not None:
                raise cancelled
            return result
        finally:
            del cancelled  # its traceback references this frame


class _Watch(Watch):
    """A socket that the loop watches."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        readable: Callable[[], object],
        writable: Callable[[], object],
    ) -> None:
        super().__init__(sock, readable, writable)
        self._loop = loop
        self._descriptor = sock.fileno()
        loop.add_reader(self._descriptor, guarded, readable)

    def _watch_write(self, wanted: bool) -> None:
        if wanted:
            self._loop.add_writer(self._descriptor, guarded, self._writable)
        else:
            self._loop.remove_writer(self._descriptor)

    def _unwatch(self) -> None:
        self._loop.remove_writer(self._descriptor)
        self._loop.remove_reader(self._descriptor)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():  # otherwise its task was cancelled, and has not resumed yet
        future.set_result(None)


class _Limit:
    """``trio.move_on_after`` for an asyncio task."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self.cancelled_caught = False
        self._loop = loop
        self._seconds = seconds
        self._asked = False
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None, "only a task waits under asyncio"
        self._task: asyncio.Task[Any] = task
        self._before = task.cancelling()
        if self._seconds != math.inf:
            self._timer = self._loop.call_later(max(self._seconds, 0), self._end)
        return self

    def _end(self) -> None:
        """It has passed, while the task waits in the block: this runs in the loop."""
        self._asked = True
        self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if self._timer is not None:
            self._timer.cancel()
        if self._asked and self._task.uncancel() <= self._before:
            self.cancelled_caught = isinstance(error, asyncio.CancelledError)
        return self.cancelled_caught
