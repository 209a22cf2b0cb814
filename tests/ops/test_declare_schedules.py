from __future__ import annotations

from tests.ops.driver import Desk
from tests.ops.schedules import DEF, OTHER, T, declare, declared, facts, lead, looks, now, seen
from worqr import ops

DEFINED = DEF.decode("latin-1")
MONTH = 30 * 24 * 3600


def test_a_new_schedule_counts_from_now_on_and_is_to_be_looked_at_at_once(desk: Desk) -> None:
    before, since = desk.state(), now(desk)
    assert desk.send(ops.declare_schedules(desk.g, [("s", DEF), ("a b", b"")], replace=True)) == [b"ok"]
    assert facts(desk, since) == {"def s": DEFINED, "last s": "now", "def a b": "", "last a b": "now"}
    for found in (looks(desk), {"s": int(desk.client.hget(desk.g.schedules, "clock") or 0)}):
        assert all(since <= at <= now(desk) for at in found.values())
    assert set(looks(desk)) == {"s", "a b"}
    assert seen(desk) == {"s": 0, "a b": 0}
    for key in (desk.g.schedules, desk.g.schedules_due, desk.g.schedules_seen):
        assert 0 < desk.client.ttl(key) - MONTH + 60 <= 60
    assert desk.state(":schedules") == before


def test_one_that_is_as_it_was_goes_on_where_it_stood(desk: Desk) -> None:
    for replace in (True, False):
        declared(desk, next=T + 5, owed=T, fired=T - 5, check_at=T + 5)
        lead(desk, 7000)
        before = facts(desk)
        declare(desk, "s", replace=replace)
        assert facts(desk) == before
        assert looks(desk) == {"s": T + 5}
        assert seen(desk) == {"s": 7000}


def test_a_changed_one_counts_from_now_on(desk: Desk) -> None:
    declared(desk, next=T + 5, owed=T, fired=T - 5, check_at=T + 5)
    since = now(desk)
    declare(desk, "s", definition=OTHER)
    assert facts(desk, since) == {"def s": OTHER.decode(), "last s": "now", "fired s": str(T - 5)}
    assert looks(desk)["s"] >= since


def test_a_pause_stays_whatever_is_declared(desk: Desk) -> None:
    declared(desk, paused="1")
    for definition in (DEF, OTHER):
        declare(desk, "s", definition=definition)
        assert facts(desk)["paused s"] == "1"
        assert looks(desk) == {}


def test_without_replacing_only_what_is_missing_is_stored(desk: Desk) -> None:
    declared(desk)
    declare(desk, "s", "lost", definition=OTHER, replace=False)
    found = facts(desk)
    assert (found["def s"], found["last s"]) == (DEFINED, str(T))
    assert found["def lost"] == OTHER.decode()
    assert int(found["last lost"]) > T


def test_one_that_a_leader_would_not_find_is_to_be_looked_at_again(desk: Desk) -> None:
    declared(desk)
    desk.client.delete(desk.g.schedules_due)
    declare(desk, "s")
    assert set(looks(desk)) == {"s"}
    assert facts(desk)["last s"] == str(T)


def test_every_declaration_keeps_all_of_them_for_a_month(desk: Desk) -> None:
    declare(desk, "s")
    keys = desk.g.schedules, desk.g.schedules_due, desk.g.schedules_seen
    for key in keys:
        desk.client.expire(key, 10)
    declare(desk, "other", replace=False)
    for key in keys:
        assert desk.client.ttl(key) > MONTH - 24 * 3600


def test_a_resend_and_a_late_copy_replace_nothing(desk: Desk) -> None:
    call = ops.declare_schedules(desk.g, [("s", DEF)], replace=True)
    desk.send(call)
    desk.client.hset(desk.g.schedules, mapping={"def s": OTHER, "last s": T})
    with desk.nothing_changes():
        assert desk.resend(call) == [b"ok"]
    with desk.nothing_happens():
        assert desk.late(call) == [b"late"]
