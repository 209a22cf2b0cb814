from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.ops.driver import BOOM, FUTURE, PAST, Desk
from worqr import ops
from worqr.ops import JobState
from worqr.records import RemoteError

FAILED = RemoteError(BOOM.type, BOOM.message, "")
KEPT: dict[str, Any] = {"fields": {"result_ttl": "60000"}}


def status(desk: Desk, number: int = 0, id: str = "x") -> JobState:
    with desk.nothing_changes():
        return desk.call(ops.job_status(desk.q, id, number))


def test_where_it_is_with_what_is_known_of_it(desk: Desk) -> None:
    waits = desk.dispatch("x").number
    assert status(desk) == status(desk, waits) == JobState("waiting", run_at_ms=PAST)
    desk.dispatch("x", run_at=FUTURE)
    assert status(desk) == status(desk, waits) == JobState("due", run_at_ms=FUTURE)
    desk.dispatch("x", run_at=PAST)
    desk.enter("A")
    [held] = desk.take("A", 1)
    active = JobState("active", claim=held, worker="A", run_at_ms=PAST, attempts=1)
    assert status(desk) == status(desk, waits) == active
    twin = desk.dispatch("x", run_at=FUTURE).number
    assert status(desk) == status(desk, waits) == active
    assert status(desk, twin) == JobState("blocked", run_at_ms=FUTURE)


def test_how_far_it_is_and_how_often_it_failed(desk: Desk) -> None:
    held = desk.run("A", "x")
    desk.retry("A", held)
    again = JobState("waiting", run_at_ms=PAST, failures=1, attempts=1, error=FAILED)
    assert status(desk) == again
    [held] = desk.take("A", 1)
    desk.call(ops.note_progress(desk.q, "A", [(held, 0.5, "half ä")]))
    known = JobState("active", claim=held, worker="A", run_at_ms=PAST, progress=0.5, message="half ä", failures=1)
    assert status(desk) == replace(known, attempts=2, error=FAILED)
    desk.call(ops.stop_tasks(desk.q, "A", [held]))
    assert status(desk) == again


def test_a_raw_task_that_became_a_job_has_no_time_that_was_asked_for(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.retry("A", held)
    assert status(desk, held, f"@{held}") == JobState("waiting", failures=1, attempts=1, error=FAILED)


def test_how_it_ended_while_that_is_kept(desk: Desk) -> None:
    ends = [("finish", {}), ("fail", {"failures": 1, "error": FAILED}), ("cancel", {})]
    words = {"finish": "finished", "fail": "failed", "cancel": "cancelled"}
    for n, (end, known) in enumerate(ends):
        held = desk.run("A", f"{n}", **KEPT)
        if end == "fail":
            desk.fail("A", held)
        if end == "cancel":
            desk.call(ops.cancel_job(desk.q, f"{n}", ""))
        desk.call(ops.finish_tasks(desk.q, "A", [held]))
        assert status(desk, 0, f"{n}") == status(desk, held - 1, f"{n}") == JobState(words[end], attempts=1, **known)


def test_of_one_that_ended_without_a_trace_nothing_is_known(desk: Desk) -> None:
    held = desk.run("A", "x")
    desk.call(ops.finish_tasks(desk.q, "A", [held]))
    assert status(desk) == status(desk, held - 1) == status(desk, 0, "nobody") == JobState("gone")


def test_what_was_set_aside_has_failed_also_when_no_result_is_kept(desk: Desk) -> None:
    held = desk.run("A", "x")
    desk.fail("A", held)
    known = JobState("failed", failures=1, attempts=1, error=FAILED)
    assert status(desk) == status(desk, held - 1) == known
    assert status(desk, held + 5) == JobState("gone")
    desk.call(ops.drop_aside(desk.q, "failed", [held]))
    assert status(desk) == JobState("gone")


def test_a_raw_task_that_was_set_aside_has_failed_too(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.fail("A", held, undecodable=True)
    known = JobState("failed", attempts=1, error=FAILED)
    assert status(desk, 0, f"@{held}") == status(desk, held, f"@{held}") == known


@pytest.mark.parametrize("end", ["finish", "fail", "broken", "cancel", "cancel waiting", "stall"])
@pytest.mark.parametrize("kept", [True, False])
def test_what_was_known_of_its_tries_survives_its_end(desk: Desk, end: str, kept: bool) -> None:
    held = desk.run("A", "x", **(KEPT if kept else {}))
    desk.retry("A", held)
    if end != "cancel waiting":
        [held] = desk.take("A", 1)
        desk.call(ops.note_progress(desk.q, "A", [(held, 0.75, "most")]))
    known = JobState("finished", failures=1, attempts=2, progress=0.75, message="most")
    match end:
        case "fail":
            desk.fail("A", held)
            known = replace(known, state="failed", failures=2, error=FAILED)
        case "broken":
            desk.fail("A", held, undecodable=True)
            known = replace(known, state="failed", error=FAILED)
        case "stall":
            desk.retry("A", held, counter="stalls", limit=1)
            known = replace(known, state="failed", error=FAILED)
        case "cancel waiting":
            desk.call(ops.cancel_job(desk.q, "x", ""))
            known = JobState("cancelled", failures=1, attempts=1)
        case _:
            if end == "cancel":
                desk.call(ops.cancel_job(desk.q, "x", ""))
                known = replace(known, state="cancelled")
            desk.call(ops.finish_tasks(desk.q, "A", [held]))
    assert status(desk) == (known if kept or known.state == "failed" else JobState("gone"))


def test_a_dead_worker_is_the_error_of_the_try_that_it_had(desk: Desk) -> None:
    desk.run("A", "x")
    desk.call(ops.fail_worker(desk.q, "A"))
    died = RemoteError("Stalled", "its worker died while it ran", "")
    assert status(desk) == JobState("waiting", run_at_ms=PAST, attempts=1, error=died)


def test_a_new_start_of_the_counters_forgets_the_error_too(desk: Desk) -> None:
    held = desk.run("A", "x")
    desk.retry("A", held)
    desk.dispatch("x", counts=False)
    assert status(desk).error == FAILED
    desk.dispatch("x")
    assert status(desk) == JobState("waiting", run_at_ms=PAST)
    desk.retry("A", desk.take("A", 1)[0])
    [held] = desk.take("A", 1)
    desk.dispatch("x", data=False, counts=True)
    desk.retry("A", held)
    assert status(desk) == JobState("waiting", run_at_ms=PAST)


@pytest.mark.parametrize("letter", ["a", "ä", "€", "𝄞"])
@pytest.mark.parametrize("shift", [0, 1, 2, 3])
def test_of_a_long_message_whole_letters_are_kept(desk: Desk, letter: str, shift: int) -> None:
    held = desk.run("A", "x")
    error = RemoteError("Boom", "." * shift + letter * 1000, "")
    desk.call(ops.retry_task(desk.q, "A", held, error, counter="failures", limit=9))
    found = status(desk).error
    assert found is not None
    assert error.message.startswith(found.message)
    assert 490 < len(found.message.encode()) <= 500


def test_a_dispatch_is_asked_for_by_its_number(desk: Desk) -> None:
    first = desk.run("A", "x", **KEPT)
    desk.call(ops.finish_tasks(desk.q, "A", [first]))
    second = desk.run("A", "x", **KEPT)
    desk.fail("A", second)
    third = desk.dispatch("x", run_at=FUTURE).number
    found = [status(desk, number).state for number in (first - 1, second - 1, third, 0, third + 1)]
    assert found == ["gone", "failed", "due", "due", "gone"]


def test_the_result_before_the_last_is_still_known(desk: Desk) -> None:
    first = desk.run("A", "x", **KEPT)
    desk.call(ops.finish_tasks(desk.q, "A", [first]))
    second = desk.dispatch("x").number
    assert [status(desk, number).state for number in (first - 1, second, 0)] == ["finished", "waiting", "waiting"]


def test_one_that_was_put_back_is_where_it_is(desk: Desk) -> None:
    held = desk.run("A", "x", **KEPT)
    desk.fail("A", held)
    desk.call(ops.retry_aside(desk.q, "failed", [held]))
    assert status(desk, held - 1).state == status(desk).state == "waiting"


def test_what_lies_in_the_trash_is_gone(desk: Desk) -> None:
    number = desk.dispatch("x").number
    desk.call(ops.delete_queue(desk.q))
    assert status(desk) == status(desk, number) == JobState("gone")
    desk.dispatch("x")
    assert status(desk, number) == JobState("gone")
    assert status(desk).state == "waiting"


def test_on_an_empty_database_nothing_is_made(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert desk.send(ops.job_status(desk.q, "x", 0)) == [b"gone"]
    assert desk.state() == {}
