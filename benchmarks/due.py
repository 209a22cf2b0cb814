"""A million scheduled jobs: their cost in memory, and the effect on other operations, beside a queue of few."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import partial
from itertools import count

import redis
import trio

import worqr
from benchmarks.measuring import Bar, Plan, Row, Table, in_turn, percentile
from benchmarks.pickup import Sample, rows
from benchmarks.server import bare
from worqr.embedded import EmbeddedServer

TASK = b"x" * 100
DAY = 86_400
CALLERS = 1000
IDLE_BAR = Bar(20, most=True)
SOON = 0.05
STEP = 0.00037
"""Seconds between the due times of successive single jobs, chosen so that they meet all phases of a millisecond."""


def used(client: redis.Redis) -> int:
    """Bytes that the server has allocated, its tables of keys among them."""
    return int(client.info("memory")["used_memory"])


def name_of(number: int) -> str:
    return f"job-{number:07d}"


async def schedule(queue: worqr.Queue, jobs: int) -> float:
    """Dispatch `jobs` over the day after the next, by many callers; return the seconds that took."""
    numbers = iter(range(jobs))

    async def caller() -> None:
        for number in numbers:
            await queue.dispatch(TASK, id=name_of(number), delay=DAY + number * 7919 % DAY)

    began = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for _ in range(CALLERS):
            nursery.start_soon(caller)
    return time.perf_counter() - began


def bare_memory(client: redis.Redis, jobs: int) -> float:
    """Bytes per job of the least that could be kept: the payload under a key, and the id in a sorted set."""
    before = used(client)
    for start in range(0, jobs, 1000):
        pipe = client.pipeline(transaction=False)
        for number in range(start, start + 1000):
            pipe.set(f"bare:job:{name_of(number)}", TASK)
            pipe.zadd("bare:due", {name_of(number): number})
        pipe.execute()
    found = (used(client) - before) / jobs
    client.flushdb()
    return found


class Lateness:
    """A peer's handler, and what it notes: how long after its due time each run began, in milliseconds.

    `hurried` counts the flows that began before all of their jobs were dispatched: their figures are none.
    """

    def __init__(self) -> None:
        self.late: list[float] = []
        self._left = 0
        self._done = trio.Event()
        self.p99: list[float] = []
        self.hurried = 0

    async def handler(self, task: bytes) -> None:
        self.late.append((time.time() - worqr.current().run_at.timestamp()) * 1000)
        self._left -= 1
        if not self._left:
            self._done.set()

    def expect(self, runs: int) -> None:
        self.late, self._left, self._done = [], runs, trio.Event()

    async def median(self) -> float:
        """When all are there: their median; the p99 is noted."""
        await self._done.wait()
        self.p99.append(percentile(self.late, 99))
        return percentile(self.late, 50)

    async def singly(self, queue: worqr.Queue, jobs: int) -> float:
        """One job after the other, each due soon, and nothing else to do."""
        self.expect(jobs)
        for number in range(jobs):
            await queue.dispatch(TASK, delay=SOON)
            await trio.sleep(SOON + 0.02 + number * STEP)
        return await self.median()

    async def flow(self, queue: worqr.Queue, rate: int, seconds: float) -> float:
        """So many come due each second, one by one; all were dispatched before the first is due."""
        jobs = int(rate * seconds)
        begin = time.time() + 1 + jobs / 2_000
        self.expect(jobs)
        async with trio.open_nursery() as nursery:
            for number in range(jobs):
                due = datetime.fromtimestamp(begin + number / rate, UTC)
                nursery.start_soon(partial(queue.dispatch, TASK, run_at=due))
        self.hurried += time.time() > begin
        return await self.median()


def timed(call: Callable[[int], Awaitable[object]], start: int) -> Sample:
    """How long each call takes, with a new number each."""
    numbers = count(start)

    async def sample() -> float:
        number = next(numbers)
        began = time.perf_counter()
        await call(number)
        return time.perf_counter() - began

    return sample


async def cancel(queue: worqr.Queue, number: int) -> None:
    assert (await queue.job(name_of(number)).cancel()).waiting == 1


async def postpone(queue: worqr.Queue, number: int) -> None:
    job = await queue.dispatch(TASK, id=name_of(number), delay=3 * DAY + number)
    assert job.outcome == "updated"


def lateness_rows(what: str, medians: list[list[float]], lates: list[Lateness], bar: Bar | None) -> list[Row]:
    """p50 and p99 of the first, beside the second if there is one."""
    p50 = Row(f"{what}, p50", "ms", medians[0], medians[1] if len(medians) > 1 else [], bar)
    p99 = Row(f"{what}, p99", "ms", lates[0].p99, lates[1].p99 if len(lates) > 1 else [], bar)
    return [p50, p99]


async def measure(plan: Plan, server: EmbeddedServer) -> list[Table]:
    """An idle mesh first; then the million, in turn with a queue of few."""
    mesh, client = worqr.Mesh(server.url), bare(server)
    single, among, alone = Lateness(), Lateness(), Lateness()
    many, few = plan.size(1_000_000, 5_000), plan.size(2_000, 200)
    rate, seconds, per_run = plan.size(1_000, 200), plan.seconds(5), plan.size(200, 10)
    least = bare_memory(client, plan.size(100_000, 5_000))
    async with mesh.join(grace=0) as peer, trio.open_nursery() as nursery:
        for name, lateness in (("single", single), ("many", among), ("few", alone)):
            await nursery.start(partial(peer.serve, name, lateness.handler))
        single.expect(1)
        await mesh.queue("single").dispatch(TASK, delay=0.01)  # the peer leads before this one has run
        await single.median()
        single.p99.clear()
        (singles,) = await in_turn(plan.runs, partial(single.singly, mesh.queue("single"), plan.size(100, 5)))
        found = lateness_rows("idle mesh, one job at a time, late", [singles], [single], IDLE_BAR)
        await schedule(mesh.queue("few"), few)
        before = used(client)
        took = await schedule(mesh.queue("many"), many)
        memory = (used(client) - before) / many
        big, small = mesh.queue("many"), mesh.queue("few")
        flows = await in_turn(
            plan.runs, partial(among.flow, big, rate, seconds), partial(alone.flow, small, rate, seconds)
        )
        found += lateness_rows(f"{rate:,} jobs a second come due, late", flows, [among, alone], None)
        pairs = [
            (what, timed(partial(call, big), start), timed(partial(call, small), start))
            for what, call, start in (("cancel", cancel, 0), ("update", postpone, few // 2))
        ]
        found += await rows(plan, pairs, (None, None), per_run)
        nursery.cancel_scope.cancel()
    client.flushdb()
    cost = [
        Row("server memory per job", "bytes", [memory], [least]),
        Row("dispatched by 1,000 callers", "jobs/s", [many / took]),
    ]
    notes = [
        f"dispatching took {took:.0f} s; memory: the limit is a bare SET of the payload and a ZADD of the id",
        f"late: from the due time until the handler starts, by the system's clock; {rate * seconds:,.0f} jobs per run",
        *["a flow began before all was dispatched: too slow a machine, measure again"][: among.hurried + alone.hurried],
    ]
    limit = f"the same in a queue of {few:,} jobs, in turn"
    return [Table(f"due: {many:,} jobs of 100 bytes that are due later", limit, cost + found, notes)]
