"""The cost of the history: drains of plain tasks, of calls and of jobs, by meshes that store it and by meshes that do not."""

from __future__ import annotations

from functools import partial

import worqr
from benchmarks.drain import PREFIX
from benchmarks.loads import CONCURRENCY, Countdown, drain
from benchmarks.measuring import Bar, Plan, Row, Table, in_turn, ratios
from benchmarks.server import bare
from worqr.embedded import EmbeddedServer

QUEUE = "history"
TASK = b"x" * 100


class Drains:
    """Drains of one server by one worker, which leads. They differ in `Mesh(history=)` only."""

    def __init__(self, server: EmbeddedServer, tasks: int) -> None:
        self.server = server
        self.client = bare(server)
        self.tasks = tasks

    async def rate(self, what: str, *, history: bool) -> float:
        """Tasks per second. `what`: raw tasks, or calls of a function, or its jobs."""
        self.client.flushdb()
        mesh = worqr.Mesh(self.server.url, prefix=PREFIX, history=history)
        ran = Countdown(self.tasks)

        async def function(n: int) -> None:
            ran.take()

        declared = None if what == "raw tasks" else mesh.task(function, name="function")
        async with mesh.connect():
            if declared is None:
                await mesh.queue(QUEUE).enqueue(*[TASK] * self.tasks)
            elif what == "calls":
                await mesh.enqueue_many(declared.call(n) for n in range(self.tasks))
            else:
                await mesh.dispatch_many(declared.call(n) for n in range(self.tasks))
        return await drain(mesh, ran, [QUEUE] if declared is None else [])


async def measure(plan: Plan, server: EmbeddedServer) -> list[Table]:
    """Drains with and without history, by turns, in 15 pairs."""
    drains = Drains(server, plan.size(60_000, 500))
    rows: list[Row] = []
    for what in ("raw tasks", "calls", "jobs"):
        stored, without = await in_turn(
            15 if plan.runs == Plan().runs else 1,
            partial(drains.rate, what, history=True),
            partial(drains.rate, what, history=False),
        )
        rows += [
            Row(f"{what}, with history", "tasks/s", stored, without),
            Row("... by those without", "times", ratios(stored, without), bar=Bar(0.97)),
        ]
    return [
        Table(
            f"history: drains of {drains.tasks:,} tasks that do nothing, concurrency {CONCURRENCY}",
            "the same without history, in turn",
            rows,
            ["from joining until the last task has started; the worker is in this process and leads"],
        )
    ]
