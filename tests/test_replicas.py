"""`replicas=` as applications say it: on the mesh, on a call, among options; awaited under Trio and asyncio, and in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import trio

import worqr
from tests.peer.tools import Runs, eventually, serving
from tests.support.patience import PATIENCE
from tests.support.replicated import Pair, mine, own_pair, pair, pair_of_module, promote, wait_for_replicas
from worqr.client.client import EMBEDDED
from worqr.keys import QueueKeys
from worqr.ops import MAX_ITEMS

assert all((mine, own_pair, pair, pair_of_module))  # fixtures

pytestmark = [pytest.mark.usefixtures(wait_for_replicas.__name__), pytest.mark.one_server]

Say = Callable[[float], None]


@pytest.fixture
def mesh(pair: Pair, mine: str) -> worqr.Mesh:
    """Every task of it must be on the replica."""
    return worqr.Mesh(pair.primary.tcp_url, prefix=mine, replicas=1)


@pytest.fixture
def lonely(pair: Pair, wait_for_replicas: Say) -> None:
    """There is no replica any more, and nobody waits long for one."""
    wait_for_replicas(0.1)
    promote(pair.replica)


def doubling(mesh: worqr.Mesh) -> worqr.Function[[int], int]:
    @mesh.task(name="Q1")
    def double(n: int) -> int:
        return 2 * n

    return double


def stored(pair: Pair, mine: str) -> int:
    """How many tasks wait, by the replica."""
    return pair.replica.look.llen(QueueKeys(mine, "Q1").base)  # type: ignore[return-value]


# Who says so


async def test_the_mesh_says_it_for_every_call(mesh: worqr.Mesh, pair: Pair, mine: str) -> None:
    double, q = doubling(mesh), mesh.queue("Q1")
    async with mesh.connect():
        await q.enqueue(b"{}")
        assert stored(pair, mine) == 1
        await q.enqueue(b"{}", b"{}", front=True, max_length=10)
        assert stored(pair, mine) == 3
        await q.dispatch(b"{}")
        assert stored(pair, mine) == 4
        await q.enqueue(b"unique", unique=True)
        assert stored(pair, mine) == 5
        await double.enqueue(1)
        assert stored(pair, mine) == 6
        await double.dispatch(1)
        assert stored(pair, mine) == 7
        await double.options(id="one").dispatch(1)
        assert stored(pair, mine) == 8
        await mesh.enqueue_many(double.call(n) for n in range(10))
        assert stored(pair, mine) == 18
        await mesh.dispatch_many(double.call(n) for n in range(10))
        assert stored(pair, mine) == 28
        await q.delete()


@pytest.mark.usefixtures("lonely")
async def test_a_call_says_otherwise(mesh: worqr.Mesh) -> None:
    double, q = doubling(mesh), mesh.queue("Q1")
    async with mesh.connect():
        await q.enqueue(b"{}", replicas=0)
        await q.dispatch(b"{}", replicas=0)
        await double.options(replicas=0).dispatch(1)
        await mesh.enqueue_many([double.options(replicas=0).call(1)])
        await mesh.dispatch_many([double.options(replicas=0).call(1)])
        with pytest.raises(worqr.NotReplicated):
            await q.enqueue(b"{}")
        with pytest.raises(worqr.NotReplicated):
            await mesh.enqueue_many([double.options(replicas=0).call(1), double.call(2)])
        await q.delete()


@pytest.mark.usefixtures("lonely")
async def test_a_call_says_so_where_the_mesh_does_not(pair: Pair, mine: str) -> None:
    mesh = worqr.Mesh(pair.primary.tcp_url, prefix=mine)
    double, q = doubling(mesh), mesh.queue("Q1")
    wanting: list[Callable[[], Any]] = [
        lambda: q.enqueue(b"{}", replicas=1),
        lambda: q.enqueue(b"u", unique=True, replicas=1),
        lambda: q.dispatch(b"{}", replicas=2),
        lambda: double.options(replicas=1).dispatch(1),
        lambda: mesh.enqueue_many([double.call(1), double.options(replicas=1).call(1)]),
        lambda: mesh.dispatch_many([double.call(1), double.options(replicas=1, delay=0).call(1)]),
    ]
    async with mesh.connect():
        await q.enqueue(b"{}")
        await double.enqueue(1)
        for call in wanting:
            with pytest.raises(worqr.NotReplicated):
                await call()
        assert await q.count() == 10
        await q.delete()


@pytest.mark.parametrize("wrong", [-1, 101, True, 1.0, "1"])
async def test_wrong_numbers_are_refused(mesh: worqr.Mesh, wrong: Any) -> None:
    double, q = doubling(mesh), mesh.queue("Q1")
    words = "replicas must be a whole number from 0 to 100"
    with pytest.raises(worqr.UsageError, match=words):
        worqr.Mesh(replicas=wrong)
    with pytest.raises(worqr.UsageError, match=words):
        double.options(replicas=wrong)
    async with mesh.connect():
        with pytest.raises(worqr.UsageError, match=words):
            await q.enqueue(b"a", replicas=wrong)
        with pytest.raises(worqr.UsageError, match=words):
            await q.dispatch(b"a", replicas=wrong)
        assert await q.count() == 0


# What NotReplicated tells


@pytest.mark.usefixtures("lonely")
async def test_a_dispatch_has_its_handle_all_the_same(mesh: worqr.Mesh) -> None:
    double, q = doubling(mesh), mesh.queue("Q1")
    async with mesh.connect():
        for dispatch in (q.dispatch(b'{"n":4}'), double.dispatch(4)):
            with pytest.raises(worqr.NotReplicated, match="is stored") as caught:
                await dispatch
            job = caught.value.job
            assert job.outcome == "created"
            assert (await job.status()).state == "waiting"
            await job.cancel()
        with pytest.raises(worqr.NotReplicated) as caught:
            await q.enqueue(b"a")
        assert (caught.value.wanted, caught.value.reached, caught.value.job) == (1, 0, None)
        assert await q.count() == 1


@pytest.mark.usefixtures("lonely")
async def test_what_was_refused_is_not_told_to_be_stored(mesh: worqr.Mesh) -> None:
    q = mesh.queue("Q1")
    async with mesh.connect():
        await q.dispatch(b"a", id="one", replicas=0)
        await q.enqueue(b"b", unique=True, replicas=0)
        with pytest.raises(worqr.Duplicate):
            await q.dispatch(b"a", id="one", if_exists="raise")
        with pytest.raises(worqr.Duplicate):
            await q.enqueue(b"b", unique=True)
        with pytest.raises(worqr.QueueFull):
            await q.dispatch(b"c", max_length=2)
        with pytest.raises(worqr.QueueFull):
            await q.enqueue(b"c", max_length=2)
        assert await q.count() == 2
        await q.delete()


@pytest.mark.usefixtures("lonely")
async def test_of_a_call_in_several_requests_all_is_stored(mesh: worqr.Mesh) -> None:
    double, q = doubling(mesh), mesh.queue("Q1")
    n = 2 * MAX_ITEMS + 500
    tasks = [b"%d" % i for i in range(n)]
    async with mesh.connect():
        for front in (False, True):
            with pytest.raises(worqr.NotReplicated):
                await q.enqueue(*tasks, front=front)
            assert (await q.tasks(n))[::-1] == tasks
            await q.delete()
        with pytest.raises(worqr.NotReplicated):
            await mesh.enqueue_many(double.call(i) for i in range(n))
        assert await q.count() == n
        await q.delete()
        with pytest.raises(worqr.NotReplicated):
            await mesh.dispatch_many(double.call(i) for i in range(n))
        assert await q.count() == n
        await q.delete()


@pytest.mark.usefixtures("lonely")
async def test_an_enqueue_of_plain_tasks_and_of_jobs_stores_all(mesh: worqr.Mesh) -> None:
    double, q = doubling(mesh), mesh.queue("Q1")

    @mesh.task(name="tagged", tags=["a"])  # its calls are jobs, because plain tasks have no tags
    def tagged(n: int) -> None: ...

    n = MAX_ITEMS + 500
    async with mesh.connect():
        with pytest.raises(worqr.NotReplicated):
            await mesh.enqueue_many(each.call(i) for i in range(n) for each in (tagged, double))
        assert (await q.count(), await tagged.queue.count()) == (n, n)
        await q.delete()
        await tagged.queue.delete()


async def test_a_server_without_replicas_never_has_enough(wait_for_replicas: Say, no_bench: None) -> None:
    wait_for_replicas(0.1)
    mesh = worqr.Mesh(EMBEDDED)
    async with mesh.connect():
        with pytest.raises(worqr.NotReplicated):
            await mesh.queue("Q1").enqueue(b"a", replicas=1)
        assert await mesh.queue("Q1").count() == 1


# What it is for


async def test_tasks_survive_the_primary_and_run_on_the_promoted_one(own_pair: Pair) -> None:
    acknowledged: set[int] = set()
    gone = worqr.Mesh(own_pair.primary.tcp_url, replicas=1, patience=PATIENCE)
    double = doubling(gone)
    async with gone.connect(), trio.open_nursery() as nursery:

        async def produce(numbers: range) -> None:
            for n in numbers:
                await double.enqueue(n)
                acknowledged.add(n)
                if len(acknowledged) == 200:
                    own_pair.primary.kill()
                    nursery.cancel_scope.cancel()

        for first in range(0, 1000, 100):
            nursery.start_soon(produce, range(first, first + 100))
    promote(own_pair.replica)
    promoted = worqr.Mesh(own_pair.replica.tcp_url)
    ran: list[int] = []

    @promoted.task(name="Q1")
    async def note(n: int) -> None:
        ran.append(n)

    async with promoted.join():
        with trio.fail_after(PATIENCE):
            while not acknowledged <= set(ran):
                await trio.sleep(0.01)


async def test_a_claim_does_not_wait_for_replicas(mesh: worqr.Mesh, pair: Pair) -> None:
    runs = Runs()
    pair.replica.pause()
    async with mesh.connect(), serving(mesh, "Q1", runs):
        await mesh.queue("Q1").enqueue(b"T1", replicas=0)
        await runs.wait(1)
        await eventually(mesh.queue("Q1").running, [])


# Elsewhere


@pytest.mark.usefixtures("lonely")
def test_in_plain_threads(mesh: worqr.Mesh, pair: Pair) -> None:
    double, q = doubling(mesh), mesh.queue("Q1")
    wanting: list[Callable[[], Any]] = [
        lambda: worqr.sync(q.enqueue, b"a"),
        lambda: worqr.sync(double.enqueue, 1),
        lambda: worqr.sync(mesh.enqueue_many, [double.call(1)]),
    ]
    try:
        assert worqr.sync(q.enqueue, b"a", replicas=0) == 1
        assert worqr.sync(q.dispatch, b"a", replicas=0).outcome == "created"
        worqr.sync(double.options(replicas=0).enqueue, 1)
        for call in wanting:
            with pytest.raises(worqr.NotReplicated):
                call()
        for dispatch in (lambda: worqr.sync(q.dispatch, b"a"), lambda: worqr.sync(double.dispatch, 1)):
            with pytest.raises(worqr.NotReplicated) as caught:
                dispatch()
            assert isinstance(caught.value.job, worqr.Job)
            assert worqr.sync(caught.value.job.status).state == "waiting"
        assert worqr.sync(q.info).waiting == 8
    finally:
        mesh.close()
    pair.primary.look.flushall()


def test_under_asyncio(mesh: worqr.Mesh, pair: Pair, mine: str, wait_for_replicas: Say) -> None:
    async def main() -> None:
        async with mesh.connect():
            q = mesh.queue("Q1")
            assert await asyncio.gather(*(q.enqueue(b"%d" % n) for n in range(50))) == [1] * 50
            assert stored(pair, mine) == 50
            pair.replica.pause()
            waiting = asyncio.create_task(q.enqueue(b"a"))
            await q.enqueue(b"b", replicas=0)
            while (
                pair.primary.look.llen(QueueKeys(mine, "Q1").base) < 52
            ):  # else the request might be withdrawn, unsent
                await asyncio.sleep(0.01)
            assert not waiting.done()
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            wait_for_replicas(0.1)
            with pytest.raises(worqr.NotReplicated):
                await q.dispatch(b"c")
            assert await q.count() == 53
            await q.delete()

    asyncio.run(main())
