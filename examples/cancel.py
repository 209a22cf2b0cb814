"""Cancelling across processes: ``cancel.py render NAME`` runs a long task, ``cancel.py stop NAME`` ends it.

The handler is cancelled in its process, like any Trio task: at its next ``await``, and its ``finally`` blocks run. The caller
waits until it has really ended. The task is not run again.
"""

import sys

import trio

import worqr

PATIENCE = 30


async def render(task: bytes) -> None:
    film = task.decode()
    print(f"rendering {film}", flush=True)
    try:
        for _frame in range(1_000_000):
            await trio.sleep(0.1)
    finally:
        print(f"no longer rendering {film}: {worqr.current().cancel_reason}", flush=True)


async def work(film: str) -> None:
    mesh = worqr.Mesh()
    async with mesh.join(concurrency=4, grace=0) as peer:
        await mesh.queue("films").enqueue(film.encode())
        await peer.serve("films", render)


async def stop(film: str) -> None:
    mesh = worqr.Mesh()
    async with mesh.connect():
        count = await mesh.queue("films").cancel(film.encode(), wait=PATIENCE)
        print(
            f"{count.waiting} removed from the queue; {count.acknowledged} of {count.running} running ones have ended"
        )


match sys.argv[1:]:
    case ["render", film]:
        trio.run(work, film)
    case ["stop", film]:
        trio.run(stop, film)
    case _:
        sys.exit("usage: cancel.py render NAME | cancel.py stop NAME")
