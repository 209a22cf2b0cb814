"""The table of queues, which `worqr queues` prints once and `worqr queues --watch` draws again and again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from worqr.cli import output
from worqr.cli.terminal import Column, number
from worqr.limits import HELD_BACK, describe_limits

if TYPE_CHECKING:
    from worqr.mesh_records import QueueInfo

QUEUES: Final = (
    Column("queue", fit="fold"),
    number("waiting", "wait", always=True),
    number("scheduled", "sched"),
    number("blocked", "block"),
    number("running", "run", always=True),
    number("failed", "fail", "bold red"),
    number("broken", "brkn", "bold red"),
    number("workers", "wrkrs", always=True),
    Column(
        "unserved",
        plain=lambda alone: "yes" if alone else "-",
        shown=lambda alone: "no worker serves it" if alone else "",
        note=True,
    ),
    Column("oldest job", "oldest", plain=output.exact_seconds, shown=output.short_duration, right=True),
    Column(
        "paused",
        plain=lambda reason: "" if reason is None else reason or "yes",
        shown=lambda reason: "" if reason is None else f"paused: {reason}" if reason else "paused",
        note=True,
    ),
    Column("held back", shown=str, note=True),
)


def queue_row(info: QueueInfo) -> Sequence[object]:
    """Return the values of `QUEUES`."""
    counts = (info.waiting, info.scheduled, info.blocked, info.running, info.failed, info.broken, info.workers)
    held_back = "" if info.held_back == "paused" and info.held_for is None else why_held_back(info)
    return (info.name, *counts, is_unserved(info), info.oldest_job, info.paused, held_back)


def is_unserved(info: QueueInfo) -> bool:
    """Return True if tasks wait and no worker serves the queue: they wait until one does."""
    return info.waiting > 0 and not info.workers


def what_may_start(info: QueueInfo) -> str:
    """Return the limits of a queue in words, and why no task may start now."""
    by = ", set by an operator" if info.limits_overridden else ""
    return "; ".join(filter(None, (describe_limits(info.limits) + by, why_held_back(info))))


def why_held_back(info: QueueInfo) -> str:
    """Return why no task may start now, and for how long; empty if one may."""
    reason = HELD_BACK[info.held_back]
    return reason if info.held_for is None or not reason else f"{reason}, for {output.short_duration(info.held_for)}"
