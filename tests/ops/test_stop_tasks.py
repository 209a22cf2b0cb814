from __future__ import annotations

import pytest

from tests.ops.driver import FUTURE, PAST, Desk, Expires, claim, policy, record, reference, remembered
from worqr import ops


def test_gives_claims_back_to_the_front_in_their_old_order_whatever_the_order_they_are_named_in(desk: Desk) -> None:
    one, two, three = desk.hold("A", b"a", b"b", b"c")
    desk.put(b"d")
    assert desk.send(ops.stop_tasks(desk.q, "A", [two, three, one])) == [b"ok"]
    assert desk.state() == {
        "waiting": [b"d", b"c", b"b", b"a"],
        ":workers": {"A": f"1 {claim(1)} 3 0"},
        ":policy:A": policy(),
        ":counts": Expires({"fence": str(claim(3)), "enqueued": "4", "claimed": "3", "stopped": "3"}),
    }


def test_costs_nothing_and_makes_no_job_of_a_raw_task(desk: Desk) -> None:
    for _ in range(5):
        desk.call(ops.stop_tasks(desk.q, "A", desk.hold("A", b"a") if not desk.waiting() else desk.take("A", 1)))
    desk.enter("B")
    assert desk.start("B", 1).entries == [b"a"]


def test_a_job_stays_a_job_with_its_counters(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.retry("A", held)
    [again] = desk.take("A", 1)
    desk.call(ops.stop_tasks(desk.q, "A", [again]))
    state = desk.state()
    assert state[f":job:@{held}"] == remembered("a", held, failures=1, queued=again)
    assert state["waiting"] == [reference(f"@{held}")]
    assert not any(name.startswith((":active:", ":claim")) for name in state)


def test_a_resend_answers_mine_and_changes_nothing(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    call = ops.stop_tasks(desk.q, "A", [held])
    desk.send(call)
    with desk.nothing_changes():
        assert desk.call(call) == {held: "mine"}


def test_a_claim_named_twice_is_given_back_once(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    assert desk.call(ops.stop_tasks(desk.q, "A", [held, held])) == {held: "mine"}
    assert desk.waiting() == [b"a"]


def test_anothers_claim_is_not_touched(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.enter("B")
    with desk.nothing_changes():
        assert desk.call(ops.stop_tasks(desk.q, "B", [held])) == {held: "mine"}
        assert desk.call(ops.stop_tasks(desk.q, "stranger", [held])) == {held: "lost"}


def test_a_swept_owner_has_lost_it(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.call(ops.fail_worker(desk.q, "A"))
    with desk.nothing_changes():
        assert desk.call(ops.stop_tasks(desk.q, "A", [held])) == {held: "lost"}


def test_on_an_empty_database_nothing_is_made(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert desk.call(ops.stop_tasks(desk.q, "A", [claim(1)])) == {claim(1): "lost"}
    assert desk.state() == {}


def test_a_mark_that_stands_ends_it_as_cancelled(desk: Desk) -> None:
    one, two = desk.hold("A", b"a", b"b")
    desk.call(ops.cancel_task(desk.q, b"a"))
    with desk.listening(desk.q.cancelled_channel) as heard:
        assert desk.call(ops.stop_tasks(desk.q, "A", [one, two])) == {one: "cancelled"}
    assert heard == [("_cancelled", str(one).encode())]
    assert desk.waiting() == [b"b"]
    assert set(desk.state()) == {"waiting", ":workers", ":policy:A", ":counts"}


def test_what_was_claimed_before_the_queue_was_deleted_is_dropped(desk: Desk) -> None:
    [raw] = desk.hold("A", b"a")
    [held] = desk.hold("A", b"b")
    desk.retry("A", held)
    [job] = desk.take("A", 1)
    desk.call(ops.delete_queue(desk.q))
    [new] = desk.hold("A", b"new")
    assert desk.call(ops.stop_tasks(desk.q, "A", [raw, job, new])) == {raw: "dropped", job: "dropped"}
    assert desk.waiting() == [b"new"]
    assert set(desk.state()) == {"waiting", ":workers", ":policy:A", ":counts"}
    assert desk.counts()["dropped"] == 2


def test_a_claim_with_nothing_under_it_is_gone_and_leaves_nothing(desk: Desk) -> None:
    raw, held = desk.hold("A", b"a", b"b")
    desk.retry("A", held)
    [job] = desk.take("A", 1)
    desk.client.delete(desk.q.claim(raw), desk.q.active(f"@{held}"))  # data that somebody deleted
    assert desk.call(ops.stop_tasks(desk.q, "A", [raw, job])) == {raw: "gone", job: "gone"}
    assert not any(name.startswith((":claim", ":active", ":job")) for name in desk.state())


def test_a_suspect_goes_back_to_the_suspects(desk: Desk) -> None:
    desk.stall(b"suspect")
    desk.put(b"a")
    desk.enter("A")
    held = desk.take("A", 2)
    desk.call(ops.stop_tasks(desk.q, "A", held))
    state = desk.state()
    assert state["waiting"] == [b"a"]
    assert state[":suspects"] == [reference(f"@{claim(1)}")]


def test_where_the_first_stall_is_final_nobody_is_a_suspect(desk: Desk) -> None:
    desk.enter("A", max_stalls=1)
    desk.put(b"a", b"b")
    one, two = desk.take("A", 2)
    desk.retry("A", two)
    [job] = desk.take("A", 1)
    desk.call(ops.stop_tasks(desk.q, "A", [one, job]))
    assert ":suspects" not in desk.state()
    assert desk.waiting() == [b"a", b"b"]


def test_wakes_one_hungry_worker_for_each(desk: Desk) -> None:
    held = desk.hold("A", b"a", b"b")
    workers = ["X", "Y", "Z"]
    desk.client.sadd(desk.q.hungry, *workers)
    with desk.listening(*map(desk.q.wake_channel, workers)) as heard:
        desk.call(ops.stop_tasks(desk.q, "A", held))
    assert len(heard) == 2


def test_a_cancelled_suspect_makes_room_for_the_next(desk: Desk) -> None:
    desk.stall(b"s1", b"s2")
    desk.enter("A")
    held = desk.take("A", 1)
    desk.client.sadd(desk.q.hungry, "B")
    desk.call(ops.cancel_task(desk.q, b"s1"))
    with desk.listening(desk.q.wake_channel("B")) as heard:
        desk.call(ops.stop_tasks(desk.q, "A", held))
    assert heard == [(":wake:B", b"1")]


def test_without_a_policy_the_defaults_hold(desk: Desk) -> None:
    desk.stall(b"suspect")
    desk.enter("A")
    held = desk.take("A", 1)
    desk.client.delete(desk.q.policy("A"))
    assert desk.call(ops.stop_tasks(desk.q, "A", held)) == {}
    assert len(desk.state()[":suspects"]) == 1


# Jobs


def test_a_dispatched_job_keeps_all_that_its_dispatch_said(desk: Desk) -> None:
    held = desk.run("A", "x", fields={"timeout": "5"}, meta="{}", expires=str(FUTURE))
    desk.call(ops.note_progress(desk.q, "A", [(held, 0.5, "half")]))
    desk.call(ops.stop_tasks(desk.q, "A", [held]))
    kept = {"timeout": 5, "meta": "{}", "expires": FUTURE, "run_at": PAST, "started": 1}
    assert desk.state()[":job:x"] == record("a", held - 1, queued=held, **kept)


def test_with_a_blocked_twin_it_is_one_job_at_the_front(desk: Desk) -> None:
    held = desk.run("A", "x", b"old", fields={"timeout": "1"})
    desk.put(b"raw")
    desk.dispatch("x", b"new", fields={"timeout": "2"}, policy="timeout")
    twin = desk.dispatch("x", b"newer", fields={"timeout": "3", "jitter": "3"}, meta="m").number
    desk.client.sadd(desk.q.hungry, "B", "C")
    with desk.listening(desk.q.wake_channel("B"), desk.q.wake_channel("C")) as heard:
        assert desk.call(ops.stop_tasks(desk.q, "A", [held])) == {}
    assert len(heard) == 1
    state = desk.state(":hungry")
    merged = {"timeout": 2, "jitter": 3, "meta": "m", "run_at": PAST, "queued": held, "last": twin, "started": 1}
    assert state[":job:x"] == record("newer", held - 1, **merged)
    assert state["waiting"] == [b"raw", reference("x")]
    assert set(state) == {"waiting", ":job:x", ":workers", ":policy:A", ":counts"}


def test_with_a_twin_that_is_due_later_it_waits_until_then(desk: Desk) -> None:
    held = desk.run("A", "x")
    desk.dispatch("x", run_at=FUTURE)
    desk.client.sadd(desk.q.hungry, "B")
    desk.call(ops.stop_tasks(desk.q, "A", [held]))
    state = desk.state()
    assert (state[":due"], state[":hungry"]) == (["x"], {"B"})
    assert state[":job:x"]["state"] == "due"


@pytest.mark.parametrize(("data", "first", "last"), [(False, b"old", "1"), (True, b"new", None)])
def test_a_twin_that_changes_nothing_changes_nothing(desk: Desk, data: bool, first: bytes, last: str | None) -> None:
    held = desk.run("A", "x", b"old")
    desk.retry("A", held)
    [held] = desk.take("A", 1)
    desk.dispatch("x", b"new", data=data, when="keep")
    desk.call(ops.stop_tasks(desk.q, "A", [held]))
    assert desk.waiting() == [first]
    assert desk.state()[":job:x"].get("failures") == last


def test_a_suspect_whose_counts_its_twin_resets_is_none(desk: Desk) -> None:
    held = desk.run("A", "x")
    for _ in range(2):
        desk.call(ops.fail_worker(desk.q, "A"))
        desk.enter("A")
        [held] = desk.take("A", 1)
    desk.dispatch("x", counts=True)
    desk.call(ops.stop_tasks(desk.q, "A", [held]))
    state = desk.state()
    assert ":suspects" not in state
    assert state[":job:x"].keys().isdisjoint({"stalls", "suspect"})


def test_marked_or_dropped_the_twin_takes_its_place(desk: Desk) -> None:
    one = desk.run("A", "x", b"old")
    desk.call(ops.cancel_job(desk.q, "x", ""))
    two = desk.run("A", "y", b"old")
    desk.call(ops.delete_queue(desk.q))
    for name in ("x", "y"):
        assert desk.dispatch(name, b"new").outcome == "blocked"
    assert desk.call(ops.stop_tasks(desk.q, "A", [one, two])) == {one: "cancelled", two: "dropped"}
    assert desk.waiting() == [b"new", b"new"]


def test_what_was_dropped_tells_whoever_waits_for_it(desk: Desk) -> None:
    held = desk.run("A", "x", fields={"result_ttl": "60000"})
    desk.call(ops.delete_queue(desk.q))
    desk.call(ops.stop_tasks(desk.q, "A", [held]))
    assert desk.call(ops.read_result(desk.q, "x", held - 1)).status == "cancelled"
