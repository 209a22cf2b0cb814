from __future__ import annotations

import hashlib

import pytest
import redis

from tests.ops.driver import FENCE, FUTURE, Desk, Expires, claim, fields_of, record, reference
from worqr import ops
from worqr.errors import QueueFull
from worqr.keys import MARKER

BYTES = [b"", b"0", b"\x00", bytes(range(256)), b"\xff\xfe", b"a\r\nb", MARKER[:-1], b"x" * 100_000]


def test_puts_tasks_at_the_back_as_they_are(desk: Desk) -> None:
    assert desk.send(ops.enqueue(desk.q, [b"a", b"b"])) == [b"ok", 2]
    assert desk.call(ops.enqueue(desk.q, [b"c"])) == 1
    assert desk.state() == {
        "waiting": [b"c", b"b", b"a"],
        ":counts": Expires({"enqueued": "3", "fence": str(FENCE)}),
    }


def test_at_the_front_the_first_is_the_next_to_be_taken(desk: Desk) -> None:
    desk.put(b"a")
    desk.put(b"b", b"c", front=True)
    assert desk.state()["waiting"] == [b"a", b"c", b"b"]
    desk.enter("A")
    assert desk.start("A", 9).entries == [b"b", b"c", b"a"]


def test_any_byte_string_comes_out_as_it_went_in(desk: Desk) -> None:
    desk.enter("A")
    desk.put(*BYTES)
    assert desk.waiting() == BYTES
    assert desk.start("A", len(BYTES)).entries == BYTES


def test_a_payload_that_looks_like_a_reference_becomes_a_job(desk: Desk) -> None:
    task = MARKER + b"\xff\x00"
    desk.put(b"a", task)
    digest = hashlib.sha1(task).hexdigest()
    job = f"@{FENCE + 1}"
    known = record(task.decode("latin-1"), FENCE + 1, twin=digest)
    assert desk.state() == {
        "waiting": [reference(job), b"a"],
        f":job:{job}": known,
        f":twins:{digest}": {job},
        ":counts": Expires({"enqueued": "2", "fence": str(FENCE + 1)}),
    }
    desk.enter("A")
    raw, entry = desk.start("A", 2).entries
    held = {"claim": str(FENCE + 3), "worker": "A", "state": "active"}
    assert (raw, fields_of(entry)) == (b"a", {**known, **held, "id": job, "task": task})


def test_references_among_thousands_get_ids_of_their_own(desk: Desk) -> None:
    tasks = [MARKER + b"%d" % n for n in range(1100)]
    desk.put(*tasks, front=True)
    assert desk.waiting() == tasks
    assert len(set(desk.client.lrange(desk.q.base, 0, -1))) == 1100


def test_a_resend_stores_nothing_twice(desk: Desk) -> None:
    call = ops.enqueue(desk.q, [b"a", MARKER])
    reply = desk.send(call)
    with desk.nothing_changes():
        assert desk.resend(call) == reply
        assert desk.resend(ops.enqueue(desk.q, [b"other"])) == reply


def test_a_late_copy_stores_nothing(desk: Desk) -> None:
    with desk.nothing_happens():
        assert desk.late(ops.enqueue(desk.q, [b"a"])) == [b"late"]


def test_a_bounded_queue_takes_all_or_nothing(desk: Desk) -> None:
    desk.put(b"a")
    call = ops.enqueue(desk.q, [b"b", b"c"], max_length=2)
    with desk.nothing_happens():
        assert desk.send(call) == [b"full", 1]
    with pytest.raises(QueueFull, match="'Q1' holds 1 tasks, 2 more are over its max_length of 2"):
        call.read([b"full", 1])
    assert desk.call(ops.enqueue(desk.q, [b"b"], max_length=2)) == 1
    assert desk.send(ops.enqueue(desk.q, [b"c"], max_length=0)) == [b"full", 2]


def test_full_is_final_for_its_number(desk: Desk) -> None:
    """Or a late copy would store a task whose caller was told that it was not."""
    desk.enter("A")
    desk.put(b"a")
    call = ops.enqueue(desk.q, [b"b"], max_length=1)
    full = desk.send(call)
    desk.take("A", 1)
    with desk.nothing_changes():
        assert desk.resend(call) == full


def test_the_bound_counts_what_waits_and_nothing_else(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    assert desk.retry("A", held) == "given"
    assert desk.call(ops.cancel_task(desk.q, b"a")).waiting == 1  # its reference stays in the list
    assert desk.call(ops.enqueue(desk.q, [b"b"], max_length=1)) == 1
    desk.start("A", 1)
    desk.stall(b"suspect")
    assert desk.send(ops.enqueue(desk.q, [b"c"], max_length=1)) == [b"full", 1]


@pytest.mark.parametrize(("tasks", "hungry", "woken"), [(1, 3, 1), (3, 2, 2), (20, 20, 16), (2, 0, 0)])
def test_wakes_as_many_as_there_is_work_for(desk: Desk, tasks: int, hungry: int, woken: int) -> None:
    workers = [f"W{n}" for n in range(hungry)]
    desk.enter(*workers)
    for worker in workers:
        assert desk.start(worker, 1).status == "short"
    with desk.listening(desk.q.base, *map(desk.q.wake_channel, workers)) as heard:
        desk.put(*[b"task"] * tasks)
    channels = [channel for channel, _ in heard]
    assert len(channels) == len(set(channels)) == woken
    assert set(channels) <= {f":wake:{worker}" for worker in workers}
    left = {worker for worker in workers if f":wake:{worker}" not in channels}
    assert desk.state().get(":hungry", set()) == left


def test_a_wake_up_that_reaches_nobody_moves_on(desk: Desk) -> None:
    workers = [f"W{n}" for n in range(30)]
    desk.enter(*workers)
    for worker in workers:
        desk.start(worker, 1)
    with desk.listening(desk.q.wake_channel("W7")) as heard:
        desk.put(b"a")
    assert heard == [(":wake:W7", b"1")]


def test_64_wake_ups_that_reach_nobody_are_enough(desk: Desk) -> None:
    workers = [f"W{n}" for n in range(100)]
    desk.enter(*workers)
    for worker in workers:
        desk.start(worker, 1)
    desk.put(b"a")
    assert len(desk.state()[":hungry"]) == 36


def test_events_are_told_to_those_who_listen(desk: Desk) -> None:
    with desk.listening(desk.q.events_channel) as heard:
        desk.put(b"a", b"b")
    assert heard == [(":events", b"enqueued 2")]


def test_events_cost_nothing_while_nobody_listens(desk: Desk) -> None:
    def published() -> int:
        calls: int = desk.client.info("commandstats").get("cmdstat_publish", {"calls": 0})["calls"]
        return calls

    before = published()
    desk.put(b"a", b"b")
    assert published() == before


def test_works_with_counts_that_expired(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    desk.put(b"a", MARKER)
    counts = desk.state()[":counts"]
    assert isinstance(counts, Expires)
    assert counts.value["enqueued"] == "2"
    seconds, micros = desk.client.time()
    assert 0 <= seconds * 1_000_000 + micros - int(counts.value["fence"]) < 60_000_000


def test_never_above_two_to_the_53_nor_with_an_exponent(desk: Desk) -> None:
    last = 9 * 10**15
    desk.client.hset(desk.q.counts, "fence", last - 10)
    desk.enter("A")
    desk.put(b"a", b"b")
    assert desk.take("A", 2) == [last - 9, last - 8]
    assert desk.client.exists(desk.q.claim(last - 9), desk.q.claim(last - 8)) == 2
    assert claim(1) not in desk.take("A", 0)


@pytest.mark.parametrize("fence", ["", "abc", "nan", "inf", "1e308", "1.5", "-7", str(2**53), "9" * 40])
def test_a_fence_that_was_never_assigned_does_not_count(desk: Desk, fence: str) -> None:
    desk.client.hset(desk.q.counts, "fence", fence)
    desk.enter("A")
    desk.put(b"a", b"b")
    first, second = desk.take("A", 2)
    assert abs(first / 10**6 - int(desk.client.time()[0])) < 600  # type: ignore[index,operator]
    assert second == first + 1


@pytest.mark.parametrize("task", [b"a", MARKER])
@pytest.mark.parametrize("key", ["base", "counts", "hungry"])
def test_a_key_of_a_foreign_type_stores_nothing(desk: Desk, key: str, task: bytes) -> None:
    desk.put(b"before")
    desk.client.set(getattr(desk.q, key), "foreign")
    with desk.nothing_changes(), pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        desk.put(b"before it", task)


def test_the_bound_counts_jobs_that_are_due_later_or_blocked_too(desk: Desk) -> None:
    desk.run("A", "runs")
    desk.dispatch("runs")
    desk.dispatch("due", run_at=FUTURE)
    desk.dispatch("waits")
    with pytest.raises(QueueFull, match="holds 3 tasks"):
        desk.call(ops.enqueue(desk.q, [b"a"], max_length=3))
    assert desk.call(ops.enqueue(desk.q, [b"a"], max_length=4)) == 1
