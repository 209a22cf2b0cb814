"""Limits: what they cost a drain, whether they hold over several peers, and how soon a freed place is used."""

from __future__ import annotations

import bisect
import itertools
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import trio

import worqr
from benchmarks.drain import CONCURRENCY, PREFIX, Drains
from benchmarks.measuring import Bar, Plan, Row, Table, in_turn, percentile, ratios
from benchmarks.server import account, bare, fill
from worqr.embedded import EmbeddedServer
from worqr.keys import QueueKeys

PEERS = 10
WORK = 0.005
"""Seconds that a handler takes."""
PERIOD = 0.1
"""Seconds of the rate whose moments are measured."""


@dataclass(slots=True)
class Seen:
    """What the handlers of all peers have seen."""

    running: int = 0
    most: int = 0
    starts: list[int] = field(default_factory=list[int])
    """In ms of the server's clock, which the numbers of claims run ahead of by less than 1 ms."""
    wanted: int = 0
    """After this many starts, `done` is set when nothing runs any more."""
    done: trio.Event = field(default_factory=trio.Event)
    free_since: float = 0.0
    waits: list[float] = field(default_factory=list[float])
    """Seconds from the end of a run to the start of the next one."""

    async def work(self, _task: bytes) -> None:
        if self.free_since:
            self.waits.append(time.perf_counter() - self.free_since)
        self.starts.append(worqr.current().fence // 1000)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await trio.sleep(WORK)
        finally:
            self.running -= 1
            self.free_since = time.perf_counter()
            if len(self.starts) >= self.wanted and not self.running:
                self.done.set()


class Holding(Seen):
    """Handlers that do not end by themselves."""

    async def work(self, _task: bytes) -> None:
        self.running += 1
        if self.running == self.wanted:
            self.done.set()
        await trio.sleep_forever()


@asynccontextmanager
async def served(
    server: EmbeddedServer, queue: str, seen: Seen, peers: int, *, concurrency: int, limit: worqr.Limit | None = None
) -> AsyncGenerator[worqr.Mesh]:
    """`peers` peers, each with a link of its own, serve a queue."""
    async with AsyncExitStack() as stack:
        nursery = await stack.enter_async_context(trio.open_nursery())
        meshes = [worqr.Mesh(server.url, prefix=PREFIX) for _ in range(peers)]
        for mesh in meshes:
            peer = await stack.enter_async_context(mesh.join(concurrency=concurrency, grace=0))
            await nursery.start(partial(peer.serve, queue, seen.work, limit=() if limit is None else limit))
        yield meshes[0]
        nursery.cancel_scope.cancel()


class Limits:
    """The runs on one server. `most` collects how many ran at once."""

    def __init__(self, server: EmbeddedServer, tasks: int) -> None:
        self.server = server
        self.client = bare(server)
        self.tasks = tasks
        self.most: list[float] = []

    def put(self, queue: str, tasks: int) -> None:
        key = QueueKeys(PREFIX, queue).base
        self.client.delete(key)
        fill(self.client, key, tasks)

    async def by_ten(self) -> float:
        """Tasks per second of ten peers behind a limit of ten."""
        seen = Seen(wanted=self.tasks)
        async with served(self.server, "ten", seen, PEERS, concurrency=PEERS, limit=worqr.Limit(PEERS)) as mesh:
            began = time.perf_counter()
            await mesh.queue("ten").enqueue(*[b"x"] * self.tasks)
            await seen.done.wait()
            rate = self.tasks / (time.perf_counter() - began)
        self.most.append(seen.most)
        return rate

    async def by_one(self) -> float:
        """Tasks per second of one peer with a concurrency of ten."""
        seen = Seen(wanted=self.tasks)
        async with served(self.server, "one", seen, 1, concurrency=PEERS) as mesh:
            began = time.perf_counter()
            await mesh.queue("one").enqueue(*[b"x"] * self.tasks)
            await seen.done.wait()
            return self.tasks / (time.perf_counter() - began)

    async def rated(self, seconds: float) -> tuple[int, int]:
        """Starts in `seconds` of four peers at 1,000 per second, and the most in any second."""
        seen = Seen()
        self.put("rated", 20_000)
        limit = worqr.Limit(rate=1000, per=1)
        async with served(self.server, "rated", seen, 4, concurrency=50, limit=limit):
            await trio.sleep(seconds + 0.5)
        starts = sorted(seen.starts)
        most = max(n + 1 - bisect.bisect_right(starts, at - 999) for n, at in enumerate(starts))
        return bisect.bisect_left(starts, starts[0] + seconds * 1000), most

    async def idle(self, seconds: float) -> float:
        """Requests per second of one of ten peers that serve an empty queue."""
        async with served(self.server, "empty", Seen(), PEERS, concurrency=PEERS):
            await trio.sleep(1)
            before = account(self.client)
            await trio.sleep(seconds)
            return account(self.client).since(before).rate / PEERS

    async def waiting(self, seconds: float) -> tuple[int, float]:
        """Starts that ten peers ask for behind a full limit, and the requests per second of one of them."""
        full = Holding(wanted=PEERS)
        self.put("full", 10_000)
        async with served(self.server, "full", full, PEERS, concurrency=PEERS, limit=worqr.Limit(PEERS)):
            await full.done.wait()
            await trio.sleep(1)
            before, asked = account(self.client), self._asked()
            await trio.sleep(seconds)
            return self._asked() - asked, account(self.client).since(before).rate / PEERS

    def _asked(self) -> int:
        """The starts that were asked for: the numbers of the last requests of all workers."""
        admissions = self.client.hvals(QueueKeys(PREFIX, "full").workers)
        return sum(int(each.split()[0]) for each in admissions)

    async def handed_over(self, samples: int) -> tuple[float, float]:
        """Milliseconds, p50 and p99, from the end of a run to the start of the next one in another peer."""
        seen = Seen(wanted=samples)
        self.put("over", samples)
        async with served(self.server, "over", seen, 4, concurrency=1, limit=worqr.Limit(1)):
            await seen.done.wait()
        return percentile(seen.waits, 50) * 1000, percentile(seen.waits, 99) * 1000

    async def opened(self, samples: int) -> tuple[float, float]:
        """Milliseconds, p50 and p99, from the moment at which a rate allows a start to that start."""
        seen = Seen(wanted=samples)
        self.put("opened", samples)
        async with served(self.server, "opened", seen, 4, concurrency=1, limit=worqr.Limit(rate=1, per=PERIOD)):
            await seen.done.wait()
        starts = sorted(seen.starts)
        late = [after - before - PERIOD * 1000 for before, after in itertools.pairwise(starts)]
        return percentile(late, 50), percentile(late, 99)


async def measure(plan: Plan, server: EmbeddedServer) -> list[Table]:
    """All of it on one server; the peers are in this process, each with connections of its own."""
    tasks = plan.size(100_000, 2_000)
    drains, limits = Drains(server, tasks), Limits(server, plan.size(2_000, 100))
    free, far, near = await in_turn(
        plan.runs,
        drains.whole,
        partial(drains.whole, limit=worqr.Limit(1_000_000)),
        partial(drains.whole, limit=worqr.Limit(CONCURRENCY)),
    )
    ten, one = await in_turn(plan.runs, limits.by_ten, limits.by_one)
    starts, most = await limits.rated(plan.seconds(10.0))
    asked, requests = await limits.waiting(plan.seconds(20.0))
    idle = await limits.idle(plan.seconds(20.0))
    p50, p99 = await limits.handed_over(plan.size(2_000, 50))
    opened, opened_99 = await limits.opened(plan.size(100, 10))
    expected = 1000 * plan.seconds(10.0)
    return [
        Table(
            "limits: what they cost, and whether they hold",
            "the same without a limit; of ten peers: one peer with a concurrency of ten; of requests: an empty queue",
            [
                Row("drain, Limit(1,000,000)", "tasks/s", far, free),
                Row("... by that without", "times", ratios(far, free), bar=Bar(0.95)),
                Row(f"drain, Limit({CONCURRENCY}) at concurrency {CONCURRENCY}", "tasks/s", near, free),
                Row("... by that without", "times", ratios(near, free), bar=Bar(0.80)),
                Row(f"{PEERS} peers behind Limit({PEERS}), runs of 5 ms", "tasks/s", ten, one),
                Row("... by that of one peer", "times", ratios(ten, one), bar=Bar(0.80)),
                Row("... most that ran at once", "runs", limits.most, bar=Bar(PEERS, most=True), worst=True),
                Row("rate=1000: starts by those allowed", "times", [starts / expected], bar=Bar(0.99)),
                Row("... most in any second", "starts", [most], bar=Bar(1000, most=True)),
                Row("full queue of 10,000: starts asked for", "requests", [asked], bar=Bar(0, most=True)),
                Row("... requests of a peer", "1/s", [requests], [idle]),
                Row("... by that of an idle one", "times", [requests / idle], bar=Bar(1.1, most=True)),
                Row("freed place to next start, p50", "ms", [p50], bar=Bar(2, most=True)),
                Row("... p99", "ms", [p99], bar=Bar(10, most=True)),
                Row("moment of a rate to the start, p50", "ms", [opened], bar=Bar(10, most=True)),
                Row("... p99", "ms", [opened_99]),
            ],
            ["the peers of one row are in one process, each with connections of its own"],
        )
    ]
