from __future__ import annotations

from tests.ops.driver import Desk, policy
from worqr import ops


def test_puts_the_worker_into_the_fence_with_its_policy(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    call = ops.start_work(desk.q, "A", max_stalls=5, keep_failed=7, last=12)
    assert desk.send(call) == [b"ok"]
    assert desk.state() == {
        ":workers": {"A": "12 0 0 0"},
        ":policy:A": policy(5, 7),
    }


def test_a_resend_changes_nothing_even_after_it_left(desk: Desk) -> None:
    call = ops.start_work(desk.q, "A", max_stalls=5, keep_failed=7, last=0)
    desk.send(call)
    with desk.nothing_changes():
        assert desk.resend(call) == [b"ok"]
    desk.call(ops.stop_work(desk.q, "A"))
    with desk.nothing_changes():
        assert desk.send(call, number=1) == [b"late"]


def test_a_late_copy_changes_nothing(desk: Desk) -> None:
    with desk.nothing_happens():
        assert desk.late(ops.start_work(desk.q, "A", max_stalls=5, keep_failed=7, last=0)) == [b"late"]


def test_who_is_in_keeps_its_place_and_gets_the_new_policy(desk: Desk) -> None:
    desk.hold("A", b"a")
    before = desk.state()
    desk.call(ops.start_work(desk.q, "A", max_stalls=9, keep_failed=9, last=0))
    assert desk.state() == {**before, ":policy:A": policy(9, 9)}


def test_who_comes_back_while_it_still_leaves_is_served(desk: Desk) -> None:
    desk.hold("A", b"a", b"b")
    assert desk.call(ops.stop_work(desk.q, "A", 1)).more
    desk.call(ops.start_work(desk.q, "A", max_stalls=3, keep_failed=1000, last=1))
    assert desk.start("A", 1).entries == [b"b"]


def test_a_handler_may_bring_a_failure_handler_and_keep_results(desk: Desk) -> None:
    desk.enter("A", on_failure=True, result_ttl_ms=5)
    assert desk.state()[":policy:A"] == policy(on_failure=True, result_ttl=5)
    desk.enter("A")
    assert desk.state()[":policy:A"] == policy()
