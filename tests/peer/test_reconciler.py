"""A server that lost its latest writes may hold claims of a living worker that ended long ago: they come back."""

from __future__ import annotations

import logging

import pytest
import redis
import trio

import worqr
from tests.peer.conftest import NewMesh
from tests.peer.tools import Held, Runs, serving, until
from tests.support.patience import PATIENCE
from tests.support.proxy import FaultProxy
from tests.support.servers import Server
from worqr.lua import script

pytestmark = pytest.mark.one_server


def forget_how_it_ended(client: redis.Redis, prefix: str, worker: str, task: bytes, claim: int) -> None:
    """Put the server back to where the worker still held the task."""
    client.rpush(f"{prefix}:{{Q1}}:claim:{claim}", task)
    client.sadd(f"{prefix}:{{Q1}}:claims:{worker}", claim)


async def reconnect(client: redis.Redis, mesh: worqr.Mesh) -> None:
    before = mesh._client.link.connections
    client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    await until(lambda: mesh._client.link.connections > before)


async def test_a_claim_whose_end_was_forgotten_is_given_back_after_the_next_connection(
    mesh: worqr.Mesh, server: Server, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    client, runs = server.client(), Runs()
    async with serving(mesh, "Q1", runs) as peer:
        await mesh.queue("Q1").enqueue(b"a")
        await runs.wait(1)
        await until(lambda: not client.keys(f"{prefix}:{{Q1}}:claim*"))
        forget_how_it_ended(client, prefix, peer.id, b"a", runs.contexts[0].fence)
        await reconnect(client, mesh)
        assert await runs.wait(2) == [b"a", b"a"]
        assert runs.contexts[1].attempt == 1, "an uncounted one"
        [line] = [record for record in caplog.records if record.getMessage().startswith("claim.stray")]
        assert (line.levelno, line.args) == (logging.WARNING, {"queue": "Q1", "count": 1})


async def test_what_runs_over_a_new_connection_is_nobodys_stray(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    client, held = server.client(), Held()
    async with serving(mesh, "Q1", held) as peer:
        await mesh.queue("Q1").enqueue(b"a", b"b", b"c")
        await held.wait(3)
        forget_how_it_ended(client, prefix, peer.id, b"old", 1)  # so it is known when all have been looked at
        await reconnect(client, mesh)
        await held.wait(4)
        held.gate.set()
        await held.wait_for(lambda: len(held.done) == 4)
        assert sorted(held.tasks) == [b"a", b"b", b"c", b"old"]
        assert not held.cancelled


async def test_what_is_held_by_hand_is_nobodys_stray_either(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    client = server.client()
    async with mesh.join() as peer, peer.work("Q1") as claims:
        await mesh.queue("Q1").enqueue(b"a")
        [claim] = await claims.take(1)
        forget_how_it_ended(client, prefix, peer.id, b"old", 1)  # so it is known when all have been looked at
        await reconnect(client, mesh)
        [old] = await claims.take(1)
        assert (claim.task, old.task) == (b"a", b"old")
        assert await mesh.queue("Q1").count() == 0, "the other one is still held"
        assert await claims.finish([claim, old]) == []


@pytest.mark.parametrize("fault", ["drop_reply", "drop_request"])
async def test_a_look_that_is_cut_off_is_made_again(
    new_mesh: NewMesh, server: Server, proxy: FaultProxy, prefix: str, fault: str
) -> None:
    mesh, client, runs = new_mesh(url=proxy.url), server.client(), Runs()
    async with serving(mesh, "Q1", runs) as peer:
        await mesh.queue("Q1").enqueue(b"a")
        await runs.wait(1)
        await until(lambda: not client.keys(f"{prefix}:{{Q1}}:claim*"))
        forget_how_it_ended(client, prefix, peer.id, b"a", runs.contexts[0].fence)
        cut = getattr(proxy, fault)(script("list_own_claims").sha)
        await reconnect(client, mesh)
        await cut.wait_fired()
        assert await runs.wait(2) == [b"a", b"a"]


async def test_a_check_that_follows_the_request_to_leave_does_not_end_the_registration(
    new_mesh: NewMesh, proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    leaving = proxy.hold_reply(script("stop_work").sha, on="data")
    mesh = new_mesh(url=proxy.url)
    async with mesh.connect():
        await mesh.queue("Q1").enqueue(b"a")
        async with mesh.join() as peer, trio.open_nursery() as nursery:
            first, taken = peer.id, trio.Event()

            async def work() -> None:
                async with peer.work("Q1") as claims:
                    await claims.take(1)
                    taken.set()

            nursery.start_soon(work)
            await taken.wait()
            await leaving.wait_executed()
            [consumer] = peer._engine.consumers
            peer._engine.reconciler.check(consumer, named=True)
            leaving.release()
            nursery.cancel_scope.deadline = trio.current_time() + PATIENCE
        assert peer.id == first
        assert [record.getMessage() for record in caplog.records if "worker.lost" in record.getMessage()] == []
        assert await mesh.queue("Q1").tasks() == [b"a"]
        await mesh.queue("Q1").cancel_all()
