from __future__ import annotations

from typing import Any

import pytest

from tests.ops.driver import FUTURE, Desk, Expires, fields_of, payloads, reference
from worqr import ops


def promote(desk: Desk, *ids: str) -> int:
    return desk.call(ops.promote_jobs(desk.q, ids))


def test_scheduled_jobs_are_due_now_and_wait_at_the_back_in_this_order(desk: Desk) -> None:
    for name in "xyz":
        desk.dispatch(name, run_at=FUTURE)
    desk.put(b"raw")
    with desk.listening(desk.q.job("x")) as heard:
        assert promote(desk, "z", "x") == 2
    assert heard == [(":job:x", b"waiting")]
    state = desk.state()
    assert state["waiting"] == [reference("x"), reference("z"), b"raw"]
    assert state[":due"] == ["y"]
    assert state[":job:x"]["state"] == "waiting"
    assert abs(int(state[":job:x"]["run_at"]) - desk.now()) < 60_000
    assert state[":job:y"]["run_at"] == str(FUTURE)
    assert desk.waiting() == [b"raw", b"a", b"a"]


def test_a_job_that_waits_for_its_next_try_too(desk: Desk) -> None:
    held = desk.run("A", "x")
    desk.retry("A", held, run_at_ms=FUTURE)
    assert promote(desk, "x") == 1
    [entry] = desk.start("A", 1).entries
    assert fields_of(entry)["failures"] == "1"


def test_a_job_that_is_not_scheduled_stays_as_it_is(desk: Desk) -> None:
    desk.run("A", "runs")
    desk.dispatch("runs", run_at=FUTURE)
    desk.dispatch("waits")
    desk.fail("A", desk.take("A", 1)[0])
    desk.dispatch("waits too")
    with desk.nothing_happens():
        assert promote(desk, "runs", "waits", "waits too", "nobody") == 0


def test_one_of_a_deleted_queue_is_none(desk: Desk) -> None:
    desk.dispatch("x", run_at=FUTURE)
    desk.call(ops.delete_queue(desk.q))
    with desk.nothing_happens():
        assert promote(desk, "x") == 0


def test_idle_workers_are_woken(desk: Desk) -> None:
    desk.dispatch("x", run_at=FUTURE)
    desk.dispatch("y", run_at=FUTURE)
    desk.client.sadd(desk.q.hungry, "A", "B", "C")
    with desk.listening(*[desk.q.wake_channel(worker) for worker in "ABC"]) as heard:
        promote(desk, "x", "y")
    assert len(heard) == 2


def test_an_id_that_is_given_twice_is_promoted_once(desk: Desk) -> None:
    desk.dispatch("x", run_at=FUTURE)
    assert promote(desk, "x", "x") == 1
    assert desk.waiting() == [b"a"]


def test_its_expiry_counts_from_now(desk: Desk) -> None:
    desk.dispatch("x", b"soon", run_at=FUTURE, expires="60000")
    promote(desk, "x")
    desk.enter("A")
    assert payloads(desk.start("A", 1).entries) == [b"soon"]


def test_a_suspect_stays_one(desk: Desk) -> None:
    desk.dispatch("x", run_at=FUTURE)
    desk.client.hset(desk.q.job("x"), "suspect", "1")
    promote(desk, "x")
    assert desk.state()[":suspects"] == [reference("x")]


def test_a_place_without_a_record_or_with_a_foreign_one_stays(desk: Desk) -> None:
    desk.client.zadd(desk.q.due, {"gone": FUTURE, "foreign": FUTURE})
    desk.client.set(desk.q.job("foreign"), "foreign")
    with desk.nothing_happens():
        assert promote(desk, "gone", "foreign") == 0


def test_a_resend_gets_the_stored_reply(desk: Desk) -> None:
    desk.dispatch("x", run_at=FUTURE)
    call: Any = ops.promote_jobs(desk.q, ["x"])
    assert desk.send(call) == [b"ok", 1]
    desk.client.zadd(desk.q.due, {"x": FUTURE})
    desk.client.hset(desk.q.job("x"), "state", "due")
    with desk.nothing_changes():
        assert desk.resend(call) == [b"ok", 1]


@pytest.mark.parametrize("ids", [[], ["x"]])
def test_on_an_empty_database_nothing_is_made(desk: Desk, ids: list[str]) -> None:
    desk.client.delete(desk.q.counts)
    assert promote(desk, *ids) == 0
    assert desk.state() == {}


def test_what_it_leaves_is_what_a_dispatch_leaves(desk: Desk) -> None:
    number = desk.dispatch("x", run_at=FUTURE).number
    promote(desk, "x")
    state = desk.state()
    assert state.keys() == {"waiting", ":job:x", ":counts"}
    assert state[":counts"] == Expires({"fence": str(number), "enqueued": "1"})
