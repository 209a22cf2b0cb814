"""A run by itself: its phases, its deadline, and the contexts that handlers get of it."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from datetime import UTC, datetime, timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

import worqr
from tests.peer.conftest import NewMesh
from tests.peer.tools import QUICK, Held, Runs, at_most, eventually, serving, spying
from tests.support.servers import Server
from worqr import Retry, RetryPolicy, Update
from worqr.keys import MARKER
from worqr.peer import run as runs
from worqr.peer import steps
from worqr.peer.context import current
from worqr.peer.run import Run, RunState, Timer, current_run
from worqr.policy import Policy
from worqr.records import RemoteError
from worqr.remote_error import packed_error


def new_run(entry: Any = b"task") -> Run[Any]:
    host: Any = SimpleNamespace(queue="Q1", id_suffix="", policy=Policy(), state=None, policy_with=lambda own: Policy())
    return Run(host, None, 7, entry)


def test_its_phases() -> None:
    run, scope = new_run(), trio.CancelScope()
    assert run.state is RunState.CLAIMED
    run.begin(scope)
    assert run.state is RunState.RUNNING
    run.cancel("cancel")
    assert (run.state, run.cancel_reason, scope.cancel_called) == (RunState.CANCELLING, "cancel", True)
    run.settle()
    assert run.settled


def test_a_run_that_was_cancelled_before_begins_with_a_cancelled_scope() -> None:
    run, scope = new_run(), trio.CancelScope()
    run.cancel("leaving")
    run.begin(scope)
    assert (run.state, scope.cancel_called) == (RunState.CANCELLING, True)


async def test_cancelling_a_settled_run_leaves_the_scope_of_its_slot_alone() -> None:
    run, scope = new_run(), trio.CancelScope()
    run.begin(scope)
    run.settle()
    run.cancel("lost")
    assert (run.settled, run.cancel_reason, scope.cancel_called) == (True, "lost", False)


@pytest.mark.parametrize(("first", "then", "stands"), [("cancel", "leaving", "cancel"), ("cancel", "lost", "lost")])
def test_the_first_reason_stands_but_a_lost_claim_is_lost(first: Any, then: Any, stands: str) -> None:
    run = new_run()
    run.cancel(first)
    run.cancel(then)
    assert run.cancel_reason == stands


def test_a_settled_run_has_no_timer_to_meet() -> None:
    run = new_run()
    timer = Timer(run, 5.0)
    run.settle()
    assert (timer.stop(), run.deadline) == (None, 5.0)


def test_the_record_of_a_job_is_read_when_it_is_asked_for() -> None:
    run = new_run([b"id", b"j", b"task", b"t", b"failures", b"2", b"stalls", b"1"])
    assert (run.id, run.task, run.failures, run.stalls, run.timeouts, run.attempt) == ("j", b"t", 2, 1, 0, 4)


def test_its_context_is_made_once_where_it_is_asked_for() -> None:
    first, second = new_run(), new_run()

    def ask(run: Run[Any]) -> worqr.Context:
        current_run.set(run)
        context = current()
        assert current() is context
        assert copy_context().run(current) is context
        return context

    outer = copy_context()
    one = outer.run(ask, first)
    assert outer.run(ask, second) is not one, "a context that was inherited is that of another run"


# A task is bytes: whatever they are, they arrive as they were enqueued.


MIB = 1 << 20
PAYLOADS = {
    "empty": b"",
    "nul": b"\x00",
    "nul first": b"\x00\x01binary protocol",
    "all bytes": bytes(range(256)),
    "invalid utf-8": b"\xff\xfe\xc3(",
    "line ends": b"\r\n$3\r\n*1\r\n",
    "looks like an int": b"007",
    "one MiB": bytes(range(256)) * (MIB // 256),
    "nearly the marker": MARKER[:-1],
}
MARKED = {"the marker": MARKER, "the marker first": MARKER + b"@17", "twice the marker": MARKER + MARKER}


@pytest.mark.parametrize("task", [pytest.param(task, id=name) for name, task in {**PAYLOADS, **MARKED}.items()])
async def test_a_task_arrives_byte_for_byte(mesh: worqr.Mesh, task: bytes) -> None:
    runs = Runs()
    async with mesh.connect():
        q = mesh.queue("Q1")
        await q.enqueue(task)
        assert await q.count() == 1
        assert await q.peek() == task
        assert await q.tasks() == [task]
        async with serving(mesh, "Q1", runs):
            assert await runs.wait(1) == [task]
            assert runs.contexts[0].task == task
        assert await q.count() == 0


@pytest.mark.parametrize("task", [pytest.param(task, id=name) for name, task in PAYLOADS.items()])
async def test_a_task_lies_in_the_list_as_it_is(mesh: worqr.Mesh, server: Server, prefix: str, task: bytes) -> None:
    async with mesh.connect():
        await mesh.queue("Q1").enqueue(task)
        assert server.client().lrange(f"{prefix}:{{Q1}}", 0, -1) == [task]


@pytest.mark.parametrize("task", [pytest.param(task, id=name) for name, task in PAYLOADS.items()])
async def test_a_task_of_a_foreign_producer_arrives_byte_for_byte(
    mesh: worqr.Mesh, server: Server, prefix: str, task: bytes
) -> None:
    runs = Runs()
    async with mesh.connect(), serving(mesh, "Q1", runs):
        server.client().lpush(f"{prefix}:{{Q1}}", task)
        server.client().publish(f"{prefix}:{{Q1}}", "1")
        assert await runs.wait(1) == [task]
        await eventually(mesh.queue("Q1").running, [])


@pytest.mark.parametrize("task", [pytest.param(task, id=name) for name, task in {**PAYLOADS, **MARKED}.items()])
async def test_a_task_survives_failing_byte_for_byte(mesh: worqr.Mesh, task: bytes) -> None:
    runs = Runs()

    async def fail_first(task: bytes) -> None:
        runs.begin(task)
        if worqr.current().attempt == 1:
            raise ValueError("the first time")

    async with mesh.connect():
        await mesh.queue("Q1").enqueue(task)
        async with serving(mesh, "Q1", fail_first, retry=QUICK):
            assert await runs.wait(2) == [task, task]
            await eventually(mesh.queue("Q1").running, [])


@pytest.mark.parametrize("task", [pytest.param(task, id=name) for name, task in {**PAYLOADS, **MARKED}.items()])
async def test_a_task_is_found_by_its_payload(mesh: worqr.Mesh, task: bytes) -> None:
    async with mesh.connect():
        q = mesh.queue("Q1")
        await q.enqueue(b"another", task, task, task + b"x")
        assert (await q.cancel(task)).waiting == 2
        assert await q.tasks() == [task + b"x", b"another"]
        assert (await q.cancel_all()).waiting == 2


async def test_a_task_of_16_mib_is_run_and_one_byte_more_is_refused(
    mesh: worqr.Mesh, server: Server, prefix: str
) -> None:
    runs = Runs()
    biggest = b"\x00\xff" * (8 * MIB)
    async with mesh.connect(), serving(mesh, "Q1", runs):
        q = mesh.queue("Q1")
        await q.enqueue(b"a", biggest, b"b")
        assert sorted(await runs.wait(3)) == [biggest, b"a", b"b"]
        await eventually(q.running, [])
        with spying(server, prefix) as spy:
            with pytest.raises(worqr.PayloadTooLarge, match=r"16,777,217 bytes.*16,777,216.*max_payload"):
                await q.enqueue(b"small", biggest + b"!")
            with pytest.raises(worqr.PayloadTooLarge):
                await q.cancel(biggest + b"!")
            calls = spy.calls()
            assert calls["enqueue"] == calls["cancel_task"] == 0
        assert await q.count() == 0


async def test_the_payload_limit_can_be_set(new_mesh: NewMesh) -> None:
    mesh = new_mesh(max_payload=4)
    async with mesh.connect():
        q = mesh.queue("Q1")
        assert await q.enqueue(b"1234") == 1
        with pytest.raises(worqr.PayloadTooLarge, match=r"5 bytes.*limit of 4"):
            await q.enqueue(b"12345")
        assert await q.tasks() == [b"1234"]


@pytest.mark.parametrize("task", ["text", 7, None, ["b"], object])
async def test_what_is_not_bytes_is_refused(mesh: worqr.Mesh, task: object) -> None:
    async with mesh.connect():
        q = mesh.queue("Q1")
        with pytest.raises(worqr.UsageError, match=type(task).__name__):
            await q.enqueue(b"good", task)  # type: ignore[arg-type]
        assert await q.count() == 0


async def test_bytes_like_tasks_are_copied(mesh: worqr.Mesh) -> None:
    buffer = bytearray(b"abcdef")
    async with mesh.connect(), trio.open_nursery() as nursery:
        q = mesh.queue("Q1")
        nursery.start_soon(partial(q.enqueue, buffer, memoryview(buffer)[::2], memoryview(b"view")))
        await trio.testing.wait_all_tasks_blocked()
        buffer[:] = b"XXXXXX"
        await eventually(q.tasks, [b"view", b"ace", b"abcdef"])


# Jobs that are not worth running any more: set aside when they are claimed too late, if they have never been started.


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


# What a handle answers in the odd cases: of a raw task that said something, after a change of nothing, after a redrive.


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


UNREADABLE = {
    "not UTF-8": b'["\xff","",9]',
    "deep": b'{"a":' * 100_000,
    "list": b"[" * 100_000,
    "number": b"7",
    "empty": b"",
}


@pytest.mark.parametrize("stored", UNREADABLE.values(), ids=UNREADABLE)
def test_an_error_that_another_program_wrote_is_unknown(stored: bytes) -> None:
    unknown = RemoteError("unknown", "", "")
    assert runs._read_try(b"3 " + stored) == (3, 3, 0)
    assert steps._step_failed("pay", stored).error == unknown
    fields = stored.decode("utf-8", "replace") or "["
    assert packed_error(msgspec.msgpack.encode(["Odd", "text", "", fields])) == unknown
