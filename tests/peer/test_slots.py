"""What a handler does to the loop and to Trio's task stays inside: the peer and the other tasks live on."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import trio
import trio.lowlevel
import trio.testing

import worqr
from tests.peer.tools import QUICK, Held, Runs, at_most, eventually, serving, until
from tests.support.patience import PATIENCE
from worqr.peer.consumer import Slots
from worqr.peer.engine import Engine

pytestmark = pytest.mark.one_server

Handler = Callable[[bytes], Awaitable[None]]


# What handlers may do


async def test_a_handler_may_open_nurseries_and_scopes(mesh: worqr.Mesh) -> None:
    runs = Runs()

    async def handler(task: bytes) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            with trio.move_on_after(0.01):
                await trio.sleep_forever()
            nursery.cancel_scope.cancel()
        with trio.CancelScope() as scope:
            scope.cancel()
            await trio.sleep_forever()
        runs.begin(task)

    async with mesh.connect(), serving(mesh, "Q1", handler, room=2) as peer:
        await mesh.queue("Q1").enqueue(*[b"%d" % i for i in range(10)])
        await runs.wait(10)
        await eventually(mesh.queue("Q1").running, [])
        assert (await mesh.queue("Q1").info()).counts["finished"] == 10
        assert len(peer._engine.slots._idle) == 2  # the slots were good for more


async def test_a_child_of_a_handlers_nursery_that_fails_is_a_failure_of_the_handler(mesh: worqr.Mesh) -> None:
    runs = Runs()

    async def child() -> None:
        raise ValueError("in the child")

    async def handler(task: bytes) -> None:
        runs.begin(task)
        if worqr.current().failures == 0:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(child)
                await trio.sleep_forever()

    async with mesh.connect(), serving(mesh, "Q1", handler) as peer:
        await mesh.queue("Q1").enqueue(b"a")
        await runs.wait(2)
        await eventually(mesh.queue("Q1").running, [])
        assert [context.failures for context in runs.contexts] == [0, 1]
        await until(lambda: peer.health().ready)


async def test_a_cancel_reaches_the_children_of_a_handler(mesh: worqr.Mesh) -> None:
    cancelled, begun = [], trio.Event()

    async def child() -> None:
        begun.set()
        try:
            await trio.sleep_forever()
        finally:
            cancelled.append("child")

    async def handler(task: bytes) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(child)

    async with mesh.connect(), serving(mesh, "Q1", handler):
        await mesh.queue("Q1").enqueue(b"a")
        await begun.wait()
        assert await mesh.queue("Q1").cancel(b"a", wait=30) == worqr.CancelCount(0, 1, 1)
        assert cancelled == ["child"]


async def test_a_handler_that_swallows_cancelled_for_a_while_is_waited_for(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    runs, swallowed = Runs(), 0

    async def handler(task: bytes) -> None:
        nonlocal swallowed
        runs.begin(task)
        while swallowed < 3:
            try:
                await trio.sleep_forever()
            except trio.Cancelled:
                swallowed += 1
                time.sleep(0.02)

    async with mesh.connect(), serving(mesh, "Q1", handler):
        await mesh.queue("Q1").enqueue(b"a")
        await runs.wait(1)
        assert await mesh.queue("Q1").cancel(b"a", wait=30) == worqr.CancelCount(0, 1, 1)
        assert swallowed == 3
        assert (await mesh.queue("Q1").info()).counts["cancelled"] == 1  # although it returned


@pytest.mark.parametrize("raised", [ValueError, KeyError, SystemExit])
async def test_whatever_a_cancelled_handler_raises_it_is_cancelled(
    mesh: worqr.Mesh, raised: type[BaseException]
) -> None:
    runs = Runs()

    async def handler(task: bytes) -> None:
        runs.begin(task)
        try:
            await trio.sleep_forever()
        finally:
            raise raised("on the way out")

    async with mesh.connect(), serving(mesh, "Q1", handler) as peer:
        await mesh.queue("Q1").enqueue(b"a")
        await runs.wait(1)
        assert await mesh.queue("Q1").cancel(b"a", wait=30) == worqr.CancelCount(0, 1, 1)
        info = await mesh.queue("Q1").info()
        assert info.counts == {"enqueued": 1, "claimed": 1, "cancelled": 1}
        await until(lambda: peer.health().ready)


async def test_a_cancel_of_one_run_does_not_touch_the_next_in_its_slot(mesh: worqr.Mesh) -> None:
    held, seen = Held(), []

    async def handler(task: bytes) -> None:
        if task == b"victim":
            await held(task)
        else:
            await trio.sleep(0.01)
            seen.append((worqr.current().cancel_reason, trio.current_effective_deadline()))

    async with mesh.connect(), serving(mesh, "Q1", handler, room=1) as peer:
        q = mesh.queue("Q1")
        for _ in range(3):
            n = len(held.tasks)
            await q.enqueue(b"victim", b"next")
            await held.wait(n + 1)
            assert (await q.cancel(b"victim", wait=30)).acknowledged == 1
            await until(lambda n=n: len(seen) == n + 1)  # type: ignore[misc]
        assert seen == [(None, float("inf"))] * 3
        await eventually(q.running, [])
        assert peer._engine.scheduler.running == 0


# What handlers should not do


async def leak_scope(task: bytes) -> None:
    trio.CancelScope().__enter__()


async def leak_scope_with_a_deadline(task: bytes) -> None:
    trio.CancelScope(deadline=trio.current_time() + 0.05).__enter__()


async def leak_cancelled_scope(task: bytes) -> None:
    trio.CancelScope().__enter__().cancel()


async def leak_scope_and_raise(task: bytes) -> None:
    trio.CancelScope().__enter__()
    if worqr.current().failures == 0:
        raise ValueError("and a scope left open")


async def leak_nursery(task: bytes) -> None:
    nursery = await trio.open_nursery().__aenter__()
    nursery.start_soon(trio.sleep_forever)


async def leak_nursery_with_a_child_that_fails(task: bytes) -> None:
    async def child() -> None:
        await trio.sleep(0.02)
        raise ValueError("in a leaked nursery")

    nursery = await trio.open_nursery().__aenter__()
    nursery.start_soon(child)


async def numbers() -> AsyncIterator[int]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep_forever)
        yield 1


generators: list[Any] = []


async def leak_nursery_in_a_generator(task: bytes) -> None:
    generator = numbers()
    generators.append(generator)
    await anext(generator)


async def leak_scope_in_a_generator(task: bytes) -> None:
    async def scoped() -> AsyncIterator[int]:
        with trio.move_on_after(0.05):
            yield 1

    generator = scoped()
    generators.append(generator)
    await anext(generator)


async def close_our_scope(task: bytes) -> None:
    status: Any = trio.lowlevel.current_task()._cancel_status
    status._scope.__exit__(None, None, None)


LEAKS: list[Handler] = [
    leak_scope,
    leak_scope_with_a_deadline,
    leak_cancelled_scope,
    leak_scope_and_raise,
    leak_nursery,
    leak_nursery_with_a_child_that_fails,
    leak_nursery_in_a_generator,
    leak_scope_in_a_generator,
    close_our_scope,
]


@pytest.mark.filterwarnings("ignore")  # Python and Trio complain about what these handlers do
@pytest.mark.parametrize("leak", LEAKS, ids=lambda leak: leak.__name__)
async def test_a_handler_that_leaves_something_open_harms_nobody(
    mesh: worqr.Mesh, leak: Handler, caplog: pytest.LogCaptureFixture
) -> None:
    held, after = Held(), Runs()

    async def handler(task: bytes) -> None:
        if task == b"leak":
            await leak(task)
        elif task == b"long":
            await held(task)
        else:
            await trio.sleep(0.001)
            after.begin(task)
            assert worqr.current().cancel_reason is None

    async with mesh.connect(), serving(mesh, "Q1", handler, room=5, retry=QUICK) as peer:
        q = mesh.queue("Q1")
        await q.enqueue(b"long")
        await held.wait(1)
        for n in range(3):
            await q.enqueue(b"leak", b"leak", *[b"%d" % i for i in range(10)])
            await after.wait(10 * (n + 1))
            await eventually(lambda: running(q), 1)
        await trio.sleep(0.1)  # a leaked deadline passes
        await q.enqueue(b"last")
        await after.wait(31)
        await eventually(lambda: running(q), 1)
        assert held.cancelled == []
        counts = (await q.info()).counts
        assert counts["finished"] == 37, counts
        assert counts.get("retried", 0) == (6 if leak is leak_scope_and_raise else 0)
        assert peer._engine.scheduler.running == 1
        await until(lambda: peer.health().ready)
        held.gate.set()
        await held.wait_for(lambda: held.done == [b"long"])
        await eventually(q.running, [])
    for record in caplog.records:
        if record.__dict__.get("event") == "slot.corrupted":
            assert record.getMessage().startswith("slot.corrupted: queue 'Q1', job @"), record.getMessage()
            assert "left a nursery or a cancel scope open" in record.getMessage()
    for generator in generators:
        try:
            await generator.aclose()
        except BaseException:
            pass
    generators.clear()
    gc.collect()


async def running(q: worqr.Queue) -> int:
    return (await q.info()).running


async def test_a_handler_that_blocks_the_loop_costs_nobody_a_task(
    mesh: worqr.Mesh, other: worqr.Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    runs = Runs()

    async def blocks_the_loop(task: bytes) -> None:
        runs.begin(task)
        if task == b"block":
            time.sleep(5)

    async with mesh.connect(), serving(mesh, "Q1", blocks_the_loop) as peer:
        q, worker = mesh.queue("Q1"), peer.id
        await q.enqueue(b"a", b"block", b"b")
        await runs.wait(3)
        await q.enqueue(b"c")
        await runs.wait(4)
        await eventually(q.running, [])
        assert peer.id == worker
        await until(lambda: peer.health().ready)
        counts = (await q.info()).counts
        assert (counts["finished"], counts.get("stalled", 0)) == (4, 0)
        await until(lambda: any("loop.turns" in record.getMessage() for record in caplog.records))
    blocked = [record.getMessage() for record in caplog.records if "loop.blocked" in record.getMessage()]
    assert sum("blocks_the_loop" in line and "'Q1'" in line for line in blocked) == 1


# Ctrl-C


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


async def in_child() -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sleep_and_press)
        await trio.sleep_forever()


async def sleep_and_press() -> None:
    await trio.lowlevel.checkpoint()
    raise KeyboardInterrupt


async def directly() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("press", [directly, in_child])
async def test_ctrl_c_in_a_handler_ends_join_and_counts_nothing(
    mesh: worqr.Mesh, other: worqr.Mesh, press: Callable[[], Awaitable[None]]
) -> None:
    held = Held()

    async def handler(task: bytes) -> None:
        if task == b"press":
            await press()
        await held(task)

    async with other.connect():
        q = other.queue("Q1")
        await q.enqueue(b"long")
        with pytest.raises(KeyboardInterrupt):
            async with at_most(), mesh.join(grace=20) as peer, trio.open_nursery() as nursery:
                await nursery.start(partial(peer.serve, "Q1", handler))
                await held.wait(1)
                await q.enqueue(b"press")
                await trio.sleep_forever()
        assert held.cancelled == [(b"long", "leaving")]
        assert (await q.tasks())[::-1] == [b"long", b"press"]
        assert await other.workers() == []
        runs = Runs()
        async with serving(other, "Q1", runs):
            await runs.wait(2)
            assert {context.attempt for context in runs.contexts} == {1}
            await eventually(q.running, [])


async def test_ctrl_c_in_the_block_of_join_gives_the_tasks_back(mesh: worqr.Mesh) -> None:
    held = Held()
    async with mesh.connect(), trio.open_nursery() as nursery:
        with pytest.raises(KeyboardInterrupt):
            async with at_most(), mesh.join(grace=20) as peer:
                await nursery.start(partial(peer.serve, "Q1", held))
                await mesh.queue("Q1").enqueue(b"a")
                await held.wait(1)
                raise KeyboardInterrupt
        assert held.cancelled == [(b"a", "leaving")]
        assert await mesh.queue("Q1").tasks() == [b"a"]


async def test_nothing_is_logged_above_info_when_all_goes_well(
    mesh: worqr.Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    runs = Runs()
    async with mesh.connect(), serving(mesh, "Q1", runs):
        await mesh.queue("Q1").enqueue(b"a secret payload")
        await runs.wait(1)
        await eventually(mesh.queue("Q1").running, [])
    above = [record.getMessage() for record in caplog.records if record.levelno > logging.INFO]
    assert [line for line in above if not line.startswith(("heartbeat.", "loop."))] == []  # the machine may stand still
    assert "secret" not in caplog.text


# The engine of a peer that has failed, or that ends: what arrives then finds no nursery that is closed.


class Bug(Exception):
    """Raised by a task of the engine."""


async def fail() -> None:
    raise Bug


async def test_a_peer_that_has_failed_claims_no_more(
    mesh: worqr.Mesh, other: worqr.Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    """One task of its engine takes its time to end, as a process does: the slots are closed, and the queue is served."""
    caplog.set_level(logging.ERROR, "worqr")
    over, runs, claimed = trio.Event(), Runs(), list[worqr.TaskInfo]()

    async def end_late() -> None:
        with trio.CancelScope(shield=True):
            await over.wait()

    async with other.connect():
        q = other.queue("Q1")
        with pytest.raises(worqr.WorqrBug, match="one of its duties failed"):
            async with serving(mesh, "Q1", runs) as peer:
                for task in (end_late, fail):
                    peer._engine.spawn(task)
                    await trio.testing.wait_all_tasks_blocked()
                await q.enqueue(b"late")
                for consumer in peer._engine.consumers:
                    consumer.request_soon()
                await mesh.queue("Q1").count()  # the reply to a start request comes before this one
                claimed = await q.running()
                over.set()
                await trio.sleep_forever()
        await eventually(q.count, 1)
        await eventually(q.running, [])
    assert (runs.tasks, claimed, caplog.messages) == ([], [], [])


@pytest.mark.parametrize("runs_in", ["loop", "thread", "asyncio"])
async def test_a_peer_that_has_failed_ends_without_a_handler_that_does_not_end(
    mesh: worqr.Mesh, monkeypatch: pytest.MonkeyPatch, runs_in: str
) -> None:
    monkeypatch.setattr("worqr.peer.engine.DETACH_AFTER", 0.2)
    begun, go = threading.Event(), threading.Event()

    async def asynchronous(_task: bytes) -> None:
        begun.set()
        if runs_in == "loop":
            await trio.sleep_forever()
        while not go.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    def blocking(_task: bytes) -> None:
        begun.set()
        go.wait(PATIENCE)

    handler = blocking if runs_in == "thread" else asynchronous
    async with mesh.connect():
        await mesh.queue("Q1").enqueue(b"x")
        with trio.fail_after(PATIENCE), pytest.raises(worqr.WorqrBug, match="one of its duties failed"):
            async with serving(mesh, "Q1", handler, runs_in=runs_in) as peer:
                await until(begun.is_set)
                peer._engine.spawn(fail)
                await trio.sleep_forever()
        assert not go.is_set()
        go.set()
        await mesh.queue("Q1").delete()


async def test_a_run_for_which_there_is_no_slot_any_more_goes_back() -> None:
    run = Mock(queue="Q1")
    slots = Slots(lambda _: None)
    async with trio.open_nursery() as nursery:
        await nursery.start(slots.run_forever)
        nursery.cancel_scope.cancel()
    slots.run(run)
    run.cancel.assert_called_once_with("leaving")
    run.host.run_ended.assert_called_once_with(run, False, None, None)


class AtEnd(trio.abc.Instrument):
    """Lets the engine run a task when its last one has ended, before the engine itself goes on."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.outcomes: list[object] = []

    def task_exited(self, task: trio.lowlevel.Task) -> None:
        nursery = self.engine._spawned
        if nursery is not None and task.parent_nursery is nursery and not nursery.child_tasks:
            try:
                self.outcomes.append(self.engine.spawn(trio.lowlevel.checkpoint))
            except RuntimeError as error:
                self.outcomes.append(error)


async def test_an_engine_whose_tasks_have_ended_runs_no_more(mesh: worqr.Mesh) -> None:
    async with serving(mesh, "Q1", Runs()) as peer:
        at_end = AtEnd(peer._engine)
        trio.lowlevel.add_instrument(at_end)
    trio.lowlevel.remove_instrument(at_end)
    assert at_end.outcomes == [False]
