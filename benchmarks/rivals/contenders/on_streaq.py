# /// script
# dependencies = ["streaq==7.2.0", "trio==0.35.0"]
# [tool.rivals]
# title = "streaQ"
# variants = { asyncio = "asyncio", trio = "Trio" }
# ///
"""streaQ, both ends on asyncio, or both on Trio."""

from __future__ import annotations

import sys
from typing import Any

import anyio
import driver
from streaq import Worker

BACKEND: Any = "trio" if driver.VARIANT == "trio" else "asyncio"
worker: Worker[None] = Worker(redis_url=driver.URL, concurrency=driver.CONCURRENCY, anyio_backend=BACKEND)


@worker.task
async def noop(payload: str) -> None:
    driver.noop(payload)


@worker.task
async def ping(sent: str) -> None:
    driver.ping(sent)


@worker.task
async def hold(path: str) -> None:
    with driver.holding(path):
        await anyio.sleep(driver.HELD)


class Producer(driver.Producer):
    async def send(self, function: str, argument: str) -> Any:
        return await {"noop": noop, "ping": ping, "hold": hold}[function].enqueue(argument)

    async def send_many(self, payloads: list[str]) -> None:
        await worker.enqueue_many([noop.enqueue(each) for each in payloads])

    async def cancel(self, handle: Any) -> None:
        await handle.abort()


async def produce() -> None:
    async with worker:
        await (driver.serve_trio if BACKEND == "trio" else driver.serve_asyncio)(Producer())


def main(role: str) -> None:
    if role == "describe":
        driver.describe(
            packages=["streaq", "coredis"],
            worker=[sys.executable, "-m", "streaq", "run", "on_streaq:worker"],
            settings=[
                f'`anyio_backend="{BACKEND}"`; producer on the same',
                "`streaq run`, one process, `concurrency=100`, results kept for 5 minutes (default)",
            ],
            every=100,
            at_least_once=True,
        )
    else:
        anyio.run(produce, backend=BACKEND)
