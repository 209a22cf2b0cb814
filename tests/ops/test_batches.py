"""The scripts of batches: what they reply and what they store, the whole of it; sent twice, late, and on an empty database."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import redis

from tests.ops.batches import (
    KEEP,
    OPEN_FOR,
    OTHER,
    REASON,
    TOKEN,
    Opened,
    follow_up,
    messages,
    opened,
    wrong,
)
from tests.ops.driver import FUTURE, PAST, Desk, claim, job, record, reference
from worqr import ops
from worqr.keys import BatchKeys, QueueKeys
from worqr.ops import OpenedPart, PartRow

DAY = 86_400_000
FIELD = f"{TOKEN}\n{{home}}\nb"
TIMES = {"made_at", "open_until", "sealed_at", "ended_at"}


def far(desk: Desk, name: str = "Q2") -> QueueKeys:
    return QueueKeys(desk.prefix, name)


def field_of(desk: Desk, home: QueueKeys | None = None) -> str:
    """The field `batch` of the record of a member."""
    return FIELD.replace("{home}", (desk.q if home is None else home).base.partition(":")[2])


def home_record(desk: Desk, state: str = "open", **fields: Any) -> dict[str, str]:
    """The record of the batch, without its times."""
    known = {"id": "b", "token": TOKEN, "state": state, "open_for": OPEN_FOR, "keep": KEEP, **fields}
    return {name: str(value) for name, value in known.items()}


def part_record(desk: Desk, home: QueueKeys | None = None, **fields: Any) -> dict[str, str]:
    """The record of its part, at version 1."""
    known = {"v": 1, "home": (desk.q if home is None else home).base, "id": "b", "keep": KEEP, **fields}
    return {name: str(value) for name, value in known.items()}


def stored(desk: Desk, *ignored: str) -> dict[str, Any]:
    """Every key of batches, without the times in the records of homes."""
    found = desk.state(":counts", ":workers", ":policy", ":hungry", *ignored)
    for name, value in found.items():
        if name.startswith(":batch:") and not name.endswith(":parts"):
            assert all(text.isdigit() for each, text in value.items() if each in TIMES)
            found[name] = {each: text for each, text in value.items() if each not in TIMES}
    return found


def counted(batch: Opened, queue: QueueKeys | None = None) -> dict[str, int]:
    """What the part counts; and the keys agree."""
    assert wrong(batch.desk) == []
    return batch.counts(queue)


# A batch is opened


def test_open_batch_stores_the_record(desk: Desk) -> None:
    facts = {**follow_up("then", desk.q, b"next", lane="gold"), "on_failed": "cancel", "meta": '{"a":"b"}'}
    before = desk.now()
    with desk.listening(desk.g.due_channel):
        call = ops.open_batch(desk.q, "b", TOKEN, open_for_ms=OPEN_FOR, keep_ms=KEEP, facts=facts)
        assert desk.send(call) == [b"ok"]
    made, until = (int(Opened(desk, desk.q).row().facts[name]) for name in ("made_at", "open_until"))
    assert before <= made <= desk.now() and until == made + OPEN_FOR
    more = {
        "then": desk.q.base,
        "then_options": msgspec.msgpack.encode({"lane": "gold"}).decode("latin-1"),
        "then_task": "next",
        "on_failed": "cancel",
        "meta": '{"a":"b"}',
    }
    assert stored(desk) == {":batch:b": home_record(desk, **more), ":batches": ["b"]}
    assert desk.client.zscore(BatchKeys(desk.q).batches, "b") == until
    with desk.nothing_changes():
        assert desk.resend(call) == [b"ok"]


def test_an_id_that_a_batch_has_is_refused(desk: Desk) -> None:
    batch = opened(desk)
    call = ops.open_batch(desk.q, "b", OTHER, open_for_ms=1, keep_ms=1, facts={})
    with desk.nothing_happens():
        assert desk.send(call) == [b"exists"]
    assert batch.row().facts["token"] == TOKEN


def test_a_batch_that_its_producer_opens_once_more_is_the_same(desk: Desk) -> None:
    opened(desk)
    call = ops.open_batch(desk.q, "b", TOKEN, open_for_ms=1, keep_ms=1, facts={})
    with desk.nothing_happens():
        assert desk.send(call) == [b"ok"]


@pytest.mark.parametrize(
    "facts",
    [
        {"then": "q"},
        {"then": "elsewhere", "then_options": b"\x80", "then_task": b"x"},
        {"otherwise": "elsewhere", "otherwise_task": b"x"},
        {"then": "q", "then_task": b"x"},
        {"then": "q", "then_options": b"\x80"},
        {"then": "a\nb", "then_options": b"\x80", "then_task": b"x"},
        {"otherwise": "q", "otherwise_options": b"\xc1", "otherwise_task": b"x"},
        {"otherwise": "q", "otherwise_options": b"", "otherwise_task": b"x"},
        {"then": "q", "then_options": msgspec.msgpack.encode({"dealy": 1}), "then_task": b"x"},
        {"then": "q", "then_options": msgspec.msgpack.encode({"delay": -1}), "then_task": b"x"},
        {"then": "q", "then_options": msgspec.msgpack.encode({"batch": {}}), "then_task": b"x"},
        {"on_failed": "continue"},
        {"meta": "x" * 4097},
        {"meta": b"\xff"},
        {"state": "ended"},
        {"token": "x"},
        {"parent": "x"},
        {"": ""},
    ],
    ids=repr,
)
def test_facts_that_cannot_be_are_an_error_before_anything_is_written(desk: Desk, facts: dict[str, Any]) -> None:
    """A follow-up that cannot be stored would break the script that ends the last member."""
    facts = {name: desk.q.base if value == "q" else value for name, value in facts.items()}
    call = ops.open_batch(desk.q, "b", TOKEN, open_for_ms=1, keep_ms=1, facts=facts)
    with (
        desk.nothing_changes(),
        pytest.raises(redis.ResponseError, match=r"of a batch|of a dispatch|has no such|a job is"),
    ):
        desk.send(call)


@pytest.mark.parametrize(
    ("id", "token", "open_for", "keep"),
    [
        ("", TOKEN, 1, 1),
        ("a\nb", TOKEN, 1, 1),
        ("x" * 1001, TOKEN, 1, 1),
        ("b", "short", 1, 1),
        ("b", "x\n" * 8, 1, 1),
        ("b", TOKEN, "", 1),
        ("b", TOKEN, -1, 1),
        ("b", TOKEN, 1, "soon"),
        ("b", TOKEN, 1, 10**15),
    ],
)
def test_a_name_that_cannot_be_is_an_error_before_anything_is_written(
    desk: Desk, id: str, token: str, open_for: Any, keep: Any
) -> None:
    call = ops.open_batch(desk.q, id, token, open_for_ms=open_for, keep_ms=keep, facts={})
    with desk.nothing_changes(), pytest.raises(redis.ResponseError, match="open_for and keep of a batch"):
        desk.send(call)


def test_open_part_gives_a_version_that_grows_when_the_part_was_closed(desk: Desk) -> None:
    batch, keys, part = opened(desk), BatchKeys(desk.q), far(desk).base
    options = {"token": TOKEN, "home": desk.q.base, "id": "b", "number": 1, "keep": str(KEEP)}
    desk.client.zadd(keys.batches, {"b": PAST})
    before = desk.now()
    assert desk.call(ops.open_part(desk.q, "b", TOKEN, part)) == OpenedPart("ok", options=options)
    assert stored(desk) == {
        ":batch:b": home_record(desk, open=1),
        ":batch:b:parts": {part: "1 1 0 0 0 0 0 0"},
        ":batches": ["b"],
    }
    until = int(batch.row().facts["open_until"])  # each opening is an addition
    assert until >= before + OPEN_FOR and desk.client.zscore(keys.batches, "b") == until
    kept = stored(desk)
    assert desk.call(ops.open_part(desk.q, "b", "", part)).options == options
    assert stored(desk) == kept
    assert desk.send(ops.report_part(desk.q, "b", TOKEN, part, 1, closed=True, counts="1 1 0 0 0 0")) == [b"ok"]
    assert desk.call(ops.open_part(desk.q, "b", TOKEN, part)).options == {**options, "number": 2}
    assert batch.row().parts == (PartRow(part, 2, True, (1, 1, 0, 0, 0, 0)),)


def test_open_part_says_what_a_part_must_know(desk: Desk) -> None:
    batch = opened(desk, on_failed="cancel")
    batch.add("x")
    batch.seal()
    options = desk.call(ops.open_part(desk.q, "b", "", desk.q.base, inside=True)).options
    assert options is not None
    assert (options["sealed"], options["on_failed"]) == (True, "cancel")


def test_open_part_refuses(desk: Desk) -> None:
    def status(id: str = "b", token: str = TOKEN, part: str = "q") -> OpenedPart:
        with desk.nothing_changes():
            return desk.call(ops.open_part(desk.q, id, token, part))

    assert status().status == "unknown"
    batch = opened(desk)
    assert status(id="other").status == "unknown"
    assert status(token=OTHER).status == "unknown"
    batch.options()
    reply = desk.send(ops.open_part(desk.q, "b", TOKEN, "more"))
    assert reply[0] == b"ok"
    call = ops.open_part(desk.q, "b", TOKEN, "even more")
    few = (*call.args[:3], 2)
    with desk.nothing_changes():
        assert desk.client.evalsha(call.script.sha, 1, call.base, *few) == [b"full"]
    few = (*call.args[:2], desk.q.base, 2)
    assert desk.client.evalsha(call.script.sha, 1, call.base, *few)[0] == b"ok"
    batch.add("x")
    batch.seal()
    assert status().status == "sealed"
    assert batch.cancel() == "ok"
    assert status() == OpenedPart("cancelled", REASON)
    ended = opened(desk, "ended", token=OTHER)
    ended.seal()
    assert status("ended", OTHER).status == "ended"


# Members


@pytest.mark.parametrize("at", ["home", "elsewhere"])
def test_a_sealed_part_takes_only_what_running_jobs_add(desk: Desk, at: str) -> None:
    batch, queue = opened(desk), desk.q if at == "home" else far(desk)
    batch.add("first", queue=queue)
    before = desk.call(ops.open_part(desk.q, "b", TOKEN, queue.base)).options
    batch.seal()
    late = [job("late", batch=before)]
    assert desk.call(ops.dispatch_jobs(queue, late))[0].outcome == "closed"
    assert desk.call(ops.open_part(desk.q, "b", TOKEN, queue.base)).status == "sealed"
    assert batch.counts(queue) == {"added": 1, "left": 1}
    assert batch.add("second", queue=queue).outcome == "created"
    assert batch.counts(queue) == {"added": 2, "left": 2}


def test_a_dispatch_adds_a_member(desk: Desk) -> None:
    batch = opened(desk)
    with desk.nothing_happens():
        assert batch.part() == (0, {})
    done = batch.add("x")
    assert (done.outcome, done.id, done.number) == ("created", "x", claim(1))
    parts = {":batch:b": home_record(desk, open=1), ":batch:b:parts": {desk.q.base: "1 1 0 0 0 0 0 0"}}
    expected = {
        **parts,
        ":batches": ["b"],
        ":part:" + TOKEN: part_record(desk, added=1),
        f":part:{TOKEN}:members": {"x"},
        ":job:x": record("a", claim(1), run_at=PAST, batch=field_of(desk)),
        "waiting": [reference("x")],
    }
    assert stored(desk) == expected
    assert batch.add("x", b"other").outcome == "duplicate"  # a member is a new job
    assert stored(desk) == expected
    assert batch.part() == (1, part_record(desk, added=1))
    assert wrong(desk) == []


@pytest.mark.parametrize("exists", ["update", "skip", "raise", "cancel"])
def test_a_member_is_never_another_job_with_its_id(desk: Desk, exists: str) -> None:
    batch = opened(desk)
    desk.dispatch("waits")
    desk.dispatch("due", run_at=FUTURE)
    desk.client.delete(desk.q.base)
    desk.run("A", "runs")
    for name in ("waits", "due", "runs"):
        assert batch.add(name, exists=exists).outcome == "duplicate"
    assert batch.counts() == {}
    desk.dispatch("gone", unique_for=60_000)
    desk.call(ops.cancel_job(desk.q, "gone", ""))
    desk.client.set(desk.q.taken("gone"), 1)
    assert batch.add("gone", exists=exists).outcome == "duplicate"
    assert batch.counts() == {} and wrong(desk) == []


def test_a_dispatch_of_a_waiting_member_leaves_it_in_its_batch(desk: Desk) -> None:
    batch = opened(desk)
    batch.add("x")
    assert desk.dispatch("x", b"new").outcome == "updated"
    assert counted(batch) == {"added": 1, "left": 1}
    assert desk.state()[":job:x"]["batch"] == field_of(desk)


def test_many_are_added_at_once_and_each_once(desk: Desk) -> None:
    batch = opened(desk)
    options = batch.options()
    new = [job(each, batch=options) for each in ("x", "y", "x", None)]
    found = desk.call(ops.dispatch_jobs(desk.q, new))
    assert [each.outcome for each in found] == ["created", "created", "duplicate", "created"]
    assert counted(batch) == {"added": 3, "left": 3}
    with desk.nothing_changes():
        again = desk.resend(ops.dispatch_jobs(desk.q, new))
    assert [entry[0] for entry in again[1:]] == [b"created", b"created", b"duplicate", b"created"]


def test_of_a_whole_with_one_id_twice_none_is_added(desk: Desk) -> None:
    batch = opened(desk)
    options = batch.options()
    call = ops.dispatch_jobs(desk.q, [job(each, batch=options) for each in ("x", "x")], all_or_none=True)
    with desk.nothing_happens():
        reply = desk.send(call)
    assert (reply[0], [entry[0] for entry in reply[1:]]) == (b"refused", [b"created", b"duplicate"])
    assert batch.counts() == {}


def test_of_a_whole_with_one_that_is_refused_none_is_added(desk: Desk) -> None:
    batch = opened(desk)
    options = batch.options()
    desk.dispatch("there")
    for bad in (job("there", batch=options), job("y", batch=options, max_length=1)):
        with desk.nothing_happens():
            reply = desk.send(ops.dispatch_jobs(desk.q, [job("x", batch=options), bad], all_or_none=True))
        assert reply[0] == b"refused"
    assert batch.counts() == {}


def test_a_part_that_has_closed_takes_no_member_until_it_is_opened_again(desk: Desk) -> None:
    batch = opened(desk)
    options = batch.options()
    desk.call(batch.close_part(desk.q.base))
    assert batch.part() == (0, part_record(desk, sealed=1, closed=1))
    before = stored(desk)
    for whole in (False, True):
        reply = desk.send(ops.dispatch_jobs(desk.q, [job("x", batch=options)], all_or_none=whole))
        assert stored(desk) == before
        assert (reply[0], reply[1][0]) == (b"refused" if whole else b"ok", b"closed")
    assert batch.add("x").outcome == "created"  # it was not sealed at home
    assert desk.client.pttl(BatchKeys(desk.q).part(TOKEN)) == -1
    assert batch.part() == (1, part_record(desk, v=2, sealed=1, added=1))
    with desk.nothing_changes():
        again = ops.dispatch_jobs(desk.q, [job("late", batch=options)])
        assert desk.resend(again)[1][:2] == [b"created", b"x"]
    inside = {**options, "sealed": True}
    [late] = desk.call(ops.dispatch_jobs(desk.q, [job("late", batch=inside)]))
    assert late.outcome == "created", "a dispatch of an older version is welcome while the part is open"


def test_a_part_that_is_cancelled_takes_no_member(desk: Desk) -> None:
    batch = opened(desk)
    options = batch.options()
    batch.add("x")
    desk.call(batch.cancel_part())
    [done] = desk.call(ops.dispatch_jobs(desk.q, [job("y", batch=options)]))
    assert done.outcome == "closed"
    assert counted(batch) == {"added": 1, "cancelled": 1}


def test_a_part_that_was_never_there_takes_members_of_a_sealed_batch(desk: Desk) -> None:
    """A handler adds to its batch: its part knows from then that nobody else adds."""
    batch = opened(desk)
    batch.add("x")
    batch.seal()
    there = far(desk)
    assert batch.add("y", queue=there).outcome == "created"
    assert batch.part(there)[1]["sealed"] == "1"
    desk.call(ops.cancel_job(there, "y", ""))
    assert batch.part(there)[1]["closed"] == "1"
    assert [message.topic for message in messages(desk, there)] == [f"report {TOKEN}".encode()]


GOOD: dict[str, Any] = {"token": TOKEN, "home": "worqr:{Q1}", "id": "b", "number": 1, "keep": "60000"}
BAD: list[Any] = [
    *("", "x", 7, True, [], [1], {}),
    *({name: value for name, value in GOOD.items() if name != missing} for missing in GOOD),
    *({**GOOD, "token": wrong} for wrong in ("short", "x" * 65, "x y" * 8, "a\nb" * 8, 7)),
    *({**GOOD, "number": wrong} for wrong in (0, -1, 0.5, "1", float("nan"), float("inf"), 10**15)),
    *({**GOOD, "home": wrong} for wrong in ("", "no-brace", "{a\nb}", "{" + "x" * 1000, 7)),
    *({**GOOD, "id": wrong} for wrong in ("", "a\nb", "\x00", 7)),
    *({**GOOD, "keep": wrong} for wrong in ("", "-1", "soon", "1" * 16, 60_000)),
    *({**GOOD, "sealed": wrong} for wrong in ("1", 1)),
    *({**GOOD, "on_failed": wrong} for wrong in ("continue", True, 1)),
]


@pytest.mark.parametrize("bad", BAD, ids=repr)
def test_an_option_batch_that_cannot_be_is_an_error_before_anything_is_written(desk: Desk, bad: Any) -> None:
    call = ops.dispatch_jobs(desk.q, [job("good", batch=GOOD), job("x", batch=bad)])
    with (
        desk.nothing_changes(),
        pytest.raises(redis.ResponseError, match="the option batch of a dispatch cannot be that"),
    ):
        desk.send(call)


def test_the_parent_of_a_batch_is_checked_like_the_option_batch(desk: Desk) -> None:
    for bad in ({}, {**GOOD, "number": 0}, {**GOOD, "id": "a\nb"}):
        call = ops.open_batch(desk.q, "b", TOKEN, open_for_ms=1, keep_ms=1, parent=bad, facts={})
        with desk.nothing_changes(), pytest.raises(redis.ResponseError, match="the parent of a batch cannot be that"):
            desk.send(call)
