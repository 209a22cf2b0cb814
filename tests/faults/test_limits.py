"""Limits under faults: the process that has the only place is killed or frozen, the leader is killed, scripts are forgotten."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import trio

import worqr
from tests.peer.tools import eventually, serving, until
from tests.support.children import Child
from tests.support.patience import PATIENCE
from tests.support.servers import Server
from worqr.keys import QueueKeys

CHILD = Path(__file__).parent / "child_peer.py"


async def joined(
    spawn: Callable[..., Child], server: Server, prefix: str, count: int, **limits: str
) -> dict[str, Child]:
    """Children that serve Q1, by their worker ids, with a limit of one unless `limits` has others."""
    children = [spawn(CHILD, server.url, prefix, "Q1", env=limits or {"LIMIT": "1"}) for _ in range(count)]
    return {(await child.line_with("joined")).split()[1]: child for child in children}


async def runner(q: worqr.Queue, among: Mapping[str, Child]) -> str:
    """The worker, one of these, whose handler runs the only running task. A claim is listed before its handler begins."""
    with trio.fail_after(PATIENCE):
        while True:
            running = await q.running()
            assert len(running) <= 1, "the limit is exceeded"
            if running and (worker := running[0].worker) in among:
                await among[worker].line_with("run hold-1")
                return worker
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
        await runner(q, {worker: child for worker, child in children.items() if worker != first})
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


async def test_a_rate_allows_the_next_start_although_the_leader_is_killed_before_its_moment(
    server: Server, prefix: str, spawn: Callable[..., Child]
) -> None:
    """The next leader finds the moment when it scans."""
    mesh, children = worqr.Mesh(server.url, prefix=prefix), await joined(spawn, server, prefix, 3, PERIOD="2")
    async with mesh.connect():
        q = mesh.queue("Q1")
        await q.enqueue(b"ok-1", b"ok-2", b"ok-3")
        with trio.fail_after(PATIENCE):
            while (await q.count()) != 2:
                await trio.sleep(0.01)
            while not (leaders := [worker.id for worker in await mesh.workers() if worker.leads]):
                await trio.sleep(0.01)
        children.pop(leaders[0]).kill()
        await all_ended(q)
        await leave(children.values())


async def test_all_run_within_their_limits_although_the_server_forgets_all_scripts(
    own_server: Server, prefix: str
) -> None:
    now, most, done = Counter[str](), Counter[str](), list[bytes]()

    async def handler(task: bytes) -> None:
        lane = worqr.current().lane
        for each in (lane, "all"):
            now[each] += 1
            most[each] = max(most[each], now[each])
        await trio.sleep(0.002)
        now.subtract([lane, "all"])
        done.append(task)

    meshes = [worqr.Mesh(own_server.url, prefix=prefix) for _ in range(2)]
    lanes, limit = worqr.Lanes(limit=worqr.Limit(2)), worqr.Limit(3)
    async with meshes[0].connect(), AsyncExitStack() as stack:
        q = meshes[0].queue("Q1")
        for mesh in meshes:
            await stack.enter_async_context(serving(mesh, "Q1", handler, lanes=lanes, limit=limit))
        with own_server.client() as client:
            for n in range(200):
                await q.dispatch(b"%d" % n, lane="ab"[n % 2], max_length=20, wait=PATIENCE)
                if n % 20 == 0:
                    client.script_flush()
        await until(lambda: len(done) == 200)
        await eventually(q.lanes, [])
    assert sorted(done) == sorted(b"%d" % n for n in range(200))
    assert most["all"] <= 3
    assert max(most["a"], most["b"]) <= 2


async def all_ended(q: worqr.Queue) -> None:
    await eventually(q.count, 0)
    await eventually(q.running, [])


async def leave(children: Iterable[Child]) -> None:
    for child in children:
        child.send("leave")
        assert await child.ended() == 0
