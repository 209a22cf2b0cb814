"""A peer with a list handler, in a process of its own, for tests that kill it. Its only input is lines, its output too.

    child_lists.py URL PREFIX BATCH_SIZE BATCH_WAIT [SHARDS]

Prints ``joined ID`` when it serves Q1, and ``run SIZE`` when a list begins; the list runs until the process is killed.
"""

from __future__ import annotations

import sys
from functools import partial

import trio

import worqr


async def handler(tasks: list[bytes]) -> None:
    print("run", len(tasks))
    await trio.sleep_forever()


async def main(url: str, prefix: str, size: int, wait: float, shards: int) -> None:
    mesh = worqr.Mesh(url, prefix=prefix, keepalive=1, patience=20)
    async with mesh.join(grace=0) as peer, trio.open_nursery() as nursery:
        mesh.queue("Q1", shards=shards)
        await nursery.start(partial(peer.serve_list, "Q1", handler, batch_size=size, batch_wait=wait))
        print("joined", peer.id)
        await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main, sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), int((*sys.argv, 1)[5]))
