# /// script
# dependencies = ["saq[redis,hiredis]==0.26.4", "typing_extensions==4.16.0"]  # which saq imports and does not ask for
# [tool.rivals]
# title = "SAQ"
# ///
"""SAQ."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import driver
from saq import Queue

RETRIES = 3
"""Attempts; with the default, 1, a job of a killed worker is aborted."""

queue = Queue.from_url(driver.URL)


async def noop(ctx: Any, *, payload: str) -> None:
    driver.noop(payload)


async def ping(ctx: Any, *, payload: str) -> None:
    driver.ping(payload)


async def hold(ctx: Any, *, payload: str) -> None:
    await driver.hold_asyncio(payload)


settings = {"queue": queue, "functions": [noop, ping, hold], "concurrency": driver.CONCURRENCY}


class Producer(driver.Producer):
    async def send(self, function: str, argument: str) -> Any:
        return await queue.enqueue(function, payload=argument, retries=RETRIES)

    async def cancel(self, handle: Any) -> None:
        await handle.abort("cancelled")


async def produce() -> None:
    await queue.connect()
    try:
        await driver.serve_asyncio(Producer())
    finally:
        await queue.disconnect()


def main(role: str) -> None:
    if role == "describe":
        driver.describe(
            packages=["saq", "redis"],
            worker=[sys.executable, "-m", "saq", "on_saq.settings"],
            settings=[
                "`saq`, one process, `concurrency=100`",
                "`retries=3`, because by default a job of a dead worker is aborted",
                "timeout 10 s, results kept for 10 minutes (defaults)",
            ],
            every=100,
            at_least_once=True,
        )
    else:
        asyncio.run(produce())
