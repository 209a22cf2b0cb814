"""A limit of one in three processes, of which the one that has the only place is killed, or frozen and thawed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import trio

import worqr
from tests.peer.tools import eventually
from tests.support.children import Child
from tests.support.patience import PATIENCE
from tests.support.servers import Server
from worqr.keys import QueueKeys

CHILD = Path(__file__).parent / "child_peer.py"


async def joined(spawn: Callable[..., Child], server: Server, prefix: str, count: int) -> dict[str, Child]:
    """Children that serve Q1, by their worker ids."""
    children = [spawn(CHILD, server.url, prefix, "Q1", env={"LIMIT": "1"}) for _ in range(count)]
    return {(await child.line_with("joined")).split()[1]: child for child in children}


async def runner(q: worqr.Queue, among: Collection[str]) -> str:
    """The worker, one of these, that runs the only task that runs."""
    with trio.fail_after(PATIENCE):
        while True:
            running = await q.running()
            assert len(running) <= 1, "the limit is exceeded"
            if running and running[0].worker in among:
                return running[0].worker
            await trio.sleep(0.02)


def limited(server: Server, prefix: str) -> int:
    with server.client() as client:
        return int(client.scard(QueueKeys(prefix, "Q1").limited))  # type: ignore[arg-type]


async def test_the_place_of_a_killed_worker_is_free_again(
    server: Server, prefix: str, spawn: Callable[..., Child]
) -> None:
    mesh, children = worqr.Mesh(server.url, prefix=prefix), await joined(spawn, server, prefix, 3)
    async with mesh.connect():
        q = mesh.queue("Q1")
        await q.enqueue(b"hold-1", b"ok-2", b"ok-3")
        children.pop(await runner(q, children)).kill()
        second = await runner(q, children)
        assert ((await q.info()).running, (await q.info()).waiting, limited(server, prefix)) == (1, 2, 1)
        assert (await q.cancel(b"hold-1", wait=PATIENCE)).acknowledged == 1
        await children[second].line_with("ended hold-1 cancel")
        await all_ended(q)
        assert limited(server, prefix) == 0
        await leave(children.values())


async def test_a_frozen_worker_frees_its_place_once(server: Server, prefix: str, spawn: Callable[..., Child]) -> None:
    mesh, children = worqr.Mesh(server.url, prefix=prefix), await joined(spawn, server, prefix, 2)
    async with mesh.connect():
        q = mesh.queue("Q1")
        await q.enqueue(b"hold-1", b"ok-2")
        first = await runner(q, children)
        zombie = children[first]
        zombie.pause()
        await runner(q, children.keys() - {first})
        zombie.resume()
        assert (await zombie.line_with("ended hold-1")).endswith("lost")
        with trio.fail_after(PATIENCE):  # under a new id
            while len([worker for worker in await mesh.workers() if worker.queues == {"Q1"}]) < 2:
                await trio.sleep(0.02)
        assert ((await q.info()).running, (await q.info()).waiting, limited(server, prefix)) == (1, 1, 1)
        await q.cancel(b"hold-1", wait=PATIENCE)
        await all_ended(q)
        assert limited(server, prefix) == 0
        await leave(children.values())


async def all_ended(q: worqr.Queue) -> None:
    await eventually(q.count, 0)
    await eventually(q.running, [])


async def leave(children: Iterable[Child]) -> None:
    for child in children:
        child.send("leave")
        assert await child.ended() == 0
