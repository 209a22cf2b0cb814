"""Timeouts of runs: one heap and one task for all runs, which costs less than a deadline in each run's cancel scope.

A run that has ended leaves only a number in the heap. The number is skipped when its time comes, or removed when most entries
are of ended runs. A run that is extended gets another number and leaves the old one behind.

The heap uses Trio's clock. Handlers see ``time.monotonic()``, which threads, an asyncio loop and child processes can read too.
"""

# The private fields of Context are hidden from users, not from its neighbours.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import heapq
import math
import threading
import time
from contextlib import suppress
from itertools import count

import trio

from worqr.peer.context import Context

BLOCKED = 0.1
GRACE = 1.0
"""Seconds. If a blocked loop could not check deadlines for longer than the first value, runs get the lost time back, up to the
second value. So a run that ended in time meanwhile keeps its own outcome."""
SWEEP_OVER = 1000
"""Number of entries up to which ended ones are not removed."""


class Deadlines:
    """The deadlines of one peer's runs. Changed only in the loop; `extends` is called from any thread."""

    def __init__(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._thread = threading.get_ident()
        self._heap: list[tuple[float, int]] = []
        self._running: dict[int, Context] = {}
        self._numbers = count(1)
        self._sweep_at = SWEEP_OVER
        self._earlier = trio.Event()

    def begin(self, context: Context, timeout: float) -> None:
        """Start the timeout of a run, `timeout` seconds from now."""
        context.deadline = time.monotonic() + timeout
        self._add(context, trio.current_time() + timeout)

    def _add(self, context: Context, when: float) -> None:
        heap, number = self._heap, next(self._numbers)
        context._timer = number
        self._running[number] = context
        if not heap or when < heap[0][0]:
            self._earlier.set()
        heapq.heappush(heap, (when, number))
        if len(heap) > self._sweep_at:
            heap[:] = [entry for entry in heap if entry[1] in self._running]
            heapq.heapify(heap)
            self._sweep_at = max(SWEEP_OVER, 2 * len(heap))

    def extends(self, context: Context, seconds: float) -> None:
        """Move a run's deadline to `seconds` from now; from any thread, without waiting. A run without a deadline gets none."""
        if context.deadline is None or context.cancel_reason is not None:
            return
        context.deadline = time.monotonic() + seconds
        if threading.get_ident() == self._thread and trio.lowlevel.in_trio_run():
            self.extend(context)
        else:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self.extend, context)

    def extend(self, context: Context) -> None:
        """Set the changed deadline of a run, unless the run has ended or its old deadline has passed."""
        if context.deadline is not None and self._running.pop(context._timer, None) is not None:
            self._add(context, trio.current_time() + context.deadline - time.monotonic())

    def end(self, context: Context) -> None:
        """The run has ended, in time or not."""
        self._running.pop(context._timer, None)

    async def watch_forever(self) -> None:
        """Cancel runs that pass their deadline."""
        while True:
            self._earlier = trio.Event()
            due = self._heap[0][0] if self._heap else math.inf
            expected = time.monotonic() + due - trio.current_time()
            with trio.move_on_at(due) as waiting:
                await self._earlier.wait()
            late = time.monotonic() - expected
            if waiting.cancelled_caught and late > BLOCKED:
                await trio.sleep(min(late, GRACE))
            self.cancel_late()

    def cancel_late(self) -> None:
        """Cancel the runs whose deadline has passed."""
        now = trio.current_time()
        while self._heap and self._heap[0][0] <= now:
            context = self._running.pop(heapq.heappop(self._heap)[1], None)
            if context is not None:
                context._cancel("timeout")
