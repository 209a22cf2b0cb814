from __future__ import annotations

import pytest

from tests.ops.driver import LEASE, Desk
from worqr import ops


def test_leaves_nothing_but_what_is_the_meshs(desk: Desk) -> None:
    desk.register("A")
    desk.beat("A", 1, lease_ms=LEASE)
    assert desk.send(ops.stop_worker(desk.g, "A")) == [b"ok"]
    assert set(desk.state()) == {":counts", ":version"}


def test_refuses_while_a_queue_is_mapped(desk: Desk) -> None:
    desk.register("A", queues=["Q1", "Q2"])
    with desk.nothing_changes():
        assert sorted(desk.call(ops.stop_worker(desk.g, "A"))) == ["Q1", "Q2"]
    for queue in ("Q1", "Q2"):
        desk.call(ops.unmap_work(desk.g, "A", queue))
    assert desk.call(ops.stop_worker(desk.g, "A")) == []


def test_names_a_hundred_queues_at_most(desk: Desk) -> None:
    desk.register("A", queues=[f"Q{n}" for n in range(150)])
    assert len(set(desk.call(ops.stop_worker(desk.g, "A")))) == 100


@pytest.mark.parametrize("holder", ["A", "B"])
def test_gives_up_its_own_lease_only(desk: Desk, holder: str) -> None:
    desk.register("A", "B")
    desk.beat(holder, 1, lease_ms=LEASE)
    desk.call(ops.stop_worker(desk.g, "A"))
    assert (":leader" in desk.state()) == (holder == "B")


def test_a_resend_finds_it_gone(desk: Desk) -> None:
    desk.register("A", "B")
    desk.call(ops.stop_worker(desk.g, "A"))
    with desk.nothing_changes():
        assert desk.send(ops.stop_worker(desk.g, "A")) == [b"gone"]
        assert desk.call(ops.stop_worker(desk.g, "A")) == []


def test_who_is_being_swept_is_the_sweepers(desk: Desk) -> None:
    desk.register("A", queues=["Q1"])
    desk.client.delete(desk.g.worker("A"))
    desk.call(ops.condemn_worker(desk.g, "A", None))
    with desk.nothing_changes():
        assert desk.send(ops.stop_worker(desk.g, "A")) == [b"gone"]


def test_on_an_empty_database_nothing_is_made(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert desk.send(ops.stop_worker(desk.g, "A")) == [b"gone"]
    assert desk.state() == {}
