"""The cost of running handlers elsewhere: tasks drained in threads and on the asyncio loop, beside the peer's own loop."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any, Literal

import trio

import worqr
from benchmarks import loads
from benchmarks.loads import CONCURRENCY
from benchmarks.measuring import Plan, Row, Table, in_turn
from benchmarks.server import bare, fill
from worqr.embedded import EmbeddedServer
from worqr.keys import QueueKeys

QUEUE = QueueKeys("worqr", "places")

Place = Literal["loop", "thread", "asyncio"]


class Countdown(loads.Countdown):
    """A handler, async or plain, from whichever thread."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._lock = threading.Lock()
        self._token = trio.lowlevel.current_trio_token()

    def plain(self, task: bytes) -> None:
        with self._lock:
            self.left -= 1
            if self.left:
                return
        self._token.run_sync_soon(self.done.set)

    async def awaited(self, task: bytes) -> None:
        self.plain(task)


async def drain(server: EmbeddedServer, count: int, place: Place) -> float:
    """Tasks per second, from entering the queue to the last handler."""
    client = bare(server)
    client.unlink(QUEUE.base)
    fill(client, QUEUE.base, count)
    countdown = Countdown(count)
    handler: Any = countdown.plain if place == "thread" else countdown.awaited
    return await loads.drain(worqr.Mesh(server.url), countdown, [QUEUE.name], handler, runs_in=place)


async def measure(plan: Plan, server: EmbeddedServer) -> list[Table]:
    """Drains by place, in turn."""
    count = plan.size(20_000, 500)
    loop, threads, asyncio = await in_turn(
        plan.runs,
        partial(drain, server, count, "loop"),
        partial(drain, server, count, "thread"),
        partial(drain, server, count, "asyncio"),
    )
    return [
        Table(
            f"places: no-op tasks drained by where their handler runs, one process, concurrency {CONCURRENCY}",
            "the same on the peer's own loop, in turn",
            [
                Row("in threads (40)", "tasks/s", threads, loop),
                Row("on the asyncio loop", "tasks/s", asyncio, loop),
            ],
        )
    ]
