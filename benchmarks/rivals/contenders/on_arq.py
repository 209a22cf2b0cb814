# /// script
# dependencies = ["arq==0.28.0"]
# [tool.rivals]
# title = "arq"
# ///
"""arq."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import driver
from arq import create_pool
from arq.connections import ArqRedis, RedisSettings


async def noop(ctx: Any, payload: str) -> None:
    driver.noop(payload)


async def ping(ctx: Any, sent: str) -> None:
    driver.ping(sent)


async def hold(ctx: Any, path: str) -> None:
    await driver.hold_asyncio(path)


class WorkerSettings:
    functions = (noop, ping, hold)
    redis_settings = RedisSettings.from_dsn(driver.URL)
    max_jobs = driver.CONCURRENCY
    allow_abort_jobs = True


class Producer(driver.Producer):
    def __init__(self, pool: ArqRedis) -> None:
        self.pool = pool

    async def send(self, function: str, argument: str) -> Any:
        return await self.pool.enqueue_job(function, argument)

    async def cancel(self, handle: Any) -> None:
        await handle.abort()


async def produce() -> None:
    pool = await create_pool(WorkerSettings.redis_settings)
    try:
        await driver.serve_asyncio(Producer(pool))
    finally:
        await pool.aclose()


def main(role: str) -> None:
    if role == "describe":
        driver.describe(
            packages=["arq", "redis"],
            worker=[os.path.join(os.path.dirname(sys.executable), "arq"), "on_arq.WorkerSettings"],
            settings=[
                "`arq`, one process, `max_jobs=100`, `allow_abort_jobs=True` (needed to cancel)",
                "job timeout 300 s, results kept for 1 hour, queue polled every 0.5 s (defaults)",
            ],
            every=100,
            at_least_once=True,
        )
    else:
        asyncio.run(produce())
