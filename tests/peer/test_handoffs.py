"""A task that comes with its wake-up: it runs at once, or goes to another worker; and it is run once, whatever becomes of the
message.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from contextlib import AsyncExitStack
from functools import partial

import pytest
import redis
import trio

import worqr
from tests.peer.conftest import NewMesh
from tests.peer.tools import Held, Runs, eventually, serving, spying, until
from tests.support.patience import PATIENCE
from tests.support.proxy import FaultProxy, sent_as
from tests.support.servers import Server
from worqr.peer.consumer import Phase, QueueConsumer
from worqr.peer.scheduler import Scheduler

pytestmark = pytest.mark.one_server


@pytest.fixture
def without_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run counts as short however busy the machine is."""
    monkeypatch.setattr("worqr.peer.settler.HANDOFF_REST", PATIENCE)


async def until_waiting(client: redis.Redis, prefix: str, peer: worqr.Peer, queue: str = "Q1") -> None:
    await until(lambda: bool(client.sismember(f"{prefix}:{{{queue}}}:hungry", peer.id)))


async def until_settled(client: redis.Redis, prefix: str, peer: worqr.Peer) -> QueueConsumer:
    """Until it waits for tasks, and knows that its claims are those of the server."""
    await until_waiting(client, prefix, peer)
    [consumer] = peer._engine.consumers.entered()
    await until(lambda: consumer.admission.checked_on > 0)
    return consumer


def handoff(client: redis.Redis, prefix: str, worker: str, claim: int, task: bytes) -> bytes:
    """What a script sends to the worker that gets the task."""
    secret = client.hget(f"{prefix}:{{Q1}}:policy:{worker}", "secret")
    assert isinstance(secret, bytes)
    digest = hashlib.sha1(b"%s %d %s" % (secret, claim, task)).hexdigest()
    return b"t %d %s %s" % (claim, digest.encode(), task)


def give(client: redis.Redis, prefix: str, worker: str, claim: int, task: bytes) -> None:
    """Claim a task for a worker, as the script does, but send no message."""
    client.lpush(f"{prefix}:{{Q1}}:claim:{claim}", task)
    client.sadd(f"{prefix}:{{Q1}}:claims:{worker}", claim)
    client.hset(f"{prefix}:{{Q1}}:counts", "fence", claim)
    client.srem(f"{prefix}:{{Q1}}:hungry", worker)


@pytest.mark.usefixtures("without_scans", "without_haste")
async def test_its_end_takes_the_worker_back_without_a_request(
    new_mesh: NewMesh, proxy: FaultProxy, server: Server, prefix: str
) -> None:
    mesh, other, runs, client = new_mesh(url=proxy.url), new_mesh(), Runs(), server.client()
    async with other.connect(), serving(mesh, "Q1", runs) as peer:
        await until_waiting(client, prefix, peer)
        starts = proxy.count(sent_as("start_tasks"))
        for n in range(1, 4):
            await other.queue("Q1").enqueue(b"a b\r\n\x00")
            assert await runs.wait(n) == [b"a b\r\n\x00"] * n
            await until_waiting(client, prefix, peer)
        assert [context.attempt for context in runs.contexts] == [1, 1, 1]
        assert client.keys(f"{prefix}:{{Q1}}:claim*") == []
        assert proxy.count(sent_as("start_tasks")) == starts


@pytest.mark.usefixtures("without_scans", "without_haste")
async def test_a_task_that_waits_at_its_end_is_started(
    new_mesh: NewMesh, proxy: FaultProxy, server: Server, prefix: str
) -> None:
    mesh, other, runs, client = new_mesh(url=proxy.url), new_mesh(), Runs(), server.client()
    async with other.connect(), serving(mesh, "Q1", runs) as peer:
        await until_waiting(client, prefix, peer)
        finish = proxy.hold(sent_as("finish_tasks"), on="data")
        await other.queue("Q1").enqueue(b"a")
        await finish.wait_fired()
        await other.queue("Q1").enqueue(b"b")
        assert client.lrange(f"{prefix}:{{Q1}}", 0, -1) == [b"b"]
        finish.release()
        assert await runs.wait(2) == [b"a", b"b"]
        await until_waiting(client, prefix, peer)


@pytest.mark.usefixtures("without_scans", "without_haste")
async def test_the_next_one_may_overtake_the_reply_to_its_end(
    new_mesh: NewMesh, proxy: FaultProxy, server: Server, prefix: str
) -> None:
    mesh, other, runs, client = new_mesh(url=proxy.url), new_mesh(), Runs(), server.client()
    async with other.connect(), serving(mesh, "Q1", runs, room=1) as peer:
        await until_waiting(client, prefix, peer)
        reply = proxy.hold_reply(sent_as("finish_tasks"), on="data")
        await other.queue("Q1").enqueue(b"a")
        await reply.wait_executed()
        await until_waiting(client, prefix, peer)
        await other.queue("Q1").enqueue(b"b")
        assert await runs.wait(2) == [b"a", b"b"]
        assert not client.exists(f"{prefix}:{{Q1}}:hungry")
        reply.release()
        await until_waiting(client, prefix, peer)
        assert client.keys(f"{prefix}:{{Q1}}:claim*") == []


@pytest.mark.usefixtures("without_scans", "without_haste")
async def test_where_another_queue_wants_tasks_the_scheduler_decides(
    new_mesh: NewMesh, proxy: FaultProxy, server: Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh, other, runs, client = new_mesh(url=proxy.url), new_mesh(), Runs(), server.client()
    monkeypatch.setattr(Scheduler, "has_others_for", lambda _scheduler, _share: True)
    async with other.connect(), serving(mesh, "Q1", runs) as peer:
        await until_waiting(client, prefix, peer)
        starts = proxy.count(sent_as("start_tasks"))
        await other.queue("Q1").enqueue(b"a")
        await runs.wait(1)
        await until_waiting(client, prefix, peer)
        assert proxy.count(sent_as("start_tasks")) == starts + 1


@pytest.mark.usefixtures("without_haste")
async def test_an_end_that_breaks_each_connection_does_not_hold_up_its_queue(
    new_mesh: NewMesh, proxy: FaultProxy, server: Server, prefix: str
) -> None:
    mesh, other, runs, client = new_mesh(url=proxy.url), new_mesh(), Runs(), server.client()
    async with other.connect(), serving(mesh, "Q1", runs) as peer:
        await until_waiting(client, prefix, peer)
        ends = [proxy.drop_request(sent_as("finish_tasks"), on="data") for _ in range(50)]
        await other.queue("Q1").enqueue(b"a")
        await ends[2].wait_fired()
        await other.queue("Q1").enqueue(b"b")
        assert await runs.wait(2) == [b"a", b"b"]
        assert not ends[-1].fired
        proxy.pass_all()


@pytest.mark.usefixtures("without_scans", "without_haste")
async def test_a_late_copy_of_its_end_does_not_take_back_a_worker_that_drains(
    new_mesh: NewMesh, proxy: FaultProxy, server: Server, prefix: str
) -> None:
    mesh, other, held, client = new_mesh(url=proxy.url), new_mesh(), Held(), server.client()

    async def handler(task: bytes) -> None:
        if task == b"runs":
            await held(task)

    async with other.connect(), serving(mesh, "Q1", handler) as peer, trio.open_nursery() as nursery:
        await until_waiting(client, prefix, peer)
        await other.queue("Q1").enqueue(b"runs")
        await held.wait(1)
        [consumer] = peer._engine.consumers.entered()
        consumer.request_soon()  # however long the rest is
        await until_waiting(client, prefix, peer)
        copy = proxy.hold(sent_as("finish_tasks"), on="data")
        await other.queue("Q1").enqueue(b"a")
        await copy.wait_fired()
        proxy.cut("data")
        await until_waiting(client, prefix, peer)
        nursery.start_soon(peer.drain, PATIENCE)
        await until(lambda: not client.exists(f"{prefix}:{{Q1}}:hungry"))
        copy.release()
        await copy.wait_executed()
        assert not client.exists(f"{prefix}:{{Q1}}:hungry")
        held.gate.set()


@pytest.mark.usefixtures("without_scans", "without_haste")
async def test_after_an_end_that_is_refused_the_worker_requests_tasks(
    new_mesh: NewMesh, proxy: FaultProxy, server: Server, prefix: str
) -> None:
    mesh, other, runs, client = new_mesh(url=proxy.url), new_mesh(), Runs(), server.client()
    counts = f"{prefix}:{{Q1}}:counts"

    async def handler(task: bytes) -> None:
        await runs(task)
        if task == b"a":
            client.rename(counts, f"{counts}-kept")
            client.set(counts, "odd")

    async with other.connect(), serving(mesh, "Q1", handler, room=1) as peer:
        await until_waiting(client, prefix, peer)
        refused = proxy.hold_reply(sent_as("finish_tasks"), on="data")
        await other.queue("Q1").enqueue(b"a")
        await refused.wait_executed()
        client.rename(f"{counts}-kept", counts)
        refused.release()
        await until_waiting(client, prefix, peer)
        await until(lambda: client.keys(f"{prefix}:{{Q1}}:claim*") == [])
        await other.queue("Q1").enqueue(b"b")
        assert await runs.wait(2) == [b"a", b"b"]
        await until(lambda: client.hget(counts, "finished") == b"2")
        rejoins = [request.words[5] for request in proxy.seen(sent_as("finish_tasks"), on="data")]
        assert [bool(number) for number in rejoins] == [True, False, True]


@pytest.mark.usefixtures("without_scans")
@pytest.mark.parametrize("in_thread", [False, True])
async def test_while_its_handler_goes_on_the_worker_takes_others(
    mesh: worqr.Mesh, server: Server, prefix: str, in_thread: bool
) -> None:
    client, held, gate, began = server.client(), Held(), threading.Event(), list[bytes]()

    def blocking(task: bytes) -> None:
        began.append(task)
        gate.wait(3 * PATIENCE)

    async with serving(mesh, "Q1", blocking if in_thread else held, room=3) as peer:
        for n in range(3):
            await until_waiting(client, prefix, peer)
            await mesh.queue("Q1").enqueue(b"%d" % n)
            await until(lambda n=n: len(began if in_thread else held.tasks) == n + 1)
        gate.set()
        held.gate.set()


@pytest.mark.usefixtures("without_scans")
async def test_without_a_free_unit_another_worker_runs_it(
    new_mesh: NewMesh, proxy: FaultProxy, server: Server, prefix: str
) -> None:
    one, two, client, held, runs = new_mesh(url=proxy.url), new_mesh(), server.client(), Held(), Runs()
    async with serving(one, "Q1", held, room=1) as full, trio.open_nursery() as nursery:
        await nursery.start(partial(full.serve, "Q2", held))
        await until_waiting(client, prefix, full)
        await one.queue("Q2").enqueue(b"fills")
        await held.wait(1)
        async with two.join(concurrency=1) as free, trio.open_nursery() as inner:
            await inner.start(partial(free.serve, "Q1", runs))
            await until_waiting(client, prefix, free)
            client.srem(f"{prefix}:{{Q1}}:hungry", free.id)
            given_back = proxy.hold(sent_as("stop_tasks"), on="data")
            await two.queue("Q1").enqueue(b"a")  # for the one that is full
            await given_back.wait_fired()
            client.sadd(f"{prefix}:{{Q1}}:hungry", free.id)
            given_back.release()
            assert await runs.wait(1) == [b"a"]
            assert runs.contexts[0].attempt == 1
            inner.cancel_scope.cancel()
        held.gate.set()
        nursery.cancel_scope.cancel()
    assert held.tasks == [b"fills"]


@pytest.mark.usefixtures("without_scans")
async def test_it_waits_for_the_reply_that_has_reserved_the_unit(
    new_mesh: NewMesh, proxy: FaultProxy, server: Server, prefix: str
) -> None:
    mesh, other, runs, client = new_mesh(url=proxy.url), new_mesh(), Runs(), server.client()
    reply = proxy.hold_reply(sent_as("start_tasks"), on="data")
    async with other.connect(), serving(mesh, "Q1", runs, room=1) as peer:
        await reply.wait_executed()
        await until_waiting(client, prefix, peer)
        [consumer] = peer._engine.consumers.entered()
        await other.queue("Q1").enqueue(b"a")
        await until(lambda: bool(consumer.request.handed))
        assert (runs.tasks, consumer.request.reserved) == ([], 1)
        reply.release()
        assert await runs.wait(1) == [b"a"]
        await other.queue("Q1").enqueue(b"b")
        assert await runs.wait(2) == [b"a", b"b"]


async def test_while_its_registration_is_in_doubt_it_does_not_run(
    new_mesh: NewMesh, server: Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh, other, runs, client = new_mesh(), new_mesh(), Runs(), server.client()
    fresh, asked = False, 0

    def is_fresh() -> bool:
        nonlocal asked
        asked += 1
        return fresh

    async with other.connect(), serving(mesh, "Q1", runs) as peer:
        await until_waiting(client, prefix, peer)
        [consumer] = peer._engine.consumers.entered()
        monkeypatch.setattr(peer._engine.session, "beat_is_fresh", is_fresh)
        await other.queue("Q1").enqueue(b"a")
        await until(lambda: asked >= 3)  # when it came, and after each heartbeat
        assert (runs.tasks, len(consumer.request.handed)) == ([], 1)
        fresh = True
        assert await runs.wait(1) == [b"a"]


async def test_a_worker_that_counts_as_dead_does_not_run_it(
    new_mesh: NewMesh, server: Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh, other, runs, others, client = new_mesh(), new_mesh(), Runs(), Runs(), server.client()
    async with serving(mesh, "Q1", runs) as peer, AsyncExitStack() as stack:
        await until_waiting(client, prefix, peer)
        [consumer] = peer._engine.consumers.entered()
        monkeypatch.setattr(peer._engine.session, "beat_is_fresh", lambda: False)
        await mesh.queue("Q1").enqueue(b"a")
        await until(lambda: bool(consumer.request.handed))
        registration = consumer.registration
        assert registration is not None
        await stack.enter_async_context(serving(other, "Q1", others))
        await mesh.evict(registration.worker)
        assert await others.wait(1) == [b"a"]
        await until(lambda: registration.dead and not consumer.request.handed)
        assert runs.tasks == []


@pytest.mark.parametrize("late", [False, True])
async def test_a_lost_message_delays_it_and_a_late_one_does_not_run_it_again(
    mesh: worqr.Mesh, server: Server, prefix: str, late: bool
) -> None:
    client, runs = server.client(), Runs()
    async with serving(mesh, "Q1", runs) as peer:
        consumer = await until_settled(client, prefix, peer)
        claim = int(client.hget(f"{prefix}:{{Q1}}:counts", "fence") or 0) + 10**15
        message = handoff(client, prefix, peer.id, claim, b"a")
        give(client, prefix, peer.id, claim, b"a")
        client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        assert await runs.wait(1) == [b"a"]
        assert runs.contexts[0].attempt == 1
        await until(lambda: not client.keys(f"{prefix}:{{Q1}}:claim*"))
        await until(lambda: consumer.admission.checked_on > 0)
        if late:
            with spying(server, prefix) as spy:
                assert client.publish(f"{prefix}:{{Q1}}:wake:{peer.id}", message) == 1
                calls, both = Counter[str](), {"start_tasks", "list_own_claims"}  # a mere wake-up; and to be sure
                await until(lambda: calls.update(spy.calls()) or both <= calls.keys())
        assert runs.tasks == [b"a"]


async def test_a_message_that_comes_again_is_a_wake_up(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    client, runs = server.client(), Runs()
    async with serving(mesh, "Q1", runs) as peer:
        await until_waiting(client, prefix, peer)
        wake = f"{prefix}:{{Q1}}:wake:{peer.id}"
        heard = client.pubsub(ignore_subscribe_messages=True)
        heard.subscribe(wake)
        heard.get_message(timeout=PATIENCE)
        await mesh.queue("Q1").enqueue(b"a")
        await runs.wait(1)
        message = heard.get_message(timeout=PATIENCE)
        assert message is not None
        await until_waiting(client, prefix, peer)
        with spying(server, prefix) as spy:
            client.publish(wake, message["data"])
            await until(lambda: spy.calls()["start_tasks"] > 0)
        assert runs.tasks == [b"a"]
        heard.close()


async def test_after_the_counters_were_deleted_one_task_is_late(
    mesh: worqr.Mesh, server: Server, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its token is smaller than that of the hand-off before. It counts as late, and is found among the claims."""
    client, runs = server.client(), Runs()
    async with serving(mesh, "Q1", runs) as peer:
        await until_waiting(client, prefix, peer)
        client.hset(f"{prefix}:{{Q1}}:counts", "fence", 8 * 10**15)
        await mesh.queue("Q1").enqueue(b"a")
        await runs.wait(1)
        await until_waiting(client, prefix, peer)
        client.delete(f"{prefix}:{{Q1}}:counts")
        for n, task in enumerate((b"b", b"c", b"d"), 2):
            await mesh.queue("Q1").enqueue(task)
            await runs.wait(n)
            await until_waiting(client, prefix, peer)
    assert runs.tasks == [b"a", b"b", b"c", b"d"]
    assert [record.getMessage().partition(":")[0] for record in caplog.records].count("claim.stray") == 1


async def test_a_message_without_the_proof_for_this_task_runs_nothing(
    mesh: worqr.Mesh, server: Server, prefix: str
) -> None:
    client, runs = server.client(), Runs()
    async with serving(mesh, "Q1", runs) as peer:
        await until_waiting(client, prefix, peer)
        claim, wake = 8 * 10**15, f"{prefix}:{{Q1}}:wake:{peer.id}"
        true = handoff(client, prefix, peer.id, claim, b"task")
        digest = true.split()[2]
        for forged in (
            *(
                true + b"x",
                true[:-1],
                b"t",
                b"t ",
                b"t %d" % claim,
                b"t %d %s" % (claim, digest),
                b"t  %s task" % digest,
            ),
            *(
                b"t %d %s task" % (claim + 1, digest),
                b"t 0%d %s task" % (claim, digest),
                b"t %d %s task" % (claim, b"0" * 40),
            ),
            *(b"T" + true[1:], b"t\t" + true[2:], b"t \xff " + digest + b" task", b"t " + b"9" * 5000 + b" x y"),
        ):
            with spying(server, prefix) as spy:
                assert client.publish(wake, forged) == 1
                await until(lambda spy=spy: spy.calls()["start_tasks"] > 0)
        assert runs.tasks == []


async def test_a_worker_that_leaves_lets_another_one_run_it(new_mesh: NewMesh, server: Server, prefix: str) -> None:
    one, two, client, held, runs = new_mesh(), new_mesh(), server.client(), Held(), Runs()
    async with two.join() as other, trio.open_nursery() as nursery:
        async with one.join(grace=PATIENCE) as peer, trio.open_nursery() as inner:
            await inner.start(partial(peer.serve, "Q1", held))
            await one.queue("Q1").enqueue(b"runs")
            await held.wait(1)
            await until_waiting(client, prefix, peer)
            [consumer] = peer._engine.consumers.entered()
            inner.cancel_scope.cancel()
            await until(lambda: consumer.lifecycle.is_leaving)
            await until(lambda: not client.sismember(f"{prefix}:{{Q1}}:hungry", peer.id))
            await one.queue("Q1").enqueue(b"a")
            await nursery.start(partial(other.serve, "Q1", runs))
            assert await runs.wait(1) == [b"a"]
            held.gate.set()
        nursery.cancel_scope.cancel()
    assert held.tasks == [b"runs"]


@pytest.mark.parametrize("taken", [True, False])
async def test_only_plain_handlers_take_them(mesh: worqr.Mesh, server: Server, prefix: str, taken: bool) -> None:
    """The others ask for permits, collect a list, find out a lane, or wait for a call first."""
    client = server.client()

    async def handler(task: int) -> None: ...

    def thread(task: int) -> None: ...

    async def listing(tasks: list[int]) -> None: ...

    if taken:
        mesh.task(handler, name="loop")
        mesh.task(thread, name="thread")
        mesh.task(handler, name="asyncio", runs_in="asyncio")
    else:
        mesh.task(handler, name="limited", limit=worqr.Limit(2, name="api"))
        mesh.task(listing, name="lists", batch_size=10)
        mesh.task(handler, name="lanes", lanes=worqr.Lanes("task"))
    async with mesh.join():
        names = ["loop", "thread", "asyncio"] if taken else ["limited", "lists", "lanes"]

        async def served() -> set[str]:
            return {queue for worker in await mesh.workers() for queue in worker.queues}

        await eventually(served, set(names))
        for name in names:
            [key] = client.keys(f"{prefix}:{{{name}}}:policy:*")
            assert client.hexists(key, "handoffs") == taken, name


@pytest.mark.parametrize("phase", [Phase.DRAINING, Phase.RETURNING])
async def test_what_comes_to_a_worker_that_leaves_goes_back_at_once(
    new_mesh: NewMesh, server: Server, prefix: str, phase: Phase
) -> None:
    one, two, client, runs, gate = new_mesh(), new_mesh(), server.client(), Runs(), trio.Event()
    began = trio.Event()

    async def stubborn(task: bytes) -> None:
        began.set()
        with trio.CancelScope(shield=True):
            await gate.wait()

    scope, grace = trio.CancelScope(), PATIENCE if phase is Phase.DRAINING else 0

    async def serve(task_status: trio.TaskStatus[None]) -> None:
        with scope:
            await peer.serve("Q1", stubborn, task_status=task_status)

    async with serving(two, "Q1", runs), one.join(grace=grace) as peer, trio.open_nursery() as nursery:
        await nursery.start(serve)
        [consumer] = peer._engine.consumers.entered()
        for n, task in enumerate([b"stubborn", b"a"], 8 * 10**15):
            give(client, prefix, peer.id, n, task)
            client.publish(f"{prefix}:{{Q1}}:wake:{peer.id}", handoff(client, prefix, peer.id, n, task))
            await began.wait()
            scope.cancel()
            await until(lambda: consumer.lifecycle.phase >= phase)
        try:
            assert await runs.wait(1) == [b"a"]
        finally:
            gate.set()


async def test_a_list_of_claims_from_before_a_loss_settles_nothing(
    new_mesh: NewMesh, proxy: FaultProxy, server: Server, prefix: str
) -> None:
    mesh, runs, client = new_mesh(url=proxy.url), Runs(), server.client()
    async with serving(mesh, "Q1", runs) as peer:
        consumer = await until_settled(client, prefix, peer)
        listed = proxy.hold_reply(sent_as("list_own_claims"), on="data")
        consumer.admission.distrust()
        await listed.wait_executed()
        give(client, prefix, peer.id, 8 * 10**15, b"a")
        doubts = consumer.admission.doubts
        client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        await until(lambda: consumer.admission.doubts > doubts)
        listed.release()
        assert await runs.wait(1) == [b"a"]


async def test_before_its_channel_is_confirmed_a_worker_takes_nothing(
    mesh: worqr.Mesh, server: Server, prefix: str
) -> None:
    """A message may be from an earlier time in which the worker served the queue, and its claim given back."""
    client, runs = server.client(), Runs()
    async with serving(mesh, "Q1", runs) as peer:
        consumer = await until_settled(client, prefix, peer)
        consumer.admission.listening = False
        with spying(server, prefix) as spy:
            message = handoff(client, prefix, peer.id, 8 * 10**15, b"a")
            client.publish(f"{prefix}:{{Q1}}:wake:{peer.id}", message)
            await until(lambda: spy.calls()["start_tasks"] > 0)
        assert runs.tasks == []


async def test_a_worker_that_is_not_missed_soon_takes_none(new_mesh: NewMesh, server: Server, prefix: str) -> None:
    for n, keepalive in enumerate([None, 60.0, 3.0]):
        async with serving(new_mesh(keepalive=keepalive), f"Q{n}", Runs()) as peer:
            policy = server.client().hgetall(f"{prefix}:{{Q{n}}}:policy:{peer.id}")
            assert (b"handoffs" in policy) is (keepalive == 3.0)


async def test_a_worker_that_drains_waits_for_no_more_tasks(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    client, held = server.client(), Held()
    async with serving(mesh, "Q1", held) as peer, trio.open_nursery() as nursery:
        await mesh.queue("Q1").enqueue(b"runs")
        await held.wait(1)
        await until_waiting(client, prefix, peer)
        nursery.start_soon(peer.drain, PATIENCE)
        await until(lambda: not client.exists(f"{prefix}:{{Q1}}:hungry"))
        assert held.cancelled == []
        held.gate.set()
