from __future__ import annotations

from tests.ops.driver import PAST, Desk
from worqr import ops
from worqr.ops import Held


def held_by(worker: str, claim: int, *, failures: int = 0) -> Held:
    """A claim on a raw task, or on one that became a job when it failed."""
    return Held(claim, worker, failures, None, "", None)


def test_by_worker_the_oldest_first_with_failures(desk: Desk) -> None:
    [first] = desk.hold("B", b"a")
    desk.retry("B", first)
    [again] = desk.take("B", 1)
    one, two = desk.hold("A", b"c", b"d")
    with desk.nothing_changes():
        assert desk.call(ops.list_claims(desk.q)) == [
            held_by("A", one),
            held_by("A", two),
            held_by("B", again, failures=1),
        ]
        assert desk.call(ops.list_claims(desk.q, 1)) == [held_by("A", one)]
        assert desk.call(ops.list_claims(desk.q, 2)) == [held_by("A", one), held_by("A", two)]


def test_of_one_that_is_being_swept_too(desk: Desk) -> None:
    held = desk.hold("A", b"a", b"b")
    desk.call(ops.fail_worker(desk.q, "A", 1))
    assert desk.call(ops.list_claims(desk.q)) == [held_by("A", held[0])]


def test_on_an_empty_database_nothing_is_made(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert desk.send(ops.list_claims(desk.q)) == [b"ok"]
    assert desk.state() == {}


def test_of_a_job_with_its_time_and_what_it_says(desk: Desk) -> None:
    held = desk.run("A", "x")
    assert desk.call(ops.list_claims(desk.q)) == [Held(held, "A", 0, None, "", PAST)]
    desk.call(ops.note_progress(desk.q, "A", [(held, 0.5, "half")]))
    with desk.nothing_changes():
        assert desk.call(ops.list_claims(desk.q)) == [Held(held, "A", 0, 0.5, "half", PAST)]
