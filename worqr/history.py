"""The history of a queue, as ``queue.history()`` returns it: points, and the distribution of run times in each. Pure.

How it is stored, and how points are computed from that, is in `worqr.history_records`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from worqr.run_counts import RUN_BOUNDS, RUN_BUCKETS, WAIT_BOUNDS, WAIT_BUCKETS

COUNTERS: Final = (
    *("enqueued", "claimed", "finished", "failed", "retried", "cancelled"),
    *("stalled", "stopped", "broken", "timed_out", "expired", "deleted"),
)
"""The totals of a queue's events that a record has, in this order."""


@dataclass(frozen=True, slots=True)
class RunTimes:
    """How long runs took, or how long jobs waited: the number of times in each of some buckets."""

    counts: tuple[int, ...]
    """The number of times in each bucket, the shortest times first."""
    bounds: tuple[float, ...]
    """The upper bound of each bucket in seconds; the last bucket has none."""
    seconds: float
    """The sum of all times, in seconds."""

    @property
    def count(self) -> int:
        """How many times there are."""
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        """The average time in seconds; None if there are no times."""
        return self.seconds / self.count if self.count else None

    def quantile(self, q: float) -> float | None:
        """Return the time in seconds that a share `q` of all times does not exceed, as an estimate.

        The estimate is in the right bucket. Inside the bucket, times count as evenly distributed. For the last bucket, which has
        no upper bound, the result is its lower bound.

        Args:
            q: The share, 0 to 1: 0.95 for the 95th percentile.

        Returns:
            The seconds; None if there are no times.
        """
        left = min(max(q, 0.0), 1.0) * self.count
        lower = 0.0
        for n, upper in zip(self.counts, self.bounds, strict=False):
            if n and left <= n:
                return lower + (upper - lower) * max(left, 0.0) / n
            left, lower = left - n, upper
        return lower if self.count else None


NO_RUNS: Final = RunTimes((0,) * RUN_BUCKETS, RUN_BOUNDS, 0.0)
NO_WAITS: Final = RunTimes((0,) * WAIT_BUCKETS, WAIT_BOUNDS, 0.0)


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """One point in the history of a queue: what happened in the time before it, and the state at its end.

    If no leader kept records, the point is a gap: its numbers are None. Then the next point has the sum of the whole time, and
    its `seconds` are more than one step.
    """

    at: datetime
    """The end of the time that the point is about, by the server's clock."""
    seconds: float
    """The length of that time. Divide the counters by it to get rates."""
    enqueued: int | None = None
    """Tasks that were enqueued, and jobs that were dispatched or retried from the dead-letter queue."""
    claimed: int | None = None
    """Runs that began."""
    finished: int | None = None
    """Runs that finished."""
    failed: int | None = None
    """Tasks that moved to the dead-letter queue."""
    retried: int | None = None
    """Runs that ended with another try."""
    cancelled: int | None = None
    """Tasks that were cancelled, waiting or running."""
    stalled: int | None = None
    """Runs whose worker died."""
    stopped: int | None = None
    """Runs that were given back, for example because their worker left."""
    broken: int | None = None
    """Tasks whose payload could not be decoded."""
    timed_out: int | None = None
    """Runs that took too long."""
    expired: int | None = None
    """Jobs that expired before they began."""
    deleted: int | None = None
    """Tasks that waited when the queue was deleted."""
    waiting: int | None = None
    """Tasks that were ready to run."""
    scheduled: int | None = None
    """Jobs that waited for their time."""
    running: int | None = None
    """Tasks that ran."""
    failed_now: int | None = None
    """Records in the dead-letter queue."""
    workers: int | None = None
    """Workers that served the queue."""
    age: float | None = None
    """For how many seconds the oldest task had waited; None if no task waited, or it is not known. For plain tasks it is an
    estimate.
    """
    runs: RunTimes = NO_RUNS
    """How long the runs took that returned."""
    waits: RunTimes = NO_WAITS
    """How long jobs had waited when they began to run. Plain tasks are not counted."""

    @property
    def is_gap(self) -> bool:
        """True if it is not known what happened in this time."""
        return self.enqueued is None


@dataclass(frozen=True, slots=True)
class History:
    """The last minutes, hours or days of a queue, as ``queue.history()`` returns them."""

    queue: str
    """The queue's name."""
    step: int
    """Seconds from one point to the next: 60 or 600."""
    points: tuple[HistoryPoint, ...]
    """The points, the oldest first. The last one ends now, so it is about less than a step."""

    def total(self, counter: str) -> int:
        """Return the sum of one counter, such as ``finished``, over all points.

        Args:
            counter: The name of a counter of `HistoryPoint`.

        Raises:
            KeyError: It has no such counter.
        """
        if counter not in COUNTERS:
            raise KeyError(f"there is no counter {counter!r}; there are {', '.join(COUNTERS)}")
        return sum(getattr(point, counter) or 0 for point in self.points)

    @property
    def runs(self) -> RunTimes:
        """How long all runs took that returned."""
        return sum_of_times([NO_RUNS, *(point.runs for point in self.points)])

    @property
    def waits(self) -> RunTimes:
        """How long all jobs had waited when they began to run."""
        return sum_of_times([NO_WAITS, *(point.waits for point in self.points)])


def sum_of_times(parts: Sequence[RunTimes]) -> RunTimes:
    """Return all these times together. They have the same bounds."""
    counts = tuple(map(sum, zip(*(part.counts for part in parts), strict=True)))
    return RunTimes(counts, parts[0].bounds, sum(part.seconds for part in parts))


# Shards


def add_points(shards: Sequence[Sequence[HistoryPoint]]) -> list[HistoryPoint]:
    """Return the points of a queue of several shards. If what happened in one of them is not known, the point is a gap."""
    if len(shards) == 1:
        return list(shards[0])
    return [_sum(parts) for parts in zip(*shards, strict=True)]


_SUMMED: Final = (*COUNTERS, "waiting", "scheduled", "running", "failed_now")


def _sum(parts: Sequence[HistoryPoint]) -> HistoryPoint:
    at, seconds = max(part.at for part in parts), max(part.seconds for part in parts)
    if any(part.is_gap for part in parts):
        return HistoryPoint(at, seconds)
    return HistoryPoint(
        at=at,
        seconds=seconds,
        **{name: sum(getattr(part, name) for part in parts) for name in _SUMMED},
        workers=max(part.workers or 0 for part in parts),
        age=max((part.age for part in parts if part.age is not None), default=None),
        runs=sum_of_times([part.runs for part in parts]),
        waits=sum_of_times([part.waits for part in parts]),
    )
