"""Batches: what jobs in a batch cost beside jobs in none, how soon the follow-up runs, and how long a cancel of all takes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import trio

import worqr
from benchmarks.drain import CONCURRENCY, PREFIX
from benchmarks.measuring import Bar, Plan, Row, Table, in_turn, percentile, ratios
from benchmarks.memory import used
from benchmarks.server import bare
from worqr.embedded import EmbeddedServer

RUNNING = 100
"""Jobs of the cancelled batch that run."""


@dataclass(slots=True)
class Drained:
    """What the drains have shown, one value per run."""

    bytes_per_job: list[float] = field(default_factory=list[float])
    follow_ups: list[float] = field(default_factory=list[float])


class Drains:
    """Drains of one server: jobs of one function are dispatched, and then one peer runs them."""

    def __init__(self, server: EmbeddedServer, jobs: int) -> None:
        self.server = server
        self.jobs = jobs
        self.client = bare(server)
        self.plain = Drained()
        self.batched = Drained()

    async def rate(self, *, batch: bool) -> float:
        """Jobs per second; with `batch`, all of them are in one."""
        seen, follow_ups, done, followed = 0, 0, trio.Event(), trio.Event()
        mesh = worqr.Mesh(self.server.url, prefix=PREFIX)
        ended = 0.0

        @mesh.task(name="member")
        async def member(n: int) -> None:
            nonlocal seen, ended
            seen += 1
            if seen == self.jobs:
                ended = time.perf_counter()
                done.set()

        @mesh.task(name="follow-up")
        async def follow_up() -> None:
            nonlocal follow_ups
            follow_ups += 1
            followed.set()

        before = used(self.client)
        async with mesh.connect():
            calls = (member.call(n) for n in range(self.jobs))
            if batch:
                async with mesh.batch(then=follow_up.call()) as made:
                    await made.dispatch_many(calls)
            else:
                await mesh.dispatch_many(calls)
            found = self.batched if batch else self.plain
            found.bytes_per_job.append((used(self.client) - before) / self.jobs)
        began = time.perf_counter()
        async with mesh.join(concurrency=CONCURRENCY, grace=10):
            await done.wait()
            if batch:
                await followed.wait()
        found.follow_ups.append(follow_ups)
        self.client.flushdb()
        return self.jobs / (ended - began)


async def latencies(server: EmbeddedServer, samples: int, *, across: bool) -> list[float]:
    """Seconds from the end of the last job of a batch to the begin of its follow-up, which is in the same or another queue."""
    mesh = worqr.Mesh(server.url, prefix=PREFIX)
    go, followed = trio.Event(), trio.Event()
    ended, found = 0.0, list[float]()

    @mesh.task(name="last")
    async def last(is_follow_up: bool) -> None:
        nonlocal ended
        if is_follow_up:
            note()
            return
        await go.wait()
        ended = time.perf_counter()

    @mesh.task(name="elsewhere")
    async def elsewhere() -> None:
        note()

    def note() -> None:
        found.append(time.perf_counter() - ended)
        followed.set()

    async with mesh.join(grace=0):
        for _ in range(samples):
            go, followed = trio.Event(), trio.Event()
            then: worqr.Call[None] = elsewhere.call() if across else last.call(is_follow_up=True)
            async with mesh.batch(then=then) as batch:
                await batch.dispatch(last.call(is_follow_up=False))
            go.set()
            await followed.wait()
    return found


@dataclass(slots=True)
class Cancelled:
    """Seconds since the call of cancel: until each job that ran then has ended, and until the batch has. And how many jobs
    started after the call, before the cancel had reached them."""

    running: list[float]
    batch: float
    started_later: int


async def cancel_all(server: EmbeddedServer, jobs: int, running: int) -> Cancelled:
    """Cancel a batch of which some jobs run."""
    mesh = worqr.Mesh(server.url, prefix=PREFIX)
    began, all_run, ends = 0, trio.Event(), dict[int, float]()

    @mesh.task(name="held")
    async def held(n: int) -> None:
        nonlocal began
        began += 1
        number = began
        if began == running:
            all_run.set()
        try:
            await trio.sleep_forever()
        finally:
            ends[number] = time.perf_counter()

    async with mesh.join(concurrency=running, grace=0):
        async with mesh.batch(queue="held") as batch:
            await batch.dispatch_many(held.call(n) for n in range(jobs))
        await all_run.wait()
        called = time.perf_counter()
        await batch.cancel()
        await batch.wait()
        ended = time.perf_counter()
    bare(server).flushdb()
    first = [end - called for number, end in ends.items() if number <= running]
    return Cancelled(first, ended - called, began - running)


def _p50(samples: Sequence[float]) -> float:
    return percentile(samples, 50) * 1e3


async def measure(plan: Plan, server: EmbeddedServer) -> list[Table]:
    """All of it on one server, which this benchmark has started."""
    jobs, samples = plan.size(100_000, 1_000), plan.size(200, 5)
    drains = Drains(server, jobs)
    plain, batched = await in_turn(plan.runs, partial(drains.rate, batch=False), partial(drains.rate, batch=True))
    extra = [
        ours - theirs for ours, theirs in zip(drains.batched.bytes_per_job, drains.plain.bytes_per_job, strict=True)
    ]
    same = [_p50(await latencies(server, samples, across=False)) for _ in range(plan.runs)]
    across = [_p50(await latencies(server, samples, across=True)) for _ in range(plan.runs)]
    cancels = [await cancel_all(server, jobs, plan.size(RUNNING, 10)) for _ in range(plan.size(3, 1))]
    return [
        Table(
            "batches: what they cost",
            "the same jobs in no batch",
            [
                Row(f"{jobs:,} jobs in no batch", "jobs/s", plain),
                Row(f"{jobs:,} jobs in one batch", "jobs/s", batched, plain),
                Row("... by those in none", "times", ratios(batched, plain), bar=Bar(0.75)),
                Row("follow-ups of a batch", "times", drains.batched.follow_ups, bar=Bar(1, most=True), worst=True),
                Row("memory of a job in a batch, above one in none", "bytes", extra, bar=Bar(120, most=True)),
            ],
            ["the peer is in this process", "the jobs are in another queue than the follow-up"],
        ),
        Table(
            "batches: from the end of the last job to the follow-up, and cancels",
            "none",
            [
                Row("the follow-up is in the queue of the jobs, p50", "ms", same, bar=Bar(2, most=True)),
                Row("... in another queue, p50", "ms", across, bar=Bar(6, most=True)),
                Row(
                    f"cancel of {jobs:,} jobs: running ones, p99",
                    "s",
                    [percentile(each.running, 99) for each in cancels],
                    bar=Bar(1, most=True),
                ),
                Row("... jobs that started during the cancel", "jobs", [each.started_later for each in cancels]),
                Row("... until the batch has ended", "s", [each.batch for each in cancels], bar=Bar(10, most=True)),
            ],
            [f"{samples} batches per run"],
        ),
    ]
