"""Every task to exactly one peer, in order, without polling, without leaving anything behind."""

from __future__ import annotations

import random
import time
from collections import Counter
from contextlib import AsyncExitStack
from functools import partial

import pytest
import trio

import worqr
from tests.peer.conftest import NewMesh
from tests.peer.tools import Held, Runs, eventually, serving, spying, until
from tests.support.leaks import dump
from tests.support.patience import PATIENCE
from tests.support.servers import Server
from worqr.peer import consumer_runner


def numbers(n: int, start: int = 0) -> list[bytes]:
    return [b"%d" % i for i in range(start, start + n)]


async def test_tasks_run_in_the_order_of_enqueueing(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    runs = Runs()
    async with mesh.connect(), serving(other, "Q1", runs, room=1):
        q = mesh.queue("Q1")
        assert await q.enqueue(*numbers(100)) == 100
        for task in numbers(100, 100):
            assert await q.enqueue(task) == 1
        assert await runs.wait(200) == numbers(200)


async def test_a_batch_is_started_in_the_order_of_the_queue(mesh: worqr.Mesh) -> None:
    held = Held()
    async with mesh.connect():
        await mesh.queue("Q1").enqueue(*numbers(50))
        async with serving(mesh, "Q1", held, room=50):
            await held.wait(50)
            by_fence = sorted(held.contexts, key=lambda context: context.fence)
            assert [context.task for context in by_fence] == numbers(50)
            held.gate.set()


async def test_fifty_peers_get_each_task_once(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    runs, at_work, all_at_work = Runs(), set[str](), trio.Event()

    async def handler(task: bytes) -> None:
        runs.begin(task)
        if int(task) < 500:
            await trio.sleep(random.random() / 500)
            return
        at_work.add(worqr.current()._run.registration.name)
        if len(at_work) == 50:
            all_at_work.set()
        await all_at_work.wait()

    async with mesh.connect(), AsyncExitStack() as stack:
        await mesh.queue("Q1").enqueue(*numbers(500))
        for _ in range(50):
            await stack.enter_async_context(serving(mesh, "Q1", handler, room=3))
        await runs.wait(500)
        await eventually(partial(hungry, server, prefix), 50)
        await mesh.queue("Q1").enqueue(*numbers(500, 500))  # wakes some, and those the others
        await runs.wait(1000)
        await eventually(mesh.queue("Q1").running, [])
        assert Counter(runs.tasks) == Counter(numbers(1000))
        assert (await mesh.queue("Q1").info()).counts == {"enqueued": 1000, "claimed": 1000, "finished": 1000}


@pytest.mark.usefixtures("without_scans")
async def test_an_idle_peer_is_told_of_work_and_does_not_poll(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    runs = Runs()
    async with mesh.connect(), serving(mesh, "Q1", runs), serving(mesh, "Q1", runs):
        await eventually(partial(hungry, server, prefix), 2)
        with spying(server, prefix) as spy:
            for _ in range(3):  # a machine that stands still makes connections anew, once
                await trio.sleep(1.5)
                if (polls := spy.calls()["start_tasks"]) == 0:
                    break
            assert polls == 0
            await mesh.queue("Q1").enqueue(b"a")
            await runs.wait(1)
            await until(lambda: all(context._run.settled for context in runs.contexts))
            await eventually(mesh.queue("Q1").running, [])
            calls = spy.calls()
            assert (calls["enqueue"], calls["finish_tasks"]) == (1, 1)
            assert calls["start_tasks"] <= 1  # 0: the end of a short run takes the worker back among those that wait
        await eventually(partial(hungry, server, prefix), 2)


async def hungry(server: Server, prefix: str) -> int:
    return server.look.scard(f"{prefix}:{{Q1}}:hungry")


async def test_an_enqueue_wakes_only_whom_it_takes(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    held = Held()
    async with mesh.connect(), AsyncExitStack() as stack:
        for _ in range(20):
            await stack.enter_async_context(serving(mesh, "Q1", held, room=1))
        await eventually(partial(hungry, server, prefix), 20)
        with spying(server, prefix) as spy:
            await mesh.queue("Q1").enqueue(b"a")
            await held.wait(1)
            assert spy.published(spy.seen(), ":wake:") == 1
            await mesh.queue("Q1").enqueue(b"b", b"c", b"d")
            await held.wait(4)
            lines = spy.seen()
        assert 3 <= spy.published(lines, ":wake:") <= 5  # a start that leaves tasks behind wakes one more
        held.gate.set()
        await held.wait_for(lambda: len(held.done) == 4)


async def test_requests_per_task_do_not_grow_with_the_number_of_peers(
    mesh: worqr.Mesh, server: Server, prefix: str
) -> None:
    runs = Runs()
    async with mesh.connect(), AsyncExitStack() as stack:
        for _ in range(30):
            await stack.enter_async_context(serving(mesh, "Q1", runs, room=1))
        await eventually(partial(hungry, server, prefix), 30)
        with spying(server, prefix) as spy:
            for n, task in enumerate(numbers(60)):
                await mesh.queue("Q1").enqueue(task)
                await runs.wait(n + 1)
            await mesh.queue("Q1").enqueue(*numbers(60, 60))
            await runs.wait(120)
            await eventually(mesh.queue("Q1").running, [])
            calls = spy.calls()
    for chore in (
        "keep_worker_alive",
        "look_at_workers",
        "list_running",
        "inspect",
        "list_queues",
        "post_scan",
        "PING",
    ):
        calls.pop(chore, None)
    assert calls.total() / 120 < 5, calls


async def test_an_idle_peer_costs_about_a_request_a_second(new_mesh: NewMesh, server: Server, prefix: str) -> None:
    async with AsyncExitStack() as stack:
        for _ in range(10):
            await stack.enter_async_context(serving(new_mesh(), "Q1", Runs()))
        await eventually(partial(hungry, server, prefix), 10)
        # A machine that stands still for a second makes connections anew, once; a peer that polls always does.
        for _ in range(3):
            with spying(server, prefix) as spy:
                start = time.monotonic()
                await trio.sleep(3)
                calls = spy.calls()
                took = time.monotonic() - start
            chores = {"look_at_workers", "list_queues", "inspect", "post_scan"}
            leading = sum(calls.pop(chore, 0) for chore in chores)
            if leading / took < 6 and calls.total() / 10 / took <= 1.5:
                break
        else:
            raise AssertionError(f"{leading} and {calls} in {took:.1f} s")


async def test_what_runs_goes_back_to_the_front_in_its_old_order_when_its_peer_leaves(
    mesh: worqr.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer_runner, "UNWIND_WITHIN", PATIENCE)  # nobody takes so long, whatever the machine does
    held, runs = Held(), Runs()

    async def handler(task: bytes) -> None:
        try:
            await held(task)
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(random.random() / 20)  # they unwind in whatever order

    async with mesh.connect():
        q = mesh.queue("Q1")
        await q.enqueue(*numbers(20))
        async with serving(mesh, "Q1", handler, room=10):
            await held.wait(10)
        assert held.cancelled and {reason for _, reason in held.cancelled} == {"leaving"}
        assert (await q.tasks())[::-1] == numbers(20)
        async with serving(mesh, "Q1", runs, room=1):
            assert await runs.wait(20) == numbers(20)
            assert {context.attempt for context in runs.contexts} == {1}
        assert "stalled" not in (await q.info()).counts


async def test_a_slow_unwinding_handler_does_not_keep_the_others_tasks(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    held, runs, slow = Held(), Runs(), trio.Event()

    async def handler(task: bytes) -> None:
        try:
            await held(task)
        finally:
            if task == b"0":
                with trio.CancelScope(shield=True):
                    await slow.wait()

    async with other.connect(), trio.open_nursery() as nursery:
        q = other.queue("Q1")
        await q.enqueue(*numbers(5))
        async with mesh.join() as leaver:
            await nursery.start(partial(leaver.serve, "Q1", handler))
            await held.wait(5)
            async with serving(other, "Q1", runs, room=1):
                nursery.start_soon(leaver.drain, 0)
                assert await runs.wait(4) == numbers(4, 1)
                assert await q.count() == 0
                assert len(await q.running()) == 1  # it runs still, so nobody else may have it
                slow.set()
                assert await runs.wait(5) == [*numbers(4, 1), b"0"]


async def test_nothing_but_the_registry_is_left_after_a_thousand_tasks(
    mesh: worqr.Mesh, server: Server, prefix: str
) -> None:
    runs = Runs()

    def lasting() -> set[bytes]:
        return {key for key, entry in dump(server.look, prefix).items() if not entry.expires}

    async with mesh.connect(), serving(mesh, "Q1", runs):
        await eventually(partial(hungry, server, prefix), 1)
        before = lasting()
        await mesh.queue("Q1").enqueue(*numbers(1000))
        await runs.wait(1000)
        await eventually(partial(hungry, server, prefix), 1)
        await eventually(mesh.queue("Q1").running, [])
        assert lasting() == before
        assert len(before) == 6, before  # Workers, WorkMap, version, and of the queue workers, policy, hungry


async def test_two_prefixes_never_see_each_other(new_mesh: NewMesh, prefix: str, server: Server) -> None:
    mesh, stranger = new_mesh(), new_mesh(prefix=f"{prefix}x")
    ours, theirs = Runs(), Runs()
    async with mesh.connect(), stranger.connect(), serving(mesh, "Q1", ours), serving(stranger, "Q1", theirs):
        await mesh.queue("Q1").enqueue(b"ours")
        await stranger.queue("Q1").enqueue(b"theirs")
        assert await ours.wait(1) == [b"ours"]
        assert await theirs.wait(1) == [b"theirs"]
        assert len(await mesh.workers()) == len(await stranger.workers()) == 1
    left = [key for key in dump(server.client(), f"{prefix}x") if not key.endswith((b":version", b":counts"))]
    server.client().delete(f"{{{prefix}x}}:version")
    assert [key for key in left if server.client().ttl(key) < 0] == []


@pytest.mark.usefixtures("without_scans")
async def test_a_task_of_a_foreign_producer_is_run(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    await run_from_afar(mesh, server, prefix, told=True)


async def test_a_task_that_nobody_was_told_of_is_found_by_the_scan(
    mesh: worqr.Mesh, server: Server, prefix: str
) -> None:
    await run_from_afar(mesh, server, prefix, told=False)


async def run_from_afar(mesh: worqr.Mesh, server: Server, prefix: str, *, told: bool) -> None:
    runs = Runs()
    async with mesh.connect(), serving(mesh, "Q1", runs), serving(mesh, "Q1", runs):
        await eventually(partial(hungry, server, prefix), 2)
        client = server.client()
        client.lpush(f"{prefix}:{{Q1}}", b"from afar")
        if told:
            client.publish(f"{prefix}:{{Q1}}", "1")
        assert await runs.wait(1) == [b"from afar"]
        await eventually(mesh.queue("Q1").running, [])
        assert runs.tasks == [b"from afar"]


@pytest.mark.usefixtures("without_scans")
async def test_a_peer_that_joins_finds_what_waits_already(mesh: worqr.Mesh) -> None:
    runs = Runs()
    async with mesh.connect():
        await mesh.queue("Q1").enqueue(*numbers(3))
        async with serving(mesh, "Q1", runs):
            await runs.wait(3)


@pytest.mark.usefixtures("without_scans")
async def test_a_wake_up_without_room_is_handed_on(
    mesh: worqr.Mesh, other: worqr.Mesh, server: Server, prefix: str
) -> None:
    busy, held = Held(), Held()
    async with mesh.connect(), mesh.join(concurrency=1) as full, trio.open_nursery() as nursery:
        await nursery.start(partial(full.serve, "Q1", held))
        await nursery.start(partial(full.serve, "Q2", busy))
        await eventually(partial(hungry, server, prefix), 1)
        await mesh.queue("Q2").enqueue(b"fills it")
        await busy.wait(1)
        async with serving(other, "Q1", held):
            await eventually(partial(hungry, server, prefix), 2)
            await mesh.queue("Q1").enqueue(b"a", b"b")
            await held.wait(2)
            assert {context._run.registration.name for context in held.contexts} != {full.id}
            held.gate.set()
            await held.wait_for(lambda: len(held.done) == 2)
        nursery.cancel_scope.cancel()
    async with mesh.connect():
        await mesh.queue("Q2").delete()
