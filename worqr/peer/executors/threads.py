"""`Threads`: runs plain functions in threads.

A thread cannot be stopped. Its function can check for a cancellation (`Context.check_cancelled`,
``trio.from_thread.check_cancelled``). Its claim is settled when the thread has really ended. A run that is cancelled before its
thread begins never begins. Trio's threads are daemons, so a stuck one delays neither the end of the peer nor that of the process.

A function that a handler runs on the loop with ``trio.from_thread.run`` is not cancelled together with the handler. Trio runs it
in a separate task, because the thread may be left behind.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import trio

from worqr.peer.forks import EndForks
from worqr.peer.executors.offloaded import OffloadedRun, no_abort
from worqr.peer.executors.stacks import describe, thread_frames
from worqr.peer.handlers import Handler, is_unrun, name_of, named_after
from worqr.peer.run import check_thread
from worqr.tracebacks import is_a

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
            f"{handler!r} is a plain function that returned {type(result).__name__}, not run yet: use async def"
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
