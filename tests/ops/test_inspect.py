from __future__ import annotations

from tests.ops.driver import FENCE, Desk
from worqr import ops
from worqr.ops import Inspected


def test_tells_all_there_is_to_know(desk: Desk) -> None:
    desk.hold("B", b"a")
    one, two, three, four = desk.hold("A", b"b", b"c", b"d", b"e")
    desk.stall(b"suspect")
    desk.fail("A", one)
    desk.fail("A", two, broken=True)
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
        broken=1,
        paused="why",
        trash=False,
        workers=[],
        counts={
            "enqueued": 7,
            "claimed": 7,
            "stalled": 2,
            "failed": 1,
            "broken": 1,
            "retried": 1,
            "stopped": 1,
            "paused": 1,
        },
        blocked=0,
        next_in_ms=None,
        oldest_ms=None,
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


def test_keeps_the_counters_from_expiring_and_changes_nothing_else(desk: Desk) -> None:
    desk.hold("A", b"a")
    desk.client.expire(desk.q.counts, 10)
    with desk.nothing_changes():
        desk.call(ops.inspect(desk.q))
    assert desk.client.ttl(desk.q.counts) > 2_000_000


def test_on_an_empty_database_nothing_is_made(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert desk.call(ops.inspect(desk.q)) == Inspected(0, 0, 0, 0, 0, None, False, [], {}, 0, None, None)
    assert desk.state() == {}


def test_what_counts_nothing_that_happened_is_not_among_the_totals(desk: Desk) -> None:
    assert desk.state()[":counts"].value == {"fence": str(FENCE)}
    assert desk.counts() == {}
