"""Producing and operating under asyncio: the same calls as under Trio, with the same answers, through the same link."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import random
import threading
import time
import warnings
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, nullcontext, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import anyio
import pytest
import trio

import worqr
from tests.support.children import Child
from tests.support.patience import PATIENCE, have_patience
from tests.support.proxy import FaultProxy
from tests.support.servers import Server
from worqr import embedded
from worqr.client import notifications
from worqr.inside import client_of
from worqr.link import Link, loop_name_here

T = TypeVar("T")
Main = Callable[[], Coroutine[Any, Any, T]]
Run = Callable[[Main[Any]], Any]
NewMesh = Callable[..., worqr.Mesh]

pytestmark = pytest.mark.one_server


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("worqr-")]


@pytest.fixture
def new_mesh(request: pytest.FixtureRequest, prefix: str) -> Iterator[NewMesh]:
    """`new_mesh(url=..., ...)`: a mesh on the test's server, under its prefix. In the end no thread of ours is left."""
    kind = "own_server" if "own_server" in request.fixturenames else "server"
    url = request.getfixturevalue(kind).url

    def make(**settings: Any) -> worqr.Mesh:
        meshes.append(worqr.Mesh(**{"url": url, "prefix": prefix, "patience": PATIENCE, **settings}))
        return meshes[-1]

    meshes: list[worqr.Mesh] = []
    yield make
    for mesh in meshes:
        mesh.close()
    deadline = time.monotonic() + PATIENCE
    while our_threads():
        assert time.monotonic() < deadline, our_threads()
        time.sleep(0.005)


@pytest.fixture
def mesh(new_mesh: NewMesh) -> worqr.Mesh:
    return new_mesh()


def bounded(main: Main[T]) -> T:
    """Run it under asyncio; what hangs is an error."""

    async def run() -> T:
        async with asyncio.timeout(2 * PATIENCE):
            return await main()

    return asyncio.run(run())


def under_uvloop(main: Main[T]) -> T:
    import uvloop  # type: ignore[import-not-found, import-untyped, unused-ignore]

    return uvloop.run(main())  # type: ignore[no-any-return, unused-ignore]


RUNS: dict[str, Run] = {
    "trio": trio.run,
    "asyncio": bounded,
    "asyncio, debug": lambda main: asyncio.run(main(), debug=True),
    "anyio": lambda main: anyio.run(main, backend="asyncio"),
}
if importlib.util.find_spec("uvloop"):
    RUNS["uvloop"] = under_uvloop


@pytest.fixture(params=RUNS.values(), ids=list(RUNS))
def run(request: pytest.FixtureRequest) -> Run:
    """`run(main)`: run an async function, and what it awaits, by one of the loops."""
    found: Run = request.param
    return found


@pytest.fixture(params=[*RUNS.values(), worqr.sync], ids=[*RUNS, "sync"])
def anywhere(request: pytest.FixtureRequest) -> Run:
    """As `run`, or by `worqr.sync`, without a loop."""
    found: Run = request.param
    return found


@asynccontextmanager
async def connected(mesh: worqr.Mesh) -> AsyncGenerator[None]:
    """Without a loop, a mesh connects by itself."""
    async with mesh.connect() if loop_name_here() else nullcontext():
        yield


async def sleep(seconds: float) -> None:
    match loop_name_here():
        case "Trio":
            await trio.sleep(seconds)
        case "asyncio":
            await asyncio.sleep(seconds)
        case _:
            time.sleep(seconds)


async def until(look: Callable[[], Awaitable[object]], wanted: object = True) -> None:
    deadline = time.monotonic() + PATIENCE
    while (seen := await look()) != wanted:
        assert time.monotonic() < deadline, f"{seen!r} is not {wanted!r}"
        await sleep(0.005)


async def come(condition: Callable[[], object]) -> None:
    async def look() -> bool:
        return bool(condition())

    await until(look)


class App:
    """An application: a mesh with functions. `serving` is a peer of it, on a Trio loop in another thread."""

    def __init__(self, mesh: worqr.Mesh) -> None:
        self.mesh = mesh
        self.ended: list[str | None] = []

        @mesh.task(name="add", result_ttl=60)
        async def add(a: int, b: int) -> int:
            return a + b

        @mesh.task(name="fail", result_ttl=60)
        async def fail(text: str) -> None:
            raise worqr.Failure(text)

        @mesh.task(name="hold", result_ttl=60)
        async def hold(who: str) -> None:
            worqr.current().progress(0.5, who)
            try:
                await trio.sleep_forever()
            finally:
                self.ended.append(worqr.current().cancel_reason)

        self.add, self.fail, self.hold = add, fail, hold

    @contextmanager
    def serving(self) -> Generator[None]:
        joined, leave = threading.Event(), trio.Event()
        tokens: list[trio.lowlevel.TrioToken] = []

        async def serve() -> None:
            async with self.mesh.join(grace=0):
                tokens.append(trio.lowlevel.current_trio_token())
                joined.set()
                await leave.wait()

        thread = threading.Thread(target=trio.run, args=(serve,))
        thread.start()
        try:
            assert joined.wait(PATIENCE)
            yield
        finally:
            tokens[0].run_sync_soon(leave.set)
            thread.join()


@pytest.fixture
def app(mesh: worqr.Mesh) -> App:
    return App(mesh)


# The same programs under each loop, and without one


def test_functions(anywhere: Run, app: App) -> None:
    async def main() -> None:
        async with connected(app.mesh):
            assert await app.add.enqueue(1, 2) is None  # type: ignore[func-returns-value]
            job = await app.add.dispatch(1, b=2)
            assert await job.result(PATIENCE) == 3
            assert await job.result() == 3
            assert await job.result(0) == 3
            assert (await job.status()).state == "finished"
            later = await app.add.options(id="sum", delay=3600, meta={"who": "ada"}).dispatch(3, 4)
            assert (later.id, later.outcome) == ("sum", "created")
            assert app.add.job("sum") == later
            assert (await app.add.job("sum").status()).state == "scheduled"
            again = await app.add.options(id="sum", delay=0).dispatch(5, 6)
            assert again.outcome == "updated"
            assert await again.result(PATIENCE) == 11
            with pytest.raises(TypeError):
                await app.add.enqueue("one")  # type: ignore[call-arg, arg-type]
            failed = await app.fail.dispatch("never")
            with pytest.raises(worqr.JobFailed) as caught:
                await failed.result(PATIENCE)
            assert (caught.value.error.type, caught.value.error.message) == ("worqr.Failure", "never")
            assert await app.fail.queue.failed.drop_all() == 1

    with app.serving():
        anywhere(main)


def test_many_calls(anywhere: Run, app: App) -> None:
    async def main() -> None:
        async with connected(app.mesh):
            assert await app.mesh.enqueue_many(app.add.call(n, n) for n in range(1500)) == 1500
            jobs = await app.mesh.dispatch_many([app.add.call(n, n) for n in range(100)])
            assert [await job.result(PATIENCE) for job in jobs] == [n + n for n in range(100)]
            assert await app.mesh.enqueue_many([]) == 0
            assert await app.mesh.dispatch_many([]) == []
            await until(app.add.queue.running, [])
            info = await app.add.queue.info()
            assert (info.waiting, info.counts["finished"]) == (0, 1600)

    with app.serving():
        anywhere(main)


def test_a_queue(anywhere: Run, mesh: worqr.Mesh) -> None:
    async def main() -> None:
        async with connected(mesh):
            q = mesh.queue("Q1")
            assert await q.peek() is None
            assert await q.enqueue(b"a", b"b", b"c") == 3
            assert await q.enqueue(b"first", front=True) == 1
            assert await q.enqueue(b"once", unique=True) == 1
            with pytest.raises(worqr.Duplicate) as caught:
                await q.enqueue(b"once", unique=True)
            assert (await caught.value.job.status()).state == "waiting"
            with pytest.raises(worqr.QueueFull):
                await q.enqueue(b"d", max_length=2)
            assert await q.enqueue(*(b"%d" % n for n in range(2500))) == 2500
            assert await q.count() == 2505
            assert await q.peek() == b"first"
            assert (await q.tasks(2))[0] == b"2499"
            assert await q.running() == []
            await q.pause("tests")
            assert (await q.info()).paused == "tests"
            await q.resume()
            assert await q.cancel(b"b") == worqr.CancelCount(1, 0, 0)
            assert [info.name for info in await mesh.queues()] == ["Q1"]
            assert await q.cancel_all(wait=1) == worqr.CancelCount(2504, 0, 0)
            await q.enqueue(b"e")
            await q.delete()
            assert (await q.info()).waiting == 0

    anywhere(main)


def test_a_job(anywhere: Run, mesh: worqr.Mesh) -> None:
    async def main() -> None:
        async with connected(mesh):
            q = mesh.queue("Q1")
            job = await q.dispatch(b"a", id="report", run_at=datetime.now(UTC) + timedelta(hours=1), result_ttl=60)
            skipped = await q.dispatch(b"b", id="report", if_exists="skip")
            assert (job.outcome, skipped.outcome) == ("created", "unchanged")
            with pytest.raises(worqr.Duplicate):
                await q.dispatch(b"b", id="report", if_exists="raise")
            for timeout in (0, 0.01):
                with pytest.raises(worqr.ResultTimeout):
                    await job.result(timeout)
            assert await q.job("report").cancel(reason="enough", wait=1) == worqr.CancelCount(1, 0, 0)
            with pytest.raises(worqr.JobCancelled, match="enough"):
                await job.result()
            with pytest.raises(worqr.NoResult):
                await q.job("unknown").result()

    anywhere(main)


def test_a_cancel_that_waits(anywhere: Run, app: App) -> None:
    async def main() -> None:
        async with connected(app.mesh):
            job = await app.hold.options(id="one").dispatch("one")
            other = await app.hold.dispatch("other")
            for each in (job, other):
                await until(lambda each=each: _progress(each), 0.5)  # type: ignore[misc]  # it has begun
            assert await job.cancel(reason="enough", wait=PATIENCE) == worqr.CancelCount(0, 1, 1)
            assert app.ended == ["cancel"]
            with pytest.raises(worqr.JobCancelled, match="enough"):
                await job.result(PATIENCE)
            assert await app.hold.queue.cancel_all(wait=PATIENCE) == worqr.CancelCount(0, 1, 1)
            assert app.ended == ["cancel", "cancel"]

    with app.serving():
        anywhere(main)


async def _progress(job: worqr.Job[Any]) -> float | None:
    return (await job.status()).progress


def test_watching_a_job(anywhere: Run, app: App) -> None:
    async def main() -> None:
        async with connected(app.mesh):
            job = await app.hold.dispatch("half")
            seen: list[str] = []
            async with job.watch() as states:
                async for status in states:
                    seen.append(status.state)
                    if status.message == "half":
                        assert status.progress == 0.5
                        await job.cancel()
            assert seen[-1] == "cancelled"
            assert "active" in seen

    with app.serving():
        anywhere(main)


def test_events(anywhere: Run, mesh: worqr.Mesh) -> None:
    async def main() -> None:
        async with connected(mesh):
            q = mesh.queue("Q1")
            async with q.events() as events, q.events() as slow:
                await q.enqueue(b"a", b"b")
                await q.pause()
                await q.resume()
                assert await anext(events) == worqr.Event("Q1", "enqueued", 2)
                assert await anext(events) == worqr.Event("Q1", "paused", 1)
                assert await anext(events) == worqr.Event("Q1", "resumed", 1)
                for _ in range(1100):
                    await q.enqueue(b"c")
                await q.enqueue(b"d", b"e", b"f")
                while (await anext(events)).count != 3:
                    pass
                seen = [await anext(slow)]
                while seen[-1].count != 3:
                    seen.append(await anext(slow))
                assert len(seen) == 1000
                await q.enqueue(b"left")
            assert [event async for event in events] == []  # it ends with its block

    anywhere(main)


def test_tasks_that_share_an_iterator_of_events_get_each_event_once(mesh: worqr.Mesh) -> None:
    seen: list[int] = []

    async def main() -> None:
        async with mesh.connect():
            q = mesh.queue("Q1")
            async with q.events() as events, asyncio.TaskGroup() as group:

                async def listen() -> None:
                    async for event in events:
                        seen.append(event.count)

                listening = [group.create_task(listen()) for _ in range(3)]
                for n in range(1, 11):
                    await q.enqueue(*[b"a"] * n)
                await come(lambda: len(seen) == 10)
                for each in listening[:2]:
                    await ends_by_cancelling(each)
                await come(lambda: len(events._waiters) == 1)  # type: ignore[attr-defined]
                await q.enqueue(*[b"a"] * 11)
                await come(lambda: len(seen) == 11)
                listening[2].cancel()

    bounded(main)
    assert sorted(seen) == list(range(1, 12))


def test_what_was_set_aside(anywhere: Run, app: App) -> None:
    async def main() -> None:
        failed = app.fail.queue.failed
        async with connected(app.mesh):
            await app.mesh.enqueue_many(app.fail.call(str(n)) for n in range(20))
            await app.add.queue.enqueue(b"not json")
            await until(lambda: _entries(failed), 20)
            await until(lambda: _entries(app.add.queue.undecodable), 1)
            entries = await failed.list(5)
            assert {entry.error.message for entry in await failed.list()} == {str(n) for n in range(20)}
            assert app.fail.decode(entries[0].task).args == (entries[0].error.message,)
            assert await failed.drop(entries[0].id, entries[1].id) == 2
            await app.fail.queue.pause()
            assert await failed.retry(entries[2].id) == 1
            assert await failed.retry_all(limit=3) == 3
            assert await failed.drop_all(error="Failure") == 14
            assert await app.fail.queue.count() == 4
            assert await app.fail.queue.cancel_all() == worqr.CancelCount(4, 0, 0)
            assert await app.add.queue.undecodable.drop_all() == 1
            await app.fail.queue.resume()

    with app.serving():
        anywhere(main)


async def _entries(aside: Any) -> int:
    return len(await aside.list())


def test_the_mesh(anywhere: Run, app: App) -> None:
    app.mesh.every(3600, app.add.call(1, 2), name="hourly")

    async def main() -> None:
        async with connected(app.mesh):
            workers = await app.mesh.workers()
            assert [sorted(worker.queues) for worker in workers] == [["add", "fail", "hold"]]
            (schedule,) = await app.mesh.schedules()
            assert schedule.name == "hourly"
            await app.mesh.pause_schedule("hourly")
            assert (await app.mesh.schedules())[0].paused
            await app.mesh.pause_schedule("hourly", paused=False)
            with pytest.raises(worqr.UsageError, match="did you mean"):
                await app.mesh.pause_schedule("hurly")

    with app.serving():
        anywhere(main)


# Cancelling, under asyncio


async def ends_by_cancelling(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_what_is_cancelled_before_it_was_sent_is_withdrawn(new_mesh: NewMesh, own_server: Server) -> None:
    mesh = new_mesh()

    async def main() -> None:
        async with mesh.connect():
            q = mesh.queue("Q1")
            await q.enqueue(b"before")
            own_server.stop()
            waiting = [asyncio.create_task(q.enqueue(b"away")) for _ in range(10)]
            await come(lambda: mesh._client.link._client.connector.state.name != "READY")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await q.enqueue(b"withdrawn")
            for each in waiting:
                await ends_by_cancelling(each)
            own_server.start()
            await q.enqueue(b"after")
            tasks = await q.tasks()
            assert b"withdrawn" not in tasks
            assert {b"before", b"after"} <= {*tasks}

    bounded(main)


def test_what_is_cancelled_after_it_was_sent_takes_effect_and_its_reply_is_nobodys(
    new_mesh: NewMesh, proxy: FaultProxy
) -> None:
    mesh = new_mesh(url=proxy.url)

    async def main() -> None:
        async with mesh.connect():
            q = mesh.queue("Q1")
            await q.enqueue(b"before")
            held = proxy.hold_reply(matching="xyzzy", on="data")
            sending = asyncio.create_task(q.dispatch(b"xyzzy"))
            await come(lambda: held.fired)
            await ends_by_cancelling(sending)
            counting = asyncio.create_task(q.count())
            held.release()
            assert await counting == 2
            assert mesh._client.link.connections == 1
            assert await q.cancel_all() == worqr.CancelCount(2, 0, 0)

    bounded(main)


def test_who_was_cancelled_already_sends_nothing(mesh: worqr.Mesh) -> None:
    async def main() -> None:
        async with mesh.connect():
            q = mesh.queue("Q1")

            async def enqueue() -> None:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
                await q.enqueue(b"a")

            with pytest.raises(asyncio.CancelledError):
                await asyncio.create_task(enqueue())
            assert await q.count() == 0

    bounded(main)


WAITS: dict[str, Callable[[App], Coroutine[Any, Any, object]]] = {
    "result": lambda app: app.hold.job("one").result(),
    "result with a timeout": lambda app: app.hold.job("one").result(PATIENCE),
    "cancel": lambda app: app.hold.job("one").cancel(wait=PATIENCE),
    "watch": lambda app: _follow(app.hold.job("one").watch()),
    "events": lambda app: _follow(app.hold.queue.events()),
}


async def _follow(opened: Any) -> None:
    async with opened as steps:
        async for _ in steps:
            pass


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
@pytest.mark.parametrize("at", [0, 1, 2, 3, 5, 8, None], ids="turn {}".format)
def test_a_wait_that_is_cancelled_at_any_moment_unsubscribes(
    app: App, server: Server, prefix: str, wait: Callable[[App], Coroutine[Any, Any, object]], at: int | None
) -> None:
    async def main() -> None:
        async with app.mesh.connect():
            await app.hold.options(id="one", delay=3600).dispatch("one")
            await app.hold.options(id="other").dispatch("other")
            waiting = asyncio.create_task(wait(app))
            if at is None:
                await come(lambda: waiting.done() or channels())
            else:
                for _ in range(at):
                    await asyncio.sleep(0)
            waiting.cancel()
            with suppress(asyncio.CancelledError):
                await waiting
            await come(lambda: not channels())
            assert await app.hold.queue.cancel_all() in (worqr.CancelCount(1, 0, 0), worqr.CancelCount(2, 0, 0))

    def channels() -> list[bytes]:
        return server.look.pubsub_channels(f"{prefix}:*")  # type: ignore[no-any-return]

    bounded(main)


def test_one_failure_in_a_group_of_tasks_cancels_the_waits_of_the_others(app: App) -> None:
    async def main() -> None:
        async with app.mesh.connect():
            job = await app.hold.dispatch("one")
            with pytest.raises(ExceptionGroup) as caught:
                async with asyncio.TaskGroup() as group:
                    group.create_task(job.result())
                    group.create_task(_follow(job.watch()))
                    group.create_task(_raise(app))
            assert caught.group_contains(ZeroDivisionError, depth=1)
            assert (await job.cancel()).waiting == 1

    bounded(main)


async def _raise(app: App) -> None:
    await app.hold.queue.count()
    raise ZeroDivisionError


def test_a_timeout_around_any_call_ends_it(new_mesh: NewMesh, own_server: Server) -> None:
    app = App(new_mesh())
    q = app.mesh.queue("Q1")
    calls: list[Callable[[], Coroutine[Any, Any, object]]] = [
        *(lambda: app.add.enqueue(1, 2), lambda: app.add.dispatch(1, 2), lambda: q.enqueue(b"a"), q.count, q.info),
        *(lambda: q.job("a").result(), lambda: q.job("a").cancel(wait=PATIENCE), lambda: q.cancel_all(wait=1)),
        *(lambda: app.mesh.enqueue_many([app.add.call(1, 2)]), app.mesh.queues, q.failed.list),
        *(lambda: _follow(q.events()), lambda: _follow(q.job("a").watch())),
    ]

    async def main() -> None:
        async with app.mesh.connect():
            await q.count()
            own_server.pause()
            try:
                for call in calls:
                    with pytest.raises(TimeoutError) as caught:
                        async with asyncio.timeout(0.02):
                            await call()
                    assert not isinstance(caught.value, worqr.WorqrError)
                    task = asyncio.current_task()
                    assert task is not None
                    assert task.cancelling() == 0
                with anyio.move_on_after(0.02) as scope:
                    await q.count()
                assert scope.cancelled_caught
            finally:
                own_server.resume()
            await q.info()

    bounded(main)


def test_a_timeout_of_the_caller_and_of_the_call_at_one_moment(
    mesh: worqr.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifications, "POLL_EVERY", 0.001)
    chance = random.Random(5)

    async def main() -> None:
        async with mesh.connect():
            job = await mesh.queue("Q1").dispatch(b"a", result_ttl=60)

            async def wait() -> str:
                moment = chance.uniform(0, 0.02)
                try:
                    async with asyncio.timeout(moment):
                        await job.result(moment)
                except worqr.ResultTimeout:
                    return "ours"
                except TimeoutError:
                    return "theirs"
                finally:
                    task = asyncio.current_task()
                    assert task is not None
                    assert task.cancelling() == 0
                return "neither"

            found: set[str] = set()
            for _ in range(5):
                found.update(await asyncio.gather(*(wait() for _ in range(40))))
            assert "neither" not in found
            await job.cancel()

    bounded(main)


def test_cancelled_callers_get_no_answers_of_others(mesh: worqr.Mesh) -> None:
    async def main() -> None:
        chance = random.Random(3)
        async with mesh.connect():
            for n in range(20):
                await mesh.queue(f"Q{n}").enqueue(*[b"%d" % n] * (n + 1))

            async def ask(n: int) -> int:
                for _ in range(30):
                    with suppress(TimeoutError):
                        async with asyncio.timeout(chance.uniform(0, 0.01)):
                            assert await mesh.queue(f"Q{n}").count() == n + 1
                            assert await mesh.queue(f"Q{n}").peek() == b"%d" % n
                return 1

            assert sum(await asyncio.gather(*(ask(n) for n in range(20) for _ in range(5)))) == 100
            assert mesh._client.link.connections == 1

    bounded(main)


# Servers that are cut off, and away


def test_what_is_enqueued_while_connections_are_cut_is_there_once(new_mesh: NewMesh, proxy: FaultProxy) -> None:
    mesh = new_mesh(url=proxy.url)
    cuts = 0

    async def main() -> None:
        async with mesh.connect():
            q = mesh.queue("Q1")

            async def produce(who: int) -> None:
                for n in range(50):
                    await q.enqueue(b"%d.%d" % (who, n))

            async def cut() -> None:
                nonlocal cuts
                while True:
                    await asyncio.sleep(0.02)
                    cuts += await asyncio.to_thread(proxy.cut, "data")

            cutting = asyncio.create_task(cut())
            await asyncio.gather(*(produce(who) for who in range(20)))
            await come(lambda: cuts)
            await ends_by_cancelling(cutting)
            tasks = await q.tasks(10_000)
            assert sorted(tasks) == sorted(b"%d.%d" % (who, n) for who in range(20) for n in range(50))

    bounded(main)


def test_a_result_comes_through_cut_connections(new_mesh: NewMesh, proxy: FaultProxy, server: Server) -> None:
    app = App(new_mesh(url=proxy.url))
    peer = App(new_mesh())

    async def main() -> None:
        async with app.mesh.connect():
            job = await app.add.dispatch(1, 2)
            waiting = asyncio.create_task(job.result(PATIENCE))
            await come(lambda: server.look.pubsub_channels(f"{app.mesh.prefix}:*"))
            for _ in range(3):
                await asyncio.to_thread(proxy.cut)
            stack = ExitStack()
            await asyncio.to_thread(stack.enter_context, peer.serving())
            try:
                assert await waiting == 3
            finally:
                await asyncio.to_thread(stack.close)

    bounded(main)


def test_a_server_that_is_away_is_unavailable(new_mesh: NewMesh, own_server: Server) -> None:
    mesh = new_mesh()

    async def main() -> None:
        q = mesh.queue("Q1")
        async with mesh.connect():
            await q.count()
            have_patience(mesh, 4)
            own_server.stop()
            counting = asyncio.create_task(q.count())
            await come(lambda: mesh._client.link._client.connector.state.name != "READY")
            waits = counting, q.enqueue(b"a"), _follow(q.events()), mesh.enqueue_many([mesh.call("Q1", a=1)]), connect()
            errors = await asyncio.gather(*waits, return_exceptions=True)
            assert {type(error) for error in errors} == {worqr.Unavailable}
            assert errors[1].sent is False
            own_server.start()
            await until(lambda: _counted(q))
        with pytest.raises(worqr.UsageError, match="not connected"):
            await q.count()

    async def connect() -> None:
        async with new_mesh(patience=0.1).connect():
            pytest.fail("it cannot be connected")

    bounded(main)


async def _counted(queue: worqr.Queue) -> bool:
    try:
        return await queue.count() == 0
    except worqr.Unavailable:
        return False


# Connecting, and loops


def connections(server: Server, app: str) -> list[str]:
    return sorted(c["name"] for c in server.look.client_list() if c["name"].startswith(f"worqr:{app}:"))


def test_nested_and_parallel_connects_share_one_link(run: Run, new_mesh: NewMesh, server: Server) -> None:
    mesh = new_mesh(app="shared")

    async def use(n: int) -> None:
        async with mesh.connect():
            await mesh.queue("Q1").enqueue(b"%d" % n)
            assert connections(server, "shared") == ["worqr:shared:data"]

    async def main() -> None:
        async with mesh.connect():
            link = mesh._client.link
            async with mesh.connect():
                assert mesh._client.link is link
            await use(0)
            assert mesh._client.link is link
        with pytest.raises(worqr.UsageError, match="not connected here"):
            await mesh.queue("Q1").count()

    async def in_parallel() -> None:
        await asyncio.gather(*(use(n) for n in range(20)))

    run(main)
    bounded(in_parallel)


def test_each_loop_has_its_link(new_mesh: NewMesh, server: Server) -> None:
    mesh = new_mesh(app="loops")
    here = threading.Barrier(5, timeout=PATIENCE)
    links: list[object] = []

    async def use() -> None:
        async with mesh.connect():
            links.append(mesh._client.link)
            await mesh.queue("Q1").enqueue(b"a")
            here.wait()  # noqa: ASYNC251, RUF100 - the loops shall stand side by side
            await mesh.queue("Q1").enqueue(b"b")

    def block() -> None:
        worqr.sync(mesh.queue("Q1").enqueue, b"a")
        here.wait()
        worqr.sync(mesh.queue("Q1").enqueue, b"b")

    failed: list[BaseException] = []

    def noted(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    works = [lambda: asyncio.run(use()), lambda: asyncio.run(use()), lambda: trio.run(use), block]
    threads = [threading.Thread(target=noted, args=(each,)) for each in works]
    for thread in threads:
        thread.start()
    here.wait()
    for thread in threads:
        thread.join(PATIENCE)
    mesh.close()
    assert not failed
    assert len({*links}) == 3
    assert server.look.llen(f"{mesh.prefix}:{{Q1}}") == 8


def test_a_guest_and_its_host_have_each_their_link(mesh: worqr.Mesh) -> None:
    links: list[object] = []

    async def guest() -> None:
        async with mesh.connect():
            links.append(mesh._client.link)
            await mesh.queue("Q1").enqueue(b"b")

    async def main() -> None:
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        async with mesh.connect():
            links.append(mesh._client.link)
            trio.lowlevel.start_guest_run(
                guest,
                run_sync_soon_threadsafe=loop.call_soon_threadsafe,
                done_callback=ended.set_result,
                host_uses_signal_set_wakeup_fd=True,
            )
            while not ended.done():
                await mesh.queue("Q1").count()
            ended.result().unwrap()
            assert await mesh.queue("Q1").count() == 1

    bounded(main)
    assert len({*links}) == 2


def test_connecting_that_is_cancelled_leaves_nothing(new_mesh: NewMesh, own_server: Server) -> None:
    mesh = new_mesh()

    async def main() -> None:
        own_server.pause()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05), mesh.connect():
                pytest.fail("it cannot be connected")
        own_server.resume()
        await come(lambda: not our_threads())

        async def connect() -> None:
            async with mesh.connect():
                await asyncio.get_running_loop().create_future()

        for turns in range(10):
            connecting = asyncio.create_task(connect())
            for _ in range(turns):
                await asyncio.sleep(0)
            await ends_by_cancelling(connecting)
        await come(lambda: not our_threads())
        async with mesh.connect():
            assert await mesh.queue("Q1").count() == 0

    bounded(main)


def test_an_error_of_the_block_comes_out_as_it_is(mesh: worqr.Mesh) -> None:
    error = KeyError("of the application")

    async def main() -> None:
        async with mesh.connect(), mesh.connect():
            raise error

    with pytest.raises(KeyError) as caught:
        bounded(main)
    assert caught.value is error


def test_what_waits_when_the_loop_ends_is_cancelled(mesh: worqr.Mesh) -> None:
    ended: list[str] = []
    kept: list[object] = []

    async def main() -> None:
        connected = mesh.connect()
        await connected.__aenter__()
        job = await mesh.queue("Q1").dispatch(b"a", id="a", result_ttl=60)

        async def wait(what: str, waits: Coroutine[Any, Any, object]) -> None:
            try:
                await waits
            finally:
                ended.append(what)

        tasks = [
            asyncio.create_task(wait("result", job.result())),
            asyncio.create_task(wait("watch", _follow(job.watch()))),
            asyncio.create_task(wait("events", _follow(mesh.queue("Q1").events()))),
        ]
        await come(lambda: mesh._client.link.subscriptions.connections)
        assert not any(task.done() for task in tasks)
        kept.extend((connected, *tasks))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(main())
        assert sorted(ended) == ["events", "result", "watch"]
        assert not mesh._client.connections.any
        kept.clear()
        gc.collect()
    worqr.sync(mesh.queue("Q1").job("a").cancel)
    mesh.close()


def test_a_connection_whose_loop_was_closed_ends_with_the_next_one(new_mesh: NewMesh, server: Server) -> None:
    mesh = new_mesh(app="left")
    kept: list[Any] = []

    async def connect() -> None:
        kept.append(connected := mesh.connect())
        await connected.__aenter__()
        await mesh.queue("Q1").enqueue(b"a")

    async def use() -> None:
        async with mesh.connect():
            assert await mesh.queue("Q1").count() == 1
            await come(lambda: connections(server, "left") == ["worqr:left:data"])
            await kept[0].__aexit__(None, None, None)  # who leaves that late harms nobody
            assert await mesh.queue("Q1").count() == 1

    loop = asyncio.new_event_loop()
    loop.run_until_complete(connect())
    loop.close()
    link = next(iter(mesh._client.connections._by_loop.values())).link
    assert mesh._client.connections.any
    bounded(use)
    assert not mesh._client.connections.any
    assert link._client.ended is not None


def test_a_connection_whose_loop_was_closed_ends_with_its_mesh(server: Server, prefix: str) -> None:
    kept: list[Any] = []

    async def connect() -> Link:
        mesh = worqr.Mesh(server.url, prefix=prefix)
        kept.append(connected := mesh.connect())
        await connected.__aenter__()
        return client_of(mesh).link

    loop = asyncio.new_event_loop()
    link = loop.run_until_complete(connect())
    loop.close()
    assert not link.has_ended
    kept.clear()
    gc.collect()
    assert link.has_ended


def test_a_mesh_is_connected_again_and_again_by_new_loops(mesh: worqr.Mesh) -> None:
    async def use() -> int:
        async with mesh.connect():
            await mesh.queue("Q1").enqueue(b"a")
            return await mesh.queue("Q1").count()

    assert [bounded(use) for _ in range(10)] == list(range(1, 11))


def test_a_block_may_end_in_another_task_than_it_began_in(mesh: worqr.Mesh) -> None:
    async def main() -> None:
        connected = mesh.connect()
        await asyncio.create_task(connected.__aenter__())
        await mesh.queue("Q1").enqueue(b"a")
        await asyncio.create_task(connected.__aexit__(None, None, None))
        assert not mesh._client.connections.any

    bounded(main)


def test_it_needs_no_asyncio_before_asyncio_is_used(spawn: Callable[..., Child]) -> None:
    child = spawn(
        """
        import sys
        import worqr

        mesh = worqr.Mesh()
        try:
            mesh.connect().__aenter__().send(None)
        except worqr.UsageError:
            print("asyncio" in sys.modules)
        """,
        fresh=True,
    )

    async def line() -> str:
        return await child.line()

    assert trio.run(line) == "False"


def test_handlers_on_the_asyncio_loop_of_a_peer_may_connect(app: App) -> None:
    @app.mesh.task(name="relay", runs_in="asyncio", result_ttl=60)
    async def relay(n: int) -> int:
        async with app.mesh.connect():
            job = await app.add.dispatch(n, n)
            return await job.result(PATIENCE)

    async def main() -> None:
        async with app.mesh.connect():
            jobs = [await relay.dispatch(n) for n in range(10)]
            assert [await job.result(PATIENCE) for job in jobs] == [n + n for n in range(10)]

    with app.serving():
        bounded(main)


def test_plain_threads_of_an_asyncio_program_have_sync(app: App) -> None:
    async def main() -> None:
        async with app.mesh.connect():
            await asyncio.to_thread(worqr.sync, app.add.enqueue, 1, 2)
            with pytest.raises(worqr.UsageError, match=r"await add\.enqueue.*async with mesh\.connect\(\)"):
                worqr.sync(app.add.enqueue, 1, 2)
            assert await app.add.queue.count() == 1
            await asyncio.to_thread(app.mesh.close)

    bounded(main)


# The embedded server


def exists(path: str) -> bool:
    return Path(path).exists()


@pytest.fixture
def of_our_own(new_mesh: NewMesh, no_bench: None) -> worqr.Mesh:
    return new_mesh(url="embedded:")


def test_the_embedded_server_runs_as_long_as_somebody_is_connected(run: Run, of_our_own: worqr.Mesh) -> None:
    mesh = of_our_own

    async def main() -> None:
        for _ in range(2):
            async with mesh.connect():
                path = mesh._client.link.settings.address.path
                async with mesh.connect():
                    assert await mesh.queue("Q1").count() == 0
                await mesh.queue("Q1").enqueue(b"a")
                assert exists(path)
            assert not exists(path)

    run(main)


def test_all_who_connect_at_once_get_one_embedded_server(of_our_own: worqr.Mesh) -> None:
    async def use() -> str:
        async with of_our_own.connect():
            await of_our_own.queue("Q1").enqueue(b"a")
            return of_our_own._client.link.settings.address.path

    async def main() -> None:
        async with of_our_own.connect():
            pass
        paths = await asyncio.gather(*(use() for _ in range(10)))
        assert not any(exists(path) for path in paths)

    bounded(main)
    assert not _holders()


def _holders() -> int:
    return sum(shared.holders for shared in embedded._shared.values())


@pytest.mark.parametrize("at", [0.0, 0.001, 0.01, 0.03, 0.1])
def test_starting_an_embedded_server_that_is_cancelled_leaves_none(of_our_own: worqr.Mesh, at: float) -> None:
    async def main() -> None:
        async def connect() -> None:
            async with of_our_own.connect():
                await asyncio.get_running_loop().create_future()

        connecting = asyncio.create_task(connect())
        await asyncio.sleep(at)
        await ends_by_cancelling(connecting)
        assert not _holders()

    bounded(main)


def test_an_embedded_server_is_let_go_of_also_when_that_is_cancelled(of_our_own: worqr.Mesh) -> None:
    async def main() -> None:
        leave = asyncio.Event()

        async def connect() -> None:
            async with of_our_own.connect():
                await leave.wait()

        connecting = asyncio.create_task(connect())
        await come(lambda: of_our_own._client.connections.any)
        await asyncio.sleep(0)
        leave.set()
        await come(lambda: not of_our_own._client.connections.any)
        connecting.cancel()
        with suppress(asyncio.CancelledError):
            await connecting
        assert not _holders()

    bounded(main)


def test_an_embedded_server_of_the_applications_own(run: Run) -> None:
    async def main() -> None:
        async with embedded.open_embedded() as server:
            assert exists(server.socket_path)
            async with worqr.Mesh(server.url).connect():
                pass
        assert not exists(server.socket_path)

    run(main)


def test_an_embedded_server_of_the_applications_own_that_is_cancelled() -> None:
    before = {*embedded._leashes}

    async def main() -> None:
        servers: list[embedded.EmbeddedServer] = []

        async def serve() -> None:
            async with embedded.open_embedded() as server:
                servers.append(server)
                await asyncio.get_running_loop().create_future()

        for wait in (True, False):
            serving = asyncio.create_task(serve())
            await (come(lambda: servers) if wait else asyncio.sleep(0.01))
            await ends_by_cancelling(serving)
        assert not any(exists(server.socket_path) for server in servers)
        assert embedded._leashes == before

    bounded(main)
