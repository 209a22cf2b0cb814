"""How fast a peer drains a queue of tasks that do nothing, beside its own scripts driven by a bare pipeline."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import redis
import trio

import worqr
from benchmarks.loads import CONCURRENCY
from benchmarks.measuring import Bar, Plan, Row, Table, in_turn, ratios
from benchmarks.server import account, bare, command, fill
from worqr import ops
from worqr.embedded import EmbeddedServer
from worqr.keys import QueueKeys

PREFIX = "worqr"
WORKER = "bare:00000000000000000000000000000000"


class Drains:
    """Drains of one server. `cpu` collects the microseconds per task of each whole drain: our process, the server."""

    def __init__(self, server: EmbeddedServer, tasks: int) -> None:
        self.mesh = worqr.Mesh(server.url, prefix=PREFIX)
        self.client: redis.Redis = bare(server)
        self.tasks = tasks
        self.cpu: list[tuple[float, float]] = []

    def keys(self, queue: str) -> QueueKeys:
        return QueueKeys(PREFIX, queue)

    async def whole(self, *, queues: int = 1, deadline: bool = False, **options: Any) -> float:
        """Fill `queues`, drain them with one peer; return tasks per second, from entering them to the last handler.

        `options` are those of `Peer.serve`.
        """
        names = [f"Q{n}" for n in range(queues)]
        for name in names:
            fill(self.client, self.keys(name).base, self.tasks // queues)
        before, used = account(self.client), time.process_time()
        rate = await self.first(names, self.tasks // queues * queues, deadline=deadline, **options)
        spent = account(self.client).since(before)
        if queues == 1 and not deadline and not options:
            self.cpu.append(((time.process_time() - used) / self.tasks * 1e6, spent.cpu / self.tasks * 1e6))
        return rate

    async def first(
        self, names: Sequence[str], count: int, *, deadline: bool = False, feed: bool = False, **options: Any
    ) -> float:
        """The first `count` tasks of some queues; with `feed` the queue is kept as long as it is."""
        seen, done, hungry = 0, trio.Event(), trio.Event()

        async def handler(task: bytes) -> int:
            nonlocal seen
            seen += 1
            if seen % CONCURRENCY == 0 and feed:
                hungry.set()
            if seen == count:
                done.set()
            return seen

        async def handler_with_deadline(task: bytes) -> int:
            with trio.move_on_after(60):
                await handler(task)
            return seen

        async def feed_forever() -> None:
            nonlocal hungry
            fed, queue = 0, self.mesh.queue(names[0])
            while True:
                await hungry.wait()
                hungry = trio.Event()
                while fed < seen:
                    fed += CONCURRENCY
                    await queue.enqueue(*BATCH)

        run = handler_with_deadline if deadline else handler
        async with self.mesh.join(concurrency=CONCURRENCY, grace=0) as peer, trio.open_nursery() as nursery:
            if feed:
                nursery.start_soon(feed_forever)
            began = time.perf_counter()
            for name in names:
                nursery.start_soon(partial(peer.serve, name, run, **options))
            await done.wait()
            ended = time.perf_counter()
            nursery.cancel_scope.cancel()
        return count / (ended - began)

    async def waiting(self, length: int) -> float:
        """The first tasks of a queue in which about `length` more wait, all the time."""
        name = f"waiting-{length}"
        key = self.keys(name).base
        missing = length + CONCURRENCY - int(self.client.llen(key))
        if missing > 0:
            fill(self.client, key, missing)
        else:
            self.client.ltrim(key, -missing, -1)
        return await self.first([name], self.tasks // 2, feed=True)

    async def bare_scripts(self) -> float:
        """The same scripts with the same keys and arguments, start 100 and finish 100 by turns, and nothing else."""
        keys, client = self.keys("bare"), self.client
        fill(client, keys.base, self.tasks)
        client.delete(keys.workers)
        enter = ops.start_work(keys, WORKER, max_stalls=3, keep_failed=1000, last=0)
        client.evalsha(*command(enter, time.time_ns() // 1000, 1))
        claims: list[int] = []
        done = number = 0
        began = time.perf_counter()
        while done < self.tasks:
            number += 1
            pipe = client.pipeline(transaction=False)
            if claims:
                pipe.evalsha(*command(ops.finish_tasks(keys, WORKER, claims)))
            start = ops.start_tasks(keys, WORKER, number, CONCURRENCY)
            pipe.evalsha(*command(start))
            started = start.read(pipe.execute()[-1])
            done += len(claims)
            claims = [started.first + n for n in range(len(started.entries))]
        return done / (time.perf_counter() - began)


BATCH = [b"%0100d" % n for n in range(CONCURRENCY)]


async def measure(plan: Plan, server: EmbeddedServer) -> list[Table]:
    """All drains, in turn with the bare scripts."""
    drains = Drains(server, plan.size(50_000, 2_000))
    lengths = [100, 10_000, plan.size(1_000_000, 20_000)]
    async with drains.mesh.connect():
        values, timeout, deadline, ten, limits = await in_turn(
            plan.runs,
            drains.whole,
            partial(drains.whole, timeout=60),
            partial(drains.whole, deadline=True),
            partial(drains.whole, queues=10),
            drains.bare_scripts,
        )
        flat = await in_turn(plan.runs, *(partial(drains.waiting, length) for length in lengths))
    table = Table(
        f"drain: no-op tasks of 100 bytes, one process, concurrency {CONCURRENCY}",
        "start_tasks 100 + finish_tasks 100 with the same keys and arguments, by a bare redis-py pipeline, in turn",
        [
            Row("drain", "tasks/s", values, limits, Bar(25_000)),
            Row("... as a share of the bare scripts", "of bare", ratios(values, limits), bar=Bar(1 / 3)),
            Row("... served with a timeout of 60 s", "tasks/s", timeout, limits),
            Row("... each run under a deadline of its own, of 60 s", "tasks/s", deadline, limits),
            Row("... from 10 queues", "tasks/s", ten, limits),
        ],
    )
    ours, theirs = (statistics.median(one) for one in zip(*drains.cpu, strict=True))
    table.notes.append(f"CPU per task: {ours:.1f} us in this process, {theirs:.1f} us in the server")
    depth = Table(
        "drain with many waiting: the queue is kept at its length by the same process",
        f"the same with {lengths[0]} waiting",
        [Row(f"{length:,} waiting", "tasks/s", rates, flat[0]) for length, rates in zip(lengths, flat, strict=True)],
    )
    return [table, depth]
