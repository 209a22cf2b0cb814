"""Jobs whose worker, leader or failure handler dies: by SIGKILL, or frozen long enough to be taken for dead."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

import worqr
from tests.peer.tools import Runs, eventually, until
from tests.support.children import Child
from tests.support.patience import PATIENCE
from tests.support.proxy import FaultProxy, sent_as
from tests.support.servers import Server
from worqr import Failed, RetryPolicy

CHILD = Path(__file__).parent / "child_jobs.py"
ASIDE = ("{Q1}:failed", "{Q1}:aside*")
Spawn = Callable[..., Child]


class Rescue(Runs):
    """A handler that ends everything at once, and what its failure handler was told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Failed] = []

    async def __call__(self, task: bytes) -> bytes:  # type: ignore[override]
        self.begin(task)
        return task + b" by another"

    async def on_failure(self, record: Failed) -> None:
        self.told.append(record)
        self.tell()


@asynccontextmanager
async def rescuing(url: str, prefix: str, **options: Any) -> AsyncGenerator[Rescue]:
    """Another peer, with a failure handler, in the test's own process."""
    mesh, rescue = worqr.Mesh(url, prefix=prefix, keepalive=1), Rescue()
    async with mesh.join() as peer, trio.open_nursery() as nursery:
        serve = partial(peer.serve, "Q1", rescue, on_failure=rescue.on_failure, result_ttl=60, **options)
        await nursery.start(serve)
        yield rescue
        nursery.cancel_scope.cancel()


@pytest.fixture
def mesh(server: Server, prefix: str) -> worqr.Mesh:
    return worqr.Mesh(server.url, prefix=prefix, keepalive=1, patience=20)


async def nothing_left(mesh: worqr.Mesh) -> None:
    """Until the dead are forgotten, and nothing waits, is due, is blocked or runs."""

    async def look() -> tuple[int, ...]:
        info, failures = await mesh.queue("Q1").info(), await mesh.queue("Q1").failures.info()
        of_both = [(each.waiting, each.scheduled, each.blocked, each.running) for each in (info, failures)]
        return len(await mesh.workers()), *of_both[0], *of_both[1]

    await eventually(look, (1, *([0] * 8)))


# Stalls


async def test_the_jobs_of_a_killed_worker_run_elsewhere_in_their_order_with_one_stall_each(
    server: Server, prefix: str, mesh: worqr.Mesh, spawn: Spawn
) -> None:
    async with mesh.connect():
        q = mesh.queue("Q1")
        child = spawn(CHILD, server.url, prefix, "Q1")
        await child.line_with("joined")
        jobs = [await q.dispatch(b"hold-%d" % n, id=f"{n}", meta={"n": f"{n}"}) for n in range(5)]
        for _ in jobs:
            await child.line_with("run")
        await q.pause()
        child.kill()
        await q.enqueue(b"behind them")
        async with rescuing(server.url, prefix) as rescue:
            await eventually(q.running, [])
            assert (await q.tasks())[::-1] == [*(b"hold-%d" % n for n in range(5)), b"behind them"]
            await q.resume()
            await rescue.wait(6)
            by_id = {context.id: context for context in rescue.contexts if context.task != b"behind them"}
            assert by_id.keys() == {job.id for job in jobs}
            for name, context in by_id.items():
                assert (context.stalls, context.failures, context.attempt) == (1, 0, 2)
                assert context.meta == {"n": name}
            for job in jobs:
                assert await job.result(PATIENCE) == f"hold-{job.id} by another".encode()
            await nothing_left(mesh)
            assert (await q.info()).counts["stalled"] == 5


@pytest.mark.leaves(*ASIDE)
async def test_a_job_that_keeps_killing_its_workers_is_set_aside_and_its_failure_handler_is_told(
    server: Server, prefix: str, mesh: worqr.Mesh, spawn: Spawn
) -> None:
    async with mesh.connect():
        q = mesh.queue("Q1")
        job = await q.dispatch(b"die", id="x", retry=RetryPolicy(max_stalls=2), meta={"k": "v"}, result_ttl=60)
        for attempt in (1, 2):
            child = spawn(CHILD, server.url, prefix, "Q1")
            assert (await child.line_with("run die")).endswith(f" {attempt}")
            await child.ended()
        async with rescuing(server.url, prefix) as rescue:
            with pytest.raises(worqr.JobFailed, match="Stalled: its workers died while it ran"):
                await job.result(PATIENCE)
            await rescue.wait_for(lambda: len(rescue.told) == 1)
            (record,) = await q.failed.list()
            assert rescue.told == [record]
            assert (record.id, record.reason, record.stalls, record.failures) == ("x", "stalled", 2, 0)
            assert (record.task, record.meta) == (b"die", {"k": "v"})
            assert rescue.tasks == []
            await nothing_left(mesh)


async def test_the_twin_of_a_job_whose_worker_is_killed_runs_in_its_place(
    server: Server, prefix: str, mesh: worqr.Mesh, spawn: Spawn
) -> None:
    async with mesh.connect():
        q = mesh.queue("Q1")
        child = spawn(CHILD, server.url, prefix, "Q1")
        await child.line_with("joined")
        job = await q.dispatch(b"hold", id="x")
        await child.line_with("run hold")
        twin = await q.dispatch(b"instead", id="x")
        assert twin.outcome == "blocked"
        child.kill()
        async with rescuing(server.url, prefix) as rescue:
            assert await twin.result(PATIENCE) == await job.result(PATIENCE) == b"instead by another"
            assert rescue.tasks == [b"instead"]
            await nothing_left(mesh)


@pytest.mark.parametrize("when", ["before it is killed", "when it is dead"])
async def test_a_cancel_by_id_that_meets_a_dying_worker_holds(
    server: Server, prefix: str, mesh: worqr.Mesh, spawn: Spawn, when: str
) -> None:
    async with mesh.connect():
        q = mesh.queue("Q1")
        child = spawn(CHILD, server.url, prefix, "Q1")
        await child.line_with("joined")
        job = await q.dispatch(b"hold", id="x")
        await child.line_with("run hold")
        child.pause()
        if when == "before it is killed":
            assert await job.cancel(reason="no") == worqr.CancelCount(0, 1, 0)
        child.kill()
        if when != "before it is killed":
            assert await job.cancel(reason="no") == worqr.CancelCount(0, 1, 0)
        async with rescuing(server.url, prefix) as rescue:
            await nothing_left(mesh)
            with pytest.raises(worqr.JobCancelled, match="no"):
                await job.result(PATIENCE)
            assert (rescue.tasks, rescue.told) == ([], [])
            assert (await q.info()).counts["cancelled"] == 1


async def test_a_caller_that_waits_for_the_acknowledgement_gets_it_from_the_sweep(
    server: Server, prefix: str, mesh: worqr.Mesh, spawn: Spawn
) -> None:
    async with mesh.join():  # it serves nothing, and sweeps
        q = mesh.queue("Q1")
        child = spawn(CHILD, server.url, prefix, "Q1")
        await child.line_with("joined")
        job = await q.dispatch(b"hold", id="x")
        await child.line_with("run hold")
        child.pause()
        async with trio.open_nursery() as nursery:
            counts: list[worqr.CancelCount] = []

            async def cancel() -> None:
                counts.append(await job.cancel(wait=PATIENCE))

            nursery.start_soon(cancel)
            await eventually(partial(marks, server, prefix), 1)
            child.kill()
        assert counts == [worqr.CancelCount(0, 1, 1)]
        await nothing_left(mesh)
        assert (await q.info()).counts == {"enqueued": 1, "claimed": 1, "cancelled": 1}


async def marks(server: Server, prefix: str) -> int:
    return int(server.look.scard(f"{prefix}:{{Q1}}:cancelling"))


# Failures


@pytest.mark.leaves(*ASIDE)
@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_peer_killed_while_it_sets_a_job_aside(
    server: Server, prefix: str, mesh: worqr.Mesh, proxy: FaultProxy, spawn: Spawn, when: str
) -> None:
    """Either nothing happened, and the job runs again, or all: the record, the failure job and the result."""
    hold = proxy.hold if when == "before" else proxy.hold_reply
    fault = hold(sent_as("fail_task"))
    async with mesh.connect():
        q = mesh.queue("Q1")
        child = spawn(CHILD, proxy.url, prefix, "Q1", env={"HOLD_FAILURES": "1"})
        await child.line_with("joined")
        job = await q.dispatch(b"fail", id="x", result_ttl=60)
        await fault.wait_fired()
        if when == "after":
            await fault.wait_executed()
        child.kill()
        fault.release()  # and is executed late, when its sender is dead; not yet swept, the claim is still its own
        async with rescuing(server.url, prefix) as rescue:
            if when == "before" and not await q.failed.list():
                await rescue.wait_for(lambda: rescue.tasks == [b"fail"] or bool(rescue.told))
            else:
                await rescue.wait_for(lambda: bool(rescue.told))
            await nothing_left(mesh)
            records = await q.failed.list()
            assert len(rescue.tasks) + len(records) == 1
            assert rescue.told == records
            assert (await job.status()).state == ("failed" if records else "finished")


@pytest.mark.leaves(*ASIDE)
async def test_a_failure_handler_that_is_killed_is_called_again_elsewhere(
    server: Server, prefix: str, mesh: worqr.Mesh, spawn: Spawn
) -> None:
    async with mesh.connect():
        q = mesh.queue("Q1")
        child = spawn(CHILD, server.url, prefix, "Q1", env={"HOLD_FAILURES": "1"})
        await child.line_with("joined")
        await q.dispatch(b"fail", id="x")
        await child.line_with("told fail failed")
        child.kill()
        async with rescuing(server.url, prefix) as rescue:
            await rescue.wait_for(lambda: len(rescue.told) == 1)
            assert rescue.told == await q.failed.list()
            await nothing_left(mesh)
            assert len(rescue.told) == 1


# Zombies


async def test_a_zombie_neither_ends_its_job_nor_keeps_a_result(
    server: Server, prefix: str, mesh: worqr.Mesh, spawn: Spawn
) -> None:
    async with mesh.connect():
        q = mesh.queue("Q1")
        child = spawn(CHILD, server.url, prefix, "Q1")
        await child.line_with("joined")
        job = await q.dispatch(b"hold", id="x", result_ttl=60)
        await child.line_with("run hold")
        child.pause()
        async with rescuing(server.url, prefix):
            assert await job.result(PATIENCE) == b"hold by another"
            again = await q.dispatch(b"again", id="x", result_ttl=60)
            assert await again.result(PATIENCE) == b"again by another"
            child.send("go")
            child.resume()
            assert await child.line_with("ended hold") in {"ended hold lost", "ended hold None"}
            child.send("leave")
            await child.line_with("left")
            assert await job.result(0) == b"hold by another"
            assert await again.result(0) == await q.job("x").result(0) == b"again by another"
            await nothing_left(mesh)
            assert (await q.info()).counts["finished"] == 2


# Due jobs


async def test_due_jobs_go_on_when_the_leader_is_killed(
    server: Server, prefix: str, mesh: worqr.Mesh, spawn: Spawn
) -> None:
    async with mesh.connect():
        q = mesh.queue("Q1")
        child = spawn(CHILD, server.url, prefix, "Q2")
        joined = await child.line_with("joined")
        lease = f"{{{prefix}}}:leader"
        await until(lambda: (server.look.get(lease) or b"").split(b" ")[0] == joined.split()[1].encode())
        async with rescuing(server.url, prefix) as rescue:
            for n in range(30):
                await q.dispatch(b"%d" % n, delay=n / 10)
            child.kill()
            assert sorted(await rescue.wait(30)) == sorted(b"%d" % n for n in range(30))
            await nothing_left(mesh)
    now = [(context.fence / 1000 - context.run_at.timestamp() * 1000) for context in rescue.contexts]
    assert min(now) >= 0 and max(now) < 20_000, now  # ms from its due time to its claim, by the server's clock


async def test_a_retry_that_waits_survives_its_worker_and_a_restart_of_the_server(
    own_server: Server, prefix: str
) -> None:
    mesh, runs = worqr.Mesh(own_server.url, prefix=prefix, keepalive=1, patience=20), Runs()

    async def handler(task: bytes) -> str:
        runs.begin(task)
        if len(runs.tasks) == 1:
            raise worqr.Retry(delay=1.5)
        return "at last"

    async with mesh.connect():
        q = mesh.queue("Q1")
        async with mesh.join() as peer, trio.open_nursery() as nursery:
            await nursery.start(partial(peer.serve, "Q1", handler, result_ttl=60))
            job = await q.dispatch(b"a", id="x", result_ttl=60)
            await runs.wait(1)
            await eventually(q.running, [])
            nursery.cancel_scope.cancel()
        own_server.restart()
        assert (await job.status()).state == "scheduled"
        async with mesh.join() as peer, trio.open_nursery() as nursery:
            await nursery.start(partial(peer.serve, "Q1", handler, result_ttl=60))
            assert await job.result(PATIENCE) == "at last"  # type: ignore[comparison-overlap]
            assert [context.failures for context in runs.contexts] == [0, 1]
            nursery.cancel_scope.cancel()
