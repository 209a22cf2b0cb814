"""The words of the mesh as values: what an operator reads, what a claim answers, how an error travels. Pure.

Nothing here knows Trio, Redis or how anything is sent.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, Literal, cast

from worqr.errors import PayloadTooLarge, UsageError

Seconds = float | timedelta
"""A duration: seconds as a number, or a timedelta."""

MAX_FAILURES: Final = 10
MAX_STALLS: Final = 3
KEEP_FAILED: Final = 1000

LONGEST: Final = 100 * 365 * 86400
"""Seconds of the longest duration: what is longer is a mistake, or infinity."""

CancelReason = Literal["cancel", "timeout", "lost", "leaving"]
"""Why a run is being cancelled."""


def seconds(value: object, what: str, *, positive: bool = False) -> float:
    """`value` as a finite float that is not negative (with `positive`: above 0), else UsageError naming `what`."""
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{what} must be seconds (a number or a timedelta), not {value!r}")
    if not (value > 0 if positive else value >= 0) or value > LONGEST:
        least = "above 0" if positive else "at least 0"
        raise UsageError(f"{what} must be {least} and at most a century, not {repr(value)[:40]}")
    return float(value)


def check_text(value: object, what: str) -> str:
    """`value` as text that UTF-8 can carry, else UsageError naming `what`."""
    if not isinstance(value, str):
        raise UsageError(f"{what} must be a str, not {type(value).__name__}")
    if (clean := _clean(value)) != value:
        raise UsageError(f"{what} is not valid Unicode: {clean[:60]!r}")
    return value


def check_task(task: object, max_payload: int) -> bytes:
    """`task` as bytes, checked in the caller so that one bad argument cannot spoil a batch.

    Raises:
        UsageError: not bytes-like.
        PayloadTooLarge: over `max_payload` bytes.
    """
    if not isinstance(task, bytes):
        if not isinstance(task, bytearray | memoryview):
            raise UsageError(f"a task must be bytes, bytearray or memoryview, not {type(task).__name__}")
        task = bytes(cast("bytearray", task))
    if len(task) > max_payload:
        raise PayloadTooLarge(
            f"a task of {len(task):,} bytes is over the limit of {max_payload:,} (Mesh(max_payload=...)): "
            "store the data elsewhere and enqueue its name"
        )
    return task


@dataclass(frozen=True, slots=True)
class RemoteError:
    """An error as it is kept and sent: names and text only, at most 16 KiB of traceback."""

    type: str
    message: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> RemoteError:
        """`error` with its qualified type name, its text, and the end of its traceback."""
        kind = type(error)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        try:
            message = str(error)
        except BaseException as unprintable:  # also a SystemExit: it is the text of an error, not an error
            message = f"<its __str__ raised {type(unprintable).__name__}>"
        lines = "".join(traceback.format_exception(error, limit=-30))
        return cls(name, _clean(message)[:4096], _clean(lines)[-16384:])

    @classmethod
    def told(cls, type: str, message: str) -> RemoteError:
        """An error that was told, not raised."""
        return cls(type, _clean(message)[:4096], "")


def _clean(text: str) -> str:
    """`text` without the lone surrogates that UTF-8 cannot carry."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


@dataclass(frozen=True, slots=True)
class CancelCount:
    """What a cancel met: waiting tasks removed, running ones marked, and how many of those acknowledged in time."""

    waiting: int
    running: int
    acknowledged: int


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a task; of a running one also its worker and since when (by the server's clock)."""

    state: Literal["waiting", "due", "blocked", "active", "finished", "failed", "cancelled", "gone"]
    worker: str | None = None
    since: datetime | None = None
    run_at: datetime | None = None
    progress: float | None = None
    message: str = ""
    failures: int = 0


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """One queue at one moment. ``counts`` are totals since the counters were last empty for 30 days."""

    name: str
    waiting: int
    due: int
    blocked: int
    running: int
    failed: int
    broken: int
    paused: str | None
    oldest: float | None
    workers: int
    counts: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One registered worker as people want to know it. ``beat_age`` is in seconds, infinite without a keepalive key."""

    id: str
    host: str
    pid: int
    app: str
    version: str
    queues: frozenset[str]
    running: int
    room: int
    beat_age: float


@dataclass(frozen=True, slots=True)
class Health:
    """``alive``: the loop turns. ``ready``: registered, beating, subscribed and not leaving; else ``why`` says what not."""

    alive: bool
    ready: bool
    why: str
    running: int
    room: int
    loop_lag: float


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to `count` tasks of a queue: enqueued, claimed, finished, stopped, retried, failed, ..."""

    queue: str
    type: str
    count: int
