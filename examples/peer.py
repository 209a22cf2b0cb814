"""The smallest worker: greets each name in the queue ``greetings``. Start as many of them as you like."""

import trio

import worqr


async def greet(task: bytes) -> None:
    print(f"Hello, {task.decode()}!", flush=True)


async def main() -> None:
    mesh = worqr.Mesh()
    async with mesh.join() as peer:
        await peer.serve("greetings", greet)


trio.run(main)
