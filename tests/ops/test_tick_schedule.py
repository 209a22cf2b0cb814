from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.ops.driver import Desk, Expires
from tests.ops.schedules import DEF, OTHER, T, declare, declared, row
from worqr import ops
from worqr.call import Call
from worqr.ops import ScheduleRow


def tick(desk: Desk, was: ScheduleRow, **more: Any) -> Call[str]:
    return ops.tick_schedule(desk.g, was, **{"last": T + 1000, "next": T + 2000, "owed": (), "fired": None, **more})


def test_notes_how_far_it_got(desk: Desk) -> None:
    was = declared(desk)
    before = desk.state()
    assert desk.send(tick(desk, was, owed=(T, T + 1000), fired=T)) == [b"ok"]
    fields = {
        "def s": DEF.decode("latin-1"),
        "seen s": str(T),
        "last s": str(T + 1000),
        "next s": str(T + 2000),
        "owed s": f"{T} {T + 1000}",
        "fired s": str(T),
    }
    assert desk.state() == {**before, ":schedules": Expires(fields)}


def test_what_is_owed_no_more_goes_and_what_was_fired_before_stays(desk: Desk) -> None:
    was = declared(desk, owed=f"{T}", fired=T - 1)
    assert desk.call(tick(desk, was)) == "ok"
    assert row(desk) == replace(was, last=T + 1000, next=T + 2000, owed=(), fired=T - 1)


def test_may_note_what_is_owed_without_a_new_firing(desk: Desk) -> None:
    was = declared(desk, owed=f"{T - 1} {T}")
    assert desk.call(tick(desk, was, last=T, owed=(T,))) == "ok"
    assert row(desk).owed == (T,)


def test_a_copy_finds_it_done(desk: Desk) -> None:
    call = tick(desk, declared(desk), owed=(T,), fired=T)
    desk.send(call)
    with desk.nothing_changes():
        assert desk.send(call) == [b"ok"]


@pytest.mark.parametrize("change", [{"last": T - 1}, {"owed": (T,)}, {"owed": ()}])
def test_where_somebody_else_moved_it_nothing_is_noted(desk: Desk, change: dict[str, Any]) -> None:
    was = replace(declared(desk, owed=f"{T - 1}"), **change)
    with desk.nothing_changes():
        assert desk.call(tick(desk, was)) == "changed"


def test_a_schedule_that_was_declared_anew_or_resumed_meanwhile_counts_from_there(desk: Desk) -> None:
    was = declared(desk)
    declare(desk, "s", definition=OTHER)
    with desk.nothing_changes():
        assert desk.call(tick(desk, was)) == "changed"
    was = declared(desk, paused="1")
    desk.call(ops.pause_schedule(desk.g, "s", paused=False))
    with desk.nothing_changes():
        assert desk.call(tick(desk, was)) == "changed"


def test_a_late_copy_does_not_move_it_back(desk: Desk) -> None:
    was = declared(desk)
    call = tick(desk, was)
    desk.send(call)
    assert desk.call(tick(desk, row(desk), last=T + 2000)) == "ok"
    with desk.nothing_changes():
        assert desk.send(call) == [b"changed"]


def test_on_an_empty_database_nothing_is_made(desk: Desk) -> None:
    was = declared(desk)
    desk.wipe()
    assert desk.call(tick(desk, was)) == "changed"
    assert desk.state() == {}


def test_may_note_the_next_firing_alone(desk: Desk) -> None:
    was = declared(desk)
    assert desk.call(tick(desk, was, last=T, next=T + 1)) == "ok"
    assert row(desk) == replace(was, next=T + 1)


def test_what_has_no_definition_any_more_is_not_brought_back(desk: Desk) -> None:
    was = declared(desk)
    desk.client.hdel(desk.g.schedules, "def s")
    with desk.nothing_changes():
        assert desk.call(tick(desk, was)) == "changed"
