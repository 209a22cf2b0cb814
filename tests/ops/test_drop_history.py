from __future__ import annotations

from tests.ops.driver import Desk
from tests.ops.test_sample_queue import busy, sample
from worqr import ops


def test_both_rings_are_deleted_and_nothing_else(desk: Desk) -> None:
    busy(desk)
    before = desk.state()
    sample(desk)
    assert desk.send(ops.drop_history(desk.q)) == [b"ok"]
    assert desk.state() == before
    with desk.nothing_changes():
        assert desk.call(ops.drop_history(desk.q)) == "ok"


def test_an_empty_database_stays_empty(desk: Desk) -> None:
    desk.wipe()
    desk.call(ops.drop_history(desk.q))
    assert desk.state() == {}
