from __future__ import annotations

from tests.ops.driver import Desk, Expires
from worqr import ops


def test_names_are_noted_with_the_minute_and_all_are_returned(desk: Desk) -> None:
    early = desk.now() // 60_000
    found = desk.call(ops.note_histories(desk.g, ["Q1", "{Q1}-fail"]))
    assert found.keys() == {"Q1", "{Q1}-fail"}
    assert early <= min(found.values()) <= max(found.values()) <= desk.now() // 60_000
    assert desk.state(":counts") == {":histories": Expires(["Q1", "{Q1}-fail"])}
    assert ops.HISTORY_EXPIRE_S - 60 <= desk.client.ttl(desk.g.histories) <= ops.HISTORY_EXPIRE_S


def test_a_copy_changes_at_most_the_minute(desk: Desk) -> None:
    once = desk.call(ops.note_histories(desk.g, ["Q1"]))
    assert desk.call(ops.note_histories(desk.g, ["Q1"])).keys() == once.keys()


def test_an_older_note_is_kept_until_the_next(desk: Desk) -> None:
    desk.client.zadd(desk.g.histories, {"Q1": 7, "Q2": 8})
    found = desk.call(ops.note_histories(desk.g, ["Q2"]))
    assert found["Q1"] == 7
    assert found["Q2"] > 8


def test_a_queue_without_a_history_is_removed(desk: Desk) -> None:
    desk.call(ops.note_histories(desk.g, ["Q1", "Q2"]))
    assert desk.call(ops.note_histories(desk.g, ["Q3"], dropped="Q1")).keys() == {"Q2", "Q3"}
    assert desk.call(ops.note_histories(desk.g, dropped="nothing")).keys() == {"Q2", "Q3"}


def test_a_look_at_an_empty_database_leaves_it_empty(desk: Desk) -> None:
    desk.wipe()
    assert desk.send(ops.note_histories(desk.g)) == [b"ok"]
    assert desk.state() == {}
