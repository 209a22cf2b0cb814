from __future__ import annotations

from tests.ops.driver import Desk, claim
from worqr import ops


def test_those_whose_cancellation_is_under_way(desk: Desk) -> None:
    one, two, three = desk.hold("A", b"x", b"x", b"y")
    desk.call(ops.cancel_task(desk.q, b"x"))
    desk.call(ops.finish_tasks(desk.q, "A", [one]))
    with desk.nothing_changes():
        assert desk.call(ops.list_marks(desk.q, [one, two, three, claim(9)])) == [two]
        assert desk.call(ops.list_marks(desk.q, [])) == []


def test_on_an_empty_database_nothing_is_made(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert desk.send(ops.list_marks(desk.q, [claim(1)])) == [b"ok"]
    assert desk.state() == {}
