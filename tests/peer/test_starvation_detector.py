"""Handlers that wait for the result of a job that finds no slot in their worker."""

from __future__ import annotations

from typing import Any

import pytest
import trio

import worqr
from tests.peer.conftest import NewMesh
from tests.peer.tools import until
from worqr.client import notifications
from worqr.peer import scheduler as scheduling
from worqr.peer.scheduler import StarvationDetector


@pytest.fixture(autouse=True)
def looks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What was found at each look whether a parent may wait in vain."""
    monkeypatch.setattr(scheduling, "CHECK_AFTER", 0.1)
    monkeypatch.setattr(notifications, "POLL_EVERY", 0.05)
    found: list[bool] = []
    look = StarvationDetector.should_check

    def spy(parent: StarvationDetector) -> bool:
        found.append(look(parent))
        return found[-1]

    monkeypatch.setattr(StarvationDetector, "should_check", spy)
    return found


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == scheduling.__name__]


def family(mesh: worqr.Mesh[Any], place: str, **child: Any) -> tuple[Any, Any]:
    """A function that waits for another one, in this place; and the other one."""

    @mesh.task(name="child", result_ttl=60, **child)
    async def done() -> int:
        return 42

    if place == "thread":

        @mesh.task(name="parent", result_ttl=60)
        def waits() -> int:
            return worqr.sync(worqr.sync(done.dispatch).result)

        return waits, done

    async def awaits() -> int:
        return await (await done.dispatch()).result()

    runs_in: Any = place
    return mesh.task(name="parent", result_ttl=60, runs_in=runs_in)(awaits), done


@pytest.mark.parametrize("place", ["loop", "thread", "asyncio"])
async def test_a_parent_whose_worker_has_no_slot_for_its_child_is_logged_once_with_the_remedy(
    mesh: worqr.Mesh, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    parent, _ = family(mesh, place)
    async with mesh.join(concurrency=2) as peer:
        jobs = [await parent.dispatch() for _ in range(2)]
        await until(lambda: lines(caplog))
        line = lines(caplog)[0]
        assert line.startswith("result.no_slot: a handler of queue 'parent' has waited 0.1 s for the result of job '")
        assert line.endswith(
            "of queue 'child', and this worker has no free slot to run that job. A handler keeps its slot while it waits. Raise "
            "the concurrency of the worker or of the function, or let another worker serve 'child'."
        )
        peer.set_concurrency(3)
        assert [await job.result(30) for job in jobs] == [42, 42]
    await trio.to_thread.run_sync(mesh.close)
    assert len(lines(caplog)) == 1


async def test_a_function_that_waits_for_itself_needs_a_higher_concurrency(
    mesh: worqr.Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    @mesh.task(name="itself", result_ttl=60, concurrency=1)
    async def itself(n: int) -> int:
        return n if n == 0 else await (await itself.dispatch(n - 1)).result()

    async with mesh.join():
        job = await itself.dispatch(1)
        await until(lambda: lines(caplog))
        assert "of queue 'itself', and this worker has no free slot" in lines(caplog)[0]
        await itself.queue.cancel_all(wait=30)
        assert (await job.status()).state == "cancelled"


async def test_nothing_is_said_of_a_parent_whose_child_runs_or_is_run_elsewhere(
    mesh: worqr.Mesh, new_mesh: NewMesh, caplog: pytest.LogCaptureFixture, looks: list[bool]
) -> None:
    gate, begun = trio.Event(), trio.Event()

    async def child() -> int:
        begun.set()
        await gate.wait()
        return 42

    elsewhere = new_mesh()
    elsewhere.task(name="child", result_ttl=60)(child)

    @mesh.task(name="parent", result_ttl=60)
    async def parent() -> int:
        job = await mesh.queue("child").dispatch(b"{}", result_ttl=60)
        await begun.wait()
        return int(await job.result())

    mesh.task(name="child")(child)
    async with mesh.join(concurrency=1), elsewhere.join():
        job = await parent.dispatch()
        await until(lambda: sum(looks) >= 3)
        gate.set()
        assert await job.result(30) == 42
    assert lines(caplog) == []


async def test_nothing_is_said_where_there_is_room_or_no_handler_waits(
    mesh: worqr.Mesh, caplog: pytest.LogCaptureFixture, looks: list[bool]
) -> None:
    parent, child = family(mesh, "loop")
    async with mesh.join(concurrency=2):
        await child.queue.pause()
        job = await parent.dispatch()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(job.result)
            await until(lambda: len(looks) >= 20)
            nursery.cancel_scope.cancel()
        assert not any(looks)
        await child.queue.resume()
        assert await job.result(30) == 42
    assert lines(caplog) == []
