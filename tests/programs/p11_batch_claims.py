import sqlite3
from contextlib import closing

import trio

import worqr

mesh = worqr.Mesh()


def store(rows: list[tuple[int, bytes]]) -> None:
    with closing(sqlite3.connect("events.db")) as db, db:
        db.executemany("insert or ignore into events values (?, ?)", rows)


async def main() -> None:
    async with mesh.join(concurrency=100) as peer, peer.work("events") as claims:
        while True:
            batch = await claims.take(100, within=1)
            try:
                await trio.to_thread.run_sync(store, [(claim.fence, claim.task) for claim in batch])
            except sqlite3.Error:
                for claim in batch:
                    await claim.retry()
                continue
            for lost in await claims.finish(batch):
                print("written twice, fence", lost.fence)


async def one_by_one() -> None:
    async with mesh.join() as peer, peer.work("events") as claims, trio.open_nursery() as nursery:
        async for claim in claims:  # pauses at `concurrency` unsettled claims
            nursery.start_soon(work_on, claim)


async def work_on(claim: worqr.Claim) -> None:
    async with claim:
        await trio.sleep(1)


trio.run(main)
