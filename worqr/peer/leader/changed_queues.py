"""`ChangedQueues`: decides which queues get a new record in their history. No input or output.

A queue gets a record at most once a minute, and only if its totals or the numbers of its tasks have changed. Each queue has a
second of its own in every minute, so that the records of all queues are spread over it. A queue that changes after a rest gets
its record at once. After the last change, one more record follows, because workers report run times a second late.
"""

from __future__ import annotations

import math
from binascii import crc32
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from worqr.history_records import FROM_ZERO, Record, state_of
from worqr.ops import Inspected
from worqr.stored_values import as_bytes

SPREAD: Final = 48
"""Seconds of each minute in which records are due. A late scan in the rest of the minute is not too late."""
HALF_LIFE: Final = 5
"""Minutes after which the activity of a queue counts half."""


class _Seen:
    """What the scans saw of one queue.

    Attributes:
        since: for its next record: the minute in or after which its totals changed.
        written: the minute of its last record; 0: this leader has stored none.
    """

    __slots__ = ("_active", "_activity", "_known", "_looked", "_state", "_total", "_trailing", "since", "written")

    def __init__(self, total: int) -> None:
        self.since: int = 0
        self.written: int = 0
        self._looked: bool = False
        self._known: int | None = None
        self._state: int = 0
        self._trailing: bool = False
        self._total: int = total
        self._activity: float = 0.0
        self._active: int = 0

    def look(self, state: int, total: int, minute: int, *, at_rest: bool) -> None:
        """Store what a scan has seen. `at_rest`: the queue is not in use, so the first scan need not lead to a record."""
        if not self.written and not total:
            self._known, self.since = state, minute | FROM_ZERO
        elif not self._looked and at_rest:
            self._known = state
        elif state == self._known and self.written:
            self.since = minute
        if total != self._total:
            self._activity = self.activity(minute) + max(0, total - self._total)
            self._total, self._active = total, minute
        self._state, self._looked = state, True

    def is_due(self, minute: int, second: int, own_second: int) -> bool:
        """Return True if the queue should get a record now."""
        if minute == self.written or not (self._trailing or self._state != self._known):
            return False
        return second >= own_second or self.written < minute - 1

    def store(self, state: int, minute: int) -> None:
        """A record with this state was stored."""
        self._trailing = state != self._known
        self._known = state
        self.written = self.since = minute

    def begin(self) -> None:
        """The queue needs a first record of this leader."""
        self._known = None

    def activity(self, minute: int) -> float:
        """Return how much has happened in the queue; what happened earlier counts less."""
        return self._activity * math.pow(0.5, max(0, minute - self._active) / HALF_LIFE)


class ChangedQueues:
    """The queues that scans have seen. Changed only in the loop.

    Attributes:
        minute: the server's time at the last scan, in minutes since 1970.
    """

    def __init__(self) -> None:
        self.minute: int = 0
        self._seen: dict[str, _Seen] = {}
        self._due: dict[str, float | None] = {}

    def __bool__(self) -> bool:
        return bool(self._due)

    def clear(self) -> None:
        """Forget everything: another leader may have stored records since."""
        self._seen.clear()
        self._due.clear()

    def forget(self, names: Iterable[str]) -> None:
        """Forget queues of which the mesh has forgotten the names."""
        for name in names:
            self._seen.pop(name, None)
            self._due.pop(name, None)

    def record(
        self, found: Mapping[str, Inspected], server_ms: int, age: Callable[[str, Inspected], float | None]
    ) -> None:
        """Store what a scan has found.

        Args:
            found: the queues that the scan has read.
            server_ms: the server's time.
            age: estimates for how many seconds the oldest task has waited.
        """
        self.minute, ms = divmod(server_ms, 60_000)
        for name, queue in found.items():
            numbers = state_of(
                queue.counts, *(queue.waiting, queue.due, queue.running, queue.failed, len(queue.workers))
            )
            total = sum(queue.counts.values())
            if (seen := self._seen.get(name)) is None:
                seen = self._seen[name] = _Seen(total)
            seen.look(hash(numbers), total, self.minute, at_rest=not (queue.waiting or queue.workers))
            if seen.is_due(self.minute, ms // 1000, crc32(as_bytes(name)) % SPREAD):
                self._due[name] = age(name, queue)

    def take_due(self) -> dict[str, float | None]:
        """Return the queues that should get a record now, the most active first, with the ages of their oldest tasks."""
        due, self._due = self._due, {}
        return dict(sorted(due.items(), key=lambda item: -self.activity(item[0])))

    def since(self, name: str) -> int:
        """Return the minute in or after which the totals of the queue have changed, as a record has it."""
        seen = self._seen.get(name)
        return 0 if seen is None else seen.since

    def written(self, name: str) -> int:
        """Return the minute of the last record that this leader has stored of the queue; 0 if there is none."""
        seen = self._seen.get(name)
        return 0 if seen is None else seen.written

    def store(self, name: str, record: Record) -> None:
        """A record of the queue was stored."""
        if (seen := self._seen.get(name)) is not None:
            seen.store(hash(record.state), record.minute)

    def begin(self, names: Iterable[str]) -> None:
        """These queues have a history, which an earlier leader has written: store a record of each, for the differences."""
        for name in names:
            if (seen := self._seen.get(name)) is not None and not seen.written:
                seen.begin()

    def activity(self, name: str) -> float:
        """Return how much has happened in the queue lately."""
        seen = self._seen.get(name)
        return 0.0 if seen is None else seen.activity(self.minute)
