"""What it costs a job to save and to take a step: one after the other in one run, and once per job in a drain."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial

import worqr
from benchmarks.loads import CONCURRENCY, Countdown, drain
from benchmarks.measuring import Bar, Plan, Row, Table, in_turn, ratios
from benchmarks.server import bare, fill_jobs
from worqr import ops
from worqr.embedded import EmbeddedServer
from worqr.job_options import encode_options
from worqr.keys import QueueKeys

STATE = b"s" * 100
STEP_BAR = Bar(0.5)
CALLS_PER_RUN = 500
WORKER = "bare:00000000000000000000000000000000"


async def charge(n: int) -> dict[str, int]:
    """Do what costs nothing."""
    return {"charged": n}


async def save(n: int) -> None:
    """Save 100 bytes."""
    await worqr.current().save(STATE)


async def step(n: int) -> None:
    """Take one step."""
    await worqr.step(f"charge {n}", charge, n)


async def nothing(n: int) -> None:
    """The handler of a plain job."""


class Saves:
    """Runs that save, on one server."""

    def __init__(self, server: EmbeddedServer, jobs: int) -> None:
        self.mesh = worqr.Mesh(server.url)
        self.client = bare(server)
        self.keys = QueueKeys("worqr", "saving")
        self.jobs = jobs

    async def one_by_one(self, keep: Callable[[int], Awaitable[None]]) -> float:
        """Milliseconds of one call, of many in one run."""
        took, ran = 0.0, Countdown(1)

        async def handler(task: bytes) -> None:
            nonlocal took
            began = time.perf_counter()
            for n in range(CALLS_PER_RUN):
                await keep(n)
            took = time.perf_counter() - began
            ran.take()

        await self._drained(handler, ran)
        return took / CALLS_PER_RUN * 1e3

    async def bare_scripts(self) -> float:
        """The same script with the same arguments, one round trip after the other by redis-py."""
        client, keys = self.client, self.keys
        client.flushdb()
        client.sadd(keys.claims(WORKER), 1)
        client.rpush(keys.claim(1), b"task")
        script = client.script_load(ops.save_state(keys, WORKER, 1, 1, "", STATE).script.source)
        began = time.perf_counter()
        for n in range(CALLS_PER_RUN):
            call = ops.save_state(keys, WORKER, 1, n + 1, "", STATE)
            client.evalsha(script, 1, call.base, *call.args)
        return (time.perf_counter() - began) / CALLS_PER_RUN * 1e3

    async def drain(self, keep: Callable[[int], Awaitable[None]]) -> float:
        """Jobs per second, of which each saves once."""
        ran = Countdown(self.jobs)

        async def handler(task: bytes) -> None:
            await keep(1)
            ran.take()

        return await self._drained(handler, ran)

    async def _drained(self, handler: Callable[[bytes], Awaitable[None]], ran: Countdown) -> float:
        self.client.flushdb()
        fill_jobs(self.client, self.keys, ran.count, encode_options({}))
        return await drain(self.mesh, ran, ["saving"], handler)


async def measure(plan: Plan, server: EmbeddedServer) -> list[Table]:
    """Calls one after the other beside the bare script, and drains beside that of plain jobs."""
    saves = Saves(server, plan.size(10_000, 300))
    async with saves.mesh.connect():
        kinds = {"one save": save, "one step": step}
        limits, *values = await in_turn(
            plan.runs, saves.bare_scripts, *(partial(saves.one_by_one, keep) for keep in kinds.values())
        )
        drains = {"jobs that save once": save, "jobs that take one step": step}
        plain, *rates = await in_turn(
            plan.runs, partial(saves.drain, nothing), *(partial(saves.drain, keep) for keep in drains.values())
        )
    saves.client.flushdb()
    calls = [Row(what, "ms", times, limits) for what, times in zip(kinds, values, strict=True)]
    jobs = [Row(what, "jobs/s", found, plain) for what, found in zip(drains, rates, strict=True)]
    calls.append(Row("saves in the time of one step", "times", ratios(*values), bar=STEP_BAR))
    jobs.append(Row("... by those that save", "times", ratios(*reversed(rates)), bar=STEP_BAR))
    return [
        Table("saving: 100 bytes, one call after the other in one run", "the same script by redis-py", calls),
        Table(f"saving: no-op jobs drained, concurrency {CONCURRENCY}", "jobs that save nothing, in turn", jobs),
    ]
