"""The cost of tracing: plain tasks drained and enqueued by meshes without tracing, with spans, and with traces in plain tasks."""

from __future__ import annotations

from functools import partial

from opentelemetry.sdk.trace import TracerProvider

import worqr
from benchmarks.loads import CALLERS, CONCURRENCY, Countdown, drain, put_in
from benchmarks.measuring import Plan, Row, Table, in_turn
from benchmarks.server import bare
from worqr.embedded import EmbeddedServer
from worqr.otel import Tracing

QUEUE = "tracing"
TASK = b"x" * 100


class Meshes:
    """Meshes that differ in their tracing only. Their spans are sampled, and not exported."""

    def __init__(self, server: EmbeddedServer, tasks: int) -> None:
        provider = TracerProvider()
        self.off: worqr.Mesh = worqr.Mesh(server.url)
        self.links: worqr.Mesh = worqr.Mesh(server.url, tracing=Tracing(tracer_provider=provider))
        self.raw: worqr.Mesh = worqr.Mesh(server.url, tracing=Tracing(tracer_provider=provider, raw=True))
        self._client = bare(server)
        self._tasks = tasks

    async def drain(self, mesh: worqr.Mesh) -> float:
        """Fill a queue and drain it with one peer of this mesh; return tasks per second."""
        self._client.flushdb()
        async with mesh.connect():
            await mesh.queue(QUEUE).enqueue(*[TASK] * self._tasks)
        return await drain(mesh, Countdown(self._tasks), [QUEUE])

    async def enqueue(self, mesh: worqr.Mesh) -> float:
        """Enqueue one task after the other in each of many Trio tasks; return tasks per second."""
        self._client.flushdb()
        queue = mesh.queue(QUEUE)
        async with mesh.connect():
            return await put_in(lambda: queue.enqueue(TASK), self._tasks, CALLERS)


async def measure(plan: Plan, server: EmbeddedServer) -> list[Table]:
    """Drains and enqueues, in turn."""
    meshes = Meshes(server, plan.size(20_000, 500))
    tables: list[Table] = []
    for what, measured in (("drained", meshes.drain), ("enqueued", meshes.enqueue)):
        off, again, links, raw = await in_turn(
            plan.runs, *(partial(measured, mesh) for mesh in (meshes.off, meshes.off, meshes.links, meshes.raw))
        )
        tables.append(
            Table(
                f"tracing: no-op tasks of {len(TASK)} bytes {what}, one process, concurrency {CONCURRENCY}",
                "the same without tracing, in turn",
                [
                    Row("without tracing, once more", "tasks/s", again, off),
                    Row("with spans", "tasks/s", links, off),
                    Row("with spans, and traces in plain tasks", "tasks/s", raw, off),
                ],
            )
        )
    return tables
