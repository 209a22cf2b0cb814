"""Lanes: what jobs in lanes cost beside jobs in none, in time and in memory, and whether turns are fair."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

import trio

import worqr
from benchmarks.drain import CONCURRENCY, PREFIX
from benchmarks.measuring import Bar, Plan, Row, Table, in_turn, ratios
from benchmarks.server import bare
from worqr.embedded import EmbeddedServer

FEW = 4
HEAVY = 5
"""The weight of one of four lanes."""
EACH = 10
"""Starts of a lane, in the mean, when turns are compared."""
SPARE = 3
"""Jobs of a lane beyond these, so that none runs dry."""
LATE = "late"
"""A lane that gets its first job in the middle."""


@dataclass(slots=True)
class Drained:
    """What one drain has shown."""

    rate: float = 0.0
    bytes_per_job: float = 0.0
    starts: Counter[int] = field(default_factory=Counter[int])
    """Of each lane, up to the moment at which the drain was to stop."""


class Drains:
    """Drains of one server: jobs of one function are dispatched, and then one peer runs them."""

    def __init__(self, server: EmbeddedServer, jobs: int) -> None:
        self.server = server
        self.jobs = jobs
        self.client = bare(server)

    async def rate(self, lanes: int) -> float:
        """Jobs per second in so many lanes (0: in none)."""
        return (await self.drain(lanes)).rate

    async def drain(
        self, lanes: int, *, weights: dict[str, int] | None = None, backlog: int = 0, stop: int = 0
    ) -> Drained:
        """Drain the jobs, and `backlog` more in lane 0; stop after `stop` starts (0: at the end)."""
        found, done, started = Drained(), trio.Event(), 0
        mesh = worqr.Mesh(self.server.url, prefix=PREFIX)
        by = worqr.Lanes(lambda n: str(n % lanes), weights=weights or {}) if lanes else worqr.Lanes()
        total = self.jobs + backlog
        last = stop or total

        @mesh.task(name="laned", lanes=by)
        async def work(n: int) -> None:
            nonlocal started
            if found.rate:
                return
            found.starts[n % max(lanes, 1)] += 1
            started += 1  # Counter.total() adds up all lanes: that was most of the time
            if started == last:
                found.rate = last / (time.perf_counter() - began)
                done.set()

        before = self._used()
        async with mesh.connect():
            await mesh.dispatch_many(work.call(n) for n in range(self.jobs))
            await mesh.dispatch_many(work.call(n * lanes) for n in range(backlog))
            found.bytes_per_job = (self._used() - before) / total
        began = time.perf_counter()
        async with mesh.join(concurrency=CONCURRENCY, grace=10):
            await done.wait()
        self.client.flushdb()
        return found

    def _used(self) -> int:
        return int(self.client.info("memory")["used_memory"])


@dataclass(slots=True)
class Turns:
    """Starts of jobs in many lanes that never run dry, one of which has a backlog."""

    starts: Counter[str] = field(default_factory=Counter[str])
    started: int = 0
    late: int = 0
    """Starts when a job was put into a new lane."""
    waited: int = 0
    """Starts between that and the start of this job."""


async def take_turns(server: EmbeddedServer, lanes: int, each: int, backlog: int) -> Turns:
    """Count starts until a lane has had `each` in the mean. In the middle, a lane comes late."""
    turns, done = Turns(), trio.Event()
    mesh = worqr.Mesh(server.url, prefix=PREFIX)

    @mesh.task(name="laned", lanes=worqr.Lanes("customer"))
    async def work(customer: str) -> None:
        if turns.started == lanes * each:
            return
        turns.starts[customer] += 1
        turns.started += 1
        if customer == LATE:
            turns.waited = turns.started - turns.late
        elif turns.started == lanes * each // 2:
            await work.dispatch(LATE)
            turns.late = turns.started
        if turns.started == lanes * each:
            done.set()

    async with mesh.connect():
        await mesh.dispatch_many(work.call(str(n)) for _ in range(each + SPARE) for n in range(lanes))
        await mesh.dispatch_many(work.call("0") for _ in range(backlog))
    async with mesh.join(concurrency=CONCURRENCY, grace=10):
        await done.wait()
    bare(server).flushdb()
    return turns


async def measure(plan: Plan, server: EmbeddedServer) -> list[Table]:
    """All of it on one server, which this benchmark has started."""
    jobs, many = plan.size(50_000, 500), plan.size(10_000, 50)
    drains = Drains(server, jobs)
    none, few, lots = await in_turn(
        plan.runs, partial(drains.rate, 0), partial(drains.rate, FEW), partial(drains.rate, many)
    )
    plain, laned = await drains.drain(0), await drains.drain(jobs // 10)
    turns = await take_turns(server, many, EACH, backlog=many * EACH)
    heavy = await drains.drain(FEW, weights={"0": HEAVY}, backlog=jobs, stop=jobs // 4)
    share = heavy.starts[0] / heavy.starts.total() / (HEAVY / (HEAVY + FEW - 1))
    return [
        Table(
            "lanes: what they cost, and whether turns are fair",
            "the same jobs without lanes",
            [
                Row("jobs in no lane", "jobs/s", none),
                Row(f"jobs in {FEW} lanes", "jobs/s", few, none),
                Row("... by those in none", "times", ratios(few, none), bar=Bar(0.80)),
                Row(f"jobs in {many:,} lanes", "jobs/s", lots, none),
                Row("... by those in none", "times", ratios(lots, none), bar=Bar(0.55)),
                Row("memory of a job, ten in each lane", "bytes", [laned.bytes_per_job], [plain.bytes_per_job]),
                Row(
                    "... above that of a plain one",
                    "bytes",
                    [laned.bytes_per_job - plain.bytes_per_job],
                    bar=Bar(40, most=True),
                ),
                Row(
                    f"{many:,} lanes, one with a backlog: its starts by the mean",
                    "times",
                    [turns.starts["0"] / EACH],
                    bar=Bar(1.1, most=True),
                ),
                Row(
                    "... least of a lane by the mean",
                    "times",
                    [min(turns.starts[str(n)] for n in range(many)) / EACH],
                    bar=Bar(0.9),
                ),
                Row("... until a lane that comes late starts", "rounds", [turns.waited / many], bar=Bar(2, most=True)),
                Row(f"weight {HEAVY} beside three of 1: its share by the fair one", "times", [share], bar=Bar(0.95)),
            ],
            ["the peer is in this process"],
        )
    ]
