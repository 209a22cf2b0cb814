"""A mesh on a real cluster: what it does on one server it does there, and it goes on while primaries and slots change."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio

import worqr
from tests.peer.tools import Held, Runs, eventually, serving, until
from tests.support.children import Child
from tests.support.clusters import Cluster, Node, cluster, cluster_of, cluster_of_module, fail_over, move_slot
from tests.support.patience import PATIENCE, have_patience
from worqr.inside import client_of
from worqr.link.session import slot_of

assert cluster, cluster_of_module  # fixtures

QUEUES = ("Q0", "Q2", "Q1")
"""One on each node; the registry lies on that of the second."""
CHILD = Path(__file__).parent / "faults" / "child_peer.py"


class Load:
    """Producers on each queue and three peers that serve them all; knows what was acknowledged, and what ran."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.mesh = worqr.Mesh(cluster.url, app="producer")
        self.acknowledged: list[bytes] = []
        self.runs: Counter[bytes] = Counter()
        self.peers: list[worqr.Peer] = []
        self.ids: list[str] = []
        self.stopped = False
        self.pause = 0.0

    async def handle(self, task: bytes) -> None:
        await trio.sleep(0.001)
        self.runs[task] += 1

    async def produce(self, queue: str, name: str) -> None:
        number = 0
        while not self.stopped:
            number += 1
            task = f"{queue} {name} {number}".encode()
            await self.mesh.queue(queue).enqueue(task)
            self.acknowledged.append(task)
            await trio.sleep(self.pause)

    async def more(self, count: int) -> None:
        """Until so many more have run, of each queue."""
        before = self.per_queue()
        await until(
            lambda: all(self.per_queue()[queue] >= before[queue] + count for queue in QUEUES),
            what="more runs on each queue",
        )

    def per_queue(self) -> Counter[str]:
        return Counter(task.decode().partition(" ")[0] for task in self.runs)

    @asynccontextmanager
    async def going_on(self) -> AsyncIterator[None]:
        """For the length of a block; then all that was acknowledged is worked off, as far as it is there."""
        async with AsyncExitStack() as stack:
            for _ in range(3):
                mesh = worqr.Mesh(self.cluster.url)
                self.peers.append(await stack.enter_async_context(mesh.join(concurrency=10, grace=0)))
            self.ids = [peer.id for peer in self.peers]
            await stack.enter_async_context(self.mesh.connect())
            async with trio.open_nursery() as nursery:
                for peer in self.peers:
                    for queue in QUEUES:
                        await nursery.start(partial(peer.serve, queue, self.handle))
                async with trio.open_nursery() as producers:
                    for queue in QUEUES:
                        for name in "ab":
                            producers.start_soon(self.produce, queue, name)
                    await self.more(50)
                    yield
                    await self.more(50)
                    self.stopped = True
                for queue in QUEUES:
                    await eventually(partial(self.left_in, queue), 0)
                nursery.cancel_scope.cancel()

    async def left_in(self, queue: str) -> int:
        info = await self.mesh.queue(queue).info()
        return info.waiting + info.running + info.scheduled

    def lost(self) -> list[bytes]:
        return [task for task in self.acknowledged if task not in self.runs]

    def twice(self) -> list[bytes]:
        return [task for task, times in self.runs.items() if times > 1]


async def test_everything_works_on_a_cluster(cluster: Cluster) -> None:
    mesh = worqr.Mesh(cluster.url)
    runs = Runs()

    @mesh.task(name="Q0", result_ttl=60)
    async def add(a: int, b: int) -> int:
        return a + b

    @mesh.task(name="Q1", retry=worqr.RetryPolicy(max_failures=1))
    async def fail(why: str) -> None:
        raise ValueError(why)

    followed: list[str] = []

    @mesh.task(name="Q3")
    async def note(word: str) -> None:
        ended = worqr.current().ended_job
        followed.append(f"{word} {ended and ended.queue}")

    held = Held()
    async with mesh.join() as peer, trio.open_nursery() as nursery:
        await nursery.start(partial(peer.serve, "Q2", held))
        await nursery.start(partial(peer.serve, "Q5", runs))
        assert await (await add.dispatch(1, 2)).result(timeout=PATIENCE) == 3
        await add.options(then=note.call("then")).dispatch(1, 2)
        await fail.options(otherwise=note.call("otherwise")).dispatch("x")
        await until(lambda: sorted(followed) == ["otherwise Q1", "then Q0"], PATIENCE)
        assert (
            await (await add.options(delay=0.2).dispatch(3, 4)).result(timeout=PATIENCE) == 7
        )  # promoted when it is due
        reports = await trio.to_thread.run_sync(client_of(mesh).link.server_reports, PATIENCE)
        assert [(report.problem, report.info["role"]) for report in reports] == [("", "master")] * len(reports)
        assert len({report.address for report in reports}) == cluster.primaries
        jobs = await mesh.dispatch_many([add.call(i, i) for i in range(100)])
        assert [await job.result(timeout=PATIENCE) for job in jobs] == [2 * i for i in range(100)]
        await fail.enqueue("so it is")
        await eventually(partial(_failed, fail.queue), ["so it is", "x"])
        await mesh.queue("Q2").enqueue(b"x", b"y")
        await held.wait(2)
        assert await mesh.queue("Q2").cancel(b"x", wait=PATIENCE) == worqr.CancelCount(0, 1, 1)
        assert held.cancelled == [(b"x", "cancel")]
        async with mesh.queue("Q5").events() as events:
            await mesh.queue("Q5").enqueue(b"told")
            assert (await anext(events)).type == "enqueued"
        await mesh.queue("Q5").pause("lunch")
        await mesh.queue("Q5").enqueue(b"later")
        await mesh.queue("Q5").resume()
        assert await runs.wait(2) == [b"told", b"later"]
        assert {info.name for info in await mesh.queues()} >= {"Q0", "Q1", "Q2", "Q5"}
        [worker] = await mesh.workers()
        assert worker.queues == {"Q0", "Q1", "Q2", "Q3", "Q5"}
        held.gate.set()
        await held.wait_for(lambda: held.done == [b"y"])
        assert await fail.queue.failed.drop_all() == 2
        nursery.cancel_scope.cancel()
    assert not [key for key in cluster.all_keys() if key.endswith(("}", ":claims", ":never"))]


async def _failed(queue: worqr.Queue) -> list[str]:
    return [each.error.message for each in await queue.failed.list()]


async def test_schedules_fire_on_a_cluster(cluster: Cluster) -> None:
    mesh = worqr.Mesh(cluster.url)
    runs = trio.Event()

    @mesh.every(0.2)
    @mesh.task(name="Q1")
    async def tick() -> None:
        runs.set()

    async with mesh.join():
        with trio.fail_after(PATIENCE):
            await runs.wait()
        [schedule] = await mesh.schedules()
        assert schedule.name == "Q1"


async def test_the_tasks_of_a_killed_peer_come_back_on_all_nodes(cluster: Cluster, spawn: Callable[..., Child]) -> None:
    children = {queue: spawn(CHILD, cluster.url, "worqr", queue) for queue in QUEUES}
    for child in children.values():
        await child.line_with("joined")
    mesh = worqr.Mesh(cluster.url)
    async with mesh.connect():
        for queue, child in children.items():
            await mesh.queue(queue).enqueue(b"hold", b"hold 2")
            await child.line_with("run hold")
        for child in children.values():
            child.kill()
        found: list[Runs] = [Runs() for _ in QUEUES]
        async with AsyncExitStack() as stack:
            for queue, runs in zip(QUEUES, found, strict=True):
                await stack.enter_async_context(serving(worqr.Mesh(cluster.url), queue, runs))
            for runs in found:
                assert sorted(await runs.wait(2)) == [b"hold", b"hold 2"]
                assert {context.stalls for context in runs.contexts} == {1}


async def test_a_failover_of_each_node_is_survived_by_all(cluster: Cluster) -> None:
    load = Load(cluster)
    async with load.going_on():
        for queue in QUEUES:
            replica = cluster.replica_of(cluster.owner(f"worqr:{{{queue}}}"))
            await trio.to_thread.run_sync(fail_over, replica)
            await trio.to_thread.run_sync(cluster.settle)
            await load.more(50)
        assert [peer.id for peer in load.peers] == load.ids, "nobody was swept"
    assert load.lost() == []
    assert load.twice() == []


async def test_a_primary_is_killed_that_holds_the_registry(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    load = Load(cluster)
    async with load.going_on():
        victim = cluster.owner("{worqr}")
        replica = cluster.replica_of(victim)
        copied = victim.ask("ROLE")[1]
        await until(lambda: replica.ask("ROLE")[4] >= copied, what="a replica in step")
        victim.kill()
        load.pause = 0.05  # those on other nodes need not use all of a core for seconds
        await until(lambda: replica.role == "master", what="an election")
        load.pause = 0.0
        await load.more(50)
        assert [peer.id for peer in load.peers] == load.ids, "nobody was swept"
    on_other_nodes = [
        task for task in load.lost() if cluster.owner(f"worqr:{{{task.decode().split()[0]}}}") is not replica
    ]
    assert on_other_nodes == []
    assert len(load.lost()) <= 100  # what was acknowledged and not yet copied: documented


async def test_a_slot_is_moved_while_its_queue_is_worked_on(cluster: Cluster) -> None:
    load = Load(cluster)
    source, target = cluster.owner("worqr:{Q0}"), cluster.owner("worqr:{Q1}")
    async with load.going_on():
        await trio.to_thread.run_sync(move_slot, cluster, slot_of("worqr:{Q0}"), target)
        await load.more(50)
    assert cluster.owner("worqr:{Q0}") is target
    assert (load.lost(), load.twice()) == ([], [])
    await trio.to_thread.run_sync(move_slot, cluster, slot_of("worqr:{Q0}"), source)


async def test_functions_on_two_nodes_share_a_limit_on_a_third_that_moves_and_fails_over(cluster: Cluster) -> None:
    limit, ran, inside, most = worqr.Limit(2, name="Q2"), Counter[str](), 0, 0
    meshes = [worqr.Mesh(cluster.url) for _ in range(2)]

    async def call(queue: str) -> None:
        nonlocal inside, most
        inside, most = inside + 1, max(most, inside + 1)
        await trio.sleep(0.002)
        inside, ran[queue] = inside - 1, ran[queue] + 1

    def function_of(mesh: worqr.Mesh, queue: str) -> worqr.Function[[], None]:
        @mesh.task(name=queue, limit=limit)
        async def run() -> None:
            await call(queue)

        return run

    functions = [function_of(mesh, queue) for mesh, queue in zip(meshes, ("Q0", "Q1"), strict=True)]
    slot, source, target = slot_of("worqr:{Q2}"), cluster.owner("worqr:{Q2}"), cluster.owner("worqr:{Q0}")

    async def more(number: int) -> None:
        end = {queue: ran[queue] + number for queue in ("Q0", "Q1")}
        for mesh, function in zip(meshes, functions, strict=True):
            await mesh.enqueue_many([function.call() for _ in range(number)])
        await until(lambda: all(ran[queue] >= end[queue] for queue in end), what="runs of both functions")

    async with meshes[0].join(), meshes[1].join(), trio.open_nursery() as nursery:
        await more(20)
        nursery.start_soon(more, 300)
        await trio.to_thread.run_sync(move_slot, cluster, slot, target)
        await more(20)
        await trio.to_thread.run_sync(move_slot, cluster, slot, source)
        await trio.to_thread.run_sync(fail_over, cluster.replica_of(source))
        await more(20)
        async with meshes[0].limit(limit):
            [info] = await meshes[1].limits()
            assert (info.name, info.concurrency, info.held > 0) == ("Q2", 2, True)
        await until(lambda: ran == {"Q0": 360, "Q1": 360}, what="all runs")
    assert most == 2


async def test_finished_tasks_stay_finished_when_their_peer_leaves_while_their_slot_moves(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot has moved between two tries of what ends them, just when the leaving of the queue is tried."""
    monkeypatch.setattr("worqr.link.node.WHILE_MOVING", 0.4)
    mesh, runs, gate = worqr.Mesh(cluster.url), list[bytes](), trio.Event()
    slot, source, target = slot_of("worqr:{Q0}"), cluster.owner("worqr:{Q0}"), cluster.owner("worqr:{Q1}")

    async def run(task: bytes) -> None:
        runs.append(task)
        await gate.wait()

    def move(node: Node, state: str, other: Node) -> None:
        node.ask("CLUSTER", "SETSLOT", slot, state, other.id)

    async with mesh.join(concurrency=8) as peer, trio.open_nursery() as nursery:
        await nursery.start(partial(peer.serve, "Q0", run))
        await mesh.queue("Q0").enqueue(*[b"%d" % n for n in range(8)])
        await until(lambda: len(runs) == 8, what="eight runs")
        move(target, "IMPORTING", source)
        move(source, "MIGRATING", target)
        keys = [key.decode() for key in source.ask("CLUSTER", "GETKEYSINSLOT", slot, 100)]
        source.ask("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
        gate.set()  # all handlers return, and what ends their tasks is refused for now
        await trio.sleep(0.2)
        nursery.start_soon(peer.drain, 0)
        await trio.sleep(0.3)
        await trio.to_thread.run_sync(move_slot, cluster, slot, target)
    assert cluster.get("LLEN", "worqr:{Q0}") == 0, "given back"
    async with mesh.connect():
        assert (await mesh.queue("Q0").info()).running == 0
    await trio.to_thread.run_sync(move_slot, cluster, slot, source)


async def test_one_node_without_a_replica_stops_its_own_queues_only(cluster: Cluster) -> None:
    """Also the sweep of those that others hold."""
    for node in cluster.running:
        node.ask("CONFIG", "SET", "cluster-require-full-coverage", "no")
    victim = cluster.owner("worqr:{Q0}")
    replica = cluster.replica_of(victim)
    try:
        replica.stop()
        mesh = worqr.Mesh(cluster.url)
        async with mesh.join() as peer, trio.open_nursery() as nursery:
            runs = {queue: Runs() for queue in QUEUES}
            for queue in QUEUES:
                await nursery.start(partial(peer.serve, queue, runs[queue]))
            victim.pause()
            have_patience(mesh, 3)
            with pytest.raises(worqr.Unavailable):
                await mesh.queue("Q0").enqueue(b"x")
            have_patience(mesh, PATIENCE)
            for queue in ("Q1", "Q2"):
                await mesh.queue(queue).enqueue(b"x")
                await runs[queue].wait(1)
            victim.resume()
            await runs["Q0"].wait_for(lambda: True)
            nursery.cancel_scope.cancel()
    finally:
        victim.resume()
        for node in cluster.running:
            node.ask("CONFIG", "SET", "cluster-require-full-coverage", "yes")


def test_plain_threads_use_a_cluster_too(cluster: Cluster) -> None:
    mesh = worqr.Mesh(cluster.url)
    for queue in QUEUES:
        assert worqr.sync(mesh.queue(queue).enqueue, json.dumps(queue).encode()) == 1
    assert sorted(info.waiting for info in worqr.sync(mesh.queues)) == [1, 1, 1]
    mesh.close()


@pytest.mark.parametrize("scheme", ["redis", "redis+cluster"])
async def test_a_cluster_of_one_node_is_a_server_too(server_kind: str, scheme: str) -> None:
    with cluster_of(server_kind, primaries=1, replicas=0) as alone:
        mesh = worqr.Mesh(f"{scheme}://127.0.0.1:{alone.nodes[0].port}")

        @mesh.task(result_ttl=60)
        async def double(n: int) -> int:
            return 2 * n

        async with mesh.join():
            jobs = await mesh.dispatch_many([double.call(n) for n in range(10)])
            assert [await job.result(timeout=PATIENCE) for job in jobs] == [2 * n for n in range(10)]
