"""A peer that runs jobs, in a process of its own, for tests that kill or freeze it. Its only input is lines, its output too.

    child_jobs.py URL PREFIX QUEUE

Prints ``joined ID`` when it serves, ``run TASK FENCE ATTEMPT`` when a handler begins, ``ended TASK REASON`` when it unwinds,
``told TASK REASON`` when the failure handler begins. The task says what the handler does: ``ok...`` returns its payload,
``hold...`` runs until cancelled, or until a line ``go`` comes, ``step...`` takes a step, saves, prints
``saved TASK``, and tries to save more after a line ``go``, ``fail...`` has failed for good, ``die...`` kills the process.
With HOLD_FAILURES the failure handler runs until cancelled. A line ``leave`` ends the block of join.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial

import trio

import worqr

go = trio.Event()


async def handler(task: bytes) -> bytes:
    context = worqr.current()
    text = task.decode()
    print("run", text, context.fence, context.attempt)
    try:
        if text.startswith("hold"):
            await go.wait()
        elif text.startswith("step"):
            await worqr.step("charge", charge, text)
            await context.save(b"by the child")
            print("saved", text)
            await go.wait()
            try:
                await context.save(b"too late")
                await worqr.step("mail", charge, text)
            except worqr.ClaimLost:
                print("refused", text)
                raise
        elif text.startswith("fail"):
            raise worqr.Failure("as it was told to")
        elif text.startswith("die"):
            os.kill(os.getpid(), signal.SIGKILL)
    finally:
        print("ended", text, context.cancel_reason)
    return task + b" by the child"


async def charge(what: str) -> str:
    print("charged", what)
    return f"{what} by the child"


async def on_failure(record: worqr.Failed) -> None:
    print("told", record.task.decode(), record.reason)
    if os.environ.get("HOLD_FAILURES"):
        await trio.sleep_forever()


async def read_lines() -> None:
    while True:
        line = (await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True)).strip()
        if line == "go":
            go.set()
        else:
            return


async def main(url: str, prefix: str, queue: str) -> None:
    mesh = worqr.Mesh(url, prefix=prefix, keepalive=1, patience=20)
    async with mesh.join(grace=0) as peer, trio.open_nursery() as nursery:
        serve = partial(peer.serve, queue, handler, on_failure=on_failure, keep_failed=10, result_ttl=60)
        await nursery.start(serve)
        print("joined", peer.id)
        await read_lines()
        nursery.cancel_scope.cancel()
    print("left")


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:4])
