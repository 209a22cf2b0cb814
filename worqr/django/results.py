"""`TaskResult` from what worqr stores about a job, and the payload from which all of it is made again."""

from __future__ import annotations

import builtins
import json
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Final

import msgspec
from django.core.exceptions import SuspiciousOperation
from django.utils.module_loading import import_string

from worqr.django.task_api import Task, TaskError, TaskResult, TaskResultStatus, normalize_json
from worqr.errors import WorqrError
from worqr.records import Ended, JobRecord, RemoteError, Try
from worqr.sql.statements import FAILED
from worqr.validation import from_ms

_STATUS: Final = {
    "waiting": TaskResultStatus.READY,
    "scheduled": TaskResultStatus.READY,
    "blocked": TaskResultStatus.READY,
    "active": TaskResultStatus.RUNNING,
    "finished": TaskResultStatus.SUCCESSFUL,
    "failed": TaskResultStatus.FAILED,
    "cancelled": TaskResultStatus.FAILED,
}
MANY_ERRORS: Final = 10
"""The errors of a result: those of the last ten tries."""
_SEPARATOR: Final = ":"
_PREFIX: Final = "django:"


@dataclass(frozen=True, slots=True)
class Enqueued:
    """The payload of a task, by the names of `execute`'s parameters."""

    path: str
    args: list[Any]
    kwargs: dict[str, Any]
    priority: int = 0
    backend: str = "default"
    queue: str = "default"
    run_after: str | None = None

    @classmethod
    def of(cls, task: Any, args: list[Any], kwargs: dict[str, Any]) -> Enqueued:
        """Return the payload of a call of a task."""
        run_after = None if task.run_after is None else task.run_after.isoformat()
        return cls(task.module_path, args, kwargs, task.priority, task.backend, task.queue_name, run_after)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `execute`."""
        return asdict(self)


def decoded(payload: bytes) -> Enqueued:
    """Return a stored payload.

    Raises:
        ValueError: It is not that of a task.
    """
    try:
        return msgspec.json.decode(payload, type=Enqueued)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"the payload is not that of a Django task: {error}") from None


def task_of(enqueued: Enqueued) -> Any:
    """Return the task as it was enqueued. Its module is imported.

    Raises:
        ImportError: The path does not exist.
        SuspiciousOperation: It names something else.
    """
    found = import_string(enqueued.path)
    if not isinstance(found, Task):
        raise SuspiciousOperation(f"{enqueued.path!r} does not point to a Task")
    run_after = None if enqueued.run_after is None else datetime.fromisoformat(enqueued.run_after)
    return found.using(
        priority=enqueued.priority, queue_name=enqueued.queue, backend=enqueued.backend, run_after=run_after
    )


def as_json(value: Any) -> Any:
    """Return a value as JSON brings it back: tuples become lists, and keys become texts.

    Raises:
        TypeError: JSON does not know its type.
        ValueError: JSON has no such number (NaN, infinity), or a text cannot be encoded as UTF-8.
    """
    normal = json.loads(json.dumps(normalize_json(value), allow_nan=False))
    msgspec.json.encode(normal)  # raises for texts that UTF-8 cannot encode
    return normal


# Ids


def result_id(queue: str, id: str) -> str:
    """Return the id of a result: Django's queue and the id of the job."""
    return f"{queue.removeprefix(_PREFIX)}{_SEPARATOR}{id}"


def job_of(result_id: str) -> tuple[str, str] | None:
    """Return the queue and the id of the job of a result; None if no result has this id."""
    queue, separator, job_id = str(result_id).rpartition(_SEPARATOR)
    known = bool(separator and queue) and job_id.isalnum() and job_id.isascii()
    return (_PREFIX + queue, job_id) if known else None


# Results


def result_of(record: JobRecord, id: str, alias: str, value: Any = None) -> Any:
    """Return the result that a record describes.

    Args:
        record: With the whole payload.
        id: The id of the result.
        alias: The alias of the backend that is asked.
        value: What the task returned, if it has.

    Raises:
        ValueError: The payload is not that of a task.
        ImportError: The task does not exist.
        SuspiciousOperation: Its path names something else.
    """
    enqueued, status, ended = decoded(record.task), _STATUS[record.status.state], _end(record)
    starts = [each.at.timestamp() - each.seconds for each in record.tries]
    last = record.status.since or (ended.started if ended else None)
    first = datetime.fromtimestamp(min(starts), record.tries[0].at.tzinfo) if starts else last
    last = last or (datetime.fromtimestamp(max(starts), record.tries[0].at.tzinfo) if starts else None)
    enqueued_at, started_at, last_attempted_at, finished_at = in_order(
        record.dispatched, first, last, _finished_at(record, ended)
    )
    result = TaskResult(
        task=task_of(enqueued),
        id=id,
        status=status,
        enqueued_at=enqueued_at,
        started_at=started_at,
        last_attempted_at=last_attempted_at,
        finished_at=finished_at,
        args=enqueued.args,
        kwargs=enqueued.kwargs,
        backend=alias,
        errors=_errors(record, ended),
        worker_ids=_worker_ids(record, ended),
    )
    object.__setattr__(result, "_return_value", value)
    return result


def in_order(*times: datetime | None) -> list[datetime | None]:
    """Return times of the server so that none is before an earlier one: some are stored in microseconds, others in whole ms."""
    ordered = list[datetime | None]()
    for time in times:
        ordered.append(None if time is None else max([time, *filter(None, ordered)]))
    return ordered


def result_of_row(row: tuple[Any, ...], id: str, alias: str) -> Any:
    """Return the result of a task that is still a row of the outbox: READY, or FAILED if the row was given up.

    Args:
        row: Its queue, payload, time in ms, state and error.
        id: As for `result_of`.
        alias: As for `result_of`.

    Raises:
        ValueError, ImportError, SuspiciousOperation: As `result_of`.
    """
    _, payload, at, state, error = row
    enqueued, failed = decoded(bytes(payload)), state == FAILED
    return TaskResult(
        task=task_of(enqueued),
        id=id,
        status=TaskResultStatus.FAILED if failed else TaskResultStatus.READY,
        enqueued_at=from_ms(at),
        started_at=None,
        last_attempted_at=None,
        finished_at=None,
        args=enqueued.args,
        kwargs=enqueued.kwargs,
        backend=alias,
        errors=[task_error(RemoteError("worqr.RefusedByServer", error or "", ""))] if failed else [],
        worker_ids=[],
    )


def _end(record: JobRecord) -> Ended | None:
    """Return how the newest dispatch ended; None while it waits or runs, or if only the dead-letter record knows."""
    is_over = record.status.state in {"finished", "failed", "cancelled"}
    return record.ended[0] if is_over and record.ended and record.ended[0].state == record.status.state else None


def _finished_at(record: JobRecord, ended: Ended | None) -> datetime | None:
    if ended is not None:
        return ended.at
    return record.dead_letters[0].at if record.status.state == "failed" and record.dead_letters else None


def _worker_ids(record: JobRecord, ended: Ended | None) -> list[str]:
    """Return the worker of each attempt; an empty text for those before the last ten."""
    known = [each.worker for each in record.tries if each.reason != "retry"]
    runs = record.failures + record.stalls + record.timeouts
    if record.status.state == "active":
        known.append(record.status.worker or "")
        runs += 1
    elif ended is not None and ended.state != "failed" and ended.started is not None:
        known.append(ended.worker)
        runs = ended.attempts
    elif ended is not None:
        runs = ended.attempts
    return [""] * (runs - len(known)) + known[max(0, len(known) - max(runs, 0)) :]


def _errors(record: JobRecord, ended: Ended | None) -> list[Any]:
    tries = [each for each in record.tries if each.reason not in {"stalled", "retry"}]
    found = [task_error(each.error) for each in tries]
    if record.status.state == "failed":
        last = ended.error if ended is not None else record.dead_letters[0].error if record.dead_letters else None
        if last is not None:
            found[-1:] = [task_error(last)] if _is_last(record.tries, tries) else [*found[-1:], task_error(last)]
    elif record.status.state == "cancelled":
        reason = ended.reason if ended is not None else ""
        found.append(TaskError(exception_class_path="worqr.JobCancelled", traceback=f"worqr.JobCancelled: {reason}\n"))
    return found[-MANY_ERRORS:]


def _is_last(tries: tuple[Try, ...], with_error: list[Try]) -> bool:
    """Return True if the last try ended with an error of its own, which the result repeats with its traceback."""
    return bool(with_error) and with_error[-1] is tries[-1]


def task_error(error: RemoteError) -> Any:
    """Return an error as Django shows it: the path of a class that can be imported, and a traceback."""
    path, text = error.type, error.traceback or f"{error.type}: {error.message}\n"
    if "." not in path:
        path = f"builtins.{path}" if hasattr(builtins, path) else f"{WorqrError.__module__}.{WorqrError.__qualname__}"
    return TaskError(exception_class_path=path, traceback=text)
