from __future__ import annotations

from tests.ops.driver import KEEPALIVE, LEASE, Desk, Expires
from worqr import ops
from worqr.ops import Beat


def test_beats_and_tells_people_how_it_is(desk: Desk) -> None:
    desk.register("A")
    desk.client.pexpire(desk.g.worker("A"), KEEPALIVE // 2)
    desk.client.expire(desk.g.info("A"), 10)
    assert desk.beat("A", 7) == Beat(True, False, False, [])
    assert desk.state(":counts") == {
        ":Workers": {"A"},
        ":worker:A": Expires("RUN 7"),
        ":info:A": Expires({"host": "h", "running": "2", "room": "3", "lag_ms": "0", "leaving": "0"}),
        ":version": "1",
    }
    assert KEEPALIVE / 2 < desk.client.pttl(desk.g.worker("A")) <= KEEPALIVE
    assert desk.client.ttl(desk.g.info("A")) > 50


def test_tells_people_that_the_loop_is_late_and_that_it_leaves(desk: Desk) -> None:
    desk.register("A")
    told = {"keepalive_ms": KEEPALIVE, "lease_ms": 0, "running": 0, "room": 1}
    desk.call(ops.keep_worker_alive(desk.g, "A", 1, **told, lag_ms=1500, leaving=True))
    facts = {"host": "h", "running": "0", "room": "1", "lag_ms": "1500", "leaving": "1"}
    assert desk.state()[":info:A"] == Expires(facts)


def test_notes_since_when_all_heartbeats_found_no_room(desk: Desk) -> None:
    desk.register("A")

    def beat(number: int, running: int, room: int) -> str | None:
        told = {"keepalive_ms": KEEPALIVE, "lease_ms": 0, "running": running, "room": room}
        desk.call(ops.keep_worker_alive(desk.g, "A", number, **told))
        found = desk.client.hget(desk.g.info("A"), "full_since")
        return None if found is None else found.decode()

    assert beat(1, 3, 1) is None
    began = int(desk.client.time()[0] * 1000)
    first = beat(2, 4, 0)
    assert first is not None
    assert began <= int(first) <= int(desk.client.time()[0] + 1) * 1000
    desk.client.hset(desk.g.info("A"), "full_since", "7")
    assert beat(3, 5, 0) == "7"  # the first one counts
    assert beat(4, 3, 1) is None
    assert beat(5, 0, 0) is None  # it runs nothing: it has no room to begin with


def test_what_people_are_told_is_written_when_it_changes_and_lasts_as_long_as_the_beats(desk: Desk) -> None:
    desk.register("A")
    desk.beat("A", 1, keepalive_ms=3000)
    writes = ("cmdstat_hset", "cmdstat_hdel", "cmdstat_expire")

    def written() -> int:
        stats = desk.client.info("commandstats")
        return sum(stats.get(name, {"calls": 0})["calls"] for name in writes)

    before = written()
    for number in range(2, 12):
        if number == 7:
            desk.client.expire(desk.g.info("A"), 10)
            before += 1
        desk.beat("A", number, keepalive_ms=3000)
    assert written() - before <= 2  # the expiry, every now and then
    assert desk.client.ttl(desk.g.info("A")) > 50
    desk.call(ops.keep_worker_alive(desk.g, "A", 12, keepalive_ms=KEEPALIVE, lease_ms=0, running=9, room=3))
    assert desk.client.hget(desk.g.info("A"), "running") == b"9"


def test_a_peer_whose_keepalive_is_longer_than_what_people_are_told_lasts_keeps_it_with_each_beat(desk: Desk) -> None:
    for keepalive_ms in (120_000, 0):
        desk.register("A", keepalive_ms=keepalive_ms)
        for number in range(1, 4):
            desk.client.expire(desk.g.info("A"), 10)
            assert desk.beat("A", number, keepalive_ms=keepalive_ms).alive
            assert desk.client.ttl(desk.g.info("A")) > 50


def test_the_same_beat_again_changes_nothing(desk: Desk) -> None:
    desk.register("A")
    desk.beat("A", 7, lease_ms=LEASE)
    with desk.nothing_changes():
        assert desk.beat("A", 7, lease_ms=LEASE) == Beat(True, False, True, [], "A 7")


def test_a_key_that_lapsed_is_armed_again_while_nobody_has_swept(desk: Desk) -> None:
    desk.register("A")
    desk.client.delete(desk.g.worker("A"))
    assert desk.beat("A", 8) == Beat(True, True, False, [])
    assert desk.state()[":worker:A"] == Expires("RUN 8")


def test_who_was_condemned_is_dead_and_leaves_nothing(desk: Desk) -> None:
    desk.register("A", queues=["Q1"])
    desk.client.delete(desk.g.worker("A"))
    desk.call(ops.condemn_worker(desk.g, "A", None))
    with desk.nothing_changes():
        assert desk.beat("A", 8, lease_ms=LEASE) == Beat(False, False, False, [])


def test_on_an_empty_database_nothing_is_made(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert desk.beat("A", lease_ms=LEASE) == Beat(False, False, False, [])
    assert desk.state() == {}


def test_one_that_never_counts_as_dead_keeps_a_key_that_stays(desk: Desk) -> None:
    desk.register("A", keepalive_ms=0)
    desk.client.delete(desk.g.worker("A"))
    assert desk.beat("A", keepalive_ms=0).alive
    assert desk.state()[":worker:A"] == "STAY"


def test_answers_with_the_queues_that_wait(desk: Desk) -> None:
    desk.register("A")
    desk.call(ops.post_scan(desk.g, ["Q2", "Q 1", "Qä"]))
    assert sorted(desk.beat("A").waiting) == ["Q 1", "Q2", "Qä"]


# The lease


def test_the_lease_is_taken_when_it_is_free_and_asked_for(desk: Desk) -> None:
    desk.register("A", "B")
    assert not desk.beat("A").leads
    assert desk.beat("A", 1, lease_ms=LEASE).leads
    assert desk.state()[":leader"] == Expires("A 1")
    assert LEASE / 2 < desk.client.pttl(desk.g.leader) <= LEASE


def test_the_lease_is_renewed_by_its_holder_alone(desk: Desk) -> None:
    desk.register("A", "B")
    desk.beat("A", 1, lease_ms=LEASE)
    desk.client.pexpire(desk.g.leader, LEASE // 2)
    assert not desk.beat("B", 5, lease_ms=LEASE).leads
    assert desk.client.pttl(desk.g.leader) <= LEASE / 2
    assert desk.beat("A", 2, lease_ms=LEASE).leads
    assert desk.state()[":leader"] == Expires("A 2")
    assert desk.client.pttl(desk.g.leader) > LEASE / 2


def test_a_holder_that_does_not_ask_lets_it_run_out(desk: Desk) -> None:
    desk.register("A")
    desk.beat("A", 1, lease_ms=LEASE)
    desk.client.pexpire(desk.g.leader, LEASE // 2)
    assert not desk.beat("A", 2).leads
    assert desk.client.pttl(desk.g.leader) <= LEASE / 2


def test_an_id_that_another_begins_with_is_not_that_other(desk: Desk) -> None:
    desk.register("a", "a b")
    assert desk.beat("a b", 1, lease_ms=LEASE).leads
    assert not desk.beat("a", 1, lease_ms=LEASE).leads
    assert desk.call(ops.stop_worker(desk.g, "a")) == []
    assert desk.state()[":leader"] == Expires("a b 1")


# A lease that stands still


def test_tells_the_lease_as_it_stands_after_the_beat(desk: Desk) -> None:
    desk.register("A", "B")
    assert desk.beat("B", 1).lease == ""
    assert desk.beat("A", 1, lease_ms=LEASE).lease == "A 1"
    assert desk.beat("B", 2, lease_ms=LEASE).lease == "A 1"
    assert desk.beat("A", 2, lease_ms=LEASE).lease == "A 2"


def test_a_lease_that_stands_still_is_taken_by_whoever_saw_it(desk: Desk) -> None:
    desk.register("A", "B")
    desk.beat("A", 7, lease_ms=LEASE)
    desk.client.pexpire(desk.g.leader, 3_600_000)  # as if the server's clock had been set back
    assert desk.beat("B", 5, lease_ms=LEASE, standing="A 7") == Beat(True, False, True, [], "B 5")
    assert desk.state()[":leader"] == Expires("B 5")
    assert desk.client.pttl(desk.g.leader) <= LEASE
    with desk.nothing_changes():
        assert desk.beat("B", 5, lease_ms=LEASE, standing="A 7").leads


def test_a_lease_that_was_renewed_or_taken_meanwhile_is_not_taken(desk: Desk) -> None:
    desk.register("A", "B", "C")
    desk.beat("A", 8, lease_ms=LEASE)
    assert desk.beat("B", 5, lease_ms=LEASE, standing="A 7") == Beat(True, False, False, [], "A 8")
    assert desk.beat("B", 6, lease_ms=LEASE, standing="A 8").leads
    assert not desk.beat("C", 6, lease_ms=LEASE, standing="A 8").leads
    assert desk.state()[":leader"] == Expires("B 6")


def test_who_does_not_ask_for_the_lease_takes_none(desk: Desk) -> None:
    desk.register("A", "B")
    desk.beat("A", 7, lease_ms=LEASE)
    assert not desk.beat("B", 5, standing="A 7").leads
    assert desk.state()[":leader"] == Expires("A 7")
