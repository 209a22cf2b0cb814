from __future__ import annotations

import time

from tests.ops.driver import Desk
from tests.ops.schedules import DEF, T, declared
from worqr import ops
from worqr.ops import ScheduleRow, Schedules


def test_lists_all_that_is_known_by_name(desk: Desk) -> None:
    declared(desk, "b c", next=T + 5, fired=T - 5, owed=f"{T - 2} {T - 1}", paused="1")
    declared(desk, "ä")
    with desk.nothing_changes():
        found = desk.call(ops.list_schedules(desk.g))
    assert found.cursor == "0"
    stands = f"{T}\n{T - 2} {T - 1}".encode()
    assert found.rows == [
        ScheduleRow("b c", DEF, T, next=T + 5, fired=T - 5, pending=(T - 2, T - 1), paused=True, as_stored=stands),
        ScheduleRow("ä", DEF, T, next=None, fired=None, pending=(), paused=False, as_stored=f"{T}\n".encode()),
    ]


def test_many_come_in_pages(desk: Desk) -> None:
    names = [f"s{n:04d}" for n in range(3000)]
    fields = {f"{fact} {name}": T for name in names for fact in ("def", "last", "next")}
    desk.client.hset(desk.g.schedules, mapping=fields)
    pages = [desk.call(ops.list_schedules(desk.g))]
    while pages[-1].cursor != "0":
        pages.append(desk.call(ops.list_schedules(desk.g, pages[-1].cursor)))
    assert len(pages) > 2
    rows = Schedules.join(pages)
    assert [row.name for row in rows] == names
    assert {(row.last, row.next) for row in rows} == {(T, T)}


def test_says_what_time_it_is(desk: Desk) -> None:
    before = time.time() * 1000
    assert before - 2 <= desk.call(ops.list_schedules(desk.g)).now <= time.time() * 1000 + 2


def test_what_has_no_definition_is_no_schedule(desk: Desk) -> None:
    desk.client.hset(desk.g.schedules, mapping={"last s": T, "nonsense": "x", "led": 5, "clock": T})
    assert desk.call(ops.list_schedules(desk.g)).rows == []


def test_on_an_empty_database_there_are_none(desk: Desk) -> None:
    before = desk.state()
    assert desk.call(ops.list_schedules(desk.g)).rows == []
    assert desk.state() == before
