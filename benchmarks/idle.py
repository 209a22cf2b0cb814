"""The cost of a peer without tasks: requests to the server, and CPU."""

from __future__ import annotations

from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass

import redis
import trio

from benchmarks.children import Child, open_child
from benchmarks.measuring import Bar, Plan, Row, Table
from benchmarks.server import account, bare, describe
from worqr.embedded import EmbeddedServer

REQUESTS_BAR, CPU_BAR = Bar(1.5, most=True), Bar(0.5, most=True)
WINDOW = 10.0
"""Seconds of one run: some scans of the leader."""
SETTLE = 3.0


@dataclass(slots=True)
class Window:
    """One run: requests per second on each server, share of a core of each process in percent."""

    leader: float
    both: float
    leader_cpu: float
    other_cpu: float
    beater_cpu: float


class Idle:
    """Three servers: one with a peer alone, which leads; one with two; one with a bare thread that beats."""

    def __init__(self, alone: redis.Redis, two: redis.Redis, children: list[Child]) -> None:
        self.alone = alone
        self.two = two
        self.children = children
        self.kinds: Counter[str] = Counter()
        self.kinds_of_leader: Counter[str] = Counter()
        self.watched = 0.0

    async def window(self, seconds: float) -> Window:
        alone, two = account(self.alone), account(self.two)
        cpu = [await child.cpu() for child in self.children]
        await trio.sleep(seconds)
        spent = [await child.cpu() - before for child, before in zip(self.children, cpu, strict=True)]
        in_alone, in_two = account(self.alone).since(alone), account(self.two).since(two)
        self.kinds.update(in_two.requests)
        self.kinds_of_leader.update(in_alone.requests)
        self.watched += in_two.at
        leader_cpu, other_cpu, beater_cpu = (used / in_two.at * 100 for used in spent)
        return Window(in_alone.rate, in_two.rate, leader_cpu, other_cpu, beater_cpu)


async def measure(plan: Plan, server: EmbeddedServer) -> list[Table]:
    """Both kinds of peer at once, each on a server of its own."""
    async with AsyncExitStack() as stack:
        second, third = (stack.enter_context(EmbeddedServer()) for _ in range(2))
        leader = await stack.enter_async_context(open_child("peers", server, queue="Q1", handler="do_nothing"))
        await stack.enter_async_context(open_child("peers", second, queue="Q1", handler="do_nothing"))
        await trio.sleep(plan.seconds(SETTLE))  # so that the first of the two leads
        other = await stack.enter_async_context(open_child("peers", second, queue="Q1", handler="do_nothing"))
        beater = await stack.enter_async_context(open_child("beater", third))
        await trio.sleep(plan.seconds(SETTLE))
        idle = Idle(bare(server), bare(second), [leader, other, beater])
        windows = [await idle.window(plan.seconds(WINDOW)) for _ in range(plan.runs)]
    beat = [1.0] * plan.runs
    leader_cpu = [window.leader_cpu for window in windows]
    other_cpu = [window.other_cpu for window in windows]
    bare_cpu = [window.beater_cpu for window in windows]
    others = [window.both - window.leader for window in windows]
    rows = [
        Row("requests of an idle peer", "1/s", others, beat, REQUESTS_BAR),
        Row("requests of an idle peer that leads", "1/s", [window.leader for window in windows], beat),
        Row("CPU of an idle peer", "% of a core", other_cpu, bare_cpu, CPU_BAR),
        Row("CPU of an idle peer that leads", "% of a core", leader_cpu, bare_cpu),
    ]
    idle.kinds.subtract(idle.kinds_of_leader)
    notes = [
        f"{plan.runs} windows of {plan.seconds(WINDOW):g} s; what scripts call is not counted",
        f"an idle peer: {describe(idle.kinds.items(), idle.watched)}",
        f"one that leads: {describe(idle.kinds_of_leader.items(), idle.watched)}",
    ]
    limit = "requests: one beat a second; CPU: a bare thread with redis-py that sets one key a second, at the same time"
    return [Table("idle: one peer in a process, one queue, nothing to do", limit, rows, notes)]
