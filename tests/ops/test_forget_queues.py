from __future__ import annotations

from tests.ops.driver import PAST, Desk, Expires
from worqr import ops
from worqr.ops import FORGET_AT_ONCE, MANY_DYING, UNUSED_MS


def note(desk: Desk, names: dict[str, int]) -> None:
    desk.client.zadd(desk.g.queues, dict(names))
    desk.client.expire(desk.g.queues, 1000)


def test_forgets_the_names_that_were_not_noted_for_an_hour(desk: Desk) -> None:
    note(desk, {"old": PAST, "other": PAST, "new": desk.now(), "hour": desk.now() - UNUSED_MS + 60_000})
    assert desk.send(ops.forget_queues(desk.g, ["old", "new", "hour"])) == [b"ok", b"old"]
    assert desk.state(":counts") == {":queues": Expires(["other", "hour", "new"])}


def test_a_name_that_is_not_there_is_not_known_either(desk: Desk) -> None:
    with desk.nothing_changes():
        assert desk.call(ops.forget_queues(desk.g, ["nobody"])) == ["nobody"]


def die(desk: Desk, worker: str, queue: str) -> None:
    desk.register(worker, queues=[queue])
    desk.client.delete(desk.g.worker(worker))
    desk.call(ops.condemn_worker(desk.g, worker, None))


def test_what_a_dying_worker_served_stays(desk: Desk) -> None:
    die(desk, "A", "Q1")
    die(desk, "B", "Q2")
    note(desk, {"Q1": PAST, "Q2": PAST, "Q3": PAST})
    assert desk.call(ops.forget_queues(desk.g, ["Q1", "Q2", "Q3"])) == ["Q3"]
    desk.call(ops.unmap_work(desk.g, "B", "Q2"))
    assert desk.call(ops.forget_queues(desk.g, ["Q1", "Q2", "Q3"])) == ["Q2", "Q3"]
    assert desk.state()[":queues"] == Expires(["Q1"])


def test_nothing_is_forgotten_while_many_workers_are_swept(desk: Desk) -> None:
    for n in range(MANY_DYING + 1):
        die(desk, f"W{n}", "Q1")
    note(desk, {"old": PAST})
    with desk.nothing_changes():
        assert desk.send(ops.forget_queues(desk.g, ["old"])) == [b"busy"]
        assert desk.call(ops.forget_queues(desk.g, ["old"])) == []
    desk.call(ops.unmap_work(desk.g, "W0", "Q1"))
    desk.call(ops.forget_worker(desk.g, "W0"))
    assert desk.call(ops.forget_queues(desk.g, ["old"])) == ["old"]


def test_a_resend_forgets_no_name_that_was_noted_meanwhile(desk: Desk) -> None:
    note(desk, {"Q1": PAST, "Q2": PAST})
    call = ops.forget_queues(desk.g, ["Q1"])
    desk.send(call)
    desk.call(ops.note_queues(desk.g, ["Q1"]))
    with desk.nothing_changes():
        assert desk.send(call) == [b"ok"]


def test_as_many_as_one_call_may_have(desk: Desk) -> None:
    names = [f"Q{n}" for n in range(FORGET_AT_ONCE)]
    note(desk, dict.fromkeys(names, PAST))
    desk.register("A")
    assert desk.call(ops.forget_queues(desk.g, names)) == names
    assert ":queues" not in desk.state()


def test_on_an_empty_database_nothing_is_made(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert desk.call(ops.forget_queues(desk.g, ["Q1"])) == ["Q1"]
    assert desk.state() == {}
