"""What workflows cost: while they are suspended, when they wake up, and with jobs of their own beside batches."""

from __future__ import annotations

import time
from functools import partial

import trio

import worqr
from benchmarks.loads import CONCURRENCY, Countdown
from benchmarks.measuring import Bar, Plan, Row, Table, in_turn, ratios
from benchmarks.pickup import Latencies
from benchmarks.server import account, bare
from worqr.embedded import EmbeddedServer

CHILDREN = 10
WINDOW = 60.0
"""Seconds in which an idle worker is watched: each has one turn of the minute, in which the history is written."""
SETTLE = 3.0
REST = 0.01
"""Seconds for which worker and server are idle before each sample: caches and clocks of the machine are as cold for all."""


class Sleepers:
    """A worker that has nothing to do, beside workflows that wait for a value."""

    def __init__(self, server: EmbeddedServer, plan: Plan, count: int) -> None:
        self.client = bare(server)
        self.client.flushdb()
        self.mesh = worqr.Mesh(server.url)
        self.count = count
        self.plan = plan

    async def rates(self) -> tuple[list[float], list[float]]:
        """Requests per second of the worker, and all commands of the server, some windows of each: all ended, all wait.

        The first ones ran in the same queue, because a leader records the history of queues that are in use.
        """

        @self.mesh.workflow
        async def sleeper(n: int, *, waits: bool) -> None:
            begun.take()
            if waits:
                await worqr.wait_for("go", int)

        requests, commands = list[float](), list[float]()
        async with self.mesh.join(concurrency=CONCURRENCY, grace=0):
            for waits in (False, True):
                begun = Countdown(self.count)
                await self.mesh.dispatch_many(sleeper.call(n, waits=waits) for n in range(self.count))
                await begun.done.wait()
                while (await self.mesh.queue(sleeper.name).info()).running:  # noqa: ASYNC110 - the server tells no event
                    await trio.sleep(0.05)
                await self._window(requests, commands)
        self.client.flushdb()
        return requests, commands

    async def _window(self, requests: list[float], commands: list[float]) -> None:
        await trio.sleep(self.plan.seconds(SETTLE))
        before = account(self.client)
        await trio.sleep(self.plan.seconds(WINDOW))
        since = account(self.client).since(before)
        requests.append(since.rate)
        commands.append(since.commands / since.at)


class Wakes:
    """Samples in seconds until the first line of a function, which an idle worker in this process runs."""

    def __init__(self, mesh: worqr.Mesh) -> None:
        self.number = 0
        self.began = 0.0
        self.took = 0.0
        self.started = trio.Event()

        @mesh.task
        async def plain(n: int) -> None:
            self.note()

        @mesh.workflow
        async def waits(n: int) -> None:
            self.note()
            await worqr.wait_for("go", int)

        self.plain = plain
        self.waits = waits

    def note(self) -> None:
        self.took = time.perf_counter() - self.began
        self.started.set()

    def begin(self) -> None:
        self.number += 1
        self.started, self.began = trio.Event(), time.perf_counter()

    async def pick_up(self) -> float:
        await trio.sleep(REST)
        self.begin()
        await self.plain.dispatch(self.number)
        await self.started.wait()
        return self.took

    async def wake(self) -> float:
        self.begin()
        job = await self.waits.dispatch(self.number)
        await self.started.wait()
        while (await job.status()).state != "suspended":  # noqa: ASYNC110 - the server tells no event
            await trio.sleep(0.002)
        await trio.sleep(REST)
        self.begin()
        await job.send("go", 1)
        await self.started.wait()
        return self.took


class Families:
    """Jobs of jobs, as a workflow waits for them and as a batch with a follow-up, each made by a job in a worker."""

    def __init__(self, server: EmbeddedServer, parents: int) -> None:
        self.server = server
        self.client = bare(server)
        self.parents = parents

    async def rate(self, *, batch: bool) -> float:
        """Children per second, until the last parent or follow-up."""
        mesh, ended = worqr.Mesh(self.server.url), Countdown(self.parents)

        @mesh.task
        async def child(n: int) -> None: ...

        @mesh.task
        async def follow_up() -> None:
            ended.take()

        @mesh.task
        async def opener(n: int) -> None:
            async with mesh.batch(then=follow_up.call()) as made:
                await made.dispatch_many(child.call(n) for n in range(CHILDREN))

        @mesh.workflow
        async def parent(n: int) -> None:
            await worqr.gather(*(child.run(n) for n in range(CHILDREN)))
            ended.take()

        first = opener.call if batch else parent.call
        async with mesh.connect():
            await mesh.dispatch_many(first(n) for n in range(self.parents))
        began = time.perf_counter()
        async with mesh.join(concurrency=CONCURRENCY, grace=0):
            await ended.done.wait()
            took = time.perf_counter() - began
        self.client.flushdb()
        return self.parents * CHILDREN / took


async def measure(plan: Plan, server: EmbeddedServer) -> list[Table]:
    """All of it on one server, with the workers in this process."""
    families = Families(server, plan.size(1_000, 20))
    batches, workflows = await in_turn(
        plan.runs, partial(families.rate, batch=True), partial(families.rate, batch=False)
    )
    mesh = worqr.Mesh(server.url)
    wakes = Wakes(mesh)
    async with mesh.join(grace=0):
        kinds = [Latencies(sample, plan.size(100, 5)) for sample in (wakes.pick_up, wakes.wake)]
        picked, woke = await in_turn(plan.runs, *(kind.run for kind in kinds))
    sleepers = Sleepers(server, plan, plan.size(100_000, 200))
    requests, commands = await sleepers.rates()
    rows = [
        Row(f"children of workflows with {CHILDREN}", "jobs/s", workflows, batches),
        Row("... by those of batches", "times", ratios(workflows, batches), bar=Bar(0.5)),
        Row("from a value to the first line, p50", "ms", woke, picked),
        Row("... by a plain job", "times", ratios(woke, picked), bar=Bar(2, most=True)),
        Row(f"requests beside {sleepers.count:,} suspended workflows", "1/s", requests[1:], requests[:1]),
        Row("... more than after as many that ended", "1/s", [requests[1] - requests[0]], bar=Bar(0.1, most=True)),
        Row("commands of the server, more than after as many that ended", "1/s", [commands[1] - commands[0]]),
    ]
    notes = [
        f"{families.parents:,} workflows, or jobs that each make a batch with a follow-up, by one worker",
        f"{kinds[0].per_run} samples per run; the plain job is dispatched",
        f"the worker leads; windows of {plan.seconds(WINDOW):g} s",
    ]
    return [Table("workflows: beside batches, plain jobs, and an idle worker", "as the row says", rows, notes)]
