"""Where ``concurrency="auto"`` settles, second by second, for work that waits, work that computes, and work that does both."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import trio

import worqr
from benchmarks.measuring import Bar, Plan, Row, Table
from benchmarks.server import bare, fill
from worqr.embedded import EmbeddedServer
from worqr.keys import QueueKeys
from worqr.peer.scheduler import usable_cores

PREFIX = "worqr"
SECONDS = 45.0
TASKS = 60_000
FIGURE = "auto.png"
WIDE, HIGH = 8.0, 5.0
"""Inches of the figure."""


@dataclass
class Work:
    """One kind of work. `seen` is the concurrency at the end of each second; `bar` is for where it settles."""

    name: str
    handler: Callable[[bytes], object]
    bar: Bar | None = None
    seen: list[int] = field(default_factory=list[int])
    ran: int = 0

    @property
    def settled(self) -> float:
        """The median of the last third."""
        return statistics.median(self.seen[-max(1, len(self.seen) // 3) :])

    @property
    def arrived(self) -> float:
        """The second from which on it stayed within a third of that, or one of it."""
        for second in range(len(self.seen), 0, -1):
            if abs(self.seen[second - 1] - self.settled) > max(self.settled / 3, 1):
                return second + 1.0
        return 1.0


async def waits(_task: bytes) -> None:
    await trio.sleep(1)


async def computes_on_the_loop(_task: bytes) -> None:
    burn(0.02)
    await trio.lowlevel.checkpoint()


def computes_in_a_thread(_task: bytes) -> None:
    burn(0.1)


def computes_without_the_lock(_task: bytes) -> None:
    hashlib.pbkdf2_hmac("sha256", b"password", b"salt", 100_000)


async def does_both(_task: bytes) -> None:
    burn(0.002)
    await trio.sleep(0.2)


def burn(seconds: float) -> None:
    """Compute in Python for so much CPU time of this thread."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


async def watch(work: Work, mesh: worqr.Mesh, queue: str, seconds: float) -> None:
    """Serve `queue` with `work` for some seconds and note the concurrency at the end of each."""

    async def count_async(task: bytes) -> None:
        work.ran += 1
        await work.handler(task)  # type: ignore[misc]

    def count(task: bytes) -> None:
        work.ran += 1
        work.handler(task)

    is_async = work.handler in {waits, computes_on_the_loop, does_both}
    async with mesh.join(concurrency="auto", grace=0) as peer, trio.open_nursery() as nursery:
        await nursery.start(partial(peer.serve, queue, count_async if is_async else count))
        began = trio.current_time()
        for second in range(1, int(seconds) + 1):
            await trio.sleep_until(began + second)
            work.seen.append(peer._engine.scheduler.concurrency)
        nursery.cancel_scope.cancel()


async def measure(plan: Plan, server: EmbeddedServer) -> list[Table]:
    cores = usable_cores()
    works = [
        Work("waits for 1 s", waits, Bar(200)),
        Work("waits for 0.2 s, computes for 2 ms", does_both),
        Work("computes for 20 ms, a coroutine on the loop", computes_on_the_loop, Bar(2 * cores, most=True)),
        Work("computes for 0.1 s, Python in threads", computes_in_a_thread, Bar(2 * cores, most=True)),
        Work(
            "computes in threads without Python's lock (hashlib)", computes_without_the_lock, Bar(2 * cores, most=True)
        ),
    ]
    mesh = worqr.Mesh(server.url, prefix=PREFIX)
    client = bare(server)
    async with mesh.connect():
        for work in works:
            key = QueueKeys(PREFIX, "auto").base
            fill(client, key, plan.size(TASKS, 5000))
            await watch(work, mesh, "auto", plan.seconds(SECONDS))
            client.delete(key)
    table = Table(
        f"auto: where concurrency='auto' settles, on {cores:g} cores",
        "",
        [Row(work.name, "units", [work.settled], bar=None if plan.quick else work.bar) for work in works],
        [
            f"{work.name}: there from second {work.arrived:.0f} on, {work.ran / len(work.seen):,.0f} runs/s over all"
            for work in works
        ],
    )
    if plan.figures is not None:
        table.notes.append(draw(works, cores, plan.figures / FIGURE))
    return [table]


def draw(works: Sequence[Work], cores: float, file: Path) -> str:
    """Draw the concurrency over time into `file`; what became of it, in a sentence."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return f"{file.name} is not drawn: that takes matplotlib (the dependency group `benchmarks`)"
    figure = Figure(figsize=(WIDE, HIGH), layout="constrained")
    axes = figure.add_subplot()
    for work in works:
        axes.plot(range(1, len(work.seen) + 1), work.seen, marker=".", label=work.name)
    axes.axhline(cores, color="grey", linestyle=":", label=f"{cores:g} cores")
    axes.set(yscale="log", xlabel="seconds", ylabel="concurrency (units)", title='concurrency="auto"')
    axes.set_yticks([1, 10, 100, 1000], ["1", "10", "100", "1000"])
    axes.grid(visible=True, alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    figure.savefig(file, dpi=100)
    return f"{file} shows each second"
