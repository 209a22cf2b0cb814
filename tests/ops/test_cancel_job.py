from __future__ import annotations

import hashlib
from typing import Any

import pytest

from tests.ops.driver import FUTURE, Desk, Expires, digest, job, payloads, reference, remembered
from worqr import ops
from worqr.ops import CancelReply

KEPT: dict[str, Any] = {"fields": {"result_ttl": "60000"}}


def cancel(desk: Desk, id: str, reason: str = "why") -> CancelReply:
    return desk.call(ops.cancel_job(desk.q, id, reason))


def kept(first: int, last: int, reason: str = "why", **tries: int) -> Expires:
    known = {name: str(value) for name, value in tries.items()}
    return Expires({"outcome": "cancelled", "first": str(first), "last": str(last), "reason": reason, **known})


def test_what_waits_leaves_only_its_place_in_line(desk: Desk) -> None:
    number = desk.dispatch("x").number
    with desk.listening(desk.q.job("x")) as heard:
        assert desk.send(ops.cancel_job(desk.q, "x", "why")) == [b"ok", 1]
    assert heard == [(":job:x", b"cancelled")]
    assert desk.state() == {
        "waiting": [reference("x")],
        ":counts": Expires({"fence": str(number), "enqueued": "1", "cancelled": "1", "stale": "1"}),
    }
    assert desk.waiting() == []


def test_what_is_due_leaves_nothing(desk: Desk) -> None:
    number = desk.dispatch("x", run_at=FUTURE).number
    desk.dispatch("other", run_at=FUTURE)
    assert cancel(desk, "x") == CancelReply(False, 1, [], "-", "-")
    state = desk.state()
    assert state[":due"] == ["other"]
    assert state[":counts"].value == {"fence": str(number + 1), "enqueued": "2", "cancelled": "1"}
    assert set(state) == {":due", ":job:other", ":counts"}


def test_what_runs_is_marked_and_its_worker_told(desk: Desk) -> None:
    held = desk.run("A", "x")
    before = desk.state()
    with desk.listening(desk.q.cancel_channel) as heard:
        assert desk.send(ops.cancel_job(desk.q, "x", "why")) == [b"ok", 0, str(held).encode()]
    assert heard == [("_cancel", str(held).encode())]
    before[":active:x"]["cancel_reason"] = "why"
    assert desk.state() == {**before, ":cancelling": {str(held)}}


SECRET = "0f" * 16


def with_secret(desk: Desk, worker: str, secret: str) -> None:
    desk.call(ops.start_work(desk.q, worker, max_stalls=3, keep_failed=1000, last=0, secret=secret))


def test_a_worker_with_a_secret_alone_is_told_and_with_a_proof(desk: Desk) -> None:
    held = desk.run("A", "x")
    with_secret(desk, "A", SECRET)
    before = desk.state()
    assert before[":policy:A"]["secret"] == SECRET
    with desk.listening(desk.q.cancel_channel, desk.q.wake_channel("A")) as heard:
        assert cancel(desk, "x", "why") == CancelReply(False, 0, [held], "-", "-")
        assert cancel(desk, "x", "again").claims == [held]  # marked already: no second message
    assert heard == [(":wake:A", b"c %d %s" % (held, hashlib.sha1(f"{SECRET} {held}".encode()).hexdigest().encode()))]
    before[":active:x"]["cancel_reason"] = "again"
    assert desk.state() == {**before, ":cancelling": {str(held)}}


@pytest.mark.parametrize("lost", ["no secret", "evicted", "another type"])
def test_a_worker_whose_secret_is_not_there_is_told_as_one_that_has_none(desk: Desk, lost: str) -> None:
    held = desk.run("A", "x")
    with_secret(desk, "A", SECRET)
    if lost == "no secret":
        with_secret(desk, "A", "")
        assert "secret" not in desk.state()[":policy:A"]
    else:
        desk.client.delete(f"{desk.q.base}:policy:A")
        if lost == "another type":
            desk.client.set(f"{desk.q.base}:policy:A", "odd")
    with desk.listening(desk.q.cancel_channel, desk.q.wake_channel("A")) as heard:
        assert cancel(desk, "x").claims == [held]
    assert heard == [("_cancel", str(held).encode())]


def test_its_run_and_the_twin_that_is_blocked_by_it_go_together(desk: Desk) -> None:
    held = desk.run("A", "x", **KEPT)
    twin = desk.dispatch("x", **KEPT).number
    assert cancel(desk, "x") == CancelReply(False, 1, [held], "-", "-")
    state = desk.state()
    assert ":blocked" not in state and ":job:x" not in state
    assert state[":result:x"] == kept(twin, twin, attempts=0)
    assert state[":active:x"]["last"] == str(twin)
    assert desk.call(ops.finish_tasks(desk.q, "A", [held])) == {held: "cancelled"}
    state = desk.state()
    assert state[":result:x"] == kept(held - 1, twin)
    assert set(state) == {":result:x", ":older_result:x", ":workers", ":policy:A", ":counts"}
    assert desk.counts() == {"enqueued": 2, "claimed": 1, "cancelled": 2}


@pytest.mark.parametrize("end", ["finish", "stop", "retry", "fail", "sweep", "leave"])
def test_however_the_run_ends_it_never_comes_back(desk: Desk, end: str) -> None:
    held = desk.run("A", "x", **KEPT)
    desk.dispatch("x")
    cancel(desk, "x", "no paper")
    match end:
        case "finish":
            assert desk.call(ops.finish_tasks(desk.q, "A", [held], {held: ("json", b"1")})) == {held: "cancelled"}
        case "stop":
            assert desk.call(ops.stop_tasks(desk.q, "A", [held])) == {held: "cancelled"}
        case "retry":
            assert desk.retry("A", held, run_at_ms=FUTURE) == "cancelled"
        case "fail":
            assert desk.fail("A", held) == "cancelled"
        case "sweep":
            assert desk.call(ops.fail_worker(desk.q, "A")).cancelled == 1
        case _:
            assert desk.call(ops.stop_work(desk.q, "A")).cancelled == 1
    state = desk.state()
    assert not any(name.startswith((":job", ":active", ":blocked", ":due", ":aside", "waiting")) for name in state)
    assert state[":result:x"].value["reason"] == "no paper"


def test_a_retried_raw_task_has_an_id_too(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.retry("A", held)
    assert desk.state()[f":twins:{digest('a')}"] == {f"@{held}"}
    assert desk.state()[f":job:@{held}"] == remembered("a", held, failures=1)
    assert cancel(desk, f"@{held}").waiting == 1
    assert set(desk.state()) == {"waiting", ":workers", ":policy:A", ":counts"}


def test_whoever_waits_learns_why_if_anything_is_to_be_kept(desk: Desk) -> None:
    number = desk.dispatch("x", **KEPT).number
    cancel(desk, "x", "ä \n why")
    assert desk.state()[":result:x"] == kept(number, number, "ä \n why".encode().decode("latin-1"), attempts=0)
    found = desk.call(ops.read_result(desk.q, "x", number))
    assert (found.status, found.values) == ("cancelled", ["ä \n why".encode()])


@pytest.mark.parametrize("ttl", [None, 0, 60_000])
def test_else_as_long_as_the_workers_of_the_queue_say(desk: Desk, ttl: int | None) -> None:
    desk.enter("A", result_ttl_ms=ttl)
    desk.dispatch("x")
    cancel(desk, "x")
    assert (":result:x" in desk.state()) == bool(ttl)
    if ttl:
        assert 1000 < desk.client.pttl(desk.q.result("x")) <= ttl


def test_frees_the_id(desk: Desk) -> None:
    desk.dispatch("x", unique_for=60_000)
    desk.run("A", "y", unique_for=60_000, front=True)
    cancel(desk, "x")
    cancel(desk, "y")
    assert not any(name.startswith(":taken") for name in desk.state())
    assert desk.dispatch("x").outcome == "created"


def test_of_what_is_not_there_nothing_is_cancelled(desk: Desk) -> None:
    desk.hold("A", b"a")
    desk.dispatch("other")
    with desk.nothing_happens():
        assert cancel(desk, "x") == CancelReply(False, 0, [], "-", "-")
        assert cancel(desk, "") == CancelReply(False, 0, [], "-", "-")


def test_a_second_cancel_finds_the_run_and_tells_nobody_twice(desk: Desk) -> None:
    held = desk.run("A", "x")
    cancel(desk, "x", "first")
    with desk.listening(desk.q.cancel_channel) as heard:
        assert cancel(desk, "x", "second") == CancelReply(False, 0, [held], "-", "-")
    assert heard == []
    assert desk.state()[":cancelling"] == {str(held)}


def test_what_was_cancelled_may_be_dispatched_again_and_is_counted_once(desk: Desk) -> None:
    desk.dispatch("x", b"old")
    cancel(desk, "x")
    desk.dispatch("x", b"new")
    assert desk.waiting() == [b"new"]
    desk.enter("A")
    assert payloads(desk.start("A", 9).entries) == [b"new"]
    assert desk.call(ops.inspect(desk.q)).waiting == 0


def test_a_dispatch_after_the_cancel_of_a_run_is_a_job_of_its_own(desk: Desk) -> None:
    held = desk.run("A", "x", b"old")
    cancel(desk, "x")
    assert desk.dispatch("x", b"new").outcome == "blocked"
    assert desk.retry("A", held) == "cancelled"
    assert desk.waiting() == [b"new"]


def test_what_lies_in_the_trash_is_not_cancelled_again(desk: Desk) -> None:
    desk.dispatch("x")
    desk.dispatch("y", run_at=FUTURE)
    desk.call(ops.delete_queue(desk.q))
    with desk.nothing_happens():
        assert cancel(desk, "x").waiting == cancel(desk, "y").waiting == 0


def test_a_resend_cancels_nothing_newer(desk: Desk) -> None:
    held = desk.run("A", "x")
    desk.dispatch("x")
    call = ops.cancel_job(desk.q, "x", "why")
    reply = desk.send(call)
    desk.client.lpush(desk.q.base, b"newer")
    with desk.nothing_changes():
        assert desk.resend(call) == reply == [b"ok", 1, str(held).encode()]


def test_a_late_copy_cancels_nothing(desk: Desk) -> None:
    desk.run("A", "x")
    desk.dispatch("x")
    with desk.nothing_happens():
        assert desk.late(ops.cancel_job(desk.q, "x", "why")) == [b"late"]


def test_on_an_empty_database_nothing_is_made(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert cancel(desk, "x") == CancelReply(False, 0, [], "-", "-")
    assert desk.state() == {}


def test_others_are_not_touched(desk: Desk) -> None:
    desk.call(ops.dispatch_jobs(desk.q, [job("x"), job("xy"), job("y", b"x"), job("z", run_at=FUTURE)]))
    before = desk.state(":counts", ":job:x")
    cancel(desk, "x")
    assert desk.state(":counts", ":job:x") == before


def test_the_id_of_a_job_that_has_ended_is_free_again(desk: Desk) -> None:
    desk.call(ops.finish_tasks(desk.q, "A", [desk.run("A", "x", unique_for=60_000)]))
    assert desk.dispatch("x").outcome == "unchanged"
    assert cancel(desk, "x") == CancelReply(False, 0, [], "-", "-")
    assert desk.dispatch("x").outcome == "created"
