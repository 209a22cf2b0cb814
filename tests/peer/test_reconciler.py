"""A server that lost its latest writes may hold claims of a living worker that ended long ago: they come back."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from contextlib import AsyncExitStack
from functools import partial

import pytest
import redis
import trio

import worqr
from tests.peer.conftest import NewMesh
from tests.peer.tools import Held, Runs, Spy, eventually, serving, spying, until
from tests.support.patience import PATIENCE
from tests.support.proxy import FaultProxy, sent_as
from tests.support.servers import Server
from worqr.client import notifications

pytestmark = pytest.mark.one_server

NEVER = 1e9
"""Seconds between looks that are timed by multiples of the loop's clock, which begins at a random time."""


def forget_how_it_ended(client: redis.Redis, prefix: str, worker: str, task: bytes, claim: int) -> None:
    """Put the server back to where the worker still held the task."""
    client.rpush(f"{prefix}:{{Q1}}:claim:{claim}", task)
    client.sadd(f"{prefix}:{{Q1}}:claims:{worker}", claim)


async def reconnect(client: redis.Redis, mesh: worqr.Mesh) -> None:
    before = mesh._client.link.connections
    client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    await until(lambda: mesh._client.link.connections > before)


async def test_a_claim_whose_end_was_forgotten_is_given_back_after_the_next_connection(
    mesh: worqr.Mesh, server: Server, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    client, runs = server.client(), Runs()
    async with serving(mesh, "Q1", runs) as peer:
        await mesh.queue("Q1").enqueue(b"a")
        await runs.wait(1)
        await until(lambda: not client.keys(f"{prefix}:{{Q1}}:claim*"))
        forget_how_it_ended(client, prefix, peer.id, b"a", runs.contexts[0].fence)
        await reconnect(client, mesh)
        assert await runs.wait(2) == [b"a", b"a"]
        assert runs.contexts[1].attempt == 1, "an uncounted one"
        [line] = [record for record in caplog.records if record.getMessage().startswith("claim.stray")]
        assert (line.levelno, line.args) == (logging.WARNING, {"queue": "Q1", "count": 1})


async def test_what_runs_over_a_new_connection_is_nobodys_stray(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    client, held = server.client(), Held()
    async with serving(mesh, "Q1", held) as peer:
        await mesh.queue("Q1").enqueue(b"a", b"b", b"c")
        await held.wait(3)
        forget_how_it_ended(client, prefix, peer.id, b"old", 1)  # so it is known when all have been looked at
        await reconnect(client, mesh)
        await held.wait(4)
        held.gate.set()
        await held.wait_for(lambda: len(held.done) == 4)
        assert sorted(held.tasks) == [b"a", b"b", b"c", b"old"]
        assert not held.cancelled


async def test_what_is_held_by_hand_is_nobodys_stray_either(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    client = server.client()
    async with mesh.join() as peer, peer.work("Q1") as claims:
        await mesh.queue("Q1").enqueue(b"a")
        [claim] = await claims.take(1)
        forget_how_it_ended(client, prefix, peer.id, b"old", 1)  # so it is known when all have been looked at
        await reconnect(client, mesh)
        [old] = await claims.take(1)
        assert (claim.task, old.task) == (b"a", b"old")
        assert await mesh.queue("Q1").count() == 0, "the other one is still held"
        assert await claims.finish([claim, old]) == []


@pytest.mark.parametrize("fault", ["drop_reply", "drop_request"])
async def test_a_look_that_is_cut_off_is_made_again(
    new_mesh: NewMesh, server: Server, proxy: FaultProxy, prefix: str, fault: str
) -> None:
    mesh, client, runs = new_mesh(url=proxy.url), server.client(), Runs()
    async with serving(mesh, "Q1", runs) as peer:
        await mesh.queue("Q1").enqueue(b"a")
        await runs.wait(1)
        await until(lambda: not client.keys(f"{prefix}:{{Q1}}:claim*"))
        forget_how_it_ended(client, prefix, peer.id, b"a", runs.contexts[0].fence)
        cut = getattr(proxy, fault)(sent_as("list_own_claims"))
        await reconnect(client, mesh)
        await cut.wait_fired()
        assert await runs.wait(2) == [b"a", b"a"]


async def test_a_check_that_follows_the_request_to_leave_does_not_end_the_registration(
    new_mesh: NewMesh, proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    leaving = proxy.hold_reply(sent_as("stop_work"), on="data")
    mesh = new_mesh(url=proxy.url)
    async with mesh.connect():
        await mesh.queue("Q1").enqueue(b"a")
        async with mesh.join() as peer, trio.open_nursery() as nursery:
            first, taken = peer.id, trio.Event()

            async def work() -> None:
                async with peer.work("Q1") as claims:
                    await claims.take(1)
                    taken.set()

            nursery.start_soon(work)
            await taken.wait()
            await leaving.wait_executed()
            [consumer] = peer._engine.consumers
            peer._engine.reconciler.check(consumer, named=True)
            leaving.release()
            nursery.cancel_scope.deadline = trio.current_time() + PATIENCE
        assert peer.id == first
        assert [record.getMessage() for record in caplog.records if "worker.lost" in record.getMessage()] == []
        assert await mesh.queue("Q1").tasks() == [b"a"]
        await mesh.queue("Q1").cancel_all()


# The three channels of a queue: what a peer does about each message, and what it does about those that were lost.


def deaf(proxy: FaultProxy) -> None:
    """Whoever is connected through the proxy hears no message any more, and is not told so. Requests go on."""
    proxy.blackhole(":subscribe")
    proxy.refuse()


# Cancellations


async def test_a_worker_that_no_cancel_message_reaches_looks_by_itself(new_mesh: NewMesh, proxy: FaultProxy) -> None:
    mesh, other, held = new_mesh(url=proxy.url), new_mesh(), Held()
    async with other.connect(), serving(mesh, "Q1", held):
        await other.queue("Q1").enqueue(b"a")
        await held.wait(1)
        deaf(proxy)
        assert await other.queue("Q1").cancel(b"a", wait=PATIENCE) == worqr.CancelCount(0, 1, 1)
        assert held.cancelled == [(b"a", "cancel")]
        proxy.pass_all()


async def test_a_caller_that_no_acknowledgement_reaches_looks_by_itself(new_mesh: NewMesh, proxy: FaultProxy) -> None:
    mesh, caller, held = new_mesh(), new_mesh(url=proxy.url), Held()
    counts: list[worqr.CancelCount] = []

    async def cancel() -> None:
        counts.append(await caller.queue("Q1").cancel(b"a", wait=PATIENCE))

    async with serving(mesh, "Q1", held), caller.connect():
        await mesh.queue("Q1").enqueue(b"a")
        await held.wait(1)
        asked = proxy.hold(sent_as("cancel_task"), on="data")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancel)
            await asked.wait_fired()  # so it listens already
            deaf(proxy)
            asked.release()
        assert counts == [worqr.CancelCount(0, 1, 1)]
        proxy.pass_all()


def mark_all(client: redis.Redis, prefix: str, worker: str) -> set[bytes]:
    """Ask for the cancellation of all that a worker holds; nobody is told."""
    claims = client.smembers(f"{prefix}:{{Q1}}:claims:{worker}")
    client.sadd(f"{prefix}:{{Q1}}:cancelling", *claims)
    return claims  # type: ignore[return-value]


async def test_a_cancel_of_one_running_job_reaches_its_worker_alone_and_needs_no_request_of_it(
    mesh: worqr.Mesh, other: worqr.Mesh, server: Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worqr.peer.consumer.RECONCILE_EVERY", NEVER)  # no look: messages go there and back
    monkeypatch.setattr(notifications, "POLL_EVERY", 3600)
    held = Held()
    async with other.connect(), serving(mesh, "Q1", held, room=1):  # which is full, and asks for no more tasks
        job = await other.queue("Q1").dispatch(b"a", id="x")
        await held.wait(1)
        with server.client().pubsub() as heard, spying(server, prefix) as spy:
            heard.subscribe(f"{prefix}:{{Q1}}_cancel")
            assert heard.get_message(timeout=PATIENCE)
            assert await job.cancel(wait=PATIENCE) == worqr.CancelCount(0, 1, 1)
            assert heard.get_message() is None
            assert spy.calls()["reconcile"] == 0
        assert held.cancelled == [(b"a", "cancel")]


def proof(client: redis.Redis, prefix: str, worker: str, claim: int) -> bytes:
    """What a script sends to the worker that holds the claim."""
    secret = client.hget(f"{prefix}:{{Q1}}:policy:{worker}", "secret")
    assert isinstance(secret, bytes), "a worker has one"
    return b"c %d %s" % (claim, hashlib.sha1(b"%s %d" % (secret, claim)).hexdigest().encode())


async def test_only_a_proof_for_this_very_claim_cancels_it(
    mesh: worqr.Mesh, server: Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worqr.peer.consumer.RECONCILE_EVERY", NEVER)
    held, client = Held(), server.client()
    async with serving(mesh, "Q1", held) as peer:
        await mesh.queue("Q1").enqueue(b"a", b"b")
        await held.wait(2)
        one, two = (context.fence for context in held.contexts)
        true, wake = proof(client, prefix, peer.id, one), f"{prefix}:{{Q1}}:wake:{peer.id}"
        digest = true.split()[2]
        for forged in (
            *(b"c %d" % two, b"c %d " % two, b"c %d %s" % (two, b"0" * 40), b"c %d %s" % (two, digest)),
            *(b"c 0%d %s" % (one, digest), b"c %d %s " % (one, digest), b"c +%d %s" % (one, digest), b"c"),
            *(b"c \xff %s" % digest, b"c " + b"9" * 5000 + b" " + digest),
        ):
            with spying(server, prefix) as spy:
                assert client.publish(wake, forged) == 1
                await until(lambda spy=spy: spy.calls()["reconcile"])  # it asks, and the server knows of no mark
        await until(lambda: not peer._engine.reconciler._checking)
        with spying(server, prefix) as spy:
            client.publish(wake, b"c" + true)
            await until(lambda: spy.calls()["start_tasks"])  # another word: a wake-up
        assert held.cancelled == []
        client.publish(wake, true)
        await held.wait_for(lambda: held.cancelled == [(held.tasks[0], "cancel")])
        held.gate.set()


async def test_a_cancel_that_overtakes_the_reply_to_a_suspension_ends_the_run_that_follows(
    new_mesh: NewMesh, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worqr.peer.consumer.RECONCILE_EVERY", NEVER)
    mesh, other = new_mesh(url=proxy.url), new_mesh()
    began, gate = trio.Event(), trio.Event()

    @mesh.workflow(name="flow", result_ttl=60)
    async def flow() -> None:
        began.set()
        await gate.wait()
        await worqr.wait_for("value", int)
        await trio.sleep_forever()

    async with other.connect(), mesh.join() as peer:
        job = other.queue("flow").job((await flow.dispatch()).id)
        await began.wait()
        await job.send("value", 5)
        suspended = proxy.hold_reply(sent_as("suspend_task"), on="data")
        gate.set()
        await suspended.wait_executed()  # the value is there: the reply is that the claim goes on, in another run
        assert (await job.cancel()).running == 1
        await until(lambda: bool(peer._engine.reconciler._checking))
        suspended.release()
        with trio.fail_after(PATIENCE), pytest.raises(worqr.JobCancelled):
            await job.result()  # the run that follows ends, even before its handler begins


async def test_two_queues_of_a_worker_have_secrets_of_their_own(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    client, held = server.client(), Held()
    async with serving(mesh, "Q1", held) as peer, trio.open_nursery() as nursery:
        await nursery.start(partial(peer.serve, "Q2", held))
        one, two = (client.hget(f"{prefix}:{{{name}}}:policy:{peer.id}", "secret") for name in ("Q1", "Q2"))
        assert one != two
        assert one is not None
        assert two is not None
        nursery.cancel_scope.cancel()


async def test_the_server_decides_what_becomes_of_a_run_whose_mark_was_lost(
    mesh: worqr.Mesh, server: Server, prefix: str
) -> None:
    """A failover may forget the mark when the message is on its way: the task is not lost."""
    held, client = Held(), server.client()
    async with serving(mesh, "Q1", held) as peer:
        await mesh.queue("Q1").enqueue(b"a")
        await held.wait(1)
        client.publish(f"{prefix}:{{Q1}}:wake:{peer.id}", proof(client, prefix, peer.id, held.contexts[0].fence))
        await held.wait_for(lambda: held.cancelled == [(b"a", "cancel")])
        await held.wait(2)
        held.gate.set()
        await held.wait_for(lambda: held.done == [b"a"])


def about_the_cancel(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage().partition(":")[0] for record in caplog.records]
    return [line for line in lines if line in {"unwinds", "task.cancelling", "task.cancelled"}]


async def test_a_handler_that_is_cancelled_does_not_wait_for_the_log_line_about_it(
    mesh: worqr.Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    log, began = logging.getLogger("handler"), list[bytes]()

    async def handler(task: bytes) -> None:
        began.append(task)
        try:
            await trio.sleep_forever()
        finally:
            log.info("unwinds:")

    logged = list[list[str]]()
    async with serving(mesh, "Q1", handler):
        for n in range(10):  # Trio runs what is ready in any order
            caplog.clear()
            job = await mesh.queue("Q1").dispatch(b"%d" % n)
            await until(lambda n=n: len(began) > n)
            await job.cancel()
            await until(lambda: len(about_the_cancel(caplog)) == 3)
            logged.append(about_the_cancel(caplog))
    assert ["unwinds", "task.cancelling", "task.cancelled"] in logged


async def test_a_log_handler_that_raises_about_a_cancel_ends_no_loop(
    mesh: worqr.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Breaks(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("task.cancelling"):
                raise KeyboardInterrupt

    log, breaks, held = logging.getLogger("worqr"), Breaks(), Held()
    monkeypatch.setattr(log, "handlers", [*log.handlers, breaks])
    monkeypatch.setattr(log, "level", logging.INFO)
    async with serving(mesh, "Q1", held):
        job = await mesh.queue("Q1").dispatch(b"a", id="x")
        await held.wait(1)
        assert await job.cancel(wait=PATIENCE) == worqr.CancelCount(0, 1, 1)
        held.gate.set()
        await mesh.queue("Q1").enqueue(b"b")
        await held.wait_for(lambda: held.done == [b"b"])
    assert held.cancelled == [(b"a", "cancel")]


async def test_one_message_on_its_own_channel_tells_a_worker_of_all_its_cancelled_claims(
    mesh: worqr.Mesh, server: Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worqr.peer.consumer.RECONCILE_EVERY", NEVER)
    held, client = Held(), server.client()
    async with serving(mesh, "Q1", held, room=3) as peer:
        await mesh.queue("Q1").enqueue(b"a", b"b", b"c", b"d")
        await held.wait(3)
        with spying(server, prefix) as spy:
            mark_all(client, prefix, peer.id)
            assert client.publish(f"{prefix}:{{Q1}}:wake:{peer.id}", "c") == 1
            await held.wait_for(lambda: len(held.cancelled) == 3)
            await held.wait(4)
            calls = spy.calls()
        assert calls["reconcile"] == 1
        assert sorted(held.cancelled) == [(b"a", "cancel"), (b"b", "cancel"), (b"c", "cancel")]
        held.gate.set()
        await held.wait_for(lambda: held.done == [b"d"])


async def test_a_claim_that_is_on_its_way_when_the_message_comes_is_looked_at_when_it_is_there(
    new_mesh: NewMesh, server: Server, prefix: str, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worqr.peer.consumer.RECONCILE_EVERY", NEVER)
    mesh, other, held, client = new_mesh(url=proxy.url), new_mesh(), Held(), server.client()
    async with other.connect(), serving(mesh, "Q1", held) as peer:
        [consumer] = peer._engine.consumers.entered()
        await until(lambda: not consumer.request.in_flight)
        fault = proxy.hold_reply(sent_as("start_tasks"), on="data")
        await other.queue("Q1").enqueue(b"a", b"b")  # one alone would be handed to it
        await fault.wait_executed()
        assert held.tasks == []
        assert len(mark_all(client, prefix, peer.id)) == 2
        client.publish(f"{prefix}:{{Q1}}:wake:{peer.id}", "c")
        await until(lambda: consumer.request.recheck_on_reply)
        fault.release()
        await eventually(lambda: cancelled(other), 2)


async def cancelled(mesh: worqr.Mesh) -> int:
    return (await mesh.queue("Q1").info()).counts.get("cancelled", 0)


# Tasks of foreign producers


def announce(client: redis.Redis, prefix: str, task: bytes) -> None:
    client.lpush(f"{prefix}:{{Q1}}", task)
    client.publish(f"{prefix}:{{Q1}}", "1")


async def starts(spy: Spy) -> int:
    """How many start requests there were since, once there is one."""
    calls: Counter[str] = Counter()
    await until(lambda: calls.update(spy.calls()) or calls["start_tasks"])
    return calls["start_tasks"]


@pytest.mark.usefixtures("without_scans")
async def test_a_busy_worker_sends_nothing_for_a_foreign_task(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    held, client = Held(), server.client()
    async with serving(mesh, "Q1", held, room=1) as peer:
        await mesh.queue("Q1").enqueue(b"a")
        await held.wait(1)
        with spying(server, prefix) as spy:
            for _ in range(3):
                announce(client, prefix, b"b")
            client.publish(f"{prefix}:{{Q1}}:wake:{peer.id}", "1")  # comes after them, and is passed on
            assert await starts(spy) == 1
        held.gate.set()
        await held.wait_for(lambda: held.done == [b"a", b"b", b"b", b"b"])


@pytest.mark.usefixtures("without_scans")
async def test_of_many_idle_workers_a_few_ask_for_a_foreign_task(
    new_mesh: NewMesh, server: Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worqr.peer.consumer.random", lambda: 0.5)
    runs, client, many, tasks = Runs(), server.client(), 20, 20
    async with AsyncExitStack() as stack:
        meshes = [new_mesh() for _ in range(2)]
        peers = [await stack.enter_async_context(serving(meshes[n % 2], "Q1", runs, room=1)) for n in range(many)]

        async def hungry() -> int:
            return server.look.scard(f"{prefix}:{{Q1}}:hungry")

        await eventually(hungry, many)
        await until(lambda: any(peer._engine.leader.leads for peer in peers))
        with spying(server, prefix) as spy:
            for n in range(tasks):
                announce(client, prefix, b"%d" % n)
                await runs.wait(n + 1)
            await eventually(partial(meshes[0].queue("Q1").running), [])
            calls = spy.calls()
        assert sorted(map(int, runs.tasks)) == list(range(tasks))
        assert calls["start_tasks"] <= 5 * tasks, "every worker asked before: 20 for each task"


@pytest.mark.usefixtures("without_scans")
async def test_on_a_paused_queue_nobody_asks_for_a_foreign_task_until_it_is_resumed(
    mesh: worqr.Mesh, other: worqr.Mesh, server: Server, prefix: str
) -> None:
    runs, client = Runs(), server.client()
    async with AsyncExitStack() as stack:
        leads = await stack.enter_async_context(serving(mesh, "Q2", runs))
        await until(lambda: leads._engine.leader.leads)
        peer = await stack.enter_async_context(serving(other, "Q1", runs))
        [consumer] = peer._engine.consumers.entered()
        await mesh.queue("Q1").pause()
        announce(client, prefix, b"a")
        await until(lambda: consumer.request.workers_waiting > 1)
        with spying(server, prefix) as spy:
            for _ in range(3):
                announce(client, prefix, b"b")
            client.publish(f"{prefix}:{{Q1}}:wake:{peer.id}", "1")
            assert await starts(spy) == 1
        await mesh.queue("Q1").resume()
        assert sorted(await runs.wait(4)) == [b"a", b"b", b"b", b"b"]
