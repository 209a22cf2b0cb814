"""What an act did, as a sentence on the page to which it returns. Pure."""

from __future__ import annotations

from typing import Final

from worqr.dashboard.figures import plural

UNSENT: Final = "unsent"
UNKNOWN: Final = "unknown"
NEW: Final = "new"
UNANSWERED: Final = frozenset({UNSENT, UNKNOWN})
"""What an act did to which the server did not reply."""


def notice(done: str) -> str:
    """Return what an act did as a sentence; empty if `done` is not from an act. It is made of numbers only, so a foreign link
    cannot put words on a page.
    """
    word, *rest = done.split(":")
    numbers = [int(each) for each in rest if each.isascii() and each.isdecimal() and len(each) < 10]
    if len(numbers) != len(rest):
        return ""
    match word, numbers:
        case "cancel", [waiting, running, acknowledged, ms]:
            return _cancelled(waiting, running, acknowledged, ms)
        case "retry", [count, asked]:
            return _counted("put back into the queue", count, asked)
        case "run", [count, asked]:
            return _counted("due now", count, asked)
        case "drop", [count, asked]:
            return _counted("deleted", count, asked)
        case _:
            return _FIXED.get(word, "") if not numbers else ""


_FIXED: Final = {
    NEW: "The task is in the queue.",
    "pause": "The queue is paused. Running tasks continue.",
    "resume": "The queue is resumed.",
    "lane-pause": "The lane is paused. Running tasks continue.",
    "lane-resume": "The lane is resumed.",
    "limit": "The limit holds now. Tasks that run continue.",
    "limit-cleared": "The limit of the code holds again.",
    "weight": "The lane has its new weight.",
    "schedule-pause": "The schedule is paused.",
    "schedule-resume": "The schedule is resumed.",
    "worker-asked": "The worker was asked. It answers with its next heartbeat, within about a second: reload this page.",
    "worker-evicted": "The worker was declared dead, and its tasks are back in their queues.",
    "schedule-run": "The task of the schedule is enqueued. Its next run stays as planned.",
    "schedule-busy": "Nothing was enqueued, because the previous run of the schedule still waits or runs.",
    "schedule-override": "The schedule has other times now, until you return to those of the code.",
    "schedule-reset": "The schedule has the times of its code.",
    UNSENT: "The server did not answer, and nothing was sent. Nothing was changed.",
    UNKNOWN: "The server did not answer. The change may have taken effect: look before you try again.",
}


def _cancelled(waiting: int, running: int, acknowledged: int, ms: int) -> str:
    parts: list[str] = []
    if waiting:
        parts.append(f"{plural(waiting, 'waiting job')} removed")
    if acknowledged:
        parts.append(f"{plural(acknowledged, 'run')} cancelled and ended after {ms:,} ms")
    if running > acknowledged:
        parts.append(f"{plural(running - acknowledged, 'run')} cancelled, and still unwinding")
    return f"{', '.join(parts)}." if parts else "There was nothing to cancel: the job has ended already."


def _counted(what: str, count: int, asked: int) -> str:
    if not count:
        return "Nothing was changed: the tasks are not in this list any more, or a job with the same id waits."
    return f"{count:,} of {plural(asked, 'task')} {what}." if count < asked else f"{plural(count, 'task')} {what}."
