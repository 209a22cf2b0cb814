"""How soon the tasks of a worker that was killed run again, with the default keepalive.

The documents promise 5 s. The tests allow 15 s, and three tries, for machines that are slow or stand still for a moment.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

import worqr
from tests.faults.rescuer import rescuer
from tests.ops.driver import Desk
from tests.peer.tools import until
from tests.support.children import Child
from tests.support.leaks import delete_all
from tests.support.proxy import FaultProxy
from tests.support.servers import Server
from worqr import ops
from worqr.keys import RegistryKeys
from worqr.peer.engine import DEFAULT_KEEPALIVE
from worqr.peer.leader import chore, leader
from worqr.peer.leader.scanner import SWEEP_AT_ONCE, Sweeper

CHILD = Path(__file__).parent / "child_peer.py"
WITHIN = 15.0
SWEPT = 100


@asynccontextmanager
async def leading(mesh: worqr.Mesh) -> AsyncGenerator[worqr.Peer]:
    """A peer that leads and serves nothing."""
    async with mesh.join() as peer:
        await until(lambda: peer._engine.leader.leads)
        yield peer


async def assert_recovers(url: str, spawn: Callable[..., Child], server: Server, prefix: str) -> None:
    """The task of a killed worker runs again within 15 s; a machine that stands still does so hardly each time."""
    late: list[float] = []
    while not late or late[-1] > WITHIN:
        assert len(late) < 3, late
        name = f"{prefix}{len(late)}"
        async with leading(worqr.Mesh(url, prefix=name)):
            await killed(spawn, server, name)
            began = time.monotonic()
            async with rescuer(server.url, name, keepalive=DEFAULT_KEEPALIVE) as rescue:
                await rescue.wait_all(b"hold-1")
                late.append(time.monotonic() - began)
        with server.client() as client:
            delete_all(client, name)


async def killed(spawn: Callable[..., Child], server: Server, prefix: str) -> Child:
    """A worker with the default keepalive that was killed while it ran a task."""
    mesh = worqr.Mesh(server.url, prefix=prefix)
    async with mesh.connect():
        await mesh.queue("Q1").enqueue(b"hold-1")
    child = spawn(CHILD, server.url, prefix, "Q1", env={"KEEPALIVE": f"{DEFAULT_KEEPALIVE}"})
    await child.line_with("run hold-1")
    child.kill()
    return child


async def test_a_killed_workers_task_runs_again_within_seconds(
    server: Server, prefix: str, spawn: Callable[..., Child]
) -> None:
    await assert_recovers(server.url, spawn, server, prefix)


async def test_nor_do_many_queue_names_on_a_slow_line_delay_it(
    server: Server, prefix: str, spawn: Callable[..., Child], proxy: FaultProxy
) -> None:
    client, queues = server.client(), RegistryKeys(f"{prefix}0").queues
    now = time.time() * 1000
    for start in range(0, 50_000, 1000):
        client.zadd(queues, {f"customer {n}": now - n for n in range(start, start + 1000)})
    client.expire(queues, 1000)
    for try_again in (1, 2):
        client.copy(queues, RegistryKeys(f"{prefix}{try_again}").queues)
    proxy.delay(0.1)
    await assert_recovers(proxy.url, spawn, server, prefix)
    client.delete(*(RegistryKeys(f"{prefix}{n}").queues for n in range(3)))


async def test_a_workers_key_lives_no_longer_than_its_keepalive(server: Server, prefix: str) -> None:
    client = server.client()
    async with worqr.Mesh(server.url, prefix=prefix).join() as peer:
        key = RegistryKeys(prefix).worker(peer.id)
        assert client.pttl(key) <= DEFAULT_KEEPALIVE * 1000
        await until(lambda: client.get(key) not in (None, b"RUN 0", b"RUN 1"))
        assert client.pttl(key) <= DEFAULT_KEEPALIVE * 1000
        await until(lambda: client.pttl(key) > 0)


async def test_many_workers_that_die_at_once_are_swept_together(
    server: Server, prefix: str, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way, most, sweep = 0, 0, Sweeper._try_sweep

    async def counted(sweeper: Sweeper, worker: str, seen: tuple[bytes | None] | None) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await sweep(sweeper, worker, seen)
        under_way -= 1

    monkeypatch.setattr(Sweeper, "_try_sweep", counted)
    desk, workers = Desk(server.client(), prefix), [f"W{n}" for n in range(SWEPT)]
    desk.register(*workers, queues=["Q1"])
    desk.enter(*workers)
    for worker in workers:
        desk.put(b"x")
        desk.take(worker, 1)
    desk.client.delete(*map(desk.g.worker, workers))
    proxy.delay(0.02)  # each sweep is four requests, one after the other
    async with leading(worqr.Mesh(proxy.url, prefix=prefix)):
        await until(lambda: desk.client.llen(desk.q.base) == len(workers))
        await until(lambda: not desk.client.exists(desk.g.dying))
    assert most == SWEEP_AT_ONCE
    desk.wipe()


async def test_the_lease_of_a_dead_leader_is_taken_when_the_servers_clock_was_set_back(
    server: Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chore, "STALE_AFTER", 1.0)
    monkeypatch.setattr(leader, "STALE_KEEPALIVES", 2)
    desk = Desk(server.client(), prefix)
    desk.register("dead leader", queues=["Q1"])
    desk.enter("dead leader")
    desk.put(b"x")
    desk.take("dead leader", 1)
    desk.beat("dead leader", 7, lease_ms=3_600_000, keepalive_ms=3_600_000)  # its keys live for an hour more
    mesh = worqr.Mesh(server.url, prefix=prefix, keepalive=1)
    async with mesh.join() as peer:
        await until(lambda: peer._engine.leader.leads)
        assert desk.client.pttl(desk.g.leader) <= 2000
        await until(lambda: desk.client.llen(desk.q.base) == 1)
    desk.wipe()


async def test_a_lease_that_is_renewed_is_not_taken(
    server: Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chore, "STALE_AFTER", 2.5)
    desk = Desk(server.client(), prefix)
    desk.register("leader", keepalive_ms=3_600_000)
    desk.beat("leader", 0, lease_ms=3_600_000, keepalive_ms=3_600_000)
    async with worqr.Mesh(server.url, prefix=prefix, keepalive=1).join() as peer:
        for beat in range(1, 25):
            await trio.sleep(0.2)
            desk.beat("leader", beat, lease_ms=3_600_000, keepalive_ms=3_600_000)
            assert not peer._engine.leader.leads
        assert desk.call(ops.stop_worker(desk.g, "leader")) == []
