"""Room: producers that wait for room in a small queue, beside producers of a queue without a bound, and what waiting costs."""

from __future__ import annotations

import math
import time
from collections import Counter
from contextlib import AsyncExitStack
from functools import partial

import trio

import worqr
from benchmarks.drain import CONCURRENCY, PREFIX
from benchmarks.measuring import Bar, Plan, Row, Table, in_turn, ratios
from benchmarks.server import account, bare
from worqr.embedded import EmbeddedServer

PRODUCERS = 10
BOUND = 1000


class Rooms:
    """The runs on one server. `lost` counts the tasks that did not run exactly once."""

    def __init__(self, server: EmbeddedServer, tasks: int) -> None:
        self.server = server
        self.client = bare(server)
        self.each = tasks // PRODUCERS
        self.lost: list[float] = []

    async def rate(self, batch: int = 1, *, bound: int | None = None) -> float:
        """Tasks per second of ten producers, each with a connection of its own, and one peer, until the last one has run."""
        seen, done, total = Counter[bytes](), trio.Event(), self.each * PRODUCERS
        ran = 0

        async def handler(task: bytes) -> None:
            nonlocal ran
            seen[task] += 1
            ran += 1
            if ran == total:
                done.set()

        async def produce(mesh: worqr.Mesh, name: int) -> None:
            queue, options = mesh.queue("room"), {} if bound is None else {"max_length": bound, "wait": math.inf}
            for n in range(0, self.each, batch):
                await queue.enqueue(*[b"%d %d" % (name, n + i) for i in range(batch)], **options)  # type: ignore[arg-type]

        async with AsyncExitStack() as stack:
            meshes = [worqr.Mesh(self.server.url, prefix=PREFIX) for _ in range(PRODUCERS)]
            for mesh in meshes:
                await stack.enter_async_context(mesh.connect())
            workers = worqr.Mesh(self.server.url, prefix=PREFIX)
            peer = await stack.enter_async_context(workers.join(concurrency=CONCURRENCY, grace=0))
            nursery = await stack.enter_async_context(trio.open_nursery())
            await nursery.start(partial(peer.serve, "room", handler))
            began = time.perf_counter()
            for name, mesh in enumerate(meshes):
                nursery.start_soon(produce, mesh, name)
            await done.wait()
            rate = total / (time.perf_counter() - began)
            nursery.cancel_scope.cancel()
        self.lost.append(total - len(seen) + sum(n - 1 for n in seen.values()))
        self.client.flushdb()
        return rate

    async def waiting(self, seconds: float) -> tuple[float, float]:
        """Requests for room, and all requests, per second of a producer that waits while nothing leaves the queue."""
        async with AsyncExitStack() as stack:
            meshes = [worqr.Mesh(self.server.url, prefix=PREFIX) for _ in range(PRODUCERS)]
            for mesh in meshes:
                await stack.enter_async_context(mesh.connect())
            await meshes[0].queue("room").enqueue(b"x")
            nursery = await stack.enter_async_context(trio.open_nursery())
            for mesh in meshes:
                nursery.start_soon(partial(mesh.queue("room").enqueue, b"x", max_length=1, wait=math.inf))
            await trio.sleep(1)
            before = account(self.client)
            await trio.sleep(seconds)
            spent = account(self.client).since(before)
            nursery.cancel_scope.cancel()
        self.client.flushdb()
        return spent.requests.get("evalsha", 0) / spent.at / PRODUCERS, spent.rate / PRODUCERS


async def measure(plan: Plan, server: EmbeddedServer) -> list[Table]:
    """All of it on one server; producers and worker are in this process, each with connections of its own."""
    rooms = Rooms(server, plan.size(40_000, 2_000))
    one, many, most, one_free, many_free, most_free = await in_turn(
        plan.runs,
        partial(rooms.rate, bound=BOUND),
        partial(rooms.rate, 10, bound=BOUND),
        partial(rooms.rate, 100, bound=BOUND),
        rooms.rate,
        partial(rooms.rate, 10),
        partial(rooms.rate, 100),
    )
    asked, sent = await rooms.waiting(plan.seconds(20.0))
    return [
        Table(
            f"room: {PRODUCERS} producers of a queue with max_length={BOUND:,} that wait, and one worker",
            "the same without a bound",
            [
                Row("one task per enqueue", "tasks/s", one, one_free),
                Row("... by that without a bound", "times", ratios(one, one_free), bar=Bar(0.80)),
                Row("ten tasks per enqueue", "tasks/s", many, many_free),
                Row("... by that without a bound", "times", ratios(many, many_free), bar=Bar(0.80)),
                Row("a hundred tasks per enqueue, so that the queue is always full", "tasks/s", most, most_free),
                Row("... by that without a bound", "times", ratios(most, most_free), bar=Bar(0.80)),
                Row("tasks that did not run exactly once", "tasks", rooms.lost, bar=Bar(0, most=True), worst=True),
                Row("requests for room by a producer that waits", "1/s", [asked], bar=Bar(1.05, most=True)),
                Row("... with the PINGs that every connection sends", "1/s", [sent]),
            ],
            ["producers and worker are in one process, each with connections of its own"],
        )
    ]
