"""Schedules: their cost for the leading peer, how late tasks start when firings are evenly spread, and many in one second."""

from __future__ import annotations

import random
import time
from collections import Counter
from functools import partial

import trio

import worqr
from benchmarks.children import open_child
from benchmarks.measuring import Bar, Plan, Row, Table, percentile
from benchmarks.server import Account, account, bare
from worqr.embedded import EmbeddedServer
from worqr.keys import QueueKeys

COUNTS = (1_000, 10_000)
MANY = 100_000
SHORTEST, LONGEST = 60.0, 120.0
"""Seconds: the periods lie between them."""
WINDOW = 30.0
SETTLE = 4.0
"""Seconds until the leader leads and has seen every schedule."""
WITHIN = 5.0
"""Seconds after which a firing that did not start counts as missed."""
HERD, TENANTS, HERD_PERIOD = 100_000, 1_000, 60.0
"""Schedules that are due in the same second, the first segments of their names, and their period in seconds."""
HERD_BAR = Bar(5, most=True)
CPU_BAR, LATE_BAR, NONE = Bar(10, most=True), Bar(50, most=True), Bar(0, most=True)


def periods(count: int, shortest: float, longest: float) -> list[int]:
    """The period of each schedule in ms; the same in every process."""
    chance = random.Random(1)
    return [chance.randrange(round(shortest * 1000), round(longest * 1000)) for _ in range(count)]


class Firings:
    """The handler of all schedules: which firings it was given, and how late, in ms."""

    def __init__(self) -> None:
        self.late: dict[tuple[str, int], float] = {}
        self.times: Counter[tuple[str, int]] = Counter()

    async def handler(self, task: bytes) -> None:
        began, context = time.time(), worqr.current()
        assert context.id is not None
        assert context.scheduled_for is not None
        firing = context.id, round(context.scheduled_for.timestamp() * 1000)
        self.times[firing] += 1
        self.late.setdefault(firing, began * 1000 - firing[1])


class Window:
    """One run: a leader in a process of its own, which only leads, and the handler in this one."""

    def __init__(self, plan: Plan, count: int) -> None:
        self.count = count
        self.shortest, self.longest = (0.5, 1.0) if plan.quick else (SHORTEST, LONGEST)
        self.seconds, self.settle, self.within = plan.seconds(WINDOW), plan.seconds(SETTLE), plan.seconds(WITHIN)
        self.firings = Firings()
        self.leader_cpu = 0.0
        self.used: Account | None = None
        self.late: list[float] = []
        self.missed = self.doubled = 0

    async def measure(self, server: EmbeddedServer) -> None:
        """Watch the firings of some seconds."""
        options = {"count": self.count, "shortest": self.shortest, "longest": self.longest}
        async with open_child("schedules", server, **options) as leader:
            await trio.sleep(self.settle)
            mesh = worqr.Mesh(server.url)
            async with mesh.join(concurrency=1000, grace=0) as peer, trio.open_nursery() as nursery:
                await nursery.start(partial(peer.serve, "tick", self.firings.handler))
                await trio.sleep(self.settle)
                before, cpu, began = account(bare(server)), await leader.cpu(), time.time()
                await trio.sleep(self.seconds)
                self.used = account(bare(server)).since(before)
                self.leader_cpu, ended = await leader.cpu() - cpu, time.time()
                await trio.sleep(self.within)
                nursery.cancel_scope.cancel()
        self._judge(round(began * 1000), round(ended * 1000))

    def _judge(self, began: int, ended: int) -> None:
        for number, period in enumerate(periods(self.count, self.shortest, self.longest)):
            for nominal in range((began // period + 1) * period, ended, period):
                firing = f"cron:s{number}", nominal
                if firing in self.firings.late:
                    self.late.append(self.firings.late[firing])
                    self.doubled += self.firings.times[firing] > 1
                else:
                    self.missed += 1

    def rows(self, *, bars: bool) -> list[Row]:
        assert self.used is not None
        late = self.late or [0.0]
        name = f"{self.count:,} schedules"
        cpu, late_bar, none = (CPU_BAR, LATE_BAR, NONE) if bars else (None, None, None)
        return [
            Row(f"{name}: CPU of the leader", "% of a core", [self.leader_cpu / self.used.at * 100], [], cpu),
            Row(f"{name}: CPU of the server", "% of a core", [self.used.cpu / self.used.at * 100]),
            Row(f"{name}: late, p50", "ms", [percentile(late, 50)]),
            Row(f"{name}: late, p99", "ms", [percentile(late, 99)], [], late_bar),
            Row(f"{name}: late, max", "ms", [max(late)]),
            Row(f"{name}: missed or fired twice", "firings", [float(self.missed + self.doubled)], [], none),
        ]


class Herd:
    """Schedules that are due in the same second, of which each that is late would be dropped, fired by a peer that only leads."""

    def __init__(self, plan: Plan) -> None:
        self.count, self.tenants = plan.size(HERD, 1_000), plan.size(TENANTS, 10)
        self.period, self.within = plan.size(round(HERD_PERIOD), 3), plan.size(30, 3)
        self.took = 0.0
        self.dropped = 0

    async def measure(self, server: EmbeddedServer) -> None:
        """Wait for the second after which a period passes, and count what is enqueued."""
        client, counts = bare(server), QueueKeys("worqr", "tick").counts
        async with open_child("herd", server, count=self.count, period=self.period, tenants=self.tenants):
            await trio.sleep(min(SETTLE, self.period / 3))
            began = (time.time() // self.period + 1) * self.period
            client.hdel(counts, "enqueued")
            await trio.sleep(began - time.time())
            while (enqueued := int(client.hget(counts, "enqueued") or 0)) < self.count:
                if time.time() > began + self.within:
                    break
                await trio.sleep(0.02)
            self.took, self.dropped = time.time() - began, self.count - enqueued

    def rows(self) -> list[Row]:
        name = f"{self.count:,} schedules due in one second"
        return [
            Row(f"{name}: until the last is enqueued", "s", [self.took], [], HERD_BAR),
            Row(f"{name}: dropped", "firings", [float(self.dropped)], [], NONE),
        ]


async def measure(plan: Plan, server: EmbeddedServer) -> list[Table]:
    """One run for each number of schedules."""
    rows: list[Row] = []
    seen: list[str] = []
    for full in (*COUNTS, *([MANY] if plan.many else [])):
        window = Window(plan, plan.size(full, full // 100))
        await window.measure(server)
        rows += window.rows(bars=full != MANY)
        seen.append(f"{len(window.late):,} of {window.count:,}")
        bare(server).flushall()
    herd = Herd(plan)
    await herd.measure(server)
    rows += herd.rows()
    bare(server).flushall()
    short = f"windows of {plan.seconds(WINDOW):g} s"
    notes = [
        f"periods of {SHORTEST:g} to {LONGEST:g} s; {short}, in which this many fired: {', '.join(seen)}",
        "late: from the nominal time until the handler starts, in another process, by the system's clock",
        f"due in one second: period {herd.period} s, {herd.tenants:,} tenants, misfire='skip', overlap='skip'",
        f"missed: did not start within {WITHIN:g} s",
    ]
    return [Table("schedules: fired by a peer that only leads", "", rows, notes)]
