"""Handlers written for asyncio: on one asyncio loop in a thread of the peer."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import pytest
import sniffio
import trio
import trio.lowlevel
import trio.testing

import worqr
from tests.peer.executors.test_executors import watched
from tests.peer.tools import at_most, until
from tests.support.patience import PATIENCE
from worqr.peer.executors import asyncio_loop
from worqr.peer.executors.asyncio_loop import AsyncioLoop

Handler = Callable[[Any], Awaitable[object]]


@asynccontextmanager
async def looping() -> AsyncGenerator[AsyncioLoop]:
    """An asyncio loop as a peer has it."""
    async with at_most(PATIENCE):
        loop = AsyncioLoop()
        try:
            yield loop
        finally:
            await loop.end()


def asyncio_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "worqr asyncio"]


class Held:
    """A handler that waits until it is let go or cancelled."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.cancelled = threading.Event()
        self.loop: asyncio.AbstractEventLoop
        self._gate: asyncio.Event

    async def __call__(self, task: bytes) -> bytes:
        self.loop, self._gate = asyncio.get_running_loop(), asyncio.Event()
        self.begun.set()
        try:
            await self._gate.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return task

    def go(self) -> None:
        self.loop.call_soon_threadsafe(self._gate.set)


async def test_what_a_handler_returns_or_raises_comes_back_as_it_is() -> None:
    value, error = object(), KeyError("no such key")

    async def handler(task: bytes) -> object:
        await asyncio.sleep(0)
        if task == b"raise":
            raise error
        return value

    async with looping() as loop:
        run = loop.prepare(handler)
        assert await run(b"") is value
        with pytest.raises(KeyError) as raised:
            await run(b"raise")
        assert raised.value is error


@pytest.mark.parametrize(
    "raised", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, StopAsyncIteration]
)
async def test_odd_exceptions_come_back_and_the_loop_lives_on(raised: type[BaseException]) -> None:
    async def handler(task: bytes) -> str:
        if task == b"raise":
            raise raised
        return "fine"

    async with looping() as loop:
        run = loop.prepare(handler)
        with pytest.raises(raised):
            await run(b"raise")
        assert await run(b"") == "fine"


async def test_what_a_task_left_behind_raises_does_not_end_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    left: list[asyncio.Task[None]] = []

    async def stray() -> None:
        raise SystemExit(3)

    async def handler(task: bytes) -> str:
        if task == b"leave":
            left.append(asyncio.create_task(stray()))
        return "fine"

    async with looping() as loop:
        run = loop.prepare(handler)
        assert await run(b"leave") == "fine"
        assert await run(b"") == "fine"
        await until(lambda: left[0].done())
        assert isinstance(left[0].exception(), SystemExit)
        assert await run(b"") == "fine"
    assert "asyncio.raised" in caplog.text


async def test_all_runs_share_one_loop_in_one_thread_that_ends_with_the_peer() -> None:
    seen: set[tuple[int, int, str]] = set()

    async def handler(task: bytes) -> None:
        await asyncio.sleep(0)
        thread = threading.current_thread()
        seen.add((id(asyncio.get_running_loop()), thread.ident or 0, thread.name))

    async with looping() as loop:
        assert asyncio_threads() == []  # before the first run there is none
        for run in (loop.prepare(handler), loop.prepare(handler)):
            async with trio.open_nursery() as nursery:
                for _ in range(50):
                    nursery.start_soon(run, b"")
        assert len(seen) == 1
        assert {name for *_, name in seen} == {"worqr asyncio"}
        (thread,) = asyncio_threads()
        assert thread.daemon
    await until(lambda: asyncio_threads() == [])


async def test_runs_go_side_by_side() -> None:
    async with looping() as loop:
        held = [Held() for _ in range(20)]
        async with trio.open_nursery() as nursery:
            for each in held:
                nursery.start_soon(loop.prepare(each), b"")
            await until(lambda: all(each.begun.is_set() for each in held))
            for each in held:
                each.go()


async def test_context_variables_reach_the_handler_and_do_not_come_back() -> None:
    variable: ContextVar[str] = ContextVar("variable")
    variable.set("of the slot")
    seen: list[str] = []

    async def child() -> None:
        seen.append(variable.get())

    async def handler(task: bytes) -> None:
        await asyncio.create_task(child())
        await asyncio.to_thread(lambda: seen.append(variable.get()))
        variable.set("of the handler")

    async with looping() as loop:
        run = loop.prepare(handler)
        await run(b"")
        await run(b"")
    assert seen == ["of the slot"] * 4
    assert variable.get() == "of the slot"


async def test_libraries_for_several_loops_see_asyncio() -> None:
    async def handler(task: bytes) -> str:
        await asyncio.sleep(0)
        return sniffio.current_async_library()

    async with looping() as loop:
        sniffio.current_async_library_cvar.set("trio")  # as whoever started us may have done
        assert await loop.prepare(handler)(b"") == "asyncio"
        assert sniffio.current_async_library() == "trio"


async def test_no_thread_to_be_had_is_a_failure_and_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    async def handler(task: bytes) -> str:
        return "fine"

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async with looping() as loop:
        run = loop.prepare(handler)
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="can't start"):
            patch.setattr(threading.Thread, "start", refuse)
            await run(b"")
        assert await run(b"") == "fine"


# Cancelling


async def run_in(scope: trio.CancelScope, run: Handler, ended: list[object]) -> None:
    with scope:
        try:
            ended.append(await run(b"a"))
        except BaseException as error:
            ended.append(type(error))
            raise


async def test_a_cancelled_run_has_its_task_cancelled_and_waits_for_its_end() -> None:
    scope, ended, go = trio.CancelScope(), list[object](), threading.Event()
    held = Held()

    async def handler(task: bytes) -> None:
        try:
            await held(task)
        finally:
            await asyncio.to_thread(go.wait, PATIENCE)

    async with looping() as loop, trio.open_nursery() as nursery:
        nursery.start_soon(run_in, scope, loop.prepare(handler), ended)
        await until(held.begun.is_set)
        scope.cancel()
        await until(held.cancelled.is_set)
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert ended == []
        go.set()
        await until(lambda: ended)
    assert ended == [trio.Cancelled]
    assert scope.cancelled_caught


@pytest.mark.parametrize("raised", [None, KeyError])
async def test_a_handler_that_ends_in_its_own_way_when_cancelled(raised: type[Exception] | None) -> None:
    scope, ended, held = trio.CancelScope(), list[object](), Held()

    async def handler(task: bytes) -> str:
        try:
            await held(task)
        except asyncio.CancelledError:
            if raised is not None:
                raise raised("on the way out") from None
        return "late"

    async with looping() as loop:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(run_in, scope, loop.prepare(handler), ended)
                await until(held.begun.is_set)
                scope.cancel()
        except* KeyError:
            assert raised is not None
    assert ended == ["late" if raised is None else raised]
    assert not scope.cancelled_caught


async def test_a_run_that_is_cancelled_before_it_begins_does_not_begin() -> None:
    scope, ended, calls = trio.CancelScope(), list[object](), list[bytes]()
    blocked, go = threading.Event(), threading.Event()

    async def block(task: bytes) -> None:
        blocked.set()
        go.wait(PATIENCE)

    async def handler(task: bytes) -> None:
        calls.append(task)

    async with looping() as loop, trio.open_nursery() as nursery:
        nursery.start_soon(loop.prepare(block), b"")
        await until(blocked.is_set)
        nursery.start_soon(run_in, scope, loop.prepare(handler), ended)
        await trio.testing.wait_all_tasks_blocked(0.05)
        scope.cancel()
        await trio.testing.wait_all_tasks_blocked(0.05)
        go.set()
        await until(lambda: ended)
    assert (ended, calls) == ([trio.Cancelled], [])


async def test_a_run_that_was_never_waited_for_does_not_begin() -> None:
    calls: list[bytes] = []

    async def handler(task: bytes) -> None:
        calls.append(task)

    async with looping() as loop:
        with trio.CancelScope() as scope:
            scope.cancel()
            await loop.prepare(handler)(b"")
        assert scope.cancelled_caught
        await loop.prepare(handler)(b"next")
    assert calls == [b"next"]


async def test_a_cancellation_that_comes_with_the_end_changes_nothing() -> None:
    # However the two meet, the run ends once, as the one or the other.
    async def handler(task: bytes) -> str:
        await asyncio.sleep(0)
        return "done"

    async with looping() as loop:
        run = loop.prepare(handler)
        outcomes: set[object] = set()
        for n in range(300):
            scope, ended = trio.CancelScope(), list[object]()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(run_in, scope, run, ended)
                await trio.sleep(n * 1e-6)
                scope.cancel()
            assert len(ended) == 1
            outcomes.update(ended)
        assert outcomes <= {"done", trio.Cancelled}
        assert await run(b"") == "done"


# Its end


async def test_what_handlers_left_behind_is_cancelled_at_the_end() -> None:
    story: list[str] = []

    async def background() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0)
            story.append("cancelled")

    async def numbers() -> AsyncGenerator[int]:
        try:
            yield 1
        finally:
            story.append("closed")

    kept: list[Any] = []

    async def handler(task: bytes) -> None:
        kept.append(asyncio.create_task(background()))
        generator = numbers()
        await anext(generator)
        kept.append(generator)

    async with looping() as loop:
        await loop.prepare(handler)(b"")
    assert story == ["cancelled", "closed"]
    assert asyncio_threads() == [] or await until(lambda: asyncio_threads() == []) is None


async def test_a_loop_that_does_not_end_is_left_behind(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worqr.peer.executors.asyncio_loop.END_WAIT", 0.1)
    go = threading.Event()

    async def stubborn() -> None:
        go.wait(PATIENCE)

    async def handler(task: bytes) -> None:
        asyncio.get_running_loop().call_later(0, lambda: go.wait(PATIENCE))

    async with looping() as loop:
        await loop.prepare(handler)(b"")
        await trio.sleep(0.05)
    (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert "asyncio.stuck" in record.getMessage()
    assert "go.wait(PATIENCE)" in record.getMessage()
    go.set()
    await until(lambda: asyncio_threads() == [])


# What its watchers see


async def test_a_watcher_sees_where_the_task_is() -> None:
    held = Held()

    async def outer(task: bytes) -> object:
        return await held(task)

    async with looping() as loop, trio.open_nursery() as nursery:
        run = await nursery.start(watched, loop.prepare(outer))
        await until(held.begun.is_set)
        await until(lambda: "_gate.wait()" in run.current_stack())
        text = run.current_stack()
        assert text.index("in outer") < text.index("in __call__") < text.index("in wait")
        assert "worqr/peer" not in text
        held.go()
    assert run.current_stack() == ""


async def test_a_watcher_sees_where_a_task_blocks_the_loop() -> None:
    begun, go = threading.Event(), threading.Event()

    def block() -> None:
        begun.set()
        go.wait(PATIENCE)

    async def handler(task: bytes) -> None:
        block()

    async with looping() as loop, trio.open_nursery() as nursery:
        run = await nursery.start(watched, loop.prepare(handler))
        await until(begun.is_set)
        await until(lambda: "go.wait(PATIENCE)" in run.current_stack())
        assert "in block" in run.current_stack()
        go.set()


async def test_a_watcher_of_one_task_sees_that_another_blocks_the_loop() -> None:
    held, begun, go = Held(), threading.Event(), threading.Event()

    async def block(task: bytes) -> None:
        begun.set()
        go.wait(PATIENCE)

    async with looping() as loop, trio.open_nursery() as nursery:
        run = await nursery.start(watched, loop.prepare(held))
        await until(held.begun.is_set)
        nursery.start_soon(loop.prepare(block), b"")
        await until(begun.is_set)
        await until(lambda: "busy with another task" in run.current_stack())
        first, _, second = run.current_stack().partition("busy with another task")
        assert "in __call__" in first
        assert "in block" in second
        assert "_bootstrap" not in second
        go.set()
        held.go()


async def test_a_run_is_let_go(caplog: pytest.LogCaptureFixture) -> None:
    held, go = Held(), threading.Event()

    async def handler(task: bytes) -> None:
        try:
            await held(task)
        finally:
            await asyncio.to_thread(go.wait, PATIENCE)

    async with looping() as loop:
        async with trio.open_nursery() as nursery:
            run = await nursery.start(watched, loop.prepare(handler))
            await until(held.begun.is_set)
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                await until(held.cancelled.is_set)
                assert nursery.child_tasks
                run.detach()
        go.set()
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


# A handler that blocks the loop


@pytest.mark.one_server
@pytest.mark.parametrize("with_lifespan", [False, True])
async def test_code_that_blocks_the_loop_is_named_and_no_more_tasks_are_taken_for_it(
    new_mesh: Callable[..., worqr.Mesh],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    with_lifespan: bool,
) -> None:
    monkeypatch.setattr(asyncio_loop, "CHECK_EVERY", 0.01)
    monkeypatch.setattr(asyncio_loop, "BLOCKED_AFTER", 0.1)

    @asynccontextmanager
    async def lifespan() -> AsyncGenerator[None]:
        yield

    go, runs = threading.Event(), list[bytes]()
    mesh = new_mesh(block_limit=0.3, asyncio_lifespan=lifespan if with_lifespan else None)

    async def block(task: bytes) -> None:
        runs.append(task)
        go.wait(PATIENCE)

    def lines(event: str) -> list[str]:
        return [each.getMessage() for each in caplog.records if each.__dict__.get("event") == event]

    @mesh.task(name="thread", result_ttl=60)
    def thread() -> int:
        return 1

    @mesh.task(name="other", runs_in="asyncio")
    async def other() -> None: ...

    async with mesh.join() as peer, trio.open_nursery() as nursery, at_most(PATIENCE):
        await nursery.start(partial(peer.serve, "Q1", block, runs_in="asyncio"))
        q = mesh.queue("Q1")
        await q.enqueue(b"first")
        await until(lambda: len(lines("asyncio.blocked")) == 2)  # a warning, and an error after `block_limit`
        await q.enqueue(b"second")
        assert await (await thread.dispatch()).result(PATIENCE) == 1
        assert (await q.info()).waiting == 1
        await until(lambda: peer.health().why == "this worker's asyncio loop is blocked")
        assert not peer.health().alive
        await until(lambda: peer.health().loop_lag > 0.3)
        go.set()
        await until(lambda: runs == [b"first", b"second"])
        await until(lambda: peer.health().ready)
        nursery.cancel_scope.cancel()
    assert all(
        "in block" in line and line.startswith("asyncio.blocked: this worker's") for line in lines("asyncio.blocked")
    )
    assert len(lines("asyncio.turns")) == 1
