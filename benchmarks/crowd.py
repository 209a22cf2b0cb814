"""A fleet of 200 real peers in a few processes: its cost while it idles, and the recovery when a quarter of it dies."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from functools import partial

import trio

import worqr
from benchmarks.children import Child, open_child
from benchmarks.measuring import Bar, Plan, Row, Table, in_turn, percentile
from benchmarks.server import account, bare
from worqr.embedded import EmbeddedServer

PROCESSES = 8
HOLDERS = 2
"""How many of these are killed at once, while they hold tasks."""
PAUSE = 0.002


async def measure(plan: Plan, server: EmbeddedServer) -> list[Table]:
    """Six processes whose peers idle on a queue, two whose peers hold a task each; those two are killed together."""
    each, processes = plan.size(25, 2), plan.size(PROCESSES, 4)
    peers, killed = processes * each, HOLDERS * each
    client, mesh = bare(server), worqr.Mesh(server.url)
    table = Table(
        f"crowd: {peers} peers in {processes} processes",
        "enqueue: the same into a queue with one peer; requests: one a second and peer",
    )
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(mesh.connect())
        start = partial(open_child, "peers", server)
        one = await stack.enter_async_context(start(queue="one", handler="do_nothing"))
        idlers = [
            await stack.enter_async_context(start(queue="many", handler="do_nothing", count=each))
            for _ in range(processes - HOLDERS)
        ]
        holders = [
            await stack.enter_async_context(start(queue="held", handler="hold", count=each, concurrency=1))
            for _ in range(HOLDERS)
        ]
        await trio.sleep(plan.seconds(5))
        requests, server_cpu, peer_cpu = list[float](), list[float](), list[float]()
        for _ in range(plan.runs):
            before, spent = account(client), await _cpu(idlers)
            await trio.sleep(plan.seconds(3))
            after = account(client).since(before)
            requests.append(after.rate)
            server_cpu.append(after.cpu / after.at * 100)
            peer_cpu.append((await _cpu(idlers) - spent) / after.at * 100 / (len(idlers) * each))
        table.rows += [
            Row("idle: requests", "1/s", requests, [peers + 1.0] * plan.runs),
            Row("idle: CPU of the server", "% of a core", server_cpu),
            Row("idle: CPU of a peer", "% of a core", peer_cpu, bar=Bar(0.5, most=True)),
        ]
        count = plan.size(300, 10)
        many, few = await in_turn(
            plan.runs, partial(_enqueue, mesh.queue("many"), count), partial(_enqueue, mesh.queue("one"), count)
        )
        table.rows.append(Row("enqueue into the queue of most of them, p50", "us", many, few))
        first, last = await _kill(mesh, holders, killed)
        table.rows += [
            Row(f"{killed} killed at once: their first task runs again", "s", [first]),
            Row(f"{killed} killed at once: all {killed} tasks have run", "s", [last], bar=Bar(5, most=True)),
        ]
        assert one.process.returncode is None
    return [table]


async def _cpu(children: list[Child]) -> float:
    return sum([await child.cpu() for child in children])


async def _enqueue(queue: worqr.Queue, count: int) -> float:
    """Enqueue a few times with pauses, which wakes a worker each time; return the median latency in microseconds."""
    latencies: list[float] = []
    for _ in range(count):
        began = time.perf_counter()
        await queue.enqueue(b"x" * 100)
        latencies.append((time.perf_counter() - began) * 1e6)
        await trio.sleep(PAUSE)
    return percentile(latencies, 50)


async def _kill(mesh: worqr.Mesh, holders: list[Child], count: int) -> tuple[float, float]:
    """Give each peer of these processes a task to hold, kill them, and work off what comes back; seconds from the kill."""
    tasks = [b"%d" % number for number in range(count)]
    await mesh.queue("held").enqueue(*tasks)
    for child in holders:
        for _ in range(count // len(holders)):
            assert (await child.line()).startswith("began")
    ran: dict[bytes, float] = {}
    done = trio.Event()

    async def handler(task: bytes) -> None:
        ran.setdefault(task, time.perf_counter())
        if len(ran) == count:
            done.set()

    async with mesh.join(grace=0) as peer, trio.open_nursery() as nursery:
        await nursery.start(partial(peer.serve, "held", handler))
        assert not ran, "a task ran twice before anybody died"
        killed = time.perf_counter()
        for child in holders:
            child.kill()
        with trio.fail_after(60):
            await done.wait()
        nursery.cancel_scope.cancel()
    return min(ran.values()) - killed, max(ran.values()) - killed
