from __future__ import annotations

import pytest

from tests.ops.driver import ALL_BYTES, FUTURE, Desk, grown
from worqr import ops
from worqr.keys import MARKER

ANY = [b"", b"\xff\x00\r\n", ALL_BYTES]


def by_id(desk: Desk, id: str = "x") -> bytes | None:
    with desk.nothing_changes():
        return desk.call(ops.read_payload(desk.q, id))


def by_claim(desk: Desk, claim: int) -> bytes | None:
    with desk.nothing_changes():
        return desk.call(ops.read_payload(desk.q, claim=claim))


@pytest.mark.parametrize("task", ANY)
def test_of_a_job_wherever_it_is(desk: Desk, task: bytes) -> None:
    task = grown(task)
    desk.dispatch("x", task)
    assert by_id(desk) == task
    desk.dispatch("x", task, run_at=FUTURE)
    assert by_id(desk) == task
    desk.dispatch("x", task)
    desk.enter("A")
    [held] = desk.take("A", 1)
    assert by_id(desk) == by_claim(desk, held) == task
    desk.fail("A", held)
    assert by_id(desk) == by_claim(desk, held) == task


@pytest.mark.parametrize("task", [*ANY, MARKER, MARKER + b"@1"])
def test_of_a_plain_task_that_runs_or_failed(desk: Desk, task: bytes) -> None:
    task = grown(task)
    [held] = desk.hold("A", task)
    assert by_claim(desk, held) == task
    desk.fail("A", held)
    [name] = desk.client.hkeys(desk.q.dead_letter_index)
    assert by_claim(desk, held) == by_id(desk, name.decode()) == task


def test_the_one_that_runs_comes_first_then_the_one_that_waits_then_the_newest_that_failed(desk: Desk) -> None:
    desk.fail("A", desk.run("A", "x", b"failed"))
    held = desk.run("A", "x", b"runs")
    desk.dispatch("x", b"blocked")
    assert by_id(desk) == b"runs"
    desk.call(ops.finish_tasks(desk.q, "A", [held]))
    assert by_id(desk) == b"blocked"
    desk.call(ops.cancel_job(desk.q, "x", ""))
    assert by_id(desk) == b"failed"


def test_of_nothing_is_none(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.call(ops.finish_tasks(desk.q, "A", [held]))
    assert (by_claim(desk, held), by_id(desk)) == (None, None)
    desk.client.delete(desk.q.counts, desk.q.workers, desk.q.policy("A"))
    assert (by_claim(desk, held), by_id(desk)) == (None, None)
    assert desk.state() == {}
