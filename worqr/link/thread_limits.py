"""Run coroutines in plain threads, with time limits like ``trio.move_on_after``. A waiting thread checks its own limits.

A thread of a handler also ends its wait when the run of that handler is cancelled. The peer knows these runs (`end_waits_by`).

Not here: how such a coroutine waits (`thread_driver`).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, Final, Protocol, Self, TypeVar

from worqr.errors import WorqrBug

T = TypeVar("T")

_LONGEST = 3600.0
"""The longest single wait in seconds; the operating system limits it as well."""


class CancellableRun(Protocol):
    """The run of a task, whose handler waits in a thread."""

    def check_wait(self) -> None:
        """Raise the cancellation error of this thread, if the run is being cancelled."""
        ...

    def add_wait(self, wake: Callable[[], object]) -> None:
        """Call `wake`, from any thread, when the run is cancelled."""
        ...

    def remove_wait(self, wake: Callable[[], object]) -> None:
        """Do not call `wake` any more."""
        ...


class LimitPassed(BaseException):
    """A limit has passed. Raised by a wait and caught by the block with that limit."""

    def __init__(self, limit: Limit) -> None:
        super().__init__("a time limit has passed")
        self.limit = limit


class Limit:
    """``trio.move_on_after`` for a plain thread."""

    __slots__ = ("_outer", "cancelled_caught", "ends_at")

    def __init__(self, ends_at: float) -> None:
        self.ends_at: float = ends_at
        self.cancelled_caught: bool = False
        self._outer: Limit | None = None

    @property
    def outer(self) -> Limit | None:
        """The block around it."""
        return self._outer

    def __enter__(self) -> Self:
        self._outer = here.limit
        here.limit = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        here.limit = self._outer
        self.cancelled_caught = isinstance(error, LimitPassed) and error.limit is self
        return self.cancelled_caught


class _Here(threading.local):
    """The innermost limit of this thread."""

    limit: Limit | None = None


class _Runs:
    """How to find the run that this thread belongs to."""

    find: Callable[[], CancellableRun | None] | None = None


here: _Here = _Here()
_runs: Final = _Runs()


def end_waits_by(find: Callable[[], CancellableRun | None]) -> None:
    """Let a cancelled run end the waits of its threads. `find` returns the run that a thread belongs to."""
    _runs.find = find


def run_here() -> CancellableRun | None:
    """Return the run that this thread belongs to; None outside a handler."""
    return None if _runs.find is None else _runs.find()


def next_limit() -> float | None:
    """Return when the first limit of this thread passes; None if it has no limit."""
    return None if here.limit is None else min(limit.ends_at for limit in _limits())


def until(wakes_at: float) -> float | None:
    """Return the seconds until `when` or the first limit of this thread; None if there is neither."""
    limit = next_limit()
    end = wakes_at if limit is None else min(wakes_at, limit)
    return None if end == math.inf else min(max(end - time.monotonic(), 0), _LONGEST)


def _limits() -> Iterator[Limit]:
    limit = here.limit
    while limit is not None:
        yield limit
        limit = limit.outer


def check_limits() -> None:
    """End the outermost block whose limit has passed, with all blocks inside it."""
    if here.limit is not None:
        now = time.monotonic()
        passed = [limit for limit in _limits() if limit.ends_at <= now]
        if passed:
            raise LimitPassed(passed[-1])


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in this thread. It may wait only by a `ThreadDriver`."""
    outer, here.limit = here.limit, None  # the interrupted caller's limits do not apply to this coroutine
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        here.limit = outer
    coroutine.close()
    raise WorqrBug(f"{coroutine!r} waits for an event loop, and here is none; please report this")
