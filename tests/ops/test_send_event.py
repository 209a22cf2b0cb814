from __future__ import annotations

from typing import Any

import pytest
import redis

from tests.ops.driver import Desk, Expires, claim, policy, reference
from tests.ops.schedules import fire_schedule
from tests.ops.test_suspend_task import APPROVED, KIB, active, job_of, send, suspend, workflow, workflow_record
from worqr import ops
from worqr.ops import Wait


def test_an_event_is_stored_beside_what_the_job_keeps(desk: Desk) -> None:
    held = workflow(desk)
    before = desk.state()
    with desk.listening(desk.q.job("x")) as heard:
        assert send(desk, value=b"json 1") == "stored"
    assert heard == [(":job:x", b"event")]
    before[":active:x"] |= {"event:1:approved": "json 1", "events:approved": "0 1", "saved_size": str(KIB)}
    assert desk.state() == before
    assert active(desk)["claim"] == str(held)


def test_a_second_one_is_refused_unless_it_is_asked_for(desk: Desk) -> None:
    workflow(desk)
    assert send(desk, value=b"json 1") == "stored"
    with desk.nothing_happens():
        assert send(desk, value=b"json 2") == "already"
    assert send(desk, value=b"json 2", again=True) == "stored"
    assert (active(desk)["event:2:approved"], active(desk)["events:approved"]) == ("json 2", "0 2")
    assert send(desk, "other") == "stored"


def test_waits_take_events_in_the_order_in_which_they_were_sent(desk: Desk) -> None:
    held = workflow(desk)
    for n in range(3):
        send(desk, value=b"json %d" % n, again=True)
    waits = [Wait(f"w{n}", "event", "approved") for n in (2, 1)]
    ends = suspend(desk, held, *waits).ends
    assert [value.split(b" ", 3)[3] for value in ends.values()] == [b"json 0", b"json 1"]
    assert list(ends) == ["end:w2", "end:w1"]
    [last] = suspend(desk, held, Wait("w3", "event", "approved")).ends.values()
    assert last.endswith(b"json 2")
    assert send(desk) == "stored"


def test_a_copy_changes_nothing(desk: Desk) -> None:
    workflow(desk)
    call = ops.send_event(desk.q, "x", "approved", b"json 1")
    assert desk.send(call) == [b"stored"]
    with desk.nothing_changes():
        assert desk.resend(call) == [b"stored"]
    with desk.nothing_happens():
        assert desk.late(call) == [b"late"]


def test_it_wakes_a_worker_for_a_suspended_job(desk: Desk) -> None:
    held = workflow(desk)
    suspend(desk, held, APPROVED)
    desk.client.sadd(desk.q.hungry, "B")
    with desk.listening(desk.q.wake_channel("B"), desk.q.job("x")) as heard:
        assert send(desk) == "woke"
        assert send(desk) == "already"
    assert heard == [(":job:x", b"waiting"), (":wake:B", b"1")]
    state = desk.state(":job:")
    assert state == {
        "waiting": [reference("x")],
        ":workers": {"A": f"1 {held} 1 0"},
        ":policy:A": policy(),
        ":counts": Expires({"fence": str(held), "enqueued": "1", "claimed": "1", "suspended": "1"}),
    }


def test_an_event_before_the_first_run_waits_for_it(desk: Desk) -> None:
    desk.enter("A")
    desk.dispatch("x", workflow=True)
    assert send(desk) == "stored"
    [held] = desk.take("A", 1)
    assert suspend(desk, held, APPROVED).status == "ready"


@pytest.mark.parametrize("task", [b"a", b"b"])
def test_another_payload_before_the_first_run_drops_events_and_begins_a_new_life(desk: Desk, task: bytes) -> None:
    first = desk.dispatch("x", b"a", workflow=True).number
    send(desk)
    again = desk.dispatch("x", task, workflow=True, lifetime="7")
    assert again.outcome == "updated"
    found = job_of(desk)
    if task == b"a":
        assert (found["life"], found["event:1:approved"]) == (str(first), "json 1")
    else:
        assert (found["life"], "event:1:approved" in found, "lives_until" in found) == (str(again.number), False, True)
    assert "events:approved" in found if task == b"a" else "events:approved" not in found


@pytest.mark.parametrize(
    ("end", "state"),
    [("finish", "gone"), ("kept", "finished"), ("fail", "failed"), ("cancel", "cancelled"), ("wipe", "gone")],
)
def test_it_never_starts_a_job(desk: Desk, end: str, state: str) -> None:
    held = desk.run("A", "x", workflow=True, fields={"result_ttl": "60000"} if end in ("kept", "cancel") else {})
    match end:
        case "finish" | "kept":
            desk.call(ops.finish_tasks(desk.q, "A", [held], {held: ("json", b"1")}))
        case "fail":
            desk.fail("A", held)
        case "cancel":
            desk.call(ops.cancel_job(desk.q, "x", "why"))
            assert send(desk) == "none cancelled"  # although its run has not acknowledged that
            desk.call(ops.finish_tasks(desk.q, "A", [held]))
        case _:
            desk.wipe()
    with desk.nothing_happens():
        assert send(desk) == f"none {state}"
        assert send(desk, id="unknown") == "none gone"


def test_a_plain_job_takes_no_events(desk: Desk) -> None:
    desk.dispatch("x")
    with desk.nothing_happens():
        assert send(desk) == "none plain"


def test_no_more_events_of_a_name_than_a_job_may_keep(desk: Desk) -> None:
    workflow(desk)
    with desk.nothing_happens():
        assert send(desk, value=b"bytes " + b"x" * 64 * KIB) == "full"
    desk.client.hset(desk.q.active("x"), "events:approved", "3 1003")
    with desk.nothing_happens():
        assert send(desk, again=True) == "full"
    desk.client.hset(desk.q.active("x"), "saved_size", 1024 * KIB - KIB + 1)
    with desk.nothing_happens():
        assert send(desk, "other") == "full"
    desk.client.hset(desk.q.active("x"), "saved_size", 1023 * KIB)
    assert send(desk, "other") == "stored"


@pytest.mark.parametrize(
    ("name", "value"),
    [("", b"json 1"), ("a\nb", b"json 1"), ("a", b""), ("a", b"json "), ("a", b"text 1"), ("a", b"none x")],
)
def test_what_is_no_event_is_an_error(desk: Desk, name: str, value: bytes) -> None:
    workflow(desk)
    with desk.nothing_changes(), pytest.raises(redis.ResponseError, match="an event has a name of one line"):
        send(desk, name, value)


# Lives


def test_it_goes_to_the_run_and_not_to_the_job_that_is_blocked_unless_that_is_meant(desk: Desk) -> None:
    workflow(desk)
    later = desk.dispatch("x", b"b", workflow=True, exists="cancel")
    assert later.outcome == "blocked"
    assert send(desk) == "none cancelled"
    assert send(desk, number=later.number) == "stored"
    assert job_of(desk)["event:1:approved"] == "json 1"
    assert send(desk, life=later.number) == "already"
    assert send(desk, life=claim(1)) == "none cancelled"


def test_an_address_is_of_one_life(desk: Desk) -> None:
    held = workflow(desk)
    desk.fail("A", held)
    other = workflow(desk)
    assert send(desk, life=claim(1)) == "none failed"
    assert send(desk, life=int(active(desk)["life"])) == "stored"
    desk.call(ops.finish_tasks(desk.q, "A", [other]))
    assert desk.call(ops.retry_aside(desk.q, "failed", [held])) == 1
    assert send(desk, life=int(job_of(desk)["life"])) == "stored"
    assert send(desk, life=other) == "none gone"  # although the record covers the number


@pytest.mark.parametrize("place", ["active", "suspended", "waiting", "due"])
@pytest.mark.parametrize(
    ("exists", "outcome"), [(None, "unchanged"), ("update", "unchanged"), ("skip", "unchanged"), ("raise", "duplicate")]
)
def test_a_dispatch_never_changes_a_workflow_that_has_begun(
    desk: Desk, place: str, exists: str | None, outcome: str
) -> None:
    begin(desk, place)
    options: dict[str, Any] = {} if exists is None else {"exists": exists}
    before = desk.state(":counts")
    found = desk.dispatch("x", b"other", workflow=True, **options)
    assert (found.outcome, found.id, found.number) == (outcome, "x", claim(1))
    assert desk.state(":counts") == before


def begin(desk: Desk, place: str) -> None:
    """A workflow that has begun, in this state."""
    held = workflow(desk)
    match place:
        case "suspended":
            suspend(desk, held, APPROVED)
        case "waiting":
            desk.retry("A", held)
        case "due":
            desk.retry("A", held, delay_ms=10**9)
        case _:
            pass


@pytest.mark.parametrize("place", ["suspended", "waiting", "due"])
def test_one_that_does_not_run_is_cancelled_for_another(desk: Desk, place: str) -> None:
    begin(desk, place)
    send(desk)
    found = desk.dispatch("x", b"a", workflow=True, exists="cancel")
    assert found.outcome == "created"
    new = job_of(desk)
    assert new == workflow_record("waiting", found.number, run_at=new["run_at"])
    assert desk.counts()["cancelled"] == 1
    [entry] = desk.start("A", 1).entries
    assert entry[-1] == b"x"
    assert desk.call(ops.inspect(desk.q)).waiting == 0


def test_one_that_runs_is_cancelled_and_blocks_the_other_which_is_never_merged(desk: Desk) -> None:
    begin(desk, "active")
    found = desk.dispatch("x", b"other", workflow=True, exists="cancel")
    assert found.outcome == "blocked"
    assert desk.dispatch("x", b"third", workflow=True).outcome == "blocked"  # as before: the run will end
    assert suspend(desk, claim(2), APPROVED).status == "cancelled"
    new = job_of(desk)
    assert (new["task"], new["state"], "started" in new) == ("third", "waiting", False)


def test_a_workflow_is_not_put_back_while_its_id_runs(desk: Desk) -> None:
    held = workflow(desk)
    desk.fail("A", held)
    workflow(desk)
    with desk.nothing_happens():
        assert desk.call(ops.retry_aside(desk.q, "failed", [held])) == 0


@pytest.mark.parametrize("place", ["active", "suspended"])
@pytest.mark.parametrize(("overlap", "status"), [("skip", "skipped"), ("queue", "busy"), ("cancel", "ok")])
def test_a_schedule_follows_its_overlap(desk: Desk, place: str, overlap: str, status: str) -> None:
    held = desk.run("A", "cron:s", workflow=True, scheduled_for="1000")
    if place == "suspended":
        suspend(desk, held, APPROVED)
    now = desk.now()
    call = fire_schedule(desk.q, "s", now, judged_at=now, run_at=now, overlap=overlap, task=b"next")
    assert desk.send(call)[0].decode() == status
    if overlap == "cancel":
        assert desk.state()[":job:cron:s"]["task"] == "next"
        assert desk.state()[":job:cron:s"]["state"] == ("blocked" if place == "active" else "waiting")


# A wait that a person ends


def end(desk: Desk, key: str = APPROVED.key, **options: Any) -> str:
    ended = desk.call(ops.end_wait(desk.q, "x", key, **options))
    return f"{ended.status} {ended.state}".strip()


def test_the_end_of_a_wait_is_a_timeout_that_wakes_the_job(desk: Desk) -> None:
    suspend(desk, workflow(desk), APPROVED)
    desk.client.sadd(desk.q.hungry, "B")
    call = ops.end_wait(desk.q, "x", APPROVED.key)
    with desk.listening(desk.q.wake_channel("B"), desk.q.job("x")) as heard:
        assert desk.send(call) == [b"woke"]
    assert heard == [(":job:x", b"waiting"), (":wake:B", b"1")]
    with desk.nothing_changes():
        assert desk.resend(call) == [b"woke"]
    with desk.nothing_happens():
        assert desk.late(call) == [b"late"]
    [held] = desk.take("A", 1)
    assert active(desk)[f"end:{APPROVED.key}"] == "timeout T 1 "
    with desk.nothing_happens():
        assert end(desk) == "closed"
    assert suspend(desk, held, APPROVED).status == "ready"


def test_a_wait_of_a_run_that_goes_on_ends_when_it_waits_again(desk: Desk) -> None:
    suspend(desk, workflow(desk), APPROVED, Wait("other", "event", "other"))
    assert send(desk, "other") == "woke"
    [held] = desk.take("A", 1)
    assert end(desk) == "ended"
    [value] = suspend(desk, held, APPROVED).ends.values()
    assert value.startswith(b"timeout ")


@pytest.mark.parametrize("key", ["", "other", "event:1:approved"])
def test_what_is_no_open_wait_is_not_ended(desk: Desk, key: str) -> None:
    suspend(desk, workflow(desk), APPROVED)
    with desk.nothing_happens():
        assert end(desk, key) == "closed"
        assert end(desk, life=7) == "none gone"


def test_a_wait_for_jobs_is_not_ended(desk: Desk) -> None:
    suspend(desk, workflow(desk), Wait("gather", "children", about="a"))
    with desk.nothing_happens():
        assert end(desk, "gather") == "children"


def test_a_spoilt_wait_is_not_ended(desk: Desk) -> None:
    suspend(desk, workflow(desk), APPROVED)
    desk.client.hset(desk.q.job("x"), f"wait:{APPROVED.key}", b"\xff")
    with desk.nothing_happens():
        assert end(desk) == "closed"
    desk.client.hset(desk.q.job("x"), "open", b"\xff")
    with desk.nothing_happens():
        assert end(desk) == "closed"


def test_the_end_of_a_wait_never_starts_a_job(desk: Desk) -> None:
    with desk.nothing_happens():
        assert end(desk) == "none gone"
    desk.dispatch("x")
    with desk.nothing_happens():
        assert end(desk) == "none plain"
