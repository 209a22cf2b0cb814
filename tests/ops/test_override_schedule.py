from __future__ import annotations

from tests.ops.driver import Desk
from tests.ops.schedules import DEF, OTHER, T, declare, declared, facts, looks, now, row
from worqr import ops
from worqr.ops import Tick

OVER = b'{"cron": "0 4 * * *"}\n\xff\x00'


def override(desk: Desk, blob: bytes = OVER, name: str = "s") -> str:
    return desk.call(ops.override_schedule(desk.g, name, blob))


def test_the_override_is_stored_with_its_time_and_firings_count_from_now(desk: Desk) -> None:
    declared(desk, owed=T, next=T + 5, fired=T - 5, check_at=T + 5)
    desk.client.hset(desk.g.schedules, "clock", 0)
    since = now(desk)
    assert desk.send(ops.override_schedule(desk.g, "s", OVER)) == [b"ok"]
    stored = row(desk)
    assert (stored.definition, stored.override, stored.next, stored.pending) == (DEF, OVER, None, ())
    assert since <= stored.overridden_at == stored.last <= now(desk)
    assert stored.fired == T - 5
    assert since <= looks(desk)["s"] <= now(desk)
    assert int(desk.client.hget(desk.g.schedules, "clock") or 0) >= since


def test_without_an_override_it_is_as_declared_from_now_on(desk: Desk) -> None:
    declared(desk, over=b"%d " % T + OVER, owed=T, next=T + 5)
    since = now(desk)
    assert override(desk, b"") == "ok"
    assert facts(desk, since) == {"def s": DEF.decode("latin-1"), "last s": "now"}
    assert since <= looks(desk)["s"] <= now(desk)


def test_a_leader_gets_it_with_the_definition(desk: Desk) -> None:
    declared(desk)
    assert desk.call(ops.tick_schedules(desk.g)).rows == [row(desk)]
    override(desk)
    [found] = desk.call(ops.tick_schedules(desk.g)).rows
    assert found == row(desk)
    assert found.override == OVER


def test_a_declaration_does_not_change_it_and_a_drop_removes_it(desk: Desk) -> None:
    declared(desk)
    override(desk)
    declare(desk, "s", definition=OTHER)
    assert (row(desk).definition, row(desk).override) == (OTHER, OVER)
    desk.client.hset(desk.g.schedules, "led", 10)
    assert desk.call(ops.drop_schedules(desk.g, 1)) == [("s", OTHER)]
    assert facts(desk) == {}


def test_a_paused_one_stays_paused(desk: Desk) -> None:
    declared(desk, paused="1")
    assert override(desk) == "ok"
    assert row(desk).paused
    assert looks(desk) == {}


def test_the_plan_of_a_leader_that_read_it_before_is_not_stored(desk: Desk) -> None:
    declared(desk)
    for _ in range(20):  # often within the same millisecond
        read = row(desk)
        override(desk)
        desk.call(ops.tick_schedules(desk.g, [Tick(read, read.last, T + 5, T + 5)]))
        assert row(desk).next is None
        read = row(desk)
        override(desk, b"")
        desk.call(ops.tick_schedules(desk.g, [Tick(read, read.last, T + 5, T + 5)]))
        assert row(desk).next is None


def test_twice_changes_nothing_the_second_time(desk: Desk) -> None:
    declared(desk)
    with desk.nothing_happens():
        assert override(desk, b"") == "same"
    assert override(desk) == "ok"
    with desk.nothing_happens():
        assert override(desk) == "same"


def test_an_unknown_one_is_unknown_also_on_an_empty_database(desk: Desk) -> None:
    for blob in (OVER, b""):
        with desk.nothing_happens():
            assert override(desk, blob) == "unknown"
    declared(desk)
    with desk.nothing_happens():
        assert override(desk, name="S") == "unknown"


def test_a_resend_and_a_late_copy_undo_nothing(desk: Desk) -> None:
    declared(desk)
    call = ops.override_schedule(desk.g, "s", OVER)
    desk.send(call)
    number = desk.numbers[desk.g.base]
    override(desk, b"")
    with desk.nothing_changes():
        assert desk.send(call, number=number) == [b"late"]
    desk.send(call)
    desk.client.hdel(desk.g.schedules, "over s")
    with desk.nothing_changes():
        assert desk.resend(call) == [b"ok"]
    with desk.nothing_happens():
        assert desk.late(call) == [b"late"]
