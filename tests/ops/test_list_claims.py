from __future__ import annotations

from tests.ops.driver import Desk
from worqr import ops


def test_by_worker_the_oldest_first_with_failures(desk: Desk) -> None:
    [first] = desk.hold("B", b"a")
    desk.retry("B", first)
    [again] = desk.take("B", 1)
    one, two = desk.hold("A", b"c", b"d")
    with desk.nothing_changes():
        assert desk.call(ops.list_claims(desk.q)) == [(one, "A", 0), (two, "A", 0), (again, "B", 1)]
        assert desk.call(ops.list_claims(desk.q, 1)) == [(one, "A", 0)]
        assert desk.call(ops.list_claims(desk.q, 2)) == [(one, "A", 0), (two, "A", 0)]


def test_of_one_that_is_being_swept_too(desk: Desk) -> None:
    held = desk.hold("A", b"a", b"b")
    desk.call(ops.fail_worker(desk.q, "A", 1))
    assert desk.call(ops.list_claims(desk.q)) == [(held[0], "A", 0)]


def test_on_an_empty_database_nothing_is_made(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert desk.send(ops.list_claims(desk.q)) == [b"ok"]
    assert desk.state() == {}
