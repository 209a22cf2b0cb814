"""How fast a peer drains jobs, which have a record each, beside raw tasks drained in turn."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from statistics import median
from typing import Any

import worqr
from benchmarks.drain import CONCURRENCY, Drains
from benchmarks.measuring import Bar, Plan, Row, Table, in_turn, ratios
from benchmarks.memory import used
from benchmarks.server import account, fill_jobs
from worqr.embedded import EmbeddedServer
from worqr.job_options import encode_options

BAR = Bar(10_000)
OWN: Mapping[str, Any] = {"timeout": 30, "result_ttl": 60, "retry": worqr.RetryPolicy(max_failures=5)}
"""The options that a job of the last kind has itself."""


class JobDrains(Drains):
    """Drains of jobs. `used` collects the microseconds per job of the plain ones: our process, the server."""

    def __init__(self, server: EmbeddedServer, tasks: int) -> None:
        super().__init__(server, tasks)
        self.used: list[tuple[float, float]] = []
        self.bytes_kept: dict[int, float] = {}
        self.cpu_kept: dict[tuple[int, int], float] = {}

    async def raw(self, **options: Any) -> float:
        """The same with raw tasks."""
        self.client.flushdb()
        return await self.whole(**options)

    async def kept(self, tags: int, jobs: int) -> float:
        """The same, each job kept at its end among the last `jobs`, with so many tags, each of which 100 jobs share."""
        self.client.flushdb()
        keep = worqr.Keep(jobs=jobs, bytes=1 << 30)

        def options_of(n: int) -> Mapping[str, object]:
            return encode_options({"keep": keep, "tags": {f"tag{each}:{n // 100}" for each in range(tags)}})

        empty = used(self.client)
        fill_jobs(self.client, self.keys("jobs"), self.tasks, options_of)
        before = account(self.client)
        rate = await self.first(["jobs"], self.tasks)
        self.cpu_kept[tags, jobs] = account(self.client).since(before).cpu / self.tasks * 1e6
        if jobs >= self.tasks:
            self.bytes_kept[tags] = (used(self.client) - empty) / self.tasks
        return rate

    async def jobs(self, own: Mapping[str, Any], **options: Any) -> float:
        """Dispatch jobs that bring `own` options, drain them with a peer that serves with `options`; jobs per second."""
        self.client.flushdb()
        fill_jobs(self.client, self.keys("jobs"), self.tasks, encode_options(own))
        before, used = account(self.client), time.process_time()
        rate = await self.first(["jobs"], self.tasks, **options)
        spent = account(self.client).since(before)
        if not own and not options:
            self.used.append(((time.process_time() - used) / self.tasks * 1e6, spent.cpu / self.tasks * 1e6))
        return rate


async def measure(plan: Plan, server: EmbeddedServer) -> list[Table]:
    """Drains of jobs in turn with a drain of raw tasks."""
    drains = JobDrains(server, plan.size(20_000, 100))
    kinds = {
        "jobs, nothing kept of them": partial(drains.jobs, {}),
        "... the result of each kept for a minute": partial(drains.jobs, {}, result_ttl=60),
        "... served with a timeout of 30 s": partial(drains.jobs, {}, timeout=30),
        "... each brings timeout, result_ttl and retry itself": partial(drains.jobs, OWN),
    }
    async with drains.mesh.connect():
        limits, *values = await in_turn(plan.runs, drains.raw, *kinds.values())
        kept = {
            f"... each kept{f', with {tags} tags' if tags else ''}{'' if all_kept else ', of which half are kept'}": partial(
                drains.kept, tags, drains.tasks if all_kept else drains.tasks // 2
            )
            for tags, all_kept in ((0, True), (0, False), (1, True), (8, True))
        }
        plain, *shares = await in_turn(plan.runs, partial(drains.jobs, {}), *kept.values())
    drains.client.flushdb()
    rows = [Row(what, "jobs/s", rates, limits, BAR) for what, rates in zip(kinds, values, strict=True)]
    ours, theirs = (median(one) for one in zip(*drains.used, strict=True))
    notes = [f"CPU per job, nothing kept: {ours:.1f} us in this process, {theirs:.1f} us in the server"]
    title = f"jobs: no-op jobs of 100 bytes drained, one process, concurrency {CONCURRENCY}"
    cpu = [f"{us:.0f} us ({tags} tags, {jobs:,} kept)" for (tags, jobs), us in drains.cpu_kept.items()]
    memory = [f"{count:,.0f} bytes with {tags} tags" for tags, count in drains.bytes_kept.items()]
    return [
        Table(title, "raw tasks drained by the same peer, in turn", rows, notes),
        Table(
            "jobs: what it costs to keep them at their end",
            "the same jobs, nothing kept of them",
            [
                Row(what, "times", ratios(rates, plain), bar=Bar(0.8) if "tags" not in what else None)
                for what, rates in zip(kept, shares, strict=True)
            ],
            [
                f"memory of a kept job with a payload of 100 bytes: {', '.join(memory)}; 100 jobs share a tag",
                f"CPU of the server for each job, in the last run: {', '.join(cpu)}",
            ],
        ),
    ]
