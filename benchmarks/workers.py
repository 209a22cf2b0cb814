"""``worqr run --workers 2`` beside two commands: rate and memory; and the rate of a busy queue while its workers are renewed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import trio
from trio_util import periodic

import worqr
from benchmarks.measuring import Bar, Plan, Row, Table
from worqr.embedded import EmbeddedServer

PROGRAM = """
import trio, worqr

mesh = worqr.Mesh()


@mesh.task(name="mail")
async def mail() -> None:
    pass


@mesh.task(name="wait")
async def wait() -> None:
    await trio.sleep(0.05)
"""
ROOT = Path(__file__).parent.parent
WORKERS = 2
RENEWED_AFTER = 10
"""Seconds: the shortest ``--max-age``."""


@asynccontextmanager
async def served(server: EmbeddedServer, folder: str, commands: int, *options: str) -> AsyncGenerator[worqr.Mesh]:
    """A mesh that so many commands serve with two workers; they are ended afterwards."""
    environment = {**os.environ, "WORQR_URL": server.url, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "worqr", "run", "program:mesh", "--log-level", "error", *options]
    mesh = worqr.Mesh(server.url)
    started = [subprocess.Popen(command, cwd=folder, env=environment) for _ in range(commands)]  # noqa: ASYNC220
    try:
        async with mesh.connect():
            async for _ in periodic(0.05):
                if len(await mesh.workers()) >= WORKERS:
                    break
            yield mesh
    finally:
        for each in started:
            each.terminate()
        for each in started:
            each.wait()


async def rate(mesh: worqr.Mesh, name: str, tasks: int) -> float:
    """Tasks per second, from the moment at which all of them wait until the last one has ended."""
    queue = mesh.queue(name)
    await queue.pause("the tasks are enqueued")
    for _ in range(0, tasks, 1000):
        await queue.enqueue(*[b"{}"] * min(1000, tasks))
    began = time.perf_counter()
    await queue.resume()
    async for _ in periodic(0.01):
        if not (await queue.count() or await queue.running()):
            break
    return tasks / (time.perf_counter() - began)


def memory() -> float:
    """MB of all children of this process and theirs, each shared page divided by its users; 0 elsewhere than on Linux."""
    found, parents = 0, {os.getpid()}
    for _ in range(2):
        listed = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", ",".join(map(str, parents))], capture_output=True, text=True, check=False
        )
        parents = set(map(int, listed.stdout.split()))
        for pid in parents:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text() if Path(f"/proc/{pid}/smaps_rollup").exists() else ""
            lines = [line.split() for line in text.splitlines() if line.startswith("Pss:")]
            command = Path(f"/proc/{pid}/cmdline").read_bytes() if lines else b""
            found += int(lines[0][1]) if lines and b"python" in command else 0
        parents = parents or {0}
    return found / 1000


async def measure(plan: Plan, server: EmbeddedServer) -> list[Table]:
    """Measure both."""
    rates: list[list[float]] = [[], []]
    sizes: list[list[float]] = [[], []]
    renewed, steady = list[float](), list[float]()
    with tempfile.TemporaryDirectory() as folder:
        await trio.Path(folder, "program.py").write_text(PROGRAM, "utf-8")
        runs = 1 if plan.quick else 3
        for _ in range(runs):
            for which, (commands, options) in enumerate(((1, ("--workers", str(WORKERS))), (WORKERS, ()))):
                async with served(server, folder, commands, *options) as mesh:
                    rates[which].append(await rate(mesh, "mail", plan.size(100_000, 1000)))
                    sizes[which].append(memory())
            tasks = plan.size(8_000, 1000)
            slow = ("--workers", str(WORKERS), "--concurrency", "10")
            async with served(server, folder, 1, *slow) as mesh:
                steady.append(await rate(mesh, "wait", tasks))
            async with served(server, folder, 1, *slow, "--max-age", str(RENEWED_AFTER)) as mesh:
                renewed.append(await rate(mesh, "wait", tasks))
    return [
        Table(
            "Several workers below one parent",
            "two commands, side by side; for the renewal, workers that are not renewed",
            [
                Row("drain with `--workers 2`", "tasks/s", rates[0], rates[1]),
                Row("memory with `--workers 2`", "MB", sizes[0], sizes[1]),
                Row("busy workers, each renewed after 10 s", "tasks/s", renewed, steady),
                Row(
                    "its share of the rate",
                    "ratio",
                    [each / of for each, of in zip(renewed, steady, strict=True)],
                    bar=Bar(0.9),
                ),
            ],
            ["Of memory, a page that several processes share is divided by their number."],
        )
    ]
