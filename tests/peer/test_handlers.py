"""What may be a handler, what it may raise, and what its run knows of itself."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import pytest
import trio

import worqr
from tests.peer.tools import QUICK, Runs, eventually, serving, until
from tests.support.leaks import dump
from tests.support.patience import PATIENCE
from tests.support.servers import Server

pytestmark = pytest.mark.one_server

FAILED = ("{Q1}:failed", "{Q1}:aside*")


async def run_one(mesh: worqr.Mesh, handler: Callable[[bytes], object], task: bytes = b"a") -> None:
    """Have one task run, and wait until nothing of it is left but what was set aside."""
    async with mesh.connect(), serving(mesh, "Q1", handler):
        q = mesh.queue("Q1")
        before = (await q.info()).counts.get("finished", 0)
        await q.enqueue(task)
        await eventually(q.count, 0)
        await eventually(q.running, [])
        info = await q.info()
        assert info.counts["finished"] == before + 1, info


# Kinds of handlers


class Async:
    def __init__(self) -> None:
        self.tasks: list[bytes] = []
        self.threads: set[int] = set()

    async def __call__(self, task: bytes) -> None:
        await self.method(task)

    async def method(self, task: bytes) -> None:
        await trio.lowlevel.checkpoint()
        self.note(task)

    def note(self, task: bytes) -> None:
        self.tasks.append(task)
        self.threads.add(threading.get_ident())

    async def two(self, word: str, task: bytes, *, more: int = 0) -> None:
        assert (word, more) == ("word", 2)
        self.note(task)


class Plain(Async):
    def __call__(self, task: bytes) -> None:  # type: ignore[override]
        self.note(task)


async def test_async_handlers_run_in_the_loop(mesh: worqr.Mesh) -> None:
    seen = Async()

    async def function(task: bytes) -> None:
        await seen.method(task)

    @functools.wraps(function)
    async def wrapped(*args: Any, **kwargs: Any) -> None:
        await function(*args, **kwargs)

    handlers: list[Callable[[bytes], object]] = [
        function,
        wrapped,
        seen,
        seen.method,
        partial(seen.two, "word", more=2),
        partial(partial(seen.two, "word"), more=2),
        partial(seen),
    ]
    for handler in handlers:
        await run_one(mesh, handler)
        assert seen.tasks == [b"a"], handler
        assert seen.threads == {threading.get_ident()}
        seen.tasks.clear()


async def test_plain_handlers_run_in_a_thread(mesh: worqr.Mesh) -> None:
    seen = Plain()
    for handler in (seen.note, seen, partial(seen.note), lambda task: seen.note(task)):
        await run_one(mesh, handler)
        assert seen.tasks == [b"a"], handler
        assert threading.get_ident() not in seen.threads
        seen.tasks.clear()


async def test_plain_handlers_run_side_by_side(mesh: worqr.Mesh) -> None:
    barrier = threading.Barrier(5, timeout=PATIENCE)
    passed: list[bytes] = []

    def meet(task: bytes) -> None:
        barrier.wait()
        passed.append(task)

    async with mesh.connect(), serving(mesh, "Q1", meet):
        await mesh.queue("Q1").enqueue(*[b"%d" % i for i in range(5)])
        await until(lambda: len(passed) == 5)
        await eventually(mesh.queue("Q1").running, [])


async def test_a_plain_handler_learns_of_a_cancel_when_it_asks(mesh: worqr.Mesh) -> None:
    begun, reasons = threading.Event(), []

    def spin(task: bytes) -> None:
        context = worqr.current()
        begun.set()
        try:
            while True:
                context.check_cancelled()
                threading.Event().wait(0.005)
        finally:
            reasons.append(context.cancel_reason)

    async with mesh.connect(), serving(mesh, "Q1", spin):
        q = mesh.queue("Q1")
        await q.enqueue(b"a")
        await until(begun.is_set)
        assert await q.cancel(b"a", wait=30) == worqr.CancelCount(0, 1, 1)
        assert reasons == ["cancel"]
        assert (await q.info()).counts["cancelled"] == 1


async def test_check_cancelled_does_nothing_in_a_coroutine_that_is_not_cancelled(mesh: worqr.Mesh) -> None:
    async def handler(task: bytes) -> None:
        worqr.current().check_cancelled()
        await trio.to_thread.run_sync(worqr.current().check_cancelled)

    await run_one(mesh, handler)


async def test_check_cancelled_is_not_for_threads_that_a_handler_started(mesh: worqr.Mesh) -> None:
    errors: list[BaseException] = []

    def handler(task: bytes) -> None:
        context = worqr.current()

        def ask() -> None:
            try:
                context.check_cancelled()
            except worqr.UsageError as error:
                errors.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()

    await run_one(mesh, handler)
    assert "cancel_reason" in str(errors[0])


def generator(task: bytes) -> Iterator[bytes]:
    yield task


async def async_generator(task: bytes) -> AsyncIterator[bytes]:
    yield task


async def no_task() -> None: ...


async def too_much(task: bytes, more: int) -> None: ...


@pytest.mark.parametrize(
    ("handler", "words"),
    [
        (None, "callable.*None"),
        (b"a", "callable.*b'a'"),
        (partial(generator), "generator"),
        (generator, "generator.*yield"),
        (async_generator, "generator.*yield"),
        (no_task, "no_task.*too many positional"),
        (too_much, "too_much.*'more'"),
    ],
)
async def test_what_cannot_be_a_handler_is_refused(mesh: worqr.Mesh, handler: Any, words: str) -> None:
    async with mesh.connect(), mesh.join() as peer:
        with pytest.raises(worqr.UsageError, match=words):
            await peer.serve("Q1", handler)
        assert (await mesh.workers())[0].queues == frozenset()


async def coroutine(task: bytes) -> None: ...


def iter_bytes(task: bytes) -> Iterator[int]:
    yield from task


@pytest.mark.leaves(*FAILED)
@pytest.mark.parametrize(("made", "remedy"), [(coroutine, b"use async def"), (iter_bytes, b"`return list(...)`")])
async def test_a_plain_function_that_returns_what_never_ran_has_failed(
    mesh: worqr.Mesh, server: Server, prefix: str, made: Callable[[bytes], object], remedy: bytes
) -> None:
    async with mesh.connect(), serving(mesh, "Q1", lambda task: made(task), retry=QUICK):
        q = mesh.queue("Q1")
        await q.enqueue(b"a")
        await eventually(lambda: failed(q), 1)
    record = aside(server, prefix)
    assert record[b"error_type"] == b"TypeError"
    assert remedy in record[b"error_message"]


async def failed(q: worqr.Queue) -> int:
    return (await q.info()).failed


def aside(server: Server, prefix: str) -> dict[bytes, bytes]:
    """The one record that was set aside."""
    records = [entry.value for key, entry in dump(server.client(), prefix).items() if b":aside:" in key]
    assert len(records) == 1, records
    record: dict[bytes, bytes] = records[0]
    return record


# What they raise


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Own(BaseException):
    pass


ERRORS: dict[str, Callable[[], BaseException]] = {
    "ValueError": lambda: ValueError("no such address"),
    "exceptions with their own __str__": Unprintable,
    "BaseException": lambda: Own("base"),
    "SystemExit": lambda: SystemExit(3),
    "GeneratorExit": GeneratorExit,
    "StopIteration": lambda: StopIteration(1),
    "StopAsyncIteration": StopAsyncIteration,
    "ExceptionGroup": lambda: ExceptionGroup("two", [ValueError("one"), KeyError("other")]),
    "BaseExceptionGroup": lambda: BaseExceptionGroup("two", [Own("one"), KeyError("other")]),
    "surrogates": lambda: ValueError("\udcff lone"),
    "long": lambda: ValueError("x" * 1_000_000),
    "UsageError": lambda: worqr.UsageError("of the handler's own making"),
    "ClaimLost": lambda: worqr.ClaimLost("of the handler's own making"),
}


@pytest.mark.parametrize("plain", [False, True], ids=["async", "thread"])
@pytest.mark.parametrize("name", ERRORS)
async def test_a_handler_that_raises_has_failed_and_the_peer_lives_on(
    mesh: worqr.Mesh, name: str, plain: bool, caplog: pytest.LogCaptureFixture
) -> None:
    runs = Runs()

    def behave(task: bytes) -> None:
        if task == b"bad" and worqr.current().failures < 2:
            raise ERRORS[name]()

    async def handler(task: bytes) -> None:
        runs.begin(task)
        if plain:
            await trio.to_thread.run_sync(behave, task)
        else:
            behave(task)

    async with mesh.connect(), serving(mesh, "Q1", handler, room=1, retry=QUICK) as peer:
        q = mesh.queue("Q1")
        worker = peer.id
        await q.enqueue(b"bad", b"good")
        await runs.wait(4)
        await eventually(q.running, [])
        assert runs.tasks == [b"bad", b"good", b"bad", b"bad"]
        assert [context.failures for context in runs.contexts] == [0, 0, 1, 2]
        info = await q.info()
        assert (info.counts["retried"], info.counts["finished"], info.failed) == (2, 2, 0)
        assert (peer.id, peer._engine.scheduler.running) == (worker, 0)
        await until(lambda: peer.health().ready)
    logged = [record for record in caplog.records if record.getMessage().startswith("task.failed")]
    assert len(logged) == 2
    assert all("Q1" in record.getMessage() and record.levelno == logging.WARNING for record in logged)


@pytest.mark.leaves(*FAILED)
async def test_after_ten_failures_a_task_is_set_aside_with_its_last_error(
    mesh: worqr.Mesh, server: Server, prefix: str
) -> None:
    runs = Runs()

    async def handler(task: bytes) -> None:
        runs.begin(task)
        raise LookupError(f"no address, attempt {worqr.current().attempt}")

    async with mesh.connect(), serving(mesh, "Q1", handler, retry=QUICK) as peer:
        q = mesh.queue("Q1")
        await q.enqueue(b"\x00bad\xff")
        await eventually(lambda: failed(q), 1)
        assert [context.attempt for context in runs.contexts] == list(range(1, 11))
        assert [context.last_attempt for context in runs.contexts] == [False] * 9 + [True]
        assert len({context.id for context in runs.contexts[1:]}) == 1  # a job from its first failure on
        assert (await q.info()).counts == {"enqueued": 1, "claimed": 10, "retried": 9, "failed": 1}
        record = aside(server, prefix)
        assert int(record[b"at"]) > 1_600_000_000_000
        assert b"in handler" in record[b"error_traceback"]
        assert b"no address, attempt 10" in record[b"error_traceback"]
        assert {
            name: record[name.encode()] for name in ("task", "reason", "error_type", "error_message", "worker")
        } == {
            "task": b"\x00bad\xff",
            "reason": b"failed",
            "error_type": b"LookupError",
            "error_message": b"no address, attempt 10",
            "worker": peer.id.encode(),
        }
        assert [int(record[name]) for name in (b"failures", b"stalls", b"timeouts")] == [10, 0, 0]


async def test_trios_cancelled_without_our_cancel_is_a_failure(mesh: worqr.Mesh) -> None:
    runs, hoard = Runs(), list[BaseException]()

    async def handler(task: bytes) -> None:
        runs.begin(task)
        if worqr.current().attempt > 1:
            return
        with trio.CancelScope() as scope:
            scope.cancel()
            try:
                await trio.lowlevel.checkpoint()
            except trio.Cancelled as cancelled:
                hoard.append(cancelled)
        raise hoard[0]

    async with mesh.connect(), serving(mesh, "Q1", handler, retry=QUICK) as peer:
        await mesh.queue("Q1").enqueue(b"a")
        await runs.wait(2)
        assert [context.failures for context in runs.contexts] == [0, 1]
        await eventually(mesh.queue("Q1").running, [])
        await until(lambda: peer.health().ready)


async def test_a_thousand_handlers_that_raise_leave_the_peer_healthy(
    mesh: worqr.Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    runs = Runs()
    caplog.set_level(logging.CRITICAL, "worqr.peer.task_log")

    async def handler(task: bytes) -> None:
        runs.begin(task)
        if worqr.current().failures == 0:
            raise ValueError(task)

    async with mesh.connect(), serving(mesh, "Q1", handler, retry=QUICK) as peer:
        q = mesh.queue("Q1")
        await q.enqueue(*[b"%d" % i for i in range(1000)])
        await runs.wait(2000)
        await eventually(q.running, [])
        assert (await q.info()).counts["finished"] == 1000
        await until(lambda: peer.health().room == 100)  # a last start request may still be under way
        await until(lambda: peer.health().ready)
        assert (peer.health().alive, peer.health().running) == (True, 0)


# What a run knows


async def test_current_tells_what_runs(mesh: worqr.Mesh) -> None:
    seen: list[tuple[Any, ...]] = []
    lock = threading.Lock()

    def note(task: bytes) -> None:
        context = worqr.current()
        with lock:
            seen.append((context.task, context.queue, context.id, context.fence, context.attempt))

    async def in_loop(task: bytes) -> None:
        note(task)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, note, task)

    async with mesh.connect(), serving(mesh, "Q1", in_loop), serving(mesh, "Q2", note):
        await mesh.queue("Q1").enqueue(b"a")
        await mesh.queue("Q2").enqueue(b"b", b"c")
        await until(lambda: len(seen) == 4)
        await eventually(mesh.queue("Q1").running, [])
        await eventually(mesh.queue("Q2").running, [])
    in_order = sorted(seen)
    assert in_order[0] == in_order[1]
    assert [entry[:2] for entry in in_order] == [(b"a", "Q1"), (b"a", "Q1"), (b"b", "Q2"), (b"c", "Q2")]
    assert all(entry[2] == f"@{entry[3]}" and entry[4] == 1 for entry in in_order)
    assert in_order[2][3] + 1 == in_order[3][3]


async def test_current_is_unknown_outside_a_handler(mesh: worqr.Mesh) -> None:
    async def handler(task: bytes) -> None: ...

    await run_one(mesh, handler)
    with pytest.raises(LookupError, match="inside a handler"):
        worqr.current()


async def test_the_fence_grows_with_every_claim(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    runs = Runs()

    async def handler(task: bytes) -> None:
        runs.begin(task)
        if worqr.current().failures < 3:
            raise ValueError

    async with mesh.connect():
        q = mesh.queue("Q1")
        await q.enqueue(b"a")
        async with serving(mesh, "Q1", handler, retry=QUICK), serving(other, "Q1", handler, retry=QUICK):
            await runs.wait(4)
            await eventually(q.running, [])
        await q.enqueue(b"b")
        async with serving(other, "Q1", handler, retry=QUICK):
            await runs.wait(8)
            await eventually(q.running, [])
    fences = [context.fence for context in runs.contexts]
    assert fences == sorted(set(fences))


variable: ContextVar[str] = ContextVar("variable", default="unset")


async def test_context_variables_of_serve_are_seen_and_those_of_a_run_end_with_it(mesh: worqr.Mesh) -> None:
    seen: list[tuple[bytes, str]] = []
    runs = Runs()

    async def handler(task: bytes) -> None:
        seen.append((task, variable.get()))
        variable.set(f"set by {task.decode()}")
        await trio.lowlevel.checkpoint()
        seen.append((task, variable.get()))
        seen.append((task, await trio.to_thread.run_sync(variable.get)))
        runs.begin(task)

    async with mesh.connect():
        token = variable.set("of serve")
        async with serving(mesh, "Q1", handler, room=1) as peer:
            variable.reset(token)
            await mesh.queue("Q1").enqueue(b"a", b"b", b"c")
            await runs.wait(3)
            await eventually(mesh.queue("Q1").running, [])
            assert len(peer._engine.slots._idle) == 1  # one slot ran them all
    tasks = ("a", "b", "c")
    assert seen == [(t.encode(), v) for t in tasks for v in ("of serve", f"set by {t}", f"set by {t}")]
