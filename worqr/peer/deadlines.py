"""`Deadlines`: the timeouts of runs, in one heap with one task. This costs less than a deadline in each run's cancel scope.

A run that was settled leaves a stopped `Timer` in the heap. The timer is skipped when its time comes, or removed when most
entries are stopped. A run that is extended gets a new timer; the old one stays in the heap, stopped.

The heap uses Trio's clock. Handlers use ``time.monotonic()``, which threads, an asyncio loop and child processes can read too.
"""

from __future__ import annotations

import heapq
import math
import threading
import time
from contextlib import suppress
from itertools import count
from typing import Any

import trio

from worqr.peer.run import Run, Timer

BLOCKED = 0.1
GRACE = 1.0
"""Seconds. If a blocked loop could not check deadlines for longer than the first value, runs get the lost time back, up to the
second value. So a run that ended in time keeps its own outcome.
"""
COMPACT_OVER = 1000
"""Number of entries above which stopped timers are removed."""


class Deadlines:
    """The deadlines of one peer's runs. Changed only in the loop; `request_extension` is called from any thread."""

    def __init__(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._thread = threading.get_ident()
        self._heap: list[tuple[float, int, Timer]] = []
        self._numbers = count(1)
        self._compact_at = COMPACT_OVER
        self._earlier = trio.Event()

    def begin(self, run: Run[Any], timeout: float) -> None:
        """Start the timeout of a run, `timeout` seconds from now."""
        self._add(Timer(run, time.monotonic() + timeout), trio.current_time() + timeout)

    def _add(self, timer: Timer, when: float) -> None:
        heap = self._heap
        if not heap or when < heap[0][0]:
            self._earlier.set()
        heapq.heappush(heap, (when, next(self._numbers), timer))
        if len(heap) > self._compact_at:
            heap[:] = [entry for entry in heap if entry[2].run is not None]
            heapq.heapify(heap)
            self._compact_at = max(COMPACT_OVER, 2 * len(heap))

    def request_extension(self, run: Run[Any], seconds: float) -> None:
        """Move a run's deadline to `seconds` from now, without waiting. From any thread.

        A run without a deadline stays without one.
        """
        if run.timer is None or run.cancel_reason is not None:
            return
        run.timer.move_to(time.monotonic() + seconds)
        if threading.get_ident() == self._thread and trio.lowlevel.in_trio_run():
            self._apply_extension(run)
        else:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._apply_extension, run)

    def _apply_extension(self, run: Run[Any]) -> None:
        """Set the changed deadline of a run, unless the run has ended or its old deadline has passed."""
        old = run.timer
        if old is not None and old.stop() is not None:
            self._add(Timer(run, old.deadline), trio.current_time() + old.deadline - time.monotonic())

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
            run = heapq.heappop(self._heap)[2].stop()
            if run is not None:
                run.cancel("timeout")
