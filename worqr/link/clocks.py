"""The clock for the age of keys and replies; it includes the time in which the machine sleeps."""

from __future__ import annotations

import time

# macOS has no CLOCK_BOOTTIME. Its CLOCK_MONOTONIC goes on while the machine sleeps; `time.monotonic()` does not.
_CLOCK: int | None = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))


def boottime() -> float:
    """Return seconds of a clock that goes on while the machine sleeps; on Windows, of the monotonic clock."""
    return time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK)
