# /// script
# dependencies = ["rq==3.0.0", "redis==8.1.0"]
# [tool.rivals]
# title = "RQ"
# ///
"""RQ."""

from __future__ import annotations

import os
import sys
from typing import Any

import driver
from redis import Redis
from rq import Queue, Retry
from rq.command import send_stop_job_command

RETRY = Retry(max=3)
"""Without it, a job whose worker died is marked as failed and does not run again."""


class Producer(driver.Producer):
    def __init__(self) -> None:
        self.redis = Redis.from_url(driver.URL)
        self.queue = Queue(connection=self.redis)

    def send(self, function: str, argument: str) -> Any:
        return self.queue.enqueue(f"driver.{function}", argument, retry=RETRY)

    def send_many(self, payloads: list[str]) -> None:
        self.queue.enqueue_many([Queue.prepare_data("driver.noop", (each,), retry=RETRY) for each in payloads])

    def cancel(self, handle: Any) -> None:
        send_stop_job_command(self.redis, handle.id)


def main(role: str) -> None:
    if role == "describe":
        command = [os.path.join(os.path.dirname(sys.executable), "rq"), "worker", "--url", driver.URL]
        driver.describe(
            packages=["rq", "redis"],
            worker=command,
            settings=[
                "`rq worker`: one job at a time, each in its own process; there is no concurrency to set",
                "`Retry(max=3)`, because by default a job of a dead worker fails",
                "results kept for 500 s (default)",
            ],
            every=1,
            at_least_once=True,
        )
    else:
        driver.run_blocking(Producer())
