from __future__ import annotations

import pytest

from tests.ops.driver import FENCE, FUTURE, PAST, Desk, Expires, job, record, reference
from worqr import ops


def make_due(desk: Desk, *ids: str, first: int = PAST) -> None:
    """Jobs that have become due, one millisecond after another, and are still among the due."""
    desk.call(ops.dispatch_jobs(desk.q, [job(each, each.encode(), run_at=FUTURE) for each in ids]))
    for n, each in enumerate(ids):
        desk.client.zadd(desk.q.due, {each: first + n})


def test_puts_what_is_due_in_line_and_says_when_the_next_one_is(desk: Desk) -> None:
    make_due(desk, "x")
    desk.dispatch("later", run_at=FUTURE)
    before = desk.now()
    promoted, next_in, _ = desk.call(ops.promote_due(desk.q))
    assert promoted == 1
    assert next_in is not None and FUTURE - desk.now() <= next_in <= FUTURE - before
    assert desk.state() == {
        "waiting": [reference("x")],
        ":due": ["later"],
        ":job:x": record("x", FENCE + 1, "waiting", run_at=FUTURE),
        ":job:later": record("a", FENCE + 2, "due", run_at=FUTURE),
        ":counts": Expires({"fence": str(FENCE + 2), "enqueued": "2"}),
    }


def test_in_the_order_of_their_times_behind_what_waits_already(desk: Desk) -> None:
    desk.put(b"raw")
    make_due(desk, "z", "b", "a", "c")
    desk.client.zadd(desk.q.due, {"c": PAST - 1})
    assert desk.call(ops.promote_due(desk.q)) == (4, None, False)
    assert desk.waiting() == [b"raw", b"c", b"z", b"b", b"a"]


def test_in_steps(desk: Desk) -> None:
    make_due(desk, *[f"{n:03}" for n in range(5)])
    assert desk.send(ops.promote_due(desk.q, 2)) == [b"ok", 2, 0, 0]
    assert desk.call(ops.promote_due(desk.q, 2)) == (2, 0, False)
    assert desk.call(ops.promote_due(desk.q, 2)) == (1, None, False)
    with desk.nothing_changes():
        assert desk.send(ops.promote_due(desk.q, 2)) == [b"ok", 0, -1, 0]
    assert desk.waiting() == [b"%03d" % n for n in range(5)]


def test_what_is_not_due_stays(desk: Desk) -> None:
    desk.dispatch("x", run_at=FUTURE)
    with desk.nothing_changes():
        promoted, next_in, _ = desk.call(ops.promote_due(desk.q))
        assert promoted == 0
        assert next_in is not None and next_in > 1000


@pytest.mark.parametrize(("jobs", "woken"), [(1, 1), (3, 3), (5, 4)])
def test_wakes_one_hungry_worker_for_each(desk: Desk, jobs: int, woken: int) -> None:
    workers = ["A", "B", "C", "D"]
    make_due(desk, *[f"{n}" for n in range(jobs)])
    desk.client.sadd(desk.q.hungry, *workers)
    with desk.listening(*map(desk.q.wake_channel, workers)) as heard:
        desk.call(ops.promote_due(desk.q))
    assert len(heard) == woken


def test_wakes_nobody_for_what_is_gone(desk: Desk) -> None:
    make_due(desk, "gone", "foreign", "elsewhere")
    desk.client.delete(desk.q.job("gone"), desk.q.job("foreign"))  # data that somebody deleted
    desk.client.set(desk.q.job("foreign"), "foreign")
    desk.client.hset(desk.q.job("elsewhere"), "state", "waiting")
    desk.client.sadd(desk.q.hungry, "A")
    with desk.listening(desk.q.wake_channel("A")) as heard:
        assert desk.call(ops.promote_due(desk.q)) == (0, None, False)
    assert heard == []
    assert "waiting" not in desk.state() and ":due" not in desk.state()


def test_whoever_watches_is_told(desk: Desk) -> None:
    make_due(desk, "x")
    with desk.listening(desk.q.job("x")) as heard:
        desk.call(ops.promote_due(desk.q))
    assert heard == [(":job:x", b"waiting")]


def test_a_suspect_goes_to_the_suspects(desk: Desk) -> None:
    make_due(desk, "x")
    desk.client.hset(desk.q.job("x"), "suspect", "1")
    desk.call(ops.promote_due(desk.q))
    assert desk.state()[":suspects"] == [reference("x")]
    assert "waiting" not in desk.state()


def test_goes_on_while_the_queue_is_paused(desk: Desk) -> None:
    make_due(desk, "x")
    desk.call(ops.pause(desk.q, "why"))
    assert desk.call(ops.promote_due(desk.q)) == (1, None, False)


def test_what_was_deleted_does_not_come_back(desk: Desk) -> None:
    make_due(desk, "x")
    desk.call(ops.delete_queue(desk.q))
    with desk.nothing_changes():
        assert desk.call(ops.promote_due(desk.q)) == (0, None, False)


def test_on_an_empty_database_nothing_is_made(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert desk.call(ops.promote_due(desk.q)) == (0, None, False)
    assert desk.state() == {}
