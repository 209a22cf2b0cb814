"""The processes of the workers: the demo starts, freezes and kills them, and stops them at its end.

The standard input of each worker is the reading end of a pipe. When the demo closes the pipe, or ends for any reason, the worker
stops. Each worker has a session of its own, so that Ctrl-C reaches only the demo, which then stops the workers.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import IO, Literal

import trio

import worqr
from worqr.cli.demo.state import FILES, LONG, ORDERS, RESULTS, Report, count_file, encode
from worqr.errors import WorqrError

# One worker of the demo, in a process of its own: ``python -m worqr.cli.demo.worker_processes URL NAME``.
#
# It serves two queues and a workflow until its standard input ends, because the demo has closed the pipe or has ended. It ends
# within some seconds after the demo.


SLOTS = 4
"""Files that a worker counts at a time."""
GRACE = 1.0
SHIPPING = 60.0
"""Seconds that the workflow ships in its first run, in which its worker is killed."""
SWITCH_INTERVAL = 0.0005
"""Seconds after which the counting thread lets the event loop run; Python's own 5 ms would delay a cancellation."""
EXIT_AFTER = 3.0
"""Seconds after which a worker that was asked to stop and still runs ends its process."""


async def count_files(results: worqr.Queue, name: str, one_at_a_time: trio.CapacityLimiter, task: bytes) -> None:
    """Handle one file: count in a thread, and enqueue the counts as a result.

    Counting never waits for I/O, so a second thread of the same Python would only slow the first one down.
    """
    began = time.monotonic()
    path = os.fsdecode(task)
    counted = await trio.to_thread.run_sync(count_file, path, limiter=one_at_a_time)
    report = Report("counted", name, began, path, counted, worqr.current().stalls)
    await results.enqueue(encode(report))


async def run_for_ever(results: worqr.Queue, name: str, task: bytes) -> None:
    """Handle the long task: report when it began, and when and why it was cancelled."""
    await results.enqueue(encode(Report("began", name, time.monotonic())))
    try:
        await trio.sleep_forever()
    finally:
        at = time.monotonic()
        with trio.CancelScope(shield=True), trio.move_on_after(GRACE):
            await results.enqueue(encode(Report("cancelled", name, at, reason=worqr.current().cancel_reason)))


def declare_order(mesh: worqr.Mesh, name: str) -> None:
    """Declare the workflow: it charges a card, waits for an approval, and ships. The demo kills its worker while it ships."""

    async def tell(kind: Literal["charged", "shipping", "shipped"]) -> None:
        await mesh.queue(RESULTS).enqueue(encode(Report(kind, name, time.monotonic())))

    @mesh.step
    async def charge() -> None:
        await tell("charged")

    @mesh.step
    async def ship() -> None:
        await tell("shipping")
        if not worqr.current().stalls:
            await trio.sleep(SHIPPING)
        await tell("shipped")

    @mesh.workflow(name=ORDERS)
    async def order() -> None:
        await charge()
        if await worqr.wait_for("approved", bool):
            await ship()


async def run_worker(url: str, name: str) -> None:
    """Join, serve, and stop when the standard input ends."""
    stop = trio.Event()
    threading.Thread(target=wait_for_end_of_stdin, args=(stop, trio.lowlevel.current_trio_token()), daemon=True).start()
    mesh = worqr.Mesh(url, app=name)
    declare_order(mesh, name)
    async with mesh.join(concurrency=SLOTS + 2, grace=GRACE) as peer, trio.open_nursery() as nursery:
        results = mesh.queue(RESULTS)
        count = partial(count_files, results, name, trio.CapacityLimiter(1))
        await nursery.start(partial(peer.serve, FILES, count, concurrency=SLOTS))
        await nursery.start(partial(peer.serve, LONG, partial(run_for_ever, results, name), concurrency=1))
        await stop.wait()
        await peer.drain()


def wait_for_end_of_stdin(stop: trio.Event, token: trio.lowlevel.TrioToken) -> None:
    """Wait for the end of the standard input, then stop; in a thread, so that it works while the event loop is busy."""
    while os.read(0, 64):
        pass
    try:
        token.run_sync_soon(stop.set)
    except trio.RunFinishedError:
        return
    time.sleep(EXIT_AFTER)
    os._exit(1)


if __name__ == "__main__":
    sys.setswitchinterval(SWITCH_INTERVAL)
    trio.run(run_worker, sys.argv[1], sys.argv[2])


STOP_WITHIN = 12.0
LOG_LINES = 15
WORKER = "worqr.cli.demo.worker_processes"


class WorkerDied(WorqrError):
    """A worker ended by itself; the message has the end of its output."""


@dataclass(slots=True)
class WorkerProcess:
    """One worker. `killed`: the demo has killed it on purpose."""

    name: str
    process: trio.Process
    log: IO[bytes]
    killed: bool = False

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def freeze(self) -> None:
        """Suspend it; it can do nothing until it is resumed."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Resume it."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Send SIGKILL: it cannot react."""
        self.killed = True
        self.process.kill()

    async def request_stop(self) -> None:
        """Close its standard input: it shuts down normally."""
        if self.process.stdin is not None:
            await self.process.stdin.aclose()

    def end_of_log(self) -> str:
        """Return the end of its output."""
        self.log.seek(0)
        return "\n".join(self.log.read().decode("utf-8", "replace").splitlines()[-LOG_LINES:]) or "(no output)"

    def check(self) -> None:
        """Raise WorkerDied if it ended by itself."""
        code = self.process.poll()
        if code and not self.killed:
            raise WorkerDied(
                f"{self.name} (pid {self.pid}) ended unexpectedly with exit code {code}:\n{self.end_of_log()}"
            )


@dataclass(frozen=True, slots=True)
class WorkerProcesses:
    """All workers."""

    all: list[WorkerProcess]

    def check(self) -> None:
        """Raise WorkerDied if one ended by itself."""
        for each in self.all:
            each.check()

    async def stop(self) -> None:
        """Stop all of them, and wait until they have ended; raise WorkerDied if one did not end normally."""
        for each in self.all:
            if not each.killed:
                await each.request_stop()
        with trio.move_on_after(STOP_WITHIN):
            for each in self.all:
                await each.process.wait()
        self.check()
        left = [each.name for each in self.all if each.process.poll() is None]
        if left:
            raise WorkerDied(f"{', '.join(left)} did not end within {STOP_WITHIN:g} s")


@asynccontextmanager
async def start_workers(url: str, number: int, module: str = WORKER) -> AsyncGenerator[WorkerProcesses]:
    """Start that many workers of the program `module`. At the end of the block, no process is left."""
    processes = WorkerProcesses([])
    try:
        for i in range(1, number + 1):
            processes.all.append(await _start(url, f"worker-{i}", module))
        yield processes
    finally:
        with trio.CancelScope(shield=True):
            for each in processes.all:
                each.process.kill()
                await each.process.wait()
                await each.request_stop()
                each.log.close()


async def _start(url: str, name: str, module: str) -> WorkerProcess:
    log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `start_workers`
    process = await trio.lowlevel.open_process(
        [sys.executable, "-m", module, url, name],
        stdin=subprocess.PIPE,
        stdout=log.fileno(),
        stderr=log.fileno(),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},  # the same worqr as ours
        start_new_session=True,
    )
    return WorkerProcess(name, process, log)
