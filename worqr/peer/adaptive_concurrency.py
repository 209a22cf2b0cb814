"""`AdaptiveConcurrency`: adapts the concurrency of a peer with ``concurrency="auto"``, once a second.

`ConcurrencyController` is the rule, without a clock or a loop. The rule has these cases:

* *CPU high*: the process needs 90 % of its cores. CPU time that other programs took from it counts as needed. The concurrency
  falls by 25 %, but not below the number of cores, because fewer units could not use them.
* *Lag high*: the loop is 50 ms late on average, because a handler blocks it. The concurrency falls by 25 %, down to 1, whatever
  the CPU load.
* *Room*: the process needs less than 75 % of its cores, and the loop is less than 25 ms late. If all units were in use and more
  were needed, the concurrency rises. It doubles each second until the load was high once. After that it rises by 1, then by 2, 4,
  8.
* Otherwise it does not change. It also does not change while the last decision has not taken effect, because longer runs go on.
* *Unused*: less than half is in use. The concurrency falls by 5 %, down to its first value. So a burst after a quiet hour does
  not start all at once.

If the loop wakes up later than a thread may hold the interpreter's lock, Python code is the limit. Then the rule counts one core,
however many the machine has.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import ceil
from typing import Final

import trio

from worqr.peer.cpu import CpuMeter, usable_cores
from worqr.peer.run_sizes import AUTO_MAX
from worqr.peer.scheduler import AUTO_START, Scheduler

ADJUST_EVERY: Final = 1.0
PROBE_EVERY: Final = 0.05
IDLE_EVERY: Final = 0.5
"""Seconds between decisions, and between measurements of the loop's delay, while something runs and while nothing does."""
CPU_HIGH: Final = 0.9
CPU_LOW: Final = 0.75
"""Shares of the cores. From the first one on, the load is too high; below the second one, more runs may start."""
LAG_HIGH: Final = 0.05
LAG_LOW: Final = 0.025
"""Average delay of the loop in seconds. From the first one on, the load is too high; below the second one, more runs may start.
"""
IN_USE: Final = 0.9
"""Share of the concurrency, less a largest run, that counts as fully used."""
OVERLOAD_FACTOR: Final = 0.75
UNUSED_FACTOR: Final = 0.95
"""Factors of the concurrency after a second with too much load, and after a second in which half of it was unused."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The measurements of one second.

    Attributes:
        cpu: cores that this process needed, with all its threads.
        lag: average delay of the loop in seconds.
        peak: the largest number of units that were held at the same time.
        short: more units would have been used.
    """

    cpu: float
    lag: float
    peak: int
    short: bool


class ConcurrencyController:
    """The rule: it turns each sample into the concurrency of the next second.

    Attributes:
        cores: how many the process may use; a fraction if a quota allows less than one.
        concurrency: units, the present one.
    """

    def __init__(self, cores: float, concurrency: int = AUTO_START) -> None:
        self.cores = cores
        self.concurrency: int = concurrency
        self._step = concurrency

    def next_concurrency(self, seen: Sample, least: int = 1) -> int:
        """Return the concurrency from now on.

        Args:
            seen: the sample taken with the present concurrency.
            least: units, the size of the largest run.
        """
        cores = min(self.cores, 1) if seen.lag >= sys.getswitchinterval() else self.cores
        full, late = seen.cpu >= CPU_HIGH * cores, seen.lag >= LAG_HIGH
        roomy = seen.cpu < CPU_LOW * cores and seen.lag < LAG_LOW
        if full or late:
            self._step = 1
            if 0 < seen.peak <= self.concurrency:
                self._shrink(seen.peak * OVERLOAD_FACTOR, 1 if late else ceil(self.cores))
        elif roomy and seen.short and seen.peak > max(0, IN_USE * self.concurrency - least):
            self._step = min(self._step, self.concurrency)
            self.concurrency += self._step
            self._step *= 2
        elif seen.peak < self.concurrency / 2:
            self._shrink(self.concurrency * UNUSED_FACTOR, AUTO_START)
        self.concurrency = min(max(self.concurrency, least), AUTO_MAX)
        return self.concurrency

    def adopt(self, concurrency: int) -> None:
        """Take over a concurrency that was changed since the last sample."""
        self.concurrency = concurrency

    def _shrink(self, wanted: float, least: int) -> None:
        self.concurrency = min(self.concurrency, max(int(wanted), least))


class AdaptiveConcurrency:
    """Measures for a second, decides, and sets the concurrency of the scheduler, while that is "auto"."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    async def adjust_forever(self) -> None:
        """Adjust the concurrency while it is "auto"; sleep while it is a number."""
        while True:
            await self._scheduler.wait_auto()
            controller = ConcurrencyController(usable_cores(), self._scheduler.concurrency)
            while self._scheduler.auto:
                await self.adjust_once(controller)

    async def adjust_once(self, controller: ConcurrencyController) -> None:
        """Measure for `ADJUST_EVERY` seconds, and decide; first wait until the last decision has taken effect."""
        scheduler = self._scheduler
        with trio.move_on_after(ADJUST_EVERY):
            while scheduler.used > scheduler.concurrency:  # noqa: ASYNC110 - an event would be set by each run
                await trio.sleep(PROBE_EVERY)
        seen = await self._measure()
        if scheduler.auto:
            controller.adopt(scheduler.concurrency)  # a large run may have raised it since
            scheduler.resize(controller.next_concurrency(seen, scheduler.largest_run))

    async def _measure(self) -> Sample:
        scheduler = self._scheduler
        scheduler.reset_peak()
        meter = CpuMeter()
        now = trio.current_time()
        end, late, probes, short = now + ADJUST_EVERY, 0.0, 0, False
        while now < end:
            due = now + (PROBE_EVERY if scheduler.peak else IDLE_EVERY)
            await trio.sleep_until(due)
            now = trio.current_time()
            late, probes, short = late + now - due, probes + 1, short or scheduler.is_limiting
        return Sample(meter.wanted(), late / probes, scheduler.peak, short)
