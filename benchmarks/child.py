"""The program of the processes beside: ``python -m benchmarks.child ROLE OPTIONS``, started by `children.open_child`.

Each role writes ``ready``, then whatever it is for, and ends with its standard input. Times are those of the system's
monotonic clock, which all processes share.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial

import redis
import trio

import worqr
from benchmarks.stand_ins import StandIns

Handler = Callable[[bytes], Awaitable[None]]


def say(line: str) -> None:
    """Write a line at once; short enough to go in one piece, from any thread."""
    os.write(1, line.encode() + b"\n")


async def do_nothing(task: bytes) -> None:
    """The handler of an idle peer."""


async def tell_latency(task: bytes) -> None:
    """The task is the time at which it was put in: tell how long ago that is."""
    say(repr(time.perf_counter() - float(task)))


async def hold(task: bytes) -> None:
    """Run until cancelled; tell when it began and when it ended."""
    say(f"began {task.decode()} {time.perf_counter()!r}")
    try:
        await trio.sleep_forever()
    finally:
        say(f"ended {task.decode()} {time.perf_counter()!r}")


async def fail(task: bytes) -> None:
    """What it needs is down."""
    raise ConnectionError("refused")


HANDLERS: dict[str, Handler] = {"do_nothing": do_nothing, "tell_latency": tell_latency, "hold": hold, "fail": fail}


async def peers(
    *,
    socket: str,
    queue: str,
    handler: str,
    count: int = 1,
    prefix: str = "worqr",
    user: str = "",
    concurrency: int = 100,
) -> None:
    """`count` peers, each with a link of its own, that serve one queue."""
    login = f"{user}:any@" if user else ""
    async with AsyncExitStack() as stack:
        nursery = await stack.enter_async_context(trio.open_nursery())
        for _ in range(count):
            mesh = worqr.Mesh(f"unix://{login}{socket}", prefix=prefix)
            peer = await stack.enter_async_context(mesh.join(concurrency=concurrency, grace=0))
            await nursery.start(partial(peer.serve, queue, HANDLERS[handler]))
        say("ready")
        await answer()
        nursery.cancel_scope.cancel()


async def answer() -> None:
    """Answer questions until there is no one to ask them."""
    stdin = trio.lowlevel.FdStream(os.dup(0))
    while await stdin.receive_some(100):  # there is one question, and never two at once
        say(repr(time.process_time()))


def listener(*, socket: str, channel: str) -> None:
    """A bare subscriber: tells how long each message, which is the time it was sent at, was under way."""
    pubsub = redis.Redis(unix_socket_path=socket).pubsub(ignore_subscribe_messages=True)
    pubsub.subscribe(channel)
    pubsub.get_message(timeout=1)
    say("ready")
    threading.Thread(target=listen_forever, args=(pubsub,), daemon=True).start()
    sys.stdin.read()


def listen_forever(pubsub: redis.client.PubSub) -> None:
    for message in pubsub.listen():
        say(repr(time.perf_counter() - float(message["data"])))


def beater(*, socket: str) -> None:
    """The least that an idle peer could do: one SET a second, from a thread."""
    client = redis.Redis(unix_socket_path=socket)

    def beat_forever() -> None:
        while True:
            client.set("beat", "RUN", px=3000)
            time.sleep(1)

    threading.Thread(target=beat_forever, daemon=True).start()
    say("ready")
    while sys.stdin.readline():
        say(repr(time.process_time()))


def stand_ins(*, socket: str, queue: str, count: int) -> None:
    """Hundreds of idle peers as the server sees them."""
    crowd = StandIns(socket, queue, count)
    crowd.enter()
    say("ready")
    threading.Thread(target=crowd.serve_forever, daemon=True).start()
    sys.stdin.read()


def main(role: str, options: str) -> None:
    logging.basicConfig(level=logging.ERROR, format=f"{role}: %(message)s")
    settings = json.loads(options)
    if role == "peers":
        trio.run(partial(peers, **settings))
    else:
        {"listener": listener, "beater": beater, "stand_ins": stand_ins}[role](**settings)


if __name__ == "__main__":
    main(*sys.argv[1:])
