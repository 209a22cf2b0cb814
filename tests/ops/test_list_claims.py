from __future__ import annotations

from typing import Any

import pytest

from tests.ops.driver import BOOM, PAST, Desk
from worqr import ops
from worqr.ops import ActiveClaim, JobState, TaskSummary
from worqr.records import RemoteError


def raw(worker: str, claim: int, task: bytes) -> ActiveClaim:
    """A claim on a plain task, of which nothing but its payload is known."""
    return ActiveClaim(claim, worker, TaskSummary(None, task, JobState("active", attempts=1)))


def of_job(worker: str, claim: int, id: str, task: bytes = b"a", **known: Any) -> ActiveClaim:
    """A claim on a job."""
    state = JobState("active", claim, worker, **{"attempts": 1, **known})
    return ActiveClaim(claim, worker, TaskSummary(id, task, state))


def test_by_worker_the_oldest_first_with_what_runs(desk: Desk) -> None:
    [first] = desk.hold("B", b"a")
    desk.retry("B", first)
    [again] = desk.take("B", 1)
    one, two = desk.hold("A", b"c", b"d")
    error = RemoteError(BOOM.type, BOOM.message, "")
    third = of_job("B", again, f"@{first}", failures=1, attempts=2, error=error)
    with desk.nothing_changes():
        assert desk.call(ops.list_claims(desk.q)) == [raw("A", one, b"c"), raw("A", two, b"d"), third]
        assert desk.call(ops.list_claims(desk.q, 1)) == [raw("A", one, b"c")]
        assert desk.call(ops.list_claims(desk.q, 2)) == [raw("A", one, b"c"), raw("A", two, b"d")]


@pytest.mark.parametrize("limit", [1, 2, 3, 10])
def test_pages_together_are_the_whole_list(desk: Desk, limit: int) -> None:
    desk.hold("B", b"a", b"b", b"c")
    desk.hold("A", b"d", b"e")
    desk.hold("C", b"f")
    found: list[ActiveClaim] = []
    after = ("", 0)
    while some := desk.call(ops.list_claims(desk.q, limit, after=after)):
        assert len(some) <= limit
        found += some
        after = some[-1].worker, some[-1].claim
    assert found == desk.call(ops.list_claims(desk.q))
    assert [each.summary.task for each in found] == [b"d", b"e", b"a", b"b", b"c", b"f"]


def test_of_one_that_is_being_swept_too(desk: Desk) -> None:
    held = desk.hold("A", b"a", b"b")
    desk.call(ops.fail_worker(desk.q, "A", 1))
    assert desk.call(ops.list_claims(desk.q)) == [raw("A", held[0], b"a")]


def test_on_an_empty_database_nothing_is_made(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert desk.send(ops.list_claims(desk.q)) == [b"ok"]
    assert desk.state() == {}


def test_of_a_job_with_its_id_its_time_and_what_it_says(desk: Desk) -> None:
    held = desk.run("A", "x")
    assert desk.call(ops.list_claims(desk.q)) == [of_job("A", held, "x", run_at_ms=PAST)]
    desk.call(ops.note_progress(desk.q, "A", [(held, 0.5, "half")]))
    with desk.nothing_changes():
        told = of_job("A", held, "x", run_at_ms=PAST, progress=0.5, message="half")
        assert desk.call(ops.list_claims(desk.q)) == [told]


@pytest.mark.parametrize("id", [None, "x"])
def test_of_a_long_payload_the_beginning(desk: Desk, id: str | None) -> None:
    payload = bytes(range(256)) * 100
    held = desk.run("A", id, payload) if id else desk.hold("A", payload)[0]
    [found] = desk.call(ops.list_claims(desk.q))
    assert (found.claim, found.summary.id, found.summary.task) == (held, id, payload[:100])


def test_of_jobs_no_more_payload_is_read_than_fits_a_request(desk: Desk) -> None:
    desk.enter("A")
    for n in range(3):
        desk.dispatch(f"{n}", b"%d" % n * 3_000_000)
    desk.take("A", 3)
    found = desk.call(ops.list_claims(desk.q))
    assert [(each.summary.id, each.summary.task) for each in found] == [
        ("0", b"0" * 100),
        ("1", b"1" * 100),
        ("2", b""),
    ]


def test_a_claim_whose_record_is_gone_is_shown_all_the_same(desk: Desk) -> None:
    held = desk.run("A", "x")
    desk.client.delete(desk.q.active("x"))
    assert desk.call(ops.list_claims(desk.q)) == [
        ActiveClaim(held, "A", TaskSummary("x", b"", JobState("active", attempts=1)))
    ]
