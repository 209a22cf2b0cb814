"""How long it takes until the tasks of a killed peer run again elsewhere."""

from __future__ import annotations

import time
from contextlib import AbstractAsyncContextManager
from functools import partial

import redis
import trio

import worqr
from benchmarks.children import Child, open_child
from benchmarks.measuring import Bar, Plan, Row, Table
from benchmarks.server import bare
from worqr.embedded import EmbeddedServer
from worqr.keys import QueueKeys, RegistryKeys

BAR = Bar(5, most=True)
TASKS = 100
STAGGER = 0.23
"""Seconds between two kills, so that they meet all phases of beats, looks and leases."""
LOOK = 0.005


class Killing:
    """One mesh of two peers, of which one is killed. Times are in seconds, from the kill."""

    def __init__(self, server: EmbeddedServer, client: redis.Redis, number: int, *, leader: bool) -> None:
        self.prefix = f"{'leader' if leader else 'other'}{number}"
        self.gone = 0.0
        self.first = 0.0
        self.all = 0.0
        self._server = server
        self._client = client
        self._leader = leader
        self._delay = number * STAGGER

    async def run(self) -> None:
        mesh = worqr.Mesh(self._server.url, prefix=self.prefix)
        async with mesh.connect():
            if self._leader:
                async with self._victim() as victim, mesh.join(grace=0) as peer:
                    await self._kill(mesh, victim, peer)
            else:
                async with mesh.join(grace=0) as peer:
                    await self._wait_leader(peer.id)
                    async with self._victim() as victim:
                        await self._kill(mesh, victim, peer)

    def _victim(self) -> AbstractAsyncContextManager[Child]:
        return open_child("peers", self._server, queue="Q1", handler="hold", prefix=self.prefix)

    async def _wait_leader(self, worker: str) -> None:
        key = RegistryKeys(self.prefix).leader
        while not (self._client.get(key) or b"").startswith(worker.encode() + b" "):  # noqa: ASYNC110 - not ours
            await trio.sleep(LOOK)

    async def _kill(self, mesh: worqr.Mesh, victim: Child, peer: worqr.Peer) -> None:
        registry = RegistryKeys(self.prefix)
        (worker,) = {name.decode() for name in self._client.smembers(registry.registered)} - {peer.id}
        await self._wait_leader(worker if self._leader else peer.id)
        tasks = [b"%d" % n for n in range(TASKS)]
        await mesh.queue("Q1").enqueue(*tasks)
        for _ in tasks:
            assert (await victim.line()).startswith("began")
        again: set[bytes] = set()
        done = trio.Event()

        async def handler(task: bytes) -> None:
            again.add(task)
            self.first = self.first or time.perf_counter()
            if len(again) == TASKS:
                self.all = time.perf_counter()
                done.set()

        async with trio.open_nursery() as nursery:
            await nursery.start(partial(peer.serve, "Q1", handler))
            await trio.sleep(1 + self._delay)
            assert not again, "a task ran twice before anybody died"
            killed = time.perf_counter()
            victim.kill()
            with trio.fail_after(60):
                while self._client.exists(registry.worker(worker)):  # noqa: ASYNC110 - the server's, not ours
                    await trio.sleep(LOOK)
                self.gone = time.perf_counter() - killed
                await done.wait()
            nursery.cancel_scope.cancel()
        assert self._client.llen(QueueKeys(self.prefix, "Q1").base) == 0
        self.first -= killed
        self.all -= killed


async def measure(plan: Plan, server: EmbeddedServer) -> list[Table]:
    """Several meshes at once, one kill in each; the peer that remains is in this process."""
    client = bare(server)
    kills = plan.size(6, 1)
    others = [Killing(server, client, n, leader=False) for n in range(kills)]
    leaders = [Killing(server, client, n, leader=True) for n in range(kills)]
    async with trio.open_nursery() as nursery:
        for killing in (*others, *leaders):
            nursery.start_soon(killing.run)
    rows: list[Row] = []
    for what, killings in (("a peer", others), ("the leader", leaders)):
        gone = [killing.gone for killing in killings]
        rows.append(Row(f"{what} killed: its first task runs again", "s", [k.first for k in killings], gone))
        rows.append(Row(f"{what} killed: all {TASKS} have run", "s", [k.all for k in killings], gone, BAR, worst=True))
    limit = "the moment at which the dead worker's keepalive key was gone; nobody may act before"
    return [Table("recovery: SIGKILL until its tasks run elsewhere", limit, rows)]
