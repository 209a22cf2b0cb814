"""The tables of the pages as JSON and as CSV, for other programs and for spreadsheets.

A table has the rows, the filters and the order of its page, and hides the same secrets. `READERS` has all tables. A page of a
table has at most 200 rows; ``next`` of the JSON, and the header ``Link``, have the address of the next page.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

from starlette.responses import Response

from worqr.dashboard import batch_pages, log_page, reading, records_page, serving
from worqr.dashboard.acts import seen_acts, sentence
from worqr.dashboard.guard import Refused
from worqr.dashboard.visit import Visit
from worqr.escaping import escape

if TYPE_CHECKING:
    from worqr.batches import BatchInfo
    from worqr.cron import Schedule
    from worqr.dashboard.bulk import Bulk
    from worqr.dashboard.payloads import Redactor
    from worqr.mesh_records import LogEntry, WorkerInfo
    from worqr.records import Failed, JobRecord, RemoteError, Status, TaskInfo, Try

MOST: Final = 200
"""Rows of one page of a table."""
ROWS: Final = 50
"""The same, if the address has no ``limit``."""
NO_RATES: Final = {"enqueued": None, "finished": None, "failed": None}
FORMULA: Final = re.compile(r"(^|;)(\s*)(?=[-=+@＝＋－＠])")
"""What stands before a text that a spreadsheet would take for a formula: the beginning of a cell, or a semicolon, because many of
them take it for the end of a cell."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rows:
    """One page of a table. `next`: the fields of the query that differ on the next page; empty if this is the last one."""

    rows: Sequence[Row]
    next: Mapping[str, object]


async def serve(read: Callable[[Visit], Awaitable[Rows]], visit: Visit) -> Response:
    """Return one page of a table, in the format that the address names."""
    form = visit.choice("format", ("json", "csv"))
    found = await read(visit)
    fields = {name: value for name, value in visit.query.items() if name not in found.next}
    following = visit.link(visit.path, **fields, **found.next) if found.next else ""
    headers = {"link": f'<{following}>; rel="next"'} if following else {}
    if form == "csv":
        name = visit.path.rpartition("/")[2]
        headers["content-disposition"] = f"attachment; filename=worqr-{name}.csv"
        return Response(csv_of(found.rows), media_type="text/csv", headers=headers)
    return Response(
        json_of({"rows": found.rows, "next": following or None}), media_type="application/json", headers=headers
    )


def json_of(value: object) -> str:
    """Return JSON. All characters beyond ASCII are escaped, so a terminal shows them without acting on any."""
    return json.dumps(value, default=_plain, separators=(",", ":"))


def csv_of(rows: Sequence[Row]) -> str:
    """Return CSV with a line of names. Columns of columns have names with a dot, such as ``counts.finished``.

    A text that a spreadsheet would take for a formula has an apostrophe before it.
    """
    flat = [dict(_flat(row)) for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(map(_cell, names))
    for row in flat:
        writer.writerow([_cell(row.get(name)) for name in names])
    return out.getvalue()


def _flat(row: Row, start: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in row.items():
        found += (
            _flat(cast("Row", value), f"{start}{name}.") if isinstance(value, dict) else [(f"{start}{name}", value)]
        )
    return found


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, datetime):
        return value.isoformat()
    return FORMULA.sub(r"\1\2'", escape(_text(value)))


def _text(value: object) -> str:
    """Return a list in one cell: texts, or records such as limits."""
    if not isinstance(value, list | tuple):
        return str(value)
    every = cast("Sequence[str | Row]", value)
    texts = [each if isinstance(each, str) else _record_text(each) for each in every]
    return " ".join(texts) if all(isinstance(each, str) for each in every) else "; ".join(texts)


def _record_text(record: Row) -> str:
    return " ".join(f"{name}={value:g}" for name, value in record.items() if value is not None)


def _plain(value: object) -> object:
    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} is not for JSON")


# Tables


def _limit(visit: Visit) -> int:
    return visit.number("limit", ROWS, 1, MOST)


def _page(visit: Visit, every: Sequence[Any], row: Callable[[Any], Row]) -> Rows:
    """Return the rows of the page that the address names."""
    number, limit = visit.number("page", 1, 1, 10_000), _limit(visit)
    end = number * limit
    return Rows([row(each) for each in every[end - limit : end]], {"page": number + 1} if len(every) > end else {})


async def queues(visit: Visit) -> Rows:
    """The list of queues."""
    state = await reading.look(visit)

    def row(info: Any) -> Row:
        rates, paused = state.rates.get(info.name), _reason(info.paused, visit.redactor)
        return {**asdict(info), "paused": paused, "rates": NO_RATES if rates is None else asdict(rates)}

    return _page(visit, reading.sorted_queues(visit, state, empty="show")[0], row)


async def tasks(visit: Visit) -> Rows:
    """The tasks of a queue in one state."""
    queue, limit = visit.queue(visit.text("queue")), _limit(visit)
    state = visit.choice("state", ("waiting", "scheduled", "blocked", "running"))
    if state == "running":
        found = await queue.running(limit)
    elif state == "waiting":
        newest = visit.choice("order", reading.ORDERS) == "end"
        found = await serving.waiting_tasks(visit, queue.name, limit + 1, newest=newest)
    else:
        found = await queue.jobs(state=state, limit=limit + 1, after=visit.text("after"))  # type: ignore[arg-type]
    rows = [task_row(queue.name, task, visit.redactor) for task in found[:limit]]
    return Rows(rows, {"after": found[limit - 1].cursor} if len(found) > limit else {})


async def lanes(visit: Visit) -> Rows:
    """The lanes of a queue, those with the most tasks first."""
    found = await visit.queue(visit.text("queue")).lanes(limit=_limit(visit))
    return Rows([{**asdict(lane), "paused": _reason(lane.paused, visit.redactor)} for lane in found], {})


async def running(visit: Visit) -> Rows:
    """The running tasks of all queues."""
    state, worker = await reading.look(visit), visit.text("worker")
    found, refused = await reading.running_tasks(visit, state, await reading.served_by(visit, worker), worker)
    if refused and not found:
        raise Refused(502, f"The server refuses to show the running tasks: {next(iter(refused.values()))}")
    return Rows([task_row(name, task, visit.redactor) for name, task in found[: _limit(visit)]], {})


async def ended(visit: Visit) -> Rows:
    """The runs of a queue that ended last."""
    queue = visit.queue(visit.text("queue"))
    return Rows([{"queue": queue.name, **asdict(run)} for run in await queue.recent(_limit(visit))], {})


async def dead_letters(visit: Visit) -> Rows:
    """The dead-letter records of a queue."""
    queue = visit.queue(visit.text("queue"))
    found = await records_page.read_records(visit, queue, visit.choice("list", ("failed", "broken")), _limit(visit))
    rows = [record_row(record, visit.redactor) for record in found["records"]]
    return Rows(rows, {"older": found["records"][-1].at.isoformat()} if found["more"] else {})


async def workers(visit: Visit) -> Rows:
    """The workers."""
    found, _ = await reading.with_state(visit, partial(reading.filtered_workers, visit))
    return _page(visit, found, partial(worker_row, visit))


async def schedules(visit: Visit) -> Rows:
    """The schedules."""
    if not visit.viewer.sees_all:
        raise Refused(403, "Schedules are shown to viewers who see all queues only.")
    found, _ = await reading.with_state(visit, partial(reading.all_schedules, visit))
    return _page(visit, found, schedule_row)


async def log(visit: Visit) -> Rows:
    """The log of the mesh."""
    found, _ = await reading.with_state(visit, partial(log_page.chosen_entries, visit))
    return _page(visit, found, partial(entry_row, visit.redactor))


async def bulk(visit: Visit) -> Rows:
    """The acts on many tasks that this process has started."""
    return _page(visit, seen_acts(visit), act_row)


async def job(visit: Visit) -> Response:
    """One job, as JSON."""
    queue = visit.queue(visit.text("queue"))
    record = await queue.read(visit.text("id"))
    if record.status.state == "gone" and not record.dead_letters:
        raise Refused(
            404, "Nothing is stored about this job: it is unknown, or it has ended and its result was not kept."
        )
    fields = job_fields(record, visit.redactor) | {"batch": None}
    if record.batch is not None and visit.viewer.sees(record.batch.queue):
        fields["batch"] = {"queue": record.batch.queue, "id": record.batch.id}
    return Response(json_of(fields), media_type="application/json")


async def batches(visit: Visit) -> Rows:
    """The batches whose home is a queue: those that have not ended first, then the newest."""
    found = await visit.queue(visit.text("queue")).batches(_limit(visit))
    return Rows([batch_row(visit, info) for info in found], {})


async def batch(visit: Visit) -> Response:
    """One batch, as JSON."""
    return Response(json_of(batch_row(visit, await batch_pages.read(visit))), media_type="application/json")


READERS: Final[dict[str, Callable[[Visit], Awaitable[Rows]]]] = {
    "/api/v1/queues": queues,
    "/api/v1/tasks": tasks,
    "/api/v1/lanes": lanes,
    "/api/v1/batches": batches,
    "/api/v1/running": running,
    "/api/v1/ended": ended,
    "/api/v1/dead-letters": dead_letters,
    "/api/v1/workers": workers,
    "/api/v1/schedules": schedules,
    "/api/v1/log": log,
    "/api/v1/bulk": bulk,
}


# Rows


def _error(error: RemoteError | None, redactor: Redactor) -> Row | None:
    return None if error is None else {"type": error.type, "message": redactor.text(error.message)}


def _reason(reason: str | None, redactor: Redactor) -> str | None:
    """Return the reason of a pause or a cancel; None if there is none."""
    return None if reason is None else redactor.text(reason)


def _status(status: Status, redactor: Redactor) -> Row:
    return {
        "state": status.state,
        "worker": status.worker,
        "since": status.since,
        "run_at": status.run_at,
        "next_run": status.next_run,
        "progress": status.progress,
        "message": redactor.text(status.message),
        "attempts": status.attempts,
        "failures": status.failures,
        "error": _error(status.error, redactor),
    }


def task_row(queue: str, task: TaskInfo, redactor: Redactor) -> Row:
    """Return a task. ``payload`` is the beginning of it, as pages show it."""
    return {
        "queue": queue,
        "id": task.id,
        "claim": task.claim,
        **_status(task, redactor),
        "deadline": task.deadline,
        "cancelling": task.cancelling,
        "place": task.place,
        "lane": task.lane or None,
        "size": task.size,
        "payload": redactor.payload(task.task, task.size, queue=queue).line,
    }


def record_row(record: Failed, redactor: Redactor) -> Row:
    """Return a dead-letter record."""
    return {
        "queue": record.queue,
        "id": record.id,
        "at": record.at,
        "reason": record.reason,
        "error": _error(record.error, redactor),
        "failures": record.failures,
        "stalls": record.stalls,
        "timeouts": record.timeouts,
        "worker": record.worker,
        "meta": {name: redactor.meta(name, value) for name, value in record.meta.items()},
        "size": record.size,
        "payload": redactor.payload(record.task, record.size, queue=record.queue).line,
    }


def worker_row(visit: Visit, worker: WorkerInfo) -> Row:
    """Return a worker, with those of its queues that the viewer sees."""
    beat_age = None if math.isinf(worker.beat_age) else worker.beat_age
    return {**asdict(worker), "beat_age": beat_age, "queues": sorted(filter(visit.viewer.sees, worker.queues))}


def schedule_row(schedule: Schedule) -> Row:
    """Return a schedule."""
    return asdict(schedule)


def entry_row(redactor: Redactor, entry: LogEntry) -> Row:
    """Return an entry of the log."""
    return {**asdict(entry), "text": redactor.text(entry.text)}


def batch_row(visit: Visit, info: BatchInfo) -> Row:
    """Return a batch, with those of its queues that the viewer sees."""
    queue, job = batch_pages.seen_follow_up(visit, info) or (None, None)
    return {
        **{name: getattr(info, name) for name in ("queue", "id", "state", "jobs", "finished", "failed", "cancelled")},
        **{name: getattr(info, name) for name in ("pending", "succeeded", "endings", "created", "ended")},
        "cancel_reason": _reason(info.cancel_reason, visit.redactor),
        "queues": batch_pages.seen_queues(visit, info),
        "follow_up": {"queue": queue, "id": job},
        "meta": {name: visit.redactor.meta(name, value) for name, value in info.meta.items()},
    }


def act_row(act: Bulk) -> Row:
    """Return an act on many tasks, and how far it is."""
    order, progress = act.order, act.progress
    return {
        "id": act.id,
        "act": order.verb,
        "queue": order.queue,
        "batch": order.batch or None,
        "who": order.who,
        "began": act.began,
        "state": progress.state,
        "tried": progress.tried,
        "total": progress.total,
        "changed": progress.changed,
        "outcome": sentence(act),
    }


def _try(each: Try, redactor: Redactor) -> Row:
    fields = {"at": each.at, "seconds": each.seconds, "worker": each.worker, "reason": each.reason}
    return {**fields, "error": _error(each.error, redactor)}


def job_fields(record: JobRecord, redactor: Redactor) -> Row:
    """Return what is stored about a job."""
    return {
        "queue": record.queue,
        "id": record.id,
        **_status(record.status, redactor),
        "dispatched": record.dispatched,
        "expires_at": record.expires_at,
        "claim": record.claim,
        "deadline": record.deadline,
        "cancelling": record.cancelling,
        "stalls": record.stalls,
        "timeouts": record.timeouts,
        "options": dict(record.options),
        "meta": {name: redactor.meta(name, value) for name, value in record.meta.items()},
        "size": record.size,
        "payload": redactor.payload(record.task, record.size, queue=record.queue).line,
        "twins": list(record.twins),
        "lane": record.lane,
        "saved_size": record.saved_size,
        "tries": [_try(each, redactor) for each in record.tries],
        "dead_letters": [record_row(each, redactor) for each in record.dead_letters],
    }
