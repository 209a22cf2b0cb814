"""The reports of the demo's handlers: JSON objects in the queue ``results``. This module writes and reads them.

Times are of the system's monotonic clock, which all processes of one machine share. So the demo can show how long after the
kill a second run began.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from worqr.cli.demo.workload import Counted

FILES = "files"
"""The queue of the paths to count."""
LONG = "long"
"""The queue of the one task that takes too long."""
RESULTS = "results"
"""The queue of the reports."""

LONG_TASK = b"a task that would run for ever"


class Report(msgspec.Struct, frozen=True, omit_defaults=True):
    """One report.

    Attributes:
        kind: ``counted``, a file's result; ``began`` and ``cancelled``, of the long task.
        worker: the name of the worker that ran it.
        at: when that run began, or was cancelled.
        path: the file.
        counted: the counts of the file.
        stalls: how many workers died while they ran it before.
        reason: why it was cancelled.
    """

    kind: Literal["counted", "began", "cancelled"]
    worker: str
    at: float
    path: str = ""
    counted: Counted | None = None
    stalls: int = 0
    reason: str | None = None


def encode(report: Report) -> bytes:
    """Return the report as a task."""
    return msgspec.json.encode(report)


def decode(task: bytes) -> Report:
    """Return the report in a task."""
    return msgspec.json.decode(task, type=Report)
