"""How fast tasks go in: one await at a time, 100 callers at once, 1,000 tasks per call."""

from __future__ import annotations

import time
from functools import partial

import worqr
from benchmarks.loads import CALLERS, put_in
from benchmarks.measuring import Bar, Plan, Row, Table, in_turn
from benchmarks.server import bare, command
from worqr import ops
from worqr.embedded import EmbeddedServer
from worqr.keys import QueueKeys

TASK = b"x" * 100
BATCH = 1000


class Enqueues:
    """Ways to fill one queue, which is emptied before each run. All return tasks per second."""

    def __init__(self, server: EmbeddedServer) -> None:
        self.mesh = worqr.Mesh(server.url)
        self.queue = self.mesh.queue("Q1")
        self.keys = QueueKeys("worqr", "Q1")
        self.client = bare(server)
        self.number = 0

    def _began(self) -> float:
        self.client.unlink(self.keys.base)
        return time.perf_counter()

    async def by(self, callers: int, count: int) -> float:
        self._began()
        return await put_in(lambda: self.queue.enqueue(TASK), count, callers)

    async def in_batches(self, count: int) -> float:
        batch = [TASK] * BATCH
        began = self._began()
        for _ in range(count // BATCH):
            await self.queue.enqueue(*batch)
        return count / (time.perf_counter() - began)

    async def bare_one_by_one(self, count: int) -> float:
        began = self._began()
        for _ in range(count):
            self.client.lpush(self.keys.base, TASK)
        return count / (time.perf_counter() - began)

    async def bare_at_once(self, count: int) -> float:
        call = ops.enqueue(self.keys, [TASK])
        began = self._began()
        for _ in range(count // CALLERS):
            pipe = self.client.pipeline(transaction=False)
            lowest = self.number + 1
            for _ in range(CALLERS):
                self.number += 1
                pipe.evalsha(*command(call, self.number, lowest))
            pipe.execute()
        return count / (time.perf_counter() - began)

    async def bare_in_batches(self, count: int) -> float:
        batch = [TASK] * BATCH
        began = self._began()
        for _ in range(count // BATCH):
            self.client.lpush(self.keys.base, *batch)
        return count / (time.perf_counter() - began)


async def measure(plan: Plan, server: EmbeddedServer) -> list[Table]:
    """The three ways, each in turn with the bare client's."""
    enqueues = Enqueues(server)
    rows: list[Row] = []
    async with enqueues.mesh.connect():
        one, some, many = plan.size(4_000, 100), plan.size(40_000, 1_000), plan.size(400_000, 10_000)
        for what, count, bar, ours, limit in (
            ("one await at a time", one, 3_000, partial(enqueues.by, 1), enqueues.bare_one_by_one),
            ("100 callers at once", some, 25_000, partial(enqueues.by, CALLERS), enqueues.bare_at_once),
            ("1,000 tasks per call", many, 200_000, enqueues.in_batches, enqueues.bare_in_batches),
        ):
            values, limits = await in_turn(plan.runs, partial(ours, count), partial(limit, count))
            rows.append(Row(what, "tasks/s", values, limits, Bar(bar)))
    enqueues.client.unlink(enqueues.keys.base)
    limit = "redis-py alone: LPUSH one at a time; a pipeline of 100 EVALSHA of the same script; LPUSH of 1,000"
    return [Table("enqueue: tasks of 100 bytes, one process", limit, rows)]
