"""A rolling deployment in which two versions of a program declare other limits and other rules of lanes for the same queue."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import pytest
import trio

import worqr
from tests.peer.conftest import NewMesh
from tests.peer.tools import eventually, serving, until
from tests.support.patience import PATIENCE

OLD: Final[dict[str, Any]] = {
    "limit": worqr.Limit(2),
    "lanes": worqr.Lanes(limit=worqr.Limit(2), weights={"a": 3}),
}
NEW: Final[dict[str, Any]] = {"limit": worqr.Limit(4), "lanes": worqr.Lanes(limit=worqr.Limit(1))}
LANES: Final = ("a", "b", "c", "d", "e")


@dataclass
class Flow:
    """A handler that notes how many of its tasks run at once, by lane and in all; and the producer of the tasks."""

    now: Counter[str] = field(default_factory=Counter[str])
    most: Counter[str] = field(default_factory=Counter[str])
    begun: set[bytes] = field(default_factory=set[bytes])
    done: list[bytes] = field(default_factory=list[bytes])
    sent: int = 0
    is_over: bool = False

    async def __call__(self, task: bytes) -> None:
        lane = worqr.current().lane
        for each in (f"lane {lane}", "all"):
            self.now[each] += 1
            self.most[each] = max(self.most[each], self.now[each])
        self.begun.add(task)
        try:
            await trio.sleep(0.002)
        finally:  # its peer may leave
            self.begun.discard(task)
            self.now.subtract([f"lane {lane}", "all"])
        self.done.append(task)

    async def produce(self, queue: worqr.Queue) -> None:
        """Keep the queue filled."""
        while not self.is_over:
            await queue.dispatch(b"%d" % self.sent, lane=LANES[self.sent % len(LANES)], max_length=40, wait=PATIENCE)
            self.sent += 1

    async def measure(self, tasks: int = 40) -> tuple[int, int, int]:
        """Return how many ran at once, at most, of those that begin from now on: in all, in lane a, and in another lane."""
        before = set(self.begun)
        await until(lambda: not before & self.begun)
        self.most, done = Counter(self.now), len(self.done)
        await until(lambda: len(self.done) >= done + tasks)
        lanes = [count for lane, count in self.most.items() if lane not in {"all", "lane a"}]
        return self.most["all"], self.most["lane a"], max(lanes)


@dataclass
class Deployment:
    """Peers of two versions, each in a task of its own, so that they leave in any order."""

    nursery: trio.Nursery
    new_mesh: NewMesh
    flow: Flow

    async def enter(self, version: dict[str, Any]) -> Callable[[], None]:
        """Let a peer of this version serve the queue. Return a function that lets it leave."""
        leave = trio.Event()
        await self.nursery.start(self._serve, version, leave)
        return leave.set

    async def _serve(self, version: dict[str, Any], leave: trio.Event, task_status: trio.TaskStatus[None]) -> None:
        async with serving(self.new_mesh(), "Q1", self.flow, room=8, **version):
            task_status.started()
            await leave.wait()


def changes(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the lines about changed limits say, without their beginning."""
    found = [record.getMessage() for record in caplog.records if getattr(record, "event", "") == "limits.changed"]
    return [message.partition("queue 'Q1': ")[2] for message in found]


IS_NOW: Final = "what may start in the mesh is now {}; its lanes have rules of their own"


@pytest.mark.usefixtures("without_periodic_scans")
async def test_the_version_that_entered_last_decides(new_mesh: NewMesh, caplog: pytest.LogCaptureFixture) -> None:
    """Workers are replaced one by one, and one of them is rolled back and replaced again."""
    caplog.set_level(logging.INFO, "worqr")
    mesh, flow = new_mesh(), Flow()
    async with mesh.connect(), trio.open_nursery() as nursery:
        queue, deployment = mesh.queue("Q1"), Deployment(nursery, new_mesh, flow)
        nursery.start_soon(flow.produce, queue)
        leave = [await deployment.enter(OLD) for _ in range(3)]
        assert await flow.measure() <= (2, 2, 2)
        for _ in range(3):
            leave.append(await deployment.enter(NEW))
            leave.pop(0)()
            assert (await queue.info()).limits == (worqr.Limit(4),)
            most, *by_lane = await flow.measure()
            assert (most <= 4, max(by_lane)) == (True, 1)
        await until(lambda: flow.most["all"] == 4, what="the places of the new version")
        for version, most_at_once, most_of_a_lane in ((OLD, 2, 2), (NEW, 4, 1)):
            leave.append(await deployment.enter(version))
            most, *by_lane = await flow.measure()
            assert (most <= most_at_once, max(by_lane) <= most_of_a_lane) == (True, True)
        old, new = IS_NOW.format("2 at once"), IS_NOW.format("4 at once")
        assert changes(caplog) == [old, new, old, new]
        await end(flow, queue)
        for each in leave:
            each()
    assert len(flow.done) == len(set(flow.done)) == flow.sent


@pytest.mark.usefixtures("without_periodic_scans")
async def test_an_operator_stands_above_both_versions(new_mesh: NewMesh, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "worqr")
    mesh, flow = new_mesh(), Flow()
    async with mesh.connect(), trio.open_nursery() as nursery:
        queue, deployment = mesh.queue("Q1"), Deployment(nursery, new_mesh, flow)
        nursery.start_soon(flow.produce, queue)
        leave = [await deployment.enter(OLD)]
        await queue.set_limit(worqr.Limit(3))
        await queue.set_limit(worqr.Limit(1), lane="a")
        for version in (NEW, OLD, NEW):
            leave.append(await deployment.enter(version))
            leave.pop(0)()
            info = await queue.info()
            assert (info.limits, info.limits_overridden) == ((worqr.Limit(3),), True)
            most, of_a, _ = await flow.measure()
            assert (most <= 3, of_a) == (True, 1)
        await queue.clear_limit()
        await queue.clear_limit(lane="a")
        assert (await queue.info()).limits == (worqr.Limit(4),)
        await until(lambda: flow.most["all"] == 4, what="the places of the new version")
        lanes = "its workers declare other rules of its lanes"  # the limits of the workers hold only at first
        assert changes(caplog) == [IS_NOW.format("2 at once"), lanes, lanes, lanes]
        await end(flow, queue)
        for each in leave:
            each()
    assert len(flow.done) == len(set(flow.done)) == flow.sent


async def end(flow: Flow, queue: worqr.Queue) -> None:
    """Produce no more, and wait until all tasks have run and nothing is left."""
    flow.is_over = True
    await until(lambda: len(flow.done) == flow.sent, what="all tasks")
    await eventually(queue.count, 0)
    await eventually(queue.running, [])
    await eventually(queue.lanes, [])
