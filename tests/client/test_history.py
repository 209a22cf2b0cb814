"""`Queue.history`: what it returns, of queues of one shard and of several, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

import worqr
from tests.ops.driver import Desk, desk_on
from tests.ops.test_read_history import put
from tests.support.servers import Server
from worqr import ops
from worqr.history_records import FROM_ZERO, Record
from worqr.keys import QueueKeys


@pytest.fixture
def desk(server: Server, prefix: str, expects_left: Callable[..., None]) -> Iterator[Desk]:
    """A `Desk`; what it leaves is removed."""
    expects_left("*")
    yield from desk_on(server, prefix)


@pytest.fixture
def mesh(server: Server, prefix: str) -> worqr.Mesh:
    return worqr.Mesh(server.url, prefix=prefix, patience=10)


def sampled(desk: Desk) -> Record:
    record = desk.call(ops.sample_queue(desk.q, create=True))
    assert record is not None
    return record


async def test_a_point_for_each_minute_or_for_ten(mesh: worqr.Mesh, desk: Desk) -> None:
    async with mesh.connect():
        q = mesh.queue("Q1")
        for minutes, step, number in ((1, 60, 1), (60, 60, 60), (480, 60, 480), (481, 600, 49), (4320, 600, 432)):
            history = await q.history(minutes)
            assert (history.queue, history.step, len(history.points)) == ("Q1", step, number)
        assert len((await q.history()).points) == 60


async def test_what_was_stored_and_what_happened_since(mesh: worqr.Mesh, desk: Desk) -> None:
    desk.hold("A", b"a", b"b")
    now = sampled(desk)
    for step in (1, 10):
        for back in range(1, 5):
            old = replace(now, at_ms=now.at_ms - back * step * 60_000, totals=(0,) * 14, since=0)
            put(desk, old, step)  # type: ignore[arg-type]
    desk.put(b"c")
    async with mesh.connect():
        for minutes in (5, 500):
            history = await mesh.queue("Q1").history(minutes)
            assert (history.total("enqueued"), history.total("claimed")) == (3, 2)
            assert [history.points[-1].running, history.points[-1].waiting] == [2, 1]
        assert [point.enqueued for point in history.points][-5:-2] == [0, 0, 0]
        assert history.points[0].enqueued == 0  # nothing had happened in the queue before the first record


async def test_run_times_and_waiting_times(mesh: worqr.Mesh, desk: Desk) -> None:
    now = sampled(desk)
    put(desk, replace(now, at_ms=now.at_ms - 60_000), 1)
    desk.client.hset(desk.q.runs, mapping={"r3": 9, "r9": 1, "rs": 400, "w0": 4, "ws": 2})
    async with mesh.connect():
        history = await mesh.queue("Q1").history(5)
    assert history.runs.count == 10
    assert history.runs.quantile(0.5) == pytest.approx(0.004 + 0.004 * 5 / 9)
    assert history.runs.mean == pytest.approx(0.04)
    assert history.waits.counts[0] == 4
    assert history.points[-1].runs == history.runs


async def test_shards_are_added(mesh: worqr.Mesh, desk: Desk, prefix: str) -> None:
    async with mesh.connect():
        broad = mesh.queue("broad", shards=3)
        await broad.enqueue(b"x")
        await broad.enqueue(b"y")
        assert (await broad.history(5)).points[-1].is_gap
        for keys in await mesh._client.sharding.shards(QueueKeys(prefix, "broad")):
            desk.call(ops.sample_queue(keys, create=True, since=FROM_ZERO | desk.now() // 60_000))
        for _ in range(3):
            await broad.enqueue(b"z")
        history = await broad.history(5)
        assert (history.queue, history.total("enqueued"), history.points[-1].waiting) == ("broad", 5, 5)


@pytest.mark.parametrize("minutes", [0, -1, 4321, 1.5, True, "60", None])
async def test_other_numbers_of_minutes_are_refused(mesh: worqr.Mesh, minutes: Any) -> None:
    async with mesh.connect():
        with pytest.raises(worqr.UsageError, match=r"minutes must be a whole number from 1 to 4,320, not "):
            await mesh.queue("Q1").history(minutes)


def test_without_a_loop(mesh: worqr.Mesh, desk: Desk) -> None:
    desk.put(b"a")
    in_a_thread = worqr.sync(mesh.queue("Q1").history, minutes=3)
    assert [point.waiting for point in in_a_thread.points] == [None, None, 1]
    with pytest.raises(worqr.UsageError, match="minutes must be"):
        worqr.sync(mesh.queue("Q1").history, 0)
    mesh.close()


def test_the_settings_of_a_mesh() -> None:
    assert worqr.Mesh().history_queues == 100
    assert worqr.Mesh(history=False).history_queues == 0
    assert worqr.Mesh(history_queues=0).history_queues == 0
    assert worqr.Mesh(history_queues=7).history_queues == 7
    for wrong in (-1, 1001, 2.5, True, None):
        bad: Any = wrong
        with pytest.raises(worqr.UsageError, match=r"history_queues must be a whole number from 0 to 1,000, not "):
            worqr.Mesh(history_queues=bad)
    for wrong in (1, None, "yes"):
        bad = wrong
        with pytest.raises(worqr.UsageError, match="history must be True or False, not"):
            worqr.Mesh(history=bad)
