from __future__ import annotations

from tests.ops.driver import Desk
from worqr import ops
from worqr.records import RemoteError


def fail(desk: Desk, *kinds: str, undecodable: bool = False) -> list[int]:
    held = desk.hold("A", *[b"a"] * len(kinds))
    for claim, kind in zip(held, kinds, strict=True):
        desk.call(ops.fail_task(desk.q, "A", claim, RemoteError(kind, "m", ""), undecodable=undecodable))
    return held


def test_records_by_the_type_of_their_error(desk: Desk) -> None:
    fail(desk, "ValueError", "smtp.Refused", "ValueError")
    fail(desk, "DecodeError", undecodable=True)
    with desk.nothing_changes():
        assert desk.call(ops.count_errors(desk.q, "failed", 0)) == (False, {"ValueError": 2, "smtp.Refused": 1})
        assert desk.call(ops.count_errors(desk.q, "undecodable", 0)) == (False, {"DecodeError": 1})


def test_pages_from_a_rank_on_the_oldest_first(desk: Desk) -> None:
    fail(desk, "A", "B", "C")
    assert desk.call(ops.count_errors(desk.q, "failed", 0, 2)) == (True, {"A": 1, "B": 1})
    assert desk.call(ops.count_errors(desk.q, "failed", 2, 2)) == (False, {"C": 1})
    assert desk.call(ops.count_errors(desk.q, "failed", 3, 2)) == (False, {})


def test_a_record_that_is_gone_or_foreign_is_not_counted(desk: Desk) -> None:
    first, second, _ = fail(desk, "A", "A", "A")
    desk.client.delete(desk.q.dead_letter(first))
    desk.client.delete(desk.q.dead_letter(second))
    desk.client.set(desk.q.dead_letter(second), "foreign")
    assert desk.call(ops.count_errors(desk.q, "failed", 0)) == (False, {"A": 1})


def test_on_an_empty_database_nothing_is_made(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert desk.send(ops.count_errors(desk.q, "failed", 0)) == [b"ok"]
    assert desk.state() == {}
