from __future__ import annotations

from tests.ops.driver import Desk
from tests.ops.schedules import DEF, T, declare, declared, facts, lead, looks, seen
from worqr import ops

DAY = 24 * 3600 * 1000


def test_forgets_all_of_a_schedule_that_nobody_declares_any_more(desk: Desk) -> None:
    before = desk.state()
    declared(desk, owed=T, next=T + 5, fired=T - 5, paused="1")
    lead(desk, DAY)
    assert desk.send(ops.drop_schedules(desk.g, DAY)) == [b"ok", b"s", DEF]
    assert desk.state() == before


def test_leaves_the_others_alone(desk: Desk) -> None:
    declared(desk)
    lead(desk, 1)
    declare(desk, "other")
    lead(desk, DAY)
    assert desk.call(ops.drop_schedules(desk.g, DAY)) == [("s", DEF)]
    assert (set(looks(desk)), seen(desk)) == ({"other"}, {"other": 1})
    assert {field.rpartition(" ")[2] for field in facts(desk)} == {"other", "led"}


def test_the_clock_of_the_server_does_not_matter(desk: Desk) -> None:
    """Neither how old the schedule is nor by what it was judged: only for how long the mesh was led."""
    declared(desk, last=T, check_at=T)
    lead(desk, DAY - 1)
    with desk.nothing_changes():
        assert desk.call(ops.drop_schedules(desk.g, DAY)) == []
    lead(desk, DAY)
    assert desk.call(ops.drop_schedules(desk.g, DAY)) == [("s", DEF)]


def test_one_that_was_declared_again_stays(desk: Desk) -> None:
    declare(desk, "s", "renewed")
    lead(desk, DAY)
    declare(desk, "s")
    desk.call(ops.renew_schedules(desk.g, ["renewed"]))
    with desk.nothing_changes():
        assert desk.call(ops.drop_schedules(desk.g, DAY)) == []


def test_what_was_declared_before_the_led_time_was_lost_counts_as_declared_now(desk: Desk) -> None:
    lead(desk, 5 * DAY)
    declare(desk, "s")
    lead(desk, 10)
    assert desk.call(ops.drop_schedules(desk.g, DAY)) == []
    assert seen(desk) == {"s": 10}


def test_so_many_at_a_time(desk: Desk) -> None:
    declare(desk, "a", "b", "c")
    lead(desk, DAY)
    assert desk.call(ops.drop_schedules(desk.g, DAY, limit=2)) == [("a", DEF), ("b", DEF)]
    assert desk.call(ops.drop_schedules(desk.g, DAY, limit=2)) == [("c", DEF)]
    assert desk.call(ops.drop_schedules(desk.g, DAY, limit=2)) == []


def test_twice_and_on_an_empty_database_it_is_gone_already(desk: Desk) -> None:
    with desk.nothing_changes():
        assert desk.call(ops.drop_schedules(desk.g, DAY)) == []
