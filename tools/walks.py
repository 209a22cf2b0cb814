"""Counts the files of worqr that a task, a call, a cancellation and a dead worker pass: ``python -m tools.walks [--files]``.

It takes each of these walks in this process, against a private server, and records the functions of worqr that are entered in all
threads. "How it is built" in the documentation describes the walks. Compare the counts with those of the commit before a change.
Each walk but the last is taken several times, and what was entered each time counts: chores go on meanwhile. Not counted: what
runs in the worker process of a handler.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import trio

import worqr
from worqr import Mesh, Peer
from worqr.embedded import EmbeddedServer

PACKAGE = str(Path(worqr.__file__).parent) + os.sep
IDLE = 1.5
"""Seconds in which a peer that has joined ends its first chores: leading, scanning, comparing."""
SETTLED = 0.05
"""Seconds in which a task is settled after its handler has returned."""
TIMES = 3
"""Times that a walk is taken. A chore that happens to run in one of them is no part of the walk."""
DEAD_WITHIN = 60.0
"""Seconds within which the leader puts the tasks of a dead worker back; it takes 5 on a quiet machine."""
HOLDER = """\
import sys, trio
from worqr import Mesh

async def handle(payload):
    print("running", flush=True)
    await trio.sleep_forever()

async def hold():
    async with Mesh(sys.argv[1]).join() as peer:
        await peer.serve("orphans", handle)

trio.run(hold)
"""

Walk = Callable[[], Awaitable[object]]


class Recorder:
    """The functions of worqr that are entered in any thread while it is on."""

    def __init__(self) -> None:
        self.entered: set[CodeType] = set()

    @contextmanager
    def on(self) -> Iterator[None]:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self.entered.add(frame.f_code)

    def files(self) -> list[str]:
        """The files of these functions, relative to the package."""
        return sorted({code.co_filename.removeprefix(PACKAGE) for code in self.entered})


async def record(walk: Walk) -> Recorder:
    """Let the mesh become idle, and record one walk."""
    await trio.sleep(IDLE)
    recorder = Recorder()
    with recorder.on():
        await walk()
        await trio.sleep(SETTLED)
    return recorder


async def record_often(walk: Walk, before: Walk | None = None) -> Recorder:
    """Record a walk several times, each after `before`. Return what all records have in common."""
    common = Recorder()
    for n in range(TIMES):
        if before is not None:
            await before()
        entered = (await record(walk)).entered
        common.entered = common.entered & entered if n else entered
    return common


mesh = Mesh()


@mesh.task(result_ttl=60)
async def greet(name: str) -> str:
    """The typed call."""
    return name


@mesh.task(runs_in="process", result_ttl=60)
def greet_elsewhere(name: str) -> str:
    """The call in a process."""
    return name


@mesh.task(result_ttl=60)
async def count_greetings() -> int:
    """The follow-up of the batch."""
    ended = worqr.current().ended_batch
    return 0 if ended is None else ended.finished


async def take_walks(url: str) -> dict[str, Recorder]:
    """Take the walks, one after the other, each in an idle mesh."""
    ran, hangs = trio.open_memory_channel[None](math.inf), trio.open_memory_channel[None](math.inf)

    async def handle(payload: bytes) -> None:
        ran[0].send_nowait(None)

    async def hang(payload: bytes) -> None:
        hangs[0].send_nowait(None)
        await trio.sleep_forever()

    async def task() -> None:
        await mesh.queue("raw").enqueue(b"x")
        await ran[1].receive()

    async def start_long() -> None:
        await mesh.queue("long").enqueue(b"x")
        await hangs[1].receive()

    async def cancel_long() -> None:
        await mesh.queue("long").cancel(b"x")

    async def call() -> None:
        await (await greet.dispatch("Ada")).result()

    async def call_in_process() -> None:
        await (await greet_elsewhere.dispatch("Ada")).result()

    async def batch() -> None:
        async with mesh.batch(then=count_greetings.call()) as made:
            await made.dispatch(greet.call("Ada"))
        await made.result()

    async with mesh.join() as peer, trio.open_nursery() as nursery:
        await nursery.start(peer.serve, "raw", handle)
        await nursery.start(peer.serve, "long", hang)
        found = {"a task": await record_often(task), "a typed call": await record_often(call)}
        await call_in_process()  # starts the worker process
        found["a call in a process"] = await record_often(call_in_process)
        found["a cancellation"] = await record_often(cancel_long, before=start_long)
        found["a batch"] = await record_often(batch)
        found["a dead worker"] = await record_recovery(peer, nursery, url)
        nursery.cancel_scope.cancel()
    return found


async def record_recovery(peer: Peer, nursery: trio.Nursery, url: str) -> Recorder:
    """Kill a worker that runs a task, and record until the task runs in `peer`."""
    again = trio.Event()

    async def take_over(payload: bytes) -> None:
        again.set()

    async def wait_again() -> None:
        with trio.fail_after(DEAD_WITHIN):
            await again.wait()

    await mesh.queue("orphans").enqueue(b"x")
    await trio.to_thread.run_sync(kill_when_running, url)
    await nursery.start(peer.serve, "orphans", take_over)
    return await record(wait_again)


def kill_when_running(url: str) -> None:
    """Start a worker, and kill it when it runs a task."""
    with subprocess.Popen([sys.executable, "-c", HOLDER, url], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        holder.kill()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.walks", description="Count the files of worqr that each walk passes."
    )
    parser.add_argument("--files", action="store_true", help="name the files")
    arguments = parser.parse_args()
    with EmbeddedServer() as server:
        os.environ["WORQR_URL"] = server.url
        found = trio.run(take_walks, server.url)
    for name, recorder in found.items():
        print(f"{name}: {len(recorder.files())} files, {len(recorder.entered)} functions")
        if arguments.files:
            print(*(f"    {file}" for file in recorder.files()), sep="\n")


if __name__ == "__main__":
    main()
