from __future__ import annotations

from tests.ops.driver import FUTURE, Desk, Expires, claim
from worqr import ops


def test_puts_what_waits_out_of_reach_and_tells_the_peers(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.put(b"b", b"c", b"d")
    before = desk.state()
    with desk.listening(desk.q.base) as heard:
        assert desk.send(ops.delete_queue(desk.q)) == [b"ok", 3]
    assert heard == [("waiting", b"deleted")]
    before[":trash"] = before.pop("waiting")
    fence = str(held + 1)
    noted = {"fence": fence, "cleared": fence, "cleared_why": "the queue was deleted"}
    before[":counts"] = Expires({**before[":counts"].value, "deleted": "3", **noted})
    assert desk.state() == before


def test_the_suspects_go_too(desk: Desk) -> None:
    desk.stall(b"suspect")
    assert desk.send(ops.delete_queue(desk.q)) == [b"ok", 1]
    state = desk.state()
    assert ":suspects" not in state
    assert len(state[":trash:suspects"]) == 1
    assert desk.call(ops.inspect(desk.q)).waiting == 0


def test_what_runs_may_finish_and_nothing_else(desk: Desk) -> None:
    one, two, three, _ = desk.hold("A", b"a", b"b", b"c", b"d")
    desk.call(ops.delete_queue(desk.q))
    assert desk.call(ops.finish_tasks(desk.q, "A", [one])) == {}
    assert desk.call(ops.stop_tasks(desk.q, "A", [two])) == {two: "dropped"}
    assert desk.retry("A", three) == "dropped"
    desk.call(ops.fail_worker(desk.q, "A"))
    assert set(desk.state()) == {":counts"}
    assert desk.counts()["dropped"] == 3


def test_the_next_claims_are_the_new_queues(desk: Desk) -> None:
    for n in range(50):  # as many as lay in the old one
        desk.put(b"old%d" % n)
    desk.call(ops.delete_queue(desk.q))
    held = desk.hold("A", *[b"new"] * 60)
    assert desk.call(ops.stop_tasks(desk.q, "A", held)) == {}
    assert desk.waiting() == [b"new"] * 60


def test_a_stale_reference_is_not_counted_and_does_not_stay_counted(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.retry("A", held)
    desk.call(ops.cancel_task(desk.q, b"a"))
    assert desk.send(ops.delete_queue(desk.q)) == [b"ok", 0]
    desk.put(b"b")
    assert desk.waiting() == [b"b"]


def test_busy_while_an_earlier_deletion_is_not_purged(desk: Desk) -> None:
    desk.put(b"a")
    assert desk.call(ops.delete_queue(desk.q))
    desk.put(b"b")
    with desk.nothing_happens():
        assert desk.send(ops.delete_queue(desk.q)) == [b"busy"]
        assert not desk.call(ops.delete_queue(desk.q))
    desk.call(ops.purge_queue(desk.q))
    assert desk.call(ops.delete_queue(desk.q))


def test_a_resend_gets_the_same_reply_and_deletes_nothing_newer(desk: Desk) -> None:
    desk.put(b"a")
    call = ops.delete_queue(desk.q)
    reply = desk.send(call)
    desk.call(ops.purge_queue(desk.q))
    desk.client.lpush(desk.q.base, b"newer")
    with desk.nothing_changes():
        assert desk.resend(call) == reply


def test_a_late_copy_deletes_nothing(desk: Desk) -> None:
    desk.put(b"a")
    with desk.nothing_happens():
        assert desk.late(ops.delete_queue(desk.q)) == [b"late"]


def test_on_an_empty_database_nothing_is_made_that_stays(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert desk.send(ops.delete_queue(desk.q)) == [b"ok", 0]
    [counts] = desk.state().values()
    assert isinstance(counts, Expires)


def test_the_fence_noted_is_above_every_claim(desk: Desk) -> None:
    held = desk.hold("A", b"a")
    desk.call(ops.delete_queue(desk.q))
    assert int(desk.state()[":counts"].value["cleared"]) > held[0]
    assert desk.hold("A", b"b") == [claim(3)]


# Jobs


def test_what_is_due_and_what_is_blocked_goes_too(desk: Desk) -> None:
    desk.run("A", "runs")
    desk.dispatch("runs")
    desk.dispatch("due", run_at=FUTURE)
    desk.dispatch("waits")
    before = desk.state()
    with desk.listening(desk.g.due_channel) as heard:
        assert desk.send(ops.delete_queue(desk.q)) == [b"ok", 3]
    assert heard == []
    after = desk.state()
    for part in ("waiting", ":due", ":blocked"):
        before[":trash" + part.replace("waiting", "")] = before.pop(part)
    fence = str(int(before[":counts"].value["fence"]) + 1)
    told = {"deleted": "3", "fence": fence, "cleared": fence, "cleared_why": "the queue was deleted"}
    before[":counts"] = Expires({**before[":counts"].value, **told})
    assert after == before
    seen = desk.call(ops.inspect(desk.q))
    assert (seen.waiting, seen.due, seen.blocked, seen.trash, seen.next_in_ms) == (0, 0, 0, True, None)


def test_busy_while_anything_of_an_earlier_deletion_is_left(desk: Desk) -> None:
    for said in ({}, {"run_at": FUTURE}):
        desk.dispatch("x", **said)
        assert desk.call(ops.delete_queue(desk.q))
        assert not desk.call(ops.delete_queue(desk.q))
        desk.call(ops.purge_queue(desk.q))
    desk.run("A", "runs")
    desk.dispatch("runs")
    assert desk.call(ops.delete_queue(desk.q))
    assert not desk.call(ops.delete_queue(desk.q))


def test_the_failure_queue_stays(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.enter("A", on_failure=True)
    desk.fail("A", held)
    desk.call(ops.delete_queue(desk.q))
    assert "-fail" in desk.state() and ":failed" in desk.state()
