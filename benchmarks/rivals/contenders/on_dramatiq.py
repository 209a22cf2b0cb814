# /// script
# dependencies = ["dramatiq[redis]==2.2.1"]
# [tool.rivals]
# title = "Dramatiq"
# ///
"""Dramatiq."""

from __future__ import annotations

import sys
from typing import Any

import dramatiq
import driver
from dramatiq.brokers.redis import RedisBroker

broker = RedisBroker(url=driver.URL)
dramatiq.set_broker(broker)


@dramatiq.actor
def noop(payload: str) -> None:
    driver.noop(payload)


@dramatiq.actor
def ping(sent: str) -> None:
    driver.ping(sent)


@dramatiq.actor
def hold(path: str) -> None:
    driver.hold(path)


class Producer(driver.Producer):
    def send(self, function: str, argument: str) -> Any:
        return {"noop": noop, "ping": ping, "hold": hold}[function].send(argument)


def main(role: str) -> None:
    if role == "describe":
        driver.describe(
            packages=["dramatiq", "redis"],
            worker=[sys.executable, "-m", "dramatiq", "--processes", "1", "--threads", "100", "on_dramatiq"],
            settings=[
                "`dramatiq --processes 1 --threads 100`, RedisBroker, default middleware",
                "no results kept (default)",
            ],
            every=100,
            at_least_once=True,
        )
    else:
        driver.run_blocking(Producer())
