from __future__ import annotations

from tests.ops.driver import Desk
from worqr import ops


def condemned(desk: Desk, *queues: str) -> None:
    desk.register("A", queues=queues)
    desk.client.delete(desk.g.worker("A"))
    desk.call(ops.condemn_worker(desk.g, "A", None))


def test_ends_the_sweep_and_leaves_nothing(desk: Desk) -> None:
    condemned(desk)
    assert desk.send(ops.forget_worker(desk.g, "A")) == [b"ok"]
    assert set(desk.state()) == {":counts", ":version"}
    with desk.nothing_changes():
        assert desk.send(ops.forget_worker(desk.g, "A")) == [b"ok"]


def test_refuses_while_a_queue_is_mapped(desk: Desk) -> None:
    condemned(desk, "Q1", "Q2")
    with desk.nothing_changes():
        assert sorted(desk.call(ops.forget_worker(desk.g, "A"))) == ["Q1", "Q2"]


def test_names_a_hundred_queues_at_most(desk: Desk) -> None:
    condemned(desk, *(f"Q{n}" for n in range(150)))
    assert len(set(desk.call(ops.forget_worker(desk.g, "A")))) == 100


def test_on_an_empty_database_nothing_is_made(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert desk.call(ops.forget_worker(desk.g, "A")) == []
    assert desk.state() == {}
