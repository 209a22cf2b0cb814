"""Where handlers run, as `serve` is told: what limits each place, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import pytest
import trio
import trio.lowlevel
import trio.testing

import worqr
from tests.peer.conftest import NewMesh
from tests.peer.tools import Held, at_most, eventually, until
from tests.support.patience import PATIENCE
from worqr.link import loop_name_here
from worqr.peer.executors import offloaded
from worqr.peer.executors.executors import Threads
from worqr.peer.executors.offloaded import name_of
from worqr.peer.run import current_run


class HeldThreads:
    """A plain handler that holds its threads until it is let go."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.names: list[str] = []

    def __call__(self, task: bytes) -> None:
        self.names.append(threading.current_thread().name)
        self.gate.wait(30)


async def test_what_would_wait_for_a_thread_is_left_to_others(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    here, there = HeldThreads(), HeldThreads()
    try:
        async with other.connect(), mesh.join(threads=2, grace=20) as peer, trio.open_nursery() as nursery:
            await nursery.start(partial(peer.serve, "Q1", here))
            await nursery.start(partial(peer.serve, "Q2", here))
            await mesh.queue("Q1").enqueue(*[b"%d" % n for n in range(5)])
            await until(lambda: len(here.names) == 2)
            await mesh.queue("Q2").enqueue(b"x")
            await eventually(lambda: waiting_and_running(mesh), (3, 2, 1, 0))  # a hand-off goes back
            assert peer.health().running == 2
            async with other.join(threads=10, grace=20) as second, trio.open_nursery() as inner:
                await inner.start(partial(second.serve, "Q1", there))
                await until(lambda: len(there.names) == 3)
                here.gate.set()
                there.gate.set()
                await eventually(lambda: waiting_and_running(mesh), (0, 0, 0, 0), within=20)
                inner.cancel_scope.cancel()
            nursery.cancel_scope.cancel()
    finally:
        here.gate.set()
        there.gate.set()
    assert len(here.names) + len(there.names) == 6


async def waiting_and_running(mesh: worqr.Mesh) -> tuple[int, ...]:
    infos = [await mesh.queue(name).info() for name in ("Q1", "Q2")]
    return tuple(number for info in infos for number in (info.waiting, info.running))


async def test_threads_do_not_limit_what_runs_on_the_loop(mesh: worqr.Mesh) -> None:
    threads, loop = HeldThreads(), Held()
    try:
        async with mesh.join(threads=1, grace=20) as peer, trio.open_nursery() as nursery:
            await nursery.start(partial(peer.serve, "Q1", threads))
            await nursery.start(partial(peer.serve, "Q2", loop))
            await mesh.queue("Q1").enqueue(b"1", b"2")
            await until(lambda: len(threads.names) == 1)
            await mesh.queue("Q2").enqueue(*[b"x"] * 10)
            await loop.wait(10)
            threads.gate.set()
            loop.gate.set()
            await eventually(lambda: waiting_and_running(mesh), (0, 0, 0, 0), within=20)
            nursery.cancel_scope.cancel()
    finally:
        threads.gate.set()


async def test_a_task_for_which_the_system_has_no_thread_runs_again_and_counts_no_failure(
    mesh: worqr.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = [RuntimeError("can't start new thread")] * 2
    start = trio.to_thread.run_sync

    async def run_sync(*args: Any, **options: Any) -> Any:
        if refusals and "thread_name" in options:
            raise refusals.pop()
        return await start(*args, **options)

    monkeypatch.setattr(trio.to_thread, "run_sync", run_sync)
    monkeypatch.setattr(offloaded, "START_AGAIN", 0.0)

    def handle(task: bytes) -> bytes:
        return b"%d %d" % (worqr.current().failures, len(refusals))

    async with mesh.join(threads=1) as peer, trio.open_nursery() as nursery:
        await nursery.start(partial(peer.serve, "Q1", handle, retry=worqr.RetryPolicy(max_failures=1)))
        job = await mesh.queue("Q1").dispatch(b"x", result_ttl=60)
        assert await job.result(PATIENCE) == b"0 0"
        nursery.cancel_scope.cancel()


async def test_a_run_takes_as_many_units_as_its_size(mesh: worqr.Mesh) -> None:
    handler = Held()
    async with mesh.join(concurrency=10) as peer, trio.open_nursery() as nursery:
        await nursery.start(partial(peer.serve, "Q1", handler, size=4))
        await mesh.queue("Q1").enqueue(*[b"x"] * 5)
        await handler.wait(2)
        info = await mesh.queue("Q1").info()
        assert (info.waiting, info.running, peer.health().room) == (3, 2, 2)
        peer.set_concurrency(12)
        await handler.wait(3)
        handler.gate.set()
        await eventually(lambda: waiting_and_running(mesh), (0, 0, 0, 0), within=20)
        nursery.cancel_scope.cancel()


async def test_a_run_that_never_fits_is_refused(mesh: worqr.Mesh) -> None:
    async with mesh.join(concurrency=3) as peer:
        with pytest.raises(worqr.UsageError, match="size 4 would never find room: the concurrency of this peer is 3"):
            await peer.serve("Q1", Held(), size=4)
        assert (await mesh.workers())[0].queues == frozenset()


def plain(task: bytes) -> None: ...


@pytest.mark.parametrize(
    ("handler", "runs_in", "words"),
    [
        (plain, "loop", "plain function and would block the loop"),
        (plain, "asyncio", "plain function and would block the loop"),
        (Held(), "thread", "async function, whose places are"),
        (Held(), "process", "is async, and runs_in='process' calls plain functions"),
        (lambda task: None, "process", "is a lambda, which another process cannot import"),
    ],
)
async def test_a_handler_in_the_wrong_place_is_refused(
    mesh: worqr.Mesh, handler: Any, runs_in: Any, words: str
) -> None:
    async with mesh.join() as peer:
        with pytest.raises(worqr.UsageError, match=words):
            await peer.serve("Q1", handler, runs_in=runs_in)


# `Mesh(runs_in=...)`: where async handlers run that have no place of their own.


def place() -> str:
    """What runs in this thread, or that it is not the main one."""
    return loop_name_here() or ("main" if threading.current_thread() is threading.main_thread() else "thread")


def declare(registry: worqr.Registry) -> list[worqr.Function[[], str]]:
    @registry.task(name="default", result_ttl=60)
    async def default() -> str:
        return place()

    @registry.task(name="plain", result_ttl=60)
    def plain() -> str:
        return place()

    @registry.task(name="trio", runs_in="loop", result_ttl=60)
    async def on_trio() -> str:
        return place()

    @registry.task(name="asyncio", runs_in="asyncio", result_ttl=60)
    async def on_asyncio() -> str:
        return place()

    return [default, plain, on_trio, on_asyncio]


async def places(mesh: worqr.Mesh, functions: list[worqr.Function[[], str]]) -> list[str]:
    async with mesh.join():
        return [await (await function.dispatch()).result(PATIENCE) for function in functions]


@pytest.mark.parametrize(("default", "found"), [("loop", "Trio"), ("asyncio", "asyncio")])
async def test_async_functions_run_where_the_mesh_says(new_mesh: NewMesh, default: Any, found: str) -> None:
    mesh = new_mesh(runs_in=default)
    assert mesh.runs_in == default
    assert await places(mesh, declare(mesh)) == [found, "thread", "Trio", "asyncio"]


async def test_the_default_is_trio(mesh: worqr.Mesh) -> None:
    assert mesh.runs_in is None
    assert await places(mesh, declare(mesh)) == ["Trio", "thread", "Trio", "asyncio"]


async def test_functions_of_a_registry_run_where_the_mesh_says_that_serves_them(new_mesh: NewMesh) -> None:
    registry = worqr.Registry()
    functions = declare(registry)
    mesh = new_mesh(runs_in="asyncio")
    mesh.include(registry, prefix="shop.")
    assert functions[0].name == "shop.default"
    assert await places(mesh, functions) == ["asyncio", "thread", "Trio", "asyncio"]


async def test_handlers_of_raw_queues_run_there_too(new_mesh: NewMesh) -> None:
    mesh, seen = new_mesh(runs_in="asyncio"), list[str]()

    async def handler(task: bytes) -> None:
        seen.append(place())

    async with mesh.join() as peer, trio.open_nursery() as nursery:
        await nursery.start(peer.serve, "Q1", handler)
        await nursery.start(partial(peer.serve, "Q2", handler, runs_in="loop"))
        await mesh.queue("Q1").enqueue(b"x")
        await until(lambda: len(seen) == 1)
        await mesh.queue("Q2").enqueue(b"x")
        await until(lambda: len(seen) == 2)
        nursery.cancel_scope.cancel()
    assert seen == ["asyncio", "Trio"]


@pytest.mark.parametrize(
    ("default", "runs_in", "expected"),
    [
        ("asyncio", None, "asyncio"),
        ("asyncio", "loop", "Trio"),
        ("asyncio", "thread", "asyncio"),
        ("loop", None, "Trio"),
        ("loop", "asyncio", "asyncio"),
        ("loop", "thread", "Trio"),
    ],
)
async def test_a_failure_handler_runs_on_the_loop_of_its_handler(
    new_mesh: NewMesh, expects_left: Callable[..., None], default: Any, runs_in: Any, expected: str
) -> None:
    expects_left("{Q1}:failed", "{Q1}:aside*")
    mesh, seen = new_mesh(runs_in=default), list[str]()

    async def fail(task: bytes) -> None:
        raise worqr.Failure("on purpose")

    def fail_in_thread(task: bytes) -> None:
        raise worqr.Failure("on purpose")

    async def on_failure(failed: worqr.Failed) -> None:
        seen.append(place())

    handler: Any = fail_in_thread if runs_in == "thread" else fail
    options = {} if runs_in is None else {"runs_in": runs_in}
    async with mesh.join() as peer, trio.open_nursery() as nursery:
        await nursery.start(partial(peer.serve, "Q1", handler, on_failure=on_failure, **options))
        await mesh.queue("Q1").enqueue(b"x")
        await until(lambda: seen)
        nursery.cancel_scope.cancel()
    assert seen == [expected]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "thread",
            "must be 'loop' or 'asyncio', not 'thread'; it is the place of async handlers: for a plain function",
        ),
        ("process", "say runs_in='process' in @mesh.task"),
        ("trio", "must be 'loop' or 'asyncio', not 'trio'$"),
    ],
)
def test_other_places_are_refused(value: Any, message: str) -> None:
    with pytest.raises(worqr.UsageError, match=message):
        worqr.Mesh(runs_in=value)


# Plain functions in threads: what they see, how they learn of a cancellation, and who waits for whom.


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
