# /// script
# dependencies = []
# [tool.rivals]
# title = "Fake"
# variants = { sound = "sound", deaf = "deaf", broken = "broken" }
# ///
"""A task queue of one list, for tests of the harness. ``deaf``: its worker runs nothing. ``broken``: it cannot be imported."""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import driver
import redis

client = redis.Redis.from_url(driver.URL)
if driver.VARIANT == "broken":
    raise ImportError("no module named fake")


class Producer(driver.Producer):
    def send(self, function: str, argument: str) -> Any:
        client.lpush("tasks", json.dumps([function, argument]))


def work() -> None:
    """Run tasks one at a time, but each `hold` in a thread, because `ping` is called meanwhile."""
    while True:
        _, task = client.brpop(["tasks"])
        function, argument = json.loads(task)
        call = getattr(driver, function)
        if function == "hold":
            threading.Thread(target=call, args=(argument,), daemon=True).start()
        else:
            call(argument)


def main(role: str) -> None:
    if role == "describe":
        command = [sys.executable, "-c", "import on_fake; on_fake.work()"]
        if driver.VARIANT == "deaf":
            command = [sys.executable, "-c", "print('no ears', flush=True); import time; time.sleep(3600)"]
        driver.describe(packages=["redis"], worker=command, settings=["a list"], every=1, at_least_once=False)
    else:
        driver.run_blocking(Producer())
