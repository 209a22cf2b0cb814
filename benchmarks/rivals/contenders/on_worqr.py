# /// script
# dependencies = []  # the worqr of the Python that runs the harness
# [tool.rivals]
# title = "worqr"
# variants = { trio = "Trio", asyncio = "asyncio" }
# ///
"""worqr. Both ends run on Trio, or both on asyncio."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import driver
import trio
import worqr

mesh = worqr.Mesh(driver.URL, runs_in="asyncio" if driver.VARIANT == "asyncio" else "loop")


@mesh.task
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
            return await noop.enqueue(argument)
        if function == "ping":
            return await ping.enqueue(argument)
        return await hold.dispatch(argument)

    async def send_many(self, payloads: list[str]) -> None:
        await mesh.enqueue_many(noop.call(each) for each in payloads)

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
                f"`worqr run`, one process, concurrency 100 (default), async handlers on {loop}; producer on {loop}",
                "typed functions, `fn.enqueue()`; a call to cancel or to recover is a job: `fn.dispatch()`",
                "no results kept (default)",
            ],
            every=100,
            at_least_once=True,
        )
    elif driver.VARIANT == "asyncio":
        asyncio.run(produce())
    else:
        trio.run(produce)
