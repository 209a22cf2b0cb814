"""Limits of a queue over several peers.

Without periodic scans, so that a wake-up that is missing shows as a task that never starts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from datetime import timedelta
from functools import partial
from random import Random
from typing import Any

import pytest
import trio

import worqr
from tests.peer.conftest import NewMesh
from tests.peer.tools import Held, Runs, eventually, serving, spying, until
from tests.support.patience import PATIENCE
from tests.support.servers import Server
from worqr.keys import QueueKeys
from worqr.peer.leader.leader import DueJobPromoter


def numbers(n: int) -> list[bytes]:
    return [b"%d" % i for i in range(n)]


class Counting(Runs):
    """A handler that takes a little while, and notes the most that ran at once."""

    def __init__(self, seconds: float = 0.002) -> None:
        super().__init__()
        self.seconds, self.running, self.most = seconds, 0, 0

    async def __call__(self, task: bytes) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await trio.sleep(self.seconds)
        finally:
            self.running -= 1
        self.begin(task)


@pytest.mark.usefixtures("without_scans")
async def test_a_limit_holds_over_several_peers(new_mesh: NewMesh) -> None:
    runs, meshes = Counting(), [new_mesh() for _ in range(4)]
    async with meshes[0].connect(), AsyncExitStack() as stack:
        for mesh in meshes:
            await stack.enter_async_context(serving(mesh, "Q1", runs, limit=worqr.Limit(3)))
        q = meshes[0].queue("Q1")
        for chunk in range(10):
            await q.enqueue(*numbers(30))
            await runs.wait(30 * (chunk + 1))
        await eventually(q.running, [])
        assert (len(runs.tasks), runs.most) == (300, 3)


@pytest.mark.usefixtures("without_periodic_scans")
@pytest.mark.parametrize("seed", range(4))
async def test_no_task_is_forgotten_while_peers_come_and_go(new_mesh: NewMesh, seed: int) -> None:
    """Peers that join and leave, runs that fail, give back and are rate limited, and limits that change."""
    random, runs, done = Random(seed), Counting(), set[bytes]()

    async def handler(task: bytes) -> None:
        await runs(task)
        if runs.tasks.count(task) == 1 and int(task) % 5 == 0:
            raise [worqr.Retry(delay=0), worqr.RateLimited(0.02), ValueError("once")][int(task) % 3]
        done.add(task)

    limits = [worqr.Limit(2), worqr.Limit(3, rate=20, per=0.1), worqr.Limit(rate=30, per=0.1)]
    options: dict[str, Any] = {"limit": limits[seed % 3], "retry": worqr.RetryPolicy(min_backoff=0)}
    async with new_mesh().connect(), AsyncExitStack() as stack:
        mesh = new_mesh()
        await stack.enter_async_context(mesh.connect())
        await stack.enter_async_context(serving(new_mesh(), "Q1", handler, room=2, **options))
        q = mesh.queue("Q1")
        for chunk in range(6):
            async with serving(new_mesh(), "Q1", handler, room=random.randint(1, 4), grace=0, **options):
                await q.enqueue(*[b"%d" % (20 * chunk + n) for n in range(20)])
                if chunk % 3 == 2:
                    await q.set_limit(worqr.Limit(random.randint(1, 3)))
                await trio.sleep(random.random() / 20)
        await q.clear_limit()
        await until(lambda: len(done) == 120, what="all tasks")


@pytest.mark.usefixtures("without_periodic_scans")
async def test_a_rate_holds_in_every_period(new_mesh: NewMesh) -> None:
    runs, meshes = Runs(), [new_mesh() for _ in range(3)]
    limit = worqr.Limit(rate=20, per=timedelta(seconds=0.4))
    async with meshes[0].connect(), AsyncExitStack() as stack:
        for mesh in meshes:
            await stack.enter_async_context(serving(mesh, "Q1", runs, limit=[limit]))
        await meshes[0].queue("Q1").enqueue(*numbers(90))
        await runs.wait(90)
    starts = sorted(
        context.fence // 1000 for context in runs.contexts
    )  # the server's clock, in ms, or 1 ms ahead of it
    assert all(later - first >= 399 for first, later in zip(starts, starts[20:], strict=False))
    assert starts[-1] - starts[0] >= 4 * 400


@pytest.mark.usefixtures("without_scans")
async def test_a_full_queue_costs_nothing(mesh: worqr.Mesh, other: worqr.Mesh, server: Server, prefix: str) -> None:
    held, limit = Held(), worqr.Limit(2)
    async with mesh.connect(), serving(mesh, "Q1", held, limit=limit), serving(other, "Q1", held, limit=limit):
        q = mesh.queue("Q1")
        await q.enqueue(*numbers(5))
        await held.wait(2)
        await eventually(partial(hungry, server, prefix), 2)
        with spying(server, prefix) as spy:
            for n in range(20):
                await q.enqueue(b"more %d" % n)
            info = await q.info()
            lines = spy.seen()
            assert spy.published(lines, ":wake:") == 0
        assert not [line for line in lines if line["client_type"] != "lua" and "start_tasks" in line["command"]]
        assert (info.running, info.waiting, info.held_back, info.held_for) == (2, 23, "concurrency", None)
        held.gate.set()
        await held.wait(25)


def hungry(server: Server, prefix: str) -> Any:
    async def look() -> int:
        with server.client() as client:
            return int(client.scard(QueueKeys(prefix, "Q1").hungry))  # type: ignore[arg-type]

    return look()


async def test_the_scan_finds_room_whose_wake_up_was_lost(
    mesh: worqr.Mesh, other: worqr.Mesh, server: Server, prefix: str
) -> None:
    """The only waiting worker is forgotten before a place is free."""
    held, limit = Held(), worqr.Limit(1)
    async with mesh.connect(), serving(mesh, "Q1", held, limit=limit), serving(other, "Q1", held, limit=limit):
        await mesh.queue("Q1").enqueue(b"T1", b"T2")
        await held.wait(1)
        await eventually(partial(hungry, server, prefix), 2)
        with server.client() as client:
            client.delete(QueueKeys(prefix, "Q1").hungry)
        held.gate.set()
        assert await held.wait(2) == [b"T1", b"T2"]


async def test_the_scan_finds_a_rate_that_allows_a_start(mesh: worqr.Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """No message about it arrives."""
    monkeypatch.setattr(DueJobPromoter, "_on_hint", lambda *_: None)
    runs = Runs()
    async with mesh.connect(), serving(mesh, "Q1", runs, limit=worqr.Limit(rate=1, per=0.5)):
        await mesh.queue("Q1").enqueue(b"T1", b"T2")
        assert await runs.wait(2) == [b"T1", b"T2"]


@pytest.mark.usefixtures("without_periodic_scans")
@pytest.mark.parametrize("runs_in", ["loop", "thread", "process", "asyncio"])
async def test_a_rate_limited_run_pauses_the_queue_and_is_not_counted(
    mesh: worqr.Mesh, runs_in: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    handler = refuse_once if runs_in in {"thread", "process"} else refuse_once_async
    async with mesh.connect():
        q = mesh.queue("Q1")
        async with serving(mesh, "Q1", handler, room=1, runs_in=runs_in, result_ttl=60):
            job = await q.dispatch(b"x", id="j")
            behind = await q.dispatch(b"behind")
            await eventually(paused(q), "the service says 429")
            assert (await q.info()).held_back == "paused"
            await q.pause("for a moment", duration=0.1)  # in place of the other pause
            assert await job.result(PATIENCE) == b"0 failures"
            assert await behind.result(PATIENCE) == b"0 failures"
        [record] = [record for record in caplog.records if getattr(record, "event", "") == "task.retry"]
        assert record.levelname == "INFO"
        assert "RateLimited: the service says 429; the queue is paused for 600 s" in record.getMessage()
        assert (await q.info()).counts["paused"] == 2


def refuse_once(task: bytes) -> bytes:
    """Refused as long as its record does not say that it began before."""
    context = worqr.current()
    if task == b"x" and not context._run.record.get(b"started"):  # type: ignore[union-attr]
        raise worqr.RateLimited(600, "the service says 429")
    return b"%d failures" % context.failures


async def refuse_once_async(task: bytes) -> bytes:
    return refuse_once(task)


def paused(q: worqr.Queue) -> Callable[[], Any]:
    async def look() -> str | None:
        return (await q.info()).paused

    return look


@pytest.mark.usefixtures("without_periodic_scans")
async def test_a_pause_ends_by_itself(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    runs = Runs()
    async with mesh.connect(), serving(other, "Q1", runs):
        q = mesh.queue("Q1")
        await q.pause("for a while", duration=600)
        await q.enqueue(*numbers(30))
        info = await q.info()
        assert (info.paused, info.held_back, runs.tasks) == ("for a while", "paused", [])
        assert info.held_for is not None
        assert 500 <= info.held_for <= 600
        await q.pause("for a moment", duration=0.3)
        await runs.wait(30)
        info = await q.info()
        assert (info.paused, info.held_back) == (None, "")


@pytest.mark.usefixtures("without_periodic_scans")
async def test_foreign_producers_are_heard_again_after_a_pause(
    mesh: worqr.Mesh, other: worqr.Mesh, server: Server, prefix: str
) -> None:
    """Nothing waits when the pause ends, so nobody is woken then; and the leader does not serve the queue."""
    runs, keys = Runs(), QueueKeys(prefix, "Q1")
    async with mesh.join() as leader:
        await until(lambda: leader._engine.leader.leads)
        async with serving(other, "Q1", runs):
            with server.client() as client:
                await mesh.queue("Q1").pause("for a while", duration=0.3)
                client.publish(keys.base, "anything")  # the worker asks, and is refused
                await eventually(paused(mesh.queue("Q1")), None)
                client.lpush(keys.base, b"a")
                client.publish(keys.base, "anything")
            await runs.wait(1)


@pytest.mark.usefixtures("without_scans")
async def test_a_pause_may_be_ended_early(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    runs = Runs()
    async with mesh.connect(), serving(other, "Q1", runs):
        await mesh.queue("Q1").pause("for an hour", duration=timedelta(hours=1))
        await mesh.queue("Q1").enqueue(b"a")
        await mesh.queue("Q1").resume()
        await runs.wait(1)


@pytest.mark.usefixtures("without_scans")
async def test_an_operator_overrides_the_limit_of_the_code(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    held = Held()
    async with mesh.connect(), serving(other, "Q1", held, limit=worqr.Limit(1)):
        q = mesh.queue("Q1")
        await q.enqueue(*numbers(9))
        await held.wait(1)
        assert ((await q.info()).limits, (await q.info()).limits_overridden) == ((worqr.Limit(1),), False)
        await q.set_limit(worqr.Limit(3))
        await held.wait(3)
        assert ((await q.info()).limits, (await q.info()).limits_overridden) == ((worqr.Limit(3),), True)
        await q.clear_limit()
        assert (await q.info()).running == 3  # nothing is stopped
        await q.set_limit()
        await held.wait(9)
        held.gate.set()
        await q.clear_limit()
        kinds = [(entry.kind, entry.text) for entry in await mesh.log() if entry.queue == "Q1"]
        assert ("limited", "3 at once") in kinds
        assert ("limited", "no limit") in kinds
        assert ("limit_cleared", "") in kinds


async def test_a_changed_limit_is_logged_once(
    mesh: worqr.Mesh, other: worqr.Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    limit = worqr.Limit(10, rate=100, per=60)
    async with serving(mesh, "Q1", Runs(), limit=limit), serving(other, "Q1", Runs(), limit=limit):
        pass
    found = [record.getMessage() for record in caplog.records if getattr(record, "event", "") == "limits.changed"]
    assert found == ["limits.changed: queue 'Q1': what may start in the mesh is now 10 at once, 100 per minute"]


async def test_a_limit_of_a_queue_with_shards_is_divided(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    held = Held()
    async with mesh.connect():
        q = mesh.queue("Q1", shards=4)
        for task in numbers(40):  # each to the next shard
            await q.enqueue(task)
        async with serving(other, "Q1", held, limit=worqr.Limit(6)):
            await held.wait(6)
            assert ((await q.info()).running, (await q.info()).limits) == (6, (worqr.Limit(6),))
            assert (await q.info()).held_back == "concurrency"
            await q.set_limit(worqr.Limit(8, rate=1000, per=60))
            await held.wait(8)
            assert (await q.info()).limits == (worqr.Limit(8), worqr.Limit(rate=1000, per=60))
            with pytest.raises(
                worqr.UsageError, match="a limit of 3 cannot be divided among the 4 shards of queue 'Q1'"
            ):
                await q.set_limit(worqr.Limit(3))
            held.gate.set()
            await held.wait(40)
        await q.clear_limit()
        async with other.join() as peer, trio.open_nursery() as nursery:
            with pytest.raises(worqr.UsageError, match="a limit of 3 cannot be divided among the 4 shards"):
                await nursery.start(partial(peer.serve, "Q1", held, limit=worqr.Limit(3)))
        await q.delete()


async def test_claims_by_hand_keep_to_the_limit(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    async with mesh.connect():
        await mesh.queue("Q1").set_limit(worqr.Limit(2))
        await mesh.queue("Q1").enqueue(*numbers(5))
        async with other.join() as peer, peer.work("Q1") as claims:
            batch = await claims.take(5)
            assert [claim.task for claim in batch] == [b"0", b"1"]
            await batch[0].finish()
            [third] = await claims.take(5)
            assert third.task == b"2"
        await mesh.queue("Q1").clear_limit()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "a Limit needs a concurrency or a rate"),
        ({"concurrency": 0}, "concurrency of a Limit must be a whole number from 1 to 1,000,000, not 0"),
        ({"concurrency": True}, "concurrency of a Limit must be a whole number"),
        ({"concurrency": 1_000_001}, "concurrency of a Limit must be a whole number"),
        ({"rate": 2.5}, "rate of a Limit must be a whole number from 1 to 1,000,000, not 2.5"),
        ({"concurrency": 1, "per": 60}, r"a Limit has per only with a rate: write Limit\(rate=100, per=60\)"),
        ({"rate": 1, "per": 0}, "per of a Limit must be 0.01 s to 31 days, not 0 s"),
        ({"rate": 1, "per": timedelta(days=32)}, "per of a Limit must be 0.01 s to 31 days"),
        ({"rate": 1, "per": "1m"}, "per of a Limit must be seconds"),
    ],
)
def test_a_limit_without_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(worqr.UsageError, match=message):
        worqr.Limit(**options)


@pytest.mark.parametrize("limit", [5, "10/s", [worqr.Limit(1)] * 5, [worqr.Limit(1), 5]])
def test_what_is_no_limit_is_refused_where_it_is_declared(limit: Any) -> None:
    with pytest.raises(worqr.UsageError, match=r"limit of task|a queue may have 4 limits"):

        @worqr.Mesh().task(limit=limit)
        def send(to: str) -> None: ...


def test_limits_describe_themselves() -> None:
    shown: Sequence[object] = [
        worqr.Limit(10),
        worqr.Limit(1_000, rate=2_000, per=3600),
        worqr.Limit(rate=5),
        worqr.Limit(rate=5, per=0.25),
    ]
    assert list(map(str, shown)) == ["10 at once", "1,000 at once, 2,000 per hour", "5 per second", "5 per 0.25 s"]


@pytest.mark.parametrize("after", [0, -1, "30", float("nan")])
def test_a_wait_without_sense_is_refused(after: Any) -> None:
    with pytest.raises(worqr.UsageError, match="retry_after of RateLimited must be"):
        worqr.RateLimited(after)
