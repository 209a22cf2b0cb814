# /// script
# dependencies = ["pydocket==0.27.0"]
# [tool.rivals]
# title = "docket"
# ///
"""docket, whose distribution is pydocket."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import driver
from docket import Docket


async def noop(payload: str) -> None:
    driver.noop(payload)


async def ping(sent: str) -> None:
    driver.ping(sent)


async def hold(path: str) -> None:
    await driver.hold_asyncio(path)


tasks = [noop, ping, hold]


class Producer(driver.Producer):
    def __init__(self, docket: Docket) -> None:
        self.docket = docket

    async def send(self, function: str, argument: str) -> Any:
        execution = await self.docket.add({"noop": noop, "ping": ping, "hold": hold}[function])(argument)
        return execution.key

    async def send_many(self, payloads: list[str]) -> None:
        await self.docket.add_many(self.docket.call(noop)(each) for each in payloads)

    async def cancel(self, handle: Any) -> None:
        await self.docket.cancel(handle)


async def produce() -> None:
    async with Docket(name="rivals", url=driver.URL) as docket:
        for task in tasks:
            docket.register(task)
        await driver.serve_asyncio(Producer(docket))


def main(role: str) -> None:
    if role == "describe":
        command = [sys.executable, "-m", "docket", "worker", "--docket", "rivals", "--url", driver.URL]
        driver.describe(
            packages=["pydocket", "redis"],
            worker=[*command, "--tasks", "on_docket:tasks", "--concurrency", str(driver.CONCURRENCY)],
            settings=[
                "`docket worker --concurrency 100`, one process",
                "redelivery after 5 minutes, results kept for 15 minutes (defaults)",
            ],
            every=100,
            at_least_once=True,
        )
    else:
        asyncio.run(produce())
