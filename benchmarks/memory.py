"""The memory that a waiting task takes on the server."""

from __future__ import annotations

import os
from functools import partial

import redis

import worqr
from benchmarks.measuring import Bar, Plan, Row, Table, in_turn
from benchmarks.server import bare
from worqr.embedded import EmbeddedServer

BAR = Bar(150, most=True)
SIZE = 100
BATCH = 1000


def used(client: redis.Redis) -> int:
    """Bytes that hold data and what belongs to it; buffers of connections are not in them."""
    return int(client.memory_stats()["dataset.bytes"])


async def by_worqr(mesh: worqr.Mesh, client: redis.Redis, count: int) -> float:
    """Bytes per task of `count` random tasks."""
    before = used(client)
    for _ in range(count // BATCH):
        await mesh.queue("Q1").enqueue(*(os.urandom(SIZE) for _ in range(BATCH)))
    after = used(client)
    client.delete("worqr:{Q1}")  # at once; UNLINK would free it during the next run
    return (after - before) / count


async def by_lpush(client: redis.Redis, count: int) -> float:
    """The same, pushed to a bare list."""
    before = used(client)
    for _ in range(count // BATCH):
        client.lpush("bare", *(os.urandom(SIZE) for _ in range(BATCH)))
    after = used(client)
    client.delete("bare")
    return (after - before) / count


async def measure(plan: Plan, server: EmbeddedServer) -> list[Table]:
    """In turn with a bare list."""
    mesh, client, count = worqr.Mesh(server.url), bare(server), plan.size(100_000, 10_000)
    async with mesh.connect():
        await mesh.queue("Q1").enqueue(b"first")  # what the queue has but once
        ours, limit = partial(by_worqr, mesh, client, count), partial(by_lpush, client, count)
        values, limits = await in_turn(plan.runs, ours, limit)
    title = f"memory: {count:,} waiting tasks of {SIZE} random bytes"
    row = Row("server memory per task", "bytes", values, limits, BAR)
    return [Table(title, "LPUSH of the same into a bare list", [row])]
