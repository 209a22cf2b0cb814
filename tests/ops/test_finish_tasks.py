from __future__ import annotations

import pytest

from tests.ops.driver import FENCE, FUTURE, PAST, Desk, Expires, claim, payloads, policy, record, reference
from worqr import ops


def test_ends_claims_and_leaves_nothing_of_them(desk: Desk) -> None:
    one, two, three = desk.hold("A", b"a", b"b", b"a")
    before = desk.state()
    assert desk.send(ops.finish_tasks(desk.q, "A", [three, one])) == [b"ok"]
    for gone in (f":claim:{one}", f":claim:{three}"):
        del before[gone]
    before[":claims:A"] = {str(two)}
    before[":counts"] = Expires({**before[":counts"].value, "finished": "2"})
    assert desk.state() == before


def test_the_last_one_leaves_the_queue_as_if_new(desk: Desk) -> None:
    held = desk.hold("A", b"a")
    desk.call(ops.finish_tasks(desk.q, "A", held))
    assert set(desk.state()) == {":workers", ":policy:A", ":counts"}


def test_a_resend_answers_mine_and_changes_nothing(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    call = ops.finish_tasks(desk.q, "A", [held])
    desk.send(call)
    with desk.nothing_changes():
        assert desk.send(call) == [b"ok", str(held).encode(), b"mine"]


def test_each_claim_gets_its_own_answer(desk: Desk) -> None:
    one, two, three = desk.hold("A", b"a", b"b", b"c")
    desk.call(ops.cancel_task(desk.q, b"b"))
    desk.call(ops.finish_tasks(desk.q, "A", [three]))
    assert desk.call(ops.finish_tasks(desk.q, "A", [one, two, three])) == {two: "cancelled", three: "mine"}
    assert desk.counts()["finished"] == 2
    assert desk.counts()["cancelled"] == 1


def test_anothers_claim_is_not_touched(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.enter("B")
    with desk.nothing_changes():
        assert desk.call(ops.finish_tasks(desk.q, "B", [held])) == {held: "mine"}
        assert desk.call(ops.finish_tasks(desk.q, "stranger", [held])) == {held: "lost"}


def test_a_swept_owner_has_lost_it(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.call(ops.fail_worker(desk.q, "A"))
    desk.hold("B")
    desk.start("B", 1)
    with desk.nothing_changes():
        assert desk.call(ops.finish_tasks(desk.q, "A", [held])) == {held: "lost"}


def test_in_the_middle_of_its_sweep_what_is_given_back_is_lost_and_the_rest_counts(desk: Desk) -> None:
    older, newer = desk.hold("A", b"a", b"b")
    assert desk.call(ops.fail_worker(desk.q, "A", 1)).more
    assert desk.call(ops.finish_tasks(desk.q, "A", [older, newer])) == {newer: "lost"}
    assert not desk.call(ops.fail_worker(desk.q, "A", 1)).more
    assert desk.waiting() == [b"b"]


def test_on_an_empty_database_nothing_is_made(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert desk.call(ops.finish_tasks(desk.q, "A", [claim(1)])) == {claim(1): "lost"}
    assert desk.state() == {}


def test_a_finished_job_leaves_nothing(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.retry("A", held)
    again = desk.take("A", 1)
    assert any(name.startswith(":twins:") for name in desk.state())
    desk.call(ops.finish_tasks(desk.q, "A", again))
    assert set(desk.state()) == {":workers", ":policy:A", ":counts"}


def test_a_mark_that_stands_ends_it_as_cancelled_and_is_acknowledged(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.call(ops.cancel_task(desk.q, b"a"))
    with desk.listening(desk.q.cancelled_channel) as heard:
        assert desk.call(ops.finish_tasks(desk.q, "A", [held])) == {held: "cancelled"}
    assert heard == [("_cancelled", str(held).encode())]
    assert set(desk.state()) == {":workers", ":policy:A", ":counts"}
    assert desk.counts() == {"enqueued": 1, "claimed": 1, "cancelled": 1}


def test_tells_a_hungry_worker_of_a_suspect(desk: Desk) -> None:
    held = desk.hold("A", b"a")
    desk.stall(b"suspect")
    desk.client.sadd(desk.q.hungry, "B")
    with desk.listening(desk.q.wake_channel("B")) as heard:
        desk.call(ops.finish_tasks(desk.q, "A", held))
    assert heard == [(":wake:B", b"1")]


def test_wakes_nobody_where_no_suspect_waits(desk: Desk) -> None:
    held = desk.hold("A", b"a")
    desk.put(b"b")
    desk.client.sadd(desk.q.hungry, "B")
    desk.call(ops.finish_tasks(desk.q, "A", held))
    assert desk.state()[":hungry"] == {"B"}


def test_a_claim_with_nothing_under_it_leaves_no_mark(desk: Desk) -> None:
    one, two = desk.hold("A", b"x", b"y")
    desk.call(ops.cancel_task(desk.q, b"x"))
    desk.client.delete(desk.q.claim(one), desk.q.claim(two))  # data that somebody deleted
    assert desk.call(ops.finish_tasks(desk.q, "A", [one, two])) == {one: "cancelled", two: "mine"}
    assert set(desk.state()) == {":workers", ":policy:A", ":counts"}


def test_a_claim_named_twice_is_ended_once(desk: Desk) -> None:
    one, two = desk.hold("A", b"x", b"y")
    desk.call(ops.cancel_task(desk.q, b"y"))
    call = ops.finish_tasks(desk.q, "A", [one, one, two, two])
    assert [text.decode() for text in desk.send(call)[1:]] == [
        *(str(one), "mine"),
        *(str(two), "cancelled"),
        *(str(two), "mine"),
    ]
    assert desk.counts()["finished"] == 1
    assert desk.counts()["cancelled"] == 1


def test_more_than_a_thousand_at_once(desk: Desk) -> None:
    held = desk.hold("A", *[b"x"] * 1500)
    assert desk.call(ops.finish_tasks(desk.q, "A", held)) == {}
    assert desk.state()[":counts"].value["finished"] == "1500"
    assert desk.state()[":counts"].value["fence"] == str(FENCE + 1500)


# Jobs


def kept(first: int, last: int, kind: str = "none", value: str = "") -> Expires:
    return Expires({"outcome": "finished", "first": str(first), "last": str(last), "kind": kind, "value": value})


def test_keeps_the_result_as_long_as_the_job_says(desk: Desk) -> None:
    held = desk.run("A", "x", fields={"result_ttl": "60000"})
    with desk.listening(desk.q.job("x")) as heard:
        assert desk.call(ops.finish_tasks(desk.q, "A", [held], {held: ("json", b'{"\xff": 1}')})) == {}
    assert heard == [(":job:x", b"finished")]
    assert desk.state() == {
        ":result:x": kept(held - 1, held - 1, "json", '{"\xff": 1}'),
        ":workers": {"A": f"1 {held} 1 0"},
        ":policy:A": policy(),
        ":counts": Expires({"fence": str(held), "enqueued": "1", "claimed": "1", "finished": "1"}),
    }
    assert 50_000 < desk.client.pttl(desk.q.result("x")) <= 60_000


@pytest.mark.parametrize(("ttl", "workers"), [("0", 60_000), (None, None), (None, 0)])
def test_keeps_nothing_where_nobody_wants_it(desk: Desk, ttl: str | None, workers: int | None) -> None:
    held = desk.run("A", "x", fields={} if ttl is None else {"result_ttl": ttl})
    desk.enter("A", result_ttl_ms=workers)
    with desk.listening(desk.q.job("x")) as heard:
        desk.call(ops.finish_tasks(desk.q, "A", [held], {held: ("json", b"1")}))
    assert heard == [(":job:x", b"finished")]
    assert set(desk.state(":result_ttls")) == {":workers", ":policy:A", ":counts"}


def test_else_as_long_as_its_worker_says(desk: Desk) -> None:
    held = desk.run("A", "x")
    desk.enter("A", result_ttl_ms=60_000)
    desk.enter("B", result_ttl_ms=5)
    desk.call(ops.finish_tasks(desk.q, "A", [held]))
    assert desk.state()[":result:x"] == kept(held - 1, held - 1)
    assert desk.client.pttl(desk.q.result("x")) > 1000


def test_each_of_many_has_a_result_of_its_own_or_none(desk: Desk) -> None:
    desk.enter("A", result_ttl_ms=60_000)
    for name in ("x", "y", "z"):
        desk.dispatch(name)
    desk.put(b"raw")
    x, y, z, raw = desk.take("A", 4)
    results = {z: ("bytes", b"Z"), x: ("json", b"X"), raw: ("json", b"R")}
    assert desk.call(ops.finish_tasks(desk.q, "A", [x, y, z, raw], results)) == {}
    state = desk.state()
    assert {name: state[name].value["value"] for name in state if name.startswith(":result:")} == {
        ":result:x": "X",
        ":result:y": "",
        ":result:z": "Z",
    }


def test_a_result_of_a_claim_that_is_not_held_is_not_kept(desk: Desk) -> None:
    held = desk.run("A", "x", fields={"result_ttl": "60000"})
    call = ops.finish_tasks(desk.q, "A", [held], {held: ("json", b"1")})
    desk.call(call)
    desk.enter("B")
    with desk.nothing_changes():
        assert desk.call(ops.finish_tasks(desk.q, "A", [held], {held: ("json", b"2")})) == {held: "mine"}
        assert desk.call(ops.finish_tasks(desk.q, "B", [held], {held: ("json", b"2")})) == {held: "mine"}
    again = desk.run("A", "x", fields={"result_ttl": "60000"})
    desk.call(ops.fail_worker(desk.q, "A"))
    with desk.nothing_changes():
        assert desk.call(ops.finish_tasks(desk.q, "A", [again], {again: ("json", b"2")})) == {again: "lost"}


def test_a_mark_that_stands_drops_the_result_and_tells_why(desk: Desk) -> None:
    held = desk.run("A", "x", fields={"result_ttl": "60000"})
    desk.call(ops.cancel_job(desk.q, "x", "no paper"))
    assert desk.call(ops.finish_tasks(desk.q, "A", [held], {held: ("json", b"1")})) == {held: "cancelled"}
    wanted = {"outcome": "cancelled", "first": str(held - 1), "last": str(held - 1), "reason": "no paper"}
    assert desk.state()[":result:x"] == Expires(wanted)


def test_the_result_before_it_stays_for_whoever_is_about_to_read_it(desk: Desk) -> None:
    held = [0, 0, 0]
    for n in range(3):
        held[n] = desk.run("A", "x", fields={"result_ttl": "60000"})
        desk.call(ops.finish_tasks(desk.q, "A", [held[n]]))
    state = desk.state()
    assert state[":result:x"] == kept(held[2] - 1, held[2] - 1)
    assert state[":older_result:x"] == kept(held[1] - 1, held[1] - 1)


def test_a_blocked_twin_is_next_in_line_and_wakes_a_worker(desk: Desk) -> None:
    held = desk.run("A", "x", b"old")
    twin = desk.dispatch("x", b"new", policy="timeout").number
    desk.client.sadd(desk.q.hungry, "B", "C")
    with desk.listening(desk.q.wake_channel("B"), desk.q.wake_channel("C")) as heard:
        desk.call(ops.finish_tasks(desk.q, "A", [held]))
    assert len(heard) == 1
    state = desk.state(":hungry")
    assert state[":job:x"] == record("new", twin, run_at=PAST)
    assert state["waiting"] == [reference("x")]
    assert set(state) == {"waiting", ":job:x", ":workers", ":policy:A", ":counts"}
    assert payloads(desk.start("A", 1).entries) == [b"new"]


@pytest.mark.parametrize("when", ["set", "keep", "later", "earlier"])
def test_whatever_its_dispatch_said_it_does_not_stay_blocked(desk: Desk, when: str) -> None:
    held = desk.run("A", "x", b"old")
    desk.dispatch("x", b"new", when=when)
    desk.call(ops.finish_tasks(desk.q, "A", [held]))
    assert desk.waiting() == [b"new"]


def test_a_twin_that_is_due_later_waits_until_then_and_wakes_nobody(desk: Desk) -> None:
    held = desk.run("A", "x", b"old")
    twin = desk.dispatch("x", b"new", run_at=FUTURE).number
    desk.client.sadd(desk.q.hungry, "B")
    with desk.listening(desk.q.wake_channel("B"), desk.g.due_channel) as heard:
        desk.call(ops.finish_tasks(desk.q, "A", [held]))
    assert [channel for channel, _ in heard] == [":due"]
    assert desk.state()[":due"] == ["x"]
    assert desk.state()[":job:x"] == record("new", twin, "due", run_at=FUTURE)


def test_a_twin_goes_in_line_also_when_the_run_is_cancelled_or_has_lost_its_record(desk: Desk) -> None:
    one = desk.run("A", "x")
    two = desk.run("A", "y")
    desk.call(ops.cancel_job(desk.q, "x", ""))
    desk.dispatch("x", b"twin of x")
    desk.dispatch("y", b"twin of y")
    desk.client.delete(desk.q.active("y"))  # data that somebody deleted
    assert desk.call(ops.finish_tasks(desk.q, "A", [one, two])) == {one: "cancelled"}
    assert desk.waiting() == [b"twin of x", b"twin of y"]


def test_a_twin_in_the_trash_stays_there(desk: Desk) -> None:
    held = desk.run("A", "x")
    desk.dispatch("x", b"new")
    desk.call(ops.delete_queue(desk.q))
    desk.call(ops.finish_tasks(desk.q, "A", [held]))
    assert desk.waiting() == []
    assert desk.state()[":trash:blocked"] == {"x"}


def test_a_plain_twin_that_finishes_frees_no_id(desk: Desk) -> None:
    desk.put(b"a")
    desk.dispatch("x", b"a")
    desk.enter("A")
    [plain] = desk.take("A", 1)
    assert desk.call(ops.finish_tasks(desk.q, "A", [plain])) == {}
    assert desk.dispatch("x", b"a", exists="raise").outcome == "duplicate"
    [unique] = desk.take("A", 1)
    assert desk.dispatch("x", b"a", exists="raise").outcome == "duplicate"
    assert desk.call(ops.finish_tasks(desk.q, "A", [unique])) == {}
    assert desk.dispatch("x", b"a", exists="raise").outcome == "created"
