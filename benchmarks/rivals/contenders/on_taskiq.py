# /// script
# dependencies = ["taskiq==0.13.0", "taskiq-redis==1.2.4"]
# [tool.rivals]
# title = "taskiq"
# variants = { stream = "stream broker", list = "list broker" }
# ///
"""taskiq with the two brokers of taskiq-redis."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import driver
from taskiq_redis import ListQueueBroker, RedisStreamBroker

broker = (ListQueueBroker if driver.VARIANT == "list" else RedisStreamBroker)(url=driver.URL)


@broker.task
async def noop(payload: str) -> None:
    driver.noop(payload)


@broker.task
async def ping(sent: str) -> None:
    driver.ping(sent)


@broker.task
async def hold(path: str) -> None:
    await driver.hold_asyncio(path)


class Producer(driver.Producer):
    async def send(self, function: str, argument: str) -> Any:
        return await {"noop": noop, "ping": ping, "hold": hold}[function].kiq(argument)


async def produce() -> None:
    await broker.startup()
    try:
        await driver.serve_asyncio(Producer())
    finally:
        await broker.shutdown()


def main(role: str) -> None:
    if role == "describe":
        command = [sys.executable, "-m", "taskiq", "worker", "on_taskiq:broker", "--workers", "1"]
        driver.describe(
            packages=["taskiq", "taskiq-redis", "redis"],
            worker=[*command, "--max-async-tasks", str(driver.CONCURRENCY)],
            settings=[
                "`taskiq worker --workers 1 --max-async-tasks 100` (default), no result backend (default)",
                f"{type(broker).__name__} with its defaults",
            ],
            every=100,
            at_least_once=driver.VARIANT != "list",
        )
    else:
        asyncio.run(produce())
