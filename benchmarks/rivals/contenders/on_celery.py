# /// script
# dependencies = ["celery[redis]==5.7.0"]
# [tool.rivals]
# title = "Celery"
# variants = { threads = "threads", prefork = "prefork" }
# ///
"""Celery, with a pool of threads, and with its default pool of processes."""

from __future__ import annotations

import sys
from typing import Any

import driver
from celery import Celery

app = Celery("on_celery", broker=driver.URL)
app.conf.update(task_acks_late=True, task_reject_on_worker_lost=True)
noop = app.task(driver.noop, name="noop")
ping = app.task(driver.ping, name="ping")
hold = app.task(driver.hold, name="hold")
PREFORK = driver.VARIANT == "prefork"


class Producer(driver.Producer):
    def send(self, function: str, argument: str) -> Any:
        return {"noop": noop, "ping": ping, "hold": hold}[function].delay(argument)


def terminate(handle: Any) -> None:
    """Stop a call that runs, by a signal to the process that runs it."""
    handle.revoke(terminate=True)


def main(role: str) -> None:
    if role == "describe":
        pool = ["--pool", "prefork"] if PREFORK else ["--pool", "threads", "--concurrency", str(driver.CONCURRENCY)]
        said = "`--pool prefork` (default), a process per core" if PREFORK else "`--pool threads --concurrency 100`"
        driver.describe(
            packages=["celery", "kombu", "redis"],
            worker=[sys.executable, "-m", "celery", "-A", "on_celery", "worker", *pool],
            settings=[
                f"`celery worker {said.removeprefix('`')}",
                "`task_acks_late`, `task_reject_on_worker_lost`: at-least-once; visibility timeout 1 hour, no results (defaults)",
            ],
            every=1 if PREFORK else 100,
            at_least_once=True,
        )
    else:
        producer = Producer()
        producer.cancel = terminate if PREFORK else None
        driver.run_blocking(producer)
