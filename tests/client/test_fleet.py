"""``mesh.evict``: a worker is declared dead by hand, and its tasks run elsewhere. `Mesh.workers` is in test_mesh."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

import worqr
from tests.faults.rescuer import rescuer
from tests.ops.conftest import desk  # noqa: F401 - a fixture
from tests.ops.driver import Desk
from tests.peer.conftest import NewMesh, new_mesh  # noqa: F401 - a fixture
from tests.peer.tools import Held, serving, until
from tests.support.children import Child
from tests.support.servers import Server
from worqr import ops

CHILD = Path(__file__).parent.parent / "faults" / "child_peer.py"


async def killed(spawn: Callable[..., Child], server: Server, prefix: str, task: bytes = b"hold-1") -> str:
    """The id of a worker with ``keepalive=None`` that was killed while it ran `task`: nobody sweeps it."""
    mesh = worqr.Mesh(server.url, prefix=prefix)
    async with mesh.connect():
        await mesh.queue("Q1").enqueue(task)
    child = spawn(CHILD, server.url, prefix, "Q1", env={"KEEPALIVE": "none"})
    worker = (await child.line_with("joined")).split()[1]
    await child.line_with(f"run {task.decode()}")
    child.kill()
    return worker


async def test_the_tasks_of_a_permanent_worker_that_was_killed_run_elsewhere(
    server: Server, prefix: str, spawn: Callable[..., Child]
) -> None:
    worker = await killed(spawn, server, prefix)
    mesh = worqr.Mesh(server.url, prefix=prefix)
    async with rescuer(server.url, prefix) as rescue, mesh.connect():
        assert worker in {each.id for each in await mesh.workers()}
        await mesh.evict(worker)
        await rescue.wait_all(b"hold-1")
        assert worker not in {each.id for each in await mesh.workers()}
        assert rescue.runs[b"hold-1"] == 1
        assert rescue.attempts[b"hold-1"] == 2  # its death counts as a stall


async def test_they_are_back_when_the_call_returns_though_no_worker_is_left_to_sweep(
    server: Server, prefix: str, spawn: Callable[..., Child]
) -> None:
    worker = await killed(spawn, server, prefix)
    mesh = worqr.Mesh(server.url, prefix=prefix)
    async with mesh.connect():
        queue = mesh.queue("Q1")
        assert await queue.count() == 0
        await mesh.evict(worker)
        assert await queue.count() == 1
        assert await mesh.workers() == []
        with pytest.raises(worqr.UsageError, match="it has left, or was evicted before; none is registered"):
            await mesh.evict(worker)  # once more changes nothing
        assert await queue.count() == 1
        await queue.cancel_all()
    assert not server.client().exists(Desk(server.client(), prefix).g.dying)


async def test_a_worker_that_is_alive_loses_its_tasks_and_joins_again(new_mesh: NewMesh) -> None:
    held = Held()
    mesh, other = new_mesh(keepalive=None), new_mesh()
    async with serving(mesh, "Q1", held) as peer, other.connect():
        worker = peer.id
        await other.queue("Q1").enqueue(b"x")
        await held.wait(1)
        await other.evict(worker)
        await held.wait_for(lambda: bool(held.cancelled))
        assert held.cancelled == [(b"x", "lost")]
        held.gate.set()
        await held.wait(2)  # by the same peer, under its next id
        assert held.contexts[1].attempt == 2
        assert peer.id != worker
        assert [each.id for each in await other.workers()] == [peer.id]


async def test_two_who_evict_the_same_worker_at_once_do_no_harm(new_mesh: NewMesh, desk: Desk) -> None:
    desk.register("A", queues=["Q1"])
    desk.enter("A")
    for n in range(3):
        desk.put(b"%d" % n)
    desk.take("A", 3)
    mesh = new_mesh()

    async def evict() -> None:
        try:
            await mesh.evict("A")
        except worqr.UsageError as error:  # the other one has finished
            assert "was evicted before" in str(error)

    async with mesh.connect(), trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(evict)
    state = desk.state()
    assert not {":Workers", ":Dying", ":info:A", ":WorkMap:A"} & state.keys()
    assert desk.client.llen(desk.q.base) == 3


async def test_an_unknown_id_is_an_error_that_names_the_nearest(new_mesh: NewMesh, desk: Desk) -> None:
    desk.register("shop:abcd", "shop:abce", "mail:1234", "dead:9876")
    desk.call(ops.condemn_worker(desk.g, "dead:9876", ops.ANY_BEAT))
    mesh = new_mesh()
    async with mesh.connect():
        for wrong, hint in (
            ("shop:abc", "did you mean 'shop:abc[de]' or 'shop:abc[de]'"),
            ("mail:1235", "did you mean 'mail:1234'"),
            ("dead:987", "did you mean 'dead:9876'"),  # its sweep is not over
            ("-", "`worqr workers` list those"),
        ):
            with desk.nothing_changes(), pytest.raises(worqr.UsageError, match=f"there is no worker '{wrong}'.*{hint}"):
                await mesh.evict(wrong)
        with pytest.raises(worqr.UsageError, match="worker_id must be a str"):
            await mesh.evict(b"shop:abcd")  # type: ignore[arg-type]


async def test_a_queue_that_cannot_be_given_back_keeps_no_other_and_is_named(new_mesh: NewMesh, desk: Desk) -> None:
    desk.register("A", queues=["broken", "Q1"])
    desk.enter("A")
    desk.put(b"x")
    desk.take("A", 1)
    spoilt = Desk(desk.client, desk.prefix)
    spoilt.q = type(desk.q)(desk.prefix, "broken")
    desk.client.set(spoilt.q.base, "no list")
    mesh = new_mesh()
    async with mesh.connect():
        with pytest.raises(worqr.RefusedByServer) as caught:
            await mesh.evict("A")
        assert caught.value.__notes__ == ["worker A is evicted, but its tasks on queue 'broken' are not back yet"]
        assert desk.client.llen(desk.q.base) == 1
        assert desk.state()[":Dying"] == {"A"}
        desk.client.delete(spoilt.q.base)
        await mesh.evict("A")  # what was left is done
    assert not {":Dying", ":WorkMap:A"} & desk.state().keys()


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_an_eviction_in_other_programs(new_mesh: NewMesh, desk: Desk, kind: str) -> None:
    desk.register("A", keepalive_ms=0)
    mesh = new_mesh()

    async def evict() -> None:
        async with mesh.connect():
            await mesh.evict("A")

    if kind == "asyncio":
        asyncio.run(evict())
    else:
        assert [each.id for each in worqr.sync(mesh.workers)] == ["A"]
        worqr.sync(mesh.evict, "A")
        mesh.close()
    assert not {":Workers", ":Dying", ":worker:A"} & desk.state().keys()


async def test_a_leader_finishes_what_somebody_condemned(new_mesh: NewMesh, desk: Desk) -> None:
    desk.register("A", queues=["Q1"], keepalive_ms=0)
    desk.enter("A")
    desk.put(b"x")
    desk.take("A", 1)
    desk.call(ops.condemn_worker(desk.g, "A", ops.ANY_BEAT))  # and then the caller died
    async with new_mesh().join() as peer:
        await until(lambda: peer._engine.leader.leads)
        await until(lambda: desk.client.llen(desk.q.base) == 1)
        await until(lambda: not desk.client.exists(desk.g.dying))
