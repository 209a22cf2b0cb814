"""How fast jobs go in, one request each or joined, beside raw tasks that go in the same way."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import count

import redis
import trio

import worqr
from benchmarks.measuring import Plan, Row, Table, in_turn
from benchmarks.server import bare
from worqr.embedded import EmbeddedServer

TASK = b"x" * 100

Put = Callable[[bytes], Awaitable[object]]


async def put_in(client: redis.Redis, put: Put, total: int, callers: int) -> float:
    """`callers` that put `total` tasks into an empty server, each one after another; return tasks per second."""
    client.flushdb()

    async def caller() -> None:
        for _ in range(total // callers):
            await put(TASK)

    began = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for _ in range(callers):
            nursery.start_soon(caller)
    return total / (time.perf_counter() - began)


def with_options(queue: worqr.Queue) -> Put:
    """A dispatch with all options that a careful caller sets."""
    ids = count()
    retry = worqr.RetryPolicy(max_failures=5, max_backoff=60)

    def put(task: bytes) -> Awaitable[object]:
        return queue.dispatch(task, id=f"job-{next(ids)}", delay=3600, timeout=30, result_ttl=300, retry=retry)

    return put


async def measure(plan: Plan, server: EmbeddedServer) -> list[Table]:
    """Dispatches in turn with enqueues by as many callers."""
    mesh, client = worqr.Mesh(server.url), bare(server)
    queue, rows = mesh.queue("Q1"), list[Row]()
    async with mesh.connect():
        for what, total, callers in (
            ("one await at a time", plan.size(3_000, 100), 1),
            ("100 callers at once", plan.size(20_000, 1_000), 100),
            ("1,000 callers at once", plan.size(20_000, 2_000), 1000),
        ):
            run = partial(put_in, client, total=total, callers=callers)
            plain, given, limits = await in_turn(
                plan.runs,
                partial(run, queue.dispatch),
                partial(run, with_options(queue)),
                partial(run, queue.enqueue),
            )
            rows.append(Row(what, "jobs/s", plain, limits))
            rows.append(Row("... with id, delay, timeout, result_ttl, retry", "jobs/s", given, limits))
    client.flushdb()
    return [Table("dispatch: jobs of 100 bytes, one process", "enqueue by as many callers, in turn", rows)]
