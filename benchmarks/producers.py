"""How fast plain threads and asyncio tasks enqueue, each beside redis-py alone: the cost of one enqueue for a view or a script.
And the cost of waiting until a replica has it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import redis.asyncio
import trio

import worqr
from benchmarks.loads import put_in
from benchmarks.measuring import Plan, Row, Table, in_turn
from benchmarks.nodes import free_port
from benchmarks.server import bare
from worqr.embedded import EmbeddedServer
from worqr.keys import QueueKeys

TASK = b"x" * 100
THREADS = 8
TASKS = 100


class Producers:
    """Ways of plain threads to fill one queue, which is emptied before each run. All return tasks per second."""

    def __init__(self, server: EmbeddedServer) -> None:
        self.mesh = worqr.Mesh(server.url)
        self.queue = self.mesh.queue("Q1")
        self.keys = QueueKeys("worqr", "Q1")
        self.client = bare(server)

        @self.mesh.task(name="Q1")
        def mail(to: str, subject: str, body: str = "") -> None: ...

        self.mail = mail

    def enqueue(self) -> None:
        worqr.sync(self.queue.enqueue, TASK)

    def call(self) -> None:
        worqr.sync(self.mail.enqueue, "ada@example.org", "hello", body="b" * 40)

    def dispatch(self) -> None:
        worqr.sync(self.queue.dispatch, TASK)

    def push_and_publish(self) -> None:
        """The least that a producer can do to wake a worker: both commands in one round trip."""
        pipe = self.client.pipeline(transaction=False)
        pipe.lpush(self.keys.base, TASK)
        pipe.publish(self.keys.base, b"")
        pipe.execute()

    async def rate(self, once: Callable[[], None], threads: int, count: int) -> float:
        self.client.unlink(self.keys.base)
        return await trio.to_thread.run_sync(partial(_rate, once, threads, count))


def _rate(once: Callable[[], None], threads: int, count: int) -> float:
    def work(_: int) -> None:
        for _ in range(count // threads):
            once()

    with ThreadPoolExecutor(threads) as pool:
        began = time.perf_counter()
        list(pool.map(work, range(threads)))
        return count // threads * threads / (time.perf_counter() - began)


class AsyncioProducers:
    """The same with asyncio tasks. Each run has a loop and connections of its own, which are open when it begins."""

    def __init__(self, server: EmbeddedServer) -> None:
        self.mesh = worqr.Mesh(server.url)
        self.socket_path = server.socket_path
        self.queue = self.mesh.queue("Q1")
        self.keys = QueueKeys("worqr", "Q1")
        self.client = bare(server)

        @self.mesh.task(name="Q1")
        def mail(to: str, subject: str, body: str = "") -> None: ...

        self.mail = mail

    async def enqueue(self) -> object:
        return await self.queue.enqueue(TASK)

    async def call(self) -> object:
        return await self.mail.enqueue("ada@example.org", "hello", body="b" * 40)

    async def dispatch(self) -> object:
        return await self.queue.dispatch(TASK)

    async def rate(self, once: Callable[[], Awaitable[object]], tasks: int, count: int) -> float:
        async def run() -> float:
            async with self.mesh.connect():
                return await _rate_of_tasks(once, tasks, count)

        self.client.unlink(self.keys.base)
        return await trio.to_thread.run_sync(lambda: asyncio.run(run()))

    async def bare_rate(self, tasks: int, count: int) -> float:
        """Both commands in one round trip, over as many connections as there are tasks."""

        async def run() -> float:
            async with redis.asyncio.Redis(unix_socket_path=self.socket_path, max_connections=tasks) as client:

                async def push_and_publish() -> None:
                    pipe = client.pipeline(transaction=False)
                    pipe.lpush(self.keys.base, TASK)
                    pipe.publish(self.keys.base, b"")
                    await pipe.execute()

                return await _rate_of_tasks(push_and_publish, tasks, count)

        self.client.unlink(self.keys.base)
        return await trio.to_thread.run_sync(lambda: asyncio.run(run()))


async def _rate_of_tasks(once: Callable[[], Awaitable[object]], tasks: int, count: int) -> float:
    async def work(times: int) -> None:
        for _ in range(times):
            await once()

    await asyncio.gather(*(work(1) for _ in range(tasks)))
    began = time.perf_counter()
    await asyncio.gather(*(work(count // tasks) for _ in range(tasks)))
    return count // tasks * tasks / (time.perf_counter() - began)


async def _with_replicas(queue: worqr.Queue, method: str, callers: int, replicas: int, count: int) -> float:
    """Tasks per second into a primary with one replica, both on this machine."""
    put = getattr(queue, method)
    rate = await put_in(lambda: put(TASK, replicas=replicas), count, callers)
    await queue.delete()
    return rate


async def measure(plan: Plan, server: EmbeddedServer) -> list[Table]:
    """Producers that do not run on Trio; and the cost of waiting for a replica."""
    return [await _threads(plan, server), await _asyncio(plan, server), await _replicated(plan)]


async def _threads(plan: Plan, server: EmbeddedServer) -> Table:
    """One thread and several, each in turn with redis-py by as many threads."""
    producers = Producers(server)
    count = plan.size(4_000, 200)
    rows: list[Row] = []
    for what, ours, threads in (
        ("queue.enqueue, 1 thread", producers.enqueue, 1),
        ("fn.enqueue, 1 thread", producers.call, 1),
        ("queue.dispatch, 1 thread", producers.dispatch, 1),
        (f"queue.enqueue, {THREADS} threads", producers.enqueue, THREADS),
        (f"fn.enqueue, {THREADS} threads", producers.call, THREADS),
    ):
        size = count * (4 if threads > 1 else 1)
        runs = (
            partial(producers.rate, ours, threads, size),
            partial(producers.rate, producers.push_and_publish, threads, size),
        )
        values, limits = await in_turn(plan.runs, *runs)
        rows.append(Row(what, "tasks/s", values, limits))
    await trio.to_thread.run_sync(producers.mesh.close)
    producers.client.flushall()
    limit = "redis-py alone: LPUSH and PUBLISH in a pipeline, one round trip, by as many threads"
    return Table("producers: plain threads, one call at a time each, tasks of 100 bytes", limit, rows)


async def _replicated(plan: Plan) -> Table:
    """With ``replicas=1`` and with 0, in turn."""
    rows: list[Row] = []
    port = free_port()
    settings = {"repl-diskless-sync-delay": "0"}
    with EmbeddedServer(port=port, settings=settings) as primary, EmbeddedServer(settings=settings) as replica:
        _follow(bare(replica), port)
        mesh = worqr.Mesh(primary.url)
        count = plan.size(3_000, 200)
        async with mesh.connect():
            for what, method, callers, size in (
                ("queue.enqueue, one await at a time", "enqueue", 1, count),
                ("queue.dispatch, one await at a time", "dispatch", 1, count),
                (f"queue.enqueue, {TASKS} tasks", "enqueue", TASKS, 10 * count),
            ):
                rate = partial(_with_replicas, mesh.queue("Q1"), method, callers)
                values, limits = await in_turn(plan.runs, partial(rate, 1, size), partial(rate, 0, size))
                rows.append(Row(what, "tasks/s", values, limits))
    limit = "the same with replicas=0"
    return Table("producers: replicas=1, one replica on the same machine, tasks of 100 bytes", limit, rows)


def _follow(client: redis.Redis, port: int) -> None:
    """Make it a replica of the server there, and wait until it is in step."""
    client.replicaof("127.0.0.1", port)
    while client.info("replication")["master_link_status"] != "up":
        time.sleep(0.01)


async def _asyncio(plan: Plan, server: EmbeddedServer) -> Table:
    """One task and many, each in turn with redis.asyncio in as many tasks."""
    producers = AsyncioProducers(server)
    count = plan.size(4_000, 200)
    rows: list[Row] = []
    for what, ours, tasks in (
        ("queue.enqueue, one await at a time", producers.enqueue, 1),
        ("fn.enqueue, one await at a time", producers.call, 1),
        ("queue.dispatch, one await at a time", producers.dispatch, 1),
        (f"queue.enqueue, {TASKS} tasks", producers.enqueue, TASKS),
        (f"fn.enqueue, {TASKS} tasks", producers.call, TASKS),
        (f"queue.dispatch, {TASKS} tasks", producers.dispatch, TASKS),
    ):
        size = count * (5 if tasks > 1 else 1)
        runs = partial(producers.rate, ours, tasks, size), partial(producers.bare_rate, tasks, size)
        values, limits = await in_turn(plan.runs, *runs)
        rows.append(Row(what, "tasks/s", values, limits))
    producers.client.flushall()
    limit = "redis.asyncio alone: LPUSH and PUBLISH in a pipeline, one round trip, in as many tasks, each with its connection"
    return Table("producers: asyncio, tasks of 100 bytes", limit, rows)
