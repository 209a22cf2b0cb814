"""The metrics that worqr exposes: the meaning of each, and its value for one peer or a whole mesh. Nothing is counted here.

The tables of docs/reference/metrics.md are made from this file. The values of a mesh come from one look at the server.

A mesh may have more queues than Prometheus should have series. `FleetMetrics` shows the most active ones by their names, and the
others as one. A queue that was shown stays, so that its counters do not jump.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, Final, Literal, Protocol

import trio

from worqr.client.client import Client
from worqr.client.fleet import Fleet
from worqr.client.inspection import OutboxInfo, RunTotalsReader, outboxes_of
from worqr.client.permits import limits_of
from worqr.client.schedules import schedules_of
from worqr.cron import Schedule
from worqr.history_records import OUTCOMES, RUN_BOUNDS, RUN_FIELDS, RUN_SUM, WAIT_BOUNDS, WAIT_FIELDS, WAIT_SUM
from worqr.inside import client_of, readings_of
from worqr.keys import PUBLISH, RegistryKeys
from worqr.limits import LimitInfo
from worqr.link import Link, ServerStats, loop_name_here
from worqr.mesh_records import Health, MeshInfo, QueueInfo
from worqr.ops import list_limits, look_at_workers, read_topics, survey_schedules
from worqr.peer.peer import PeerReadings

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
    "worqr_schedules": _gauge("schedules: `declared` by workers, or `stored` by programs", "kind"),
    "worqr_schedules_late": _gauge("schedules that the leader should have looked at more than a minute ago"),
    "worqr_schedule_next_timestamp_seconds": _gauge("the Unix time of the next firing", "schedule"),
    "worqr_schedule_last_timestamp_seconds": _gauge("the Unix time of the last firing; absent before it", "schedule"),
    "worqr_schedule_last_failed": _gauge(
        "1 if the last run has failed for good; absent before one has ended", "schedule"
    ),
    "worqr_schedule_last_seconds": _gauge("how long the last run took; absent before one has ended", "schedule"),
    "worqr_schedule_paused": _gauge("1 if the schedule is paused", "schedule"),
    "worqr_schedule_pending": _gauge("firings that the leader could not enqueue yet", "schedule"),
    "worqr_events_total": _counter(
        "events of topics: `published`, `retried` because some queue has not taken one, or `failed`, which are dead letters",
        "event",
    ),
    "worqr_events_pending": _gauge("events that some queue has not got yet"),
    "worqr_subscriber_events_total": _counter(
        "tasks of a queue that is subscribed to topics: `delivered` to it, or `refused` because it was full; each try counts",
        "queue",
        "event",
    ),
    "worqr_subscriber_seen_seconds": _gauge("for how long no worker has declared the subscription of a queue", "queue"),
    "worqr_limit_held": _gauge("permits of a limit with a name that programs hold", "limit"),
    "worqr_limit_concurrency": _gauge("permits of it that may be held at once; absent without such a number", "limit"),
    "worqr_limit_used": _gauge("what its rate has started in the last period; absent without a rate", "limit", "unit"),
    "worqr_limit_rate": _gauge("what its rate may start in any period; absent without a rate", "limit", "unit"),
    "worqr_limit_waiting": _gauge("blocks, and functions of workers, that wait for a permit", "limit"),
    "worqr_limit_expired": _gauge("permits of programs that died, until the next caller frees them", "limit"),
    "worqr_outbox_rows": _gauge("rows of an outbox: `waiting`, `failed` or `held`", "table", "state"),
    "worqr_outbox_oldest_seconds": _gauge("how long the oldest row of an outbox has waited", "table"),
    "worqr_outbox_unseen_seconds": _gauge("how long no worker has looked after an outbox", "table"),
    "worqr_server_memory_bytes": _gauge("the memory that the data of the server take"),
    "worqr_server_max_bytes": _gauge("its limit, `maxmemory`; 0: none"),
    "worqr_server_keeps_everything": _gauge("1 if the server never evicts keys (`noeviction`)"),
    "worqr_server_clients": _gauge("open connections of the server"),
}

"""The metrics of the whole mesh: ``worqr metrics``."""


class HasReadings(Protocol):
    """A `Peer` or a `ThreadPeer`."""

    def health(self) -> Health:
        """Return its health, from any thread."""
        ...

    def _readings(self) -> PeerReadings | None: ...


def peer_samples(peer: HasReadings) -> Samples:
    """Return the metrics of a peer, without I/O and without waiting for the event loop. From any thread."""
    readings = readings_of(peer)
    health = peer.health() if readings is None else readings.health
    found = Samples()
    for name, value in (("alive", health.alive), ("ready", health.ready), ("running", health.running)):
        found.add(f"worqr_peer_{name}", value)
    found.add("worqr_peer_room", health.room)
    found.add("worqr_peer_loop_lag_seconds", health.loop_lag)
    if readings is not None:
        _add_readings(found, readings)
    return found


def _add_readings(found: Samples, readings: PeerReadings) -> None:
    found.add("worqr_peer_leads", readings.leads)
    found.add("worqr_peer_concurrency", readings.concurrency)
    found.add("worqr_peer_stuck", readings.stuck)
    found.add("worqr_peer_beat_age_seconds", readings.beat_age)
    found.add("worqr_peer_link_up", readings.link.up)
    found.add("worqr_peer_requests_in_flight", readings.link.unanswered)
    found.add("worqr_peer_children", readings.children)
    found.add("worqr_peer_beats_failed_total", readings.beats_failed)
    found.add("worqr_peer_reconnects_total", readings.link.reconnects)
    found.add("worqr_peer_registrations_total", readings.registrations)
    found.add("worqr_peer_loop_blocked_total", readings.loop_blocks)
    found.add("worqr_peer_counts_lost_total", readings.counts_lost)
    for (queue, outcome), n in sorted(readings.runs.items()):
        found.add("worqr_peer_runs_total", n, queue, outcome)


# The metrics of runs: outcomes, and how long runs took and jobs waited. Workers count them: `worqr.history_records`.


BOUNDS: Final = tuple(4**i / 1000 for i in range(1, 10))

"""The upper bounds of the buckets that Prometheus gets, in seconds: 4 ms to 262 s. Fewer bounds are fewer series."""


def add_runs(found: Samples, name: str, queues: Iterable[Mapping[str, int]]) -> None:
    """Add the sums of the totals of these queues."""
    totals: Counter[str] = Counter()
    for each in queues:
        totals.update(each)
    for outcome in OUTCOMES:
        found.add("worqr_runs_total", totals[outcome], name, outcome)
    runs, waits = _buckets(totals, RUN_FIELDS, RUN_BOUNDS), _buckets(totals, WAIT_FIELDS, WAIT_BOUNDS)
    found.add_histogram("worqr_run_seconds", runs, totals[RUN_SUM] / 1000, name)
    found.add_histogram("worqr_wait_seconds", waits, totals[WAIT_SUM] / 1000, name)


def _buckets(totals: Mapping[str, int], fields: Sequence[str], bounds: Sequence[float]) -> dict[str, int]:
    """Return how many values are below each of BOUNDS, and how many there are."""
    below = list(accumulate(totals.get(field, 0) for field in fields))
    return {**{str(bound): below[bounds.index(bound)] for bound in BOUNDS}, "+Inf": below[-1]}


# `FleetReader`: looks at the whole mesh for its metrics, again and again.


Together = Callable[[Sequence[Callable[[], Awaitable[Any]]]], Awaitable[list[Any]]]

GIVE_UP_AFTER: Final = 1.5

"""Seconds until a server that does not reply counts as away, so that a scrape ends within two."""


class FleetReader:
    """Looks at one mesh for one caller, on Trio, on asyncio or in a plain thread.

    Args:
        mesh: The mesh, which is connected when it is read.
        together: Makes calls, and returns what they return. It may make them side by side, so that they are one batch.
    """

    def __init__(self, mesh: Fleet, together: Together | None = None) -> None:
        self._mesh = mesh
        self._together: Together = _one_by_one if together is None else together
        self._client: Client = client_of(mesh)
        self._runs = RunTotalsReader(self._client)

    async def read(self) -> FleetSnapshot:
        """Look at the mesh once.

        Raises:
            RefusedByServer: The user lacks a permission of an operator.
            Unavailable: The server did not reply.
        """
        client, keys = self._client, RegistryKeys(self._client.settings.prefix)
        calls: list[Callable[[], Awaitable[Any]]] = [
            self._mesh.info,
            partial(client.ask, survey_schedules(keys, limit=MAX_SCHEDULES, late_ms=LATE_MS)),
            partial(client.link.call, look_at_workers(keys)),
            partial(_server_stats, client.link),
            partial(outboxes_of, client),
            partial(client.ask, read_topics(keys)),
            partial(client.ask, list_limits(keys)),
        ]
        info, survey, workers, server, outboxes, subscriptions, units = await self._together(calls)
        more: list[Callable[[], Awaitable[Any]]] = [
            partial(schedules_of, client, survey.rows, survey.now),
            partial(self._runs.read, info.queues),
            partial(limits_of, client, dict(sorted(units.items())[:MAX_LIMITS])),
        ]
        schedules, runs, limits = await self._together(more)
        return FleetSnapshot(
            mesh=info,
            dying=len(workers.dying),
            schedules=schedules,
            stored=survey.stored,
            late=survey.overdue,
            declared=survey.declared,
            runs=runs,
            server=server,
            outboxes=outboxes,
            limits=limits,
            subscribed={each.queue: min(each.patterns.values()) / 1000 for each in subscriptions if each.patterns},
        )


async def _one_by_one(calls: Sequence[Callable[[], Awaitable[Any]]]) -> list[Any]:
    return [await call() for call in calls]


async def _server_stats(link: Link) -> ServerStats:
    match loop_name_here():
        case "Trio":
            return await trio.to_thread.run_sync(link.server_stats, GIVE_UP_AFTER, abandon_on_cancel=True)
        case "asyncio":
            return await asyncio.to_thread(link.server_stats, GIVE_UP_AFTER)
        case _:
            return link.server_stats(GIVE_UP_AFTER)


MAX_SCHEDULES: Final = 1000
"""Declared schedules that have series of their own. What users make has none: it would be a series for each of them."""
LATE_MS: Final = 60_000
MAX_LIMITS: Final = 200
"""Limits with a name that have series of their own, by name: a program may make one for each customer."""

OTHER: Final = "(other)"

"""The label of the queues that are not shown by their names. No queue can have this name and be served by a function."""

EVENTS: Final = ("enqueued", "claimed", "finished", "retried", "failed", "undecodable", "stalled", "cancelled")

"""Events that each queue has, also if they never happened: Prometheus cannot see the first increase of a counter otherwise."""


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """What one look at the server has found.

    Attributes:
        mesh: the queues and the workers.
        dying: workers that were declared dead, and whose tasks are being given back.
        schedules: declared schedules, up to `MAX_SCHEDULES`.
        runs: the totals of the runs of queues, by field (`worqr.history_records.FIELDS`). Queues without runs are left out.
        server: the state of the server.
        outboxes: the outboxes in databases.
        declared, stored: how many schedules workers declare, and programs have stored.
        late: how many of both the leader has not looked at in time.
        subscribed: the queues that are subscribed to topics, and for how many seconds no worker has declared it.
        limits: the limits with a name, up to `MAX_LIMITS`.
    """

    mesh: MeshInfo
    dying: int
    schedules: Sequence[Schedule]
    runs: Mapping[str, Mapping[str, int]]
    server: ServerStats
    outboxes: Sequence[OutboxInfo] = ()
    declared: int = 0
    stored: int = 0
    late: int = 0
    subscribed: Mapping[str, float] = field(default_factory=dict[str, float])
    limits: Sequence[LimitInfo] = ()


REMEMBERED: Final = 10_000
"""Queues whose last totals are kept, also while no snapshot names them."""


class _OtherCounters:
    """The sums of the counters of the queues that are not shown.

    A queue that comes to them or leaves them changes no sum, only what happens in it meanwhile. A sum that falls would look like
    a counter that begins again from 0, so Prometheus would count all of it once more.
    """

    def __init__(self) -> None:
        self._sums = Counter[str]()
        self._totals: dict[str, Mapping[str, int]] = {}
        self._named: frozenset[str] = frozenset()
        self._left_out: Mapping[str, int] | None = None

    def add(
        self, totals: Mapping[str, Mapping[str, int]], shown: Collection[str], left_out: Mapping[str, int] | None = None
    ) -> Mapping[str, int]:
        """Return the sums, with these totals of queues. `left_out`: the sum of the queues that the snapshot does not name."""
        came = totals.keys() - self._named if self._left_out is not None else frozenset[str]()
        if left_out is not None:
            before = Counter(self._left_out or {})
            for name in self._named - totals.keys():  # they were left out, so they are in the sum
                before.update(self._totals.get(name, {}))
            for name in came:
                before.subtract(totals[name])
            self._sums.update({event: max(0, count - before[event]) for event, count in left_out.items()})
        for name, counts in totals.items():
            last = counts if name in came else self._totals.pop(name, {})
            if name not in shown:
                for event, count in counts.items():  # one that has fallen began anew, or is of an older snapshot
                    self._sums[event] += max(0, count - last.get(event, 0))
            self._totals[name] = counts
        while len(self._totals) > REMEMBERED:
            del self._totals[next(iter(self._totals))]
        self._named, self._left_out = frozenset(totals), left_out
        return self._sums


class FleetMetrics:
    """The metrics of one mesh, from scrape to scrape.

    Args:
        max_queues: how many queues have series of their own.
    """

    def __init__(self, max_queues: int) -> None:
        self._max_queues = max_queues
        self._shown: set[str] = set()
        self._tasks = _OtherCounters()
        self._runs = _OtherCounters()
        self._subscribers = _OtherCounters()

    def samples(self, snapshot: FleetSnapshot | None) -> Samples:
        """Return the metrics of this snapshot; None: the server does not reply."""
        found = Samples()
        found.add("worqr_up", snapshot is not None)
        if snapshot is not None:
            found.add("worqr_snapshot_age_seconds", snapshot.mesh.age)
            found.add("worqr_workers_dying", snapshot.dying)
            _add_workers(found, snapshot.mesh)
            self._add_queues(found, snapshot.mesh, snapshot.runs)
            found.add("worqr_schedules", snapshot.declared, "declared")
            found.add("worqr_schedules", snapshot.stored, "stored")
            found.add("worqr_schedules_late", snapshot.late)
            for schedule in snapshot.schedules:
                _add_schedule(found, schedule)
            self._add_topics(found, snapshot)
            for table in sorted({outbox.table for outbox in snapshot.outboxes}):
                _add_outboxes(found, table, [outbox for outbox in snapshot.outboxes if outbox.table == table])
            for limit in snapshot.limits:
                _add_limit(found, limit)
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
        others_ran = self._runs.add({info.name: runs[info.name] for info in queues if info.name in runs}, self._shown)
        left_out = None if mesh.others is None else mesh.others.counts
        counts = self._tasks.add({info.name: info.counts for info in queues}, self._shown, left_out)
        if mesh.others is not None:
            others.append(mesh.others)
        for info in queues:
            if info.name in self._shown:
                _add_queue(found, info.name, [info], info.counts)
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
            _add_queue(found, OTHER, others, counts)
        if others_ran:
            add_runs(found, OTHER, [others_ran])

    def _add_topics(self, found: Samples, snapshot: FleetSnapshot) -> None:
        """Add the events. Of the subscribers, those have series whose queues have."""
        infos = {info.name: info for info in snapshot.mesh.queues}
        if publishing := infos.get(PUBLISH):
            for event, name in (("published", "enqueued"), ("retried", "retried"), ("failed", "failed")):
                found.add("worqr_events_total", publishing.counts.get(name, 0), event)
            pending = publishing.waiting + publishing.scheduled + publishing.running
            found.add("worqr_events_pending", pending)
        totals: dict[str, Mapping[str, int]] = {}
        for queue, seen in sorted(snapshot.subscribed.items()):
            if queue in infos:
                counts = infos[queue].counts
                totals[queue] = {"delivered": counts.get("enqueued", 0), "refused": counts.get("refused", 0)}
            if queue in self._shown:
                found.add("worqr_subscriber_seen_seconds", seen, queue)
                for event, number in totals[queue].items():
                    found.add("worqr_subscriber_events_total", number, queue, event)
        for event, number in self._subscribers.add(totals, self._shown).items():
            found.add("worqr_subscriber_events_total", number, OTHER, event)


def _activity(info: QueueInfo) -> tuple[int, int]:
    return info.running + info.waiting + info.scheduled + info.blocked, sum(info.counts.values())


def _add_queue(found: Samples, name: str, infos: Sequence[QueueInfo], counts: Mapping[str, int]) -> None:
    """Add the sums of these queues, and their counters."""
    found.add("worqr_queue_waiting", sum(info.waiting for info in infos), name)
    found.add("worqr_queue_scheduled", sum(info.scheduled for info in infos), name)
    found.add("worqr_queue_suspended", sum(info.suspended for info in infos), name)
    found.add("worqr_queue_kept", sum(info.kept for info in infos), name)
    found.add("worqr_queue_kept_bytes", sum(info.kept_bytes for info in infos), name)
    found.add("worqr_queue_blocked", sum(info.blocked for info in infos), name)
    found.add("worqr_queue_running", sum(info.running for info in infos), name)
    found.add("worqr_queue_dead_letters", sum(info.failed for info in infos), name, "failed")
    found.add("worqr_queue_dead_letters", sum(info.undecodable for info in infos), name, "undecodable")
    for event, count in {**dict.fromkeys(EVENTS, 0), **counts}.items():
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
    found.add("worqr_schedule_pending", schedule.pending, schedule.name)
    if schedule.last_outcome is not None:
        found.add("worqr_schedule_last_failed", schedule.last_outcome.outcome == "failed", schedule.name)
        found.add("worqr_schedule_last_seconds", schedule.last_outcome.seconds, schedule.name)


def _add_outboxes(found: Samples, table: str, outboxes: Sequence[OutboxInfo]) -> None:
    """Add the outboxes whose tables have this name: two databases may each have one."""
    found.add("worqr_outbox_rows", sum(outbox.rows for outbox in outboxes), table, "waiting")
    found.add("worqr_outbox_rows", sum(outbox.failed for outbox in outboxes), table, "failed")
    found.add("worqr_outbox_rows", sum(outbox.held for outbox in outboxes), table, "held")
    found.add("worqr_outbox_oldest_seconds", max(outbox.oldest for outbox in outboxes), table)
    found.add("worqr_outbox_unseen_seconds", max(outbox.age for outbox in outboxes), table)


def _add_limit(found: Samples, limit: LimitInfo) -> None:
    found.add("worqr_limit_held", limit.held, limit.name)
    found.add("worqr_limit_concurrency", limit.concurrency, limit.name)
    found.add("worqr_limit_used", limit.used, limit.name, limit.unit)
    found.add("worqr_limit_rate", limit.rate, limit.name, limit.unit)
    found.add("worqr_limit_waiting", limit.waiting, limit.name)
    found.add("worqr_limit_expired", limit.expired, limit.name)


def _add_server(found: Samples, server: ServerStats) -> None:
    found.add("worqr_server_memory_bytes", server.memory)
    found.add("worqr_server_max_bytes", server.max_memory)
    found.add("worqr_server_keeps_everything", server.keeps_everything)
    found.add("worqr_server_clients", server.clients)
