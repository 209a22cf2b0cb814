from __future__ import annotations

from tests.ops.driver import Desk, Expires
from tests.ops.schedules import DEF, OTHER, T, declare, declared, now, told
from worqr import ops

DEFINED = DEF.decode("latin-1")


def test_a_new_schedule_counts_from_now_on(desk: Desk) -> None:
    before, since = desk.state(), now(desk)
    assert desk.send(ops.declare_schedules(desk.g, [("s", DEF), ("a b", b"")], replace=True)) == [b"ok"]
    fields = {"def s": DEFINED, "last s": "now", "seen s": "now", "def a b": "", "last a b": "now", "seen a b": "now"}
    assert told(desk, since) == {**before, ":schedules": Expires(fields)}
    assert 0 < desk.client.ttl(desk.g.schedules) - 30 * 24 * 3600 + 5 <= 5


def test_one_that_is_as_it_was_goes_on_where_it_stood(desk: Desk) -> None:
    for replace in (True, False):
        declared(desk, next=T + 5, owed=T, fired=T - 5, paused="1")
        since = now(desk)
        declare(desk, "s", replace=replace)
        assert told(desk, since)[":schedules"].value == {
            "def s": DEFINED,
            "last s": str(T),
            "next s": str(T + 5),
            "owed s": str(T),
            "fired s": str(T - 5),
            "paused s": "1",
            "seen s": "now",
        }


def test_a_changed_one_counts_from_now_on_and_stays_paused(desk: Desk) -> None:
    declared(desk, next=T + 5, owed=T, fired=T - 5, paused="1")
    since = now(desk)
    declare(desk, "s", definition=OTHER)
    assert told(desk, since)[":schedules"].value == {
        "def s": OTHER.decode(),
        "last s": "now",
        "fired s": str(T - 5),
        "paused s": "1",
        "seen s": "now",
    }


def test_what_is_only_still_meant_replaces_nothing_but_is_there_again_when_it_was_lost(desk: Desk) -> None:
    declared(desk)
    declare(desk, "s", "lost", definition=OTHER, replace=False)
    fields = desk.state()[":schedules"].value
    assert (fields["def s"], fields["last s"]) == (DEFINED, str(T))
    assert int(fields["seen s"]) > T
    assert fields["def lost"] == OTHER.decode()
    assert int(fields["last lost"]) > T


def test_every_declaration_keeps_all_of_them_for_a_month(desk: Desk) -> None:
    declare(desk, "s")
    desk.client.expire(desk.g.schedules, 10)
    declare(desk, "other", replace=False)
    assert desk.client.ttl(desk.g.schedules) > 29 * 24 * 3600


def test_a_resend_and_a_late_copy_replace_nothing(desk: Desk) -> None:
    call = ops.declare_schedules(desk.g, [("s", DEF)], replace=True)
    desk.send(call)
    desk.client.hset(desk.g.schedules, mapping={"def s": OTHER, "last s": T})
    with desk.nothing_changes():
        assert desk.resend(call) == [b"ok"]
    with desk.nothing_happens():
        assert desk.late(call) == [b"late"]
