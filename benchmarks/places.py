"""The cost of running handlers elsewhere: tasks drained in threads and on the asyncio loop, beside the peer's own loop."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any, Literal

import trio

import worqr
from benchmarks.measuring import Plan, Row, Table, in_turn
from benchmarks.server import bare, fill
from worqr.embedded import EmbeddedServer
from worqr.keys import QueueKeys

CONCURRENCY = 100
QUEUE = QueueKeys("worqr", "places")

Place = Literal["loop", "thread", "asyncio"]


class Countdown:
    """A handler, async or plain, that ends a drain when it was called often enough; from whichever thread."""

    def __init__(self, count: int) -> None:
        self.done = trio.Event()
        self._left = count
        self._lock = threading.Lock()
        self._token = trio.lowlevel.current_trio_token()

    def plain(self, task: bytes) -> None:
        with self._lock:
            self._left -= 1
            if self._left:
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
    async with worqr.Mesh(server.url).join(concurrency=CONCURRENCY, grace=0) as peer, trio.open_nursery() as nursery:
        began = time.perf_counter()
        nursery.start_soon(partial(peer.serve, QUEUE.name, handler, runs_in=place))
        await countdown.done.wait()
        ended = time.perf_counter()
        nursery.cancel_scope.cancel()
    return count / (ended - began)


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
