from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from tests.ops.driver import Desk
from tests.ops.schedules import (
    DEF,
    HOUR,
    MINUTE,
    OTHER,
    T,
    declare,
    declared,
    facts,
    lead,
    looks,
    now,
    row,
    seen,
    set_clock_ahead,
)
from worqr import ops
from worqr.command import Command
from worqr.ops import DueSchedules, ScheduleRow, Tick

FAR = 7_000_000_000_000


def tick(desk: Desk, was: ScheduleRow, **more: Any) -> Command[DueSchedules]:
    return ops.tick_schedules(desk.g, [Tick(was, **{"last": T + 1000, "next": FAR, "check_at": FAR, **more})])


# What is due


def test_returns_what_is_due_and_when_the_next_one_is(desk: Desk) -> None:
    first = declared(desk, "first", check_at=T, next=T - 1, fired=T - 2, owed=f"{T - 2} {T - 1}")
    second = declared(desk, "ä", check_at=T + 1)
    declared(desk, "later", check_at=FAR)
    declared(desk, "never", check_at=FAR + 1)
    declared(desk, "paused", paused="1")
    lead(desk, 5)
    with desk.nothing_changes():
        since = now(desk)
        due = desk.call(ops.tick_schedules(desk.g))
    assert due.rows == [first, second]
    assert (due.led, due.next, due.clock_set_back) == (5, FAR, False)
    assert since <= due.now <= now(desk)


def test_what_does_not_belong_there_is_taken_out(desk: Desk) -> None:
    declared(desk, "paused", paused="1")
    declare(desk, "gone")
    desk.client.hdel(desk.g.schedules, "def gone")
    desk.client.zadd(desk.g.schedules_due, {"paused": T, "gone": T})
    assert desk.call(ops.tick_schedules(desk.g)).rows == []
    assert looks(desk) == {}


def test_a_page_has_250_schedules_and_about_a_mebibyte_of_definitions(desk: Desk) -> None:
    names = [f"s{n:03d}" for n in range(300)]
    declare(desk, *names)
    due = desk.call(ops.tick_schedules(desk.g))
    assert [each.name for each in due.rows] == names[:250]
    ticks = [Tick(each, T, FAR, FAR) for each in due.rows]
    due = desk.call(ops.tick_schedules(desk.g, ticks))
    assert [each.name for each in due.rows] == names[250:]
    desk.wipe()
    for n in range(10):
        declare(desk, f"large{n}", definition=b"x" * 200_000)
    assert len(desk.call(ops.tick_schedules(desk.g)).rows) == 6


def test_on_an_empty_database_nothing_is_due_and_nothing_is_made(desk: Desk) -> None:
    was = declared(desk)
    desk.wipe()
    due = desk.call(tick(desk, was))
    assert (due.rows, due.next, due.led) == ([], None, 0)
    assert desk.call(ops.tick_schedules(desk.g, was_led=0, led=10)).led == 0
    assert desk.state() == {}


# Notes


def test_notes_how_far_it_got(desk: Desk) -> None:
    was = declared(desk)
    due = desk.call(tick(desk, was, pending=(T, T + 1000), fired=T))
    assert facts(desk) == {
        "def s": DEF.decode("latin-1"),
        "last s": str(T + 1000),
        "next s": str(FAR),
        "owed s": f"{T} {T + 1000}",
        "fired s": str(T),
    }
    assert looks(desk) == {"s": FAR}
    assert seen(desk) == {"s": 0}
    assert (due.rows, due.next) == ([], FAR)


def test_what_is_owed_no_more_goes_and_what_was_fired_before_stays(desk: Desk) -> None:
    was = declared(desk, owed=f"{T}", fired=T - 1)
    desk.call(tick(desk, was))
    found = row(desk)
    assert (found.last, found.next, found.pending, found.fired) == (T + 1000, FAR, (), T - 1)
    assert "owed s" not in facts(desk)


def test_one_that_was_not_fired_is_put_off(desk: Desk) -> None:
    was = declared(desk, next=T + 7, owed=f"{T - 1}")
    desk.call(tick(desk, was, last=T, next=None, check_at=FAR - 5, pending=(T - 1,)))
    assert row(desk) == was
    assert looks(desk) == {"s": FAR - 5}


def test_several_are_noted_at_once_each_for_itself(desk: Desk) -> None:
    rows = [declared(desk, name) for name in ("a", "b", "c")]
    desk.client.hset(desk.g.schedules, "last b", T + 1)
    desk.call(ops.tick_schedules(desk.g, [Tick(each, T + 1000, FAR, FAR) for each in rows]))
    assert [row(desk, name).last for name in ("a", "b", "c")] == [T + 1000, T + 1, T + 1000]


def test_many_are_noted_at_once_as_one_by_one(desk: Desk) -> None:
    """Commands read and store 25 schedules each. Of one that comes twice, the first counts, if only because it moves on."""
    rng = random.Random(4)

    def prepared() -> list[Tick]:
        rng.seed(4)
        ticks: list[Tick] = []
        for n in range(90):
            fields: dict[str, Any] = {"owed": f"{T}", "fired": T - 1, "ran": 3, "paused": "1", "ver": 7}
            was = declared(desk, f"s{n}", **{name: fields[name] for name in fields if rng.random() < 0.4})
            was = replace(was, as_stored=b"moved") if rng.random() < 0.2 else was
            pending = rng.choice([(), (T,), (T, T + 1000)])
            fired, ran = rng.choice([None, T]), rng.choice([None, 2])
            check_at = rng.choice([FAR, 0])
            ticks.append(Tick(was, T + 1000 + n, rng.choice([None, FAR]), check_at, pending, fired, ran))
            ticks += [Tick(was, T + 5000, FAR, FAR)] if n % 7 == 0 else []
        return ticks

    since, found = now(desk), list[tuple[dict[str, str], dict[str, int]]]()
    for size in (200, 1):
        desk.wipe()
        ticks = prepared()
        for start in range(0, len(ticks), size):
            desk.call(ops.tick_schedules(desk.g, ticks[start : start + size]))
        found.append((facts(desk, since), {name: (at - since) // HOUR for name, at in looks(desk).items()}))
    assert found[0] == found[1]
    assert len(found[0][0]) > 400


def test_a_copy_finds_it_done(desk: Desk) -> None:
    call = tick(desk, declared(desk), pending=(T,), fired=T)
    desk.send(call)
    with desk.nothing_changes():
        desk.send(call)


def test_a_late_copy_does_not_move_it_back(desk: Desk) -> None:
    call = tick(desk, declared(desk))
    desk.send(call)
    desk.call(tick(desk, row(desk), last=T + 2000, check_at=FAR + 9))
    with desk.nothing_changes():
        desk.send(call)
    assert row(desk).last == T + 2000


@pytest.mark.parametrize("as_stored", [f"{T - 1}\n{T}", f"{T}\n", f"{T}\n{T} {T}"])
def test_where_somebody_else_moved_it_nothing_is_noted(desk: Desk, as_stored: str) -> None:
    was = replace(declared(desk, owed=f"{T}"), as_stored=as_stored.encode())
    with desk.nothing_changes():
        desk.call(tick(desk, was))


def test_a_schedule_that_was_declared_anew_or_resumed_meanwhile_counts_from_there(desk: Desk) -> None:
    was = declared(desk)
    declare(desk, "s", definition=OTHER)
    with desk.nothing_changes():
        desk.call(tick(desk, was))
    was = declared(desk, paused="1")
    desk.call(ops.pause_schedule(desk.g, "s", paused=False))
    with desk.nothing_changes():
        desk.call(tick(desk, was))


def test_one_that_was_paused_meanwhile_stays_paused(desk: Desk) -> None:
    was = declared(desk)
    desk.call(ops.pause_schedule(desk.g, "s", paused=True))
    desk.call(tick(desk, was, fired=T + 1000))
    assert row(desk).paused
    assert row(desk).fired == T + 1000
    assert looks(desk) == {}


def test_what_has_no_definition_any_more_is_not_brought_back(desk: Desk) -> None:
    was = declared(desk)
    desk.client.hdel(desk.g.schedules, "def s")
    desk.client.zrem(desk.g.schedules_due, "s")
    with desk.nothing_changes():
        desk.call(tick(desk, was))


@pytest.mark.parametrize("spoilt", [b"nonsense", b"\xff\n", b""])
def test_what_somebody_spoilt_by_hand_is_noted_like_the_rest(desk: Desk, spoilt: bytes) -> None:
    declare(desk, "s")
    desk.client.hset(desk.g.schedules, mapping={"last s": spoilt, "owed s": spoilt})
    [was] = desk.call(ops.tick_schedules(desk.g)).rows
    assert (was.last, was.pending) == (0, ())
    desk.call(tick(desk, was))
    assert row(desk).last == T + 1000


# Time


def test_led_time_is_noted_where_it_is_as_the_leader_read_it(desk: Desk) -> None:
    declare(desk, "s")
    assert desk.call(ops.tick_schedules(desk.g, was_led=0, led=3000)).led == 3000
    assert desk.call(ops.tick_schedules(desk.g, was_led=0, led=3000)).led == 3000  # a copy
    assert desk.call(ops.tick_schedules(desk.g, was_led=0, led=5000)).led == 3000  # another leader
    assert desk.call(ops.tick_schedules(desk.g, was_led=3000, led=5000)).led == 5000


def test_the_latest_time_is_noted_once_per_second(desk: Desk) -> None:
    declared(desk, check_at=FAR)
    client, key = desk.client, desk.g.schedules
    client.hset(key, "clock", now(desk) - 900)
    with desk.nothing_changes():
        desk.call(ops.tick_schedules(desk.g))
    client.hset(key, "clock", now(desk) - 1000)
    since = now(desk)
    desk.call(ops.tick_schedules(desk.g))
    assert int(client.hget(key, "clock") or 0) >= since


def test_a_clock_that_was_set_back_by_more_than_a_minute_is_told_and_nothing_is_noted(desk: Desk) -> None:
    was = declared(desk)
    set_clock_ahead(desk, HOUR)
    with desk.nothing_changes():
        assert desk.send(tick(desk, was)) == [b"back"]
    assert desk.call(tick(desk, was)).clock_set_back
    set_clock_ahead(desk, MINUTE - 5000)
    assert not desk.call(tick(desk, was)).clock_set_back
    assert row(desk).last == T + 1000


def test_a_cursor_from_before_the_clock_was_set_back_is_not_noted(desk: Desk) -> None:
    was = declared(desk)
    with desk.nothing_changes():
        desk.call(tick(desk, was, last=now(desk) + MINUTE + 5000))
    desk.call(tick(desk, was, last=now(desk) + MINUTE - 5000))
    assert row(desk).last > T
