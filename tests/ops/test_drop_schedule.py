from __future__ import annotations

from tests.ops.driver import Desk
from tests.ops.schedules import T, declare, declared, now
from worqr import ops

DAY = 24 * 3600 * 1000


def test_forgets_all_of_a_schedule_that_nobody_declares_any_more(desk: Desk) -> None:
    before = desk.state()
    declared(desk, owed=T, next=T + 5, fired=T - 5, paused="1")
    assert desk.send(ops.drop_schedule(desk.g, "s", DAY)) == [b"ok"]
    assert desk.state() == before


def test_leaves_the_others_alone(desk: Desk) -> None:
    declare(desk, "other")
    before = desk.state()
    declared(desk)
    assert desk.call(ops.drop_schedule(desk.g, "s", DAY)) == "ok"
    assert desk.state() == before


def test_one_that_was_seen_meanwhile_stays(desk: Desk) -> None:
    declared(desk, seen=now(desk) - DAY + 60_000)
    with desk.nothing_changes():
        assert desk.call(ops.drop_schedule(desk.g, "s", DAY)) == "seen"
    desk.client.hset(desk.g.schedules, "seen s", now(desk) - DAY)
    assert desk.call(ops.drop_schedule(desk.g, "s", DAY)) == "ok"


def test_twice_and_on_an_empty_database_it_is_gone_already(desk: Desk) -> None:
    with desk.nothing_changes():
        assert desk.call(ops.drop_schedule(desk.g, "s", DAY)) == "ok"
