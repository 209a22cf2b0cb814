"""Which queues get a record in their history, and when."""

from __future__ import annotations

from binascii import crc32

import pytest

from worqr.history_records import COUNTERS, FROM_ZERO, Record
from worqr.ops import Inspected
from worqr.peer.leader.scanner import SPREAD, ChangedQueues

T = 29_000_000
OWN = crc32(b"Q1") % SPREAD
"""The second of each minute in which the record of Q1 is due."""


def found(finished: int = 0, *, waiting: int = 0, workers: int = 1, running: int = 0) -> Inspected:
    counts = {"enqueued": finished, "claimed": finished, "finished": finished} if finished else {}
    names = [f"W{n}" for n in range(workers)]
    return Inspected(waiting, 0, running, 0, 0, None, False, names, counts, 0, None, None)


def record_of(queue: Inspected, minute: int) -> Record:
    totals = tuple(queue.counts.get(name, 0) for name in COUNTERS)
    gauges = (queue.waiting, queue.due, queue.running, queue.failed)
    return Record(minute * 60_000, 0, len(queue.workers), None, gauges, (*totals, 0, 0), (0,) * 20, (0,) * 16)


class Mesh:
    """A leader that scans Q1, and stores each record that is due."""

    def __init__(self) -> None:
        self.changed = ChangedQueues()
        self.since: list[int] = []

    def scan(self, queue: Inspected, minute: float, *, stored: Inspected | None = None, fails: bool = False) -> bool:
        """True if a record was due. `stored`: the queue when it was stored."""
        self.changed.record({"Q1": queue}, round(minute * 60_000), lambda *_: None)
        due = self.changed.take_due()
        for name in due:
            self.since.append(self.changed.since(name) - T if self.changed.since(name) else 0)
            if not fails:
                self.changed.store(name, record_of(stored or queue, int(minute)))
        return bool(due)


def at(second: float) -> float:
    return second / 60


def test_a_queue_that_was_never_used_gets_no_record() -> None:
    mesh = Mesh()
    assert not any(mesh.scan(found(workers=n % 3), T + n / 2) for n in range(10))


def test_the_first_record_of_a_new_queue_says_that_its_totals_were_zero() -> None:
    mesh = Mesh()
    mesh.scan(found(), T + 1)
    assert mesh.scan(found(5), T + 1.5)
    assert mesh.since == [1 | FROM_ZERO]


@pytest.mark.parametrize("queue", [found(5), found(5, waiting=1, workers=0), found(5, running=1)])
def test_a_queue_in_use_when_it_was_first_seen_gets_a_record_of_unknown_differences(queue: Inspected) -> None:
    mesh = Mesh()
    assert mesh.scan(queue, T + 1)
    assert mesh.since == [0]


def test_a_queue_at_rest_when_it_was_first_seen_gets_none_until_it_changes() -> None:
    mesh = Mesh()
    assert not any(mesh.scan(found(5, workers=0), T + n) for n in range(5))
    assert mesh.scan(found(6, workers=0), T + 5)
    assert mesh.since == [0]


def test_a_busy_queue_gets_one_record_a_minute_in_its_own_second() -> None:
    mesh = Mesh()
    mesh.scan(found(), T)
    times = [(n, mesh.scan(found(n + 1), T + at(3 * n))) for n in range(100)]
    first, *later = [n for n, due in times if due]
    assert first == 0
    assert len(later) == 4 or OWN < 3  # minutes 1 to 4
    for n in later:
        assert OWN <= (3 * n) % 60 < OWN + 3
    assert len({3 * n // 60 for n in [first, *later]}) == len([first, *later])


def test_after_the_last_change_one_more_record_follows_and_then_none() -> None:
    mesh = Mesh()
    mesh.scan(found(), T)
    assert mesh.scan(found(5), T + at(3))
    due = [n for n in range(1, 400) if mesh.scan(found(5), T + at(3 + 3 * n))]
    assert len(due) == 1
    assert 60 <= 3 + 3 * due[0] < 120


def test_a_change_after_a_rest_is_recorded_at_once_with_the_minute_until_which_it_rested() -> None:
    mesh = Mesh()
    mesh.scan(found(), T)
    mesh.scan(found(5), T + at(3))
    for n in range(200):
        mesh.scan(found(5), T + at(6 + 3 * n))
    assert mesh.scan(found(6), T + 15)
    assert mesh.since[-1] == 10  # the last scan before was at T + 10:03


def test_changes_between_the_scan_and_the_record_are_seen_by_the_next_scan() -> None:
    mesh = Mesh()
    mesh.scan(found(), T)
    mesh.scan(found(5), T + at(1), stored=found(8))
    assert mesh.scan(found(8), T + 2)  # it follows the last change
    assert not mesh.scan(found(8), T + 4)
    mesh.scan(found(9), T + 6, stored=found(10))
    mesh.scan(found(10), T + 8)
    assert not mesh.scan(found(10), T + 10)


def test_a_record_that_could_not_be_stored_is_due_at_the_next_scan() -> None:
    mesh = Mesh()
    mesh.scan(found(), T)
    assert mesh.scan(found(5), T + at(3), fails=True)
    assert mesh.scan(found(5), T + at(6))
    assert mesh.since == [FROM_ZERO, FROM_ZERO]


@pytest.mark.parametrize("other", [found(5, waiting=1), found(5, workers=2), found(5, running=1)])
def test_a_change_of_other_numbers_is_recorded_too(other: Inspected) -> None:
    mesh = Mesh()
    mesh.scan(found(), T)
    mesh.scan(found(5), T + at(3))
    assert mesh.scan(found(5), T + 1.9)
    assert not mesh.scan(found(5), T + 5)
    assert mesh.scan(other, T + 6)


def test_queues_that_an_earlier_leader_has_recorded_get_a_record_at_once() -> None:
    mesh = Mesh()
    assert not mesh.scan(found(5, workers=0), T)
    mesh.changed.begin(["Q1", "gone"])
    assert mesh.scan(found(5, workers=0), T + at(3))
    assert mesh.since == [0]
    mesh.changed.begin(["Q1"])
    assert not mesh.scan(found(5, workers=0), T + at(6))


def test_what_was_cleared_or_forgotten_is_new_again() -> None:
    mesh = Mesh()
    mesh.scan(found(5, running=1), T)
    mesh.changed.forget(["Q1", "nothing"])
    assert mesh.scan(found(5, running=1), T + at(3))
    mesh.changed.clear()
    assert mesh.scan(found(5, running=1), T + at(6))
    assert mesh.changed.since("nothing") == mesh.changed.written("nothing") == mesh.changed.activity("nothing") == 0


def test_the_most_active_queues_come_first_and_activity_fades() -> None:
    changed = ChangedQueues()
    changed.record({"a": found(1), "b": found(1)}, T * 60_000, lambda *_: None)
    changed.record({"a": found(10), "b": found(90)}, T * 60_000 + 3000, lambda *_: None)
    assert list(changed.take_due()) == ["b", "a"]
    before = changed.activity("b")
    changed.record({"a": found(60), "b": found(90)}, (T + 20) * 60_000, lambda *_: None)
    assert changed.activity("b") == pytest.approx(before / 16)
    assert changed.activity("a") > changed.activity("b")


def test_after_the_servers_clock_was_set_back_records_go_on() -> None:
    mesh, early = Mesh(), T - 5_000_000
    mesh.scan(found(), T)
    mesh.scan(found(5), T + at(3))
    assert sum([mesh.scan(found(6 + n), early + at(3 * n)) for n in range(20)]) == 1
    assert sum([mesh.scan(found(50 + n), early + 1 + at(3 * n)) for n in range(20)]) == 1


def test_the_age_of_the_oldest_task_is_that_of_the_scan() -> None:
    changed = ChangedQueues()
    changed.record({"Q1": found(5, waiting=2)}, T * 60_000, lambda name, queue: len(name) + queue.waiting)
    assert bool(changed)
    assert changed.take_due() == {"Q1": 4}
    assert not changed
