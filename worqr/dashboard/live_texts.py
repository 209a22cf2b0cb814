"""The texts that change while a page is open, by the key that its template gives them. Pure.

A template shows the texts of the same functions, so a page does not change at its first update.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Final

from worqr.batches import BatchInfo
from worqr.dashboard.payloads import Redactor
from worqr.dashboard.state import (
    MeshState,
    batches_text,
    lane_hold_text,
    lanes_text,
    leader_text,
    limits_text,
    pause_text,
    source_text,
)
from worqr.mesh_records import LaneInfo, QueueInfo, WorkerInfo
from worqr.records import Status, TaskInfo
from worqr.views import values
from worqr.views.tables import APPS, DEAD, LANES, QUEUES, WORKERS, age_text, lane_key

MOST_GONE: Final = 3000
"""Texts of lanes without tasks that a stream still has."""
MOVED: Final[dict[str, tuple[str, ...]]] = {
    "waiting": ("enqueued", "claimed"),
    "failed": ("failed",),
    "undecodable": ("undecodable",),
    "kept": ("finished", "failed", "cancelled"),
    "ended": ("finished", "retried", "failed", "cancelled"),
}
"""The counters of a queue that grow when one of its lists has changed, besides the length of the list."""


def state_numbers(
    state: MeshState, queues: Iterable[QueueInfo] = (), workers: Iterable[WorkerInfo] = ()
) -> dict[str, str]:
    """Return the totals, and the numbers of the queues and workers that a page shows."""
    texts = total_numbers(state)
    for info in queues:
        rates = state.rates.get(info.name)
        texts |= queue_numbers(info) | {f"queue.{info.name}.rate": values.rate(rates.finished if rates else None)}
    for worker in workers:
        texts |= WORKERS.live(worker, "running room beat_age lag")
    for app in state.apps.items():
        texts |= APPS.live(app, "workers running room")
    return texts


def total_numbers(state: MeshState) -> dict[str, str]:
    """Return the totals of the overview."""
    texts = {f"total.{name}": values.count(number) for name, number in state.total.items()}
    texts |= header_numbers(state) | {"total.age": age_text(state.oldest)}
    for name in ("finished_rate", "failed_rate"):
        texts[f"total.{name}"] = values.rate(state.total[name])
    return texts


def header_numbers(state: MeshState) -> dict[str, str]:
    """Return what the header of each page says of the mesh."""
    return {"mesh.leader": leader_text(state.info), "mesh.source": source_text(state.info)}


def queue_numbers(info: QueueInfo, *, full: bool = False) -> dict[str, str]:
    """Return the numbers of a queue; with the totals if `full`."""
    start = QUEUES.key(info)
    texts = QUEUES.live(info, "waiting scheduled suspended blocked running failed undecodable workers")
    texts |= {f"{start}.dead": DEAD.on_page(info), f"{start}.age": age_text(info)}
    if full:
        texts |= {f"{start}.count.{name}": values.count(number) for name, number in info.counts.items()}
        texts |= hold_numbers(info)
    return texts


def hold_numbers(info: QueueInfo) -> dict[str, str]:
    """Return what the page of a queue says of its pause, its limits, its lanes and its batches."""
    start = f"queue.{info.name}"
    return {
        f"{start}.pause": pause_text(info),
        f"{start}.limits": limits_text(info),
        f"{start}.lanes": lanes_text(info),
        f"{start}.batches": batches_text(info),
    }


def lane_numbers(queue: str, lanes: Iterable[LaneInfo]) -> dict[str, str]:
    """Return what changes on the page of the lanes of a queue while its rows stay."""
    texts: dict[str, str] = {}
    for lane in lanes:
        key = lane_key(queue, lane.name)
        found = LANES.pick("waiting running")
        texts |= {f"{key}.{each.name}": each.on_page(lane) for each in found} | {f"{key}.hold": lane_hold_text(lane)}
    return texts


def lane_rows(lanes: Iterable[LaneInfo]) -> object:
    """Return what differs when the rows of the page of lanes have changed: which lanes there are, and how they are set. They are
    in the order of their names, because their numbers move.
    """
    return sorted((lane.name, lane.weight, str(lane.limits), lane.paused) for lane in lanes)


def without_old_lanes(texts: dict[str, str], before: Mapping[str, str]) -> dict[str, str]:
    """Return the texts of the lanes that are there, and of those that were there before: nothing waits or runs in these."""
    gone = {key: "" if key.endswith(".hold") else "0" for key in before if key.startswith("lane.") and key not in texts}
    return texts | dict(list(gone.items())[:MOST_GONE])


def rows_of(info: QueueInfo, tab: str, running: Sequence[TaskInfo]) -> object:
    """Return what differs when a list of a queue has changed: the claims that are shown of running tasks, or numbers."""
    if tab == "running":
        return [task.claim for task in running]
    return (getattr(info, tab, 0), *(info.counts.get(name, 0) for name in MOVED.get(tab, ())))


def signature(rows: object) -> str:
    """Return a short text for the rows of a list. Other rows have another one."""
    return f"{zlib.crc32(repr(rows).encode()):08x}"


def running_numbers(tasks: Iterable[tuple[str, TaskInfo]], redactor: Redactor, now: datetime) -> dict[str, str]:
    """Return how far running tasks are."""
    texts: dict[str, str] = {}
    for queue, task in tasks:
        start = run_key(queue, task)
        texts[f"{start}.for"] = values.since(task.since, now)
        texts[f"{start}.percent"] = values.percent(task.progress)
        texts[f"{start}.bar"] = bar(task.progress)
        texts[f"{start}.message"] = values.line(redactor.text(task.message or ""))
    return texts


def run_key(queue: str, task: TaskInfo) -> str:
    """Return a key for a run."""
    return f"run.{queue}.{task.claim}"


def bar(progress: float | None) -> str:
    """Return the value of a progress bar, from 0 to 1; empty if it is not known."""
    return "" if progress is None else f"{min(max(progress, 0.0), 1.0):.3f}"


def job_numbers(status: Status, redactor: Redactor, now: datetime) -> dict[str, str]:
    """Return what changes on the page of a job while its state stays."""
    return {
        "job.state": status.state,
        "job.for": values.since(status.since, now),
        "job.percent": values.percent(status.progress),
        "job.bar": bar(status.progress),
        "job.message": values.line(redactor.text(status.message or "")),
        "job.attempts": values.count(status.attempts),
        "job.failures": values.count(status.failures),
    }


def job_rows(status: Status) -> object:
    """Return what differs when the page of a job has changed, besides its numbers."""
    return (status.state, status.attempts, status.failures, status.worker, status.waits_for)


JOB_NEWS: Final = {
    "waiting": "This job waits for a free worker.",
    "scheduled": "This job waits for its time.",
    "suspended": "This workflow waits for something.",
    "blocked": "This job waits until another run of its id has ended.",
    "active": "A worker runs this job.",
    "finished": "This job has finished.",
    "failed": "This job has failed.",
    "cancelled": "This job was cancelled.",
    "gone": "This job has ended.",
}
"""What an open page of a job says when the state has become another one."""


def batch_share(info: BatchInfo) -> str:
    """Return how many of the jobs have ended, from 0 to 1."""
    return bar((info.jobs - info.pending) / info.jobs if info.jobs else None)


def ended_text(info: BatchInfo) -> str:
    """Return how many of the jobs have ended, as text."""
    return f"{values.count(info.jobs - info.pending)} of {values.count(info.jobs)}"


def batch_numbers(info: BatchInfo) -> dict[str, str]:
    """Return the texts that change on the page of a batch while its state stays."""
    counts = {name: getattr(info, name) for name in ("jobs", "pending", "finished", "failed", "cancelled")}
    texts = {f"batch.{name}": values.count(number) for name, number in counts.items()}
    return texts | {"batch.ended": f"{ended_text(info)} jobs have ended", "batch.bar": batch_share(info)}
