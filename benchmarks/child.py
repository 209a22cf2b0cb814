"""The program of the other processes: ``python -m benchmarks.child ROLE OPTIONS``, started by `children.open_child`.

Each role writes ``ready``, then its own output, and ends with its standard input. Times are those of the system's monotonic
clock, which all processes share.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import redis
import trio

import worqr
from benchmarks.schedules import periods
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


async def schedules(*, socket: str, count: int, shortest: float, longest: float) -> None:
    """A peer that serves nothing: it declares schedules, leads, and fires them."""
    mesh = worqr.Mesh(f"unix://{socket}")
    for number, period in enumerate(periods(count, shortest, longest)):
        mesh.every(period / 1000, mesh.call("tick", i=number), name=f"s{number}")
    async with mesh.join(grace=0):
        say("ready")
        await answer()


async def drip(*, socket: str, queue: str, task: str, spacing: float) -> None:
    """Enqueue one raw task after the other, `spacing` seconds apart."""
    mesh = worqr.Mesh(f"unix://{socket}")
    async with mesh.connect():
        say("ready")
        while True:
            await mesh.queue(queue).enqueue(task.encode())
            await trio.sleep(spacing)


async def herd(*, socket: str, count: int, period: float, tenants: int) -> None:
    """As `schedules`, with schedules of many tenants that are due in the same second, and are dropped if they are late."""
    mesh = worqr.Mesh(f"unix://{socket}")
    for number in range(count):
        name = f"tenant-{number % tenants}/{number}"
        mesh.every(period, mesh.call("tick", i=number), name=name, misfire="skip")
    async with mesh.join(grace=0):
        say("ready")
        await answer()


async def answer() -> None:
    """Reply to questions until the input ends."""
    stdin = trio.lowlevel.FdStream(os.dup(0))
    while await stdin.receive_some(100):  # there is one question, and never two at once
        say(repr(time.process_time()))


def telling(name: str, socket: str, count: int) -> worqr.Mesh:
    """A mesh that serves two queues: ``NAME-drain`` tells tasks per second after `count` tasks, ``NAME-pickup`` latencies."""
    mesh = worqr.Mesh(f"unix://{socket}")
    seen, began = 0, 0.0

    @mesh.task(name=f"{name}-drain")
    async def tell_rate(task: bytes, /) -> None:
        nonlocal seen, began
        if not seen:
            began = time.perf_counter()
        seen += 1
        if seen == count:
            seen = 0
            say(repr(count / (time.perf_counter() - began)))

    @mesh.task(name=f"{name}-pickup")
    async def pick_up(task: bytes, /) -> None:
        await tell_latency(task)

    return mesh


async def joined(*, name: str, socket: str, count: int, concurrency: int) -> None:
    """A peer that has the only loop of its process."""
    stdin = trio.lowlevel.FdStream(os.dup(0))
    async with telling(name, socket, count).join(concurrency=concurrency, grace=0):
        say("ready")
        while await stdin.receive_some(100):
            say("ok")


def joined_in_thread(*, name: str, socket: str, count: int, concurrency: int) -> None:
    """A peer in a thread, while the main thread runs asyncio, which is asked to be ``busy`` or ``idle``."""
    asyncio.run(_beside_asyncio(telling(name, socket, count).join_in_thread(concurrency=concurrency, grace=0)))


async def _beside_asyncio(peer: worqr.ThreadPeer) -> None:
    loop = asyncio.get_running_loop()
    busy, ended = asyncio.Event(), asyncio.Event()

    def hear() -> None:
        line = os.read(0, 100)
        (busy.set if line == b"busy\n" else busy.clear)()
        if line:
            say("ok")
        else:
            ended.set()
            busy.set()

    async with peer:
        loop.add_reader(0, hear)
        say("ready")
        while not ended.is_set():
            await busy.wait()
            until = time.perf_counter() + 0.001
            while time.perf_counter() < until:
                pass
            await asyncio.sleep(0.001)


def listener(*, socket: str, channel: str) -> None:
    """A bare subscriber: tells how long each message, which is the time it was sent at, was under way."""
    pubsub = redis.Redis(unix_socket_path=socket).pubsub(ignore_subscribe_messages=True)
    pubsub.subscribe(channel)
    pubsub.get_message(timeout=1)
    say("ready")
    threading.Thread(target=listen_forever, args=(pubsub,), daemon=True).start()
    sys.stdin.read()


async def callers(
    *, socket: str, limit: dict[str, Any], estimate: int, spread: int, prefix: str, as_option: bool
) -> None:
    """A worker with five functions that share a limit: tells when each call began, and what it has used.

    The limit is around the call, or `as_option` of the functions.
    """
    mesh, shared = worqr.Mesh(f"unix://{socket}", prefix=prefix), worqr.Limit(**limit, unit="tokens")

    async def use(cost: Callable[[int], None]) -> None:
        used = random.randint(estimate - spread, estimate + spread)
        say(f"{time.monotonic()} {used}")
        cost(used)
        await trio.sleep(0.1)

    async def call(task: bytes, /) -> None:
        if as_option:
            await use(worqr.current().cost)
            return
        async with mesh.limit(shared, cost=estimate) as permit:
            await use(permit.cost)

    for n in range(5):
        if as_option:
            mesh.task(name=f"f{n}", limit=shared, cost=estimate)(call)
        else:
            mesh.task(name=f"f{n}")(call)
    async with mesh.join(concurrency=30, grace=0):
        say("ready")
        await answer()


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


def bulk(*, socket: str, queue: str, meant: int, stop_at: int) -> None:
    """The dashboard's retry of all failed tasks: tells how many were tried, and stops after `stop_at`; 0: never."""
    from worqr.dashboard.bulk import Bulk, Order

    class Telling(Bulk):
        def _tried(self, tried: int, total: int) -> None:
            say(str(tried))
            if stop_at and tried >= stop_at:
                self.stop()
            super()._tried(tried, total)

    say("ready")
    act = Telling(Order("retry", queue, "benchmark", meant), lambda: worqr.Mesh(f"unix://{socket}"))
    act.start()
    act.ended.wait()
    say("ended")
    sys.stdin.read()


def main(role: str, options: str) -> None:
    logging.basicConfig(level=logging.ERROR, format=f"{role}: %(message)s")
    settings = json.loads(options)
    roles = {
        "peers": peers,
        "joined": joined,
        "schedules": schedules,
        "herd": herd,
        "drip": drip,
        "callers": callers,
    }
    if role in roles:
        trio.run(partial(roles[role], **settings))
    else:
        roles = {
            "bulk": bulk,
            "listener": listener,
            "beater": beater,
            "stand_ins": stand_ins,
            "joined_in_thread": joined_in_thread,
        }
        roles[role](**settings)


if __name__ == "__main__":
    main(*sys.argv[1:])
