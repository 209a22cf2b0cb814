"""Timeouts of runs: one heap and one task for all that run, which costs less than a deadline in each run's cancel scope.

A run that has ended leaves a number behind, to be skipped when its time comes or swept when most are such; nothing of the run
itself is kept. One that is extended gets another number, so that it leaves one behind as well.

The heap goes by Trio's clock. Handlers are told by ``time.monotonic()``, which a thread, an asyncio loop and a child process
can read as well.
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
"""Seconds. If the loop could not look at a deadline for longer than the first, because some handler blocked it, runs get the lost
time back before they are cancelled, up to the second: a neighbour that has ended by itself keeps its own outcome."""
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
        """A run begins that may take `timeout` seconds."""
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
        """A run asks for `seconds` from now; from any thread, without waiting. One that has no deadline gets none."""
        if context.deadline is None or context.cancel_reason is not None:
            return
        context.deadline = time.monotonic() + seconds
        if threading.get_ident() == self._thread and trio.lowlevel.in_trio_run():
            self.extend(context)
        else:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self.extend, context)

    def extend(self, context: Context) -> None:
        """Let a run go on until its deadline, which has changed; unless it has ended, or its time was up before we came here."""
        if context.deadline is not None and self._running.pop(context._timer, None) is not None:
            self._add(context, trio.current_time() + context.deadline - time.monotonic())

    def end(self, context: Context) -> None:
        """The run has ended in time, or not."""
        self._running.pop(context._timer, None)

    async def watch_forever(self) -> None:
        """Cancel what runs past its deadline."""
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
