"""The output of the commands: plain tables, and lines of JSON. All text is made safe by `worqr.escaping`; nothing reads markup.

Tables that fit a terminal are in `worqr.cli.terminal`.
"""

from __future__ import annotations

import base64
import json
import math
import re
import sys
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from worqr.escaping import escape as escape
from worqr.escaping import escape_bytes as escape_bytes

if TYPE_CHECKING:
    from worqr.mesh_records import WorkerInfo


# Short forms of values for terminals: worker ids, times, durations, progress.


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


LONGEST_CELL: Final = 200
"""Characters of a payload or a message in a table; JSON has the whole of it."""
_GAP: Final = "  "


def shorten(text: str) -> str:
    """Return the beginning of a text that is too long for a table."""
    return text if len(text) <= LONGEST_CELL else text[: LONGEST_CELL - 1] + "…"


def format_time(when: datetime | None) -> str:
    """Return a time in this machine's zone, to the second."""
    return "-" if when is None else when.astimezone().isoformat(" ", "seconds")


def print_error(message: str, detail: str = "") -> None:
    """Print a message to the standard error, and below it the `detail` (a log, a traceback)."""
    print("worqr:", escape(message.strip(), keep="\n"), file=sys.stderr, flush=True)
    if detail:
        print(escape(detail.strip("\n"), keep="\n"), file=sys.stderr, flush=True)


def print_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows in columns, numbers to the right, without cutting or wrapping anything."""
    cells = [[escape(str(value)) for value in row] for row in rows]
    numeric = [all(_is_number(row[i]) for row in cells) for i in range(len(header))]
    lines = [list(header), *cells]
    widths = [max(_width(line[i]) for line in lines) for i in range(len(header))]
    for line in lines:
        padded = [_pad(text, width, right=right) for text, width, right in zip(line, widths, numeric, strict=True)]
        print(_GAP.join(padded).rstrip())


def _is_number(text: str) -> bool:
    return text == "-" or text.removesuffix(" s").replace(".", "", 1).isdigit()


def _pad(text: str, width: int, *, right: bool) -> str:
    fill = " " * (width - _width(text))
    return fill + text if right else text + fill


def _width(text: str) -> int:
    """Return how many columns of a terminal the text takes."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def print_json(value: Mapping[str, Any]) -> None:
    """Print one object on a line of its own."""
    print(json_line(value))


def worker_fields(worker: WorkerInfo) -> dict[str, Any]:
    """Return a worker for JSON, which has no infinity: ``beat_age`` is null if the heartbeat key has expired."""
    return {**asdict(worker), "beat_age": None if math.isinf(worker.beat_age) else worker.beat_age}


def json_line(value: Mapping[str, Any]) -> str:
    """Return JSON without any character that a terminal would act upon."""
    line = json.dumps(value, ensure_ascii=False, default=_as_json, separators=(",", ":"))
    return line if line.isprintable() else "".join(c if c.isprintable() else _json_escaped(c) for c in line)


def _json_escaped(character: str) -> str:
    return json.dumps(character)[1:-1] if not character.isascii() else f"\\u{ord(character):04x}"


def _as_json(value: object) -> object:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, frozenset | set):
        return sorted(value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    raise TypeError(f"{type(value).__name__} is not for JSON")


def payload_fields(data: bytes) -> dict[str, str]:
    """Return a payload for JSON: as text if it is UTF-8, else as base64; the field ``encoding`` says which."""
    try:
        return {"task": data.decode(), "encoding": "utf-8"}
    except UnicodeDecodeError:
        return {"task": base64.b64encode(data).decode(), "encoding": "base64"}
