from __future__ import annotations

import hashlib

import pytest
from msgspec.structs import replace

from tests.ops.driver import ALL_BYTES, FUTURE, Desk, Expires, claim, digest, grown, payloads, reference
from worqr import ops
from worqr.command import Command
from worqr.keys import MARKER
from worqr.ops import CancelReply


def with_budget(call: Command[CancelReply], budget: int) -> Command[CancelReply]:
    return replace(call, args=(*call.args[:-3], budget, budget, call.args[-1]))


def cancel_in_steps(desk: Desk, task: bytes, budget: int) -> list[CancelReply]:
    steps = [desk.call(with_budget(ops.cancel_task(desk.q, task), budget))]
    while steps[-1].more:
        call = ops.cancel_task(desk.q, task, steps[-1].cursor, steps[-1].after)
        steps.append(desk.call(with_budget(call, budget)))
    return steps


def test_removes_what_waits_and_nothing_else(desk: Desk) -> None:
    desk.put(b"x", b"y", b"x")
    assert desk.send(ops.cancel_task(desk.q, b"x")) == [b"ok", 2, 0, b"-", b"-"]
    assert desk.state() == {
        "waiting": [b"y"],
        ":counts": Expires({**desk.state()[":counts"].value, "enqueued": "3", "cancelled": "2"}),
    }


def test_marks_what_runs_and_tells_its_workers(desk: Desk) -> None:
    one, _, three = desk.hold("A", b"x", b"y", b"x")
    [four] = desk.hold("B", b"x")
    desk.hold("C", b"z")
    before = desk.state()
    call = ops.cancel_task(desk.q, b"x")
    with desk.listening(desk.q.cancel_channel, *(desk.q.wake_channel(worker) for worker in "ABC")) as heard:
        reply = desk.send(call)
    assert reply == [b"ok", 0, 3, b"-", b"-", *(str(each).encode() for each in (one, three, four))]
    assert call.read(reply) == CancelReply(False, 0, [one, three, four], "-", "-")
    assert heard == [(":wake:A", b"c"), (":wake:B", b"c")]
    assert desk.state() == {**before, ":cancelling": {str(one), str(three), str(four)}}


def test_of_a_single_one_its_claim_is_told_to_all_who_listen(desk: Desk) -> None:
    [held, _] = desk.hold("A", b"x", b"y")
    with desk.listening(desk.q.cancel_channel, desk.q.wake_channel("A")) as heard:
        assert desk.call(ops.cancel_task(desk.q, b"x")).claims == [held]
    assert heard == [("_cancel", str(held).encode())]


def test_jobs_are_among_the_many_whose_workers_are_told_once(desk: Desk) -> None:
    held = desk.hold("A", *[b"x"] * 3)
    for one in held:
        desk.retry("A", one)
    jobs = desk.take("A", 3)
    raw = desk.hold("A", b"x")
    with desk.listening(desk.q.cancel_channel, desk.q.wake_channel("A")) as heard:
        assert sorted(desk.call(ops.cancel_task(desk.q, b"x")).claims) == jobs + raw
    assert heard == [(":wake:A", b"c")]
    assert desk.state()[":cancelling"] == {str(one) for one in jobs + raw}


def test_finds_all_of_them_wherever_they_are(desk: Desk) -> None:
    """Running as a job, raw, and with a worker that is being swept; waiting as a suspect, as a job, and raw."""
    [raw] = desk.hold("A", b"x")
    desk.retry("A", raw)
    [job] = desk.take("A", 1)
    [raw] = desk.hold("B", b"x")
    [retried] = desk.hold("C", b"x")
    swept, _ = desk.hold("D", b"x", b"y")
    assert desk.call(ops.fail_worker(desk.q, "D", 1)).more
    desk.call(ops.finish_tasks(desk.q, "A", desk.take("A", 1)))
    desk.stall(b"x")
    desk.retry("C", retried)
    desk.put(b"x", b"z")
    assert desk.call(ops.cancel_task(desk.q, b"x")) == CancelReply(False, 3, [job, raw, swept], "-", "-")
    for worker in ("A", "B", "C", "D"):
        desk.call(ops.fail_worker(desk.q, worker))
    assert desk.waiting() == [b"z"]
    assert desk.counts()["cancelled"] == 6
    assert not any(name.startswith((":cancelling", ":twins", ":job", ":active", ":claim")) for name in desk.state())


def test_a_swept_owners_task_is_not_missed_between_two_steps_of_the_sweep(desk: Desk) -> None:
    """Its worker is out of the fence, the claim is not given back yet: it must not come back as if nothing had been."""
    held = desk.hold("A", b"x", b"y")
    assert desk.call(ops.fail_worker(desk.q, "A", 1)).more
    assert desk.call(ops.cancel_task(desk.q, b"x")).claims == [held[0]]
    desk.call(ops.fail_worker(desk.q, "A", 1))
    assert desk.waiting() == [b"y"]


def test_the_count_is_right_after_cancelling_a_retried_task(desk: Desk) -> None:
    held = desk.hold("A", b"x", b"y")
    for one in held:
        desk.retry("A", one)
    assert desk.call(ops.cancel_task(desk.q, b"x")).waiting == 1
    assert desk.call(ops.list_tasks(desk.q, 9)) == (1, [b"y"])
    assert desk.call(ops.inspect(desk.q)).waiting == 1
    assert payloads(desk.start("A", 2).entries) == [b"y"]
    assert desk.call(ops.inspect(desk.q)).waiting == 0


def test_a_cancelled_job_leaves_only_its_place_in_line(desk: Desk) -> None:
    [held] = desk.hold("A", b"x")
    desk.retry("A", held)
    desk.call(ops.cancel_task(desk.q, b"x"))
    state = desk.state()
    assert set(state) == {"waiting", ":workers", ":policy:A", ":counts"}
    assert state["waiting"] == [reference(f"@{held}")]
    assert state[":counts"].value["stale"] == "1"


def test_what_was_deleted_but_is_not_purged_yet_is_not_counted_again(desk: Desk) -> None:
    [held] = desk.hold("A", b"x")
    desk.retry("A", held)
    desk.call(ops.delete_queue(desk.q))
    assert desk.call(ops.cancel_task(desk.q, b"x")).waiting == 0
    desk.put(b"y")
    assert desk.waiting() == [b"y"]
    assert not desk.call(ops.purge_queue(desk.q))
    assert set(desk.state()) == {"waiting", ":workers", ":policy:A", ":counts"}


def test_a_twin_without_a_record_is_forgotten(desk: Desk) -> None:
    desk.client.sadd(desk.q.twins(hashlib.sha1(b"x").hexdigest()), "@1")
    assert desk.call(ops.cancel_task(desk.q, b"x")) == CancelReply(False, 0, [], "-", "-")
    assert set(desk.state()) == {":counts"}


@pytest.mark.parametrize("task", [b"", b"\xff\x00", b"12", bytes(range(255)), MARKER, MARKER + b"@1", ALL_BYTES])
def test_any_payload_can_be_cancelled(desk: Desk, task: bytes) -> None:
    task = grown(task)
    [held] = desk.hold("A", task)
    desk.put(task, b"y")
    assert desk.call(ops.cancel_task(desk.q, task)) == CancelReply(False, 1, [held], "-", "-")
    assert desk.waiting() == [b"y"]
    assert desk.call(ops.finish_tasks(desk.q, "A", [held])) == {held: "cancelled"}


def test_a_payload_that_spells_a_reference_does_not_hit_that_job(desk: Desk) -> None:
    [held] = desk.hold("A", b"x")
    desk.retry("A", held)
    forged = reference(f"@{held}")
    assert desk.call(ops.cancel_task(desk.q, forged)) == CancelReply(False, 0, [], "-", "-")
    assert desk.waiting() == [b"x"]
    desk.take("A", 1)
    assert desk.call(ops.cancel_task(desk.q, forged)) == CancelReply(False, 0, [], "-", "-")


def test_a_resend_gets_the_same_reply_and_cancels_nothing_newer(desk: Desk) -> None:
    desk.enter("A worker: with \\ odd {characters} and spaces")
    [held] = desk.hold("A worker: with \\ odd {characters} and spaces", b"x")
    desk.put(b"x")
    call = ops.cancel_task(desk.q, b"x")
    reply = desk.send(call)
    desk.client.lpush(desk.q.base, b"x")
    with desk.nothing_changes():
        assert desk.resend(call) == reply
        assert call.read(desk.resend(call)) == CancelReply(False, 1, [held], "-", "-")


def test_a_late_copy_cancels_nothing(desk: Desk) -> None:
    desk.hold("A", b"x")
    desk.put(b"x")
    before = desk.state()
    assert desk.late(ops.cancel_task(desk.q, b"x")) == [b"late"]
    assert desk.state() == before


def test_a_second_cancel_finds_the_same_claims_and_tells_nobody_twice(desk: Desk) -> None:
    [held] = desk.hold("A", b"x")
    desk.call(ops.cancel_task(desk.q, b"x"))
    with desk.listening(desk.q.cancel_channel) as heard:
        assert desk.call(ops.cancel_task(desk.q, b"x")).claims == [held]
    assert heard == []


def test_on_an_empty_database_nothing_is_made(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert desk.call(ops.cancel_task(desk.q, b"x")) == CancelReply(False, 0, [], "-", "-")
    assert desk.state() == {}


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 7, 100])
def test_in_steps_each_claim_is_looked_at_once(desk: Desk, budget: int) -> None:
    workers = ["a b", "a", "a b 9", "-", "9 z"]
    expected = []
    for worker in workers:
        claims = desk.hold(worker, b"x", b"y", b"x")
        expected += [claims[0], claims[2]]
    steps = cancel_in_steps(desk, b"x", budget)
    assert sorted(claim for step in steps for claim in step.claims) == sorted(expected)
    assert desk.state()[":cancelling"] == {str(claim) for claim in expected}
    assert len(steps) == max(1, -(-15 // budget))


def test_what_is_given_back_between_two_steps_is_removed_in_the_last(desk: Desk) -> None:
    """And only in the first and the last: the list may be long."""
    [first] = desk.hold("A", b"x")
    [second] = desk.hold("B", b"x")
    [third] = desk.hold("C", b"x")
    step = desk.call(with_budget(ops.cancel_task(desk.q, b"x"), 1))
    assert step == CancelReply(True, 0, [first], "-", f"{first} A")
    assert desk.call(ops.stop_tasks(desk.q, "C", [third])) == {}
    step = desk.call(with_budget(ops.cancel_task(desk.q, b"x", step.cursor, f"{first - 1} A"), 1))
    assert (step.more, step.waiting, desk.waiting()) == (True, 0, [b"x"])
    step = desk.call(with_budget(ops.cancel_task(desk.q, b"x", step.cursor, step.after), 1))
    assert step == CancelReply(False, 1, [second], "-", "-")
    assert desk.waiting() == []


def test_more_claims_than_lua_can_unpack_in_one_step(desk: Desk) -> None:
    held = desk.hold("A", *[b"x"] * 1000)
    for _ in range(8):
        desk.put(*[b"x"] * 1000)
        held += desk.take("A", 1000)
    call = ops.cancel_task(desk.q, b"x")
    reply = desk.send(call)
    assert call.read(reply) == CancelReply(False, 0, held, "-", "-")
    assert desk.resend(call) == reply
    assert desk.client.scard(desk.q.cancelling) == 9000


def test_more_twins_than_one_step_looks_at(desk: Desk) -> None:
    for one in desk.hold("A", *[b"x"] * 700):
        desk.retry("A", one)
    steps = cancel_in_steps(desk, b"x", 100)
    assert len(steps) > 2
    assert sum(step.waiting for step in steps) == 700
    assert desk.call(ops.inspect(desk.q)).waiting == 0
    assert claim(1) not in [claim for step in steps for claim in step.claims]


# Jobs


def test_raw_tasks_that_wait_for_their_time_are_found_too(desk: Desk) -> None:
    one, two = desk.hold("A", b"x", b"y")
    desk.retry("A", one, run_at_ms=FUTURE)
    desk.retry("A", two, run_at_ms=FUTURE)
    assert desk.call(ops.cancel_task(desk.q, b"x")) == CancelReply(False, 1, [], "-", "-")
    state = desk.state()
    assert state[":due"] == [f"@{two}"]
    assert "stale" not in state[":counts"].value
    assert f":twins:{digest('x')}" not in state and f":job:@{one}" not in state


def test_one_that_said_how_far_it_is_is_found_and_told_why(desk: Desk) -> None:
    [held] = desk.hold("A", b"x")
    desk.enter("A", result_ttl_ms=60_000)
    desk.call(ops.note_progress(desk.q, "A", [(held, 0.5, "")]))
    assert desk.call(ops.cancel_task(desk.q, b"x", reason="no paper")).claims == [held]
    assert desk.call(ops.finish_tasks(desk.q, "A", [held])) == {held: "cancelled"}
    found = desk.call(ops.read_result(desk.q, f"@{held}", 0))
    assert (found.status, found.values) == ("cancelled", [b"no paper"])


def test_a_job_that_was_dispatched_is_cancelled_by_its_id_only(desk: Desk) -> None:
    held = desk.run("A", "x", b"x")
    desk.dispatch("y", b"x")
    desk.dispatch("z", b"x", run_at=FUTURE)
    with desk.nothing_happens():
        assert desk.call(ops.cancel_task(desk.q, b"x")) == CancelReply(False, 0, [], "-", "-")
    assert desk.call(ops.cancel_job(desk.q, "x", "")).claims == [held]
