from __future__ import annotations

from tests.ops.driver import Desk, Expires
from worqr import ops


def test_notes_the_queue_for_a_registered_worker(desk: Desk) -> None:
    desk.register("A")
    before = desk.state()
    assert desk.send(ops.map_work(desk.g, "A", "Q ä")) == [b"ok"]
    name = "Q ä".encode().decode("latin-1")
    assert desk.state() == {**before, ":WorkMap:A": {name}, ":queues": Expires({name})}


def test_a_resend_and_a_late_copy_map_nothing_anew(desk: Desk) -> None:
    desk.register("A")
    call = ops.map_work(desk.g, "A", "Q1")
    desk.send(call)
    with desk.nothing_changes():
        assert desk.resend(call) == [b"ok"]
    number = desk.numbers[desk.g.base]
    desk.call(ops.unmap_work(desk.g, "A", "Q1"))
    with desk.nothing_changes():
        assert desk.send(call, number=number) == [b"late"]
    with desk.nothing_happens():
        assert desk.late(call) == [b"late"]


def test_the_dead_and_strangers_map_nothing(desk: Desk) -> None:
    desk.register("A")
    desk.client.delete(desk.g.worker("A"))
    desk.call(ops.condemn_worker(desk.g, "A", None))
    with desk.nothing_happens():
        assert desk.call(ops.map_work(desk.g, "A", "Q1")) == "dead"
        assert desk.call(ops.map_work(desk.g, "stranger", "Q1")) == "dead"


def test_on_an_empty_database_nothing_is_made(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert desk.call(ops.map_work(desk.g, "A", "Q1")) == "dead"
    assert desk.state() == {}
