"""A job with an id, as in a web application: ordered, watched, stopped and fetched by different processes.

``reports.py work`` writes reports. ``reports.py order NAME [PAGES]`` orders one and watches it; if you order it again while it
runs, it runs once more afterwards. ``reports.py fetch NAME`` waits for its result, ``reports.py stop NAME`` cancels it.
"""

import sys

import trio

import worqr

KEPT = 3600
"""Seconds for which a report can be fetched."""


async def write(task: bytes) -> dict[str, object]:
    run = worqr.current()
    pages = int(task)
    for page in range(pages):
        run.progress(page / pages, f"page {page + 1} of {pages}")
        await trio.sleep(0.2)
    return {"report": run.id, "pages": pages, "for": run.meta["user"]}


async def work() -> None:
    mesh = worqr.Mesh()
    async with mesh.join(grace=1) as peer:
        await peer.serve("reports", write, timeout=600)


async def order(name: str, pages: str) -> None:
    mesh = worqr.Mesh()
    async with mesh.connect():
        queue = mesh.queue("reports")
        job = await queue.dispatch(pages.encode(), id=name, result_ttl=KEPT, meta={"user": "ada"})
        print(f"{name}: {job.outcome}", flush=True)
        async with job.watch() as states:
            async for status in states:
                print(f"{name}: {status.state} {status.message}".rstrip(), flush=True)


async def fetch(name: str) -> None:
    mesh = worqr.Mesh()
    async with mesh.connect():
        try:
            print(await mesh.queue("reports").job(name).result(timeout=30))
        except worqr.JobCancelled as cancelled:
            print(f"{name} was cancelled: {cancelled.reason}")
        except worqr.NoResult:
            print(f"{name} was never ordered, or is forgotten")


async def stop(name: str) -> None:
    mesh = worqr.Mesh()
    async with mesh.connect():
        count = await mesh.queue("reports").job(name).cancel(reason="cancelled by the user", wait=30)
        print(f"{count.waiting} removed; {count.acknowledged} of {count.running} running ones have ended")


match sys.argv[1:]:
    case ["work"]:
        trio.run(work)
    case ["order", name]:
        trio.run(order, name, "5")
    case ["order", name, pages]:
        trio.run(order, name, pages)
    case ["fetch", name]:
        trio.run(fetch, name)
    case ["stop", name]:
        trio.run(stop, name)
    case _:
        sys.exit("usage: reports.py work | order NAME [PAGES] | fetch NAME | stop NAME")
