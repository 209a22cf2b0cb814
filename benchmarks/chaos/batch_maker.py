"""`BatchMaker`: batches of a producer, batches in batches, and failed jobs that are put back."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

import trio

import worqr
from benchmarks.chaos.sender import Sender
from benchmarks.chaos.workload import ASYNCIO, DOOMED, FOLLOW_UPS, HOMES, JOBS, OPEN_FOR, RAW, THREAD, follow_up_of

DEEPEST: Final = 2
"""Batches in batches in batches."""
PUTS_BACK: Final = (0, 1, 1, 2, 3)
"""How often the failed jobs of a batch are put back."""


class BatchMaker:
    """Makes batches of jobs of several queues. A block may end with an error, or its batch be cancelled."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._rng = sender.rng
        self._batches = 0

    async def make(self, nursery: trio.Nursery) -> None:
        """Make a batch, perhaps with batches in it."""
        await self._make(nursery, None, "", 0)

    async def _make(self, nursery: trio.Nursery, parent: worqr.Batch | None, parent_name: str, depth: int) -> None:
        self._batches += 1
        name, rng, mesh = f"{self._sender.name}.{self._batches}", self._rng, self._sender.mesh
        home = rng.choice(HOMES)
        follow_ups = {kind: mesh.call(FOLLOW_UPS, follow_up_of(name, kind).encode()) for kind in ("then", "otherwise")}
        options = worqr.BatchOptions(
            id=name,
            queue=home,
            open_for=OPEN_FOR,
            on_failed=rng.choice(("continue", "continue", "cancel")),
            then=follow_ups["then"],
            otherwise=follow_ups["otherwise"],
        )
        with suppress(worqr.WorqrError, ZeroDivisionError):
            async with mesh.batch(parent=parent, **options) as batch:
                self._sender.ledger.write("opened", batch=name, parent=parent_name)
                nursery.start_soon(self._put_back, home, name)
                await self._fill(nursery, batch, name, depth)

    async def _fill(self, nursery: trio.Nursery, batch: worqr.Batch, name: str, depth: int) -> None:
        rng = self._rng
        for _ in range(rng.randint(0, 8)):
            if depth < DEEPEST and rng.random() < 0.15:
                await self._make(nursery, batch, name, depth + 1)
            else:
                await self._add(batch, name)
            await trio.sleep(rng.uniform(0, 0.05))
        x = rng.random()
        if x < 0.1:
            await batch.cancel(reason="at random")
        elif x < 0.15:
            raise ZeroDivisionError

    async def _add(self, batch: worqr.Batch, name: str) -> None:
        queue = self._rng.choice((RAW, THREAD, ASYNCIO, JOBS))
        task = self._sender.new_task(queue, DOOMED if self._rng.random() < 0.2 else "")
        call = self._sender.mesh.call(queue, task.encode())
        await self._sender.send(queue, [task], lambda: batch.dispatch(call), batch=name)

    async def _put_back(self, home: str, name: str) -> None:
        """Put the failed jobs of a batch back a few times, whether it has ended or not."""
        for _ in range(self._rng.choice(PUTS_BACK)):
            await trio.sleep(self._rng.choice((0.3, 1.0, 2.0)))
            call = self._sender.begin("retry", batch=name)
            try:
                count = await self._sender.mesh.queue(home).batch(name).retry_failed()
            except worqr.WorqrError as error:
                self._sender.failed(call, error)
            else:
                self._sender.ledger.write("retried", call=call, count=count)
