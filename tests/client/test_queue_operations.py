"""Single tasks as operators deal with them: read with everything that is stored, cancelled by their claims, run now, found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest
import trio

import worqr
from tests.ops.driver import Desk
from tests.peer.conftest import NewMesh, mesh, new_mesh, other  # noqa: F401 - fixtures
from tests.peer.tools import QUICK, Held, Runs, eventually, serving
from tests.support.patience import PATIENCE
from tests.support.servers import Server
from worqr.client import fleet
from worqr.keys import QueueKeys, shards_of

LATER = 3600
ONCE = worqr.RetryPolicy(max_failures=1)
FAILED = pytest.mark.leaves("{Q1}:failed", "{Q1}:aside*")


async def state(job: worqr.Job[bytes]) -> str:
    return (await job.status()).state


def is_recent(moment: datetime | None) -> bool:
    return moment is not None and abs(moment - datetime.now(UTC)) < timedelta(seconds=PATIENCE)


# Reading a job


async def test_a_job_that_waits_for_its_next_try_tells_why(mesh: worqr.Mesh) -> None:
    async def handler(task: bytes) -> None:
        raise ConnectionRefusedError("smtp: connection refused")

    slow = worqr.RetryPolicy(min_backoff=LATER, max_backoff=LATER)
    async with mesh.connect(), serving(mesh, "Q1", handler) as peer:
        q = mesh.queue("Q1")
        job = await q.dispatch(b"mail", id="x", meta={"trace": "7"}, retry=slow, timeout=5, result_ttl=60)
        await eventually(lambda: state(job), "scheduled")
        record = await q.read("x")
        assert record.status == await job.status()
        assert (record.id, record.queue, record.task, record.size) == ("x", "Q1", b"mail", 4)
        assert (record.meta, record.plain, record.blocked, record.claim) == ({"trace": "7"}, False, None, None)
        assert record.options == {"min_backoff": LATER, "max_backoff": LATER, "timeout": 5, "result_ttl": 60}
        assert (record.failures, record.stalls, record.timeouts) == (1, 0, 0)
        assert is_recent(record.dispatched)
        (tried,) = record.tries
        assert (tried.worker, tried.reason) == (peer.id, "failed")
        assert tried.error == worqr.RemoteError("ConnectionRefusedError", "smtp: connection refused", "")
        assert is_recent(tried.at)
        assert 0 <= tried.seconds < PATIENCE
        await job.cancel()
        record = await q.read("x")
        assert (record.status.state, record.task, record.size, record.tries) == ("cancelled", b"", None, ())
        assert [(ended.state, ended.reason) for ended in record.ended] == [("cancelled", "")]
        assert 0 < record.ended[0].expires_in <= 60


async def test_a_job_that_runs_and_the_dispatch_behind_it(mesh: worqr.Mesh) -> None:
    held = Held()
    async with mesh.connect(), serving(mesh, "Q1", held):
        q = mesh.queue("Q1")
        job = await q.dispatch(b"first", id="x", timeout=LATER, unique_for=LATER)
        await held.wait(1)
        await q.dispatch(b"second", id="x", delay=LATER)
        record = await q.read("x")
        assert record.status == await job.status()
        assert (record.status.state, record.task, record.cancelling) == ("active", b"first", False)
        assert record.claim == str(held.contexts[0].fence)
        assert record.deadline is not None
        assert record.status.since is not None
        assert record.deadline - record.status.since == timedelta(seconds=LATER)
        assert record.reserved is not None
        assert LATER - PATIENCE < record.reserved <= LATER
        assert record.blocked is not None
        assert (record.blocked.state, record.blocked.task, record.blocked.size) == ("blocked", b"second", 6)
        assert record.blocked.run_at is not None
        await job.cancel(reason="no paper", wait=PATIENCE)
        assert (await q.read("x")).status.state == "gone"


@FAILED
async def test_a_job_that_failed_with_its_records_and_results(mesh: worqr.Mesh) -> None:
    async def handler(task: bytes) -> None:
        raise ValueError(task.decode())

    async with mesh.connect(), serving(mesh, "Q1", handler, retry=ONCE):
        q = mesh.queue("Q1")
        for text in (b"one", b"two"):
            job = await q.dispatch(text, id="x", result_ttl=60)
            await eventually(lambda job=job: state(job), "failed")  # type: ignore[misc]
        record = await q.read("x")
        newest = await q.job("x").status()
        assert record.status == newest
        assert [failed.task for failed in record.dead_letters] == [b"two", b"one"]
        assert record.dead_letters[0] == (await q.failed.list())[0]
        assert [tried.error.message for tried in record.tries] == ["two"]
        assert [(ended.state, ended.attempts, ended.failures) for ended in record.ended] == [("failed", 1, 1)] * 2
        first, second = record.ended
        assert first.error is not None
        assert second.error is not None
        assert (first.error.message, second.error.message) == ("two", "one")
        assert "in handler" in first.error.traceback
        assert (record.task, record.size) == (b"two", 3)


@FAILED
async def test_without_a_result_the_dead_letter_record_tells_the_state(mesh: worqr.Mesh) -> None:
    async def handler(task: bytes) -> None:
        raise worqr.Failure("no")

    async with mesh.connect(), serving(mesh, "Q1", handler):
        q = mesh.queue("Q1")
        job = await q.dispatch(b"a", id="x", expires=LATER)
        await eventually(lambda: state(job), "failed")
        record = await q.read("x")
        assert record.status == await job.status()
        assert (record.ended, record.expires_at, len(record.dead_letters)) == ((), None, 1)


async def test_an_unknown_id_is_gone(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        record = await mesh.queue("Q1").read("x")
        assert record.status == worqr.Status("gone")
        assert (record.task, record.size, record.dispatched, record.tries, record.ended) == (b"", None, None, (), ())
        assert (record.options, record.meta, record.reserved, record.blocked) == ({}, {}, None, None)


async def test_a_plain_task_that_was_retried(mesh: worqr.Mesh) -> None:
    held = Held()

    async def handler(task: bytes) -> None:
        if worqr.current().attempt == 1:
            raise ValueError
        await held(task)

    async with mesh.connect(), serving(mesh, "Q1", handler, retry=QUICK):
        q = mesh.queue("Q1")
        await q.enqueue(b"a")
        await held.wait(1)
        (running,) = await q.running()
        assert running.id is not None
        record = await q.read(running.id)
        assert (record.plain, record.dispatched, len(record.tries)) == (True, None, 1)
        held.gate.set()
        await eventually(q.running, [])


async def test_when_it_expires_and_for_what_it_was_scheduled(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        q = mesh.queue("Q1")
        moment = datetime(2040, 5, 1, 12, tzinfo=UTC)
        await q.dispatch(b"a", id="x", run_at=moment, expires=60)
        await q.dispatch(b"a", id="y", run_at=moment, expires=moment + timedelta(hours=1))
        assert (await q.read("x")).expires_at == moment + timedelta(seconds=60)
        assert (await q.read("y")).expires_at == moment + timedelta(hours=1)
        await q.delete()


async def test_of_a_long_payload_the_beginning_or_all_of_it(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        q, payload = mesh.queue("Q1"), bytes(range(256)) * 100
        await q.dispatch(payload, id="x")
        record = await q.read("x")
        assert (record.task, record.size) == (payload[:4096], 25_600)
        assert await q.read("x", payload=True) == replace(record, task=payload)
        assert await q.payload("x") == payload
        await q.delete()


async def test_what_another_program_wrote_into_a_record_is_no_error(
    mesh: worqr.Mesh, server: Server, prefix: str
) -> None:
    async with mesh.connect():
        q = mesh.queue("Q1")
        await q.dispatch(b"a", id="x")
        for tries in (b"\xc1", b"\x91\x91\x01"):
            foreign = {
                "tries": tries,
                "expires": "x",
                "expires_at": "9" * 5000,
                "timeout": "-",
                "meta": "{",
                "failures": "many",
                "retry_on": b"\xff",
            }
            server.client().hset(f"{prefix}:{{Q1}}:job:x", mapping=foreign)  # type: ignore[arg-type]
            record = await q.read("x")
            assert (record.tries, record.failures, record.meta, record.expires_at) == ((), 0, {}, None)
        late = {"tries": b"\x91\x96\xcf" + b"\xff" * 8 + b"\x00\xa0\xa0\xa0\xa0", "expires_at": "9" * 25}
        server.client().hdel(f"{prefix}:{{Q1}}:job:x", "expires")
        server.client().hset(f"{prefix}:{{Q1}}:job:x", mapping=late)  # type: ignore[arg-type]
        record = await q.read("x")
        assert (record.tries, record.expires_at) == ((), None)
        await q.delete()


# Payloads


@FAILED
async def test_the_payload_of_what_runs_and_of_what_failed(mesh: worqr.Mesh) -> None:
    held, payload = Held(), b"\x00\xff" * 1000
    async with mesh.connect():
        q = mesh.queue("Q1")
        async with serving(mesh, "Q1", held):
            await q.enqueue(payload)
            await held.wait(1)
            (running,) = await q.running()
            assert (running.id, running.task, running.size) == (None, payload[:100], 2000)
            assert await q.payload(claim=running.claim) == payload
            held.gate.set()
            await eventually(q.running, [])
        assert await q.payload(claim=running.claim) is None
        assert await q.payload("nobody") is None
        async with serving(mesh, "Q1", fail, retry=ONCE):
            await q.enqueue(payload)
            await eventually(lambda: failed(q), 1)
        (record,) = await q.failed.list()
        assert await q.payload(record.id) == payload


async def fail(task: bytes) -> None:
    raise ValueError


async def failed(q: worqr.Queue) -> int:
    return (await q.info()).failed


# Running tasks


async def test_the_longest_running_tasks_come_first_whoever_runs_them(
    mesh: worqr.Mesh, other: worqr.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held()
    async with mesh.connect(), serving(mesh, "Q1", held, room=3), serving(other, "Q1", held, room=3):
        q = mesh.queue("Q1")
        for n in range(6):
            await q.dispatch(b"%d" % n, id=f"job {n}")
            await held.wait(n + 1)
        running = await q.running()
        assert [task.id for task in running] == [f"job {n}" for n in range(6)]
        assert len({task.worker for task in running}) == 2
        assert [task.claim for task in running] == [str(context.fence) for context in held.contexts]
        assert [task.id for task in await q.running(2)] == ["job 0", "job 1"]
        for limit in (1, 2, 4):
            monkeypatch.setattr("worqr.client.inspection.RUNNING_AT_ONCE", limit)
            assert await q.running() == running
        found: list[str | None] = []
        page = await q.jobs(state="active", limit=4)
        while page:
            found += [task.id for task in page]
            page = await q.jobs(state="active", limit=4, after=page[-1].cursor)
        assert found == [task.id for task in running]
        with pytest.raises(worqr.UsageError, match="after= must be the cursor"):
            await q.jobs(state="active", after="active 0 x")
        held.gate.set()
        await eventually(q.running, [])


@pytest.mark.leaves("*")
async def test_of_hundreds_of_workers_too(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    desk = Desk(server.client(), prefix)
    workers = [f"W{n:03}" for n in range(450)]
    desk.enter(*workers)
    desk.put(*[b"%d" % n for n in range(900)])
    Random(7).shuffle(workers)
    for worker in workers * 2:
        desk.take(worker, 1)
    async with mesh.connect():
        q = mesh.queue("Q1")
        for limit in (1, 5, 300, 899, 1000):
            running = await q.running(limit)
            assert [task.task for task in running] == [b"%d" % n for n in range(min(limit, 900))]
            assert [task.worker for task in running] == (workers * 2)[:limit]
        found: list[bytes] = []
        page = await q.jobs(state="active", limit=400)
        while page:
            found += [task.task for task in page]
            page = await q.jobs(state="active", limit=400, after=page[-1].cursor)
        assert found == [b"%d" % n for n in range(900)]


@pytest.mark.leaves("*")
async def test_shards_may_have_runs_with_the_same_claim(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    q = mesh.queue("hot", shards=2)
    for shard, keys in enumerate(shards_of(QueueKeys(prefix, "hot"), 2)):
        desk = Desk(server.client(), prefix)
        desk.q = keys
        desk.set_fence()
        desk.hold("A", *[b"%d.%d" % (n, shard) for n in range(3)])
    async with mesh.connect():
        for limit in (1, 2, 4, 6):
            found: list[bytes] = []
            page = await q.jobs(state="active", limit=limit)
            while page:
                found += [task.task for task in page]
                page = await q.jobs(state="active", limit=limit, after=page[-1].cursor)
            assert found == [b"0.0", b"0.1", b"1.0", b"1.1", b"2.0", b"2.1"]
        running = await q.running()
        assert await q.cancel_claims(str(running[3].claim)) == worqr.CancelCount(0, 1, 0)
        assert [task.task for task in await q.running() if task.cancelling] == [b"1.1"]


async def test_a_run_that_is_to_be_cancelled_is_shown_so(mesh: worqr.Mesh) -> None:
    stop = trio.Event()

    async def handler(task: bytes) -> None:
        with trio.CancelScope(shield=True):
            await stop.wait()

    async with mesh.connect(), serving(mesh, "Q1", handler):
        q = mesh.queue("Q1")
        job = await q.dispatch(b"a", id="x", timeout=LATER)
        await eventually(lambda: state(job), "active")
        (running,) = await q.running()
        assert not running.cancelling
        assert running.deadline is not None
        await job.cancel()
        (running,) = await q.running()
        assert running.cancelling
        assert (await q.read("x")).cancelling
        stop.set()
        await eventually(q.running, [])


# Cancelling by claims


async def test_one_of_two_equal_tasks_is_cancelled(mesh: worqr.Mesh) -> None:
    held = Held()
    async with mesh.connect(), serving(mesh, "Q1", held):
        q = mesh.queue("Q1")
        await q.enqueue(b"a", b"a")
        await held.wait(2)
        first, second = [str(task.claim) for task in await q.running()]
        assert await q.cancel_claims(second, reason="twice", wait=PATIENCE) == worqr.CancelCount(0, 1, 1)
        assert [task.claim for task in await q.running()] == [first]
        assert await q.cancel_claims(second, wait=PATIENCE) == worqr.CancelCount(0, 0, 0)
        assert await q.cancel_claims() == worqr.CancelCount(0, 0, 0)
        held.gate.set()
        await eventually(q.running, [])
        assert held.done == [b"a"]


async def test_many_of_several_workers_and_jobs_with_the_reason(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    held = Held()
    async with mesh.connect(), serving(mesh, "Q1", held, room=4), serving(other, "Q1", held, room=4):
        q = mesh.queue("Q1")
        job = await q.dispatch(b"job", id="x", result_ttl=60)
        await q.enqueue(*[b"a"] * 7)
        await held.wait(8)
        claims = [str(task.claim) for task in await q.running()]
        count = await q.cancel_claims(*claims, *claims, "7", reason="all of them", wait=PATIENCE)
        assert count == worqr.CancelCount(0, 8, 8)
        assert {why for _, why in held.cancelled} == {"cancel"}
        with pytest.raises(worqr.JobCancelled, match="all of them"):
            await job.result(PATIENCE)


async def test_thousands_are_cancelled_in_several_requests(mesh: worqr.Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worqr.client.queue.MAX_ITEMS", 3)
    held = Held()
    async with mesh.connect(), serving(mesh, "Q1", held):
        q = mesh.queue("Q1")
        await q.enqueue(*[b"a"] * 7)
        await held.wait(7)
        claims = [str(task.claim) for task in await q.running()]
        assert await q.cancel_claims(*claims, wait=PATIENCE) == worqr.CancelCount(0, 7, 7)


# Scheduled jobs


async def test_a_scheduled_job_runs_now(mesh: worqr.Mesh) -> None:
    runs = Runs()
    async with mesh.connect(), serving(mesh, "Q1", runs):
        q = mesh.queue("Q1")
        for n in range(3):
            await q.dispatch(b"%d" % n, id=f"job {n}", delay=LATER)
        assert await q.run_now("job 1", "job 2", "nobody") == 2
        assert sorted(await runs.wait(2)) == [b"1", b"2"]
        assert await q.run_now("job 1") == 0
        assert (await q.job("job 0").status()).state == "scheduled"
        await q.delete()
        await eventually(q.running, [])


async def test_a_job_that_waits_for_its_next_try_is_tried_now(mesh: worqr.Mesh) -> None:
    async def handler(task: bytes) -> bytes:
        if worqr.current().attempt == 1:
            raise ValueError
        return b"done"

    slow = worqr.RetryPolicy(min_backoff=LATER, max_backoff=LATER)
    async with mesh.connect(), serving(mesh, "Q1", handler, retry=slow):
        q = mesh.queue("Q1")
        job = await q.dispatch(b"a", id="x", result_ttl=60)
        await eventually(lambda: state(job), "scheduled")
        assert await q.run_now("x") == 1
        assert await job.result(PATIENCE) == b"done"


async def test_many_run_now_in_several_requests(mesh: worqr.Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worqr.client.queue.MAX_ITEMS", 2)
    async with mesh.connect():
        q = mesh.queue("Q1")
        ids = [f"job {n}" for n in range(5)]
        for name in ids:
            await q.dispatch(b"a", id=name, delay=LATER)
        assert await q.run_now(*ids) == 5
        assert [task.id for task in await q.jobs()] == ids
        await q.delete()


# Finding


async def test_an_id_is_found_in_all_queues_that_know_it(mesh: worqr.Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "AT_ONCE", 2)
    async with mesh.connect():
        for n in range(5):
            await mesh.queue(f"Q{n}").enqueue(b"a")
        await mesh.queue("Q1").dispatch(b"a", id="x")
        await mesh.queue("Q3").dispatch(b"a", id="x", delay=LATER)
        await mesh.queue("Q3").failures.dispatch(b"a", id="x")
        found = await mesh.find("x")
        assert {name: status.state for name, status in found.items()} == {
            "Q1": "waiting",
            "Q3": "scheduled",
            "{Q3}-fail": "waiting",
        }
        assert await mesh.find("y") == {}
        await mesh.queue("Q3").failures.delete()
        for n in range(5):
            await mesh.queue(f"Q{n}").delete()


@pytest.mark.leaves("shards")
async def test_an_id_is_found_in_a_queue_of_several_shards(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        q = mesh.queue("hot", shards=4)
        jobs = [await q.dispatch(b"a") for _ in range(4)]
        for job in (*jobs, await q.dispatch(b"a", id="mine")):
            assert [(name, found.state) for name, found in (await mesh.find(job.id)).items()] == [("hot", "waiting")]
            assert (await q.read(job.id)).task == b"a"
            assert await q.payload(job.id) == b"a"
        await q.delete()


@pytest.mark.leaves("shards")
async def test_runs_of_several_shards_are_listed_and_cancelled_each_by_its_claim(mesh: worqr.Mesh) -> None:
    held, q = Held(), mesh.queue("hot", shards=4)
    async with mesh.connect(), serving(mesh, "hot", held):
        for n in range(8):
            await q.enqueue(b"%d" % n)
            await held.wait(n + 1)
        running = await q.running()
        assert [task.task for task in running] == [b"%d" % n for n in range(8)]
        assert len({(task.claim or "").partition("~")[2] for task in running}) == 4
        found: list[bytes] = []
        page = await q.jobs(state="active", limit=3)
        while page:
            found += [task.task for task in page]
            page = await q.jobs(state="active", limit=3, after=page[-1].cursor)
        assert found == [task.task for task in running]
        assert [await q.payload(claim=task.claim) for task in running] == found
        some = [str(task.claim) for task in running[::2]]
        assert await q.cancel_claims(*some, wait=PATIENCE) == worqr.CancelCount(0, 4, 4)
        assert [task.task for task in await q.running()] == found[1::2]
        held.gate.set()
        await eventually(q.running, [])
        await q.delete()


# Used wrongly


WRONG: dict[str, tuple[Callable[[worqr.Queue], Any], str]] = {
    "no id": (lambda q: q.read(""), "a job's id must have 1 to"),
    "no text": (lambda q: q.read(7), "a job's id must be a str"),
    "id that is none": (lambda q: q.run_now("x", "a\nb"), "no control characters"),
    "neither": (lambda q: q.payload(), "by its id or by its claim"),
    "both": (lambda q: q.payload("x", claim="7"), "by its id or by its claim"),
    "claim that is none": (lambda q: q.payload(claim="x"), "a claim is the `claim` of a task in queue.running"),
    "number": (lambda q: q.cancel_claims(7), "a claim is the `claim` of a task in queue.running"),
    "long claim": (lambda q: q.cancel_claims("1" * 17), "a claim is the `claim` of a task in queue.running"),
    "tag": (lambda q: q.cancel_claims("7~"), "a claim is the `claim` of a task in queue.running"),
    "reason": (lambda q: q.cancel_claims("7", reason=7), "reason must be a str"),
    "wait": (lambda q: q.cancel_claims("7", wait=-1), "wait must"),
    "limit": (lambda q: q.running(0), "limit must"),
}


@pytest.mark.parametrize(("use", "text"), WRONG.values(), ids=WRONG)
async def test_a_wrong_argument_is_told(mesh: worqr.Mesh, use: Callable[[worqr.Queue], Any], text: str) -> None:
    async with mesh.connect():
        with pytest.raises(worqr.UsageError, match=text):
            await use(mesh.queue("Q1"))


async def test_find_needs_an_id_and_a_connection(mesh: worqr.Mesh, new_mesh: NewMesh) -> None:
    with pytest.raises(worqr.UsageError, match="not connected"):
        await mesh.find("x")
    async with mesh.connect():
        with pytest.raises(worqr.UsageError, match="a job's id must have 1 to"):
            await mesh.find("")


# Without an event loop


async def test_plain_threads_can_do_the_same(mesh: worqr.Mesh) -> None:
    held, q = Held(), mesh.queue("Q1")

    async def here(call: Callable[..., Any], *args: Any, **named: Any) -> Any:
        return await trio.to_thread.run_sync(lambda: worqr.sync(call, *args, **named))

    async with mesh.connect(), serving(mesh, "Q1", held):
        await here(q.enqueue, b"a")
        await here(q.dispatch, b"job", id="x", delay=LATER)
        await held.wait(1)
        (running,) = await here(q.running)
        assert await here(q.payload, claim=running.claim) == b"a"
        assert (await here(mesh.find, "x"))["Q1"].state == "scheduled"
        assert (await here(q.read, "x", payload=True)).task == b"job"
        assert await here(q.run_now, "x") == 1
        await held.wait(2)
        assert (await here(q.cancel_claims, running.claim, wait=PATIENCE)).acknowledged == 1
        held.gate.set()
        await eventually(mesh.queue("Q1").running, [])
    mesh.close()


# Running


async def test_the_running_tasks_of_one_worker(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    mine, theirs = Held(), Held()
    async with serving(mesh, "Q1", mine, concurrency=2) as first, serving(other, "Q1", theirs, concurrency=2) as second:
        q = mesh.queue("Q1")
        await q.enqueue(*[b"%d" % n for n in range(4)])
        await mine.wait(2)
        await theirs.wait(2)
        for peer in (first, second):
            assert [task.worker for task in await q.running(worker=peer.id)] == [peer.id] * 2
            assert len(await q.running(1, worker=peer.id)) == 1
        assert await q.running(worker="unknown") == []
        with pytest.raises(worqr.UsageError, match="worker must be a str"):
            await q.running(worker=7)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        mine.gate.set()
        theirs.gate.set()


# By the payload


@pytest.mark.leaves("*")
async def test_plain_tasks_are_found_by_their_payload(mesh: worqr.Mesh) -> None:
    q, held = mesh.queue("Q1"), Held()
    async with mesh.connect():
        await q.enqueue(b"first", b"x", b"x")
        assert await q.find(b"x") == worqr.Matches(waiting=(1, 2), jobs=(), running=(), complete=True)
        assert await q.find(bytearray(b"x"), 1) == worqr.Matches(waiting=(1,), jobs=(), running=(), complete=False)
        await q.cancel_all()
        await q.dispatch(b"x", id="not plain")
        assert await q.find(b"x") == worqr.Matches(waiting=(), jobs=(), running=(), complete=True)
        await q.cancel_all()
    async with serving(mesh, "Q1", held):
        await q.enqueue(b"x")
        await held.wait(1)
        [claim] = (await q.find(b"x")).running
        assert claim == (await q.running())[0].claim
        assert (await q.cancel_claims(claim, wait=PATIENCE)).acknowledged == 1


@pytest.mark.leaves("*")
async def test_plain_tasks_are_found_in_all_shards(mesh: worqr.Mesh) -> None:
    q = mesh.queue("Q1", shards=3)
    async with mesh.connect():
        for _ in range(6):
            await q.enqueue(b"x")
        assert await q.find(b"x") == worqr.Matches(waiting=(0, 0, 0, 1, 1, 1), jobs=(), running=(), complete=True)
        assert await q.find(b"x", 4) == worqr.Matches(waiting=(0, 0, 0, 1), jobs=(), running=(), complete=False)


@pytest.mark.parametrize(("task", "limit", "message"), [("x", 9, "bytes"), (b"x", 0, "limit")])
async def test_what_is_no_payload_or_no_limit_is_refused(mesh: worqr.Mesh, task: Any, limit: int, message: str) -> None:
    async with mesh.connect():
        with pytest.raises(worqr.UsageError, match=message):
            await mesh.queue("Q1").find(task, limit)
