"""The mailbox of one asyncio loop, of whatever make. Imported when the first link is made under asyncio: see `loops`.

A cancellation of asyncio is an exception that comes once; that it was asked for is counted in the task. Three rules follow:

* A cancellation that was asked for and has not come yet is found by the task's count, before anything is sent.
* A time limit asks for one as well, and takes back what it asked for when its block ends. It ends its block only if nobody
  else, be it a limit around it, has asked meanwhile; so a cancellation of the caller's is never taken for a limit's.
* When a task is cancelled, its future is at once; the task comes to know a turn of the loop later. What is settled in
  between wakes nobody.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from worqr.link.mailbox import TimeLimit, Waiter, guarded

T = TypeVar("T")


class AsyncioMailbox:
    """The mailbox of the asyncio loop it is made in."""

    __slots__ = ("_loop",)

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def post(self, deliver: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(guarded, deliver)
        except RuntimeError:
            pass  # it is closed: nobody is left to be told

    async def checkpoint(self) -> None:
        await asyncio.sleep(0)

    async def prepare(self, request: Waiter) -> None:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            await asyncio.sleep(0)  # raises what has not come yet; who was cancelled before and cleans up may go on

    async def wait(self, request: Waiter) -> None:
        # What settles a request wakes it by `post`, so in this thread, and cannot come between these lines.
        future = self._loop.create_future()
        request.wake = partial(_settle, future)
        try:
            await future
        except BaseException:  # cancelled; or thrown away, with a loop that was closed
            request.wake = None
            request.abandoned = True
            raise

    def move_on_after(self, seconds: float) -> AbstractContextManager[TimeLimit]:
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
            del cancelled  # its traceback knows this frame


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():  # its task was cancelled, and does not know yet
        future.set_result(None)


class _Limit:
    """``trio.move_on_after`` for an asyncio task."""

    __slots__ = ("_asked", "_before", "_loop", "_seconds", "_task", "_timer", "cancelled_caught")

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self.cancelled_caught = False
        self._loop = loop
        self._seconds = seconds
        self._asked = False
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None, "whoever waits under asyncio is a task"
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
