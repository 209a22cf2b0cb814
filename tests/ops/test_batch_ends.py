"""The ends of members: by every way in which a job ends, each is counted once, and the last one ends the batch."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.ops.batches import TOKEN, Opened, delivery, follow_up, messages, opened, relay, wrong
from tests.ops.driver import BODIES, BOOM, FUTURE, Desk, alone, fields_of
from tests.ops.schedules import TASK, T, fire_schedule
from worqr import ops
from worqr.command import Command
from worqr.keys import BatchKeys, QueueKeys

Way = Callable[[Desk, Opened], "Command[Any]"]
"""Adds the member x, and returns the call that ends it."""


def finished(desk: Desk, batch: Opened) -> Command[Any]:
    return ops.finish_tasks(desk.q, "A", [batch.run("A", "x")])


def failed(desk: Desk, batch: Opened) -> Command[Any]:
    return ops.fail_task(desk.q, "A", batch.run("A", "x"), BOOM)


def undecodable(desk: Desk, batch: Opened) -> Command[Any]:
    return ops.fail_task(desk.q, "A", batch.run("A", "x"), BOOM, undecodable=True)


def failed_too_often(desk: Desk, batch: Opened) -> Command[Any]:
    return ops.retry_task(desk.q, "A", batch.run("A", "x"), BOOM, counter="failures", limit=1)


def timed_out_too_often(desk: Desk, batch: Opened) -> Command[Any]:
    return ops.retry_task(desk.q, "A", batch.run("A", "x"), BOOM, counter="timeouts", limit=1)


def stalled_too_often(desk: Desk, batch: Opened) -> Command[Any]:
    batch.run("A", "x", fields={"max_stalls": "1"})
    return ops.fail_worker(desk.q, "A")


def expired(desk: Desk, batch: Opened) -> Command[Any]:
    desk.enter("A")
    batch.add("x", expires="0")
    return ops.start_tasks(desk.q, "A", 1, 1)


def cancelled_waiting(desk: Desk, batch: Opened) -> Command[Any]:
    batch.add("x")
    return ops.cancel_job(desk.q, "x", "")


def cancelled_scheduled(desk: Desk, batch: Opened) -> Command[Any]:
    batch.add("x", run_at=FUTURE)
    return ops.cancel_job(desk.q, "x", "")


def marked(desk: Desk, batch: Opened, **options: Any) -> int:
    """The claim of A on the member, which is to be cancelled."""
    held = batch.run("A", "x", **options)
    desk.call(ops.cancel_job(desk.q, "x", ""))
    return held


def cancelled_and_stopped(desk: Desk, batch: Opened) -> Command[Any]:
    return ops.stop_tasks(desk.q, "A", [marked(desk, batch)])


def cancelled_and_finished(desk: Desk, batch: Opened) -> Command[Any]:
    return ops.finish_tasks(desk.q, "A", [marked(desk, batch)])


def cancelled_and_failed(desk: Desk, batch: Opened) -> Command[Any]:
    return ops.fail_task(desk.q, "A", marked(desk, batch), BOOM)


def cancelled_and_retried(desk: Desk, batch: Opened) -> Command[Any]:
    return ops.retry_task(desk.q, "A", marked(desk, batch), BOOM, counter="failures", limit=9)


def cancelled_and_left(desk: Desk, batch: Opened) -> Command[Any]:
    marked(desk, batch)
    return ops.stop_work(desk.q, "A", 9)


def cancelled_and_swept(desk: Desk, batch: Opened) -> Command[Any]:
    marked(desk, batch)
    return ops.fail_worker(desk.q, "A")


def claim_cancelled(desk: Desk, batch: Opened) -> Command[Any]:
    held = batch.run("A", "x")
    desk.call(ops.cancel_claims(desk.q, [held], reason=""))
    return ops.stop_tasks(desk.q, "A", [held])


def replaced_while_it_ran(desk: Desk, batch: Opened) -> Command[Any]:
    """By a job of no batch, which waits until the run has ended."""
    held = batch.run("A", "x")
    assert desk.dispatch("x", exists="cancel").outcome == "blocked"
    return ops.stop_tasks(desk.q, "A", [held])


def deleted_with_its_queue(desk: Desk, batch: Opened) -> Command[Any]:
    batch.add("x")
    desk.call(ops.delete_queue(desk.q))
    return ops.purge_queue(desk.q)


def deleted_while_scheduled(desk: Desk, batch: Opened) -> Command[Any]:
    batch.add("x", run_at=FUTURE)
    desk.call(ops.delete_queue(desk.q))
    return ops.purge_queue(desk.q)


def deleted_in_its_lane(desk: Desk, batch: Opened) -> Command[Any]:
    batch.add("x", lane="gold")
    desk.call(ops.delete_queue(desk.q))
    return ops.purge_queue(desk.q)


def cancelled_with_all(desk: Desk, batch: Opened) -> Command[Any]:
    batch.add("x")
    desk.call(ops.cancel_all(desk.q))
    return ops.purge_queue(desk.q)


def given_back_after_a_deletion(desk: Desk, batch: Opened) -> Command[Any]:
    held = batch.run("A", "x")
    desk.call(ops.delete_queue(desk.q))
    return ops.stop_tasks(desk.q, "A", [held])


def left_after_a_deletion(desk: Desk, batch: Opened) -> Command[Any]:
    batch.run("A", "x")
    desk.call(ops.delete_queue(desk.q))
    return ops.stop_work(desk.q, "A", 9)


def dispatched_again_after_a_deletion(desk: Desk, batch: Opened) -> Command[Any]:
    batch.add("x")
    desk.call(ops.delete_queue(desk.q))
    return ops.dispatch_jobs(desk.q, [({"id": "x"}, b"b")])


def fired_after_a_deletion(desk: Desk, batch: Opened) -> Command[Any]:
    batch.add("cron:s")
    desk.call(ops.delete_queue(desk.q))
    return fire_schedule(desk.q, "s", T, judged_at=T, run_at=T, overlap="skip", task=TASK, meta="")


def put_back_after_a_deletion(desk: Desk, batch: Opened) -> Command[Any]:
    """A dead-letter record of no batch takes the id."""
    held = desk.run("A", "x")
    desk.fail("A", held)
    batch.add("x")
    desk.call(ops.delete_queue(desk.q))
    return ops.retry_aside(desk.q, "failed", [held])


def cancelled_with_its_lane(desk: Desk, batch: Opened) -> Command[Any]:
    batch.add("x", lane="gold")
    return ops.cancel_lane(desk.q, "gold")


def scheduled_and_cancelled_with_its_lane(desk: Desk, batch: Opened) -> Command[Any]:
    batch.add("x", lane="gold", run_at=FUTURE)
    return ops.cancel_lane(desk.q, "gold")


def cancelled_with_its_batch(desk: Desk, batch: Opened) -> Command[Any]:
    batch.add("x")
    return batch.cancel_part()


def without_a_task(desk: Desk, batch: Opened) -> Command[Any]:
    """Something has deleted the payload of its record."""
    held = batch.run("A", "x")
    desk.client.hdel(desk.q.active("x"), "task")
    return ops.fail_task(desk.q, "A", held, BOOM)


def without_a_record(desk: Desk, batch: Opened) -> Command[Any]:
    """A failover has lost a record that was just written."""
    batch.add("x")
    desk.client.delete(desk.q.job("x"))
    return batch.close_part(desk.q.base)


def without_a_record_while_it_ran(desk: Desk, batch: Opened) -> Command[Any]:
    held = batch.run("A", "x")
    desk.client.delete(desk.q.active("x"))
    desk.call(ops.finish_tasks(desk.q, "A", [held]))
    return batch.close_part(desk.q.base)


WAYS: dict[str, list[Way]] = {
    "finished": [finished],
    "failed": [failed, undecodable, failed_too_often, timed_out_too_often, stalled_too_often, expired],
    "cancelled": [
        *(cancelled_waiting, cancelled_scheduled, cancelled_and_stopped, cancelled_and_finished, cancelled_and_failed),
        *(cancelled_and_retried, cancelled_and_left, cancelled_and_swept, claim_cancelled, replaced_while_it_ran),
        *(deleted_with_its_queue, deleted_while_scheduled, deleted_in_its_lane, cancelled_with_all),
        *(given_back_after_a_deletion, left_after_a_deletion, dispatched_again_after_a_deletion),
        *(fired_after_a_deletion, put_back_after_a_deletion, cancelled_with_its_lane),
        *(scheduled_and_cancelled_with_its_lane, cancelled_with_its_batch),
    ],
    "lost": [without_a_task, without_a_record, without_a_record_while_it_ran],
}
EACH = [(way, outcome) for outcome, ways in WAYS.items() for way in ways]
BY_NAME = (without_a_record, without_a_record_while_it_ran, cancelled_with_its_batch)
"""Ends in a script that names the part: it is refused if a key of the part is foreign."""
each_way = pytest.mark.parametrize(("way", "outcome"), EACH, ids=lambda each: getattr(each, "__name__", ""))


def expected(outcome: str, times: int = 1) -> dict[str, int]:
    return {"added": times, outcome: times, **({"failures": times} if outcome == "failed" else {})}


def text_of(counts: dict[str, int]) -> str:
    names = ("added", "finished", "failed", "cancelled", "lost", "failures")
    return " ".join(str(counts.get(name, 0)) for name in names)


def send_twice(desk: Desk, call: Command[Any]) -> None:
    """The second time as the link sends a request again."""
    if call.numbered:
        first = desk.send(call)
        assert desk.resend(call) == first
    else:
        desk.send(call)
        desk.send(call)


@each_way
def test_a_member_is_counted_when_it_ends_and_once(desk: Desk, way: Way, outcome: str) -> None:
    batch = opened(desk)
    call = way(desk, batch)
    assert batch.counts() == {"added": 1, "left": 1}
    send_twice(desk, call)
    assert batch.counts() == expected(outcome)
    assert batch.state() == "open"
    assert wrong(desk) == []


@each_way
def test_the_last_end_ends_the_batch_and_stores_its_follow_up(desk: Desk, way: Way, outcome: str) -> None:
    kinds = {kind: follow_up(kind, desk.q, kind.encode(), delay=FUTURE) for kind in ("then", "otherwise")}
    batch = opened(desk, **kinds["then"], **kinds["otherwise"])
    call = way(desk, batch)
    if call.script.name == "close_part":  # which is what the producer sends when it has sealed the batch
        desk.call(ops.seal_batch(desk.q, "b", TOKEN))
    else:
        batch.seal()
    assert batch.state() == "sealed"
    send_twice(desk, call)
    kind, facts = "then" if outcome == "finished" else "otherwise", batch.row().facts
    assert (facts["state"], facts["endings"]) == ("ended", "1")
    assert facts["follow_up"] == f"{desk.q.base}\n{batch.follow_up_id(kind)}"
    assert desk.client.hget(desk.q.job(batch.follow_up_id(kind)), "task") == kind.encode()
    assert len([key for key in desk.state() if key.startswith(":job:@")]) == 1
    assert batch.counts() == expected(outcome)
    assert messages(desk) == []
    assert wrong(desk) == []


@each_way
def test_the_last_end_reports_to_a_home_elsewhere(desk: Desk, way: Way, outcome: str) -> None:
    home = QueueKeys(desk.prefix, "Q2")
    batch = opened(desk, home=home, **follow_up("then", home), **follow_up("otherwise", home))
    call = way(desk, batch)
    desk.call(ops.seal_batch(home, "b", TOKEN))
    if call.script.name != "close_part":
        desk.call(batch.close_part(desk.q.base))
    assert messages(desk) == []
    with desk.listening(desk.g.due_channel) as heard:
        send_twice(desk, call)
    assert (":due", f"0 {desk.q.base}".encode()) in heard, "the leader is told"
    [message] = messages(desk)
    assert message.topic == f"report {TOKEN}".encode()
    counts = text_of(expected(outcome))
    parts = [home.base, "b", TOKEN, desk.q.base, "1", "1", counts]
    assert (message.kind, [bytes(part).decode() for part in message.parts]) == ("report", parts)
    assert batch.state() == "sealed"
    for _ in range(2):
        desk.call(delivery(desk, message))
    kind = "then" if outcome == "finished" else "otherwise"
    assert batch.row().facts["follow_up"] == f"{home.base}\n{batch.follow_up_id(kind)}"
    assert desk.call(ops.list_tasks(home, 9))[0] == 1
    assert wrong(desk, desk.q, home) == []


@pytest.mark.parametrize("way", [way for way, _ in EACH if way not in BY_NAME])
def test_a_job_ends_although_its_part_is_not_stored_any_more(desk: Desk, way: Way) -> None:
    batch = opened(desk)
    call = way(desk, batch)
    keys = BatchKeys(desk.q)
    desk.client.delete(keys.part(TOKEN), keys.members(TOKEN))
    send_twice(desk, call)
    fields = [value for key, value in desk.state().items() if key.startswith((":active:", ":job:"))]
    assert [each for each in fields if "batch" in each] == []
    assert batch.counts() == {}


@pytest.mark.parametrize("foreign", ["batch", "batches", "parts", "part", "members", "outbox"])
@pytest.mark.parametrize(("way", "outcome"), [each for each in EACH if each[0] not in BY_NAME])
def test_a_job_ends_although_a_key_of_its_batch_is_foreign(desk: Desk, way: Way, outcome: str, foreign: str) -> None:
    """The batch may go on when the key is gone: what its home cannot be told is in the outbox."""
    batch = opened(desk, **follow_up("then", desk.q), **follow_up("otherwise", desk.q))
    call = way(desk, batch)
    batch.seal()
    keys = BatchKeys(desk.q)
    key = {
        "batch": keys.batch("b"),
        "batches": keys.batches,
        "parts": keys.parts("b"),
        "part": keys.part(TOKEN),
        "members": keys.members(TOKEN),
        "outbox": keys.outbox,
    }[foreign]
    kept = desk.client.dump(key)
    desk.client.delete(key)
    desk.client.set(key, "foreign")
    send_twice(desk, call)
    assert not [each for each in desk.state() if each.startswith((":active:x", ":claim:"))]
    if foreign in {"batch", "batches", "parts"}:
        assert [message.kind for message in messages(desk)] == ["report"]
        desk.client.delete(key)
        desk.client.restore(key, 0, kept)
        relay(desk)
    if foreign not in {"part", "members"}:
        assert batch.state() == "ended"
        assert batch.counts() == expected(outcome)


# Former owners


def test_a_former_owner_ends_nothing(desk: Desk) -> None:
    """A's claims were swept; B runs the member then."""
    batch = opened(desk)
    old = batch.run("A", "x")
    desk.call(ops.fail_worker(desk.q, "A"))
    late = [
        ops.finish_tasks(desk.q, "A", [old]),
        ops.fail_task(desk.q, "A", old, BOOM),
        ops.retry_task(desk.q, "A", old, BOOM, counter="failures", limit=1),
        ops.stop_tasks(desk.q, "A", [old]),
    ]

    def nothing_counts() -> None:
        before = batch.counts()
        for call in late:
            with desk.nothing_changes():
                desk.send(call)
        assert batch.counts() == before

    nothing_counts()
    desk.enter("B")
    [held] = desk.take("B", 1)
    nothing_counts()
    desk.call(ops.finish_tasks(desk.q, "B", [held]))
    nothing_counts()
    assert batch.counts() == {"added": 1, "finished": 1}
    assert batch.add("x").outcome == "created"  # the id is free, for a member that is another job
    assert batch.counts() == {"added": 2, "finished": 1, "left": 1}
    nothing_counts()


def test_what_comes_back_is_still_a_member(desk: Desk) -> None:
    batch = opened(desk)
    held = batch.run("A", "x")
    desk.call(ops.stop_tasks(desk.q, "A", [held]))
    [held] = desk.take("A", 1)
    desk.retry("A", held)
    [held] = desk.take("A", 1)
    assert desk.dispatch("x", b"changed").outcome == "blocked"
    desk.retry("A", held)  # takes what was blocked in
    assert batch.counts() == {"added": 1, "left": 1}
    [entry] = desk.start("A", 1).entries
    assert (fields_of(entry)["task"], fields_of(entry)["batch"]) == (b"changed", f"{TOKEN}\n{{Q1}}\nb")
    assert wrong(desk) == []


def test_a_blocked_job_behind_a_member_is_no_member(desk: Desk) -> None:
    batch = opened(desk)
    held = batch.run("A", "x")
    assert desk.dispatch("x", b"next").outcome == "blocked"
    desk.call(ops.finish_tasks(desk.q, "A", [held]))
    assert batch.counts() == {"added": 1, "finished": 1}
    [held] = desk.take("A", 1)
    desk.call(ops.finish_tasks(desk.q, "A", [held]))
    assert batch.counts() == {"added": 1, "finished": 1}


def test_many_ends_of_several_batches_in_one_script(desk: Desk) -> None:
    one, two = opened(desk, "one", token="1" * 32), opened(desk, "two", token="2" * 32, **follow_up("then", desk.q))
    desk.enter("A")
    for n in range(3):
        one.add(f"one {n}")
        two.add(f"two {n}")
    claims = desk.take("A", 6)
    two.seal()
    with desk.listening(BatchKeys(desk.q).batch("one"), BatchKeys(desk.q).batch("two")) as heard:
        desk.call(ops.finish_tasks(desk.q, "A", claims))
    assert heard == [(":batch:two", b"ended")]
    assert (one.counts(), two.counts()) == ({"added": 3, "finished": 3}, {"added": 3, "finished": 3})
    assert (one.state(), two.state()) == ("open", "ended")
    assert desk.run_id("A") == "@" + "2" * 32 + ".then"


def test_a_follow_up_wakes_a_worker_that_waits(desk: Desk) -> None:
    batch = opened(desk, **follow_up("then", desk.q))
    held = batch.run("A", "x")
    batch.seal()
    assert desk.start("A", 1).entries == []
    with desk.listening(desk.q.wake_channel("A")) as heard:
        desk.call(ops.finish_tasks(desk.q, "A", [held]))
    assert heard == [(":wake:A", b"1")]


def test_the_follow_up_of_an_end_in_a_start_does_not_take_its_numbers(desk: Desk) -> None:
    """A start that moves an expired member to the dead-letter queue claims others under the numbers after it."""
    batch = opened(desk, **follow_up("otherwise", desk.q))
    desk.enter("A")
    batch.add("x", expires="0")
    batch.seal()
    desk.dispatch("y")
    started = desk.start("A", 2)
    assert len(started.entries) == 2 and started.entries[0] is None
    follow = desk.state()[f":job:{batch.follow_up_id('otherwise')}"]
    assert int(follow["first"]) > started.first + 1
    assert desk.run_id("A") == batch.follow_up_id("otherwise")


# The code


ENDING = [name for name in BODIES if "note_member(" in alone(name)]
"""Scripts that may note what happens to a member, by what is linked into them."""


ENDERS = ("release_all", "release_uncounted")
"""Functions that give back all that a script was called for, and count the members of it."""


def counts_members(source: str, body: str) -> bool:
    """True if the body of a script counts members: itself, or by one of ENDERS that does so in `source`."""
    code = re.sub(r"--.*", "", body)
    enders = [each for each in ENDERS if f"{each}(" in code]
    return "count_members(" in code or any(
        re.search(rf"function (?:shared\.)?{each}\(.*?count_members\(.*?\nend\n", source, re.DOTALL) for each in enders
    )


@pytest.mark.parametrize("name", ENDING)
def test_a_script_that_may_end_a_member_counts_members(name: str) -> None:
    source, body = alone(name), BODIES[name]
    assert counts_members(source, body)
    called = ("count_members", *ENDERS)
    assert not counts_members(source, re.sub(rf"\b({'|'.join(called)})\(", "", body))


@pytest.mark.parametrize("name", ENDERS)
def test_a_function_that_stops_to_count_members_is_found(name: str) -> None:
    counting = f"local function {name}(base)\n  local ready = count_members(base)\nend\n"
    assert counts_members(counting, f"return {name}(queue)\n")
    assert not counts_members(counting.replace("count_members(base)", "0"), f"return {name}(queue)\n")


def test_these_scripts_may_end_a_member() -> None:
    assert {"finish_tasks", "start_tasks", "purge_queue", "fail_worker", "stop_work", "fire_schedules"} < set(ENDING)
