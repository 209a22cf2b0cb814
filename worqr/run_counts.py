"""`RunCounts`: how runs ended, how long they took, and how long their jobs had waited. Pure: no clock but the times it is given.

A worker counts its runs here, and adds the counts to the totals of the queue on the server, one field for each count. Durations
are counted in buckets. So quantiles of a whole mesh can be computed from the sum of the counts of all workers.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from worqr.stored_values import whole

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

    def add_returned(self, began: Sequence[float], now: float) -> None:
        """Count runs that returned, with their run times.

        Args:
            began: when each of them was claimed; runs of one reply have the same time.
            now: when they ended, by the same clock.
        """
        counts = self._counts
        counts["ok"] += len(began)
        for start, n in Counter(began).items() if len(began) > 1 else ((began[0], 1),):
            took = now - start
            counts[RUN_FIELDS[run_bucket(took)]] += n
            self._run_seconds += took * n

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
