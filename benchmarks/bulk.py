"""A retry of all failed tasks from the dashboard, while a peer serves another queue: what the peer notices of it, and whether
the counts are exact after a stop, and after SIGKILL of the dashboard's process.
"""

from __future__ import annotations

import logging
import time
from functools import partial

import trio

import worqr
from benchmarks.children import Child, open_child
from benchmarks.measuring import Bar, Plan, Row, Table, percentile
from benchmarks.pickup import enqueue
from worqr.embedded import EmbeddedServer

FAILED = 100_000
QUEUE = "broken-down"
P99_BAR = Bar(3, most=True)
"""How many times as long a pick-up may take while the retry runs."""
NONE_BAR = Bar(0, most=True)
PAUSE = 0.002
LATE = 2.5
"""Seconds after which a heartbeat is late: there is one each second."""
BEATS_EVERY = 0.25
PAGE = 1000


async def fail_all(mesh: worqr.Mesh, count: int) -> None:
    """Let so many tasks fail."""
    queue = mesh.queue(QUEUE)

    async def fails(task: bytes) -> None:
        raise worqr.Failure("refused")

    logging.getLogger("worqr.peer.task_log").setLevel(logging.CRITICAL)
    async with mesh.join(grace=0, concurrency=1000) as peer, trio.open_nursery() as nursery:
        for start in range(0, count, 1000):
            await queue.enqueue(*[b"%d" % number for number in range(start, min(start + 1000, count))])
        await nursery.start(partial(peer.serve, QUEUE, fails, keep_failed=count))
        while (await queue.info()).failed < count:  # noqa: ASYNC110 - the peer counts, not this process
            await trio.sleep(0.1)
        nursery.cancel_scope.cancel()


class Watch:
    """What a peer of another queue notices while a retry runs: pick-ups in milliseconds, and heartbeats that were late."""

    def __init__(self, mesh: worqr.Mesh, peer: Child, server: EmbeddedServer) -> None:
        self.during: list[float] = []
        self.late = 0
        self.took = 0.0
        self._mesh = mesh
        self._peer = peer
        self._server = server

    async def pick_up(self) -> float:
        await trio.sleep(PAUSE)
        return await enqueue(self._mesh.queue("Q1"), self._peer) * 1000

    async def retry(self, meant: int, *, stop_at: int = 0, kill_at: int | None = None) -> int:
        """Retry all in a process of its own. Stop or kill it after so many. Return how many it has told of."""
        told, done = 0, trio.Event()
        async with (
            open_child("bulk", self._server, queue=QUEUE, meant=meant, stop_at=stop_at) as child,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(self._pick_ups, done)
            nursery.start_soon(self._beats, done)
            began = time.perf_counter()
            while (line := await child.line()) != "ended":
                told = int(line)
                if kill_at is not None and told >= kill_at:
                    child.kill()
                    break
            self.took += time.perf_counter() - began
            done.set()
        return told

    async def _pick_ups(self, done: trio.Event) -> None:
        while not done.is_set():
            self.during.append(await self.pick_up())

    async def _beats(self, done: trio.Event) -> None:
        while not done.is_set():
            self.late += sum(each.beat_age > LATE for each in await self._mesh.workers())
            with trio.move_on_after(BEATS_EVERY):
                await done.wait()


async def all_waiting(queue: worqr.Queue) -> list[bytes]:
    """Return the payloads of all waiting tasks. They are short, so a list has them whole."""
    found: list[bytes] = []
    after = ""
    while page := await queue.jobs(state="waiting", limit=PAGE, after=after):
        found += [each.task for each in page]
        after = page[-1].cursor
    return found


async def wrong(queue: worqr.Queue, count: int) -> float:
    """Return the number of tasks that are lost, or there twice."""
    info = await queue.info()
    waiting = await all_waiting(queue)
    failed = [record.task for record in await queue.failed.list(count + 1, payload=False)]
    distinct = len({*waiting, *failed})
    return float(abs(count - info.waiting - info.failed) + (len(waiting) + len(failed) - distinct) + (count - distinct))


async def measure(plan: Plan, server: EmbeddedServer) -> list[Table]:
    """Pick-ups before; then a retry that is stopped half-way, one that is killed, and one that ends."""
    count, samples = plan.size(FAILED, 1_500), plan.size(2_000, 20)
    mesh = worqr.Mesh(server.url)
    queue = mesh.queue(QUEUE)
    async with mesh.connect(), open_child("peers", server, queue="Q1", handler="tell_latency") as peer:
        await fail_all(mesh, count)
        watch = Watch(mesh, peer, server)
        before = [await watch.pick_up() for _ in range(samples)]
        stopped = await watch.retry(count, stop_at=count // 2)
        after_stop = abs((await queue.info()).failed - (count - stopped)) + await wrong(queue, count)
        killed = await watch.retry(count - stopped, kill_at=(count - stopped) // 2)
        after_kill = await wrong(queue, count)
        await watch.retry(count)
        at_end = (await queue.info()).failed + await wrong(queue, count)
    during = watch.during
    ratio = percentile(during, 99) / percentile(before, 99)
    rows = [
        Row("pick-up of another queue, p50", "ms", [percentile(during, 50)], [percentile(before, 50)]),
        Row("pick-up of another queue, p99", "ms", [percentile(during, 99)], [percentile(before, 99)]),
        Row("p99 during, compared to before", "times", [ratio], bar=P99_BAR),
        Row(f"heartbeats later than {LATE:g} s", "", [float(watch.late)], bar=NONE_BAR),
        Row("tasks that are wrong after a stop", "", [after_stop], bar=NONE_BAR),
        Row("tasks that are wrong after SIGKILL", "", [after_kill], bar=NONE_BAR),
        Row("tasks that are wrong at the end", "", [at_end], bar=NONE_BAR),
        Row(f"retry of {count:,} tasks", "s", [watch.took]),
    ]
    notes = [
        f"{count:,} failed tasks; the first retry was stopped after {stopped:,}, the second was killed after {killed:,} more",
        f"{len(before):,} pick-ups before, {len(during):,} during",
    ]
    return [Table("bulk: a retry of all failed tasks, beside a peer of another queue", "before the retry", rows, notes)]
