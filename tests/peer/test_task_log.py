"""What the log says of a task's runs: one line each, with all that somebody on call wants to know, and the same as fields."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
import trio

import worqr
from tests.peer.tools import Runs, eventually, serving, until
from tests.support.patience import PATIENCE
from worqr import RetryPolicy
from worqr.peer.task_log import _undecodable
from worqr.policy import Undecodable
from worqr.tracebacks import one_line

pytestmark = pytest.mark.one_server

FAILED = ("{Q1}:failed", "{Q1}:aside*")
BROKEN = ("{Q1}:broken", "{Q1}:aside*")
RUN = {"queue", "job", "attempt", "attempts", "worker"}


def records(caplog: pytest.LogCaptureFixture, *events: str) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.__dict__.get("event") in events]


def fields(record: logging.LogRecord, *names: str) -> tuple[object, ...]:
    return tuple(record.__dict__[name] for name in names)


async def failed(q: worqr.Queue) -> int:
    return (await q.info()).failed


# Failures


@pytest.mark.leaves(*FAILED)
async def test_each_failure_is_one_line_and_the_last_one_an_error(
    mesh: worqr.Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    async def send(task: bytes) -> None:
        raise ConnectionError("smtp:\nconnection refused")

    policy = RetryPolicy(max_failures=3, min_backoff=0.9, max_backoff=0.9, jitter=False)
    async with mesh.connect(), serving(mesh, "Q1", send, retry=policy) as peer:
        q, worker = mesh.queue("Q1"), peer.id
        await q.dispatch(b"secret", id="mail-2")
        await eventually(lambda: failed(q), 1)
    first, second, last = records(caplog, "task.failed")
    assert second.getMessage() == (
        "task.failed: queue 'Q1', job mail-2, attempt 2 of 3: ConnectionError: smtp: connection refused; "
        "next attempt in 0.9 s"
    )
    assert last.getMessage() == (
        "task.failed: queue 'Q1', job mail-2: gave up after 3 attempts: ConnectionError: smtp: connection refused; "
        "it is in the dead-letter queue: worqr failed 'Q1'"
    )
    assert [record.levelname for record in (first, second, last)] == ["WARNING", "WARNING", "ERROR"]
    assert fields(second, "queue", "job", "attempt", "attempts", "worker", "error", "retry_in") == (
        *("Q1", "mail-2", 2, 3, worker, "ConnectionError: smtp: connection refused", 0.9),
    )
    assert fields(last, "attempt", "attempts") == (3, 3) and not hasattr(last, "retry_in")
    assert "secret" not in caplog.text


@pytest.mark.leaves(*FAILED)
async def test_an_error_that_is_not_retried_is_given_up_at_once(
    mesh: worqr.Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    async def handler(task: bytes) -> None:
        raise worqr.Failure("no such user")

    async with mesh.connect(), serving(mesh, "Q1", handler):
        q = mesh.queue("Q1")
        await q.dispatch(b"a", id="x")
        await eventually(lambda: failed(q), 1)
    (record,) = records(caplog, "task.failed")
    assert record.getMessage().startswith(
        "task.failed: queue 'Q1', job x: gave up after 1 attempt (such an error is not retried): Failure: no such user; "
    )
    assert (record.levelname, record.exc_info) == ("ERROR", None)


async def test_a_retry_at_a_time_says_the_time(mesh: worqr.Mesh, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "worqr.peer.task_log")
    runs = Runs()

    async def handler(task: bytes) -> None:
        runs.begin(task)
        if len(runs.tasks) == 1:
            raise worqr.Retry("not yet", run_at=datetime(2024, 5, 1, tzinfo=UTC))

    async with mesh.connect(), serving(mesh, "Q1", handler):
        await mesh.queue("Q1").enqueue(b"a")
        await runs.wait(2)
        await eventually(mesh.queue("Q1").running, [])
    (record,) = records(caplog, "task.retry")
    assert record.getMessage().endswith("Retry: not yet; next attempt at 2024-05-01T00:00:00+00:00")
    assert (record.levelname, record.__dict__["run_at"]) == ("INFO", "2024-05-01T00:00:00+00:00")


async def test_of_a_queue_with_lanes_only_the_lane_is_said_to_be_paused(
    mesh: worqr.Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    done = trio.Event()

    @mesh.task(name="Q1", lanes=worqr.Lanes(by="tenant"))
    async def call(tenant: str) -> None:
        if worqr.current().attempt == 1 and not records(caplog, "task.retry"):
            raise worqr.RateLimited(0.1)
        done.set()

    async with mesh.join():
        await call.enqueue("acme")
        await done.wait()
    (record,) = records(caplog, "task.retry")
    assert record.getMessage().endswith("RateLimited: rate limited for 0.1 s; lane 'acme' is paused for 0.1 s")
    assert fields(record, "lane", "retry_in") == ("acme", 0.1)


@pytest.mark.parametrize("returns", [False, True])
async def test_a_cancelled_task_is_named_by_its_job(
    mesh: worqr.Mesh, caplog: pytest.LogCaptureFixture, returns: bool
) -> None:
    caplog.set_level(logging.INFO)
    begun = trio.Event()

    async def handler(task: bytes) -> None:
        begun.set()
        with trio.CancelScope(shield=returns):
            while worqr.current().cancel_reason is None:
                await trio.sleep(0.01)

    async with mesh.connect(), serving(mesh, "Q1", handler):
        job = await mesh.queue("Q1").dispatch(b"x", id="mail-2")
        await begun.wait()
        await job.cancel(wait=20)
        await until(lambda: bool(records(caplog, "task.cancelled")))
    (record,) = records(caplog, "task.cancelled")
    assert record.getMessage() == "task.cancelled: queue 'Q1', job mail-2: the task was cancelled"
    assert fields(record, "queue", "job") == ("Q1", "mail-2")


@pytest.mark.leaves(*FAILED)
async def test_claims_by_hand_are_told_of_too(mesh: worqr.Mesh, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "worqr.peer.task_log")
    async with mesh.join(grace=0) as peer, peer.work("Q1") as claims:
        await mesh.queue("Q1").dispatch(b"a", id="x")
        (claim,) = await claims.take(1)
        await claim.retry(delay=0)
        (claim,) = await claims.take(1)
        await claim.fail("no such user")
    retried, gave_up = records(caplog, "task.retry", "task.failed")
    assert "job x, attempt 1 of 10: " in retried.getMessage() and "next attempt in 0 s" in retried.getMessage()
    assert "gave up after 2 attempts" in gave_up.getMessage() and "Failure: no such user" in gave_up.getMessage()


def test_an_error_is_one_line_of_bounded_length() -> None:
    assert one_line(KeyError()) == "KeyError"
    assert one_line(ValueError("a\n  b")) == "ValueError: a b"
    assert len(one_line(ValueError("a" * 10_000))) == 500
    group = ExceptionGroup("two", [ValueError("a"), ExceptionGroup("one", [KeyError("b")])])
    assert one_line(group) == (
        "ExceptionGroup: two (2 sub-exceptions) (ValueError: a; ExceptionGroup: one (1 sub-exception) (KeyError: 'b'))"
    )


# Tracebacks


def fail_here(task: bytes) -> None:
    """What the handlers of these tests call, in all places."""
    raise LookupError("on purpose")


async def fail_on_a_loop(task: bytes) -> None:
    fail_here(task)


async def fail_with_a_cause(task: bytes) -> None:
    try:
        fail_here(task)
    except LookupError as error:
        raise ValueError("because") from error


async def fail_in_a_group(task: bytes) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fail_on_a_loop, task)


async def call_inside(context: worqr.Context, call_next: Callable[[], Any]) -> Any:
    return await call_next()


@pytest.mark.leaves(*FAILED)
@pytest.mark.parametrize(
    ("handler", "place"),
    [
        (fail_on_a_loop, "loop"),
        (fail_on_a_loop, "asyncio"),
        (fail_here, "thread"),
        (fail_with_a_cause, "loop"),
        (fail_in_a_group, "loop"),
    ],
)
async def test_a_traceback_begins_at_the_first_frame_of_the_user(
    mesh: worqr.Mesh, caplog: pytest.LogCaptureFixture, handler: Callable[[bytes], Any], place: str
) -> None:
    options = {"retry": RetryPolicy(max_failures=1), "runs_in": place}
    async with mesh.connect(), serving(mesh, "Q1", handler, **options):
        q = mesh.queue("Q1")
        await q.enqueue(b"a")
        await eventually(lambda: failed(q), 1)
        (kept,) = await q.failed.list()
    (record,) = records(caplog, "task.failed")
    assert record.exc_info is not None
    logged = logging.Formatter().formatException(record.exc_info)
    for text in (logged, kept.error.traceback):
        files = re.findall(r'File "(.*?)", line \d+, in (\w+)', text)
        first = next(file for file in files if "trio" not in file[0]) if handler is fail_in_a_group else files[0]
        assert first[0] == __file__ and first[1] in {"fail_here", handler.__name__}
        assert "/worqr/peer/" not in text
    assert "on purpose" in logged and "on purpose" in kept.error.traceback


# What ends well


async def test_debug_has_the_beginning_and_the_end_of_each_run(
    mesh: worqr.Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "worqr.peer.task_log")
    runs = Runs()
    async with mesh.connect(), serving(mesh, "Q1", runs) as peer:
        await mesh.queue("Q1").dispatch(b"secret", id="x")
        await runs.wait(1)
        await until(lambda: records(caplog, "task.finished"))
        (consumer,) = peer._engine.consumers.entered()
        assert consumer.begun == {}
    started, finished = records(caplog, "task.started", "task.finished")
    assert started.getMessage() == "task.started: queue 'Q1', job x, attempt 1 of 10"
    assert re.fullmatch(
        r"task\.finished: queue 'Q1', job x, attempt 1 of 10: returned after [\d.e-]+ s", finished.getMessage()
    )
    assert (started.levelname, finished.levelname) == ("DEBUG", "DEBUG")
    duration = finished.__dict__["duration"]
    assert isinstance(duration, float) and 0 <= duration < PATIENCE
    assert "secret" not in caplog.text


async def test_what_does_not_end_well_is_not_remembered(mesh: worqr.Mesh, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "worqr.peer.task_log")
    runs = Runs()

    async def handler(task: bytes) -> None:
        runs.begin(task)
        if worqr.current().failures == 0:
            raise ValueError

    async with mesh.connect(), serving(mesh, "Q1", handler, retry=RetryPolicy(min_backoff=0)) as peer:
        await mesh.queue("Q1").enqueue(b"a")
        await runs.wait(2)
        await until(lambda: records(caplog, "task.finished"))
        (consumer,) = peer._engine.consumers.entered()
        assert consumer.begun == {}


async def test_above_debug_nothing_is_noted_of_what_ends_well(
    mesh: worqr.Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "worqr.peer.task_log")
    noted: list[object] = []
    runs = Runs()

    async def handler(task: bytes) -> None:
        (consumer,) = peer._engine.consumers.entered()
        noted.append(dict(consumer.begun))
        runs.begin(task)

    async with mesh.connect(), serving(mesh, "Q1", handler) as peer:
        await mesh.queue("Q1").enqueue(b"a")
        await runs.wait(1)
        await eventually(mesh.queue("Q1").running, [])
    assert noted == [{}]
    assert records(caplog, "task.started", "task.finished") == []


# Timeouts


async def test_a_thread_that_goes_on_after_its_timeout_is_told_of_at_once_and_again_when_it_returns(
    mesh: worqr.Mesh, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worqr.peer.task_log.LATE", 0.01)
    monkeypatch.setattr("worqr.peer.consumer_runner.OVERDUE_AFTER", 1000.0)  # that is for coroutines
    go = threading.Event()

    def convert(task: bytes) -> None:
        assert go.wait(2 * PATIENCE)
        deadline = worqr.current().deadline
        assert deadline is not None
        while time.monotonic() < deadline + 0.1:
            time.sleep(0.01)

    try:
        async with mesh.connect(), serving(mesh, "Q1", convert, timeout=1) as peer:
            await mesh.queue("Q1").dispatch(b"a", id="x")
            peer._engine.stuck.after = 1000.0
            await until(lambda: records(caplog, "task.overdue"))
            go.set()
            await until(lambda: records(caplog, "task.finished"))
            await eventually(mesh.queue("Q1").running, [])
    finally:
        go.set()
    (overdue,), (finished,) = records(caplog, "task.overdue"), records(caplog, "task.finished")
    said = overdue.getMessage()
    assert said.startswith("task.overdue: queue 'Q1', job x, attempt 1 of 10: tests.peer.test_task_log.")
    assert "still runs after its timeout of 1 s" in said
    assert 'runs_in="process"' in said and "check_cancelled()" in said
    assert "go.wait" in said  # where it is
    assert (overdue.levelname, overdue.__dict__["timeout"]) == ("WARNING", 1.0)
    assert finished.levelname == "WARNING" and finished.__dict__["late"] >= 0.1
    assert re.search(r"finished \d+(\.\d)? s after its timeout of 1 s$", finished.getMessage())


async def test_an_asyncio_task_that_swallows_its_timeout_is_told_of(
    mesh: worqr.Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    import asyncio

    go = threading.Event()

    async def swallow(task: bytes) -> None:
        worqr.current().extend(0.1)  # from now on: what times out before it begins is not run
        while not go.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                pass

    try:
        async with mesh.connect(), serving(mesh, "Q1", swallow, timeout=2 * PATIENCE, runs_in="asyncio"):
            await mesh.queue("Q1").dispatch(b"a", id="x")
            await until(lambda: records(caplog, "task.overdue"))
            go.set()
            await eventually(mesh.queue("Q1").running, [])
    finally:
        go.set()
    (record,) = records(caplog, "task.overdue")
    assert "asyncio.CancelledError" in record.getMessage()


# What cannot be decoded


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        (msgspec.ValidationError("Expected `int`, got `str` - at `$.n`"), "Expected `int`, got `str` - at `$.n`"),
        (msgspec.ValidationError("Object missing required field `to`"), "Object missing required field `to`"),
        (msgspec.DecodeError("JSON is malformed: invalid character (byte 3)"), "JSON is malformed: invalid character"),
        (msgspec.DecodeError("Input data was truncated"), "Input data was truncated"),
    ],
)
def test_a_decoder_that_quotes_nothing_is_quoted(cause: Exception, said: str) -> None:
    error = Undecodable("all of it")
    error.__cause__ = cause
    assert said in _undecodable(error)
    assert _undecodable(error).startswith(f"{type(cause).__name__}: ")


def test_a_decoder_that_quotes_the_payload_is_not() -> None:
    error = Undecodable("all of it")
    error.__cause__ = msgspec.ValidationError("Invalid enum value 'pa55' - at `$.color`")
    assert _undecodable(error) == "ValidationError - at `$.color`"
    error.__cause__ = ValueError("pa55 is too short")
    assert _undecodable(error) == "ValueError"


def test_what_a_handler_says_itself_is_said() -> None:
    assert _undecodable(Undecodable("not a picture")) == "Undecodable: not a picture"
