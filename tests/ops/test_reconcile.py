from __future__ import annotations

from tests.ops.driver import Desk, claim
from worqr import ops


def test_tells_the_marked_ones_and_those_that_are_gone(desk: Desk) -> None:
    one, two, three = desk.hold("A", b"a", b"b", b"c")
    desk.call(ops.finish_tasks(desk.q, "A", [three]))
    desk.call(ops.cancel_task(desk.q, b"b"))
    with desk.nothing_changes():
        assert desk.call(ops.reconcile(desk.q, "A", [one, two, three, claim(9)])) == ([two], [three, claim(9)])
        assert desk.call(ops.reconcile(desk.q, "A")) == ([two], [])


def test_several_marks_come_in_the_order_of_nobody_but_all_come(desk: Desk) -> None:
    held = desk.hold("A", *[b"x"] * 600)
    desk.call(ops.cancel_task(desk.q, b"x"))
    reconciled = desk.call(ops.reconcile(desk.q, "A", [claim(9999)]))
    assert reconciled is not None
    assert (sorted(reconciled[0]), reconciled[1]) == (held, [claim(9999)])


def test_a_mark_on_anothers_claim_is_not_told(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.enter("B")
    desk.call(ops.cancel_task(desk.q, b"a"))
    assert desk.call(ops.reconcile(desk.q, "B", [held])) == ([], [held])


def test_who_stands_outside_the_fence_is_told_so(desk: Desk) -> None:
    held = desk.hold("A", b"a", b"b")
    with desk.nothing_changes():
        assert desk.call(ops.reconcile(desk.q, "stranger", held)) is None
    assert desk.call(ops.fail_worker(desk.q, "A", 1)).more
    assert desk.call(ops.reconcile(desk.q, "A", held)) is None


def test_on_an_empty_database_nothing_is_made(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert desk.send(ops.reconcile(desk.q, "A", [claim(1)])) == [b"not_serving"]
    assert desk.state() == {}
