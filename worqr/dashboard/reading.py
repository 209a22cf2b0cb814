"""The handlers of the pages that show something. Each makes few requests, and each list has pages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, Literal, TypeVar, cast

import anyio
from starlette.responses import Response

from worqr.cron import Schedule
from worqr.dashboard.guard import Refused
from worqr.dashboard.state import MeshState, age_of, needs_of, read_state
from worqr.dashboard.visit import Visit
from worqr.records import Failed, QueueInfo, Status, TaskInfo, WorkerInfo

T = TypeVar("T")

SHORT_LIST: Final = 8
PAGE: Final = 50
RECORDS: Final = 25
"""Dead-letter records of a page: they come with their payloads."""
QUEUES_OF_RUNNING: Final = 20
"""Queues whose running tasks are read for one page."""
SEARCHED: Final = 200
"""Queues in which an id is looked for."""
TABS: Final = ("waiting", "scheduled", "blocked", "running", "failed", "broken")
SORTS: Final[dict[str, Callable[[QueueInfo], float | str]]] = {
    "name": lambda info: info.name,
    "waiting": lambda info: info.waiting,
    "scheduled": lambda info: info.scheduled,
    "running": lambda info: info.running,
    "failed": lambda info: info.failed + info.broken,
    "workers": lambda info: info.workers,
    "age": lambda info: age_of(info) or 0.0,
}


async def gathered(calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """Make calls side by side, so that they go to the server in one batch. Raise the error of the first that fails."""
    found: dict[int, T] = {}
    errors: list[Exception] = []

    async def one(place: int, call: Callable[[], Awaitable[T]]) -> None:
        try:
            found[place] = await call()
        except Exception as error:  # a group of errors would be reported as something unexpected
            errors.append(error)

    async with anyio.create_task_group() as group:
        for place, call in enumerate(calls):
            group.start_soon(one, place, call)
    if errors:
        raise errors[0]
    return [found[place] for place in range(len(calls))]


async def look(visit: Visit) -> MeshState:
    """Return the state of the mesh, as this viewer sees it."""
    state: MeshState = await visit.looks.get("state", partial(read_state, visit.mesh))
    return state.for_viewer(visit.viewer)


async def all_schedules(visit: Visit) -> list[Schedule]:
    """Return the schedules; none to a viewer who does not see all queues, because a schedule does not name its queue."""
    if not visit.viewer.sees_all:
        return []

    async def read(_before: list[Schedule] | None) -> list[Schedule]:
        return await visit.mesh.schedules()

    return await visit.looks.get("schedules", read)


async def overview(visit: Visit) -> Response:
    """The totals, what needs attention, the busiest queues, and the workers."""
    state, schedules = await look(visit), await all_schedules(visit)
    return visit.page(
        "overview.html",
        live=visit.link("/live", view="overview"),
        state=state,
        needs=needs_of(state, schedules),
        busiest=state.busiest(SHORT_LIST),
    )


async def queues(visit: Visit) -> Response:
    """The list of queues."""
    state = await look(visit)
    found = sorted_queues(visit, state)
    start = start_of_page(visit)
    fields = {name: visit.text(name) for name in ("q", "sort", "page")}
    return visit.page(
        "queues.html",
        live=visit.link("/live", view="queues", **fields),
        state=state,
        found=found[start : start + PAGE],
        total=len(found),
        start=start,
        size=PAGE,
        word=fields["q"],
        sort=fields["sort"] or "activity",
    )


def sorted_queues(visit: Visit, state: MeshState) -> list[QueueInfo]:
    """Return the queues that match the filter of the list, in its order."""
    word, sort = visit.text("q").strip().lower(), visit.choice("sort", ("activity", *SORTS))
    found = [info for info in state.busiest(len(state.queues)) if word in info.name.lower()]
    if sort != "activity":
        found.sort(key=SORTS[sort], reverse=sort != "name")
    return found


def filtered_workers(visit: Visit, state: MeshState) -> list[WorkerInfo]:
    """Return the workers that match the filter of the list."""
    app, worker = visit.text("app"), visit.text("id")
    return [each for each in state.workers if (not app or each.app == app) and (not worker or each.id == worker)]


def start_of_page(visit: Visit) -> int:
    """Return the place of the first row of a page of a list."""
    return (visit.number("page", 1, 1, 10_000) - 1) * PAGE


async def queue(visit: Visit) -> Response:
    """One queue, and one page of its tasks."""
    queue = visit.queue(visit.text("name"))
    tab = visit.choice("tab", TABS)
    info = await queue.info()
    context: dict[str, Any] = {}
    if tab in ("failed", "broken"):
        error, before = visit.text("error").strip(), _time(visit.text("before"))
        aside = queue.failed if tab == "failed" else queue.broken
        records = await aside.list(RECORDS + 1, error=error or None, before=before)
        context = {"records": records[:RECORDS], "more": len(records) > RECORDS, "error": error, "before": before}
    else:
        tasks = await queue.jobs(state=_state(tab), limit=PAGE + 1, after=visit.text("after"))
        context = {"tasks": tasks[:PAGE], "more": len(tasks) > PAGE, "after": visit.text("after")}
    view = visit.link("/live", view="queue", name=info.name, tab=tab)
    return visit.page("queue.html", live=view, info=info, tab=tab, tabs=TABS, age=age_of(info), **context)


def _state(tab: str) -> Literal["waiting", "scheduled", "blocked", "active"]:
    return "active" if tab == "running" else cast('Literal["waiting", "scheduled", "blocked"]', tab)


def _time(text: str) -> datetime | None:
    if not text:
        return None
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise Refused(400, "'before' must be a time in ISO 8601, such as 2026-01-31T12:00:00+00:00.") from None
    return when if when.tzinfo else when.replace(tzinfo=UTC)


async def job(visit: Visit) -> Response:
    """One job: where it is, its tries, its last error."""
    queue = visit.queue(visit.text("queue"))
    job = queue.job(visit.text("id"))
    status = await job.status()
    records = await queue.failed.list(1) if status.state == "failed" else []
    record = next((each for each in records if each.id == job.id), None)
    view = visit.link("/live", view="job", queue=job.queue, id=job.id)
    return visit.page(
        "job.html", 404 if status.state == "gone" else 200, live=view, job=job, status=status, record=record
    )


async def running(visit: Visit) -> Response:
    """The running tasks of all queues, the longest first."""
    state = await look(visit)
    tasks = await running_tasks(visit, state, visit.text("worker"))
    view = visit.link("/live", view="running", worker=visit.text("worker"))
    busy = sum(1 for info in state.queues if info.running)
    return visit.page(
        "running.html",
        live=view,
        tasks=tasks[:PAGE],
        left_out=max(len(tasks) - PAGE, 0),
        queues_left_out=max(busy - QUEUES_OF_RUNNING, 0),
        worker=visit.text("worker"),
        total=sum(info.running for info in state.queues),
    )


async def running_tasks(visit: Visit, state: MeshState, worker: str = "") -> list[tuple[str, TaskInfo]]:
    """Return tasks that run, with their queues, the longest first."""
    serves = {name for each in state.workers if each.id == worker for name in each.queues} if worker else None
    busy = [
        q.name
        for q in sorted(state.queues, key=lambda q: -q.running)
        if q.running and (serves is None or q.name in serves)
    ]

    async def read(name: str) -> list[tuple[str, TaskInfo]]:
        return [(name, task) for task in await visit.mesh.queue(name).running()]

    lists = await gathered([partial(read, name) for name in busy[:QUEUES_OF_RUNNING]])
    found = [(name, task) for tasks in lists for name, task in tasks if not worker or task.worker == worker]
    return sorted(found, key=lambda pair: pair[1].since or datetime.max.replace(tzinfo=UTC))


async def failed(visit: Visit) -> Response:
    """The queues with dead-letter records, and the newest records of each."""
    state = await look(visit)
    found = failing_queues(state)

    async def newest(name: str) -> list[Failed]:
        return await visit.mesh.queue(name).failed.list(1)

    shown = found[:QUEUES_OF_RUNNING]
    newests = await gathered([partial(newest, info.name) for info in shown])
    view = visit.link("/live", view="failed")
    return visit.page(
        "failed.html", live=view, found=list(zip(shown, newests, strict=True)), left_out=len(found) - len(shown)
    )


def failing_queues(state: MeshState) -> list[QueueInfo]:
    """Return the queues with dead-letter records, those with the most first."""
    found = [info for info in state.queues if info.failed or info.broken]
    return sorted(found, key=lambda info: (-(info.failed + info.broken), info.name))


async def workers(visit: Visit) -> Response:
    """The registered workers."""
    state = await look(visit)
    start, app = start_of_page(visit), visit.text("app")
    found = filtered_workers(visit, state)
    versions = {each.version for each in state.workers}
    return visit.page(
        "workers.html",
        live=visit.link("/live", view="workers", app=app, page=visit.text("page")),
        found=found[start : start + PAGE],
        total=len(found),
        start=start,
        size=PAGE,
        app=app,
        apps=state.apps,
        mixed=len(versions) > 1,
    )


async def worker(visit: Visit) -> Response:
    """One worker, and what it runs."""
    state, known_as = await look(visit), visit.text("id")
    info = next((each for each in state.workers if each.id == known_as), None)
    if info is None:
        raise Refused(404, "There is no worker with this id: it has left, or its tasks were given back after it died.")
    tasks = await running_tasks(visit, state, known_as)
    served = sorted(name for name in info.queues if visit.viewer.sees(name))
    view = visit.link("/live", view="workers", id=known_as)
    return visit.page(
        "worker.html", live=view, info=info, tasks=tasks[:PAGE], left_out=max(len(tasks) - PAGE, 0), served=served
    )


async def schedules(visit: Visit) -> Response:
    """The schedules."""
    if not visit.viewer.sees_all:
        raise Refused(403, "Schedules are shown to viewers who see all queues only.")
    return visit.page("schedules.html", live="", found=await all_schedules(visit))


async def search(visit: Visit) -> Response:
    """A job by its id, in all queues."""
    word = visit.text("q").strip()
    found: list[tuple[str, Status]] = []
    names: list[str] = []
    left_out = 0
    if word:
        state = await look(visit)
        matching = [info.name for info in state.queues if word.lower() in info.name.lower()]
        names = [info.name for info in state.busiest(len(state.queues))]
        left_out = max(len(names) - SEARCHED, 0)
        statuses = await gathered([partial(_status, visit, name, word) for name in names[:SEARCHED]])
        found = [(name, status) for name, status in zip(names, statuses, strict=False) if status.state != "gone"]
        names = matching[:PAGE]
    return visit.page("search.html", live="", word=word, found=found, names=names, left_out=left_out)


async def _status(visit: Visit, queue: str, job: str) -> Status:
    return await visit.mesh.queue(queue).job(job).status()
