"""Which queues the leader looks at, and which names it forgets. No server is needed for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from worqr.ops import UNUSED_MS, Inspected
from worqr.peer.leader import scanner
from worqr.peer.leader.scanner import FRESH, FRESH_AT_ONCE, MAX_WAITING, QUIET_AT_ONCE, UNSEEN_AT_ONCE, KnownQueues

NOTHING = Inspected(0, 0, 0, 0, 0, None, False, [], {}, 0, None, None)
LATE = 10_000_000_000.0
"""The server's time, in ms."""
LONG_AGO = LATE - 2 * UNUSED_MS


def queue(**facts: Any) -> Inspected:
    return replace(NOTHING, **facts)


def knowing(*names: str, noted_ms: float = LONG_AGO) -> KnownQueues:
    known = KnownQueues()
    for name in names:
        known.note(name, noted_ms, LATE, 0.0)
    return known


def scanned(known: KnownQueues, now: float, **found: Inspected) -> list[str]:
    """One scan that finds what `found` says, elsewhere nothing."""
    names = known.next_scan(now)
    for name in names:
        known.mark_read(name)
        known.record(name, found.get(name, NOTHING))
    return names


def many(n: int) -> list[str]:
    return [f"Q{i}" for i in range(n)]


def test_every_scan_looks_at_what_is_served_or_due_or_to_be_purged() -> None:
    urgent = {
        "served": queue(workers=["A"]),
        "held": queue(running=1),
        "due": queue(due=1),
        "deleted": queue(trash=True),
    }
    known = knowing(*urgent, *many(10 * QUIET_AT_ONCE))
    while known.unseen:
        scanned(known, 0.0, **urgent)
    for _ in range(5):
        assert urgent.keys() <= set(scanned(known, 0.0, **urgent))


def test_all_other_names_take_turns() -> None:
    known = knowing(*many(5 * QUIET_AT_ONCE))
    while known.unseen:
        scanned(known, 0.0)
    turns = [scanned(known, 0.0) for _ in range(10)]
    assert {len(turn) for turn in turns} == {QUIET_AT_ONCE}
    for five in (turns[:5], turns[5:]):
        assert len({name for turn in five for name in turn}) >= 4 * QUIET_AT_ONCE
    assert {name for turn in turns for name in turn} == set(many(5 * QUIET_AT_ONCE))


def test_few_names_are_all_looked_at_in_each_scan_and_once() -> None:
    known = knowing(*many(20))
    for _ in range(5):
        assert sorted(scanned(known, 0.0)) == sorted(many(20))


def test_new_names_are_looked_at_soon_but_not_all_at_once() -> None:
    known = knowing(*many(2 * UNSEEN_AT_ONCE))
    first, second = scanned(known, 0.0), scanned(known, 0.0)
    assert len(first) <= UNSEEN_AT_ONCE + QUIET_AT_ONCE
    assert set(first) | set(second) == set(many(2 * UNSEEN_AT_ONCE))
    assert not known.unseen


def test_a_name_that_was_just_noted_is_looked_at_in_each_scan_for_a_while() -> None:
    known = knowing(*many(10 * QUIET_AT_ONCE))
    while known.unseen:
        scanned(known, 0.0)
    known.note("entered soon", LATE, LATE, 0.0)
    for now in (0.0, FRESH / 2, FRESH):
        assert "entered soon" in scanned(known, now)
    assert "entered soon" not in [name for _ in range(3) for name in scanned(known, FRESH + 1)]


def test_many_names_that_were_just_noted_take_turns() -> None:
    names = many(5 * FRESH_AT_ONCE)
    known = knowing(*names, noted_ms=LATE)
    turns: list[str] = []
    while known.unseen:
        looked_at = scanned(known, 0.0)
        assert len(looked_at) <= FRESH_AT_ONCE + UNSEEN_AT_ONCE + QUIET_AT_ONCE
        turns += looked_at[:FRESH_AT_ONCE]
    for _ in range(5):
        turns += scanned(known, 0.0)[:FRESH_AT_ONCE]
    assert set(names) <= set(turns[-len(names) :])


def test_after_hints_were_missed_all_that_is_in_use_is_looked_at_once_more() -> None:
    known = knowing(*many(10 * QUIET_AT_ONCE))
    used = [f"used {n}" for n in range(2 * QUIET_AT_ONCE)]
    for name in used:
        known.note(name, LATE - 300_000, LATE, 0.0)
    while known.unseen:
        scanned(known, 0.0)
    known.rescan(LATE)
    assert set(used) <= set(scanned(known, 0.0))


# Forgetting


def test_a_queue_that_waits_for_a_limit_is_not_announced() -> None:
    known = knowing("full", "limited", "paused", "free")
    waits = replace(NOTHING, waiting=5, workers=["A"])
    found = {
        "full": replace(waits, room=0),
        "limited": replace(waits, room=3),
        "paused": replace(waits, room=0, paused="why"),
        "free": waits,
    }
    assert known.waiting(found) == ["free", "limited"]


def test_a_name_that_was_long_not_noted_and_holds_nothing_may_be_forgotten() -> None:
    known = knowing("old")
    known.note("new", LATE - UNUSED_MS + 1, LATE, 0.0)
    assert known.unused({"old": NOTHING, "new": NOTHING}, LATE) == ["old"]
    known.note("old", LATE, LATE, 0.0)
    assert known.unused({"old": NOTHING, "new": NOTHING}, LATE) == []


def test_whatever_a_queue_holds_keeps_its_name() -> None:
    holding = {
        **{kind: queue(**{kind: 1}) for kind in ("waiting", "due", "running", "failed", "broken", "blocked")},
        "paused": queue(paused=""),
        "trash": queue(trash=True),
        "workers": queue(workers=["A"]),
        "overridden": queue(overridden=True),
        "lane_rules": queue(lane_rules=1),
        "batches": queue(batches=1),
        "needs_relay": queue(needs_relay=True),
    }
    others = {"counts", "next_in_ms", "oldest_ms", "limits", "room", "opens_in_ms"} | {
        "lanes",
        "held_lanes",
        "only_held",
        "open_batches",
        "due_soon",
    }
    assert set(holding) == set(Inspected.__slots__) - others
    known = knowing(*holding)
    assert known.unused(holding, LATE) == []
    assert known.unused(dict.fromkeys(holding, queue(counts={"enqueued": 7})), LATE) == list(holding)


def test_what_was_forgotten_is_looked_at_no_more() -> None:
    known = knowing("a", "b")
    scanned(known, 0.0, a=queue(due=1))
    known.forget(["a", "b", "c"])
    assert scanned(known, 0.0) == []
    assert known.noted == {}


# What the beats are told


def test_the_beats_are_told_of_queues_with_tasks_and_workers_that_are_not_paused() -> None:
    unserved = {f"off {n}": queue(waiting=1) for n in range(10 * MAX_WAITING)}
    found = {
        **unserved,
        "served": queue(waiting=1, workers=["A"]),
        "paused": queue(waiting=1, workers=["A"], paused="why"),
        "empty": queue(workers=["A"]),
    }
    assert KnownQueues().waiting(found) == ["served"]


def test_where_there_is_room_the_beats_are_told_of_shards_that_nobody_serves() -> None:
    served = {name: queue(waiting=1, workers=["A"]) for name in many(MAX_WAITING - 1)}
    shards = {f"{{hot~{n}}}-shard": queue(waiting=1) for n in range(3)}
    told = KnownQueues().waiting({**served, **shards, "off": queue(waiting=1)})
    assert set(told) == {*served, "{hot~0}-shard"}


def test_if_they_are_many_they_are_told_in_turns() -> None:
    known = KnownQueues()
    found = {name: queue(waiting=1, workers=["A"]) for name in many(2 * MAX_WAITING + 50)}
    told = [known.waiting(found) for _ in range(3)]
    assert {len(set(each)) for each in told} == {scanner.MAX_WAITING}
    assert {name for each in told for name in each} == set(found)
