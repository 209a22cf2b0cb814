"""The cost of a fleet of idle peers, for enqueueing callers and for the server."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial

import redis
import trio

import worqr
from benchmarks.children import open_child
from benchmarks.measuring import Bar, Plan, Row, Table, in_turn, percentile, ratios
from benchmarks.server import account, bare
from worqr.embedded import EmbeddedServer

FLAT = Bar(1.5, most=True)
PAUSE = 0.002


@dataclass(slots=True)
class Cost:
    """Enqueues into one queue, per run: median latency and server time; both in microseconds."""

    latency: list[float] = field(default_factory=list[float])
    script: list[float] = field(default_factory=list[float])
    requests: list[float] = field(default_factory=list[float])


class Fleet:
    """A mesh that grows. `one` is a queue with a single peer; all other peers serve `many`."""

    def __init__(self, server: EmbeddedServer, client: redis.Redis, plan: Plan) -> None:
        self.client = client
        self.plan = plan
        self.mesh = worqr.Mesh(server.url)
        self.idle_cpu: list[float] = []
        self._idle_script = 0.0
        self._idle_requests = 0.0

    async def idle(self) -> float:
        """Requests per second of all peers together; remembers what must be subtracted from a busy time."""
        before = account(self.client)
        await trio.sleep(self.plan.seconds(3))
        spent = account(self.client).since(before)
        self._idle_script = spent.script_time / spent.at
        self._idle_requests = spent.rate
        self.idle_cpu.append(spent.cpu / spent.at * 100)
        return spent.rate

    async def enqueue(self, name: str, cost: Cost) -> float:
        """Enqueue a few times with pauses, which wakes a worker each time; return the median latency in microseconds."""
        queue, latencies = self.mesh.queue(name), list[float]()
        before = account(self.client)
        for _ in range(self.plan.size(300, 10)):
            began = time.perf_counter()
            await queue.enqueue(b"x" * 100)
            latencies.append((time.perf_counter() - began) * 1e6)
            await trio.sleep(PAUSE)
        spent = account(self.client).since(before)
        n = len(latencies)
        cost.latency.append(percentile(latencies, 50))
        cost.script.append((spent.script_time - self._idle_script * spent.at) / n * 1e6)
        cost.requests.append((sum(spent.requests.values()) - self._idle_requests * spent.at) / n)
        return cost.latency[-1]


async def measure(plan: Plan, server: EmbeddedServer) -> list[Table]:
    """The same mesh with 1, then 100, then 1,000 idle peers on the queue; beside it a queue with one peer."""
    client = bare(server)
    fleet = Fleet(server, client, plan)
    cost = Table(
        "fleet: enqueue, one at a time, into a queue on which N idle peers wait",
        "the same, in turn, into a queue of the same mesh with one peer",
    )
    idle = Table("fleet: requests of all idle peers together", "1 request per second and peer")
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(fleet.mesh.connect())
        real, all_of_them = plan.size(100, 2), plan.size(1000, 12)
        peers = partial(open_child, "peers", server, handler="do_nothing")
        stand_ins = partial(open_child, "stand_ins", server)
        await stack.enter_async_context(peers(queue="one"))
        stages = [(1, peers, 1), (real, peers, real - 1), (all_of_them, stand_ins, all_of_them - real)]
        for size, start, count in stages:
            await stack.enter_async_context(start(queue="many", count=count))
            await trio.sleep(plan.seconds(4))
            fleet.idle_cpu.clear()
            rates = [await fleet.idle() for _ in range(plan.runs)]
            limit = [size + 1.0] * len(rates)
            idle.rows.append(Row(f"{size + 1:,} peers: requests", "1/s", rates, limit))
            idle.rows.append(Row("... CPU of the server", "% of a core", list(fleet.idle_cpu)))
            many, one = Cost(), Cost()
            await in_turn(plan.runs, partial(fleet.enqueue, "many", many), partial(fleet.enqueue, "one", one))
            cost.rows += [
                Row(f"{size:,} peers: latency of the call", "us", many.latency, one.latency),
                Row("... by that of one peer", "times", ratios(many.latency, one.latency), bar=FLAT),
                Row("... server time in scripts (enqueue, start, finish)", "us", many.script, one.script),
                Row("... by that of one peer", "times", ratios(many.script, one.script), bar=FLAT),
                Row("... requests per task", "requests", many.requests, one.requests),
            ]
    cost.notes.append("server time and requests: what the idle peers cause meanwhile is measured before and subtracted")
    crowd = (
        f"{all_of_them - real} of the {all_of_them:,} are stand-ins (stand_ins.py): a peer's requests without its PING"
    )
    cost.notes.append(crowd)
    idle.notes.append(crowd)
    idle.notes.append("each real peer has a link, subscriptions and a keepalive of its own")
    return [cost, idle]
