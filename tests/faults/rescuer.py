"""The other peer: joins in the test's own process after (or before) a process died, and notes all its runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial

import trio

import worqr
from tests.support.patience import PATIENCE


class Rescuer:
    """A peer that finishes everything. `runs` counts how often each task began here, `attempts` the last attempt's number."""

    def __init__(self) -> None:
        self.runs: Counter[bytes] = Counter()
        self.attempts: dict[bytes, int] = {}
        self._news = trio.Event()

    async def handle(self, task: bytes) -> None:
        self.runs[task] += 1
        self.attempts[task] = worqr.current().attempt
        self._news.set()

    async def wait_all(self, *tasks: bytes, within: float = PATIENCE) -> None:
        """Until each of the tasks has run here."""
        with trio.move_on_after(within):
            while not all(self.runs[task] for task in tasks):
                self._news = trio.Event()
                await self._news.wait()
            return
        raise AssertionError(
            f"not run within {within:g} s: {[t for t in tasks if not self.runs[t]]}; ran: {dict(self.runs)}"
        )


@asynccontextmanager
async def rescuer(url: str, prefix: str, queue: str = "Q1", *, keepalive: float = 1) -> AsyncGenerator[Rescuer]:
    """A `Rescuer` that serves `queue`."""
    mesh, rescuer = worqr.Mesh(url, prefix=prefix, keepalive=keepalive), Rescuer()
    async with mesh.join() as peer, trio.open_nursery() as nursery:
        await nursery.start(partial(peer.serve, queue, rescuer.handle))
        yield rescuer
        nursery.cancel_scope.cancel()


async def wait_for_nobody(url: str, prefix: str, *, but: str = "", within: float = PATIENCE) -> None:
    """Wait until only worker `but` is registered, and no worker is being recovered."""
    mesh = worqr.Mesh(url, prefix=prefix)
    async with mesh.connect():
        with trio.move_on_after(within):
            while [w for w in await mesh.workers() if w.id != but]:
                await trio.sleep(0.05)
            return
    raise AssertionError(f"workers still registered after {within:g} s")
