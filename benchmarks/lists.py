"""Lists: what a task costs a worker whose handler takes a hundred at once, beside one by one, and how fast a queue is drained."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

import redis
import trio

import worqr
from benchmarks.drain import CONCURRENCY, PREFIX
from benchmarks.measuring import Bar, Plan, Row, Table, in_turn, ratios
from benchmarks.server import bare, fill
from worqr.embedded import EmbeddedServer
from worqr.keys import QueueKeys

QUEUE = "Q0"
BATCH_SIZE = 100


@dataclass(slots=True)
class Page:
    """A call of a typed function."""

    url: str


class Drains:
    """Drains of one server with handlers that do nothing."""

    def __init__(self, server: EmbeddedServer, tasks: int) -> None:
        self.server = server
        self.tasks = tasks
        self.client: redis.Redis = bare(server)
        self.cpu: dict[int, list[float]] = {}
        """Microseconds of this process per task, by the size of lists."""
        self._seen = 0
        self._done = trio.Event()

    def _take(self, n: int) -> None:
        self._seen += n
        if self._seen == self.tasks:
            self._done.set()

    async def raw(self, size: int, *, threads: bool = False) -> float:
        """Raw tasks per second, `size` at once; 0: one by one. With `threads`, handlers are plain functions."""
        fill(self.client, QueueKeys(PREFIX, QUEUE).base, self.tasks)
        mesh, self._seen, self._done = worqr.Mesh(self.server.url, prefix=PREFIX), 0, trio.Event()

        async def one(task: bytes) -> None:
            self._take(1)

        async def many(tasks: list[bytes]) -> None:
            self._take(len(tasks))

        def one_in_thread(task: bytes) -> None:
            trio.from_thread.run_sync(self._take, 1)

        def many_in_thread(tasks: list[bytes]) -> None:
            trio.from_thread.run_sync(self._take, len(tasks))

        async with mesh.join(concurrency=CONCURRENCY, grace=10) as peer, trio.open_nursery() as nursery:
            began, used = time.perf_counter(), time.process_time()
            if size:
                handler = many_in_thread if threads else many
                nursery.start_soon(partial(peer.serve_list, QUEUE, handler, batch_size=size))
            else:
                nursery.start_soon(peer.serve, QUEUE, one_in_thread if threads else one)
            await self._done.wait()
            rate = self.tasks / (time.perf_counter() - began)
            await self._settled(mesh, QUEUE)
            self.cpu.setdefault(size, []).append((time.process_time() - used) / self.tasks * 1e6)
            nursery.cancel_scope.cancel()
        return rate

    async def typed(self, size: int) -> float:
        """Jobs of a typed function per second, each with a result, `size` at once; 0: one by one."""
        mesh, self._seen, self._done = worqr.Mesh(self.server.url, prefix=PREFIX), 0, trio.Event()

        async def many(pages: list[Page]) -> list[str | Exception]:
            self._take(len(pages))
            return [page.url for page in pages]

        async def one(page: Page, /) -> str:
            self._take(1)
            return page.url

        if size:
            function = mesh.task(name="index", batch_size=size, result_ttl=60)(many)
            calls = [function.call(Page(f"/{n}")) for n in range(self.tasks)]
        else:
            alone = mesh.task(name="index", result_ttl=60)(one)
            calls = [alone.call(Page(f"/{n}")) for n in range(self.tasks)]
        async with mesh.connect():
            await mesh.dispatch_many(calls)
        began = time.perf_counter()
        async with mesh.join(concurrency=CONCURRENCY, grace=10):
            await self._done.wait()
            rate = self.tasks / (time.perf_counter() - began)
            await self._settled(mesh, "index")
        self.client.flushdb()
        return rate

    @staticmethod
    async def _settled(mesh: worqr.Mesh, queue: str) -> None:
        while (await mesh.queue(queue).info()).running:  # noqa: ASYNC110
            await trio.sleep(0.01)


async def measure(plan: Plan, server: EmbeddedServer) -> list[Table]:
    """All of it on one server, which this benchmark has started."""
    raw, slow = Drains(server, plan.size(100_000, 1000)), Drains(server, plan.size(20_000, 500))
    one, ten, many, in_threads, in_thread_lists, jobs, job_lists = await in_turn(
        plan.runs,
        partial(raw.raw, 0),
        partial(raw.raw, 10),
        partial(raw.raw, BATCH_SIZE),
        partial(slow.raw, 0, threads=True),
        partial(slow.raw, BATCH_SIZE, threads=True),
        partial(slow.typed, 0),
        partial(slow.typed, BATCH_SIZE),
    )
    cpu, list_cpu = raw.cpu[0], raw.cpu[BATCH_SIZE]
    return [
        Table(
            "lists: tasks that do nothing, a hundred at once",
            "the same tasks one by one",
            [
                Row("raw tasks one by one", "tasks/s", one),
                Row("raw tasks, lists of 10", "tasks/s", ten, one),
                Row(f"raw tasks, lists of {BATCH_SIZE}", "tasks/s", many, one),
                Row("CPU of the worker, one by one", "us/task", cpu),
                Row(f"CPU of the worker, lists of {BATCH_SIZE}", "us/task", list_cpu, cpu),
                Row("... one by one, by lists", "times", ratios(cpu, list_cpu), bar=Bar(2.0)),
                Row("raw tasks in threads, one by one", "tasks/s", in_threads),
                Row(f"raw tasks in threads, lists of {BATCH_SIZE}", "tasks/s", in_thread_lists, in_threads),
                Row("... by those one by one", "times", ratios(in_thread_lists, in_threads), bar=Bar(2.0)),
                Row("jobs with results, one by one", "jobs/s", jobs),
                Row(f"jobs with results, lists of {BATCH_SIZE}", "jobs/s", job_lists, jobs),
            ],
            ["the peer is in this process", "on the loop, lists are as fast as the scripts of the server"],
        )
    ]
