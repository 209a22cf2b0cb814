"""`Mesh(asyncio_lifespan=...)`: what handlers on asyncio need is opened on their loop, and closed there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
import trio

import worqr
from tests.peer.conftest import NewMesh
from tests.peer.tools import at_most, until
from tests.support.patience import PATIENCE
from worqr import testing


class Pool:
    """A connection pool as asyncio libraries make them: for the loop that it was made on."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.story: list[str] = ["opened"]

    async def fetch(self) -> None:
        assert asyncio.get_running_loop() is self.loop
        assert self.story[-1] != "closed"
        await asyncio.sleep(0)
        self.story.append("used")


def life_of(pools: list[Pool]) -> Any:
    @asynccontextmanager
    async def lifespan() -> AsyncGenerator[Pool]:
        pool = Pool()
        pools.append(pool)
        await asyncio.sleep(0)
        try:
            yield pool
        finally:
            await asyncio.sleep(0)
            pool.story.append("closed")

    return lifespan


async def test_handlers_on_asyncio_see_what_it_yields(new_mesh: NewMesh) -> None:
    pools: list[Pool] = []
    mesh = new_mesh(runs_in="asyncio", asyncio_lifespan=life_of(pools))
    gate = threading.Event()

    @mesh.task(name="Q1")
    async def use() -> None:
        pool: Pool = worqr.current().state
        await pool.fetch()
        await asyncio.to_thread(gate.wait, PATIENCE)
        await pool.fetch()

    async with mesh.connect():
        await use.enqueue()
        async with trio.open_nursery() as nursery, mesh.join(grace=60) as peer:
            await until(lambda: pools and pools[0].story == ["opened", "used"])
            nursery.start_soon(peer.drain)
            await until(lambda: peer._engine.leaving)
            gate.set()
    (pool,) = pools
    assert pool.story == ["opened", "used", "used", "closed"]
    assert pool.loop.is_closed()


async def test_each_handler_sees_the_state_of_its_own_loop(new_mesh: NewMesh, expects_left: Any) -> None:
    @asynccontextmanager
    async def on_trio() -> AsyncGenerator[str]:
        await trio.lowlevel.checkpoint()
        yield "of Trio"

    @asynccontextmanager
    async def on_asyncio() -> AsyncGenerator[str]:
        await asyncio.sleep(0)
        yield "of asyncio"

    mesh: worqr.Mesh[str] = new_mesh(lifespan=on_trio, asyncio_lifespan=on_asyncio)
    seen: dict[str, object] = {}

    @mesh.task(result_ttl=60)
    async def loop() -> str:
        return str(worqr.current().state)

    @mesh.task(runs_in="asyncio", result_ttl=60)
    async def aio() -> str:
        return str(worqr.current().state)

    @mesh.task(result_ttl=60)
    def thread() -> str:
        return str(worqr.current().state)

    @mesh.task(name="Q1", runs_in="asyncio")
    async def fail() -> None:
        raise worqr.Failure("on purpose")

    @fail.on_failure
    async def on_failure(failed: worqr.Failed) -> None:
        seen["failure"] = worqr.current().state

    expects_left("{Q1}:failed", "{Q1}:aside*")
    async with mesh.join():
        assert mesh.state == "of Trio"
        found = [await (await each.dispatch()).result(PATIENCE) for each in (loop, aio, thread)]
        assert found == ["of Trio", "of asyncio", "of Trio"]
        await fail.enqueue()
        await until(lambda: seen)
    assert seen == {"failure": "of asyncio"}


async def test_without_one_handlers_on_asyncio_see_what_lifespan_yields(new_mesh: NewMesh) -> None:
    @asynccontextmanager
    async def on_trio() -> AsyncGenerator[str]:
        yield "of Trio"

    mesh: worqr.Mesh[str] = new_mesh(lifespan=on_trio, runs_in="asyncio")

    @mesh.task(result_ttl=60)
    async def aio() -> str:
        return str(worqr.current().state)

    async with mesh.join():
        assert await (await aio.dispatch()).result(PATIENCE) == "of Trio"


async def test_it_may_use_the_mesh(new_mesh: NewMesh) -> None:
    noted: list[str] = []

    @asynccontextmanager
    async def lifespan() -> AsyncGenerator[None]:
        await note.enqueue("entered")
        yield
        await note.enqueue("left")

    mesh = new_mesh(runs_in="asyncio", asyncio_lifespan=lifespan)

    @mesh.task
    async def note(what: str) -> None:
        noted.append(what)

    for _ in range(2):
        async with mesh.join():
            await until(lambda: "entered" in noted)
    assert noted[:1] == ["entered"]
    async with mesh.connect():
        await note.queue.delete()


# When it fails


async def test_what_it_raises_at_its_begin_is_raised_by_join(new_mesh: NewMesh) -> None:
    raised = OSError("the database is down")

    @asynccontextmanager
    async def lifespan() -> AsyncGenerator[None]:
        await asyncio.sleep(0)
        raise raised
        yield

    mesh = new_mesh(asyncio_lifespan=lifespan)
    with pytest.raises(OSError, match="the database is down") as caught:
        async with mesh.join():
            raise AssertionError("not reached")
    assert caught.value is raised
    assert not mesh._client.connections.any
    await until(lambda: "worqr asyncio" not in {thread.name for thread in threading.enumerate()})


async def test_what_it_raises_at_its_end_is_raised_by_join(new_mesh: NewMesh) -> None:
    @asynccontextmanager
    async def lifespan() -> AsyncGenerator[None]:
        yield
        raise OSError("cannot close")

    with pytest.raises(OSError, match="cannot close"):
        async with new_mesh(asyncio_lifespan=lifespan).join():
            pass


async def test_an_error_of_the_block_comes_first_and_the_other_is_logged(
    new_mesh: NewMesh, caplog: pytest.LogCaptureFixture
) -> None:
    @asynccontextmanager
    async def lifespan() -> AsyncGenerator[None]:
        yield
        raise OSError("cannot close")

    with pytest.raises(ValueError, match="of the block"):
        async with new_mesh(asyncio_lifespan=lifespan).join():
            raise ValueError("of the block")
    assert "asyncio.raised: asyncio_lifespan raised an error while its worker left" in caplog.text
    assert "cannot close" in caplog.text


async def test_one_that_ends_by_itself_ends_the_peer(new_mesh: NewMesh, caplog: pytest.LogCaptureFixture) -> None:
    lost = threading.Event()

    async def watch() -> None:
        await asyncio.to_thread(lost.wait, PATIENCE)
        raise OSError("the connection is lost")

    @asynccontextmanager
    async def lifespan() -> AsyncGenerator[None]:
        async with asyncio.TaskGroup() as group:
            group.create_task(watch())
            yield

    async with at_most():
        with pytest.raises(ExceptionGroup) as caught:
            async with new_mesh(asyncio_lifespan=lifespan).join(grace=0) as peer:
                lost.set()
                await peer.wait()
    assert caught.group_contains(OSError, match="the connection is lost")
    assert "asyncio.ended: asyncio_lifespan has ended by itself" in caplog.text


async def test_one_that_a_handler_cancels_ends_the_peer(new_mesh: NewMesh) -> None:
    pools: list[Pool] = []
    mesh = new_mesh(runs_in="asyncio", asyncio_lifespan=life_of(pools))

    @mesh.task(name="Q1")
    async def cancel_all() -> None:
        for task in asyncio.all_tasks():
            if task is not asyncio.current_task():
                task.cancel()

    async with at_most():
        with pytest.raises(worqr.UsageError, match="has cancelled the task of asyncio_lifespan"):
            async with mesh.join(grace=0) as peer:
                await cancel_all.enqueue()
                await peer.wait()
    assert pools[0].story == ["opened", "closed"]


async def test_a_join_that_is_cancelled_meanwhile_ends_it(new_mesh: NewMesh) -> None:
    story: list[str] = []

    @asynccontextmanager
    async def lifespan() -> AsyncGenerator[None]:
        story.append("entering")
        try:
            await asyncio.sleep(3600)
        finally:
            story.append("cancelled")
        yield

    async def join() -> None:
        async with new_mesh(asyncio_lifespan=lifespan).join():
            raise AssertionError("not reached")

    async with at_most(), trio.open_nursery() as nursery:
        nursery.start_soon(join)
        await until(lambda: story)
        nursery.cancel_scope.cancel()
    assert story == ["entering", "cancelled"]


async def test_one_that_does_not_end_is_left_behind(
    new_mesh: NewMesh, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worqr.peer.executors.asyncio_loop.LEAVE_WITHIN", 0.1)
    go = threading.Event()

    @asynccontextmanager
    async def lifespan() -> AsyncGenerator[None]:
        yield
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.to_thread(go.wait, PATIENCE)

    async with at_most(), new_mesh(asyncio_lifespan=lifespan).join():
        pass
    assert "asyncio.stuck: asyncio_lifespan has not ended within 0.1 s" in caplog.text
    go.set()
    await until(lambda: "worqr asyncio" not in {thread.name for thread in threading.enumerate()})


# When it is used wrongly


@asynccontextmanager
async def needs_asyncio() -> AsyncGenerator[None]:
    await asyncio.sleep(0.01)
    yield


@asynccontextmanager
async def needs_trio() -> AsyncGenerator[None]:
    await trio.sleep(0.01)
    yield


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"lifespan": needs_asyncio}, "put what needs asyncio into Mesh(asyncio_lifespan=...)"),
        ({"asyncio_lifespan": needs_trio}, "put what needs Trio into Mesh(lifespan=...)"),
    ],
    ids=["asyncio in lifespan", "Trio in asyncio_lifespan"],
)
async def test_one_on_the_wrong_loop_says_so(new_mesh: NewMesh, settings: Any, remedy: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        async with new_mesh(**settings).join():
            pass
    (note,) = caught.value.__notes__
    assert remedy in note


async def test_an_error_of_the_block_gets_no_such_note(new_mesh: NewMesh) -> None:
    @asynccontextmanager
    async def lifespan() -> AsyncGenerator[None]:
        yield

    with pytest.raises(RuntimeError) as caught:
        async with new_mesh(lifespan=lifespan, asyncio_lifespan=lifespan).join():
            await asyncio.sleep(0.01)
    assert not hasattr(caught.value, "__notes__")


@contextmanager
def plain() -> Any:
    yield


async def generator() -> AsyncGenerator[None]:
    yield


async def coroutine() -> None: ...


async def of_a_web_framework(app: object) -> AsyncGenerator[None]:
    yield


@pytest.mark.parametrize("name", ["lifespan", "asyncio_lifespan"])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (7, "must be a function that gives a context manager, not 7"),
        (generator, "must give a context manager: put @contextlib.asynccontextmanager above"),
        (
            coroutine,
            "is a coroutine function: let it `yield` where it returns, and put @contextlib.asynccontextmanager",
        ),
        (asynccontextmanager(of_a_web_framework), "missing a required argument: 'app' .a lifespan of a web framework"),
    ],
    ids=["not callable", "generator", "coroutine", "arguments"],
)
def test_what_is_no_lifespan_is_refused(name: str, given: Any, message: str) -> None:
    with pytest.raises(worqr.UsageError, match=f"^{name} .*{message}"):
        worqr.Mesh(**{name: given})


@pytest.mark.parametrize("name", ["lifespan", "asyncio_lifespan"])
async def test_a_plain_context_manager_is_refused_by_join(new_mesh: NewMesh, name: str) -> None:
    with pytest.raises(worqr.UsageError, match=f"^{name} must give an async context manager, not _GeneratorContext"):
        async with new_mesh(**{name: plain}).join():
            pass


@pytest.mark.parametrize(
    ("settings", "options", "warned"),
    [
        ({}, {}, True),
        ({"runs_in": "asyncio"}, {}, False),
        ({}, {"runs_in": "asyncio"}, False),
    ],
)
async def test_a_warning_says_that_nobody_sees_what_it_yields(
    new_mesh: NewMesh, caplog: pytest.LogCaptureFixture, settings: Any, options: Any, warned: bool
) -> None:
    caplog.set_level(logging.WARNING)
    mesh = new_mesh(asyncio_lifespan=life_of([]), **settings)

    @mesh.task(**options)
    async def noop() -> None: ...

    async with mesh.join():
        pass
    assert ("use Mesh(runs_in='asyncio')" in caplog.text) is warned


async def test_it_is_entered_on_a_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[Pool] = []
    mesh = worqr.Mesh(runs_in="asyncio", asyncio_lifespan=life_of(pools))

    @mesh.task
    async def use() -> None:
        await worqr.current().state.fetch()

    async with testing.bench(mesh) as bench:
        await use.enqueue()
        assert (await bench.run_until_empty()).finished == 1
    assert [pool.story for pool in pools] == [["opened", "used", "closed"]]


def test_a_peer_in_a_thread_has_it_too(new_mesh: NewMesh) -> None:
    pools: list[Pool] = []
    mesh = new_mesh(runs_in="asyncio", asyncio_lifespan=life_of(pools))

    @mesh.task(result_ttl=60)
    async def use() -> None:
        await worqr.current().state.fetch()

    async def main() -> None:
        async with mesh.connect(), mesh.join_in_thread():
            await (await use.dispatch()).result(PATIENCE)

    asyncio.run(main())
    assert [pool.story for pool in pools] == [["opened", "used", "closed"]]
