from __future__ import annotations

import msgspec
import pytest
import redis

from tests.ops.driver import (
    ALL_BYTES,
    BOOM,
    FUTURE,
    PAST,
    Desk,
    Expires,
    aside,
    claim,
    digest,
    grown,
    policy,
    record,
    reference,
)
from worqr import ops
from worqr.keys import MARKER, QueueKeys


@pytest.mark.parametrize(("undecodable", "kind", "failures"), [(False, "failed", 1), (True, "broken", 0)])
def test_sets_the_task_aside_with_what_is_known_of_it(desk: Desk, undecodable: bool, kind: str, failures: int) -> None:
    [held] = desk.hold("A", b"a")
    assert desk.fail("A", held, undecodable=undecodable) == "aside"
    assert desk.state() == {
        f":{kind}": [str(held)],
        f":aside:{held}": aside("a", f"@{held}", reason=kind, failures=failures),
        ":aside": {f"@{held}": str(held)},
        ":workers": {"A": f"1 {claim(1)} 1 0"},
        ":policy:A": policy(),
        ":counts": Expires({"fence": str(claim(1)), "enqueued": "1", "claimed": "1", kind: "1"}),
    }


def test_a_job_takes_its_id_and_counters_along_and_leaves_nothing_else(desk: Desk) -> None:
    desk.stall(b"a", times=1)
    desk.enter("A")
    desk.retry("A", desk.take("A", 1)[0])
    [held] = desk.take("A", 1)
    desk.fail("A", held)
    state = desk.state()
    kept = {"twin": digest("a"), "first": claim(1), "last": claim(1), "started": 1}
    assert state[f":aside:{held}"] == aside("a", f"@{claim(1)}", reason="failed", failures=2, stalls=1, **kept)
    assert state[":aside"] == {f"@{claim(1)}": str(held)}
    assert set(state) == {":failed", ":aside", f":aside:{held}", ":workers", ":policy:A", ":counts"}


@pytest.mark.parametrize("task", [b"", bytes(range(255)), MARKER + b"\xff", ALL_BYTES])
def test_keeps_the_payload_byte_for_byte(desk: Desk, task: bytes) -> None:
    task = grown(task)
    [held] = desk.hold("A", task)
    desk.fail("A", held, undecodable=True)
    assert desk.client.hget(desk.q.dead_letter(held), "task") == task


def test_the_time_is_the_servers(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.fail("A", held)
    seconds, micros = desk.client.time()
    at = int(desk.client.hget(desk.q.dead_letter(held), "at") or 0)
    assert 0 <= seconds * 1000 + micros // 1000 - at < 60_000
    assert desk.client.zscore(desk.q.failed, str(held)) == at


def test_failed_ones_are_capped_and_the_oldest_go(desk: Desk) -> None:
    desk.enter("A", keep_failed=2)
    desk.put(b"a", b"b", b"c")
    held = desk.take("A", 3)
    for one in held:
        desk.fail("A", one)
    state = desk.state()
    assert state[":failed"] == [str(one) for one in held[1:]]
    assert [name for name in state if name.startswith(":aside:")] == [f":aside:{one}" for one in held[1:]]
    assert desk.counts()["failed"] == 3


def test_a_smaller_cap_is_reached_in_steps(desk: Desk) -> None:
    held = desk.hold("A", *[b"a"] * 153)
    for one in held[:151]:
        desk.fail("A", one)
    desk.enter("A", keep_failed=3)
    desk.fail("A", held[151])
    assert len(desk.state()[":failed"]) == 52
    desk.fail("A", held[152])
    state = desk.state()
    assert state[":failed"] == [str(one) for one in held[150:]]
    assert len([name for name in state if name.startswith(":aside:")]) == 3


def test_keep_0_keeps_none(desk: Desk) -> None:
    one, two = desk.hold("A", b"a", b"b")
    desk.fail("A", one)
    desk.enter("A", keep_failed=0)
    desk.fail("A", two)
    assert set(desk.state()) == {":workers", ":policy:A", ":counts"}
    assert desk.counts()["failed"] == 2


def test_undecodable_ones_are_not_capped(desk: Desk) -> None:
    held = desk.hold("A", b"a", b"b", b"c")
    desk.enter("A", keep_failed=0)
    for one in held:
        desk.fail("A", one, undecodable=True)
    assert desk.state()[":broken"] == [str(one) for one in held]


def test_a_resend_answers_mine_and_changes_nothing(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.fail("A", held)
    with desk.nothing_changes():
        assert desk.fail("A", held) == "mine"


def test_anothers_claim_is_not_touched(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.enter("B")
    with desk.nothing_changes():
        assert desk.fail("B", held) == "mine"
        assert desk.fail("stranger", held) == "lost"


def test_a_swept_owner_has_lost_it(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.call(ops.fail_worker(desk.q, "A"))
    with desk.nothing_changes():
        assert desk.fail("A", held) == "lost"


def test_on_an_empty_database_nothing_is_made(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert desk.fail("A", claim(1)) == "lost"
    assert desk.state() == {}


def test_a_mark_that_stands_ends_it_as_cancelled(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.call(ops.cancel_task(desk.q, b"a"))
    assert desk.fail("A", held) == "cancelled"
    assert set(desk.state()) == {":workers", ":policy:A", ":counts"}


def test_a_claim_with_nothing_under_it_is_gone_and_leaves_nothing(desk: Desk) -> None:
    raw, held = desk.hold("A", b"a", b"b")
    desk.retry("A", held)
    [job] = desk.take("A", 1)
    desk.client.delete(desk.q.claim(raw), desk.q.active(f"@{held}"))
    assert [desk.fail("A", raw), desk.fail("A", job)] == ["gone", "gone"]
    assert not any(name.startswith((":claim", ":active", ":aside")) for name in desk.state())


def test_tells_a_hungry_worker_of_a_suspect(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.stall(b"suspect")
    desk.client.sadd(desk.q.hungry, "B")
    with desk.listening(desk.q.wake_channel("B")) as heard:
        desk.fail("A", held)
    assert heard == [(":wake:B", b"1")]


@pytest.mark.parametrize("undecodable", [False, True])
def test_a_list_of_a_foreign_type_leaves_the_claim_as_it_is(desk: Desk, undecodable: bool) -> None:
    [held] = desk.hold("A", b"a")
    desk.client.set(desk.q.undecodable if undecodable else desk.q.failed, "foreign")
    with desk.nothing_changes(), pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        desk.fail("A", held, undecodable=undecodable)


# The failure handler


def failure_of(desk: Desk, held: int) -> dict[str, str]:
    """What the failure handler's job tells of the claim, without the time."""
    packed = desk.client.hget(f"{desk.q.base}-fail:job:@f{held}", "failed")
    facts: dict[str, str | int] = msgspec.msgpack.decode(packed or b"")
    assert 0 <= desk.now() - int(facts.pop("at")) < 60_000
    return {name: str(value) for name, value in facts.items()}


@pytest.mark.parametrize(("undecodable", "kind", "failures"), [(False, "failed", 1), (True, "broken", 0)])
def test_gets_its_job_in_the_same_step_from_the_very_first_failure_on(
    desk: Desk, undecodable: bool, kind: str, failures: int
) -> None:
    [held] = desk.hold("A", b"a\x00\xff")
    desk.enter("A", on_failure=True)
    failed = QueueKeys(desk.prefix, "Q1", failures=True)
    desk.client.sadd(failed.hungry, "B")
    before = desk.now()
    with desk.listening(failed.wake_channel("B"), failed.job(f"@f{held}")) as heard:
        assert desk.fail("A", held, undecodable=undecodable) == "aside"
    assert heard == [(f"-fail:job:@f{held}", b"waiting"), ("-fail:wake:B", b"1")]
    known = aside("a\x00\xff", f"@{held}", reason=kind, failures=failures)
    told = failure_of(desk, held)
    assert told == {name: value for name, value in known.items() if name != "task"}
    state = desk.state()
    job = state.pop(f"-fail:job:@f{held}")
    number = int(job["first"])
    assert before * 1000 <= number <= (desk.now() + 1) * 1000
    assert before <= int(job.pop("run_at")) <= desk.now()
    assert job.pop("failed")
    assert job == record("a\x00\xff", number)
    assert state == {
        "-fail": [reference(f"@f{held}")],
        "-fail:counts": Expires({"fence": str(number), "enqueued": "1"}),
        f":{kind}": [str(held)],
        f":aside:{held}": known,
        ":aside": {f"@{held}": str(held)},
        ":workers": {"A": f"1 {claim(1)} 1 0"},
        ":policy:A": policy(on_failure=True),
        ":counts": Expires({"fence": str(claim(1)), "enqueued": "1", "claimed": "1", kind: "1"}),
    }


def test_also_when_no_record_is_kept(desk: Desk) -> None:
    held = desk.run("A", "x", b"task", meta='{"a":"b"}')
    desk.enter("A", on_failure=True, keep_failed=0)
    desk.fail("A", held)
    told = failure_of(desk, held)
    assert (told["id"], told["meta"], told["worker"], told["failures"]) == ("x", '{"a":"b"}', "A", "1")
    assert desk.client.hget(f"{desk.q.base}-fail:job:@f{held}", "task") == b"task"
    assert not any(name.startswith((":aside", ":failed", ":active", ":claim")) for name in desk.state())


def test_gets_one_job_for_each_in_their_order(desk: Desk) -> None:
    one, two = desk.hold("A", b"a", b"b")
    desk.enter("A", on_failure=True)
    desk.fail("A", two)
    desk.fail("A", one)
    with desk.nothing_changes():
        assert desk.fail("A", one) == "mine"
    assert desk.state()["-fail"] == [reference(f"@f{one}"), reference(f"@f{two}")]


@pytest.mark.parametrize("how", ["no handler", "cancelled", "gone"])
def test_gets_none_where_there_is_nothing_to_handle(desk: Desk, how: str) -> None:
    [held] = desk.hold("A", b"a")
    desk.enter("A", on_failure=how != "no handler")
    if how == "cancelled":
        desk.call(ops.cancel_task(desk.q, b"a"))
    if how == "gone":
        desk.client.delete(desk.q.claim(held))
    desk.fail("A", held)
    assert not any(name.startswith("-fail") for name in desk.state())


# Jobs


def test_a_job_leaves_a_failed_result_if_one_is_kept(desk: Desk) -> None:
    held = desk.run("A", "x", fields={"result_ttl": "60000"})
    with desk.listening(desk.q.job("x")) as heard:
        desk.fail("A", held)
    assert heard == [(":job:x", b"failed")]
    why = {"error_type": BOOM.type, "error_message": BOOM.message, "error_traceback": BOOM.traceback}
    assert desk.state()[":result:x"] == Expires(
        {"outcome": "failed", "first": str(held - 1), "last": str(held - 1), "failures": "1", **why}
    )
    assert 50_000 < desk.client.pttl(desk.q.result("x")) <= 60_000
    assert desk.state()[f":aside:{held}"] == aside(
        "a", "x", reason="failed", failures=1, first=held - 1, last=held - 1, run_at=PAST, result_ttl=60000
    )


def test_its_blocked_twin_is_next_in_line(desk: Desk) -> None:
    held = desk.run("A", "x", b"old")
    twin = desk.dispatch("x", b"new").number
    desk.client.sadd(desk.q.hungry, "B")
    with desk.listening(desk.q.wake_channel("B")) as heard:
        desk.fail("A", held)
    assert heard == [(":wake:B", b"1")]
    assert desk.state()[":job:x"] == record("new", twin, run_at=PAST)
    assert desk.client.hget(desk.q.dead_letter(held), "task") == b"old"


def test_all_that_was_known_of_it_is_set_aside_with_how_far_it_came(desk: Desk) -> None:
    said = {"fields": {"timeout": "5"}, "meta": "{}", "expires_at": str(FUTURE), "scheduled_for": "7"}
    held = desk.run("A", "x", **said)
    desk.call(ops.note_progress(desk.q, "A", [(held, 0.5, "half")]))
    desk.fail("A", held)
    kept = {"first": held - 1, "last": held - 1, "run_at": PAST, "timeout": 5, "meta": "{}", "scheduled_for": 7}
    kept |= {"progress": 0.5, "message": "half"}
    known = aside("a", "x", reason="failed", failures=1, expires_at=FUTURE, **kept)
    assert desk.state()[f":aside:{held}"] == known


def test_the_same_id_set_aside_again_knows_the_one_before(desk: Desk) -> None:
    first = desk.run("A", "x")
    desk.fail("A", first)
    second = desk.run("A", "x")
    desk.fail("A", second, undecodable=True)
    state = desk.state()
    assert state[":aside"] == {"x": str(second)}
    assert (state[f":aside:{second}"]["older"], state[f":aside:{first}"]["newer"]) == (str(first), str(second))
    assert (state[":failed"], state[":broken"]) == ([str(first)], [str(second)])
