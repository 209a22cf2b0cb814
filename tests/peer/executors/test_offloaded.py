"""Handlers that run in threads and on the asyncio loop of a peer know, say and learn the same as those on its loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

import worqr
from tests.peer.tools import QUICK, eventually, serving, until
from tests.support.patience import PATIENCE
from worqr import RetryPolicy

pytestmark = pytest.mark.one_server

FAILED = ("{Q1}:failed", "{Q1}:aside*")

Plain = Callable[[worqr.Context], Any]


def placed(plain: Plain, place: str) -> Callable[[bytes], Any]:
    """A handler that calls `plain` with its context, in a place."""

    async def on_a_loop(task: bytes) -> Any:
        return plain(worqr.current())

    def in_a_thread(task: bytes) -> Any:
        return plain(worqr.current())

    return in_a_thread if place == "thread" else on_a_loop


@asynccontextmanager
async def placing(mesh: worqr.Mesh, plain: Plain, place: str, **options: Any) -> Any:
    async with mesh.connect(), serving(mesh, "Q1", placed(plain, place), runs_in=place, **options) as peer:
        yield peer


everywhere = pytest.mark.parametrize("place", ["loop", "thread", "asyncio"])
elsewhere = pytest.mark.parametrize("place", ["thread", "asyncio"])


async def finished(q: worqr.Queue) -> int:
    return (await q.info()).counts.get("finished", 0)


@everywhere
async def test_current_tells_the_same_everywhere(mesh: worqr.Mesh, place: str) -> None:
    seen: list[dict[str, Any]] = []
    names = [name for name in dir(worqr.Context) if not name.startswith("_")]

    def plain(context: worqr.Context) -> None:
        seen.append({name: getattr(context, name) for name in names})
        if context.failures == 0:
            raise ValueError

    async with placing(mesh, plain, place, timeout=50, retry=QUICK):
        q = mesh.queue("Q1")
        before = time.monotonic()
        await q.dispatch(b"task", id="x", meta={"trace": "1"})
        await eventually(lambda: finished(q), 1)
    first, second = seen
    assert (first["id"], first["queue"], first["task"], first["meta"]) == ("x", "Q1", b"task", {"trace": "1"})
    assert [(c["attempt"], c["failures"], c["last_attempt"]) for c in seen] == [(1, 0, False), (2, 1, False)]
    assert first["fence"] < second["fence"]
    assert before + 50 < first["deadline"] < time.monotonic() + 50
    assert first["cancel_reason"] is None


@everywhere
async def test_what_a_handler_returns_is_its_result_everywhere(mesh: worqr.Mesh, place: str) -> None:
    async with placing(mesh, lambda context: {"place": place}, place):
        job = await mesh.queue("Q1").dispatch(b"task", result_ttl=60)
        assert await job.result(PATIENCE) == {"place": place}  # type: ignore[comparison-overlap]


@everywhere
async def test_progress_is_said_everywhere(mesh: worqr.Mesh, place: str) -> None:
    def plain(context: worqr.Context) -> None:
        context.progress(0.5, f"half of it, {place}")
        if place != "loop":
            assert go.wait(PATIENCE)

    go = threading.Event()
    async with placing(mesh, plain, place):
        job = await mesh.queue("Q1").dispatch(b"task", result_ttl=60)
        if place != "loop":

            async def said() -> str:
                return (await job.status()).message

            await eventually(said, f"half of it, {place}")
            go.set()
        await job.result(PATIENCE)


@everywhere
async def test_time_is_asked_for_everywhere(mesh: worqr.Mesh, place: str) -> None:
    go, asked = threading.Event(), threading.Event()

    def ask(context: worqr.Context) -> None:
        context.extend(5000)
        left.append((context.deadline or 0) - time.monotonic())
        asked.set()

    def plain(context: worqr.Context) -> None:
        ask(context)
        assert go.wait(PATIENCE)

    async def on_the_loop(task: bytes) -> None:
        ask(worqr.current())
        await until(go.is_set, PATIENCE)

    left: list[float] = []
    handler = on_the_loop if place == "loop" else placed(plain, place)
    async with mesh.connect(), serving(mesh, "Q1", handler, runs_in=place, timeout=600) as peer:
        q = mesh.queue("Q1")
        await q.enqueue(b"task")
        await until(asked.is_set)
        deadlines = peer._engine.slots.deadlines
        await until(
            lambda: [
                when
                for when, _, timer in deadlines._heap
                if timer.run is not None and when - trio.current_time() > 4000
            ]
        )
        go.set()
        await eventually(lambda: finished(q), 1)
    assert 4900 < left[0] <= 5000


# Being cancelled


async def waits_for_ever(task: bytes) -> None:
    await asyncio.Event().wait()


async def asks_in_between(task: bytes) -> None:
    while True:
        time.sleep(0.001)  # it blocks its loop, and asks
        await asyncio.sleep(0)
        worqr.current().check_cancelled()


async def asks_in_a_thread_of_its_own(task: bytes) -> None:
    await asyncio.shield(asyncio.to_thread(asks, task))


def asks(task: bytes) -> None:
    while True:
        time.sleep(0.001)
        worqr.current().check_cancelled()


def asks_trio(task: bytes) -> None:
    while True:
        time.sleep(0.001)
        trio.from_thread.check_cancelled()


def looks_at_the_reason(task: bytes) -> None:
    while worqr.current().cancel_reason is None:
        time.sleep(0.001)
    raise InterruptedError(worqr.current().cancel_reason)


COOPERATIVE = [
    *((waits_for_ever, "asyncio"), (asks_in_between, "asyncio"), (asks_in_a_thread_of_its_own, "asyncio")),
    *((asks, "thread"), (asks_trio, "thread"), (looks_at_the_reason, "thread")),
]
cooperative = pytest.mark.parametrize(("handler", "place"), COOPERATIVE, ids=[each[0].__name__ for each in COOPERATIVE])


@cooperative
async def test_a_cancel_is_acknowledged_when_the_handler_has_ended(mesh: worqr.Mesh, handler: Any, place: str) -> None:
    async with mesh.connect(), serving(mesh, "Q1", handler, runs_in=place) as peer:
        q = mesh.queue("Q1")
        await q.enqueue(b"a")
        await eventually(lambda: running(q), 1)
        assert await q.cancel(b"a", wait=PATIENCE) == worqr.CancelCount(0, 1, 1)
        assert (await q.info()).counts == {"enqueued": 1, "claimed": 1, "cancelled": 1}
        await until(lambda: peer._engine.scheduler.room == 100)


@cooperative
@pytest.mark.leaves(*FAILED)
async def test_a_run_that_takes_too_long_has_timed_out(mesh: worqr.Mesh, handler: Any, place: str) -> None:
    policy = RetryPolicy(max_timeouts=2, min_backoff=0)
    async with mesh.connect(), serving(mesh, "Q1", handler, runs_in=place, timeout=0.1, retry=policy):
        q = mesh.queue("Q1")
        job = await q.dispatch(b"a", result_ttl=60)
        with pytest.raises(worqr.JobFailed, match="Timeout"):
            await job.result(PATIENCE)
        (record,) = await q.failed.list()
        assert (record.reason, record.timeouts, record.failures) == ("timeout", 2, 0)


@cooperative
async def test_a_task_of_a_peer_that_leaves_goes_back_uncounted(
    mesh: worqr.Mesh, other: worqr.Mesh, handler: Any, place: str
) -> None:
    async with other.connect():
        q = other.queue("Q1")
        async with serving(mesh, "Q1", handler, runs_in=place):
            await q.enqueue(b"a")
            await eventually(lambda: running(q), 1)
        assert [await q.tasks(), await q.running(), await other.workers()] == [[b"a"], [], []]
        assert (await q.info()).counts.get("retried", 0) == 0


async def running(q: worqr.Queue) -> int:
    return (await q.info()).running


# What they raise


@elsewhere
@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit])
async def test_whatever_a_handler_raises_it_has_failed_and_the_peer_lives_on(
    mesh: worqr.Mesh, place: str, error: type[BaseException]
) -> None:
    def plain(context: worqr.Context) -> None:
        if context.task == b"bad" and context.failures < 2:
            raise error("of its own")

    async with placing(mesh, plain, place, retry=QUICK, room=1) as peer:
        q, worker = mesh.queue("Q1"), peer.id
        await q.enqueue(b"bad", b"good")
        await eventually(lambda: finished(q), 2)
        counts = (await q.info()).counts
        assert (counts["claimed"], counts["retried"]) == (4, 2)
        assert peer.id == worker
        await until(lambda: peer.health().ready)


@elsewhere
@pytest.mark.leaves(*FAILED)
async def test_the_record_of_a_failure_shows_the_handler_and_no_other_error(mesh: worqr.Mesh, place: str) -> None:
    def plain(context: worqr.Context) -> None:
        raise LookupError("no such address")

    async with placing(mesh, plain, place, retry=RetryPolicy(max_failures=1)):
        q = mesh.queue("Q1")
        await q.enqueue(b"a")
        await eventually(lambda: aside(q), 1)
        (record,) = await q.failed.list()
    assert (record.error.type, record.error.message) == ("LookupError", "no such address")
    assert "in plain" in record.error.traceback
    assert "During handling of" not in record.error.traceback


async def aside(q: worqr.Queue) -> int:
    return (await q.info()).failed


@pytest.mark.leaves(*FAILED)
@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])
async def test_a_failure_handler_runs_where_its_handler_does(mesh: worqr.Mesh, plain: bool) -> None:
    told: list[tuple[bytes, str]] = []

    async def handler(task: bytes) -> None:
        raise worqr.Failure("no such address")

    async def tell(failed: worqr.Failed) -> None:
        await asyncio.sleep(0)
        told.append((failed.task, threading.current_thread().name))

    def tell_in_a_thread(failed: worqr.Failed) -> None:
        told.append((failed.task, "a thread"))

    on_failure: Any = tell_in_a_thread if plain else tell
    async with mesh.connect(), serving(mesh, "Q1", handler, runs_in="asyncio", on_failure=on_failure):
        await mesh.queue("Q1").enqueue(b"a")
        await until(lambda: told)
        await eventually(mesh.queue("Q1").failures.running, [])
    assert told == [(b"a", "a thread" if plain else "worqr asyncio")]


# What they cannot be


@pytest.mark.parametrize("place", ["loop", "asyncio"])
async def test_a_plain_function_is_refused_where_functions_are_awaited(mesh: worqr.Mesh, place: Any) -> None:
    async with mesh.join() as peer:
        with pytest.raises(worqr.UsageError, match="plain function"):
            await peer.serve("Q1", lambda task: None, runs_in=place)
        assert (await mesh.workers())[0].queues == frozenset()
