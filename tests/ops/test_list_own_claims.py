from __future__ import annotations

from tests.ops.driver import Desk
from worqr import ops


def test_a_worker_is_told_what_it_holds_the_oldest_first(desk: Desk) -> None:
    held = desk.hold("A", b"a", b"b", b"c")
    desk.call(ops.finish_tasks(desk.q, "A", [held[1]]))
    with desk.nothing_changes():
        assert desk.call(ops.list_own_claims(desk.q, "A")) == [held[0], held[2]]


def test_nobody_is_told_of_anothers(desk: Desk) -> None:
    desk.hold("A", b"a")
    desk.enter("B")
    assert desk.call(ops.list_own_claims(desk.q, "B")) == []


def test_of_very_many_the_oldest_are_told(desk: Desk) -> None:
    held = [*desk.hold("A", *[b"x"] * 1000), *desk.hold("A", b"y")]
    assert desk.call(ops.list_own_claims(desk.q, "A")) == held[:1000]


def test_who_stands_outside_the_fence_is_told_so(desk: Desk) -> None:
    desk.hold("A", b"a")
    with desk.nothing_changes():
        assert desk.call(ops.list_own_claims(desk.q, "stranger")) is None


def test_on_an_empty_database_nothing_is_made(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert desk.send(ops.list_own_claims(desk.q, "A")) == [b"not_serving"]
    assert desk.state() == {}
