"""One worker of the demo, in a process of its own: ``python -m worqr.cli.demo.worker URL NAME``.

It serves two queues until its standard input ends, because the demo has closed the pipe or has ended. It ends within some seconds
after the demo.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from functools import partial

import trio

import worqr
from worqr.cli.demo.report import FILES, LONG, RESULTS, Report, encode
from worqr.cli.demo.workload import count_file

SLOTS = 4
"""Files that a worker counts at a time."""
GRACE = 1.0
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


async def run_worker(url: str, name: str) -> None:
    """Join, serve, and stop when the standard input ends."""
    stop = trio.Event()
    threading.Thread(target=wait_for_end_of_stdin, args=(stop, trio.lowlevel.current_trio_token()), daemon=True).start()
    mesh = worqr.Mesh(url, app=name)
    async with mesh.join(concurrency=SLOTS + 1, grace=GRACE) as peer, trio.open_nursery() as nursery:
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
