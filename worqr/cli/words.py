"""What people write on a command line, as values: durations, moments, pairs, names of queues. All of it pure."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from worqr.cli.failing import WrongUse

_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhdw])")


def duration(text: str | None, what: str) -> float | None:
    """Seconds: ``90``, ``1.5``, ``10m``, ``1h30m``; ms, s, m, h, d and w are known. WrongUse names `what`."""
    if text is None:
        return None
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    parts = _PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise WrongUse(f"{what} must be seconds, or with units as in 10m or 1h30m (ms, s, m, h, d, w), not {text!r}")
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def moment(text: str | None, what: str, *, ago: bool = False) -> datetime | None:
    """A moment in ISO 8601; without a zone it is this machine's time. With `ago` also a duration before now."""
    if text is None:
        return None
    if ago and re.fullmatch(rf"({_PART.pattern})+", text):
        return datetime.now(UTC) - timedelta(seconds=duration(text, what) or 0)
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        or_ago = ", or so long ago as in 2h" if ago else ""
        raise WrongUse(
            f"{what} must be a time as in 2031-05-01T12:00 or 2031-05-01T12:00Z{or_ago}, not {text!r}"
        ) from None


def pairs(texts: Sequence[str], what: str) -> dict[str, str]:
    """``name=text``, each."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise WrongUse(f"{what} must be name=text, not {text!r}")
        if name in found:
            raise WrongUse(f"{what}: {name!r} is there twice")
        found[name] = value
    return found


def arguments(texts: Sequence[str]) -> dict[str, Any]:
    """Arguments of a function: ``name=text`` or ``name:=JSON``."""
    found: dict[str, Any] = {}
    for text in texts:
        match = re.fullmatch(r"(\w+)(:?=)(.*)", text, re.DOTALL)
        if match is None:
            raise WrongUse(f"an argument must be name=text or name:=JSON, not {text!r}")
        name, sign, value = match.groups()
        if name in found:
            raise WrongUse(f"the argument {name!r} is there twice")
        try:
            found[name] = value if sign == "=" else json.loads(value)
        except ValueError as error:
            raise WrongUse(f"what follows {name}:= must be JSON ({error}); for a text write {name}=...") from None
    return found
