"""The pages that show something: a handler for each. Each makes few requests, and each list has pages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, cast

from starlette.responses import Response

from worqr import ops
from worqr.client.inspection import ask_each, list_jobs, merge_queue_info
from worqr.client.job import opened_infos
from worqr.client.queue import queue_named
from worqr.client.schedules import find_schedule, schedule_of, schedules_of
from worqr.cron import Schedule
from worqr.dashboard.access import Refused
from worqr.dashboard.ended import OUTCOMES, jobs_of, read_counts, read_records, result_of, tagged
from worqr.dashboard.graphs import DAY, HOUR, NAMES, read_graphs, read_sparklines
from worqr.dashboard.reads import FRESH, gathered, pair, unless_refused
from worqr.dashboard.request import Visit
from worqr.dashboard.state import (
    MeshState,
    is_empty_failure_queue,
    job_rows,
    lane_rows,
    needs_of,
    read_state,
    rows_of,
    signature,
)
from worqr.errors import RefusedByServer, UsageError
from worqr.inside import client_of
from worqr.keys import MAX_SHARDS, PUBLISH, QueueKeys, RegistryKeys
from worqr.mesh_records import LaneInfo, LogEntry, QueueInfo, WorkerInfo, is_in_use
from worqr.ops import FIND_DEPTH
from worqr.records import MOST_RECENT, EndedRun, Entry, Failed, JobRecord, Matches, Status, TaskInfo
from worqr.views import values
from worqr.views.schemas import FormField, form_fields
from worqr.views.tables import age_of, open_waits

if TYPE_CHECKING:
    from worqr.client.queue import Queue
    from worqr.client.topics import Subscription
    from worqr.limits import LimitInfo
    from worqr.ops import ServedPolicy


# The page of all failed tasks: the newest error of each queue, and on demand the types of errors in all queues.


MOST_QUEUES: Final = 20
"""Queues whose records are read for the page."""
MOST_TYPES: Final = 50


@dataclass(frozen=True, slots=True)
class ErrorTable:
    """How many records have which type of error, by queue. Rows and columns are sorted, those with the most records first."""

    queues: Sequence[str]
    rows: Sequence[tuple[str, int, Sequence[int]]]
    """The type of the error, its sum, and its number in each queue."""
    types_left_out: int


async def failed(visit: Visit) -> Response:
    """The queues with dead-letter records, the newest record of each, and their error types if the viewer asks for them."""
    state = await look(visit)
    found = failing_queues(state)
    shown = found[:MOST_QUEUES]

    async def newest(name: str) -> tuple[list[Failed], str]:
        return await unless_refused(partial(queue_named(visit.mesh.queue, name).failed.list, 1), list[Failed]())

    names = [info.name for info in shown]
    calls: list[Callable[[], Awaitable[Any]]] = [partial(newest, name) for name in names]
    calls.append(partial(read_sparklines, visit, names, DAY, "failed", "Failed"))
    if visit.text("count") == "errors":
        calls.append(partial(read_counts, visit, names_to_count(state), "failed"))
    found_all = await gathered(calls)  # all of them at once, so that they are one batch
    newests, (sparks, *counted) = found_all[: len(names)], found_all[len(names) :]
    return visit.page(
        "failed.html",
        live=visit.link("/live", view="failed", count=visit.text("count")),
        found=list(zip(shown, newests, strict=True)),
        sparks=sparks,
        left_out=len(found) - len(shown),
        errors=error_table(counted[0].counts) if counted else None,
        counted=counted[0] if counted else None,
        total=sum(info.failed for info in shown),
    )


def names_to_count(state: MeshState) -> list[str]:
    """Return the queues whose records the page counts."""
    return [info.name for info in failing_queues(state)[:MOST_QUEUES] if info.failed]


def failing_queues(state: MeshState) -> list[QueueInfo]:
    """Return the queues with dead-letter records, those with the most first."""
    found = [info for info in state.queues if info.failed or info.undecodable]
    return sorted(found, key=lambda info: (-(info.failed + info.undecodable), info.name))


def error_table(counts: Mapping[str, Mapping[str, int]]) -> ErrorTable:
    """Return the table of the counts of each queue."""
    by_queue = {name: found for name, found in counts.items() if found}
    queues = sorted(by_queue, key=lambda name: (-sum(by_queue[name].values()), name))
    sums: dict[str, int] = {}
    for found in by_queue.values():
        for error, number in found.items():
            sums[error] = sums.get(error, 0) + number
    errors = sorted(sums, key=lambda error: (-sums[error], error))
    rows = [(error, sums[error], [by_queue[name].get(error, 0) for name in queues]) for error in errors[:MOST_TYPES]]
    return ErrorTable(queues, rows, len(errors) - len(rows))


def check_sees_all(visit: Visit) -> None:
    if not visit.viewer.sees_all:
        raise Refused(403, "Schedules are for viewers who see all queues only.")


# What was asked of a worker, and what can be done about it, as sentences.


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


T = TypeVar("T")

SHORT_LIST: Final = 8
NEWEST: Final = 8
"""Entries of the log on the overview."""
NEWEST_READ: Final = 50
"""Entries of the log that are read for it, because a viewer may not see all of them."""
PAGE: Final = 50
OF_ONE_WORKER: Final = 250
"""Running tasks of one worker in one queue that are read, so that the page can say how many are left out."""
MOST_COLONS: Final = 4
"""Colons at which the text of a search is split into a queue and an id. Both may have some."""
QUEUES_OF_RUNNING: Final = 20
"""Queues whose running tasks are read for one page."""
MOST_FORMS: Final = 20
"""Waits of one workflow for which a page has a form."""
Empty = Literal["hide", "show"]
TABS: Final = ("waiting", "scheduled", "suspended", "blocked", "running", "failed", "undecodable", "kept", "ended")
"""The lists of the page of a queue."""
ORDERS: Final = ("front", "end")
"""The ends from which waiting tasks are listed."""
SORTS: Final[dict[str, Callable[[QueueInfo], float | str]]] = {
    "name": lambda info: info.name,
    "waiting": lambda info: info.waiting,
    "scheduled": lambda info: info.scheduled,
    "running": lambda info: info.running,
    "failed": lambda info: info.failed + info.undecodable,
    "workers": lambda info: info.workers,
    "age": lambda info: age_of(info) or 0.0,
}


async def look(visit: Visit) -> MeshState:
    """Return the state of the mesh, as this viewer sees it."""
    state: MeshState = await visit.looks.get("state", partial(read_state, visit.mesh))
    return state.for_viewer(visit.viewer)


async def with_state(visit: Visit, read: Callable[[], Awaitable[T]]) -> tuple[T, MeshState]:
    """Read something together with the state of the mesh, of which each page has a part in its header: one batch of requests."""
    return await pair(read, partial(look, visit))


async def all_workers(visit: Visit) -> list[WorkerInfo]:
    """Return the workers, read a moment ago."""

    async def read(_before: list[WorkerInfo] | None) -> list[WorkerInfo]:
        return await visit.mesh.workers()

    return await visit.looks.get("workers", read)


async def page_of_schedules(visit: Visit, limit: int) -> tuple[list[Schedule], str]:
    """Return one page of the schedules whose names begin with the text of the filter, and the name after which the next begins.

    Of the stored ones, nothing but the page is read. A viewer who does not see all queues gets none, because a schedule does not
    name its queue.
    """
    if not visit.viewer.sees_all:
        return [], ""
    client, keys = client_of(visit.mesh), RegistryKeys(visit.mesh.prefix)
    prefix, after = visit.text("q"), visit.text("after")
    calls: list[Callable[[], Awaitable[Any]]] = [
        partial(client.ask, ops.survey_schedules(keys)),
        partial(client.ask, ops.page_schedules(keys, prefix, after, limit + 1)),
        partial(look, visit),
    ]
    survey, (stored, now), _ = await gathered(calls)
    declared = [row for row in survey.rows if row.name.startswith(prefix) and row.name > after]
    rows: list[ops.ScheduleRow] = sorted([*declared, *stored], key=_name_of)
    found = await schedules_of(client, rows[:limit], now)
    return [_without_secrets(each, visit) for each in found], rows[limit - 1].name if len(rows) > limit else ""


def _name_of(row: ops.ScheduleRow) -> str:
    return row.name


def _without_secrets(schedule: Schedule, visit: Visit) -> Schedule:
    last = schedule.last_outcome
    if last is None or not last.error:
        return schedule
    return replace(schedule, last_outcome=replace(last, error=visit.redactor.text(last.error)))


async def _late_schedules(visit: Visit) -> list[Schedule]:
    """Return the schedules that have been due for longest, without how their last runs ended."""
    if not visit.viewer.sees_all:
        return []
    client, keys = client_of(visit.mesh), RegistryKeys(visit.mesh.prefix)

    async def read(_before: list[Schedule] | None) -> list[Schedule]:
        names = await client.ask(ops.list_due_schedules(keys, 0))
        survey = await client.ask(ops.survey_schedules(keys, names[:PAGE])) if names else None
        return [] if survey is None else [schedule_of(row, survey.now) for row in survey.rows]

    return await visit.looks.get("late schedules", read)


async def overview(visit: Visit) -> Response:
    """The totals, what needs attention, the busiest queues, and the workers."""
    read = partial(unless_refused, partial(_late_schedules, visit), list[Schedule]())
    events = partial(unless_refused, partial(newest_entries, visit), list[LogEntry]())
    calls: list[Callable[[], Awaitable[Any]]] = [partial(look, visit), read, events]
    state, (schedules, refused), (entries, _) = await gathered(calls)
    busiest = state.busiest(SHORT_LIST)
    sparks = await read_sparklines(visit, [info.name for info in busiest], HOUR, "finished", "Finished")
    return visit.page(
        "overview.html",
        live=visit.link("/live", view="overview"),
        state=state,
        needs=needs_of(state, schedules),
        refused=refused,
        busiest=busiest,
        sparks=sparks,
        entries=entries,
    )


async def newest_entries(visit: Visit) -> list[LogEntry]:
    """Return the newest entries of the log for the overview, the newest first: those that this viewer may see."""

    async def read(_before: list[LogEntry] | None) -> list[LogEntry]:
        return (await visit.mesh.log(NEWEST_READ))[::-1]

    entries = await visit.looks.get("newest entries", read)
    return [each for each in entries if visit.viewer.sees_all or (each.queue and visit.viewer.sees(each.queue))][
        :NEWEST
    ]


async def queues(visit: Visit) -> Response:
    """The list of queues, without failure queues that are empty unless the viewer asks for them."""
    fields = {name: visit.text(name) for name in ("q", "sort", "page")} | {"empty": visit.text("empty") or "hide"}
    start = start_of_page(visit)
    state = await look(visit)
    found, hidden = sorted_queues(visit, state, empty="hide")
    shown = found[start : start + PAGE]
    shared = await named_limits(visit) if not (start or fields["q"]) else []
    return visit.page(
        "queues.html",
        limits=shared,
        live=visit.link("/live", view="queues", **fields),
        state=state,
        found=shown,
        sparks=await read_sparklines(visit, [info.name for info in shown], HOUR, "finished", "Finished"),
        total=len(found),
        start=start,
        size=PAGE,
        word=fields["q"],
        sort=fields["sort"] or "activity",
        empty=fields["empty"],
        hidden=hidden,
        unreadable={
            name: why for name, why in state.info.unreadable.items() if fields["q"].strip().lower() in name.lower()
        },
    )


async def named_limits(visit: Visit) -> list[LimitInfo]:
    """Return the limits with a name; none if the server refuses to say, or if the viewer does not see all queues."""
    try:
        return await visit.mesh.limits() if visit.viewer.sees_all else []
    except RefusedByServer:
        return []


def sorted_queues(visit: Visit, state: MeshState, *, empty: Empty) -> tuple[list[QueueInfo], int]:
    """Return the queues that match the filter of the list, in its order; and how many empty failure queues are left out.

    Args:
        visit: the request, with the filter.
        state: the queues.
        empty: what becomes of empty failure queues, unless the request says it.
    """
    word, sort = visit.text("q").strip().lower(), visit.choice("sort", ("activity", *SORTS))
    every = [info for info in state.busiest(len(state.queues)) if word in info.name.lower()]
    hides = visit.choice("empty", ("hide", "show") if empty == "hide" else ("show", "hide")) == "hide"
    found = [info for info in every if not (hides and is_empty_failure_queue(info))]
    if sort != "activity":
        found.sort(key=SORTS[sort], reverse=sort != "name")
    return found, len(every) - len(found)


async def filtered_workers(visit: Visit) -> list[WorkerInfo]:
    """Return the workers that match the filter of the list."""
    app, worker, queue = visit.text("app"), visit.text("id"), visit.text("queue")
    if queue:
        visit.queue(queue)
    return [
        each
        for each in await all_workers(visit)
        if (not app or each.app == app) and (not worker or each.id == worker) and (not queue or queue in each.queues)
    ]


def start_of_page(visit: Visit, size: int = PAGE) -> int:
    """Return the place of the first row of a page of a list."""
    return (visit.number("page", 1, 1, 10_000) - 1) * size


async def queue(visit: Visit) -> Response:
    """One queue, and one page of its tasks."""
    queue = visit.queue(visit.text("name"))
    tab = visit.choice("tab", TABS)
    span = visit.choice("range", tuple(NAMES))
    calls: list[Callable[[], Awaitable[Any]]] = [partial(look, visit), partial(read_info, visit, queue.name)]
    calls += [partial(unless_refused, partial(_tasks_of, visit, queue, tab), dict[str, Any]())]
    calls += [partial(read_graphs, visit, queue.name, span)]
    calls += [partial(unless_refused, partial(read_serving, visit, queue.name), None)]
    state, (info, shards), (context, refused), graphs, (served, unserved) = await gathered(calls)
    info = state.age_in(info)
    context |= {"graphs": graphs, "range": span, "ranges": NAMES, "refused": refused}
    context |= {
        "serving": served,
        "unserved": unserved,
        "shards": shards,
        "shard": visit.number("shard", 0, 1, MAX_SHARDS),
    }
    context["shard_texts"] = shard_numbers(info.name, shards)
    context["left_out"] = info.running - PAGE if tab == "running" else 0
    unknown = not (is_in_use(info) or any(info.counts.values()) or visit.text("done"))
    context |= {"unknown": unknown, "near": nearest(info.name, state) if unknown else ""}
    counts = visit.text("count")
    seen = "" if counts else signature(rows_of(info, tab, context.get("tasks", ())))
    view = visit.link("/live", view="queue", name=info.name, tab=tab, range=span, count=counts, seen=seen)
    return visit.page("queue.html", 404 if unknown else 200, live=view, info=info, tab=tab, tabs=TABS, **context)


def nearest(name: str, state: MeshState) -> str:
    """Return the queue whose name is most similar to that of a queue that was never used; empty if none is."""
    import difflib  # imported here, because only unknown names need it

    close = difflib.get_close_matches(name, [info.name for info in state.queues if info.name != name], 1)
    return close[0] if close else ""


async def _tasks_of(visit: Visit, queue: Queue, tab: str) -> dict[str, Any]:
    """Return one page of the tasks of a queue, as its template needs it."""
    if tab in ("failed", "undecodable"):
        return await read_records(visit, queue, tab)
    if tab == "ended":
        return {"ended": await queue.recent(PAGE)}
    if tab == "kept":
        tasks = await jobs_of(visit, queue, PAGE + 1)
        chosen = {"outcome": visit.choice("outcome", OUTCOMES), "outcomes": OUTCOMES, "tag": visit.text("tag").strip()}
        return {"tasks": tasks[:PAGE], "more": len(tasks) > PAGE, "after": visit.text("after"), **chosen}
    if tab == "running":
        return {"tasks": (await queue.running(PAGE + 1))[:PAGE], "more": False, "after": ""}
    order = visit.choice("order", ORDERS)
    if tab == "waiting":
        tasks = await waiting_tasks(visit, queue.name, PAGE + 1, newest=order == "end")
    else:
        tasks = await queue.jobs(state=_state(tab), limit=PAGE + 1, after=visit.text("after"))
    return {"tasks": tasks[:PAGE], "more": len(tasks) > PAGE, "after": visit.text("after"), "order": order}


def _state(tab: str) -> Literal["scheduled", "suspended", "blocked"]:
    return cast('Literal["scheduled", "suspended", "blocked"]', tab)


async def job(visit: Visit) -> Response:
    """One job: where it is, its tries, its payload."""
    context = await read_job(visit)
    record: JobRecord = context["record"]
    is_gone = record.status.state == "gone" and not record.dead_letters
    unknown = is_gone and not (context["last_run"] or context["listed"] or visit.text("done"))
    fields = {"queue": record.queue, "id": record.id, "seen": signature(job_rows(record.status))}
    view = visit.link("/live", view="job", listed="" if unknown else "1", **fields)
    return visit.page("job.html", 404 if unknown else 200, live=view, **context)


async def read_job(visit: Visit) -> dict[str, Any]:
    """Return what the page of a job shows. Of a job that is gone, its last run is looked for among the runs that are kept."""
    queue = visit.queue(visit.text("queue"))
    calls: list[Callable[[], Awaitable[Any]]] = [partial(queue.read, visit.text("id")), partial(look, visit)]
    calls += [partial(unless_refused, queue.info, None)]
    calls += [partial(unless_refused, partial(result_of, visit, queue, visit.text("id")), None)]
    record, _, (info, _), (result, _) = await gathered(calls)
    runs: list[EndedRun] = []
    if record.status.state == "gone":
        runs, _ = await unless_refused(partial(queue.recent, MOST_RECENT), runs)
    last_run = next((run for run in runs if run.id == record.id), None)
    context = {"record": record, "status": record.status, "info": info, "last_run": last_run, "forms": _forms(record)}
    return context | {"listed": bool(visit.text("listed")), "result": result}


def _forms(record: JobRecord) -> list[tuple[Entry, Sequence[FormField]]]:
    """Return the open waits of a workflow for events, and the fields of the value that each needs."""
    return [(each, form_fields(each.schema)) for each in open_waits(record)[:MOST_FORMS]]


async def payload(visit: Visit) -> Response:
    """The whole payload of a job, as a download."""
    queue = visit.queue(visit.text("queue"))
    record = await queue.read(visit.text("id"), payload=True)
    if record.size is None and not record.dead_letters:
        raise Refused(404, "No payload of this job is stored.")
    task = record.dead_letters[0].task if record.size is None else record.task
    client = client_of(visit.mesh)
    await client.note("payload_seen", queue=record.queue, job=record.id)
    headers = {"content-disposition": "attachment; filename=payload.bin"}
    return Response(task, media_type="application/octet-stream", headers=headers)


async def running(visit: Visit) -> Response:
    """The running tasks of all queues, the longest first."""
    state, worker = await look(visit), visit.text("worker")
    tasks, refused = await running_tasks(visit, state, await served_by(visit, worker), worker)
    busy = sorted((info for info in state.queues if info.running), key=lambda info: -info.running)
    running = sum(info.running for info in busy[:QUEUES_OF_RUNNING] if info.name not in refused)
    return visit.page(
        "running.html",
        live=visit.link("/live", view="running", worker=worker),
        tasks=tasks[:PAGE],
        left_out=max((len(tasks) if worker else running) - PAGE, 0),
        queues_left_out=max(len(busy) - QUEUES_OF_RUNNING, 0),
        refused=refused,
        worker=worker,
        total=sum(info.running for info in state.queues),
    )


async def served_by(visit: Visit, worker: str) -> Collection[str] | None:
    """Return the queues that a worker serves; None: all, because no worker is named."""
    if not worker:
        return None
    return {name for each in await all_workers(visit) if each.id == worker for name in each.queues}


async def running_tasks(
    visit: Visit, state: MeshState, served: Collection[str] | None, worker: str = "", most: int = PAGE + 1
) -> tuple[list[tuple[str, TaskInfo]], dict[str, str]]:
    """Return the tasks that run longest, `most` of each queue, with their queues; and the queues whose running tasks the server
    refuses to list, with its words. If the id of a worker and the queues that it serves are given: the tasks of this worker.
    """
    busy = [each for each in state.queues if each.running and (served is None or each.name in served)]
    names = [each.name for each in sorted(busy, key=lambda info: -info.running)]

    async def read(name: str) -> tuple[list[TaskInfo], str]:
        limit = OF_ONE_WORKER if worker else most
        return await unless_refused(
            partial(queue_named(visit.mesh.queue, name).running, limit, worker=worker), list[TaskInfo]()
        )

    lists = await gathered([partial(read, name) for name in names[:QUEUES_OF_RUNNING]])
    found = [(name, task) for name, (tasks, _) in zip(names, lists, strict=False) for task in tasks]
    found.sort(key=lambda pair: pair[1].since or datetime.max.replace(tzinfo=UTC))
    return found, {name: why for name, (_, why) in zip(names, lists, strict=False) if why}


async def workers(visit: Visit) -> Response:
    """The registered workers."""
    start, app, queue = start_of_page(visit), visit.text("app"), visit.text("queue")
    found, _ = await with_state(visit, partial(filtered_workers, visit))
    versions = {each.version for each in await all_workers(visit)}
    return visit.page(
        "workers.html",
        live=visit.link("/live", view="workers", app=app, queue=queue, page=visit.text("page")),
        found=found[start : start + PAGE],
        total=len(found),
        start=start,
        size=PAGE,
        app=app,
        queue=queue,
        mixed=len(versions) > 1,
    )


async def worker(visit: Visit) -> Response:
    """One worker, and what it runs."""
    found, state = await with_state(visit, partial(filtered_workers, visit))
    if not found or not visit.text("id"):
        raise Refused(404, "There is no worker with this id: it has left, or its tasks were given back after it died.")
    info = found[0]
    tasks, refused = await running_tasks(visit, state, info.queues, info.id)
    return visit.page(
        "worker.html",
        live=visit.link("/live", view="workers", id=info.id),
        info=info,
        request=request_text(info, state.at),
        advice=advice(info),
        refused=refused,
        tasks=tasks[:PAGE],
        left_out=max(len(tasks) - PAGE, 0),
        served=sorted(name for name in info.queues if visit.viewer.sees(name)),
    )


async def search(visit: Visit) -> Response:
    """A job by its id, in all queues or in the one that is named before a colon; and queues by a part of their name. Or the plain
    tasks of a queue with a payload.
    """
    word = visit.text("q").strip()
    matches = await _matches(visit) if "payload" in visit.query else None
    found: list[tuple[str, str, Status]] = []
    with_tag: list[tuple[str, TaskInfo]] = []
    names: list[str] = []
    if word:
        calls: list[Callable[[], Awaitable[Any]]] = [partial(look, visit), *_searches(visit, word)]
        state, *lists = await gathered(calls)
        found = [each for some in lists for each in some]
        names = [info.name for info in state.queues if word.lower() in info.name.lower()][:PAGE]
        with_tag = [] if found or names else await tagged(visit, state, word)  # mostly a word is one of them
    shown, left_out = found[:PAGE], max(len(found) - PAGE, 0)
    return visit.page(
        "search.html",
        live="",
        word=word,
        found=shown,
        left_out=left_out,
        with_tag=with_tag,
        names=names,
        matches=matches,
        depth=FIND_DEPTH,
    )


async def _matches(visit: Visit) -> Matches:
    """Return where a payload is. A viewer who may not read payloads may not test guesses of them, either."""
    if "payloads" not in visit.viewer.may:
        raise Refused(403, f"You are {visit.viewer.name!r}, and lack the right 'payloads' for this.")
    queue = visit.queue(visit.text("queue").strip())
    matches, _ = await with_state(visit, partial(queue.find, visit.text("payload").encode(), PAGE))
    return matches


Found = list[tuple[str, str, Status]]


def _searches(visit: Visit, word: str) -> list[Callable[[], Awaitable[Found]]]:
    """Return the calls that look for a job: in all queues, and in one for ``QUEUE:ID``. Each returns queues, ids and statuses."""

    async def everywhere() -> Found:
        statuses = await visit.mesh.find(word)
        return [(name, word, status) for name, status in statuses.items() if visit.viewer.sees(name)]

    async def in_queue(name: str, id: str) -> Found:
        try:
            status = await queue_named(visit.mesh.queue, name).job(id).status()
        except UsageError:  # the name of no queue, or the id of no job
            return []
        return [(name, id, status)] if status.state != "gone" else []

    splits = [(word[:place], word[place + 1 :]) for place, letter in enumerate(word) if letter == ":"][:MOST_COLONS]
    named = [partial(in_queue, name, rest) for name, rest in splits if name and rest and visit.viewer.sees(name)]
    return [everywhere, *named]


# The page of the log of the mesh: what has happened, and what operators did.


LOG_PAGE: Final = 100
"""Entries of one page."""
MOST_ENTRIES: Final = 1000
"""Entries that are read, the newest: as many as one request returns."""


async def log(visit: Visit) -> Response:
    """One page of the log, newest first, filtered by kind, queue and person."""
    entries, _ = await with_state(visit, partial(entries_of, visit))
    chosen, found = chosen_fields(visit), matching(visit, entries)
    start = start_of_page(visit, LOG_PAGE)
    return visit.page(
        "log.html",
        live=visit.link("/live", view="log"),
        found=found[start : start + LOG_PAGE],
        total=len(found),
        start=start,
        size=LOG_PAGE,
        chosen=chosen,
        kinds=sorted(({entry.kind for entry in entries} | {chosen["kind"]}) - {""}),
        people=sorted(({entry.who for entry in entries} | {chosen["who"]}) - {""}),
        cut=len(entries) == MOST_ENTRIES,
    )


async def chosen_entries(visit: Visit) -> list[LogEntry]:
    """Return the entries that match the filter of the address."""
    return matching(visit, await entries_of(visit))


def chosen_fields(visit: Visit) -> dict[str, str]:
    return {name: visit.text(name).strip() for name in ("kind", "queue", "who")}


def matching(visit: Visit, entries: Iterable[LogEntry]) -> list[LogEntry]:
    chosen = chosen_fields(visit)
    return [entry for entry in entries if all(getattr(entry, name) == value for name, value in chosen.items() if value)]


async def entries_of(visit: Visit, within: float = FRESH, *, spare: bool = False) -> list[LogEntry]:
    """Return the newest entries that this viewer may see, the newest first.

    A viewer who does not see all queues sees only what is about those that they see.
    """

    async def read(_before: list[LogEntry] | None) -> list[LogEntry]:
        return (await visit.mesh.log(MOST_ENTRIES))[::-1]

    entries = await visit.looks.get("log", read, within=within, spare=spare)
    if visit.viewer.sees_all:
        return entries
    return [entry for entry in entries if entry.queue and visit.viewer.sees(entry.queue)]


# Who serves a queue and with which handler options, and the shards of a queue, for its page.
#
# Workers store their options when they enter a queue. The server keeps those of a worker until it leaves.


NOT_KNOWN: Final = "–"


@dataclass(frozen=True, slots=True)
class HandlerTexts:
    """The handler options of some workers, as texts for a row of a table."""

    failures: str
    timeouts: str
    stalls: str
    backoff: str
    timeout: str
    errors: str
    kept: str
    results: str
    handler: str


@dataclass(frozen=True, slots=True)
class Served:
    """Workers with the same options. `workers`: the first of them by id. `number`: how many they are."""

    number: int
    workers: Sequence[str]
    options: HandlerTexts


@dataclass(frozen=True, slots=True)
class Serving:
    """All that serve a queue, most workers first.

    Attributes:
        left_out: how many workers were not looked at.
    """

    groups: Sequence[Served]
    left_out: int = 0

    @property
    def differing(self) -> set[str]:
        """The names of the options that are not the same for all workers."""
        known = [group.options for group in self.groups]
        names = (each.name for each in fields(HandlerTexts))
        return {name for name in names if len({getattr(each, name) for each in known}) > 1}


def serving_of(found: Sequence[ServedPolicy], left_out: int = 0) -> Serving:
    """Return the options of workers as texts."""
    return Serving([Served(each.number, each.workers, options_of(each.fields)) for each in found], left_out)


def options_of(stored: Mapping[str, str]) -> HandlerTexts:
    """Return handler options as texts. What is not stored, or is no number, is not known."""
    only, never = stored.get("retry_on", ""), stored.get("fail_on", "")
    known = "max_failures" in stored
    errors = [f"only {only}" if only else "", f"never {never}" if never else ""]
    return HandlerTexts(
        failures=_stored_number(stored, "max_failures"),
        timeouts=_stored_number(stored, "max_timeouts"),
        stalls=_stored_number(stored, "max_stalls"),
        backoff=_backoff(stored),
        timeout=_stored_time(stored, "timeout") if "timeout" in stored or not known else "none",
        errors="; ".join(filter(None, errors)) or ("all" if known else NOT_KNOWN),
        kept=_stored_number(stored, "keep_failed"),
        results=_stored_time(stored, "result_ttl") if "result_ttl" in stored else "not kept",
        handler={"1": "handler", "0": "none"}.get(stored.get("on_failure", ""), NOT_KNOWN),
    )


def _backoff(stored: Mapping[str, str]) -> str:
    """Return how long a task waits before it is retried, and for how long it is retried at all."""
    lowest, highest = _stored_time(stored, "min_backoff"), _stored_time(stored, "max_backoff")
    found = NOT_KNOWN if NOT_KNOWN in (lowest, highest) else f"{lowest} to {highest}"
    found = f"{stored['backoff']}()" if "backoff" in stored else found
    return f"{found}, for {_stored_time(stored, 'retry_for')}" if "retry_for" in stored else found


def _stored_number(stored: Mapping[str, str], name: str) -> str:
    value = stored.get(name, "")
    if not (value.isascii() and value.isdecimal() and len(value) < 16):
        return NOT_KNOWN
    return values.limit(int(value))


def _stored_time(stored: Mapping[str, str], name: str) -> str:
    value = stored.get(name, "")
    if not (value.isascii() and value.isdecimal() and len(value) < 16):
        return NOT_KNOWN
    seconds = int(value) / 1000
    return values.duration(seconds) if seconds.is_integer() else f"{seconds:g} s"


async def read_serving(visit: Visit, name: str) -> Serving:
    """Return who serves a queue. Workers serve all shards of a queue, so the first shard tells."""
    client = client_of(visit.mesh)
    shards = await client.sharding.shards(QueueKeys.of(visit.mesh.prefix, name))
    return serving_of(*await client.ask(ops.list_policies(shards[0])))


async def read_info(visit: Visit, name: str) -> tuple[QueueInfo, list[QueueInfo]]:
    """Return the counters of a queue, and those of each of its shards; of a queue with one shard only the former."""
    client, keys = client_of(visit.mesh), QueueKeys.of(visit.mesh.prefix, name)
    found = await ask_each(client, await client.sharding.shards(keys), ops.inspect)
    shards = [merge_queue_info(f"{keys.display_name} {n}", [each]) for n, each in enumerate(found, 1)]
    return merge_queue_info(keys.display_name, found), shards if len(shards) > 1 else []


async def waiting_tasks(visit: Visit, name: str, limit: int, *, newest: bool) -> list[TaskInfo]:
    """Return one page of the waiting tasks of a queue, or of the shard whose number the field `shard` is.

    Raises:
        Refused: the queue has no such shard.
    """
    client = client_of(visit.mesh)
    shards, number = (
        await client.sharding.shards(QueueKeys.of(visit.mesh.prefix, name)),
        visit.number("shard", 0, 1, MAX_SHARDS),
    )
    if number > len(shards):
        raise Refused(404, f"The queue has {values.plural(len(shards), 'shard')}.")
    chosen = shards[number - 1 : number] if number else shards
    return opened_infos(client, await list_jobs(client, chosen, "waiting", limit, visit.text("after"), newest=newest))


def shard_of(task: TaskInfo) -> int:
    """Return the number of the shard in which a listed task waits, from 1 on. Its cursor begins with the state and the shard."""
    return int(task.cursor.split(" ")[1]) + 1


def shard_numbers(name: str, shards: Sequence[QueueInfo]) -> dict[str, str]:
    """Return the numbers of the shards of a queue that change while its page is open."""
    names = ("waiting", "scheduled", "running", "failed")
    return {
        f"shard.{name}.{n}.{each}": values.count(getattr(info, each) + (info.undecodable if each == "failed" else 0))
        for n, info in enumerate(shards, 1)
        for each in names
    }


# The page of the lanes of a queue.


LANES_SHOWN: Final = 100
"""Lanes on the page: those with the most tasks."""


async def lanes_of(visit: Visit) -> list[LaneInfo]:
    """Return the lanes of the queue that the address names, one more than the page shows if there are more."""
    return await visit.queue(visit.text("queue")).lanes(limit=LANES_SHOWN + 1)


async def lanes(visit: Visit) -> Response:
    """The lanes of a queue."""
    queue = visit.queue(visit.text("queue"))
    found, state = await with_state(visit, lambda: lanes_of(visit))
    shown, more = found[:LANES_SHOWN], len(found) > LANES_SHOWN
    live = visit.link("/live", view="lanes", queue=queue.name, seen=signature(lane_rows(shown)))
    return visit.page("lanes.html", live=live, state=state, queue=queue.name, found=shown, shown=LANES_SHOWN, more=more)


# The page of schedules.


NEXT: Final = 5
"""Times that the page of one schedule lists."""
LAST: Final = 20
"""Runs that it lists."""


@dataclass(frozen=True, slots=True)
class Subscriber:
    """A pattern of topics to which a queue is subscribed, and the tasks of the queue."""

    pattern: str
    queue: str
    app: str
    seen: float
    waiting: int
    delivered: int
    refused: int
    dead: int


async def subscribers(visit: Visit) -> tuple[list[Subscriber], MeshState]:
    """Return the subscriptions of the queues that this viewer sees, and the state of the mesh."""

    async def read(_before: list[Subscription] | None) -> list[Subscription]:
        return await visit.mesh.topics()

    found, state = await with_state(visit, partial(visit.looks.get, "topics", read))
    infos = {info.name: info for info in state.queues}

    def row(each: Subscription) -> Subscriber:
        info = infos.get(each.queue)
        numbers = (0, 0, 0, 0)
        if info is not None:
            counts = info.counts
            numbers = (
                info.waiting,
                counts.get("enqueued", 0),
                counts.get("refused", 0),
                info.failed + info.undecodable,
            )
        return Subscriber(each.pattern, each.queue, each.app, each.seen, *numbers)

    return [row(each) for each in found if visit.viewer.sees(each.queue)], state


async def topics(visit: Visit) -> Response:
    """What queues are subscribed to, and the events that some queue has not got."""
    found, state = await subscribers(visit)
    publishing = next((info for info in state.queues if info.name == PUBLISH), None)
    start = start_of_page(visit)
    return visit.page(
        "topics.html",
        live="",
        found=found[start : start + PAGE],
        total=len(found),
        start=start,
        size=PAGE,
        publishing=publishing,
    )


async def schedules(visit: Visit) -> Response:
    """A page of the schedules; or one with its next times, if the address names it."""
    check_sees_all(visit)
    name, client = visit.text("name"), client_of(visit.mesh)
    if not name:
        shown, following = await page_of_schedules(visit, PAGE)
        word, after = visit.text("q"), visit.text("after")
        return visit.page("schedules.html", live="", found=shown, following=following, word=word, after=after)
    found = await find_schedule(client, name)
    if found is None:
        raise Refused(404, "There is no schedule of this name.")
    calls: list[Callable[[], Awaitable[Any]]] = [
        partial(look, visit),
        partial(schedules_of, client, [found[0]], found[1]),
        partial(_last_runs, visit, schedule_of(*found)),
    ]
    _, [one], (ended, refused) = await gathered(calls)
    one = _without_secrets(one, visit)
    upcoming, why = _next_runs(one)
    return visit.page(
        "schedule.html",
        live="",
        schedule=one,
        upcoming=upcoming,
        why=why,
        info={"name": one.queue},
        ended=ended,
        ended_refused=refused,
    )


async def _last_runs(visit: Visit, schedule: Schedule) -> tuple[list[EndedRun], str]:
    """Return the last runs of a schedule that workers have kept; or the words of a server that refuses them."""
    if not schedule.queue:
        return [], ""
    read = partial(queue_named(visit.mesh.queue, schedule.queue).recent, MOST_RECENT)
    runs, refused = await unless_refused(read, list[EndedRun]())
    return [run for run in runs if run.id == f"cron:{schedule.name}"][:LAST], refused


def _next_runs(schedule: Schedule) -> tuple[list[datetime], str]:
    """Return the next times; or why they are not known."""
    if schedule.paused:
        return [], "The schedule is paused."
    if schedule.problem:
        return [], "They are not known, because of the problem above."
    try:
        return schedule.next_runs(NEXT), ""
    except UsageError as error:  # the extra is missing
        return [], str(error)
