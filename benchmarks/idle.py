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
LEADER_BAR, COMMANDS_BAR = Bar(3, most=True), Bar(25, most=True)
WINDOW = 10.0
"""Seconds of one run: some scans of the leader."""
SETTLE = 3.0


@dataclass(slots=True)
class Window:
    """One run: requests per second for one, two and three peers, all commands for one, and each process's percent of a core."""

    rates: list[float]
    commands: float
    cpu: list[float]


class Idle:
    """Four servers: three with one, two and three peers, of which the first leads; one with a bare thread that beats."""

    def __init__(self, servers: list[redis.Redis], children: list[Child]) -> None:
        self.servers = servers
        self.children = children
        self.kinds: list[Counter[str]] = [Counter() for _ in servers]
        self.watched = 0.0

    async def window(self, seconds: float) -> Window:
        before = [account(each) for each in self.servers]
        cpu = [await child.cpu() for child in self.children]
        await trio.sleep(seconds)
        spent = [await child.cpu() - was for child, was in zip(self.children, cpu, strict=True)]
        since = [account(each).since(was) for each, was in zip(self.servers, before, strict=True)]
        for kinds, books in zip(self.kinds, since, strict=True):
            kinds.update(books.requests)
        took = since[0].at
        self.watched += took
        rates = [books.rate for books in since]
        return Window(rates, since[0].commands / took, [used / took * 100 for used in spent])


async def measure(plan: Plan, server: EmbeddedServer) -> list[Table]:
    """All kinds of peer at once."""
    async with AsyncExitStack() as stack:
        servers = [server, *(stack.enter_context(EmbeddedServer()) for _ in range(3))]
        peers: list[Child] = []
        for number in range(3):  # of a server; the first of its peers leads
            for each in servers[number:3]:
                open_peer = open_child("peers", each, queue="Q1", handler="do_nothing")
                peers.append(await stack.enter_async_context(open_peer))
            await trio.sleep(plan.seconds(SETTLE))
        beater = await stack.enter_async_context(open_child("beater", servers[3]))
        await trio.sleep(plan.seconds(SETTLE))
        idle = Idle([bare(each) for each in servers[:3]], [peers[0], peers[-1], beater])
        windows = [await idle.window(plan.seconds(WINDOW)) for _ in range(plan.runs)]
    beat = [1.0] * plan.runs
    leader_cpu, other_cpu, bare_cpu = ([window.cpu[n] for window in windows] for n in range(3))
    alone, two, three = ([window.rates[n] for window in windows] for n in range(3))
    rows = [
        Row("requests of an idle peer", "1/s", [b - a for a, b in zip(two, three, strict=True)], beat, REQUESTS_BAR),
        Row("requests of a lone peer, which leads", "1/s", alone, beat, LEADER_BAR),
        Row("commands of the server for it", "1/s", [window.commands for window in windows], bar=COMMANDS_BAR),
        Row("requests of two peers", "1/s", two, beat),
        Row("CPU of an idle peer", "% of a core", other_cpu, bare_cpu, CPU_BAR),
        Row("CPU of a lone peer", "% of a core", leader_cpu, bare_cpu),
    ]
    third = idle.kinds[2].copy()
    third.subtract(idle.kinds[1])
    notes = [
        f"{plan.runs} windows of {plan.seconds(WINDOW):g} s; requests without what scripts call, commands with it",
        "a leader looks for dead peers two times a second, and once in 2.5 s if it is alone",
        f"an idle peer: {describe(third.items(), idle.watched)}",
        f"a lone one: {describe(idle.kinds[0].items(), idle.watched)}",
    ]
    limit = "requests: one beat a second; CPU: a bare thread with redis-py that sets one key a second, at the same time"
    return [Table("idle: peers in processes of their own, one queue, nothing to do", limit, rows, notes)]
