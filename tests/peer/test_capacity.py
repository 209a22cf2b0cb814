"""The room of a peer: shared fairly between its queues, never exceeded, never leaked."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from typing import Any

import pytest
import trio

import worqr
from tests.peer.tools import QUICK, Held, Runs, eventually, serving, until


def numbers(n: int) -> list[bytes]:
    return [b"%d" % i for i in range(n)]


class Busy(Runs):
    """Notes how many runs there are at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()

    async def __call__(self, task: bytes) -> None:
        queue = worqr.current().queue
        for name in (queue, "all"):
            self.now[name] += 1
            self.most[name] = max(self.most[name], self.now[name])
        await trio.sleep(random.random() / 500)
        self.begin(task)
        for name in (queue, "all"):
            self.now[name] -= 1
        if task.endswith(b"7"):
            raise ValueError


@pytest.mark.leaves("{Q?}:failed", "{Q?}:aside*")
async def test_room_is_used_up_and_never_exceeded_nor_leaked(mesh: worqr.Mesh) -> None:
    busy = Busy()
    async with mesh.join(concurrency=10) as peer, trio.open_nursery() as nursery:
        await nursery.start(partial(peer.serve, "Q1", busy, concurrency=4, retry=QUICK))
        await nursery.start(partial(peer.serve, "Q2", busy, retry=QUICK))
        await nursery.start(partial(peer.serve, "Q3", busy, concurrency=1, retry=QUICK))
        for name in ("Q1", "Q2", "Q3"):
            await mesh.queue(name).enqueue(*numbers(100))
        await busy.wait(3 * (90 + 10 * 10))
        for name in ("Q1", "Q2", "Q3"):
            await eventually(mesh.queue(name).running, [])
        assert 7 <= busy.most["all"] <= 10
        assert (busy.most["Q1"], busy.most["Q3"]) == (4, 1)
        with trio.fail_after(5):  # a last start request may still be under way
            while (peer.capacity.running, peer.capacity.room, peer.health().room) != (0, 10, 10):
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()


async def test_a_queue_gets_all_the_room_that_is_left(mesh: worqr.Mesh) -> None:
    held = Held()
    async with mesh.connect(), serving(mesh, "Q1", held, room=7) as peer:
        await mesh.queue("Q1").enqueue(*numbers(20))
        await held.wait(7)
        await trio.sleep(0.05)
        assert len(held.tasks) == 7
        assert (peer.health().running, peer.health().room) == (7, 0)
        held.gate.set()
        await held.wait(20)
        await eventually(mesh.queue("Q1").running, [])
        assert peer.capacity.room == 7


async def test_neither_of_two_queues_starves(mesh: worqr.Mesh) -> None:
    order: list[str] = []
    done = trio.Event()

    async def handler(task: bytes) -> None:
        await trio.sleep(0.001)
        order.append(worqr.current().queue)
        if len(order) == 200:
            done.set()

    async with mesh.join(concurrency=2) as peer, trio.open_nursery() as nursery:
        await mesh.queue("Q1").enqueue(*numbers(150))
        await nursery.start(partial(peer.serve, "Q1", handler))
        await nursery.start(partial(peer.serve, "Q2", handler))
        await mesh.queue("Q2").enqueue(*numbers(50))
        await done.wait()
        nursery.cancel_scope.cancel()
    last_of_q2 = max(place for place, queue in enumerate(order) if queue == "Q2")
    assert last_of_q2 < 150, order  # in turn, not after all of Q1
    assert order[:20].count("Q1") >= 5


async def test_room_that_one_queue_frees_is_offered_to_the_other(mesh: worqr.Mesh) -> None:
    first, second = Held(), Runs()
    async with mesh.join(concurrency=1) as peer, trio.open_nursery() as nursery:
        await nursery.start(partial(peer.serve, "Q1", first))
        await nursery.start(partial(peer.serve, "Q2", second))
        await mesh.queue("Q1").enqueue(b"a")
        await first.wait(1)
        await mesh.queue("Q2").enqueue(b"b")
        await trio.sleep(0.05)
        assert second.tasks == []
        first.gate.set()
        await second.wait(1, within=0.5)
        await eventually(mesh.queue("Q2").running, [])
        nursery.cancel_scope.cancel()


async def test_room_comes_back_after_every_kind_of_end(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    held = Held()

    async def handler(task: bytes) -> None:
        if task == b"fail" and worqr.current().failures == 0:
            raise ValueError
        if task == b"hold":
            await held(task)

    async with other.connect(), serving(mesh, "Q1", handler, room=3, retry=QUICK) as peer:
        q = other.queue("Q1")
        for n in range(5):
            await q.enqueue(b"ok", b"fail", b"hold")
            await held.wait(n + 1)
            await q.cancel(b"hold", wait=2)
            await eventually(q.count, 0)
            await eventually(q.running, [])
            assert peer.capacity.running == 0
        await until(lambda: peer.health().room == 3)


@pytest.mark.parametrize("n", [0, -1, True, 1.5, "3", None])
async def test_concurrency_is_a_whole_number(mesh: worqr.Mesh, n: Any) -> None:
    with pytest.raises(worqr.UsageError, match=f"concurrency must be a whole number.* at least 1.* not {n!r}"):
        async with mesh.join(concurrency=n):
            pytest.fail("it must not join")
    async with mesh.join() as peer:
        with pytest.raises(worqr.UsageError, match=f"concurrency must be a whole number.* at least 1.* not {n!r}"):
            peer.set_concurrency(n)
        if n is not None:
            with pytest.raises(worqr.UsageError, match=f"concurrency of serve.*must be a whole number.*{n!r}"):
                await peer.serve("Q1", Runs(), concurrency=n)
