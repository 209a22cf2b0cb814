from __future__ import annotations

from datetime import UTC, datetime

import pytest
import redis

from tests.ops.driver import Desk
from worqr import ops
from worqr.mesh_records import LogEntry


def test_the_newest_entries_and_those_after_one(desk: Desk) -> None:
    for n in range(5):
        desk.client.xadd(desk.g.log, {"kind": f"k{n}"}, id=f"{1000 + n}-0")
    with desk.nothing_changes():
        assert kinds(desk.call(ops.list_events(desk.g, 3))) == ["k2", "k3", "k4"]
        assert kinds(desk.call(ops.list_events(desk.g, 3, "0"))) == ["k0", "k1", "k2"]
        assert kinds(desk.call(ops.list_events(desk.g, 3, "1002-0"))) == ["k3", "k4"]
        assert desk.call(ops.list_events(desk.g, 3, "1004-0")) == []


def kinds(entries: list[LogEntry]) -> list[str]:
    return [entry.kind for entry in entries]


def test_an_entry_has_all_its_fields(desk: Desk) -> None:
    desk.call(ops.note_event(desk.g, "paused", who="Ada", queue="Q1", worker="W", job="J", count=3, text="why"))
    [entry] = desk.call(ops.list_events(desk.g, 9))
    assert abs((datetime.now(UTC) - entry.at).total_seconds()) < 60
    assert entry == LogEntry(entry.id, entry.at, "paused", "Ada", "Q1", "W", "J", 3, "why")
    desk.client.delete(desk.g.log)
    desk.client.xadd(desk.g.log, {"other": "x", "n": "y"}, id="5-1")
    assert desk.call(ops.list_events(desk.g, 9)) == [
        LogEntry("5-1", datetime.fromtimestamp(0.005, UTC), "", "", "", "", "", None, "")
    ]


def test_on_an_empty_database_there_is_nothing(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert desk.send(ops.list_events(desk.g, 9)) == [b"ok"]
    assert desk.state() == {}


def test_a_log_of_a_foreign_type_is_an_error(desk: Desk) -> None:
    desk.client.set(desk.g.log, "foreign")
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        desk.call(ops.list_events(desk.g, 9))
