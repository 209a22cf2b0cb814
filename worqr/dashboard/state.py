"""What the pages show of the whole mesh: queues, workers, rates, and the queues that need attention."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from math import isinf
from typing import TYPE_CHECKING, Any, Final, Literal

from worqr.batches import BatchInfo
from worqr.dashboard.payloads import Redactor
from worqr.escaping import escape
from worqr.mesh_records import AppInfo, LaneInfo, MeshInfo, QueueInfo, WorkerInfo
from worqr.records import Status, TaskInfo
from worqr.views import values
from worqr.views.tables import APPS, DEAD, LANES, OVERDUE, QUEUES, WORKERS, age_of, age_text, lane_key, lane_notes

if TYPE_CHECKING:
    from worqr.cron import Schedule
    from worqr.dashboard.access import Viewer
    from worqr.mesh import Mesh


# Why tasks of a queue do not start, and until when, as sentences. Pure. Pages and live updates use the same functions.


FAST: Final = 60.0
"""Seconds: a pause or a rate that ends sooner is no reason to stop workers."""


def pause_text(info: QueueInfo) -> str:
    """Return what the page of a queue says of its pause, without the reason; empty if there is none."""
    if info.paused is None:
        return ""
    end = f" The pause ends in {values.duration(info.held_for)}." if info.held_for is not None else ""
    return f"No worker takes tasks of this queue.{end}"


def limits_text(info: QueueInfo) -> str:
    """Return what the page of a queue says of its limits; empty if it has none."""
    if not info.limits:
        return ""
    by = ", set by an operator" if info.limits_overridden else ""
    held = ""
    if info.held_back == "concurrency":
        held = " The limit is reached: a task starts when another one ends."
    elif info.held_back == "rate":
        more = f": more tasks start in {values.duration(info.held_for)}" if info.held_for is not None else ""
        held = f" The rate is reached{more}."
    return f"In the whole mesh: {', '.join(map(str, info.limits))}{by}.{held}"


def lanes_text(info: QueueInfo) -> str:
    """Return what the page of a queue says of its lanes; empty if none has tasks."""
    if not info.lanes:
        return ""
    have = "lane has" if info.lanes == 1 else "lanes have"
    held = ""
    if info.held_lanes:
        known = info.held_back == "lanes" and info.held_for is not None
        first = f"; the first may in {values.duration(info.held_for)}" if known else ""
        held = f" {values.count(info.held_lanes)} of them may not start any now{first}."
    return f"{values.count(info.lanes)} {have} tasks.{held}"


def lane_hold_text(lane: LaneInfo) -> str:
    """Return why a lane starts no task, and until when; empty if it may start one. A pause has a tag of its own."""
    return "; ".join(note.ends if lane.paused is not None else note.text for note in lane_notes(lane))


def batches_text(info: QueueInfo) -> str:
    """Return what the page of a queue says of the batches whose home it is; empty if there are none."""
    if not info.batches:
        return ""
    have = "batch has its" if info.batches == 1 else "batches have their"
    return f"{values.count(info.batches)} {have} home in this queue, ended ones included."


def may_run(info: QueueInfo) -> int:
    """Return how many tasks could run now if there were workers for all of them.

    Scheduled jobs that are due within 10 s count, because a worker takes about that long to start. A long pause, and lanes that
    are all held, let none start. A limit on the concurrency lets no more than its number run.
    """
    brief = info.held_for is not None and info.held_for <= FAST
    if info.held_back in ("paused", "lanes") and not brief:
        return info.running
    at_once = [limit.concurrency for limit in info.limits if limit.concurrency is not None]
    return max(info.running, min([info.waiting + info.running + info.due_soon, *at_once]))


TOO_OLD: Final = 60.0
"""Seconds that a task may wait before the overview mentions its queue."""
FULL: Final = timedelta(minutes=5)
"""The time for which the workers of an application may be full before the overview mentions it."""
RATED: Final = 120.0
"""Seconds between two looks, at most, from which rates are made."""
FAILING: Final = 0.1
NEARLY_FULL: Final = 0.85
"""The used part of the server's memory from which the overview mentions it. The alerts of `deploy/` have the same limit."""

Level = Literal["bad", "warn"]


@dataclass(frozen=True, slots=True)
class Rates:
    """Tasks per second since the look before."""

    enqueued: float
    finished: float
    failed: float


@dataclass(frozen=True, slots=True)
class MeshState:
    """The whole mesh at one moment, as a viewer sees it."""

    info: MeshInfo
    rates: Mapping[str, Rates] = field(default_factory=dict[str, Rates])
    ahead: timedelta = timedelta()
    """By how much the server's clock is ahead of the clock of this host."""

    def now(self) -> datetime:
        """Return the time by the server's clock."""
        return datetime.now(UTC) + self.ahead

    @property
    def at(self) -> datetime:
        """The time of the snapshot, by the server's clock."""
        return self.info.at

    @property
    def queues(self) -> Sequence[QueueInfo]:
        """The queues, the most active first."""
        return self.info.queues

    @property
    def apps(self) -> Mapping[str, AppInfo]:
        """The workers of each application."""
        return self.info.apps

    def for_viewer(self, viewer: Viewer) -> MeshState:
        """Return the part that this viewer sees."""
        if viewer.sees_all:
            return self
        queues = [info for info in self.queues if viewer.sees(info.name)]
        rates = {info.name: self.rates[info.name] for info in queues if info.name in self.rates}
        unreadable = {name: why for name, why in self.info.unreadable.items() if viewer.sees(name)}
        info = replace(self.info, queues=queues, queues_left_out=0, others=None, unreadable=unreadable)
        return replace(self, info=info, rates=rates)

    @property
    def total(self) -> dict[str, float | None]:
        """The sums over all queues."""
        names = ("waiting", "scheduled", "suspended", "blocked", "running", "failed", "undecodable")
        every = [*self.queues, *([self.info.others] if self.info.others else [])]
        sums: dict[str, float | None] = {name: sum(getattr(info, name) for info in every) for name in names}
        sums["dead"] = sum(info.failed + info.undecodable for info in every)
        for name in ("finished", "failed"):
            sums[f"{name}_rate"] = sum(getattr(each, name) for each in self.rates.values()) if self.rates else None
        sums["workers"] = sum(app.workers for app in self.apps.values())
        return sums

    @property
    def oldest(self) -> QueueInfo | None:
        """The queue whose oldest task has waited longest; None if no task waits."""
        aged = [info for info in self.queues if age_of(info) is not None]
        return max(aged, key=lambda info: age_of(info) or 0.0, default=None)

    def age_in(self, info: QueueInfo) -> QueueInfo:
        """Return the counters of a queue with the estimated age of its oldest task, which only the mesh has."""
        known = next((each for each in self.queues if each.name == info.name), None)
        if info.age is not None or known is None or not info.waiting:
            return info
        return replace(info, age=known.age, age_estimated=known.age_estimated)

    def busiest(self, most: int) -> list[QueueInfo]:
        """Return the queues with the most to do, first."""

        def order(q: QueueInfo) -> tuple[object, ...]:
            return (-(q.waiting + q.running), -(q.scheduled + q.failed), is_empty_failure_queue(q), q.name)

        return sorted(self.queues, key=order)[:most]


@dataclass(frozen=True, slots=True)
class Need:
    """Something that needs an operator. `more` is the reason of a pause, if it has one."""

    level: Level
    subject: str
    text: str
    link: tuple[str, dict[str, str]]
    more: str = ""


async def read_state(mesh: Mesh[Any], before: MeshState | None) -> MeshState:
    """Read the snapshot of the mesh; make rates from what was read `before`."""
    info = await mesh.info()
    state = MeshState(info, ahead=info.at + timedelta(seconds=info.age) - datetime.now(UTC))
    if before is None:
        return state
    seconds = (state.at - before.at).total_seconds()
    if seconds <= 0:  # the same snapshot once more
        return replace(state, rates=before.rates)
    return replace(state, rates=rates_between(before, state)) if seconds <= RATED else state


def rates_between(before: MeshState, after: MeshState) -> dict[str, Rates]:
    """Return the rates of the queues that are in both. A total that went back was reset, and has no rate."""
    seconds = (after.at - before.at).total_seconds()
    old = {info.name: info.counts for info in before.queues}
    found: dict[str, Rates] = {}
    for info in after.queues:
        if info.name in old:
            steps = [
                info.counts.get(name, 0) - old[info.name].get(name, 0) for name in ("enqueued", "finished", "failed")
            ]
            if min(steps) >= 0:
                found[info.name] = Rates(*(step / seconds for step in steps))
    return found


def is_empty_failure_queue(info: QueueInfo) -> bool:
    """Return True for the queue of a failure handler that has nothing to do: ``{mails}-fail``. Each such handler has one."""
    waits = info.waiting or info.scheduled or info.suspended or info.blocked
    has_tasks = waits or info.running or info.failed or info.undecodable
    return info.name.startswith("{") and info.name.endswith("}-fail") and not has_tasks and info.paused is None


def source_text(info: MeshInfo) -> str:
    """Return who read the figures, and how old they are."""
    who = "by the leader" if info.source == "leader" else "read directly"
    return f"{who}, {values.brief(info.age)} ago" if info.age >= 2 else who


def leader_text(info: MeshInfo) -> str:
    """Return the short form of the leader's id."""
    return "none" if info.leader is None else values.worker(info.leader)


def needs_of(state: MeshState, schedules: Iterable[Schedule]) -> list[Need]:
    """Return what needs an operator, the worst first."""
    found: list[Need] = []
    if state.info.leader is None and state.apps:
        text = "has no leader: scheduled jobs do not start, and dead workers are not noticed"
        found.append(Need("bad", "The mesh", text, ("/workers", {})))
    if (used := state.info.memory) is not None and used > NEARLY_FULL:
        text = "refuses new tasks, because its memory is full" if used >= 1 else f"has used {used:.0%} of its memory"
        found.append(Need("bad" if used >= 1 else "warn", "The server", text, ("/server", {})))
    for name, why in state.info.unreadable.items():
        found.append(Need("bad", name, f"cannot be read: {escape(why)}", ("/queue", {"name": name})))
    found += [need for name, app in state.apps.items() if (need := _need_of_app(name, app, state.at)) is not None]
    full = bool(state.apps) and not any(app.room for app in state.apps.values())
    for info in state.queues:
        found += _needs_of_queue(info, state.rates.get(info.name), full=full)
    found += map(_need_of_worker, state.info.unhealthy)
    for schedule in schedules:
        if not schedule.paused and state.at - schedule.next_run > OVERDUE:
            text = f"is overdue for {values.since(schedule.next_run, state.at)}"
            found.append(Need("bad", schedule.name, text, ("/schedules", {})))
    return sorted(found, key=lambda need: need.level != "bad")


def _need_of_app(name: str, app: AppInfo, now: datetime) -> Need | None:
    if app.full_since is None or now - app.full_since < FULL:
        return None
    places = "all places of its worker" if app.workers == 1 else f"all places of its {app.workers:,} workers"
    text = f"{places} have been taken for {values.since(app.full_since, now)}"
    return Need("warn", name or "no name", text, ("/workers", {"app": name}))


def _need_of_worker(worker: WorkerInfo) -> Need:
    link = ("/worker", {"id": worker.id})
    if worker.state in ("missing", "dead"):
        since = "" if isinf(worker.beat_age) else f" (the last one was {values.duration(worker.beat_age)} ago)"
        return Need("bad", values.worker(worker.id), f"sends no heartbeat any more{since}", link)
    return Need("warn", values.worker(worker.id), f"has an event loop that is {values.duration(worker.lag)} late", link)


def _needs_of_queue(info: QueueInfo, rates: Rates | None, *, full: bool) -> list[Need]:
    link, found = ("/queue", {"name": info.name}), list[Need]()
    waiting = values.plural(info.waiting, "task waits", "tasks wait")
    if info.waiting and not info.workers and info.paused is None:
        found.append(Need("bad", info.name, f"{waiting}, and no worker serves the queue", link))
    if info.undecodable:
        text = f"{values.plural(info.undecodable, 'task')} with a payload that cannot be decoded"
        found.append(Need("bad", info.name, text, ("/queue", {"name": info.name, "tab": "undecodable"})))
    if rates is not None and rates.failed > FAILING * (rates.finished + rates.failed) > 0:
        text = f"{rates.failed / (rates.finished + rates.failed):.0%} of the tasks fail"
        found.append(Need("bad", info.name, text, ("/queue", {"name": info.name, "tab": "failed"})))
    if info.paused is not None:
        until = "" if info.held_for is None else f" for {values.duration(info.held_for)} more"
        found.append(Need("warn", info.name, f"is paused{until}", link, info.paused))
    if (age := age_of(info)) is not None and age > TOO_OLD and info.workers and info.paused is None:
        about = "about " if info.age is not None and info.age_estimated else ""
        why = f" ({held})" if (held := QUEUES.state_of(info)) else ", and all workers are full" if full else ""
        text = f"the oldest task has waited for {about}{values.duration(age)}{why}"
        found.append(Need("warn", info.name, text, link))
    return found


# The texts that change while a page is open, by the key that its template gives them. Pure.
#
# A template shows the texts of the same functions, so a page does not change at its first update.


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
