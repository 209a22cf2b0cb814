from __future__ import annotations

from tests.ops.driver import Desk
from worqr import ops


def test_the_first_who_says_so_decides(desk: Desk) -> None:
    assert desk.send(ops.declare_shards(desk.g, {"hot": 8, "b ä": 2})) == [b"ok", b"8", b"2"]
    name = "b ä".encode().decode("latin-1")
    assert desk.state(":counts") == {":shards": {"hot": "8", name: "2"}}
    before = desk.state()
    assert desk.call(ops.declare_shards(desk.g, {"b ä": 3, "hot": 8})) == {"b ä": 2, "hot": 8}
    assert desk.state() == before
    assert desk.call(ops.declare_shards(desk.g, {"hot": 4, "new": 4})) == {"hot": 8, "new": 4}
    assert desk.state(":counts") == {":shards": {"hot": "8", name: "2", "new": "4"}}


def test_a_resend_and_a_late_copy_declare_nothing_anew(desk: Desk) -> None:
    call = ops.declare_shards(desk.g, {"hot": 8})
    desk.send(call)
    with desk.nothing_changes():
        assert desk.resend(call) == [b"ok", b"8"]
    number = desk.numbers[desk.g.base]
    desk.call(ops.drop_shards(desk.g, "hot", 8))
    with desk.nothing_changes():
        assert desk.send(call, number=number) == [b"late"]
    with desk.nothing_happens():
        assert desk.late(call) == [b"late"]


def test_nothing_declared_is_nothing_noted(desk: Desk) -> None:
    assert desk.call(ops.declare_shards(desk.g, {})) == {}
    assert desk.state(":counts") == {}


def test_as_many_as_an_application_may_have(desk: Desk) -> None:
    many = {f"q{n}": 2 + n % 7 for n in range(2000)}
    assert desk.call(ops.declare_shards(desk.g, many)) == many
    assert desk.call(ops.list_shards(desk.g)) == many
