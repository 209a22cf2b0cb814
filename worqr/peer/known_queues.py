"""`KnownQueues`: which queues the leader's next scan reads. Pure: no I/O, and no clock except the times it is given.

Each scan reads the queues that may need the leader soon: served queues, queues with scheduled or deleted tasks, and recently
noted queues. The other names take turns, a few per scan, so that the cost does not grow with the number of names. A name may be
forgotten when it was noted an hour ago and its queue is empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

from worqr.ops import NOTE_EVERY, UNUSED_MS, Inspected

FRESH = 30.0
"""Seconds for which each scan reads a name after it was noted, because a worker notes a queue before it serves it."""
FRESH_AT_ONCE = 2000
"""Limit of such names per scan, so that a scan ends soon. If more names were noted, they take turns."""
UNSEEN_AT_ONCE = 2000
QUIET_AT_ONCE = 200
MAX_WAITING = 100
"""Limit of queues that are announced to heartbeats."""


class KnownQueues:
    """The names of queues that the leader has read.

    Attributes:
        noted: for each name, the server's time in ms at which it was noted last.
    """

    def __init__(self) -> None:
        self.noted: dict[str, float] = {}
        self._urgent: dict[str, None] = {}
        self._fresh: dict[str, float] = {}
        self._unseen: dict[str, None] = {}
        self._rotation: Iterator[str] = iter(())
        self._announced = 0

    @property
    def unseen(self) -> int:
        """How many names have not been read yet."""
        return len(self._unseen)

    def note(self, name: str, noted_ms: float, server_ms: float, now: float) -> None:
        """Store that `name` was noted at `noted_ms`."""
        if self.noted.get(name) == noted_ms:
            return
        self.noted[name] = noted_ms
        self._unseen[name] = None
        if noted_ms > server_ms - FRESH * 1000:
            self._fresh[name] = now + FRESH

    def rescan(self, server_ms: float) -> None:
        """Read all queues in use once more, because hints about due jobs may have been missed."""
        since = server_ms - (NOTE_EVERY + 60) * 1000
        self._unseen.update((name, None) for name, noted_ms in self.noted.items() if noted_ms >= since)

    def reread(self) -> None:
        """Read all queues once more, soon."""
        self._unseen.update(dict.fromkeys(self.noted))

    def next_scan(self, now: float) -> list[str]:
        """Return the names that the next scan reads."""
        for name in [name for name, until in self._fresh.items() if until < now]:
            del self._fresh[name]
        fresh = list(islice(self._fresh, FRESH_AT_ONCE))
        if len(fresh) == FRESH_AT_ONCE:
            for name in fresh:
                self._fresh[name] = self._fresh.pop(name)
        names = {**self._urgent, **dict.fromkeys(fresh), **dict.fromkeys(islice(self._unseen, UNSEEN_AT_ONCE))}
        left = QUIET_AT_ONCE
        for again in (False, True):  # the end of this rotation, then the beginning of the next
            if again:
                self._rotation = iter(list(self.noted))
            for name in self._rotation:
                if name in self.noted and name not in names:
                    names[name] = None
                    left -= 1
                    if not left:
                        return list(names)
        return list(names)

    def mark_read(self, name: str) -> None:
        """Store that `name` was read, with or without success."""
        self._unseen.pop(name, None)

    def record(self, name: str, queue: Inspected) -> None:
        """Store what the scan found in a queue."""
        if queue.workers or queue.running or queue.due or queue.trash or queue.batches or queue.needs_relay:
            self._urgent[name] = None
        else:
            self._urgent.pop(name, None)

    def unused(self, found: Mapping[str, Inspected], server_ms: float) -> list[str]:
        """Return the names of those `found` that may be forgotten."""
        latest = server_ms - UNUSED_MS
        return [name for name, queue in found.items() if self.noted.get(name, 0) <= latest and is_empty(queue)]

    def forget(self, names: Iterable[str]) -> None:
        """Forget these names."""
        for name in names:
            for kept in (self.noted, self._urgent, self._fresh, self._unseen):
                kept.pop(name, None)

    def waiting(self, found: Mapping[str, Inspected]) -> list[str]:
        """Return the queues that have workers and tasks that may start, because a wake-up may have been lost. If there are many,
        they take turns.

        If the limit permits, include shards that have tasks and no workers. A peer that serves other shards of the queue logs a
        warning.
        """
        names = sorted(name for name, q in found.items() if q.waiting and q.paused is None and q.room != 0)
        served = [name for name in names if found[name].workers]
        if len(served) <= MAX_WAITING:
            return (served + [name for name in names if name.startswith("{") and not found[name].workers])[:MAX_WAITING]
        start = self._announced % len(served)
        self._announced = start + MAX_WAITING
        return (served + served)[start : start + MAX_WAITING]


def is_empty(queue: Inspected) -> bool:
    """Return True if the queue is empty, no worker serves it, and no operator has paused or limited it."""
    holds = queue.waiting or queue.due or queue.running or queue.failed or queue.broken or queue.blocked or queue.trash
    holds = holds or queue.batches or queue.needs_relay
    return not (holds or queue.workers or queue.paused is not None or queue.overridden or queue.lane_rules)
