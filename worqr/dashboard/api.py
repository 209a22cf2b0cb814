"""What other programs read: the tables of the pages as JSON and CSV, the load of a queue, and the metrics for Prometheus.

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

import anyio
from starlette.responses import JSONResponse, Response

from worqr.dashboard import batch_pages, pages
from worqr.dashboard.access import Refused
from worqr.dashboard.bulk import seen_acts, sentence
from worqr.dashboard.ended import jobs_of, read_records
from worqr.dashboard.pages import look
from worqr.dashboard.reads import gathered
from worqr.dashboard.request import Visit
from worqr.dashboard.state import may_run
from worqr.errors import Unavailable, UsageError
from worqr.escaping import escape
from worqr.functions.schema import asyncapi
from worqr.inside import client_of, definition_of
from worqr.metrics.fleet import GIVE_UP_AFTER, FleetMetrics, FleetReader, FleetSnapshot
from worqr.records import Failed, JobRecord, TaskInfo
from worqr.views.tables import fields_of, picked

if TYPE_CHECKING:
    from worqr.batches import BatchInfo
    from worqr.dashboard.bulk import Bulk
    from worqr.dashboard.payloads import Redactor
    from worqr.mesh_records import LogEntry, WorkerInfo
    from worqr.records import Entry, Failed, JobRecord, RemoteError, Status, TaskInfo


# JSON for other programs, behind the same gate as the pages: what a program that scales workers needs.


MOST_PLACES: Final = 100_000


async def scale(visit: Visit) -> Response:
    """Return how much there is to do on one queue, also while no worker runs. Tasks that a pause or a limit holds do not count.

    With `places`, the number of tasks that one worker runs at the same time, also return how many workers are wanted.
    """
    queue, places = visit.queue(visit.text("queue")), visit.number("places", 0, 1, MOST_PLACES)
    state = await look(visit)
    info = state.age_in(await queue.info())
    load = may_run(info)
    found: dict[str, Any] = {"queue": queue.name, "load": load, "age": info.age or 0.0, "workers": info.workers}
    found |= {"held_back": info.held_back, "held_for": info.held_for}
    if places:
        found["wanted"] = math.ceil(load / places)
    return JSONResponse(found)


async def schema(visit: Visit) -> Response:
    """Return the functions of the application that the viewer sees, as a document of AsyncAPI."""
    functions = [definition_of(visit.functions[name]) for name in sorted(visit.functions) if visit.viewer.sees(name)]
    settings = client_of(visit.mesh).settings
    try:
        found = asyncapi(functions, settings.prefix, settings.app)
    except UsageError as error:
        raise Refused(404, f"{error}.") from None
    if not visit.functions:
        found["info"]["description"] = "No functions: mount the dashboard in the application that declares them."
    return JSONResponse(found)


# ``/metrics``: the metrics of the mesh for Prometheus, behind the same gate as the pages.


MAX_QUEUES: Final = 300
"""Queues that are shown by name; the others are summed up."""


class FleetSource:
    """Reads the mesh for scrapes, and remembers which queues it has shown by name."""

    def __init__(self, visit: Visit) -> None:
        self._mesh = visit.mesh
        self._reader = FleetReader(visit.mesh, gathered)
        self.metrics: FleetMetrics = FleetMetrics(MAX_QUEUES)

    async def read(self, _before: object) -> FleetSnapshot | None:
        """Look at the mesh; None if its server does not reply."""
        with anyio.move_on_after(GIVE_UP_AFTER):
            try:
                async with self._mesh.connect():
                    return await self._reader.read()
            except Unavailable:
                return None
        return None


async def scrape(visit: Visit) -> Response:
    """Return the metrics of the mesh. If its server is away, ``worqr_up`` is 0, and no other metric is there."""
    if not visit.viewer.sees_all:
        raise Refused(403, "Metrics are for viewers who see all queues only.")
    try:
        from worqr.metrics.prometheus import exposition, fleet_collector
    except ImportError as error:
        raise Refused(501, f"{error}.") from None
    source = visit.looks.kept("metrics", partial(FleetSource, visit))
    snapshot: FleetSnapshot | None = await visit.looks.get("metrics", source.read)
    body, content_type = exposition(fleet_collector(source.metrics.samples(snapshot)), "")
    return Response(body, media_type=None, headers={"content-type": content_type})


MOST_ROWS: Final = 200
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
    return " ".join(
        f"{name}={value if isinstance(value, str) else f'{value:g}'}"
        for name, value in record.items()
        if value not in (None, "")
    )


def _plain(value: object) -> object:
    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} is not for JSON")


# Tables


def _limit(visit: Visit) -> int:
    return visit.number("limit", ROWS, 1, MOST_ROWS)


def _page(visit: Visit, every: Sequence[Any], row: Callable[[Any], Row]) -> Rows:
    """Return the rows of the page that the address names."""
    number, limit = visit.number("page", 1, 1, 10_000), _limit(visit)
    end = number * limit
    return Rows([row(each) for each in every[end - limit : end]], {"page": number + 1} if len(every) > end else {})


async def queues(visit: Visit) -> Rows:
    """The list of queues."""
    state = await pages.look(visit)

    def row(info: Any) -> Row:
        rates, paused = state.rates.get(info.name), _reason(info.paused, visit.redactor)
        return {**asdict(info), "paused": paused, "rates": NO_RATES if rates is None else asdict(rates)}

    return _page(visit, pages.sorted_queues(visit, state, empty="show")[0], row)


async def tasks(visit: Visit) -> Rows:
    """The tasks of a queue in one state."""
    queue, limit = visit.queue(visit.text("queue")), _limit(visit)
    state = visit.choice("state", ("waiting", "scheduled", "suspended", "blocked", "running", "kept"))
    if state == "kept":
        found = await jobs_of(visit, queue, limit + 1)
    elif state == "running":
        found = await queue.running(limit)
    elif state == "waiting":
        newest = visit.choice("order", pages.ORDERS) == "end"
        found = await pages.waiting_tasks(visit, queue.name, limit + 1, newest=newest)
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
    state, worker = await pages.look(visit), visit.text("worker")
    found, refused = await pages.running_tasks(
        visit, state, await pages.served_by(visit, worker), worker, _limit(visit)
    )
    if refused and not found:
        raise Refused(502, f"The server refuses to show the running tasks: {next(iter(refused.values()))}")
    return Rows([task_row(name, task, visit.redactor) for name, task in found[: _limit(visit)]], {})


async def ended(visit: Visit) -> Rows:
    """The runs of a queue that ended last."""
    queue = visit.queue(visit.text("queue"))
    return Rows([{"queue": queue.name, **asdict(run)} for run in await queue.recent(_limit(visit))], {})


async def records(visit: Visit) -> Rows:
    """The dead-letter records of a queue."""
    queue = visit.queue(visit.text("queue"))
    found = await read_records(visit, queue, visit.choice("list", ("failed", "undecodable")), _limit(visit))
    rows = [record_row(record, visit.redactor) for record in found["records"]]
    last = found["records"][-1] if found["more"] else None
    return Rows(rows, {} if last is None else {"older": last.at.isoformat(), "past": last.id})


async def workers(visit: Visit) -> Rows:
    """The workers."""
    found, _ = await pages.with_state(visit, partial(pages.filtered_workers, visit))
    return _page(visit, found, partial(worker_row, visit))


async def schedules(visit: Visit) -> Rows:
    """The schedules."""
    if not visit.viewer.sees_all:
        raise Refused(403, "Schedules are shown to viewers who see all queues only.")
    found, following = await pages.page_of_schedules(visit, _limit(visit))
    return Rows([fields_of(each) for each in found], {"after": following} if following else {})


async def topics(visit: Visit) -> Rows:
    """What queues are subscribed to."""
    found, _ = await pages.subscribers(visit)
    return _page(visit, found, asdict)


async def limits(visit: Visit) -> Rows:
    """The limits with a name."""
    if not visit.viewer.sees_all:
        raise Refused(403, "Limits with a name are shown to viewers who see all queues only.")
    return _page(visit, await pages.named_limits(visit), asdict)


async def log(visit: Visit) -> Rows:
    """The log of the mesh."""
    found, _ = await pages.with_state(visit, partial(pages.chosen_entries, visit))
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
    fields = job_fields(record, visit.redactor) | {"batch": None, "follows": None}
    if record.batch is not None and visit.viewer.sees(record.batch.queue):
        fields["batch"] = {"queue": record.batch.queue, "id": record.batch.id}
    if record.follows is not None and visit.viewer.sees(record.follows[0]):
        fields["follows"] = {"queue": record.follows[0], "id": record.follows[1]}
    for name, follow_up in (("then", record.then), ("otherwise", record.otherwise)):
        fields[name] = follow_up if follow_up and visit.viewer.sees(follow_up) else None
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
    "/api/v1/dead-letters": records,
    "/api/v1/workers": workers,
    "/api/v1/schedules": schedules,
    "/api/v1/topics": topics,
    "/api/v1/limits": limits,
    "/api/v1/log": log,
    "/api/v1/bulk": bulk,
}


# Rows


def _error(error: RemoteError | None, redactor: Redactor) -> Row | None:
    return None if error is None else {"type": error.type, "message": redactor.text(error.message)}


def _reason(reason: str | None, redactor: Redactor) -> str | None:
    """Return the reason of a pause or a cancel; None if there is none."""
    return None if reason is None else redactor.text(reason)


STATUS: Final = "state worker since run_at next_run progress attempts failures"
RECORD: Final = "queue id at reason failures stalls timeouts worker size"
JOB: Final = (
    "queue id life dispatched expires_at claim deadline cancelling stalls timeouts size lane saved_size options meta "
    "twins"
)


def _status(status: Status, redactor: Redactor) -> Row:
    texts = {name: redactor.text(getattr(status, name)) for name in ("message", "waits_for")}
    return picked(status, STATUS) | texts | {"error": _error(status.error, redactor)}


def _stored(record: TaskInfo | Failed | JobRecord, redactor: Redactor, queue: str) -> Row:
    """Return the beginning of a payload, as pages show it, and `meta` without its secrets."""
    found: Row = {"payload": redactor.payload(record.task, record.size, queue=queue).line}
    if not isinstance(record, TaskInfo):
        found["meta"] = {name: redactor.meta(name, value) for name, value in record.meta.items()}
    return found


def task_row(queue: str, task: TaskInfo, redactor: Redactor) -> Row:
    """Return a task."""
    fields = picked(task, "id claim deadline cancelling place size ended seconds kept") | {"lane": task.lane or None}
    fields |= {"tags": list(task.tags)}
    return {"queue": queue} | _status(task, redactor) | fields | _stored(task, redactor, queue)


def record_row(record: Failed, redactor: Redactor) -> Row:
    """Return a dead-letter record."""
    return picked(record, RECORD) | {"error": _error(record.error, redactor)} | _stored(record, redactor, record.queue)


def worker_row(visit: Visit, worker: WorkerInfo) -> Row:
    """Return a worker, with those of its queues that the viewer sees."""
    return {**fields_of(worker), "queues": sorted(filter(visit.viewer.sees, worker.queues))}


def entry_row(redactor: Redactor, entry: LogEntry) -> Row:
    """Return an entry of the log."""
    return {**asdict(entry), "text": redactor.text(entry.text)}


def batch_row(visit: Visit, info: BatchInfo) -> Row:
    """Return a batch, with those of its queues that the viewer sees."""
    queue, job = batch_pages.seen_follow_up(visit, info) or (None, None)
    numbers = "queue id state jobs finished failed cancelled pending succeeded endings created ended"
    return picked(info, numbers) | {
        "cancel_reason": _reason(info.cancel_reason, visit.redactor),
        "queues": batch_pages.seen_queues(visit, info),
        "follow_up": {"queue": queue, "id": job},
        "meta": {name: visit.redactor.meta(name, value) for name, value in info.meta.items()},
    }


def act_row(act: Bulk) -> Row:
    """Return an act on many tasks, and how far it is."""
    order, about = act.order, {"id": act.id, "act": act.order.verb, "began": act.began, "outcome": sentence(act)}
    about |= {"queue": order.queue, "batch": order.batch or None, "who": order.who}
    return about | picked(act.progress, "state tried total changed")


def line_row(entry: Entry, redactor: Redactor) -> Row:
    """Return an entry of the time line of a workflow."""
    names = {"name": redactor.text(entry.name), "key": redactor.text(entry.key)}
    return {**fields_of(entry), **names, "seconds": entry.seconds, "error": _error(entry.error, redactor)}


def job_fields(record: JobRecord, redactor: Redactor) -> Row:
    """Return what is stored about a job."""
    tries = [
        picked(each, "at seconds worker reason") | {"error": _error(each.error, redactor)} for each in record.tries
    ]
    return {
        **picked(record, JOB),
        **_status(record.status, redactor),
        **_stored(record, redactor, record.queue),
        "options": dict(record.options),
        "twins": list(record.twins),
        "tries": tries,
        "time_line": [line_row(each, redactor) for each in record.time_line],
        "dead_letters": [record_row(each, redactor) for each in record.dead_letters],
    }
