from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import redis

from tests.ops.driver import FUTURE, PAST, Desk, Expires, claim, fields_of, policy, record, reference
from worqr import ops
from worqr.ops import Suspended, Wait

KIB = 1024
LATEST = 253402300799999
APPROVED = Wait("approved #1", "event", "approved", '{"type":"object"}')
NAP = Wait("sleep #1", "sleep", at_ms=FUTURE)


def workflow(desk: Desk, worker: str = "A", id: str = "x", **options: Any) -> int:
    """The claim of `worker` on a new workflow."""
    return desk.run(worker, id, workflow=True, **options)


def suspend(desk: Desk, held: int, *waits: Wait, worker: str = "A", progress: bool = False) -> Suspended:
    return desk.call(ops.suspend_task(desk.q, worker, held, waits, progress=progress))


def send(desk: Desk, name: str = "approved", value: bytes = b"json 1", *, id: str = "x", **options: Any) -> str:
    sent = desk.call(ops.send_event(desk.q, id, name, value, **options))
    return f"{sent.status} {sent.state}".strip()


def job_of(desk: Desk, id: str = "x") -> dict[str, str]:
    """The record of a job that does not run, without the times at which its waits began."""
    return untimed(desk.state()[f":job:{id}"])


def active(desk: Desk, id: str = "x") -> dict[str, str]:
    return untimed(desk.state()[f":active:{id}"])


def untimed(fields: dict[str, str]) -> dict[str, str]:
    """The fields of a record, with T for when waits began and ended, and without the numbers of waits."""
    found = {}
    for name, value in fields.items():
        words = value.split(" ")
        if name.startswith("at:wait:"):
            continue
        if name.startswith(("wait:", "end:")):
            assert words[1].isdigit()
            words[1] = "T"
        found[name] = " ".join(words)
    return found


def packed(*keys: str) -> str:
    """The field `open` of a record."""
    return msgspec.msgpack.encode(list(keys)).decode("latin-1")


def workflow_record(state: str, dispatched: Any, **fields: Any) -> dict[str, str]:
    return record("a", dispatched, state, life=dispatched, **fields)


def test_the_time_for_which_it_waits_is_no_time_for_which_it_fails(desk: Desk) -> None:
    held = workflow(desk)
    assert desk.retry("A", held, since_ms=7) == "given"
    [held] = desk.take("A", 1)
    assert active(desk)["failing_since"] == "7"
    suspend(desk, held, APPROVED)
    assert "failing_since" not in job_of(desk)


def test_the_claim_ends_and_the_job_is_suspended(desk: Desk) -> None:
    held = workflow(desk)
    call = ops.suspend_task(desk.q, "A", held, [APPROVED, NAP])
    with desk.listening(desk.q.job("x")) as heard:
        assert desk.send(call) == [b"suspended"]
    assert heard == [(":job:x", b"suspended")]
    state = desk.state()
    assert untimed(state.pop(":job:x")) == workflow_record(
        *("suspended", claim(1)),
        queued=held,
        started=1,
        run_at=FUTURE,
        earlier=1,
        entries=1,
        error_type="",
        error_message="approved, sleep #1",
        open=packed("approved #1", "sleep #1"),
        **{
            "wait:approved #1": 'event T -\napproved\n{"type":"object"}',
            "wait:sleep #1": f"sleep T {FUTURE}\n\n",
        },
    )
    assert state == {
        ":suspended": ["x"],
        ":workers": {"A": f"1 {held} 1 0"},
        ":policy:A": policy(),
        ":counts": Expires({"fence": str(held), "enqueued": "1", "claimed": "1", "suspended": "1"}),
    }
    assert desk.client.zscore(desk.q.suspended, "x") == FUTURE
    assert desk.call(ops.inspect(desk.q)).suspended == 1
    with desk.nothing_changes():
        assert suspend(desk, held, APPROVED).status == "mine"


def test_without_a_deadline_it_has_no_time(desk: Desk) -> None:
    held = workflow(desk)
    assert suspend(desk, held, APPROVED) == Suspended("suspended")
    assert desk.client.zscore(desk.q.suspended, "x") == LATEST
    assert desk.call(ops.promote_due(desk.q)).next_in_ms is None
    assert desk.start("A", 1).entries == []


def test_an_event_wakes_it_and_the_next_claim_binds_the_wait(desk: Desk) -> None:
    held = workflow(desk)
    suspend(desk, held, APPROVED, NAP)
    assert send(desk, value=b"json {}") == "woke"
    woken = job_of(desk)
    assert (woken["state"], woken["event:1:approved"], woken["events:approved"]) == ("waiting", "json {}", "0 1")
    assert ":suspended" not in desk.state()
    assert desk.state()["waiting"] == [reference("x")]
    [entry] = desk.start("A", 1).entries
    found = untimed({name: str(value) for name, value in fields_of(entry).items() if name != "open"})
    assert found["end:approved #1"] == "value T 1 json {}"
    assert found["wait:approved #1"] == "event T -\napproved\n"
    assert "event:1:approved" not in found
    assert active(desk)["open"] == packed("sleep #1")
    assert (found["events:approved"], found["saved_size"]) == ("1 1", str(KIB))


def test_ready_brings_what_is_there_and_keeps_the_claim(desk: Desk) -> None:
    held = workflow(desk)
    assert send(desk, value=b"bytes \x00\xff") == "stored"
    ready = suspend(desk, held, APPROVED, NAP)
    assert ready.status == "ready"
    [(name, value)] = ready.ends.items()
    assert (name, value.split(b" ", 3)[::3]) == ("end:approved #1", [b"value", b"bytes \x00\xff"])
    assert desk.call(ops.list_own_claims(desk.q, "A")) == [held]
    assert suspend(desk, held, APPROVED, NAP) == ready  # sent again
    assert suspend(desk, held, NAP).status == "suspended"


def test_a_passed_deadline_is_a_timeout_and_stays_one(desk: Desk) -> None:
    held = workflow(desk)
    wait = APPROVED._replace(at_ms=PAST)
    ready = suspend(desk, held, wait)
    assert ready.status == "ready"
    assert ready.ends["end:approved #1"].startswith(b"timeout ")
    assert send(desk) == "stored"
    assert suspend(desk, held, wait) == ready
    [_, fact] = suspend(desk, held, wait, Wait("approved #2", "event", "approved")).ends.values()
    assert fact.startswith(b"value ")  # what comes later is for a later wait


def test_when_the_time_has_come_it_is_put_in_line(desk: Desk) -> None:
    held = workflow(desk)
    suspend(desk, held, NAP)
    sooner(desk, "x")
    assert desk.call(ops.promote_due(desk.q)).number == 1
    [entry] = desk.start("A", 1).entries
    assert fields_of(entry)["end:sleep #1"].startswith("timeout ")


def sooner(desk: Desk, id: str) -> None:
    """All deadlines of a suspended job have passed."""
    key = desk.q.job(id)
    fields: Any = desk.client.hgetall(key)
    for name, value in fields.items():
        if name.startswith(b"wait:"):
            desk.client.hset(key, name, value.replace(str(FUTURE).encode(), str(PAST).encode()))
    desk.client.zadd(desk.q.suspended, {id: PAST})


def test_a_start_wakes_it_if_nobody_else_does(desk: Desk) -> None:
    held = workflow(desk)
    suspend(desk, held, NAP)
    sooner(desk, "x")
    assert len(desk.start("A", 1).entries) == 1
    assert ":suspended" not in desk.state()


def test_a_repeated_wait_keeps_its_deadline_and_another_one_is_forgotten(desk: Desk) -> None:
    held = workflow(desk)
    suspend(desk, held, APPROVED._replace(in_ms=10**9), NAP)
    before = desk.client.hget(desk.q.job("x"), "wait:approved #1")
    send(desk, "other")
    assert desk.client.hget(desk.q.job("x"), "state") == b"suspended"
    desk.client.zadd(desk.q.suspended, {"x": PAST})  # an early wake-up binds nothing
    [again] = desk.take("A", 1)
    assert not [name for name in active(desk) if name.startswith("end:")]
    assert suspend(desk, again, APPROVED._replace(in_ms=10**10)).status == "suspended"
    assert desk.client.hget(desk.q.job("x"), "wait:approved #1") == before
    assert (job_of(desk)["open"], job_of(desk)["earlier"]) == (packed("approved #1"), "2")
    assert "wait:sleep #1" not in job_of(desk)


def test_a_retry_keeps_the_deadline_and_no_event_ends_its_backoff(desk: Desk) -> None:
    held = workflow(desk)
    suspend(desk, held, APPROVED._replace(at_ms=FUTURE))
    desk.client.zadd(desk.q.suspended, {"x": PAST})
    [again] = desk.take("A", 1)
    desk.retry("A", again, delay_ms=10**9)
    assert send(desk) == "stored"
    assert job_of(desk)["state"] == "due"
    desk.client.zadd(desk.q.due, {"x": PAST})
    [entry] = desk.start("A", 1).entries
    assert fields_of(entry)["end:approved #1"].startswith("value ")


def test_children_end_a_wait_when_all_have_ended(desk: Desk) -> None:
    held = workflow(desk)
    both = Wait("gather #1", "children", about="pack 1\npack 2")
    desk.client.hset(desk.q.active("x"), "end:pack 1", "finished 1 0 none ")
    assert suspend(desk, held, both).status == "suspended"
    desk.client.hset(desk.q.job("x"), "end:pack 2", "finished 1 0 none ")
    desk.client.zadd(desk.q.suspended, {"x": PAST})
    [entry] = desk.start("A", 1).entries
    assert fields_of(entry)["end:gather #1"].startswith("ended ")


def test_the_end_of_a_life_ends_all_waits(desk: Desk) -> None:
    held = workflow(desk, lifetime=str(10**9))
    lives_until = int(desk.state()[":active:x"]["lives_until"])
    assert 0 <= lives_until - desk.now() <= 10**9
    suspend(desk, held, APPROVED)
    assert desk.client.zscore(desk.q.suspended, "x") == lives_until
    desk.client.hset(desk.q.job("x"), "lives_until", PAST)
    desk.client.zadd(desk.q.suspended, {"x": PAST})
    [entry] = desk.start("A", 1).entries
    assert fields_of(entry)["end:approved #1"].startswith("lifetime ")


def test_a_task_that_waits_becomes_a_job_with_a_life(desk: Desk) -> None:
    [raw] = desk.hold("A", b"a")
    assert suspend(desk, raw, APPROVED).status == "suspended"
    found = job_of(desk, f"@{raw}")
    assert (found["life"], found["state"], found["task"]) == (str(raw), "suspended", "a")
    assert send(desk, id=f"@{raw}") == "woke"


def test_a_plain_job_gets_its_life_at_its_first_suspension(desk: Desk) -> None:
    held = desk.run("A", "x")
    assert send(desk) == "none plain"
    suspend(desk, held, APPROVED)
    assert job_of(desk)["life"] == str(claim(1))
    assert send(desk) == "woke"


@pytest.mark.parametrize("task", [b"a", b"other"])
def test_what_was_blocked_by_a_run_that_is_suspended_runs_if_its_payload_is_another(desk: Desk, task: bytes) -> None:
    held = desk.run("A", "x")
    assert desk.dispatch("x", task).outcome == "blocked"
    assert suspend(desk, held, APPROVED).status == "suspended"
    if task == b"a":
        assert job_of(desk)["state"] == "suspended"
        assert send(desk) == "woke"
    else:
        assert "open" not in (found := job_of(desk))
        assert (found["state"], found["life"]) == ("waiting", found["last"])
    [again] = desk.take("A", 1)
    assert again > held
    assert active(desk)["task"] == task.decode()


@pytest.mark.parametrize("how", ["other", "stranger", "swept", "stopped", "finished", "empty"])
def test_only_the_run_that_holds_the_claim_suspends(desk: Desk, how: str) -> None:
    held = workflow(desk)
    desk.enter("B")
    match how:
        case "swept":
            desk.call(ops.fail_worker(desk.q, "A"))
        case "stopped":
            desk.call(ops.stop_tasks(desk.q, "A", [held]))
        case "finished":
            desk.call(ops.finish_tasks(desk.q, "A", [held]))
        case "empty":
            desk.wipe()
    if how in ("swept", "stopped"):
        desk.take("B", 1)
    worker = {"other": "B", "stranger": "nobody"}.get(how, "A")
    status = "lost" if how in ("stranger", "swept", "empty") else "mine"
    with desk.nothing_changes():
        assert suspend(desk, held, APPROVED, worker=worker).status == status
        assert desk.call(ops.refuse_event(desk.q, worker, held, "approved #1")) == "lost"


def test_a_cancel_and_a_deleted_queue_come_first(desk: Desk) -> None:
    held = workflow(desk)
    send(desk)
    desk.call(ops.cancel_job(desk.q, "x", "why"))
    assert suspend(desk, held, APPROVED).status == "cancelled"
    held = workflow(desk)
    send(desk)
    desk.call(ops.delete_queue(desk.q))
    assert suspend(desk, held, APPROVED).status == "dropped"
    assert set(desk.state()) == {":workers", ":policy:A", ":counts"}


def test_a_claim_without_a_record_is_gone(desk: Desk) -> None:
    held = workflow(desk)
    desk.client.delete(desk.q.active("x"))
    assert suspend(desk, held, APPROVED).status == "gone"
    assert set(desk.state()) == {":workers", ":policy:A", ":counts"}


@pytest.mark.parametrize(
    "waits",
    [
        [],
        [Wait(f"w{n}", "sleep", in_ms=1) for n in range(1001)],
        [Wait("", "sleep", in_ms=1)],
        [Wait("two\nlines", "sleep", in_ms=1)],
        [Wait("w", "sleep")],
        [Wait("w", "event")],
        [Wait("w", "event", "two\nlines")],
        [Wait("w", "children")],
        [Wait("w", "sleep", in_ms=-1)],
        [Wait("w", "sleep", in_ms=10**15)],
        [Wait("w", "else", "n")],  # type: ignore[arg-type]
    ],
)
def test_what_is_no_wait_is_an_error_that_changes_nothing(desk: Desk, waits: Sequence[Wait]) -> None:
    held = workflow(desk)
    with desk.nothing_changes(), pytest.raises(redis.ResponseError, match="wait"):
        suspend(desk, held, *waits)


def test_a_run_cannot_wait_for_more_than_a_job_may_keep(desk: Desk) -> None:
    held = workflow(desk)
    with desk.nothing_happens():
        assert suspend(desk, held, APPROVED._replace(about="x" * 256 * KIB)).status == "full"
    desk.client.hset(desk.q.active("x"), "saved_size", 2 * KIB * KIB + 1)
    with desk.nothing_happens():
        assert suspend(desk, held, APPROVED).status == "full"


def test_counters_begin_anew_with_progress(desk: Desk) -> None:
    held = workflow(desk)
    desk.retry("A", held)
    [held] = desk.take("A", 1)
    desk.call(ops.fail_worker(desk.q, "A"))
    desk.enter("A")
    [held] = desk.take("A", 1)
    assert (active(desk)["failures"], active(desk)["stalls"]) == ("1", "1")
    suspend(desk, held, APPROVED)
    assert (job_of(desk)["failures"], job_of(desk)["earlier"]) == ("1", "1")
    desk.client.zadd(desk.q.suspended, {"x": PAST})
    [held] = desk.take("A", 1)
    suspend(desk, held, APPROVED, progress=True)  # as before: no progress
    assert (job_of(desk)["failures"], job_of(desk)["earlier"]) == ("1", "2")
    desk.client.zadd(desk.q.suspended, {"x": PAST})
    [held] = desk.take("A", 1)
    suspend(desk, held, NAP, progress=True)
    found = job_of(desk)
    assert not {"failures", "stalls", "timeouts", "suspect"} & found.keys()
    assert found["earlier"] == "5"  # two that were counted, three suspensions


def test_a_refused_event_is_set_aside_and_the_wait_is_open_again(desk: Desk) -> None:
    held = workflow(desk)
    send(desk, value=b'json {"bx":1}')
    suspend(desk, held, APPROVED)
    refuse = ops.refuse_event(desk.q, "A", held, "approved #1")
    assert desk.call(refuse) == "ok"
    found = active(desk)
    assert (found["refused:approved #1"], found["open"]) == ('json {"bx":1}', packed("approved #1"))
    assert "end:approved #1" not in found
    with desk.nothing_changes():
        assert desk.call(refuse) == "ok"
        assert desk.call(ops.refuse_event(desk.q, "A", held, "unknown")) == "ok"
    assert suspend(desk, held, APPROVED).status == "suspended"
    assert send(desk) == "woke"


def test_of_refused_events_the_last_one_is_kept_and_counted(desk: Desk) -> None:
    held = workflow(desk)
    for n in range(3):
        send(desk, value=b"json %d" % n)
        assert suspend(desk, held, APPROVED).status == "ready"
        desk.call(ops.refuse_event(desk.q, "A", held, APPROVED.key))
    found = active(desk)
    assert (found[f"refused:{APPROVED.key}"], found["saved_size"]) == ("json 2", str(KIB))


def test_it_holds_no_slot_of_a_limit_nor_of_a_lane(desk: Desk) -> None:
    desk.call(ops.set_limits(desk.q, "1"))
    held = workflow(desk)
    desk.dispatch("y")
    assert desk.start("A", 1).status == "limited"
    suspend(desk, held, APPROVED)
    assert len(desk.start("A", 1).entries) == 1


def test_in_its_lane_it_is_found_again(desk: Desk) -> None:
    held = workflow(desk, lane="gold")
    suspend(desk, held, APPROVED)
    assert not [key for key in desk.state() if key.startswith(":lane")]
    assert send(desk) == "woke"
    [entry] = desk.start("A", 1).entries
    assert fields_of(entry)["lane"] == "gold"


def test_a_strict_lane_waits_for_it(desk: Desk) -> None:
    rules = msgspec.msgpack.encode({"strict": True})
    desk.call(ops.start_work(desk.q, "A", max_stalls=3, keep_failed=9, last=0, lanes=rules))
    desk.dispatch("x", workflow=True, lane="gold")
    desk.dispatch("y", lane="gold")
    [held] = desk.take("A", 1)
    suspend(desk, held, APPROVED)
    assert desk.start("A", 1).entries == []
    send(desk)
    [entry] = desk.start("A", 1).entries
    assert fields_of(entry)["id"] == "x"
    suspend(desk, claim_of(desk, "x"), NAP)
    assert desk.start("A", 1).entries == []
    desk.call(ops.cancel_job(desk.q, "x", "why"))
    [entry] = desk.start("A", 1).entries
    assert fields_of(entry)["id"] == "y"


def claim_of(desk: Desk, id: str) -> int:
    return int(desk.state()[f":active:{id}"]["claim"])


def test_a_wrong_type_is_an_error_before_the_first_write(desk: Desk) -> None:
    held = workflow(desk)
    desk.client.set(desk.q.suspended, "foreign")
    with desk.nothing_changes(), pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        suspend(desk, held, APPROVED)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("open", b"\xc1"),
        ("open", msgspec.msgpack.encode([1, {}, None])),
        ("open", msgspec.msgpack.encode({"a": 1})),
        ("open", msgspec.msgpack.encode(["approved #1", "unknown"])),
        ("wait:approved #1", b"nonsense"),
        ("wait:approved #1", b"event 1 -5\napproved\n"),
        ("events:approved", b"9 1"),
        ("events:approved", b"0 99999999999999"),
        ("events:approved", b"-1"),
        ("entries", b"x"),
        ("lives_until", b"1e999"),
        ("saved_size", b"-7"),
    ],
)
def test_odd_values_of_others_cost_only_themselves(desk: Desk, field: str, value: bytes) -> None:
    held = workflow(desk)
    suspend(desk, held, APPROVED)
    desk.client.hset(desk.q.job("x"), field, value)
    assert send(desk, again=True) in ("woke", "stored", "full")
    desk.client.zadd(desk.q.suspended, {"x": PAST})
    [entry] = desk.start("A", 1).entries
    assert entry[-1] == b"x"
    again = suspend(desk, claim_of(desk, "x"), APPROVED, Wait("approved #2", "event", "approved", in_ms=5))
    assert again.status in ("ready", "suspended")


def test_what_belongs_to_its_life_survives_every_way_back(desk: Desk) -> None:
    held = workflow(desk)
    desk.call(ops.save_state(desk.q, "A", held, 0, "charge", b"json 1"))
    send(desk, "early", b"json 2")
    suspend(desk, held, APPROVED)
    send(desk)
    [held] = desk.take("A", 1)
    kept = {name: value for name, value in active(desk).items() if ":" in name or name in ("life", "saved_size")}
    assert {"step:charge", "event:1:early", "end:approved #1", "wait:approved #1", "life"} <= kept.keys()
    desk.call(ops.stop_tasks(desk.q, "A", [held]))
    assert kept.items() <= job_of(desk).items()
    [held] = desk.take("A", 1)
    desk.fail("A", held)
    assert kept.items() <= untimed(desk.state()[f":aside:{held}"]).items()
    assert send(desk) == "none failed"
    assert desk.call(ops.retry_aside(desk.q, "failed", [held])) == 1
    assert kept.items() <= job_of(desk).items()
    assert job_of(desk)["started"] == "1"
    [held] = desk.take("A", 1)
    desk.call(ops.finish_tasks(desk.q, "A", [held]))
    assert set(desk.state()) == {":workers", ":policy:A", ":counts"}


@pytest.mark.parametrize("how", ["cancel_job", "cancel_all", "delete_queue"])
def test_a_suspended_job_is_cancelled_and_deleted_as_others_are(desk: Desk, how: str) -> None:
    held = workflow(desk)
    suspend(desk, held, APPROVED)
    match how:
        case "cancel_job":
            assert desk.call(ops.cancel_job(desk.q, "x", "why")).waiting == 1
        case "cancel_all":
            cancelled = desk.call(ops.cancel_all(desk.q))
            assert cancelled is not None
            assert cancelled.waiting == 1
        case _:
            assert desk.call(ops.delete_queue(desk.q)) == 1
    assert send(desk) == "none gone"
    while desk.send(ops.purge_queue(desk.q)) == [b"more"]:
        pass
    assert set(desk.state()) == {":workers", ":policy:A", ":counts"}


def test_a_lane_is_cancelled_with_its_suspended_jobs(desk: Desk) -> None:
    held = workflow(desk, lane="gold")
    suspend(desk, held, APPROVED)
    assert desk.call(ops.cancel_lane(desk.q, "gold")).waiting == 1
    assert ":suspended" not in desk.state()


def test_suspended_jobs_are_listed_by_their_time(desk: Desk) -> None:
    for name, wait in (("x", APPROVED), ("y", NAP), ("z", APPROVED)):
        suspend(desk, workflow(desk, id=name), wait)
    page = desk.call(ops.list_jobs(desk.q, "suspended", 2))
    assert [each.id for _, each in page.positions if each] == ["y", "x"]
    assert desk.call(ops.job_status(desk.q, "y", 0)).state == "suspended"
    assert desk.call(ops.read_result(desk.q, "y", 0)).status == "never"


def test_it_goes_on_when_memory_is_full(own_desk: Desk) -> None:
    desk = own_desk
    held = workflow(desk)
    desk.client.config_set("maxmemory", 1)
    assert suspend(desk, held, APPROVED).status == "suspended"
    assert send(desk) == "woke"
    desk.client.config_set("maxmemory", 0)
