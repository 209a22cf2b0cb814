from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from tests.ops.driver import FENCE, FUTURE, Desk, Expires, claim
from worqr import ops
from worqr.ops import CancelReply


def test_what_waits_is_put_out_of_reach_and_what_runs_is_marked(desk: Desk) -> None:
    one, two = desk.hold("A", b"a", b"b")
    desk.put(b"c", b"d")
    before = desk.state()
    call = ops.cancel_all(desk.q)
    with desk.listening(desk.q.cancel_channel, desk.q.wake_channel("A")) as heard:
        reply = desk.send(call)
    assert reply == [b"ok", 2, 2, b"-", str(one).encode(), str(two).encode()]
    assert call.read(reply) == CancelReply(False, 2, [one, two], "-", "-")
    assert heard == [(":wake:A", b"c")]
    before[":trash"] = before.pop("waiting")
    before[":cancelling"] = {str(one), str(two)}
    counts = before[":counts"].value
    noted = {"fence": str(claim(3)), "cleared": str(claim(3)), "cleared_why": ""}
    before[":counts"] = Expires({**counts, "cancelled": "2", **noted})
    assert desk.state() == before


def test_suspects_and_jobs_go_too_and_stale_references_are_not_counted(desk: Desk) -> None:
    desk.stall(b"suspect")
    [suspect, held] = desk.hold("A", b"a")[:1] + desk.take("A", 1)
    desk.retry("A", held)
    desk.call(ops.cancel_task(desk.q, b"a"))
    desk.call(ops.stop_tasks(desk.q, "A", [suspect]))
    assert desk.call(ops.cancel_all(desk.q)) == CancelReply(False, 1, [], "-", "-")
    assert desk.waiting() == []
    assert not desk.call(ops.purge_queue(desk.q))
    assert set(desk.state()) == {":workers", ":policy:A", ":counts"}


def test_busy_while_an_earlier_clearing_is_not_purged(desk: Desk) -> None:
    desk.put(b"a")
    desk.call(ops.cancel_all(desk.q))
    desk.put(b"b")
    with desk.nothing_happens():
        assert desk.send(ops.cancel_all(desk.q)) == [b"busy"]
        assert desk.call(ops.cancel_all(desk.q)) is None
    desk.call(ops.purge_queue(desk.q))
    assert desk.call(ops.cancel_all(desk.q)) == CancelReply(False, 1, [], "-", "-")


def test_busy_is_final_for_its_number(desk: Desk) -> None:
    desk.put(b"a")
    desk.call(ops.cancel_all(desk.q))
    call = ops.cancel_all(desk.q)
    desk.send(call)
    desk.call(ops.purge_queue(desk.q))
    desk.client.lpush(desk.q.base, b"newer")
    with desk.nothing_changes():
        assert desk.resend(call) == [b"busy"]


def test_a_resend_gets_the_same_reply_and_cancels_nothing_newer(desk: Desk) -> None:
    desk.hold("odd name", b"a")
    desk.put(b"b")
    call = ops.cancel_all(desk.q)
    reply = desk.send(call)
    desk.client.lpush(desk.q.base, b"newer")
    with desk.nothing_changes():
        assert desk.resend(call) == reply


def test_a_late_copy_cancels_nothing(desk: Desk) -> None:
    desk.hold("A", b"a")
    desk.put(b"b")
    with desk.nothing_happens():
        assert desk.late(ops.cancel_all(desk.q)) == [b"late"]


def test_in_steps_nothing_slips_through(desk: Desk) -> None:
    """What is given back before its turn to be marked has come is dropped."""
    [first] = desk.hold("A", b"a")
    [second] = desk.hold("B", b"b")
    desk.put(b"c")
    call = ops.cancel_all(desk.q)
    step = desk.call(replace(call, args=("-", 1, "")))
    assert step == CancelReply(True, 1, [first], "-", f"{first} A")
    assert desk.call(ops.stop_tasks(desk.q, "B", [second])) == {second: "dropped"}
    desk.put(b"newer")
    assert desk.call(ops.cancel_all(desk.q, f"{first} A")) == CancelReply(False, 0, [], "-", "-")
    assert desk.waiting() == [b"newer"]


def test_claims_of_one_that_is_being_swept_are_marked(desk: Desk) -> None:
    held = desk.hold("A", b"a", b"b")
    assert desk.call(ops.fail_worker(desk.q, "A", 1)).more
    assert desk.call(ops.cancel_all(desk.q)) == CancelReply(False, 1, held[:1], "-", "-")


def test_on_an_empty_database_nothing_is_made_that_stays(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert desk.call(ops.cancel_all(desk.q)) == CancelReply(False, 0, [], "-", "-")
    [counts] = desk.state().values()
    assert isinstance(counts, Expires)
    assert int(counts.value["fence"]) < FENCE


def test_thousands_of_claims_in_steps_of_a_thousand(desk: Desk) -> None:
    held = desk.hold("A", *[b"x"] * 1000)
    for n in range(3):
        worker = "BC"[n // 2]
        desk.enter(worker)
        desk.put(*[b"x"] * 1000)
        held += desk.take(worker, 1000)
    steps = [desk.call(ops.cancel_all(desk.q))]
    with desk.listening(desk.q.cancel_channel, *(desk.q.wake_channel(worker) for worker in "ABC")) as heard:
        while steps[-1] and steps[-1].more:
            steps.append(desk.call(ops.cancel_all(desk.q, steps[-1].after)))
    claims = [step.claims for step in steps if step]
    assert [len(each) for each in claims] == [1000] * 4
    assert [one for each in claims for one in each] == held
    assert heard == [(":wake:B", b"c")] * 2 + [(":wake:C", b"c")]
    assert desk.state()[":cancelling"] == {str(one) for one in held}


def test_of_a_single_one_its_claim_is_told_to_all_who_listen(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    with desk.listening(desk.q.cancel_channel, desk.q.wake_channel("A")) as heard:
        desk.call(ops.cancel_all(desk.q))
    assert heard == [("_cancel", str(held).encode())]


# Jobs


def test_what_is_due_and_what_is_blocked_goes_too_and_runs_learn_why(desk: Desk) -> None:
    kept: dict[str, Any] = {"fields": {"result_ttl": "60000"}}
    held = desk.run("A", "runs", **kept)
    twin = desk.dispatch("runs", **kept).number
    desk.dispatch("due", run_at=FUTURE)
    desk.dispatch("waits")
    call = ops.cancel_all(desk.q, reason="no paper")
    assert desk.call(call) == CancelReply(False, 3, [held], "-", "-")
    state = desk.state()
    assert state[":active:runs"]["cancel_reason"] == "no paper"
    assert (state[":trash:due"], state[":trash:blocked"], len(state[":trash"])) == (["due"], {"runs"}, 1)
    assert desk.counts()["cancelled"] == 3
    assert desk.call(ops.finish_tasks(desk.q, "A", [held])) == {held: "cancelled"}
    assert not desk.call(ops.purge_queue(desk.q))
    for number in (held - 1, twin):
        found = desk.call(ops.read_result(desk.q, "runs", number))
        assert (found.status, found.values) == ("cancelled", [b"no paper"])
    assert {name for name in desk.state() if "result" not in name} == {":workers", ":policy:A", ":counts"}


def test_a_dispatch_after_it_is_not_cancelled(desk: Desk) -> None:
    held = desk.run("A", "runs")
    desk.dispatch("runs", b"old")
    desk.call(ops.cancel_all(desk.q))
    assert desk.dispatch("runs", b"new").outcome == "blocked"
    assert desk.call(ops.stop_tasks(desk.q, "A", [held])) == {held: "cancelled"}
    desk.call(ops.purge_queue(desk.q))
    assert desk.waiting() == [b"new"]
