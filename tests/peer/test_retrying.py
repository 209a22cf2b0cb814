"""What becomes of a run that raised: when it is tried again, how often, and what is remembered about it."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest
import trio

import worqr
from tests.peer import process_jobs
from tests.peer.tools import QUICK, Runs, eventually, serving
from tests.support.patience import PATIENCE
from tests.support.servers import Server
from worqr import Failure, Retry, RetryPolicy, Undecodable, Update

FAILED = ("{Q1}:failed", "{Q1}:aside*")
BROKEN = ("{Q1}:broken", "{Q1}:aside*")


class Raising(Runs):
    """A handler that raises what `raises(attempt)` answers, and returns when that is None."""

    def __init__(self, raises: Callable[[int], BaseException | None]) -> None:
        super().__init__()
        self.raises = raises
        self.times: list[float] = []

    async def __call__(self, task: bytes) -> object:
        self.times.append(trio.current_time())
        self.begin(task)
        if (error := self.raises(worqr.current().attempt)) is not None:
            raise error
        return None

    @property
    def waits(self) -> list[float]:
        """Seconds between one run and the next."""
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]


def always(error: BaseException) -> Raising:
    return Raising(lambda _attempt: error)


def once(error: BaseException) -> Raising:
    return Raising(lambda attempt: error if attempt == 1 else None)


async def failed(q: worqr.Queue) -> int:
    return (await q.info()).failed


async def finished(q: worqr.Queue) -> int:
    return (await q.info()).counts.get("finished", 0)


def server_time(server: Server) -> datetime:
    seconds, microseconds = server.client().time()
    return datetime.fromtimestamp(seconds, UTC) + timedelta(microseconds=microseconds)


# When


async def test_the_backoff_is_doubled_up_to_its_maximum_and_the_tenth_failure_is_final(
    mesh: worqr.Mesh, server: Server, expects_left: Callable[..., None]
) -> None:
    expects_left(*FAILED)
    async with mesh.join() as peer, peer.work("Q1", retry=RetryPolicy(jitter=False)) as claims:
        q = mesh.queue("Q1")
        job = await q.dispatch(b"a", id="x")
        for run in range(1, 11):
            (claim,) = await claims.take(1)
            assert (claim.attempt, claim.failures, claim.last_attempt) == (run, run - 1, run == 10)
            before = server_time(server)
            await claim.retry()
            after = server_time(server)
            status = await job.status()
            if run < 10:
                assert status.state == "scheduled" and status.run_at is not None and status.failures == run
                wait, ms = timedelta(seconds=[2, 4, 8, 16, 32, 64, 128, 256, 300][run - 1]), timedelta(milliseconds=1)
                assert before - ms <= status.run_at - wait <= after + ms
                await q.dispatch(b"", id="x", update=Update(data=False))  # now, with its counts as they are
        assert status.state == "failed"
        assert [(record.id, record.failures) for record in await q.failed.list()] == [("x", 10)]


async def test_jitter_spreads_what_failed_together(mesh: worqr.Mesh, server: Server) -> None:
    async with mesh.join() as peer, peer.work("Q1", retry=RetryPolicy(min_backoff=100)) as claims:
        q = mesh.queue("Q1")
        jobs = [await q.dispatch(b"%d" % n) for n in range(100)]
        batch = await claims.take(100)
        start = server_time(server)
        for claim in batch:
            await claim.retry()
        end = server_time(server)
        due = [(await job.status()).run_at for job in jobs]
        assert all(start + timedelta(seconds=50) <= moment <= end + timedelta(seconds=100) for moment in due if moment)
        seconds = sorted((moment - start).total_seconds() for moment in due if moment)
        assert len(seconds) == 100 and seconds[0] < 65 and seconds[-1] > 85
        await q.delete()


async def test_a_failed_run_waits_for_its_backoff(mesh: worqr.Mesh) -> None:
    handler = once(ValueError("x"))
    async with mesh.connect(), serving(mesh, "Q1", handler, retry=RetryPolicy(min_backoff=0.3, jitter=False)):
        q = mesh.queue("Q1")
        await q.enqueue(b"a")
        await handler.wait(2)
        await eventually(q.running, [])
    assert 0.3 <= handler.waits[0] < 20
    assert [context.failures for context in handler.contexts] == [0, 1]


@pytest.mark.parametrize("delay", [0, 0.2])
async def test_an_explicit_delay_is_never_raised_to_the_backoff(mesh: worqr.Mesh, delay: float) -> None:
    handler = once(Retry(delay=delay))
    async with mesh.connect(), serving(mesh, "Q1", handler, retry=RetryPolicy(min_backoff=60)):
        await mesh.queue("Q1").enqueue(b"a")
        await handler.wait(2)
        await eventually(mesh.queue("Q1").running, [])
    assert delay <= handler.waits[0] < 30


async def test_a_retry_may_name_the_moment(mesh: worqr.Mesh, server: Server) -> None:
    moment = server_time(server) + timedelta(seconds=2)
    handler = once(Retry(run_at=moment, counted=False))
    arrived: list[datetime] = []

    async def note(task: bytes) -> None:
        arrived.append(server_time(server))
        handler.raises = lambda _attempt: Retry(run_at=moment, counted=False) if len(arrived) == 1 else None
        await handler(task)

    async with mesh.connect(), serving(mesh, "Q1", note, retry=RetryPolicy(min_backoff=60)):
        await mesh.queue("Q1").enqueue(b"a")
        await handler.wait(2)
        await eventually(mesh.queue("Q1").running, [])
    assert moment <= arrived[1] < moment + timedelta(seconds=30)
    assert timedelta(0) <= handler.contexts[1].run_at - moment <= timedelta(milliseconds=1)


async def test_a_moment_in_the_past_is_now(mesh: worqr.Mesh) -> None:
    handler = once(Retry(run_at=datetime(2001, 1, 1, tzinfo=UTC)))
    async with mesh.connect(), serving(mesh, "Q1", handler):
        await mesh.queue("Q1").enqueue(b"a")
        await handler.wait(2)
        await eventually(mesh.queue("Q1").running, [])


async def test_what_is_retried_now_goes_to_the_back(mesh: worqr.Mesh) -> None:
    handler = Raising(lambda attempt: Retry(delay=0) if attempt == 1 and handler.tasks[-1] == b"A" else None)
    async with mesh.connect():
        q = mesh.queue("Q1")
        await q.enqueue(b"A", b"B", b"C")
        async with serving(mesh, "Q1", handler, room=1):
            assert await handler.wait(4) == [b"A", b"B", b"C", b"A"]
            await eventually(q.running, [])


# How often


@pytest.mark.leaves(*FAILED)
async def test_ten_failures_are_ten_runs(mesh: worqr.Mesh) -> None:
    handler = always(ValueError("x"))
    async with mesh.connect(), serving(mesh, "Q1", handler, retry=QUICK):
        q = mesh.queue("Q1")
        await q.enqueue(b"a")
        await eventually(lambda: failed(q), 1)
        assert len(handler.tasks) == 10
        (record,) = await q.failed.list()
        assert (record.failures, record.stalls, record.timeouts, record.reason) == (10, 0, 0, "failed")


@pytest.mark.leaves(*FAILED)
@pytest.mark.parametrize(
    ("handlers", "jobs", "runs"),
    [
        (RetryPolicy(max_failures=2, min_backoff=0), None, 2),
        (RetryPolicy(max_failures=2, min_backoff=0), RetryPolicy(max_failures=4), 4),
        (RetryPolicy(max_failures=4, min_backoff=0), RetryPolicy(max_failures=1), 1),
        (RetryPolicy(max_failures=2), RetryPolicy(min_backoff=0), 2),
        (RetryPolicy(retry_on=(), min_backoff=0), None, 1),
        (RetryPolicy(retry_on=(), min_backoff=0), RetryPolicy(retry_on=(LookupError,), max_failures=3), 3),
        (RetryPolicy(max_failures=3, min_backoff=0), RetryPolicy(fail_on=(LookupError,)), 1),
        (RetryPolicy(max_failures=3, min_backoff=0, fail_on=(LookupError,)), RetryPolicy(fail_on=()), 3),
        (RetryPolicy(max_failures=3, min_backoff=0, retry_on=(OSError,)), None, 1),
        (RetryPolicy(max_failures=3, min_backoff=0, retry_on=(LookupError, OSError)), None, 3),
    ],
)
async def test_a_jobs_own_policy_is_over_that_of_the_handler(
    mesh: worqr.Mesh, handlers: RetryPolicy, jobs: RetryPolicy | None, runs: int
) -> None:
    handler = always(KeyError("a LookupError"))
    async with mesh.connect(), serving(mesh, "Q1", handler, retry=handlers):
        q = mesh.queue("Q1")
        await (q.enqueue(b"a") if jobs is None else q.dispatch(b"a", retry=jobs))
        await eventually(lambda: failed(q), 1)
        assert len(handler.tasks) == runs
        assert [context.last_attempt for context in handler.contexts][-1:] == [True] or runs == 1
        (record,) = await q.failed.list()
        assert (record.failures, record.error.type, record.error.message) == (runs, "KeyError", "'a LookupError'")


@pytest.mark.leaves(*FAILED)
async def test_a_change_of_the_handlers_policy_takes_effect_on_what_waits(mesh: worqr.Mesh) -> None:
    first, second = always(ValueError()), always(ValueError())
    async with mesh.connect():
        q = mesh.queue("Q1")
        async with serving(mesh, "Q1", first, retry=RetryPolicy(min_backoff=0.2)):
            await q.enqueue(b"a")
            await first.wait(1)
            await eventually(q.running, [])
        async with serving(mesh, "Q1", second, retry=RetryPolicy(max_failures=2)):
            await eventually(lambda: failed(q), 1)
            assert len(second.tasks) == 1


@pytest.mark.leaves(*FAILED)
async def test_a_failure_is_final(mesh: worqr.Mesh) -> None:
    handler = always(Failure("no such address"))
    async with mesh.connect(), serving(mesh, "Q1", handler):
        q = mesh.queue("Q1")
        await q.enqueue(b"a\x00\xff")
        await eventually(lambda: failed(q), 1)
        (record,) = await q.failed.list()
        assert (record.task, record.reason, record.failures) == (b"a\x00\xff", "failed", 1)
        assert (record.error.type, record.error.message) == ("worqr.Failure", "no such address")
        assert len(handler.tasks) == 1


@pytest.mark.leaves(*BROKEN)
async def test_what_is_undecodable_is_set_aside_byte_for_byte(mesh: worqr.Mesh) -> None:
    handler = always(Undecodable("not JSON"))
    async with mesh.connect(), serving(mesh, "Q1", handler, keep_failed=0):
        q = mesh.queue("Q1")
        await q.enqueue(bytes(range(256)))
        await eventually(lambda: broken(q), 1)
        (record,) = await q.undecodable.list()
        assert (record.task, record.reason, record.failures) == (bytes(range(256)), "undecodable", 0)
        assert record.error.message == "not JSON"
        assert (await failed(q), len(handler.tasks)) == (0, 1)


async def broken(q: worqr.Queue) -> int:
    return (await q.info()).undecodable


async def test_uncounted_retries_cost_nothing(mesh: worqr.Mesh) -> None:
    handler = Raising(lambda _attempt: Retry(delay=0, counted=False) if len(handler.tasks) < 25 else None)
    async with mesh.connect(), serving(mesh, "Q1", handler, retry=RetryPolicy(max_failures=1)):
        q = mesh.queue("Q1")
        await q.enqueue(b"a")
        await handler.wait(25)
        await eventually(lambda: finished(q), 1)
        assert {(context.attempt, context.failures) for context in handler.contexts} == {(1, 0)}
        assert (await q.info()).counts["retried"] == 24


async def test_counted_retries_and_errors_share_their_limit(
    mesh: worqr.Mesh, expects_left: Callable[..., None]
) -> None:
    expects_left(*FAILED)
    handler = Raising(lambda attempt: Retry("no", delay=0) if attempt % 2 else ValueError("x"))
    async with mesh.connect(), serving(mesh, "Q1", handler, retry=RetryPolicy(max_failures=5, min_backoff=0)):
        q = mesh.queue("Q1")
        await q.enqueue(b"a")
        await eventually(lambda: failed(q), 1)
        assert len(handler.tasks) == 5
        (record,) = await q.failed.list()
        assert (record.error.type, record.error.message) == ("worqr.Retry", "no")


@pytest.mark.parametrize("value", [None, False, 0, b"", ValueError("returned, not raised"), Retry(), Failure()])
async def test_whatever_is_returned_is_a_success(mesh: worqr.Mesh, value: object) -> None:
    async def handler(task: bytes) -> object:
        return value

    async with mesh.connect(), serving(mesh, "Q1", handler):
        q = mesh.queue("Q1")
        await q.enqueue(b"a")
        await eventually(lambda: finished(q), 1)
        assert await failed(q) == 0


# Groups, threads, blocks


async def test_a_retry_out_of_a_nursery_is_a_retry(mesh: worqr.Mesh) -> None:
    runs = Runs()

    async def handler(task: bytes) -> None:
        runs.begin(task)

        async def child(delay: float) -> None:
            raise Retry(delay=delay, counted=False)

        if len(runs.tasks) < 3:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(child, 0)
                nursery.start_soon(child, 0.01)

    async with mesh.connect(), serving(mesh, "Q1", handler):
        await mesh.queue("Q1").enqueue(b"a")
        await runs.wait(3)
        await eventually(mesh.queue("Q1").running, [])
        assert [context.failures for context in runs.contexts] == [0, 0, 0]


@pytest.mark.leaves(*FAILED)
@pytest.mark.parametrize(
    ("errors", "runs", "kind"),
    [
        ([Retry(delay=0), Failure("no"), Failure("never")], 1, "worqr.Failure"),
        ([Retry(delay=0), ValueError()], 3, "ExceptionGroup"),
        ([ValueError(), Failure("no")], 1, "worqr.Failure"),
        ([ConnectionError("no"), ExceptionGroup("inner", [ConnectionError("too")])], 3, "ConnectionError"),
        ([ConnectionError("no")], 3, "ConnectionError"),
        ([BrokenPipeError("no"), ConnectionError("too")], 3, "ExceptionGroup"),
    ],
)
async def test_a_group_counts_as_what_is_in_it(mesh: worqr.Mesh, errors: list[Exception], runs: int, kind: str) -> None:
    handler = always(ExceptionGroup("several", errors))
    async with mesh.connect(), serving(mesh, "Q1", handler, retry=RetryPolicy(max_failures=3, min_backoff=0)):
        q = mesh.queue("Q1")
        await q.enqueue(b"a")
        await eventually(lambda: failed(q), 1)
        assert len(handler.tasks) == runs
        (record,) = await q.failed.list()
        assert record.error.type == kind
        assert record.error.message in {"no", "no (and 1 more)", "several (2 sub-exceptions)"}
        assert await q.failed.errors() == {kind: 1}
        assert await q.failed.count(error=kind.rpartition(".")[2]) == 1


@pytest.mark.leaves(*FAILED, "result:*")
@pytest.mark.parametrize("place", ["loop", "thread"])
async def test_a_retry_from_an_error_keeps_the_error(
    mesh: worqr.Mesh, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "worqr")

    def call() -> None:
        try:
            raise TimeoutError("the service is slow")
        except TimeoutError as error:
            raise Retry("try later", delay=0) from error

    async def call_async(task: bytes) -> None:
        call()

    def in_thread(task: bytes) -> None:
        call()

    handler: Any = in_thread if place == "thread" else call_async
    async with mesh.connect(), serving(mesh, "Q1", handler, retry=RetryPolicy(max_failures=2), runs_in=place):
        q = mesh.queue("Q1")
        job = await q.dispatch(b"a", result_ttl=60)
        with pytest.raises(worqr.JobFailed) as caught:
            await job.result(timeout=PATIENCE)
        (record,) = await q.failed.list()
        assert await q.failed.errors() == {"TimeoutError": 1}
    for error in (caught.value.error, record.error):
        assert (error.type, error.message) == ("TimeoutError", "the service is slow")
        assert 'raise TimeoutError("the service is slow")' in error.traceback
    assert "attempt 1 of 2: TimeoutError: the service is slow (Retry: try later); next attempt in 0 s" in caplog.text


@pytest.mark.leaves(*FAILED)
@pytest.mark.parametrize("error", [Retry(delay=0), ValueError("x"), Failure("no")], ids=["retry", "error", "failure"])
async def test_a_plain_handler_raises_the_same_words(mesh: worqr.Mesh, error: Exception) -> None:
    attempts: list[int] = []

    def handler(task: bytes) -> None:
        attempts.append(worqr.current().attempt)
        raise error

    async with mesh.connect(), serving(mesh, "Q1", handler, retry=RetryPolicy(max_failures=3, min_backoff=0)):
        q = mesh.queue("Q1")
        await q.enqueue(b"a")
        await eventually(lambda: failed(q), 1)
        assert attempts == ([1] if isinstance(error, Failure) else [1, 2, 3])


@pytest.mark.parametrize(
    ("error", "state", "failures"),
    [(Retry(delay=60), "scheduled", 1), (Retry(delay=0, counted=False), "waiting", 0), (ValueError(), "scheduled", 1)],
)
async def test_the_block_of_a_claim_that_raises_is_settled_by_the_policy(
    mesh: worqr.Mesh, error: Exception, state: str, failures: int
) -> None:
    async with mesh.join() as peer, peer.work("Q1", retry=RetryPolicy(min_backoff=60)) as claims:
        q = mesh.queue("Q1")
        job = await q.dispatch(b"a")
        async with await anext(claims):
            raise error
        status = await job.status()
        assert (status.state, status.failures) == (state, failures)
        await q.delete()


@pytest.mark.leaves(*FAILED, *BROKEN)
async def test_the_block_of_a_claim_sets_aside_what_will_never_do(mesh: worqr.Mesh) -> None:
    async with mesh.join() as peer, peer.work("Q1", retry=RetryPolicy(fail_on=(LookupError,))) as claims:
        q = mesh.queue("Q1")
        await q.enqueue(b"failure", b"undecodable", b"error")
        for error in (Failure("no"), Undecodable("what?"), KeyError("k")):
            async with await anext(claims):
                raise error
        assert [record.task for record in await q.failed.list()] == [b"error", b"failure"]
        assert [record.task for record in await q.undecodable.list()] == [b"undecodable"]


@pytest.mark.parametrize(
    "how",
    [{"delay": -1}, {"delay": "1"}, {"delay": 1, "run_at": datetime(2030, 1, 1, tzinfo=UTC)}, {"run_at": 5}],
)
async def test_a_claim_that_is_retried_wrongly_is_still_ours(mesh: worqr.Mesh, how: Any) -> None:
    async with mesh.join() as peer, peer.work("Q1") as claims:
        await mesh.queue("Q1").enqueue(b"a")
        (claim,) = await claims.take(1)
        with pytest.raises(worqr.UsageError, match="Retry"):
            await claim.retry(**how)
        with pytest.raises(worqr.UsageError, match="why must be a str"):
            await claim.fail(7)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        with pytest.raises(worqr.UsageError, match="a result must be bytes"):
            await claim.finish("text")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        await claim.finish()


# What is remembered


async def test_a_raw_task_that_failed_is_a_job_from_then_on(mesh: worqr.Mesh) -> None:
    handler = Raising(lambda attempt: ValueError() if attempt < 3 else None)
    async with mesh.connect(), serving(mesh, "Q1", handler, retry=RetryPolicy(min_backoff=0.05)):
        q = mesh.queue("Q1")
        await q.enqueue(b"a", b"a")
        await handler.wait(6)
        await eventually(q.running, [])
    ids = [context.id for context in handler.contexts]
    assert len(set(ids)) == 2 and all(ids.count(each) == 3 for each in ids)
    for each in set(ids):
        assert [context.failures for context in handler.contexts if context.id == each] == [0, 1, 2]


@pytest.mark.parametrize(
    ("update", "failures", "task"),
    [
        (Update(), 0, b"new"),
        (Update(counts=False), 1, b"new"),
        (Update(data=False), 1, b"old"),
        (Update(data=False, counts=True), 0, b"old"),
    ],
)
async def test_a_dispatch_onto_a_job_that_failed_resets_its_counts_as_it_says(
    mesh: worqr.Mesh, update: Update, failures: int, task: bytes
) -> None:
    handler = Raising(lambda _attempt: ValueError() if len(handler.tasks) == 1 else None)
    async with mesh.connect(), serving(mesh, "Q1", handler, retry=RetryPolicy(min_backoff=60)):
        q = mesh.queue("Q1")
        job = await q.dispatch(b"old", id="x")
        await eventually(lambda: state(job), "scheduled")
        await q.dispatch(b"new", id="x", update=update)
        await handler.wait(2)
        await eventually(q.running, [])
    assert (handler.tasks[1], handler.contexts[1].failures) == (task, failures)


async def state(job: worqr.Job[Any]) -> str:
    return (await job.status()).state


async def test_a_leaving_peer_counts_nothing(mesh: worqr.Mesh) -> None:
    runs = Runs()

    async def handler(task: bytes) -> None:
        runs.begin(task)
        if len(runs.tasks) <= 5:
            await trio.sleep_forever()

    async with mesh.connect():
        q = mesh.queue("Q1")
        await q.dispatch(b"a", id="x", retry=RetryPolicy(max_failures=1, max_stalls=1, max_timeouts=1))
        for n in range(6):
            async with serving(mesh, "Q1", handler):
                await runs.wait(n + 1)
                if n == 5:
                    await eventually(lambda: finished(q), 1)
    assert {context.attempt for context in runs.contexts} == {1}
    assert {context.id for context in runs.contexts} == {"x"}


async def test_what_is_logged_of_a_retry(mesh: worqr.Mesh, caplog: pytest.LogCaptureFixture) -> None:
    handler = once(Retry("not yet", delay=0))
    async with mesh.connect(), serving(mesh, "Q1", handler):
        with caplog.at_level("INFO", "worqr"):
            await mesh.queue("Q1").enqueue(b"secret")
            await handler.wait(2)
            await eventually(mesh.queue("Q1").running, [])
    (line,) = [record for record in caplog.records if record.getMessage().startswith("task.retry")]
    assert "not yet" in line.getMessage() and "attempt 1" in line.getMessage() and line.exc_info is None
    assert "secret" not in caplog.text


# What a policy says


async def test_a_function_of_the_application_decides_when(mesh: worqr.Mesh, caplog: pytest.LogCaptureFixture) -> None:
    asked: list[tuple[int, str]] = []

    def backoff(failures: int, error: str) -> float:
        asked.append((failures, error))
        if failures == 2:
            raise ZeroDivisionError
        return 0.0

    handler = Raising(lambda attempt: ValueError(attempt) if attempt < 4 else None)
    retry = RetryPolicy(backoff=backoff, min_backoff=0, max_backoff=0)
    async with mesh.connect(), serving(mesh, "Q1", handler, retry=retry):
        await mesh.queue("Q1").dispatch(b"a")
        await eventually(lambda: finished(mesh.queue("Q1")), 1)
    assert asked == [(1, "ValueError"), (2, "ValueError"), (3, "ValueError")]
    [line] = [each.getMessage() for each in caplog.records if each.__dict__.get("event") == "retry.backoff"]
    assert "ZeroDivisionError" in line


async def test_without_a_limit_a_task_fails_as_often_as_it_likes(
    mesh: worqr.Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    handler = Raising(lambda attempt: ValueError(attempt) if attempt < 15 else None)
    retry = RetryPolicy(max_failures=math.inf, min_backoff=0, max_backoff=0)
    async with mesh.connect(), serving(mesh, "Q1", handler):
        job = await mesh.queue("Q1").dispatch(b"a", retry=retry)
        record = await mesh.queue("Q1").read(job.id)
        await eventually(lambda: finished(mesh.queue("Q1")), 1)
    assert record is not None
    assert record.options["max_failures"] == "unlimited"
    assert "attempt 3 of unlimited" in caplog.text


async def test_no_retry_begins_later_than_retry_for_allows(mesh: worqr.Mesh, expects_left: Callable[..., None]) -> None:
    expects_left(*FAILED)
    handler = Raising(lambda attempt: Retry("soon", delay=0) if attempt < 3 else Retry("late", delay=3601))
    async with mesh.connect(), serving(mesh, "Q1", handler, retry=RetryPolicy(retry_for=timedelta(hours=1))):
        await mesh.queue("Q1").dispatch(b"a", id="x")
        await eventually(lambda: failed(mesh.queue("Q1")), 1)
        [entry] = await mesh.queue("Q1").failed.list(1)
    assert (entry.failures, entry.error.message) == (3, "late")


@pytest.mark.leaves(*FAILED)
async def test_the_time_for_retries_begins_with_the_first_run_that_failed(mesh: worqr.Mesh, server: Server) -> None:
    async with mesh.join() as peer, peer.work("Q1", retry=RetryPolicy(retry_for=60)) as claims:
        job = await mesh.queue("Q1").dispatch(b"a", id="x")
        (claim,) = await claims.take(1)
        await claim.retry(delay=0)
        key = f"{mesh.prefix}:{{Q1}}:job:x"
        since = server.client().hget(key, "failing_since")
        assert since == b"%d" % (claim.fence // 1000)
        server.client().hset(key, "failing_since", int(since) - 60_000)
        (claim,) = await claims.take(1)
        assert claim.last_attempt
        await claim.retry(delay=0)
        assert (await job.status()).state == "failed"


async def test_a_timeout_is_final_when_there_is_no_time_for_another_run(
    mesh: worqr.Mesh, expects_left: Callable[..., None]
) -> None:
    expects_left(*FAILED)

    async def handler(task: bytes) -> None:
        await trio.sleep_forever()

    retry = RetryPolicy(retry_for=1, min_backoff=100)
    async with mesh.connect(), serving(mesh, "Q1", handler, retry=retry, timeout=0.05):
        await mesh.queue("Q1").dispatch(b"a", id="x")
        await eventually(lambda: failed(mesh.queue("Q1")), 1)
        [entry] = await mesh.queue("Q1").failed.list(1)
    assert (entry.reason, entry.timeouts) == ("timeout", 1)


async def test_a_crash_of_a_process_is_retried_also_if_there_is_no_time_for_another_run(
    mesh: worqr.Mesh, expects_left: Callable[..., None]
) -> None:
    expects_left(*FAILED)
    retry = RetryPolicy(retry_for=0.001, max_stalls=2, min_backoff=0.1)
    async with mesh.connect(), serving(mesh, "Q1", process_jobs.crash, runs_in="process", retry=retry):
        await mesh.queue("Q1").dispatch(b"exit", id="x")
        await eventually(lambda: failed(mesh.queue("Q1")), 1)
        [entry] = await mesh.queue("Q1").failed.list(1)
    assert (entry.reason, entry.stalls) == ("stalled", 2)


# Tasks that are not ready


async def snoozing_in_a_nursery(task: bytes) -> str:
    async def one(tell: Callable[[str], None]) -> None:
        tell(process_jobs.snoozing(task))

    told: list[str] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep_forever) if worqr.current().run <= 2 else None
        nursery.start_soon(one, told.append)
    return told[0]


async def snoozing_in_a_group(task: bytes) -> str:
    async def one() -> str:
        return process_jobs.snoozing(task)

    async with asyncio.TaskGroup() as group:
        found = group.create_task(one())
    return found.result()


async def snoozing(task: bytes) -> str:
    return process_jobs.snoozing(task)


SNOOZING: Final[list[tuple[Any, str]]] = [
    *((snoozing, "loop"), (snoozing, "asyncio"), (process_jobs.snoozing, "thread"), (process_jobs.snoozing, "process")),
    *((snoozing_in_a_nursery, "loop"), (snoozing_in_a_group, "asyncio")),
]


@pytest.mark.parametrize(("handler", "place"), SNOOZING)
async def test_a_snooze_is_no_failure_and_no_error_wherever_it_is_raised(
    mesh: worqr.Mesh, handler: Any, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "worqr.peer.task_log")
    async with mesh.connect(), serving(mesh, "Q1", handler, runs_in=place, retry=RetryPolicy(max_failures=1)):
        job = await mesh.queue("Q1").dispatch(b"a", result_ttl=60)
        assert await job.result(PATIENCE) == "run 3, attempt 1, failures 0"
        assert (await job.status()).failures == 0
        assert (await mesh.queue("Q1").info()).counts.get("failed", 0) == 0
    events = [each.__dict__["event"] for each in caplog.records if each.name == "worqr.peer.task_log"]
    assert [each for each in events if each != "task.started"] == ["task.snoozed"] * 2 + ["task.finished"]


async def test_what_a_snoozed_task_waits_for_is_shown_and_its_earlier_errors_stay(mesh: worqr.Mesh) -> None:
    def raises(_: int) -> BaseException:
        return ValueError("once") if worqr.current().run == 1 else worqr.Snooze(timedelta(hours=1), "the upload")

    async with mesh.connect(), serving(mesh, "Q1", Raising(raises), retry=RetryPolicy(min_backoff=0)):
        job = await mesh.queue("Q1").dispatch(b"a")
        await eventually(lambda: state_of(job), "scheduled")
        status, record = await job.status(), await mesh.queue("Q1").read(job.id)
        assert (status.failures, status.waits_for, status.error) == (1, "the upload", None)
        assert record is not None
        assert [each.error.message for each in record.tries] == ["once"]
        await job.cancel()


async def state_of(job: worqr.Job[Any]) -> str:
    status = await job.status()
    return status.state if status.failures and status.waits_for else ""


async def test_the_block_of_a_claim_may_snooze(mesh: worqr.Mesh) -> None:
    async with mesh.join() as peer, peer.work("Q1") as claims:
        job = await mesh.queue("Q1").dispatch(b"a")
        async with (await claims.take(1))[0]:
            raise worqr.Snooze(datetime.now(UTC) + timedelta(days=1))
        assert ((await job.status()).state, (await job.status()).failures) == ("scheduled", 0)
        await job.cancel()


@pytest.mark.parametrize("until", [-1, None, "60", math.inf, datetime(2031, 1, 1)])
def test_a_snooze_needs_a_time(until: Any) -> None:
    with pytest.raises(worqr.UsageError, match="until of Snooze"):
        worqr.Snooze(until)
