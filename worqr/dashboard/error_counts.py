"""Counts the records of dead-letter queues by the type of their error: some thousands in one look, and the rest in the next ones.

Nothing is counted in the background. An open page looks once a second, and a reload looks, too. All viewers share one count.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from worqr import ops
from worqr.dashboard.visit import Visit
from worqr.inside import client_of
from worqr.keys import QueueKeys
from worqr.ops import MAX_ITEMS

AT_ONCE: Final = 4
"""Requests of one look, for 1,000 records each. The server takes about 1.4 ms for one."""
LASTS: Final = 30.0
"""Seconds after which records are counted anew."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the next records of a shard are."""

    queue: str
    keys: QueueKeys
    rank: int


@dataclass(frozen=True, slots=True)
class ErrorCounts:
    """How many records of which type of error were counted so far, by queue. `left` is empty when all were."""

    counts: Mapping[str, Mapping[str, int]]
    left: Sequence[_Place]
    began: float

    @property
    def read(self) -> int:
        """The number of records that were counted."""
        return sum(sum(each.values()) for each in self.counts.values())

    def of_queue(self, queue: str) -> dict[str, int]:
        """Return the counts of one queue, the most frequent type first."""
        return dict(sorted(self.counts.get(queue, {}).items(), key=lambda each: (-each[1], each[0])))

    def text(self, total: int) -> str:
        """Return how many of the records were counted."""
        return f"{self.read:,} of {max(total, self.read):,}"


async def read_counts(visit: Visit, queues: Sequence[str], which: Literal["failed", "broken"]) -> ErrorCounts:
    """Count some more records of these queues. Return what is known so far."""

    async def read(before: ErrorCounts | None) -> ErrorCounts:
        now = time.monotonic()
        if before is None or (not before.left and now - before.began > LASTS):
            before = ErrorCounts({}, await _first_places(visit, queues), now)
        return await _counted_on(visit, before, which) if before.left else before

    return await visit.looks.get(("errors", which, tuple(sorted(queues))), read)


async def _first_places(visit: Visit, queues: Sequence[str]) -> list[_Place]:
    sharding, prefix = client_of(visit.mesh).sharding, visit.mesh.prefix
    shards = {name: await sharding.shards(QueueKeys.of(prefix, name), declare=False) for name in queues}
    return [_Place(name, keys, 0) for name, found in shards.items() for keys in found]


async def _counted_on(visit: Visit, before: ErrorCounts, which: Literal["failed", "broken"]) -> ErrorCounts:
    """Send the next requests, in one batch."""
    first = before.left[:AT_ONCE]
    steps = -(-AT_ONCE // len(first))
    pages = [(place, place.rank + step * MAX_ITEMS) for step in range(steps) for place in first][:AT_ONCE]
    link = client_of(visit.mesh).link
    replies = await link.call_all([ops.count_errors(place.keys, which, rank) for place, rank in pages])
    counts = {name: Counter(each) for name, each in before.counts.items()}
    ends, done = {place: place.rank for place in first}, set[_Place]()
    for (place, rank), (more, numbers) in zip(pages, replies, strict=True):
        counts.setdefault(place.queue, Counter()).update(numbers)
        ends[place] = max(ends[place], rank + MAX_ITEMS)
        if not more:
            done.add(place)
    left = [_Place(place.queue, place.keys, end) for place, end in ends.items() if place not in done]
    return ErrorCounts(counts, [*left, *before.left[AT_ONCE:]], before.began)
