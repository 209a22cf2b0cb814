"""How long a task that is put into an idle queue waits until its handler starts."""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import redis
import trio

import worqr
from benchmarks.children import Child, open_child
from benchmarks.measuring import Bar, Plan, Row, Table, in_turn, percentile
from benchmarks.server import bare
from worqr.embedded import EmbeddedServer

P50_BAR, P99_BAR = Bar(1.2, most=True), Bar(5, most=True)
PAUSE = 0.002
"""Seconds between two samples: enough for the peer to be idle again, and for the reply to its finish."""

Sample = Callable[[], Awaitable[float]]
Bars = tuple[Bar | None, Bar | None]


class Latencies:
    """Samples of one kind, in milliseconds: each run adds `per_run` of them and returns their median."""

    def __init__(self, sample: Sample, per_run: int) -> None:
        self.p99: list[float] = []
        self.sample = sample
        self.per_run = per_run

    async def run(self) -> float:
        samples: list[float] = []
        for _ in range(self.per_run):
            await trio.sleep(PAUSE)
            samples.append(await self.sample() * 1000)
        self.p99.append(percentile(samples, 99))
        return percentile(samples, 50)


async def rows(plan: Plan, pairs: Sequence[tuple[str, Sample, Sample]], bars: Bars, per_run: int) -> list[Row]:
    """Two lines, p50 and p99, for each (what, ours, limit), all measured in turn."""
    kinds = [Latencies(sample, per_run) for _, *samples in pairs for sample in samples]
    medians = await in_turn(plan.runs, *(kind.run for kind in kinds))
    found: list[Row] = []
    for at, (what, *_) in enumerate(pairs):
        ours, limit = 2 * at, 2 * at + 1
        found.append(Row(f"{what}, p50", "ms", medians[ours], medians[limit], bars[0]))
        found.append(Row(f"{what}, p99", "ms", kinds[ours].p99, kinds[limit].p99, bars[1]))
    return found


async def publish(client: redis.Redis, channel: str, listener: Child) -> float:
    """One message to another process, which tells how long it took."""
    client.publish(channel, repr(time.perf_counter()))
    return float(await listener.line())


async def enqueue(queue: worqr.Queue, child: Child) -> float:
    """One task to another process, which tells how long it took until the handler started."""
    await queue.enqueue(repr(time.perf_counter()).encode())
    return float(await child.line())


class InOneProcess:
    """The same within this process: a peer beside its producer, and a thread that listens."""

    def __init__(self, server: EmbeddedServer, queue: worqr.Queue) -> None:
        self.client = bare(server)
        self.queue = queue
        self.started = trio.Event()
        self.took = 0.0
        self.token = trio.lowlevel.current_trio_token()
        self.pubsub = redis.Redis(unix_socket_path=server.socket_path).pubsub(ignore_subscribe_messages=True)
        self.pubsub.subscribe("threads")
        self.pubsub.get_message(timeout=1)
        threading.Thread(target=self._listen_forever, daemon=True).start()

    async def handler(self, task: bytes) -> None:
        self._took(time.perf_counter() - float(task))

    def _took(self, seconds: float) -> None:
        self.took = seconds
        self.started.set()

    def _listen_forever(self) -> None:
        try:
            for message in self.pubsub.listen():
                self.token.run_sync_soon(self._took, time.perf_counter() - float(message["data"]))
        except (redis.ConnectionError, trio.RunFinishedError):
            pass  # the server has gone, and with it the benchmark

    async def pick_up(self) -> float:
        self.started = trio.Event()
        await self.queue.enqueue(repr(time.perf_counter()).encode())
        await self.started.wait()
        return self.took

    async def publish(self) -> float:
        self.started = trio.Event()
        self.client.publish("threads", repr(time.perf_counter()))
        await self.started.wait()
        return self.took


async def measure(plan: Plan, server: EmbeddedServer) -> list[Table]:
    """From one process to another, and within one."""
    mesh = worqr.Mesh(server.url)
    client = bare(server)
    async with (
        open_child("peers", server, queue="far", handler="tell_latency") as far,
        open_child("listener", server, channel="processes") as listener,
        mesh.join(grace=0) as peer,
        trio.open_nursery() as nursery,
    ):
        near = InOneProcess(server, mesh.queue("near"))
        await nursery.start(partial(peer.serve, "near", near.handler))
        ours, limit = partial(enqueue, mesh.queue("far"), far), partial(publish, client, "processes", listener)
        pairs: list[tuple[str, Sample, Sample]] = [
            ("in one process", near.pick_up, near.publish),
            ("from process to process", ours, limit),
        ]
        found = await rows(plan, pairs, (P50_BAR, P99_BAR), plan.size(200, 10))
        nursery.cancel_scope.cancel()
    limit = "redis-py alone: PUBLISH until the message is there, between two threads and between two processes"
    samples = plan.size(200, 10)
    notes = [f"{samples} samples per run; the p99 is the median of the runs' p99"]
    return [Table("pick-up: enqueue into an idle queue until the handler starts", limit, found, notes)]
