"""The mesh as a whole: how many requests its lists take. What they list is in test_mesh and in tests/client/test_fleet."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import trio

import worqr
from tests.ops.conftest import desk  # noqa: F401 - a fixture
from tests.ops.driver import KEEPALIVE, Desk
from tests.peer.conftest import NewMesh, mesh, new_mesh, other  # noqa: F401 - fixtures
from tests.peer.tools import Held, eventually, serving
from worqr import ops
from worqr.link.live_connection import LiveConnection


@contextmanager
def batches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """The names of the scripts of each batch that this process sends in the block: a batch is one round trip."""
    sent: list[list[str]] = []
    send = LiveConnection.send

    def noting(self: LiveConnection, batch: Any, now: float) -> Any:
        sent.append([request.call.script.name for request in batch])
        return send(self, batch, now)

    with monkeypatch.context() as patch:
        patch.setattr(LiveConnection, "send", noting)
        yield sent


@pytest.mark.leaves("{hot*")
async def test_all_queues_are_read_in_few_round_trips(mesh: worqr.Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    async with mesh.connect():
        for n in range(300):
            await mesh.queue(f"q{n:03}").enqueue(b"x")
        hot = mesh.queue("hot", shards=4)
        await hot.enqueue(*(b"%d" % n for n in range(8)))
        with batches(monkeypatch) as sent:
            found = await mesh.queues()
        assert [(info.name, info.waiting) for info in found] == [("hot", 8), *((f"q{n:03}", 1) for n in range(300))]
        assert len([names for names in sent if "inspect" in names]) == 1
        assert sum(names.count("inspect") for names in sent) == 304
        for info in found:
            await mesh.queue(info.name).delete()


# Workers


async def test_a_worker_tells_when_it_joined_and_how_it_is(mesh: worqr.Mesh) -> None:
    before = datetime.now(UTC)
    async with mesh.join(threads=7, processes=3):
        await eventually(lambda: leaders(mesh), 1)
        [worker] = await mesh.workers()
        assert worker.state == "ready"
        assert worker.started is not None
        assert before - timedelta(seconds=5) <= worker.started <= datetime.now(UTC) + timedelta(seconds=5)
        assert worker.lag is not None
        assert worker.lag >= 0
        assert (worker.python, worker.threads, worker.processes) == (platform.python_version(), 7, 3)


async def leaders(mesh: worqr.Mesh) -> int:
    return [worker.leads for worker in await mesh.workers()].count(True)


async def test_a_worker_that_drains_is_leaving(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    held = Held()
    async with other.connect(), serving(mesh, "Q1", held) as peer, trio.open_nursery() as nursery:
        await other.queue("Q1").enqueue(b"a")
        await held.wait(1)
        nursery.start_soon(peer.drain)
        await eventually(lambda: states(other), ["leaving"])
        held.gate.set()


async def states(mesh: worqr.Mesh) -> list[str]:
    return [worker.state for worker in await mesh.workers()]


async def test_workers_are_read_page_by_page(mesh: worqr.Mesh, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"w{n:03}" for n in range(250)]
    desk.register(*names)
    desk.call(ops.keep_worker_alive(desk.g, "w001", 1, keepalive_ms=KEEPALIVE, lease_ms=KEEPALIVE, running=0, room=1))
    desk.client.delete(desk.g.worker("w002"))
    desk.call(ops.condemn_worker(desk.g, "w003", ops.ANY_BEAT))
    async with mesh.connect():
        with batches(monkeypatch) as sent:
            found = await mesh.workers()
    assert sent == 3 * [["list_workers"]]
    assert [worker.id for worker in found] == names
    assert [worker.id for worker in found if worker.leads] == ["w001"]
    assert {worker.id: worker.state for worker in found if worker.state != "ready"} == {
        "w002": "missing",
        "w003": "dead",
    }


async def test_a_worker_of_an_older_version_is_listed_without_what_it_does_not_report(
    mesh: worqr.Mesh, desk: Desk
) -> None:
    desk.register("A")
    desk.client.hdel(desk.g.info("A"), "started")
    async with mesh.connect():
        [worker] = await mesh.workers()
    assert (worker.host, worker.state, worker.python) == ("h", "ready", "")
    assert worker.started is worker.lag is worker.threads is worker.processes is None
