"""What a handle answers in the odd cases: of a raw task that said something, after a change of nothing, after a redrive."""

from __future__ import annotations

import pytest
import trio

import worqr
from tests.peer.tools import at_most, eventually, serving


async def test_a_raw_task_that_says_something_is_seen_and_its_result_is_kept(mesh: worqr.Mesh) -> None:
    said, go_on = trio.Event(), trio.Event()
    ids: list[str] = []

    async def handler(_task: bytes) -> dict[str, int]:
        run = worqr.current()
        ids.append(run.id)
        run.progress(0.5, "half")
        said.set()
        await go_on.wait()
        return {"pages": 7}

    async with mesh.connect(), serving(mesh, "Q1", handler, result_ttl=60) as peer, at_most(60):
        queue = mesh.queue("Q1")
        await queue.enqueue(b"report")
        await said.wait()
        job = queue.job(ids[0])

        async def look() -> tuple[str, str | None, float | None, str]:
            status = await job.status()
            return status.state, status.worker, status.progress, status.message

        await eventually(look, ("active", peer.id, 0.5, "half"))
        go_on.set()
        assert await job.result() == {"pages": 7}


async def test_counting_anew_is_a_change(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        queue, keep = mesh.queue("Q1"), worqr.Update(data=False, run_at=False)
        await queue.dispatch(b"a", id="x")
        assert (await queue.dispatch(b"b", id="x", update=keep)).outcome == "unchanged"
        anew = worqr.Update(data=False, run_at=False, counts=True)
        assert (await queue.dispatch(b"b", id="x", update=anew)).outcome == "updated"
        await queue.cancel_all()


async def test_a_job_that_failed_and_was_put_back_is_waited_for_again(mesh: worqr.Mesh) -> None:
    go_on = trio.Event()

    async def handler(_task: bytes) -> bytes:
        if worqr.current().meta["try"] == "1" and not go_on.is_set():
            raise worqr.Failure("not today")
        await go_on.wait()
        return b"done"

    async with mesh.connect(), serving(mesh, "Q1", handler, result_ttl=60), at_most(60):
        queue = mesh.queue("Q1")
        job = await queue.dispatch(b"a", id="x", meta={"try": "1"})
        with pytest.raises(worqr.JobFailed):
            await job.result()
        await queue.pause()
        assert await queue.failed.retry("x") == 1
        assert (await job.status()).state == "waiting"
        with pytest.raises(worqr.ResultTimeout):
            await job.result(timeout=0)
        go_on.set()
        await queue.resume()
        assert await job.result() == b"done"
