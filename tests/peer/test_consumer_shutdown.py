"""Leaving: a queue, or the mesh, in whatever way; tasks go back, errors come out, nothing stays behind, nothing hangs."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import pytest
import trio
import trio.testing

import worqr
from tests.peer.conftest import NewMesh
from tests.peer.tools import Held, Runs, at_most, eventually, impatient, serving, until
from tests.support.leaks import dump, short
from tests.support.patience import PATIENCE
from tests.support.proxy import FaultProxy, sent_as
from tests.support.servers import Server
from worqr.lua import script
from worqr.peer import consumer_runner


def numbers(n: int, start: int = 0) -> list[bytes]:
    return [b"%d" % i for i in range(start, start + n)]


def worker_keys(server: Server, prefix: str) -> list[str]:
    """Keys that a worker has while it is there."""
    names = [short(key, prefix) for key in dump(server.client(), prefix)]
    parts = ("worker:", "WorkMap:", "Workers", "Dying", "claim", "policy", "hungry", "workers")
    return [name for name in names if any(part in name for part in parts)]


async def test_cancelling_serve_leaves_that_queue_alone(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    held, stays = Held(), Held()
    async with mesh.join() as peer, trio.open_nursery() as nursery:
        q1, q2 = mesh.queue("Q1"), mesh.queue("Q2")
        await nursery.start(partial(peer.serve, "Q2", stays))
        await q2.enqueue(b"stays")
        await stays.wait(1)
        async with trio.open_nursery() as inner:
            await inner.start(partial(peer.serve, "Q1", held))
            await q1.enqueue(b"a", b"b")
            await held.wait(2)
            inner.cancel_scope.cancel()
        assert sorted(held.cancelled) == [(b"a", "leaving"), (b"b", "leaving")]
        assert (await q1.tasks())[::-1] == [b"a", b"b"]
        assert {key for key in worker_keys(server, prefix) if "{Q1}" in key} == set()
        assert (await mesh.workers())[0].queues == {"Q2"}
        await until(lambda: peer.health().ready)
        assert stays.cancelled == []
        await q1.enqueue(b"c")
        await trio.sleep(0.05)
        assert await q1.count() == 3  # nobody serves it
        stays.gate.set()
        await stays.wait_for(lambda: stays.done == [b"stays"])
        runs = Runs()
        await nursery.start(partial(peer.serve, "Q1", runs))  # once more, by the same peer
        await runs.wait(3)
        await eventually(q1.running, [])
        nursery.cancel_scope.cancel()


async def test_a_body_that_ends_lets_what_runs_end(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    held = Held()
    async with mesh.connect(), trio.open_nursery() as nursery:
        q = mesh.queue("Q1")
        async with mesh.join(concurrency=2, grace=20) as peer:
            await nursery.start(partial(peer.serve, "Q1", held))
            await q.enqueue(*numbers(4))
            await held.wait(2)
            nursery.start_soon(open_after, held.gate, 0.1)
        assert sorted(held.done) == numbers(2)
        assert held.cancelled == []
        assert (await q.info()).counts["finished"] == 2
        assert (await q.tasks())[::-1] == numbers(2, 2)
        assert worker_keys(server, prefix) == []


async def open_after(gate: trio.Event, seconds: float) -> None:
    await trio.sleep(seconds)
    gate.set()


async def test_grace_is_the_longest_that_a_handler_is_waited_for(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    held = Held()
    async with mesh.connect(), trio.open_nursery() as nursery:
        start = time.monotonic()
        async with at_most(), mesh.join(grace=0.3) as peer:
            await nursery.start(partial(peer.serve, "Q1", held))
            await mesh.queue("Q1").enqueue(b"a")
            await held.wait(1)
        assert time.monotonic() - start > 0.3
        assert held.cancelled == [(b"a", "leaving")]
        assert await mesh.queue("Q1").tasks() == [b"a"]
        assert worker_keys(server, prefix) == []


async def test_a_body_that_raises_gives_its_tasks_back_at_once(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    held, error = Held(), LookupError("of the application")
    async with mesh.connect(), trio.open_nursery() as nursery:
        with pytest.raises(LookupError) as caught:
            async with at_most(), mesh.join(grace=20) as peer:
                await nursery.start(partial(peer.serve, "Q1", held))
                await mesh.queue("Q1").enqueue(b"a", b"b")
                await held.wait(2)
                raise error
        assert caught.value is error
        assert (await mesh.queue("Q1").tasks())[::-1] == [b"a", b"b"]
        assert worker_keys(server, prefix) == []


async def test_a_group_that_the_body_raises_comes_out_as_it_is(mesh: worqr.Mesh) -> None:
    group = BaseExceptionGroup("of the application", [ValueError(), SystemExit()])
    with pytest.raises(BaseExceptionGroup) as caught:
        async with mesh.join():
            raise group
    assert caught.value is group


async def test_an_outer_cancellation_gives_the_tasks_back(
    mesh: worqr.Mesh, other: worqr.Mesh, server: Server, prefix: str
) -> None:
    held = Held()
    async with other.connect():
        with trio.CancelScope() as scope:
            async with at_most(), mesh.join(grace=20) as peer, trio.open_nursery() as nursery:
                await nursery.start(partial(peer.serve, "Q1", held))
                await other.queue("Q1").enqueue(b"a")
                await held.wait(1)
                cancelled_at = time.monotonic()
                scope.cancel()
                await trio.sleep_forever()
        assert scope.cancelled_caught
        assert time.monotonic() - cancelled_at < 15
        assert held.cancelled == [(b"a", "leaving")]
        assert await other.queue("Q1").tasks() == [b"a"]
        assert worker_keys(server, prefix) == []


async def test_a_cancellation_during_the_drain_hurries(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    held = Held()
    async with other.connect(), trio.open_nursery() as nursery:
        q = other.queue("Q1")
        with trio.CancelScope() as scope:
            async with mesh.join(grace=30) as peer:
                await nursery.start(partial(peer.serve, "Q1", held))
                await q.enqueue(b"a")
                await held.wait(1)
                nursery.start_soon(cancel_when, scope, lambda: peer._engine.leaving)
                start = time.monotonic()
        assert scope.cancelled_caught
        assert time.monotonic() - start < 25
        assert await q.tasks() == [b"a"]


async def cancel_when(scope: trio.CancelScope, condition: Callable[[], bool]) -> None:
    await until(condition)
    await trio.testing.wait_all_tasks_blocked(0.05)
    scope.cancel()


async def test_drain_twice_is_harmless_and_the_less_patient_one_wins(mesh: worqr.Mesh) -> None:
    held = Held()
    async with mesh.connect(), trio.open_nursery() as nursery:
        async with mesh.join(grace=30) as peer:
            await nursery.start(partial(peer.serve, "Q1", held))
            await mesh.queue("Q1").enqueue(b"a")
            await held.wait(1)
            nursery.start_soon(peer.drain)
            await until(lambda: peer._engine.leaving)
            async with at_most(25):
                await peer.drain(0.1)
                await peer.wait()
                await peer.drain()
            assert held.cancelled == [(b"a", "leaving")]
        assert await mesh.queue("Q1").tasks() == [b"a"]


async def test_a_cancelled_drain_goes_on(mesh: worqr.Mesh) -> None:
    held = Held()
    async with mesh.connect(), trio.open_nursery() as nursery:
        async with mesh.join(grace=30) as peer:
            await nursery.start(partial(peer.serve, "Q1", held))
            await mesh.queue("Q1").enqueue(b"a")
            await held.wait(1)
            with trio.move_on_after(0.05):
                await peer.drain(20)
            assert peer._engine.leaving
            assert peer.health().why == "the peer is leaving"
            held.gate.set()
            async with at_most():
                await peer.drain(20)
        assert held.done == [b"a"]


async def test_wait_ends_with_the_drain_and_serve_comes_back(mesh: worqr.Mesh) -> None:
    runs, order = Runs(), list[str]()
    async with mesh.join() as peer, trio.open_nursery() as nursery:

        async def note(what: str, wait: Callable[[], Awaitable[None]]) -> None:
            await wait()
            order.append(what)

        nursery.start_soon(note, "serve", partial(peer.serve, "Q1", runs))
        nursery.start_soon(note, "wait", peer.wait)
        await mesh.queue("Q1").enqueue(b"a")
        await runs.wait(1)
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert order == []
        await peer.drain()
        await until(lambda: sorted(order) == ["serve", "wait"])


async def test_a_peer_that_has_left_cannot_be_used(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        async with mesh.join() as peer:
            await peer.drain()
            with pytest.raises(worqr.UsageError, match=r"'Q1'.*has left.*join again"):
                await peer.serve("Q1", Runs())
            with pytest.raises(worqr.UsageError, match="has left"):
                async with peer.work("Q1"):
                    pytest.fail("it has left")
        with pytest.raises(worqr.UsageError, match="has left"):
            await peer.serve("Q1", Runs())
        await peer.drain()
        await peer.wait()
        assert (peer.health().ready, peer.health().running) == (False, 0)
        assert await mesh.workers() == []


async def test_a_drain_meets_a_serve_that_is_just_entering(
    new_mesh: NewMesh, server: Server, prefix: str, proxy: FaultProxy
) -> None:
    mesh, direct = new_mesh(url=proxy.url), new_mesh()
    for stage in ("map_work", "start_work"):
        async with direct.connect(), mesh.join() as peer, trio.open_nursery() as nursery:
            held = proxy.hold_reply(matching=sent_as(stage))
            nursery.start_soon(peer.serve, "Q1", Runs())
            await held.wait_executed()
            nursery.start_soon(peer.drain)
            await until(lambda peer=peer: peer._engine.leaving)  # type: ignore[misc]
            held.release()
            async with at_most():
                await peer.wait()
            await eventually(lambda: served(direct), [frozenset()])
            nursery.cancel_scope.cancel()
        assert worker_keys(server, prefix) == []


@pytest.mark.leaves("Workers")  # the server was away: a sweep will find it
async def test_a_drain_does_not_wait_for_a_serve_that_cannot_enter(own_server: Server, prefix: str) -> None:
    mesh = worqr.Mesh(own_server.url, prefix=prefix, patience=60)
    async with at_most(40), mesh.join() as peer, trio.open_nursery() as nursery:
        own_server.stop()
        nursery.start_soon(peer.serve, "Q1", Runs())
        await trio.sleep(0.2)
        async with at_most(20):
            await peer.drain()
    own_server.start()


async def served(mesh: worqr.Mesh) -> list[frozenset[str]]:
    return [worker.queues for worker in await mesh.workers()]


async def test_a_serve_that_is_cancelled_while_entering_leaves_nothing(
    mesh: worqr.Mesh, server: Server, prefix: str
) -> None:
    async with mesh.join() as peer:
        for n in range(30):
            with trio.move_on_after(n / 10_000):
                await peer.serve("Q1", Runs())
        await eventually(lambda: served(mesh), [frozenset()])
        assert [key for key in worker_keys(server, prefix) if "{Q1}" in key] == []


async def test_leaving_while_the_server_is_away_takes_a_few_seconds(own_server: Server, prefix: str) -> None:
    held, mesh = Held(), worqr.Mesh(own_server.url, prefix=prefix)
    async with trio.open_nursery() as nursery:
        start = 0.0
        with trio.CancelScope() as scope:
            async with mesh.join(grace=20) as peer:
                await nursery.start(partial(peer.serve, "Q1", held))
                await nursery.start(partial(peer.serve, "Q2", held))
                await mesh.queue("Q1").enqueue(b"a")
                await held.wait(1)
                own_server.stop()
                start = time.monotonic()
                scope.cancel()
                await trio.sleep_forever()
        assert time.monotonic() - start < 15
        assert held.cancelled == [(b"a", "leaving")]
    own_server.start()
    runs = Runs()
    async with serving(worqr.Mesh(own_server.url, prefix=prefix, keepalive=1), "Q1", runs):
        assert await runs.wait(1) == [b"a"]  # the next peer found that its worker was dead
    assert [key for key in worker_keys(own_server, prefix) if "claim" in key] == []


async def test_a_plain_handler_is_waited_for_and_its_task_not_given_away(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    begun, let_go, runs = threading.Event(), threading.Event(), Runs()

    def stubborn(task: bytes) -> None:
        begun.set()
        let_go.wait(60)

    async with other.connect(), trio.open_nursery() as nursery:
        q = other.queue("Q1")
        async with mesh.join(grace=0.1) as peer:
            nursery.start_soon(peer.serve, "Q1", stubborn)
            await q.enqueue(b"a")
            await until(begun.is_set)
            async with serving(other, "Q1", runs):
                nursery.start_soon(peer.drain)
                await trio.sleep(1.3)  # longer than what handlers have to unwind together
                assert runs.tasks == []
                assert len(await q.running()) == 1
                let_go.set()
                await peer.wait()
        assert (await q.info()).counts["finished"] == 1  # it returned, so it is done
        assert runs.tasks == []


async def test_errors_of_join_come_out_alone(new_mesh: NewMesh, server: Server, prefix: str) -> None:
    server.client().set(f"{{{prefix}}}:version", "999")
    with pytest.raises(worqr.WrongVersion, match=r"999.*1"):
        async with at_most(), new_mesh().join():
            pytest.fail("it must not join")
    assert worker_keys(server, prefix) == []


async def test_a_queue_that_cannot_be_entered_is_told_by_serve(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    server.client().set(f"{prefix}:{{Q1}}:workers", "of another type")
    async with mesh.join() as peer:
        with pytest.raises(worqr.RefusedByServer, match="start_work.*WRONGTYPE"):
            async with at_most():
                await peer.serve("Q1", Runs())
        server.client().delete(f"{prefix}:{{Q1}}:workers")
        with trio.move_on_after(0.1):
            await peer.serve("Q1", Runs())


async def test_a_bug_of_ours_ends_join_as_one_error_and_gives_the_tasks_back(
    mesh: worqr.Mesh, other: worqr.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held()

    async def fail() -> None:
        await held.wait(1)
        raise KeyError("of ours")

    monkeypatch.setattr("worqr.peer.consumer.Reconciler.reconcile_forever", lambda self: fail())
    async with other.connect(), trio.open_nursery() as nursery:
        with pytest.raises(worqr.WorqrBug, match=r"KeyError: 'of ours'.*please report") as caught:
            async with at_most(), mesh.join(grace=20) as peer:
                nursery.start_soon(peer.serve, "Q1", held)
                await other.queue("Q1").enqueue(b"a")
                await trio.sleep_forever()
        assert isinstance(caught.value.__cause__, KeyError)
        await eventually(other.queue("Q1").tasks, [b"a"])
        assert await other.workers() == []


# A server that cannot be told, or will not hear of it


async def test_a_queue_that_was_left_in_an_outage_is_left_when_the_server_is_back(
    new_mesh: NewMesh, server: Server, prefix: str, proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    mesh, other, held, stays = new_mesh(url=proxy.url, keepalive=60), new_mesh(), Held(), Held()
    async with other.connect(), serving(mesh, "Q2", stays) as peer:
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(peer.serve, "Q1", held))
            await other.queue("Q1").enqueue(b"a", b"b")
            await held.wait(2)
            proxy.refuse()
            proxy.cut()
            start = time.monotonic()
            nursery.cancel_scope.cancel()
        assert time.monotonic() - start < 15, "the caller does not wait for the server"
        assert len(await other.queue("Q1").running()) == 2
        proxy.pass_all()
        assert any("leave.unanswered: queue 'Q1'" in record.getMessage() for record in caplog.records)
        await eventually(other.queue("Q1").tasks, [b"b", b"a"])
        await eventually(lambda: served(other), [frozenset({"Q2"})])
        assert {key for key in worker_keys(server, prefix) if "{Q1}" in key} == set()
        await until(lambda: peer.health().ready)
        await other.queue("Q2").enqueue(b"c")
        assert await stays.wait(1) == [b"c"]


async def test_a_queue_that_is_served_anew_is_left_first_and_keeps_what_runs_there_then(
    new_mesh: NewMesh, server: Server, prefix: str, proxy: FaultProxy
) -> None:
    mesh, other, before, after = new_mesh(url=proxy.url, keepalive=60), new_mesh(), Held(), Held()
    async with other.connect(), mesh.join() as peer, trio.open_nursery() as nursery:
        async with trio.open_nursery() as inner:
            await inner.start(partial(peer.serve, "Q1", before))
            await other.queue("Q1").enqueue(b"a")
            await before.wait(1)
            lost = proxy.hold_reply(matching=sent_as("stop_work"), on="data")
            inner.cancel_scope.cancel()
        await lost.wait_executed()
        proxy.forget_requests()
        nursery.start_soon(partial(peer.serve, "Q1", after))
        await until(lambda: peer._engine.consumers.get("Q1") is not None)
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert proxy.count(sent_as("start_work")) == 0
        proxy.cut(on="data")  # the answer to stop_work never comes: it is sent once more
        assert await after.wait(1) == [b"a"]
        names = {script(name).sha: name for name in ("stop_work", "start_work")}
        calls = [request.words[1].decode() for request in proxy.seen("EVALSHA", on="data")]
        order = [names[sha] for sha in calls if sha in names]
        assert order == ["stop_work", "start_work"]
        assert len(await other.queue("Q1").running()) == 1
        lost.release()
        after.gate.set()
        await after.wait_for(lambda: after.done == [b"a"])
        assert after.tasks == [b"a"]
        nursery.cancel_scope.cancel()


async def test_a_queue_that_the_server_does_not_let_go_is_left_as_soon_as_it_does(
    mesh: worqr.Mesh,
    other: worqr.Mesh,
    server: Server,
    prefix: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(consumer_runner, "LEAVE_PATIENCE", 2)
    held, client, key = Held(), server.client(), f"{prefix}:{{Q1}}:suspects"
    async with other.connect(), mesh.join() as peer:
        async with at_most(), trio.open_nursery() as nursery:
            await nursery.start(partial(peer.serve, "Q1", held))
            await other.queue("Q1").enqueue(b"a")
            await held.wait(1)
            client.set(key, "foreign")
            nursery.cancel_scope.cancel()
        [line] = [r.getMessage() for r in caplog.records if r.getMessage().startswith("leave.refused")]
        assert "'Q1'" in line
        assert "WRONGTYPE" in line
        client.delete(key)
        await eventually(other.queue("Q1").tasks, [b"a"])
        await eventually(lambda: served(other), [frozenset()])


async def test_a_queue_that_cannot_be_left_cannot_be_served_anew(
    new_mesh: NewMesh, server: Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer_runner, "LEAVE_PATIENCE", 2)
    mesh, client, key = new_mesh(), server.client(), f"{prefix}:{{Q1}}:suspects"
    async with mesh.join() as peer:
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(peer.serve, "Q1", Runs()))
            client.set(key, "foreign")
            nursery.cancel_scope.cancel()
        with impatient(mesh), pytest.raises(worqr.Unavailable, match="'Q1': this worker left it before.*WRONGTYPE"):
            async with at_most():
                await peer.serve("Q1", Runs())
        client.delete(key)
        await eventually(lambda: served(mesh), [frozenset()])


async def test_only_the_new_station_of_a_queue_with_a_run_left_behind_requests_tasks(
    new_mesh: NewMesh, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second request would overwrite the reply that the server keeps of the first, and take the worker off those that wait."""
    monkeypatch.setattr("worqr.peer.consumer_runner.DETACH_AFTER", 1.1)
    mesh, other = new_mesh(url=proxy.url, keepalive=60), new_mesh()
    begun, let_go, runs = threading.Event(), threading.Event(), Runs()

    def stubborn(task: bytes) -> None:
        begun.set()
        let_go.wait(60)

    def asked(times: int) -> bool:
        return proxy.count(sent_as("start_tasks"), on="data") >= times

    async with other.connect(), mesh.join() as peer:
        q = other.queue("Q1")
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(peer.serve, "Q1", stubborn))
            await q.enqueue(b"stuck")
            await until(begun.is_set)
            nursery.cancel_scope.cancel()
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(peer.serve, "Q1", runs))
            [consumer] = peer._engine.consumers.entered()
            await until(lambda: not consumer.request.in_flight)
            proxy.forget_requests()
            for n in range(5):
                await q.enqueue(b"%d" % n)
                await runs.wait(n + 1)
                await until(partial(asked, n + 1))
                await until(lambda: not consumer.request.in_flight)
            assert proxy.count(sent_as("start_tasks"), on="data") == 5
            nursery.cancel_scope.cancel()
        let_go.set()
        await eventually(lambda: served(other), [frozenset()])


@pytest.mark.parametrize("outage", [False, True])
async def test_what_is_being_claimed_where_a_run_was_left_behind_goes_back_at_once(
    new_mesh: NewMesh, proxy: FaultProxy, outage: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worqr.peer.consumer_runner.DETACH_AFTER", 1.1)
    mesh, other = new_mesh(url=proxy.url, keepalive=60), new_mesh()
    begun, let_go, runs = threading.Event(), threading.Event(), Runs()

    def stubborn(task: bytes) -> None:
        begun.set()
        let_go.wait(60)

    async with other.connect(), mesh.join() as peer:
        q = other.queue("Q1")
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(peer.serve, "Q1", stubborn))
            await q.enqueue(b"stuck")
            await until(begun.is_set)
            nursery.cancel_scope.cancel()
        async with (
            trio.open_nursery() as nursery
        ):  # the thread still runs: another consumer needs its place in the fence
            await nursery.start(partial(peer.serve, "Q1", runs))
            held = proxy.hold_reply(matching=sent_as("start_tasks"), on="data")
            await q.enqueue(b"a", b"b")
            await held.wait_executed()
            if outage:
                proxy.cut(on="data")
            nursery.cancel_scope.cancel()
        held.release()
        await eventually(q.tasks, [b"b", b"a"], within=15)
        assert len(await q.running()) == 1
        assert runs.tasks in ([], [b"a", b"b"])
        let_go.set()
        await eventually(lambda: served(other), [frozenset()])


# A rolling deployment in which two versions of a program declare other limits and other rules of lanes for the same queue.


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
        """Return how many ran at once, at most, of those that begin from now on: in all, in lane a, and in another lane.

        Lane a may begin none for a moment, because the place of a peer that leaves has to be given back first.
        """
        before = set(self.begun)
        await until(lambda: not before & self.begun)
        self.most, done = Counter(self.now), len(self.done)
        await until(lambda: len(self.done) >= done + tasks and self.most["lane a"] > 0)
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
