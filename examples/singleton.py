"""Debounce: a search index is rebuilt half a second after the last change, and only one run at a time.

``singleton.py work`` rebuilds indexes, ``singleton.py edit SITE N`` makes N changes to a site, as fast as it can. All of them
are one job, which each change delays. A change during a run becomes a second job, which waits for that run.
"""

import sys

import trio

import worqr

QUIET = 0.5
LATER = worqr.Update(run_at="if_later")


async def rebuild(task: bytes) -> None:
    print(f"{worqr.current().id}: rebuilt after {task.decode()}", flush=True)


async def work() -> None:
    mesh = worqr.Mesh()
    async with mesh.join(grace=1) as peer:
        await peer.serve("index", rebuild)


async def edit(site: str, changes: int) -> None:
    mesh = worqr.Mesh()
    async with mesh.connect():
        outcomes = [
            (await mesh.queue("index").dispatch(f"change {n}".encode(), id=site, delay=QUIET, update=LATER)).outcome
            for n in range(1, changes + 1)
        ]
        print(f"{outcomes.count('created')} created, {outcomes.count('updated')} updated")


match sys.argv[1:]:
    case ["work"]:
        trio.run(work)
    case ["edit", site, n]:
        trio.run(edit, site, int(n))
    case _:
        sys.exit("usage: singleton.py work | edit SITE N")
