from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import redis

from tests.ops.driver import (
    ALL_BYTES,
    FENCE,
    FUTURE,
    PAST,
    Desk,
    Expires,
    claim,
    fields_of,
    grown,
    job,
    payloads,
    policy,
    record,
    reference,
)
from worqr import ops
from worqr.command import Command
from worqr.keys import MARKER
from worqr.ops import Dispatched

GIVEN = " fail_on jitter max_backoff max_failures max_stalls max_timeouts min_backoff result_ttl retry_on timeout "
"""All names of a policy, as Update(policy=True) sends them."""


def dispatch(desk: Desk, *jobs: Any, whole: bool = False) -> list[Dispatched]:
    return desk.call(ops.dispatch_jobs(desk.q, jobs, all_or_none=whole))


def outcomes(desk: Desk, *jobs: Any, whole: bool = False) -> list[str]:
    return [each.outcome for each in dispatch(desk, *jobs, whole=whole)]


# New jobs


def test_a_new_job_is_a_record_and_a_place_in_line(desk: Desk) -> None:
    call = ops.dispatch_jobs(desk.q, [job("x", b"a")])
    assert desk.send(call) == [b"ok", [b"created", b"x", str(FENCE + 1).encode()]]
    assert desk.state() == {
        "waiting": [reference("x")],
        ":job:x": record("a", FENCE + 1, run_at=PAST),
        ":counts": Expires({"fence": str(FENCE + 1), "enqueued": "1"}),
    }
    assert desk.waiting() == [b"a"]


def test_a_later_one_is_due_then(desk: Desk) -> None:
    assert desk.dispatch("x", run_at=FUTURE) == Dispatched("created", "x", FENCE + 1)
    assert desk.state() == {
        ":due": ["x"],
        ":job:x": record("a", FENCE + 1, "due", run_at=FUTURE),
        ":counts": Expires({"fence": str(FENCE + 1), "enqueued": "1"}),
    }
    assert desk.client.zscore(desk.q.due, "x") == FUTURE


def test_a_delay_is_counted_by_the_servers_clock(desk: Desk) -> None:
    before = desk.now()
    dispatch(desk, job("now", delay=0), job("later", delay=60_000), ({"id": "none"}, b"a"))
    after = desk.now()
    times = [int(desk.state()[f":job:{each}"]["run_at"]) for each in ("now", "later", "none")]
    assert before <= times[0] <= after
    assert times == [times[0], times[0] + 60_000, times[0]]
    assert desk.state()[":due"] == ["later"]
    assert desk.client.zscore(desk.q.due, "later") == times[1]


def test_a_time_that_has_come_is_no_time_to_wait_for(desk: Desk) -> None:
    desk.dispatch("now", run_at=desk.now())
    desk.dispatch("zero", run_at=0)
    assert len(desk.state()["waiting"]) == 2


def test_all_that_a_dispatch_may_say_stands_in_the_record(desk: Desk) -> None:
    fields = {"timeout": "1000", "max_failures": "3", "retry_on": "OSError ValueError"}
    said = {"fields": fields, "meta": '{"a":"b"}', "expires": "500", "expires_at": "600", "scheduled_for": "700"}
    desk.dispatch("x", **said)
    known = {name: str(value) for name, value in said.items() if name != "fields"}
    assert desk.state()[":job:x"] == record("a", FENCE + 1, run_at=PAST, **fields, **known)


def test_without_an_id_each_gets_one_of_its_own(desk: Desk) -> None:
    made = dispatch(desk, *[job(None)] * 3)
    assert [each.id for each in made] == [f"@{FENCE + n}" for n in (1, 2, 3)]
    assert [each.number for each in made] == [FENCE + n for n in (1, 2, 3)]
    assert desk.state()["waiting"] == [reference(f"@{FENCE + n}") for n in (3, 2, 1)]


def test_the_id_ends_with_what_its_producer_made_of_chance(desk: Desk) -> None:
    parts = ["0123456789abcdef" * 2, "Z" * 16, "y" * 64]
    made = dispatch(desk, *[job(None, random=part) for part in parts], job("x", random=parts[0]))
    assert [each.id for each in made] == [*(f"@{FENCE + n}-{part}" for n, part in enumerate(parts, 1)), "x"]
    assert desk.state()[f":job:{made[0].id}"] == record("a", FENCE + 1, run_at=PAST)


@pytest.mark.parametrize("wrong", ["a" * 15, "a" * 65, "a" * 31 + "~", "a" * 31 + "\n", "a" * 31 + "é", "", 17, True])
def test_chance_is_letters_and_digits_and_enough_of_them(desk: Desk, wrong: object) -> None:
    with desk.nothing_happens(), pytest.raises(redis.ResponseError, match="option random of a dispatch cannot be that"):
        desk.send(ops.dispatch_jobs(desk.q, [({"random": wrong}, b"a")]))


@pytest.mark.parametrize("task", [b"", b"\xff\x00\r\n", MARKER, MARKER + b"x", ALL_BYTES])
def test_a_payload_is_taken_byte_for_byte(desk: Desk, task: bytes) -> None:
    task = grown(task)
    desk.dispatch("x", task)
    desk.enter("A")
    [entry] = desk.start("A", 1).entries
    assert fields_of(entry) == {
        **record("", FENCE + 1, "active", run_at=PAST, claim=claim(2), worker="A", id="x"),
        "task": task,
    }


@pytest.mark.parametrize("id", ["1", "a b", "ä日本", ":", "x:y", "a" * 200, "}{", "*", "nil", "false"])
def test_an_id_is_any_text(desk: Desk, id: str) -> None:
    assert desk.dispatch(id).id == id
    assert desk.run_id("A") == id


def test_many_are_put_in_line_in_their_order(desk: Desk) -> None:
    dispatch(desk, *[job(f"{n}", b"%d" % n) for n in range(1000)])
    assert desk.waiting() == [b"%d" % n for n in range(1000)]


def test_in_front_they_are_taken_next(desk: Desk) -> None:
    desk.put(b"raw")
    dispatch(desk, job("a", b"a"), job("b", b"b", front=True))
    assert desk.waiting() == [b"b", b"raw", b"a"]


def test_two_kinds_of_tasks_share_one_line(desk: Desk) -> None:
    desk.put(b"1")
    desk.dispatch("x", b"2")
    desk.put(b"3")
    assert desk.waiting() == [b"1", b"2", b"3"]


# Waking


@pytest.mark.parametrize(("jobs", "woken"), [(0, 0), (1, 1), (3, 3), (5, 4)])
def test_wakes_one_hungry_worker_for_each_that_can_be_taken(desk: Desk, jobs: int, woken: int) -> None:
    workers = ["A", "B", "C", "D"]
    desk.client.sadd(desk.q.hungry, *workers)
    late = [job(f"due{n}", run_at=FUTURE) for n in range(2)]
    with desk.listening(*map(desk.q.wake_channel, workers)) as heard:
        dispatch(desk, *late, *[job(f"{n}") for n in range(jobs)])
    assert len({channel for channel, _ in heard}) == len(heard) == woken
    assert len(desk.client.smembers(desk.q.hungry)) == 4 - woken


def test_a_blocked_or_unchanged_one_wakes_nobody_and_one_moved_to_now_does(desk: Desk) -> None:
    desk.run("A", "runs")
    desk.dispatch("waits")
    desk.dispatch("due", run_at=FUTURE)
    desk.client.sadd(desk.q.hungry, "B")
    with desk.listening(desk.q.wake_channel("B")) as heard:
        dispatch(desk, job("runs"), job("waits", b"b"), job("waits", exists="skip"), job("due", when="keep"))
    assert heard == []
    with desk.listening(desk.q.wake_channel("B")) as heard:
        desk.dispatch("due")
    assert heard == [(":wake:B", b"1")]


def test_whoever_is_the_earliest_tells_the_leader(desk: Desk) -> None:
    with desk.listening(desk.g.due_channel) as heard:
        before = desk.now()
        for each, run_at in (("b", FUTURE), ("later", FUTURE + 1), ("a", FUTURE - 5), ("now", PAST)):
            desk.dispatch(each, run_at=run_at)
        after = desk.now()
    assert len(heard) == 2
    for (channel, message), run_at in zip(heard, (FUTURE, FUTURE - 5), strict=True):
        ms, base = message.decode().split(" ", 1)
        assert (channel, base) == (":due", desk.q.base)
        assert run_at - after <= int(ms) <= run_at - before


def test_whoever_watches_a_job_is_told(desk: Desk) -> None:
    desk.run("A", "runs")
    channels = [desk.q.job(each) for each in ("x", "due", "runs")]
    with desk.listening(*channels) as heard:
        dispatch(desk, job("x"), job("due", run_at=FUTURE), job("runs"))
    assert heard == [(":job:x", b"waiting"), (":job:due", b"due"), (":job:runs", b"blocked")]


# The same id again


BEFORE = {"fields": {"timeout": "1"}, "meta": "m1", "expires_at": "1"}
AFTER = {"fields": {"timeout": "2", "result_ttl": "2"}, "meta": "m2", "expires": "2"}
COUNTED = {"failures": "2", "stalls": "1", "timeouts": "1"}


def updates(when: str) -> Iterator[dict[str, Any]]:
    """All that an Update may say besides."""
    for data, counts, forced in product((True, False), (True, False, None), ("", "timeout", "max_failures", GIVEN)):
        update: dict[str, Any] = {"policy": forced} if forced else {}
        update |= {} if counts is None else {"counts": counts}
        update |= {} if data else {"data": False}
        yield update if when == "set" else {"when": when, **update}


def expected(before: dict[str, str], update: dict[str, Any], asked: int) -> dict[str, str]:
    """The record after a dispatch that says so, but for its state."""
    found, data = dict(before), update.get("data", True)
    old = int(before["run_at"])
    when = update.get("when", "set")
    run_at = {"set": asked, "keep": old, "later": max(old, asked), "earlier": min(old, asked)}[when]
    if data:
        found |= {"task": "b", "meta": "m2"}
    if run_at != old or when == "set":
        found |= {"run_at": str(run_at), "expires": "2"}
        found.pop("expires_at", None)
    if update.get("counts", data):
        found = {name: value for name, value in found.items() if name not in COUNTED}
    found["result_ttl"] = "2"
    if "timeout" in update.get("policy", "").split():
        found["timeout"] = "2"
    return found


TIMES = [(PAST, PAST - 1), (PAST, PAST + 1), (PAST, FUTURE), (FUTURE, FUTURE - 1), (FUTURE, FUTURE + 1), (FUTURE, PAST)]


@pytest.mark.parametrize("when", ["set", "keep", "later", "earlier"])
@pytest.mark.parametrize(("old", "asked"), TIMES)
def test_what_waits_or_is_due_is_changed_as_the_update_says(desk: Desk, when: str, old: int, asked: int) -> None:
    """A job for each update, and one look at all of them."""
    every, records = list(enumerate(updates(when))), {}
    for n, update in every:
        first = desk.dispatch(f"{n}", run_at=old, **BEFORE).number
        desk.client.hset(desk.q.job(f"{n}"), mapping=COUNTED)
        assert desk.dispatch(f"{n}", b"b", run_at=asked, **AFTER, **update) == Dispatched("updated", f"{n}", first + 1)
        before = record("a", first, run_at=old, timeout=1, meta="m1", expires_at=1, **COUNTED)
        records[f":job:{n}"] = expected(before, update, asked) | {"last": str(first + 1)}
    state, counts = desk.state(), {"fence": str(FENCE + 2 * len(every)), "enqueued": str(len(every))}
    run_at = int(next(iter(records.values()))["run_at"])
    if is_due := run_at > desk.now():
        assert {found.pop("state") for found in records.values()} == {"waiting"}
        records = {name: found | {"state": "due"} for name, found in records.items()}
        assert set(state.pop(":due")) == {f"{n}" for n, _ in every}
        assert {score for _, score in desk.client.zrange(desk.q.due, 0, -1, withscores=True)} == {run_at}
    if not is_due or old == PAST:
        assert state.pop("waiting") == [reference(f"{n}") for n, _ in reversed(every)]
    if is_due and old == PAST:
        counts["stale"] = str(len(every))
    assert state == {**records, ":counts": Expires(counts)}
    assert desk.waiting() == ([] if is_due else [found["task"].encode() for found in records.values()])


@pytest.mark.parametrize("when", ["set", "keep", "later", "earlier"])
@pytest.mark.parametrize(("old", "asked"), TIMES)
def test_a_blocked_twin_is_changed_likewise_and_stays_blocked(desk: Desk, when: str, old: int, asked: int) -> None:
    every, records = list(enumerate(updates(when))), {}
    dispatch(desk, *[job(f"{n}") for n, _ in every])
    desk.enter("A")
    desk.take("A", len(every))
    others = desk.state(":counts")
    for n, update in every:
        first = desk.dispatch(f"{n}", run_at=old, **BEFORE).number
        assert desk.dispatch(f"{n}", b"b", run_at=asked, **AFTER, **update) == Dispatched("blocked", f"{n}", first + 1)
        before = record("a", first, "blocked", run_at=old, timeout=1, meta="m1", expires_at=1)
        forced = " ".join(name for name in ("timeout", "result_ttl") if name in update.get("policy", "").split())
        said = {"update_data": "1", "update_counts": "1"} | ({"update_policy": forced} if forced else {})
        records[f":job:{n}"] = expected(before, update, asked) | {"last": str(first + 1), **said}
    after = desk.state(":counts")
    for name in records:
        low, high = int(after[name].pop("update_low")), int(after[name].pop("update_high"))
        wanted = {"set": (asked, asked), "keep": (old, old), "later": (max(old, asked),) * 2}
        assert (low, high) == wanted.get(when, (min(old, asked),) * 2)
    assert after == {**others, **records, ":blocked": {f"{n}" for n, _ in every}}


def test_the_first_dispatch_onto_a_run_is_blocked_and_remembers_what_it_would_change(desk: Desk) -> None:
    held = desk.run("A", "x")
    before = desk.state()
    done = desk.dispatch("x", b"b", run_at=FUTURE, fields={"timeout": "2", "jitter": "1"}, policy="timeout max_stalls")
    assert done == Dispatched("blocked", "x", held + 1)
    remembered = {"update_data": "1", "update_counts": "1", "update_low": str(FUTURE), "update_high": str(FUTURE)}
    twin = record("b", held + 1, "blocked", run_at=FUTURE, timeout=2, jitter=1, **remembered, update_policy="timeout")
    assert desk.state() == {
        **before,
        ":blocked": {"x"},
        ":job:x": twin,
        ":counts": Expires({**before[":counts"].value, "fence": str(held + 1), "enqueued": "2"}),
    }


@pytest.mark.parametrize(
    ("update", "low", "high", "flags"),
    [
        ({"when": "keep"}, "0", "9007199254740991", {"update_data", "update_counts"}),
        ({"when": "later"}, str(PAST), "9007199254740991", {"update_data", "update_counts"}),
        ({"when": "earlier"}, "0", str(PAST), {"update_data", "update_counts"}),
        ({"data": False}, str(PAST), str(PAST), set()),
        ({"data": False, "counts": True}, str(PAST), str(PAST), {"update_counts"}),
        ({"counts": False}, str(PAST), str(PAST), {"update_data"}),
    ],
)
def test_each_flag_is_remembered(desk: Desk, update: dict[str, Any], low: str, high: str, flags: set[str]) -> None:
    desk.run("A", "x")
    desk.dispatch("x", **update)
    found = desk.state()[":job:x"]
    assert (found["update_low"], found["update_high"]) == (low, high)
    assert {name for name in found if name[:6] == "update"} - {"update_low", "update_high"} == flags


def test_an_update_that_changes_nothing_says_so(desk: Desk) -> None:
    desk.dispatch("x", fields={"timeout": "1"})
    for update in ({"when": "later"}, {"when": "keep"}, {"fields": {"timeout": "2"}, "when": "keep"}):
        assert desk.dispatch("x", b"b", data=False, **update).outcome == "unchanged"
    found = desk.state()[":job:x"]
    assert found == record("a", FENCE + 1, run_at=PAST, timeout=1, last=FENCE + 4)


@pytest.mark.parametrize(
    ("first", "update", "outcome"),
    [
        ({"delay": 0}, {"delay": 0}, "unchanged"),  # it is in line, and keeps its place
        ({"delay": 0}, {"delay": 0, "when": "later"}, "unchanged"),
        ({"delay": 0}, {"delay": 0, "when": "earlier"}, "unchanged"),
        ({"delay": 0}, {"delay": 0, "expires": "60000"}, "updated"),
        ({"delay": 0, "expires_at": str(FUTURE)}, {"delay": 0, "expires_at": str(FUTURE)}, "unchanged"),
        ({"delay": 60_000}, {"delay": 60_000}, "updated"),
        ({"delay": 60_000}, {"delay": 60_000, "when": "later"}, "updated"),
        ({"delay": 60_000}, {"delay": 60_000, "when": "earlier"}, "unchanged"),
        ({"run_at": FUTURE}, {"run_at": FUTURE}, "unchanged"),
        ({"run_at": FUTURE, "expires": "5"}, {"run_at": FUTURE, "expires": "5"}, "unchanged"),
    ],
)
def test_an_outcome_does_not_depend_on_whether_the_clock_moved_on(
    desk: Desk, first: dict[str, Any], update: dict[str, Any], outcome: str
) -> None:
    """Many equal updates, some of them within the same millisecond: all of them say the same."""
    call = ops.dispatch_jobs(desk.q, [job("x", b"b", **first), *[job("x", b"b", data=False, **update)] * 50])
    told = {done.outcome for _ in range(3) for done in desk.call(call)[2:]}
    for _ in range(100):
        told.add(desk.dispatch("x", b"b", data=False, **update).outcome)
    assert told == {outcome}


def test_another_time_to_expire_is_an_update(desk: Desk) -> None:
    desk.dispatch("x", run_at=FUTURE, expires="5")
    ways: list[dict[str, Any]] = [{"expires": "6"}, {"expires_at": "6"}, {}, {"expires": "5"}]
    for expires in ways:
        assert desk.dispatch("x", run_at=FUTURE, data=False, **expires).outcome == "updated"
        assert desk.dispatch("x", run_at=FUTURE, data=False, **expires).outcome == "unchanged"


def test_the_newest_dispatch_says_when_it_expires_if_it_says_when_it_is_due(desk: Desk) -> None:
    desk.dispatch("x", expires="1")
    desk.dispatch("x", expires_at="2")
    assert desk.state()[":job:x"] == record("a", FENCE + 1, run_at=PAST, last=FENCE + 2, expires_at=2)
    desk.dispatch("x", when="keep", expires="3")
    assert desk.state()[":job:x"]["expires_at"] == "2"
    desk.dispatch("x")
    assert desk.state()[":job:x"].keys().isdisjoint({"expires", "expires_at"})


def test_it_keeps_its_place_in_line(desk: Desk) -> None:
    dispatch(desk, job("a", b"a"), job("b", b"b"), job("c", b"c"))
    desk.dispatch("a", b"A", run_at=PAST + 7)
    desk.dispatch("c", b"C", front=True)
    assert desk.waiting() == [b"A", b"b", b"C"]
    assert len(desk.state()["waiting"]) == 3


def test_one_postponed_and_taken_back_is_counted_and_run_once(desk: Desk) -> None:
    dispatch(desk, job("a", b"a"), job("b", b"b"))
    for run_at in (FUTURE, PAST, FUTURE, PAST):
        desk.dispatch("a", run_at=run_at)
    assert desk.call(ops.inspect(desk.q)).waiting == 2
    assert sorted(desk.waiting()) == [b"a", b"b"]
    desk.enter("A")
    assert sorted(payloads(desk.start("A", 9).entries)) == [b"a", b"b"]
    assert desk.call(ops.inspect(desk.q)).waiting == 0


def test_a_suspect_that_is_postponed_stays_one_unless_counts_begin_anew(desk: Desk) -> None:
    for counts, list_of_it in ((False, ":suspects"), (True, "waiting")):
        desk.wipe()
        desk.set_fence()
        desk.run("A", "x")
        desk.call(ops.fail_worker(desk.q, "A"))
        desk.enter("A")
        desk.take("A", 1)
        desk.call(ops.fail_worker(desk.q, "A"))
        assert desk.client.rpop(desk.q.suspects) == reference("x")
        desk.dispatch("x", run_at=FUTURE, counts=counts)
        desk.dispatch("x", counts=counts)
        assert [name for name in (":suspects", "waiting") if name in desk.state()] == [list_of_it]


# What refuses


@pytest.mark.parametrize("where", ["waits", "due", "runs", "blocked", "taken"])
def test_an_id_that_is_there_already_may_be_left_alone_or_refused(desk: Desk, where: str) -> None:
    desk.run("A", "runs")
    blocked = desk.run("A", "blocked")
    newest = desk.dispatch("blocked").number
    desk.call(ops.finish_tasks(desk.q, "A", [desk.run("A", "taken", unique_for=60_000)]))
    taken = int(desk.state()[":taken:taken"].value)
    numbers = {"waits": desk.dispatch("waits").number, "due": desk.dispatch("due", run_at=FUTURE).number}
    numbers |= {"runs": blocked - 2, "blocked": newest, "taken": taken}
    before = desk.state(":counts")
    for exists, outcome in (("skip", "unchanged"), ("raise", "duplicate")):
        done = desk.dispatch(where, b"b", run_at=FUTURE, exists=exists, unique_for=9, meta="m")
        assert done == Dispatched(outcome, where, numbers[where] if where != "runs" else done.number)
        assert desk.state(":counts") == before
    assert desk.counts()["enqueued"] == 6


@pytest.mark.parametrize("exists", ["skip", "raise", "update", "cancel"])
def test_where_nothing_is_there_it_is_created(desk: Desk, exists: str) -> None:
    assert desk.dispatch("x", exists=exists).outcome == "created"


def test_a_run_is_cancelled_and_the_new_job_follows_it(desk: Desk) -> None:
    held = desk.run("A", "x", fields={"result_ttl": "60000"})
    before = desk.state()
    done = desk.dispatch("x", b"b", exists="cancel")
    assert done == Dispatched("blocked", "x", held + 1)
    after = desk.state()
    assert after.pop(":cancelling") == {str(held)}
    assert after.pop(":active:x") == before[":active:x"] | {"cancel_reason": "a later job with its id was dispatched"}
    assert desk.dispatch("x", b"c", exists="cancel").outcome == "blocked"  # it changes the blocked job
    desk.call(ops.finish_tasks(desk.q, "A", [held]))
    assert desk.call(ops.read_result(desk.q, "x", held - 1)).status == "cancelled"
    assert payloads(desk.start("A", 1).entries) == [b"c"]
    assert desk.state().get(":cancelling") is None


def test_a_job_that_does_not_run_is_changed_where_a_run_would_be_cancelled(desk: Desk) -> None:
    desk.dispatch("waits")
    desk.dispatch("due", run_at=FUTURE)
    for where in ("waits", "due"):
        assert desk.dispatch(where, b"b", exists="cancel").outcome == "updated"
    assert sorted(desk.waiting()) == [b"b", b"b"]
    assert ":cancelling" not in desk.state()


def test_a_run_goes_on_if_the_queue_is_full_for_the_job_that_would_replace_it(desk: Desk) -> None:
    desk.run("A", "x")
    desk.dispatch("other")
    before = desk.state(":counts")
    for whole in (False, True):
        [done] = dispatch(desk, job("x", b"b", exists="cancel", max_length=1), whole=whole)
        assert done.outcome == "full"
    assert desk.state(":counts") == before


def test_a_job_whose_id_is_reserved_after_its_end_is_not_replaced(desk: Desk) -> None:
    held = desk.run("A", "x", unique_for=60_000)
    desk.call(ops.finish_tasks(desk.q, "A", [held]))
    assert desk.dispatch("x", b"b", exists="cancel") == Dispatched("unchanged", "x", held - 1)


@pytest.mark.parametrize("when", ["set", "later"])
def test_updates_move_a_job_no_later_than_the_first_of_them_allows(desk: Desk, when: str) -> None:
    desk.dispatch("x", delay=5_000, at_most=60_000, when=when)
    created = desk.now()
    latest = int(desk.state()[":job:x"]["latest"])
    assert created - 10_000 < latest - 60_000 <= created
    for delay, at_most in ((50_000, 60_000), (500_000, 60_000), (900_000, 10**9)):
        assert desk.dispatch("x", b"b", delay=delay, at_most=at_most, when=when).outcome == "updated"
    found = desk.state()[":job:x"]
    assert (int(found["run_at"]), int(found["latest"])) == (latest, latest)
    again = desk.dispatch("x", delay=500_000, at_most=60_000, when=when, data=False)
    assert again.outcome == "unchanged"
    assert desk.dispatch("x", b"c", delay=500_000, when=when).outcome == "updated"  # without at_most there is no limit
    assert int(desk.state()[":job:x"]["run_at"]) > latest + 100_000


def test_a_job_that_was_due_later_anyway_keeps_its_time(desk: Desk) -> None:
    desk.dispatch("x", run_at=FUTURE)
    assert desk.dispatch("x", b"b", run_at=FUTURE + 7, at_most=60_000).outcome == "updated"
    found = desk.state()[":job:x"]
    assert (found["run_at"], found["task"]) == (str(FUTURE), "b")
    assert int(found["latest"]) < FUTURE


def test_an_id_stays_taken_past_its_end_and_then_is_free(desk: Desk) -> None:
    held = desk.run("A", "x", unique_for=60_000)
    assert 0 < desk.client.pttl(desk.q.taken("x")) <= 60_000
    assert desk.state()[":taken:x"] == Expires(str(held - 1))
    desk.call(ops.finish_tasks(desk.q, "A", [held]))
    assert desk.dispatch("x", b"b") == Dispatched("unchanged", "x", held - 1)
    assert "waiting" not in desk.state()
    desk.client.delete(desk.q.taken("x"))  # as if it had expired
    assert desk.dispatch("x", b"b").outcome == "created"


def test_an_update_counts_the_time_for_which_it_is_taken_anew(desk: Desk) -> None:
    desk.dispatch("x", unique_for=5)
    desk.dispatch("x", unique_for=60_000)
    assert 1000 < desk.client.pttl(desk.q.taken("x")) <= 60_000
    assert desk.state()[":taken:x"] == Expires(str(FENCE + 2))


def test_the_bound_counts_all_that_does_not_run(desk: Desk) -> None:
    desk.run("A", "runs")
    desk.put(b"raw")
    dispatch(desk, job("due", run_at=FUTURE), job("waits"), job("runs"), job("stale"))
    desk.call(ops.cancel_job(desk.q, "stale", ""))
    before = desk.state(":counts")
    assert outcomes(desk, job("new", max_length=4), job(None, max_length=4)) == ["full", "full"]
    assert desk.state(":counts") == before
    assert desk.client.hget(desk.q.counts, "refused") == b"2"
    assert outcomes(desk, job("new", max_length=5), job("newer", max_length=5)) == ["created", "full"]


def test_the_bound_does_not_stop_an_update_or_a_twin(desk: Desk) -> None:
    desk.run("A", "runs")
    desk.dispatch("waits")
    assert outcomes(desk, job("waits", max_length=1), job("runs", max_length=1)) == ["updated", "full"]
    assert desk.dispatch("runs", max_length=2).outcome == "blocked"
    assert desk.dispatch("runs", max_length=2).outcome == "blocked"


# All or none


def test_of_a_whole_all_are_stored(desk: Desk) -> None:
    desk.dispatch("old")
    assert outcomes(desk, job("a"), job(None), job("old", b"b"), job("b", exists="raise"), whole=True) == [
        *("created", "created", "updated", "created")
    ]


@pytest.mark.parametrize(
    ("jobs", "answers"),
    [
        ([job("new"), job("old", exists="raise"), job("newer")], ["created", "duplicate"]),
        ([job("new"), job("new", exists="raise")], ["created", "duplicate"]),
        ([job("new"), job(None), job("newer", max_length=3)], ["created", "created", "full"]),
        ([job(None, max_length=1)], ["full"]),
    ],
)
def test_or_none_of_it_is(desk: Desk, jobs: list[Any], answers: list[str]) -> None:
    desk.dispatch("old", b"old")
    call = ops.dispatch_jobs(desk.q, jobs, all_or_none=True)
    with desk.nothing_happens():
        reply = desk.send(call)
    assert reply[0] == b"refused"
    assert [each.outcome for each in call.read(reply)] == answers
    with desk.nothing_changes():
        assert desk.resend(call) == reply


def test_updates_in_a_whole_do_not_count_against_the_bound(desk: Desk) -> None:
    desk.dispatch("old")
    whole = [job("old", max_length=2), job("new", max_length=2), job("new", b"b", max_length=2)]
    assert outcomes(desk, *whole, whole=True) == ["updated", "created", "updated"]


def test_the_refused_one_says_which_job_is_there(desk: Desk) -> None:
    there = desk.dispatch("old").number
    refused = dispatch(desk, job("new"), job("old", exists="raise"), whole=True)[-1]
    assert refused == Dispatched("duplicate", "old", there)


def test_without_whole_each_is_judged_alone_after_those_before_it(desk: Desk) -> None:
    desk.dispatch("old")
    again = job("a", b"2", exists="raise")
    assert outcomes(desk, job("a", b"1"), again, job("old", exists="raise"), job("a", b"3"), job("b")) == [
        *("created", "duplicate", "duplicate", "updated", "created")
    ]
    assert desk.waiting() == [b"a", b"3", b"a"]
    assert desk.counts() == {"enqueued": 3}


# What lies in the trash


def test_a_record_in_the_trash_is_none(desk: Desk) -> None:
    dispatch(desk, job("waits", b"old"), job("due", b"old", run_at=FUTURE))
    desk.run("A", "runs", b"old", front=True)
    desk.dispatch("runs", b"old")
    desk.call(ops.delete_queue(desk.q))
    new = [job(each, b"new", exists="raise") for each in ("waits", "due")]
    assert outcomes(desk, *new) == ["created", "created"]
    assert desk.dispatch("runs", b"new").outcome == "blocked"
    assert not desk.call(ops.purge_queue(desk.q))
    assert desk.waiting() == [b"new", b"new"]
    state = desk.state()
    assert {state[f":job:{each}"]["task"] for each in ("waits", "due", "runs")} == {"new"}
    assert state[":blocked"] == {"runs"}
    assert not any(name.startswith(":trash") for name in state)


def test_an_id_in_the_trash_is_free(desk: Desk) -> None:
    desk.dispatch("x", unique_for=60_000)
    desk.call(ops.delete_queue(desk.q))
    assert desk.dispatch("x", exists="raise").outcome == "created"
    assert ":taken:x" not in desk.state()


def test_whoever_waits_for_the_one_in_the_trash_is_told_by_the_next_dispatch(desk: Desk) -> None:
    old = desk.dispatch("x", fields={"result_ttl": "60000"}).number
    desk.call(ops.delete_queue(desk.q))
    desk.dispatch("x")
    found = desk.call(ops.read_result(desk.q, "x", old))
    assert (found.status, found.values) == ("cancelled", [b"the queue was deleted"])


# Results


def test_a_new_dispatch_makes_room_for_its_result(desk: Desk) -> None:
    held = desk.run("A", "x", fields={"result_ttl": "60000"})
    desk.call(ops.finish_tasks(desk.q, "A", [held], {held: ("json", b"1")}))
    kept = desk.state()[":result:x"]
    desk.dispatch("x")
    state = desk.state()
    assert ":result:x" not in state
    assert state[":older_result:x"] == kept


def test_an_update_leaves_an_older_result_where_it_is(desk: Desk) -> None:
    held = desk.run("A", "x", fields={"result_ttl": "60000"})
    desk.call(ops.finish_tasks(desk.q, "A", [held], {held: ("json", b"1")}))
    desk.dispatch("x")
    before = desk.state()
    desk.dispatch("x", b"b")
    assert desk.state()[":older_result:x"] == before[":older_result:x"]


# Again, late, elsewhere


NAMELESS = job(None, random="0123456789abcdef" * 2)


def every_kind() -> list[Any]:
    return [job("new"), job("waits", b"b"), job("due", run_at=PAST), job("runs", b"b"), NAMELESS, job("new", b"c")]


def everywhere(desk: Desk) -> None:
    desk.run("A", "runs")
    dispatch(desk, job("waits"), job("due", run_at=FUTURE))


def test_a_resend_gets_the_same_reply_and_changes_nothing(desk: Desk) -> None:
    everywhere(desk)
    call = ops.dispatch_jobs(desk.q, every_kind())
    reply = desk.send(call)
    desk.take("A", 1)
    with desk.nothing_changes():
        assert desk.resend(call) == reply
    assert [each.outcome for each in call.read(reply)] == [
        *("created", "updated", "updated", "blocked", "created", "updated")
    ]


def test_a_late_copy_stores_nothing(desk: Desk) -> None:
    everywhere(desk)
    with desk.nothing_happens():
        assert desk.late(ops.dispatch_jobs(desk.q, every_kind())) == [b"late"]


def test_none_at_all_is_no_harm(desk: Desk) -> None:
    with desk.nothing_happens():
        assert desk.send(ops.dispatch_jobs(desk.q, [])) == [b"ok"]


def test_on_an_empty_database_the_numbers_come_from_the_clock(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    before = desk.now()
    done = desk.dispatch("x")
    assert before * 1000 <= done.number <= (desk.now() + 1) * 1000
    assert desk.state() == {
        "waiting": [reference("x")],
        ":job:x": record("a", done.number, run_at=PAST),
        ":counts": Expires({"fence": str(done.number), "enqueued": "1"}),
    }


def test_claims_after_it_are_above_its_numbers(desk: Desk) -> None:
    made = dispatch(desk, *[job(None)] * 5)
    desk.enter("A")
    assert desk.start("A", 1).first == made[-1].number + 1


def test_options_that_are_no_map_are_an_error_before_anything_is_written(desk: Desk) -> None:
    call = ops.dispatch_jobs(desk.q, [job("a"), job("b")])
    broken: Command[Any] = Command(call.script, call.base, (*call.args[:3], b"\xc1", b"b"), call.read, True)
    with desk.nothing_changes(), pytest.raises(redis.ResponseError):
        desk.send(broken)


def test_a_paused_queue_takes_them(desk: Desk) -> None:
    desk.call(ops.pause(desk.q, "why"))
    assert desk.dispatch("x").outcome == "created"


def test_it_is_claimed_with_its_policy_and_runs_once(desk: Desk) -> None:
    held = desk.run("A", "x", b"task", fields={"timeout": "5"})
    assert desk.state() == {
        f":claim:{held}": [reference("x")],
        ":claims:A": {str(held)},
        ":active:x": record("task", held - 1, "active", run_at=PAST, timeout=5, claim=held, worker="A"),
        ":workers": {"A": f"1 {held} 1 0"},
        ":policy:A": policy(),
        ":counts": Expires({"fence": str(held), "enqueued": "1", "claimed": "1"}),
    }
    assert desk.start("A", 1).entries == []


# Rows of an outbox

ROW, OTHER_ROW = "0a" * 16, "0b" * 16


def test_a_row_becomes_one_job_however_often_it_is_sent(desk: Desk) -> None:
    first = desk.dispatch("x", row=ROW)
    assert first == Dispatched("created", "x", FENCE + 1)
    assert desk.state()[f":sent:{ROW}"] == Expires(f"{FENCE + 1} x")
    assert 604_000_000 < desk.client.pttl(desk.q.sent(ROW)) <= 604_800_000
    before = desk.state(":counts")
    assert desk.dispatch("x", b"other", row=ROW) == Dispatched("sent", "x", FENCE + 1)
    assert desk.dispatch(None, row=ROW) == Dispatched("sent", "x", FENCE + 1)
    assert desk.state(":counts") == before
    assert desk.counts()["enqueued"] == 1


@pytest.mark.parametrize("how", ["ends", "cancelled", "cancelled while it runs", "purged", "failed"])
def test_what_becomes_of_its_job_does_not_free_a_row(desk: Desk, how: str) -> None:
    if how in {"cancelled", "purged"}:
        desk.dispatch("x", row=ROW)
    else:
        held = desk.run("A", "x", row=ROW)
    match how:
        case "ends":
            desk.call(ops.finish_tasks(desk.q, "A", [held]))
        case "failed":
            desk.fail("A", held)
        case "purged":
            desk.call(ops.delete_queue(desk.q))
            while desk.call(ops.purge_queue(desk.q)):
                pass
        case _:
            desk.call(ops.cancel_job(desk.q, "x", ""))
    before = desk.state(":counts")
    assert desk.dispatch("x", row=ROW).outcome == "sent"
    assert desk.state(":counts") == before


def test_rows_of_one_request_are_looked_at_in_turn(desk: Desk) -> None:
    jobs = job("x", row=ROW), job("x", b"b", row=ROW), job("x", b"c", row=OTHER_ROW), job("plain")
    assert outcomes(desk, *jobs) == ["created", "sent", "updated", "created"]
    assert desk.counts()["enqueued"] == 2
    assert outcomes(desk, *jobs)[:3] == ["sent", "sent", "sent"]


def test_a_row_for_which_there_was_no_room_is_sent_later(desk: Desk) -> None:
    desk.put(b"raw")
    assert desk.dispatch("x", row=ROW, max_length=1).outcome == "full"
    assert f":sent:{ROW}" not in desk.state()
    assert desk.dispatch("x", row=ROW, max_length=2).outcome == "created"
    assert desk.dispatch("x", row=ROW, max_length=1).outcome == "sent"


def test_a_row_that_leaves_a_taken_id_alone_was_sent(desk: Desk) -> None:
    number = desk.dispatch("x").number
    assert desk.dispatch("x", row=ROW, exists="skip") == Dispatched("unchanged", "x", number)
    desk.call(ops.cancel_job(desk.q, "x", ""))
    assert desk.dispatch("x", row=ROW, exists="skip") == Dispatched("sent", "x", number)


@pytest.mark.parametrize("value", ["", "short", "a" * 65, "a" * 15 + "-", 7])
def test_a_row_has_a_name_of_letters_and_digits(desk: Desk, value: object) -> None:
    with desk.nothing_changes(), pytest.raises(redis.ResponseError, match="the option row"):
        desk.send(ops.dispatch_jobs(desk.q, [job("x", row=value)]))


def test_rows_are_not_stored_all_or_none(desk: Desk) -> None:
    with desk.nothing_changes(), pytest.raises(redis.ResponseError, match="not all or none"):
        desk.send(ops.dispatch_jobs(desk.q, [job("x", row=ROW)], all_or_none=True))


@pytest.mark.parametrize("value", ["", "no number", "7", "x 7"])
def test_what_another_program_wrote_there_is_no_row(desk: Desk, value: str) -> None:
    desk.client.set(desk.q.sent(ROW), value)
    assert desk.dispatch("x", row=ROW).outcome == "created"
    desk.client.delete(desk.q.sent(ROW))
    desk.client.rpush(desk.q.sent(ROW), "foreign")
    assert desk.dispatch("y", row=ROW).outcome == "created"
    assert desk.dispatch("y", row=ROW).outcome == "sent"


def test_a_dispatch_that_must_not_be_late_is_sent_alone(desk: Desk) -> None:
    call = ops.dispatch_jobs(desk.q, [job("x", row=ROW)], not_after=7.0)
    assert (call.merge, call.not_after) == (None, 7.0)
    assert ops.dispatch_jobs(desk.q, [job("x")]).merge is not None
