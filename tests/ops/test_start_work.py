from __future__ import annotations

from typing import Any

import msgspec

from tests.ops.driver import Desk, policy
from worqr import ops
from worqr.command import Command


def test_puts_the_worker_into_the_fence_with_its_policy(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    call = ops.start_work(desk.q, "A", max_stalls=5, keep_failed=7, last=12)
    assert desk.send(call) == [b"ok", 0]
    assert desk.state() == {
        ":workers": {"A": "12 0 0 0"},
        ":policy:A": policy(5, 7),
    }


def test_a_resend_changes_nothing_even_after_it_left(desk: Desk) -> None:
    call = ops.start_work(desk.q, "A", max_stalls=5, keep_failed=7, last=0)
    desk.send(call)
    with desk.nothing_changes():
        assert desk.resend(call) == [b"ok", 0]
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
    assert desk.client.zrange(desk.q.result_ttls, 0, -1, withscores=True) == [(b"A", 5)]
    desk.enter("A")
    assert desk.state()[":policy:A"] == policy()
    assert ":result_ttls" not in desk.state()


def test_who_keeps_results_is_known_until_it_has_left(desk: Desk) -> None:
    desk.hold("A", b"a", b"b")
    for worker, ttl in (("A", 60_000), ("B", 70_000), ("C", 0), ("D", None)):
        desk.enter(worker, result_ttl_ms=ttl)
    assert desk.state()[":result_ttls"] == ["A", "B"]
    assert desk.call(ops.stop_work(desk.q, "A", 1)).more
    assert desk.state()[":result_ttls"] == ["A", "B"]
    assert not desk.call(ops.stop_work(desk.q, "A", 1)).more
    assert desk.state()[":result_ttls"] == ["B"]
    desk.call(ops.fail_worker(desk.q, "B"))
    assert ":result_ttls" not in desk.state()
    desk.enter("A", result_ttl_ms=60_000)
    assert desk.state()[":result_ttls"] == ["A"]


def calls(desk: Desk, call: Command[Any]) -> int:
    """How many commands the script of `call` needs."""
    desk.client.config_resetstat()
    desk.send(call)
    return sum(told["calls"] for told in desk.client.info("commandstats").values())


def test_how_long_results_are_kept_is_one_read_however_many_workers_there_are(own_desk: Desk) -> None:
    desk = own_desk
    costs: list[tuple[int, int, int]] = []
    for workers in (["A"], [f"W{n}" for n in range(50)]):
        desk.enter(*workers)
        desk.dispatch("x")
        reads = calls(desk, ops.read_result(desk.q, "x", 0))
        cancels = calls(desk, ops.cancel_job(desk.q, "x", "why"))
        desk.put(b"a")
        desk.call(ops.delete_queue(desk.q))
        costs.append((reads, cancels, calls(desk, ops.purge_queue(desk.q))))
        desk.wipe()
        desk.numbers.clear()
    assert costs[0] == costs[1]


def test_the_deploy_of_a_worker_is_that_of_its_last_start(desk: Desk) -> None:
    for deploy, kept in (7, b"7"), (0, None):
        desk.call(ops.start_work(desk.q, "A", max_stalls=3, keep_failed=9, last=0, deploy=deploy))
        assert desk.client.hget(desk.q.policy("A"), "deploy") == kept


def test_says_whether_limits_or_only_rules_of_lanes_are_others(desk: Desk) -> None:
    """While an operator's limit holds, other limits of the workers change nothing."""

    def enter(limits: str, lanes: bytes) -> str:
        return desk.call(ops.start_work(desk.q, "A", max_stalls=3, keep_failed=9, last=0, limits=limits, lanes=lanes))

    one, two = (msgspec.msgpack.encode({"limit": text}) for text in ("1", "2"))
    assert [enter("5", one), enter("5", one), enter("5", two), enter("6", one)] == ["limits", "", "lanes", "limits"]
    desk.call(ops.set_limits(desk.q, "3"))
    assert [enter("5", one), enter("6", two)] == ["", "lanes"]
