"""The cost of a storm of retries for its neighbours: thousands of jobs fail, and another queue's tasks must flow."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from statistics import median

import trio

import worqr
from benchmarks.child import fail
from benchmarks.children import open_child
from benchmarks.measuring import Plan, Row, Table, in_turn, percentile
from benchmarks.pickup import PAUSE
from benchmarks.server import bare, fill_jobs
from worqr.embedded import EmbeddedServer
from worqr.keys import QueueKeys

CONCURRENCY = 100
FEED = 100
AHEAD = 1000
"""Tasks that wait, so that the peer never finds its queue empty."""

Run = Callable[[], Awaitable[float]]


class Storm:
    """A calm queue with its peer in this process, and queues of failing jobs beside it."""

    def __init__(self, server: EmbeddedServer, plan: Plan) -> None:
        self.mesh = worqr.Mesh(server.url)
        self.client = bare(server)
        self.calm = self.mesh.queue("calm")
        self.jobs = plan.size(10_000, 200)
        self.window = plan.size(3_000, 300) / 1000
        self.failures: list[float] = []
        self.p99: dict[str, list[float]] = {}
        self._flown = 0
        self._took = 0.0
        self._started = trio.Event()
        self._hungry = trio.Event()

    async def handler(self, task: bytes) -> None:
        """Of the calm queue: a task is filler, or the time at which it was put in."""
        if len(task) < FEED:
            self._took = time.perf_counter() - float(task)
            self._started.set()
            return
        self._flown += 1
        if self._flown % FEED == 0:
            self._hungry.set()

    async def flow(self) -> float:
        """Tasks per second through the calm queue, which always holds some."""
        first = fed = self._flown
        batch = [b"x" * FEED] * FEED
        began = time.perf_counter()
        while time.perf_counter() - began < self.window:
            if fed < self._flown + AHEAD:  # its peer may take them as fast as they come
                fed += await self.calm.enqueue(*batch)
            else:
                await self._wait_hungry()
        rate = (self._flown - first) / (time.perf_counter() - began)
        while self._flown < fed:
            await self._wait_hungry()
        return rate

    async def _wait_hungry(self) -> None:
        self._hungry = trio.Event()
        await self._hungry.wait()

    async def pick_up(self, kind: str) -> float:
        """Single tasks with pauses: the median of the milliseconds until their handler starts; the p99 is noted."""
        samples: list[float] = []
        ends = time.perf_counter() + self.window
        while time.perf_counter() < ends:
            await trio.sleep(PAUSE)
            self._started = trio.Event()
            await self.calm.enqueue(repr(time.perf_counter()).encode())
            await self._started.wait()
            samples.append(self._took * 1000)
        self.p99.setdefault(kind, []).append(percentile(samples, 99))
        return percentile(samples, 50)

    async def beside(self, name: str, run: Run) -> float:
        """`run` while the jobs of the queue `name` fail, and fail again."""
        queue = self.mesh.queue(name)
        await queue.pause("until all are there")
        fill_jobs(self.client, QueueKeys("worqr", name), self.jobs, {})
        before = (await queue.info()).counts.get("retried", 0)
        await queue.resume()
        began = time.perf_counter()
        found = await run()
        took, after = time.perf_counter() - began, (await queue.info()).counts.get("retried", 0)
        self.failures.append((after - before) / took)
        await queue.cancel_all(wait=10)
        return found


async def measure(plan: Plan, server: EmbeddedServer) -> list[Table]:
    """Alone, beside a storm in another process, beside one on the same peer; in turn."""
    storm = Storm(server, plan)
    async with (
        open_child("peers", server, queue="far", handler="fail"),
        storm.mesh.join(concurrency=CONCURRENCY, grace=0) as peer,
        trio.open_nursery() as nursery,
    ):
        await nursery.start(partial(peer.serve, "calm", storm.handler))
        await nursery.start(partial(peer.serve, "near", fail))
        runs: list[Run] = []
        for of in (lambda _: storm.flow, lambda kind: partial(storm.pick_up, kind)):
            runs += [of("alone"), partial(storm.beside, "far", of("far")), partial(storm.beside, "near", of("near"))]
        flow, far, near, pick, pick_far, pick_near = await in_turn(plan.runs, *runs)
        nursery.cancel_scope.cancel()
    where = ("alone", "beside a storm in another process", "beside a storm on the same peer")
    rows = [Row(f"{what}", "tasks/s", values, flow) for what, values in zip(where, (flow, far, near), strict=True)]
    for what, kind, values in zip(where, ("alone", "far", "near"), (pick, pick_far, pick_near), strict=True):
        rows.append(Row(f"pick-up {what}, p50", "ms", values, pick))
        rows.append(Row("... p99", "ms", storm.p99[kind], storm.p99["alone"]))
    notes = [
        f"a storm: {storm.jobs:,} jobs fail with the default backoff, the first time all at once; {storm.window:g} s from "
        f"then on are measured, in which {median(storm.failures):,.0f} runs a second failed",
        "nothing is logged; a traceback per failure, as is the default, costs the peer that runs them more",
    ]
    return [Table("storm: raw tasks of one queue while the jobs of another fail", "alone, in turn", rows, notes)]
