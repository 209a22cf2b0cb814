"""Where handlers run, as `serve` is told: what limits each place, and what is refused."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import trio

import worqr
from tests.peer.tools import Held, eventually, until


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
            info = await mesh.queue("Q1").info()
            assert (info.waiting, info.running) == (3, 2)
            assert (peer.health().running, (await mesh.queue("Q2").info()).waiting) == (2, 1)
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
