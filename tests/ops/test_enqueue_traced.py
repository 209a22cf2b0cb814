from __future__ import annotations

import hashlib
from typing import Any

import pytest
import redis

from tests.ops.driver import FENCE, Desk, Expires, fields_of, record, reference
from worqr import ops
from worqr.command import Command
from worqr.keys import MARKER

META = '{"traceparent":"00-1-2-01"}'


def traced(desk: Desk, *tasks: bytes, **options: Any) -> Command[int]:
    return ops.enqueue_traced(ops.enqueue(desk.q, tasks, **options), META)


def put(desk: Desk, *tasks: bytes, front: bool = False, max_length: int | None = None) -> list[bytes]:
    return desk.send(traced(desk, *tasks, front=front, max_length=max_length))


def digest(task: bytes) -> str:
    return hashlib.sha1(task).hexdigest()


def test_tasks_become_jobs_with_meta_that_are_found_by_their_payload(desk: Desk) -> None:
    assert put(desk, b"a", b"b") == [b"ok", 2]
    one, two = f"@{FENCE + 1}", f"@{FENCE + 2}"
    assert desk.state() == {
        "waiting": [reference(two), reference(one)],
        f":job:{one}": record("a", FENCE + 1, twin=digest(b"a"), meta=META),
        f":job:{two}": record("b", FENCE + 2, twin=digest(b"b"), meta=META),
        f":twins:{digest(b'a')}": {one},
        f":twins:{digest(b'b')}": {two},
        ":counts": Expires({"enqueued": "2", "fence": str(FENCE + 2)}),
    }


def test_they_are_taken_in_the_order_of_all_plain_tasks(desk: Desk) -> None:
    desk.put(b"1")
    put(desk, b"2", b"3")
    desk.put(b"4")
    put(desk, b"-1", b"0", front=True)
    assert desk.waiting() == [b"-1", b"0", b"1", b"2", b"3", b"4"]
    desk.enter("A")
    taken = desk.start("A", 9).entries
    payloads = [entry if isinstance(entry, bytes) else fields_of(entry)["task"] for entry in taken]
    assert [each.encode() if isinstance(each, str) else each for each in payloads] == [
        *(b"-1", b"0", b"1", b"2", b"3", b"4")
    ]


@pytest.mark.parametrize("task", [b"", b"\x00\xff", MARKER + b"x", b"x" * 100_000])
def test_any_payload_comes_out_as_it_went_in(desk: Desk, task: bytes) -> None:
    put(desk, task)
    assert desk.waiting() == [task]
    desk.enter("A")
    [entry] = desk.start("A", 1).entries
    fields = fields_of(entry)
    assert (fields["task"], fields["meta"]) == (task, META)


def test_a_cancel_by_payload_finds_each_copy_traced_or_not(desk: Desk) -> None:
    put(desk, b"a", b"a", b"b")
    desk.put(b"a")
    assert desk.call(ops.cancel_task(desk.q, b"a")).waiting == 3
    assert desk.waiting() == [b"b"]
    assert desk.counts() == {"enqueued": 4, "cancelled": 3}


def test_a_retry_keeps_the_meta_and_the_place_among_the_copies(desk: Desk) -> None:
    put(desk, b"a")
    desk.enter("A")
    [claimed] = desk.take("A", 1)
    assert desk.retry("A", claimed) == "given"
    kept = desk.state()[f":job:@{FENCE + 1}"]
    assert isinstance(kept, dict)
    assert (kept["meta"], kept["failures"], kept["twin"]) == (META, "1", digest(b"a"))
    assert desk.call(ops.cancel_task(desk.q, b"a")).waiting == 1


def test_nothing_stays_of_a_task_that_is_finished(desk: Desk) -> None:
    desk.enter("A")
    before = set(desk.state())
    put(desk, b"a", b"b")
    assert desk.call(ops.finish_tasks(desk.q, "A", desk.take("A", 2))) == {}
    assert set(desk.state()) - before <= {":counts"}


def test_a_resend_stores_nothing_twice(desk: Desk) -> None:
    call = traced(desk, b"a", MARKER)
    reply = desk.send(call)
    with desk.nothing_changes():
        assert desk.resend(call) == reply
        assert desk.resend(traced(desk, b"other")) == reply


def test_a_late_copy_stores_nothing(desk: Desk) -> None:
    with desk.nothing_happens():
        assert desk.late(traced(desk, b"a")) == [b"late"]


def test_a_bounded_queue_takes_all_or_nothing(desk: Desk) -> None:
    desk.put(b"a")
    with desk.nothing_happens():
        assert put(desk, b"b", b"c", max_length=2) == [b"full", 1]
    assert put(desk, b"b", max_length=2) == [b"ok", 1]


@pytest.mark.parametrize("meta", ["x" * 4097, "\udcff"])
def test_a_meta_that_cannot_be_is_refused_before_anything_is_written(desk: Desk, meta: str) -> None:
    call = ops.enqueue_traced(ops.enqueue(desk.q, [b"a"]), meta.encode("utf-8", "surrogateescape"))  # type: ignore[arg-type]
    with desk.nothing_happens(), pytest.raises(redis.ResponseError, match="meta"):
        desk.send(call)


def test_wakes_as_many_as_there_is_work_for(desk: Desk) -> None:
    workers = ["W1", "W2", "W3"]
    desk.enter(*workers)
    for worker in workers:
        assert desk.start(worker, 1).status == "short"
    with desk.listening(desk.q.base, *map(desk.q.wake_channel, workers)) as heard:
        put(desk, b"a", b"b")
    assert len({channel for channel, _ in heard}) == len(heard) == 2


def test_a_listener_hears_of_them(desk: Desk) -> None:
    with desk.listening(desk.q.events_channel) as heard:
        put(desk, b"a", b"b")
    assert heard == [(":events", b"enqueued 2")]


def test_a_value_of_another_application_is_replaced(desk: Desk) -> None:
    desk.client.set(desk.q.job(f"@{FENCE + 1}"), "foreign")
    desk.client.set(f"{desk.q.base}:twins:{digest(b'a')}", "foreign")
    assert put(desk, b"a") == [b"ok", 1]
    assert desk.waiting() == [b"a"]


@pytest.mark.parametrize("key", ["base", "counts", "hungry"])
def test_a_key_of_a_foreign_type_stores_nothing(desk: Desk, key: str) -> None:
    desk.put(b"before")
    desk.client.set(getattr(desk.q, key), "foreign")
    with desk.nothing_changes(), pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        put(desk, b"a")


def test_on_an_empty_database(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert put(desk, b"a") == [b"ok", 1]
    assert desk.waiting() == [b"a"]
    counts = desk.state()[":counts"]
    assert isinstance(counts, Expires)
    assert counts.value["enqueued"] == "1"
