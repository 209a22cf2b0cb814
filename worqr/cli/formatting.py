"""Short forms of values for terminals: worker ids, times, durations, progress. Pure."""

from __future__ import annotations

import math
import re
from datetime import datetime
from typing import Final

WORKER_DIGITS: Final = 8
"""Digits of a worker's id that terminals show: two workers of a fleet of 1,000 share them once in 8,000 fleets."""
_WORKER: Final = re.compile(rf"((?:.*:)?[0-9a-f]{{{WORKER_DIGITS}}})[0-9a-f]{{24}}", re.DOTALL)
_UNITS: Final = ((86400, "d"), (3600, "h"), (60, "min"))


def short_worker_id(id: str | None) -> str:
    """Return the short form of a worker's id: ``shop:51924699``."""
    match = _WORKER.fullmatch(id or "-")
    return match[1] if match else id or "-"


def short_time(when: datetime | None) -> str:
    """Return a moment in this machine's time zone: today the time to the second, else the date and the minute."""
    if when is None:
        return "-"
    local = when.astimezone()
    if local.date() == datetime.now(local.tzinfo).date():
        return local.strftime("%H:%M:%S")
    return f"{local:%Y-%m-%d %H:%M}"


def short_duration(seconds: float | None) -> str:
    """Return a duration in its largest unit: ``3.4 s``, ``12 min``, ``3 h``, ``2 d``."""
    if seconds is None:
        return "-"
    if math.isinf(seconds):
        return "never"
    for size, unit in _UNITS:
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s"


def millis(seconds: float | None) -> str:
    """Return a duration from milliseconds to days: ``12 ms``, ``3.4 s``, ``12 min``."""
    if seconds is None or seconds >= 1:
        return short_duration(seconds)
    return f"{seconds * 1000:.0f} ms"


def exact_seconds(value: float | None) -> str:
    """Return a number of seconds as pipes and files get it: ``3.4 s``, ``7300.0 s``."""
    return "-" if value is None else "never" if math.isinf(value) else f"{value:.1f} s"


def percent(share: float | None) -> str:
    """Return a progress from 0 to 1 in percent; any other number unchanged."""
    if share is None:
        return "-"
    return f"{share:.0%}" if 0 <= share <= 1 else f"{share:g}"
