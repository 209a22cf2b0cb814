"""How fast jobs go in, one request each or joined, beside raw tasks that go in the same way."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from itertools import count

import redis

import worqr
from benchmarks.loads import put_in
from benchmarks.measuring import Plan, Row, Table, in_turn
from benchmarks.server import bare
from worqr import ops
from worqr.embedded import EmbeddedServer
from worqr.inside import client_of
from worqr.keys import RegistryKeys

TASK = b"x" * 100
VALUE = "x" * 98
"""The same, as JSON."""

Put = Callable[[], Awaitable[object]]


async def into_empty(client: redis.Redis, put: Put, total: int, callers: int) -> float:
    """`callers` that put `total` tasks into an empty server."""
    client.flushdb()
    return await put_in(put, total, callers)


def with_options(queue: worqr.Queue) -> Put:
    """A dispatch with all options that a careful caller sets."""
    ids = count()
    retry = worqr.RetryPolicy(max_failures=5, max_backoff=60)

    def put() -> Awaitable[object]:
        return queue.dispatch(TASK, id=f"job-{next(ids)}", delay=3600, timeout=30, result_ttl=300, retry=retry)

    return put


async def published(client: redis.Redis, mesh: worqr.Mesh, subscribers: int, total: int, callers: int) -> float:
    """`callers` that publish `total` events to so many subscribers."""
    client.flushdb()
    keys, topics = RegistryKeys(mesh.prefix), client_of(mesh).topics
    calls = [ops.declare_topics(keys, f"subscriber-{n}", b"{}", ["order.paid"]) for n in range(subscribers)]
    await client_of(mesh).link.call_all(calls)
    topics.reset()
    return await put_in(lambda: mesh.publish("order.paid", VALUE), total, callers)


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
            run = partial(into_empty, client, total=total, callers=callers)
            plain, given, limits = await in_turn(
                plan.runs,
                partial(run, lambda: queue.dispatch(TASK)),
                partial(run, with_options(queue)),
                partial(run, lambda: queue.enqueue(TASK)),
            )
            rows.append(Row(what, "jobs/s", plain, limits))
            rows.append(Row("... with id, delay, timeout, result_ttl, retry", "jobs/s", given, limits))
        events = list[Row]()
        for subscribers in (1, 10):
            total = plan.size(10_000 // subscribers, 100)
            sent, limits = await in_turn(
                plan.runs,
                partial(published, client, mesh, subscribers, total, 100),
                partial(into_empty, client, partial(queue.dispatch, TASK), plan.size(20_000, 1_000), 100),
            )
            events.append(Row(f"publish to {subscribers}, 100 callers at once", "events/s", sent, limits))
    client.flushdb()
    return [
        Table("dispatch: jobs of 100 bytes, one process", "enqueue by as many callers, in turn", rows),
        Table("publish: events of 100 bytes, one process", "dispatch by as many callers, in turn", events),
    ]
