"""What was asked of a worker, and what can be done about it, as sentences. Pure."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from worqr.mesh_records import WorkerInfo

ANSWERS_WITHIN: Final = 5.0
"""Seconds after which a worker should have answered a request: it reads requests with its heartbeat."""


def request_text(info: WorkerInfo, now: datetime) -> str:
    """Return what was asked of a worker and how it answered; empty if nothing was."""
    if info.request and info.requested_at is not None:
        if (now - info.requested_at).total_seconds() < ANSWERS_WITHIN:
            return f"{info.request}: asked, and it answers with its next heartbeat"
        return f"{info.request}: not answered. It runs an older version of worqr, or its heartbeats do not arrive."
    return info.answer


def advice(info: WorkerInfo) -> str:
    """Return what can be done about a worker in this state; empty if nothing has to be done."""
    match info.state:
        case "dead":
            return "It was declared dead. Its tasks are going back to their queues, and you have to do nothing."
        case "missing":
            return (
                "Its heartbeat key has expired. The leader declares it dead within seconds. If no worker leads, "
                "evict it, and its tasks are given back."
            )
        case "leaving":
            return "It takes no more tasks, and leaves when the running ones have ended."
        case _:
            return (
                "If it hangs, end its process. If its process is gone for good, evict it, and its tasks are given back."
            )
