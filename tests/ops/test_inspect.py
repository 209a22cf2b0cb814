from __future__ import annotations

from tests.ops.driver import FENCE, FUTURE, PAST, Desk
from worqr import ops
from worqr.ops import Inspected


def test_tells_all_there_is_to_know(desk: Desk) -> None:
    desk.hold("B", b"a")
    one, two, three, four = desk.hold("A", b"b", b"c", b"d", b"e")
    desk.stall(b"suspect")
    desk.fail("A", one)
    desk.fail("A", two, undecodable=True)
    desk.retry("A", three)
    desk.call(ops.stop_tasks(desk.q, "A", [four]))
    desk.put(b"g")
    desk.call(ops.pause(desk.q, "why"))
    seen = desk.call(ops.inspect(desk.q))
    assert sorted(seen.workers) == ["A", "B"]
    seen.workers.clear()
    assert seen == Inspected(
        waiting=4,
        due=0,
        running=1,
        failed=1,
        undecodable=1,
        paused="why",
        trash=False,
        workers=[],
        counts={
            "enqueued": 7,
            "claimed": 7,
            "stalled": 2,
            "failed": 1,
            "undecodable": 1,
            "retried": 1,
            "stopped": 1,
            "paused": 1,
        },
        blocked=0,
        next_in_ms=None,
        oldest_ms=None,
        room=0,
    )


def test_counts_no_reference_to_nothing_and_tells_of_the_trash(desk: Desk) -> None:
    held = desk.hold("A", b"a", b"b")
    for one in held:
        desk.retry("A", one)
    desk.call(ops.cancel_task(desk.q, b"a"))
    assert desk.call(ops.inspect(desk.q)).waiting == 1
    desk.call(ops.delete_queue(desk.q))
    seen = desk.call(ops.inspect(desk.q))
    assert (seen.waiting, seen.trash) == (0, True)
    desk.stall(b"suspect")
    desk.call(ops.purge_queue(desk.q))
    desk.call(ops.delete_queue(desk.q))
    assert desk.call(ops.inspect(desk.q)).trash


def test_counts_the_claims_of_one_that_is_being_swept(desk: Desk) -> None:
    desk.hold("A", b"a", b"b", b"c")
    desk.call(ops.fail_worker(desk.q, "A", 1))
    seen = desk.call(ops.inspect(desk.q))
    assert (seen.running, seen.workers) == (2, ["A"])


def test_looking_keeps_no_counter_from_expiring(desk: Desk) -> None:
    desk.hold("A", b"a")
    desk.client.expire(desk.q.counts, 10)
    with desk.nothing_changes():
        desk.call(ops.inspect(desk.q))
    assert desk.client.ttl(desk.q.counts) <= 10


def test_claiming_renews_the_counters_when_less_than_half_of_their_time_is_left(desk: Desk) -> None:
    days = 24 * 3600
    desk.put(b"a", b"b", b"c")
    desk.enter("A")
    desk.take("A", 1)
    desk.client.expire(desk.q.counts, 16 * days)
    desk.take("A", 1)
    assert desk.client.ttl(desk.q.counts) <= 16 * days, "EXPIRE would be one more write for each task"
    desk.client.expire(desk.q.counts, 14 * days)
    desk.take("A", 1)
    assert desk.client.ttl(desk.q.counts) > 29 * days


def test_a_new_counter_renews_all_of_them(desk: Desk) -> None:
    desk.put(b"a")
    desk.client.expire(desk.q.counts, 10)
    desk.call(ops.pause(desk.q, "why"))
    assert desk.client.ttl(desk.q.counts) > 29 * 24 * 3600


def test_a_queue_without_counters_gets_them_with_an_expiry(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    desk.dispatch("x", b"a")
    assert desk.client.ttl(desk.q.counts) > 29 * 24 * 3600
    desk.client.delete(desk.q.counts)
    desk.dispatch("x", b"b")  # an update: nothing is counted, but its number is noted
    assert desk.client.ttl(desk.q.counts) > 29 * 24 * 3600


def test_on_an_empty_database_nothing_is_made(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert desk.call(ops.inspect(desk.q)) == Inspected(0, 0, 0, 0, 0, None, False, [], {}, 0, None, None)
    assert desk.state() == {}


def test_what_counts_nothing_that_happened_is_not_among_the_totals(desk: Desk) -> None:
    assert desk.state()[":counts"].value == {"fence": str(FENCE)}
    assert desk.counts() == {}


# Jobs


def test_counts_what_is_due_and_what_is_blocked_and_says_when_the_next_one_is_due(desk: Desk) -> None:
    desk.run("A", "runs")
    desk.dispatch("runs")
    desk.dispatch("due", run_at=FUTURE)
    desk.dispatch("later", run_at=FUTURE + 1)
    before = desk.now()
    seen = desk.call(ops.inspect(desk.q))
    assert (seen.waiting, seen.due, seen.blocked, seen.running, seen.oldest_ms) == (0, 2, 1, 1, None)
    assert seen.due_soon == 0
    assert seen.next_in_ms is not None
    assert FUTURE - desk.now() <= seen.next_in_ms <= FUTURE - before
    desk.client.zadd(desk.q.due, {"later": PAST})
    assert desk.call(ops.inspect(desk.q)).next_in_ms == 0


def test_counts_all_jobs_that_are_due_within_ten_seconds(desk: Desk) -> None:
    now = desk.now()
    desk.client.zadd(desk.q.due, {f"soon{n}": now + 9_000 for n in range(300)} | {"overdue": PAST})
    desk.client.zadd(desk.q.due, {"later": now + 3_600_000})
    seen = desk.call(ops.inspect(desk.q))
    assert (seen.due, seen.due_soon) == (302, 301)


def test_says_how_long_the_job_in_front_has_waited(desk: Desk) -> None:
    desk.dispatch("x", run_at=PAST)
    desk.dispatch("y", run_at=PAST + 10**11)
    before = desk.now()
    oldest = desk.call(ops.inspect(desk.q)).oldest_ms
    assert oldest is not None
    assert before - PAST <= oldest <= desk.now() - PAST
    desk.put(b"raw", front=True)
    assert desk.call(ops.inspect(desk.q)).oldest_ms is None


def test_why_the_queue_was_cleared_is_not_among_the_totals(desk: Desk) -> None:
    desk.dispatch("x")
    desk.call(ops.cancel_all(desk.q, reason="why"))
    assert desk.counts() == {"enqueued": 1, "cancelled": 1}
