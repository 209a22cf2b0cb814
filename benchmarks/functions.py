"""How fast typed functions go in and are drained, beside raw tasks of the same size with a handler of bytes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from uuid import UUID

import trio

import worqr
from benchmarks.measuring import Bar, Plan, Row, Table, in_turn
from benchmarks.server import bare
from worqr.embedded import EmbeddedServer
from worqr.keys import QueueKeys

CONCURRENCY = 100
CALLERS = 100
ORDER = UUID("7f8ad1cf-95b5-4cf7-8b0d-6a6f17a6cf5e")
AT = datetime(2026, 1, 1, tzinfo=UTC)
BODY = "b" * 40


@dataclass
class Order:
    """The data of a typed payload."""

    id: UUID
    at: datetime
    body: str


class Functions:
    """The functions of one mesh, each of which ends a drain when it was called often enough."""

    def __init__(self, server: EmbeddedServer) -> None:
        self.mesh = worqr.Mesh(server.url)
        self.client = bare(server)
        self.left = 0
        self.done = trio.Event()

        @self.mesh.task(name="mail")
        async def mail(to: str, subject: str, body: str = "") -> int:
            return self._ran()

        @self.mesh.task(name="ship")
        async def ship(order: Order, /) -> int:
            return self._ran()

        @self.mesh.task(name="job", result_ttl=60)
        async def job(to: str, subject: str, body: str = "") -> int:
            return self._ran()

        self.mail, self.ship, self.job = mail, ship, job

    def _ran(self) -> int:
        self.left -= 1
        if self.left == 0:
            self.done.set()
        return self.left

    async def handle(self, task: bytes) -> int:
        return self._ran()

    def _begin(self, count: int) -> None:
        for name in ("mail", "ship", "job", "raw"):
            self.client.unlink(QueueKeys("worqr", name).base)
        self.left, self.done = count, trio.Event()

    def mails(self, count: int) -> list[worqr.Call[int]]:
        return [self.mail.call("ada@example.org", f"subject {n}", BODY) for n in range(count)]

    # Draining: from joining to the last call

    async def drain_mails(self, count: int) -> float:
        self._begin(count)
        async with self.mesh.connect():
            await self.mesh.enqueue_many(self.mails(count))
            return await self._drain("mail", count)

    async def drain_orders(self, count: int) -> float:
        self._begin(count)
        async with self.mesh.connect():
            await self.mesh.enqueue_many(self.ship.call(Order(ORDER, AT, BODY)) for _ in range(count))
            return await self._drain("ship", count)

    async def drain_results(self, count: int) -> float:
        self._begin(count)
        async with self.mesh.connect():
            await self.mesh.dispatch_many(self.job.call("ada@example.org", f"subject {n}", BODY) for n in range(count))
            return await self._drain("job", count)

    async def drain_raw(self, count: int) -> float:
        self._begin(count)
        async with self.mesh.connect():
            await self.mesh.queue("raw").enqueue(*[call.task for call in self.mails(count)])
            began = time.perf_counter()
            async with (
                self.mesh.join(concurrency=CONCURRENCY, grace=0, only=["ship"]) as peer,
                trio.open_nursery() as nursery,
            ):
                nursery.start_soon(peer.serve, "raw", self.handle)
                await self.done.wait()
                ended = time.perf_counter()
                nursery.cancel_scope.cancel()
            return count / (ended - began)

    async def _drain(self, name: str, count: int) -> float:
        began = time.perf_counter()
        async with self.mesh.join(concurrency=CONCURRENCY, grace=0, only=[name]):
            await self.done.wait()
            ended = time.perf_counter()
        return count / (ended - began)

    # Putting in

    async def in_turn(self, count: int) -> float:
        self._begin(0)
        async with self.mesh.connect():
            began = time.perf_counter()
            for _ in range(count):
                await self.mail.enqueue("ada@example.org", "hi", BODY)
            return count / (time.perf_counter() - began)

    async def raw_in_turn(self, count: int) -> float:
        self._begin(0)
        async with self.mesh.connect():
            queue, task = self.mesh.queue("mail"), self.mail.call("ada@example.org", "hi", BODY).task
            began = time.perf_counter()
            for _ in range(count):
                await queue.enqueue(task)
            return count / (time.perf_counter() - began)

    async def at_once(self, count: int, *, raw: bool = False) -> float:
        self._begin(0)
        queue, task = self.mesh.queue("mail"), self.mail.call("ada@example.org", "hi", BODY).task

        async def caller() -> None:
            for _ in range(count // CALLERS):
                if raw:
                    await queue.enqueue(task)
                else:
                    await self.mail.enqueue("ada@example.org", "hi", BODY)

        async with self.mesh.connect():
            began = time.perf_counter()
            async with trio.open_nursery() as nursery:
                for _ in range(CALLERS):
                    nursery.start_soon(caller)
            return count / (time.perf_counter() - began)

    async def many(self, count: int, *, raw: bool = False) -> float:
        self._begin(0)
        async with self.mesh.connect():
            tasks = [call.task for call in self.mails(count)] if raw else []
            began = time.perf_counter()
            if raw:
                await self.mesh.queue("mail").enqueue(*tasks)
            else:
                await self.mesh.enqueue_many(self.mails(count))
            return count / (time.perf_counter() - began)


async def measure(plan: Plan, server: EmbeddedServer) -> list[Table]:
    """Drains of typed functions, and ways to put their calls in, in turn with raw tasks."""
    functions = Functions(server)
    count, few = plan.size(30_000, 1_000), plan.size(2_000, 200)
    mails, orders, results, raw = await in_turn(
        plan.runs,
        *(
            partial(drain, count)
            for drain in (
                functions.drain_mails,
                functions.drain_orders,
                functions.drain_results,
                functions.drain_raw,
            )
        ),
    )
    one, raw_one, at_once, raw_at_once, many, raw_many = await in_turn(
        plan.runs,
        partial(functions.in_turn, few),
        partial(functions.raw_in_turn, few),
        partial(functions.at_once, count),
        partial(functions.at_once, count, raw=True),
        partial(functions.many, count),
        partial(functions.many, count, raw=True),
    )
    return [
        Table(
            f"functions: typed calls drained, one process, concurrency {CONCURRENCY}, from joining to the last call",
            "raw tasks of the same bytes with a handler of bytes, in turn",
            [
                Row("three texts", "tasks/s", mails, raw, Bar(15_000)),
                Row("a dataclass with UUID and datetime, whole", "tasks/s", orders, raw),
                Row("three texts, dispatched, the result kept", "jobs/s", results, raw),
            ],
        ),
        Table(
            "functions: typed calls enqueued",
            "the same bytes enqueued raw, in turn",
            [
                Row("one await at a time", "tasks/s", one, raw_one),
                Row(f"{CALLERS} callers", "tasks/s", at_once, raw_at_once),
                Row("enqueue_many, calls made in the same time", "tasks/s", many, raw_many),
            ],
        ),
    ]
