from __future__ import annotations

from random import Random
from typing import Any

import pytest

from tests.ops.driver import (
    ALL_BYTES,
    FUTURE,
    PAST,
    TRIED,
    Desk,
    Expires,
    aside,
    claim,
    digest,
    fields_of,
    grown,
    payloads,
    policy,
    record,
    reference,
    remembered,
)
from worqr import ops
from worqr.keys import MARKER
from worqr.records import RemoteError


def test_sends_a_raw_task_to_the_back_as_a_job_that_counts_its_failure(desk: Desk) -> None:
    desk.enter("A")
    desk.put(b"a", b"b", b"c")
    [held] = desk.take("A", 1)
    assert desk.retry("A", held) == "given"
    job = f"@{held}"
    assert desk.state() == {
        "waiting": [reference(job), b"c", b"b"],
        f":job:{job}": remembered("a", held, failures=1),
        f":twins:{digest('a')}": {job},
        ":workers": {"A": f"1 {claim(1)} 1 0"},
        ":policy:A": policy(),
        ":counts": Expires({"fence": str(claim(1)), "enqueued": "3", "claimed": "1", "retried": "1"}),
    }
    assert desk.waiting() == [b"b", b"c", b"a"]


def test_the_job_keeps_its_id_and_counts_on(desk: Desk) -> None:
    held = desk.hold("A", b"a")
    for failures in range(1, 4):
        assert desk.retry("A", held[0]) == "given"
        started = desk.start("A", 1)
        facts = fields_of(started.entries[0])
        assert (facts["id"], facts["failures"]) == (f"@{claim(1)}", str(failures))
        assert facts.keys().isdisjoint({"stalls", "timeouts"})
        held = [started.first]


@pytest.mark.parametrize("task", [b"", b"\xff\x00\r\n", MARKER, MARKER + b"@1", ALL_BYTES])
def test_any_payload_survives_it(desk: Desk, task: bytes) -> None:
    task = grown(task)
    [held] = desk.hold("A", task)
    desk.retry("A", held)
    assert payloads(desk.start("A", 1).entries) == [task]


def test_uncounted_it_stays_raw_and_costs_nothing(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.put(b"b")
    assert desk.retry("A", held, counter="", limit=1) == "given"
    assert desk.state()["waiting"] == [b"a", b"b"]


def test_uncounted_a_job_keeps_its_count(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.retry("A", held)
    desk.retry("A", desk.take("A", 1)[0], counter="")
    assert fields_of(desk.start("A", 1).entries[0])["failures"] == "1"


def test_the_last_failure_is_final(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    for _ in range(9):
        assert desk.retry("A", held) == "given"
        [held] = desk.take("A", 1)
    assert desk.retry("A", held) == "aside"
    kept = {"twin": digest("a"), "first": claim(1), "last": claim(1), "started": 1}
    assert desk.state() == {
        ":failed": [str(held)],
        f":aside:{held}": aside("a", f"@{claim(1)}", reason="failed", failures=10, **kept),
        ":aside": {f"@{claim(1)}": str(held)},
        ":workers": {"A": f"10 {claim(10)} 1 0"},
        ":policy:A": policy(),
        ":counts": Expires({"fence": str(claim(10)), "enqueued": "1", "claimed": "10", "retried": "9", "failed": "1"}),
    }


def test_a_resend_answers_mine_and_changes_nothing(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.retry("A", held)
    with desk.nothing_changes():
        assert desk.retry("A", held) == "mine"


def test_anothers_claim_is_not_touched(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.enter("B")
    with desk.nothing_changes():
        assert desk.retry("B", held) == "mine"
        assert desk.retry("stranger", held) == "lost"


def test_a_swept_owner_has_lost_it(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.call(ops.fail_worker(desk.q, "A"))
    desk.enter("B")
    desk.take("B", 1)
    with desk.nothing_changes():
        assert desk.retry("A", held) == "lost"


def test_on_an_empty_database_nothing_is_made(desk: Desk) -> None:
    desk.client.delete(desk.q.counts)
    assert desk.retry("A", claim(1)) == "lost"
    assert desk.state() == {}


@pytest.mark.parametrize("limit", [10, 1])
def test_a_mark_that_stands_ends_it_as_cancelled(desk: Desk, limit: int) -> None:
    [held] = desk.hold("A", b"a")
    desk.call(ops.cancel_task(desk.q, b"a"))
    assert desk.retry("A", held, limit=limit) == "cancelled"
    assert set(desk.state()) == {":workers", ":policy:A", ":counts"}
    assert desk.counts() == {"enqueued": 1, "claimed": 1, "cancelled": 1}


def test_what_was_claimed_before_the_queue_was_deleted_is_dropped(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.call(ops.delete_queue(desk.q))
    assert desk.retry("A", held) == "dropped"
    assert set(desk.state()) == {":workers", ":policy:A", ":counts"}


def test_a_claim_with_nothing_under_it_is_gone(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.client.delete(desk.q.claim(held))
    assert desk.retry("A", held) == "gone"
    assert set(desk.state()) == {":workers", ":policy:A", ":counts"}


def test_wakes_one_for_the_task_and_one_for_a_suspect(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    workers = ["X", "Y", "Z"]
    desk.client.sadd(desk.q.hungry, *workers)
    with desk.listening(*map(desk.q.wake_channel, workers)) as heard:
        desk.retry("A", held)
    assert len(heard) == 1
    desk.client.delete(desk.q.hungry)
    [held] = desk.take("A", 1)
    desk.stall(b"suspect")
    desk.client.sadd(desk.q.hungry, *workers)
    with desk.listening(*map(desk.q.wake_channel, workers)) as heard:
        desk.retry("A", held)
    assert len(heard) == 2


# When


def test_with_a_time_it_is_due_then_and_wakes_nobody(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.client.sadd(desk.q.hungry, "B")
    with desk.listening(desk.q.wake_channel("B"), desk.g.due_channel) as heard:
        assert desk.retry("A", held, run_at_ms=FUTURE) == "given"
    assert [channel for channel, _ in heard] == [":due"]
    assert desk.state(":hungry") == {
        ":due": [f"@{held}"],
        f":job:@{held}": remembered("a", held, state="due", failures=1, run_at=FUTURE),
        f":twins:{digest('a')}": {f"@{held}"},
        ":workers": {"A": f"1 {claim(1)} 1 0"},
        ":policy:A": policy(),
        ":counts": Expires({"fence": str(held), "enqueued": "1", "claimed": "1", "retried": "1"}),
    }
    assert desk.client.zscore(desk.q.due, f"@{held}") == FUTURE


def test_a_delay_is_honoured_exactly_by_the_servers_clock(desk: Desk) -> None:
    held = desk.run("A", "x")
    before = desk.now()
    desk.retry("A", held, delay_ms=60_000)
    run_at = int(desk.state()[":job:x"]["run_at"])
    assert before + 60_000 <= run_at <= desk.now() + 60_000
    assert desk.client.zscore(desk.q.due, "x") == run_at
    assert int(desk.state()[":job:x"]["retried_at"]) == run_at - 60_000


def test_a_time_that_has_come_is_now(desk: Desk) -> None:
    held = desk.run("A", "x")
    desk.put(b"raw")
    desk.retry("A", held, run_at_ms=PAST + 1)
    assert desk.waiting() == [b"raw", b"a"]
    assert desk.state()[":job:x"]["run_at"] == str(PAST + 1)


def test_later_but_uncounted_a_raw_task_becomes_a_job_that_has_not_failed(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.retry("A", held, counter="", run_at_ms=FUTURE)
    waits = {**TRIED, "error_type": "", "earlier": 1}  # what it waits for, and no error
    assert desk.state()[f":job:@{held}"] == remembered("a", held, state="due", run_at=FUTURE, **waits)


def test_a_job_keeps_all_that_its_dispatch_said(desk: Desk) -> None:
    said = {"fields": {"timeout": "5"}, "meta": "{}", "expires_at": str(FUTURE), "scheduled_for": "7"}
    held = desk.run("A", "x", **said)
    desk.call(ops.note_progress(desk.q, "A", [(held, 0.5, "half")]))
    desk.retry("A", held)
    kept = {"timeout": 5, "meta": "{}", "expires_at": FUTURE, "scheduled_for": 7, "run_at": PAST}
    known = record("a", held - 1, queued=held, started=1, failures=1, **kept, **TRIED)
    assert desk.state()[":job:x"] == known


# Limits


def test_timeouts_are_counted_apart(desk: Desk) -> None:
    held = desk.run("A", "x")
    for counter in ("failures", "timeouts", "timeouts", "failures"):
        assert desk.retry("A", held, counter=counter, limit=3) == "given"
        [held] = desk.take("A", 1)
    assert desk.retry("A", held, counter="timeouts", limit=3) == "aside"
    found = desk.state()[f":aside:{held}"]
    assert (found["reason"], found["failures"], found["timeouts"]) == ("timeout", "2", "3")


def test_a_process_that_died_is_counted_as_a_worker_that_died_is(desk: Desk) -> None:
    held = desk.run("A", "x")
    assert desk.retry("A", held, counter="stalls", limit=3, run_at_ms=FUTURE) == "given"
    known = record("a", held - 1, "due", queued=held, started=1, stalls=1, run_at=FUTURE, **TRIED)
    assert desk.state()[":job:x"] == known
    assert desk.counts() == {"enqueued": 1, "claimed": 1, "stalled": 1}


def test_one_death_before_the_limit_it_is_a_suspect_and_at_the_limit_stalled(desk: Desk) -> None:
    [held] = desk.hold("A", b"a")
    desk.retry("A", held, counter="stalls", limit=3)
    [held] = desk.take("A", 1)
    desk.put(b"b")
    assert desk.retry("A", held, counter="stalls", limit=3) == "given"
    assert desk.state()[":suspects"] == [reference(f"@{claim(1)}")]
    [held] = desk.take("A", 1)
    assert desk.retry("A", held, counter="stalls", limit=3) == "aside"
    found = desk.state()[f":aside:{held}"]
    assert (found["reason"], found["stalls"], found["failures"]) == ("stalled", "3", "0")
    assert desk.counts() == {"enqueued": 2, "claimed": 3, "stalled": 2, "failed": 1}


@pytest.mark.parametrize("counter", ["failures", "stalls", "timeouts"])
def test_the_limit_that_the_job_brings_goes_before_the_handlers(desk: Desk, counter: str) -> None:
    held = desk.run("A", "x", fields={f"max_{counter}": "2"})
    assert desk.retry("A", held, counter=counter, limit=1) == "given"
    [held] = desk.take("A", 1)
    assert desk.retry("A", held, counter=counter, limit=9) == "aside"


def test_the_last_one_of_a_job_leaves_a_result_and_lets_its_twin_go(desk: Desk) -> None:
    held = desk.run("A", "x", b"old", fields={"result_ttl": "60000"})
    desk.dispatch("x", b"new")
    desk.client.sadd(desk.q.hungry, "B")
    with desk.listening(desk.q.wake_channel("B")) as heard:
        assert desk.retry("A", held, limit=1, run_at_ms=FUTURE) == "aside"
    assert heard == [(":wake:B", b"1")]
    assert desk.waiting() == [b"new"]
    assert desk.call(ops.read_result(desk.q, "x", held - 1)).status == "failed"


# With a blocked twin


def test_the_run_takes_its_twin_in(desk: Desk) -> None:
    held = desk.run("A", "x", b"old", meta="old", fields={"timeout": "1"})
    twin = desk.dispatch("x", b"new", meta="new", run_at=FUTURE, fields={"timeout": "2", "jitter": "1"}).number
    assert desk.retry("A", held) == "given"
    merged = {"meta": "new", "timeout": 1, "jitter": 1, "run_at": FUTURE, "queued": held, "last": twin, "started": 1}
    state = desk.state()
    assert state[":job:x"] == record("new", held - 1, "due", **merged)
    assert set(state) == {":due", ":job:x", ":workers", ":policy:A", ":counts"}


OPTIONS = {
    "run_at": [PAST, PAST + 1, FUTURE - 1, FUTURE, FUTURE + 1],
    "when": [None, "keep", "later", "earlier"],
    "data": [None, None, False],
    "counts": [None, True, False],
    "policy": [None, "timeout", "jitter max_failures result_ttl timeout"],
    "meta": [None, "m"],
    "fields": [None, {"timeout": "1"}, {"timeout": "2", "jitter": "3", "max_failures": ""}],
}


def by_chance(random: Random, name: str) -> dict[str, Any]:
    """Options of a dispatch, whose values say from which one they are."""
    chosen = {each: random.choice(values) for each, values in OPTIONS.items()}
    options = {each: value for each, value in chosen.items() if value is not None}
    if "meta" in options:
        options["meta"] = name
    if "fields" in options:
        options["fields"] = {
            each: value + name.replace(".", "0") if value else "7" for each, value in options["fields"].items()
        }
    return options


@pytest.mark.parametrize("back_at", [FUTURE, FUTURE - 1, PAST])
@pytest.mark.parametrize("seed", range(5))
def test_twins_merge_field_by_field_as_their_dispatches_would_have_one_after_the_other(
    desk: Desk, seed: int, back_at: int
) -> None:
    """Blocked while it ran and then merged, or dispatched after it came back: the record is the same."""
    random = Random(seed)
    cases = [[by_chance(random, f"{n}.{k}") for k in range(3)] for n in range(25)]
    desk.enter("A")
    for n, (first, second, third) in enumerate(cases):
        for kind in ("merged", "later"):
            name, twins = f"{kind}{n}", [(b"2", second), (b"3", third)]
            desk.dispatch(name, b"1", **{**first, "run_at": PAST})
            [held] = desk.take("A", 1)
            for task, said in twins if kind == "merged" else ():
                assert desk.dispatch(name, task, **said).outcome == "blocked"
            assert desk.retry("A", held, run_at_ms=back_at) == "given"
            for task, said in twins if kind == "later" else ():
                assert desk.dispatch(name, task, **said).outcome in ("updated", "unchanged")
            desk.client.delete(desk.q.base, desk.q.due)  # out of the way of the next one
        found = [desk.client.hgetall(desk.q.job(f"{kind}{n}")) for kind in ("merged", "later")]
        for each in found:
            for number in (b"first", b"last", b"queued"):
                each.pop(number)
            each.pop(b"tries", None)
            assert not any(name.startswith(b"update") for name in each)
        assert found[0] == found[1], cases[n]
    assert ":blocked" not in desk.state()


def test_a_merged_twin_that_can_be_taken_wakes_one(desk: Desk) -> None:
    held = desk.run("A", "x")
    desk.dispatch("x")
    desk.client.sadd(desk.q.hungry, "B", "C")
    with desk.listening(desk.q.wake_channel("B"), desk.q.wake_channel("C")) as heard:
        desk.retry("A", held, run_at_ms=FUTURE)  # which the newer dispatch puts forward
    assert len(heard) == 1
    assert desk.waiting() == [b"a"]


def test_after_a_merge_it_runs_once(desk: Desk) -> None:
    held = desk.run("A", "x", b"old")
    desk.dispatch("x", b"new")
    desk.retry("A", held)
    desk.enter("B")
    assert payloads(desk.start("B", 5).entries) == [b"new"]
    assert desk.dispatch("x", b"newer").outcome == "blocked"


def test_a_limit_of_zero_is_final_whatever_the_job_says(desk: Desk) -> None:
    desk.dispatch("x", b"a", fields={"max_failures": "9"})
    desk.enter("A")
    [held] = desk.take("A", 1)
    assert desk.retry("A", held, limit=0) == "aside"
    assert desk.state()[f":aside:{held}"]["failures"] == "1"


def test_when_the_first_failed_run_has_begun_is_kept_until_the_counters_begin_anew(desk: Desk) -> None:
    desk.dispatch("x", b"a")
    desk.enter("A")
    assert desk.retry("A", desk.take("A", 1)[0], since_ms=7) == "given"
    assert desk.state()[":job:x"]["failing_since"] == "7"
    assert desk.retry("A", desk.take("A", 1)[0], counter="") == "given"
    assert desk.state()[":job:x"]["failing_since"] == "7"
    desk.dispatch("x", b"b")
    assert "failing_since" not in desk.state()[":job:x"]


def test_uncounted_and_without_an_error_it_is_no_try(desk: Desk) -> None:
    held = desk.run("A", "x")
    assert desk.retry("A", held) == "given"
    tries = desk.client.hget(f"{desk.q.base}:job:x", "tries")
    [held] = desk.take("A", 1)
    quiet = ops.retry_task(desk.q, "A", held, RemoteError("", "the upload", ""), counter="", limit=1)
    assert desk.call(quiet) == "given"
    found = desk.state()[":job:x"]
    assert (found["failures"], found["error_type"], found["error_message"]) == ("1", "", "the upload")
    assert (desk.client.hget(f"{desk.q.base}:job:x", "tries"), found["earlier"]) == (tries, "1")
