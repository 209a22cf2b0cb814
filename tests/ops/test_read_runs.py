from __future__ import annotations

from tests.ops.driver import Desk
from worqr import ops


def test_returns_the_totals_and_changes_nothing(desk: Desk) -> None:
    desk.enter("A")
    desk.call(ops.note_runs(desk.q, "A", 1, {"ok": 2, "r3": 2, "rs": 9}))
    with desk.nothing_changes():
        for _ in range(2):
            assert desk.send(ops.read_runs(desk.q)) == [b"ok", [b"ok", b"2", b"r3", b"2", b"rs", b"9"]]
        assert desk.call(ops.read_runs(desk.q)) == {"ok": 2, "r3": 2, "rs": 9}


def test_a_queue_without_runs_has_none(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert desk.call(ops.read_runs(desk.q)) == {}
    assert desk.state() == {}


def test_a_value_of_another_application_counts_as_none(desk: Desk) -> None:
    desk.client.set(desk.q.runs, "mine")
    with desk.nothing_changes():
        assert desk.call(ops.read_runs(desk.q)) == {}
