"""A peer of the chaos run, a process of its own: ``python -m benchmarks.chaos.peer SETTINGS``."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import trio

import worqr
from benchmarks.chaos import handlers
from benchmarks.chaos.child import Child
from benchmarks.chaos.handlers import Handlers, options_of
from benchmarks.chaos.ledger import now
from benchmarks.chaos.rows import Database
from benchmarks.chaos.topics import subscribe
from benchmarks.chaos.workflows import flows
from benchmarks.chaos.workload import (
    ASYNCIO,
    FOLLOW_UPS,
    HAND,
    JOBS,
    KEEPALIVE,
    LANES,
    LIMITED,
    PREFIX,
    PROCESS,
    RAW,
    ROOM,
    ROWS,
    SAVES,
    SCHEDULES,
    SINGLE,
    SPOILT,
    THREAD,
    TICKS,
    UPDATES,
)

IN_LOOP = (RAW, JOBS, SINGLE, UPDATES, TICKS, LIMITED, LANES, ROOM, FOLLOW_UPS, ROWS)
IN_SPELLS = frozenset({RAW, ASYNCIO, LIMITED, LANES, ROOM})
"""Queues that each peer leaves and serves again all the time."""


class Peer:
    """Serves all queues, works on one by hand, and leaves on SIGTERM."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._rng = child.rng
        self._ledger = child.ledger
        self._handlers = Handlers(child.ledger, child.rng)
        self._mesh = worqr.Mesh(
            child.settings.url,
            prefix=PREFIX,
            app=child.settings.name,
            deploy=child.settings.deploy,
            keepalive=KEEPALIVE,
            patience=child.settings.patience,
            middleware=[self._handlers.around],
        )
        for name, beat in SCHEDULES.items():
            call = self._mesh.call(TICKS, name.encode())
            if beat.complete:
                self._mesh.every(beat.period, call, name=name, misfire=100, overlap="queue")
            else:
                self._mesh.every(beat.period, call, name=name)
        self._mesh.include(flows)
        Database(Path(child.settings.folder)).outbox(self._mesh, child.settings.replicas)  # which the peer sweeps
        subscribe(self._mesh, self._handlers)
        self._joined: worqr.Peer | None = None
        self._leaving = False

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(self._leave_on_sigterm, nursery)
            async with self._mesh.join(concurrency=12, threads=4, processes=1, grace=1) as peer:
                self._joined = peer
                nursery.start_soon(self._tell_worker, peer)
                await self._serve(peer)
            nursery.cancel_scope.cancel()
        self._ledger.write("left")

    async def _leave_on_sigterm(
        self, nursery: trio.Nursery, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        with trio.open_signal_receiver(signal.SIGTERM) as signals:
            task_status.started()
            async for _ in signals:
                grace = self._rng.choice([0, 0.2, 1])
                self._ledger.write("leaving", grace=grace)
                self._leaving = True
                if self._joined is None:
                    nursery.cancel_scope.cancel()
                    return
                nursery.start_soon(self._joined.drain, grace)

    async def _tell_worker(self, peer: worqr.Peer) -> None:
        """Write each worker id: a new one means that the last was declared dead."""
        last = ""
        while True:
            if peer.id and peer.id != last:
                last = peer.id
                self._ledger.write("registered", worker=last)
            await trio.sleep(0.02)

    async def _serve(self, peer: worqr.Peer) -> None:
        """Until the peer has drained."""
        bury = self._handlers.bury
        async with trio.open_nursery() as nursery:
            serve = [
                *((queue, self._handlers.in_loop, {}) for queue in IN_LOOP),
                (SAVES, self._handlers.in_loop_saving, {}),
                (THREAD, self._handlers.in_thread, {}),
                (ASYNCIO, self._handlers.in_asyncio, {"runs_in": "asyncio"}),
                (PROCESS, handlers.in_process, {"runs_in": "process"}),
            ]
            for queue, handler, options in serve:
                given = {**options_of(queue), **options, "on_failure": bury}
                start = partial(peer.serve, queue, handler, **given)
                if queue in IN_SPELLS:
                    nursery.start_soon(self._serve_in_spells, queue, start)
                else:
                    nursery.start_soon(self._unless_leaving, start)
            nursery.start_soon(self._unless_leaving, partial(self._work, peer))
            await peer.wait()

    async def _unless_leaving(self, serve: Callable[[], Awaitable[None]]) -> None:
        """Serve a queue. A peer that was drained before it came to that refuses."""
        try:
            await serve()
        except worqr.UsageError:
            if not self._leaving:
                raise

    async def _serve_in_spells(self, queue: str, serve: Callable[[], Awaitable[None]]) -> None:
        """Serve for a while, leave the queue, and come back, while the peer goes on with the other queues."""
        while not self._leaving:
            with trio.move_on_after(self._rng.uniform(2, 12)) as spell:
                await self._unless_leaving(serve)
            if not spell.cancelled_caught:
                return
            self._ledger.write("left_queue", queue=queue, at=now() - (trio.current_time() - spell.deadline))
            await trio.sleep(self._rng.uniform(0, 0.5))

    async def _work(self, peer: worqr.Peer) -> None:
        """Take batches of claims by hand and settle them in every way."""
        async with peer.work(HAND, **handlers.options_of(HAND)) as claims:
            while batch := await claims.take(self._rng.randint(1, 4)):
                await claims.finish([claim for claim in batch if claim.id.startswith(SPOILT)])
                batch = [claim for claim in batch if not claim.id.startswith(SPOILT)]
                for claim in batch:
                    task = claim.task.decode()
                    self._ledger.write("began", queue=HAND, task=task, id=claim.id, fence=claim.fence)
                await trio.sleep(self._rng.uniform(0, 0.04))
                await self._settle(claims, batch)

    async def _settle(self, claims: worqr.Claims, batch: list[worqr.Claim]) -> None:
        to_finish: list[worqr.Claim] = []
        for claim in batch:
            x = self._rng.random()
            if claim.cancel_reason is not None:
                self._ended(claim, f"cancelled: {claim.cancel_reason}")
            elif x < 0.9:
                self._ended(claim, "returned")
                to_finish.append(claim)
                continue
            await self._settle_one(claim, x)
        try:
            lost = await claims.finish(to_finish)
        except worqr.WorqrError as error:
            for claim in to_finish:
                self._settled(claim, type(error).__name__)
        else:
            for claim in to_finish:
                self._settled(claim, "lost" if claim in lost else "ok")

    async def _settle_one(self, claim: worqr.Claim, x: float) -> None:
        try:
            if claim.cancel_reason is not None:
                await claim.stop()  # ends a claim whose task was cancelled, and gives any other back
            elif x < 0.94:
                self._ended(claim, "stopped")
                await claim.stop()
            elif x < 0.98:
                self._ended(claim, "error", counted=True)
                await claim.retry()
            else:
                self._ended(claim, "failure")
                await claim.fail("at random")
        except worqr.WorqrError as error:
            self._settled(claim, type(error).__name__)
        else:
            self._settled(claim, "ok")

    def _ended(self, claim: worqr.Claim, how: str, *, counted: bool = False) -> None:
        self._ledger.write("ended", queue=HAND, fence=claim.fence, how=how, counted=counted)

    def _settled(self, claim: worqr.Claim, answer: str) -> None:
        self._ledger.write("settled", queue=HAND, fence=claim.fence, answer=answer)


def main() -> None:
    child = Child.of_command_line()
    settings = child.settings
    os.environ |= {handlers.FOLDER: settings.folder, handlers.NAME: settings.name, handlers.URL: settings.url}
    os.environ[handlers.DEPLOY] = str(settings.deploy)
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    trio.run(Peer(child).run)


if __name__ == "__main__":
    main()
