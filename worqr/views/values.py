"""How numbers, times, sizes and ids are written: short on terminals and pages, exact in pipes and files. Pure."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime
from typing import Final
from zoneinfo import ZoneInfo

from worqr.escaping import escape
from worqr.policy import UNLIMITED

NONE: Final = "–"
_UNITS: Final = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
LONGEST_ZONE: Final = 100
WORKER_DIGITS: Final = 8
"""Digits of a worker's id that are shown: two workers of a fleet of 1,000 share them once in 8,000 fleets."""
_WORKER: Final = re.compile(rf"((?:.*:)?[0-9a-f]{{{WORKER_DIGITS}}})[0-9a-f]{{24}}", re.DOTALL)
LONGEST_CELL: Final = 200
"""Characters of a payload or a message in a table of a terminal; JSON has the whole of it."""


def count(number: float | None) -> str:
    """Return ``12,345``; a dash for None."""
    return NONE if number is None else f"{number:,.0f}"


def limit(number: float) -> str:
    """Return the limit of a counter: ``10``, or ``unlimited``."""
    return "unlimited" if number >= UNLIMITED else count(number)


def rate(per_second: float | None) -> str:
    """Return a rate with two significant digits: ``0.4``, ``12``."""
    if per_second is None:
        return NONE
    if per_second < 1:
        return "0" if per_second < 0.005 else f"{per_second:.2f}"
    return f"{per_second:,.3g}" if per_second < 100 else f"{per_second:,.0f}"


def duration(seconds: float | None) -> str:
    """Return a duration in one unit, or two: ``340 ms``, ``12 s``, ``3 min 20 s``, ``2 d 4 h``."""
    if seconds is None or math.isnan(seconds):  # a snapshot that another program wrote may have NaN
        return NONE
    if math.isinf(seconds):
        return "never"
    if seconds < 1:
        return f"{max(seconds, 0) * 1000:.0f} ms"
    left, parts = int(seconds), list[str]()
    for size, unit in _UNITS:
        if left >= size or (parts and left):
            if left // size:
                parts.append(f"{left // size} {unit}")
            left %= size
        if len(parts) == 2 or (parts and parts[0].endswith(" s")):
            break
    return " ".join(parts)


def brief(seconds: float | None) -> str:
    """Return a duration in its largest unit, for a narrow column: ``340 ms``, ``12 s``, ``3 min``, ``2 d``."""
    return " ".join(duration(seconds).split(" ")[:2])


def span(seconds: float | None) -> str:
    """Return a duration with two digits, for values that are compared: ``340 ms``, ``1.9 s``, ``12 s``, ``3 min``."""
    if seconds is None:
        return NONE
    return f"{seconds:.1f} s" if 0.9995 <= seconds < 9.95 else brief(round(seconds, 3 if seconds < 1 else 0))


def clock(when: datetime | None) -> str:
    """Return a time in UTC, to the second."""
    return NONE if when is None else f"{when.astimezone(UTC):%Y-%m-%d %H:%M:%S}"


def in_zone(when: datetime | None, zone: str) -> str:
    """Return a time on the clocks of a time zone, with the name of the zone. UTC, if this program does not know the zone."""
    if when is None:
        return NONE
    try:
        there = ZoneInfo(zone) if len(zone) <= LONGEST_ZONE else UTC
    except (KeyError, ValueError, OSError):  # unknown, no name of a zone, or the database of zones is missing
        there = UTC
    return f"{when.astimezone(there):%Y-%m-%d %H:%M:%S %Z}"


def iso(when: datetime) -> str:
    """Return a time for the attribute of a ``<time>``."""
    return when.astimezone(UTC).isoformat(timespec="milliseconds")


def since(when: datetime | None, now: datetime) -> str:
    """Return how long ago it was."""
    return NONE if when is None else duration(max((now - when).total_seconds(), 0.0))


def until(when: datetime | None, now: datetime) -> str:
    """Return in how much time it is: ``in 3 min``, or ``5 s ago``."""
    if when is None:
        return NONE
    seconds = (when - now).total_seconds()
    return f"in {duration(seconds)}" if seconds >= 0 else f"{duration(-seconds)} ago"


def size(number: int) -> str:
    """Return a number of bytes: ``812 B``, ``1.4 KiB``, ``16 MiB``."""
    value, unit = float(number), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" or value >= 10 else f"{value:.1f} {unit}"


def percent(share: float | None) -> str:
    """Return a progress from 0 to 1 in percent; any other number as it is."""
    if share is None:
        return NONE
    return f"{share:.0%}" if 0 <= share <= 1 else f"{share:g}"


def worker(id: str | None) -> str:
    """Return the short form of a worker's id: ``shop:51924699``."""
    match = _WORKER.fullmatch(id or "")
    return match[1] if match else id or NONE


def plural(number: int, one: str, many: str = "") -> str:
    """Return ``1 task``, ``2 tasks``."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def line(text: str, most: int = 160) -> str:
    """Return a text of unknown origin in one line, escaped."""
    shown = escape(text[: most + 1].replace("\n", " "))
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def shorten(text: str) -> str:
    """Return the beginning of a text that is too long for a table of a terminal."""
    return text if len(text) <= LONGEST_CELL else text[: LONGEST_CELL - 1] + "…"


def short_time(when: datetime | None) -> str:
    """Return a moment in this machine's time zone: today the time to the second, else the date and the minute."""
    if when is None:
        return "-"
    local = when.astimezone()
    if local.date() == datetime.now(local.tzinfo).date():
        return local.strftime("%H:%M:%S")
    return f"{local:%Y-%m-%d %H:%M}"


def exact_time(when: datetime | None) -> str:
    """Return a time in this machine's zone, to the second."""
    return "-" if when is None else when.astimezone().isoformat(" ", "seconds")


def exact_seconds(seconds: float) -> str:
    """Return a duration as pipes and files get it: ``3.4 s``, ``7300.0 s``."""
    return "never" if math.isinf(seconds) else f"{seconds:.1f} s"
