"""A peer in a process of its own, for tests that kill, freeze or cut it off. Its only input is lines, its only output too.

    child_peer.py URL PREFIX QUEUE

Prints ``joined ID`` when it serves, ``run TASK FENCE ATTEMPT`` when a handler begins, ``ended TASK REASON`` when it unwinds
(REASON: done, or why it was cancelled). The task says what the handler does: ``ok...`` returns, ``hold...`` runs until
cancelled, ``fail...`` raises, ``block...`` blocks the loop for 5 s. Reads ``leave`` (end the block of join), ``stop``
(cancel serve), ``hand`` is an option: claims one task by hand and does with it what the next line says.
"""

from __future__ import annotations

import logging
import os
import sys
from functools import partial

import trio

import worqr


async def handler(task: bytes) -> None:
    context = worqr.current()
    text = task.decode()
    print("run", text, context.fence, context.attempt)
    try:
        if text.startswith("hold"):
            await trio.sleep_forever()
        elif text.startswith("fail"):
            raise ValueError("as it was told to")
        elif text.startswith("block"):
            import time

            time.sleep(5)
    except trio.Cancelled:
        print("ended", text, context.cancel_reason)
        raise
    print("ended", text, "done")


async def laned(task: bytes, /) -> None:
    """A function each of whose tasks is in a lane of its own."""
    await handler(task)


async def read_lines() -> None:
    """Lines of standard input, obeyed as they come."""
    while True:
        line = await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True)
        if line.strip() in {"leave", ""}:
            return


async def by_hand(peer: worqr.Peer, queue: str) -> None:
    async with peer.work(queue) as claims:
        print("joined", peer.id)
        while True:
            claim = (await claims.take(1))[0]
            what = claim.task.decode()
            print("run", what, claim.fence, claim.attempt)
            if what.startswith("stop"):
                await claim.stop()
                return
            if what.startswith("set-aside"):
                await claim.fail("by hand")
            else:
                await claim.finish()


async def main(url: str, prefix: str, queue: str) -> None:
    keepalive = os.environ.get("KEEPALIVE", "1")
    mesh = worqr.Mesh(url, prefix=prefix, keepalive=None if keepalive == "none" else float(keepalive), patience=20)
    grace = float(os.environ.get("GRACE", "0"))
    if os.environ.get("LANED"):
        mesh.task(name=queue, lanes=worqr.Lanes(lambda task: task.decode()))(laned)
    async with mesh.join(grace=grace, concurrency=int(os.environ.get("CONCURRENCY", "100"))) as peer:
        async with trio.open_nursery() as nursery:
            if os.environ.get("LANED"):
                print("joined", peer.id)
            elif os.environ.get("BY_HAND"):
                nursery.start_soon(by_hand, peer, queue)
            else:
                limit = [worqr.Limit(int(os.environ["LIMIT"]))] if "LIMIT" in os.environ else []
                limit += [worqr.Limit(rate=1, per=float(os.environ["PERIOD"]))] if "PERIOD" in os.environ else []
                await nursery.start(partial(peer.serve, queue, handler, limit=limit))
                print("joined", peer.id)
            await read_lines()
            await peer.drain()
            nursery.cancel_scope.cancel()
    print("left")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    trio.run(main, *sys.argv[1:4])
