"""The mesh of ``worqr run tests.cli.app:mesh``: handlers that report how they end."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import threading
import time

import trio
from trio_util import periodic

import worqr

mesh = worqr.Mesh(app="tests", keepalive=60)  # one of several workers may stand still
empty = worqr.Mesh()
"""It has no function."""


@mesh.task
async def nap(seconds: float) -> None:
    print("napping", flush=True)
    await trio.sleep(seconds)
    print("awake", flush=True)


@mesh.task
async def nap_until(path: str) -> None:
    """Until the file exists."""
    print("napping", flush=True)
    async for _ in periodic(0.05):
        if await trio.Path(path).exists():
            break
    print("awake", flush=True)


@mesh.task
async def hold() -> None:
    print("holding", flush=True)
    try:
        await trio.sleep_forever()
    finally:
        print("let go:", worqr.current().cancel_reason, flush=True)


@mesh.task
async def stubborn() -> None:
    print("stubborn", flush=True)
    with trio.CancelScope(shield=True):
        await trio.sleep_forever()


@mesh.task
async def block() -> None:
    print("blocking", flush=True)
    while True:
        time.sleep(1)  # the loop and all


@mesh.task(timeout=30, concurrency=5, aliases=["old.fail"])
def fail(text: str) -> None:
    raise worqr.Failure(text) from ValueError(text)


@mesh.task
def linger() -> None:
    threading.Thread(target=time.sleep, args=(600,), name="lingering", daemon=False).start()
    print("lingering", flush=True)


@mesh.task
def leave() -> None:
    """Leaves a process behind that has another parent then."""
    found = subprocess.run(
        ["sh", "-c", "sleep 0.5 >/dev/null & echo $!"], stdout=subprocess.PIPE, text=True, check=True
    )
    print("left", found.stdout.strip(), flush=True)


@mesh.task
def terminate() -> None:
    """Forks a child, and terminates it once it runs: before that, Python forgets signals."""
    reader, writer = os.pipe()

    def run() -> None:
        os.write(writer, b"!")
        time.sleep(600)

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    os.read(reader, 1)
    child.terminate()
    child.join(60)
    print("ended by", child.exitcode, flush=True)
    child.kill()
