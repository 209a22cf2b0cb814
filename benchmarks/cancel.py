"""How long it takes until a running task is cancelled from another process, with pub/sub and without."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import count

import redis
import trio

import worqr
from benchmarks.children import Child, open_child
from benchmarks.measuring import Bar, Plan, Row, Table, percentile
from benchmarks.pickup import publish, rows
from benchmarks.server import bare
from worqr.embedded import EmbeddedServer

P50_BAR, P99_BAR = Bar(2, most=True), Bar(10, most=True)
CUT_BAR = Bar(1.5, most=True)
USER = "deaf"
STEP = 0.137
"""Seconds between two cancels of the cut: no fraction of the peer's rhythm, so that they meet all of its phases."""


def cancel_one(queue: worqr.Queue, child: Child) -> Callable[[], Awaitable[float]]:
    """Start a task over there, cancel it from here, and take the time until its handler has unwound."""
    names = count()

    async def sample() -> float:
        task = b"task-%d" % next(names)
        await queue.enqueue(task)
        assert (await child.line()).startswith("began")
        await trio.sleep(0.002)
        called = time.perf_counter()
        await queue.cancel(task)
        word, name, ended = (await child.line()).split()
        assert (word, name) == ("ended", task.decode())
        return float(ended) - called

    return sample


async def cancel_without_messages(plan: Plan, server: EmbeddedServer, client: redis.Redis) -> list[float]:
    """Seconds from call to end, when the peer's user has lost the right to all channels and so its subscriptions."""
    client.acl_setuser(USER, enabled=True, nopass=True, keys=["*"], channels=["*"], commands=["+@all"])
    mesh = worqr.Mesh(server.url)
    queue = mesh.queue("cut")
    tasks = [b"task-%d" % n for n in range(plan.size(50, 4))]
    latencies: list[float] = []
    async with mesh.connect(), open_child("peers", server, queue="cut", handler="hold", user=USER) as child:
        await queue.enqueue(*tasks)
        for _ in tasks:
            assert (await child.line()).startswith("began")
        client.acl_setuser(USER, reset_channels=True)
        await trio.sleep(0.5)
        assert int(client.pubsub_numsub("worqr:{cut}_cancel")[0][1]) == 0, "the peer still listens"
        called: dict[str, float] = {}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(cancel_all, queue, tasks, called))
            for _ in tasks:
                _, name, ended = (await child.line()).split()
                latencies.append(float(ended) - called[name])
    return latencies


async def cancel_all(queue: worqr.Queue, tasks: list[bytes], called: dict[str, float]) -> None:
    for task in tasks:
        called[task.decode()] = time.perf_counter()
        await queue.cancel(task)
        await trio.sleep(STEP)


async def measure(plan: Plan, server: EmbeddedServer) -> list[Table]:
    """With messages, in turn with a bare message; then without."""
    mesh, client = worqr.Mesh(server.url), bare(server)
    async with (
        mesh.connect(),
        open_child("peers", server, queue="Q1", handler="hold") as child,
        open_child("listener", server, channel="processes") as listener,
    ):
        message = partial(publish, client, "processes", listener)
        pairs = [("another process", cancel_one(mesh.queue("Q1"), child), message)]
        found = await rows(plan, pairs, (P50_BAR, P99_BAR), plan.size(200, 5))
    cut = await cancel_without_messages(plan, server, client)
    found.append(Row(f"no pub/sub, p50 of {len(cut)} cancels", "s", [percentile(cut, 50)]))
    found.append(Row(f"no pub/sub, slowest of {len(cut)} cancels", "s", [max(cut)], bar=CUT_BAR))
    notes = [
        f"{plan.size(200, 5)} samples per run; the p99 is the median of the runs' p99",
        "no pub/sub: the peer's user loses all channels (ACL), so its subscription is cut and every new one refused",
    ]
    limit = "redis-py alone: PUBLISH until the message is there, between two processes"
    return [Table("cancel: the call in one process until the handler has unwound in another", limit, found, notes)]
