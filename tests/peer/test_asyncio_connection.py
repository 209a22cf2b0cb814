"""Handlers on asyncio use the mesh without connecting: their loop gets a connection of its own, which ends with it."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import trio

import worqr
from tests.peer.conftest import NewMesh
from tests.peer.tools import until
from tests.support.patience import PATIENCE
from tests.support.servers import Server
from worqr import testing
from worqr.client.client import ConnectionRegistry
from worqr.keys import QueueKeys, shards_of
from worqr.link import Link, LinkSettings


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The threads in which links were made."""
    made: list[str] = []
    new_link = ConnectionRegistry.new_link

    def note(connections: ConnectionRegistry, settings: LinkSettings) -> Link:
        made.append(threading.current_thread().name)
        return new_link(connections, settings)

    monkeypatch.setattr(ConnectionRegistry, "new_link", note)
    return made


async def test_a_handler_enqueues_dispatches_and_waits(new_mesh: NewMesh, links: list[str]) -> None:
    mesh, noted = new_mesh(runs_in="asyncio"), list[int]()

    @mesh.task(result_ttl=60)
    async def double(n: int) -> int:
        noted.append(n)
        return 2 * n

    @mesh.task(name="outer", result_ttl=60)
    async def outer() -> list[int]:
        await double.enqueue(1)
        await mesh.enqueue_many([double.call(2)])
        job = await double.dispatch(3)
        jobs = await mesh.dispatch_many([double.call(4)])
        found = [await job.result(PATIENCE), await jobs[0].result(PATIENCE)]
        async with (await double.options(delay=0.01).dispatch(5)).watch() as states:
            assert [status.state async for status in states][-1] == "finished"
        assert (await mesh.queue("outer").info()).running == 1
        return found

    async with mesh.join():
        assert await (await outer.dispatch()).result(PATIENCE) == [6, 8]
        await until(lambda: sorted(noted) == [1, 2, 3, 4, 5])
    assert links == ["MainThread", "worqr asyncio"]  # one for all runs


async def test_who_does_not_use_the_mesh_makes_no_connection(new_mesh: NewMesh, links: list[str]) -> None:
    mesh = new_mesh(runs_in="asyncio")

    @mesh.task(result_ttl=60)
    async def double(n: int) -> int:
        await asyncio.sleep(0)
        return 2 * n

    async with mesh.join():
        assert await (await double.dispatch(4)).result(PATIENCE) == 8
    assert links == ["MainThread"]


async def test_the_connection_ends_with_the_loop(new_mesh: NewMesh) -> None:
    mesh = new_mesh(runs_in="asyncio")
    before = {thread for thread in threading.enumerate() if thread.name.startswith("worqr")}

    @mesh.task(result_ttl=60)
    async def again(n: int) -> None:
        if n:
            await again.enqueue(n - 1)

    for _ in range(2):  # the next peer has another loop
        async with mesh.join():
            await (await again.dispatch(1)).result(PATIENCE)
            await until(lambda: len(mesh._client.connections._by_loop) == 2)  # pyright: ignore[reportPrivateUsage]
        await until(lambda: not mesh._client.connections.any)
        assert mesh._client.connections._hosted == {}  # pyright: ignore[reportPrivateUsage]
    await until(lambda: {t for t in threading.enumerate() if t.name.startswith("worqr")} <= before)


async def test_a_handler_that_connects_all_the_same_disconnects_nobody(new_mesh: NewMesh, links: list[str]) -> None:
    mesh = new_mesh(runs_in="asyncio")

    @mesh.task(result_ttl=60)
    async def outer() -> int:
        async with mesh.connect(), mesh.connect():
            inner = mesh.queue("Q1")
            await inner.enqueue(b"a")
        return await inner.enqueue(b"b")

    async with mesh.join():
        assert await (await outer.dispatch()).result(PATIENCE) == 1
        assert await mesh.queue("Q1").count() == 2
        await mesh.queue("Q1").delete()
    assert links == ["MainThread", "worqr asyncio"]


async def test_it_knows_the_shards_that_others_have_declared(new_mesh: NewMesh, server: Server, prefix: str) -> None:
    mesh, other = new_mesh(runs_in="asyncio"), new_mesh()

    @mesh.task(result_ttl=60)
    async def spread() -> None:
        await asyncio.gather(*(mesh.queue("wide").enqueue(b"x") for _ in range(8)))

    async with other.connect():
        wide = other.queue("wide", shards=4)
        assert await wide.count() == 0
        async with mesh.join():
            await (await spread.dispatch()).result(PATIENCE)
        lists = [keys.base for keys in shards_of(QueueKeys(prefix, "wide"), 4)]
        assert [server.look.llen(name) for name in lists] == [2, 2, 2, 2]
        await wide.delete()


async def test_a_loop_that_is_no_peers_is_not_connected(new_mesh: NewMesh) -> None:
    mesh = new_mesh(runs_in="asyncio")
    raised: list[Any] = []

    async def enqueue() -> None:
        await mesh.queue("Q1").enqueue(b"x")

    def elsewhere() -> None:
        try:
            asyncio.run(enqueue())
        except worqr.UsageError as error:
            raised.append(str(error))

    async with mesh.join():
        await trio.to_thread.run_sync(elsewhere)
    assert "this mesh is not connected here" in raised[0]


async def test_on_a_bench_it_goes_by_the_clock_of_the_bench() -> None:
    mesh = worqr.Mesh(runs_in="asyncio")

    @mesh.task
    async def outer() -> None:
        await later.options(delay=3600).dispatch()

    @mesh.task
    async def later() -> None: ...

    async with testing.bench(mesh) as bench:
        await bench.advance(1800)
        await outer.enqueue()
        assert (await bench.run_until_empty()).finished == 1
        await bench.advance(3599)
        assert (await bench.run_until_empty()).finished == 0
        await bench.advance(2)
        assert (await bench.run_until_empty()).finished == 1
        assert bench.sent(later) == [later.call()]
