"""Plain functions in threads: what they see, how they learn of a cancellation, and who waits for whom."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import pytest
import trio
import trio.lowlevel
import trio.testing

from tests.peer.tools import at_most, until
from tests.support.patience import PATIENCE
from worqr.peer.executors.executors import Threads
from worqr.peer.executors.offloaded import name_of
from worqr.peer.run import current_run

Handler = Callable[[bytes], Awaitable[object]]


class Stubborn:
    """A plain function that does not end before it is let go, cancelled or not."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go = threading.Event()
        self.calls = 0

    def __call__(self, task: bytes) -> bytes:
        self.calls += 1
        self.begun.set()
        assert self.go.wait(PATIENCE)
        return task


@pytest.fixture
def threads() -> Threads:
    return Threads(40)


@pytest.fixture
def stubborn() -> Iterator[Stubborn]:
    function = Stubborn()
    yield function
    function.go.set()


async def test_what_a_thread_returns_or_raises_comes_back_as_it_is(threads: Threads) -> None:
    value, error = object(), KeyError("no such key")

    def plain(task: bytes) -> object:
        if task == b"raise":
            raise error
        return value

    run = threads.prepare(plain)
    assert await run(b"") is value
    with pytest.raises(KeyError) as raised:
        await run(b"raise")
    assert raised.value is error


@pytest.mark.parametrize("raised", [SystemExit, KeyboardInterrupt, GeneratorExit, trio.RunFinishedError])
async def test_odd_exceptions_come_back_as_well(threads: Threads, raised: type[BaseException]) -> None:
    def plain(task: bytes) -> None:
        raise raised

    with pytest.raises(raised):
        await threads.prepare(plain)(b"")


async def test_context_variables_reach_the_thread_and_do_not_come_back(threads: Threads) -> None:
    variable: ContextVar[str] = ContextVar("variable")
    variable.set("of the slot")
    seen: list[str] = []

    def plain(task: bytes) -> None:
        seen.append(variable.get())
        variable.set("of the thread")

    await threads.prepare(plain)(b"")
    assert (seen, variable.get()) == (["of the slot"], "of the slot")


async def test_the_thread_is_named_after_its_handler(threads: Threads) -> None:
    names: list[str] = []

    def plain(task: bytes) -> None:
        names.append(threading.current_thread().name)

    await threads.prepare(plain)(b"")
    assert names == [f"worqr {name_of(plain)}"]
    assert names[0].endswith("plain")


# Cancelling


class SlotRun:
    """What a slot knows of the run that it is busy with, in place of a `Run`."""

    offloaded: Any = None

    def offload(self, offloaded: Any) -> None:
        self.offloaded = offloaded


async def watched(run: Handler, task_status: trio.TaskStatus[Any]) -> None:
    """Run something as a slot does, and tell where it runs."""
    run_of_slot = SlotRun()
    current_run.set(run_of_slot)  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run, b"task")
        await until(lambda: run_of_slot.offloaded)
        task_status.started(run_of_slot.offloaded)


async def cancelled(run: Handler, stubborn: Stubborn, scope: trio.CancelScope, ended: list[object]) -> None:
    with scope:
        try:
            ended.append(await run(b"a"))
        except BaseException as error:
            ended.append(type(error))
            raise


async def test_a_cancelled_run_ends_when_its_thread_does_with_what_it_returned(
    threads: Threads, stubborn: Stubborn
) -> None:
    scope, ended = trio.CancelScope(), list[object]()
    async with at_most(PATIENCE), trio.open_nursery() as nursery:
        nursery.start_soon(cancelled, threads.prepare(stubborn), stubborn, scope, ended)
        await until(stubborn.begun.is_set)
        scope.cancel()
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert ended == []
        stubborn.go.set()
    assert ended == [b"a"]
    assert not scope.cancelled_caught


async def test_a_cancelled_run_ends_with_what_its_thread_raised(threads: Threads) -> None:
    scope, begun, go = trio.CancelScope(), threading.Event(), threading.Event()

    def plain(task: bytes) -> None:
        begun.set()
        assert go.wait(PATIENCE)
        raise KeyError("late")

    async def run() -> None:
        with pytest.raises(KeyError, match="late") as raised, scope:
            await threads.prepare(plain)(b"")
        assert raised.value.__context__ is None  # it has nothing to do with our waiting

    async with at_most(PATIENCE), trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await until(begun.is_set)
        scope.cancel()
        go.set()


@pytest.mark.parametrize("times", [1, 3])
async def test_a_thread_learns_of_the_cancellation_when_it_asks(threads: Threads, times: int) -> None:
    scope, begun, asked, swallowed = trio.CancelScope(), threading.Event(), threading.Event(), list[BaseException]()

    def plain(task: bytes) -> None:
        trio.from_thread.check_cancelled()
        begun.set()
        assert asked.wait(PATIENCE)
        for _ in range(times - 1):
            try:
                trio.from_thread.check_cancelled()
            except trio.Cancelled as error:
                swallowed.append(error)
        trio.from_thread.check_cancelled()

    async with at_most(PATIENCE), trio.open_nursery() as nursery:
        nursery.start_soon(cancelled, threads.prepare(plain), Stubborn(), scope, [])
        await until(begun.is_set)
        scope.cancel()
        asked.set()
    assert scope.cancelled_caught
    assert len(swallowed) == times - 1


async def test_a_run_that_waits_for_a_thread_does_not_begin_once_it_is_cancelled(stubborn: Stubborn) -> None:
    threads, scope, calls = Threads(1), trio.CancelScope(), list[bytes]()
    async with at_most(PATIENCE), trio.open_nursery() as nursery:
        nursery.start_soon(threads.prepare(stubborn), b"a")
        await until(stubborn.begun.is_set)
        nursery.start_soon(cancelled, threads.prepare(calls.append), stubborn, scope, [])
        await trio.testing.wait_all_tasks_blocked(0.05)
        scope.cancel()
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert scope.cancelled_caught
        stubborn.go.set()
    await threads.prepare(calls.append)(b"next")
    assert calls == [b"next"]


async def test_a_thread_that_was_not_begun_when_the_cancellation_came_does_not_begin(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Between the start of a thread and its first step anything may happen; here the cancellation does.
    held: list[Callable[[], None]] = []
    start = trio.lowlevel.start_thread_soon
    monkeypatch.setattr("trio._threads.start_thread_soon", lambda *args: held.append(lambda: start(*args)))
    scope, calls, ended = trio.CancelScope(), list[bytes](), list[object]()
    async with at_most(PATIENCE), trio.open_nursery() as nursery:
        nursery.start_soon(cancelled, threads.prepare(calls.append), Stubborn(), scope, ended)
        await until(lambda: held)
        scope.cancel()
        await until(lambda: ended)
    assert ended == [trio.Cancelled]
    held[0]()
    await until(lambda: threads.limiter.borrowed_tokens == 0)
    assert calls == []


async def test_the_thread_of_a_cancelled_run_counts_until_it_ends(stubborn: Stubborn) -> None:
    threads, scope = Threads(1), trio.CancelScope()
    async with at_most(PATIENCE), trio.open_nursery() as nursery:
        nursery.start_soon(cancelled, threads.prepare(stubborn), stubborn, scope, [])
        await until(stubborn.begun.is_set)
        scope.cancel()
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert threads.limiter.borrowed_tokens == 1
        stubborn.go.set()
    await until(lambda: threads.limiter.borrowed_tokens == 0)


async def test_a_thread_may_use_the_loop_before_and_after_its_cancellation(threads: Threads) -> None:
    scope, begun, go, answers = trio.CancelScope(), threading.Event(), threading.Event(), list[object]()

    async def here(word: str) -> str:
        await trio.lowlevel.checkpoint()
        return word

    def plain(task: bytes) -> None:
        answers.append(trio.from_thread.run(here, "before"))
        begun.set()
        assert go.wait(PATIENCE)
        answers.append(trio.from_thread.run(here, "after"))
        answers.append(trio.from_thread.run_sync(str, "sync"))

    async with at_most(PATIENCE), trio.open_nursery() as nursery:
        nursery.start_soon(cancelled, threads.prepare(plain), Stubborn(), scope, [])
        await until(begun.is_set)
        scope.cancel()
        go.set()
    assert answers == ["before", "after", "sync"]


def test_a_thread_outlives_the_loop_without_complaint(capfd: pytest.CaptureFixture[str]) -> None:
    stubborn, ended = Stubborn(), threading.Event()

    def plain(task: bytes) -> None:
        stubborn(task)
        ended.set()

    async def main() -> None:
        async with at_most(PATIENCE), trio.open_nursery() as nursery:
            run = await nursery.start(watched, Threads(1).prepare(plain))
            await until(stubborn.begun.is_set)
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                await trio.testing.wait_all_tasks_blocked(0.05)
            assert nursery.child_tasks
            run.detach()

    trio.run(main)
    stubborn.go.set()
    assert ended.wait(PATIENCE)
    assert capfd.readouterr().err == ""


# Around each call


async def test_around_thread_is_entered_in_the_thread_around_each_call() -> None:
    story: list[tuple[str, int]] = []

    @contextmanager
    def around() -> Iterator[None]:
        story.append(("before", threading.get_ident()))
        try:
            yield
        except KeyError:
            story.append(("raised", threading.get_ident()))
            raise
        finally:
            story.append(("after", threading.get_ident()))

    def plain(task: bytes) -> bytes:
        story.append((task.decode(), threading.get_ident()))
        if task == b"raise":
            raise KeyError
        return task

    run = Threads(1, around).prepare(plain)
    assert await run(b"task") == b"task"
    with pytest.raises(KeyError):
        await run(b"raise")
    assert [word for word, _ in story] == ["before", "task", "after", "before", "raise", "raised", "after"]
    assert threading.get_ident() not in {ident for _, ident in story}
    assert len({ident for _, ident in story[:3]}) == 1


async def test_what_around_thread_raises_is_raised_by_the_run() -> None:
    calls: list[bytes] = []

    @contextmanager
    def around() -> Iterator[None]:
        raise ConnectionError("no database")
        yield

    with pytest.raises(ConnectionError):
        await Threads(1, around).prepare(calls.append)(b"")
    assert calls == []


async def test_around_thread_may_swallow_an_error() -> None:
    @contextmanager
    def around() -> Iterator[None]:
        try:
            yield
        except KeyError:
            pass

    def plain(task: bytes) -> None:
        raise KeyError

    assert await Threads(1, around).prepare(plain)(b"") is None


# Stuck ones


async def test_stuck_threads_are_replaced_at_most_as_many_again() -> None:
    threads, stuck = Threads(2), [Stubborn() for _ in range(5)]
    async with at_most(PATIENCE), trio.open_nursery() as nursery:
        runs = [await nursery.start(watched, threads.prepare(function)) for function in stuck]
        for n, replaced in enumerate([True, True, False, False]):
            await until(stuck[n].begun.is_set)
            assert [runs[n].allow_replacement(), runs[n].allow_replacement()] == [replaced] * 2
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await trio.testing.wait_all_tasks_blocked(0.05)
        assert threads.limiter.total_tokens == 4
        for function in stuck:
            function.go.set()
    assert threads.limiter.total_tokens == 2
    assert stuck[4].calls == 0


async def test_a_watcher_sees_where_the_thread_is(threads: Threads, stubborn: Stubborn) -> None:
    async with at_most(PATIENCE), trio.open_nursery() as nursery:
        run = await nursery.start(watched, threads.prepare(stubborn))
        await until(stubborn.begun.is_set)
        text = run.current_stack()
        assert "in __call__" in text
        assert "self.go.wait(PATIENCE)" in text
        assert "worqr/peer" not in text
        assert "_bootstrap" not in text
        stubborn.go.set()
    assert run.current_stack() == ""
