"""Queues of several shards, on a real server: what a queue can do it does over all of them, and what holds for one holds."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import trio
from redis.crc import key_slot

import worqr
from tests.cli.conftest import Answer, beside, cli, command  # noqa: F401 - fixtures
from tests.peer.conftest import NewMesh, mesh, new_mesh, other  # noqa: F401 - fixtures
from tests.peer.tools import QUICK, Held, Runs, eventually, serving, spying, until
from tests.support.clusters import Cluster, cluster, cluster_of_module  # noqa: F401 - fixtures
from tests.support.leaks import dump
from tests.support.patience import PATIENCE
from tests.support.servers import Server
from worqr import ops, testing
from worqr.client import client
from worqr.keys import QueueKeys, RegistryKeys, shard_of, shards_of, slot_of

pytestmark = [
    pytest.mark.one_server,
    pytest.mark.leaves("shards", "{hot*", "{Q1}:*", "{tests.*", "{cold*"),
]
FOUR = 4
Beside = Callable[..., Awaitable[Answer]]


def shards(prefix: str, name: str = "hot", number: int = FOUR) -> tuple[QueueKeys, ...]:
    return shards_of(QueueKeys(prefix, name), number)


async def lengths(mesh: worqr.Mesh, name: str = "hot", number: int = FOUR) -> list[int]:
    """How many tasks wait in each shard."""
    seen = await mesh._client.link.call_all([ops.inspect(keys) for keys in shards(mesh.prefix, name, number)])
    return [each.waiting for each in seen]


def ids_in(mesh: worqr.Mesh, shard: int, number: int = FOUR, count: int = 1) -> list[str]:
    """Ids that belong to a shard."""
    every = shards(mesh.prefix, number=number)
    found = (f"id-{n}" for n in range(10_000) if shard_of(every, f"id-{n}") == every[shard])
    return [next(found) for _ in range(count)]


@pytest.fixture
def hot(mesh: worqr.Mesh) -> worqr.Queue:
    return mesh.queue("hot", shards=FOUR)


# Where tasks go


async def test_each_call_goes_to_the_next_shard_and_a_thousand_at_a_time(mesh: worqr.Mesh, hot: worqr.Queue) -> None:
    async with mesh.connect():
        for n in range(8):
            assert await hot.enqueue(b"%d a" % n, b"%d b" % n) == 2
        assert await lengths(mesh) == [4, 4, 4, 4]
        assert await hot.enqueue(*[b"x"] * 4000) == 4000
        assert await lengths(mesh) == [1004] * 4
        assert (await hot.count(), len(await hot.tasks(10_000))) == (4016, 4016)


async def test_what_is_enqueued_together_stays_together_and_in_order(mesh: worqr.Mesh, hot: worqr.Queue) -> None:
    async with mesh.connect():
        await hot.enqueue(b"1", b"2", b"3")
        await hot.enqueue(b"0", front=True)
        [(_, tasks)] = [
            seen
            for seen in await mesh._client.link.call_all([ops.list_tasks(keys, 9) for keys in shards(mesh.prefix)])
            if seen[0] == 3
        ]
        assert tasks == [b"3", b"2", b"1"]


async def test_programs_do_not_all_begin_with_the_same_shard(new_mesh: NewMesh) -> None:
    used: set[int] = set()
    while len(used) < FOUR:
        one = new_mesh()
        async with one.connect():
            await one.queue("hot", shards=FOUR).enqueue(b"x")
            used |= {i for i, n in enumerate(await lengths(one)) if n}
            await one.queue("hot").cancel_all()


async def test_a_job_lies_where_its_id_says(mesh: worqr.Mesh, other: worqr.Mesh, hot: worqr.Queue) -> None:
    async with mesh.connect(), other.connect():
        for n in range(40):
            job = await hot.dispatch(b"x", id=f"id-{n}")
            assert (job.outcome, job.queue) == ("created", "hot")
            assert (await other.queue("hot").dispatch(b"y", id=f"id-{n}")).outcome == "updated"
            found = other.queue("hot").job(f"id-{n}")
            assert job == hot.job(f"id-{n}")
            assert (await found.status()).state == "waiting"
        assert await hot.count() == 40
        assert min(await lengths(mesh)) > 0


async def test_a_generated_id_is_enough_to_find_the_job(mesh: worqr.Mesh, other: worqr.Mesh, hot: worqr.Queue) -> None:
    async with mesh.connect(), other.connect():
        jobs = [await hot.dispatch(b"%d" % n) for n in range(12)]
        assert await lengths(mesh) == [3, 3, 3, 3]
        assert len({job.id for job in jobs}) == 12
        assert all(re.fullmatch(r"@\d{16}-\w{22}(~\w+)?", job.id) for job in jobs)
        for job in jobs:
            found = other.queue("hot").job(job.id)
            assert (await found.cancel()).waiting == 1
        assert await hot.count() == 0


async def test_a_payload_that_looks_like_a_reference_is_a_task_of_any_shard(mesh: worqr.Mesh, hot: worqr.Queue) -> None:
    odd, runs = b"\x00worqr\x00x", Runs()
    async with mesh.connect(), serving(mesh, "hot", runs):
        for _ in range(8):
            await hot.enqueue(odd)
        assert await runs.wait(8) == [odd] * 8
        assert len({context.id for context in runs.contexts}) == 8
        assert {context.id.partition("~")[2] for context in runs.contexts} == {keys.tag for keys in shards(mesh.prefix)}


async def test_foreign_producers_go_on_with_their_two_commands(
    mesh: worqr.Mesh, hot: worqr.Queue, server: Server, prefix: str
) -> None:
    runs = Runs()
    async with serving(mesh, "hot", runs):
        client = server.client()
        client.lpush(f"{prefix}:{{hot}}", b"from afar")
        client.publish(f"{prefix}:{{hot}}", "1")
        assert await runs.wait(1) == [b"from afar"]


async def test_no_shard_has_a_key_in_the_slot_of_another(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    hot = mesh.queue("hot", shards=8)
    client = server.client()

    async def handler(task: bytes) -> bytes:
        if task == b"bad":
            raise worqr.Failure("bad")
        if task == b"again" and worqr.current().attempt == 1:
            raise worqr.Retry(delay=0)
        return task

    async def told(_failed: worqr.Failed) -> None:
        pass

    async with serving(mesh, "hot", handler, on_failure=told, keep_failed=100, result_ttl=60):
        for task in (b"good", b"bad", b"again"):
            for _ in range(8):
                await hot.enqueue(task)
            for n in range(16):
                await hot.dispatch(task, id=f"{task.decode()}-{n}")
            await hot.dispatch(task, delay=3600)
        await until(lambda: True)
        await eventually(lambda: _idle(hot), (0, 0))
        keys = dump(client, prefix)
    mine = {key: entry for key, entry in keys.items() if b"{hot" in key}
    slots = {key_slot(key) for key in mine}
    assert slots == {slot_of("hot") + 2048 * i - (16384 if slot_of("hot") + 2048 * i >= 16384 else 0) for i in range(8)}
    assert len(await _failed_ids(mesh)) == 8 + 16
    async with mesh.connect():
        await hot.failed.drop_all()
        await hot.delete()


async def _idle(queue: worqr.Queue) -> tuple[int, int]:
    info = await queue.info()
    return info.waiting, info.running


async def _failed_ids(mesh: worqr.Mesh) -> set[str]:
    async with mesh.connect():
        return {failed.id for failed in await mesh.queue("hot").failed.list(1000)}


# Every method, beside a queue of one shard


@asynccontextmanager
async def both(mesh: worqr.Mesh) -> AsyncGenerator[list[worqr.Queue]]:
    async with mesh.connect():
        yield [mesh.queue("hot", shards=FOUR), mesh.queue("cold")]


async def test_looking(mesh: worqr.Mesh) -> None:
    async with both(mesh) as queues:
        for queue in queues:
            assert (await queue.peek(), await queue.count(), await queue.tasks()) == (None, 0, [])
            for n in range(12):
                await queue.enqueue(b"%d" % n)
            for n in range(4):
                await queue.dispatch(b"later", delay=3600, id=f"later-{n}")
            await queue.pause("repairs")
        infos = [replace(await queue.info(), name="") for queue in queues]
        assert infos[0] == infos[1]
        assert (infos[0].waiting, infos[0].scheduled, infos[0].paused) == (12, 4, "repairs")
        assert [set(await queue.tasks()) for queue in queues] == [{b"%d" % n for n in range(12)}] * 2
        assert [len(await queue.tasks(5)) for queue in queues] == [5, 5]
        assert {await queue.peek() for queue in queues} <= {b"%d" % n for n in range(12)}
        assert [(info.name, info.waiting) for info in await mesh.queues()] == [("cold", 12), ("hot", 12)]
        for queue in queues:
            await queue.resume()
            assert (await queue.info()).paused is None
            await queue.delete()
            assert replace(await queue.info(), counts={}, name="") == replace(
                infos[0], waiting=0, scheduled=0, paused=None, held_back="", counts={}
            )


async def states(queue: worqr.Queue) -> list[str]:
    return [status.state for status in await queue.running()]


async def test_cancelling(mesh: worqr.Mesh) -> None:
    held = Held()
    async with both(mesh) as queues:
        for queue in queues:
            for _ in range(3):
                await queue.enqueue(b"a", b"b")
            for n in range(5):
                await queue.dispatch(b"job", id=f"x{n}")
            named: list[worqr.TaskInfo] = []
            while some := await queue.jobs(limit=3, after=named[-1].cursor if named else ""):
                named += some
            assert sorted(each.id or each.task.decode() for each in named) == [*"aaabbb", *(f"x{n}" for n in range(5))]
            assert await queue.cancel(b"a") == worqr.CancelCount(3, 0, 0)
            assert await queue.job("x3").cancel() == worqr.CancelCount(1, 0, 0)
            assert await queue.cancel_all() == worqr.CancelCount(7, 0, 0)
            assert await queue.count() == 0
            async with serving(mesh, queue.name, held, room=6):
                held.tasks.clear()
                for _ in range(8):
                    await queue.enqueue(b"a")
                await held.wait(6)
                await eventually(partial(states, queue), ["active"] * 6)  # a hand-off that finds no room goes back
                running = await queue.running()
                assert running == sorted(running, key=lambda status: status.since or 0)  # type: ignore[arg-type,return-value]
                shown: list[worqr.TaskInfo] = []
                while page := await queue.jobs(state="active", limit=4, after=shown[-1].cursor if shown else ""):
                    shown += page
                assert sorted(map(repr, shown)) == sorted(map(repr, running))
                count = await queue.cancel(b"a", wait=PATIENCE)
                assert (count.waiting + count.running, count.acknowledged) == (8, count.running)
                held.tasks.clear()
                for n in range(6):
                    await queue.dispatch(b"b", id=f"y{n}")
                await held.wait(6)
                assert await queue.job("y1").cancel(wait=PATIENCE) == worqr.CancelCount(0, 1, 1)
                assert await queue.cancel_all(wait=PATIENCE) == worqr.CancelCount(0, 5, 5)


async def test_what_was_set_aside(mesh: worqr.Mesh) -> None:
    ids: list[str] = []

    async def handler(task: bytes) -> None:
        ids.append(worqr.current().id)
        raise (worqr.Undecodable if task == b"undecodable" else KeyError if task == b"key" else worqr.Failure)("no")

    async with both(mesh) as queues:
        for queue in queues:
            async with serving(mesh, queue.name, handler, retry=worqr.RetryPolicy(max_failures=1)):
                for task in (b"key", b"raw"):
                    for _ in range(8):
                        await queue.enqueue(task)
                for n in range(8):
                    await queue.dispatch(b"job", id=f"x{n}")
                    await queue.enqueue(b"undecodable")
                await eventually(lambda queue=queue: _aside(queue), (24, 8))  # type: ignore[misc]
            found = await queue.failed.list()
            assert Counter(each.task for each in found) == {b"key": 8, b"raw": 8, b"job": 8}
            assert {each.queue for each in found} == {queue.name}
            assert [each.at for each in found] == sorted((each.at for each in found), reverse=True)
            assert len({each.id for each in found}) == 24
            assert {each.id for each in found} < set(ids)  # also of those that had no record then
            assert len(await queue.failed.list(5)) == 5
            assert len(await queue.failed.list(error="KeyError")) == 8
            raw = [each.id for each in found if each.task == b"raw"]
            assert await queue.failed.drop(*raw[:4], "nobody") == 4
            assert await queue.failed.retry(*raw[4:], "x1") == 5
            assert Counter(await queue.tasks()) == {b"raw": 4, b"job": 1}
            assert [(await queue.job(name).status()).state for name in (*raw[4:], "x1")] == ["waiting"] * 5
            newest = {each.id for each in await queue.failed.list(3)}
            assert await queue.failed.drop_all(limit=3) == 3
            assert not newest & {each.id for each in await queue.failed.list()}
            assert await queue.failed.retry_all(error="KeyError") + await queue.failed.drop_all() == 12
            assert await queue.undecodable.retry_all(limit=5) == 5
            assert await queue.undecodable.drop_all() == 3
            await queue.cancel_all()
            assert (await queue.info()).waiting == 0


async def _aside(queue: worqr.Queue) -> tuple[int, int]:
    info = await queue.info()
    return info.failed, info.undecodable


async def test_unique_tasks(mesh: worqr.Mesh) -> None:
    async with both(mesh) as queues:
        for queue in queues:
            for n in range(8):
                assert await queue.enqueue(b"%d" % n, unique=True) == 1
                with pytest.raises(worqr.Duplicate) as caught:
                    await queue.enqueue(b"%d" % n, unique=True)
                assert caught.value.job is not None
                assert (await caught.value.job.status()).state == "waiting"
            assert await queue.count() == 8
        with pytest.raises(worqr.UsageError, match="'hot' has several shards, .* one by one"):
            await queues[0].enqueue(b"a", b"b", unique=True)
        assert await queues[0].count() == 8


async def test_a_bound_is_shared_out(mesh: worqr.Mesh, hot: worqr.Queue) -> None:
    async with mesh.connect():
        for n in range(12):
            await (hot.enqueue(b"x", max_length=10) if n % 2 else hot.dispatch(b"x", max_length=10))
        assert await lengths(mesh) == [3, 3, 3, 3]
        for send in (partial(hot.enqueue, b"x"), partial(hot.dispatch, b"x"), partial(hot.enqueue, b"y", unique=True)):
            with pytest.raises(worqr.QueueFull):
                await send(max_length=10)
        assert await hot.count() == 12


async def test_results_states_and_watching(mesh: worqr.Mesh, other: worqr.Mesh, hot: worqr.Queue) -> None:
    async def handler(task: bytes) -> bytes:
        return task * 2

    async with mesh.connect(), other.connect():
        jobs: list[worqr.Job[bytes]] = []
        for n in range(8):
            options: Any = {"id": f"x{n}"} if n % 2 else {}
            jobs.append(await hot.dispatch(b"%d" % n, result_ttl=60, **options))
        states: list[str] = []
        async with jobs[0].watch() as seen:
            states.append((await anext(seen)).state)
            async with serving(mesh, "hot", handler):
                states += [status.state async for status in seen]
        assert (states[0], states[-1]) == ("waiting", "finished")
        for n, job in enumerate(jobs):
            assert await job.result(PATIENCE) == b"%d" % n * 2
            assert await other.queue("hot").job(job.id).result(0) == b"%d" % n * 2


async def test_events_of_all_shards(mesh: worqr.Mesh, hot: worqr.Queue) -> None:
    async with mesh.connect(), hot.events() as events:
        for _ in range(8):
            await hot.enqueue(b"x")
        enqueued = 0
        async for event in events:
            assert (event.queue, event.type) == ("hot", "enqueued")
            enqueued += event.count
            if enqueued == 8:
                break


async def test_threads_have_the_same_queue(mesh: worqr.Mesh) -> None:
    def work() -> tuple[int, int]:
        queue = mesh.queue("hot", shards=FOUR)
        try:
            for n in range(8):
                worqr.sync(queue.enqueue, b"x")
                worqr.sync(queue.dispatch, b"y", id=f"x{n}")
            counts = [worqr.sync(mesh.queue("hot").job(f"x{n}").cancel).waiting for n in range(8)]
            return worqr.sync(queue.info).waiting, sum(counts)
        finally:
            mesh.close()

    assert await trio.to_thread.run_sync(work) == (8, 8)


# Peers


async def test_nothing_is_lost_and_an_id_runs_once_at_a_time(new_mesh: NewMesh) -> None:
    done: Counter[bytes] = Counter()
    running: Counter[str] = Counter()
    chance = random.Random(7)

    async def handler(task: bytes) -> None:
        context = worqr.current()
        name = context.id
        running[name] += 1
        if running[name] > 1:
            twice.append(name)
        await trio.sleep(chance.choice((0, 0, 0.001)))
        running[name] -= 1
        if task.startswith(b"odd") and context.failures == 0:
            raise worqr.Retry(delay=chance.choice((0, 0.01)))
        done[task] += 1

    async def produce(producer: int) -> None:
        one = new_mesh()
        async with one.connect():
            queue = one.queue("hot", shards=FOUR)
            for n in range(0, 100, 5):
                some = [b"%s %d %d" % (chance.choice((b"odd", b"even")), producer, n + i) for i in range(5)]
                raw.extend(some)
                await queue.enqueue(*some)
                await queue.dispatch(b"job", id=f"singleton-{n % 7}", if_exists="update")
                await queue.dispatch(b"%d" % n)

    raw: list[bytes] = []
    twice: list[str] = []
    async with trio.open_nursery() as peers:
        meshes = [new_mesh() for _ in range(3)]
        for one in meshes:
            await peers.start(_serve, one, handler)
        async with trio.open_nursery() as producers:
            for producer in range(4):
                producers.start_soon(produce, producer)
        async with meshes[0].connect():
            queue = meshes[0].queue("hot")
            await eventually(lambda: _all_idle(queue), (0, 0, 0, 0))
        peers.cancel_scope.cancel()
    assert twice == []
    assert {task: count for task, count in done.items() if task in set(raw)} == dict.fromkeys(raw, 1)
    assert done[b"job"] >= 7
    assert sum(done[b"%d" % n] for n in range(0, 100, 5)) == 80


async def _serve(
    mesh: worqr.Mesh, handler: Callable[[bytes], object], *, task_status: trio.TaskStatus[worqr.Peer]
) -> None:
    mesh.queue("hot", shards=FOUR)
    async with serving(mesh, "hot", handler, retry=QUICK) as peer:
        task_status.started(peer)
        await trio.sleep_forever()


async def _all_idle(queue: worqr.Queue) -> tuple[int, int, int, int]:
    info = await queue.info()
    return info.waiting, info.scheduled, info.blocked, info.running


async def test_a_handlers_concurrency_is_that_of_all_shards(mesh: worqr.Mesh, hot: worqr.Queue) -> None:
    held, most = Held(), 0
    running = 0

    async def handler(task: bytes) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            await held(task)
        finally:
            running -= 1

    async with serving(mesh, "hot", handler, concurrency=3) as peer:
        for n in range(24):
            await hot.enqueue(b"%d" % n)
        await held.wait(3)
        async with mesh.connect():
            assert (await hot.info()).running == 3
        held.gate.set()
        await held.wait(24)
        await until(lambda: peer._engine.scheduler.running == 0)
    assert most == 3


async def test_the_shards_of_a_queue_have_the_share_of_one(mesh: worqr.Mesh, hot: worqr.Queue) -> None:
    held = Held()
    cold = mesh.queue("cold")
    async with mesh.connect():
        for _ in range(10):
            await hot.enqueue(*[b"hot"] * 10)
        await cold.enqueue(*[b"cold"] * 100)
        async with mesh.join(concurrency=40, grace=0) as peer, trio.open_nursery() as nursery:
            peer.set_concurrency(1)
            await nursery.start(partial(peer.serve, "hot", held))
            await nursery.start(partial(peer.serve, "cold", held))
            peer.set_concurrency(40)
            await held.wait(40)
            took = Counter(held.tasks)
            nursery.cancel_scope.cancel()
    assert took.total() == 40
    assert 12 <= took[b"cold"] <= 28, took


async def test_names_of_shards_are_nobodys_business(mesh: worqr.Mesh, hot: worqr.Queue) -> None:
    held = Held()
    async with serving(mesh, "hot", held) as peer:
        for _ in range(8):
            await hot.enqueue(b"x")
        await held.wait(8)
        assert {context.queue for context in held.contexts} == {"hot"}
        [worker] = await mesh.workers()
        assert worker.queues == {"hot"}
        [info] = await mesh.queues()
        assert (info.name, info.workers, info.running) == ("hot", 1, 8)
        assert peer.health().running == 8
        with pytest.raises(worqr.UsageError, match="queue 'hot' is served by this peer already"):
            await peer.serve("hot", held)
        with pytest.raises(worqr.UsageError, match=r"serve\(\) takes no shards: say mesh.queue\('hot', shards=...\)"):
            await peer.serve("hot", held, shards=2)


async def test_leaving_gives_back_what_runs_in_every_shard(mesh: worqr.Mesh, hot: worqr.Queue) -> None:
    held = Held()
    async with mesh.connect():
        async with serving(mesh, "hot", held, grace=0):
            for n in range(12):
                await hot.enqueue(b"%d" % n)
            await held.wait(12)
        assert Counter(held.cancelled) == Counter((b"%d" % n, "leaving") for n in range(12))
        assert await lengths(mesh) == [3, 3, 3, 3]
        assert [await mesh.workers(), (await hot.info()).workers] == [[], 0]
        runs = Runs()
        async with serving(mesh, "hot", runs):
            await runs.wait(12)
        await hot.delete()


async def test_a_failure_handler_is_told_of_all_shards(mesh: worqr.Mesh, hot: worqr.Queue) -> None:
    told: list[worqr.Failed] = []
    news = Runs()

    async def handler(_task: bytes) -> None:
        raise worqr.Failure("no")

    async def on_failure(failed: worqr.Failed) -> None:
        assert worqr.current().queue == "{hot}-fail"
        told.append(failed)
        news.begin(failed.task)

    async with serving(mesh, "hot", handler, on_failure=on_failure, keep_failed=0):
        for n in range(8):
            await hot.enqueue(b"%d" % n)
        await news.wait(8)
        assert {(failed.task, failed.queue) for failed in told} == {(b"%d" % n, "hot") for n in range(8)}
        assert len({failed.id for failed in told}) == 8
        await eventually(lambda: _all_idle(hot.failures), (0, 0, 0, 0))
        assert (await hot.failures.info()).counts["finished"] == 8


async def test_claims_by_hand_come_from_all_shards(mesh: worqr.Mesh, hot: worqr.Queue) -> None:
    async with mesh.join(concurrency=100, grace=5) as peer, peer.work("hot") as claims:
        for n in range(16):
            await hot.enqueue(b"%d" % n)
        batch: list[worqr.Claim] = []
        while len(batch) < 16:
            batch += await claims.take(16 - len(batch))
        assert sorted(int(claim.task) for claim in batch) == list(range(16))
        assert {claim.queue for claim in batch} == {"hot"}
        assert await claims.finish(batch[:8]) == []
        for claim in batch[8:12]:
            await claim.stop()
        again = [await anext(claims) for _ in range(4)]
        assert {claim.task for claim in again} == {claim.task for claim in batch[8:12]}
        with pytest.raises(worqr.UsageError, match="the same claim stands twice"):
            await claims.finish([again[0], again[0]])
        assert await claims.finish(again) == []
        for claim in batch[12:]:
            async with claim:
                pass
        assert (await hot.info()).counts["finished"] == 16


async def test_no_more_is_claimed_than_is_asked_for(mesh: worqr.Mesh, hot: worqr.Queue) -> None:
    async with mesh.join(concurrency=100, grace=5) as peer:
        async with peer.work("hot") as claims:
            for _ in range(4):
                await hot.enqueue(*[b"x"] * 10)
            taken = await claims.take(5)
            assert len(taken) == 5
            info = await hot.info()
            assert (info.waiting, info.running) == (35, 5)
            some = await claims.take(30, within=1)
            assert (await hot.info()).running == 5 + len(some) == 35
        assert await hot.count() == 40  # and what is unsettled goes back
        await hot.delete()


async def test_whoever_waits_for_a_claim_is_woken_by_any_shard(mesh: worqr.Mesh, hot: worqr.Queue) -> None:
    async with mesh.join(concurrency=100, grace=5) as peer, peer.work("hot") as claims:
        got: list[worqr.Claim] = []
        for shard in range(FOUR):
            [name] = ids_in(mesh, shard)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(finish_one, claims, got)
                await hot.dispatch(b"x", id=name)
            assert [claim.id for claim in got] == [name]
            got.clear()


async def finish_one(claims: worqr.Claims, got: list[worqr.Claim]) -> None:
    with trio.fail_after(PATIENCE):
        got += await claims.take(1)
        await got[0].finish()


# Functions


def declared(mesh: worqr.Mesh) -> worqr.Function[[int], int]:
    @mesh.task(name="tests.double", shards=FOUR, result_ttl=60, max_length=40_000)
    async def double(n: int) -> int:
        return 2 * n

    return double


async def test_functions_have_shards_too(new_mesh: NewMesh) -> None:
    mesh = new_mesh()
    double = declared(mesh)
    async with mesh.join() as peer:
        jobs = await mesh.dispatch_many([double.call(n) for n in range(20)])
        jobs += await mesh.dispatch_many([double.options(id=f"x{n}").call(n) for n in range(20)])
        jobs.append(await double.dispatch(20))
        assert [await job.result(PATIENCE) for job in jobs] == [2 * n for n in [*range(20), *range(20), 20]]
        assert await double.job("x7").result(0) == 14
        assert await mesh.enqueue_many([double.call(n) for n in range(2500)]) == 2500
        await double.enqueue(1)
        await eventually(lambda: _idle(double.queue), (0, 0))
        info = await double.queue.info()
        assert (info.name, info.counts["finished"]) == ("tests.double", 41 + 2501)
        assert [worker.queues for worker in await mesh.workers()] == [frozenset({"tests.double"})]
        assert peer.health().ready


async def test_many_calls_go_to_as_few_requests_as_before(new_mesh: NewMesh, server: Server, prefix: str) -> None:
    mesh = new_mesh()
    double = declared(mesh)
    async with mesh.connect():
        await double.queue.count()
        with spying(server, prefix) as spy:
            await mesh.enqueue_many([double.call(n) for n in range(1000)])
            await mesh.dispatch_many([double.call(n) for n in range(900)])
            await mesh.dispatch_many([double.options(id=f"x{n}").call(n) for n in range(40)])
            calls = spy.calls()
        assert (calls["enqueue"], calls["dispatch_jobs"]) == (1, 1 + FOUR)
        assert await lengths(mesh, "tests.double") != [0, 0, 0, 0]
        assert await double.queue.count() == 1940
        await double.queue.delete()


async def test_on_a_bench_and_recorded(new_mesh: NewMesh) -> None:
    mesh = new_mesh()
    double = declared(mesh)
    seen: list[int] = []

    @mesh.every(timedelta(hours=1), name="hourly")
    @mesh.task(name="tests.tick", shards=3)
    async def tick() -> None:
        seen.append(1)

    async with testing.bench(mesh) as bench:
        await mesh.enqueue_many([double.call(n) for n in range(10)])
        job = await double.options(id="x").dispatch(4)
        assert (await bench.run_until_empty()).finished == 11
        assert await job.result(0) == 8
        await bench.advance(timedelta(hours=1))
        assert (await bench.run_until_empty()).finished == len(seen) == 1
    with testing.recording(mesh) as sent:
        await double.enqueue(3)
        assert (await double.dispatch(4)).queue == "tests.double"
    assert sent.calls(double) == [double.call(3), double.call(4)]


async def test_a_schedule_fires_into_one_shard(new_mesh: NewMesh) -> None:
    mesh, runs = new_mesh(), Runs()

    @mesh.every(0.1, name="often")
    @mesh.task(name="tests.tick", shards=FOUR)
    async def tick() -> None:
        runs.begin(b"")

    async with mesh.join(grace=5):
        await runs.wait(3)
    every = shards(mesh.prefix, "tests.tick")
    assert {context._run.host.keys for context in runs.contexts} == {shard_of(every, "cron:often")}  # type: ignore[attr-defined]
    async with mesh.connect():
        await mesh.queue("tests.tick").delete()


# How many


async def test_who_says_nothing_has_as_many_as_were_declared(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    runs = Runs()
    async with mesh.connect():
        await mesh.queue("hot", shards=FOUR).count()
        async with other.connect():
            for _ in range(8):
                await other.queue("hot").enqueue(b"x")
            assert await lengths(mesh) == [2, 2, 2, 2]
        async with serving(other, "hot", runs):
            assert len(await runs.wait(8)) == 8


async def test_another_number_is_an_error_that_names_both(
    mesh: worqr.Mesh, other: worqr.Mesh, new_mesh: NewMesh, prefix: str
) -> None:
    why = f"queue 'hot' has 4 shards in the mesh '{prefix}', and 8 were declared here: declare 4; or let it run empty"
    async with mesh.connect(), other.connect():
        await mesh.queue("hot", shards=4).enqueue(b"x")
        for call in (
            other.queue("hot", shards=8).enqueue,
            other.queue("hot").dispatch,
            other.queue("hot").cancel,
        ):
            with pytest.raises(worqr.UsageError, match=why):
                await call(b"x")
        await other.queue("cold").enqueue(b"x")  # which is nothing to another queue
        assert len(await other.queues()) == 2
        assert await mesh.queue("hot").count() == 1
    third = new_mesh()
    third.queue("hot", shards=8)
    with pytest.raises(worqr.UsageError, match=why):
        async with third.join():
            pass
    with pytest.raises(worqr.UsageError, match="'hot' was declared with 8 shards, and then with 4: say it once"):
        third.queue("hot", shards=4)
    with pytest.raises(worqr.UsageError, match="shards must be a whole number from 1 to 64"):
        third.queue("hot", shards=0)
    with pytest.raises(worqr.UsageError, match="'tests.double' was declared with 8 shards, and then with 4"):
        third.queue("tests.double", shards=8)
        declared(third)


async def test_it_is_told_before_anything_is_sent(mesh: worqr.Mesh, other: worqr.Mesh, server: Server) -> None:
    async with mesh.connect(), other.connect():
        await mesh.queue("hot", shards=2).count()
        with spying(server, mesh.prefix) as spy:
            with pytest.raises(worqr.UsageError, match="has 2 shards"):
                await other.queue("hot", shards=3).enqueue(b"x")
            calls = spy.calls()
        assert (calls["declare_shards"], calls["enqueue"]) == (1, 0)


async def test_delete_forgets_the_number_of_an_empty_queue(mesh: worqr.Mesh, other: worqr.Mesh, server: Server) -> None:
    client, registry = server.client(), RegistryKeys(mesh.prefix)
    async with mesh.connect():
        hot = mesh.queue("hot", shards=FOUR)
        await hot.enqueue(b"x")
        assert client.hgetall(registry.shards) == {b"hot": b"4"}
        async with serving(mesh, "hot", Runs()):
            await eventually(lambda: _idle(hot), (0, 0))
            await hot.delete()
            assert client.hgetall(registry.shards) == {b"hot": b"4"}  # somebody serves it
        await hot.delete()
        assert client.hgetall(registry.shards) == {}
    async with other.connect():
        for n in range(9):
            await other.queue("hot", shards=3).dispatch(b"x", id=f"x{n}")
        assert sum(await lengths(other, number=3)) == 9
    async with mesh.connect():
        with pytest.raises(worqr.UsageError, match="has 3 shards"):
            await hot.count()


async def test_delete_does_not_forget_where_something_was_set_aside(mesh: worqr.Mesh, server: Server) -> None:
    async def handler(_task: bytes) -> None:
        raise worqr.Failure("no")

    async with mesh.connect():
        hot = mesh.queue("hot", shards=FOUR)
        async with serving(mesh, "hot", handler):
            await hot.enqueue(b"x")
            await eventually(lambda: _aside(hot), (1, 0))
        await hot.delete()
        assert server.client().hgetall(RegistryKeys(mesh.prefix).shards) == {b"hot": b"4"}
        assert await hot.failed.drop_all() == 1
        await hot.delete()
        assert server.client().hgetall(RegistryKeys(mesh.prefix).shards) == {}


@pytest.mark.parametrize("lane", [None, "acme"])
async def test_delete_does_not_forget_where_an_operator_has_to_undo_something(
    mesh: worqr.Mesh, other: worqr.Mesh, server: Server, lane: str | None
) -> None:
    shards = RegistryKeys(mesh.prefix).shards
    async with mesh.connect():
        await mesh.queue("hot", shards=FOUR).enqueue(b"x")
    async with other.connect():
        hot = other.queue("hot")
        for do, undo in (
            (partial(hot.pause, lane=lane), partial(hot.resume, lane=lane)),
            (partial(hot.set_limit, worqr.Limit(8), lane=lane), partial(hot.clear_limit, lane=lane)),
        ):
            await do()
            await hot.delete()
            assert server.client().hgetall(shards) == {b"hot": b"4"}, "else only one shard would be resumed"
            await undo()
        await hot.delete()
        assert server.client().hgetall(shards) == {}


async def test_a_queue_that_gets_shards_keeps_what_waits(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    runs = Runs()
    async with mesh.connect():
        await mesh.queue("hot").enqueue(*[b"%d" % n for n in range(10)])
        job = await mesh.queue("hot").dispatch(b"job", result_ttl=60)
    async with other.connect():
        hot = other.queue("hot", shards=8)
        assert await hot.count() == 11
        for n in range(10, 20):
            await hot.enqueue(b"%d" % n)
        assert await hot.cancel(b"3") == worqr.CancelCount(1, 0, 0)
        async with serving(other, "hot", runs):
            await runs.wait(20)
            assert await hot.job(job.id).result(PATIENCE) is None
    assert set(runs.tasks) == {b"job", *(b"%d" % n for n in range(20) if n != 3)}


async def test_a_program_that_was_there_before_learns_of_it_at_a_join(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    runs = Runs()
    async with other.connect():
        await other.queue("hot").enqueue(b"0")
        async with mesh.connect():
            for _ in range(8):
                await mesh.queue("hot", shards=FOUR).enqueue(b"x")
        async with serving(other, "hot", runs):
            await runs.wait(9)


async def test_a_peer_that_joined_before_says_that_it_does_not_serve_all(
    mesh: worqr.Mesh, other: worqr.Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    runs = Runs()
    async with mesh.connect(), serving(other, "hot", runs):
        hot = mesh.queue("hot", shards=FOUR)
        for n in range(FOUR):
            await hot.enqueue(b"%d" % n)
        assert len(await runs.wait(1)) == 1
        await until(lambda: len([each for each in caplog.messages if "shards.unserved" in each]) == FOUR - 1)
        async with serving(mesh, "hot", runs):
            await runs.wait(FOUR)
    assert "shards.unserved: queue 'hot' has shards that this worker does not serve" in caplog.text


async def test_a_program_that_was_there_before_asks_now_and_then(
    mesh: worqr.Mesh, other: worqr.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with other.connect(), mesh.connect():
        await mesh.queue("hot", shards=FOUR).count()
        await other.queue("warm").enqueue(b"0")
        assert other._client.sharding._known == {}  # type: ignore[attr-defined]
        other._client.sharding._refreshed_at -= client.REFRESH_EVERY  # type: ignore[attr-defined]
        await other.queue("luke").enqueue(b"0")
        await until(lambda: other._client.sharding._known == {"hot": FOUR})  # type: ignore[attr-defined]


async def test_connecting_costs_one_request_and_a_queue_of_one_shard_none(
    mesh: worqr.Mesh, server: Server, prefix: str
) -> None:
    with spying(server, prefix) as spy:
        async with mesh.connect():
            await mesh.queue("cold").enqueue(b"x")
            await mesh.queue("cold").dispatch(b"x")
            await mesh.queue("cold").info()
            async with mesh.connect():
                await mesh.queue("cold").delete()
            calls = spy.calls()
    wanted = {"list_shards": 1, "enqueue": 1, "dispatch_jobs": 1, "inspect": 1, "delete_queue": 1, "note_queues": 1}
    assert {name: calls[name] for name in wanted} == wanted
    assert calls["declare_shards"] == 0


# Whoever dies, and a cluster


async def test_what_a_dead_peer_held_in_any_shard_runs_again(new_mesh: NewMesh) -> None:
    dying, living, held, runs = new_mesh(keepalive=1), new_mesh(keepalive=1), Held(), Runs()
    async with living.connect():
        hot = living.queue("hot", shards=FOUR)
        await hot.count()
        async with serving(dying, "hot", held, grace=0) as peer:
            for n in range(8):
                await hot.enqueue(b"%d" % n)
            await held.wait(8)
            peer._engine.session.leave_silently()
            async with serving(living, "hot", runs):
                assert set(await runs.wait(8)) == {b"%d" % n for n in range(8)}
                assert {context.stalls for context in runs.contexts} == {1}


@pytest.mark.parametrize("name", ["hot", "images"])
async def test_on_a_cluster_each_node_has_its_share(cluster: Cluster, name: str) -> None:
    mesh, other = (worqr.Mesh(cluster.url, prefix="t") for _ in range(2))
    runs = Runs()
    async with mesh.connect(), other.connect():
        queue = mesh.queue(name, shards=3)
        for n in range(9):
            await queue.enqueue(b"%d" % n)
            await queue.dispatch(b"job", id=f"x{n}")
        for node in cluster.nodes[:3]:
            with node.client() as client:
                waiting = [client.llen(key) for key in client.scan_iter(f"t:{{{name}*") if client.type(key) == b"list"]
                assert len(waiting) == 1
        assert (await queue.info()).waiting == await queue.count() == 18
        assert (await queue.cancel(b"3"), (await queue.job("x3").cancel()).waiting) == (
            worqr.CancelCount(1, 0, 0),
            1,
        )
        await queue.pause("wait")
        async with serving(other, name, runs):
            await queue.resume()
            await runs.wait(16)
            assert sorted(runs.tasks) == sorted([b"%d" % n for n in range(9) if n != 3] + [b"job"] * 8)
            await eventually(lambda: _idle(queue), (0, 0))
        await queue.delete()


# The command line


async def test_the_command_line_knows_one_queue(beside: Beside, mesh: worqr.Mesh, prefix: str) -> None:
    async with mesh.connect():
        hot = mesh.queue("hot", shards=FOUR)
        for n in range(8):
            await hot.enqueue(b"%d" % n)
        assert [(info["name"], info["waiting"]) for info in (await beside("queues", "--json")).json] == [("hot", 8)]
        assert await beside("pause", "hot", "repairs") == Answer(0, "Paused queue hot\n", "")
        seen = await mesh._client.link.call_all([ops.inspect(keys) for keys in shards(prefix)])
        assert [each.paused for each in seen] == ["repairs"] * FOUR
        assert await beside("resume", "hot") == Answer(0, "Resumed queue hot\n", "")
        assert (await hot.info()).paused is None
        assert (await beside("cancel", "hot", "--all")).out == "8 removed, 0 running cancelled\n"
        assert await hot.count() == 0
        assert (await beside("enqueue", "hot", "a")).code == 0
        assert await hot.tasks() == [b"a"]
