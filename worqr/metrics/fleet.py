"""The metrics of a whole mesh, from one look at the server. Nothing is counted here: the server has all totals.

A mesh may have more queues than Prometheus should have series. `FleetMetrics` shows the most active ones by their names, and the
others as one. A queue that was shown stays, so that its counters do not jump.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from worqr.cron import Schedule
from worqr.link import ServerStats
from worqr.mesh_records import MeshInfo, QueueInfo
from worqr.metrics.runs import add_runs
from worqr.metrics.samples import Samples

OTHER: Final = "(other)"
"""The label of the queues that are not shown by their names. No queue can have this name and be served by a function."""
EVENTS: Final = ("enqueued", "claimed", "finished", "retried", "failed", "broken", "stalled", "cancelled")
"""Events that each queue has, also if they never happened: Prometheus cannot see the first increase of a counter otherwise."""


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """What one look at the server has found.

    Attributes:
        mesh: the queues and the workers.
        dying: workers that were declared dead, and whose tasks are being given back.
        schedules: all schedules.
        pending: how many firings of each schedule could not be enqueued yet.
        runs: the totals of the runs of queues, by field (`worqr.run_counts.FIELDS`). Queues without runs are left out.
        server: the state of the server.
    """

    mesh: MeshInfo
    dying: int
    schedules: Sequence[Schedule]
    pending: Mapping[str, int]
    runs: Mapping[str, Mapping[str, int]]
    server: ServerStats


class FleetMetrics:
    """The metrics of one mesh, from scrape to scrape.

    Args:
        max_queues: how many queues have series of their own.
    """

    def __init__(self, max_queues: int) -> None:
        self._max_queues = max_queues
        self._shown: set[str] = set()

    def samples(self, snapshot: FleetSnapshot | None) -> Samples:
        """Return the metrics of this snapshot; None: the server does not reply."""
        found = Samples()
        found.add("worqr_up", snapshot is not None)
        if snapshot is not None:
            found.add("worqr_snapshot_age_seconds", snapshot.mesh.age)
            found.add("worqr_workers_dying", snapshot.dying)
            _add_workers(found, snapshot.mesh)
            self._add_queues(found, snapshot.mesh, snapshot.runs)
            for schedule in snapshot.schedules:
                _add_schedule(found, schedule)
                found.add("worqr_schedule_pending", snapshot.pending.get(schedule.name, 0), schedule.name)
            _add_server(found, snapshot.server)
        return found

    def _add_queues(self, found: Samples, mesh: MeshInfo, runs: Mapping[str, Mapping[str, int]]) -> None:
        queues = mesh.queues
        self._shown &= {info.name for info in queues}
        for info in sorted(queues, key=_activity, reverse=True):
            if len(self._shown) < self._max_queues:
                self._shown.add(info.name)
        others = [info for info in queues if info.name not in self._shown]
        found.add("worqr_queues_not_shown", len(others) + mesh.queues_left_out)
        others_ran = [runs[info.name] for info in others if info.name in runs]
        if mesh.others is not None:
            others.append(mesh.others)
        for info in queues:
            if info.name in self._shown:
                _add_queue(found, info.name, [info])
                found.add("worqr_queue_workers", info.workers, info.name)
                found.add("worqr_queue_paused", info.paused is not None, info.name)
                found.add("worqr_queue_held_back", info.held_back in {"concurrency", "rate", "lanes"}, info.name)
                found.add("worqr_queue_held_for_seconds", info.held_for, info.name)
                found.add("worqr_queue_lanes", info.lanes, info.name)
                found.add("worqr_queue_held_lanes", info.held_lanes, info.name)
                found.add("worqr_queue_batches", info.open_batches, info.name)
                found.add("worqr_queue_relay_pending", info.relay_pending, info.name)
                found.add("worqr_queue_age_seconds", info.age, info.name)
                found.add("worqr_queue_age_estimated", None if info.age is None else info.age_estimated, info.name)
                if info.name in runs:
                    add_runs(found, info.name, [runs[info.name]])
        if others:
            _add_queue(found, OTHER, others)
        if others_ran:
            add_runs(found, OTHER, others_ran)


def _activity(info: QueueInfo) -> tuple[int, int]:
    return info.running + info.waiting + info.scheduled + info.blocked, sum(info.counts.values())


def _add_queue(found: Samples, name: str, infos: Sequence[QueueInfo]) -> None:
    """Add the sums of these queues."""
    found.add("worqr_queue_waiting", sum(info.waiting for info in infos), name)
    found.add("worqr_queue_scheduled", sum(info.scheduled for info in infos), name)
    found.add("worqr_queue_blocked", sum(info.blocked for info in infos), name)
    found.add("worqr_queue_running", sum(info.running for info in infos), name)
    found.add("worqr_queue_dead_letters", sum(info.failed for info in infos), name, "failed")
    found.add("worqr_queue_dead_letters", sum(info.broken for info in infos), name, "broken")
    counts = Counter[str](dict.fromkeys(EVENTS, 0))
    for info in infos:
        counts.update(info.counts)
    for event, count in counts.items():
        found.add("worqr_tasks_total", count, name, event)


def _add_workers(found: Samples, mesh: MeshInfo) -> None:
    found.add("worqr_has_leader", mesh.leader is not None)
    for name, app in sorted(mesh.apps.items()):
        found.add("worqr_workers", app.workers, name)
        found.add("worqr_worker_running", app.running, name)
        found.add("worqr_worker_room", app.room, name)


def _add_schedule(found: Samples, schedule: Schedule) -> None:
    last = None if schedule.last_run is None else schedule.last_run.timestamp()
    found.add("worqr_schedule_next_timestamp_seconds", schedule.next_run.timestamp(), schedule.name)
    found.add("worqr_schedule_last_timestamp_seconds", last, schedule.name)
    found.add("worqr_schedule_paused", schedule.paused, schedule.name)


def _add_server(found: Samples, server: ServerStats) -> None:
    found.add("worqr_server_memory_bytes", server.memory)
    found.add("worqr_server_max_bytes", server.max_memory)
    found.add("worqr_server_keeps_everything", server.keeps_everything)
    found.add("worqr_server_clients", server.clients)
