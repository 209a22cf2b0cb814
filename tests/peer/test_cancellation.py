"""A caller that is cancelled: before, while, and just when its answer comes. It ends at once, nothing is lost or doubled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing

import worqr
from tests.peer.conftest import NewMesh
from tests.peer.tools import Held, Runs, at_most, eventually, serving, spying, until
from tests.support.patience import PATIENCE
from tests.support.proxy import FaultProxy, sent_as
from tests.support.servers import Server


@contextmanager
def intact() -> Iterator[None]:
    """Fail if the block leaves a nursery or a cancel scope of this task open, or closes one that is not its own."""
    task: Any = trio.lowlevel.current_task()
    nurseries, status = list(task.child_nurseries), task._cancel_status
    yield
    assert list(task.child_nurseries) == nurseries
    assert task._cancel_status is status


class World:
    """What the calls below need: a mesh, a queue with tasks, a peer, claims."""

    def __init__(self, mesh: worqr.Mesh, peer: worqr.Peer, claims: worqr.Claims) -> None:
        self.mesh = mesh
        self.q = mesh.queue("Q1")
        self.peer = peer
        self.claims = claims

    async def claim(self) -> worqr.Claim:
        await self.mesh.queue("Q2").enqueue(b"claimed")
        return (await self.claims.take(1))[0]


@asynccontextmanager
async def world(mesh: worqr.Mesh) -> AsyncGenerator[World]:
    async with mesh.join(concurrency=200) as peer, peer.work("Q2") as claims:
        yield World(mesh, peer, claims)
        with trio.CancelScope(shield=True):
            await mesh.queue("Q1").delete()
            await mesh.queue("Q1").resume()


Call = Callable[[World], Awaitable[Any]]

CALLS: dict[str, tuple[str, Call]] = {
    "enqueue": ("enqueue", lambda w: w.q.enqueue(b"a")),
    "count": ("list_tasks", lambda w: w.q.count()),
    "peek": ("list_tasks", lambda w: w.q.peek()),
    "tasks": ("list_tasks", lambda w: w.q.tasks()),
    "running": ("list_running", lambda w: w.q.running()),
    "jobs": ("list_jobs", lambda w: w.q.jobs()),
    "info": ("inspect", lambda w: w.q.info()),
    "cancel": ("cancel_task", lambda w: w.q.cancel(b"zzz")),
    "cancel and wait": ("cancel_task", lambda w: w.q.cancel(b"zzz", wait=1)),
    "cancel_all": ("cancel_all", lambda w: w.q.cancel_all()),
    "pause": ("pause", lambda w: w.q.pause()),
    "resume": ("resume", lambda w: w.q.resume()),
    "delete": ("delete_queue", lambda w: w.q.delete()),
    "queues": ("list_queues", lambda w: w.mesh.queues()),
    "workers": ("list_workers", lambda w: w.mesh.workers()),
    "serve": ("map_work", lambda w: w.peer.serve("Q3", Runs())),
}
SETTLES: dict[str, tuple[str, Callable[[worqr.Claim], Awaitable[Any]]]] = {
    "finish": ("finish_tasks", lambda claim: claim.finish()),
    "stop": ("stop_tasks", lambda claim: claim.stop()),
    "retry": ("retry_task", lambda claim: claim.retry()),
    "fail": ("fail_task", lambda claim: claim.fail("why")),
}
any_call = pytest.mark.parametrize(("name", "call"), CALLS.values(), ids=CALLS)
any_settle = pytest.mark.parametrize(("name", "settle"), SETTLES.values(), ids=SETTLES)
SET_ASIDE = pytest.mark.leaves("{Q2}:failed", "{Q2}:aside*", "{Q2}:job:*", "{Q2}:twins:*")


# Before


@any_call
@pytest.mark.usefixtures("without_scans")
async def test_a_call_of_a_cancelled_caller_sends_nothing(
    mesh: worqr.Mesh, server: Server, prefix: str, name: str, call: Call
) -> None:
    async with world(mesh) as w:
        with spying(server, prefix) as spy:
            with intact(), trio.CancelScope() as scope:
                scope.cancel()
                await call(w)
            assert scope.cancelled_caught
            await w.q.count()  # whatever the call has sent was sent before this
            calls = spy.calls()
            assert calls[name] == (1 if name == "list_tasks" else 0)


@SET_ASIDE
@any_settle
async def test_a_settle_of_a_cancelled_caller_is_sent_all_the_same(
    mesh: worqr.Mesh, name: str, settle: Callable[[worqr.Claim], Awaitable[Any]]
) -> None:
    # The work was done: what it came to is posted before anything is waited for.
    async with world(mesh) as w:
        claim = await w.claim()
        with intact(), trio.CancelScope() as scope:
            scope.cancel()
            await settle(claim)
        assert scope.cancelled_caught
        await eventually(mesh.queue("Q2").running, [])
        with pytest.raises(worqr.ClaimSettled):
            await claim.finish()
        await mesh.queue("Q2").delete()


async def test_waits_of_a_cancelled_caller_end_at_once(mesh: worqr.Mesh) -> None:
    async with world(mesh) as w:
        claim = await w.claim()
        await mesh.queue("Q2").enqueue(b"there")
        waits: list[Callable[[], Awaitable[Any]]] = [
            w.peer.wait,
            partial(w.claims.take, 1),
            partial(w.claims.take, 1, within=1),
            w.claims.__anext__,
            claim.wait_cancelled,
            partial(w.claims.finish, []),
        ]
        for wait in waits:
            with intact(), trio.CancelScope() as scope:
                scope.cancel()
                await wait()
            assert scope.cancelled_caught, wait
        assert [c.task for c in await w.claims.take(5)] == [b"there"]


async def test_every_call_is_a_checkpoint(mesh: worqr.Mesh) -> None:
    async with world(mesh) as w:
        await mesh.queue("Q2").enqueue(*[b"%d" % i for i in range(10)])
        for call in [call for name, call in CALLS.values() if name != "map_work"]:
            with trio.testing.assert_checkpoints():
                await call(w)
        with trio.testing.assert_checkpoints():
            claim = await anext(w.claims)
        with trio.testing.assert_checkpoints():
            await claim.finish()
        with trio.testing.assert_checkpoints():
            batch = await w.claims.take(3)
        with trio.testing.assert_checkpoints():
            await w.claims.finish(batch)
        with trio.testing.assert_checkpoints():
            await w.claims.finish([])
        with trio.testing.assert_checkpoints():
            await w.q.enqueue()
        await mesh.queue("Q2").delete()
        with trio.testing.assert_checkpoints():
            await w.peer.drain()
        with trio.testing.assert_checkpoints():
            await w.peer.drain()
        with trio.testing.assert_checkpoints():
            await w.peer.wait()


# While


@any_call
async def test_a_call_that_waits_for_its_answer_ends_at_once_and_harms_no_other(
    new_mesh: NewMesh, proxy: FaultProxy, name: str, call: Call
) -> None:
    async with world(new_mesh(url=proxy.url)) as w:
        held = proxy.hold_reply(matching=sent_as(name), on="data")
        ended = trio.Event()
        scope = trio.CancelScope()

        async def run() -> None:
            with intact(), scope:
                await call(w)
            ended.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await held.wait_executed()
            scope.cancel()
            async with at_most():
                if name == "map_work":
                    held.release()  # leaving what was being entered needs the connection
                await ended.wait()
            assert scope.cancelled_caught
            held.release()
        async with at_most():
            await w.q.resume()
            assert await w.q.enqueue(b"after") == 1
            assert await w.q.peek() is not None


@SET_ASIDE
@any_settle
async def test_a_settle_that_waits_for_its_answer_takes_effect_once(
    new_mesh: NewMesh, proxy: FaultProxy, name: str, settle: Callable[[worqr.Claim], Awaitable[Any]]
) -> None:
    mesh = new_mesh(url=proxy.url)
    async with world(mesh) as w:
        claim = await w.claim()
        held = proxy.hold_reply(matching=sent_as(name), on="data")
        scope = trio.CancelScope()
        async with trio.open_nursery() as nursery:

            async def run() -> None:
                with intact(), scope:
                    await settle(claim)

            nursery.start_soon(run)
            await held.wait_executed()
            scope.cancel()
        assert scope.cancelled_caught
        held.release()
        await eventually(mesh.queue("Q2").running, [])
        assert w.peer._engine.scheduler.running == 0
        counts = (await mesh.queue("Q2").info()).counts
        assert counts["claimed"] == 1
        assert counts.get("finished", 0) == (name == "finish_tasks")
        await mesh.queue("Q2").delete()


async def test_an_enqueue_that_is_cancelled_anywhere_is_stored_once_or_not_at_all(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        q = mesh.queue("Q1")
        returned = 0
        for n in range(60):
            with trio.move_on_after(n / 30_000):
                returned += await q.enqueue(b"%d" % n)
        stored = await q.tasks()
        assert returned <= len(stored) <= 60
        assert len(set(stored)) == len(stored)


async def test_a_cancelled_cancel_unsubscribes(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    held = Held()

    async def stubborn(task: bytes) -> None:
        with trio.CancelScope(shield=True):
            await held(task)

    async with mesh.connect(), serving(mesh, "Q1", stubborn):
        q = mesh.queue("Q1")
        await q.enqueue(b"a")
        await held.wait(1)
        with intact(), trio.move_on_after(0.1) as scope:
            await q.cancel(b"a", wait=30)
        assert scope.cancelled_caught
        channel = f"{prefix}:{{Q1}}_cancelled"
        await until(lambda: server.look.pubsub_numsub(channel)[0][1] == 0)
        held.gate.set()
        await eventually(q.running, [])


async def test_a_cancelled_listener_unsubscribes(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    async with mesh.connect():
        with intact(), trio.move_on_after(0.1) as scope:
            async with mesh.queue("Q1").events() as events:
                await anext(events)
        assert scope.cancelled_caught
        await until(lambda: server.look.pubsub_numsub(f"{prefix}:{{Q1}}:events")[0][1] == 0)


async def test_connecting_that_is_cancelled_leaves_nothing(server: Server, prefix: str, own_server: Server) -> None:
    own_server.pause()
    before = threading.active_count()
    mesh = worqr.Mesh(own_server.url, prefix=prefix)
    with intact(), trio.move_on_after(0.1) as scope:
        async with mesh.connect():
            pytest.fail("it cannot be connected")
    assert scope.cancelled_caught
    own_server.resume()
    await until(lambda: threading.active_count() <= before)
    async with mesh.connect():
        assert await mesh.queue("Q1").count() == 0
    with intact(), trio.CancelScope() as scope:
        scope.cancel()
        async with mesh.connect():
            pytest.fail("it was cancelled before")
    await until(lambda: threading.active_count() <= before)


async def test_a_connect_that_is_cancelled_does_not_disconnect_the_others(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        with trio.CancelScope() as scope:
            scope.cancel()
            async with mesh.connect():
                pytest.fail("it was cancelled before")
        assert await mesh.queue("Q1").count() == 0


async def test_joining_that_is_cancelled_anywhere_leaves_no_worker(mesh: worqr.Mesh) -> None:
    joined, seconds = 0, 0.0
    async with mesh.connect():
        while joined <= 5:  # however long it takes here, it was cancelled at many points of its way
            seconds += max(1 / 3000, seconds / 10)
            with intact(), trio.move_on_after(seconds):
                async with mesh.join():
                    joined += 1
                    await trio.sleep_forever()
        await eventually(mesh.workers, [])


async def test_serving_that_is_cancelled_anywhere_leaves_its_queue(mesh: worqr.Mesh) -> None:
    runs = Runs()
    async with mesh.connect(), mesh.join() as peer:
        q = mesh.queue("Q1")
        for n in range(30):
            await q.enqueue(b"%d" % n)
            with intact(), trio.move_on_after(n / 3000):
                await peer.serve("Q1", runs)
        await q.enqueue(b"last")
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(peer.serve, "Q1", runs))
            await runs.wait_for(lambda: b"last" in runs.tasks)
            await eventually(q.running, [])
            nursery.cancel_scope.cancel()
        assert sorted(runs.tasks) == sorted([*[b"%d" % n for n in range(30)], b"last"])
        assert (await q.info()).workers == 0


async def test_working_by_hand_that_is_cancelled_anywhere_loses_no_task(mesh: worqr.Mesh) -> None:
    taken: list[bytes] = []
    async with mesh.connect(), mesh.join() as peer:
        q = mesh.queue("Q1")
        await q.enqueue(*[b"%d" % n for n in range(40)])
        for n in range(40):
            with intact(), trio.move_on_after(n / 3000):
                async with peer.work("Q1") as claims:
                    async for claim in claims:
                        async with claim:
                            await trio.lowlevel.checkpoint()
                            taken.append(claim.task)
                        if n % 3 == 0:
                            break
        counts = (await q.info()).counts
        assert counts.get("finished", 0) + await q.count() == 40
        assert counts.get("finished", 0) <= len(taken)
        await q.delete()


async def test_a_body_of_join_that_is_cancelled_again_while_it_leaves_still_leaves(
    mesh: worqr.Mesh, other: worqr.Mesh
) -> None:
    held, slow = Held(), trio.Event()

    async def handler(task: bytes) -> None:
        try:
            await held(task)
        finally:
            with trio.CancelScope(shield=True):
                await slow.wait()

    async with other.connect(), trio.open_nursery() as nursery:
        q = other.queue("Q1")
        with intact(), trio.CancelScope() as outer, trio.CancelScope() as inner:
            async with mesh.join(grace=20) as peer:
                nursery.start_soon(peer.serve, "Q1", handler)
                await q.enqueue(b"a")
                await held.wait(1)
                nursery.start_soon(let_go_later, outer, slow)
                inner.cancel()
                await trio.sleep_forever()
        assert await q.tasks() == [b"a"]
        assert await other.workers() == []


async def let_go_later(scope: trio.CancelScope, slow: trio.Event) -> None:
    await trio.sleep(0.1)
    scope.cancel()
    await trio.sleep(0.1)
    slow.set()


# Claims' blocks and Trio's order


async def test_a_claims_block_nests_as_a_scope_does(mesh: worqr.Mesh) -> None:
    async with world(mesh) as w:
        with intact():
            a, b = await w.claim(), await w.claim()
            with trio.CancelScope() as outer:
                async with a, trio.open_nursery() as nursery:
                    nursery.start_soon(trio.sleep_forever)
                    async with b:
                        with trio.move_on_after(0.01):
                            await trio.sleep_forever()
                    nursery.cancel_scope.cancel()
            assert not outer.cancelled_caught
        assert (await mesh.queue("Q2").info()).counts["finished"] == 2


async def test_a_cancel_of_the_outer_claim_ends_both_blocks(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    async with other.connect(), world(mesh) as w:
        await mesh.queue("Q2").enqueue(b"outer", b"inner")
        outer, inner = await w.claims.take(2)
        with intact():
            async with outer:
                async with inner:
                    await other.queue("Q2").cancel(b"outer")
                    async with at_most():
                        await trio.sleep_forever()
                pytest.fail("the outer block was cancelled")
        await eventually(mesh.queue("Q2").tasks, [b"inner"])  # it was given back, uncounted
        assert (await mesh.queue("Q2").info()).counts["cancelled"] == 1
        await mesh.queue("Q2").delete()


async def test_a_scope_left_open_in_a_claims_block_is_told(mesh: worqr.Mesh) -> None:
    async with world(mesh) as w:
        claim = await w.claim()
        leaked = trio.CancelScope()
        with pytest.raises(RuntimeError, match="stack corrupted"):
            async with claim:
                leaked.__enter__()
        await mesh.queue("Q2").delete()


@any_call
async def test_a_call_leaves_trios_order_intact(mesh: worqr.Mesh, name: str, call: Call) -> None:
    async with world(mesh) as w:
        with intact(), trio.move_on_after(0.05):
            await call(w)
        with intact():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(call, w)
                await trio.sleep(0.01)
                nursery.cancel_scope.cancel()


def wait_for_result(mesh: worqr.Mesh) -> None:
    worqr.sync(worqr.sync(mesh.queue("Q2").dispatch, b"child", result_ttl=60).result)


def wait_for_batch(mesh: worqr.Mesh) -> None:
    with worqr.sync_block(mesh.batch, queue="Q2") as batch:
        worqr.sync(batch.dispatch, mesh.call("Q2"))
    worqr.sync(batch.wait)


def wait_for_room(mesh: worqr.Mesh) -> None:
    for task in b"a", b"b":
        worqr.sync(mesh.queue("Q2").enqueue, task, max_length=1, wait=3600)


def wait_for_an_end(mesh: worqr.Mesh) -> None:
    job = worqr.sync(mesh.queue("Q3").dispatch, b"child")
    while worqr.sync(job.status).progress is None:  # a run that has not begun would end at once
        worqr.current().check_cancelled()
    worqr.sync(job.cancel, wait=3600)


def wait_for_event(mesh: worqr.Mesh) -> None:
    with worqr.sync_block(mesh.queue("Q2").events) as events:
        next(events)


WAITS = [wait_for_result, wait_for_batch, wait_for_room, wait_for_an_end, wait_for_event]
PLACES = ["thread", "list", "thread of a task on Trio", "thread of a task on asyncio"]


@pytest.mark.leaves("{Q2}:*", "{Q3}:*", "{Q4}:*")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("wait", WAITS)
async def test_a_thread_that_waits_for_the_server_ends_with_its_run(
    mesh: worqr.Mesh, other: worqr.Mesh, wait: Callable[[worqr.Mesh], None], place: str
) -> None:
    begun, stubborn, ends = threading.Event(), threading.Event(), list[type[BaseException]]()

    def never_ending(_: bytes) -> None:
        worqr.current().progress(0.5)
        stubborn.wait()

    def handler(_: Any) -> None:
        begun.set()
        try:
            wait(other)
        except BaseException as error:
            ends.append(type(error))
            worqr.sync(other.queue("Q4").enqueue, b"cleaned up")  # a request is no wait
            raise

    async def on_trio(task: bytes) -> None:
        await trio.to_thread.run_sync(handler, task)

    async def on_asyncio(task: bytes) -> None:
        await asyncio.to_thread(handler, task)

    async with mesh.join(grace=60) as peer, trio.open_nursery() as nursery:
        await nursery.start(peer.serve, "Q3", never_ending)
        if place == "list":
            await nursery.start(partial(peer.serve_list, "Q1", handler, batch_size=2))
        elif place == "thread of a task on asyncio":
            await nursery.start(partial(peer.serve, "Q1", on_asyncio, runs_in="asyncio"))
        else:
            await nursery.start(peer.serve, "Q1", handler if place == "thread" else on_trio)
        job = await mesh.queue("Q1").dispatch(b"parent", result_ttl=60)
        await trio.to_thread.run_sync(begun.wait)
        async with at_most():
            assert (await job.cancel(wait=60)).acknowledged == 1
        await until(lambda: bool(ends))
        assert ends == [asyncio.CancelledError if place == "thread of a task on asyncio" else trio.Cancelled]
        await eventually(mesh.queue("Q4").count, 1)
        stubborn.set()
        nursery.cancel_scope.cancel()
    async with mesh.connect():
        await mesh.queue("Q4").delete()
        await mesh.queue("Q2").cancel_all()


async def test_a_worker_leaves_at_once_if_its_thread_waits_for_a_result(
    mesh: worqr.Mesh, other: worqr.Mesh, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("engine", "consumer_runner"):
        monkeypatch.setattr(f"worqr.peer.{module}.DETACH_AFTER", PATIENCE)
    begun = threading.Event()

    def parent(_task: bytes) -> None:
        begun.set()
        wait_for_result(other)

    async with serving(mesh, "Q1", parent, grace=0):
        await mesh.queue("Q1").enqueue(b"parent")
        await trio.to_thread.run_sync(begun.wait)
        left_at = trio.current_time()
    assert trio.current_time() - left_at < PATIENCE / 2
    assert not [record for record in caplog.records if getattr(record, "event", "") == "task.unending"]
    async with mesh.connect():
        await mesh.queue("Q1").cancel_all()
        await mesh.queue("Q2").cancel_all()
