"""Room: what a producer notes when a queue is full, who is woken when tasks leave it, and what an entry can do wrong.

`tests/client/test_room.py` has the producers.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import redis

from tests.ops.driver import FUTURE, Desk, Expires, job
from worqr import ops
from worqr.command import Command
from worqr.errors import QueueFull
from worqr.keys import RoomKeys


def wait(desk: Desk, name: str, *tasks: bytes, max_length: int) -> None:
    """Note a call that waits."""
    with pytest.raises(QueueFull):
        desk.call(ops.enqueue(desk.q, tasks or [b"more"], max_length=max_length, waiter=name))


def waiters(desk: Desk) -> object:
    """The entries without the time of each, and that they expire."""
    now, entries = desk.now(), desk.state()[":waiters"]
    assert isinstance(entries, Expires)
    times = [int(entry.split(" ")[3]) for entry in entries.value.values()]
    assert all(now - 3_600_000 < time <= now for time in times)
    return Expires({name: re.sub(r"^(\S+ \S+ \S+) \d+", r"\1", entry) for name, entry in entries.value.items()})


def names(desk: Desk) -> set[str]:
    return {name.decode() for name in desk.client.hkeys(RoomKeys(desk.q).waiters)}


def channel(desk: Desk, name: str) -> str:
    return RoomKeys(desk.q).channel(name)


@pytest.fixture
def full(desk: Desk) -> Desk:
    """A queue of three tasks, one of which A may claim, and B, which waits with one task until two are left."""
    desk.enter("A")
    desk.put(b"a", b"b", b"c")
    wait(desk, "B-7", max_length=3)
    return desk


def test_a_full_queue_notes_who_waits_and_for_what(full: Desk) -> None:
    assert waiters(full) == Expires({"B-7": "3 1 - "})
    assert 0 < full.client.ttl(RoomKeys(full.q).waiters) <= 10
    wait(full, "B-7", b"x", b"y", max_length=4)
    wait(full, "C-0", max_length=3)
    assert waiters(full) == Expires({"B-7": "4 2 - ", "C-0": "3 1 - "})


def test_a_full_queue_notes_nobody_who_does_not_wait(desk: Desk) -> None:
    desk.put(b"a")
    with desk.nothing_happens():
        assert desk.send(ops.enqueue(desk.q, [b"b"], max_length=1)) == [b"full", 1]


def test_a_refusal_that_comes_again_notes_nothing_again(full: Desk) -> None:
    call = ops.enqueue(full.q, [b"x"], max_length=3, waiter="C-1")
    reply = full.send(call)
    full.client.delete(RoomKeys(full.q).waiters)
    with full.nothing_changes():
        assert full.resend(call) == reply == [b"full", 3]


def cancel_lane(desk: Desk) -> None:
    desk.call(ops.cancel_lane(desk.q, "gold"))


SHRINKS: dict[str, Callable[[Desk], object]] = {
    "start_tasks": lambda desk: desk.start("A", 1),
    "cancel_job": lambda desk: desk.call(ops.cancel_job(desk.q, "j", "why")),
    "cancel_job, scheduled": lambda desk: desk.call(ops.cancel_job(desk.q, "later", "why")),
    "cancel_task": lambda desk: desk.call(ops.cancel_task(desk.q, b"a")),
    "cancel_all": lambda desk: desk.call(ops.cancel_all(desk.q)),
    "cancel_lane": cancel_lane,
    "delete_queue": lambda desk: desk.call(ops.delete_queue(desk.q)),
}


@pytest.mark.parametrize("how", SHRINKS)
def test_whatever_takes_a_task_out_of_the_queue_wakes_a_producer(desk: Desk, how: str) -> None:
    desk.enter("A")
    desk.put(b"a")
    desk.dispatch("j")
    desk.dispatch("later", run_at=FUTURE)
    desk.dispatch("laned", lane="gold")
    wait(desk, "B-7", max_length=4)
    with desk.listening(channel(desk, "B")) as heard:
        SHRINKS[how](desk)
    assert heard == [(":room:B", b"7")]
    assert ":waiters" not in desk.state()


@pytest.mark.parametrize(
    "how", [lambda desk: desk.start("A", 0), lambda desk: desk.call(ops.cancel_job(desk.q, "?", ""))]
)
def test_nobody_is_woken_while_the_queue_is_full(full: Desk, how: Callable[[Desk], object]) -> None:
    with full.listening(channel(full, "B")) as heard:
        how(full)
    assert (heard, names(full)) == ([], {"B-7"})


def test_as_many_are_woken_as_have_room_together(full: Desk) -> None:
    wait(full, "B-8", max_length=3)
    wait(full, "B-9", b"x", b"y", max_length=3)
    with full.listening(channel(full, "B")) as heard:
        full.start("A", 2)
    assert len(heard) in {1, 2}, "either both of one task, or the one of two"
    woken = {int(number) for _, number in heard}
    assert woken in ({7, 8}, {9}, {7}, {8})
    assert names(full) == {f"B-{n}" for n in {7, 8, 9} - woken}


def test_16_are_woken_at_once_and_those_who_found_room_wake_others(desk: Desk) -> None:
    desk.put(*[b"x"] * 50)
    for n in range(40):
        wait(desk, f"B-{n}", max_length=50)
    with desk.listening(channel(desk, "B")) as heard:
        desk.call(ops.delete_queue(desk.q))
    assert len(set(heard)) == 16
    [first, *_] = [number.decode() for _, number in heard]
    with desk.listening(channel(desk, "B")) as heard:
        assert desk.call(ops.enqueue(desk.q, [b"x"], max_length=50, waiter=f"B-{first}")) == 1
    assert len(set(heard)) == 16


HOUR = 3_600_000


@pytest.mark.parametrize("lane", ["", "gold"])
@pytest.mark.parametrize(
    ("bound", "woken"), [(1, [True]), (3, [True]), (4, [True]), (8, [False, True]), (16, [False, False, False, True])]
)
def test_a_call_that_has_just_begun_to_wait_is_woken_when_a_quarter_is_free(
    desk: Desk, lane: str, bound: int, woken: list[bool]
) -> None:
    """So that a producer that is woken has room for several calls, and is not refused after each of them."""
    desk.enter("A")
    for _ in range(bound):
        desk.dispatch(None, **({"lane": lane} if lane else {}))
    wish = f"- 1 {bound} {{}} gold" if lane else f"{bound} 1 - {{}} "
    for each in woken:
        desk.client.hset(RoomKeys(desk.q).waiters, "B-7", wish.format(desk.now() + HOUR))
        with desk.listening(channel(desk, "B")) as heard:
            desk.start("A", 1)
        assert heard == ([(":room:B", b"7")] if each else [])


def test_a_call_that_has_waited_is_woken_when_a_task_leaves(desk: Desk) -> None:
    desk.enter("A")
    desk.put(*[b"x"] * 100)
    desk.client.hset(RoomKeys(desk.q).waiters, "B-7", f"100 1 - {desk.now() - 21} ")
    with desk.listening(channel(desk, "B")) as heard:
        desk.start("A", 1)
    assert heard == [(":room:B", b"7")]


def test_a_producer_that_does_not_listen_takes_no_room(desk: Desk) -> None:
    desk.enter("A")
    desk.put(b"a")
    for n in range(8):
        wait(desk, f"gone-{n}", max_length=1)
    wait(desk, "B-7", max_length=1)
    with desk.listening(channel(desk, "B")) as heard:
        desk.start("A", 1)
    assert heard == [(":room:B", b"7")]


def test_a_producer_that_does_not_listen_takes_no_room_in_a_lane(desk: Desk) -> None:
    desk.enter("A")
    desk.dispatch("a", lane="gold")
    for name in (*(f"gone-{n}" for n in range(8)), "B-7"):
        desk.dispatch("more", lane="gold", max_lane_length=1, waiter=f"{name} 1")
    with desk.listening(channel(desk, "B")) as heard:
        desk.start("A", 1)
    assert heard == [(":room:B", b"7")]


def test_who_finds_room_by_itself_waits_no_longer(full: Desk) -> None:
    full.client.rpop(full.q.base)
    assert full.call(ops.enqueue(full.q, [b"x"], max_length=3, waiter="B-7")) == 1
    assert ":waiters" not in full.state()


# Dispatches


def test_a_dispatch_notes_its_bounds_and_its_lane(desk: Desk) -> None:
    desk.dispatch("a", lane="gold")
    more = {"max_length": 9, "lane": "gold", "max_lane_length": 1, "waiter": "B-7 1"}
    assert desk.dispatch("b", **more).outcome == "full"
    assert waiters(desk) == Expires({"B-7": "9 1 1 gold"})


def test_room_in_another_lane_wakes_nobody(desk: Desk) -> None:
    desk.enter("A")
    desk.dispatch("a", lane="gold")
    desk.dispatch("b", lane="silver")
    desk.dispatch("c", lane="gold", max_lane_length=1, waiter="B-7 1")
    with desk.listening(channel(desk, "B")) as heard:
        desk.call(ops.cancel_job(desk.q, "b", ""))
    assert (heard, names(desk)) == ([], {"B-7"})
    with desk.listening(channel(desk, "B")) as heard:
        desk.call(ops.cancel_lane(desk.q, "gold"))
    assert heard == [(":room:B", b"7")]


def test_a_whole_that_is_refused_stores_nothing_but_who_waits(desk: Desk) -> None:
    desk.dispatch("a")
    jobs = [job(str(n), max_length=2, exists="raise", waiter="B-7 2") for n in range(2)]
    before = desk.state()
    assert desk.send(ops.dispatch_jobs(desk.q, jobs, all_or_none=True))[0] == b"refused"
    assert waiters(desk) == Expires({"B-7": "2 2 - "})
    assert {key: value for key, value in desk.state().items() if key != ":waiters"} == before


def test_a_dispatch_that_changes_a_job_needs_no_room(desk: Desk) -> None:
    desk.dispatch("a")
    assert desk.dispatch("a", b"b", max_length=1, waiter="B-7 1").outcome == "updated"
    assert ":waiters" not in desk.state()


# What is wrong


@pytest.mark.parametrize("waiter", ["B", "B-", "-7", "B-x", "B-7 1", "B 7", "é-7", f"{'B' * 70}-7"])
def test_a_name_of_another_form_is_refused_before_anything_is_stored(desk: Desk, waiter: str) -> None:
    with desk.nothing_changes(), pytest.raises(redis.ResponseError, match="the bound must be a number"):
        desk.send(ops.enqueue(desk.q, [b"x"], max_length=3, waiter=waiter))


@pytest.mark.parametrize("waiter", ["", "B-7", "B-7 0", "B-7 x", 7])
def test_an_option_of_another_form_is_refused_before_anything_is_stored(desk: Desk, waiter: object) -> None:
    with desk.nothing_changes(), pytest.raises(redis.ResponseError, match="waiter"):
        desk.dispatch("a", waiter=waiter)


WAYS: dict[str, Callable[[Desk], Command[object]]] = {
    "start_tasks": lambda desk: ops.start_tasks(desk.q, "A", 1, 1),
    "enqueue": lambda desk: ops.enqueue(desk.q, [b"x"], max_length=9, waiter="B-7"),
    "dispatch_jobs": lambda desk: ops.dispatch_jobs(desk.q, [job("b", max_length=9, waiter="B-7 1")]),
    "cancel_job": lambda desk: ops.cancel_job(desk.q, "j", ""),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("value", ["", "x", "- - - - ", "1 1", "1 1 - ", "x x x x x"])
def test_an_entry_that_nobody_understands_stops_no_script(desk: Desk, way: str, value: str) -> None:
    desk.enter("A")
    desk.dispatch("j")
    desk.client.hset(RoomKeys(desk.q).waiters, mapping={"odd": value, "B-x": value, "": value})
    assert desk.send(WAYS[way](desk))[0] in {b"ok", b"short"}


@pytest.mark.parametrize("way", WAYS)
def test_a_key_of_another_application_stops_no_script(desk: Desk, way: str) -> None:
    """Producers ask once a second then."""
    desk.enter("A")
    desk.dispatch("j")
    desk.client.set(RoomKeys(desk.q).waiters, "foreign")
    assert desk.send(WAYS[way](desk))[0] in {b"ok", b"short"}
    with pytest.raises(QueueFull):
        desk.call(ops.enqueue(desk.q, [b"x"] * 9, max_length=1, waiter="B-7"))
    assert desk.client.get(RoomKeys(desk.q).waiters) == b"foreign"


def test_a_key_of_the_queue_of_a_foreign_type_stops_no_start(full: Desk) -> None:
    """A start has claimed by then. Nobody is woken."""
    full.client.set(full.q.blocked, "foreign")
    assert full.start("A", 1).entries == [b"a"]
    assert names(full) == {"B-7"}


def test_ten_thousand_entries_are_enough(desk: Desk) -> None:
    desk.put(b"a")
    desk.client.hset(RoomKeys(desk.q).waiters, mapping={f"B-{n}": "1 1 - 0 " for n in range(10_000)})
    wait(desk, "C-1", max_length=1)
    assert waiters(desk) == Expires({"C-1": "1 1 - "})


def test_a_start_asks_nothing_more_while_nobody_waits(desk: Desk) -> None:
    """Whether somebody waits is part of a question that is asked anyway."""
    desk.enter("A")
    desk.put(*[b"x"] * 3)
    desk.start("A", 1)

    def asked() -> dict[str, int]:
        found = desk.client.info("commandstats")
        return {name: found.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("exists", "hrandfield", "hlen")}

    before = asked()
    desk.start("A", 1)
    assert {name: n - before[name] for name, n in asked().items()} == {"exists": 1, "hrandfield": 0, "hlen": 0}
