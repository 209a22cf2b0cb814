from __future__ import annotations

from itertools import pairwise

import pytest

from tests.ops.driver import DIED, PAST, Desk, Expires, aside, claim, digest, payloads, record, reference, remembered
from worqr import ops
from worqr.ops import ReleasedClaims
from worqr.records import RemoteError


def test_gives_claims_back_to_the_front_in_their_old_order_with_one_stall_more(desk: Desk) -> None:
    one, two = desk.hold("A", b"a", b"b")
    desk.start("A", 1)
    desk.put(b"c")
    assert desk.send(ops.fail_worker(desk.q, "A")) == [b"ok", 2, 0, 0]
    assert desk.state() == {
        "waiting": [b"c", reference(f"@{two}"), reference(f"@{one}")],
        f":job:@{one}": remembered("a", one, stalls=1),
        f":job:@{two}": remembered("b", two, stalls=1),
        f":twins:{digest('a')}": {f"@{one}"},
        f":twins:{digest('b')}": {f"@{two}"},
        ":counts": Expires({"fence": str(two), "enqueued": "3", "claimed": "2", "stalled": "2"}),
    }
    assert desk.waiting() == [b"a", b"b", b"c"]


def test_one_stall_before_the_limit_to_the_suspects_set_aside_at_it(desk: Desk) -> None:
    desk.put(b"poison")
    for n in range(3):
        desk.enter("A", keep_failed=5)
        assert desk.take("A", 1) == [claim(n + 1)]
        assert desk.call(ops.fail_worker(desk.q, "A")) == ReleasedClaims(False, int(n < 2), 0, int(n == 2))
        assert (":suspects" in desk.state()) == (n == 1)
    last, error = (
        str(claim(3)),
        RemoteError("Stalled", "its workers died while it ran, as often as max_stalls allows", ""),
    )
    kept = {"twin": digest("poison"), "first": claim(1), "last": claim(1), "started": 1}
    assert desk.state() == {
        ":failed": [last],
        f":aside:{last}": aside("poison", f"@{claim(1)}", reason="stalled", stalls=3, error=error, **kept),
        ":aside": {f"@{claim(1)}": last},
        ":counts": Expires({"fence": last, "enqueued": "1", "claimed": "3", "stalled": "2", "failed": "1"}),
    }


@pytest.mark.parametrize("max_stalls", [1, 2, 4])
def test_the_limit_is_the_handlers(desk: Desk, max_stalls: int) -> None:
    desk.put(b"poison")
    for n in range(1, max_stalls + 1):
        desk.enter("A", max_stalls=max_stalls, keep_failed=0)
        desk.take("A", 1)
        returned = desk.call(ops.fail_worker(desk.q, "A"))
        assert returned.dead_lettered == int(n == max_stalls)
        assert (":suspects" in desk.state()) == (n == max_stalls - 1)
    assert set(desk.state()) == {":counts"}  # keep_failed=0: no record


def test_a_poison_task_does_not_take_its_neighbours_with_it(desk: Desk) -> None:
    neighbours = [b"n%d" % n for n in range(5)]
    desk.put(b"poison", *neighbours)
    for _ in range(3):
        desk.enter("A")
        assert payloads(desk.start("A", 3).entries)[0] == b"poison"
        desk.call(ops.fail_worker(desk.q, "A"))
    assert desk.counts()["failed"] == 1
    assert len(desk.state()[":suspects"]) == 2  # the two that were with it from the first: from now on apart
    desk.enter("B")
    done: list[bytes] = []
    while (started := desk.start("B", 9)).entries:
        done += payloads(started.entries)
        claims = range(started.first, started.first + len(started.entries))
        desk.call(ops.finish_tasks(desk.q, "B", claims))
    assert sorted(done) == neighbours


def test_goes_in_steps_and_keeps_the_order_over_thousands(desk: Desk) -> None:
    tasks = [b"%d" % n for n in range(3500)]
    desk.enter("A")
    for start in range(0, 3500, 500):
        desk.put(*tasks[start : start + 500])
    for _ in range(7):
        desk.take("A", 500)
    steps = [desk.call(ops.fail_worker(desk.q, "A", 1000)) for _ in range(4)]
    assert [(step.more, step.requeued) for step in steps] == [(True, 1000)] * 3 + [(False, 500)]
    assert desk.client.keys(f"{desk.q.base}:c*") == [desk.q.counts.encode()]  # neither claims nor claim lists
    assert not desk.client.exists(desk.q.workers, desk.q.policy("A"), desk.q.leaving("A"))
    items = desk.client.lrange(desk.q.base, 0, -1)
    assert all(later > earlier for later, earlier in pairwise(items))
    assert desk.waiting() == tasks


def test_a_copy_goes_on_and_then_finds_nothing(desk: Desk) -> None:
    desk.hold("A", b"a", b"b", b"c")
    call = ops.fail_worker(desk.q, "A", 2)
    assert [desk.call(call), desk.call(call)] == [ReleasedClaims(True, 2, 0, 0), ReleasedClaims(False, 1, 0, 0)]
    with desk.nothing_changes():
        assert desk.call(call) == ReleasedClaims(False, 0, 0, 0)
    assert desk.waiting() == [b"a", b"b", b"c"]


def test_equal_tasks_of_a_dead_worker_all_go_back(desk: Desk) -> None:
    desk.hold("A", b"a", b"a", b"b", b"a")
    desk.call(ops.fail_worker(desk.q, "A"))
    assert desk.waiting() == [b"a", b"a", b"b", b"a"]


def test_the_others_are_not_touched(desk: Desk) -> None:
    desk.enter("A", "B")
    desk.put(b"a", b"b")
    desk.take("A", 1)
    mine = desk.state(":counts")
    desk.take("B", 1)
    desk.call(ops.fail_worker(desk.q, "B"))
    after = desk.state(":counts")
    assert {name: after[name] for name in (":claims:A", f":claim:{claim(1)}", ":policy:A")} == {
        name: mine[name] for name in (":claims:A", f":claim:{claim(1)}", ":policy:A")
    }
    assert set(after[":workers"]) == {"A"}


def test_on_an_empty_database_nothing_is_made(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert desk.call(ops.fail_worker(desk.q, "A")) == ReleasedClaims(False, 0, 0, 0)
    assert desk.state() == {}


def test_a_cancel_that_met_the_dying_owner_holds(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.call(ops.cancel_task(desk.q, b"a"))
    with desk.listening(desk.q.cancelled_channel) as heard:
        assert desk.call(ops.fail_worker(desk.q, "A")) == ReleasedClaims(False, 0, 1, 0)
    assert heard == [("_cancelled", str(held).encode())]
    assert set(desk.state()) == {":counts"}
    assert "stalled" not in desk.counts()


def test_what_was_claimed_before_the_queue_was_deleted_is_dropped(desk: Desk) -> None:
    desk.hold("A", b"a")
    desk.call(ops.delete_queue(desk.q))
    assert desk.call(ops.fail_worker(desk.q, "A")) == ReleasedClaims(False, 0, 0, 0)
    assert set(desk.state()) == {":counts"}


def test_wakes_one_hungry_worker_for_each_but_never_the_dead(desk: Desk) -> None:
    desk.hold("A", b"a", b"b")
    desk.start("A", 1)
    desk.client.sadd(desk.q.hungry, "B", "C", "D")
    with desk.listening(*map(desk.q.wake_channel, "ABCD")) as heard:
        desk.call(ops.fail_worker(desk.q, "A"))
    assert len(heard) == 2
    assert (":wake:A", b"1") not in heard


def test_without_a_policy_the_defaults_hold(desk: Desk) -> None:
    desk.hold("A", b"a")
    desk.client.delete(desk.q.policy("A"))
    assert desk.call(ops.fail_worker(desk.q, "A")) == ReleasedClaims(False, 1, 0, 0)


# Jobs


def test_a_job_with_a_blocked_twin_comes_back_as_one_with_a_stall_more_or_none(desk: Desk) -> None:
    for counts, stalls in ((False, "1"), (True, None)):
        held = desk.run("A", f"{counts}", b"old")
        twin = desk.dispatch(f"{counts}", b"new", counts=counts).number
        assert desk.call(ops.fail_worker(desk.q, "A")) == ReleasedClaims(False, 1, 0, 0)
        state = desk.state()
        wanted = record(
            "new", held - 1, run_at=PAST, queued=held, last=twin, started=1, **({} if counts else {"stalls": 1, **DIED})
        )
        assert state[f":job:{counts}"] == wanted
        assert wanted.get("stalls") == stalls
        assert state["waiting"] == [reference(f"{counts}")]
        assert ":blocked" not in state
        desk.call(ops.cancel_job(desk.q, f"{counts}", ""))
        desk.client.delete(desk.q.base)


def test_the_limit_that_the_job_brings_goes_before_the_handlers(desk: Desk) -> None:
    held = desk.run("A", "x", fields={"max_stalls": "1"})
    assert desk.call(ops.fail_worker(desk.q, "A")).dead_lettered == 1
    desk.run("A", "y", fields={"max_stalls": "5"})
    for _ in range(3):
        assert desk.call(ops.fail_worker(desk.q, "A")).requeued == 1
        desk.enter("A")
        desk.take("A", 1)
    assert ":suspects" not in desk.state()
    assert desk.state()[":failed"] == [str(held)]


def test_one_that_is_set_aside_posts_its_failure_leaves_a_result_and_lets_its_twin_go(desk: Desk) -> None:
    held = desk.run("A", "x", b"old", fields={"result_ttl": "60000", "max_stalls": "1"})
    desk.dispatch("x", b"new")
    desk.enter("A", on_failure=True)
    assert desk.call(ops.fail_worker(desk.q, "A")) == ReleasedClaims(False, 0, 0, 1)
    state = desk.state()
    assert state["-fail"] == [reference(f"@f{held}")]
    assert state[f"-fail:job:@f{held}"]["task"] == "old"
    assert state[":result:x"].value["error_type"] == "Stalled"
    assert desk.waiting() == [b"new"]


def test_a_dead_one_in_the_trash_stays_there(desk: Desk) -> None:
    desk.run("A", "x", b"old")
    desk.dispatch("x", b"twin")
    desk.call(ops.delete_queue(desk.q))
    desk.dispatch("x", b"new")
    assert desk.call(ops.fail_worker(desk.q, "A")) == ReleasedClaims(False, 0, 0, 0)
    assert desk.waiting() == [b"new"]
    assert desk.counts()["dropped"] == 1
