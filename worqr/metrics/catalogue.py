"""Every metric that worqr exposes: its name, its kind, its labels, and its meaning. Pure.

The tables of docs/reference/metrics.md are made from it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

# `Samples`: the values of metrics at one moment. `prometheus` and `worqr.otel` export them.


@dataclass(frozen=True, slots=True)
class Sample:
    """The value of a gauge or a counter, and the values of its labels in the order of the catalogue."""

    labels: tuple[str, ...]
    value: float


@dataclass(frozen=True, slots=True)
class HistogramSample:
    """The value of a histogram.

    Attributes:
        labels: the values of its labels.
        buckets: the number of values up to each bound, in order; the last bound is ``+Inf``.
        total: the sum of all values.
    """

    labels: tuple[str, ...]
    buckets: Mapping[str, int]
    total: float


class Samples:
    """The values of a catalogue's metrics. A metric without a value is left out.

    Attributes:
        values: those of gauges and counters, by metric.
        histograms: those of histograms, by metric.
    """

    def __init__(self) -> None:
        self.values: defaultdict[str, list[Sample]] = defaultdict(list)
        self.histograms: defaultdict[str, list[HistogramSample]] = defaultdict(list)

    def add(self, name: str, value: float | None, *labels: str) -> None:
        """Note a value; None: there is none."""
        if value is not None:
            self.values[name].append(Sample(labels, float(value)))

    def add_histogram(self, name: str, buckets: Mapping[str, int], total: float, *labels: str) -> None:
        """Note the value of a histogram; see `HistogramSample`."""
        self.histograms[name].append(HistogramSample(labels, buckets, total))


Kind = Literal["gauge", "counter", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. The names of counters end in ``_total``."""

    kind: Kind
    meaning: str
    labels: tuple[str, ...] = ()


def _gauge(meaning: str, *labels: str) -> Metric:
    return Metric("gauge", meaning, labels)


def _counter(meaning: str, *labels: str) -> Metric:
    return Metric("counter", meaning, labels)


def _histogram(meaning: str, *labels: str) -> Metric:
    return Metric("histogram", meaning, labels)


PEER: Final[dict[str, Metric]] = {
    "worqr_peer_alive": _gauge("1 if the event loop turns"),
    "worqr_peer_ready": _gauge("1 if the worker takes tasks"),
    "worqr_peer_leads": _gauge("1 if the worker is the leader of the mesh"),
    "worqr_peer_running": _gauge("tasks that it runs"),
    "worqr_peer_room": _gauge("the free part of its concurrency, in units"),
    "worqr_peer_concurrency": _gauge("units of work that it may run at once"),
    "worqr_peer_stuck": _gauge("runs that were cancelled and do not end"),
    "worqr_peer_loop_lag_seconds": _gauge("by how much the event loop is late"),
    "worqr_peer_beat_age_seconds": _gauge(
        "the time since the newest heartbeat that the server acknowledged; absent while it is not registered"
    ),
    "worqr_peer_link_up": _gauge("1 if the worker is connected and the server works"),
    "worqr_peer_requests_in_flight": _gauge("requests to the server without a reply"),
    "worqr_peer_children": _gauge('processes for `runs_in="process"`'),
    "worqr_peer_beats_failed_total": _counter("heartbeats that failed"),
    "worqr_peer_reconnects_total": _counter("connections that were lost and made anew"),
    "worqr_peer_registrations_total": _counter("how often it has joined; more than once: it was declared dead"),
    "worqr_peer_loop_blocked_total": _counter("how often the event loop was blocked for over a second"),
    "worqr_peer_counts_lost_total": _counter(
        "runs that are missing in `worqr_runs_total`, because the worker left the queue"
    ),
    "worqr_peer_runs_total": _counter("runs that ended in this worker, by outcome", "queue", "outcome"),
}
"""The metrics of one worker: ``/metrics`` of its probes."""

FLEET: Final[dict[str, Metric]] = {
    "worqr_up": _gauge("1 if the server replies; without it, no other metric is there"),
    "worqr_has_leader": _gauge("1 if a worker is the leader of the mesh"),
    "worqr_snapshot_age_seconds": _gauge("how old the numbers of queues and workers are"),
    "worqr_queues_not_shown": _gauge('queues that are summed up as `queue="(other)"`'),
    "worqr_workers": _gauge("workers", "app"),
    "worqr_worker_running": _gauge("tasks that the workers run", "app"),
    "worqr_worker_room": _gauge("the free part of the workers' concurrency, in units", "app"),
    "worqr_workers_dying": _gauge("workers that were declared dead, and whose tasks are being given back"),
    "worqr_queue_waiting": _gauge("tasks that are ready to run", "queue"),
    "worqr_queue_scheduled": _gauge("jobs that wait for their time", "queue"),
    "worqr_queue_suspended": _gauge("workflows that wait for an event, a time or other jobs", "queue"),
    "worqr_queue_kept": _gauge("jobs that have ended and are kept", "queue"),
    "worqr_queue_kept_bytes": _gauge("memory that kept jobs count", "queue"),
    "worqr_queue_blocked": _gauge("jobs that wait until another run of their id has ended", "queue"),
    "worqr_queue_running": _gauge("tasks that run now", "queue"),
    "worqr_queue_dead_letters": _gauge(
        "records in the dead-letter queue; list: `failed` or `undecodable`", "queue", "list"
    ),
    "worqr_queue_workers": _gauge("workers that serve the queue", "queue"),
    "worqr_queue_paused": _gauge("1 if the queue is paused", "queue"),
    "worqr_queue_held_back": _gauge("1 if a limit, or limits of all lanes, allow no task to start now", "queue"),
    "worqr_queue_held_for_seconds": _gauge(
        "after how long a task may start by itself: a rate allows it, or a pause ends; absent if that is not known",
        "queue",
    ),
    "worqr_queue_lanes": _gauge("lanes with tasks", "queue"),
    "worqr_queue_held_lanes": _gauge("lanes with tasks of which none may start now", "queue"),
    "worqr_queue_batches": _gauge(
        "batches that have not ended, and whose home queue it is; of more than 500 batches, not all are counted",
        "queue",
    ),
    "worqr_queue_relay_pending": _gauge(
        "1 if the leader still has to deliver messages of the queue about batches, or to check a batch", "queue"
    ),
    "worqr_queue_age_seconds": _gauge("for how long the oldest task has waited; absent if none waits", "queue"),
    "worqr_queue_age_estimated": _gauge(
        "1 if the leader estimated that age, because a plain task is in front; absent if none waits", "queue"
    ),
    "worqr_tasks_total": _counter("tasks by event: `enqueued`, `finished`, `failed`, ...", "queue", "event"),
    "worqr_runs_total": _counter(
        "runs by outcome: `ok`, `raised`, `timeout`, `cancelled` or `lost`", "queue", "outcome"
    ),
    "worqr_run_seconds": _histogram("how long runs took whose handler returned", "queue"),
    "worqr_wait_seconds": _histogram("how long jobs were ready before they ran; plain tasks do not count", "queue"),
    "worqr_schedule_next_timestamp_seconds": _gauge("the Unix time of the next firing", "schedule"),
    "worqr_schedule_last_timestamp_seconds": _gauge("the Unix time of the last firing; absent before it", "schedule"),
    "worqr_schedule_paused": _gauge("1 if the schedule is paused", "schedule"),
    "worqr_schedule_pending": _gauge("firings that the leader could not enqueue yet", "schedule"),
    "worqr_outbox_rows": _gauge("rows of an outbox: `waiting`, `failed` or `held`", "table", "state"),
    "worqr_outbox_oldest_seconds": _gauge("how long the oldest row of an outbox has waited", "table"),
    "worqr_outbox_unseen_seconds": _gauge("how long no worker has looked after an outbox", "table"),
    "worqr_server_memory_bytes": _gauge("the memory that the data of the server take"),
    "worqr_server_max_bytes": _gauge("its limit, `maxmemory`; 0: none"),
    "worqr_server_keeps_everything": _gauge("1 if the server never evicts keys (`noeviction`)"),
    "worqr_server_clients": _gauge("open connections of the server"),
}
"""The metrics of the whole mesh: ``worqr metrics``."""
