from __future__ import annotations

from tests.ops.driver import Desk
from worqr import ops


def test_appends_an_entry_with_its_fields(desk: Desk) -> None:
    call = ops.note_event(desk.g, "paused", who="Ada", queue="Q1", worker="W", job="J", count=3, text=400 * "x")
    assert desk.send(call) == [b"ok"]
    told = {"kind": "paused", "who": "Ada", "queue": "Q1", "worker": "W", "job": "J", "n": "3", "text": 300 * "x"}
    assert desk.log() == [told]
    assert 29 * 86400 < desk.client.ttl(desk.g.log) <= 30 * 86400
    with desk.nothing_changes():
        assert desk.resend(call) == [b"ok"]
    desk.call(ops.note_event(desk.g, "resumed"))
    assert desk.log() == [told, {"kind": "resumed"}]


def test_a_late_copy_appends_nothing(desk: Desk) -> None:
    with desk.nothing_happens():
        assert desk.late(ops.note_event(desk.g, "paused")) == [b"late"]


def test_the_oldest_entries_go(desk: Desk) -> None:
    for n in range(2200):
        desk.client.xadd(desk.g.log, {"kind": str(n)})
    desk.call(ops.note_event(desk.g, "last"))
    kept = desk.log()
    assert 2000 <= len(kept) <= 2101  # whole nodes of about a hundred entries
    assert kept[-1] == {"kind": "last"}


def test_a_key_of_another_application_stays_as_it_is(desk: Desk) -> None:
    desk.client.set(desk.g.log, "foreign")
    desk.call(ops.note_event(desk.g, "paused"))
    desk.register("A")
    desk.call(ops.stop_worker(desk.g, "A"))
    assert desk.client.get(desk.g.log) == b"foreign"
    assert desk.client.ttl(desk.g.log) == -1


# What scripts of the registry append


def test_workers_that_join_leave_and_die(desk: Desk) -> None:
    call = ops.start_worker(desk.g, "A", keepalive_ms=3000, facts=[], text="host, pid 7")
    desk.send(call)
    desk.resend(call)
    desk.register("B", "C")
    desk.call(ops.stop_worker(desk.g, "A"))
    desk.call(ops.stop_worker(desk.g, "A"))
    for _ in range(2):
        desk.call(ops.condemn_worker(desk.g, "B", ops.ANY_BEAT, who="Ada", text="evicted"))
    assert desk.call(ops.condemn_worker(desk.g, "C", None, text="why")) == "alive"
    assert desk.log() == [
        {"kind": "joined", "worker": "A", "text": "host, pid 7"},
        {"kind": "joined", "worker": "B"},
        {"kind": "joined", "worker": "C"},
        {"kind": "left", "worker": "A"},
        {"kind": "dead", "worker": "B", "who": "Ada", "text": "evicted"},
    ]


def test_a_refused_worker_is_not_in_the_log(desk: Desk) -> None:
    desk.client.set(desk.g.version, "2")
    desk.send(ops.start_worker(desk.g, "A", keepalive_ms=3000, facts=[]))
    assert desk.log() == []


def test_of_many_that_join_in_a_second_the_last_are_one_entry(desk: Desk) -> None:
    members(desk, 20)
    desk.call(ops.note_event(desk.g, "paused"))
    desk.register("A")
    desk.register("B")
    desk.call(ops.stop_worker(desk.g, "A"))
    *others, last = desk.log()
    assert [entry["kind"] for entry in others] == [*(20 * ["joined"]), "paused"]
    assert last == {"kind": "more", "n": "3", "text": "more workers have joined or left in this second"}


def test_those_of_another_second_have_entries_of_their_own(desk: Desk) -> None:
    members(desk, 20, ago=2000)
    desk.register("A")
    assert desk.log()[-1] == {"kind": "joined", "worker": "A"}


def members(desk: Desk, count: int, *, ago: int = 0) -> None:
    """Entries of workers that have joined so many ms ago; without `ago`, in the second that is to come."""
    at = desk.now() - ago if ago else desk.now() + 60_000
    for n in range(count):
        desk.client.xadd(desk.g.log, {"kind": "joined", "worker": f"w{n}"}, id=f"{at}-{n}")
