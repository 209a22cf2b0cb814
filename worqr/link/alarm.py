"""`Alarm`: one planned callback in the driver's loop, and how late it came."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

from worqr.link.driver import Driver, Timer

LATE: Final = 0.05
"""Seconds: a callback that comes later was held up by a blocked loop."""


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
