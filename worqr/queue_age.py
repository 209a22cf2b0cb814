"""`QueuePlaces`: estimates for how long the oldest waiting task has waited. Pure: no clock except the times it is given.

The server does not record when a plain task was enqueued. But it counts the tasks that workers took. The number of tasks taken
plus the number that wait is the place of the newest task. Samples of that number tell when each place was filled. The task at the
front has the place after those that were taken, so its age follows. Producers need no help from worqr.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from operator import itemgetter
from typing import Final

MAX_SAMPLES: Final = 240
"""Samples of one queue. If there are more, every second one of the older half is dropped, so the older ones are less exact."""

_ENDS: Final = ("finished", "retried", "failed", "broken", "stopped", "stalled", "dropped")
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
