"""The clock that tells how old something is, also after the machine has slept."""

from __future__ import annotations

import time

# macOS has no CLOCK_BOOTTIME. Its CLOCK_MONOTONIC goes on while the machine sleeps; `time.monotonic()` does not.
_CLOCK: int | None = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))


def boottime() -> float:
    """Seconds of a clock that goes on while the machine sleeps. Windows has none; there it is the monotonic clock."""
    return time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK)
