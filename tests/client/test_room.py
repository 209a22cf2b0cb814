"""Producers wait for room in a queue at its max_length: what takes tasks out of it wakes them, else they look once a second.

`tests/ops/test_room.py` has what the scripts store and publish.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
import trio

import worqr
from tests.peer.conftest import NewMesh, mesh, new_mesh, other, without_scans  # noqa: F401 - fixtures
from tests.peer.tools import Held, Runs, at_most, eventually, serving, spying, until
from tests.support.clusters import Cluster, cluster, cluster_of_module  # noqa: F401 - fixtures
from tests.support.patience import PATIENCE
from tests.support.servers import Server
from worqr.client import notifications
from worqr.client.room import RoomChannel
from worqr.keys import QueueKeys, RoomKeys

WAITERS = "{*}:waiters"
"""Entries of calls that gave up; they expire."""


@pytest.fixture
def by_messages_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks by itself: a message that is missing shows in a call that never returns."""
    monkeypatch.setattr(notifications, "POLL_EVERY", 10 * PATIENCE)


@pytest.fixture
def full(mesh: worqr.Mesh) -> worqr.Queue:
    return mesh.queue("Q1")


def waiting(server: Server, prefix: str, queue: str = "Q1") -> int:
    with server.client() as client:
        return int(client.hlen(RoomKeys(QueueKeys(prefix, queue)).waiters))  # type: ignore[arg-type]


WAYS: dict[str, Callable[[worqr.Queue], Awaitable[Any]]] = {
    "enqueue": lambda q: q.enqueue(b"more", max_length=1, wait=math.inf),
    "enqueue unique": lambda q: q.enqueue(b"more", unique=True, max_length=1, wait=PATIENCE),
    "dispatch": lambda q: q.dispatch(b"more", max_length=1, wait=math.inf),
    "dispatch with an id": lambda q: q.dispatch(b"more", id="more", max_length=1, wait=PATIENCE),
}


@pytest.mark.usefixtures("by_messages_alone", "without_scans")
@pytest.mark.parametrize("way", WAYS)
async def test_a_worker_that_takes_a_task_makes_room_for_a_producer(
    mesh: worqr.Mesh, server: Server, prefix: str, full: worqr.Queue, way: str
) -> None:
    runs = Runs()
    async with mesh.connect():
        await full.enqueue(b"first")
        async with at_most(PATIENCE), trio.open_nursery() as nursery:
            nursery.start_soon(WAYS[way], full)
            await until(lambda: waiting(server, prefix))
            async with serving(mesh, "Q1", runs, room=1):
                assert sorted(await runs.wait(2)) == [b"first", b"more"]
        assert waiting(server, prefix) == 0


@pytest.mark.usefixtures("by_messages_alone")
async def test_an_operator_who_cancels_makes_room(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    q = mesh.queue("Q1")
    async with mesh.connect():
        await q.enqueue(b"first")
        for cancel in (partial(q.cancel, b"first"), q.cancel_all, q.delete):
            async with at_most(PATIENCE), trio.open_nursery() as nursery:
                nursery.start_soon(partial(q.enqueue, b"first", max_length=1, wait=PATIENCE))
                await until(lambda: waiting(server, prefix))
                assert await q.count() == 1
                await cancel()
            assert await q.count() == 1
        await q.delete()


async def test_a_queue_with_room_lets_nobody_wait(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    async with mesh.connect():
        with spying(server, prefix) as spy:
            assert await mesh.queue("Q1").enqueue(b"a", max_length=1, wait=PATIENCE) == 1
            calls = spy.calls()
            assert (calls["enqueue"], calls["SUBSCRIBE"]) == (1, 0)
        await mesh.queue("Q1").delete()


@pytest.mark.leaves(WAITERS)
@pytest.mark.parametrize("way", ["enqueue", "dispatch"])
async def test_after_the_time_the_queue_is_full(mesh: worqr.Mesh, full: worqr.Queue, way: str) -> None:
    async with mesh.connect():
        await full.enqueue(b"first")
        began = time.monotonic()
        with pytest.raises(worqr.QueueFull) as caught:
            await getattr(full, way)(b"more", max_length=1, wait=0.1)
        assert time.monotonic() - began >= 0.1
        assert caught.value.__notes__ == ["waited 0.1 s for room"]
        assert await full.count() == 1
        await full.delete()


@pytest.mark.leaves(WAITERS)
async def test_who_is_cancelled_while_it_waits_stores_nothing(
    mesh: worqr.Mesh, server: Server, prefix: str, full: worqr.Queue
) -> None:
    async with mesh.connect():
        await full.enqueue(b"first")
        async with at_most(PATIENCE), trio.open_nursery() as nursery:
            nursery.start_soon(partial(full.enqueue, b"more", max_length=1, wait=PATIENCE))
            await until(lambda: waiting(server, prefix))
            nursery.cancel_scope.cancel()
        assert await full.cancel(b"first") == worqr.CancelCount(waiting=1, running=0, acknowledged=0)
        assert await full.enqueue(b"x", max_length=1, wait=PATIENCE) == 1, "its message wakes nobody"
        assert await full.tasks() == [b"x"]
        await full.delete()


async def test_a_message_that_is_lost_costs_a_second(
    mesh: worqr.Mesh, server: Server, prefix: str, full: worqr.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RoomChannel, "_deliver", lambda *_: None)
    async with mesh.connect():
        await full.enqueue(b"first")
        async with at_most(PATIENCE), trio.open_nursery() as nursery:
            nursery.start_soon(partial(full.enqueue, b"more", max_length=1, wait=math.inf))
            await until(lambda: waiting(server, prefix))
            await full.cancel(b"first")
        assert await full.tasks() == [b"more"]
        await full.delete()


@pytest.mark.leaves(WAITERS)
async def test_who_waits_asks_about_once_a_second(
    mesh: worqr.Mesh, server: Server, prefix: str, full: worqr.Queue
) -> None:
    async with mesh.connect():
        await full.enqueue(b"first")
        async with at_most(PATIENCE), trio.open_nursery() as nursery:
            nursery.start_soon(partial(full.enqueue, b"more", max_length=1, wait=math.inf))
            await until(lambda: waiting(server, prefix))
            with spying(server, prefix) as spy:
                await trio.sleep(2.2)
                assert 1 <= spy.calls()["enqueue"] <= 3
            nursery.cancel_scope.cancel()
        await full.delete()


@pytest.mark.leaves(WAITERS)
async def test_a_message_for_a_call_that_gave_up_wakes_another_one(
    mesh: worqr.Mesh, server: Server, prefix: str, full: worqr.Queue, by_messages_alone: None
) -> None:
    async with mesh.connect():
        await full.enqueue(b"a", b"b")
        async with at_most(PATIENCE), trio.open_nursery() as nursery:
            scope = trio.CancelScope()

            async def give_up() -> None:
                with scope:
                    await full.enqueue(b"gives up", max_length=2, wait=PATIENCE)

            nursery.start_soon(give_up)
            await until(lambda: waiting(server, prefix) == 1)
            nursery.start_soon(partial(full.enqueue, b"x", b"y", max_length=2, wait=PATIENCE))
            await until(lambda: waiting(server, prefix) == 2)
            scope.cancel()
            await full.cancel(b"a")  # has room for the one that gave up
            await full.cancel(b"b")  # and now for both of the other one
        assert sorted(await full.tasks()) == [b"x", b"y"]
        await full.delete()


async def test_ten_producers_and_a_small_queue_lose_nothing_and_double_nothing(
    mesh: worqr.Mesh, other: worqr.Mesh, full: worqr.Queue
) -> None:
    runs, each = Runs(), 40

    async def produce(by: worqr.Mesh, n: int) -> None:
        for task in range(each):
            await by.queue("Q1").enqueue(b"%d-%d" % (n, task), max_length=5, wait=math.inf)

    async with mesh.connect(), other.connect(), serving(mesh, "Q1", runs, room=3):
        async with at_most(PATIENCE), trio.open_nursery() as nursery:
            for n in range(10):
                nursery.start_soon(produce, (mesh, other)[n % 2], n)
        tasks = await runs.wait(10 * each)
    assert Counter(tasks) == dict.fromkeys([b"%d-%d" % (n, task) for n in range(10) for task in range(each)], 1)


# Functions


@pytest.mark.usefixtures("by_messages_alone")
@pytest.mark.parametrize("how", ["enqueue", "dispatch"])
async def test_a_call_of_a_function_waits(mesh: worqr.Mesh, server: Server, prefix: str, how: str) -> None:
    done: list[int] = []

    @mesh.task(name="f", max_length=1)
    async def work(n: int) -> None:
        done.append(n)

    async with mesh.connect():
        await work.enqueue(1)
        with pytest.raises(worqr.QueueFull):
            await work.options(delay=0).dispatch(2)
        async with at_most(PATIENCE), trio.open_nursery() as nursery:
            nursery.start_soon(getattr(work.options(wait=PATIENCE), how), 2)
            await until(lambda: waiting(server, prefix, "f"))
            async with mesh.join(concurrency=1):
                await until(lambda: sorted(done) == [1, 2])


@pytest.mark.leaves(WAITERS)
async def test_a_plain_task_of_a_function_is_refused_after_the_time(mesh: worqr.Mesh) -> None:
    @mesh.task(name="f", max_length=1)
    async def work(n: int) -> None: ...

    async with mesh.connect():
        await work.enqueue(1)
        with pytest.raises(worqr.QueueFull) as caught:
            await work.options(wait=0.1).enqueue(2)
        assert caught.value.__notes__ == ["waited 0.1 s for room"]
        await work.options(max_length=2, wait=PATIENCE).enqueue(3)
        assert await work.queue.tasks() == [b'{"n":3}', b'{"n":1}']
        await work.queue.delete()


@pytest.mark.usefixtures("by_messages_alone")
@pytest.mark.parametrize("how", ["enqueue", "dispatch"])
async def test_a_call_waits_for_room_in_its_lane(mesh: worqr.Mesh, server: Server, prefix: str, how: str) -> None:
    @mesh.task(name="f", lanes=worqr.Lanes("customer", max_length=1))
    async def work(customer: str, n: int) -> None: ...

    async with mesh.connect():
        await work.enqueue("acme", 1)
        await work.enqueue("initech", 1)
        async with at_most(PATIENCE), trio.open_nursery() as nursery:
            nursery.start_soon(getattr(work.options(wait=PATIENCE), how), "acme", 2)
            await until(lambda: waiting(server, prefix, "f"))
            await work.queue.cancel_lane("initech")
            assert waiting(server, prefix, "f") == 1
            await work.queue.cancel_lane("acme")
        assert await work.queue.count() == 1
        await work.queue.delete()


@pytest.mark.usefixtures("by_messages_alone")
async def test_calls_for_several_full_lanes_wait_for_room_in_each(
    mesh: worqr.Mesh, server: Server, prefix: str
) -> None:
    @mesh.task(name="f", lanes=worqr.Lanes("customer", max_length=20))
    async def work(customer: str) -> None: ...

    call, lanes = work.options(wait=PATIENCE).call, ["acme", "initech"]
    async with mesh.connect():
        await mesh.dispatch_many(work.call(lane) for lane in lanes * 20)
        for order in (lanes, lanes[::-1]):
            async with at_most(PATIENCE), trio.open_nursery() as nursery:
                nursery.start_soon(mesh.dispatch_many, [call(lane) for lane in lanes])
                await until(lambda: waiting(server, prefix, "f") == 2)
                await work.queue.cancel_lane(order[0])
                await until(lambda: waiting(server, prefix, "f") == 1)
                await eventually(lambda: work.queue.count(), 21)
                await work.queue.cancel_lane(order[1])
            assert (await work.queue.count(), waiting(server, prefix, "f")) == (2, 0)
            await mesh.dispatch_many(work.call(lane) for lane in lanes * 19)
        await work.queue.delete()


@pytest.mark.parametrize("how", ["enqueue_many", "dispatch_many"])
async def test_a_call_without_a_lane_finds_room_at_once(mesh: worqr.Mesh, how: str) -> None:
    @mesh.task(name="f", lanes=worqr.Lanes("customer", max_length=1))
    async def work(customer: str | None) -> None: ...

    call = work.options(wait=PATIENCE).call
    async with mesh.connect():
        await getattr(mesh, how)([call(None), call("acme"), call(None)])
        assert await work.queue.count() == 3
        await work.queue.delete()


@pytest.mark.parametrize("how", ["enqueue_many", "dispatch_many"])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.leaves("shards")
async def test_more_calls_than_fit_go_in_parts(mesh: worqr.Mesh, how: str, shards: int) -> None:
    done: list[int] = []

    @mesh.task(name="f", max_length=30, shards=shards)
    async def work(n: int) -> None:
        done.append(n)

    async with mesh.join(concurrency=4), at_most(PATIENCE):
        sent = await getattr(mesh, how)(work.options(wait=PATIENCE).call(n) for n in range(200))
        assert (sent if how == "enqueue_many" else len(sent)) == 200
        await until(lambda: len(done) == 200)
    assert sorted(done) == list(range(200))


@pytest.mark.leaves(WAITERS)
@pytest.mark.parametrize("how", ["enqueue_many", "dispatch_many"])
async def test_of_many_calls_the_first_are_stored_until_the_time_is_over(mesh: worqr.Mesh, how: str) -> None:
    @mesh.task(name="f", max_length=20)
    async def work(n: int) -> None: ...

    async with mesh.connect():
        with pytest.raises(worqr.QueueFull):
            await getattr(mesh, how)(work.options(wait=0.05).call(n) for n in range(50))
        assert await work.queue.count() == 20
        await work.queue.delete()


async def test_calls_of_both_kinds_go_together(mesh: worqr.Mesh) -> None:
    @mesh.task(name="f", max_length=100)
    async def work(n: int) -> None: ...

    async with mesh.connect():
        calls = [work.options(wait=n % 3).call(n) for n in range(60)]
        assert [job.outcome for job in await mesh.dispatch_many(calls)] == ["created"] * 60
        assert await mesh.enqueue_many(calls[:30]) == 30
        assert await work.queue.count() == 90
        await work.queue.delete()


# Other loops, threads, shards and clusters


@pytest.mark.usefixtures("by_messages_alone")
def test_under_asyncio(new_mesh: NewMesh, server: Server, prefix: str) -> None:
    mesh = new_mesh()

    async def main() -> None:
        async with mesh.connect():
            q = mesh.queue("Q1")
            await q.enqueue(b"first")
            sends = [asyncio.create_task(q.enqueue(b"more", max_length=1, wait=math.inf)) for _ in range(3)]
            while waiting(server, prefix) < 3:
                await asyncio.sleep(0.005)
            for _ in range(3):
                assert await q.count() == 1
                await q.cancel_all()
                await asyncio.wait(sends, return_when=asyncio.FIRST_COMPLETED)
                sends = [each for each in sends if not each.done()]
            assert sends == []
            await q.delete()

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


@pytest.mark.usefixtures("by_messages_alone")
@pytest.mark.parametrize("of_a_function", [False, True])
def test_in_plain_threads(new_mesh: NewMesh, server: Server, prefix: str, of_a_function: bool) -> None:
    mesh = new_mesh()
    q, stored = mesh.queue("Q1"), threading.Semaphore(0)

    @mesh.task(name="Q1", max_length=1)
    def work(what: str) -> None: ...

    more = work.call("more").task

    def produce() -> None:
        if of_a_function:
            worqr.sync(work.options(wait=PATIENCE).enqueue, "more")
        else:
            worqr.sync(q.enqueue, more, max_length=1, wait=PATIENCE)
        stored.release()

    worqr.sync(q.enqueue, b"first")
    threads = [threading.Thread(target=produce, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    until_noted = time.monotonic() + PATIENCE
    while waiting(server, prefix) < 4:
        assert time.monotonic() < until_noted
        time.sleep(0.005)
    for n in range(4):
        assert worqr.sync(q.cancel, more if n else b"first").waiting == 1
        assert stored.acquire(timeout=PATIENCE)
    for thread in threads:
        thread.join(PATIENCE)
    assert worqr.sync(q.cancel, more).waiting == 1
    mesh.close()


@pytest.mark.leaves("shards", WAITERS)
async def test_a_producer_waits_at_the_share_of_its_shard(mesh: worqr.Mesh) -> None:
    q = mesh.queue("hot", shards=2)
    async with mesh.connect():
        for _ in range(4):
            await q.enqueue(b"x", max_length=4, wait=PATIENCE)
        with pytest.raises(worqr.QueueFull):
            await q.enqueue(b"x", max_length=4, wait=0.05)
        with pytest.raises(worqr.UsageError, match="3 tasks in one call never fit"):
            await q.enqueue(b"x", b"x", b"x", max_length=4, wait=0.05)
        await q.cancel_all()


@pytest.mark.one_server
async def test_on_a_cluster(cluster: Cluster) -> None:
    mesh, keys = worqr.Mesh(cluster.url, prefix="room"), [QueueKeys("room", f"Q{n}") for n in range(6)]
    async with mesh.connect():
        queues = [mesh.queue(each.name) for each in keys]
        for q in queues:
            await q.enqueue(b"first")
        async with at_most(PATIENCE), trio.open_nursery() as nursery:
            for q in queues:
                nursery.start_soon(partial(q.enqueue, b"more", max_length=1, wait=PATIENCE))
            await until(lambda: all(cluster.get("HLEN", RoomKeys(each).waiters) for each in keys))
            for q in queues:
                assert await q.count() == 1
                await q.cancel_all()
        for q in queues:
            await eventually(q.count, 1)
            await q.delete()


# What is wrong


@pytest.mark.parametrize("wait", [-1, "1", "", None, True, False, math.nan])
async def test_what_is_no_time_to_wait(mesh: worqr.Mesh, wait: Any) -> None:
    async with mesh.connect():
        with pytest.raises(worqr.UsageError, match="wait"):
            await mesh.queue("Q1").enqueue(b"x", max_length=1, wait=wait)
        with pytest.raises(worqr.UsageError, match="wait"):
            await mesh.queue("Q1").dispatch(b"x", max_length=1, wait=wait)


async def test_without_a_bound_there_is_nothing_to_wait_for(mesh: worqr.Mesh) -> None:
    @mesh.task(name="f", lanes=worqr.Lanes("n"))
    async def work(n: int) -> None: ...

    remedy = r"wait= without max_length=.*write max_length=1000, wait=30"
    async with mesh.connect():
        q = mesh.queue("Q1")
        for refused in (partial(q.enqueue, b"x", wait=1), partial(q.dispatch, b"x", wait=1)):
            with pytest.raises(worqr.UsageError, match=remedy):
                await refused()
    with pytest.raises(worqr.UsageError, match=remedy):
        work.options(wait=1)
    work.options(wait=0)
    work.options(wait=1, max_length=5)


async def test_more_than_ever_fit_is_said_at_once(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        for unique in (False, True):
            with pytest.raises(worqr.UsageError, match=r"3 tasks in one call never fit into queue 'Q1', .* at most 2"):
                await mesh.queue("Q1").enqueue(b"a", b"b", b"c", unique=unique, max_length=2, wait=1)


async def test_a_server_without_memory_is_nothing_to_wait_for(new_mesh: NewMesh, own_server: Server) -> None:
    mesh = worqr.Mesh(own_server.url, patience=PATIENCE)
    with own_server.client() as client:
        async with mesh.connect(), at_most(PATIENCE):
            client.config_set("maxmemory", 1)
            with pytest.raises(worqr.QueueFull, match="memory"):
                await mesh.queue("Q1").enqueue(b"x", max_length=9, wait=math.inf)
            client.config_set("maxmemory", 0)


async def test_a_user_without_the_right_to_the_channel_is_told(own_server: Server) -> None:
    with own_server.client() as client:
        client.execute_command("ACL", "SETUSER", "mute", "on", ">x", "~*", "+@all", "resetchannels", "&{worqr}*")
    mesh = worqr.Mesh(own_server.url, credentials=lambda: ("mute", "x"), patience=PATIENCE)
    async with mesh.connect(), at_most(PATIENCE):
        await mesh.queue("Q1").enqueue(b"first")
        for _ in range(2):
            with pytest.raises(worqr.RefusedByServer, match="subscribe"):
                await mesh.queue("Q1").enqueue(b"x", max_length=1, wait=math.inf)
        assert await mesh.queue("Q1").count() == 1


@pytest.mark.leaves(WAITERS)
async def test_a_connection_keeps_few_channels(mesh: worqr.Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worqr.client.room.MAX_CHANNELS", 3)
    async with mesh.connect():
        for n in range(6):
            q = mesh.queue(f"Q{n}")
            await q.enqueue(b"x")
            with pytest.raises(worqr.QueueFull):
                await q.enqueue(b"x", max_length=1, wait=0.01)
            await q.delete()
        rooms = mesh._client.rooms
        assert len(rooms._channels) == 3


async def test_a_handler_of_the_queue_itself_may_wait_while_others_run(mesh: worqr.Mesh) -> None:
    held, q = Held(), mesh.queue("Q1")
    async with mesh.connect(), serving(mesh, "Q1", held, room=2):
        await q.enqueue(b"a", b"b", b"c")
        await held.wait(2)
        async with at_most(PATIENCE), trio.open_nursery() as nursery:
            nursery.start_soon(partial(q.enqueue, b"d", max_length=1, wait=PATIENCE))
            held.gate.set()
        await held.wait(4)
