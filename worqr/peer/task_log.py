"""Log lines about the runs of a task: started, finished, failed, and the time of the next attempt.

A failed run is one line, with the queue, the id of the job, the attempt, the error and the time until the next attempt. When
worqr gives up, because that was the last attempt or the error is final, the line is ``task.failed`` with the level ERROR. This
includes timeouts and crashes. Payloads are never logged. A decoder's message may quote them, and is reduced to the part that
does not.

Runs that end well are logged at DEBUG. `note_started` is called only if DEBUG is enabled, and `log_finished` uses only what it
stored, so that otherwise a run costs nothing extra.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, TypedDict

from worqr.log_events import ExcInfo, emit_fields
from worqr.ops import Wait
from worqr.peer.run import Run, RunHost
from worqr.policy import UNLIMITED, ChildError, Failure, Retry, RetryDecision, Undecodable
from worqr.remote_error import reported_error
from worqr.tracebacks import cause_of, is_a, one_line, shortened, text_of, users_traceback
from worqr.validation import from_ms, qualname_of

if TYPE_CHECKING:
    from worqr.peer.consumer import HandlerConsumer

logger: logging.Logger = logging.getLogger(__name__)

RUN: Final = "queue %(queue)r, job %(job)s, attempt %(attempt)d of %(attempts)s"
"""The beginning of a log line about a run. `run_fields` returns its values."""
LATE: Final = 1.0
"""Seconds after its timeout above which the late end of a run is logged."""

_DECODERS_SAY: Final = re.compile(
    r"Expected `|Object missing required field `|(?:JSON|MessagePack|Input) (?:is|data) |[\w ]+ out of range"
)
"""The beginnings of those messages of msgspec that quote nothing of a payload."""
_PATH: Final = re.compile(r" - at `[^`]*`$")
_FROM_DECODER: Final = "The above exception was the direct cause"

Began = tuple[float, dict[str, object]]
"""When a run began, and its fields."""


def run_fields(run: Run[RunHost], left: int | None = None) -> dict[str, object]:
    """Return the fields of a run.

    `left` is how many attempts the task has after this one; by default, those that it has if this one fails.
    """
    if left is None:
        left = run.policy.max_failures - run.failures - 1
    return {
        "queue": run.queue,
        "job": run.id,
        "attempt": run.attempt,
        "attempts": run.attempt + max(left, 0) if left < UNLIMITED // 2 else "unlimited",
        "worker": run.registration.worker,
    }


# Runs that end well


def note_started(runs: Iterable[Run[HandlerConsumer]]) -> None:
    """Log that these runs begin, and store it for `log_finished`."""
    for run in runs:
        fields = run_fields(run)
        run.host.begun[run.fence] = time.monotonic(), fields
        emit_fields(logger, "task.started", RUN, fields)


def log_finished(host: HandlerConsumer, claims: Sequence[int]) -> None:
    """Log that these runs have ended well. Drop the stored data of those that have ended otherwise."""
    now, begun = time.monotonic(), host.begun
    for claim in claims:
        if (found := begun.pop(claim, None)) is not None:
            fields = {**found[1], "duration": round(now - found[0], 6)}
            emit_fields(logger, "task.finished", f"{RUN}: returned after %(duration)s s", fields)
    for claim in [claim for claim in begun if claim not in host.running]:
        del begun[claim]


def log_late(run: Run[RunHost]) -> None:
    """Log that a handler has returned after its timeout. Its result counts."""
    late = _seconds_late(run)
    if late >= LATE:
        fields = {**run_fields(run), "timeout": run.policy.timeout, "late": late}
        text = f"{RUN}: finished %(late)s s after its timeout of %(timeout)g s"
        emit_fields(logger, "task.finished", text, fields, level=logging.WARNING)


def _seconds_late(run: Run[RunHost]) -> float:
    """Return the seconds since the deadline of a run."""
    return 0.0 if run.deadline is None else round(max(0.0, time.monotonic() - run.deadline), 1)


# Runs that fail


def log_failure(run: Run[RunHost], decision: RetryDecision) -> None:
    """Log how a run that raised has ended, and the next step. Only unexpected errors are logged with a traceback."""
    error, policy = decision.error, run.policy
    if is_a(error, Undecodable):
        _log_undecodable(run, error)
        return
    failures, stalls = (0, 0) if run.progressed else (run.failures, run.stalls)
    left = policy.max_stalls - stalls if decision.stalled else policy.max_failures - failures
    fields = {**run_fields(run, left - 1), "error": run.describe(error).line}
    trace = None if any(is_a(error, kind) for kind in (Retry, Failure, ChildError)) else error
    if decision.kind == "fail":
        _log_given_up(run, fields, error, trace, " (such an error is not retried)")
    elif decision.counted and (left <= 1 or decision.last):
        _log_given_up(run, fields, error, trace)
    else:
        event = "task.retry" if is_a(error, Retry) else "task.crashed" if decision.stalled else "task.failed"
        text = f"{RUN}: %(error)s; {_next_attempt(run, decision, fields)}{_remote_traceback(error, fields)}"
        emit_fields(logger, event, text, fields, **_traceback_of(run, trace))


def log_timeout(run: Run[RunHost], delay: float, error: str, *, last: bool) -> None:
    """Log that a run took too long, and the next step."""
    policy, late = run.policy, _seconds_late(run)
    left = policy.max_timeouts - (0 if run.progressed else run.timeouts)
    fields = {**run_fields(run, left - 1), "timeout": policy.timeout}
    ended = ""
    if late >= LATE:
        fields["late"] = late
        ended = ", and ended %(late)s s after it"
    if left <= 1 or last:
        _log_given_up(run, {**fields, "error": f"Timeout: {error}"}, None, None)
        return
    fields["retry_in"] = _seconds(delay)
    text = f"{RUN}: ran longer than its timeout of %(timeout)g s{ended}; next attempt in %(retry_in)s s"
    emit_fields(logger, "task.timeout", text, fields)


def _log_given_up(
    run: Run[RunHost],
    fields: dict[str, object],
    error: BaseException | None,
    trace: BaseException | None,
    why: str = "",
) -> None:
    runs = "1 attempt" if run.attempt == 1 else "%(attempt)d attempts"
    text = (
        f"queue %(queue)r, job %(job)s: gave up after {runs}{why}: %(error)s; it is in the dead-letter queue: "
        f"worqr failed %(queue)r{_remote_traceback(error, fields)}"
    )
    emit_fields(logger, "task.failed", text, fields, level=logging.ERROR, **_traceback_of(run, trace))


def _log_undecodable(run: Run[RunHost], error: Undecodable) -> None:
    fields = {**run_fields(run), "error": _undecodable(error)}
    text = f"{RUN}: %(error)s; the task is kept in queue.undecodable: worqr undecodable %(queue)r"
    emit_fields(logger, "task.undecodable", text, fields)


def _next_attempt(run: Run[RunHost], decision: RetryDecision, fields: dict[str, object]) -> str:
    """Return the text about the next attempt, and add its time to the fields."""
    if decision.pause is not None:
        fields["retry_in"] = _seconds(decision.pause)
        if run.record is not None and (lane := run.record.get(b"lane")):
            fields["lane"] = lane.decode("utf-8", "replace")
            return "lane %(lane)r is paused for %(retry_in)s s"
        return "the queue is paused for %(retry_in)s s"
    if decision.run_at_ms is not None:
        fields["run_at"] = from_ms(decision.run_at_ms).isoformat(timespec="seconds")
        return "next attempt at %(run_at)s"
    fields["retry_in"] = _seconds(decision.delay)
    return "next attempt in %(retry_in)s s"


def _seconds(delay: float) -> float:
    """Return a delay with a precision that is easy to read. Whole seconds have no fraction."""
    found = round(delay, 1 if delay >= 0.1 else 3)
    return int(found) if found == int(found) else found


class _Traceback(TypedDict, total=False):
    exc_info: ExcInfo
    exc_text: str


def _traceback_of(run: Run[RunHost], error: BaseException | None) -> _Traceback:
    """Return an error with the part of its traceback that begins in the user's code, and as the text that is stored."""
    if error is None:
        return {}
    text = run.describe(error).error.traceback.rstrip("\n")
    return {"exc_info": (type(error), error, users_traceback(error)), "exc_text": text}


def _remote_traceback(error: BaseException | None, fields: dict[str, object]) -> str:
    """Return the text for the traceback of an error in a worker process, and add the traceback to the fields."""
    if error is None or not is_a(error, ChildError) or not error.remote.traceback:
        return ""
    fields["traceback"] = error.remote.traceback.rstrip()
    return "\n%(traceback)s"


# Payloads that cannot be decoded


def log_suspended(run: Run[RunHost], waits: Sequence[Wait]) -> None:
    """Log that a workflow is suspended, and what it waits for."""
    if logger.isEnabledFor(logging.DEBUG):
        what = ", ".join(wait.key for wait in waits[:10])
        text = "queue %(queue)r, job %(job)s: suspended, it waits for %(waits)s"
        emit_fields(logger, "task.suspended", text, {"queue": run.queue, "job": run.id, "waits": what})


def log_snoozed(run: Run[RunHost], decision: RetryDecision) -> None:
    """Log that a handler has raised `Snooze`, and when it runs again."""
    if logger.isEnabledFor(logging.DEBUG):
        fields = {**run_fields(run), "waits": text_of(decision.error)}
        emit_fields(
            logger, "task.snoozed", f"{RUN}: not ready (%(waits)s); {_next_attempt(run, decision, fields)}", fields
        )


def _undecodable(error: Undecodable) -> str:
    """Return the error of a payload without its contents.

    The user's own message is used, or a decoder's message as far as it quotes nothing.
    """
    if (remote := reported_error(error)) is not None:
        if _FROM_DECODER not in remote.traceback:
            return shortened(f"Undecodable: {remote.message}")
        _, _, told = remote.message.partition(": ")
        kind, _, text = told.partition(": ")
        return _without_values(kind, text)
    cause = cause_of(error)
    return one_line(error) if cause is None else _without_values(qualname_of(type(cause)), text_of(cause))


def _without_values(kind: str, text: str) -> str:
    """Return a decoder's message if it quotes nothing, else the kind and the place of the error."""
    if _DECODERS_SAY.match(text):
        return shortened(f"{kind}: {text}")
    where = _PATH.search(text)
    return f"{kind}{where[0] if where else ''}"
