"""What runs say about how far they are: seen by everybody, sent rarely, gone with the job."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import trio

import worqr
from tests.peer.conftest import NewMesh
from tests.peer.process_jobs import report_and_end, report_and_end_all
from tests.peer.tools import Held, Runs, at_most, eventually, serving, spying, until
from tests.support.leaks import dump
from tests.support.proxy import FaultProxy
from tests.support.servers import Server
from worqr.lua import script
from worqr.peer import run_reports


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
            proxy.drop_reply(matching=script(name).sha, on="data")
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
