from __future__ import annotations

from tests.ops.driver import Desk
from worqr import ops


def test_puts_it_among_the_dying_with_the_queue_it_stands_in(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert desk.send(ops.adopt_worker(desk.g, "A", "Q1")) == [b"ok"]
    assert desk.state() == {":Dying": {"A"}, ":WorkMap:A": {"Q1"}}
    with desk.nothing_changes():
        assert desk.send(ops.adopt_worker(desk.g, "A", "Q1")) == [b"ok"]


def test_who_is_registered_is_its_own_business(desk: Desk) -> None:
    desk.register("A")
    with desk.nothing_changes():
        assert desk.call(ops.adopt_worker(desk.g, "A", "Q1")) == "alive"


def test_a_copy_after_the_sweep_makes_one_more_sweep_that_finds_nothing(desk: Desk) -> None:
    desk.hold("A", b"a")
    for _ in range(2):
        desk.call(ops.adopt_worker(desk.g, "A", "Q1"))
        desk.call(ops.fail_worker(desk.q, "A"))
        desk.call(ops.unmap_work(desk.g, "A", "Q1"))
        assert desk.call(ops.forget_worker(desk.g, "A")) == []
    assert desk.waiting() == [b"a"]
    assert not any("A" in name for name in desk.state())
