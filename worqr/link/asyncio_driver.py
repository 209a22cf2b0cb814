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
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, suppress
from contextvars import Context
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
        if self._may_be_cancelled():
            await asyncio.sleep(0)  # raises a pending cancellation; a task that was cancelled before may continue

    async def exchange(self, request: Waiter, submit: Callable[[Any], Watch | None]) -> None:
        if self._may_be_cancelled():
            await asyncio.sleep(0)
        watch: Any = submit(request)
        if not request.settled:
            try:
                await (self._wake_for(request) if watch is None else watch.reply_for(request))
            except BaseException:
                request.abandon()
                raise

    async def wait(self, request: Waiter) -> None:
        if not request.settled:  # at once, as at the end of the link
            try:
                await self._wake_for(request)
            except BaseException:  # cancelled; or thrown away, with a loop that was closed
                request.abandon()
                raise

    def _may_be_cancelled(self) -> bool:
        """Return True if a cancellation of this task was requested. It is still to be delivered, or its task is cleaning up."""
        task = asyncio.current_task(self._loop)
        return task is not None and task.cancelling() > 0

    def _wake_for(self, request: Waiter) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.Future(loop=self._loop)
        request.when_settled(partial(_settle, future))
        return future

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
    """A socket that the loop watches.

    While calls come one at a time, the task of a call goes on in the callback that has read its reply, which saves a turn of the
    loop per call.
    """

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
        self._is_reading = False
        self._resumed: _Reply | None = None
        loop.add_reader(self._descriptor, self._read)

    def _read(self) -> None:
        self._is_reading = True
        guarded(self._readable)
        self._is_reading = False
        reply, self._resumed = self._resumed, None
        if reply is not None:
            reply.resume()  # what its task raises is not guarded: the loop handles it, as it does for any other task

    def reply_for(self, request: Waiter) -> _Reply:
        """Return what the task of `request` awaits. It is the only request on the connection."""
        reply = _Reply(self, self._loop)
        request.when_settled(reply.settle)
        return reply

    def resume_after_read(self, reply: _Reply) -> bool:
        """Let the task of `reply` go on at the end of this read. Return False if nothing is read now, or another task goes on."""
        if not self._is_reading or self._resumed is not None:
            return False
        self._resumed = reply
        return True

    def _watch_write(self, wanted: bool) -> None:
        if wanted:
            self._loop.add_writer(self._descriptor, guarded, self._writable)
        else:
            self._loop.remove_writer(self._descriptor)

    def _unwatch(self) -> None:
        self._loop.remove_writer(self._descriptor)
        self._loop.remove_reader(self._descriptor)


class _Reply:
    """The future that a task awaits for the reply of the only call: one of the kind that ``asyncio.isfuture`` describes.

    A future of asyncio wakes its task one turn of the loop later, and a subclass of it costs as much as that turn.
    """

    __slots__ = ("_asyncio_future_blocking", "_callback", "_context", "_error", "_is_done", "_loop", "_watch")

    def __init__(self, watch: _Watch, loop: asyncio.AbstractEventLoop) -> None:
        self._asyncio_future_blocking = False
        self._watch = watch
        self._loop = loop
        self._is_done = False
        self._error: asyncio.CancelledError | None = None

    # For its task

    def __await__(self) -> Generator[_Reply]:
        self._asyncio_future_blocking = True
        yield self
        self.result()

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def add_done_callback(self, callback: Callable[[_Reply], object], /, *, context: Context) -> None:
        self._callback, self._context = callback, context

    def cancel(self, msg: object = None) -> bool:
        if self._is_done:
            return False
        self._error = asyncio.CancelledError() if msg is None else asyncio.CancelledError(msg)
        self._resume_soon()
        return True

    def done(self) -> bool:
        return self._is_done

    def result(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback references this frame

    # For its request

    def settle(self) -> None:
        """The request has its outcome."""
        if not self._is_done and not self._watch.resume_after_read(self):
            self._resume_soon()

    def resume(self) -> None:
        """Let the task go on now, unless it was cancelled meanwhile. Call it in a callback of the loop, where no task runs."""
        if not self._is_done:
            self._is_done = True
            self._context.run(self._callback, self)

    def _resume_soon(self) -> None:
        self._is_done = True
        self._loop.call_soon(self._callback, self, context=self._context)


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
