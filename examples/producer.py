"""The smallest producer: puts its arguments into the queue ``greetings``, one task each."""

import sys

import trio

import worqr


async def main(names: list[str]) -> None:
    mesh = worqr.Mesh()
    async with mesh.connect():
        stored = await mesh.queue("greetings").enqueue(*(name.encode() for name in names))
        print(f"{stored} enqueued")


trio.run(main, sys.argv[1:])
