from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.ops.driver import FUTURE, Desk, job, reference
from worqr import ops
from worqr.command import Command
from worqr.keys import MARKER, QueueKeys


def test_empties_the_trash_in_steps(desk: Desk) -> None:
    desk.put(*[b"a"] * 5)
    desk.call(ops.delete_queue(desk.q))
    assert desk.call(ops.purge_queue(desk.q, 3))
    assert len(desk.state()[":trash"]) == 2
    assert not desk.call(ops.purge_queue(desk.q, 3))
    assert set(desk.state()) == {":counts"}
    with desk.nothing_changes():
        assert not desk.call(ops.purge_queue(desk.q))


def test_a_job_counts_as_ten_plain_tasks(desk: Desk) -> None:
    desk.put(*[b"a"] * 5)
    desk.call(ops.dispatch_jobs(desk.q, [job(f"w{n}") for n in range(4)]))
    desk.call(ops.delete_queue(desk.q))
    assert desk.call(ops.purge_queue(desk.q, 16))  # five plain tasks, one job, and another one for the last place
    assert len(desk.state()[":trash"]) == 2


def test_takes_the_records_of_the_jobs_along(desk: Desk) -> None:
    desk.stall(b"suspect")
    desk.hold("A", b"a")
    [held] = desk.hold("B", b"b")
    desk.retry("B", held)
    desk.put(MARKER, b"c")
    desk.call(ops.delete_queue(desk.q))
    assert desk.call(ops.purge_queue(desk.q, 21))
    assert not desk.call(ops.purge_queue(desk.q, 1))
    assert not any(name.startswith((":trash", ":job", "waiting")) for name in desk.state())


@pytest.mark.parametrize(
    ("clear", "why"),
    [(ops.delete_queue, b"the queue was deleted"), (partial(ops.cancel_all, reason="no paper"), b"no paper")],
)
def test_tells_whoever_waits_why(desk: Desk, clear: Callable[[QueueKeys], Command[Any]], why: bytes) -> None:
    options = {"id": "x", "fields": {"result_ttl": "60000"}}
    [job] = desk.call(
        ops.dispatch_jobs(
            desk.q,
            [
                (options, b"a"),
            ],
        )
    )
    desk.call(clear(desk.q))
    desk.call(ops.purge_queue(desk.q))
    found = desk.call(ops.read_result(desk.q, "x", job.number))
    assert (found.status, found.values) == ("cancelled", [why])


def test_what_is_newer_stays(desk: Desk) -> None:
    desk.put(b"old")
    desk.call(ops.delete_queue(desk.q))
    [held] = desk.hold("A", b"new")
    desk.retry("A", held)
    desk.call(ops.purge_queue(desk.q))
    assert desk.waiting() == [b"new"]


def test_an_old_reference_does_not_take_a_newer_record_of_its_id_along(desk: Desk) -> None:
    desk.put(b"old")
    desk.call(ops.delete_queue(desk.q))
    [held] = desk.hold("A", b"new")
    desk.retry("A", held)
    desk.client.rpush(desk.q.trash, reference(f"@{held}"))
    assert not desk.call(ops.purge_queue(desk.q))
    assert desk.waiting() == [b"new"]


def test_without_counts_all_of_the_trash_goes(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.retry("A", held)
    desk.call(ops.delete_queue(desk.q))
    desk.client.delete(desk.q.counts)
    assert not desk.call(ops.purge_queue(desk.q))
    assert set(desk.state()) == {":workers", ":policy:A"}


def test_on_an_empty_database_nothing_is_made(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert desk.send(ops.purge_queue(desk.q)) == [b"ok"]
    assert desk.state() == {}


# Jobs


def test_takes_due_and_blocked_ones_along_and_tells_whoever_waits(desk: Desk) -> None:
    kept: dict[str, Any] = {"fields": {"result_ttl": "60000"}}
    held = desk.run("A", "runs", **kept)
    numbers = {"runs": desk.dispatch("runs", **kept).number, "due": desk.dispatch("due", run_at=FUTURE, **kept).number}
    numbers["waits"] = desk.dispatch("waits", unique_for=60_000, **kept).number
    desk.call(ops.delete_queue(desk.q))
    with desk.listening(*map(desk.q.job, numbers)) as heard:
        assert not desk.call(ops.purge_queue(desk.q))
    assert sorted(heard) == [(f":job:{name}", b"cancelled") for name in ("due", "runs", "waits")]
    for name, number in numbers.items():
        found = desk.call(ops.read_result(desk.q, name, number))
        assert (found.status, found.values) == ("cancelled", [b"the queue was deleted"])
    assert {name for name in desk.state() if not name.startswith(":result")} == {
        *(":active:runs", ":claims:A", f":claim:{held}", ":workers", ":policy:A", ":counts")
    }


def test_in_steps_through_all_that_is_there(desk: Desk) -> None:
    desk.call(ops.dispatch_jobs(desk.q, [job(f"r{n}") for n in range(4)]))
    desk.enter("A")
    desk.take("A", 4)
    desk.call(ops.dispatch_jobs(desk.q, [job(f"r{n}") for n in range(4)]))
    desk.call(ops.dispatch_jobs(desk.q, [job(f"d{n}", run_at=FUTURE) for n in range(4)]))
    desk.call(ops.dispatch_jobs(desk.q, [job(f"w{n}") for n in range(4)]))
    desk.call(ops.delete_queue(desk.q))
    left = []
    while desk.call(ops.purge_queue(desk.q, 30)):
        left.append(len([name for name in desk.state() if name.startswith(":job:")]))
    assert left == [9, 6, 3]
    assert not any(name.startswith((":trash", ":job:")) for name in desk.state())


def test_a_newer_one_of_its_id_stays_wherever_it_is(desk: Desk) -> None:
    desk.call(ops.dispatch_jobs(desk.q, [job("a"), job("b", run_at=FUTURE), job("c")]))
    desk.call(ops.delete_queue(desk.q))
    desk.call(ops.dispatch_jobs(desk.q, [job("a", b"n", run_at=FUTURE), job("b", b"n"), job("c", b"n")]))
    desk.enter("A")
    assert len(desk.start("A", 1).entries) == 1  # b runs
    before = {name: value for name, value in desk.state().items() if not name.startswith(":trash")}
    assert not desk.call(ops.purge_queue(desk.q))
    assert desk.state() == before
