"""The two loops of most benchmarks: callers that put tasks in, and a peer that drains them.

Both return a rate. What is put in, and what the handlers do, is up to the benchmark.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import trio

import worqr

CONCURRENCY = 100
CALLERS = 100


class Countdown:
    """A handler that does nothing but count. `done` is set when it was called often enough."""

    def __init__(self, count: int) -> None:
        self.count = self.left = count
        self.done = trio.Event()

    def take(self, n: int = 1) -> int:
        """Count so many runs; return how many are left."""
        self.left -= n
        if not self.left:
            self.done.set()
        return self.left

    async def __call__(self, task: bytes) -> int:
        return self.take()


async def drain(
    mesh: worqr.Mesh,
    ran: Countdown,
    queues: Sequence[str] = (),
    handler: Any = None,
    *,
    only: Any = None,
    **options: Any,
) -> float:
    """Let one peer run all that waits; return tasks per second.

    With `queues`, the time begins when the peer enters them; `options` are those of `Peer.serve`. Without, the mesh has
    functions, and the time begins when it joins. It ends with the last handler.
    """
    began = time.perf_counter()
    join = {} if only is None else {"only": only}
    async with mesh.join(concurrency=CONCURRENCY, grace=0, **join) as peer, trio.open_nursery() as nursery:
        if queues:
            began = time.perf_counter()
        for name in queues:
            nursery.start_soon(partial(peer.serve, name, handler or ran, **options))
        await ran.done.wait()
        ended = time.perf_counter()
        nursery.cancel_scope.cancel()
    return ran.count / (ended - began)


async def put_in(put: Callable[[], Awaitable[object]], total: int, callers: int = 1) -> float:
    """Let callers put `total` tasks in, each one after another; return tasks per second."""

    async def caller() -> None:
        for _ in range(total // callers):
            await put()

    began = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for _ in range(callers):
            nursery.start_soon(caller)
    return total // callers * callers / (time.perf_counter() - began)
