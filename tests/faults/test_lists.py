"""Workers with list handlers that are killed: while a list waits for calls, and while it runs; in shards, lanes and clusters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import trio

import worqr
from tests.peer.tools import QUICK, eventually
from tests.support.children import Child
from tests.support.clusters import Cluster, cluster, cluster_of_module
from tests.support.patience import PATIENCE
from tests.support.servers import Server

assert cluster, cluster_of_module  # fixtures

CHILD = Path(__file__).parent / "child_lists.py"
Spawn = Callable[..., Child]
TASKS = [b"%d" % n for n in range(7)]


@pytest.fixture
def mesh(server: Server, prefix: str) -> worqr.Mesh:
    return worqr.Mesh(server.url, prefix=prefix, keepalive=1, patience=20)


class Rescue:
    """A list handler that ends everything at once."""

    def __init__(self) -> None:
        self.lists: list[list[bytes]] = []
        self.stalls: list[int] = []

    async def __call__(self, tasks: list[bytes]) -> None:
        self.lists.append(list(tasks))
        self.stalls += [item.stalls for item in worqr.current().items]


async def rescued(mesh: worqr.Mesh, **options: worqr.Lanes) -> Rescue:
    """Let another worker run what the killed one had; return when all have finished."""
    rescue, queue = Rescue(), mesh.queue("Q1")
    async with mesh.join() as peer, trio.open_nursery() as nursery:
        await nursery.start(partial(peer.serve_list, "Q1", rescue, batch_size=100, retry=QUICK, **options))

        async def look() -> tuple[int, int, int]:
            info = await queue.info()
            return info.counts.get("finished", 0), info.running, info.waiting

        await eventually(look, (len(TASKS), 0, 0))
        nursery.cancel_scope.cancel()
    assert sorted(task for each in rescue.lists for task in each) == sorted(TASKS)
    return rescue


@pytest.mark.parametrize(("size", "wait"), [(100, 600), (7, 0)], ids=["in the wait", "in the run"])
async def test_all_calls_of_a_killed_worker_run_again_each_alone(
    server: Server, prefix: str, mesh: worqr.Mesh, spawn: Spawn, size: int, wait: float
) -> None:
    child = spawn(CHILD, server.url, prefix, str(size), str(wait))
    await child.line_with("joined")
    async with mesh.connect():
        queue = mesh.queue("Q1")
        await queue.enqueue(*TASKS)

        async def running() -> int:
            return (await queue.info()).running

        await eventually(running, len(TASKS))
        if not wait:
            assert (await child.line_with("run")).strip() == "run 7"
        child.kill()
        rescue = await rescued(mesh)
        assert rescue.stalls == [1] * len(TASKS)
        assert [len(each) for each in rescue.lists] == [1] * len(TASKS)


async def killed_with_lists_of_several_shards(url: str, prefix: str, spawn: Spawn) -> None:
    """Calls of six lanes and one without a lane wait in lists of one worker, which is killed: each runs again, alone."""
    child = spawn(CHILD, url, prefix, "100", "600", "3")
    await child.line_with("joined")
    mesh = worqr.Mesh(url, prefix=prefix, keepalive=1, patience=20)
    async with mesh.connect():
        queue = mesh.queue("Q1", shards=3)
        await queue.enqueue(TASKS[0])
        for n, task in enumerate(TASKS[1:]):
            await queue.dispatch(task, lane=f"lane {n}")

        async def running() -> tuple[int, int]:
            info = await queue.info()
            return info.running, len([lane for lane in await queue.lanes() if lane.running])

        await eventually(running, (len(TASKS), len(TASKS) - 1))
        child.kill()
        rescue = await rescued(mesh, lanes=worqr.Lanes(limit=worqr.Limit(1)))
        assert rescue.stalls == [1] * len(TASKS)
        assert [len(each) for each in rescue.lists] == [1] * len(TASKS)
        await eventually(queue.lanes, [])


@pytest.mark.leaves("shards")
async def test_calls_of_shards_and_lanes_run_again_after_a_kill(server: Server, prefix: str, spawn: Spawn) -> None:
    await killed_with_lists_of_several_shards(server.url, prefix, spawn)


@pytest.mark.one_server
async def test_calls_of_a_cluster_run_again_after_a_kill(cluster: Cluster, spawn: Spawn) -> None:
    await killed_with_lists_of_several_shards(cluster.url, "worqr", spawn)


async def test_a_worker_that_is_frozen_while_a_list_waits_loses_its_calls_and_runs_none_of_them(
    server: Server, prefix: str, mesh: worqr.Mesh, spawn: Spawn
) -> None:
    child = spawn(CHILD, server.url, prefix, "100", "1.5")
    await child.line_with("joined")
    async with mesh.connect():
        queue = mesh.queue("Q1")
        await queue.enqueue(*TASKS)

        async def running() -> int:
            return (await queue.info()).running

        await eventually(running, len(TASKS))
        child.pause()
        await rescued(mesh)
        child.resume()

        async def workers() -> int:
            return len([worker for worker in await mesh.workers() if worker.queues])

        await eventually(workers, 1)  # it has joined again
        await queue.enqueue(b"new")
        with trio.fail_after(PATIENCE):
            assert (await child.line_with("run")).strip() == "run 1"
        child.send("leave")
        await child.ended()
        assert await running() == 0
