"""What the pages show of the whole mesh: queues, workers, rates, and the queues that need attention."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Literal

from worqr.dashboard import figures
from worqr.records import QueueInfo, WorkerInfo

if TYPE_CHECKING:
    from worqr.cron import Schedule
    from worqr.dashboard.access import Viewer
    from worqr.mesh import Mesh

TOO_OLD: Final = 60.0
"""Seconds that a task may wait before the overview mentions its queue."""
LATE_BEAT: Final = 3.0
"""Seconds without a heartbeat after which a worker is marked: the default of ``keepalive``."""
OVERDUE: Final = timedelta(seconds=60)
RATED: Final = 120.0
"""Seconds between two looks, at most, from which rates are made."""
FAILING: Final = 0.1

Level = Literal["bad", "warn"]


@dataclass(frozen=True, slots=True)
class Rates:
    """Tasks per second since the look before."""

    enqueued: float
    finished: float
    failed: float


@dataclass(frozen=True, slots=True)
class MeshState:
    """All queues and workers at one moment."""

    at: datetime
    queues: tuple[QueueInfo, ...]
    workers: tuple[WorkerInfo, ...]
    rates: Mapping[str, Rates] = field(default_factory=dict[str, Rates])

    def for_viewer(self, viewer: Viewer) -> MeshState:
        """Return the part that this viewer sees."""
        if viewer.sees_all:
            return self
        queues = tuple(info for info in self.queues if viewer.sees(info.name))
        return MeshState(
            self.at,
            queues,
            self.workers,
            {info.name: self.rates[info.name] for info in queues if info.name in self.rates},
        )

    @property
    def total(self) -> dict[str, float | None]:
        """The sums over all queues."""
        names = ("waiting", "scheduled", "blocked", "running", "failed", "broken")
        sums: dict[str, float | None] = {name: sum(getattr(info, name) for info in self.queues) for name in names}
        ages = [age for info in self.queues if (age := age_of(info)) is not None]
        sums["age"] = max(ages, default=None)
        for name in ("finished", "failed"):
            sums[f"{name}_rate"] = sum(getattr(each, name) for each in self.rates.values()) if self.rates else None
        sums["workers"] = len(self.workers)
        return sums

    @property
    def apps(self) -> list[App]:
        """The workers, by application."""
        found: dict[str, list[WorkerInfo]] = {}
        for worker in self.workers:
            found.setdefault(worker.app, []).append(worker)
        return [
            App(
                name, len(each), sum(w.running for w in each), sum(w.room for w in each), len({w.version for w in each})
            )
            for name, each in sorted(found.items())
        ]

    def busiest(self, most: int) -> list[QueueInfo]:
        """Return the queues with the most to do, first."""
        return sorted(self.queues, key=lambda q: (-(q.waiting + q.running), -(q.scheduled + q.failed), q.name))[:most]


@dataclass(frozen=True, slots=True)
class App:
    """The workers of one application."""

    name: str
    workers: int
    running: int
    room: int
    versions: int


@dataclass(frozen=True, slots=True)
class Need:
    """Something that needs an operator. `more` is the reason that an operator gave, if any."""

    level: Level
    subject: str
    text: str
    link: tuple[str, dict[str, str]]
    more: str = ""


async def read_state(mesh: Mesh[Any], before: MeshState | None) -> MeshState:
    """Read queues and workers; make rates from what was read `before`."""
    queues = tuple(await mesh.queues())
    workers = tuple(await mesh.workers())
    state = MeshState(datetime.now(UTC), queues, workers)
    if before is None or not 0 < (state.at - before.at).total_seconds() <= RATED:
        return state
    return MeshState(state.at, queues, workers, rates_between(before, state))


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


def age_of(info: QueueInfo) -> float | None:
    """Return the seconds for which the oldest task of a queue has waited; None if it is not known."""
    return info.oldest_job


def needs_of(state: MeshState, schedules: Iterable[Schedule]) -> list[Need]:
    """Return what needs an operator, the worst first."""
    found: list[Need] = []
    for info in state.queues:
        found += _needs_of_queue(info, state.rates.get(info.name))
    for worker in state.workers:
        if worker.beat_age > LATE_BEAT:
            text = f"no heartbeat for {figures.duration(worker.beat_age)}"
            found.append(Need("bad", figures.worker(worker.id), text, ("/worker", {"id": worker.id})))
    for schedule in schedules:
        if not schedule.paused and state.at - schedule.next_run > OVERDUE:
            text = f"overdue for {figures.since(schedule.next_run, state.at)}"
            found.append(Need("bad", schedule.name, text, ("/schedules", {})))
    return sorted(found, key=lambda need: need.level != "bad")


def _needs_of_queue(info: QueueInfo, rates: Rates | None) -> list[Need]:
    link, found = ("/queue", {"name": info.name}), list[Need]()
    waiting = figures.plural(info.waiting, "task waits", "tasks wait")
    if info.waiting and not info.workers and info.paused is None:
        found.append(Need("bad", info.name, f"{waiting}, and no worker serves the queue", link))
    if info.broken:
        text = f"{figures.plural(info.broken, 'task')} with a payload that cannot be decoded"
        found.append(Need("bad", info.name, text, ("/queue", {"name": info.name, "tab": "broken"})))
    if rates is not None and rates.failed > FAILING * (rates.finished + rates.failed) > 0:
        text = f"{rates.failed / (rates.finished + rates.failed):.0%} of the tasks fail"
        found.append(Need("bad", info.name, text, ("/queue", {"name": info.name, "tab": "failed"})))
    if info.paused is not None:
        found.append(Need("warn", info.name, "is paused", link, info.paused))
    if (age := age_of(info)) is not None and age > TOO_OLD and info.workers and info.paused is None:
        found.append(Need("warn", info.name, f"the oldest task has waited for {figures.duration(age)}", link))
    return found
