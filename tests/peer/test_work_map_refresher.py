"""A registry that lost its last writes in a failover learns again which queues a worker serves."""

from __future__ import annotations

from functools import partial

import pytest
import trio

import worqr
from tests.peer.conftest import NewMesh
from tests.peer.test_reconciler import reconnect
from tests.peer.tools import Runs, eventually, serving, until
from tests.support.proxy import FaultProxy, sent_as
from tests.support.servers import Server
from worqr.peer import consumer_runner

pytestmark = pytest.mark.one_server


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer_runner, "MAP_CHECK_EVERY", 0.05)


async def served(mesh: worqr.Mesh) -> list[frozenset[str]]:
    return [worker.queues for worker in await mesh.workers()]


async def test_a_forgotten_queue_is_mapped_again_after_the_next_connection(
    mesh: worqr.Mesh, server: Server, prefix: str
) -> None:
    client = server.client()
    async with serving(mesh, "Q1", Runs()) as peer:
        client.delete(f"{{{prefix}}}:WorkMap:{peer.id}", f"{{{prefix}}}:queues")
        await reconnect(client, mesh)
        await eventually(lambda: served(mesh), [frozenset({"Q1"})])
        assert client.zrange(f"{{{prefix}}}:queues", 0, -1) == [b"Q1"]


async def test_it_is_tried_until_the_server_accepts_it_and_told_once(
    mesh: worqr.Mesh, server: Server, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = server.client()
    async with serving(mesh, "Q1", Runs()) as peer:
        key = f"{{{prefix}}}:WorkMap:{peer.id}"
        client.set(key, "foreign")
        await reconnect(client, mesh)

        def lines() -> list[str]:
            return [r.getMessage() for r in caplog.records if r.getMessage().startswith("map_work")]

        await until(lines)
        await trio.sleep(0.2)
        client.delete(key)
        await eventually(lambda: served(mesh), [frozenset({"Q1"})])
        assert len(lines()) == 1


async def test_a_queue_that_was_left_is_not_mapped_again(mesh: worqr.Mesh, server: Server) -> None:
    async with mesh.join():
        async with serving(mesh, "Q1", Runs()):
            pass
        await reconnect(server.client(), mesh)
        await trio.sleep(0.2)
        assert await served(mesh) == [frozenset()]


async def test_a_queue_that_is_being_left_when_the_connection_is_back_is_not_mapped_again(
    new_mesh: NewMesh, other: worqr.Mesh, proxy: FaultProxy
) -> None:
    mesh = new_mesh(url=proxy.url)
    async with other.connect(), mesh.join() as peer:
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(peer.serve, "Q1", Runs()))
            [consumer] = peer._engine.consumers.entered()
            told = proxy.hold_reply(sent_as("unmap_work"), on="data")
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                await told.wait_executed()
                assert peer._engine.consumers.held() == [consumer], "it has not left before the answer is there"
                consumer.admission.mapped(-1)
                peer._engine.queues.work_map.refresh_once()
                told.release()
        await other.queue("Q1").enqueue(b"a")  # a round trip of its own
        assert proxy.count(sent_as("map_work")) == 1
        assert await served(other) == [frozenset()]


async def test_a_worker_that_the_registry_forgot_joins_again(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    client = server.client()
    async with serving(mesh, "Q1", Runs()) as peer:
        first = peer.id
        client.srem(f"{{{prefix}}}:Workers", first)
        await reconnect(client, mesh)
        await until(lambda: peer.id not in {"", first})
        await eventually(lambda: served(mesh), [frozenset({"Q1"})])
        await until(
            lambda: not client.smembers(f"{{{prefix}}}:Dying") and not client.hexists(f"{prefix}:{{Q1}}:workers", first)
        )
