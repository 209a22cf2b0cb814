"""The engine of a peer that has failed, or that ends: what arrives then finds no nursery that is closed."""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import suppress
from unittest.mock import Mock

import pytest
import trio
import trio.testing

import worqr
from tests.peer.tools import Runs, eventually, serving, until
from tests.support.patience import PATIENCE
from worqr.peer.engine import Engine
from worqr.peer.slots import Slots

pytestmark = pytest.mark.one_server


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
