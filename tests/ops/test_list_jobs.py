from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import pytest

from tests.ops.driver import BOOM, FUTURE, PAST, Desk
from worqr import ops
from worqr.keys import MARKER
from worqr.ops import JobState, TaskSummary
from worqr.records import RemoteError

Unstarted = Literal["waiting", "due", "blocked"]


def page(desk: Desk, state: Unstarted, limit: int = 1000, after: str = "") -> tuple[bool, list[TaskSummary]]:
    """Whether there is more, and what is listed."""
    with desk.nothing_changes():
        found = desk.call(ops.list_jobs(desk.q, state, limit, after=after))
    return found.more, [seen for _, seen in found.positions if seen is not None]


def pages(desk: Desk, state: Unstarted, limit: int) -> Iterator[list[str | bytes]]:
    """All pages: ids, and payloads of plain tasks."""
    more, cursor = True, ""
    while more:
        found = desk.call(ops.list_jobs(desk.q, state, limit, after=cursor))
        yield [seen.id or seen.task for _, seen in found.positions if seen is not None]
        more, cursor = found.more, found.positions[-1][0] if found.positions else ""


def names(desk: Desk, state: Unstarted) -> list[str | bytes]:
    return [seen.id or seen.task for seen in page(desk, state)[1]]


def job(name: str, task: bytes = b"a", **known: Any) -> TaskSummary:
    return TaskSummary(name, task, JobState(**known), len(task))


def test_each_state_has_its_jobs_with_what_is_known_of_them(desk: Desk) -> None:
    held = desk.run("A", "runs")
    desk.dispatch("runs", b"twin", run_at=FUTURE)
    retried = desk.hold("B", b"raw")[0]
    desk.retry("B", retried, run_at_ms=FUTURE + 1)
    desk.put(b"plain")
    desk.dispatch("waits", b"b")
    desk.dispatch("later", b"c", run_at=FUTURE)
    error = RemoteError(BOOM.type, BOOM.message, "")
    assert page(desk, "waiting") == (
        False,
        [
            TaskSummary(None, b"plain", JobState("waiting"), 5, place=1),
            replace(job("waits", b"b", state="waiting", run_at_ms=PAST), place=2),
        ],
    )
    tried = {"run_at_ms": FUTURE + 1, "failures": 1, "attempts": 1, "error": error}
    assert page(desk, "due") == (
        False,
        [job("later", b"c", state="due", run_at_ms=FUTURE), job(f"@{retried}", b"raw", state="due", **tried)],
    )
    assert page(desk, "blocked") == (False, [job("runs", b"twin", state="blocked", run_at_ms=FUTURE)])
    desk.call(ops.finish_tasks(desk.q, "A", [held]))
    assert page(desk, "blocked") == (False, [])


def test_what_waits_is_listed_as_it_will_be_taken_the_suspects_first(desk: Desk) -> None:
    desk.stall(b"poison", b"bad")
    suspects = [seen.id for seen in page(desk, "waiting")[1]]
    desk.put(b"1", b"2")
    desk.dispatch("x")
    assert names(desk, "waiting") == [*suspects, b"1", b"2", "x"]
    assert desk.waiting() == [b"poison", b"bad", b"1", b"2", b"a"]


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("state", ["waiting", "due", "blocked"])
def test_pages_together_are_the_whole_list(desk: Desk, limit: int, state: Unstarted) -> None:
    ids = [f"job {n} ä" for n in range(7)]
    if state == "waiting":
        desk.stall(b"poison", b"bad")
    for each in ids:
        if state == "blocked":
            desk.run("A", each)
        desk.dispatch(each, run_at=FUTURE if state == "due" else PAST)
    found = list(pages(desk, state, limit))
    assert [name for each in found for name in each] == names(desk, state)
    assert set(ids) <= {name for each in found for name in each}
    assert all(len(each) == limit for each in found[:-1])


def test_what_is_claimed_meanwhile_hides_nothing_that_waits(desk: Desk) -> None:
    desk.put(*[b"%d" % n for n in range(10)])
    first = desk.call(ops.list_jobs(desk.q, "waiting", 4))
    desk.enter("A")
    desk.take("A", 2)
    desk.put(b"10")
    more, rest = page(desk, "waiting", after=first.positions[-1][0])
    assert (more, [seen.task for seen in rest]) == (False, [b"%d" % n for n in range(4, 11)])
    desk.take("A", 6)
    assert [seen.task for seen in page(desk, "waiting", after=first.positions[-1][0])[1]] == [b"8", b"9", b"10"]


def test_after_a_due_job_that_has_gone_come_those_that_are_due_later(desk: Desk) -> None:
    for n in range(4):
        desk.dispatch(f"{n}", run_at=FUTURE + n)
    cursor = desk.call(ops.list_jobs(desk.q, "due", 2)).positions[-1][0]
    desk.call(ops.cancel_job(desk.q, "1", ""))
    assert [seen.id for seen in page(desk, "due", after=cursor)[1]] == ["2", "3"]


def test_a_place_without_a_job_is_passed_over_and_a_job_with_two_places_is_listed_once(desk: Desk) -> None:
    for each in ("gone", "twice", "stays"):
        desk.dispatch(each)
    desk.call(ops.cancel_job(desk.q, "gone", ""))
    desk.dispatch("twice", run_at=FUTURE)
    assert names(desk, "waiting") == ["stays"]
    desk.dispatch("twice", run_at=PAST)
    assert names(desk, "waiting") == ["twice", "stays"]
    found = desk.call(ops.list_jobs(desk.q, "waiting", 1))
    assert found.more
    assert [seen for _, seen in found.positions] == [None]


def test_no_more_payload_is_read_than_fits_a_request(desk: Desk) -> None:
    for n in range(4):
        desk.put(b"%d" % n * 5_000_000)
    desk.dispatch("x", b"j" * 5_000_000)
    found = list(pages(desk, "waiting", 1000))
    assert [len(each) for each in found] == [2, 2, 1]
    for n in range(2):
        desk.dispatch(f"due {n}", b"%d" % n * 5_000_000, run_at=FUTURE + n)
    assert [seen.task for seen in page(desk, "due")[1]] == [b"0" * 100, b""]


def test_a_payload_that_looks_like_a_reference_is_listed(desk: Desk) -> None:
    desk.put(MARKER + b"x")
    assert [seen.task for seen in page(desk, "waiting")[1]] == [MARKER + b"x"]


@pytest.mark.parametrize("state", ["waiting", "due", "blocked"])
@pytest.mark.parametrize("after", ["", "queue 5 7", "nonsense", "1 gone", "-"])
def test_on_an_empty_database_nothing_is_made(desk: Desk, state: Unstarted, after: str) -> None:
    desk.client.delete(desk.q.counts)
    assert desk.send(ops.list_jobs(desk.q, state, after=after)) == [b"ok"]
    assert desk.state() == {}


@pytest.mark.parametrize("limit", [1, 7, 64, 1000])
def test_a_long_queue_is_listed_whole(desk: Desk, limit: int) -> None:
    expected: list[str | bytes] = []
    for n in range(200):
        if n % 3:
            desk.put(b"%d" % n)
        else:
            desk.dispatch(f"job {n}")
        expected.append(b"%d" % n if n % 3 else f"job {n}")
    assert [name for some in pages(desk, "waiting", limit) for name in some] == expected


def test_what_waits_is_listed_from_the_end_with_the_places_from_the_front(desk: Desk) -> None:
    desk.stall(b"poison", b"bad")
    desk.put(b"1", b"2")
    desk.dispatch("x")
    front = desk.call(ops.list_jobs(desk.q, "waiting")).positions
    end = desk.call(ops.list_jobs(desk.q, "waiting", from_end=True)).positions
    assert [seen and seen.place for _, seen in front] == [1, 2, 3, 4, 5]
    assert end == [*front[:1:-1], *front[1::-1]]  # the suspects are in front


@pytest.mark.parametrize("limit", [1, 2, 7, 64])
def test_pages_from_the_end_are_the_whole_list(desk: Desk, limit: int) -> None:
    desk.stall(b"poison", b"bad")
    desk.put(*[b"%d" % n for n in range(100)])
    for lane in ("a", "b"):
        for n in range(5):
            desk.dispatch(f"{lane}{n}", lane=lane)
    found, after, more = list[tuple[str, int | None, str]](), "", True
    while more:
        page = desk.call(ops.list_jobs(desk.q, "waiting", limit, after=after, from_end=True))
        found += [(seen.lane, seen.place, seen.id or seen.task.decode()) for _, seen in page.positions if seen]
        after, more = page.positions[-1][0], page.more
    assert found[:100] == [("", n + 3, f"{n}") for n in reversed(range(100))]
    assert [(lane, place) for lane, place, _ in found[100:102]] == [("", 2), ("", 1)]
    assert found[102:] == [(lane, n + 1, f"{lane}{n}") for lane in ("a", "b") for n in reversed(range(5))]


def test_from_the_end_claims_and_new_tasks_hide_nothing_and_repeat_nothing(desk: Desk) -> None:
    desk.put(*[b"%d" % n for n in range(10)])
    first = desk.call(ops.list_jobs(desk.q, "waiting", 4, from_end=True))
    assert [seen and seen.task for _, seen in first.positions] == [b"9", b"8", b"7", b"6"]
    desk.enter("A")
    desk.take("A", 2)
    desk.put(b"10", b"11", b"12")
    rest = desk.call(ops.list_jobs(desk.q, "waiting", after=first.positions[-1][0], from_end=True))
    assert [(seen.task, seen.place) for _, seen in rest.positions if seen] == [
        (b"5", 4),
        (b"4", 3),
        (b"3", 2),
        (b"2", 1),
    ]
    desk.take("A", 6)  # the next task of that page runs, and all before it
    assert desk.call(ops.list_jobs(desk.q, "waiting", after=first.positions[-1][0], from_end=True)).positions == []


def test_from_the_end_a_claim_in_one_lane_hides_no_task_of_another(desk: Desk) -> None:
    for lane in ("a", "b"):
        for n in range(3):
            desk.dispatch(f"{lane}{n}", lane=lane)
    first = desk.call(ops.list_jobs(desk.q, "waiting", 4, from_end=True))
    assert [seen and seen.id for _, seen in first.positions] == ["a2", "a1", "a0", "b2"]
    desk.enter("A")
    desk.take("A", 1)  # a0
    assert [seen.id for _, seen in rest(desk, first.positions[-1][0]) if seen] == ["b1", "b0"]


def rest(desk: Desk, after: str) -> list[tuple[str, TaskSummary | None]]:
    return desk.call(ops.list_jobs(desk.q, "waiting", after=after, from_end=True)).positions


def test_either_end_of_a_long_queue_costs_the_same(desk: Desk) -> None:
    """A list of small items is in nodes of 8 KiB, and LRANGE skips whole nodes, from the end that is nearer."""
    desk.put(*[b"%d" % n for n in range(1000)])
    for from_end in (False, True):
        found = desk.call(ops.list_jobs(desk.q, "waiting", 50, from_end=from_end))
        assert found.more
        places = [seen.place for _, seen in found.positions if seen]
        assert places == (list(range(1000, 950, -1)) if from_end else list(range(1, 51)))
