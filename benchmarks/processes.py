"""The cost of a run in a process: the round trip to a warm one, the start of a cold one, and the end of a cancelled one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import trio

import worqr
from benchmarks.children import ROOT
from benchmarks.measuring import Plan, Row, Table, in_turn
from worqr.embedded import EmbeddedServer
from worqr.peer.executors.processes.pool import ProcessPool
from worqr.peer.run import Run, current_run
from worqr.policy import Policy

TASK = b'{"number": 42}'


def nothing(task: bytes) -> None:
    """The function whose runs are measured."""


async def nothing_async(task: bytes) -> None:
    """The same in the loop."""


def echo(task: bytes) -> bytes:
    return task


def hold(task: bytes) -> None:
    """Hold the CPU, and a grandchild."""
    grandchild = subprocess.Popen(["sleep", "1000"])
    worqr.current().progress(message=json.dumps([os.getpid(), grandchild.pid]))
    while True:
        pass


class Desk:
    """Stands where a peer's station would."""

    name = queue = "Q1"
    base = ""
    id_suffix = ""
    state = None
    values = None
    hides_arguments = False
    deploy = 0
    policy = Policy(result_ttl=60.0)

    def __init__(self) -> None:
        self.said = trio.Event()
        self.pids: list[int] = []

    def report_progress(self, run: Run[Any], done: float | None, message: str, value: bytes) -> None:
        self.pids = json.loads(message)
        self.said.set()


@asynccontextmanager
async def open_children(desk: Desk, task: bytes = TASK) -> AsyncGenerator[ProcessPool]:
    """A pool of one process; what runs here is a job with `task`, whose result is kept."""
    station: Any = desk
    run = Run(station, None, 1_900_000_000_000_000, [b"id", b"x", b"task", task])
    token = current_run.set(run)
    children = ProcessPool(1, max_result=1 << 26)
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(children.run_forever)
            yield children
            nursery.cancel_scope.cancel()
    finally:
        current_run.reset(token)


def repeated(run: Callable[[bytes], Awaitable[object]], times: int) -> Callable[[], Awaitable[float]]:
    """Microseconds of one of `times` runs, one after the other."""

    async def measured() -> float:
        began = time.perf_counter()
        for _ in range(times):
            await run(TASK)
        return (time.perf_counter() - began) / times * 1e6

    return measured


async def in_thread(task: bytes) -> None:
    await trio.to_thread.run_sync(nothing, task)


async def start_cold() -> float:
    """Milliseconds until a process that is not there yet has run its first function."""
    async with open_children(Desk()) as children:
        run = children.prepare(nothing)
        began = time.perf_counter()
        await run(TASK)
        return (time.perf_counter() - began) * 1000


async def start_python() -> float:
    """The least that takes: Python, and worqr imported."""
    began = time.perf_counter()
    await trio.run_process([sys.executable, "-c", "import worqr"], cwd=ROOT)
    return (time.perf_counter() - began) * 1000


async def kill() -> float:
    """Milliseconds from the cancellation until neither the process nor its grandchild runs any more."""
    desk = Desk()
    async with open_children(desk) as children, trio.open_nursery() as nursery:
        nursery.start_soon(children.prepare(hold), TASK)
        await desk.said.wait()
        began = time.perf_counter()
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            while any(map(is_alive, desk.pids)):
                await trio.lowlevel.checkpoint()
        ended = time.perf_counter()
    return (ended - began) * 1000


async def kill_bare() -> float:
    """The same of a process of the same size, by its id."""
    program = [sys.executable, "-c", "import worqr; print(flush=True)\nwhile True: pass"]
    process = await trio.lowlevel.open_process(program, cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    async with process.stdout:
        await process.stdout.receive_some()
        began = time.perf_counter()
        process.kill()
        await process.wait()
        return (time.perf_counter() - began) * 1000


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def measure(plan: Plan, server: EmbeddedServer) -> list[Table]:
    """Runs beside runs in a thread and in the loop, then what starts and ends."""
    times = plan.size(2000, 20)
    async with open_children(Desk()) as children:
        process = children.prepare(nothing)
        for run in (process, in_thread):
            await run(TASK)  # warm
        runs = [repeated(run, times) for run in (process, in_thread, nothing_async)]
        in_process, threads, bare = await in_turn(plan.runs, *runs)
    async with open_children(Desk(), bytes(10 * 1024 * 1024)) as children:
        echoed = children.prepare(echo)
        await echoed(TASK)
        (large,) = await in_turn(plan.runs, repeated(echoed, plan.size(20, 2)))
    cold, python = await in_turn(plan.runs, start_cold, start_python)
    rows = [
        Row("a run in a warm process", "us", in_process, threads),
        Row("the same awaited in the loop", "us", bare, threads),
        Row("a run that takes 10 MiB and returns them", "ms", [us / 1000 for us in large]),
        Row("a process that is not there yet, until its first run is back", "ms", cold, python),
    ]
    if sys.platform == "linux":
        killed, by_id = await in_turn(plan.size(10, 1), kill, kill_bare)
        rows.append(Row("cancelled, until it and its grandchild are gone", "ms", killed, by_id))
    notes = [f"a run: {times} no-op runs of {len(TASK)} bytes, one after the other, without a queue"]
    limit = (
        "a run: trio.to_thread.run_sync; a start: Python with worqr imported; a kill: a process that only imports worqr"
    )
    return [Table("processes: runs that can be killed", limit, rows, notes)]
