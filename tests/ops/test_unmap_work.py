from __future__ import annotations

from tests.ops.driver import Desk
from worqr import ops


def test_takes_the_queue_from_the_map(desk: Desk) -> None:
    desk.register("A", queues=["Q1", "Q2"])
    before = desk.state()
    assert desk.send(ops.unmap_work(desk.g, "A", "Q1")) == [b"ok"]
    assert desk.state() == {**before, ":WorkMap:A": {"Q2"}}
    desk.call(ops.unmap_work(desk.g, "A", "Q2"))
    assert ":WorkMap:A" not in desk.state()


def test_a_resend_does_not_unmap_what_was_mapped_again(desk: Desk) -> None:
    desk.register("A", queues=["Q1"])
    call = ops.unmap_work(desk.g, "A", "Q1")
    desk.send(call)
    desk.client.sadd(desk.g.work_map("A"), "Q1")
    with desk.nothing_changes():
        assert desk.resend(call) == [b"ok"]


def test_a_late_copy_unmaps_nothing(desk: Desk) -> None:
    desk.register("A", queues=["Q1"])
    with desk.nothing_happens():
        assert desk.late(ops.unmap_work(desk.g, "A", "Q1")) == [b"late"]


def test_on_an_empty_database_nothing_is_made(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    desk.call(ops.unmap_work(desk.g, "A", "Q1"))
    assert desk.state() == {}
