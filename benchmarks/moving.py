"""A mesh with a million tasks moves to another server under load: ``python -m benchmarks.moving [--tasks 1000000]``.

A producer goes on, and two processes with a worker each run tasks. One worker has the URL of the old server, the other was
started after the move with the new one. At the end each task has run once, and each worker has started the tasks in order.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import trio

import worqr
from tests.support.children import ROOT
from tests.support.servers import Server, chosen

QUEUE: Final = "moving"
BATCH: Final = 10_000
SLOTS: Final = 100
"""Of a worker. Trio runs the tasks that have been started together in any order."""
PATIENCE: Final = 60.0
"""Seconds without a run after which the rest counts as lost."""


@dataclass(frozen=True)
class Outcome:
    """The figures of a run. `said`: what the command printed."""

    tasks: int
    lost: int
    doubled: int
    out_of_order: int
    seconds: float
    said: str


class Worker:
    """A process that runs tasks, and writes the number of each to a file when it starts it."""

    def __init__(self, url: str, file: Path) -> None:
        self.file = file
        command = [sys.executable, "-m", "benchmarks.moving", "--url", url, "--file", str(file)]
        self.process = subprocess.Popen(command, cwd=ROOT)

    def runs(self) -> array[int]:
        """Return the numbers of the tasks, in the order in which they were started."""
        found = array("q")
        data = self.file.read_bytes() if self.file.exists() else b""
        found.frombytes(data[: len(data) // found.itemsize * found.itemsize])
        return found

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(PATIENCE)


async def work(url: str, file: Path) -> None:
    """Be a worker."""
    mesh = worqr.Mesh(url)
    with file.open("ab", buffering=0) as started:

        async def run(task: bytes) -> None:
            started.write(int(task).to_bytes(8, sys.byteorder))

        async with mesh.join() as peer:
            await peer.serve(QUEUE, run, concurrency=SLOTS)


async def move_under_load(kind: str, tasks: int) -> Outcome:
    """Fill the old server, move it in the middle of the work, and count."""
    with ExitStack() as stack:
        old, new = (Server(kind, settings={"appendfsync": "everysec"}) for _ in range(2))
        for server in (old, new):
            stack.callback(server.close)
            server.start()
        mesh = worqr.Mesh(old.tcp_url)
        async with mesh.connect():
            queue = mesh.queue(QUEUE)
            for first in range(0, tasks, BATCH):
                await queue.enqueue(*(b"%d" % n for n in range(first, min(tasks, first + BATCH))))
            workers = [Worker(old.tcp_url, old.folder / "old.runs")]
            stack.callback(workers[0].stop)
            sent, said = tasks, ""
            while not workers[0].runs():  # noqa: ASYNC110 - another process writes them
                await trio.sleep(0.1)
            began = time.monotonic()
            async with trio.open_nursery() as nursery:
                moved = trio.Event()

                async def move() -> None:
                    nonlocal said
                    command = [
                        sys.executable,
                        "-m",
                        "worqr",
                        "move",
                        new.tcp_url.removesuffix("/0"),
                        "--url",
                        old.tcp_url,
                    ]
                    done = await trio.run_process([*command, "--patience", "60"], capture_stdout=True)
                    said = done.stdout.decode()
                    moved.set()

                nursery.start_soon(move)
                while not moved.is_set():
                    await queue.enqueue(b"%d" % sent)
                    sent += 1
            workers.append(Worker(new.tcp_url, new.folder / "new.runs"))
            stack.callback(workers[1].stop)
            await wait_until_done(workers, sent)
            return count([worker.runs() for worker in workers], sent, time.monotonic() - began, said)


async def wait_until_done(workers: Sequence[Worker], sent: int) -> None:
    """Return when all tasks have run, or when none has for long."""
    before, since = 0, time.monotonic()
    while before < sent and time.monotonic() - since < PATIENCE:
        await trio.sleep(0.5)
        if (now := sum(len(worker.runs()) for worker in workers)) != before:
            before, since = now, time.monotonic()
    await trio.sleep(1)  # a second run would come now


def count(runs: Sequence[array[int]], sent: int, seconds: float, said: str) -> Outcome:
    """Compare what ran with what was sent."""
    times = bytearray(sent)
    for each in runs:
        for n in each:
            times[n] += 1
    order = sum(earlier > later + SLOTS for each in runs for earlier, later in pairwise(each))
    return Outcome(sent, times.count(0), sum(n > 1 for n in times), order, seconds, said)


def main() -> None:
    """Run it, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.moving")
    parser.add_argument("--tasks", type=int, default=1_000_000)
    parser.add_argument("--server", default=chosen()[0])
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.url:
        trio.run(work, given.url, given.file)
        return
    found = trio.run(move_under_load, given.server, given.tasks)
    print(found.said)
    print(f"{'tasks':>12}{'lost':>8}{'doubled':>9}{'out of order':>14}{'seconds':>9}")
    print(f"{found.tasks:>12,}{found.lost:>8}{found.doubled:>9}{found.out_of_order:>14}{found.seconds:>9.0f}")


if __name__ == "__main__":
    main()
