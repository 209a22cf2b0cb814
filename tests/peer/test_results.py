"""What a job's handler returned, kept for a while for whoever waits: each handle gets its own dispatch's, or an error at once."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec
import pytest
import trio

import worqr
from tests.peer.conftest import NewMesh
from tests.peer.process_jobs import report_and_end, report_and_end_all
from tests.peer.tools import Held, Runs, at_most, eventually, serving, spying, until
from tests.support.leaks import dump
from tests.support.patience import PATIENCE
from tests.support.proxy import FaultProxy, sent_as
from tests.support.servers import Server
from worqr import Failure, JobCancelled, JobFailed, NoResult, ResultTimeout, Retry, ops
from worqr.client import job as job_module
from worqr.client import notifications
from worqr.link import TrioDriver
from worqr.peer import run_reports

FAILED = ("{Q1}:failed", "{Q1}:aside*")


async def state(job: worqr.Job[Any]) -> str:
    return (await job.status()).state


def answering(value: object) -> Callable[[bytes], Any]:
    async def handler(task: bytes) -> object:
        return value

    return handler


async def echo(task: bytes) -> bytes:
    return task


# Values


@dataclasses.dataclass
class Report:
    pages: int


class Struct(msgspec.Struct):
    name: str


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (None, None),
        (0, 0),
        (False, False),
        (b"", b""),
        ("", ""),
        ([], []),
        (bytes(range(256)), bytes(range(256))),
        (bytearray(b"a"), b"a"),
        ({"a": [1, 2.5, None, "ä\u20ac\x00"]}, {"a": [1, 2.5, None, "ä\u20ac\x00"]}),
        ((1, 2), [1, 2]),
        (2**63, 2**63),
        (Report(7), {"pages": 7}),
        (Struct("x"), {"name": "x"}),
        (datetime(2030, 1, 1, tzinfo=UTC), "2030-01-01T00:00:00Z"),
    ],
    ids=repr,
)
async def test_what_a_handler_returns_is_the_result(mesh: worqr.Mesh, other: worqr.Mesh, value: Any, kept: Any) -> None:
    async with mesh.connect(), serving(other, "Q1", answering(value)):
        job = await mesh.queue("Q1").dispatch(b"a", result_ttl=60)
        result: Any = await job.result(30)
        assert (result, type(result)) == (kept, type(kept))
        assert await mesh.queue("Q1").job(job.id).result(0) == kept  # again, and by whom has only the id


async def test_the_result_of_a_plain_handler_and_of_a_claim_by_hand(mesh: worqr.Mesh) -> None:
    async with mesh.connect(), serving(mesh, "Q1", lambda task: task[::-1]):
        assert await (await mesh.queue("Q1").dispatch(b"abc", result_ttl=60)).result(30) == b"cba"  # type: ignore[comparison-overlap]
    async with mesh.join() as peer, peer.work("Q1") as claims:
        jobs = [await mesh.queue("Q1").dispatch(b"a", result_ttl=60) for _ in range(3)]
        one, two, three = await claims.take(3)
        await one.finish(b"by hand")
        assert await claims.finish([two]) == []
        async with three:
            pass
        assert [await job.result(0) for job in jobs] == [b"by hand", None, None]


@pytest.mark.leaves(*FAILED)
@pytest.mark.parametrize(
    "value", [object(), {1: object()}, lambda: None, float("nan").hex, {"a": {b"\xff": 1}, "b": object()}]
)
async def test_a_result_that_cannot_be_kept_is_a_failure_for_good(mesh: worqr.Mesh, value: object) -> None:
    async with mesh.connect(), serving(mesh, "Q1", answering(value)):
        q = mesh.queue("Q1")
        job = await q.dispatch(b"a", result_ttl=60)
        with pytest.raises(JobFailed, match="its result cannot be kept.*neither bytes nor JSON") as caught:
            await job.result(30)
        assert caught.value.error.type == "worqr.Failure"
        (record,) = await q.failed.list()
        assert (record.id, record.failures) == (job.id, 1)
        fine = await q.dispatch(b"a", result_ttl=0)  # nobody keeps it, so nobody minds
        await eventually(lambda: finished(q), 1)
        assert await state(fine) == "gone"


async def finished(q: worqr.Queue) -> int:
    return (await q.info()).counts.get("finished", 0)


async def test_a_result_over_the_limit_is_a_failure(new_mesh: NewMesh, expects_left: Callable[..., None]) -> None:
    expects_left(*FAILED)
    mesh = new_mesh(max_payload=1000)

    async def handler(task: bytes) -> bytes:
        return b"x" * int(task)

    async with mesh.connect(), serving(mesh, "Q1", handler):
        q = mesh.queue("Q1")
        assert await (await q.dispatch(b"1000", result_ttl=60)).result(30) == b"x" * 1000
        with pytest.raises(JobFailed, match="1,001 bytes are over the limit of 1,000.*store it elsewhere"):
            await (await q.dispatch(b"1001", result_ttl=60)).result(30)
    async with mesh.join() as peer, peer.work("Q1") as claims:
        await q.dispatch(b"a", result_ttl=60)
        (claim,) = await claims.take(1)
        with pytest.raises(worqr.UsageError, match="1,001 bytes"):
            await claim.finish(b"x" * 1001)
        await claim.finish(b"x")


async def test_many_large_results_of_one_moment_are_all_kept(mesh: worqr.Mesh) -> None:
    async def handler(task: bytes) -> bytes:
        return task * (1 << 20)

    async with mesh.connect():
        q = mesh.queue("Q1")
        jobs = [await q.dispatch(bytes([65 + n]), result_ttl=60) for n in range(20)]
        async with serving(mesh, "Q1", handler):
            for n, job in enumerate(jobs):
                assert await job.result(30) == bytes([65 + n]) * (1 << 20)


# None kept


async def test_no_result_is_told_at_once(mesh: worqr.Mesh) -> None:
    held = Held()
    async with mesh.connect(), at_most(30):
        q = mesh.queue("Q1")
        with pytest.raises(
            NoResult, match="of job 'nobody' of queue 'Q1' is stored: the id is unknown, or it was not kept"
        ):
            await q.job("nobody").result()
        waiting = await q.dispatch(b"a", id="x", delay=60)
        with pytest.raises(NoResult, match="keeps no result.*result_ttl"):
            await waiting.result()
        await waiting.cancel()
        async with serving(mesh, "Q1", held):
            job = await q.dispatch(b"a")
            await held.wait(1)
            with pytest.raises(NoResult, match="keeps no result"):
                await job.result()
            held.gate.set()
            await eventually(q.running, [])
            with pytest.raises(NoResult, match=r"is stored: it was not kept \(no result_ttl\) or has expired"):
                await job.result()


@pytest.mark.parametrize(
    ("dispatched", "served", "kept"),
    [(None, None, False), (60, None, True), (None, 60, True), (0, 60, False), (60, 0, True), (0, None, False)],
)
async def test_a_result_is_kept_as_the_dispatch_says_and_else_the_handler(
    mesh: worqr.Mesh, dispatched: float | None, served: float | None, kept: bool
) -> None:
    async with mesh.connect(), serving(mesh, "Q1", echo, result_ttl=served):
        q = mesh.queue("Q1")
        job = await (q.dispatch(b"a") if dispatched is None else q.dispatch(b"a", result_ttl=dispatched))
        if kept:
            assert await job.result(30) == b"a"
            assert await state(job) == "finished"
        else:
            with pytest.raises(NoResult):
                await job.result()
            await eventually(lambda: finished(q), 1)
            assert await state(job) == "gone"


async def test_a_result_expires(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    client, key = server.client(), f"{prefix}:{{Q1}}:result:x"
    async with mesh.connect(), serving(mesh, "Q1", echo):
        job = await mesh.queue("Q1").dispatch(b"a", id="x", result_ttl=60)
        assert await job.result(30) == b"a"
        assert 0 < client.pttl(key) <= 60_000
        client.pexpire(key, 1)  # and a minute passes
        await eventually(partial(state, job), "gone")
        with pytest.raises(NoResult, match="expired"):
            await job.result()


# How it ended otherwise


@pytest.mark.parametrize("how", ["failed", "undecodable"])
async def test_a_failure_is_told_as_long_as_its_record_is_there_also_where_no_results_are_kept(
    mesh: worqr.Mesh, how: str
) -> None:
    async def handler(task: bytes) -> None:
        raise worqr.Undecodable("of no use") if how == "undecodable" else worqr.Failure("no such customer")

    async with mesh.connect(), serving(mesh, "Q1", handler), at_most(30):
        q = mesh.queue("Q1")
        job = await q.dispatch(b"a", id="x")
        await eventually(partial(state, job), "failed")
        message = "of no use" if how == "undecodable" else "no such customer"
        for handle in (job, q.job("x")):
            with pytest.raises(JobFailed, match=message) as caught:
                await handle.result()
            (note,) = caught.value.__notes__  # what Python shows below the error
            assert note.startswith("The worker's traceback:\nTraceback (most recent call last):\n")
            assert "in handler" in note
            assert note.endswith(message)
            assert caught.value.error.message == message
            status = await handle.status()
            assert (status.attempts, status.failures) == (1, int(how == "failed"))
            assert status.error is not None
            assert status.error.message == message
        await (q.undecodable if how == "undecodable" else q.failed).drop("x")
        with pytest.raises(NoResult, match="is stored: it was not kept"):
            await job.result()


async def test_a_job_that_waits_for_its_next_try_says_why_and_when(mesh: worqr.Mesh) -> None:
    async def handler(task: bytes) -> None:
        raise worqr.Retry("the printer is out of paper", delay=3600)

    async with mesh.connect(), serving(mesh, "Q1", handler), at_most(30):
        job = await mesh.queue("Q1").dispatch(b"a")
        before = await job.status()
        assert before.error is None
        await eventually(partial(state, job), "scheduled")
        status = await job.status()
        assert (status.failures, status.attempts) == (1, 1)
        assert status.error is not None
        assert (status.error.type, status.error.message) == ("worqr.Retry", "the printer is out of paper")
        assert status.next_run is not None
        assert status.next_run == status.run_at > datetime.now(UTC)
        await job.cancel()


@pytest.mark.leaves(*FAILED)
async def test_a_job_that_failed_raises_its_error(mesh: worqr.Mesh) -> None:
    async def handler(task: bytes) -> None:
        raise LookupError("no such page") if task == b"a" else Failure()

    async with mesh.connect(), serving(mesh, "Q1", handler, retry=worqr.RetryPolicy(max_failures=2, min_backoff=0)):
        job = await mesh.queue("Q1").dispatch(b"a", result_ttl=60)
        with pytest.raises(JobFailed, match="LookupError: no such page") as caught:
            await job.result(30)
        assert caught.value.error.type == "LookupError"
        assert "in handler" in caught.value.error.traceback
        with pytest.raises(JobFailed):
            await mesh.queue("Q1").job(job.id).result(0)


async def test_a_job_that_is_tried_again_has_not_ended(mesh: worqr.Mesh) -> None:
    runs, gate = Runs(), trio.Event()

    async def handler(task: bytes) -> int:
        runs.begin(task)
        if len(runs.tasks) < 3:
            raise Retry(delay=0.1)
        await gate.wait()
        return len(runs.tasks)

    async with mesh.connect(), serving(mesh, "Q1", handler):
        job = await mesh.queue("Q1").dispatch(b"a", result_ttl=60)
        await runs.wait(1)
        with pytest.raises(ResultTimeout):
            await job.result(0)
        gate.set()
        assert await job.result(30) == 3  # type: ignore[comparison-overlap]


async def test_a_cancelled_job_raises_the_reason(mesh: worqr.Mesh) -> None:
    async with mesh.connect(), trio.open_nursery() as nursery:
        job = await mesh.queue("Q1").dispatch(b"a", delay=60, result_ttl=60)
        ended: list[str] = []

        async def wait() -> None:
            with pytest.raises(JobCancelled) as caught:
                await job.result(30)
            ended.append(caught.value.reason)

        for _ in range(5):
            nursery.start_soon(wait)
        await trio.sleep(0.05)
        await job.cancel(reason="changed our mind")
        await until(lambda: ended == ["changed our mind"] * 5)


# Whose


async def test_a_handle_never_takes_an_earlier_result_for_its_own(mesh: worqr.Mesh) -> None:
    async with mesh.connect(), serving(mesh, "Q1", echo):
        q = mesh.queue("Q1")
        first = await q.dispatch(b"1", id="x", result_ttl=60)
        assert await first.result(30) == b"1"
        second = await q.dispatch(b"2", id="x", delay=60, result_ttl=60)
        for newest in (second, q.job("x")):
            with pytest.raises(ResultTimeout):
                await newest.result(0)
        assert await first.result(0) == b"1"  # it was about to be read
        third = await q.dispatch(b"3", id="x", result_ttl=60)  # onto the one that is due
        assert third.outcome == "updated"
        assert await third.result(30) == await second.result(30) == await q.job("x").result(0) == b"3"
        assert await first.result(0) == b"1"
        assert await (await q.dispatch(b"4", id="x", result_ttl=60)).result(30) == b"4"
        assert await third.result(0) == b"3"
        with pytest.raises(NoResult, match="has a newer dispatch, and the result of this one was not kept"):
            await first.result()


async def test_a_handle_never_gets_the_result_of_an_earlier_job_that_was_put_back(mesh: worqr.Mesh) -> None:
    may_finish = False

    async def handler(task: bytes) -> bytes:
        if task == b"1" and not may_finish:
            raise Failure("not yet")
        return task

    async with mesh.connect(), serving(mesh, "Q1", handler, result_ttl=60):
        q = mesh.queue("Q1")
        first = await q.dispatch(b"1", id="x")
        with pytest.raises(JobFailed):
            await first.result(30)
        second = await q.dispatch(b"2", id="x")
        assert await second.result(30) == b"2"
        await q.pause()
        may_finish = await q.failed.retry("x") == 1
        assert [(await each.status()).state for each in (first, second)] == ["waiting", "finished"]
        await q.resume()
        assert await first.result(30) == await q.job("x").result(0) == b"1"
        assert await second.result(0) == b"2"


@pytest.mark.leaves("{Q1}:failed", "{Q1}:aside*")
@pytest.mark.parametrize("result_ttl", [0, 60])
async def test_a_handle_never_gets_the_error_of_an_earlier_job_that_was_put_back(
    mesh: worqr.Mesh, result_ttl: int
) -> None:
    async def handler(task: bytes) -> None:
        raise KeyError if task == b"1" else ValueError

    retry = worqr.RetryPolicy(max_failures=1)
    async with mesh.connect(), serving(mesh, "Q1", handler, result_ttl=result_ttl, retry=retry):
        q = mesh.queue("Q1")
        jobs: list[worqr.Job[Any]] = []
        for number, task in enumerate((b"1", b"2"), 1):
            jobs.append(await q.dispatch(task, id="x"))
            await eventually(q.failed.count, number)
        assert await q.failed.retry_all(error="KeyError") == 1
        await eventually(q.failed.count, 2)
        for job, error in zip(jobs, ("KeyError", "ValueError"), strict=True):
            with pytest.raises(JobFailed, match=error):
                await job.result(0)
        status = await jobs[1].status()
        assert status.error is not None and status.error.type == "ValueError"


async def test_the_handle_of_a_blocked_dispatch_waits_for_its_own_run(mesh: worqr.Mesh) -> None:
    held = Held()

    async def handler(task: bytes) -> bytes:
        await held(task)
        return task

    async with mesh.connect(), serving(mesh, "Q1", handler):
        q = mesh.queue("Q1")
        first = await q.dispatch(b"1", id="x", result_ttl=60)
        await held.wait(1)
        second = await q.dispatch(b"2", id="x", result_ttl=60)
        with pytest.raises(ResultTimeout):
            await second.result(0)
        held.gate.set()
        assert (await first.result(30), await second.result(30)) == (b"1", b"2")


async def test_a_dispatch_that_changed_nothing_waits_for_the_job_that_is_there(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        q = mesh.queue("Q1")
        await q.dispatch(b"1", id="x", result_ttl=60)
        skipped = await q.dispatch(b"2", id="x", if_exists="skip", result_ttl=60)
        async with serving(mesh, "Q1", echo):
            assert await skipped.result(30) == b"1"


# Waiting


@pytest.mark.parametrize("timeout", [0, 0.1])
async def test_a_result_that_does_not_come_in_time(mesh: worqr.Mesh, timeout: float) -> None:
    async with mesh.connect():
        job = await mesh.queue("Q1").dispatch(b"a", id="x", delay=60, result_ttl=60)
        start = trio.current_time()
        with pytest.raises(ResultTimeout, match="'x' of 'Q1'> had not ended after") as caught:
            await job.result(timeout)
        assert isinstance(caught.value, TimeoutError)
        assert timeout <= trio.current_time() - start < timeout + 10
        assert await job.cancel() == worqr.CancelCount(1, 0, 0)  # it is none the worse


async def late(job: worqr.Job[Any], timeout: float = 0.01) -> tuple[str, str | None, int | None, int | None]:
    """What a result that does not come in time says of the job `x` of `shop.sned`, behind the time; and the attributes."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ResultTimeout) as caught:
        patch.setattr(job_module, "EXPLAIN_WITHIN", PATIENCE)  # the server answers, however late
        await job.result(timeout)
    start, end = "<Job 'x' of 'shop.sned'> had not ended after 0.01 s: ", "; in time"
    error = caught.value
    return (f"{error}{end}".removeprefix(start).removesuffix(end), error.state, error.waiting, error.workers)


async def test_a_result_that_does_not_come_says_that_no_worker_serves_the_queue(
    mesh: worqr.Mesh, other: worqr.Mesh
) -> None:
    async with mesh.connect(), serving(other, "shop.send", echo):
        q = mesh.queue("shop.sned")
        await q.enqueue(b"1", b"2")
        job = await q.dispatch(b"a", id="x", result_ttl=60)
        waits = "its state is 'waiting'; 3 tasks wait in the queue, and no worker serves it; did you mean 'shop.send'?"
        assert await late(job) == (waits, "waiting", 3, 0)
        await q.cancel_all()


async def test_a_result_that_does_not_come_says_where_it_has_looked(mesh: worqr.Mesh, server: Server) -> None:
    async with mesh.connect():
        job = await mesh.queue("shop.sned").dispatch(b"a", id="x", result_ttl=60)
        text, *_ = await late(job)
        assert text.endswith(
            f"no worker serves it; if one runs, compare its prefix ({mesh.prefix!r} here) and its server ({server.url} here)"
        )
        await job.cancel()


@pytest.mark.leaves(*(name.replace("Q1", "shop.sned") for name in FAILED))
async def test_a_result_that_does_not_come_says_where_the_job_is(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    held, q = Held(), mesh.queue("shop.sned")

    async def fail(_task: bytes) -> None:
        raise Retry(delay=60) from ValueError("why")

    async with mesh.connect():
        async with serving(other, "shop.sned", held):
            job = await q.dispatch(b"a", id="x", result_ttl=60)
            await held.wait(1)
            assert await late(job) == (
                "its state is 'active'; 0 tasks wait in the queue, and 1 worker serves it",
                *("active", 0, 1),
            )
            held.gate.set()
            assert await job.result(30) is None
        async with serving(other, "shop.sned", fail):
            job = await q.dispatch(b"a", id="x", result_ttl=60)
            await eventually(lambda: state(job), "scheduled")
            text, *facts = await late(job)
            assert facts == ["scheduled", 0, 1]
            assert text.startswith("its state is 'scheduled'; its last try raised ")
            due = (await job.status()).next_run
            assert due is not None
            assert f"; its next run is due at {due:%Y-%m-%d %H:%M:%S} UTC; 0 tasks wait" in text
        await job.cancel()


async def test_a_result_that_does_not_come_says_the_remedy_at_the_end_of_a_long_error(
    mesh: worqr.Mesh, other: worqr.Mesh
) -> None:
    async def fail(_task: bytes) -> None:
        raise ValueError(f"{'why, ' * 80}and what to do")

    async with mesh.connect(), serving(other, "shop.sned", fail, retry=worqr.RetryPolicy(min_backoff=60)):
        job = await mesh.queue("shop.sned").dispatch(b"a", id="x", result_ttl=60)
        await eventually(lambda: state(job), "scheduled")
        text, *_ = await late(job)
        assert "why, and what to do; " in text
        await job.cancel()


async def test_a_job_that_ended_just_then_is_said_to_have_ended(
    mesh: worqr.Mesh, other: worqr.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with mesh.connect(), serving(other, "shop.sned", echo):
        job = await mesh.queue("shop.sned").dispatch(b"a", id="x", result_ttl=60)
        assert await job.result(30) == b"a"

        async def look() -> ops.ResultReply:
            return ops.ResultReply("wait", [])

        monkeypatch.setattr(worqr.Job, "_read_result", lambda _job: look())
        assert await late(job) == ("it has ended since (finished), ask again", "finished", None, None)


@pytest.mark.parametrize(
    ("silent", "said"),
    [
        ("job_status", ("<Job 'x' of 'shop.sned'> had not ended after 0.01 s", None, None, None)),
        ("inspect", ("its state is 'waiting'", "waiting", None, None)),
        (
            "list_workers",
            ("its state is 'waiting'; 1 task waits in the queue, and no worker serves it", "waiting", 1, 0),
        ),
    ],
)
async def test_a_result_that_does_not_come_says_what_the_server_says_in_time(
    server: Server,
    prefix: str,
    proxy: FaultProxy,
    monkeypatch: pytest.MonkeyPatch,
    silent: str,
    said: tuple[object, ...],
) -> None:
    mesh, limit = worqr.Mesh(proxy.url, prefix=prefix), trio.CancelScope()
    async with mesh.connect(), trio.open_nursery() as nursery:
        job = await mesh.queue("shop.sned").dispatch(b"a", id="x", result_ttl=60)
        held, limited = proxy.hold(sent_as(silent)), TrioDriver.move_on_after

        def limit_of(driver: TrioDriver, seconds: float, **options: bool) -> Any:
            return limit if seconds == PATIENCE else limited(driver, seconds, **options)

        async def end_the_time() -> None:
            await held.wait_fired()
            limit.cancel()

        monkeypatch.setattr(TrioDriver, "move_on_after", limit_of)
        nursery.start_soon(end_the_time)
        assert await late(job) == said
        held.release()
        await job.cancel()


async def test_only_looking_for_a_result_asks_for_nothing_else(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    async with mesh.connect():
        job = await mesh.queue("Q1").dispatch(b"a", id="x", result_ttl=60)
        with spying(server, prefix) as spy:
            with pytest.raises(ResultTimeout) as caught:
                await job.result(0)
            assert not spy.calls().keys() & {"job_status", "inspect", "list_workers"}
        assert (caught.value.state, caught.value.waiting, caught.value.workers) == (None, None, None)
        await job.cancel()


@pytest.mark.parametrize("timeout", [-1, float("nan"), "1", True])
async def test_timeout_is_a_duration(mesh: worqr.Mesh, timeout: Any) -> None:
    async with mesh.connect():
        with pytest.raises(worqr.UsageError, match="timeout"):
            await mesh.queue("Q1").job("x").result(timeout)


async def test_a_result_is_waited_for_without_polling(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    held = Held()
    async with mesh.connect(), serving(mesh, "Q1", held), trio.open_nursery() as nursery:
        job = await mesh.queue("Q1").dispatch(b"a", result_ttl=60)
        await held.wait(1)
        with spying(server, prefix) as spy:
            for _ in range(10):
                nursery.start_soon(job.result)
            start = trio.current_time()
            await trio.sleep(1.5)
            assert spy.calls()["read_result"] <= 10 * (2.5 + trio.current_time() - start)  # they look once a second
        held.gate.set()
        assert await job.result() is None


async def test_the_message_of_a_result_is_what_ends_the_waiting(
    mesh: worqr.Mesh, other: worqr.Mesh, server: Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifications, "POLL_EVERY", 3600)
    held, results = Held(), list[Any]()
    async with mesh.connect(), serving(other, "Q1", held), trio.open_nursery() as nursery:
        job = await mesh.queue("Q1").dispatch(b"a", id="x", result_ttl=60)

        async def wait() -> None:
            results.append(await job.result())

        nursery.start_soon(wait)
        await held.wait(1)
        await eventually(partial(subscribed, server, f"{prefix}:{{Q1}}:job:x"), 1)
        held.gate.set()
        await until(lambda: results == [None])


async def test_a_caller_that_gives_up_leaves_no_subscription(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    channel = f"{prefix}:{{Q1}}:job:x"

    async def listeners() -> int:
        return int(server.look.pubsub_numsub(channel)[0][1])

    async with mesh.connect():
        job = await mesh.queue("Q1").dispatch(b"a", id="x", delay=60, result_ttl=60)
        for _ in range(3):
            with trio.move_on_after(0.1):
                await job.result()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(job.result)
            await eventually(listeners, 1)
            nursery.cancel_scope.cancel()
        await eventually(listeners, 0)
        await job.cancel()


async def test_a_result_is_found_when_its_message_was_lost(prefix: str, proxy: FaultProxy, other: worqr.Mesh) -> None:
    held, results = Held(), list[Any]()
    mesh = worqr.Mesh(proxy.url, prefix=prefix)

    async def handler(task: bytes) -> str:
        await held(task)
        return "found"

    async with mesh.connect(), serving(other, "Q1", handler), trio.open_nursery() as nursery:
        job = await mesh.queue("Q1").dispatch(b"a", id="x", result_ttl=60)
        await held.wait(1)

        async def wait() -> None:
            results.append(await job.result())

        nursery.start_soon(wait)
        # Asked before the subscription, and when the client has heard that it stands; the server knows of it earlier.
        await until(lambda: proxy.count(sent_as("read_result")) >= 2)
        proxy.blackhole(":subscribe")
        held.gate.set()
        await until(lambda: results == ["found"])


async def subscribed(server: Server, channel: str) -> int:
    return int(server.look.pubsub_numsub(channel)[0][1])


async def test_a_result_is_waited_for_across_a_restart_of_the_server(own_server: Server, prefix: str) -> None:
    held, results = Held(), list[Any]()

    async def handler(task: bytes) -> str:
        await held(task)
        return "after all"

    mesh = worqr.Mesh(own_server.url, prefix=prefix, patience=20, keepalive=10)
    async with mesh.connect(), serving(mesh, "Q1", handler), trio.open_nursery() as nursery:
        job = await mesh.queue("Q1").dispatch(b"a", result_ttl=60)
        await held.wait(1)

        async def wait() -> None:
            results.append(await job.result())

        nursery.start_soon(wait)
        await trio.sleep(0.1)
        own_server.restart()
        held.gate.set()
        await until(lambda: results == ["after all"])


# What runs say about how far they are: seen by everybody, sent rarely, gone with the job.


async def said(job: worqr.Job[Any]) -> tuple[float | None, str]:
    status = await job.status()
    return status.progress, status.message


async def test_progress_of_a_coroutine_is_seen_from_elsewhere(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    held = Held()

    async def handler(task: bytes) -> None:
        worqr.current().progress(0.25, "reading \u20ac")
        await held(task)

    async with other.connect(), serving(mesh, "Q1", handler) as peer:
        q = other.queue("Q1")
        job = await q.dispatch(b"a", id="x")
        await eventually(lambda: said(job), (0.25, "reading \u20ac"))
        (running,) = await q.running()
        assert (running.state, running.worker, running.progress, running.message) == (
            *("active", peer.id),
            *(0.25, "reading \u20ac"),
        )
        held.gate.set()
        await eventually(q.running, [])
        assert await said(job) == (None, "")


async def test_progress_of_a_thread_is_seen_from_elsewhere(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    gate = threading.Event()

    def handler(task: bytes) -> None:
        worqr.current().progress(1)
        gate.wait(60)

    async with other.connect(), serving(mesh, "Q1", handler):
        job = await other.queue("Q1").dispatch(b"a")
        await eventually(lambda: said(job), (1.0, ""))
        gate.set()
        await eventually(other.queue("Q1").running, [])


async def test_progress_from_a_loop_of_the_thread_s_own_is_seen(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    gate = threading.Event()

    async def speak() -> None:
        await trio.lowlevel.checkpoint()
        worqr.current().progress(1)

    def handler(task: bytes) -> None:
        trio.run(speak)
        gate.wait(60)

    async with other.connect(), serving(mesh, "Q1", handler):
        for _ in range(3):
            job = await other.queue("Q1").dispatch(b"a")
            await eventually(lambda job=job: said(job), (1.0, ""))  # type: ignore[misc]
            gate.set()
            await eventually(other.queue("Q1").running, [])
            gate.clear()


@pytest.mark.parametrize("plain", [False, True], ids=["loop", "thread"])
async def test_it_is_sent_ten_times_a_second_at_most_and_the_last_word_wins(
    mesh: worqr.Mesh, server: Server, prefix: str, plain: bool
) -> None:
    held = Held()

    def speak() -> None:
        for n in range(2000):
            worqr.current().progress(n / 2000, f"at {n}")

    async def handler(task: bytes) -> None:
        for _ in range(10):
            await (trio.to_thread.run_sync(speak) if plain else _async(speak))
            await trio.sleep(0.05)
        worqr.current().progress(1.0, "the end")
        await held(task)

    async with mesh.connect(), serving(mesh, "Q1", handler):
        with spying(server, prefix) as spy:
            start = trio.current_time()
            jobs = [await mesh.queue("Q1").dispatch(b"%d" % n) for n in range(3)]
            await held.wait(3)
            for job in jobs:
                await eventually(lambda job=job: said(job), (1.0, "the end"))  # type: ignore[misc]
            took = trio.current_time() - start
            calls = spy.calls()["note_progress"]
        assert 2 <= calls <= took * 10 + 2  # of all three together
        held.gate.set()
        await eventually(mesh.queue("Q1").running, [])


async def _async(function: Any) -> None:
    function()


async def test_whoever_follows_a_job_sees_its_progress(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    part_seen = {n: trio.Event() for n in (1, 2, 3)}

    async def handler(task: bytes) -> None:
        for n in (1, 2, 3):
            worqr.current().progress(n / 3, f"part {n}")
            await part_seen[n].wait()

    seen: list[tuple[float | None, str]] = []
    async with other.connect(), serving(mesh, "Q1", handler):
        job = await other.queue("Q1").dispatch(b"a", delay=0.1, result_ttl=60)
        async with at_most(60), job.watch() as states:
            async for status in states:
                seen.append((status.progress, status.message))
                if status.progress is not None:
                    part_seen[round(status.progress * 3)].set()
        assert status.state == "finished"
    assert [message for _, message in seen if message] == ["part 1", "part 2", "part 3", "part 3"]  # also at its end


def asynchronous(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    async def call(task: Any) -> Any:
        await _async(lambda: None)
        return function(task)

    return call


@pytest.mark.leaves("{Q1}:failed", "{Q1}:aside", "{Q1}:aside:*")
@pytest.mark.parametrize("in_list", [False, True], ids=["task", "list"])
@pytest.mark.parametrize("place", ["loop", "asyncio", "thread", "process"])
async def test_the_last_report_of_a_run_arrives_with_its_end(
    new_mesh: NewMesh, place: Any, in_list: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_reports, "SEND_EVERY", 3600)  # nothing but the end sends it
    function: Callable[[Any], Any] = report_and_end_all if in_list else report_and_end
    if place in {"loop", "asyncio"}:
        function = asynchronous(function)
    ends, seen = {b"return": "finished", b"fail": "failed", b"raise": "failed"}, dict[bytes, worqr.Status]()
    mesh, once = new_mesh(), worqr.RetryPolicy(max_failures=1)
    async with mesh.join(processes=1, grace=5) as peer, trio.open_nursery() as nursery:
        if in_list:
            await nursery.start(partial(peer.serve_list, "Q1", function, runs_in=place, batch_size=10, retry=once))
        else:
            await nursery.start(partial(peer.serve, "Q1", function, runs_in=place, retry=once))
        for task in ends:
            job = await mesh.queue("Q1").dispatch(task, result_ttl=60)
            async with at_most(60), job.watch() as states:
                async for status in states:
                    seen[task] = status
        nursery.cancel_scope.cancel()
    assert {task: (status.state, status.progress, status.message) for task, status in seen.items()} == {
        task: (state, 1.0, "step 4") for task, state in ends.items()
    }


async def test_the_last_report_arrives_however_often_reports_are_sent(
    mesh: worqr.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_reports, "SEND_EVERY", 0)  # also between the end of a run and the request that says so
    async with mesh.connect(), serving(mesh, "Q1", report_and_end):
        jobs = [await mesh.queue("Q1").dispatch(b"return", result_ttl=60) for _ in range(100)]
        for job in jobs:
            await job.result(timeout=60)
            assert await said(job) == (1.0, "step 4")


async def test_the_last_report_of_a_cancelled_run_arrives(mesh: worqr.Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_reports, "SEND_EVERY", 3600)

    async def handler(task: bytes) -> None:
        try:
            await held(task)
        finally:
            worqr.current().progress(0.5, "stopped here")

    held = Held()
    async with mesh.connect(), serving(mesh, "Q1", handler):
        job = await mesh.queue("Q1").dispatch(b"a", result_ttl=60)
        await held.wait(1)
        await job.cancel(wait=60)
        await eventually(lambda: said(job), (0.5, "stopped here"))
        assert (await job.status()).state == "cancelled"


async def test_the_last_report_survives_a_lost_connection(
    new_mesh: NewMesh, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_reports, "SEND_EVERY", 3600)
    mesh, other = new_mesh(url=proxy.url, keepalive=60), new_mesh()
    async with other.connect(), serving(mesh, "Q1", asynchronous(report_and_end)):
        for name in "note_progress", "finish_tasks":
            proxy.drop_reply(matching=sent_as(name), on="data")
            job = await other.queue("Q1").dispatch(b"return", result_ttl=60)
            await job.result(timeout=60)
            assert await said(job) == (1.0, "step 4")


async def test_runs_that_report_nothing_send_no_more_requests(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    runs = Runs()
    async with mesh.connect(), serving(mesh, "Q1", runs):
        with spying(server, prefix) as spy:
            await mesh.queue("Q1").enqueue(*[b"%d" % n for n in range(50)])
            await runs.wait(50)
            await eventually(mesh.queue("Q1").running, [])
            assert "note_progress" not in spy.calls()


async def test_progress_goes_with_the_job(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    runs, seen = Runs(), trio.Event()

    async def handler(task: bytes) -> None:
        worqr.current().progress(0.5, "in a hurry")
        if worqr.current().failures == 0:
            await seen.wait()
            raise worqr.Retry(delay=0.2)
        runs.begin(task)

    async with mesh.connect(), serving(mesh, "Q1", handler):
        q = mesh.queue("Q1")
        job = await q.dispatch(b"a", id="x")
        await eventually(lambda: said(job), (0.5, "in a hurry"))
        seen.set()
        await eventually(lambda: said(job), (None, ""))  # it is due, and has not begun
        await q.enqueue(*[b"%d" % n for n in range(50)])
        await runs.wait(51)
        await eventually(q.running, [])
        await trio.sleep(0.15)  # the last words of those that ended
        left = [key for key in dump(server.client(), prefix) if b":active:" in key or b":job:" in key]
        assert left == []


async def test_a_raw_task_that_says_something_is_still_found_by_its_payload(mesh: worqr.Mesh) -> None:
    held = Held()

    async def handler(task: bytes) -> None:
        worqr.current().progress(0.5)
        await held(task)

    async with mesh.connect(), serving(mesh, "Q1", handler):
        q = mesh.queue("Q1")
        await q.enqueue(b"raw", b"other")
        await held.wait(2)
        await eventually(lambda: progress_of_all(q), [0.5, 0.5])
        assert await q.cancel(b"raw", wait=30) == worqr.CancelCount(0, 1, 1)
        assert held.cancelled == [(b"raw", "cancel")]
        held.gate.set()
        await eventually(q.running, [])
        assert (await q.info()).counts == {"enqueued": 2, "claimed": 2, "cancelled": 1, "finished": 1}


async def progress_of_all(q: worqr.Queue) -> list[float | None]:
    return [status.progress for status in await q.running()]


async def test_progress_of_a_claim_by_hand(mesh: worqr.Mesh) -> None:
    async with mesh.join() as peer, peer.work("Q1") as claims:
        job = await mesh.queue("Q1").dispatch(b"a")
        (claim,) = await claims.take(1)
        claim.progress(message="only words")
        await eventually(lambda: said(job), (None, "only words"))
        claim.progress(0.0)
        await eventually(lambda: said(job), (0.0, ""))
        claim.progress(0.5, "half \udc80")  # as a file's name may be: no reason to fail the run
        await eventually(lambda: said(job), (0.5, "half \\udc80"))
        await claim.finish()
        claim.progress(1.0)  # too late: nobody minds


@pytest.mark.parametrize("done", [float("nan"), float("inf"), "1", True, b"1"])
async def test_progress_is_a_finite_number(mesh: worqr.Mesh, done: Any) -> None:
    async with mesh.join() as peer, peer.work("Q1") as claims:
        await mesh.queue("Q1").enqueue(b"a")
        (claim,) = await claims.take(1)
        with pytest.raises(worqr.UsageError, match="progress must be a finite number or None"):
            claim.progress(done)
        with pytest.raises(worqr.UsageError, match="the message of progress must be a str"):
            claim.progress(0.5, 7)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        await claim.finish()


async def test_a_long_message_is_cut(mesh: worqr.Mesh) -> None:
    async with mesh.join() as peer, peer.work("Q1") as claims:
        job = await mesh.queue("Q1").dispatch(b"a")
        (claim,) = await claims.take(1)
        claim.progress(message="x" * 100_000)
        await eventually(lambda: said(job), (None, "x" * 1000))
        await claim.finish()


async def test_nobody_waits_for_the_server_to_say_something(own_server: Server, prefix: str) -> None:
    held, spoken = Held(), list[float]()

    async def handler(task: bytes) -> None:
        await held(task)
        start = trio.current_time()
        for n in range(1000):
            worqr.current().progress(n / 1000)
        spoken.append(trio.current_time() - start)

    mesh = worqr.Mesh(own_server.url, prefix=prefix, keepalive=30)
    async with mesh.connect(), serving(mesh, "Q1", handler):
        await mesh.queue("Q1").enqueue(b"a")
        await held.wait(1)
        own_server.pause()
        held.gate.set()
        await until(lambda: bool(spoken))
        own_server.resume()
        assert spoken[0] < 10
        await eventually(mesh.queue("Q1").running, [])
