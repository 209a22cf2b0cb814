"""Middleware: around every run of a peer, on its loop; it sees how a run ended, and may decide so."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import pytest
import trio

import worqr
from tests.peer.conftest import NewMesh
from tests.peer.tools import Held, eventually, until

CallNext = Callable[[], Awaitable[object]]
FAILED = ("{Q1}:failed", "{Q1}:aside*")
REQUEST: ContextVar[str] = ContextVar("request", default="none")


class Story:
    """What happened, in order; from any thread."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, line: str) -> None:
        self.lines.append(line)

    async def wait(self, n: int) -> list[str]:
        await until(lambda: len(self.lines) >= n, within=20, what=f"{n} lines")
        return self.lines

    def around(self, name: str) -> worqr.Middleware:
        """A middleware that notes when it begins and how it ends."""

        async def middleware(context: worqr.Context, call_next: CallNext) -> object:
            self(f"{name} begins")
            try:
                result = await call_next()
            except BaseException as error:
                self(f"{name}: {type(error).__name__}")
                raise
            self(f"{name}: {result}")
            return result

        return middleware


@pytest.fixture
def story() -> Story:
    return Story()


@pytest.mark.parametrize("plain", [False, True])
async def test_the_first_is_outermost(new_mesh: NewMesh, story: Story, plain: bool) -> None:
    mesh = new_mesh(middleware=[story.around("outer"), story.around("inner")])

    def run(n: int) -> int:
        story("run" if (threading.current_thread() is threading.main_thread()) is not plain else "elsewhere")
        return n

    async def run_later(n: int) -> int:
        return run(n)

    mesh.task(name="Q1")(run if plain else run_later)
    async with mesh.join():
        await mesh.queue("Q1").enqueue(b'{"n":7}')
        await story.wait(5)
    assert story.lines == ["outer begins", "inner begins", "run", "inner: 7", "outer: 7"]


async def test_it_runs_on_the_loop_and_knows_the_run(new_mesh: NewMesh) -> None:
    seen: list[Any] = []

    async def middleware(context: worqr.Context, call_next: CallNext) -> object:
        seen.append((context is worqr.current(), context.queue, context.task, context.attempt, context.meta["tenant"]))
        seen.append(threading.current_thread() is threading.main_thread() and trio.lowlevel.in_trio_task())
        return await call_next()

    mesh = new_mesh(middleware=(middleware,))

    @mesh.task(name="Q1", result_ttl=60)
    def run(n: int) -> int:
        return n

    async with mesh.join():
        job = await run.options(meta={"tenant": "x"}).dispatch(1)
        assert await job.result(timeout=30) == 1
    assert seen == [(True, "Q1", b'{"n":1}', 1, "x"), True]


async def test_what_it_returns_is_the_result(new_mesh: NewMesh) -> None:
    async def doubled(context: worqr.Context, call_next: CallNext) -> object:
        return 2 * int(str(await call_next()))

    mesh = new_mesh(middleware=[doubled, doubled])

    @mesh.task(name="Q1", result_ttl=60)
    async def run(n: int) -> int:
        return n

    async with mesh.join():
        assert await (await run.dispatch(3)).result(timeout=30) == 12


async def test_it_may_answer_without_a_run(new_mesh: NewMesh) -> None:
    ran: list[int] = []

    async def cached(context: worqr.Context, call_next: CallNext) -> object:
        return 7

    mesh = new_mesh(middleware=[cached])

    @mesh.task(name="Q1", result_ttl=60)
    async def run(n: int) -> int:
        ran.append(n)
        return n

    async with mesh.join():
        assert await (await run.dispatch(3)).result(timeout=30) == 7
    assert not ran


async def test_it_is_around_what_is_served_by_hand(mesh: worqr.Mesh, new_mesh: NewMesh, story: Story) -> None:
    mesh = new_mesh(middleware=[story.around("around")])

    async def handle(task: bytes) -> None:
        story(task.decode())

    async with mesh.join() as peer, trio.open_nursery() as nursery:
        await nursery.start(peer.serve, "Q1", handle)
        await mesh.queue("Q1").enqueue(b"x")
        assert await story.wait(3) == ["around begins", "x", "around: None"]
        nursery.cancel_scope.cancel()


async def test_context_variables_reach_the_run(new_mesh: NewMesh) -> None:
    seen: list[str] = []

    async def middleware(context: worqr.Context, call_next: CallNext) -> object:
        REQUEST.set(context.task.decode())
        return await call_next()

    mesh = new_mesh(middleware=[middleware])

    @mesh.task(name="Q1")
    async def run(n: int, /) -> None:
        seen.append(REQUEST.get())

    @mesh.task(name="Q2")
    def run_in_a_thread(n: int, /) -> None:
        seen.append(REQUEST.get())

    async with mesh.join():
        for n, function in enumerate((run, run_in_a_thread, run), 1):
            await function.enqueue(n)
            await until(lambda n=n: len(seen) == n)  # type: ignore[misc]
    assert seen == ["1", "2", "3"]
    assert REQUEST.get() == "none"


# Errors


@pytest.mark.leaves(*FAILED)
async def test_it_sees_what_a_run_raises(new_mesh: NewMesh, story: Story) -> None:
    mesh = new_mesh(middleware=[story.around("around")])

    @mesh.task(name="Q1")
    async def run(word: str) -> None:
        raise {"failure": worqr.Failure, "undecodable": worqr.Undecodable, "error": KeyError}[word]

    async with mesh.connect():
        for word, name in (("failure", "Failure"), ("undecodable", "Undecodable")):
            story.lines.clear()
            async with mesh.join():
                await run.enqueue(word)
                assert await story.wait(2) == ["around begins", f"around: {name}"]
                await eventually(run.queue.running, [])
        assert {each.error.type for each in await run.queue.failed.list()} == {"worqr.Failure"}
        assert await run.queue.undecodable.drop_all() == 1


@pytest.mark.leaves("{Q1}:broken", "{Q1}:aside*")
async def test_it_sees_payloads_that_cannot_be_decoded(new_mesh: NewMesh, story: Story) -> None:
    mesh = new_mesh(middleware=[story.around("around")])

    @mesh.task(name="Q1")
    async def run(n: int) -> None: ...

    async with mesh.join():
        await run.queue.enqueue(b"x")
        assert await story.wait(2) == ["around begins", "around: Undecodable"]
        await eventually(run.queue.running, [])
        assert [each.task for each in await run.queue.undecodable.list()] == [b"x"]


async def test_an_error_that_it_swallows_is_none(new_mesh: NewMesh) -> None:
    async def lenient(context: worqr.Context, call_next: CallNext) -> object:
        try:
            return await call_next()
        except KeyError:
            return "no key"

    mesh = new_mesh(middleware=[lenient])

    @mesh.task(name="Q1", result_ttl=60)
    def run() -> str:
        raise KeyError

    async with mesh.join():
        assert await (await run.dispatch()).result(timeout=30) == "no key"


async def test_it_may_say_that_the_task_is_tried_again(new_mesh: NewMesh) -> None:
    async def patient(context: worqr.Context, call_next: CallNext) -> object:
        try:
            return await call_next()
        except ConnectionError as error:
            raise worqr.Retry("the database is away", delay=0, counted=False) from error

    mesh = new_mesh(middleware=[patient])
    tries: list[int] = []

    @mesh.task(name="Q1", retry=worqr.RetryPolicy(max_failures=1), result_ttl=60)
    async def run() -> int:
        tries.append(worqr.current().failures)
        if len(tries) < 4:
            raise ConnectionError("down")
        return len(tries)

    async with mesh.join():
        assert await (await run.dispatch()).result(timeout=30) == 4
    assert tries == [0, 0, 0, 0]


@pytest.mark.leaves(*FAILED)
async def test_an_error_of_its_own_fails_the_run(new_mesh: NewMesh, caplog: pytest.LogCaptureFixture) -> None:
    async def broken(context: worqr.Context, call_next: CallNext) -> object:
        await call_next()
        raise LookupError("in the middleware")

    mesh = new_mesh(middleware=[broken])

    @mesh.task(name="Q1", result_ttl=60, retry=worqr.RetryPolicy(max_failures=2, min_backoff=0))
    async def run() -> None: ...

    with caplog.at_level(logging.WARNING):
        async with mesh.join():
            with pytest.raises(worqr.JobFailed, match="LookupError: in the middleware"):
                await (await run.dispatch()).result(timeout=30)
    assert caplog.text.count("task.failed: queue 'Q1'") == 2


@pytest.mark.leaves(*FAILED)
async def test_it_is_around_failure_handlers_too(new_mesh: NewMesh, story: Story) -> None:
    async def middleware(context: worqr.Context, call_next: CallNext) -> object:
        story(f"{context.queue} begins")
        try:
            return await call_next()
        finally:
            story(f"{context.queue} ends")

    mesh = new_mesh(middleware=[middleware])

    @mesh.task(name="Q1")
    async def run() -> None:
        raise worqr.Failure

    @run.on_failure
    def gave_up(record: worqr.Failed) -> None:
        story(f"gave up {record.queue}")

    async with mesh.join():
        await run.enqueue()
        assert await story.wait(5) == ["Q1 begins", "Q1 ends", "{Q1}-fail begins", "gave up Q1", "{Q1}-fail ends"]
        await eventually(run.queue.failures.running, [])


# Cancellation


@pytest.mark.leaves(*FAILED)
@pytest.mark.parametrize("plain", [False, True])
async def test_a_timeout_passes_through(new_mesh: NewMesh, story: Story, plain: bool) -> None:
    mesh = new_mesh(middleware=[story.around("around")])

    def run() -> None:
        while True:
            worqr.current().check_cancelled()
            time.sleep(0.01)

    async def run_later() -> None:
        await trio.sleep_forever()

    options: Any = {"timeout": 0.05, "retry": worqr.RetryPolicy(max_timeouts=1), "result_ttl": 60}
    function: Any = mesh.task(name="Q1", **options)(run if plain else run_later)
    async with mesh.join():
        with pytest.raises(worqr.JobFailed, match="Timeout: it ran longer than"):
            await (await function.dispatch()).result(timeout=30)
    assert story.lines == ["around begins", "around: Cancelled"]


async def test_a_timeout_is_that_of_the_middleware_too(new_mesh: NewMesh, expects_left: Any) -> None:
    async def slow(context: worqr.Context, call_next: CallNext) -> object:
        await trio.sleep_forever()
        return await call_next()

    mesh = new_mesh(middleware=[slow])

    @mesh.task(name="Q1", timeout=0.05, retry=worqr.RetryPolicy(max_timeouts=1), result_ttl=60)
    async def run() -> None:
        pytest.fail("it ran")

    expects_left(*FAILED)
    async with mesh.join():
        with pytest.raises(worqr.JobFailed, match="Timeout"):
            await (await run.dispatch()).result(timeout=30)


async def test_a_cancel_passes_through(new_mesh: NewMesh, story: Story) -> None:
    mesh, held = new_mesh(middleware=[story.around("around")]), Held()

    @mesh.task(name="Q1", result_ttl=60)
    async def hold(task: bytes, /) -> None:
        await held(task)

    async with mesh.join():
        job = await hold.dispatch(b"x")
        await held.wait(1)
        assert (await job.cancel(reason="button", wait=30)).acknowledged == 1
        with pytest.raises(worqr.JobCancelled, match="button"):
            await job.result(timeout=30)
    assert story.lines == ["around begins", "around: Cancelled"]
    assert held.cancelled == [(b"x", "cancel")]


async def test_a_cancel_that_it_swallows_is_one_all_the_same(new_mesh: NewMesh) -> None:
    held = Held()

    async def stubborn(context: worqr.Context, call_next: CallNext) -> object:
        try:
            return await call_next()
        except trio.Cancelled:
            return "I go on"

    mesh = new_mesh(middleware=[stubborn])

    @mesh.task(name="Q1", result_ttl=60)
    async def hold(task: bytes, /) -> str:
        await held(task)
        return "done"

    async with mesh.join():
        job = await hold.dispatch(b"x")
        await held.wait(1)
        await job.cancel(wait=30)
        with pytest.raises(worqr.JobCancelled):
            await job.result(timeout=30)


# The worked examples of the documents


async def test_timing_and_error_reports(new_mesh: NewMesh, expects_left: Any) -> None:
    """What most middleware is for."""
    times: list[tuple[str, float]] = []
    reports: list[tuple[str, str, bool]] = []

    async def timing(context: worqr.Context, call_next: CallNext) -> object:
        began = trio.current_time()
        try:
            return await call_next()
        finally:
            times.append((context.queue, trio.current_time() - began))

    async def reporting(context: worqr.Context, call_next: CallNext) -> object:
        try:
            return await call_next()
        except (worqr.Retry, worqr.Failure):
            raise
        except Exception as error:
            reports.append((context.id, str(error), context.last_attempt))
            raise

    mesh = new_mesh(middleware=[timing, reporting])

    @mesh.task(name="Q1", retry=worqr.RetryPolicy(max_failures=2, min_backoff=0), result_ttl=60)
    async def run() -> None:
        raise ConnectionError("down")

    expects_left(*FAILED)
    async with mesh.join():
        job = await run.options(id="job").dispatch()
        with pytest.raises(worqr.JobFailed):
            await job.result(timeout=30)
    assert reports == [("job", "down", False), ("job", "down", True)]
    assert [queue for queue, _ in times] == ["Q1", "Q1"]


async def test_runs_without_middleware_are_not_slower(mesh: worqr.Mesh) -> None:
    """The handler itself is called: nothing stands in between."""
    from worqr.peer.lifespans import with_middleware

    async def handler(task: bytes) -> None: ...

    assert with_middleware(handler, (), "loop") is handler
    async with mesh.join() as peer:
        run, _ = peer._engine.executors.prepare(handler, None)  # pyright: ignore[reportPrivateUsage]
        assert run is handler
