"""The history of a queue: the records that are stored of it, and the points that are computed from them. Pure.

Once a minute, the leader lets the server store one record of each queue in use (`worqr.peer.leader.scanner`). A record
has totals, not differences. So a lost record, another leader or counters that began anew never make a wrong rate: a point is
the difference of two records, and is left empty if they do not tell it.

A record has 232 bytes, all numbers unsigned and big-endian:

    0    4  minute: the server's time in minutes since 1970
    4    4  since: the totals changed in or after this minute, or not at all; 0: unknown; 1: unknown, and this is the first
            record. Highest bit: before, they were zero
    8    2  milliseconds of the server's time within the minute
    10   2  workers that serve the queue
    12   4  milliseconds for which the oldest task has waited; 4294967295: unknown, or there is none
    16  16  4 numbers at that time: waiting, scheduled, running, failed (records in the dead-letter queue)
    32  56  14 totals modulo 2^32: those of `COUNTERS`, and the sums of run times and of waiting times in milliseconds
    88  80  20 totals modulo 2^32: the buckets of run times
    168 64  16 totals modulo 2^32: the buckets of waiting times
"""

from __future__ import annotations

import struct
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from typing import Any, Final

from worqr.stored_values import whole
from worqr.validation import from_ms

# `RunCounts`: how runs ended, how long they took, and how long their jobs had waited. Pure: no clock but the times it is given.
#
# A worker counts its runs here, and adds the counts to the totals of the queue on the server, one field for each count. Durations
# are counted in buckets. So quantiles of a whole mesh can be computed from the sum of the counts of all workers.

OUTCOMES: Final = ("ok", "raised", "timeout", "cancelled", "lost")

"""How runs end: the handler returned; it raised; it ran too long; it was cancelled; another worker had received the task."""

RUN_BUCKETS: Final = 20

WAIT_BUCKETS: Final = 16

RUN_BOUNDS: Final = tuple(2**i / 1000 for i in range(RUN_BUCKETS - 1))

"""Upper bounds of the buckets ``r0``, ``r1`` ... of run times, in seconds: 1 ms to 262 s. The last bucket has no bound."""

WAIT_BOUNDS: Final = tuple(4**i / 1000 for i in range(WAIT_BUCKETS - 1))

"""Upper bounds of the buckets ``w0``, ``w1`` ... of waiting times, in seconds: 1 ms to 74 hours. The last bucket has no bound."""

RUN_FIELDS: Final = tuple(f"r{i}" for i in range(RUN_BUCKETS))

WAIT_FIELDS: Final = tuple(f"w{i}" for i in range(WAIT_BUCKETS))

RUN_SUM: Final = "rs"

WAIT_SUM: Final = "ws"

"""The fields of the sums of all run times and of all waiting times, in milliseconds."""

FIELDS: Final = (*RUN_FIELDS, RUN_SUM, *WAIT_FIELDS, WAIT_SUM, *OUTCOMES)

"""All fields of the totals of a queue."""

_LAST_RUN: Final = RUN_BUCKETS - 1

_LAST_WAIT: Final = WAIT_BUCKETS - 1


def run_bucket(seconds: float) -> int:
    """Return the bucket of a run time. Bucket i has the times under 2^i ms that no lower bucket has; the last has the rest."""
    return min(int(seconds * 1000).bit_length(), _LAST_RUN) if seconds > 0 else 0


def wait_bucket(ms: int) -> int:
    """Return the bucket of a waiting time. Bucket i has the times under 4^i ms that no lower bucket has; the last one has the
    rest.
    """
    return _wait_bucket_of(ms.bit_length()) if ms > 0 else 0


def _wait_bucket_of(bits: int) -> int:
    return min((bits + 1) // 2, _LAST_WAIT)


def waited_ms(record: Mapping[bytes, bytes], fence: int) -> int | None:
    """Return for how many milliseconds a claimed job was ready to run; None if its record does not tell.

    All times are of the server's clock: a fencing token is the time of its claim in microseconds. A job that is retried without a
    delay keeps no time of its retry.

    Args:
        record: the fields of the job, as the worker received them.
        fence: the fencing token of the claim.
    """
    get = record.get
    ready, queued = whole(get(b"run_at"), 0), whole(get(b"queued"), 0) // 1000
    if ready < queued:
        if get(b"started") is not None:
            return None
        ready = queued
    if not ready:
        return None
    ms = fence // 1000 - ready
    return ms if ms > 0 else 0


class RunCounts:
    """The counts of the runs of one queue that were not sent yet, and the last of these runs, if the queue keeps some.

    Args:
        keep: how many of the last runs the queue keeps.
    """

    __slots__ = ("_counts", "_ended", "_run_seconds")

    def __init__(self, keep: int = 0) -> None:
        self._counts: Counter[str] = Counter()
        self._run_seconds: float = 0.0
        self._ended: deque[bytes] = deque(maxlen=keep)

    def __bool__(self) -> bool:
        return bool(self._counts)

    def add(self, outcome: str, n: int = 1) -> None:
        """Count runs that ended in this way."""
        self._counts[outcome] += n

    def add_returned(self, began: Sequence[float], now: float) -> int:
        """Count runs that returned, with their run times. Return how many.

        Args:
            began: when each of them was claimed; runs of one reply have the same time.
            now: when they ended, by the same clock.
        """
        counts, returned = self._counts, len(began)
        counts["ok"] += returned
        for start, n in Counter(began).items() if returned > 1 else ((began[0], 1),):
            took = now - start
            counts[RUN_FIELDS[run_bucket(took)]] += n
            self._run_seconds += took * n
        return returned

    def add_waits(self, waits: Sequence[int]) -> None:
        """Count the waiting times of jobs, in milliseconds."""
        counts = self._counts
        counts[WAIT_SUM] += sum(waits)
        sizes = list(map(int.bit_length, waits))
        for size in set(sizes):
            counts[WAIT_FIELDS[_wait_bucket_of(size)]] += sizes.count(size)

    def keep(self, runs: Iterable[bytes]) -> None:
        """Keep runs that have ended, as they are stored (`worqr.records`). The last ones stay if there are too many."""
        self._ended.extend(runs)

    def take(self) -> tuple[dict[str, int], tuple[bytes, ...]]:
        """Return the counts by field, and the kept runs, and begin anew. A fraction of a millisecond stays for the next time."""
        taken: dict[str, int] = dict(self._counts)
        ms = int(self._run_seconds * 1000)
        if ms > 0:
            taken[RUN_SUM] = ms
            self._run_seconds -= ms / 1000
        self._counts.clear()
        ended = tuple(self._ended)
        self._ended.clear()
        return taken, ended

    def put_back(self, taken: Mapping[str, int], ended: Sequence[bytes] = ()) -> None:
        """Add counts that could not be sent, and runs that ended before those that are kept."""
        self._ended = deque([*ended, *self._ended], self._ended.maxlen)
        for field, n in taken.items():
            if field == RUN_SUM:
                self._run_seconds += n / 1000
            else:
                self._counts[field] += n


# The history of a queue, as ``queue.history()`` returns it: points, and the distribution of run times in each.


COUNTERS: Final = (
    *("enqueued", "claimed", "finished", "failed", "retried", "cancelled"),
    *("stalled", "stopped", "undecodable", "timed_out", "expired", "deleted"),
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
    undecodable: int | None = None
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


RECORD_BYTES: Final = 232

MINUTE_RECORDS: Final = 480

"""Records of a minute that are kept: 8 hours."""

TEN_MINUTE_RECORDS: Final = 432

"""Records of ten minutes that are kept: 3 days."""

FIRST: Final = 1

"""`since` of the first record of a ring, if nothing is known of the time before it. It is not replaced in its minute."""

FROM_ZERO: Final = 1 << 31

"""The bit of `since` that says that the totals were zero before."""

_LAYOUT: Final = struct.Struct(f">IIHHI4I{len(COUNTERS) + 2}I{RUN_BUCKETS}I{WAIT_BUCKETS}I")

_COUNTERS_AT: Final = 9

_RUNS_AT: Final = _COUNTERS_AT + len(COUNTERS) + 2

_WAITS_AT: Final = _RUNS_AT + RUN_BUCKETS

_WRAP: Final = 1 << 32

_UNKNOWN: Final = _WRAP - 1

_MOST: Final = 1 << 31

"""A difference of at least this much means that a total became smaller."""


@dataclass(frozen=True, slots=True)
class Record:
    """One stored record. `totals`: those of COUNTERS and both sums; all totals are modulo 2^32. `since` includes FROM_ZERO."""

    at_ms: int
    since: int
    workers: int
    age_ms: int | None
    gauges: tuple[int, int, int, int]
    totals: tuple[int, ...]
    runs: tuple[int, ...]
    waits: tuple[int, ...]

    @property
    def minute(self) -> int:
        """The minute since 1970 in which it was stored."""
        return self.at_ms // 60_000

    @property
    def state(self) -> tuple[int, ...]:
        """The counters and the numbers of waiting, scheduled, running and failed tasks and of workers; see `state_of`."""
        return (*self.totals[: len(COUNTERS)], *self.gauges, self.workers)


def state_of(counts: Mapping[str, int], *gauges: int) -> tuple[int, ...]:
    """Return the state of a queue, which equals that of a record if nothing has happened since.

    Args:
        counts: the totals of the queue's events.
        gauges: the numbers of waiting, scheduled, running and failed tasks, and of workers.
    """
    return (*(counts.get(name, 0) % _WRAP for name in COUNTERS), *gauges)


def encode_record(record: Record) -> bytes:
    """Return the record as it is stored."""
    minute, ms = divmod(record.at_ms, 60_000)
    age = _UNKNOWN if record.age_ms is None else min(record.age_ms, _UNKNOWN - 1)
    numbers = (minute, record.since, ms, record.workers, age)
    return _LAYOUT.pack(*numbers, *record.gauges, *record.totals, *record.runs, *record.waits)


def decode_record(stored: bytes) -> Record | None:
    """Return a stored record; None if none was stored in this place."""
    if len(stored) != RECORD_BYTES:
        return None  # another program has written something else
    minute, since, ms, workers, age, *numbers = _LAYOUT.unpack(stored)
    if not minute:
        return None
    waiting, scheduled, running, failed, *totals = numbers
    return Record(
        at_ms=minute * 60_000 + ms,
        since=since,
        workers=workers,
        age_ms=None if age == _UNKNOWN else age,
        gauges=(waiting, scheduled, running, failed),
        totals=tuple(totals[: _RUNS_AT - _COUNTERS_AT]),
        runs=tuple(totals[_RUNS_AT - _COUNTERS_AT : _WAITS_AT - _COUNTERS_AT]),
        waits=tuple(totals[_WAITS_AT - _COUNTERS_AT :]),
    )


def decode_records(stored: bytes) -> Iterator[Record]:
    """Return the records of a part of a ring, in no particular order."""
    for start in range(0, len(stored) - RECORD_BYTES + 1, RECORD_BYTES):
        if (record := decode_record(stored[start : start + RECORD_BYTES])) is not None:
            yield record


# Differences


def _differences(before: Sequence[int], after: Sequence[int]) -> tuple[int, ...] | None:
    """Return by how much each total grew; None if one became smaller."""
    grown = tuple((new - old) % _WRAP for old, new in zip(before, after, strict=True))
    return grown if max(grown) < _MOST else None


def _times(before: Sequence[int], after: Sequence[int], sums: tuple[int, int], none: RunTimes) -> RunTimes:
    """Return the times between two records. The sums are known modulo 2^32 only. The buckets tell how often they began anew."""
    counts = _differences(before, after)
    if counts is None or not any(counts):
        return none
    least = round(sum(n * lower * 1000 for n, lower in zip(counts, (0.0, *none.bounds), strict=True)))
    ms = (sums[1] - sums[0]) % _WRAP
    ms += max(0, -(-(least - ms) // _WRAP)) * _WRAP
    return RunTimes(counts, none.bounds, ms / 1000)


def _point(before: Record | None, after: Record, slot_ms: int, *, rested: bool = False) -> HistoryPoint:
    """Return what happened between two records. Without the first one, only the state is known.

    Args:
        before: the record before.
        after: the record at the end of the time.
        slot_ms: when the time began, if neither record tells.
        rested: nothing happened before `slot_ms`.
    """
    start_ms = slot_ms if before is None or rested else max(before.at_ms, _quiet_ms(after))
    waiting, scheduled, running, failed = after.gauges
    point = HistoryPoint(
        at=from_ms(after.at_ms),
        seconds=max(after.at_ms - start_ms, 1) / 1000,
        waiting=waiting,
        scheduled=scheduled,
        running=running,
        failed_now=failed,
        workers=after.workers,
        age=None if after.age_ms is None else after.age_ms / 1000,
    )
    grown = None if before is None else _differences(before.totals[:-2], after.totals[:-2])
    if before is None or grown is None:
        return point
    counters: dict[str, Any] = dict(zip(COUNTERS, grown, strict=True))
    return replace(
        point,
        **counters,
        runs=_times(before.runs, after.runs, (before.totals[-2], after.totals[-2]), NO_RUNS),
        waits=_times(before.waits, after.waits, (before.totals[-1], after.totals[-1]), NO_WAITS),
    )


def history_points(records: Iterable[Record], now: Record, number: int, step: int) -> list[HistoryPoint]:
    """Return the last points of a queue, one for each step, the oldest first.

    Args:
        records: those of the time that the points are about, and the last one before it, in any order.
        now: the queue at this moment.
        number: how many points.
        step: minutes from one point to the next.
    """
    last = now.minute // step
    oldest = last - number + 1
    by_slot = {record.minute // step: record for record in sorted(records, key=lambda record: record.at_ms)}
    known = {slot: record for slot, record in by_slot.items() if slot <= last}
    if (same := known.get(last)) is not None:
        now = replace(now, since=same.since, age_ms=_age_now(same, now))
    known[last] = now
    first, *_ = slots = sorted(known)
    start = _zeros(known[first], first * step * 60_000)
    if start is None and first == last:
        start = same  # the history has just begun
    found = {first: _point(start, known[first], first * step * 60_000)}
    if not any(known[first].totals):
        found |= {slot: _rest_point(known[first], slot, step) for slot in range(oldest, first)}
    for earlier, slot in pairwise(slots):
        before, after = known[earlier], _aged(known[earlier], known[slot])
        unchanged = before.totals == after.totals
        found[slot] = _point(before, after, slot * step * 60_000, rested=unchanged and slot > earlier + 1)
        quiet = slot if unchanged else _quiet_ms(after) // (step * 60_000)
        rest = range(max(earlier + 1, oldest), min(quiet + 1, slot))
        found |= {each: _rest_point(before, each, step) for each in rest}
    return [found.get(slot) or _gap(slot, step) for slot in range(oldest, last + 1)]


def _quiet_ms(record: Record) -> int:
    """Return the beginning of the minute until which the totals did not change; 0 if that is not known.

    A minute of the future is from before the server's clock was set back.
    """
    since = record.since & ~FROM_ZERO
    return since * 60_000 if since <= record.minute else 0


def _zeros(first: Record, start_ms: int) -> Record | None:
    """Return the record before the first one if it is known that its totals were zero."""
    if any(first.totals) and not first.since & FROM_ZERO:
        return None
    none = (0,) * len(first.totals)
    return replace(first, at_ms=start_ms, totals=none, runs=NO_RUNS.counts, waits=NO_WAITS.counts)


def _age_now(recorded: Record, now: Record) -> int | None:
    """Return the age of the oldest task. The leader has estimated it for plain tasks, and this process has not."""
    if now.age_ms is not None or recorded.age_ms is None or not now.gauges[0]:
        return now.age_ms
    return recorded.age_ms


def _aged(before: Record, after: Record) -> Record:
    """Return the second record with the age of its oldest task, which is that of the first record if nothing has happened."""
    if after.age_ms is not None or before.age_ms is None or not after.gauges[0] or before.totals != after.totals:
        return after
    return replace(after, age_ms=before.age_ms + max(0, after.at_ms - before.at_ms))


def _rest_point(before: Record, slot: int, step: int) -> HistoryPoint:
    """Return a point in which nothing happened. A task that waits gets older."""
    start, end = slot * step * 60_000, (slot + 1) * step * 60_000
    age = None if before.age_ms is None else before.age_ms + max(0, end - before.at_ms)
    return _point(before, replace(before, at_ms=end, since=0, age_ms=age), start, rested=True)


def _gap(slot: int, step: int) -> HistoryPoint:
    return HistoryPoint(at=from_ms((slot + 1) * step * 60_000), seconds=step * 60.0)
