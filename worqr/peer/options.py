"""Checking what a caller passes to `serve`, `work` and `join`, before anything is sent."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from worqr.errors import UsageError

PLANNED = {
    "serve": frozenset(
        {"timeout", "retry", "keep_failed", "size", "priority", "on_failure", "runs_in", "result_ttl", "max_length"}
    ),
    "join": frozenset({"threads", "processes", "only"}),
}
TAKEN: dict[str, tuple[str, ...]] = {"serve": ("concurrency",), "join": ("concurrency", "grace")}


def refuse_options(where: str, options: Mapping[str, object]) -> None:
    """UsageError for the first of `options`: it does not exist, or not yet."""
    for name in options:
        if name in PLANNED[where]:
            raise UsageError(f"{where}() does not know the option {name!r} yet; it takes {', '.join(TAKEN[where])}")
        close = difflib.get_close_matches(name, TAKEN[where], 1)
        hint = f"; did you mean {close[0]!r}?" if close else f"; it takes {', '.join(TAKEN[where])}"
        raise UsageError(f"{where}() has no option {name!r}{hint}")


def check_count(value: object, what: str) -> int:
    """`value` as a whole number of at least 1."""
    if value == "auto":
        raise UsageError(f"{what} does not know 'auto' yet; it takes a whole number of at least 1")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{what} must be a whole number of at least 1, not {value!r}")
    return value
