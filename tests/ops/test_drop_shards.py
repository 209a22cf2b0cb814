from __future__ import annotations

from tests.ops.driver import Desk
from worqr import ops


def test_forgets_the_number_of_one_queue(desk: Desk) -> None:
    desk.call(ops.declare_shards(desk.g, {"hot": 8, "warm": 2}))
    assert desk.send(ops.drop_shards(desk.g, "hot", 8)) == [b"ok"]
    assert desk.state(":counts") == {":shards": {"warm": "2"}}
    desk.call(ops.drop_shards(desk.g, "warm", 2))
    assert desk.state(":counts") == {}


def test_a_number_that_is_not_the_known_one_stays(desk: Desk) -> None:
    desk.call(ops.declare_shards(desk.g, {"hot": 8}))
    before = desk.state()
    assert desk.call(ops.drop_shards(desk.g, "hot", 4)) == "changed"
    assert desk.call(ops.drop_shards(desk.g, "cold", 8)) == "changed"
    assert desk.state() == before


def test_a_resend_and_a_late_copy_drop_nothing_that_was_declared_since(desk: Desk) -> None:
    desk.call(ops.declare_shards(desk.g, {"hot": 8}))
    call = ops.drop_shards(desk.g, "hot", 8)
    desk.send(call)
    number = desk.numbers[desk.g.base]
    desk.call(ops.declare_shards(desk.g, {"hot": 8}))
    with desk.nothing_changes():
        assert desk.send(call, number=number) in ([b"ok"], [b"late"])
    with desk.nothing_happens():
        assert desk.late(call) == [b"late"]


def test_on_an_empty_database_there_is_nothing_to_forget(desk: Desk) -> None:
    assert desk.call(ops.drop_shards(desk.g, "hot", 8)) == "changed"
    assert desk.state(":counts") == {}
