from __future__ import annotations

from tests.ops.driver import Desk
from tests.ops.schedules import DEF, T, declared, now, told
from worqr import ops

DEFINED = {"def s": DEF.decode("latin-1"), "seen s": str(T)}


def test_notes_that_it_is_paused_and_nothing_else(desk: Desk) -> None:
    declared(desk, owed=T)
    before = desk.state()
    assert desk.send(ops.pause_schedule(desk.g, "s", paused=True)) == [b"ok"]
    after = desk.state()
    assert after[":schedules"].value == {**before[":schedules"].value, "paused s": "1"}
    assert {**after, ":schedules": None} == {**before, ":schedules": None}


def test_let_go_on_it_counts_from_now_and_owes_nothing(desk: Desk) -> None:
    declared(desk, paused="1", owed=T, next=T + 5, fired=T - 5)
    since = now(desk)
    assert desk.call(ops.pause_schedule(desk.g, "s", paused=False))
    assert told(desk, since)[":schedules"].value == {**DEFINED, "last s": "now", "fired s": str(T - 5)}


def test_what_is_not_paused_is_not_moved_by_letting_it_go_on(desk: Desk) -> None:
    declared(desk, owed=T, next=T + 5)
    with desk.nothing_happens():
        assert desk.call(ops.pause_schedule(desk.g, "s", paused=False))


def test_twice_is_harmless(desk: Desk) -> None:
    declared(desk)
    desk.call(ops.pause_schedule(desk.g, "s", paused=True))
    with desk.nothing_happens():
        assert desk.call(ops.pause_schedule(desk.g, "s", paused=True))


def test_an_unknown_one_is_unknown_also_on_an_empty_database(desk: Desk) -> None:
    with desk.nothing_happens():
        assert not desk.call(ops.pause_schedule(desk.g, "s", paused=True))
    declared(desk)
    with desk.nothing_happens():
        assert not desk.call(ops.pause_schedule(desk.g, "S", paused=True))


def test_a_resend_and_a_late_copy_undo_nothing(desk: Desk) -> None:
    declared(desk)
    call = ops.pause_schedule(desk.g, "s", paused=True)
    desk.send(call)
    number = desk.numbers[desk.g.base]
    desk.call(ops.pause_schedule(desk.g, "s", paused=False))
    with desk.nothing_changes():
        assert desk.send(call, number=number) == [b"late"]
    desk.send(call)
    desk.client.hdel(desk.g.schedules, "paused s")
    with desk.nothing_changes():
        assert desk.resend(call) == [b"ok"]
    with desk.nothing_happens():
        assert desk.late(call) == [b"late"]
