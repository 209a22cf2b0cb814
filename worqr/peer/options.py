"""Checking what a caller passes to `serve`, `work` and `join`, before anything is sent."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace

from worqr.errors import UsageError
from worqr.policy import Policy, RetryPolicy
from worqr.task import KEEP_FAILED, Seconds, seconds

PLANNED = {
    "serve": frozenset({"size", "priority", "runs_in", "max_length"}),
    "join": frozenset({"threads", "processes", "only"}),
}
TAKEN: dict[str, tuple[str, ...]] = {
    "serve": ("concurrency", "timeout", "retry", "keep_failed", "on_failure", "result_ttl"),
    "join": ("concurrency", "grace"),
}

PATIENT = Policy(max_failures=100, min_backoff=10.0, max_backoff=900.0)
"""The policy of failure handlers: what they look after shall not get lost because a mail server is down for a day."""


def policy_for(
    retry: RetryPolicy | None = None,
    *,
    timeout: Seconds | None = None,
    keep_failed: int = KEEP_FAILED,
    result_ttl: Seconds | None = None,
    on_failure: bool = False,
) -> Policy:
    """The policy of a handler, checked: what is not given is the default."""
    if retry is not None and not isinstance(retry, RetryPolicy):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"retry must be a worqr.RetryPolicy, not {retry!r}")
    if isinstance(keep_failed, bool) or not isinstance(keep_failed, int) or keep_failed < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"keep_failed must be a whole number, at least 0, not {keep_failed!r}")
    policy = Policy() if retry is None else Policy().over(retry.to_fields())
    return replace(
        policy,
        timeout=None if timeout is None else seconds(timeout, "timeout", positive=True),
        keep_failed=keep_failed,
        result_ttl=0.0 if result_ttl is None else seconds(result_ttl, "result_ttl"),
        on_failure=on_failure,
    )


def refuse_options(where: str, options: Mapping[str, object]) -> None:
    """UsageError for the first of `options`: it does not exist, or not yet."""
    for name in options:
        if name in PLANNED[where]:
            raise UsageError(f"{where}() does not know the option {name!r} yet; it takes {', '.join(TAKEN[where])}")
        close = difflib.get_close_matches(name, TAKEN[where], 1)
        hint = f"; did you mean {close[0]!r}?" if close else f"; it takes {', '.join(TAKEN[where])}"
        raise UsageError(f"{where}() has no option {name!r}{hint}")
