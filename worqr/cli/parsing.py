"""Parse the values on a command line: durations, times, pairs, arguments. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from worqr.cli.errors import InvalidArguments
from worqr.limits import Limit

_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhdw])")


def parse_duration(text: str | None, what: str) -> float | None:
    """Return seconds: ``90``, ``1.5``, ``10m``, ``1h30m``; units are ms, s, m, h, d and w. InvalidArguments names `what`."""
    if text is None:
        return None
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    parts = _PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise InvalidArguments(
            f"{what} must be a duration such as 90 (seconds), 10m or 1h30m (units: ms, s, m, h, d, w), got {text!r}"
        )
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def parse_rate(text: str, what: str) -> Limit:
    """Return the limit that a number and a period mean: ``100/1m``. InvalidArguments names `what`."""
    number, slash, period = text.partition("/")
    if not slash or not re.fullmatch(r"\d+", number):
        raise InvalidArguments(f"{what} must be a number and a period, such as 100/1m, not {text!r}")
    return Limit(rate=int(number), per=parse_duration(period, f"the period of {what}"))


def parse_time(text: str | None, what: str, *, ago: bool = False) -> datetime | None:
    """Return a time in ISO 8601, by default in this machine's zone. With `ago`, it may be a duration before now."""
    if text is None:
        return None
    try:
        if ago and re.fullmatch(rf"({_PART.pattern})+", text):
            return datetime.now(UTC) - timedelta(seconds=parse_duration(text, what) or 0)
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        or_ago = ", or a duration before now such as 2h" if ago else ""
        raise InvalidArguments(
            f"{what} must be a time such as 2031-05-01T12:00 or 2031-05-01T12:00Z{or_ago}, got {text!r}"
        ) from None


def parse_pairs(texts: Sequence[str], what: str) -> dict[str, str]:
    """Return pairs of ``name=text``."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise InvalidArguments(f"{what} must be name=text, got {text!r}")
        if name in found:
            raise InvalidArguments(f"{what}: {name!r} is given twice")
        found[name] = value
    return found


def parse_arguments(texts: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of a function, typed as ``name=text`` or ``name:=JSON``."""
    found: dict[str, Any] = {}
    for text in texts:
        match = re.fullmatch(r"(\w+)(:?=)(.*)", text, re.DOTALL)
        if match is None:
            raise InvalidArguments(f"an argument must be name=text or name:=JSON, got {text!r}")
        name, sign, value = match.groups()
        if name in found:
            raise InvalidArguments(f"the argument {name!r} is given twice")
        try:
            found[name] = value if sign == "=" else json.loads(value)
        except ValueError as error:
            raise InvalidArguments(
                f"the value after {name}:= must be JSON ({error}); to pass text, type {name}=..."
            ) from None
    return found


def text_like_json(text: str) -> str | None:
    """Return the name in ``name=text`` if the text is also a number, true, false, null, a list or an object in JSON."""
    name, sign, value = text.partition("=")
    try:
        found = None if not sign or name.endswith(":") else json.loads(value)
    except ValueError:
        return None
    return None if isinstance(found, str) or (found is None and value != "null") else name
