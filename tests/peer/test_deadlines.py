"""Runs that take too long: cancelled, counted apart from failures, and set aside when it has happened too often."""

from __future__ import annotations

import datetime as dt
import re
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import pytest
import trio
import trio.testing
from trio.testing import MockClock

import worqr
from tests.peer.tools import Held, Runs, eventually, serving, until
from worqr import RetryPolicy
from worqr.peer.consumer import COMPACT_OVER, Deadlines
from worqr.peer.run import Timer

FAILED = ("{Q1}:failed", "{Q1}:aside*")
NOW = RetryPolicy(min_backoff=0)


async def failed(q: worqr.Queue) -> int:
    return (await q.info()).failed


async def finished(q: worqr.Queue) -> int:
    return (await q.info()).counts.get("finished", 0)


@pytest.mark.leaves(*FAILED)
async def test_the_third_timeout_is_final(mesh: worqr.Mesh, caplog: pytest.LogCaptureFixture) -> None:
    held = Held()
    async with mesh.connect(), serving(mesh, "Q1", held, timeout=0.1, retry=NOW) as peer:
        q = mesh.queue("Q1")
        job = await q.dispatch(b"a", result_ttl=60)
        with pytest.raises(worqr.JobFailed, match="Timeout: it ran longer than 0.1 s"):
            await job.result(30)
        assert held.cancelled == [(b"a", "timeout")] * 3
        assert [(c.attempt, c.failures, c.timeouts) for c in held.contexts] == [(1, 0, 0), (2, 0, 1), (3, 0, 2)]
        (record,) = await q.failed.list()
        assert (record.reason, record.failures, record.stalls, record.timeouts) == ("timeout", 0, 0, 3)
        assert record.error.type == "Timeout"
        assert peer._engine.scheduler.running == 0
        await until(lambda: peer.health().ready)
    said = [r for r in caplog.records if r.getMessage().startswith("task.")]
    assert [(r.__dict__["event"], r.levelname) for r in said] == [
        ("task.timeout", "WARNING"),
        ("task.timeout", "WARNING"),
        ("task.failed", "ERROR"),
    ]
    told = re.sub(r", and ended \d+(\.\d)? s after it", "", said[0].getMessage())  # if the machine stood still
    assert told == (
        f"task.timeout: queue 'Q1', job {job.id}, attempt 1 of 3: ran longer than its timeout of 0.1 s; next attempt in 0 s"
    )
    assert "gave up after 3 attempts: Timeout: it ran longer than 0.1 s" in said[2].getMessage()


async def test_a_timeout_is_when_it_says(mesh: worqr.Mesh) -> None:
    times: list[float] = []

    async def handler(task: bytes) -> None:
        start = trio.current_time()
        deadline = worqr.current().deadline
        assert deadline is not None and -10 < deadline - time.monotonic() <= 0.4
        if worqr.current().timeouts == 0:
            try:
                await trio.sleep_forever()
            finally:
                times.append(trio.current_time() - start)

    async with mesh.connect(), serving(mesh, "Q1", handler, timeout=0.4, retry=NOW):
        q = mesh.queue("Q1")
        await q.enqueue(b"a")
        await eventually(lambda: finished(q), 1)
    assert 0.39 <= times[0] < 10


async def test_what_ends_in_time_is_not_touched(mesh: worqr.Mesh) -> None:
    seen: list[float | None] = []

    async def handler(task: bytes) -> None:
        await trio.sleep(0.02)
        seen.append(worqr.current().deadline)

    async with mesh.connect(), serving(mesh, "Q1", handler, timeout=5, room=10) as peer:
        q = mesh.queue("Q1")
        await q.enqueue(*[b"a"] * 50)
        await eventually(lambda: finished(q), 50)
        assert None not in seen
        assert peer._engine.scheduler.running == 0
    async with mesh.connect(), serving(mesh, "Q1", handler):
        await q.enqueue(b"b")
        await until(lambda: seen[-1] is None)
        await eventually(q.running, [])


@pytest.mark.leaves(*FAILED)
@pytest.mark.parametrize(
    ("handlers", "jobs"),
    [(None, 0.1), (60, 0.1), (0.1, None)],
    ids=["only the job's", "the job's over the handler's", "the handler's"],
)
async def test_a_jobs_own_timeout_is_over_that_of_the_handler(
    mesh: worqr.Mesh, handlers: float | None, jobs: float | None
) -> None:
    held = Held()
    policy = RetryPolicy(max_timeouts=1)
    async with mesh.connect(), serving(mesh, "Q1", held, timeout=handlers, retry=policy):
        q = mesh.queue("Q1")
        await (q.enqueue(b"a") if jobs is None else q.dispatch(b"a", timeout=jobs))
        await eventually(lambda: failed(q), 1)
        assert held.cancelled == [(b"a", "timeout")]


async def test_a_jobs_longer_timeout_gives_it_more_time(mesh: worqr.Mesh) -> None:
    held = Held()
    async with mesh.connect(), serving(mesh, "Q1", held, timeout=0.1):
        q = mesh.queue("Q1")
        await q.dispatch(b"a", timeout=60)
        await held.wait(1)
        await trio.sleep(0.3)
        held.gate.set()
        await eventually(lambda: finished(q), 1)
        assert held.cancelled == []


async def test_of_many_deadlines_each_meets_its_own_run(mesh: worqr.Mesh) -> None:
    for slack in (0.7, 2, 10):  # the machine may stand still, but hardly each time
        times = await meet_deadlines(mesh)
        assert len(times) == 8
        assert all((int(task) - 1) / 10 <= took for task, took in times.items()), times
        if all(took < int(task) / 10 + slack for task, took in times.items()):
            return
    raise AssertionError(times)


async def meet_deadlines(mesh: worqr.Mesh) -> dict[bytes, float]:
    """After which time each of eight tasks was cancelled, the task `n` after `n` tenths of a second."""
    runs, times = Runs(), dict[bytes, float]()

    async def handler(task: bytes) -> None:
        start = trio.current_time()
        if worqr.current().timeouts:
            runs.begin(task)
            return
        try:
            await trio.sleep_forever()
        finally:
            times[task] = trio.current_time() - start

    async with mesh.connect(), serving(mesh, "Q1", handler, retry=NOW, timeout=60):
        q = mesh.queue("Q1")
        for n in (8, 3, 6, 1, 4, 7, 2, 5):
            await q.dispatch(b"%d" % n, timeout=n / 10)
        await runs.wait(8)
        await eventually(q.running, [])
    return times


async def test_timeouts_and_failures_are_counted_apart(mesh: worqr.Mesh) -> None:
    runs = Runs()

    async def handler(task: bytes) -> None:
        runs.begin(task)
        if len(runs.tasks) in {1, 3}:
            await trio.sleep_forever()
        if len(runs.tasks) in {2, 4}:
            raise ValueError

    policy = RetryPolicy(max_failures=3, max_timeouts=3, max_stalls=1, min_backoff=0)
    async with mesh.connect(), serving(mesh, "Q1", handler, timeout=0.1, retry=policy):
        q = mesh.queue("Q1")
        await q.enqueue(b"a")
        await eventually(lambda: finished(q), 1)
    assert [(c.failures, c.timeouts, c.attempt) for c in runs.contexts] == [
        *((0, 0, 1), (0, 1, 2), (1, 1, 3), (1, 2, 4)),
        (2, 2, 5),
    ]


async def test_a_run_that_timed_out_waits_for_its_backoff(mesh: worqr.Mesh) -> None:
    times: list[float] = []

    async def handler(task: bytes) -> None:
        times.append(trio.current_time())
        if len(times) < 3:
            await trio.sleep_forever()

    async with (
        mesh.connect(),
        serving(mesh, "Q1", handler, timeout=0.1, retry=RetryPolicy(min_backoff=0.3, jitter=False)),
    ):
        q = mesh.queue("Q1")
        await q.enqueue(b"a")
        await eventually(lambda: finished(q), 1)
    assert 0.39 <= times[1] - times[0] < 20
    assert 0.69 <= times[2] - times[1] < 20


# Who does not stop


async def late_in_the_loop(task: bytes) -> str:
    worqr.current().extend(0.1)  # from now on: what times out before it begins is not run
    with trio.CancelScope(shield=True):
        await trio.sleep(0.3)
    return "late"


async def swallowing(task: bytes) -> str:
    worqr.current().extend(0.1)
    try:
        await trio.sleep_forever()
    except trio.Cancelled:
        return "late"
    return ""


def late_in_a_thread(task: bytes) -> str:
    worqr.current().extend(0.1)
    time.sleep(0.3)
    return "late"


@pytest.mark.parametrize("handler", [late_in_the_loop, swallowing, late_in_a_thread])
async def test_a_handler_that_returns_late_has_finished_and_is_not_run_again(
    mesh: worqr.Mesh, handler: Callable[[bytes], Any]
) -> None:
    async with mesh.connect(), serving(mesh, "Q1", handler, timeout=60, retry=NOW):
        q = mesh.queue("Q1")
        job = await q.dispatch(b"a", result_ttl=60)
        assert await job.result(30) == "late"  # type: ignore[comparison-overlap]
        info = await q.info()
        assert (info.counts["claimed"], info.counts["finished"], info.failed) == (1, 1, 0)
        assert "retried" not in info.counts


@pytest.mark.leaves(*FAILED)
async def test_a_plain_handler_learns_of_its_timeout_when_it_asks(mesh: worqr.Mesh) -> None:
    reasons: list[str | None] = []

    def spin(task: bytes) -> None:
        context = worqr.current()
        context.extend(0.1)  # from now on: a thread that has not begun by then would never begin
        try:
            while True:
                context.check_cancelled()
                threading.Event().wait(0.005)
        finally:
            reasons.append(context.cancel_reason)

    async with mesh.connect(), serving(mesh, "Q1", spin, timeout=60, retry=RetryPolicy(max_timeouts=2, min_backoff=0)):
        q = mesh.queue("Q1")
        await q.enqueue(b"a")
        await eventually(lambda: failed(q), 1)
        assert reasons == ["timeout", "timeout"]
        (record,) = await q.failed.list()
        assert (record.reason, record.timeouts, record.failures) == ("timeout", 2, 0)


@pytest.mark.leaves(*FAILED)
async def test_whatever_it_raises_on_the_way_out_it_has_timed_out(mesh: worqr.Mesh) -> None:
    async def handler(task: bytes) -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise worqr.Failure("on the way out")

    async with mesh.connect(), serving(mesh, "Q1", handler, timeout=0.05, retry=NOW):
        q = mesh.queue("Q1")
        await q.enqueue(b"a")
        await eventually(lambda: failed(q), 1)
        (record,) = await q.failed.list()
        assert (record.reason, record.timeouts) == ("timeout", 3)


async def test_a_run_that_has_timed_out_is_still_cancelled_for_good(mesh: worqr.Mesh) -> None:
    held, slow = Held(), trio.Event()

    async def handler(task: bytes) -> None:
        try:
            await held(task)
        finally:
            with trio.CancelScope(shield=True):
                await slow.wait()

    async with mesh.connect(), serving(mesh, "Q1", handler, timeout=0.1, retry=NOW):
        q = mesh.queue("Q1")
        job = await q.dispatch(b"a", id="x", result_ttl=60)
        await held.wait_for(lambda: bool(held.cancelled))
        assert await job.cancel(reason="enough") == worqr.CancelCount(0, 1, 0)
        slow.set()
        with pytest.raises(worqr.JobCancelled, match="enough"):
            await job.result(30)
        assert held.cancelled == [(b"a", "timeout")]
        assert (await q.info()).counts == {"enqueued": 1, "claimed": 1, "cancelled": 1}


async def test_a_deadline_that_passed_does_not_meet_the_next_run_in_its_slot(mesh: worqr.Mesh) -> None:
    runs, passed = Runs(), 0.0

    async def handler(task: bytes) -> None:
        nonlocal passed
        runs.begin(task)
        if deadline := worqr.current().deadline:
            passed = deadline - time.monotonic() + trio.current_time() + 0.05
        else:
            await trio.sleep_until(passed)

    async with mesh.connect(), serving(mesh, "Q1", handler, room=1):
        q = mesh.queue("Q1")
        await q.dispatch(b"short", timeout=1.5)
        await q.enqueue(b"long")
        await eventually(lambda: finished(q), 2)
    assert [context.cancel_reason for context in runs.contexts] == [None, None]


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "5", True])
async def test_timeout_is_a_duration_above_zero(mesh: worqr.Mesh, timeout: Any) -> None:
    async with mesh.join() as peer:
        with pytest.raises(worqr.UsageError, match="timeout must be"):
            await peer.serve("Q1", Runs(), timeout=timeout)
        assert (await mesh.workers())[0].queues == frozenset()


@pytest.mark.parametrize("ends", ["returns", "raises", "hangs"])
async def test_a_handler_that_blocks_the_loop_costs_its_neighbour_no_timeout(mesh: worqr.Mesh, ends: str) -> None:
    attempts: list[tuple[int, int]] = []

    async def handler(task: bytes) -> None:
        if task == b"block":
            time.sleep(1)
            return
        attempts.append((worqr.current().failures, worqr.current().timeouts))
        if len(attempts) == 1:
            await trio.sleep(3600 if ends == "hangs" else 0.35)
            await trio.sleep(0.05)  # this one begins when the loop turns again
            if ends == "raises":
                raise ValueError

    async with mesh.connect(), serving(mesh, "Q1", handler, timeout=0.7, retry=NOW):
        q = mesh.queue("Q1")
        await q.enqueue(b"neighbour")
        await until(lambda: attempts)
        await q.enqueue(b"block")
        await eventually(lambda: finished(q), 2)
        assert attempts == {"returns": [(0, 0)], "raises": [(0, 0), (1, 0)], "hangs": [(0, 0), (0, 1)]}[ends]


# More time


class Run:
    """What a heap of deadlines knows of a run."""

    def __init__(self) -> None:
        self.timer: Timer | None = None
        self.cancel_reason: str | None = None

    def cancel(self, reason: str) -> None:
        self.cancel_reason = reason


async def test_a_deadline_that_was_moved_counts_and_the_one_before_does_not(mock_clock: MockClock) -> None:
    deadlines, late, early, same = Deadlines(), cast("Any", Run()), cast("Any", Run()), cast("Any", Run())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(deadlines.watch_forever)
        for run in (late, early, same):
            deadlines.begin(run, 1000)
        await trio.testing.wait_all_tasks_blocked()
        mock_clock.jump(900)
        await trio.testing.wait_all_tasks_blocked()
        deadlines.request_extension(late, 2000)
        await trio.to_thread.run_sync(deadlines.request_extension, early, 10)
        await trio.testing.wait_all_tasks_blocked()
        seen: list[tuple[str | None, ...]] = []
        for jump in (0, 50, 100, 1000, 1000):  # at 900, 950, 1050, 2050, 3050
            mock_clock.jump(jump)
            await trio.testing.wait_all_tasks_blocked()
            seen.append((late.cancel_reason, early.cancel_reason, same.cancel_reason))
        nursery.cancel_scope.cancel()
    assert seen == [
        *((None, None, None), (None, "timeout", None)),
        *((None, "timeout", "timeout"), (None, "timeout", "timeout"), ("timeout", "timeout", "timeout")),
    ]


async def test_deadlines_that_were_moved_are_swept(mock_clock: MockClock) -> None:
    deadlines, run = Deadlines(), cast("Any", Run())
    deadlines.begin(run, 1000)
    for _ in range(5 * COMPACT_OVER):
        deadlines.request_extension(run, 1000)
    assert len(deadlines._heap) <= COMPACT_OVER + 1
    assert run.timer.stop() is run
    deadlines.request_extension(run, 1)
    mock_clock.jump(5000)
    deadlines.cancel_late()
    assert (run.cancel_reason, deadlines._heap) == (None, [])


async def test_a_run_may_ask_for_more_time(mesh: worqr.Mesh) -> None:
    async def handler(task: bytes) -> None:
        worqr.current().extend(600)
        await trio.sleep(1.2)

    async with mesh.connect(), serving(mesh, "Q1", handler, timeout=1, retry=NOW):
        q = mesh.queue("Q1")
        await q.enqueue(b"a")
        await eventually(lambda: finished(q), 1)
        assert "retried" not in (await q.info()).counts


@pytest.mark.leaves(*FAILED)
async def test_a_run_may_ask_for_less_time(mesh: worqr.Mesh) -> None:
    async def handler(task: bytes) -> None:
        worqr.current().extend(dt.timedelta(milliseconds=50))
        await trio.sleep_forever()

    async with mesh.connect(), serving(mesh, "Q1", handler, timeout=600, retry=RetryPolicy(max_timeouts=1)):
        q = mesh.queue("Q1")
        await q.enqueue(b"a")
        await eventually(lambda: failed(q), 1)
        assert (await q.failed.list())[0].reason == "timeout"


async def test_a_run_without_a_timeout_gets_none_by_asking_for_time(mesh: worqr.Mesh) -> None:
    seen: list[float | None] = []

    async def handler(task: bytes) -> None:
        worqr.current().extend(0.05)
        await trio.sleep(0.2)
        seen.append(worqr.current().deadline)

    async with mesh.connect(), serving(mesh, "Q1", handler):
        await mesh.queue("Q1").enqueue(b"a")
        await until(lambda: seen == [None])


@pytest.mark.leaves(*FAILED)
async def test_it_is_too_late_to_ask_for_time_once_it_is_over(mesh: worqr.Mesh) -> None:
    async def handler(task: bytes) -> None:
        try:
            await trio.sleep_forever()
        finally:
            worqr.current().extend(60)

    async with mesh.connect(), serving(mesh, "Q1", handler, timeout=0.05, retry=RetryPolicy(max_timeouts=1)):
        q = mesh.queue("Q1")
        await q.enqueue(b"a")
        await eventually(lambda: failed(q), 1)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), "5", None, True])
async def test_more_time_is_a_duration_above_zero(mesh: worqr.Mesh, seconds: Any) -> None:
    errors: list[BaseException] = []

    async def handler(task: bytes) -> None:
        with pytest.raises(worqr.UsageError, match="seconds of extend") as raised:
            worqr.current().extend(seconds)
        errors.append(raised.value)

    async with mesh.connect(), serving(mesh, "Q1", handler, timeout=30):
        await mesh.queue("Q1").enqueue(b"a")
        await until(lambda: errors)
