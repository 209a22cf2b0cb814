from __future__ import annotations

from tests.ops.driver import Desk, Expires, claim, reference
from worqr import ops
from worqr.ops import ReleasedClaims


def test_leaves_and_gives_all_claims_back_uncounted_in_their_old_order(desk: Desk) -> None:
    desk.hold("A", b"a", b"b", b"c")
    desk.start("A", 1)
    desk.put(b"d")
    with desk.listening(desk.q.events_channel) as heard:
        assert desk.send(ops.stop_work(desk.q, "A")) == [b"ok", 3, 0, 0]
    assert heard == [(":events", b"stopped 3")]
    assert desk.state() == {
        "waiting": [b"d", b"c", b"b", b"a"],
        ":counts": Expires({"fence": str(claim(3)), "enqueued": "4", "claimed": "3", "stopped": "3"}),
    }


def test_is_hungry_no_more(desk: Desk) -> None:
    desk.enter("A")
    desk.start("A", 1)
    desk.call(ops.stop_work(desk.q, "A"))
    assert set(desk.state()) == {":counts"}


def test_costs_no_stall_and_keeps_suspects_apart(desk: Desk) -> None:
    desk.stall(b"suspect")
    desk.put(b"a")
    desk.enter("A")
    desk.take("A", 2)
    desk.call(ops.stop_work(desk.q, "A"))
    state = desk.state()
    assert state["waiting"] == [b"a"]
    assert state[":suspects"] == [reference(f"@{claim(1)}")]
    assert state[f":job:@{claim(1)}"]["stalls"] == "2"


def test_what_suspects_are_is_for_the_workers_policy_to_say(desk: Desk) -> None:
    desk.stall(b"a", times=1)
    desk.enter("A", max_stalls=2)
    desk.take("A", 1)
    desk.call(ops.stop_work(desk.q, "A"))
    assert ":suspects" in desk.state()


def test_goes_in_steps_and_stays_known_as_leaving(desk: Desk) -> None:
    held = desk.hold("A", b"a", b"b", b"c")
    assert desk.call(ops.stop_work(desk.q, "A", 2)) == ReleasedClaims(True, 2, 0, 0)
    state = desk.state()
    assert state["waiting"] == [b"c", b"b"]
    assert state[":workers"] == {"A": "leaving"}
    assert state[":claims:A"] == {str(held[0])}
    assert state[":leaving:A"] == [str(held[0]).encode()]
    assert desk.call(ops.stop_work(desk.q, "A", 2)) == ReleasedClaims(False, 1, 0, 0)
    counts = {**state[":counts"].value, "stopped": "3"}
    assert desk.state() == {"waiting": [b"c", b"b", b"a"], ":counts": Expires(counts)}


def test_a_resend_gives_no_more_back(desk: Desk) -> None:
    desk.hold("A", b"a", b"b", b"c")
    call = ops.stop_work(desk.q, "A", 1)
    reply = desk.send(call)
    with desk.nothing_changes():
        assert desk.resend(call) == reply == [b"more", 1, 0, 0]


def test_a_late_copy_does_not_put_out_who_came_back(desk: Desk) -> None:
    desk.hold("A", b"a")
    with desk.nothing_happens():
        assert desk.late(ops.stop_work(desk.q, "A")) == [b"late"]


def test_the_others_claims_are_not_touched(desk: Desk) -> None:
    desk.enter("A", "B")
    desk.put(b"a", b"b")
    desk.take("A", 1)
    before = desk.state()
    desk.take("B", 1)
    desk.call(ops.stop_work(desk.q, "B"))
    after = desk.state()
    assert (after[":claims:A"], after["waiting"]) == (before[":claims:A"], [b"b"])
    assert set(after[":workers"]) == {"A"}


def test_a_stranger_leaves_nothing(desk: Desk) -> None:
    desk.hold("A", b"a")
    with desk.nothing_happens():
        assert desk.call(ops.stop_work(desk.q, "stranger")) == ReleasedClaims(False, 0, 0, 0)


def test_on_an_empty_database_nothing_is_made(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert desk.call(ops.stop_work(desk.q, "A")) == ReleasedClaims(False, 0, 0, 0)
    assert desk.state() == {}


def test_marked_ones_end_as_cancelled_and_those_of_a_deleted_queue_are_dropped(desk: Desk) -> None:
    desk.hold("A", b"a", b"b")
    desk.call(ops.delete_queue(desk.q))
    desk.hold("A", b"c", b"d")
    desk.call(ops.cancel_task(desk.q, b"b"))
    desk.call(ops.cancel_task(desk.q, b"d"))
    assert desk.call(ops.stop_work(desk.q, "A")) == ReleasedClaims(False, 1, 2, 0)
    state = desk.state()
    assert set(state) == {"waiting", ":counts"}
    assert state["waiting"] == [b"c"]
    assert desk.counts()["dropped"] == 1


def test_settled_between_the_steps_leaves_nothing(desk: Desk) -> None:
    held = desk.hold("A", *[b"a"] * 5)
    assert desk.call(ops.stop_work(desk.q, "A", 1)).more
    desk.call(ops.finish_tasks(desk.q, "A", held[:4]))
    assert desk.call(ops.stop_work(desk.q, "A", 1)) == ReleasedClaims(False, 0, 0, 0)
    assert set(desk.state()) == {"waiting", ":counts"}


def test_a_wake_up_that_a_leaving_worker_may_have_had_goes_to_another(desk: Desk) -> None:
    desk.enter("A", "B")
    desk.put(b"x")
    desk.client.sadd(desk.q.hungry, "B")  # A was woken for it
    with desk.listening(desk.q.wake_channel("B")) as heard:
        desk.call(ops.stop_work(desk.q, "A"))
    assert heard == [(":wake:B", b"1")]
    assert ":hungry" not in desk.state()
