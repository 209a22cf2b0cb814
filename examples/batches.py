"""Claims by hand: take readings from the queue in batches, and store each batch in one transaction of a database.

``batches.py FILE`` writes them into an SQLite database, ``batches.py --feed N`` enqueues N of them. A task may be delivered
again, when the process dies between the commit and the finish. So the table has a key that rejects a second copy.
"""

import json
import sqlite3
import sys
from contextlib import closing

import trio

import worqr


def store(path: str, readings: list[dict[str, float]]) -> None:
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE IF NOT EXISTS readings (number INTEGER PRIMARY KEY, value REAL)")
        database.executemany("INSERT OR IGNORE INTO readings VALUES (:number, :value)", readings)


async def write(path: str) -> None:
    mesh = worqr.Mesh()
    async with mesh.join() as peer, peer.work("readings") as claims:
        while batch := await claims.take(100, within=0.2):
            readings = [json.loads(claim.task) for claim in batch]
            await trio.to_thread.run_sync(store, path, readings)
            lost = await claims.finish(batch)
            print(f"{len(batch)} stored, {len(lost)} of them lost to another worker meanwhile", flush=True)


async def feed(n: int) -> None:
    mesh = worqr.Mesh()
    async with mesh.connect():
        tasks = [json.dumps({"number": number, "value": number / 7}).encode() for number in range(n)]
        print(f"{await mesh.queue('readings').enqueue(*tasks)} enqueued")


match sys.argv[1:]:
    case ["--feed", n]:
        trio.run(feed, int(n))
    case [path]:
        trio.run(write, path)
    case _:
        sys.exit("usage: batches.py FILE | batches.py --feed N")
