from __future__ import annotations

from typing import Any

import pytest

from tests.ops.driver import Desk, Expires, claim, reference
from tests.ops.schedules import HOUR, MINUTE, TASK, T, fire_schedule, now
from worqr import ops
from worqr.command import Command

ID = "cron:s"
OVERLAPS = ("skip", "queue", "cancel")


def fire(desk: Desk, nominal: int = T, **more: Any) -> Command[str]:
    options = {"judged_at": nominal, "run_at": nominal, "overlap": "skip", "task": TASK, **more}
    return fire_schedule(desk.q, options.pop("name", "s"), nominal, **options)


def job(desk: Desk, state: str, nominal: int, number: int, **more: str) -> dict[str, str]:
    """The record of a firing under its `number`-th fence number."""
    place = str(claim(number))
    times = {"run_at": str(nominal), "scheduled_for": str(nominal)}
    return {
        "task": TASK.decode("latin-1"),
        "state": state,
        "queued": place,
        "first": place,
        "last": place,
        **times,
        **more,
    }


def run(desk: Desk) -> int:
    """A claim of A on the firing that waits."""
    desk.enter("A")
    started = desk.start("A", 1)
    assert len(started.entries) == 1
    return started.first


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_puts_the_job_of_the_schedule_in_line(desk: Desk, overlap: str) -> None:
    assert desk.send(fire(desk, overlap=overlap)) == [b"ok"]
    assert desk.state() == {
        ":counts": Expires({"fence": str(claim(1)), "enqueued": "1"}),
        ":fired": Expires({"s": f"{T} ok"}),
        ":job:cron:s": job(desk, "waiting", T, 1),
        "waiting": [reference(ID)],
    }
    assert 0 < desk.client.ttl(desk.q.fired) - 7 * 24 * 3600 + 60 <= 60


def test_a_workflow_has_a_life_and_its_end_from_the_first_moment_on(desk: Desk) -> None:
    later = now(desk) + 60_000
    assert desk.call(fire(desk, run_at=later, workflow=True, lifetime_ms=1000)) == "ok"
    more = {"life": str(claim(1)), "lives_until": str(later + 1000), "lifetime": "1000"}
    assert desk.state()[":job:cron:s"] == job(desk, "due", T, 1, run_at=str(later), **more)


def test_its_job_has_the_options_of_its_call_and_the_meta_of_both(desk: Desk) -> None:
    later = now(desk) + 60_000
    options = {
        "lane": "acme",
        "meta": '{"tenant":"acme"}',
        "done": "20 1000 10000",
        "tags": "a",
        "fields": {"timeout": "5"},
    }
    assert desk.call(fire(desk, run_at=later, options=options, meta='{"traceparent":"x"}')) == "ok"
    more = {"lane": "acme", "done": "20 1000 10000", "tags": "a", "timeout": "5"}
    meta = '{"tenant":"acme","traceparent":"x"}'
    assert desk.state()[":job:cron:s"] == job(desk, "due", T, 1, run_at=str(later), meta=meta, **more)


@pytest.mark.parametrize(
    "options", [{"lane": 7}, {"done": "x"}, {"fields": {"task": "y"}}, {"nothing": 1}, {"meta": 1}]
)
def test_options_that_a_job_cannot_have_are_left_out(desk: Desk, options: dict[str, Any]) -> None:
    later = now(desk) + 60_000
    assert desk.call(fire(desk, run_at=later, options=options)) == "ok"
    assert desk.state()[":job:cron:s"] == job(desk, "due", T, 1, run_at=str(later))


def test_one_with_jitter_becomes_due_later(desk: Desk) -> None:
    later = now(desk) + 60_000
    assert desk.call(fire(desk, run_at=later)) == "ok"
    state = desk.state()
    assert state[":job:cron:s"] == job(desk, "due", T, 1, run_at=str(later))
    assert state[":due"] == [ID]
    assert "waiting" not in state


def test_wakes_a_hungry_worker(desk: Desk) -> None:
    desk.client.sadd(desk.q.hungry, "A")
    with desk.listening(desk.q.wake_channel("A")) as heard:
        desk.send(fire(desk))
    assert heard == [(":wake:A", b"1")]


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_firing_happens_once_whoever_asks_how_often(desk: Desk, overlap: str) -> None:
    desk.send(fire(desk, overlap=overlap))
    with desk.nothing_changes():
        assert desk.call(fire(desk, overlap=overlap)) == "ok"
    claimed = run(desk)
    with desk.nothing_changes():
        assert desk.call(fire(desk, overlap=overlap)) == "ok"
    desk.call(ops.finish_tasks(desk.q, "A", [claimed]))
    with desk.nothing_changes():
        assert desk.call(fire(desk, overlap=overlap)) == "ok"


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_one_that_is_older_than_the_last_is_over(desk: Desk, overlap: str) -> None:
    desk.send(fire(desk, T + 1000, overlap=overlap))
    with desk.nothing_changes():
        assert desk.call(fire(desk, T + 999, overlap=overlap)) == "fired"
        assert desk.call(fire(desk, T, overlap=overlap)) == "fired"


def test_two_schedules_of_a_queue_do_not_know_each_other(desk: Desk) -> None:
    assert desk.call(fire(desk, T + 1000)) == "ok"
    assert desk.call(fire(desk, T, name="t")) == "ok"
    assert desk.state()[":fired"] == Expires({"s": f"{T + 1000} ok", "t": f"{T} ok"})
    assert desk.state()["waiting"] == [reference("cron:t"), reference(ID)]


def test_every_firing_keeps_the_counters_for_a_month(desk: Desk) -> None:
    for nominal in (T, T + 1000):
        desk.client.expire(desk.q.counts, 10)
        assert desk.call(fire(desk, nominal, overlap="cancel")) == "ok"
        assert desk.client.ttl(desk.q.counts) > 29 * 24 * 3600


# Overlap: skip


@pytest.mark.parametrize("place", ["waiting", "due", "active"])
def test_skip_lets_a_firing_pass_while_the_one_before_is_there(desk: Desk, place: str) -> None:
    desk.send(fire(desk, run_at=now(desk) + 60_000 if place == "due" else T))
    if place == "active":
        run(desk)
    before = desk.state()
    assert desk.send(fire(desk, T + 1000)) == [b"skipped"]
    assert desk.state() == {**before, ":fired": Expires({"s": f"{T + 1000} skipped"})}
    with desk.nothing_changes():
        assert desk.call(fire(desk, T + 1000)) == "skipped"


def test_skip_fires_again_when_the_one_before_has_ended(desk: Desk) -> None:
    desk.send(fire(desk))
    claimed = run(desk)
    desk.call(fire(desk, T + 1000))
    desk.call(ops.finish_tasks(desk.q, "A", [claimed]))
    assert desk.call(fire(desk, T + 1000)) == "skipped"
    assert desk.call(fire(desk, T + 2000)) == "ok"


# Overlap: queue


@pytest.mark.parametrize("place", ["waiting", "due", "active"])
def test_queue_waits_until_the_one_before_has_ended(desk: Desk, place: str) -> None:
    desk.send(fire(desk, overlap="queue", run_at=now(desk) + 60_000 if place == "due" else T))
    if place == "active":
        run(desk)
    with desk.nothing_changes():
        assert desk.call(fire(desk, T + 1000, overlap="queue")) == "busy"


def test_queue_leaves_out_what_comes_while_no_worker_has_taken_the_one_before_for_a_day(desk: Desk) -> None:
    desk.send(fire(desk, overlap="queue"))
    waiting = desk.client.hgetall(desk.q.job(ID))
    day = 86_400_000
    desk.client.hset(desk.q.job(ID), "first", 1000 * (now(desk) - day + 5000))
    assert desk.call(fire(desk, T + 1000, overlap="queue")) == "busy"
    desk.client.hset(desk.q.job(ID), "first", 1000 * (now(desk) - day))
    assert desk.call(fire(desk, T + 1000, overlap="queue")) == "skipped"
    assert desk.call(fire(desk, T + 1000, overlap="queue")) == "skipped"
    assert {**desk.client.hgetall(desk.q.job(ID)), b"first": b""} == {**waiting, b"first": b""}
    desk.register("A", queues=["Q1"])
    desk.enter("A")
    assert desk.call(fire(desk, T + 2000, overlap="queue")) == "busy"  # it is served again
    desk.call(ops.finish_tasks(desk.q, "A", [run(desk)]))
    assert desk.call(fire(desk, T + 2000, overlap="queue")) == "ok"


def test_queue_fires_it_then(desk: Desk) -> None:
    desk.send(fire(desk, overlap="queue"))
    claimed = run(desk)
    assert desk.call(fire(desk, T + 1000, overlap="queue")) == "busy"
    desk.call(ops.finish_tasks(desk.q, "A", [claimed]))
    assert desk.call(fire(desk, T + 1000, overlap="queue")) == "ok"
    assert desk.state()[":job:cron:s"]["scheduled_for"] == str(T + 1000)


# Overlap: cancel


@pytest.mark.parametrize("place", ["waiting", "due"])
def test_cancel_takes_the_place_of_one_that_did_not_begin(desk: Desk, place: str) -> None:
    desk.send(fire(desk, overlap="cancel", run_at=now(desk) + 60_000 if place == "due" else T))
    assert desk.call(fire(desk, T + 1000, overlap="cancel", task=b"new")) == "ok"
    state = desk.state()
    assert state[":job:cron:s"]["task"] == "new"
    assert state[":job:cron:s"]["state"] == "waiting"
    assert state[":job:cron:s"]["scheduled_for"] == str(T + 1000)
    assert ":due" not in state
    assert desk.waiting() == [b"new"]
    assert len(state["waiting"]) == 1


def test_cancel_marks_the_one_that_runs_and_the_next_begins_when_it_has_unwound(desk: Desk) -> None:
    desk.send(fire(desk, overlap="cancel"))
    claimed = run(desk)
    with desk.listening(desk.q.cancel_channel) as heard:
        assert desk.call(fire(desk, T + 1000, overlap="cancel")) == "ok"
    assert heard == [("_cancel", str(claimed).encode())]
    state = desk.state()
    assert state[":cancelling"] == {str(claimed)}
    assert state[":blocked"] == {ID}
    assert state[":job:cron:s"]["state"] == "blocked"
    desk.call(ops.finish_tasks(desk.q, "A", [claimed]))
    state = desk.state()
    assert ":blocked" not in state
    assert state[":job:cron:s"]["state"] == "waiting"
    assert state[":job:cron:s"]["scheduled_for"] == str(T + 1000)


def test_cancel_keeps_only_the_newest_of_those_that_wait_for_it(desk: Desk) -> None:
    desk.send(fire(desk, overlap="cancel"))
    claimed = run(desk)
    desk.call(fire(desk, T + 1000, overlap="cancel"))
    assert desk.call(fire(desk, T + 2000, overlap="cancel")) == "ok"
    desk.call(ops.finish_tasks(desk.q, "A", [claimed]))
    assert desk.state()[":job:cron:s"]["scheduled_for"] == str(T + 2000)
    assert desk.waiting() == [TASK]


# A clock that was ahead


def test_what_was_fired_by_a_clock_far_ahead_holds_nothing_back(desk: Desk) -> None:
    tomorrow = T + 24 * HOUR
    desk.call(fire(desk, tomorrow))
    desk.call(ops.finish_tasks(desk.q, "A", [run(desk)]))
    assert desk.call(fire(desk, T)) == "ok"
    assert desk.state()[":fired"] == Expires({"s": f"{T} ok"})


def test_up_to_a_minute_ahead_it_holds_back(desk: Desk) -> None:
    desk.call(fire(desk, T + MINUTE))
    with desk.nothing_changes():
        assert desk.call(fire(desk, T)) == "fired"
    assert desk.call(fire(desk, T, judged_at=T - 1)) == "ok"


def test_a_copy_gets_the_same_answer_however_far_ahead_it_was(desk: Desk) -> None:
    desk.call(fire(desk, T + HOUR))
    with desk.nothing_changes():
        assert desk.call(fire(desk, T + HOUR, judged_at=T)) == "ok"


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_job_that_was_to_begin_in_that_future_is_replaced(desk: Desk, overlap: str) -> None:
    future = now(desk) + HOUR
    desk.call(fire(desk, future, run_at=future + 5))
    assert desk.call(fire(desk, T, overlap=overlap)) == "ok"
    state = desk.state()
    assert state[":job:cron:s"]["state"] == "waiting"
    assert state[":job:cron:s"]["scheduled_for"] == str(T)
    assert ":due" not in state
    assert len(desk.waiting()) == 1


def test_a_run_that_began_in_that_future_counts_as_the_one_before(desk: Desk) -> None:
    desk.call(fire(desk, T + HOUR))
    run(desk)
    assert desk.call(fire(desk, T)) == "skipped"
    assert desk.call(fire(desk, T + 1, overlap="queue")) == "busy"


# In general


def test_a_foreign_type_is_an_error_before_anything_is_written(desk: Desk) -> None:
    desk.client.set(desk.q.fired, "foreign")
    with desk.nothing_changes(), pytest.raises(Exception, match="WRONGTYPE"):
        desk.send(fire(desk))


def retry_of_a_wrong_clock(desk: Desk, *, ahead_ms: int, delay_ms: int = 30_000) -> tuple[int, int]:
    """A firing at T whose run failed while the clock was so far ahead. Its claim, and when its retry is due."""
    desk.call(fire(desk))
    held = run(desk)
    desk.retry("A", held, delay_ms=delay_ms)
    began = int(desk.state()[f":job:{ID}"]["retried_at"])
    due = began + delay_ms + ahead_ms
    desk.client.hset(desk.q.job(ID), mapping={"retried_at": began + ahead_ms, "run_at": due})
    desk.client.zadd(desk.q.due, {ID: due})
    return held, due


@pytest.mark.parametrize(("overlap", "answer"), [("skip", "skipped"), ("queue", "busy")])
def test_a_retry_of_a_clock_that_was_ahead_is_due_when_the_schedule_fires_next(
    desk: Desk, overlap: str, answer: str
) -> None:
    held, _ = retry_of_a_wrong_clock(desk, ahead_ms=HOUR)
    desk.client.sadd(desk.q.hungry, "A")
    assert desk.call(fire(desk, T + MINUTE, overlap=overlap)) == answer
    state = desk.state()
    assert (state["waiting"], state.get(":due")) == ([reference(ID)], None)
    assert state[f":job:{ID}"]["failures"] == "1"
    assert desk.call(fire(desk, T + 2 * MINUTE, overlap=overlap)) == answer
    assert desk.state()["waiting"] == [reference(ID)]
    again = run(desk)
    assert again > held
    assert desk.state()[f":active:{ID}"]["scheduled_for"] == str(T)


@pytest.mark.parametrize("options", [{"ahead_ms": MINUTE - 1000}, {"ahead_ms": 0, "delay_ms": HOUR}])
def test_any_other_retry_keeps_its_backoff(desk: Desk, options: dict[str, int]) -> None:
    _, due = retry_of_a_wrong_clock(desk, **options)
    assert desk.call(fire(desk, T + MINUTE)) == "skipped"
    assert desk.client.zscore(desk.q.due, ID) == due
    assert "waiting" not in desk.state()


def test_a_retry_at_a_time_that_its_handler_named_keeps_that_time(desk: Desk) -> None:
    desk.call(fire(desk))
    held = run(desk)
    desk.retry("A", held, delay_ms=30_000)
    desk.client.zadd(desk.q.due, {ID: 0})
    desk.call(ops.promote_due(desk.q))
    held = run(desk)
    named = now(desk) + HOUR
    desk.retry("A", held, run_at_ms=named)
    assert "retried_at" not in desk.state()[f":job:{ID}"]
    assert desk.client.zscore(desk.q.due, ID) == named


def test_a_retry_of_a_clock_that_was_ahead_is_replaced_where_firings_cancel_each_other(desk: Desk) -> None:
    retry_of_a_wrong_clock(desk, ahead_ms=HOUR)
    assert desk.call(fire(desk, T + MINUTE, overlap="cancel")) == "ok"
    state = desk.state()
    assert (state["waiting"], state.get(":due")) == ([reference(ID)], None)
    assert state[f":job:{ID}"]["scheduled_for"] == str(T + MINUTE)


META = '{"traceparent":"00-1-2-01"}'


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_the_job_has_the_meta_of_its_firing(desk: Desk, overlap: str) -> None:
    assert desk.call(fire(desk, overlap=overlap, meta=META)) == "ok"
    assert desk.state()[":job:cron:s"] == job(desk, "waiting", T, 1, meta=META)
    with desk.nothing_changes():
        assert desk.call(fire(desk, overlap=overlap, meta=META)) == "ok", "a resend"


@pytest.mark.parametrize(("first", "second"), [(META, "{}"), (META, ""), ("", META)])
def test_another_meta_tells_that_another_leader_has_enqueued_it(desk: Desk, first: str, second: str) -> None:
    assert desk.call(fire(desk, meta=first)) == "ok"
    for _ in range(2):
        with desk.nothing_changes():
            assert desk.call(fire(desk, meta=second)) == "again"
    desk.call(ops.finish_tasks(desk.q, "A", [run(desk)]))
    assert desk.call(fire(desk, meta=second)) == "again"
    assert desk.call(fire(desk, T + HOUR, meta=second)) == "ok"


def test_what_is_skipped_is_skipped_with_any_meta(desk: Desk) -> None:
    desk.call(fire(desk, meta=META))
    for meta in ("{}", META, ""):
        assert desk.call(fire(desk, T + HOUR, meta=meta)) == "skipped"
    assert desk.state()[":fired"] == Expires({"s": f"{T + HOUR} skipped"})


@pytest.mark.parametrize(("meta", "kept"), [("{}", {"meta": "{}"}), ("", {})])
def test_the_next_firing_replaces_the_meta(desk: Desk, meta: str, kept: dict[str, str]) -> None:
    later = now(desk) + HOUR
    desk.call(fire(desk, run_at=later, meta=META))
    desk.call(fire(desk, T + HOUR, run_at=later, overlap="cancel", meta=meta))
    stored = desk.state()[":job:cron:s"]
    assert {name: value for name, value in stored.items() if name == "meta"} == kept
