"""Detect a blocked event loop: the loop confirms ticks, and the keepalive thread checks the age of the last one. No sockets,
no threads.

A loop that has not run a tick for over a second is logged, with the code that it is running. A loop that has not run one for
the block limit counts as blocked. The time in which the keepalive thread itself could not run (a frozen process, a C call
that holds the GIL) does not count.

Nothing here logs directly, because a handler that blocks would stop the keepalive. The keepalive thread passes the collected
lines to the log thread.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from worqr.link.driver import Driver

_TURNING = 1.0  # seconds: a loop that confirms a tick within this time is running
_LATE = 1.0  # seconds: the keepalive thread itself did not run for this time


class Line(NamedTuple):
    """A line for the log: the arguments of `emit`."""

    event: str
    text: str
    seconds: float
    where: str | None = None
    level: int | None = None


class LoopState(enum.Enum):
    """The state of a loop, by the time for which the last tick has waited."""

    TURNING = "it was confirmed, or has not waited for long"
    BLOCKED = "it has waited for over a second"
    STALLED = "it has waited for longer than the block limit"


class LoopMonitor:
    """The watch over one loop.

    Attributes:
        state: TURNING -> BLOCKED -> STALLED while a tick waits; TURNING when the loop has confirmed it.
    """

    def __init__(self, driver: Driver, describe: Callable[[], str], block_limit: float) -> None:
        self.state: LoopState = LoopState.TURNING
        self.blocks: int = 0
        self._driver = driver
        self._describe = describe
        self._block_limit = block_limit
        self._asked = 0  # changed only by the keepalive thread
        self._asked_at = 0.0
        self._answered = 0  # changed only in the loop, like:
        self._last_lag = 0.0
        self._blocked_since = 0.0
        self._slice_began = 0.0
        self._lines: list[Line] = []

    @property
    def lag(self) -> float:
        waiting = time.monotonic() - self._asked_at if self._answered != self._asked else 0.0
        return max(waiting, self._last_lag)

    def look(self, now: float) -> None:
        """Judge the last tick; post the next one if it was answered. Two ticks are never on their way."""
        if self._answered != self._asked:
            waited = now - self._asked_at
            if self.state is LoopState.TURNING:
                self._blocked_since = self._asked_at
            if waited > _TURNING and self.state is LoopState.TURNING:
                self.state = LoopState.BLOCKED
                self.blocks += 1
                self._line(
                    "loop.blocked",
                    "the event loop has not turned for %(duration).1f s; it is busy with %(where)s; let blocking code run in a "
                    "thread, as the handlers do that are declared with a plain def",
                    waited,
                )
            if waited > self._block_limit and self.state is not LoopState.STALLED:
                self.state = LoopState.STALLED
                self._line(
                    "loop.blocked",
                    "the event loop has not turned for %(duration).1f s, and this worker sends no heartbeats until it does: "
                    "it is busy with %(where)s",
                    waited,
                    logging.ERROR,
                )
            return
        if self.state is not LoopState.TURNING:
            gone = now - self._blocked_since
            self._lines.append(Line("loop.turns", "the event loop turns again, after %(duration).1f s", gone))
        self.state = LoopState.TURNING
        self._asked_at = now  # before `_asked`: any thread may read `lag` between the two
        self._asked += 1
        self._driver.post(partial(self._tick, self._asked))

    def forgive(self, late: float) -> None:
        """The keepalive thread woke up this much too late: the process was frozen, or the GIL held. The loop could not run
        either.
        """
        if late > _LATE:
            self._asked_at += late
            self._line(
                "heartbeat.late",
                "the heartbeat thread could not run for %(duration).1f s; the process was frozen, or held up by %(where)s",
                late,
            )

    def begin_slice(self, now: float) -> None:
        """The keepalive thread begins to wait for a reply."""
        self._slice_began = now

    def end_slice(self, now: float, expected: float) -> None:
        """It has waited for a slice of this length, and waits on. See `forgive`."""
        self.forgive(now - self._slice_began - expected)
        self._slice_began = now

    def lines(self) -> list[Line]:
        lines, self._lines = self._lines, []
        return lines

    def _line(self, event: str, text: str, seconds: float, level: int | None = None) -> None:
        try:
            where = self._describe()
        except Exception as exc:
            where = f"(unknown: {type(exc).__name__})"
        self._lines.append(Line(event, text, seconds, where, level))

    def _tick(self, number: int) -> None:
        """In the loop: confirm a tick."""
        self._last_lag = time.monotonic() - self._asked_at
        self._answered = number
