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


def test_who_is_evicted_goes_whatever_its_beat_is(desk: Desk) -> None:
    desk.register("A", "B", queues=["Q1"])
    desk.register("C", keepalive_ms=0)
    desk.beat("A", 5)
    for worker in ("A", "C"):
        call = ops.condemn_worker(desk.g, worker, ops.ANY_BEAT)
        before = desk.state()
        assert desk.send(call) == [b"ok"]
        gone = {":Workers": before[":Workers"] - {worker}, ":Dying": before.get(":Dying", set()) | {worker}}
        assert desk.state() == {key: value for key, value in {**before, **gone}.items() if key != f":worker:{worker}"}
        with desk.nothing_changes():
            assert desk.send(call) == [b"ok"]
            assert not desk.call(
                ops.keep_worker_alive(desk.g, worker, 6, keepalive_ms=0, lease_ms=0, running=0, room=1)
            ).alive
        desk.call(ops.unmap_work(desk.g, worker, "Q1"))
        desk.call(ops.forget_worker(desk.g, worker))
        with desk.nothing_changes():
            assert desk.send(call) == [b"gone"]


def test_a_missing_beat_does_not_save_who_is_evicted(desk: Desk) -> None:
    desk.register("A")
    desk.client.delete(desk.g.worker("A"))
    assert desk.call(ops.condemn_worker(desk.g, "A", ops.ANY_BEAT)) == "ok"
    assert desk.state()[":Dying"] == {"A"}


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
    for seen in (None, b"RUN 5", ops.ANY_BEAT):
        assert desk.call(ops.condemn_worker(desk.g, "A", seen)) == "gone"
    assert desk.state() == {}
