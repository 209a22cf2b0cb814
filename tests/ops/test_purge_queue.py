from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.ops.driver import Desk, reference
from worqr import ops
from worqr.call import Call
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


def test_takes_the_records_of_the_jobs_along(desk: Desk) -> None:
    desk.stall(b"suspect")
    desk.hold("A", b"a")
    [held] = desk.hold("B", b"b")
    desk.retry("B", held)
    desk.put(MARKER, b"c")
    desk.call(ops.delete_queue(desk.q))
    assert desk.call(ops.purge_queue(desk.q, 3))
    assert not desk.call(ops.purge_queue(desk.q, 1))
    assert not any(name.startswith((":trash", ":job", "waiting")) for name in desk.state())


@pytest.mark.parametrize(
    ("clear", "why"),
    [(ops.delete_queue, b"the queue was deleted"), (partial(ops.cancel_all, reason="no paper"), b"no paper")],
)
def test_tells_whoever_waits_why(desk: Desk, clear: Callable[[QueueKeys], Call[Any]], why: bytes) -> None:
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
    assert (found.word, found.facts) == ("cancelled", [why])


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
