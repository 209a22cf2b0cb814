"""Why tasks of a queue do not start, and until when, as sentences. Pure. Pages and live updates use the same functions."""

from __future__ import annotations

from typing import Final

from worqr.dashboard import figures
from worqr.limits import HELD_BACK
from worqr.mesh_records import LaneInfo, QueueInfo

FAST: Final = 60.0
"""Seconds: a pause or a rate that ends sooner is no reason to stop workers."""


def hold_word(info: QueueInfo) -> str:
    """Return why tasks that wait do not start, in two or three words; empty if they may start. A pause has a tag of its own."""
    return HELD_BACK[info.held_back] if info.waiting and info.paused is None else ""


def hold_text(info: QueueInfo) -> str:
    """Return the same with the time after which a task may start, if it is known."""
    word = hold_word(info)
    return f"{word}, for {figures.duration(info.held_for)}" if word and info.held_for is not None else word


def pause_text(info: QueueInfo) -> str:
    """Return what the page of a queue says of its pause, without the reason; empty if there is none."""
    if info.paused is None:
        return ""
    end = f" The pause ends in {figures.duration(info.held_for)}." if info.held_for is not None else ""
    return f"No worker takes tasks of this queue.{end}"


def limits_text(info: QueueInfo) -> str:
    """Return what the page of a queue says of its limits; empty if it has none."""
    if not info.limits:
        return ""
    by = ", set by an operator" if info.limits_overridden else ""
    held = ""
    if info.held_back == "concurrency":
        held = " The limit is reached: a task starts when another one ends."
    elif info.held_back == "rate":
        more = f": more tasks start in {figures.duration(info.held_for)}" if info.held_for is not None else ""
        held = f" The rate is reached{more}."
    return f"In the whole mesh: {', '.join(map(str, info.limits))}{by}.{held}"


def lanes_text(info: QueueInfo) -> str:
    """Return what the page of a queue says of its lanes; empty if none has tasks."""
    if not info.lanes:
        return ""
    have = "lane has" if info.lanes == 1 else "lanes have"
    held = ""
    if info.held_lanes:
        known = info.held_back == "lanes" and info.held_for is not None
        first = f"; the first may in {figures.duration(info.held_for)}" if known else ""
        held = f" {figures.count(info.held_lanes)} of them may not start any now{first}."
    return f"{figures.count(info.lanes)} {have} tasks.{held}"


def lane_hold_text(lane: LaneInfo) -> str:
    """Return why a lane starts no task, and until when; empty if it may start one. A pause has a tag of its own."""
    until = "" if lane.held_for is None else f"for {figures.duration(lane.held_for)}"
    if lane.paused is not None:
        return until
    return ", ".join(filter(None, ("limit reached", until))) if lane.held else ""


def batches_text(info: QueueInfo) -> str:
    """Return what the page of a queue says of the batches whose home it is; empty if there are none."""
    if not info.batches:
        return ""
    have = "batch has its" if info.batches == 1 else "batches have their"
    return f"{figures.count(info.batches)} {have} home in this queue, ended ones included."


def may_run(info: QueueInfo) -> int:
    """Return how many tasks could run now if there were workers for all of them.

    Scheduled jobs that are due within 10 s count, because a worker takes about that long to start. A long pause, and lanes that
    are all held, let none start. A limit on the concurrency lets no more than its number run.
    """
    brief = info.held_for is not None and info.held_for <= FAST
    if info.held_back in ("paused", "lanes") and not brief:
        return info.running
    at_once = [limit.concurrency for limit in info.limits if limit.concurrency is not None]
    return max(info.running, min([info.waiting + info.running + info.due_soon, *at_once]))
