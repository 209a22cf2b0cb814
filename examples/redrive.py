"""The dead-letter queue: list tasks, retry them, or drop them.

``redrive.py show QUEUE`` lists failed and undecodable tasks, ``redrive.py retry QUEUE [ERROR]`` retries the failed ones (with
that type of error), ``redrive.py drop QUEUE ERROR`` deletes them. Try it with the queue of retries.py, ``deliveries``.
"""

import sys
from collections.abc import Awaitable, Callable

import trio

import worqr


def line(record: worqr.Failed) -> str:
    runs = f"{record.failures} failures, {record.stalls} stalls, {record.timeouts} timeouts"
    return f"{record.reason}: {record.task!r}: {record.error.type}: {record.error.message} ({runs})"


async def show(queue: worqr.Queue) -> None:
    for record in [*await queue.failed.list(), *await queue.undecodable.list()]:
        print(line(record))


async def retry(queue: worqr.Queue, error: str | None = None) -> None:
    print(f"{await queue.failed.retry_all(error=error)} put back")


async def drop(queue: worqr.Queue, error: str) -> None:
    print(f"{await queue.failed.drop_all(error=error)} forgotten")


async def main(do: Callable[..., Awaitable[None]], name: str, *error: str) -> None:
    mesh = worqr.Mesh()
    async with mesh.connect():
        await do(mesh.queue(name), *error)


match sys.argv[1:]:
    case ["show", name]:
        trio.run(main, show, name)
    case ["retry", name] | ["retry", name, _]:
        trio.run(main, retry, name, *sys.argv[3:])
    case ["drop", name, error]:
        trio.run(main, drop, name, error)
    case _:
        sys.exit("usage: redrive.py show QUEUE | retry QUEUE [ERROR] | drop QUEUE ERROR")
