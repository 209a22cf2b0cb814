"""Handlers that ignore their cancellation: reported, their slots given away, their claims kept, and left behind at the end."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio

import worqr
from tests.peer.conftest import NewMesh
from tests.peer.test_reconciler import forget_how_it_ended, reconnect
from tests.peer.tools import QUICK, Held, Runs, at_most, eventually, serving, until
from tests.support.children import Child
from tests.support.patience import PATIENCE
from tests.support.proxy import FaultProxy, sent_as
from tests.support.servers import Server
from worqr.peer.consumer import Slots
from worqr.peer.consumer_runner import StuckHandlerMonitor

pytestmark = pytest.mark.one_server

FAILED = ("{Q1}:failed", "{Q1}:aside*")
LONG = 2 * PATIENCE
"""Seconds after which a handler of these tests ends by itself, should a test forget it."""


class Stubborn:
    """A handler, in one of three places, that ignores its cancellation until it is let go; of other tasks than ``stuck`` it
    makes a note.
    """

    def __init__(self, place: str) -> None:
        self.begun = threading.Event()
        self.go = threading.Event()
        self.tasks: list[bytes] = []
        self.contexts: list[worqr.Context] = []
        self.raises: type[Exception] | None = None
        self.timeout: float | None = None  # seconds from when it begins: what times out before that is not run
        self.handler: Callable[[bytes], Any] = {
            "loop": self.on_the_loop,
            "thread": self.in_a_thread,
            "asyncio": self.on_asyncio,
        }[place]
        self.runs_in = place

    async def on_the_loop(self, task: bytes) -> str:
        if self._begin(task):
            with trio.CancelScope(shield=True):
                await until(self.go.is_set, LONG)
        return self._end()

    def in_a_thread(self, task: bytes) -> str:
        if self._begin(task):
            assert self.go.wait(LONG)
        return self._end()

    async def on_asyncio(self, task: bytes) -> str:
        if self._begin(task):
            while not self.go.is_set():
                try:
                    await asyncio.sleep(0.01)
                except asyncio.CancelledError:
                    pass
        return self._end()

    def _begin(self, task: bytes) -> bool:
        self.contexts.append(worqr.current())
        self.tasks.append(task)
        if self.timeout is not None:
            worqr.current().extend(self.timeout)
        if task.startswith(b"stuck"):
            self.begun.set()
        return task.startswith(b"stuck")

    def _end(self) -> str:
        if self.raises is not None:
            raise self.raises("on the way out")
        return "late"


@pytest.fixture
def stubborn(place: str) -> Iterator[Stubborn]:
    handler = Stubborn(place)
    yield handler
    handler.go.set()


everywhere = pytest.mark.parametrize("place", ["loop", "thread", "asyncio"])
elsewhere = pytest.mark.parametrize("place", ["thread", "asyncio"])


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler counts as stuck after 0.2 s."""
    made = StuckHandlerMonitor.__init__

    def hurried(stuck: StuckHandlerMonitor, *args: Any, **kwargs: Any) -> None:
        made(stuck, *args, **{**kwargs, "after": 0.2})

    monkeypatch.setattr(StuckHandlerMonitor, "__init__", hurried)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handlers are left behind after 1.2 s."""
    monkeypatch.setattr("worqr.peer.consumer_runner.DETACH_AFTER", 1.2)


def lines(caplog: pytest.LogCaptureFixture, word: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith(word)]


@asynccontextmanager
async def serving_it(mesh: worqr.Mesh, stubborn: Stubborn, **options: Any) -> AsyncGenerator[worqr.Peer]:
    async with serving(mesh, "Q1", stubborn.handler, runs_in=stubborn.runs_in, **options) as peer:
        yield peer


async def running(q: worqr.Queue) -> int:
    return (await q.info()).running


# While the peer lives


@everywhere
@pytest.mark.usefixtures("soon")
async def test_a_stuck_handler_is_reported_once_and_its_slot_given_to_another_task(
    mesh: worqr.Mesh, stubborn: Stubborn, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "worqr.peer.consumer_runner")
    async with mesh.connect(), serving_it(mesh, stubborn, room=1) as peer:
        q = mesh.queue("Q1")
        await q.enqueue(b"stuck", b"next")
        await until(stubborn.begun.is_set)
        assert await q.cancel(b"stuck") == worqr.CancelCount(0, 1, 0)
        await until(lambda: stubborn.tasks == [b"stuck", b"next"])  # although there is room for one
        await eventually(lambda: running(q), 1)  # its claim stays with it
        await until(lambda: peer._engine.scheduler.room == 1)  # a start request may still be under way
        for _ in range(3):
            peer._engine.stuck.check_once()
        stubborn.go.set()
        await eventually(q.running, [])
        await until(lambda: lines(caplog, "task.unstuck"))
        assert (await q.info()).counts == {"enqueued": 2, "claimed": 2, "finished": 1, "cancelled": 1}
        await until(lambda: (peer.health().running, peer._engine.scheduler.room, peer.health().ready) == (0, 1, True))
    (report,) = lines(caplog, "task.stuck")
    assert "queue 'Q1'" in report
    assert f"job {stubborn.contexts[0].id}, attempt 1 of 10" in report
    assert f"tests.peer.test_stuck_handlers.Stubborn.{stubborn.handler.__name__}" in report
    assert "(cancel)" in report
    assert f"in {stubborn.handler.__name__}" in report  # its stack
    assert "worqr/peer/" not in report
    (end,) = lines(caplog, "task.unstuck")
    assert f"job {stubborn.contexts[0].id}" in end


@everywhere
@pytest.mark.leaves(*FAILED)
@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("raised", [None, KeyError])
async def test_a_stuck_handler_that_ends_at_last_is_settled_as_its_cancellation_says(
    mesh: worqr.Mesh, stubborn: Stubborn, raised: type[Exception] | None, caplog: pytest.LogCaptureFixture
) -> None:
    stubborn.raises, stubborn.timeout = raised, 0.1
    policy = worqr.RetryPolicy(max_timeouts=1)
    async with mesh.connect(), serving_it(mesh, stubborn, timeout=LONG, retry=policy):
        q = mesh.queue("Q1")
        job = await q.dispatch(b"stuck", result_ttl=60)
        await until(lambda: lines(caplog, "task.stuck"))
        assert "(timeout)" in lines(caplog, "task.stuck")[0]
        assert await running(q) == 1
        stubborn.go.set()
        if raised is None:
            assert await job.result(PATIENCE) == "late"  # type: ignore[comparison-overlap]
        else:
            with pytest.raises(worqr.JobFailed, match="Timeout"):
                await job.result(PATIENCE)
            (record,) = await q.failed.list()
            assert (record.reason, record.timeouts, record.failures) == ("timeout", 1, 0)


@pytest.mark.parametrize("place", ["thread"])
@pytest.mark.usefixtures("soon")
async def test_a_stuck_handler_whose_claim_was_lost_is_reported_too(
    mesh: worqr.Mesh, other: worqr.Mesh, stubborn: Stubborn, caplog: pytest.LogCaptureFixture
) -> None:
    async with mesh.connect(), other.connect(), serving_it(mesh, stubborn, room=1) as peer:
        q, worker = mesh.queue("Q1"), peer.id
        await q.enqueue(b"stuck")
        await until(stubborn.begun.is_set)
        peer._engine.session.lost(peer._engine.session.registration, "as a test has it")  # type: ignore[arg-type]
        await until(lambda: lines(caplog, "task.stuck"))
        assert "(lost)" in lines(caplog, "task.stuck")[0]
        await q.enqueue(b"next")
        await until(lambda: b"next" in stubborn.tasks)
        assert peer.id != worker
        stubborn.go.set()

        async def left() -> tuple[int, int]:
            info = await q.info()
            return info.waiting, info.running

        await eventually(left, (0, 0))  # the claim of the lost worker came back, and was done


@pytest.mark.usefixtures("soon")
async def test_stuck_threads_do_not_use_up_the_threads(mesh: worqr.Mesh) -> None:
    stubborn = Stubborn("thread")
    async with mesh.connect(), mesh.join(threads=2) as peer, trio.open_nursery() as nursery:
        await nursery.start(partial(peer.serve, "Q1", stubborn.handler, timeout=0.1))
        q = mesh.queue("Q1")
        await q.enqueue(b"stuck1", b"stuck2", b"a", b"b")
        await until(lambda: len(stubborn.tasks) == 4)
        stubborn.go.set()
        await eventually(q.running, [])
        assert (await q.info()).counts["finished"] == 4
        nursery.cancel_scope.cancel()


@pytest.mark.usefixtures("soon")
async def test_a_blocked_asyncio_loop_blocks_neither_the_peer_nor_its_reports(
    mesh: worqr.Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    begun, go, runs = [threading.Event(), threading.Event()], threading.Event(), Runs()

    async def blocks(task: bytes) -> None:
        begun[0].set()
        assert go.wait(LONG)

    async def waits(task: bytes) -> None:
        begun[1].set()
        await asyncio.Event().wait()

    async with mesh.connect(), mesh.join(grace=5) as peer, trio.open_nursery() as nursery:
        worker = peer.id
        await nursery.start(partial(peer.serve, "Q1", waits, runs_in="asyncio"))
        await nursery.start(partial(peer.serve, "Q2", blocks, runs_in="asyncio"))
        await nursery.start(partial(peer.serve, "Q3", runs))
        await mesh.queue("Q1").enqueue(b"waits")
        await until(begun[1].is_set)
        await mesh.queue("Q2").enqueue(b"blocks")
        await until(begun[0].is_set)
        assert await mesh.queue("Q1").cancel(b"waits") == worqr.CancelCount(0, 1, 0)
        await until(lambda: lines(caplog, "task.stuck"))
        await mesh.queue("Q3").enqueue(b"a")
        await runs.wait(1)
        assert peer.id == worker
        go.set()
        await until(lambda: peer.health().ready)
        for name in ("Q1", "Q2"):
            await eventually(mesh.queue(name).running, [])
        nursery.cancel_scope.cancel()
    (report,) = lines(caplog, "task.stuck")
    ours, _, blocker = report.partition("busy with another task")
    assert "in waits" in ours
    assert "in blocks" in blocker


async def test_a_thousand_plain_handlers_that_raise_leave_the_peer_healthy(
    mesh: worqr.Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "worqr.peer.task_log")

    def raising(task: bytes) -> None:
        if worqr.current().failures == 0:
            raise ValueError(task)

    async def raising_too(task: bytes) -> None:
        raising(task)

    async with (
        mesh.connect(),
        serving(mesh, "Q1", raising, retry=QUICK) as peer,
        serving(mesh, "Q2", raising_too, retry=QUICK, runs_in="asyncio") as asyncio_peer,
    ):
        for name in ("Q1", "Q2"):
            await mesh.queue(name).enqueue(*[b"%d" % i for i in range(1000)])
        for name in ("Q1", "Q2"):
            q = mesh.queue(name)

            async def finished(q: worqr.Queue = q) -> int:
                return (await q.info()).counts.get("finished", 0)

            await eventually(finished, 1000)
            await eventually(q.running, [])
        for each in (peer, asyncio_peer):
            await until(lambda each=each: each.health().ready)  # type: ignore[misc]
            health = each.health()
            assert (health.alive, health.running, health.room) == (True, 0, 100)


# When the peer leaves


@elsewhere
@pytest.mark.usefixtures("impatient")
async def test_a_peer_leaves_without_a_stuck_handler_whose_task_then_runs_elsewhere(
    mesh: worqr.Mesh, other: worqr.Mesh, stubborn: Stubborn, caplog: pytest.LogCaptureFixture
) -> None:
    runs = Runs()
    async with other.connect():
        q = other.queue("Q1")
        async with at_most(PATIENCE):
            async with mesh.join(grace=0) as peer:
                nothing = trio.Event()
                async with trio.open_nursery() as nursery:
                    await nursery.start(partial(peer.serve, "Q1", stubborn.handler, runs_in=stubborn.runs_in))
                    await q.enqueue(b"stuck")
                    await until(stubborn.begun.is_set)
                    nursery.cancel_scope.cancel()
                    await nothing.wait()
        assert stubborn.contexts[0].cancel_reason == "lost"  # as its handler can see, which still runs
        (report,) = lines(caplog, "task.unending")
        assert f"in {stubborn.handler.__name__}" in report
        assert "left without it" in report
        assert lines(caplog, "worker.vanished")
        # Its claim was not given back: the others find it when the keepalive has lapsed.
        assert [len(await q.running()), await q.count()] == [1, 0]
        async with serving(other, "Q1", runs):
            await runs.wait(1)
            assert runs.contexts[0].stalls == 1
            await eventually(q.running, [])
        await eventually(other.workers, [])


@pytest.mark.parametrize("place", ["thread"])
@pytest.mark.usefixtures("impatient")
async def test_a_peer_whose_block_raises_leaves_without_a_stuck_handler(
    mesh: worqr.Mesh, other: worqr.Mesh, stubborn: Stubborn
) -> None:
    async with other.join() as sweeper:
        q = other.queue("Q1")
        with pytest.RaisesGroup(KeyError):
            async with at_most(PATIENCE), mesh.join(grace=20) as peer, trio.open_nursery() as nursery:
                await nursery.start(partial(peer.serve, "Q1", stubborn.handler, runs_in=stubborn.runs_in))
                await q.enqueue(b"stuck")
                await until(stubborn.begun.is_set)
                raise KeyError
        await eventually(q.tasks, [b"stuck"])  # swept

        async def workers() -> list[str]:
            return [worker.id for worker in await other.workers()]

        await eventually(workers, [sweeper.id])  # the sweeper drops the dead worker after its tasks are back
        await q.delete()


@everywhere
async def test_what_else_ran_goes_back_before_the_stuck_handler_ends(
    mesh: worqr.Mesh, other: worqr.Mesh, stubborn: Stubborn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worqr.peer.consumer_runner.DETACH_AFTER", 1000)
    held = Held()
    async with other.connect():
        q, q2 = other.queue("Q1"), other.queue("Q2")
        async with mesh.join(grace=0) as peer, trio.open_nursery() as nursery:
            await nursery.start(partial(peer.serve, "Q1", stubborn.handler, runs_in=stubborn.runs_in))
            await nursery.start(partial(peer.serve, "Q2", held))
            await q.enqueue(b"stuck")
            await q2.enqueue(b"a", b"b")
            await until(stubborn.begun.is_set)
            await held.wait(2)
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                await eventually(q2.tasks, [b"b", b"a"])
                assert await running(q) == 1
            stubborn.go.set()
        await eventually(q.running, [])
        assert (await q.info()).counts["finished"] == 1  # it returned
        assert await other.workers() == []


@elsewhere
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("raised", [None, KeyError])
async def test_a_queue_is_left_without_a_stuck_handler_which_is_settled_when_it_ends(
    mesh: worqr.Mesh, stubborn: Stubborn, raised: type[Exception] | None, caplog: pytest.LogCaptureFixture
) -> None:
    stubborn.raises = raised
    async with mesh.join() as peer:
        q = mesh.queue("Q1")
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(peer.serve, "Q1", stubborn.handler, runs_in=stubborn.runs_in))
            await q.enqueue(b"stuck")
            await until(stubborn.begun.is_set)
            nursery.cancel_scope.cancel()
        assert lines(caplog, "task.unending")
        assert [len(await q.running()), await q.count()] == [1, 0]
        stubborn.go.set()
        await eventually(q.running, [])
        assert await q.tasks() == ([] if raised is None else [b"stuck"])

        async def served() -> frozenset[str]:
            return (await mesh.workers())[0].queues

        await eventually(served, frozenset())
        await until(lambda: (peer.health().running, peer.health().ready) == (0, True))


@elsewhere
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("ends", ["before", "after"])
async def test_a_queue_that_is_served_anew_beside_a_stuck_handler(
    mesh: worqr.Mesh, stubborn: Stubborn, ends: str
) -> None:
    runs = Runs()
    stubborn.raises = KeyError
    async with mesh.join() as peer:
        q = mesh.queue("Q1")
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(peer.serve, "Q1", stubborn.handler, runs_in=stubborn.runs_in))
            await q.enqueue(b"stuck")
            await until(stubborn.begun.is_set)
            nursery.cancel_scope.cancel()
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(peer.serve, "Q1", runs))
            await q.enqueue(b"a")
            await runs.wait(1)
            if ends == "before":
                stubborn.go.set()
                assert await runs.wait(2) == [b"a", b"stuck"]  # given back, and taken
                await eventually(q.running, [])
                await q.enqueue(b"b")
                await runs.wait(3)  # it still stands in the fence
            await eventually(lambda: running(q), 0 if ends == "before" else 1)
            nursery.cancel_scope.cancel()
        if ends == "after":
            assert [len(await q.running()), await q.count()] == [1, 0]  # the claim was not given back with the queue
            stubborn.go.set()
            await eventually(q.tasks, [b"stuck"])
        else:
            await q.enqueue(b"left")

        async def served() -> frozenset[str]:
            return (await mesh.workers())[0].queues

        await eventually(served, frozenset())
        assert runs.tasks == ([b"a", b"stuck", b"b"] if ends == "before" else [b"a"])


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("place", ["thread"])
async def test_a_run_that_was_left_behind_is_no_stray_where_the_queue_is_served_anew(
    mesh: worqr.Mesh, server: Server, prefix: str, stubborn: Stubborn, caplog: pytest.LogCaptureFixture
) -> None:
    client, runs = server.client(), Runs()
    async with mesh.join() as peer:
        q = mesh.queue("Q1")
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(peer.serve, "Q1", stubborn.handler))
            await q.enqueue(b"stuck")
            await until(stubborn.begun.is_set)
            nursery.cancel_scope.cancel()
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(peer.serve, "Q1", runs))
            forget_how_it_ended(client, prefix, peer.id, b"old", 1)  # so it is known when all have been looked at
            await reconnect(client, mesh)
            assert await runs.wait(1) == [b"old"]
            await eventually(lambda: running(q), 1)
            stubborn.go.set()
            await eventually(q.running, [])
            nursery.cancel_scope.cancel()
    assert (stubborn.tasks, runs.tasks) == ([b"stuck"], [b"old"])
    assert [record.args for record in caplog.records if record.getMessage().startswith("claim.stray")] == [
        {"queue": "Q1", "count": 1}
    ]


@pytest.mark.parametrize("place", ["thread"])
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
async def test_what_was_being_claimed_goes_back_although_the_queue_lingers(
    new_mesh: NewMesh,
    other: worqr.Mesh,
    proxy: FaultProxy,
    stubborn: Stubborn,
    late: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("worqr.peer.consumer_runner.DETACH_AFTER", 1.2)
    stubborn.raises = KeyError
    async with other.connect(), new_mesh(url=proxy.url).join() as peer:
        q = other.queue("Q1")
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(peer.serve, "Q1", stubborn.handler))
            await q.enqueue(b"stuck")
            await until(stubborn.begun.is_set)
            held = proxy.hold_reply(matching=sent_as("start_tasks"), on="data")
            await q.enqueue(b"a", b"b")
            await held.wait_executed()
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                await until(lambda: peer._engine.consumers.get("Q1").lifecycle.grace_over.is_set())  # type: ignore[union-attr]
            if not late:
                held.release()
        assert lines(caplog, "task.unending")
        held.release()
        await eventually(q.tasks, [b"b", b"a"])
        assert await running(q) == 1
        stubborn.go.set()
        await eventually(q.tasks, [b"b", b"a", b"stuck"])
        assert stubborn.tasks == [b"stuck"]


def test_a_process_ends_whatever_sticks_in_its_threads(spawn: Callable[..., Child]) -> None:
    child = spawn(
        """
        import asyncio, functools, threading, time, trio, worqr

        begun = threading.Semaphore(0)

        def in_a_thread(task: bytes) -> None:
            begun.release()
            time.sleep(1000)

        async def on_asyncio(task: bytes) -> None:
            begun.release()
            time.sleep(1000)

        async def main() -> None:
            mesh = worqr.Mesh("embedded:")
            async with mesh.join(grace=0) as peer, trio.open_nursery() as nursery:
                await nursery.start(functools.partial(peer.serve, "Q1", in_a_thread))
                await nursery.start(functools.partial(peer.serve, "Q2", on_asyncio, runs_in="asyncio"))
                await mesh.queue("Q1").enqueue(b"a")
                await mesh.queue("Q2").enqueue(b"a")
                for _ in range(2):
                    await trio.to_thread.run_sync(begun.acquire)
                nursery.cancel_scope.cancel()
            print("left", flush=True)

        trio.run(main)
        print("ended", flush=True)
        """
    )
    assert child.process.wait(LONG) == 0, child.errors
    assert "in in_a_thread" in child.errors
    assert "in on_asyncio" in child.errors


async def test_a_coroutine_that_swallows_its_cancellation_keeps_the_peer_and_is_reported_now_and_then(
    mesh: worqr.Mesh, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("worqr.peer.consumer_runner.DETACH_AFTER", 1.05)
    monkeypatch.setattr("worqr.peer.consumer_runner.REMIND", 0.1)
    runs, go = Runs(), False

    async def swallowing(task: bytes) -> None:
        runs.begin(task)
        while not go:
            try:
                await trio.sleep_forever()
            except trio.Cancelled:
                await trio.lowlevel.cancel_shielded_checkpoint()
                time.sleep(0.001)

    async def release() -> None:
        nonlocal go
        await until(lambda: len(lines(caplog, "task.unending")) >= 3)
        go = True

    async with mesh.connect(), trio.open_nursery() as nursery:
        async with serving(mesh, "Q1", swallowing):
            await mesh.queue("Q1").enqueue(b"a")
            await runs.wait(1)
            nursery.start_soon(release)
    report = lines(caplog, "task.unending")[0]
    assert "in swallowing" in report
    assert "cannot leave" in report
    async with mesh.connect():
        assert await mesh.queue("Q1").running() == []


# Handlers that keep the CPU or the loop to themselves


async def test_handlers_that_use_the_cpu_in_every_thread_cost_no_claim(new_mesh: NewMesh, other: worqr.Mesh) -> None:
    mesh, held = new_mesh(), Held()

    def burn(task: bytes) -> None:
        end = time.monotonic() + 2
        while time.monotonic() < end:
            sum(range(1000))

    async with other.join(), mesh.join(grace=30) as peer, trio.open_nursery() as nursery:
        worker = peer.id
        await nursery.start(partial(peer.serve, "Q2", held))
        await nursery.start(partial(peer.serve, "Q1", burn))
        await mesh.queue("Q2").enqueue(*[b"%d" % i for i in range(20)])
        await held.wait(20)
        q = mesh.queue("Q1")
        await q.enqueue(*[b"%d" % i for i in range(40)])

        async def finished() -> int:
            return (await q.info()).counts.get("finished", 0)

        await eventually(finished, 40, LONG)
        assert (peer.id, held.cancelled) == (worker, [])
        held.gate.set()
        await held.wait_for(lambda: len(held.done) == 20)
        for name in ("Q1", "Q2"):
            await eventually(mesh.queue(name).running, [])
            counts = (await mesh.queue(name).info()).counts
            assert counts["claimed"] == counts["finished"] == (40 if name == "Q1" else 20), counts
        nursery.cancel_scope.cancel()


async def test_a_workflow_whose_suspension_the_server_has_not_answered_is_not_stuck(
    new_mesh: NewMesh, other: worqr.Mesh, proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    mesh = new_mesh(url=proxy.url)

    @mesh.workflow(name="fulfil", result_ttl=60)
    async def fulfil() -> None:
        await worqr.wait_for("approved", str)

    async with other.connect(), mesh.join() as peer:
        held = proxy.hold_reply(matching=sent_as("suspend_task"), on="data")
        job = await fulfil.dispatch()
        await held.wait_executed()
        monitor = peer._engine.stuck
        after, monitor.after = monitor.after, 0.0
        monitor.check_once()
        monitor.after = after
        assert monitor.stuck == 0
        held.release()
        await job.send("approved", "ada")
        await job.result(PATIENCE)
    assert not lines(caplog, "task.stuck")


@pytest.mark.leaves("{*}", "{*}:*", "*")  # what the leader has to recover
async def test_a_worker_leaves_while_the_server_does_not_answer_a_suspension(
    new_mesh: NewMesh, proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    mesh = new_mesh(url=proxy.url)

    @mesh.workflow(name="fulfil")
    async def fulfil() -> None:
        await worqr.wait_for("approved", str)

    async with mesh.join(grace=0):
        held = proxy.hold(matching=sent_as("suspend_task"), on="data")
        await fulfil.dispatch()
        await held.wait_fired()
        proxy.blackhole()
    assert not lines(caplog, "task.unending")


# Runs that no slot has


@pytest.mark.parametrize("lists", [False, True])
async def test_a_worker_whose_slot_is_lost_is_not_ready_and_leaves_without_it(
    mesh: worqr.Mesh, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, lists: bool
) -> None:
    run_in_slot = Slots.run

    def lose(slots: Slots, run: Any) -> None:
        tasks = [item.task for item in run.claimed] if lists else [run.task]
        if b"lost" not in tasks:
            run_in_slot(slots, run)

    monkeypatch.setattr(Slots, "run", lose)
    runs = Runs()
    async with mesh.connect():
        q = mesh.queue("Q1")
        async with mesh.join(grace=0) as peer, trio.open_nursery() as nursery:
            if lists:
                await nursery.start(partial(peer.serve_list, "Q1", runs, batch_size=1))
            else:
                await nursery.start(partial(peer.serve, "Q1", runs))
            await q.enqueue(b"lost", b"fine")
            await runs.wait(1)
            await until(lambda: peer.health().why == "slots lost by a bug of worqr: 1; restart this worker")
            with trio.fail_after(PATIENCE):
                await peer.drain(0)
            nursery.cancel_scope.cancel()
        assert (await q.info()).waiting == 1
        await q.delete()
    assert len(lines(caplog, "task.orphaned: queue 'Q1', job ")) == 1
