"""Jobs that are not worth running any more: set aside when they are claimed too late, if they have never been started."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import trio

import worqr
from tests.peer.tools import Held, Runs, eventually, serving
from tests.support.servers import Server
from worqr import Retry, RetryPolicy, Update

FAILED = ("{Q1}:failed", "{Q1}:aside*")


def now() -> datetime:
    return datetime.now(UTC)


async def failed(q: worqr.Queue) -> int:
    return (await q.info()).failed


@pytest.mark.leaves(*FAILED)
@pytest.mark.parametrize("how", ["a duration", "a moment", "both passed long ago"])
async def test_a_job_that_was_not_started_in_time_is_set_aside(mesh: worqr.Mesh, how: str) -> None:
    runs, told = Runs(), list[worqr.Failed]()
    expires = {
        "a duration": 0.1,
        "a moment": now() + timedelta(seconds=0.1),
        "both passed long ago": now() - timedelta(1),
    }
    async with mesh.connect():
        q = mesh.queue("Q1")
        job = await q.dispatch(b"a\x00", id="x", expires=expires[how], result_ttl=60, meta={"k": "v"})  # type: ignore[arg-type]
        await q.dispatch(b"b", expires=60)
        await q.enqueue(b"c")
        await trio.sleep(0.15)
        async with serving(mesh, "Q1", runs, on_failure=told.append):
            assert sorted(await runs.wait(2)) == [b"b", b"c"]
            with pytest.raises(worqr.JobFailed, match="Expired: it was not started before it expired"):
                await job.result(30)
            await eventually(lambda: listed(told), 1)
            (record,) = await q.failed.list()
            assert record == told[0]
            assert (record.id, record.task, record.reason, record.meta) == ("x", b"a\x00", "expired", {"k": "v"})
            assert (record.failures, record.stalls, record.timeouts) == (0, 0, 0)
            await eventually(q.running, [])
            assert (await q.info()).counts["failed"] == 1
        assert len(runs.tasks) == 2


async def listed(told: list[worqr.Failed]) -> int:
    return len(told)


@pytest.mark.leaves(*FAILED)
async def test_a_duration_counts_from_the_due_time(mesh: worqr.Mesh) -> None:
    runs, due = Runs(), now() - timedelta(hours=2)
    async with mesh.connect(), serving(mesh, "Q1", runs):
        q = mesh.queue("Q1")
        await q.dispatch(b"too late", id="x", run_at=due, expires=timedelta(hours=1))
        await q.dispatch(b"in time", run_at=due, expires=timedelta(hours=3))
        assert await runs.wait(1) == [b"in time"]
        await eventually(q.running, [])
        assert [record.id for record in await q.failed.list()] == ["x"]


@pytest.mark.parametrize("way", ["retried", "stopped", "left"])
async def test_a_job_that_was_started_once_does_not_expire(
    mesh: worqr.Mesh, server: Server, prefix: str, way: str
) -> None:
    runs = Runs()
    async with mesh.connect():
        q = mesh.queue("Q1")
        await q.dispatch(b"a", id="x", expires=60)
        async with mesh.join() as peer, peer.work("Q1") as claims:
            (claim,) = await claims.take(1)
            if way == "retried":
                await claim.retry(delay=0)
            elif way == "stopped":
                await claim.stop()
        assert server.client().hset(f"{prefix}:{{Q1}}:job:x", "expires", 1) == 0  # as if a minute had passed
        async with serving(mesh, "Q1", runs):
            assert await runs.wait(1) == [b"a"]
            await eventually(q.running, [])
        assert await failed(q) == 0


async def test_a_run_is_not_ended_because_its_job_has_expired_meanwhile(
    mesh: worqr.Mesh, server: Server, prefix: str
) -> None:
    held = Held()
    async with mesh.connect(), serving(mesh, "Q1", held, retry=RetryPolicy(min_backoff=0)):
        q = mesh.queue("Q1")
        job = await q.dispatch(b"a", id="x", expires=60, result_ttl=60)
        await held.wait(1)
        assert server.client().hset(f"{prefix}:{{Q1}}:active:x", "expires", 1) == 0  # as if a minute had passed
        held.gate.set()
        assert await job.result(30) is None


async def test_a_dispatch_renews_or_keeps_when_its_job_expires(
    mesh: worqr.Mesh, expects_left: Callable[..., None]
) -> None:
    expects_left(*FAILED)
    runs = Runs()
    async with mesh.connect():
        q = mesh.queue("Q1")
        for name in ("renewed", "kept", "freed"):
            await q.dispatch(name.encode(), id=name, expires=0.1)
        await q.dispatch(b"renewed", id="renewed", expires=60)
        await q.dispatch(b"kept", id="kept", expires=60, update=Update(run_at=False))
        await q.dispatch(b"freed", id="freed")
        await trio.sleep(0.2)
        async with serving(mesh, "Q1", runs):
            assert sorted(await runs.wait(2)) == [b"freed", b"renewed"]
            await eventually(lambda: failed(q), 1)
            assert [record.id for record in await q.failed.list()] == ["kept"]


@pytest.mark.leaves(*FAILED)
async def test_expired_jobs_do_not_hold_up_the_others(mesh: worqr.Mesh) -> None:
    runs = Runs()
    async with mesh.connect():
        q = mesh.queue("Q1")
        async with trio.open_nursery() as nursery:
            for n in range(300):
                nursery.start_soon(dispatch, q, b"%d" % n, 0.01)
        await q.enqueue(b"last")
        await trio.sleep(0.05)
        async with serving(mesh, "Q1", runs, room=4):
            assert await runs.wait(1) == [b"last"]
            await eventually(q.running, [])
            assert await failed(q) == 300
            assert (await q.info()).waiting == 0


async def dispatch(q: worqr.Queue, task: bytes, expires: float) -> None:
    await q.dispatch(task, expires=expires)


@pytest.mark.leaves(*FAILED)
async def test_the_blocked_twin_of_a_job_expires_by_its_own_time(mesh: worqr.Mesh) -> None:
    held = Held()

    async def handler(task: bytes) -> None:
        await held(task)
        if worqr.current().failures == 0 and task == b"c":
            raise Retry(delay=0)

    async with mesh.connect(), serving(mesh, "Q1", handler):
        q = mesh.queue("Q1")
        await q.dispatch(b"a", id="x")
        await held.wait(1)
        twin = await q.dispatch(b"b", id="x", expires=0.1, result_ttl=60)
        await trio.sleep(0.15)
        held.gate.set()
        with pytest.raises(worqr.JobFailed, match="Expired"):
            await twin.result(30)
        assert held.tasks == [b"a"]


@pytest.mark.leaves(*FAILED)
async def test_an_expired_job_that_is_put_back_runs(mesh: worqr.Mesh) -> None:
    runs = Runs()
    async with mesh.connect():
        q = mesh.queue("Q1")
        await q.dispatch(b"a", id="x", expires=0.01)
        await trio.sleep(0.05)
        async with serving(mesh, "Q1", runs):
            await eventually(lambda: failed(q), 1)
            assert await q.failed.retry("x") == 1
            assert await runs.wait(1) == [b"a"]
            await eventually(q.running, [])


@pytest.mark.parametrize("expires", [-1, float("nan"), "5", True, datetime(2030, 1, 1), None])
async def test_expires_is_a_duration_or_an_aware_moment(mesh: worqr.Mesh, expires: Any) -> None:
    async with mesh.connect():
        with pytest.raises(worqr.UsageError, match="expires must"):
            await mesh.queue("Q1").dispatch(b"a", expires=expires)
