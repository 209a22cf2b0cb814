"""Callbacks that run at a certain time.

`Timers` keeps the callbacks of the drivers for Trio and for plain threads, and tells them until when to wait. The asyncio driver
uses the timers of its loop. `Alarm` plans one callback with the timers of any driver.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable
from typing import Final

from worqr.link.driver import Driver, Timer

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

    __slots__ = ("_call", "_numbers", "_times")

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
        """Run the callbacks that are due."""
        times = self._times
        if times and times[0][0] <= (now := time.monotonic()):
            while times and times[0][0] <= now:
                callback = heapq.heappop(times)[2].callback
                if callback is not None:
                    self._call(callback)

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

    __slots__ = ("_callback", "_driver", "_timer", "at")

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
