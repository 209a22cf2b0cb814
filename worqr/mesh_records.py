"""The values that operators read: queues, workers, the mesh, its log, and the health of a peer. Pure.

The state of tasks is in `worqr.records`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from worqr.limits import Limit


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
    broken: int
    """Records in ``queue.broken``, of payloads that could not be decoded."""
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
