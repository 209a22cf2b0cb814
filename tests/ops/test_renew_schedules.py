from __future__ import annotations

from tests.ops.driver import Desk
from tests.ops.schedules import T, declare, declared, facts, lead, looks, seen
from worqr import ops

MONTH = 30 * 24 * 3600


def test_notes_that_they_are_still_declared_and_nothing_else(desk: Desk) -> None:
    declared(desk, next=T + 5, owed=T, fired=T - 5, check_at=T + 5)
    declare(desk, "other")
    lead(desk, 9000)
    before = facts(desk)
    assert desk.send(ops.renew_schedules(desk.g, ["s"])) == [b"ok"]
    assert seen(desk) == {"other": 0, "s": 9000}
    assert facts(desk) == before
    assert looks(desk)["s"] == T + 5


def test_tells_which_of_them_are_missing(desk: Desk) -> None:
    declare(desk, "s")
    desk.client.hset(desk.g.schedules, "last b", T)
    assert desk.call(ops.renew_schedules(desk.g, ["ä", "s", "b"])) == ["ä", "b"]
    assert seen(desk) == {"s": 0}


def test_one_that_a_leader_would_not_find_is_to_be_looked_at_again_unless_it_is_paused(desk: Desk) -> None:
    declared(desk)
    declared(desk, "paused", paused="1")
    desk.client.delete(desk.g.schedules_due)
    assert desk.call(ops.renew_schedules(desk.g, ["s", "paused"])) == []
    assert set(looks(desk)) == {"s"}


def test_keeps_all_of_them_for_a_month(desk: Desk) -> None:
    declare(desk, "s")
    keys = desk.g.schedules, desk.g.schedules_due, desk.g.schedules_seen
    for key in keys:
        desk.client.expire(key, 10)
    desk.call(ops.renew_schedules(desk.g, ["s"]))
    for key in keys:
        assert desk.client.ttl(key) > MONTH - 24 * 3600


def test_twice_is_harmless(desk: Desk) -> None:
    declare(desk, "s")
    call = ops.renew_schedules(desk.g, ["s", "gone"])
    assert desk.call(call) == ["gone"]
    with desk.nothing_changes():
        assert desk.call(call) == ["gone"]


def test_on_an_empty_database_all_are_missing_and_nothing_is_made(desk: Desk) -> None:
    desk.wipe()
    assert desk.call(ops.renew_schedules(desk.g, ["s"])) == ["s"]
    assert desk.state() == {}
