"""The tries that a record keeps: of each attempt that did not end well, when, for how long, on which worker, and why."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.ops.driver import BOOM, FUTURE, PAST, Desk, fields_of
from tests.support.patience import PATIENCE
from worqr import ops
from worqr.records import RemoteError


def tried(desk: Desk, key: str) -> list[tuple[str, str, str, str]]:
    """The worker, the reason and the error of each; their times are those of this test."""
    found = desk.tries(key)
    for at, ms, *_ in found:
        assert abs(at - desk.now()) < PATIENCE * 1000
        assert ms >= 0
    return [(worker, why, kind, message) for _, _, worker, why, kind, message in found]


def one(why: str, worker: str = "A", error: RemoteError = BOOM) -> tuple[str, str, str, str]:
    return worker, why, error.type, error.message


STALLED = RemoteError("Stalled", "its worker died while it ran", "")


def test_each_way_back_adds_one_and_what_is_no_error_adds_none(desk: Desk) -> None:
    held = desk.run("A", "x")
    desk.retry("A", held)
    [held] = desk.take("A", 1)
    desk.retry("A", held, counter="timeouts")
    [held] = desk.take("A", 1)
    desk.retry("A", held, counter="stalls")
    [held] = desk.take("A", 1)
    desk.retry("A", held, counter="")
    [held] = desk.take("A", 1)
    known = [one("failed"), one("timeout"), one("stalled"), one("retry")]
    assert tried(desk, desk.q.active("x")) == known
    desk.call(ops.stop_tasks(desk.q, "A", [held]))
    desk.take("A", 1)
    desk.call(ops.stop_work(desk.q, "A"))
    assert tried(desk, desk.q.job("x")) == known
    desk.enter("B")
    desk.take("B", 1)
    desk.call(ops.fail_worker(desk.q, "B"))
    assert tried(desk, desk.q.job("x")) == [*known, one("stalled", "B", STALLED)]


def test_of_a_raw_task_too_which_becomes_a_job_by_it(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.retry("A", held)
    assert tried(desk, desk.q.job(f"@{held}")) == [one("failed")]


def test_none_of_a_raw_task_that_stays_one(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.retry("A", held, counter="")
    assert desk.state()["waiting"] == [b"a"]


def test_a_try_says_how_long_it_took(desk: Desk) -> None:
    held = desk.run("A", "x")
    began = desk.now() - 5_000
    earlier = began * 1000  # of a claim that was made five seconds ago
    client, q = desk.client, desk.q
    client.rename(q.claim(held), q.claim(earlier))
    client.srem(q.claims("A"), held)
    client.sadd(q.claims("A"), earlier)
    client.hset(q.active("x"), "claim", earlier)
    desk.retry("A", earlier)
    [[at, ms, *_]] = desk.tries(q.job("x"))
    assert ms >= 5_000
    assert at - ms == began


@pytest.mark.parametrize("undecodable", [False, True])
def test_the_last_one_is_in_the_dead_letter_record(desk: Desk, undecodable: bool) -> None:
    held = desk.run("A", "x")
    desk.retry("A", held)
    [held] = desk.take("A", 1)
    desk.fail("A", held, undecodable=undecodable)
    assert tried(desk, desk.q.dead_letter(held)) == [one("failed"), one("broken" if undecodable else "failed")]


@pytest.mark.parametrize(("counter", "why"), [("failures", "failed"), ("timeouts", "timeout"), ("stalls", "stalled")])
def test_at_the_limit_too(desk: Desk, counter: Any, why: str) -> None:
    [held] = desk.hold("A", b"a")
    assert desk.retry("A", held, counter=counter, limit=1) == "aside"
    assert tried(desk, desk.q.dead_letter(held)) == [one(why)]


def test_a_job_that_expired_was_not_tried(desk: Desk) -> None:
    desk.enter("A")
    desk.dispatch("x", expires="0")
    [entry] = desk.start("A", 1).entries
    assert entry is None
    [held] = desk.client.zrange(desk.q.failed, 0, -1)
    assert desk.tries(desk.q.dead_letter(int(held))) == []
    assert desk.counts()["expired"] == desk.counts()["failed"] == 1


def test_the_last_ten_are_kept_and_long_texts_are_cut(desk: Desk) -> None:
    held = desk.run("A", "x")
    for n in range(12):
        error = RemoteError(f"Error{n}", "\N{SNOWMAN}" * 1000, "")
        desk.call(ops.retry_task(desk.q, "A", held, error, counter="failures", limit=99))
        [held] = desk.take("A", 1)
    known = tried(desk, desk.q.active("x"))
    assert [kind for _, _, kind, _ in known] == [f"Error{n}" for n in range(2, 12)]
    assert {message for *_, message in known} == {"\N{SNOWMAN}" * 166}  # 500 bytes, without a part of a character
    assert len(desk.client.hget(desk.q.active("x"), "tries") or b"") <= 8192


def test_they_take_8_kib_at_most(desk: Desk) -> None:
    held = desk.run("A", "x")
    for n in range(11):
        error = RemoteError(f"{n:02}" + "E" * 1000, "m" * 1000, "")
        desk.call(ops.retry_task(desk.q, "A", held, error, counter="failures", limit=99))
        [held] = desk.take("A", 1)
    known = desk.tries(desk.q.active("x"))
    assert len(desk.client.hget(desk.q.active("x"), "tries") or b"") <= 8192
    assert [each[4][:2] for each in known] == ["04", "05", "06", "07", "08", "09", "10"]


@pytest.mark.parametrize(
    "foreign", [b"", b"\xc1", b"no msgpack", msgspec.msgpack.encode({"a": 1}), msgspec.msgpack.encode(7), b"\xdc\xff"]
)
def test_what_another_program_wrote_there_is_replaced(desk: Desk, foreign: bytes) -> None:
    held = desk.run("A", "x")
    desk.client.hset(desk.q.active("x"), "tries", foreign)
    assert desk.retry("A", held) == "given"
    assert tried(desk, desk.q.job("x")) == [one("failed")]


def test_a_worker_is_not_sent_them_and_gets_everything_else(desk: Desk) -> None:
    held = desk.run("A", "x", meta='{"a":"b"}', fields={"timeout": "5"})
    desk.retry("A", held)
    started = desk.start("A", 1)
    stored = {name.decode() for name in desk.client.hkeys(desk.q.active("x"))}
    assert set(fields_of(started.entries[0])) == (stored | {"id"}) - {"tries"}
    again = desk.call(ops.start_tasks(desk.q, "A", desk.starts["A"], 1))
    assert again.entries == started.entries


def test_an_event_of_a_start_has_the_id_of_a_job_that_has_them(desk: Desk) -> None:
    held = desk.run("A", "x")
    desk.retry("A", held)
    with desk.listening(desk.q.events_channel, desk.q.event_ids_channel) as heard:
        desk.take("A", 1)
    assert heard == [(":event_ids", b"claimed 1\nx"), (":events", b"claimed 1")]


def test_a_resend_adds_none(desk: Desk) -> None:
    held = desk.run("A", "x")
    desk.retry("A", held)
    before = desk.tries(desk.q.job("x"))
    assert desk.retry("A", held) == "mine"
    assert desk.tries(desk.q.job("x")) == before


def test_they_go_with_the_counters(desk: Desk) -> None:
    held = desk.run("A", "x")
    desk.retry("A", held, delay_ms=0, run_at_ms=FUTURE)
    desk.dispatch("x", data=False, run_at=FUTURE)
    assert tried(desk, desk.q.job("x")) == [one("failed")]
    desk.dispatch("x", b"new", run_at=PAST)
    assert desk.tries(desk.q.job("x")) == []


@pytest.mark.parametrize("resets", [True, False])
def test_a_blocked_dispatch_that_resets_the_counters_removes_them(desk: Desk, resets: bool) -> None:
    held = desk.run("A", "x")
    desk.retry("A", held)
    [held] = desk.take("A", 1)
    desk.dispatch("x", b"twin", counts=resets)
    desk.retry("A", held)
    assert tried(desk, desk.q.job("x")) == ([] if resets else [one("failed")] * 2)


def test_a_retry_from_the_dead_letter_queue_begins_anew(desk: Desk) -> None:
    held = desk.run("A", "x")
    desk.fail("A", held)
    desk.call(ops.retry_aside(desk.q, "failed", [held]))
    assert desk.tries(desk.q.job("x")) == []


def test_a_failure_handler_does_not_get_them(desk: Desk) -> None:
    held = desk.run("A", "x")
    desk.enter("A", on_failure=True)
    desk.fail("A", held)
    [key] = [key for key in desk.all_keys() if b"-fail:job:" in key]
    assert "tries" not in msgspec.msgpack.decode(desk.client.hget(key, "failed") or b"")


def test_timeouts_are_counted_beside_what_becomes_of_the_task(desk: Desk) -> None:
    held = desk.run("A", "x")
    with desk.listening(desk.q.events_channel) as heard:
        desk.retry("A", held, counter="timeouts")
        [held] = desk.take("A", 1)
        desk.retry("A", held, counter="timeouts", limit=1)
    assert [message for _, message in heard] == [b"retried 1", b"claimed 1", b"failed 1"]
    counts = desk.counts()
    assert (counts["timed_out"], counts["retried"], counts["failed"]) == (2, 1, 1)


def test_a_timeout_of_a_cancelled_run_is_not_counted(desk: Desk) -> None:
    held = desk.run("A", "x")
    desk.call(ops.cancel_job(desk.q, "x", ""))
    assert desk.retry("A", held, counter="timeouts") == "cancelled"
    assert "timed_out" not in desk.counts()


def test_tasks_that_a_leaving_worker_gives_back_are_counted_as_stopped(desk: Desk) -> None:
    desk.hold("A", b"a", b"b")
    desk.call(ops.stop_work(desk.q, "A"))
    assert desk.counts() == {"enqueued": 2, "claimed": 2, "stopped": 2}
