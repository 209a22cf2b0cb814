"""The values that operators read: queues, workers, the mesh, its log, and the health of a peer. Pure.

The state of tasks is in `worqr.records`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from operator import itemgetter
from typing import Any, Final, Literal

import msgspec

from worqr.keys import QueueKeys
from worqr.limits import Limit, limits_text, parse_limits
from worqr.stored_values import public_name, readable, stored_word
from worqr.validation import from_ms

# `QueuePlaces`: estimates for how long the oldest waiting task has waited. Pure: no clock except the times it is given.
#
# The server does not record when a plain task was enqueued. But it counts the tasks that workers took. The number of tasks
# taken plus the number that wait is the place of the newest task. Samples of that number tell when each place was filled. The
# task at the front has the place after those that were taken, so its age follows. Producers need no help from worqr.


MAX_SAMPLES: Final = 240
"""Samples of one queue. If there are more, every second one of the older half is dropped, so the older ones are less exact."""

_ENDS: Final = ("finished", "retried", "failed", "undecodable", "stopped", "stalled", "dropped", "suspended")
"""The totals of runs that ended otherwise than cancelled."""
_place = itemgetter(1)


def count_taken(counts: Mapping[str, int]) -> int:
    """Return how many tasks left the front of a queue for good, from the totals of its events."""
    return counts.get("claimed", 0) - counts.get("stopped", 0) - counts.get("stalled", 0)


def count_cancelled(counts: Mapping[str, int], running: int) -> int:
    """Return how many tasks were cancelled while they waited. The total ``cancelled`` also has those that ran."""
    ended = sum(counts.get(kind, 0) for kind in _ENDS)
    return counts.get("cancelled", 0) - max(0, counts.get("claimed", 0) - running - ended)


class QueuePlaces:
    """The places of the newest task of one queue, at the times of the last samples.

    A task that is cancelled while it waits makes the places behind it sink. Which task it was is unknown. So the code assumes
    that all places of waiting tasks sink in proportion.
    """

    __slots__ = ("_cancelled", "_deleted", "_front", "_samples")

    def __init__(self) -> None:
        self._samples: list[tuple[float, float]] = []
        self._front: int = 1
        self._deleted: int = 0
        self._cancelled: int = 0

    def record(self, now: float, waiting: int, running: int, counts: Mapping[str, int]) -> None:
        """Add a sample that was taken at `now`.

        Args:
            now: seconds of any clock that is never set back.
            waiting: the number of waiting tasks.
            running: the number of claimed tasks. They may return to their old places.
            counts: the totals of the queue's events.
        """
        taken, deleted = count_taken(counts), counts.get("deleted", 0)
        newest, samples = float(taken + waiting), self._samples
        if taken - self._front + 1 < -running - waiting or deleted != self._deleted or not waiting:
            samples.clear()  # the totals began anew, the tasks were deleted, or there are none
        cancelled = count_cancelled(counts, running)
        if samples:
            sunk = max(float(taken), samples[-1][1] - max(0, cancelled - self._cancelled))
            self._sink(min(newest, sunk), float(taken))
        self._front, self._deleted, self._cancelled = taken + 1, deleted, cancelled
        if len(samples) > 1 and samples[-1][1] == samples[-2][1] == newest:
            samples[-1] = (now, newest)
            return
        samples.append((now, newest))
        needed = max(bisect_left(samples, taken - running + 1, key=_place) - 1, 0)
        del samples[:needed]
        if len(samples) > MAX_SAMPLES:
            del samples[1 : len(samples) // 2 : 2]

    def _sink(self, newest: float, taken: float) -> None:
        """Move the places of waiting tasks so that the newest is `newest`, unless it is less already."""
        before = self._samples[-1][1]
        if before <= newest:
            return
        share = (newest - taken) / (before - taken)
        self._samples[:] = [
            (at, taken + (place - taken) * share if place > taken else place) for at, place in self._samples
        ]

    def age(self, now: float) -> float | None:
        """Return for how many seconds the task at the front has waited; None if the last sample found no waiting task.

        A task that waited at the first sample counts from that sample.
        """
        samples, front = self._samples, self._front
        if not samples or samples[-1][1] < front:
            return None
        after = bisect_left(samples, front, key=_place)
        began, filled = samples[after]
        if after:
            earlier, before = samples[after - 1]
            began = earlier + (began - earlier) * (front - before) / (filled - before + 1)
        return max(0.0, now - began)


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """The counters of a queue at one moment."""

    name: str
    """The queue's name."""
    waiting: int
    """Tasks that are ready to run."""
    scheduled: int
    """Jobs that wait for their time."""
    blocked: int
    """Jobs that wait until another run of their id has ended."""
    running: int
    """Tasks that run now."""
    failed: int
    """Records in the dead-letter queue ``queue.failed``."""
    undecodable: int
    """Records in ``queue.undecodable``, of payloads that could not be decoded."""
    paused: str | None
    """The reason that ``queue.pause()`` was given, perhaps empty; None if the queue is not paused."""
    oldest_job: float | None
    """The age of the job at the front of the queue, in seconds. None if the queue is empty or a plain task is at the front."""
    workers: int
    """The number of workers that serve the queue."""
    counts: Mapping[str, int]
    """Totals by event (``enqueued``, ``finished``, ``failed``, ...), since the counters were last unused for 30 days."""
    age: float | None = None
    """For how many seconds the oldest task has waited. None if no task waits.

    For plain tasks, only ``mesh.info()`` returns it, as the leader's estimate; elsewhere it is None.
    """
    age_estimated: bool = False
    """The leader estimated ``age`` from the totals of the queue. Tasks that waited when it began to lead count from that time."""
    limits: tuple[Limit, ...] = ()
    """What may start in the whole mesh: the limits of the handler, or those of ``queue.set_limit()``."""
    limits_overridden: bool = False
    """``queue.set_limit()`` was called, and ``queue.clear_limit()`` was not."""
    held_back: Literal["", "paused", "concurrency", "rate", "lanes"] = ""
    """Why no task may start now; empty if one may. ``lanes``: all lanes with tasks are paused or at a limit of their own."""
    held_for: float | None = None
    """Seconds until more tasks may start by themselves: a rate allows it, or a pause ends. None if that is not known."""
    lanes: int = 0
    """Lanes with tasks."""
    held_lanes: int = 0
    """Lanes with tasks of which none may start now, because the lane is paused or at a limit of its own."""
    batches: int = 0
    """Batches whose home queue this is: those that have not ended, and ended ones whose `keep` has not passed."""
    relay_pending: bool = False
    """The leader still has to deliver messages of this queue about batches, or to check a batch. True for more than some seconds:
    the mesh has no leader, or the log of the leader has the event ``relay``.
    """
    open_batches: int = 0
    """Of `batches`, those that have not ended. Only the 500 batches that the leader checks first are looked at."""
    due_soon: int = 0
    """Of `scheduled`, those that are due within 10 seconds."""
    suspended: int = 0
    """Workflows that wait for an event, a time or other jobs."""
    kept: int = 0
    """Jobs that have ended and are kept (`Keep`)."""
    kept_bytes: int = 0
    """The memory that they count, in bytes."""


@dataclass(frozen=True, slots=True)
class LaneInfo:
    """A lane of a queue at one moment."""

    name: str
    """The lane's name."""
    waiting: int
    """Its tasks that are ready to run. Jobs that were cancelled lately may be among them."""
    running: int
    """Its tasks that run now."""
    weight: int
    """How many of its tasks start for each task of a lane of weight 1."""
    limits: tuple[Limit, ...] = ()
    """What may start in the lane."""
    paused: str | None = None
    """The reason that ``queue.pause(lane=...)`` was given, perhaps empty; None if the lane is not paused."""
    held: bool = False
    """None of its tasks may start now: it is paused, or at its limit."""
    held_for: float | None = None
    """Seconds until one may start by itself: a rate allows it, a pause ends, or a retry is due. None if that is not known."""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker, as the server knows it. Workers of older versions do not report every value."""

    id: str
    """The worker id. A worker that was declared dead joins again under a new id."""
    host: str
    """The host name of its machine."""
    pid: int
    """Its process id; 0 if it is not known."""
    app: str
    """The name of its application, from ``Mesh(app=...)``."""
    version: str
    """Its version of worqr."""
    queues: frozenset[str]
    """The names of the queues that it serves."""
    running: int
    """The number of tasks that it ran at its last heartbeat; 0 if it is not known."""
    room: int
    """The free part of its concurrency at its last heartbeat, in units; 0 if it is not known."""
    beat_age: float
    """Seconds since its last heartbeat; infinite if its key has expired. 0 for a worker with ``keepalive=None``."""
    state: Literal["ready", "quiet", "leaving", "missing", "dead"] = "ready"
    """The state. ``ready``: it takes tasks. ``quiet``: it takes no new tasks, because an operator asked it to. ``leaving``: it
    takes no more tasks, and waits for those that run. ``missing``: its heartbeat key has expired. ``dead``: it was declared
    dead, and its tasks are being given back.
    """
    leads: bool = False
    """True if it is the leader, which looks after the whole mesh."""
    started: datetime | None = None
    """The time at which it joined, by the server's clock; None if it did not report it."""
    lag: float | None = None
    """Seconds by which its event loop was late at its last heartbeat; None if it did not report it."""
    python: str = ""
    """Its version of Python; empty if it did not report it."""
    threads: int | None = None
    """The number of its threads for plain functions; None if it did not report it."""
    processes: int | None = None
    """The number of its processes for ``runs_in="process"``; None if it did not report it."""
    request: str = ""
    """What ``mesh.ask_worker()`` asked of it, until it has replied; empty if nothing. Workers of older versions never reply."""
    requested_at: datetime | None = None
    """The time of that request, by the server's clock; None without one."""
    answer: str = ""
    """Its reply to the last request: ``done``, or why it refused; empty if there is none."""
    full_since: datetime | None = None
    """The time of the first heartbeat since which all have found no free concurrency, by the server's clock; None if the last one
    found some.
    """
    deploy: int = 0
    """The number of this version of its application, from ``Mesh(deploy=...)``; 0 if it has none."""


@dataclass(frozen=True, slots=True)
class AppInfo:
    """The workers of one application, added up."""

    workers: int
    """The number of its workers."""
    running: int
    """The number of tasks that they run."""
    room: int
    """The free part of their concurrency, in units."""
    full_since: datetime | None = None
    """The time since which no heartbeat of any of them found free concurrency; None if one has some. Workers that are quiet or
    leave do not count.
    """


@dataclass(frozen=True, slots=True)
class MeshInfo:
    """The whole mesh at one moment, as ``mesh.info()`` returns it."""

    at: datetime
    """The time of the snapshot, by the server's clock."""
    source: Literal["leader", "direct"]
    """Who read the queues. ``leader``: the leader, which writes a snapshot while programs read them. ``direct``: this process,
    because there was no snapshot: no worker leads, or no program has read snapshots lately.
    """
    age: float
    """Seconds since the snapshot was made."""
    leader: str | None
    """The worker id of the leader; None if no worker leads."""
    queues: Sequence[QueueInfo]
    """Up to 1,000 queues that are not empty or have a worker, the most active first. Queues that the server refuses to read are
    left out.
    """
    queues_left_out: int
    """The number of further queues."""
    others: QueueInfo | None
    """The sum of those further queues; None if there are none. A worker counts once for each queue."""
    apps: Mapping[str, AppInfo]
    """The workers of each application, by its name in ``Mesh(app=...)``."""
    unhealthy: Sequence[WorkerInfo] = ()
    """Up to 20 workers that are missing or dead, or whose event loop was late by more than a second, the worst first. Their
    ``queues`` are left out; ``mesh.workers()`` has them.
    """
    unreadable: Mapping[str, str] = field(default_factory=dict[str, str])
    """Up to 100 queues that the server refuses to read, and its words: a key has a foreign type, or the user lacks a
    permission.
    """
    memory: float | None = None
    """The used part of the limit of the server's memory; from 1 on, the server refuses new tasks. None: there is no limit, or
    the user lacks the permission for INFO. On a cluster: of the node that has the registry of the mesh.
    """


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One entry in the log of the mesh. See ``mesh.log()``."""

    id: str
    """The id of the entry. Pass it as ``after`` to read the entries after it."""
    at: datetime
    """The time at which it was written, by the server's clock."""
    kind: str
    """What happened: ``joined``, ``left``, ``dead``, ``paused`` and others."""
    who: str
    """The program or person that did it: the `app` of the mesh, or the user of the command line. Empty if unknown."""
    queue: str
    """The queue that it was about; empty if there is none."""
    worker: str
    """The worker that it was about; empty if there is none."""
    job: str
    """The job that it was about; empty if there is none."""
    count: int | None
    """How many tasks or workers it was about; None if it is no matter of numbers."""
    text: str
    """Details for people, at most 300 characters."""


@dataclass(frozen=True, slots=True)
class Health:
    """The health of a peer, for the probes of an orchestrator."""

    alive: bool
    """True if the event loop turns: it was blocked for less than ``Mesh(block_limit=...)`` seconds."""
    ready: bool
    """True if the peer is registered, its heartbeat is acknowledged, its queues are subscribed, and it is not leaving."""
    why: str
    """Why it is not ready; empty if it is."""
    running: int
    """The number of tasks that it runs."""
    room: int
    """The free part of its concurrency, in units. A task takes `size` units."""
    loop_lag: float
    """Seconds by which the event loop is late."""


# The snapshot of a mesh: how it is made of the queues and the workers, and how it is stored. Pure.
#
# The leader writes snapshots while programs read them: `worqr.peer.leader.scanner`. `worqr.client.inspection` reads them.


MAX_QUEUES: Final = 1000
"""Queues that a snapshot names; the others are added up."""
MAX_REASON: Final = 300
"""Characters of the reason of a pause, or of a refusal, that a snapshot has."""
OTHERS: Final = "(others)"
MAX_UNREADABLE: Final = 100
"""Queues that cannot be read that a snapshot names."""
MAX_UNHEALTHY: Final = 20
"""Workers in trouble that a snapshot names."""
LATE_LOOP: Final = 1.0
"""Seconds by which the event loop of a worker may be late before the worker counts as unhealthy."""


class _Queue(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fields of `QueueInfo`: those that are zero are not stored. `limits`: as text (`worqr.limits`)."""

    name: str
    waiting: int = 0
    scheduled: int = 0
    blocked: int = 0
    running: int = 0
    failed: int = 0
    undecodable: int = msgspec.field(default=0, name="broken")
    paused: str | None = None
    oldest_job: float | None = None
    workers: int = 0
    counts: dict[str, int] = {}
    age: float | None = None
    age_estimated: bool = False
    limits: str = ""
    limits_overridden: bool = False
    held_back: Literal["", "paused", "concurrency", "rate", "lanes"] = ""
    held_for: float | None = None
    lanes: int = 0
    held_lanes: int = 0
    batches: int = 0
    relay_pending: bool = False
    open_batches: int = 0
    due_soon: int = 0
    suspended: int = 0
    kept: int = 0
    kept_bytes: int = 0


class _App(msgspec.Struct, omit_defaults=True):
    """The fields of `AppInfo`."""

    workers: int = 0
    running: int = 0
    room: int = 0
    full_since: int = 0


class _Snapshot(msgspec.Struct, omit_defaults=True):
    """`at`: the server's time in ms. `others`: the sum of the queues that are not named."""

    at: int
    leader: str = ""
    queues: list[_Queue] = []
    left_out: int = 0
    others: _Queue | None = None
    apps: dict[str, _App] = {}
    unhealthy: list[WorkerInfo] = []
    unreadable: dict[str, str] = {}


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(_Snapshot)


def apps_of(workers: Iterable[WorkerInfo]) -> dict[str, AppInfo]:
    """Return the workers that were not declared dead, added up by their application."""
    found: dict[str, AppInfo] = {}
    ready: dict[str, list[datetime | None]] = {}
    for worker in workers:
        if worker.state != "dead":
            seen = found.get(worker.app, AppInfo(0, 0, 0))
            found[worker.app] = AppInfo(seen.workers + 1, seen.running + worker.running, seen.room + worker.room)
        if worker.state == "ready":
            ready.setdefault(worker.app, []).append(worker.full_since)
    return {name: replace(app, full_since=_full_since(ready.get(name, []))) for name, app in sorted(found.items())}


def _full_since(workers: Iterable[datetime | None]) -> datetime | None:
    """Return since when all these workers were full; None if one is not, or there are none."""
    times = list(workers)
    known = [each for each in times if each is not None]
    return max(known) if known and len(known) == len(times) else None


def unhealthy_of(workers: Iterable[WorkerInfo]) -> list[WorkerInfo]:
    """Return the workers that need an operator, the worst first, without their queues."""
    found = [worker for worker in workers if worker.state in ("missing", "dead") or (worker.lag or 0.0) > LATE_LOOP]
    found.sort(key=lambda worker: (worker.state not in ("missing", "dead"), -worker.beat_age, -(worker.lag or 0.0)))
    return [replace(worker, queues=frozenset()) for worker in found[:MAX_UNHEALTHY]]


def unreadable_of(refused: Mapping[str, str]) -> dict[str, str]:
    """Return the queues that the server refuses to read, by their names for people, with its words."""
    found = {readable(QueueKeys.of("", name).display_name): why[:MAX_REASON] for name, why in refused.items()}
    return dict(sorted(found.items())[:MAX_UNREADABLE])


def is_in_use(queue: QueueInfo) -> bool:
    """Return True if the queue is not empty, keeps batches or jobs, has a worker, or an operator has paused or limited it."""
    holds = queue.waiting or queue.running or queue.scheduled or queue.blocked or queue.failed or queue.undecodable
    return (
        bool(holds or queue.suspended or queue.batches or queue.kept or queue.workers or queue.limits_overridden)
        or queue.paused is not None
    )


def most_active(queues: Iterable[QueueInfo]) -> tuple[list[QueueInfo], int, QueueInfo | None]:
    """Return the queues to name, the most active first; how many are left out, and their sum."""
    ordered = sorted(queues, key=_activity)
    rest = ordered[MAX_QUEUES:]
    return ordered[:MAX_QUEUES], len(rest), _sum_of(rest) if rest else None


def _activity(queue: QueueInfo) -> tuple[int, int, int, str]:
    return (-queue.running - queue.waiting, -queue.scheduled - queue.blocked, -queue.workers, queue.name)


def _sum_of(queues: Sequence[QueueInfo]) -> QueueInfo:
    counts: Counter[str] = Counter()
    for queue in queues:
        counts.update(queue.counts)
    oldest = max(queues, key=lambda queue: -1.0 if queue.age is None else queue.age)
    return QueueInfo(
        name=OTHERS,
        waiting=sum(queue.waiting for queue in queues),
        scheduled=sum(queue.scheduled for queue in queues),
        blocked=sum(queue.blocked for queue in queues),
        suspended=sum(queue.suspended for queue in queues),
        running=sum(queue.running for queue in queues),
        failed=sum(queue.failed for queue in queues),
        undecodable=sum(queue.undecodable for queue in queues),
        paused=None,
        oldest_job=max((queue.oldest_job for queue in queues if queue.oldest_job is not None), default=None),
        workers=sum(queue.workers for queue in queues),
        counts=dict(counts),
        batches=sum(queue.batches for queue in queues),
        relay_pending=any(queue.relay_pending for queue in queues),
        open_batches=sum(queue.open_batches for queue in queues),
        due_soon=sum(queue.due_soon for queue in queues),
        kept=sum(queue.kept for queue in queues),
        kept_bytes=sum(queue.kept_bytes for queue in queues),
        age=oldest.age,
        age_estimated=oldest.age_estimated,
    )


def encode_snapshot(info: MeshInfo) -> bytes:
    """Return the snapshot as msgpack: maps whose fields are those of the records, without zeros."""
    stored = _Snapshot(
        at=round(info.at.timestamp() * 1000),
        leader=info.leader or "",
        queues=[_stored(queue) for queue in info.queues],
        left_out=info.queues_left_out,
        others=None if info.others is None else _stored(info.others),
        apps={name: _stored_app(app) for name, app in info.apps.items()},
        unhealthy=list(info.unhealthy),
        unreadable=dict(info.unreadable),
    )
    return _encoder.encode(stored)


def decode_snapshot(stored: bytes, now_ms: int) -> MeshInfo | None:
    """Return the snapshot as of `now_ms`, the server's time; None if it cannot be decoded."""
    try:
        found = _decoder.decode(stored)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return MeshInfo(
        at=from_ms(found.at),
        source="leader",
        age=max(0, now_ms - found.at) / 1000,
        leader=found.leader or None,
        queues=[_queue(queue) for queue in found.queues],
        queues_left_out=found.left_out,
        others=None if found.others is None else _queue(found.others),
        apps={name: _app(app) for name, app in found.apps.items()},
        unhealthy=found.unhealthy,
        unreadable=found.unreadable,
    )


def _stored_app(app: AppInfo) -> _App:
    since = 0 if app.full_since is None else round(app.full_since.timestamp() * 1000)
    return _App(app.workers, app.running, app.room, since)


def _app(app: _App) -> AppInfo:
    return AppInfo(app.workers, app.running, app.room, from_ms(app.full_since) if app.full_since else None)


def _stored(queue: QueueInfo) -> _Queue:
    if queue.paused is not None:
        queue = replace(queue, paused=queue.paused[:MAX_REASON])
    values: dict[str, Any] = {name: getattr(queue, name) for name in _Queue.__struct_fields__}
    values["limits"] = limits_text(queue.limits, queue.name)
    values["counts"] = {stored_word(name): count for name, count in queue.counts.items()}
    return _Queue(**values)


def _queue(stored: _Queue) -> QueueInfo:
    values: dict[str, Any] = {name: getattr(stored, name) for name in _Queue.__struct_fields__}
    values["limits"] = parse_limits(stored.limits)
    values["counts"] = {public_name(word): count for word, count in stored.counts.items()}
    return QueueInfo(**values)
