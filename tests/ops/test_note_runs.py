from __future__ import annotations

import pytest
import redis

from tests.ops.driver import Desk, Expires, policy
from worqr import ops
from worqr.history_records import FIELDS

COUNTS = {"ok": 2, "r0": 1, "r3": 1, "rs": 5}


def note(desk: Desk, worker: str = "A", number: int = 1, **counts: int) -> list[bytes]:
    return desk.send(ops.note_runs(desk.q, worker, number, counts or COUNTS))


def test_counts_are_added_to_the_totals_of_the_queue(desk: Desk) -> None:
    desk.enter("A")
    before = desk.state()
    assert note(desk) == [b"ok"]
    assert note(desk, number=2, ok=1, raised=3) == [b"ok"]
    totals = {"ok": "3", "r0": "1", "r3": "1", "rs": "5", "raised": "3"}
    assert desk.state() == {**before, ":policy:A": policy(noted=2), ":runs": Expires(totals)}


def test_all_fields_are_kept(desk: Desk) -> None:
    desk.enter("A")
    note(desk, **{field: i for i, field in enumerate(FIELDS)})
    assert desk.state()[":runs"] == Expires({field: str(i) for i, field in enumerate(FIELDS)})


def test_the_same_request_adds_nothing_twice(desk: Desk) -> None:
    desk.enter("A")
    note(desk, number=7)
    with desk.nothing_changes():
        assert note(desk, number=7) == [b"ok"]


def test_a_copy_that_comes_late_adds_nothing(desk: Desk) -> None:
    desk.enter("A")
    note(desk, number=7)
    with desk.nothing_changes():
        assert note(desk, number=6) == [b"ok"]


def test_workers_have_numbers_of_their_own(desk: Desk) -> None:
    desk.enter("A", "B")
    note(desk, "A", 7, ok=1)
    assert note(desk, "B", 1, ok=1) == [b"ok"]
    assert desk.state()[":runs"] == Expires({"ok": "2"})


def test_entering_again_keeps_the_number(desk: Desk) -> None:
    desk.enter("A")
    note(desk, number=7)
    desk.enter("A")
    with desk.nothing_changes():
        assert note(desk, number=7) == [b"ok"]


@pytest.mark.parametrize("ending", ["stop_work", "fail_worker"])
def test_a_worker_that_has_left_adds_nothing(desk: Desk, ending: str) -> None:
    desk.enter("A")
    desk.call(getattr(ops, ending)(desk.q, "A"))
    with desk.nothing_changes():
        assert note(desk) == [b"gone"]


def test_on_an_empty_database_nothing_is_made(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert note(desk) == [b"gone"]
    assert desk.state() == {}


def test_a_foreign_value_over_the_totals_is_an_error_before_anything_is_written(desk: Desk) -> None:
    desk.enter("A")
    desk.client.set(desk.q.runs, "mine")
    with desk.nothing_changes(), pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        note(desk)


def test_the_expiry_is_renewed_in_the_second_half_only(desk: Desk) -> None:
    desk.enter("A")
    note(desk)
    desk.client.expire(desk.q.runs, 20 * 24 * 3600)
    note(desk, number=2)
    assert desk.client.ttl(desk.q.runs) <= 20 * 24 * 3600
    desk.client.expire(desk.q.runs, 10 * 24 * 3600)
    note(desk, number=3)
    assert desk.client.ttl(desk.q.runs) > 29 * 24 * 3600


# The runs that ended last


def note_ended(desk: Desk, *runs: bytes, number: int = 1, keep: int = 3) -> list[bytes]:
    return desk.send(ops.note_runs(desk.q, "A", number, {"ok": len(runs)}, runs, keep))


def test_ended_runs_are_kept_the_last_one_first(desk: Desk) -> None:
    desk.enter("A")
    before = desk.state()
    assert note_ended(desk, b"1", b"2") == [b"ok"]
    assert note_ended(desk, b"3", b"4", number=2) == [b"ok"]
    kept = {":runs": Expires({"ok": "4"}), ":recent": Expires([b"4", b"3", b"2"])}
    assert desk.state() == {**before, ":policy:A": policy(noted=2), **kept}
    assert 86_390 <= desk.client.ttl(desk.q.recent) <= 86_400
    assert desk.call(ops.list_ended(desk.q, 2)) == [b"4", b"3"]


def test_ended_runs_that_come_twice_or_late_are_stored_once(desk: Desk) -> None:
    desk.enter("A")
    note_ended(desk, b"1", number=7)
    with desk.nothing_changes():
        assert note_ended(desk, b"1", number=7) == [b"ok"]
        assert note_ended(desk, b"0", number=6) == [b"ok"]


def test_a_former_worker_stores_no_ended_runs(desk: Desk) -> None:
    desk.enter("A")
    desk.call(ops.fail_worker(desk.q, "A"))
    with desk.nothing_changes():
        assert note_ended(desk, b"1") == [b"gone"]


def test_a_foreign_value_over_the_ended_runs_keeps_the_counts_and_stays(desk: Desk) -> None:
    desk.enter("A")
    desk.client.set(desk.q.recent, "mine")
    assert note_ended(desk, b"1") == [b"ok"]
    assert desk.client.get(desk.q.recent) == b"mine"
    assert desk.state()[":runs"] == Expires({"ok": "1"})
    with desk.nothing_changes():
        assert desk.call(ops.list_ended(desk.q, 9)) == []


def test_a_queue_without_ended_runs_lists_none(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert desk.call(ops.list_ended(desk.q, 9)) == []
    assert desk.state() == {}


def test_the_most_runs_that_a_request_has_fit_the_stack_of_a_script(desk: Desk) -> None:
    desk.enter("A")
    assert note_ended(desk, *[b"%d" % n for n in range(ops.MAX_ITEMS)], keep=ops.MAX_ITEMS) == [b"ok"]
    assert desk.call(ops.list_ended(desk.q, 5000))[:2] == [b"999", b"998"]
