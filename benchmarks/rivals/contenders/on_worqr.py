# /// script
# dependencies = []  # the worqr of the Python that runs the harness
# [tool.rivals]
# title = "worqr"
# variants = { trio = "Trio", asyncio = "asyncio", jobs = "jobs with results" }
# ///
"""worqr with plain tasks, on Trio or on asyncio at both ends; and on Trio with jobs whose results are kept."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import driver
import trio

import worqr

JOBS = driver.VARIANT == "jobs"
RESULT_TTL = 600 if JOBS else None
"""Seconds, as most of the other libraries keep results by default."""

mesh = worqr.Mesh(driver.URL, runs_in="asyncio" if driver.VARIANT == "asyncio" else "loop")


@mesh.task(result_ttl=RESULT_TTL)
async def noop(payload: str) -> None:
    driver.noop(payload)


@mesh.task
async def ping(sent: str) -> None:
    driver.ping(sent)


@mesh.task
async def hold(path: str) -> None:
    if driver.VARIANT == "asyncio":
        await driver.hold_asyncio(path)
    else:
        with driver.holding(path):
            await trio.sleep(driver.HELD)


class Producer(driver.Producer):
    async def send(self, function: str, argument: str) -> Any:
        if function == "noop":
            return await (noop.dispatch(argument) if JOBS else noop.enqueue(argument))
        if function == "ping":
            return await ping.enqueue(argument)
        return await hold.dispatch(argument)

    async def send_many(self, payloads: list[str]) -> None:
        calls = (noop.call(each) for each in payloads)
        await (mesh.dispatch_many(calls) if JOBS else mesh.enqueue_many(calls))

    async def cancel(self, handle: Any) -> None:
        await handle.cancel()


async def produce() -> None:
    async with mesh.connect():
        await (driver.serve_asyncio if driver.VARIANT == "asyncio" else driver.serve_trio)(Producer())


def main(role: str) -> None:
    if role == "describe":
        loop = "asyncio" if driver.VARIANT == "asyncio" else "Trio"
        driver.describe(
            packages=["worqr", "redis", "trio"],
            worker=[sys.executable, "-m", "worqr", "run", "on_worqr:mesh"],
            settings=[
                "`worqr run`, one process, concurrency 100 (default)",
                f"async handlers and producer on {loop}",
                "jobs, `fn.dispatch()`, results kept for 10 minutes"
                if JOBS
                else "tasks, `fn.enqueue()`, without results (default)",
                "the task that is cancelled, or whose worker is killed, is a job",
            ],
            every=100,
            at_least_once=True,
        )
    elif driver.VARIANT == "asyncio":
        asyncio.run(produce())
    else:
        trio.run(produce)
