from __future__ import annotations

import time

from tests.ops.driver import Desk
from tests.ops.schedules import DEF, T, declared
from worqr import ops
from worqr.ops import ScheduleRow


def test_lists_all_that_is_known_by_name(desk: Desk) -> None:
    declared(desk, "b c", next=T + 5, fired=T - 5, owed=f"{T - 2} {T - 1}", paused="1")
    declared(desk, "ä")
    with desk.nothing_changes():
        found = desk.call(ops.list_schedules(desk.g))
    assert found.rows == [
        ScheduleRow("b c", DEF, last=T, next=T + 5, fired=T - 5, owed=(T - 2, T - 1), seen=T, paused=True),
        ScheduleRow("ä", DEF, last=T, next=None, fired=None, owed=(), seen=T, paused=False),
    ]


def test_says_what_time_it_is(desk: Desk) -> None:
    before = time.time() * 1000
    assert before - 2 <= desk.call(ops.list_schedules(desk.g)).now <= time.time() * 1000 + 2


def test_what_has_no_definition_is_no_schedule(desk: Desk) -> None:
    desk.client.hset(desk.g.schedules, mapping={"last s": T, "nonsense": "x"})
    assert desk.call(ops.list_schedules(desk.g)).rows == []


def test_on_an_empty_database_there_are_none(desk: Desk) -> None:
    before = desk.state()
    assert desk.call(ops.list_schedules(desk.g)).rows == []
    assert desk.state() == before
