"""The lifespan of a peer: what it holds is there before anything runs and until all has ended, and handlers see it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import trio

import worqr
from tests.peer.conftest import NewMesh
from tests.peer.tools import QUICK, Held, Runs, at_most, eventually, until


@dataclass
class Pool:
    """What handlers need: equal to any other of its kind, open while its peer lives."""

    open: bool = False
    story: list[str] = field(default_factory=list, compare=False)


def life_of(*pools: Pool) -> Any:
    """A lifespan that gives the next of `pools`."""
    coming = iter(pools)

    @asynccontextmanager
    async def lifespan() -> AsyncGenerator[Pool]:
        pool = next(coming)
        pool.open = True
        pool.story.append("entered")
        try:
            yield pool
        except BaseException as error:
            pool.story.append(type(error).__name__)
            raise
        finally:
            pool.open = False
            pool.story.append("left")

    return lifespan


async def test_it_is_there_before_the_first_run_and_after_the_last(new_mesh: NewMesh) -> None:
    pool = Pool()
    mesh: worqr.Mesh[Pool] = new_mesh(lifespan=life_of(pool))
    gate = trio.Event()

    @mesh.task(name="Q1")
    async def note(n: int) -> None:
        assert mesh.state is worqr.current().state is pool
        assert pool.open
        pool.story.append(f"began {n}")
        await gate.wait()
        assert pool.open
        assert mesh.state is pool
        pool.story.append(f"ended {n}")

    async with mesh.connect():
        await note.enqueue(1)
        async with trio.open_nursery() as nursery, mesh.join(grace=60) as peer:
            assert mesh.state is pool
            await until(lambda: pool.story == ["entered", "began 1"])
            nursery.start_soon(peer.drain)
            await until(lambda: peer.health().why == "the peer is leaving")
            gate.set()
        assert pool.story == ["entered", "began 1", "ended 1", "left"]


async def test_threads_failure_handlers_and_claims_see_it_too(new_mesh: NewMesh, expects_left: Any) -> None:
    pool = Pool()
    mesh: worqr.Mesh[Pool] = new_mesh(lifespan=life_of(pool))
    seen: list[tuple[str, object]] = []

    @mesh.task(name="Q1")
    def note() -> None:
        seen.append(("thread", worqr.current().state))
        raise worqr.Failure("on purpose")

    @note.on_failure
    async def gave_up(record: worqr.Failed) -> None:
        seen.append(("failure", worqr.current().state))

    expects_left("{Q1}:failed", "{Q1}:aside*")
    async with mesh.join() as peer, peer.work("Q2") as claims:
        await note.enqueue()
        await until(lambda: len(seen) == 2)
        await mesh.queue("Q2").enqueue(b"x")
        (claim,) = await claims.take(1, within=20)
        seen.append(("claim", claim.state))
        await claim.finish()
        await eventually(note.queue.failures.running, [])
    assert seen == [("thread", pool), ("failure", pool), ("claim", pool)]
    assert all(state is pool for _, state in seen)


async def test_two_peers_have_a_state_each(new_mesh: NewMesh) -> None:
    pools = [Pool(), Pool()]
    mesh: worqr.Mesh[Pool] = new_mesh(lifespan=life_of(*pools))
    outer, inner = mesh.join(), mesh.join()
    await outer.__aenter__()
    assert mesh.state is pools[0]
    await inner.__aenter__()
    assert mesh.state is pools[1]
    await inner.__aexit__(None, None, None)
    assert [pool.open for pool in pools] == [True, False]
    assert mesh.state is pools[0]
    await outer.__aexit__(None, None, None)
    assert [pool.story for pool in pools] == [["entered", "left"]] * 2


async def test_each_run_sees_the_state_of_its_own_peer(new_mesh: NewMesh) -> None:
    pools = [Pool(), Pool()]
    mesh: worqr.Mesh[Pool] = new_mesh(lifespan=life_of(*pools))
    states: dict[str, Any] = {}

    async def note() -> None:
        states[worqr.current().queue] = worqr.current().state

    functions = [mesh.task(name=name)(note) for name in ("Q1", "Q2")]
    async with mesh.join(only=["Q1"]), mesh.join(only=["Q2"]):
        for function in functions:
            await function.enqueue()
        await until(lambda: len(states) == 2, within=20)
    assert states["Q1"] is pools[0]
    assert states["Q2"] is pools[1]


async def test_there_is_none_without_a_lifespan(mesh: worqr.Mesh) -> None:
    assert mesh.state is None
    seen = Runs()
    async with mesh.join() as peer, trio.open_nursery() as nursery:
        await nursery.start(peer.serve, "Q1", seen)
        await mesh.queue("Q1").enqueue(b"x")
        await seen.wait(1)
        assert mesh.state is seen.contexts[0].state is None
        nursery.cancel_scope.cancel()


async def test_outside_of_a_join_there_is_no_state(new_mesh: NewMesh) -> None:
    mesh = new_mesh(lifespan=life_of(Pool()))
    words = "mesh.state is what the lifespan gives, so it is there inside `async with mesh.join"
    with pytest.raises(worqr.UsageError, match=words):
        _ = mesh.state
    async with mesh.connect():
        with pytest.raises(worqr.UsageError, match=words):
            _ = mesh.state
        async with mesh.join():
            assert mesh.state == Pool(open=True)
        with pytest.raises(worqr.UsageError, match=words):
            _ = mesh.state


async def test_a_state_may_be_anything(new_mesh: NewMesh) -> None:
    class Unequal:
        def __eq__(self, other: object) -> bool:
            raise ValueError("the truth value of an array is ambiguous")

        __hash__ = None  # type: ignore[assignment]

    @asynccontextmanager
    async def lifespan() -> AsyncGenerator[object]:
        yield Unequal()

    mesh = new_mesh(lifespan=lifespan)
    async with mesh.join():
        async with mesh.join():
            assert isinstance(mesh.state, Unequal)
        assert isinstance(mesh.state, Unequal)


# Errors


async def test_an_error_on_the_way_in_is_the_join_s(new_mesh: NewMesh) -> None:
    @asynccontextmanager
    async def lifespan() -> AsyncGenerator[None]:
        raise KeyError("no database")
        yield

    mesh = new_mesh(lifespan=lifespan)
    runs = Runs()
    mesh.task(name="Q1")(runs.begin)
    with pytest.raises(KeyError, match="no database"):
        async with mesh.join():
            pytest.fail("it was entered")
    async with mesh.connect():
        assert await mesh.workers() == []


async def test_an_error_on_the_way_out_is_the_join_s(new_mesh: NewMesh) -> None:
    @asynccontextmanager
    async def lifespan() -> AsyncGenerator[None]:
        yield
        raise KeyError("the pool does not close")

    mesh = new_mesh(lifespan=lifespan)
    with pytest.raises(KeyError, match="does not close"):
        async with mesh.join():
            pass
    with pytest.raises(worqr.UsageError, match="not connected"):
        mesh._client.check_connected()


async def test_an_error_of_the_block_passes_through_it(new_mesh: NewMesh) -> None:
    pool = Pool()
    mesh = new_mesh(lifespan=life_of(pool))
    with pytest.raises(RuntimeError, match="the application's"):
        async with mesh.join():
            raise RuntimeError("the application's")
    assert pool.story == ["entered", "RuntimeError", "left"]


async def test_a_lifespan_may_suppress_an_error(new_mesh: NewMesh) -> None:
    @asynccontextmanager
    async def lifespan() -> AsyncGenerator[None]:
        with contextlib.suppress(KeyError):
            yield

    async with new_mesh(lifespan=lifespan).join():
        raise KeyError("of no interest")


async def test_cancelling_gives_back_what_runs_before_it_ends(new_mesh: NewMesh) -> None:
    pool, held = Pool(), Held()
    mesh = new_mesh(lifespan=life_of(pool))

    @mesh.task(name="Q1")
    async def hold(task: bytes, /) -> None:
        try:
            await held(task)
        finally:
            assert pool.open

    async with mesh.connect():
        await hold.enqueue(b"x")
        with trio.CancelScope() as scope:
            async with mesh.join():
                await held.wait(1)
                scope.cancel()
                await trio.sleep_forever()
        assert scope.cancelled_caught
        assert held.cancelled == [(b"x", "leaving")]
        assert pool.story == ["entered", "Cancelled", "left"]
        assert await hold.queue.tasks() == [b"x"]
        await hold.queue.delete()


async def test_it_may_hold_tasks_of_its_own(new_mesh: NewMesh, expects_left: Any) -> None:
    """A nursery in a lifespan, for what runs beside the handlers."""
    beats: list[int] = []

    async def beat() -> None:
        while True:
            beats.append(1)
            await trio.sleep(0.01)

    @asynccontextmanager
    async def lifespan() -> AsyncGenerator[trio.Nursery]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(beat)
            yield nursery
            nursery.cancel_scope.cancel()

    mesh = new_mesh(lifespan=lifespan)

    @mesh.task(name="Q1", retry=QUICK, result_ttl=60)
    async def count() -> int:
        return len(beats)

    async with at_most(50), mesh.join():
        assert isinstance(mesh.state, trio.Nursery)
        await until(lambda: len(beats) > 3)
        assert await (await count.dispatch()).result(timeout=20) > 3


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lifespan": 7}, "lifespan must be a function that gives a context manager, not 7"),
        ({"around_thread": "x"}, "around_thread must be a function that gives a context manager"),
        ({"process_lifespan": []}, "process_lifespan must be a function that gives a context manager"),
        ({"middleware": print}, "middleware must be a collection of async functions, not <built-in function print>"),
        (
            {"middleware": [print]},
            r"middleware must be async functions \(context, call_next\), not <built-in function print>",
        ),
        ({"middleware": [None]}, "middleware must be async functions"),
    ],
)
def test_what_cannot_be_is_refused_when_the_mesh_is_made(settings: Any, words: str) -> None:
    with pytest.raises(worqr.UsageError, match=words):
        worqr.Mesh(**settings)


async def no_decorator() -> AsyncGenerator[None]:
    yield


def test_a_forgotten_decorator_is_told() -> None:
    with pytest.raises(worqr.UsageError, match=r"lifespan must give .*: put @contextlib\.asynccontextmanager above"):
        worqr.Mesh(lifespan=no_decorator)  # type: ignore[arg-type]
