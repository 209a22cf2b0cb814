"""Pacing: how a peer with ``concurrency="auto"`` finds out how much it can hold at once, judged each second.

Here: the rule (`Pace`, which knows no clock and no loop), what it is fed with, and the duty that does so. The rule, each second:

* *full*: the process wants 90 % of its cores, what other programs kept it from using included. Then a quarter less, but not
  less than there are cores: fewer than that could not use them.
* *late*: whatever the CPU does, the loop is 50 ms late on average (a handler blocks it). Then a quarter less, down to 1.
* *roomy*: it wants less than 75 %, and is less than 25 ms late. Then more, if all of it was in use and more was wanted
  still: twice as much until it was full or late for the first time; after that 1 more, then 2, 4, 8.
* Between these nothing changes; nor while what was decided last has not taken effect, because longer runs go on.
* Less than half in use: 5 % less, down to where it began, so that what comes after a quiet hour does not all start at once.

A loop that is woken later than a thread may keep the interpreter's lock waits for that lock, or for itself. Then there is one
core, however many the machine has: what computes is Python.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import ceil
from typing import Final

import trio

from worqr.peer.capacity import AUTO_MOST, AUTO_START, Capacity
from worqr.peer.cpu import CpuMeter, usable_cores

JUDGE_EVERY: Final = 1.0
PROBE_EVERY: Final = 0.05
IDLE_EVERY: Final = 0.5
"""Seconds between judgements, and between looks at how late the loop is, while something runs and while nothing does."""
FULL: Final = 0.9
ROOMY: Final = 0.75
"""Shares of the cores: from here on there is too much, below there is room for more."""
LATE: Final = 0.05
PUNCTUAL: Final = 0.025
"""Seconds that the loop is late on average: from here on there is too much, below there is room for more."""
IN_USE: Final = 0.9
"""Share of the concurrency, less a largest run, that counts as all of it."""
LESS: Final = 0.75
FADE: Final = 0.95
"""What is left of the concurrency after a second with too much, and after one with half of it unused."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What was seen in a second.

    Attributes:
        cpu: cores that this process wanted, with all its threads.
        lag: seconds that the loop was late, on average.
        peak: units, the most that were held at once.
        short: more would have been used.
    """

    cpu: float
    lag: float
    peak: int
    short: bool


class Pace:
    """The rule: each sample is answered by the concurrency for the next second.

    Attributes:
        cores: how many the process may use; a part of one if it is held down to that.
        concurrency: units, the present one.
    """

    def __init__(self, cores: float, concurrency: int = AUTO_START) -> None:
        self.cores = cores
        self.concurrency: int = concurrency
        self._step = concurrency

    def judge(self, seen: Sample, least: int = 1) -> int:
        """The concurrency from now on.

        Args:
            seen: what the present one led to.
            least: units, the size of the largest run.
        """
        cores = min(self.cores, 1) if seen.lag >= sys.getswitchinterval() else self.cores
        full, late = seen.cpu >= FULL * cores, seen.lag >= LATE
        roomy = seen.cpu < ROOMY * cores and seen.lag < PUNCTUAL
        if full or late:
            self._step = 1
            if 0 < seen.peak <= self.concurrency:
                self._shrink(seen.peak * LESS, 1 if late else ceil(self.cores))
        elif roomy and seen.short and seen.peak > max(0, IN_USE * self.concurrency - least):
            self._step = min(self._step, self.concurrency)
            self.concurrency += self._step
            self._step *= 2
        elif seen.peak < self.concurrency / 2:
            self._shrink(self.concurrency * FADE, AUTO_START)
        self.concurrency = min(max(self.concurrency, least), AUTO_MOST)
        return self.concurrency

    def _shrink(self, wanted: float, least: int) -> None:
        self.concurrency = min(self.concurrency, max(int(wanted), least))


class Pacer:
    """The duty of a peer: watches for a second, judges, and sets the concurrency of `capacity`, while that is "auto"."""

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity

    async def pace_forever(self) -> None:
        """Sleeps while the concurrency is a number."""
        while True:
            await self._capacity.wait_auto()
            pace = Pace(usable_cores(), self._capacity.concurrency)
            while self._capacity.auto:
                await self.pace_once(pace)

    async def pace_once(self, pace: Pace) -> None:
        """Watch for `JUDGE_EVERY` seconds, and judge; first give what was decided last so long to take effect."""
        capacity = self._capacity
        with trio.move_on_after(JUDGE_EVERY):
            while capacity.used > capacity.concurrency:  # noqa: ASYNC110 - an event would be set by each run
                await trio.sleep(PROBE_EVERY)
        seen = await self._watch()
        if capacity.auto:
            pace.concurrency = capacity.concurrency  # a large run that is served since may have raised it
            capacity.resize(pace.judge(seen, capacity.least))

    async def _watch(self) -> Sample:
        capacity = self._capacity
        capacity.peak = capacity.used
        meter = CpuMeter()
        now = trio.current_time()
        end, late, probes, short = now + JUDGE_EVERY, 0.0, 0, False
        while now < end:
            due = now + (PROBE_EVERY if capacity.peak else IDLE_EVERY)
            await trio.sleep_until(due)
            now = trio.current_time()
            late, probes, short = late + now - due, probes + 1, short or capacity.short
        return Sample(meter.wanted(), late / probes, capacity.peak, short)
