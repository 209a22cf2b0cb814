"""The tables of ``worqr top``: what each reads from the mesh, and its columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from worqr.cli import output
from worqr.cli.lanes_command import why_held
from worqr.cli.output import escape_bytes
from worqr.cli.parsing import queue_by_name
from worqr.cli.queue_table import why_held_back
from worqr.cli.terminal import Column, number
from worqr.limits import describe_limits

if TYPE_CHECKING:
    from worqr.cron import Schedule
    from worqr.mesh import Mesh
    from worqr.mesh_records import LaneInfo, LogEntry, MeshInfo, QueueInfo, WorkerInfo
    from worqr.records import Failed, TaskInfo

FAILED_PER_QUEUE: Final = 50
"""Newest failed tasks that are read of each queue."""
LOG_ENTRIES: Final = 200
"""Newest entries of the log that are read."""
LANES_PER_QUEUE: Final = 1_000
"""Lanes that are read of each queue: those with the most tasks."""
QUEUES_READ: Final = 20
"""Queues of which tasks or lanes are read at once, if none is chosen: those with the most of them."""


class View(Enum):
    """A table. The value is its title; the number of its key is its place."""

    QUEUES = "queues"
    RUNNING = "running"
    WORKERS = "workers"
    FAILED = "failed"
    SCHEDULES = "schedules"
    LOG = "log"
    LANES = "lanes"


@dataclass(frozen=True, slots=True)
class Row:
    """One row.

    Attributes:
        key: identifies what the row shows, so that it stays selected when the table is read again.
        values: the values of the columns.
        target: what the row shows.
        queue: the name of its queue; empty if it has none.
    """

    key: str
    values: Sequence[Any]
    target: Any
    queue: str = ""


@dataclass(frozen=True, slots=True)
class Reading:
    """What was read from the mesh at one moment. `more`: a remark if not everything was read."""

    mesh: MeshInfo | None
    rows: Sequence[Row]
    more: str = ""


def _seconds(title: str, **options: Any) -> Column:
    return Column(title, plain=output.exact_seconds, shown=output.short_duration, right=True, **options)


COLUMNS: Final[Mapping[View, tuple[Column, ...]]] = {
    View.QUEUES: (
        Column("queue", fit="cut"),
        number("waiting"),
        number("scheduled"),
        number("blocked"),
        number("running"),
        number("failed", style="bold red"),
        number("broken", style="bold red"),
        number("workers"),
        _seconds("oldest job"),
        Column("state", style="yellow", fit="cut"),
    ),
    View.RUNNING: (
        Column("task", fit="cut", least=16),
        _seconds("for"),
        Column("queue", fit="cut", least=8),
        Column("worker", shown=output.short_worker_id, fit="cut", least=8),
        Column("attempt", style=lambda attempt: "yellow" if attempt > 1 else "", right=True),
        Column("progress", shown=output.percent, right=True),
        Column("message", fit="cut", least=8),
    ),
    View.WORKERS: (
        Column("worker", shown=output.short_worker_id, fit="cut"),
        Column("host", fit="cut", least=8),
        Column("pid", right=True),
        number("running"),
        number("room"),
        _seconds("last beat"),
        Column("version"),
        Column("queues", fit="cut", least=8),
        Column("state", style="yellow"),
    ),
    View.FAILED: (
        Column("id", fit="cut", least=12),
        _seconds("ago"),
        Column("queue", fit="cut", least=8),
        Column("reason"),
        Column("error", style="red", fit="cut", least=20),
        Column("task", fit="cut", least=8),
    ),
    View.SCHEDULES: (
        Column("schedule", fit="cut"),
        Column("next run", shown=output.short_time),
        Column("last run", shown=output.short_time),
        Column("state", style="yellow"),
    ),
    View.LOG: (
        Column("time", shown=output.short_time),
        Column("kind", style=lambda kind: "red" if kind == "dead" else ""),
        Column("who", fit="cut"),
        Column("queue", fit="cut", least=8),
        Column("worker", shown=output.short_worker_id, fit="cut"),
        Column("n", shown=lambda count: "" if count is None else str(count), right=True),
        Column("details", fit="cut", least=16),
    ),
    View.LANES: (
        Column("lane", fit="cut", least=12),
        Column("queue", fit="cut", least=8),
        number("waiting"),
        number("running"),
        number("weight"),
        Column("limits", fit="cut", least=12),
        Column("state", style="yellow", fit="cut", least=16),
    ),
}


async def read_view(mesh: Mesh, view: View, queue: str) -> Reading:
    """Read a table. `queue`: only of this queue; empty: of all."""
    info = await mesh.info()
    return await _READERS[view](mesh, info, queue)


async def _queues(_mesh: Mesh, info: MeshInfo, queue: str) -> Reading:
    more = f"{info.queues_left_out:,} quieter queues are left out" if info.queues_left_out else ""
    return Reading(info, [_queue_row(each) for each in info.queues if queue in ("", each.name)], more)


def _queue_row(info: QueueInfo) -> Row:
    state = "no worker" if info.waiting and not info.workers else why_held_back(info)
    if info.paused is not None:
        until = "" if info.held_for is None else f" for {output.short_duration(info.held_for)}"
        state = f"paused{until}: {info.paused}" if info.paused else f"paused{until}"
    counts = (info.waiting, info.scheduled, info.blocked, info.running, info.failed, info.broken, info.workers)
    return Row(info.name, (info.name, *counts, info.oldest_job, state), info, info.name)


async def _running(mesh: Mesh, info: MeshInfo, queue: str) -> Reading:
    names, more = _chosen(info.queues, queue, lambda info: info.running)
    now = info.at + timedelta(seconds=info.age)
    found = [(name, task) for name in names for task in await queue_by_name(mesh, name).running()]
    rows = sorted((_running_row(name, task, now) for name, task in found), key=lambda row: -row.values[1])
    return Reading(info, rows, more)


def _running_row(queue: str, task: TaskInfo, now: datetime) -> Row:
    since = 0.0 if task.since is None else max(0.0, (now - task.since).total_seconds())
    shown = task.id or escape_bytes(task.task)
    key = f"{queue} {task.worker} {task.since}"
    return Row(key, (shown, since, queue, task.worker, task.attempts, task.progress, task.message), task, queue)


async def _workers(mesh: Mesh, info: MeshInfo, queue: str) -> Reading:
    found = [each for each in await mesh.workers() if not queue or queue in each.queues]
    return Reading(info, [_worker_row(each) for each in found])


def _worker_row(info: WorkerInfo) -> Row:
    served = ", ".join(sorted(info.queues))
    values = (info.id, info.host, info.pid, info.running, info.room, info.beat_age, info.version, served, _state(info))
    return Row(info.id, values, info)


def _state(info: WorkerInfo) -> str:
    return f"asked: {info.request}" if info.request else "" if info.state == "ready" else info.state


async def _failed(mesh: Mesh, info: MeshInfo, queue: str) -> Reading:
    names, more = _chosen(info.queues, queue, lambda info: info.failed)
    now = info.at + timedelta(seconds=info.age)
    found = [each for name in names for each in await queue_by_name(mesh, name).failed.list(FAILED_PER_QUEUE)]
    newest = sorted(found, key=lambda record: record.at, reverse=True)
    return Reading(info, [_failed_row(record, now) for record in newest], more)


def _failed_row(record: Failed, now: datetime) -> Row:
    error = ": ".join(filter(None, (record.error.type.rpartition(".")[2], record.error.message)))
    ago = max(0.0, (now - record.at).total_seconds())
    values = (record.id, ago, record.queue, record.reason, error, escape_bytes(record.task[:200]))
    return Row(f"{record.queue} {record.id}", values, record, record.queue)


async def _schedules(mesh: Mesh, info: MeshInfo, _queue: str) -> Reading:
    return Reading(info, [_schedule_row(schedule) for schedule in await mesh.schedules()])


async def _log(mesh: Mesh, info: MeshInfo, queue: str) -> Reading:
    found = [entry for entry in reversed(await mesh.log(LOG_ENTRIES)) if queue in ("", entry.queue)]
    return Reading(info, list(map(_log_row, found)))


def _log_row(entry: LogEntry) -> Row:
    details = " ".join(filter(None, (entry.job, entry.text)))
    values = (entry.at, entry.kind, entry.who, entry.queue, entry.worker, entry.count, details)
    return Row(entry.id, values, entry, entry.queue)


async def _lanes(mesh: Mesh, info: MeshInfo, queue: str) -> Reading:
    names, more = _chosen(info.queues, queue, lambda info: info.lanes)
    found = {name: await queue_by_name(mesh, name).lanes(limit=LANES_PER_QUEUE) for name in names}
    if not more and any(len(lanes) == LANES_PER_QUEUE for lanes in found.values()):
        more = f"{LANES_PER_QUEUE:,} lanes of each queue, those with the most tasks"
    return Reading(info, [_lane_row(name, lane) for name, lanes in found.items() for lane in lanes], more)


def _lane_row(queue: str, lane: LaneInfo) -> Row:
    limits = describe_limits(lane.limits) if lane.limits else ""
    values = (lane.name, queue, lane.waiting, lane.running, lane.weight, limits, why_held(lane))
    return Row(f"{queue} {lane.name}", values, lane, queue)


def _schedule_row(schedule: Schedule) -> Row:
    values = (schedule.name, schedule.next_run, schedule.last_run, "paused" if schedule.paused else "")
    return Row(schedule.name, values, schedule)


def _chosen(queues: Sequence[QueueInfo], queue: str, size: Callable[[QueueInfo], int]) -> tuple[list[str], str]:
    """Return the names of the queues whose tasks are read, and a remark if some are left out."""
    if queue:
        return [queue], ""
    full = sorted((info for info in queues if size(info)), key=size, reverse=True)
    left_out = len(full) - QUEUES_READ
    more = f"{left_out} more queues: open one on the first page" if left_out > 0 else ""
    return [info.name for info in full[:QUEUES_READ]], more


_READERS: Final = {
    View.QUEUES: _queues,
    View.RUNNING: _running,
    View.WORKERS: _workers,
    View.FAILED: _failed,
    View.SCHEDULES: _schedules,
    View.LOG: _log,
    View.LANES: _lanes,
}
