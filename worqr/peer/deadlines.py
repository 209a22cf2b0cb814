"""Timeouts of runs: one heap and one task for all that run, which costs less than a deadline in each run's cancel scope.

A run that has ended leaves a number behind, to be skipped when its time comes or swept when most are such; nothing of the run
itself is kept.
"""

# The private fields of Context are hidden from users, not from its neighbours.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import heapq
import math
from itertools import count

import trio

from worqr.peer.context import Context

SWEEP_OVER = 1000
"""Entries below which nobody minds the ended ones among them."""


class Deadlines:
    """The deadlines of one peer's runs. Changed only in the loop."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []
        self._running: dict[int, Context] = {}
        self._numbers = count(1)
        self._sweep_at = SWEEP_OVER
        self._earlier = trio.Event()

    def begin(self, context: Context, timeout: float) -> None:
        """A run begins that may take `timeout` seconds."""
        heap, when, number = self._heap, trio.current_time() + timeout, next(self._numbers)
        context.deadline, context._timer = when, number
        self._running[number] = context
        if not heap or when < heap[0][0]:
            self._earlier.set()
        heapq.heappush(heap, (when, number))
        if len(heap) > self._sweep_at:
            heap[:] = [entry for entry in heap if entry[1] in self._running]
            heapq.heapify(heap)
            self._sweep_at = max(SWEEP_OVER, 2 * len(heap))

    def end(self, context: Context) -> None:
        """The run has ended in time, or not."""
        self._running.pop(context._timer, None)

    async def watch_forever(self) -> None:
        """Cancel what runs past its deadline."""
        while True:
            self._earlier = trio.Event()
            with trio.move_on_at(self._heap[0][0] if self._heap else math.inf):
                await self._earlier.wait()
            self.cancel_late()

    def cancel_late(self) -> None:
        """Cancel the runs whose deadline has passed."""
        now = trio.current_time()
        while self._heap and self._heap[0][0] <= now:
            context = self._running.pop(heapq.heappop(self._heap)[1], None)
            if context is not None:
                context._cancel("timeout")
