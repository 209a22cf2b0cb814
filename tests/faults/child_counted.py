"""A peer in a process of its own that prints how long each of its runs took. Its only input is lines, its only output too.

    child_counted.py URL PREFIX QUEUE

Prints ``joined ID`` when it serves, ``leads`` when it leads, and ``took SECONDS`` when a handler returns. The task says what the
handler does: ``ok MS`` returns after that time, ``fail`` fails for good, ``retry`` fails at its first run. Reads ``leave``.
"""

from __future__ import annotations

import sys
import time
from functools import partial

import trio

import worqr


async def handler(task: bytes) -> None:
    began = time.monotonic()
    match task.decode().split():
        case ["ok", ms, *_]:
            await trio.sleep(int(ms) / 1000)
        case ["fail", *_]:
            raise worqr.Failure("as it was told to")
        case _ if worqr.current().attempt == 1:
            raise ValueError("the first time")
    print(f"took {time.monotonic() - began:.6f}")


async def main(url: str, prefix: str, queue: str) -> None:
    mesh = worqr.Mesh(url, prefix=prefix, keepalive=1, patience=20)
    quick = worqr.RetryPolicy(min_backoff=0, max_backoff=0.01)
    async with mesh.join(grace=10, concurrency=60) as peer, trio.open_nursery() as nursery:
        await nursery.start(partial(peer.serve, queue, handler, retry=quick))
        print("joined", peer.id)
        await peer._engine.leader.wait_leading()
        print("leads")
        await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:4])
