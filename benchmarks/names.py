"""The cost of unused queues for the server and the leader, while the leader has no tasks to run."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass

import redis
import trio

from benchmarks.children import Child, open_child
from benchmarks.measuring import Plan, Row, Table
from benchmarks.server import account, bare, command, fill
from worqr import ops
from worqr.embedded import EmbeddedServer
from worqr.keys import QueueKeys, RegistryKeys

PREFIX = "worqr"
NAMES = 1000
WINDOW = 12.0
"""Seconds of one run: four scans of the leader."""
SETTLE = 6.0


@dataclass(slots=True)
class Mesh:
    """One server with one peer, which leads."""

    client: redis.Redis
    leader: Child


@dataclass(slots=True)
class Window:
    """One run: requests per second; CPU of the server and of the leader, and the server's time in scripts, in % of a core."""

    requests: float
    server: float
    scripts: float
    leader: float


async def watch(mesh: Mesh, seconds: float, found: list[Window]) -> None:
    before, cpu = account(mesh.client), await mesh.leader.cpu()
    await trio.sleep(seconds)
    spent, used = account(mesh.client).since(before), await mesh.leader.cpu() - cpu
    server, scripts, leader = (part / spent.at * 100 for part in (spent.cpu, spent.script_time, used))
    found.append(Window(spent.rate, server, scripts, leader))


async def measure(plan: Plan, server: EmbeddedServer) -> list[Table]:
    """Three meshes at once: without names, with names of empty queues, and of queues that wait."""
    names = [f"customer-{n:04d}" for n in range(plan.size(NAMES, 50))]
    async with AsyncExitStack() as stack:
        servers = [server, *(stack.enter_context(EmbeddedServer()) for _ in range(2))]
        meshes: list[Mesh] = []
        for number, each in enumerate(servers):
            client = bare(each)
            if number:
                client.evalsha(*command(ops.note_queues(RegistryKeys(PREFIX), names)))
            for name in names if number == 2 else ():
                fill(client, QueueKeys(PREFIX, name).base, 1)
            child = await stack.enter_async_context(open_child("peers", each, queue="Q1", handler="do_nothing"))
            meshes.append(Mesh(client, child))
        await trio.sleep(plan.seconds(SETTLE))
        runs: list[list[Window]] = [[] for _ in meshes]
        for _ in range(plan.runs):
            async with trio.open_nursery() as nursery:
                for mesh, found in zip(meshes, runs, strict=True):
                    nursery.start_soon(watch, mesh, plan.seconds(WINDOW), found)
    rows: list[Row] = []
    for number, what in (
        (1, f"{len(names):,} queues that are empty"),
        (2, f"{len(names):,} queues with a task, unserved"),
    ):
        for kind, unit, of in (
            ("CPU of the server", "% of a core", lambda each: each.server),
            ("time in scripts", "% of a core", lambda each: each.scripts),
            ("CPU of the leader", "% of a core", lambda each: each.leader),
            ("requests", "1/s", lambda each: each.requests),
        ):
            rows.append(
                Row(f"{what}: {kind}", unit, [of(each) for each in runs[number]], [of(each) for each in runs[0]])
            )
    notes = [f"{plan.runs} windows of {plan.seconds(WINDOW):g} s each"]
    return [
        Table("names: a leader with nothing to do, and queues without a worker", "a mesh of one queue", rows, notes)
    ]
