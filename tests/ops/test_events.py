"""The ids that events carry, of all scripts: which, how many, and that they cost nothing while nobody listens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from tests.ops.driver import BOOM, FUTURE, Desk, job
from tests.ops.schedules import fire_schedule
from worqr import ops
from worqr.keys import MARKER, QueueKeys

Heard = list[tuple[str, int, list[str]]]


@contextmanager
def events(desk: Desk, keys: QueueKeys | None = None) -> Iterator[Heard]:
    """Fills the list with (type, count, ids) when the block ends. What an older listener hears is the same without the ids."""
    keys = keys or desk.q
    told: Heard = []
    with desk.listening(keys.events_channel, keys.event_ids_channel) as heard:
        yield told
    ids: list[str] = []
    before = ""
    for channel, message in heard:
        text = message.decode()
        if channel.endswith(":event_ids"):
            before, *ids = text.split("\n")
            assert ids
        else:
            assert before in ("", text)  # the ids are told right before
            kind, count = text.split(" ")
            told.append((kind, int(count), ids))
            before, ids = "", []


def dispatch(desk: Desk, *ids: str, **options: Any) -> None:
    desk.call(ops.dispatch_jobs(desk.q, [job(each, **options) for each in ids]))


def test_dispatched_claimed_and_finished_jobs_are_named_and_plain_tasks_are_not(desk: Desk) -> None:
    desk.enter("A")
    with events(desk) as heard:
        dispatch(desk, "x", "y")
        desk.put(b"plain")
        first = desk.start("A", 3).first
        desk.call(ops.finish_tasks(desk.q, "A", [first + n for n in range(3)], {first: ("json", b"1")}))
    assert heard == [
        ("enqueued", 2, ["x", "y"]),
        ("enqueued", 1, []),
        ("claimed", 3, ["x", "y"]),
        ("finished", 3, ["x", "y"]),
    ]


BIG = b"\xff" * 1500
ENDS = {
    "a result": (b"x", ("json", b"1"), ["A", "x", None, "json", b"1", None, None]),
    "a large result": (b"x", ("bytes", BIG), ["A", "x", None, "bytes", BIG[:1024], None, None]),
    "no result": (b"x", None, ["A", "x", None, None, None, None, None]),
    "a result of none": (b"x", ("none", b""), ["A", "x", None, None, None, None, None]),
    "a plain task": (BIG, None, ["A", None, BIG[:1024], None, None, None, None]),
    "an empty task": (b"", None, ["A", None, b"", None, None, None, None]),
}


def unpacked(message: bytes) -> tuple[str, list[list[Any]]]:
    """The event, and the values of each end; ids and words as texts."""
    event, lengths, rest = message.split(b"\n", 2)
    values: list[Any] = []
    for length in map(int, lengths.split()):
        values.append(None if length < 0 else rest[:length])
        rest = rest[max(0, length) :]
    assert rest == b""
    runs = [values[i : i + 7] for i in range(0, len(values), 7)]
    return event.decode(), [
        [value if n in (2, 4) or value is None else value.decode() for n, value in enumerate(run)] for run in runs
    ]


@pytest.mark.parametrize("case", ENDS)
def test_how_a_run_finished_is_published_to_those_who_listen_to_that(desk: Desk, case: str) -> None:
    task, result, expected = ENDS[case]
    desk.enter("A")
    desk.put(task) if expected[1] is None else dispatch(desk, "x", fields={"result_ttl": "60000"})
    first = desk.start("A", 1).first
    call = ops.finish_tasks(desk.q, "A", [first], {first: result} if result else {})  # type: ignore[dict-item]
    with desk.listening(desk.q.events_channel, desk.q.event_ends_channel) as heard:
        assert desk.send(call) == [b"ok"]
        desk.send(call)
    (channel, ends), last = heard
    assert channel.endswith(":event_ends")
    assert last[1] == b"finished 1"
    assert unpacked(ends) == ("finished 1", [expected])


@pytest.mark.parametrize("kind", ["failed", "broken"])
def test_how_a_run_failed_is_published_to_those_who_listen_to_that(desk: Desk, kind: str) -> None:
    desk.enter("A")
    dispatch(desk, "x")
    desk.put(b"plain")
    first = desk.start("A", 2).first
    error = replace(BOOM, message="é" * 1000)
    with desk.listening(desk.q.events_channel, desk.q.event_ends_channel) as heard:
        for claim in (first, first + 1):
            desk.call(ops.fail_task(desk.q, "A", claim, error, undecodable=kind == "broken"))
    (_, job_end), _, (_, plain_end), _ = heard
    text = "é" * 512  # a KiB
    assert unpacked(job_end) == (f"{kind} 1", [["A", "x", None, None, None, BOOM.type, text]])
    assert unpacked(plain_end) == (f"{kind} 1", [["A", None, b"plain", None, None, BOOM.type, text]])


def test_the_ends_of_a_hundred_runs_are_published(desk: Desk) -> None:
    desk.enter("A")
    dispatch(desk, *(f"{n}" for n in range(250)))
    first = desk.start("A", 250).first
    with desk.listening(desk.q.events_channel, desk.q.event_ends_channel) as heard:
        desk.call(ops.finish_tasks(desk.q, "A", [first + n for n in range(250)]))
    event, ends = unpacked(heard[0][1])
    assert (event, [end[1] for end in ends]) == ("finished 250", [f"{n}" for n in range(100)])


def test_nothing_is_published_to_those_who_listen_to_the_ends_alone_or_to_the_events_alone(desk: Desk) -> None:
    desk.enter("A")
    desk.put(b"a", b"b")
    first = desk.start("A", 2).first
    with desk.listening(desk.q.event_ends_channel) as heard:
        desk.call(ops.finish_tasks(desk.q, "A", [first]))
    assert heard == []
    with desk.listening(desk.q.events_channel) as heard:
        desk.call(ops.finish_tasks(desk.q, "A", [first + 1]))
    assert heard == [(":events", b"finished 1")]


def test_generated_ids_are_told_too(desk: Desk) -> None:
    with events(desk) as heard:
        done = desk.call(ops.dispatch_jobs(desk.q, [job(None), job(None, delay=60_000)]))
    assert heard == [("enqueued", 2, [each.id for each in done])]


def test_only_new_jobs_count_as_enqueued(desk: Desk) -> None:
    desk.enter("A")
    dispatch(desk, "waits", "runs")
    desk.start("A", 2)
    dispatch(desk, "waits")
    with events(desk) as heard:
        dispatch(desk, "waits", "runs", "new")
        dispatch(desk, "waits", "runs")
    assert heard == [("enqueued", 2, ["runs", "new"])]


@pytest.mark.parametrize("counter", ["failures", "timeouts", "stalls"])
def test_what_is_tried_again_has_an_id_by_then(desk: Desk, counter: Any) -> None:
    desk.enter("A")
    dispatch(desk, "x")
    desk.put(b"plain")
    first = desk.start("A", 2).first
    with events(desk) as heard:
        for claim in (first, first + 1):
            desk.call(ops.retry_task(desk.q, "A", claim, BOOM, counter=counter, limit=5, delay_ms=60_000))
    kind = "stalled" if counter == "stalls" else "retried"
    assert heard == [(kind, 1, ["x"]), (kind, 1, [f"@{first + 1}"])]
    assert desk.client.exists(desk.q.job(f"@{first + 1}"))


@pytest.mark.parametrize(("kind", "on_failure"), [("failed", False), ("failed", True), ("broken", False)])
def test_what_is_set_aside_is_named_as_in_the_list(desk: Desk, kind: Any, on_failure: bool) -> None:
    desk.enter("A", on_failure=on_failure)
    dispatch(desk, "x")
    desk.put(b"plain")
    first = desk.start("A", 2).first
    failures = QueueKeys(desk.prefix, "Q1", failures=True)
    with events(desk) as heard, events(desk, failures) as of_failures:
        for claim in (first, first + 1):
            desk.call(ops.fail_task(desk.q, "A", claim, BOOM, undecodable=kind == "broken"))
    assert heard == [(kind, 1, ["x"]), (kind, 1, [f"@{first + 1}"])]
    assert [type_ for type_, _, _ in of_failures] == ["enqueued"] * (2 if on_failure else 0)
    assert all(desk.client.exists(failures.job(name)) for _, _, (name,) in of_failures)
    assert desk.state()[":aside"].keys() == {f"@{first + 1}", "x"}


def test_what_is_given_back_is_named_if_it_is_a_job(desk: Desk) -> None:
    desk.register("A", "B", queues=["Q1"])
    desk.enter("A", "B")
    dispatch(desk, "x", "y")
    desk.put(b"plain", b"plain too")
    ours = desk.start("A", 3).first
    desk.start("B", 1)
    with events(desk) as heard:
        desk.call(ops.stop_tasks(desk.q, "A", [ours, ours + 2]))
        desk.call(ops.stop_work(desk.q, "A"))
        desk.call(ops.fail_worker(desk.q, "B"))
    assert heard == [
        ("stopped", 2, ["x"]),
        ("stopped", 1, ["y"]),
        ("stalled", 1, [f"@{ours + 3}"]),  # a plain task that is remembered is a job
    ]


def test_what_is_cancelled_is_named_if_it_is_a_job(desk: Desk) -> None:
    desk.enter("A")
    desk.put(b"runs")
    dispatch(desk, "runs", "waits", "due", "other")
    dispatch(desk, "due", run_at=FUTURE)
    first = desk.start("A", 2).first
    with events(desk) as heard:
        desk.call(ops.cancel_job(desk.q, "waits", ""))
        desk.call(ops.cancel_job(desk.q, "due", ""))
        desk.call(ops.cancel_job(desk.q, "runs", ""))
        desk.call(ops.cancel_task(desk.q, b"runs"))
        desk.call(ops.finish_tasks(desk.q, "A", [first, first + 1]))
        desk.call(ops.cancel_job(desk.q, "other", ""))
    assert heard == [
        *(("cancelled", 1, ["waits"]), ("cancelled", 1, ["due"])),
        *(("cancelled", 1, []), ("cancelled", 1, ["runs"])),
        ("cancelled", 1, ["other"]),
    ]


def test_jobs_that_are_cancelled_by_their_payload_are_named(desk: Desk) -> None:
    desk.enter("A")
    desk.put(b"a")
    first = desk.start("A", 1).first
    desk.call(ops.retry_task(desk.q, "A", first, BOOM, counter="failures", limit=5))
    desk.put(b"a")
    with events(desk) as heard:
        desk.call(ops.cancel_task(desk.q, b"a"))
    assert heard == [("cancelled", 2, [f"@{first}"])]


def test_what_is_put_back_and_what_a_schedule_fires_is_named(desk: Desk) -> None:
    desk.enter("A")
    desk.put(b"a")
    first = desk.start("A", 1).first
    desk.call(ops.fail_task(desk.q, "A", first, BOOM))
    with events(desk) as heard:
        desk.call(ops.retry_aside(desk.q, "failed", [first]))
        desk.call(fire_schedule(desk.q, "nightly", 1, judged_at=1, run_at=1, overlap="skip", task=b"n"))
    assert heard == [("enqueued", 1, [f"@{first}"]), ("enqueued", 1, ["cron:nightly"])]


def test_what_is_done_to_all_is_only_counted(desk: Desk) -> None:
    dispatch(desk, "x", "y")
    with events(desk) as heard:
        desk.call(ops.pause(desk.q, ""))
        desk.call(ops.resume(desk.q))
        desk.call(ops.delete_queue(desk.q))
    assert heard == [("paused", 1, []), ("resumed", 1, []), ("deleted", 2, [])]


def test_the_first_hundred_are_named_and_all_are_counted(desk: Desk) -> None:
    desk.enter("A")
    ids = [f"{n:0200}" for n in range(250)]
    with events(desk) as heard:
        dispatch(desk, *ids)
        first = desk.start("A", 250).first
        desk.call(ops.finish_tasks(desk.q, "A", [first + n for n in range(250)]))
    assert heard == [(kind, 250, ids[:100]) for kind in ("enqueued", "claimed", "finished")]


def test_an_id_of_any_characters_comes_whole(desk: Desk) -> None:
    ids = ['a "quoted" id', "back\\slash", "ä/ö", "[1, 2]", "日本", " "]
    with events(desk) as heard:
        dispatch(desk, *ids)
    assert heard == [("enqueued", len(ids), ids)]


@pytest.mark.parametrize("jobs", [True, False])
def test_nobody_pays_for_ids_while_nobody_listens(desk: Desk, jobs: bool) -> None:
    def calls(doing: Callable[[], Any]) -> dict[str, int]:
        def seen() -> dict[str, int]:
            stats = desk.client.info("commandstats")
            return {name.removeprefix("cmdstat_"): each["calls"] for name, each in stats.items()}

        before = seen()
        doing()
        return {name: n - before.get(name, 0) for name, n in seen().items() if n != before.get(name, 0)}

    desk.enter("A")
    asked = {"pubsub|numsub": 1}  # once a script, as before there were ids
    put = calls(lambda: dispatch(desk, "x", "y", "z") if jobs else desk.put(b"x", b"y", b"z"))
    start = calls(lambda: desk.start("A", 2))
    first = int(desk.client.smembers(desk.q.claims("A")).pop())
    finish = calls(lambda: desk.call(ops.finish_tasks(desk.q, "A", [first])))
    for each in (put, start, finish):
        assert {name: n for name, n in each.items() if name.startswith("pubsub")} == asked
        assert each.get("lindex", 0) == 0
    if jobs:
        assert calls(lambda: dispatch(desk, "z")).get("pubsub|numsub") is None  # an update is no event
    assert calls(lambda: desk.start("A", 0)).get("pubsub|numsub") is None
    desk.put(MARKER + b"looks like a reference")
