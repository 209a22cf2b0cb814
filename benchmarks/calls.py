"""How many functions Python calls for one task, how often the loop waits, and how often it switches to another task.

The machine and its load do not change these figures, so `tests/test_call_counts.py` holds them. Functions of C that Python calls
count as well.
"""

from __future__ import annotations

import asyncio
import cProfile
import types
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial

import redis
import trio

import worqr
from benchmarks.children import open_child
from benchmarks.measuring import Bar, Plan, Row, Table
from benchmarks.server import bare
from worqr.embedded import EmbeddedServer

TYPED, RAW, BLOCKING, WORKER = Bar(160, most=True), Bar(130, most=True), Bar(140, most=True), Bar(400, most=True)
SWITCHES = Bar(5, most=True)
ONE_WAIT, WORKER_WAITS = Bar(1, most=True), Bar(3, most=True)
"""A worker waits for the message that brings the task, and for the reply to the settle; Trio polls between them. What a lone
worker does each second besides, as it leads, adds 0.1 here.
"""
COUNT = 1000
WARM = 100
"""Calls before those that are counted."""
SPACING = 0.005
"""Seconds between two tasks, so that the worker gets them one by one."""
WAITS = ("'poll' of 'select.epoll'", "'control' of 'select.kqueue'")


@dataclass(slots=True)
class Counts:
    """What was counted, for each task."""

    calls: float = 0
    waits: float = 0
    switches: float = 0


@contextmanager
def counting(per: Callable[[], int]) -> Generator[Counts]:
    """Count what this thread does in the block. `per` returns the number of tasks, at its end."""
    counts, profile = Counts(), cProfile.Profile()
    profile.enable()
    try:
        yield counts
    finally:
        profile.disable()
    tasks = per()
    for entry in profile.getstats():
        code = entry.code
        counts.calls += entry.callcount / tasks
        if isinstance(code, types.CodeType):
            if code.co_name == "reschedule" and code.co_varnames[0] == "self":  # Trio's method, and not its wrapper
                counts.switches += entry.callcount / tasks
        elif any(name in code for name in WAITS):
            counts.waits += entry.callcount / tasks


async def counted(call: Callable[[], Awaitable[object]], count: int) -> Counts:
    for _ in range(WARM):
        await call()
    with counting(lambda: count) as counts:
        for _ in range(count):
            await call()
    return counts


def counted_in_thread(call: Callable[[], object], count: int) -> Counts:
    for _ in range(WARM):
        call()
    with counting(lambda: count) as counts:
        for _ in range(count):
            call()
    return counts


class Calls:
    """The calls that are counted: a typed function, a raw queue, and what redis-py makes of the least that there is."""

    def __init__(self, server: EmbeddedServer) -> None:
        self.server = server
        self.mesh = worqr.Mesh(server.url)
        self.client: redis.Redis = bare(server)
        self.ran = 0
        self.awaited = 0
        self.came = trio.Event()

        @self.mesh.task(name="order")
        async def order(number: int, text: str) -> None:
            self.ran += 1
            if self.ran == self.awaited:
                self.came.set()

        self.order = order
        self.queue = self.mesh.queue("raw")

    async def typed(self, count: int) -> Counts:
        async with self.mesh.connect():
            return await counted(lambda: self.order.enqueue(1, "abc"), count)

    async def on_asyncio(self, count: int) -> Counts:
        return await trio.to_thread.run_sync(lambda: asyncio.run(self.typed(count)))

    async def raw(self, count: int) -> Counts:
        async with self.mesh.connect():
            return await counted(lambda: self.queue.enqueue(b"x"), count)

    async def blocking(self, count: int) -> Counts:
        try:
            return await trio.to_thread.run_sync(
                counted_in_thread, lambda: worqr.sync(self.order.enqueue, 1, "abc"), count
            )
        finally:
            self.mesh.close()

    async def bare(self, count: int) -> Counts:
        call = partial(self.client.lpush, "bare", b"x")
        return await trio.to_thread.run_sync(counted_in_thread, call, count)

    async def worker(self, count: int) -> Counts:
        """A worker in this thread, while another process enqueues one task after the other."""
        self.client.flushdb()
        self.ran = 0
        async with self.mesh.join(concurrency=100, grace=0), self._drip():
            await self._until(WARM)
            before = self.ran
            with counting(lambda: self.ran - before) as counts:
                await self._until(before + count)
        return counts

    @asynccontextmanager
    async def _drip(self) -> AsyncGenerator[None]:
        task = '{"number":1,"text":"abc"}'
        async with open_child("drip", self.server, queue="order", task=task, spacing=SPACING):
            yield

    async def _until(self, count: int) -> None:
        """Wait until so many tasks have run."""
        self.awaited, self.came = count, trio.Event()
        await self.came.wait()


async def measure(plan: Plan, server: EmbeddedServer) -> list[Table]:
    """Each figure once: it does not vary."""
    calls, count = Calls(server), plan.size(COUNT, 300)
    bare = await calls.bare(count)
    rows: list[Row] = []
    limit = [bare.calls]
    for what, found, most in (
        ("raw, Trio", await calls.raw(count), RAW),
        ("typed, Trio", await calls.typed(count), TYPED),
        ("typed, asyncio", await calls.on_asyncio(count), TYPED),
        ("typed, blocking", await calls.blocking(count), BLOCKING),
    ):
        rows += [
            Row(f"enqueue, {what}", "calls", [found.calls], limit, most),
            Row(f"enqueue, {what}: waits", "waits", [round(found.waits, 1)], bar=ONE_WAIT),
        ]
    worker = await calls.worker(plan.size(400, 200))
    rows += [
        Row("worker, one task after the other", "calls", [worker.calls], limit, WORKER),
        Row("worker: waits", "waits", [round(worker.waits, 1)], bar=WORKER_WAITS),
        Row("worker: switches between tasks", "switches", [round(worker.switches, 1)], bar=SWITCHES),
    ]
    about = "calls: what redis-py makes for one LPUSH"
    notes = [f"{count} tasks each; the worker's come from another process, {SPACING * 1000:g} ms apart"]
    return [Table("calls: functions that Python calls for each task", about, rows, notes)]
