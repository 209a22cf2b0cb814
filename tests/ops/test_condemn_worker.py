from __future__ import annotations

from tests.ops.driver import Desk
from worqr import ops


def test_a_missing_beat_moves_the_worker_among_the_dying(desk: Desk) -> None:
    desk.register("A", "B", queues=["Q1"])
    desk.client.delete(desk.g.worker("A"))
    before = desk.state()
    assert desk.send(ops.condemn_worker(desk.g, "A", None)) == [b"ok"]
    assert desk.state() == {**before, ":Workers": {"B"}, ":Dying": {"A"}}


def test_a_beat_that_stands_still_too_and_its_key_goes(desk: Desk) -> None:
    desk.register("A")
    desk.beat("A", 5)
    assert desk.call(ops.condemn_worker(desk.g, "A", b"RUN 5")) == "ok"
    state = desk.state()
    assert state[":Dying"] == {"A"}
    assert not {":worker:A", ":Workers"} & set(state)


def test_who_has_beaten_since_is_alive(desk: Desk) -> None:
    desk.register("A")
    desk.beat("A", 5)
    with desk.nothing_changes():
        assert desk.call(ops.condemn_worker(desk.g, "A", None)) == "alive"
        assert desk.call(ops.condemn_worker(desk.g, "A", b"RUN 4")) == "alive"


def test_who_asked_never_to_count_as_dead_does_not(desk: Desk) -> None:
    desk.register("A", keepalive_ms=0)
    with desk.nothing_changes():
        assert desk.call(ops.condemn_worker(desk.g, "A", b"STAY")) == "alive"
        assert desk.call(ops.condemn_worker(desk.g, "A", None)) == "alive"


def test_a_resend_says_the_same_until_the_sweep_is_over(desk: Desk) -> None:
    desk.register("A")
    desk.client.delete(desk.g.worker("A"))
    call = ops.condemn_worker(desk.g, "A", None)
    desk.send(call)
    with desk.nothing_changes():
        assert desk.send(call) == [b"ok"]
    desk.call(ops.forget_worker(desk.g, "A"))
    with desk.nothing_changes():
        assert desk.send(call) == [b"gone"]


def test_on_an_empty_database_nothing_is_made(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert desk.call(ops.condemn_worker(desk.g, "A", None)) == "gone"
    assert desk.state() == {}
