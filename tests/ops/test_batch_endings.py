"""How a batch ends, begins again, is cancelled and forgotten: the scripts of its home and of its parts, and the outbox."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import redis

from tests.ops.batches import KEEP, OTHER, REASON, TOKEN, Opened, delivery, follow_up, messages, opened, relay, wrong
from tests.ops.driver import FUTURE, PAST, Desk, Expires, claim, fields_of, record, reference
from tests.ops.test_batches import far, field_of, home_record, part_record, stored
from worqr import ops
from worqr.keys import BatchKeys, QueueKeys
from worqr.ops import BatchCheck, PartRow, Sealed

DAY = 86_400_000
INNER = "1ec" * 10


def both(desk: Desk, queue: Any = None, **options: Any) -> dict[str, bytes | str]:
    """Two follow-ups, whose tasks are then and otherwise."""
    there = desk.q if queue is None else queue
    kinds = [follow_up(kind, there, kind.encode(), **options) for kind in ("then", "otherwise")]
    return {**kinds[0], **kinds[1]}


def finish(desk: Desk, *claims: int) -> None:
    desk.call(ops.finish_tasks(desk.q, "A", list(claims)))


def started(desk: Desk) -> dict[str, Any]:
    """What A is given: a job, by its fields."""
    desk.enter("A")
    [entry] = desk.start("A", 1).entries
    return fields_of(entry)


def facts_of(entry: dict[str, Any]) -> dict[str, Any]:
    """What a follow-up knows of its batch."""
    return msgspec.msgpack.decode(entry["batch_ended"])


# Sealing, closing and ending


def test_a_batch_without_members_ends_when_it_is_sealed(desk: Desk) -> None:
    opened(desk, **both(desk))
    with desk.listening(BatchKeys(desk.q).batch("b")) as heard:
        assert desk.call(ops.seal_batch(desk.q, "b", TOKEN)) == Sealed("ended", str(KEEP), ())
    assert heard == [(":batch:b", b"sealed"), (":batch:b", b"ended")]
    with desk.nothing_changes():
        assert desk.call(ops.seal_batch(desk.q, "b", TOKEN)) == Sealed("ended", str(KEEP), ())
    entry = started(desk)
    assert (entry["task"], entry["id"]) == (b"then", f"@{TOKEN}.then")
    facts = facts_of(entry)
    assert facts.pop("ended_at").isdigit()
    counts = {"added": 0, "finished": 0, "failed": 0, "cancelled": 0}
    assert facts == {"home": desk.q.base, "id": "b", "token": TOKEN, "endings": 1, **counts}


def test_sealing_returns_the_parts_that_are_to_be_told(desk: Desk) -> None:
    batch = opened(desk)
    with desk.nothing_changes():
        assert desk.call(ops.seal_batch(desk.q, "b", OTHER)) is None
        assert desk.call(ops.seal_batch(desk.q, "other", TOKEN)) is None
    batch.add("x")
    batch.add("y", queue=far(desk))
    before = desk.now()
    sealed = desk.call(ops.seal_batch(desk.q, "b", TOKEN))
    assert sealed is not None
    assert (sealed.state, sealed.keep) == ("sealed", str(KEEP))
    assert sorted(sealed.parts) == sorted([(desk.q.base, 1), (far(desk).base, 1)])
    due = desk.client.zscore(BatchKeys(desk.q).batches, "b")
    assert due is not None and before + 10_000 <= due <= desk.now() + 10_000, "the leader looks at it then"
    with desk.nothing_changes():
        assert desk.call(ops.seal_batch(desk.q, "b", TOKEN)) == sealed


def test_the_whole_of_what_a_batch_leaves(desk: Desk) -> None:
    batch = opened(desk, **follow_up("then", desk.q), meta='{"a":"b"}')
    held = batch.run("A", "x")
    batch.seal()
    finish(desk, held)
    more = {"then": desk.q.base, "then_options": "\x80", "then_task": "next", "meta": '{"a":"b"}', "endings": 1}
    follow = batch.follow_up_id()
    found = stored(desk)
    job = found.pop(f":job:{follow}")
    ended = msgspec.msgpack.decode(job.pop("batch_ended").encode("latin-1"))
    assert (ended["meta"], ended["finished"]) == ('{"a":"b"}', 1)
    at = job.pop("run_at")
    assert int(at) >= int(ended["ended_at"]), "a script may look at the clock more than once"
    number = job["first"]
    assert job == record("next", int(number))
    assert int(number) > claim(2)
    assert found == {
        ":batch:b": home_record(desk, "ended", open=0, follow_up=f"{desk.q.base}\n{follow}", **more),
        ":batch:b:parts": {desk.q.base: "1 0 1 1 0 0 0 0"},
        ":batches": ["b"],
        f":part:{TOKEN}": Expires(part_record(desk, added=1, finished=1, sealed=1, closed=1)),
        "waiting": [reference(follow)],
    }
    assert desk.client.zscore(BatchKeys(desk.q).batches, "b") == int(ended["ended_at"]) + KEEP, "then it is forgotten"
    assert 0 <= KEEP + DAY - desk.client.pttl(BatchKeys(desk.q).part(TOKEN)) < KEEP
    assert desk.counts()["enqueued"] == 2


def test_close_part_creates_a_part_to_which_nothing_came(desk: Desk) -> None:
    batch = opened(desk, home=far(desk))
    options = batch.options()
    for _ in range(2):
        assert desk.send(batch.close_part(desk.q.base)) == [b"ok"]
        assert stored(desk) == {
            f":part:{TOKEN}": Expires(part_record(desk, far(desk), sealed=1, closed=1)),
            ":outbox": {
                f"report {TOKEN}": msgspec.msgpack.encode(
                    ["report", far(desk).base, "b", TOKEN, desk.q.base, "1", "1", "0 0 0 0 0 0"]
                ).decode("latin-1")
            },
            **{name: value for name, value in stored(desk).items() if name.startswith(desk.prefix)},
        }
    [late] = desk.call(ops.dispatch_jobs(desk.q, [({"id": "x", "batch": options}, b"a")]))
    assert late.outcome == "closed"
    relay(desk)
    assert batch.row().parts == (PartRow(desk.q.base, 1, False, (0,) * 6),)


def test_close_part_waits_for_members_and_repeats_the_report(desk: Desk) -> None:
    batch = opened(desk, home=far(desk))
    held = batch.run("A", "x")
    desk.call(ops.seal_batch(far(desk), "b", TOKEN))
    for _ in range(2):
        desk.call(batch.close_part(desk.q.base))
        assert batch.part() == (1, part_record(desk, far(desk), added=1, sealed=1))
    assert messages(desk) == []
    finish(desk, held)
    [first] = messages(desk)
    desk.call(ops.drop_outbox(desk.q, [first]))  # as if its delivery had been lost
    desk.client.pexpire(BatchKeys(desk.q).part(TOKEN), 10_000)
    desk.call(batch.close_part(desk.q.base))
    assert messages(desk) == [first]
    assert desk.client.pttl(BatchKeys(desk.q).part(TOKEN)) > KEEP, "it does not expire before its batch has ended"
    relay(desk)
    assert batch.state() == "ended"


def test_reports_are_believed_if_they_are_newer(desk: Desk) -> None:
    batch, part = opened(desk), far(desk).base
    desk.call(ops.open_part(desk.q, "b", TOKEN, part))

    def report(version: int, counts: str, *, closed: bool = True, id: str = "b", token: str = TOKEN) -> tuple[Any, ...]:
        call = ops.report_part(desk.q, id, token, part, version, closed=closed, counts=counts)
        desk.send(call)
        [row] = batch.row().parts
        return row.version, row.open, row.counts[:2]

    assert report(1, "2 1 0 0 0 0", closed=False) == (1, True, (2, 1))
    assert report(0, "9 9 0 0 0 0") == (1, True, (2, 1))
    assert report(1, "9 9 0 0 0 0", token=OTHER) == (1, True, (2, 1))
    assert report(1, "9 9 0 0 0 0", id="other") == (1, True, (2, 1))
    assert report(1, "2 2 0 0 0 0") == (1, False, (2, 2))
    assert report(1, "9 9 0 0 0 0", closed=False) == (1, False, (2, 2)), "of a version that has closed"
    assert report(3, "3 2 0 0 0 0", closed=False) == (3, True, (3, 2)), "it was reopened"
    assert report(2, "9 9 0 0 0 0") == (3, True, (3, 2))
    assert wrong(desk) == []
    assert batch.row().facts["state"] == "open"
    with desk.nothing_changes():
        report(2, "9 9 0 0 0 0")


def test_a_batch_ends_when_its_last_part_has_closed(desk: Desk) -> None:
    queues = [far(desk, name) for name in ("Q2", "Q3")]
    batch = opened(desk, **both(desk))
    for n, queue in enumerate(queues):
        batch.add(f"x{n}", queue=queue)
        desk.call(ops.start_work(queue, "A", max_stalls=3, keep_failed=9, last=0))
    batch.add("here", expires="0")
    batch.seal()
    for queue in queues:
        assert batch.state() == "sealed"
        first = desk.call(ops.start_tasks(queue, "A", 1, 1)).first
        desk.call(ops.finish_tasks(queue, "A", [first]))
        relay(desk, queue)
    assert batch.state() == "sealed"
    desk.call(ops.cancel_job(desk.q, "here", ""))
    assert batch.state() == "ended"
    facts = facts_of(started(desk))
    assert (facts["added"], facts["finished"], facts["cancelled"]) == (3, 2, 1)
    assert wrong(desk, desk.q, *queues) == []


def test_only_the_follow_up_that_fits_is_stored(desk: Desk) -> None:
    batch = opened(desk, **follow_up("then", desk.q))
    held = batch.run("A", "x")
    batch.seal()
    desk.fail("A", held)
    facts = batch.row().facts
    assert (facts["state"], facts["endings"], facts.get("follow_up")) == ("ended", "1", None)
    assert desk.waiting() == []


def test_a_follow_up_has_the_options_of_its_call(desk: Desk) -> None:
    options = {
        "lane": "gold",
        "meta": '{"m":"1"}',
        "fields": {"result_ttl": "60000"},
        "expires": "60000",
        "front": True,
    }
    batch = opened(desk, **follow_up("then", desk.q, b"next", **options))
    later = opened(desk, "later", token=OTHER, **follow_up("then", desk.q, b"next", delay=60_000))
    batch.seal()
    later.seal()
    assert desk.call(ops.inspect(desk.q)).due == 1
    entry = started(desk)
    assert {name: entry[name] for name in ("lane", "meta", "result_ttl", "expires")} == {
        "lane": "gold",
        "meta": '{"m":"1"}',
        "result_ttl": "60000",
        "expires": "60000",
    }


# A follow-up in another queue


def held_in(desk: Desk, there: QueueKeys) -> dict[bytes, bytes]:
    """What a queue holds of the follow-ups of the batch."""
    return desk.client.hgetall(BatchKeys(there).follow_ups(TOKEN))


def test_a_follow_up_elsewhere_is_stored_there_and_the_message_only_names_it(desk: Desk) -> None:
    there = far(desk)
    batch = opened(desk, **both(desk, there), meta='{"a":"b"}')
    assert not {name for name in desk.state()[":batch:b"] if name.endswith(("_options", "_task"))}
    stored = {b"home": desk.q.base.encode(), b"id": b"b", b"meta": b'{"a":"b"}'}
    for kind in (b"then", b"otherwise"):
        stored |= {kind + b"_options": b"\x80", kind + b"_task": kind}
    assert held_in(desk, there) == stored
    assert desk.client.pttl(BatchKeys(there).follow_ups(TOKEN)) == -1
    claim = batch.run("A", "x")
    batch.seal()
    desk.fail("A", claim)
    [message] = messages(desk)
    follow = batch.follow_up_id("otherwise")
    assert (message.topic, message.kind) == (f"release {TOKEN} 1".encode(), "release")
    assert [bytes(part) for part in message.parts[:4]] == [there.base.encode(), TOKEN.encode(), b"otherwise", b"1"]
    assert message.message.count(b"otherwise") == 1  # the kind, not the task
    assert batch.row().facts["follow_up"] == f"{there.base}\n{follow}"
    assert desk.call(ops.list_tasks(there, 9))[0] == 0
    call = delivery(desk, message)
    assert [desk.send(call), desk.send(call)] == [[b"ok"], [b"stored"]]
    assert desk.call(ops.list_tasks(there, 9)) == (1, [b"otherwise"])
    record = desk.client.hgetall(there.job(follow))
    counts = {"added": 1, "finished": 0, "failed": 1, "cancelled": 0, "endings": 1}
    facts = msgspec.msgpack.decode(record[b"batch_ended"])
    assert facts.pop("ended_at").isdigit()
    assert facts == {"home": desk.q.base, "id": "b", "token": TOKEN, "meta": '{"a":"b"}', **counts}
    desk.call(ops.drop_outbox(desk.q, [message]))
    assert desk.call(ops.retry_aside(desk.q, "failed", [claim])) == 1
    [claim] = desk.take("A", 1)
    finish(desk, claim)
    [second] = messages(desk)
    assert second.topic == f"release {TOKEN} 2".encode()
    assert [desk.send(delivery(desk, each))[0] for each in (second, message, second)] == [b"ok", b"stored", b"stored"]
    assert desk.call(ops.list_tasks(there, 9)) == (2, [b"then", b"otherwise"])
    assert batch.row().facts["follow_up"] == f"{there.base}\n{batch.follow_up_id('then', 2)}"
    assert held_in(desk, there) == {**stored, b"ending 1": b"1", b"ending 2": b"1"}


def test_follow_ups_elsewhere_expire_if_the_batch_is_not_opened_and_when_it_is_forgotten(desk: Desk) -> None:
    there, key = far(desk), BatchKeys(far(desk)).follow_ups(TOKEN)
    options = {"then_options": msgspec.msgpack.encode({}), "then_task": b"next"}
    hold = ops.hold_follow_ups(there, TOKEN, desk.q.base, "b", options)
    keep, forget = ops.keep_follow_ups(there, TOKEN, 0), ops.keep_follow_ups(there, TOKEN, DAY)
    for call in (keep, forget):
        with desk.nothing_changes():  # nothing is held yet
            assert desk.send(call) == [b"ok"]
    assert desk.send(hold) == [b"ok"]
    assert 6 * DAY < desk.client.pttl(key) <= 7 * DAY
    other = ops.hold_follow_ups(there, TOKEN, desk.q.base, "b", {**options, "then_task": b"another"})
    with desk.nothing_changes():
        assert [desk.send(hold), desk.send(other)] == [[b"ok"], [b"ok"]]
    desk.call(keep)
    assert desk.client.pttl(key) == -1
    with desk.nothing_changes():
        assert [desk.send(hold), desk.send(keep)] == [[b"ok"], [b"ok"]]
    desk.call(forget)
    desk.call(keep)  # a copy, too late
    assert 0 < desk.client.pttl(key) <= DAY
    facts = msgspec.msgpack.encode({})
    assert desk.send(ops.put_follow_up(there, TOKEN, "then", 1, facts)) == [b"ok"]
    desk.call(ops.keep_follow_ups(there, TOKEN, 1))
    while desk.client.exists(key):
        pass
    with desk.nothing_changes():
        assert desk.send(ops.put_follow_up(there, TOKEN, "then", 2, facts)) == [b"unknown"]


def test_a_batch_is_forgotten_after_its_follow_up_elsewhere_is_enqueued(desk: Desk) -> None:
    there = far(desk)
    batch = opened(desk, **follow_up("then", there), **follow_up("otherwise", desk.q), keep_ms=0)
    batch.seal()
    [release] = messages(desk)
    desk.client.zadd(BatchKeys(desk.q).batches, {"b": PAST})
    desk.call(ops.check_batches(desk.q))
    assert batch.state() == "ended"
    assert desk.client.zscore(BatchKeys(desk.q).batches, "b") > PAST
    desk.call(delivery(desk, release))
    desk.call(ops.drop_outbox(desk.q, [release]))
    desk.client.zadd(BatchKeys(desk.q).batches, {"b": PAST})
    desk.call(ops.check_batches(desk.q))
    assert desk.call(ops.read_batch(desk.q, "b")) is None
    [message] = messages(desk)
    assert (message.topic, message.kind) == (f"keep {TOKEN} {there.base}".encode(), "keep")
    assert desk.client.pttl(BatchKeys(there).follow_ups(TOKEN)) == -1
    relay(desk)
    assert 0 < desk.client.pttl(BatchKeys(there).follow_ups(TOKEN)) <= DAY
    assert desk.call(ops.list_tasks(there, 9)) == (1, [b"next"])


FACTS = msgspec.msgpack.encode({"added": 1})
ODD: dict[str, tuple[str, int, bytes, str]] = {
    "another kind": ("meta", 1, FACTS, "unknown"),
    "another follow-up": ("otherwise", 1, FACTS, "unknown"),
    "the ending zero": ("then", 0, FACTS, "ERR"),
    "an ending of 17 digits": ("then", 10**16, FACTS, "ERR"),
    "no facts": ("then", 1, b"", "ERR"),
    "facts that are no MessagePack": ("then", 1, b"\xc1", "ERR"),
    "facts that are no map": ("then", 1, msgspec.msgpack.encode(1), "ERR"),
    "facts of other types": (
        *("then", 1),
        msgspec.msgpack.encode(
            {"added": float("nan"), "failed": [], "finished": "x", "ended_at": 1, "cancel_reason": "??"}
        ).replace(b"??", b"\xff\xff"),
        "ok",
    ),
}


@pytest.mark.parametrize("case", ODD)
def test_a_message_about_a_follow_up_can_be_forged_and_changes_nothing_else(desk: Desk, case: str) -> None:
    kind, ending, facts, reply = ODD[case]
    opened(desk, home=far(desk), **follow_up("then", desk.q))
    call = ops.put_follow_up(desk.q, TOKEN, kind, ending, facts)
    if reply == "ok":
        assert desk.send(call) == [b"ok"]
        told = facts_of(started(desk))
        assert told.pop("ended_at").isdigit()
        counts = {"added": 0, "finished": 0, "failed": 0, "cancelled": 0, "endings": 1}
        assert told == {"home": far(desk).base, "id": "b", "token": TOKEN, **counts}
        return
    with desk.nothing_changes():
        if reply == "ERR":
            with pytest.raises(redis.ResponseError, match="of a follow-up cannot be that"):
                desk.send(call)
        else:
            assert desk.send(call) == [reply.encode()]


@pytest.mark.parametrize("field", ["then_options", "then_task", "home", "id"])
def test_a_held_follow_up_that_cannot_be_read_is_not_enqueued(desk: Desk, field: str) -> None:
    opened(desk, home=far(desk), **follow_up("then", desk.q))
    desk.client.hset(BatchKeys(desk.q).follow_ups(TOKEN), field, b"\xc1") if field != "then_task" else desk.client.hdel(
        BatchKeys(desk.q).follow_ups(TOKEN), field
    )
    with desk.nothing_changes():
        assert desk.send(ops.put_follow_up(desk.q, TOKEN, "then", 1, FACTS)) == [b"unknown"]


@pytest.mark.parametrize("options", [b"", b"\xc1", b"\x01", msgspec.msgpack.encode({"run_at": "x"})])
def test_a_follow_up_at_home_that_cannot_be_read_costs_no_other_job_its_end(desk: Desk, options: bytes) -> None:
    batch = opened(desk, **follow_up("then", desk.q))
    claim = batch.run("A", "x", fields={"result_ttl": "60000"})
    batch.seal()
    desk.client.hset(BatchKeys(desk.q).batch("b"), "then_options", options)
    finish(desk, claim)
    assert batch.state() == "ended"
    assert "follow_up" not in batch.row().facts
    assert desk.call(ops.list_tasks(desk.q, 9)) == (0, [])
    assert desk.client.exists(desk.q.result("x"))


def test_a_follow_up_that_an_earlier_version_stored_at_home_stays_in_the_outbox(desk: Desk) -> None:
    there = far(desk)
    batch = opened(desk)
    desk.client.hset(BatchKeys(desk.q).batch("b"), mapping=follow_up("then", there))
    batch.seal()
    [message] = messages(desk)
    assert (message.topic, message.kind) == (f"follow_up {TOKEN} 1".encode(), "follow_up")
    assert [bytes(part) for part in message.parts] == [there.base.encode(), TOKEN.encode(), b"1", b"\x80", b"next"]


# A member is put back


def ended_with_a_failure(desk: Desk, **facts: Any) -> tuple[Opened, int]:
    batch = opened(desk, **facts)
    held = batch.run("A", "x")
    batch.seal()
    desk.fail("A", held)
    assert batch.state() == "ended"
    return batch, held


def put_back(desk: Desk, *claims: int) -> int:
    return desk.call(ops.retry_aside(desk.q, "failed", list(claims)))


def test_a_member_that_is_put_back_reopens_the_batch(desk: Desk) -> None:
    batch, held = ended_with_a_failure(desk, **both(desk))
    first = batch.row().facts["follow_up"]
    assert put_back(desk, held) == 1
    assert batch.counts() == {"added": 1, "failures": 1, "left": 1}
    row = batch.row()
    assert row.facts["state"] == "sealed"
    assert not {"ended_at", "follow_up", "cancel_reason"} & row.facts.keys()
    [part] = row.parts
    assert (part.version, part.open) == (2, True)
    assert desk.client.pttl(BatchKeys(desk.q).part(TOKEN)) == -1
    assert desk.state()[":job:x"]["batch"] == field_of(desk)
    with desk.nothing_changes():
        assert desk.resend(ops.retry_aside(desk.q, "failed", [held]))[0] == b"ok"
    assert started(desk)["task"] == b"otherwise"
    [again] = desk.take("A", 1)
    finish(desk, again)
    facts = batch.row().facts
    assert (facts["state"], facts["endings"]) == ("ended", "2")
    assert facts["follow_up"] == f"{desk.q.base}\n{batch.follow_up_id('then', 2)}" != first
    entry = started(desk)
    assert (entry["task"], facts_of(entry)["endings"], facts_of(entry)["failed"]) == (b"then", 2, 0)
    assert batch.counts() == {"added": 1, "finished": 1, "failures": 1}
    assert wrong(desk) == []


def test_a_member_that_fails_again_is_counted_once(desk: Desk) -> None:
    batch, held = ended_with_a_failure(desk)
    for n in (2, 3):
        assert put_back(desk, held) == 1
        [held] = desk.take("A", 1)
        desk.fail("A", held)
        assert batch.row().facts["endings"] == str(n)
    assert batch.counts() == {"added": 1, "failed": 1, "failures": 3}


def test_a_member_is_put_back_while_the_batch_goes_on(desk: Desk) -> None:
    batch = opened(desk)
    held = batch.run("A", "x")
    batch.add("y", run_at=FUTURE)
    desk.fail("A", held)
    assert batch.counts() == {"added": 2, "failed": 1, "failures": 1, "left": 1}
    assert put_back(desk, held) == 1
    assert batch.counts() == {"added": 2, "failures": 1, "left": 2}
    assert (batch.state(), batch.part()[1]["v"]) == ("open", "1")
    assert wrong(desk) == []


def test_a_member_is_put_back_in_a_queue_that_is_not_the_home(desk: Desk) -> None:
    home = far(desk)
    batch = opened(desk, home=home, **both(desk, home))
    held = batch.run("A", "x")
    desk.call(ops.seal_batch(home, "b", TOKEN))
    desk.call(batch.close_part(desk.q.base))
    desk.fail("A", held)
    [closed] = messages(desk)
    relay(desk)
    put_back(desk, held)
    [reopened] = messages(desk)
    assert [bytes(part) for part in reopened.parts[4:]] == [b"2", b"0", b"1 0 0 0 0 1"]
    for message in (closed, reopened, closed, reopened):
        desk.call(delivery(desk, message))
    assert batch.state() == "sealed"
    [held] = desk.take("A", 1)
    finish(desk, held)
    [again] = messages(desk)  # it replaces the one that was not dropped
    assert [bytes(part) for part in again.parts[4:]] == [b"2", b"1", b"1 1 0 0 0 1"]
    desk.call(ops.drop_outbox(desk.q, [reopened]))
    assert messages(desk) == [again], "a topic that has a newer message keeps it"
    for message in (closed, again, reopened, again, closed):
        desk.call(delivery(desk, message))
    assert (batch.state(), batch.row().facts["endings"]) == ("ended", "2")
    assert desk.call(ops.list_tasks(home, 9))[1] == [b"then", b"otherwise"]
    assert wrong(desk, desk.q, home) == []


def test_a_reopening_that_the_home_never_heard_of_ends_the_batch_again_all_the_same(desk: Desk) -> None:
    home = far(desk)
    batch = opened(desk, home=home)
    held = batch.run("A", "x")
    desk.call(ops.seal_batch(home, "b", TOKEN))
    desk.call(batch.close_part(desk.q.base))
    desk.fail("A", held)
    relay(desk)
    put_back(desk, held)
    [held] = desk.take("A", 1)
    finish(desk, held)  # its report replaces that of the reopening
    assert relay(desk) == 1
    assert (batch.state(), batch.row().facts["endings"]) == ("ended", "2")
    assert wrong(desk, desk.q, home) == []


def test_a_task_whose_part_is_forgotten_is_put_back_as_a_job_of_no_batch(desk: Desk) -> None:
    batch, held = ended_with_a_failure(desk)
    keys = BatchKeys(desk.q)
    desk.client.delete(keys.part(TOKEN), keys.batch("b"), keys.parts("b"), keys.batches)
    assert put_back(desk, held) == 1
    assert "batch" not in desk.state()[":job:x"]
    assert batch.counts() == {}


def test_a_member_stays_failed_while_its_id_runs(desk: Desk) -> None:
    batch, held = ended_with_a_failure(desk)
    other = desk.run("A", "x", b"other")
    with desk.nothing_happens():
        assert put_back(desk, held) == 0
    finish(desk, other)
    assert put_back(desk, held) == 1
    assert batch.counts() == {"added": 1, "failures": 1, "left": 1}


def test_a_member_stays_failed_while_its_batch_is_being_cancelled(desk: Desk) -> None:
    batch = opened(desk)
    held = batch.run("A", "x")
    other = batch.run("A", "y")
    desk.fail("A", held)
    batch.cancel()
    relay(desk)
    with desk.nothing_happens():
        assert put_back(desk, held) == 0
    desk.call(ops.stop_tasks(desk.q, "A", [other]))
    assert (batch.state(), batch.row().facts["cancel_reason"]) == ("ended", REASON)
    assert put_back(desk, held) == 1, "now it can be put back, and the cancel is over"
    assert (batch.state(), batch.row().facts.get("cancel_reason")) == ("sealed", None)
    assert "cancel_reason" not in batch.part()[1]


def test_a_member_takes_the_id_of_one_in_the_trash(desk: Desk) -> None:
    """One script ends the old job, and adds the new one to the same batch."""
    batch = opened(desk)
    batch.add("x")
    desk.call(ops.delete_queue(desk.q))
    assert batch.add("x", b"new").outcome == "created"
    assert batch.counts() == {"added": 2, "cancelled": 1, "left": 1}
    desk.call(ops.purge_queue(desk.q))
    assert batch.counts() == {"added": 2, "cancelled": 1, "left": 1}
    assert wrong(desk) == []


def test_a_member_is_put_back_under_the_id_of_one_in_the_trash(desk: Desk) -> None:
    batch = opened(desk)
    held = batch.run("A", "x")
    desk.fail("A", held)
    batch.add("x")
    desk.call(ops.delete_queue(desk.q))
    assert put_back(desk, held) == 1
    assert batch.counts() == {"added": 2, "cancelled": 1, "failures": 1, "left": 1}
    assert wrong(desk) == []


# A failure cancels the batch


def test_the_first_failure_cancels_the_others(desk: Desk) -> None:
    batch = opened(desk, on_failed="cancel", **both(desk))
    held = batch.run("A", "x")
    batch.add("y", run_at=FUTURE)
    batch.add("z", run_at=FUTURE)
    desk.fail("A", held)
    assert (batch.state(), batch.row().facts["cancel_reason"]) == ("sealed", "a job of the batch failed")
    [message] = messages(desk)
    assert (message.topic, message.kind) == (f"cancel {TOKEN} {desk.q.base}".encode(), "cancel")
    relay(desk)
    assert batch.counts() == {"added": 3, "failed": 1, "cancelled": 2, "failures": 1}
    assert batch.state() == "ended"
    entry = started(desk)
    assert (entry["task"], facts_of(entry)["cancel_reason"]) == (b"otherwise", "a job of the batch failed")


def test_the_first_failure_elsewhere_cancels_the_others(desk: Desk) -> None:
    home = far(desk)
    batch = opened(desk, home=home, on_failed="cancel")
    held = batch.run("A", "x")
    batch.add("y", run_at=FUTURE)
    desk.fail("A", held)
    [report] = messages(desk)
    assert [bytes(part) for part in report.parts[4:]] == [b"1", b"0", b"2 0 1 0 0 1"]
    desk.call(delivery(desk, report))
    desk.call(ops.drop_outbox(desk.q, [report]))
    [cancel] = messages(desk, home)
    assert cancel.kind == "cancel"
    desk.call(delivery(desk, report))
    assert messages(desk, home) == [cancel]
    assert relay(desk, home, desk.q) == 2
    assert batch.state() == "ended"
    assert wrong(desk, desk.q, home) == []


def test_a_failure_that_was_put_back_does_not_cancel_again_but_the_next_one_does(desk: Desk) -> None:
    batch, held = ended_with_a_failure(desk, on_failed="cancel")
    assert batch.row().facts["cancel_reason"] == "a job of the batch failed"
    put_back(desk, held)
    assert batch.row().facts.get("cancel_reason") is None
    [held] = desk.take("A", 1)
    desk.fail("A", held)
    assert (batch.state(), batch.row().facts["endings"]) == ("ended", "2")
    assert batch.row().facts["cancel_reason"] == "a job of the batch failed"


def test_a_cancelled_member_does_not_cancel_the_others(desk: Desk) -> None:
    batch = opened(desk, on_failed="cancel")
    batch.add("x")
    batch.add("y")
    desk.call(ops.cancel_job(desk.q, "x", ""))
    assert "cancel_reason" not in batch.row().facts
    assert messages(desk) == []


# A batch is cancelled


def test_a_cancel_in_steps(desk: Desk) -> None:
    batch = opened(desk, **both(desk))
    claims = [batch.run("A", f"runs {n}", fields={"result_ttl": "60000"}) for n in range(20)]
    for n in range(300):
        batch.add(f"waits {n}", run_at=FUTURE)
    with desk.listening(BatchKeys(desk.q).batch("b")) as heard:
        assert [batch.cancel(), batch.cancel("another reason")] == ["ok", "ok"]
    assert heard == [(":batch:b", b"cancelled")]
    assert batch.row().facts["cancel_reason"] == REASON
    steps, cursor = 0, "0"
    while cursor is not None:
        steps += 1
        before = batch.counts().get("cancelled", 0)
        cursor = desk.call(batch.cancel_part(cursor=cursor))
        assert desk.client.scard(desk.q.cancelling) == 20, "running members are cancelled in the first step"
        assert batch.counts().get("cancelled", 0) - before < 300
        assert batch.state() == "sealed"
    assert steps > 1
    assert batch.counts() == {"added": 320, "cancelled": 300, "left": 20}
    with desk.nothing_changes():  # once more, from the beginning
        desk.call(batch.cancel_part())
    for held in claims[:10]:
        desk.call(ops.stop_tasks(desk.q, "A", [held]))
    assert batch.state() == "sealed"
    finish(desk, *claims[10:])
    assert batch.counts() == {"added": 320, "cancelled": 320}
    assert batch.state() == "ended"
    assert desk.client.hget(desk.q.result("runs 0"), "reason") == REASON.encode()
    assert (started(desk)["task"], batch.cancel()) == (b"otherwise", "ended")
    with desk.nothing_changes():
        assert desk.call(ops.cancel_batch(desk.q, "b", OTHER, "")) == "unknown"
        assert desk.call(ops.cancel_batch(desk.q, "other", "", "")) == "unknown"
        assert desk.call(ops.cancel_batch(desk.q, "b", "", "")) == "ended"


def test_a_cancel_ends_a_batch_without_open_parts_at_once(desk: Desk) -> None:
    batch = opened(desk)
    assert batch.cancel() == "ok"
    assert (batch.state(), messages(desk)) == ("ended", [])


def test_a_cancel_that_comes_late_leaves_a_newer_part_alone(desk: Desk) -> None:
    batch, held = ended_with_a_failure(desk)
    put_back(desk, held)
    with desk.nothing_changes():
        assert desk.call(batch.cancel_part(version=1)) is None
    assert batch.counts() == {"added": 1, "failures": 1, "left": 1}
    assert desk.call(batch.cancel_part(version=2)) is None
    assert batch.counts() == {"added": 1, "cancelled": 1, "failures": 1}


def test_a_cancel_of_a_part_to_which_nothing_came(desk: Desk) -> None:
    batch = opened(desk, home=far(desk))
    options = batch.options()
    batch.cancel()
    assert relay(desk, far(desk)) == 1
    assert batch.part() == (0, part_record(desk, far(desk), sealed=1, closed=1, cancel_reason=REASON))
    [late] = desk.call(ops.dispatch_jobs(desk.q, [({"id": "x", "batch": options}, b"a")]))
    assert late.outcome == "closed"
    desk.call(batch.cancel_part())
    relay(desk)
    assert batch.state() == "ended"


def test_a_cancel_finds_members_that_were_lost(desk: Desk) -> None:
    """A batch that is cancelled is not asked in any other way."""
    _, inner = nested(desk)
    batch = opened(desk)
    for name in ("lost", "waits"):
        batch.add(name, run_at=FUTURE)
    desk.client.delete(desk.q.job("lost"))
    batch.cancel()
    relay(desk)
    assert batch.counts() == {"added": 2, "cancelled": 1, "lost": 1}
    assert batch.state() == "ended"
    desk.client.delete(BatchKeys(desk.q).batch(inner.id))
    outer = Opened(desk, desk.q, "outer", OTHER)
    outer.cancel()
    relay(desk)
    assert (outer.state(), outer.counts()) == ("ended", {"added": 1, "lost": 1})


def test_a_cancel_that_comes_again_repeats_the_report(desk: Desk) -> None:
    home = far(desk)
    batch = opened(desk, home=home)
    batch.add("x")
    batch.cancel()
    desk.call(batch.cancel_part())
    [report] = messages(desk)
    desk.call(ops.drop_outbox(desk.q, [report]))  # as if it had been lost
    desk.call(batch.cancel_part())
    assert messages(desk) == [report]
    relay(desk, desk.q)
    assert batch.state() == "ended"
    assert messages(desk, home)[0].kind == "cancel"


def test_a_part_that_is_reopened_while_its_batch_is_being_cancelled_is_told_again(desk: Desk) -> None:
    """x failed, and was put back before the cancel of the batch arrived."""
    home = far(desk)
    batch = opened(desk, home=home)
    held = batch.run("A", "x")
    batch.add("y", queue=home, run_at=FUTURE)
    desk.call(batch.close_part(desk.q.base))
    desk.fail("A", held)
    put_back(desk, held)
    batch.cancel()
    assert relay(desk, desk.q) == 1
    topics = {bytes(message.topic) for message in messages(desk, home)}
    assert topics == {f"cancel {TOKEN} {queue.base}".encode() for queue in (desk.q, home)}
    assert relay(desk, home, desk.q) >= 2
    assert batch.state() == "ended"
    assert batch.counts() == {"added": 1, "cancelled": 1, "failures": 1}
    assert wrong(desk, desk.q, home) == []


# The leader


def due(desk: Desk, *ids: str) -> None:
    desk.client.zadd(BatchKeys(desk.q).batches, dict.fromkeys(ids, PAST))


def test_the_leader_tells_open_parts_again_ever_more_seldom(desk: Desk) -> None:
    batch = opened(desk)
    batch.add("x", run_at=FUTURE)
    batch.seal()
    waits = []
    for n in range(7):
        due(desk, "b")
        more, checks = desk.call(ops.check_batches(desk.q))
        assert (more, checks) == (False, [BatchCheck("b", TOKEN, None, str(KEEP), ((desk.q.base, 1),))]), n
        waits.append(round((desk.client.zscore(BatchKeys(desk.q).batches, "b") - desk.now()) / 10_000))
        with desk.nothing_changes():
            assert desk.call(ops.check_batches(desk.q)) == (False, [])
    assert waits == [1, 2, 4, 8, 16, 30, 30]
    batch.cancel()
    due(desk, "b")
    _, [check] = desk.call(ops.check_batches(desk.q))
    assert check.reason == REASON
    assert desk.client.zscore(BatchKeys(desk.q).batches, "b") - desk.now() < 11_000


def test_the_leader_renews_parts_that_have_closed(desk: Desk) -> None:
    there = far(desk)
    batch = opened(desk)
    batch.add("x", run_at=FUTURE)
    batch.add("y", queue=there)
    batch.seal()
    desk.call(ops.cancel_job(there, "y", ""))
    relay(desk, there)
    told = set()
    desk.client.hset(BatchKeys(desk.q).batch("b"), "checks", 98)
    for _ in range(3):
        due(desk, "b")
        _, [check] = desk.call(ops.check_batches(desk.q))
        told.add(tuple(sorted(check.parts)))
    assert told == {((desk.q.base, 1),), tuple(sorted([(desk.q.base, 1), (there.base, 1)]))}
    desk.client.pexpire(BatchKeys(there).part(TOKEN), 60_000)
    desk.call(batch.close_part(there.base))
    assert desk.client.pttl(BatchKeys(there).part(TOKEN)) > 60_000
    relay(desk, there)
    assert batch.state() == "sealed"


def test_the_leader_cancels_a_batch_that_its_producer_has_left_open(desk: Desk) -> None:
    batch = opened(desk, **both(desk))
    batch.add("x", run_at=FUTURE)
    due(desk, "b")
    assert desk.call(ops.check_batches(desk.q)) == (False, [])
    assert batch.state() == "open"
    assert desk.client.zscore(BatchKeys(desk.q).batches, "b") == int(batch.row().facts["open_until"])
    due(desk, "b")
    desk.client.hset(BatchKeys(desk.q).batch("b"), "open_until", PAST)
    assert desk.call(ops.check_batches(desk.q)) == (False, [])
    assert batch.row().facts["cancel_reason"] == "its producer left it open"
    relay(desk)
    assert batch.state() == "ended"
    assert started(desk)["task"] == b"otherwise"


def test_the_leader_forgets_a_batch_when_its_keep_has_passed(desk: Desk) -> None:
    batch = opened(desk)
    batch.seal()
    due(desk, "b")
    assert desk.call(ops.check_batches(desk.q)) == (False, [])
    assert batch.state() == "ended"
    keys = BatchKeys(desk.q)
    assert desk.client.zscore(keys.batches, "b") == int(batch.row().facts["ended_at"]) + KEEP
    desk.client.hset(keys.batch("b"), "ended_at", PAST)
    due(desk, "b", "nobody")
    assert desk.call(ops.check_batches(desk.q)) == (False, [])
    assert stored(desk) == {}
    assert desk.call(ops.read_batch(desk.q, "b")) is None


def test_the_leader_looks_at_some_batches_at_once(desk: Desk) -> None:
    for n in range(25):
        opened(desk, f"b{n}", token=f"{n:032}")
    due(desk, *(f"b{n}" for n in range(25)))
    assert desk.call(ops.check_batches(desk.q)) == (True, [])
    assert desk.call(ops.check_batches(desk.q)) == (False, [])


def test_a_member_that_was_lost_is_found_missing(desk: Desk) -> None:
    there = far(desk)
    batch = opened(desk, **both(desk))
    batch.add("lost", queue=there)
    batch.add("waits", queue=there, run_at=FUTURE)
    batch.seal()
    desk.client.delete(there.job("lost"))
    for _ in range(2):
        desk.call(batch.close_part(there.base))
        assert batch.counts(there) == {"added": 2, "lost": 1, "left": 1}
    desk.call(ops.cancel_job(there, "waits", ""))
    relay(desk, there)
    entry = started(desk)
    assert (entry["task"], facts_of(entry)["failed"], facts_of(entry)["cancelled"]) == (b"otherwise", 1, 1)


def test_the_promotion_says_when_the_leader_is_to_relay(desk: Desk) -> None:
    def told() -> tuple[bool, bool]:
        found = desk.call(ops.promote_due(desk.q))
        return found.needs_relay, found.next_in_ms is not None

    assert told() == (False, False)
    batch = opened(desk, open_for_ms=60_000)
    promoted = desk.call(ops.promote_due(desk.q))
    assert (promoted.needs_relay, 50_000 < (promoted.next_in_ms or 0) <= 60_000) == (False, True)
    due(desk, "b")
    assert told()[0]
    desk.call(ops.check_batches(desk.q))
    assert told() == (False, True)
    batch.add("x")
    batch.cancel()
    assert told()[0]
    [message] = messages(desk)
    desk.call(ops.drop_outbox(desk.q, [message]))
    assert told() == (False, True)


# Batches in batches


def nested(desk: Desk, **facts: Any) -> tuple[Opened, Opened]:
    outer = opened(desk, "outer", token=OTHER, **follow_up("then", desk.q, b"outer then"))
    inner = opened(desk, "inner", token=INNER, parent=outer.options(), **facts)
    return outer, inner


def test_a_batch_is_a_member_of_another(desk: Desk) -> None:
    outer, inner = nested(desk)
    assert outer.part() == (1, {**part_record(desk, added=1), "id": "outer"})
    assert desk.state()[f":part:{OTHER}:members"] == {"\ninner"}
    assert inner.row().facts["parent"] == f"{OTHER}\n{{Q1}}\nouter"
    held = inner.run("A", "x")
    outer.seal()
    inner.seal()
    assert (outer.state(), inner.state()) == ("sealed", "sealed")
    finish(desk, held)
    assert (inner.state(), outer.state()) == ("ended", "ended")
    assert outer.counts() == {"added": 1, "finished": 1}
    assert started(desk)["task"] == b"outer then"
    assert wrong(desk) == []


def test_a_copy_of_its_opening_adds_it_once(desk: Desk) -> None:
    outer = opened(desk, "outer", token=OTHER)
    parent = outer.options()
    call = ops.open_batch(desk.q, "inner", INNER, open_for_ms=1, keep_ms=1, parent=parent, facts={})
    assert desk.send(call) == [b"ok"]
    with desk.nothing_changes():
        assert desk.resend(call) == [b"ok"]
    assert desk.send(call) == [b"ok"]
    assert outer.counts() == {"added": 1, "left": 1}
    desk.call(outer.cancel_part())
    call = ops.open_batch(desk.q, "more", "ee" * 16, open_for_ms=1, keep_ms=1, parent=parent, facts={})
    with desk.nothing_happens():
        assert desk.send(call) == [b"closed"]


def test_its_follow_up_becomes_a_member_of_the_outer_batch(desk: Desk) -> None:
    outer, inner = nested(desk, **both(desk))
    outer.seal()
    inner.seal()
    assert inner.state() == "ended"
    assert outer.counts() == {"added": 2, "finished": 1, "left": 1}
    entry = started(desk)
    assert (entry["task"], entry["batch"]) == (b"then", f"{OTHER}\n{{Q1}}\nouter")
    finish(desk, int(entry["claim"]))
    assert outer.state() == "ended"
    assert outer.counts() == {"added": 2, "finished": 2}
    assert wrong(desk) == []


def test_a_failed_inner_batch_is_a_failed_member_and_comes_back(desk: Desk) -> None:
    outer, inner = nested(desk)
    held = inner.run("A", "x")
    outer.seal()
    inner.seal()
    desk.fail("A", held)
    assert outer.counts() == {"added": 1, "failed": 1, "failures": 1}
    assert (inner.state(), outer.state()) == ("ended", "ended")
    put_back(desk, held)
    assert (inner.state(), outer.state()) == ("sealed", "sealed")
    assert outer.counts() == {"added": 1, "failures": 1, "left": 1}
    [held] = desk.take("A", 1)
    finish(desk, held)
    assert (inner.state(), outer.state()) == ("ended", "ended")
    assert outer.counts() == {"added": 1, "finished": 1, "failures": 1}
    assert outer.row().facts["endings"] == "2"
    assert started(desk)["task"] == b"outer then"
    assert wrong(desk) == []


def test_an_inner_batch_that_ends_again_after_the_outer_one_is_forgotten_leaves_nothing_of_it(desk: Desk) -> None:
    outer, inner = nested(desk, **both(desk))
    held = inner.run("A", "x")
    outer.seal()
    inner.seal()
    desk.fail("A", held)
    finish(desk, int(started(desk)["claim"]))
    assert outer.state() == "ended"
    desk.client.delete(BatchKeys(desk.q).part(OTHER))  # it has expired
    put_back(desk, held)
    [held] = desk.take("A", 1)
    finish(desk, held)
    assert inner.state() == "ended"
    assert "batch" not in started(desk)
    assert not [name for name in desk.state() if name.startswith(f":part:{OTHER}")]


def test_a_cancel_of_the_outer_batch_cancels_the_inner_one(desk: Desk) -> None:
    outer, inner = nested(desk)
    held = inner.run("A", "x")
    inner.add("y", run_at=FUTURE)
    inner.seal()
    outer.cancel()
    relay(desk)
    assert inner.row().facts["cancel_reason"] == REASON
    assert inner.counts() == {"added": 2, "cancelled": 1, "left": 1}
    assert (inner.state(), outer.state()) == ("sealed", "sealed")
    desk.call(ops.stop_tasks(desk.q, "A", [held]))
    assert (inner.state(), outer.state()) == ("ended", "ended")
    assert outer.counts() == {"added": 1, "failed": 1, "failures": 1}
    assert wrong(desk) == []


def test_an_inner_batch_whose_record_was_lost_is_found_missing(desk: Desk) -> None:
    outer, _ = nested(desk)
    outer.seal()
    assert outer.state() == "sealed"
    keys = BatchKeys(desk.q)
    desk.client.delete(keys.batch("inner"), keys.parts("inner"))
    due(desk, "inner", "outer")
    _, checks = desk.call(ops.check_batches(desk.q))
    assert [check.id for check in checks] == ["outer"]
    desk.call(outer.close_part(desk.q.base))
    assert outer.counts() == {"added": 1, "lost": 1}
    assert outer.state() == "ended"


# What is shown


def test_batches_are_listed_by_when_they_are_looked_at(desk: Desk) -> None:
    for n, name in enumerate("abc"):
        opened(desk, name, token=f"{n:032}")
        desk.client.zadd(BatchKeys(desk.q).batches, {name: FUTURE - n})
    number, rows = desk.call(ops.list_batches(desk.q, 0, 2))
    assert (number, [row.id for row in rows]) == (3, ["c", "b"])
    assert rows[0] == desk.call(ops.read_batch(desk.q, "c"))
    assert [row.id for row in desk.call(ops.list_batches(desk.q, 2, 2))[1]] == ["a"]
    assert desk.call(ops.list_batches(desk.q, 3, 2)) == (3, [])


def test_the_counters_of_an_open_part_at_home_are_of_this_moment(desk: Desk) -> None:
    batch = opened(desk)
    held = batch.run("A", "x")
    batch.add("y", queue=far(desk))
    assert {row.base: row.counts for row in batch.row().parts} == {
        desk.q.base: (1, 0, 0, 0, 0, 0),
        far(desk).base: (0,) * 6,
    }
    finish(desk, held)
    assert {row.base: row.counts for row in batch.row().parts}[desk.q.base] == (1, 1, 0, 0, 0, 0)


# The outbox


def test_the_outbox_is_read_and_emptied(desk: Desk) -> None:
    batch = opened(desk)
    queues = [far(desk, f"Q{n}") for n in range(2, 7)]
    for queue in queues:
        batch.add(None, queue=queue)
    batch.cancel()
    found = messages(desk)
    assert [message.kind for message in found] == ["cancel"] * 5
    with desk.nothing_changes():
        assert messages(desk) == found
    wrong_bytes = [ops.OutboxMessage(found[0].topic, b"another", "cancel", ())]
    with desk.nothing_changes():
        desk.call(ops.drop_outbox(desk.q, wrong_bytes))
    for _ in range(2):
        desk.call(ops.drop_outbox(desk.q, found[:2]))
        assert messages(desk) == found[2:]
    desk.call(ops.drop_outbox(desk.q, found))
    assert messages(desk) == []
    assert not desk.client.exists(BatchKeys(desk.q).outbox)


# An empty database


def test_on_an_empty_database(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    told = (desk.q.base, "b", str(KEEP))
    replies = {
        "seal": desk.call(ops.seal_batch(desk.q, "b", TOKEN)),
        "cancel": desk.call(ops.cancel_batch(desk.q, "b", "", REASON)),
        "report": desk.call(ops.report_part(desk.q, "b", TOKEN, "q", 1, closed=True, counts="1 1 0 0 0 0")),
        "check": desk.call(ops.check_batches(desk.q)),
        "read": desk.call(ops.read_batch(desk.q, "b")),
        "list": desk.call(ops.list_batches(desk.q)),
        "open": desk.call(ops.open_part(desk.q, "b", TOKEN, "q")).status,
        "part": desk.call(ops.read_part(desk.q, TOKEN)),
        "take": desk.call(ops.take_outbox(desk.q)),
        "drop": desk.call(ops.drop_outbox(desk.q, [ops.OutboxMessage(b"a", b"b", "", ())])),
    }
    assert replies == {
        "seal": None,
        "cancel": "unknown",
        "report": "ok",
        "check": (False, []),
        "read": None,
        "list": (0, []),
        "open": "unknown",
        "part": (0, {}),
        "take": [],
        "drop": "ok",
    }
    assert desk.state() == {}
    desk.call(ops.close_part(desk.q, TOKEN, 1, *told))
    closed = part_record(desk, sealed=1, closed=1)
    assert desk.state() == {f":part:{TOKEN}": Expires(closed)}
    desk.call(ops.cancel_part(desk.q, OTHER, 1, *told, REASON))
    assert desk.state()[f":part:{OTHER}"] == Expires({**closed, "cancel_reason": REASON})


# What operators see


def test_a_queue_counts_the_batches_that_have_not_ended_apart(desk: Desk) -> None:
    def counted() -> tuple[int, int]:
        found = desk.call(ops.inspect(desk.q))
        return found.batches, found.open_batches

    assert counted() == (0, 0)
    batch, other = opened(desk), opened(desk, "other", token=OTHER)
    held = batch.run("A", "x")
    assert counted() == (2, 2)
    batch.seal()
    assert counted() == (2, 2), "a sealed batch has not ended"
    other.seal()
    assert (other.state(), counted()) == ("ended", (2, 1))
    desk.fail("A", held)
    assert (batch.state(), counted()) == ("ended", (2, 0))
    put_back(desk, held)
    assert (batch.state(), counted()) == ("sealed", (2, 1))
    desk.client.zadd(BatchKeys(desk.q).batches, {f"n{n}": PAST for n in range(500)})
    assert counted() == (502, 0), "those behind the first 500 are not looked at"
