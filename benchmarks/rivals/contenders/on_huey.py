# /// script
# dependencies = ["huey==3.5.4", "redis==8.1.0"]
# [tool.rivals]
# title = "huey"
# ///
"""huey."""

from __future__ import annotations

import sys
from typing import Any

import driver
from huey import RedisHuey

huey = RedisHuey("rivals", url=driver.URL)


@huey.task()
def noop(payload: str) -> None:
    driver.noop(payload)


@huey.task()
def ping(sent: str) -> None:
    driver.ping(sent)


@huey.task()
def hold(path: str) -> None:
    driver.hold(path)


class Producer(driver.Producer):
    def send(self, function: str, argument: str) -> Any:
        return {"noop": noop, "ping": ping, "hold": hold}[function](argument)


def main(role: str) -> None:
    if role == "describe":
        consumer = [sys.executable, "-m", "huey.bin.huey_consumer", "on_huey.huey"]
        driver.describe(
            packages=["huey", "redis"],
            worker=[*consumer, "--workers", str(driver.CONCURRENCY), "--worker-type", "thread"],
            settings=[
                "`huey_consumer --workers 100 --worker-type thread`, one process, RedisHuey",
                "results are kept unless they are None (default)",
            ],
            every=100,
            at_least_once=False,
        )
    else:
        driver.run_blocking(Producer())
