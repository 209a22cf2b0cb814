from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.ops.driver import BOOM, PAST, Desk
from worqr import ops
from worqr.ops import JobState, RunningTask, TaskSummary
from worqr.records import RemoteError


def raw(worker: str, claim: int, task: bytes) -> RunningTask:
    """A claim on a plain task, of which nothing but its payload is known."""
    return RunningTask(claim, worker, False, TaskSummary(None, task, JobState("active", attempts=1), len(task)))


def of_job(worker: str, claim: int, id: str, task: bytes = b"a", **known: Any) -> RunningTask:
    """A claim on a job."""
    state = JobState("active", claim, worker, **{"attempts": 1, **known})
    return RunningTask(claim, worker, False, TaskSummary(id, task, state, len(task)))


def running(desk: Desk, **options: Any) -> list[RunningTask]:
    """All that run, if one page is enough."""
    page = desk.call(ops.list_running(desk.q, **options))
    assert not page.more
    return page.tasks


def test_the_longest_running_first_of_whichever_worker(desk: Desk) -> None:
    [first] = desk.hold("B", b"a")
    desk.retry("B", first)
    [again] = desk.take("B", 1)
    one, two = desk.hold("A", b"c", b"d")
    [three] = desk.hold("B", b"e")
    error = RemoteError(BOOM.type, BOOM.message, "")
    second = of_job("B", again, f"@{first}", failures=1, attempts=2, error=error)
    with desk.nothing_changes():
        assert running(desk) == [second, raw("A", one, b"c"), raw("A", two, b"d"), raw("B", three, b"e")]
        assert running(desk, limit=2) == [second, raw("A", one, b"c")]
        assert running(desk, after_claim=one) == [raw("A", two, b"d"), raw("B", three, b"e")]
        assert running(desk, after_claim=one, limit=1) == [raw("A", two, b"d")]
        assert running(desk, after_claim=three) == []
        assert running(desk, before_claim=two) == [second, raw("A", one, b"c")]
        assert running(desk, after_claim=again, before_claim=two) == [raw("A", one, b"c")]


def test_pages_of_workers_each_with_its_longest_running(desk: Desk) -> None:
    for n in range(450):
        desk.enter(f"W{n:03}")
        desk.put(b"%d" % n)
        desk.take(f"W{n:03}", 1)
    pages = [desk.call(ops.list_running(desk.q, 3))]
    while pages[-1].more:
        pages.append(desk.call(ops.list_running(desk.q, 3, after_worker=pages[-1].worker)))
    assert [page.worker for page in pages] == ["W199", "W399", "W449"]
    assert [[each.summary.task for each in page.tasks] for page in pages] == [
        [b"0", b"1", b"2"],
        [b"200", b"201", b"202"],
        [b"400", b"401", b"402"],
    ]
    assert [each.worker for page in pages for each in page.tasks][:3] == ["W000", "W001", "W002"]


def test_no_more_than_a_thousand_claims_are_looked_at_but_those_of_the_first_worker(desk: Desk) -> None:
    desk.hold("A", *[b"a"] * 1500)
    desk.hold("B", *[b"b"] * 600)
    desk.hold("C", *[b"c"] * 400)
    desk.hold("D", b"d")
    page = desk.call(ops.list_running(desk.q, 2))
    assert (page.more, page.worker, len(page.tasks)) == (True, "A", 2)
    page = desk.call(ops.list_running(desk.q, 1000, after_worker="A"))
    assert (page.more, page.worker, len(page.tasks)) == (True, "C", 1000)
    page = desk.call(ops.list_running(desk.q, after_worker="C"))
    assert (page.more, page.worker, [each.worker for each in page.tasks]) == (False, "D", ["D"])


def test_a_page_without_a_claim_says_all_the_same_whether_there_is_more(desk: Desk) -> None:
    desk.enter(*[f"W{n:03}" for n in range(201)])
    page = desk.call(ops.list_running(desk.q))
    assert (page.more, page.worker, page.tasks) == (True, "W199", [])
    page = desk.call(ops.list_running(desk.q, after_worker="W199"))
    assert (page.more, page.worker, page.tasks) == (False, "W200", [])


def test_of_one_worker_if_it_is_named(desk: Desk) -> None:
    a, b = desk.hold("A", b"1", b"2"), desk.hold("B", b"3")
    with desk.nothing_changes():
        for worker, claims in (("A", a), ("B", b), ("C", [])):
            page = desk.call(ops.list_running(desk.q, only=worker))
            assert [(task.claim, task.worker) for task in page.tasks] == [(claim, worker) for claim in claims]
            assert not page.more
        assert [task.claim for task in desk.call(ops.list_running(desk.q, after_claim=a[0], only="A")).tasks] == a[1:]


def test_of_one_that_is_being_swept_too(desk: Desk) -> None:
    held = desk.hold("A", b"a", b"b")
    desk.call(ops.fail_worker(desk.q, "A", 1))
    assert running(desk) == [raw("A", held[0], b"a")]


def test_on_an_empty_database_nothing_is_made(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert desk.send(ops.list_running(desk.q)) == [b"ok", b""]
    assert desk.state() == {}


def test_of_a_job_with_its_id_its_time_and_what_it_says(desk: Desk) -> None:
    held = desk.run("A", "x")
    assert running(desk) == [of_job("A", held, "x", run_at_ms=PAST)]
    desk.call(ops.note_progress(desk.q, "A", [(held, 0.5, "half")]))
    with desk.nothing_changes():
        assert running(desk) == [of_job("A", held, "x", run_at_ms=PAST, progress=0.5, message="half")]


def test_with_its_own_timeout_and_whether_it_is_cancelled(desk: Desk) -> None:
    first = desk.run("A", "x", fields={"timeout": "1500"})
    [second] = desk.hold("A", b"b")
    desk.call(ops.cancel_job(desk.q, "x", ""))
    told = of_job("A", first, "x", run_at_ms=PAST)
    told = replace(told, cancelling=True, summary=replace(told.summary, timeout_ms=1500))
    assert running(desk) == [told, raw("A", second, b"b")]
    desk.call(ops.cancel_claims(desk.q, [second]))
    assert [each.cancelling for each in running(desk)] == [True, True]


@pytest.mark.parametrize("id", [None, "x"])
def test_of_a_long_payload_the_beginning_and_its_size(desk: Desk, id: str | None) -> None:
    payload = bytes(range(256)) * 100
    held = desk.run("A", id, payload) if id else desk.hold("A", payload)[0]
    [found] = running(desk)
    assert (found.claim, found.summary.id, found.summary.task, found.summary.size) == (held, id, payload[:100], 25_600)


def test_of_jobs_no_more_payload_is_read_than_fits_a_request(desk: Desk) -> None:
    desk.enter("A")
    for n in range(3):
        desk.dispatch(f"{n}", b"%d" % n * 3_000_000)
    desk.take("A", 3)
    found = running(desk)
    assert [(each.summary.id, each.summary.task) for each in found] == [
        ("0", b"0" * 100),
        ("1", b"1" * 100),
        ("2", b""),
    ]
    assert {each.summary.size for each in found} == {3_000_000}


def test_a_claim_whose_record_is_gone_or_foreign_is_shown_all_the_same(desk: Desk) -> None:
    held = desk.run("A", "x")
    desk.client.delete(desk.q.active("x"))
    gone = RunningTask(held, "A", False, TaskSummary("x", b"", JobState("active", attempts=1), 0))
    assert running(desk) == [gone]
    desk.client.set(desk.q.active("x"), "foreign")
    assert running(desk) == [replace(gone, summary=replace(gone.summary, size=None))]
