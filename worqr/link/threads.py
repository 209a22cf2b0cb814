"""The mailbox of plain threads: whoever waits blocks. With it, what is written for a loop runs where there is none.

A coroutine that waits by a mailbox alone never yields here, so `run_blocking` runs it to its end in one step. Deadlines are
kept: a wait that lasts too long ends with an exception of ours, which ends the block that set the deadline.

There is no loop, so what is posted runs at once, in the link's thread that posts it, beside those who wait. So `Waiter.wake`
is set by `prepare`, before anybody else knows the waiter, and calling it twice does no harm. It is taken when the outcome is
complete, and whoever finds it taken has nothing to wait for. No lock is held while somebody waits or a caller's code runs:
an exception out of a signal handler (Ctrl-C) leaves nothing behind but an abandoned request.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from worqr.errors import WorqrBug
from worqr.link.mailbox import TimeLimit, Waiter, guarded

T = TypeVar("T")


class ThreadMailbox:
    """The mailbox of plain threads, of any number of them."""

    __slots__ = ()

    def post(self, deliver: Callable[[], object]) -> None:
        guarded(deliver)

    async def checkpoint(self) -> None:
        _check_limits()

    async def prepare(self, request: Waiter) -> None:
        _check_limits()
        request.wake = _Gate()

    async def wait(self, request: Waiter) -> None:
        gate = request.wake
        if gate is None:
            return  # it was settled meanwhile
        assert isinstance(gate, _Gate), "whoever waits in a thread has prepared to"
        try:
            gate.wait()
        except BaseException:
            request.wake = None
            request.abandoned = True
            raise

    def move_on_after(self, seconds: float) -> AbstractContextManager[TimeLimit]:
        return _Limit(time.monotonic() + seconds)

    async def in_thread(self, work: Callable[[], T]) -> T:
        return work()


class _Gate:
    """One thread waits for it, once; calling it opens it."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def __call__(self) -> None:
        try:
            self._lock.release()
        except RuntimeError:
            pass  # it is open

    def wait(self) -> None:
        """Until it is open, or a limit of this thread has passed."""
        while _here.limit is not None:
            _check_limits()
            left = min(limit.ends_at for limit in _limits()) - time.monotonic()
            patience = -1 if left == math.inf else min(max(left, 0), threading.TIMEOUT_MAX)
            if self._lock.acquire(timeout=patience):
                return
        self._lock.acquire()


class _Passed(BaseException):
    """A limit has passed: on its way from a wait to the block that has set the limit, where it ends."""

    def __init__(self, limit: _Limit) -> None:
        super().__init__("a time limit has passed")
        self.limit = limit


class _Limit:
    """``trio.move_on_after`` for a plain thread."""

    __slots__ = ("_outer", "cancelled_caught", "ends_at")

    def __init__(self, ends_at: float) -> None:
        self.ends_at = ends_at
        self.cancelled_caught = False
        self._outer: _Limit | None = None

    @property
    def outer(self) -> _Limit | None:
        """The block around it."""
        return self._outer

    def __enter__(self) -> Self:
        self._outer = _here.limit
        _here.limit = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        _here.limit = self._outer
        self.cancelled_caught = isinstance(error, _Passed) and error.limit is self
        return self.cancelled_caught


class _Here(threading.local):
    """Of this thread: the innermost limit that it waits under."""

    limit: _Limit | None = None


_here = _Here()


def _limits() -> Iterator[_Limit]:
    limit = _here.limit
    while limit is not None:
        yield limit
        limit = limit.outer


def _check_limits() -> None:
    """End the outermost block whose limit has passed, and so all those within it."""
    if _here.limit is not None:
        now = time.monotonic()
        passed = [limit for limit in _limits() if limit.ends_at <= now]
        if passed:
            raise _Passed(passed[-1])


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in this thread; it waits by a `ThreadMailbox`, or not at all."""
    outer, _here.limit = _here.limit, None  # those of whoever is interrupted here, or was, are not its own
    try:
        coroutine.send(None)
    except StopIteration as end:
        return cast("T", end.value)
    finally:
        _here.limit = outer
    coroutine.close()
    raise WorqrBug(f"{coroutine!r} waits for an event loop, and here is none; please report this")
