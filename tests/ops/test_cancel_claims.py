from __future__ import annotations

import pytest

from tests.ops.driver import Desk, claim
from worqr import ops


def cancel(desk: Desk, *claims: int, reason: str = "why") -> list[int]:
    return desk.call(ops.cancel_claims(desk.q, claims, reason=reason))


def test_one_without_an_id_is_marked_and_its_worker_told(desk: Desk) -> None:
    one, two = desk.hold("A", b"a", b"a")
    before = desk.state()
    with desk.listening(desk.q.cancel_channel, desk.q.wake_channel("A")) as heard:
        assert cancel(desk, two) == [two]
    assert heard == [("_cancel", str(two).encode())]
    assert desk.state() == {**before, ":cancelling": {str(two)}}
    assert desk.call(ops.finish_tasks(desk.q, "A", [one, two])) == {two: "cancelled"}
    assert desk.counts() == {"enqueued": 2, "claimed": 2, "finished": 1, "cancelled": 1}


def test_of_several_each_worker_that_holds_a_claim_is_told_once(desk: Desk) -> None:
    desk.enter("C")
    one, two = desk.hold("A", b"a", b"b")
    [three] = desk.hold("B", b"c")
    channels = [desk.q.wake_channel(worker) for worker in "ABC"]
    with desk.listening(desk.q.cancel_channel, *channels) as heard:
        assert cancel(desk, one, three) == [one, three]
    assert sorted(heard) == [(":wake:A", b"c"), (":wake:B", b"c")]
    assert desk.state()[":cancelling"] == {str(one), str(three)}
    assert desk.call(ops.list_marks(desk.q, [one, two, three])) == [one, three]


def test_a_job_gets_the_reason_and_frees_its_id(desk: Desk) -> None:
    held = desk.run("A", "x", unique_for=60_000, fields={"result_ttl": "60000"})
    assert cancel(desk, held, reason="no paper") == [held]
    state = desk.state()
    assert state[":active:x"]["cancel_reason"] == "no paper"
    assert ":taken:x" not in state
    assert desk.retry("A", held) == "cancelled"
    assert desk.state()[":result:x"].value["reason"] == "no paper"


def test_one_that_has_ended_is_left_out_and_leaves_no_mark(desk: Desk) -> None:
    one, two = desk.hold("A", b"a", b"b")
    desk.call(ops.finish_tasks(desk.q, "A", [one]))
    with desk.nothing_happens():
        assert cancel(desk, one, 7) == []
    desk.call(ops.stop_tasks(desk.q, "A", [two]))
    with desk.nothing_happens():
        assert cancel(desk, two) == []


def test_a_job_that_runs_again_is_not_touched_by_its_old_claim(desk: Desk) -> None:
    first = desk.run("A", "x")
    desk.retry("A", first)
    desk.take("A", 1)
    with desk.nothing_happens():
        assert cancel(desk, first) == []


def test_of_a_worker_that_died_it_ends_when_it_is_given_back(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    cancel(desk, held)
    with desk.listening(desk.q.cancelled_channel) as heard:
        desk.call(ops.fail_worker(desk.q, "A"))
    assert heard == [("_cancelled", str(held).encode())]
    assert desk.state().keys() == {":counts"}


def test_a_thousand_at_once(desk: Desk) -> None:
    held = desk.hold("A", *[b"a"] * 1000)
    assert cancel(desk, *held) == held
    assert len(desk.state()[":cancelling"]) == 1000


def test_a_resend_gets_the_stored_reply(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    call = ops.cancel_claims(desk.q, [held])
    reply = desk.send(call)
    desk.call(ops.finish_tasks(desk.q, "A", [held]))
    with desk.nothing_changes():
        assert desk.resend(call) == reply == [b"ok", str(held).encode()]


@pytest.mark.parametrize("claims", [[], [claim(1)]])
def test_on_an_empty_database_nothing_is_made(desk: Desk, claims: list[int]) -> None:
    desk.client.delete(desk.q.counts)
    assert cancel(desk, *claims) == []
    assert desk.state() == {}
