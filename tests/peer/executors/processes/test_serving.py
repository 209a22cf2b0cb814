"""Functions in worker processes as handlers of a queue: what becomes of their tasks, however their runs end."""

from __future__ import annotations

import errno
import json
import subprocess
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

import worqr
from tests.peer import process_jobs as jobs
from tests.peer.processes import LONG, Pool, is_alive, open_pool, wait_dead
from tests.peer.test_claims import lose
from tests.peer.tools import QUICK, Runs, eventually, serving
from tests.support.servers import Server
from worqr.peer.executors import offloaded

pytestmark = pytest.mark.one_server

FAILED = ("{Q1}:failed", "{Q1}:aside*")


@asynccontextmanager
async def serving_in_processes(
    mesh: worqr.Mesh, function: Callable[[bytes], object], *, limit: int = 2, **options: Any
) -> AsyncGenerator[tuple[worqr.Queue, Pool]]:
    """A peer that serves Q1 by `function`, each run in a process."""
    async with mesh.connect(), open_pool(limit) as pool:
        async with serving(mesh, "Q1", pool.children.prepare(function), **options):
            yield mesh.queue("Q1"), pool


async def begun(job: worqr.Job[Any]) -> dict[str, int]:
    """What its run says first."""
    with trio.fail_after(LONG):
        while not (status := await job.status()).message:
            await trio.sleep(0.02)
    facts: dict[str, int] = json.loads(status.message)
    return facts


async def test_a_job_has_its_result_and_a_raw_task_its_run(mesh: worqr.Mesh) -> None:
    async with serving_in_processes(mesh, jobs.echo) as (queue, _):
        job = await queue.dispatch(b"there and back", result_ttl=60)
        assert await job.result(LONG) == b"there and back"
        await queue.enqueue(b"raw", b"raw")
        await eventually(lambda: finished(queue), 3, LONG)


async def finished(queue: worqr.Queue) -> int:
    return (await queue.info()).counts.get("finished", 0)


@pytest.mark.leaves(*FAILED)
@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EMFILE, errno.ENOENT])
async def test_a_task_for_which_the_system_has_no_process_runs_again_and_counts_no_failure(
    mesh: worqr.Mesh, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A program that is not there is no shortage: the task fails."""
    refusals, start = [OSError(number, "no process")], subprocess.Popen

    def popen(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        if refusals:
            raise refusals.pop()
        return start(*args, **options)

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(offloaded, "START_AGAIN", 0.0)
    async with serving_in_processes(mesh, jobs.echo, retry=worqr.RetryPolicy(max_failures=1)) as (queue, _):
        job = await queue.dispatch(b"x", result_ttl=60)
        if number == errno.ENOENT:
            with pytest.raises(worqr.JobFailed, match="no process"):
                await job.result(LONG)
        else:
            assert await job.result(LONG) == b"x"


@pytest.mark.leaves(*FAILED)
async def test_a_failure_is_counted_and_its_record_has_what_was_written_to_stderr(
    mesh: worqr.Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    twice = worqr.RetryPolicy(max_failures=2, min_backoff=0)
    async with serving_in_processes(mesh, jobs.fail, retry=twice) as (queue, _):
        job = await queue.dispatch(b"refused", result_ttl=60)
        with pytest.raises(worqr.JobFailed, match="Down: refused"):
            await job.result(LONG)
        (record,) = await queue.failed.list()
    assert (record.reason, record.failures, record.error.message) == ("failed", 2, "refused")
    assert record.error.type == "tests.peer.process_jobs.Down"
    assert record.error.fields == {"text": "refused"}
    assert record.error.traceback.endswith("stderr:\nit went wrong\n")
    assert "task.failed: queue 'Q1'" in caplog.text
    assert "raise Down(task.decode())" in caplog.text  # the traceback over there


@pytest.mark.leaves(*FAILED)
async def test_the_policy_knows_errors_by_the_names_of_their_classes(mesh: worqr.Mesh) -> None:
    policy = worqr.RetryPolicy(fail_on=(ConnectionError,))
    async with serving_in_processes(mesh, jobs.fail, retry=policy) as (queue, _):
        job = await queue.dispatch(b"x", result_ttl=60)
        with pytest.raises(worqr.JobFailed):
            await job.result(LONG)
        (record,) = await queue.failed.list()
    assert (record.reason, record.failures) == ("failed", 1)


@pytest.mark.leaves(*FAILED)
async def test_a_crash_is_a_stall_and_the_last_one_is_final(mesh: worqr.Mesh, caplog: pytest.LogCaptureFixture) -> None:
    async with serving_in_processes(mesh, jobs.crash, retry=QUICK) as (queue, _):
        job = await queue.dispatch(b"segv", result_ttl=60)
        with pytest.raises(worqr.JobFailed, match="was killed by SIGSEGV"):
            await job.result(LONG)
        (record,) = await queue.failed.list()
        assert (record.reason, record.failures, record.stalls, record.timeouts) == ("stalled", 0, 3, 0)
        assert record.error.traceback.startswith("stderr:\nabout to crash\n")
        counts = (await queue.info()).counts
        assert counts == {"enqueued": 1, "claimed": 3, "stalled": 2, "failed": 1}
    assert caplog.text.count("task.crashed: queue 'Q1'") == 2
    assert f"task.failed: queue 'Q1', job {job.id}: gave up after 3 attempts: " in caplog.text


@pytest.mark.leaves(*FAILED)
async def test_a_crash_touches_no_other_run(mesh: worqr.Mesh) -> None:
    async with serving_in_processes(mesh, jobs.hold_or_crash) as (queue, _):
        held = await queue.dispatch(b"hold", id="held")
        pid = (await begun(held))["pid"]
        crashed = await queue.dispatch(b"kill", result_ttl=60, retry=worqr.RetryPolicy(max_stalls=1))
        with pytest.raises(worqr.JobFailed, match="SIGKILL"):
            await crashed.result(LONG)
        assert is_alive(pid)
        assert (await held.status()).state == "active"
        await held.cancel(wait=LONG)


@pytest.mark.parametrize("handler", [jobs.spin, jobs.hold_the_lock])
async def test_a_cancelled_job_is_killed_with_all_it_has_started(
    mesh: worqr.Mesh, handler: Callable[[bytes], object]
) -> None:
    async with serving_in_processes(mesh, handler) as (queue, _):
        job = await queue.dispatch(b"x", id="x")
        facts = await begun(job)
        count = await job.cancel(wait=LONG)
        assert (count.running, count.acknowledged) == (1, 1)
        assert not is_alive(facts["pid"])  # when that is acknowledged
        await wait_dead(*facts.values())
        assert (await job.status()).state == "gone"


@pytest.mark.leaves(*FAILED)
async def test_one_that_takes_too_long_is_killed_and_counted(mesh: worqr.Mesh, tmp_path: Path) -> None:
    once, file = worqr.RetryPolicy(max_timeouts=1), tmp_path / "pids"
    async with serving_in_processes(mesh, jobs.spin_shortly, timeout=LONG, retry=once) as (queue, _):
        job = await queue.dispatch(str(file).encode(), result_ttl=60)
        with pytest.raises(worqr.JobFailed, match="it ran longer than"):
            await job.result(LONG / 2)
        pids = [int(pid) for pid in file.read_text().split()]
        assert not is_alive(pids[0])
        await wait_dead(*pids)
        (record,) = await queue.failed.list()
    assert (record.reason, record.timeouts) == ("timeout", 1)
    assert record.error.traceback == "stderr:\nnot long now\n"


async def test_a_lost_claim_kills_its_run(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    async with serving_in_processes(mesh, jobs.spin) as (queue, _):
        job = await queue.dispatch(b"x", id="x")
        facts = await begun(job)
        [worker] = await mesh.workers()
        lose(server, prefix, worker.id)
        await wait_dead(*facts.values())
        with trio.fail_after(LONG):  # and it runs again
            while (await begun(job))["pid"] == facts["pid"]:
                await trio.sleep(0.02)
        await job.cancel(wait=LONG)


async def test_who_leaves_kills_what_runs_and_gives_it_back(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    runs = Runs()
    async with serving_in_processes(mesh, jobs.spin, grace=0) as (queue, _):
        job = await queue.dispatch(b"x", id="x")
        facts = await begun(job)
    await wait_dead(*facts.values())
    async with other.connect(), serving(other, "Q1", runs):
        assert await runs.wait(1, LONG) == [b"x"]
        assert runs.contexts[0].attempt == 1


async def test_a_run_that_asks_for_more_time_gets_it(mesh: worqr.Mesh) -> None:
    async with mesh.connect(), open_pool() as pool:
        run, left = pool.children.prepare(jobs.extend), list[float]()

        async def handler(task: bytes) -> object:
            result = await run(task)
            deadline = worqr.current().deadline
            assert deadline is not None
            left.append(deadline - time.monotonic())
            return result

        async with serving(mesh, "Q1", handler, timeout=LONG):
            job = await mesh.queue("Q1").dispatch(b"x", result_ttl=60)
            await job.result(LONG)
    assert 100 - LONG < left[0] <= 100
