"""A cluster of three shards beside one server, all on this machine; and for how long callers notice its failovers."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Awaitable, Callable
from functools import partial

import trio

import worqr
from benchmarks.loads import CALLERS, Countdown, drain, put_in
from benchmarks.measuring import Plan, Row, Table, in_turn
from benchmarks.nodes import NODE_TIMEOUT_MS, Node, Nodes, free_port, open_cluster
from worqr.embedded import EmbeddedServer

PAUSE = 0.001
"""Seconds between the calls of a caller that measures a failover."""


class Load:
    """Work on one server or one cluster. Rates are tasks per second."""

    def __init__(self, url: str, tasks: int) -> None:
        self.mesh = worqr.Mesh(url)
        self.tasks = tasks
        self._sharded = worqr.Mesh(url, prefix="sharded")
        self._sharded.queue("hot", shards=3)

    async def drain(self, queues: int) -> float:
        """Fill `queues` queues, then drain them with one peer."""
        return await self._drain(self.mesh, [f"Q{number}" for number in range(queues)])

    async def drain_sharded(self) -> float:
        """The same with one queue of three shards."""
        return await self._drain(self._sharded, ["hot"])

    async def _drain(self, mesh: worqr.Mesh, names: list[str]) -> float:
        batch = [b"%0100d" % number for number in range(self.tasks // len(names))]
        async with mesh.connect():
            for name in names:
                for start in range(0, len(batch), 1000):
                    await mesh.queue(name).enqueue(*batch[start : start + 1000])
        return await drain(mesh, Countdown(len(batch) * len(names)), names)

    async def enqueue(self, queues: int) -> float:
        """One task per call by 100 callers, over `queues` queues."""
        async with self.mesh.connect():
            found = [self.mesh.queue(f"E{number}") for number in range(queues)]
            turns = itertools.cycle(found)
            rate = await put_in(lambda: next(turns).enqueue(TASK), self.tasks, CALLERS)
            for queue in found:
                await queue.delete()
        return rate


TASK = b"x" * 100


class Failovers:
    """A caller calls all the time, and notes the longest time without a reply."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.mesh = worqr.Mesh(nodes.url, prefix="failovers")

    async def planned(self) -> float:
        """CLUSTER FAILOVER of the node that has the queue; seconds."""

        async def change(primary: Node, replica: Node) -> None:
            replica.ask("CLUSTER", "FAILOVER")

        return await self._felt(change)

    async def killed(self) -> float:
        """Freeze the node that has the queue (as if it were gone) until another one has its slots; return seconds."""

        async def change(primary: Node, replica: Node) -> None:
            os.kill(primary.server.pid, signal.SIGSTOP)

        return await self._felt(change)

    async def _felt(self, change: Callable[[Node, Node], Awaitable[None]]) -> float:
        primary, replica = self.nodes.pair("failovers:{F}")
        longest, last = 0.0, 0.0

        async def call_forever() -> None:
            nonlocal longest, last
            queue = self.mesh.queue("F")
            last = time.perf_counter()
            while True:
                await queue.enqueue(b"x")
                now = time.perf_counter()
                longest, last = max(longest, now - last), now
                await trio.sleep(PAUSE)

        try:
            async with self.mesh.connect(), trio.open_nursery() as nursery:
                nursery.start_soon(call_forever)
                await trio.sleep(0.5)
                longest = 0.0
                await change(primary, replica)
                while replica.ask("ROLE")[0] != b"master":  # noqa: ASYNC110 - the server's, not ours
                    await trio.sleep(0.01)
                elected = time.perf_counter()
                while last < elected:  # noqa: ASYNC110 - the client gets no notification
                    await trio.sleep(0.01)
                nursery.cancel_scope.cancel()
        finally:
            os.kill(primary.server.pid, signal.SIGCONT)
            await trio.to_thread.run_sync(self.nodes.settle)
        return longest


async def measure(plan: Plan, server: EmbeddedServer) -> list[Table]:
    """The cluster by turns with one server on TCP, as the cluster's nodes are."""
    tasks = plan.size(20_000, 600)
    with open_cluster() as nodes, EmbeddedServer(port=free_port()) as alone:
        one = Load(f"redis://127.0.0.1:{alone.port}", tasks)
        three = Load(nodes.url, tasks)
        rates = Table(
            "cluster: three shards beside one server, one process, tasks of 100 bytes",
            "the same on one server; a queue of three shards beside one queue on one server",
        )
        for queues in (1, 3, 12):
            ours, theirs = await in_turn(plan.runs, partial(three.drain, queues), partial(one.drain, queues))
            rates.rows.append(Row(f"drain, {queues} queues", "tasks/s", ours, theirs))
        ours, theirs = await in_turn(plan.runs, three.drain_sharded, partial(one.drain, 1))
        rates.rows.append(Row("drain, one queue of three shards", "tasks/s", ours, theirs))
        for queues in (1, 3, 12):
            ours, theirs = await in_turn(plan.runs, partial(three.enqueue, queues), partial(one.enqueue, queues))
            rates.rows.append(Row(f"enqueue, 100 callers, {queues} queues", "tasks/s", ours, theirs))
        rates.notes.append("seven server processes and this one share the cores: shards cannot be faster here")
        failovers = Failovers(nodes)
        planned, killed = await in_turn(plan.runs, failovers.planned, failovers.killed)
    felt = Table(
        "cluster: the longest time without an answer for whoever enqueues into a queue of the node",
        f"the node timeout of the cluster, {NODE_TIMEOUT_MS} ms",
        [
            Row("CLUSTER FAILOVER", "s", planned),
            Row("a primary stands still", "s", killed, [NODE_TIMEOUT_MS / 1000] * len(killed)),
        ],
    )
    return [rates, felt]
