from __future__ import annotations

from tests.ops.driver import Desk
from tests.ops.schedules import HOUR, MINUTE, T, declared, facts, looks, now, row, seen, set_clock_ahead
from worqr import ops


def rewind(desk: Desk) -> int:
    """How many were rewound, all pages together."""
    cursor, rewound = desk.call(ops.rewind_schedules(desk.g))
    while cursor != "0":
        cursor, some = desk.call(ops.rewind_schedules(desk.g, cursor))
        rewound += some
    return rewound


def test_one_in_the_future_goes_on_from_now(desk: Desk) -> None:
    future = now(desk) + HOUR
    declared(desk, last=future, next=future + 5, fired=future, check_at=future + 5)
    since = now(desk)
    assert rewind(desk) == 1
    found = row(desk)
    assert since <= found.last <= now(desk)
    assert (found.next, found.fired, found.pending) == (None, future, ())
    assert since <= looks(desk)["s"] <= now(desk)
    assert seen(desk) == {"s": 0}


def test_of_what_it_owes_only_that_stays_whose_time_has_come(desk: Desk) -> None:
    future = now(desk) + HOUR
    soon = now(desk) + MINUTE - 5000
    declared(desk, last=future, owed=f"{T} {T + 1} {soon} {future - 1} {future}", check_at=future)
    rewind(desk)
    assert row(desk).pending == (T, T + 1), "`soon` is after `last` now, so it will be judged again"


def test_those_that_are_not_in_the_future_stay_where_they_are(desk: Desk) -> None:
    soon = now(desk) + MINUTE - 5000
    declared(desk, last=T, next=soon + HOUR, owed=T, check_at=soon + HOUR)  # yearly, perhaps
    declared(desk, "soon", last=soon, next=soon + 1, check_at=soon + 1)
    before, when = facts(desk), looks(desk)
    assert rewind(desk) == 0
    assert facts(desk) == before
    assert looks(desk) == when


def test_one_that_was_put_off_by_the_wrong_clock_is_to_be_looked_at_at_once(desk: Desk) -> None:
    future = now(desk) + HOUR
    was = declared(desk, next=T + 1, check_at=future)
    assert rewind(desk) == 0
    assert row(desk) == was
    assert looks(desk)["s"] < future


def test_a_paused_one_stays_paused(desk: Desk) -> None:
    declared(desk, last=now(desk) + HOUR, paused="1")
    assert rewind(desk) == 1
    assert row(desk).paused
    assert looks(desk) == {}


def test_the_last_page_notes_that_it_is_done(desk: Desk) -> None:
    future = now(desk) + HOUR
    names = [f"s{n}" for n in range(2000)]
    fields = {f"{fact} {name}": future for name in names for fact in ("def", "last")}
    desk.client.hset(desk.g.schedules, mapping=fields)
    set_clock_ahead(desk, HOUR)
    cursor, first = desk.call(ops.rewind_schedules(desk.g))
    assert cursor != "0"
    assert 0 < first < 2000
    assert desk.call(ops.tick_schedules(desk.g)).clock_set_back
    assert first + rewind(desk) >= 2000
    assert not desk.call(ops.tick_schedules(desk.g)).clock_set_back
    assert set(looks(desk)) == set(names)


def test_twice_is_harmless(desk: Desk) -> None:
    declared(desk, last=now(desk) + HOUR)
    rewind(desk)
    before, when = facts(desk), looks(desk)
    assert rewind(desk) == 0
    assert (facts(desk), looks(desk)) == (before, when)


def test_on_an_empty_database_nothing_is_made(desk: Desk) -> None:
    desk.wipe()
    assert rewind(desk) == 0
    assert desk.state() == {}
