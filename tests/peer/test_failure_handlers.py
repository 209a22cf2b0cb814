"""Failure handlers: told of everything that was set aside, at least once, whatever happens to them and around them."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest
import trio

import worqr
from tests.peer.test_claims import lose
from tests.peer.tools import QUICK, Held, Runs, eventually, serving
from tests.support.patience import PATIENCE
from tests.support.servers import Server
from worqr import Failed, Failure, Retry, RetryPolicy, Undecodable
from worqr.handler_options import PATIENT

ASIDE = ("{Q1}:failed", "{Q1}:broken", "{Q1}:aside*")
OF_FAILURES = ("{Q1}-fail:*",)
ONCE = RetryPolicy(max_failures=1, max_stalls=1, max_timeouts=1)


class Told(Runs):
    """A failure handler that notes what it was told, and fails as often as it is said to."""

    def __init__(self, *fails: BaseException) -> None:
        super().__init__()
        self.records: list[Failed] = []
        self.fails = list(fails)

    async def __call__(self, record: Failed) -> None:  # type: ignore[override]
        self.records.append(record)
        self.begin(record.task)
        if self.fails:
            raise self.fails.pop(0)


async def failing(task: bytes) -> None:
    raise LookupError(f"no {task!r}")


@asynccontextmanager
async def told_by(
    mesh: worqr.Mesh, handler: Callable[[bytes], object], told: Callable[[Failed], object], **options: Any
) -> AsyncGenerator[worqr.Peer]:
    """A peer that serves Q1 with a failure handler; one failed run is final."""
    given: dict[str, Any] = {"retry": ONCE, "keep_failed": 0, **options}
    async with serving(mesh, "Q1", handler, on_failure=told, **given) as peer:
        yield peer


async def empty(q: worqr.Queue) -> tuple[int, ...]:
    info = await q.failures.info()
    return info.waiting, info.scheduled, info.running


# What is told


async def test_the_very_first_failure_is_told(mesh: worqr.Mesh) -> None:
    told, start = Told(), datetime.now(UTC)
    async with mesh.connect(), told_by(mesh, failing, told) as peer:
        q = mesh.queue("Q1")
        await q.dispatch(b"a\x00\xff", id="x", meta={"tenant": "t"})
        await told.wait(1)
        (record,) = told.records
        assert (record.id, record.queue, record.task, record.reason) == ("x", "Q1", b"a\x00\xff", "failed")
        assert (record.failures, record.stalls, record.timeouts) == (1, 0, 0)
        assert (record.worker, record.meta) == (peer.id, {"tenant": "t"})
        assert (record.error.type, record.error.message) == ("LookupError", "no b'a\\x00\\xff'")
        assert "in failing" in record.error.traceback
        assert abs((record.at - start).total_seconds()) < 20
        assert await q.failed.list() == []  # keep_failed=0 concerns the records, not who is told
        await eventually(partial(empty, q), (0, 0, 0))


@pytest.mark.leaves(*ASIDE)
@pytest.mark.parametrize("final", [True, False])
async def test_the_attributes_of_the_error_are_told(mesh: worqr.Mesh, final: bool) -> None:
    class Bounced(worqr.Failure if final else OSError):  # type: ignore[misc]
        def __init__(self, code: int) -> None:
            super().__init__("bounced")
            self.code, self.greeting, self._secret, self.socket = code, {"helo": ["ä"]}, "x", object()

    async def bounce(task: bytes) -> None:
        raise Bounced(550)

    told, fields = Told(), {"code": 550, "greeting": {"helo": ["ä"]}}
    async with mesh.connect(), told_by(mesh, bounce, told, keep_failed=10):
        q = mesh.queue("Q1")
        job = await q.dispatch(b"a", id="x")
        await told.wait(1)
        assert told.records[0].error.fields == fields
        assert await q.failed.list() == told.records
        with pytest.raises(worqr.JobFailed) as caught:
            await job.result()
        assert caught.value.error == told.records[0].error
        await eventually(partial(empty, q), (0, 0, 0))


@pytest.mark.leaves(*ASIDE)
async def test_what_is_told_is_what_is_kept(mesh: worqr.Mesh) -> None:
    told = Told()
    async with mesh.connect(), told_by(mesh, failing, told, keep_failed=10):
        q = mesh.queue("Q1")
        await q.enqueue(b"raw")
        await told.wait(1)
        assert await q.failed.list() == told.records
        assert told.records[0].id.startswith("@")
        await eventually(partial(empty, q), (0, 0, 0))


async def test_each_of_many_failures_is_told(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    told = Told()
    async with mesh.connect(), told_by(mesh, failing, told), told_by(other, failing, told):
        q = mesh.queue("Q1")
        await q.enqueue(*[b"%d" % n for n in range(200)])
        await told.wait(200)
        await eventually(partial(empty, q), (0, 0, 0))
        assert sorted(told.tasks) == sorted(b"%d" % n for n in range(200))
        await q.enqueue(b"later")  # and after the failure queue was drained
        await told.wait(201)
        await eventually(partial(empty, q), (0, 0, 0))


async def test_two_failures_of_one_id_are_two(mesh: worqr.Mesh) -> None:
    told = Told()
    async with mesh.connect():
        q = mesh.queue("Q1")
        async with told_by(mesh, failing, told):
            await q.failures.pause()
            for n in range(2):
                await q.dispatch(b"%d" % n, id="x")
                await eventually(lambda n=n: failed_count(q), n + 1)  # type: ignore[misc]
            await q.failures.resume()
            await told.wait(2)
            await eventually(partial(empty, q), (0, 0, 0))
    assert [(record.id, record.task) for record in sorted(told.records, key=lambda r: r.task)] == [
        *(("x", b"0"), ("x", b"1")),
    ]


async def failed_count(q: worqr.Queue) -> int:
    return (await q.info()).counts.get("failed", 0)


@pytest.mark.leaves("{Q1}:broken", "{Q1}:aside*")
async def test_the_reasons(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    told, held = Told(), Held()

    async def handler(task: bytes) -> None:
        if task == b"failure":
            raise Failure("no")
        if task == b"undecodable":
            raise Undecodable("what?")
        await held(task)

    async with mesh.connect(), told_by(mesh, handler, told) as peer:
        q = mesh.queue("Q1")
        await q.enqueue(b"failure", b"undecodable")
        await q.dispatch(b"timeout", timeout=0.1)
        await told.wait(3)
        await q.pause()
        await q.dispatch(b"expired", expires=0.01)
        await trio.sleep(0.05)
        await q.resume()
        await told.wait(4)
        await q.enqueue(b"stalled")
        await held.wait_for(lambda: held.tasks[-1:] == [b"stalled"])
        lose(server, prefix, peer.id)
        await told.wait(5)
        await eventually(partial(empty, q), (0, 0, 0))
    reasons = {record.task: (record.reason, record.failures, record.stalls, record.timeouts) for record in told.records}
    assert reasons == {
        b"failure": ("failed", 1, 0, 0),
        b"undecodable": ("undecodable", 0, 0, 0),
        b"timeout": ("timeout", 0, 0, 1),
        b"expired": ("expired", 0, 0, 0),
        b"stalled": ("stalled", 0, 1, 0),
    }
    types = {record.task: record.error.type for record in told.records}
    assert types[b"stalled"] == "Stalled" and types[b"timeout"] == "Timeout" and types[b"expired"] == "Expired"


async def test_a_cancelled_task_is_no_failure(mesh: worqr.Mesh) -> None:
    told, held = Told(), Held()
    async with mesh.connect(), told_by(mesh, held, told):
        q = mesh.queue("Q1")
        await q.enqueue(b"a")
        await held.wait(1)
        assert await q.cancel(b"a", wait=30) == worqr.CancelCount(0, 1, 1)
        await q.enqueue(b"b")
        held.gate.set()
        await held.wait_for(lambda: held.done == [b"b"])
        await eventually(q.running, [])
        assert (told.records, await empty(q)) == ([], (0, 0, 0))


@pytest.mark.leaves(*ASIDE)
async def test_without_a_handler_there_is_no_failure_job(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    """Whether there is one is what the worker said that had the task: with a handler elsewhere, too."""
    told = Told()
    async with mesh.connect(), serving(mesh, "Q1", failing, retry=ONCE):
        q = mesh.queue("Q1")
        await q.enqueue(b"a")
        await eventually(lambda: failed_count(q), 1)
        assert (await q.failures.info()).counts == {}
        assert await empty(q) == (0, 0, 0)
    async with mesh.connect(), told_by(other, failing, told):
        await q.enqueue(b"b")
        assert await told.wait(1) == [b"b"]
        await eventually(partial(empty, q), (0, 0, 0))


async def test_a_plain_failure_handler_runs_in_a_thread(mesh: worqr.Mesh) -> None:
    threads, ids = set[int](), list[str]()
    done = trio.Event()
    token = trio.lowlevel.current_trio_token()

    def told(record: Failed) -> None:
        threads.add(threading.get_ident())
        ids.append(worqr.current().queue)
        token.run_sync_soon(done.set)

    async with mesh.connect(), told_by(mesh, failing, told):
        await mesh.queue("Q1").enqueue(b"a")
        with trio.fail_after(PATIENCE):
            await done.wait()
        await eventually(partial(empty, mesh.queue("Q1")), (0, 0, 0))
    assert threads.isdisjoint({threading.get_ident()}) and ids == ["{Q1}-fail"]


# When it fails itself


async def test_it_is_called_until_it_works(mesh: worqr.Mesh) -> None:
    told = Told(Retry("the mail server is down", delay=0), Retry(delay=0.1), Retry(delay=0))
    async with mesh.connect(), told_by(mesh, failing, told):
        q = mesh.queue("Q1")
        await q.dispatch(b"a", id="x")
        assert await told.wait(4) == [b"a"] * 4
        await eventually(partial(empty, q), (0, 0, 0))
    assert len({record.id for record in told.records}) == len({record.at for record in told.records}) == 1
    assert [context.failures for context in told.contexts] == [0, 1, 2, 3]
    assert len({context.id for context in told.contexts}) == 1


async def test_its_own_policy_is_patient(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    told = Told(ValueError("no mail server"), ValueError("still none"))
    async with mesh.connect(), told_by(mesh, failing, told, retry=ONCE):
        q = mesh.queue("Q1")
        await q.enqueue(b"a")
        for run, (least, most) in ((1, (5, 10)), (2, (10, 20))):
            await told.wait(run)
            await eventually(partial(empty, q), (0, 1, 0))
            status = await q.failures.job(told.contexts[0].id).status()
            assert status.run_at is not None
            wait = (status.run_at - datetime.now(UTC)).total_seconds()
            assert least - 5 < wait < most + 1  # some of it has passed
            server.client().zadd(f"{prefix}:{{Q1}}-fail:due", {told.contexts[0].id: 0})  # found by the next scan
        await told.wait(3)
        await eventually(partial(empty, q), (0, 0, 0))
        assert told.contexts[-1]._run.policy.max_failures == 100


@pytest.mark.leaves(*OF_FAILURES)
async def test_it_may_have_a_policy_of_its_own(mesh: worqr.Mesh) -> None:
    told, own = Told(ValueError(1), ValueError(2), ValueError(3)), RetryPolicy(max_failures=3, min_backoff=0)
    async with mesh.connect(), told_by(mesh, failing, told, on_failure_retry=own):
        q = mesh.queue("Q1")
        await q.enqueue(b"a")
        await eventually(lambda: failed_count(q.failures), 1)
        (record,) = await q.failures.failed.list()
        assert (record.reason, record.failures, record.error.message) == ("failed", 3, "3")
        assert [context.failures for context in told.contexts] == [0, 1, 2]
        policy = told.contexts[0]._run.policy  # what was not given is as patient as ever
        assert (policy.max_timeouts, policy.max_backoff, policy.timeout) == (100, 900, None)


@pytest.mark.leaves(*OF_FAILURES)
async def test_a_failure_handler_that_takes_too_long_is_called_again_then_set_aside(mesh: worqr.Mesh) -> None:
    reasons: list[str | None] = []

    async def slow(record: Failed) -> None:
        try:
            await trio.sleep_forever()
        finally:
            reasons.append(worqr.current().cancel_reason)

    own = RetryPolicy(max_timeouts=2, min_backoff=0)
    given: dict[str, Any] = {"on_failure_retry": own, "on_failure_timeout": 0.05}
    async with mesh.connect(), told_by(mesh, failing, slow, **given):
        q = mesh.queue("Q1")
        await q.enqueue(b"a")
        await eventually(lambda: failed_count(q.failures), 1)
        assert reasons == ["timeout"] * 2
        (record,) = await q.failures.failed.list()
        assert (record.reason, record.timeouts, record.failures) == ("timeout", 2, 0)
        assert record.error.message == "it ran longer than 0.05 s"


async def test_with_a_timeout_alone_it_is_as_patient_as_without(mesh: worqr.Mesh) -> None:
    told = Told()
    async with mesh.connect(), told_by(mesh, failing, told, on_failure_timeout=30):
        await mesh.queue("Q1").enqueue(b"a")
        await told.wait(1)
        assert told.contexts[0]._run.policy == replace(PATIENT, timeout=30.0)
        await eventually(partial(empty, mesh.queue("Q1")), (0, 0, 0))


async def test_the_function_and_its_failure_handler_keep_their_policies_apart(mesh: worqr.Mesh) -> None:
    told, runs = Told(), Runs()
    own = RetryPolicy(max_failures=7)

    @mesh.task(name="Q1", retry=ONCE, timeout=9, keep_failed=0, on_failure_retry=own, on_failure_timeout=5)
    async def send(to: str) -> None:
        runs.begin(to.encode())
        raise LookupError(to)

    send.on_failure(told)
    async with mesh.join():
        await send.enqueue("ada")
        await told.wait(1)
        q = mesh.queue("Q1")
        assert (runs.contexts[0]._run.policy.max_failures, runs.contexts[0]._run.policy.timeout) == (1, 9)
        assert (told.contexts[0]._run.policy.max_failures, told.contexts[0]._run.policy.timeout) == (7, 5)
        await eventually(partial(empty, q), (0, 0, 0))


@pytest.mark.parametrize("options", [{"on_failure_retry": ONCE}, {"on_failure_timeout": 5}])
async def test_options_of_a_failure_handler_need_one(mesh: worqr.Mesh, options: Any) -> None:
    words = "on_failure_retry and on_failure_timeout are options of a failure handler, and 'Q1' has none"
    async with mesh.join() as peer:
        with pytest.raises(worqr.UsageError, match=words):
            await peer.serve("Q1", failing, **options)
        assert (await mesh.workers())[0].queues == frozenset()

    @mesh.task(name="Q1", **options)  # it may get one later, by its decorator
    async def send(to: str) -> None: ...

    with pytest.raises(worqr.UsageError, match=words):
        async with mesh.join():
            pytest.fail("it must not join")


@pytest.mark.leaves(*OF_FAILURES)
async def test_a_failure_handler_that_gives_up_leaves_its_job_to_be_seen(mesh: worqr.Mesh) -> None:
    told = Told(Failure("nobody to tell"))
    async with mesh.connect(), told_by(mesh, failing, told):
        q = mesh.queue("Q1")
        await q.dispatch(b"a", id="x")
        await told.wait(1)
        await eventually(lambda: failed_count(q.failures), 1)
        (record,) = await q.failures.failed.list()
        assert (record.task, record.error.message, record.queue) == (b"a", "nobody to tell", "{Q1}-fail")
        assert await q.failures.failed.retry(record.id) == 1
        await told.wait(2)
        assert told.records[0] == told.records[1]
        await eventually(partial(empty, q), (0, 0, 0))


async def test_a_failure_queue_has_none_itself(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        failures = mesh.queue("Q1").failures
        assert failures.name == "{Q1}-fail"
        with pytest.raises(worqr.UsageError, match=r"'\{Q1\}-fail' is a failure queue"):
            _ = failures.failures


@pytest.mark.leaves(*OF_FAILURES)
async def test_what_strangers_put_into_a_failure_queue_is_undecodable(mesh: worqr.Mesh) -> None:
    told = Told()
    async with mesh.connect(), told_by(mesh, failing, told):
        q = mesh.queue("Q1")
        await q.failures.enqueue(b"junk")
        await q.failures.dispatch(b"junk too", id="y")
        await eventually(lambda: undecodable_count(q.failures), 2)
        assert sorted(record.task for record in await q.failures.undecodable.list()) == [b"junk", b"junk too"]
        assert told.records == []


async def undecodable_count(q: worqr.Queue) -> int:
    return (await q.info()).undecodable


# What happens around it


async def test_it_is_told_of_what_failed_before_anybody_served_it(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    first, second = Told(Retry(delay=3600)), Told()
    async with mesh.connect():
        q = mesh.queue("Q1")
        async with told_by(mesh, failing, first):
            await q.dispatch(b"a", id="x")
            await first.wait(1)
        [scheduled] = await q.failures.jobs(state="scheduled")
        assert await q.failures.run_now(scheduled.id) == 1
        async with told_by(other, failing, second):
            await second.wait(1)
            assert second.records == first.records
            await eventually(partial(empty, q), (0, 0, 0))


async def test_a_failure_handler_that_is_cut_short_is_called_again(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    begun, told = trio.Event(), Told()

    async def slow(record: Failed) -> None:
        begun.set()
        await trio.sleep_forever()

    async with mesh.connect():
        q = mesh.queue("Q1")
        async with told_by(mesh, failing, slow):
            await q.enqueue(b"a")
            await begun.wait()
        async with told_by(other, failing, told):
            await told.wait(1)
            assert told.contexts[0].attempt == 1
            await eventually(partial(empty, q), (0, 0, 0))


async def test_a_sweep_makes_the_failure_job_that_the_dead_workers_handler_wanted(
    mesh: worqr.Mesh, other: worqr.Mesh, server: Server, prefix: str
) -> None:
    held, told = Held(), Told()
    async with mesh.connect(), serving(other, "Q2", failing), told_by(mesh, held, told) as peer:
        q = mesh.queue("Q1")
        await q.dispatch(b"a", id="x", result_ttl=60)
        await held.wait(1)
        lose(server, prefix, peer.id)
        await told.wait(1)
        assert (told.records[0].reason, told.records[0].worker, told.records[0].stalls) == ("stalled", held_by(held), 1)
        with pytest.raises(worqr.JobFailed, match="Stalled"):
            await q.job("x").result(0)
        await eventually(partial(empty, q), (0, 0, 0))


def held_by(held: Held) -> str:
    worker: str = held.contexts[0]._run.registration.name
    return worker


async def test_a_periodic_job_survives_its_failures_by_its_failure_handler(mesh: worqr.Mesh) -> None:
    """Queasy's way: the handler and the failure handler both dispatch the id anew, so that nothing stops it."""
    runs = Runs()

    async def again(task: bytes) -> None:
        if len(runs.tasks) < 8:
            await mesh.queue("Q1").dispatch(task, id="tick", delay=0.02)

    async def handler(task: bytes) -> None:
        runs.begin(task)
        if len(runs.tasks) % 2:
            raise ValueError("this time not")
        await again(task)

    async def told(record: Failed) -> None:
        await again(record.task)

    async with mesh.connect(), told_by(mesh, handler, told):
        q = mesh.queue("Q1")
        await q.dispatch(b"a", id="tick")
        await runs.wait(8)
        await eventually(q.running, [])
        await eventually(partial(empty, q), (0, 0, 0))


async def test_on_failure_counts_against_no_limit_of_its_queue(mesh: worqr.Mesh) -> None:
    held, told = Held(), Told()

    async def handler(task: bytes) -> None:
        if task == b"bad":
            raise ValueError
        await held(task)

    async with mesh.connect(), told_by(mesh, handler, told, concurrency=2, room=3):
        q = mesh.queue("Q1")
        await q.enqueue(b"bad", b"a", b"b", b"c")
        await held.wait(2)
        await told.wait(1)
        held.gate.set()
        await held.wait_for(lambda: len(held.done) == 3)
        await eventually(q.running, [])
        await eventually(partial(empty, q), (0, 0, 0))


@pytest.mark.parametrize("handler", [7, "told", lambda: None, lambda a, b: None])
async def test_what_cannot_be_a_failure_handler_is_refused(mesh: worqr.Mesh, handler: Any) -> None:
    async with mesh.join() as peer:
        with pytest.raises(worqr.UsageError, match="handler"):
            await peer.serve("Q1", failing, on_failure=handler)
        assert (await mesh.workers())[0].queues == frozenset()


async def test_the_same_run_is_not_told_twice_by_a_quick_retry(mesh: worqr.Mesh) -> None:
    told, runs = Told(), Runs()

    async def handler(task: bytes) -> None:
        runs.begin(task)
        raise ValueError

    async with mesh.connect(), told_by(mesh, handler, told, retry=QUICK):
        q = mesh.queue("Q1")
        await q.enqueue(b"a")
        await told.wait(1)
        await eventually(partial(empty, q), (0, 0, 0))
        await eventually(q.running, [])
        assert (len(runs.tasks), len(told.records), told.records[0].failures) == (10, 1, 10)
