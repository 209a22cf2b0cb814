"""`Timers`: callbacks by their time, for the drivers that have no timers of an event loop. A driver waits until `next`."""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable


class Timer:
    """A callback that runs at some time."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        self.callback = None


class Timers:
    """Callbacks by their time. Times are those of the monotonic clock. `call` runs a callback, and handles its errors."""

    __slots__ = ("_call", "_numbers", "_times")

    def __init__(self, call: Callable[[Callable[[], object]], object]) -> None:
        self._times: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()
        self._call = call

    def add(self, when: float, callback: Callable[[], object]) -> Timer:
        timer = Timer(callback)
        heapq.heappush(self._times, (when, next(self._numbers), timer))
        return timer

    def next(self) -> float:
        """When the next callback is due; infinity if there is none. Callbacks that were cancelled do not count."""
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
