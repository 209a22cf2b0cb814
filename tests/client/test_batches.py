"""Batches as producers see them: made, added to, looked at, waited for, cancelled; under Trio, asyncio and in plain threads."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import trio

import worqr
from tests.peer.conftest import NewMesh, mesh, new_mesh, other  # noqa: F401 - fixtures
from tests.peer.tools import eventually, spying, until
from tests.support.patience import PATIENCE
from tests.support.servers import Server
from worqr import BatchEnded, BatchFailed, Duplicate, NoResult, QueueFull, ResultTimeout, UsageError, ops
from worqr.client import batch as batch_module
from worqr.client import notifications
from worqr.client.outbox_relay import Relay, relay_messages
from worqr.command import Command
from worqr.keys import QueueKeys
from worqr.link import Link, session
from worqr.peer.leader import leader as leader_relay

pytestmark = [
    pytest.mark.one_server,
    pytest.mark.leaves(
        "{*}*:batch*", "{*}:failed", "{*}:aside*", "shards", "{*}*:part:*", "{*}*:outbox", "{*}*:job:*", "{*}*:due"
    ),
]


class Shop:
    """Three functions on three queues, and what the follow-ups were told."""

    def __init__(self, mesh: worqr.Mesh) -> None:
        self.mesh = mesh
        self.told: list[tuple[str, worqr.BatchInfo | None]] = []
        self.seen: list[worqr.BatchRef | None] = []
        self.gate = threading.Event()

        @mesh.task(name="work", retry=worqr.RetryPolicy(max_failures=1))
        async def work(n: int) -> int:
            self.seen.append(worqr.current().batch)
            if n < 0:
                raise ValueError(n)
            return n

        @mesh.task(name="hold")
        async def hold() -> None:
            while not self.gate.is_set():
                await trio.sleep(0.005)

        @mesh.task(name="spread")
        async def spread(n: int) -> None:
            batch = mesh.current_batch()
            assert batch is not None
            await batch.dispatch_many([work.call(i) for i in range(n)])

        @mesh.task(name="done", result_ttl=60)
        async def done(word: str = "done") -> str:
            self.told.append((word, worqr.current().ended_batch))
            return word

        self.work, self.hold, self.spread, self.done = work, hold, spread, done


@pytest.fixture
def shop(mesh: worqr.Mesh) -> Shop:
    return Shop(mesh)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is polled in case a message is lost is polled often."""
    monkeypatch.setattr(notifications, "POLL_EVERY", 0.05)
    monkeypatch.setattr(batch_module, "ASK_AGAIN", 0.005)


# What a producer does


async def life(shop: Shop) -> None:
    """Everything that the handle of a batch can do, in a loop in which the mesh has joined."""
    mesh = shop.mesh
    async with mesh.batch(then=shop.done.call(), otherwise=shop.done.call("alarm"), meta={"shop": "7"}) as batch:
        assert (await batch.info()).state == "open"
        job = await batch.dispatch(shop.work.call(1))
        assert (job.queue, job.outcome) == ("work", "created")
        assert len(await batch.dispatch_many(shop.work.call(n) for n in range(20))) == 20
        await batch.dispatch(shop.spread.call(4))
    info = await batch.wait(PATIENCE)
    assert (info.jobs, info.finished, info.failed, info.cancelled) == (26, 26, 0, 0)
    assert (info.state, info.endings, info.pending, info.succeeded) == ("ended", 1, 0, True)
    assert (info.queue, info.queues, info.meta) == ("done", ("spread", "work"), {"shop": "7"})
    assert await batch.result(PATIENCE) == "done"
    assert info.follow_up is not None
    ((word, told),) = shop.told
    assert told is not None
    assert (word, told.id, told.queue, told.jobs, told.meta) == ("done", batch.id, "done", 26, {"shop": "7"})
    assert {ref and (ref.queue, ref.id) for ref in shop.seen} == {("done", batch.id)}

    found = mesh.queue("done").batch(batch.id)
    assert await found.info() == await batch.info()
    assert await found.result(0) == "done"
    with pytest.raises(BatchEnded, match="has ended"):
        await found.dispatch(shop.work.call(1))
    async with found.watch() as infos:
        assert [each async for each in infos] == [info]
    assert [each.id for each in await mesh.queue("done").batches()] == [batch.id]

    async with mesh.batch(otherwise=shop.done.call("alarm")) as failing:
        await failing.dispatch_many([shop.work.call(-1), shop.work.call(1)])
    with pytest.raises(BatchFailed, match="1 of 2 jobs finished, 1 failed") as caught:
        await failing.result(PATIENCE)
    assert caught.value.info.failed == 1
    assert await failing.retry_failed() == 1
    assert (await failing.wait(PATIENCE)).endings == 2

    with pytest.raises(ZeroDivisionError):
        async with mesh.batch() as broken:
            await broken.dispatch(shop.work.options(delay=600).call(1))
            raise ZeroDivisionError
    ended = await broken.wait(PATIENCE)
    assert (ended.cancelled, ended.cancel_reason) == (1, "its block ended with ZeroDivisionError")
    with pytest.raises(BatchEnded, match="was cancelled: its block ended"):
        await broken.dispatch(shop.work.call(1))
    assert await broken.cancel() is False


async def test_the_life_of_a_batch_under_trio(shop: Shop) -> None:
    async with shop.mesh.join():
        await life(shop)


def test_the_life_of_a_batch_under_asyncio(shop: Shop) -> None:
    async def main() -> None:
        async with shop.mesh.join(), asyncio.timeout(PATIENCE):
            await life(shop)

    shop.hold.queue  # noqa: B018 - its handler waits by Trio, and is not called here
    asyncio.run(main())


@pytest.fixture
def served(shop: Shop) -> Iterator[Shop]:
    """A worker in a thread, as a program without a loop has it."""
    with shop.mesh.join_in_thread():
        yield shop
    shop.mesh.close()


def test_the_life_of_a_batch_in_a_plain_thread(served: Shop) -> None:
    shop, mesh = served, served.mesh
    with worqr.sync_block(mesh.batch, then=shop.done.call(), otherwise=shop.done.call("alarm")) as batch:
        assert worqr.sync(batch.dispatch, shop.work.call(1)).queue == "work"
        assert len(worqr.sync(batch.dispatch_many, (shop.work.call(n) for n in range(20)))) == 20
        assert worqr.sync(batch.info).state == "open"
    assert repr(batch) == f"<Batch {batch.id!r} of 'done'>"
    info = worqr.sync(batch.wait, PATIENCE)
    assert (info.jobs, info.finished, info.queue) == (21, 21, batch.queue)
    assert worqr.sync(batch.result, PATIENCE) == "done"
    with worqr.sync_block(batch.watch) as infos:
        assert list(infos) == [info]
    assert worqr.sync(mesh.queue("done").batch(batch.id).info) == info
    assert worqr.sync(mesh.queue("done").batches) == [info]
    with worqr.sync_block(mesh.batch) as failing:
        worqr.sync(failing.dispatch, shop.work.call(-1))
    assert worqr.sync(failing.wait, PATIENCE).failed == 1
    assert worqr.sync(failing.retry_failed) == 1
    with pytest.raises(ZeroDivisionError), worqr.sync_block(mesh.batch) as broken:
        worqr.sync(broken.dispatch, shop.work.options(delay=600).call(1))
        raise ZeroDivisionError
    assert worqr.sync(broken.wait, PATIENCE).cancelled == 1
    assert worqr.sync(broken.cancel, reason="too late") is False


def test_threads_add_to_one_batch_and_its_home_is_made_once(served: Shop) -> None:
    with worqr.sync_block(served.mesh.batch) as batch:
        threads = [threading.Thread(target=worqr.sync, args=(batch.dispatch, served.work.call(n))) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert worqr.sync(batch.wait, PATIENCE).finished == 8
    assert len(worqr.sync(served.mesh.queue("work").batches)) == 1


async def test_tasks_add_to_one_batch_and_its_home_is_made_once(shop: Shop) -> None:
    async with shop.mesh.join():
        async with shop.mesh.batch() as batch, trio.open_nursery() as nursery:
            for n in range(8):
                nursery.start_soon(batch.dispatch, shop.work.call(n))
                nursery.start_soon(batch.dispatch, shop.spread.call(1))
        assert (await batch.wait(PATIENCE)).finished == 24
        names = ("work", "spread")
        assert [each for name in names for each in await shop.mesh.queue(name).batches()] == [await batch.info()]


# What is refused


async def test_what_is_no_block_and_what_would_stop_the_loop_is_refused(shop: Shop) -> None:
    mesh = shop.mesh
    with pytest.raises(UsageError, match="is not connected"):
        async with mesh.batch():
            raise AssertionError
    async with mesh.connect():
        with pytest.raises(UsageError, match=r"write `async with mesh.batch\(\.\.\.\) as batch:`"):
            with mesh.batch():  # type: ignore[attr-defined]  # pyright: ignore[reportGeneralTypeIssues, reportAttributeAccessIssue]
                raise AssertionError
        with pytest.raises(UsageError, match=r"write `async with mesh.batch\(\.\.\.\) as batch:`"):
            await mesh.batch()  # type: ignore[misc]  # pyright: ignore[reportGeneralTypeIssues]
        with (
            pytest.raises(UsageError, match="would stop the Trio loop.*async with mesh.batch"),
            worqr.sync_block(mesh.batch),
        ):
            raise AssertionError
        with pytest.raises(UsageError, match="would stop the Trio loop"):
            worqr.sync(mesh.queue("work").batches)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"them": None}, "has no option 'them'; it takes id, keep, meta, on_failed, open_for, otherwise, queue, then"),
        ({"then": 7}, "then of a batch must be a call: write then=function.call"),
        ({"on_failed": "stop"}, "on_failed"),
        ({"keep": 0}, "keep"),
        ({"open_for": -1}, "open_for"),
        ({"id": "@mine"}, "id"),
        ({"queue": "a{b"}, "queue|name"),
    ],
)
async def test_options_are_checked(shop: Shop, options: dict[str, Any], says: str) -> None:
    async with shop.mesh.connect():
        with pytest.raises(UsageError, match=says):
            async with shop.mesh.batch(**options):
                raise AssertionError


async def test_a_follow_up_has_no_id_of_its_own(shop: Shop) -> None:
    async with shop.mesh.connect():
        with pytest.raises(UsageError, match="leave id= out"):
            async with shop.mesh.batch(then=shop.done.options(id="x").call()):
                raise AssertionError
        async with shop.mesh.batch() as batch:
            with pytest.raises(UsageError, match="is no home queue|has no home queue yet"):
                _ = batch.id
            with pytest.raises(UsageError, match="give calls"):
                await batch.dispatch(7)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        assert (await batch.wait()).state == "ended"
        assert await batch.result() is None


async def test_an_id_names_one_batch_until_it_is_forgotten(shop: Shop) -> None:
    async with shop.mesh.connect():
        async with shop.mesh.batch(id="night", queue="done"):
            with pytest.raises(Duplicate, match="has a batch with the id 'night' already"):
                async with shop.mesh.batch(id="night", queue="done"):
                    raise AssertionError
        with pytest.raises(NoResult, match="is unknown"):
            await shop.mesh.queue("done").batch("nights").info()
        with pytest.raises(BatchEnded, match="is unknown"):
            await shop.mesh.queue("done").batch("nights").dispatch(shop.work.call(1))
        with pytest.raises(NoResult):
            await shop.mesh.queue("done").batch("nights").cancel()
        with pytest.raises(NoResult):
            await shop.mesh.queue("done").batch("nights").retry_failed()


async def test_a_member_is_always_a_new_job(shop: Shop) -> None:
    async with shop.mesh.connect():
        await shop.work.options(id="x").dispatch(1)
        with pytest.raises(Duplicate) as caught:
            async with shop.mesh.batch() as batch:
                await batch.dispatch(shop.work.options(id="x").call(1))
        assert caught.value.job is not None
        assert (await batch.wait(PATIENCE)).jobs == 0
        await shop.mesh.queue("work").delete()


async def test_a_queue_that_is_full_takes_no_member(shop: Shop) -> None:
    async with shop.mesh.connect():
        with pytest.raises(QueueFull):
            async with shop.mesh.batch() as batch:
                await batch.dispatch_many([shop.work.options(max_length=2).call(n) for n in range(3)])
        info = await batch.wait(PATIENCE)
        assert (info.jobs, info.cancelled) == (2, 2)


async def test_an_error_says_how_many_jobs_were_added(shop: Shop) -> None:
    async with shop.mesh.connect():
        calls = [*(shop.work.call(n) for n in range(1500)), shop.work.options(max_length=1000).call(1)]
        with pytest.raises(QueueFull) as caught:
            async with shop.mesh.batch() as batch:
                await batch.dispatch_many(calls)
        assert "the first 1,000 jobs were added" in caught.value.__notes__
        assert (await batch.wait(PATIENCE)).cancelled == 1500


async def test_a_sealed_batch_takes_jobs_from_its_own_jobs_only(shop: Shop, other: worqr.Mesh) -> None:
    inside: list[worqr.Batch] = []
    sealed = "was sealed by the end of its block"

    @shop.mesh.task(name="inside")
    async def add_more() -> None:
        batch = shop.mesh.current_batch()
        assert batch is not None
        inside.append(batch)
        await batch.dispatch(shop.work.call(1))
        while not shop.gate.is_set():
            await trio.sleep(0.005)
        await batch.dispatch_many([shop.work.call(2), shop.hold.call()])  # after the seal; one in a queue that is new

    async with shop.mesh.join(), other.connect():
        async with shop.mesh.batch(then=shop.done.call(), id="b") as batch:
            await batch.dispatch(add_more.call())
            elsewhere = other.queue("done").batch("b")
            await elsewhere.dispatch(shop.work.call(3))
            while not inside:
                await trio.sleep(0.005)
        for handle in batch, elsewhere, other.queue("done").batch("b"):
            for call in shop.work.call(4), shop.spread.call(1):  # a queue that has a part, and one that has none
                with pytest.raises(BatchEnded, match=sealed):
                    await handle.dispatch(call)
        with pytest.raises(BatchEnded, match=sealed):
            async with shop.mesh.batch(parent=batch, queue="done"):
                pass
        shop.gate.set()
        info = await batch.wait(timeout=PATIENCE)
        assert (info.jobs, info.finished) == (5, 5)
        with pytest.raises(BatchEnded, match="has ended"):
            await batch.dispatch(shop.work.call(4))


def test_a_batch_without_jobs_takes_none_after_its_block(served: Shop) -> None:
    with worqr.sync_block(served.mesh.batch) as batch:
        pass
    with pytest.raises(BatchEnded, match="was sealed by the end of its block"):
        worqr.sync(batch.dispatch, served.work.call(1))


async def test_waiting_has_a_limit(shop: Shop) -> None:
    async with shop.mesh.connect():
        async with shop.mesh.batch() as batch:
            await batch.dispatch(shop.work.options(delay=600).call(1))
            with pytest.raises(ResultTimeout, match="1 of 1 jobs run or wait"):
                await batch.wait(0)
            with pytest.raises(ResultTimeout):
                await batch.result(0.01)
            await batch.cancel(reason="enough")


# Many


async def test_more_than_a_thousand_are_sent_in_few_round_trips_and_read_as_they_are_sent(
    shop: Shop, server: Server
) -> None:
    read: list[int] = []

    def calls() -> Iterator[worqr.Call[int]]:
        for n in range(2500):
            read.append(n)
            yield shop.work.call(n)

    async with shop.mesh.connect():
        async with shop.mesh.batch() as batch:
            with spying(server, shop.mesh.prefix) as spy:
                await batch.dispatch_many(calls())
                seen = spy.calls()
        assert (seen["dispatch_jobs"], seen["open_part"], seen["open_batch"]) == (3, 1, 1)
        assert (await batch.info()).jobs == len(read) == 2500
        await batch.cancel()


async def test_the_parts_in_many_queues_are_asked_together(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    call, call_all = Link.call, Link.call_all

    async def ask(link: Link, *args: Any, **kwargs: Any) -> Any:
        asked.append("call")
        return await call(link, *args, **kwargs)

    async def ask_all(link: Link, *args: Any) -> Any:
        asked.append("call_all")
        return await call_all(link, *args)

    monkeypatch.setattr(Link, "call", ask)
    monkeypatch.setattr(Link, "call_all", ask_all)
    async with shop.mesh.connect():
        async with shop.mesh.batch(queue="home") as batch:
            await batch.dispatch_many([shop.mesh.call(f"q{n}", b"x") for n in range(20)])
            asked.clear()
            assert (await batch.info()).jobs == 20
            assert asked == ["call", "call_all"]
            asked.clear()
            assert [each.jobs for each in await shop.mesh.queue("home").batches()] == [20]
            assert asked == ["call_all", "call_all"]
            await batch.cancel()


# Shards


async def test_a_batch_of_sharded_queues(shop: Shop, other: worqr.Mesh) -> None:
    """Its home is a shard, its members are in all of them, and another program finds it by its id."""
    mesh = shop.mesh
    for name in ("work", "done"):
        mesh.queue(name, shards=4)
    async with mesh.join(), other.connect():
        for name in ({}, {"id": "night"}, {"id": "day"}):
            async with mesh.batch(then=shop.done.call(), **name) as batch:  # type: ignore[arg-type]
                for n in range(30):
                    await batch.dispatch(shop.work.options(id=f"{name.get('id')}{n}").call(n))
                await batch.dispatch(shop.spread.call(9))
            assert await batch.result(PATIENCE) == "done"
            for queue in (mesh.queue("done"), other.queue("done")):
                info = await queue.batch(batch.id).info()
                assert (info.jobs, info.finished, info.queues, info.queue) == (40, 40, ("spread", "work"), "done")
        assert {each.id for each in await other.queue("done").batches()} >= {"night", "day"}
        assert len(await other.queue("done").batches()) == 3


async def test_a_handle_declares_the_shards_of_its_program_first(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    """A handle by its id is used before anything else, in the first program that declares the shards."""
    async with other.connect():
        handle = other.queue("hot", shards=8).batch("b1")
        with pytest.raises(NoResult):
            await handle.info()
        async with mesh.connect():
            for n in range(8):
                async with mesh.batch(id=f"b{n}", queue="hot"):
                    pass
            for n in range(8):
                assert (await other.queue("hot").batch(f"b{n}").info()).state == "ended"


# Batches in batches


async def test_a_batch_is_a_job_of_another(shop: Shop) -> None:
    mesh = shop.mesh
    async with mesh.join():
        async with mesh.batch(then=shop.done.call("outer")) as outer:
            for n in range(3):
                async with mesh.batch(parent=outer, then=shop.done.call(f"inner {n}")) as inner:
                    await inner.dispatch(shop.work.call(n))
        info = await outer.wait(PATIENCE)
        assert (info.jobs, info.finished) == (6, 6), "three batches, and their follow-ups in the queue of the outer one"
        assert await outer.result(PATIENCE) == "outer"
        assert shop.told[-1][0] == "outer"


async def test_the_first_job_of_a_batch_may_be_a_batch(shop: Shop) -> None:
    async with shop.mesh.connect():
        async with shop.mesh.batch() as outer, shop.mesh.batch(parent=outer) as inner:
            await inner.dispatch(shop.work.call(1))
            assert (outer.queue, inner.queue) == ("work", "work")
            assert (await outer.info()).jobs == 1
            await outer.cancel(reason="no")
        assert (await inner.wait(PATIENCE)).cancel_reason == "no"
        assert (await outer.wait(PATIENCE)).failed == 1, "a batch that did not succeed"


# Its producer


async def test_additions_tell_that_the_producer_is_alive(shop: Shop, server: Server) -> None:
    """Also those of one call, whose iterator is slow."""
    async with shop.mesh.connect():
        async with shop.mesh.batch(open_for=1, queue="home") as batch:
            await batch.dispatch(shop.work.call(0))
            key = f"{shop.mesh.prefix}:{{home}}:batch:{batch.id}"
            before = int(server.look.hget(key, "open_until") or 0)

            def calls() -> Iterator[worqr.Call[int]]:
                for n in range(2001):
                    if n % 1000 == 0:
                        time.sleep(0.3)
                    yield shop.work.call(n)

            await batch.dispatch_many(calls())
            assert int(server.look.hget(key, "open_until") or 0) - before >= 500
            await batch.cancel()


async def test_a_producer_that_waits_for_room_is_alive(shop: Shop, server: Server) -> None:
    bounded = shop.work.options(max_length=1, wait=PATIENCE)
    async with shop.mesh.connect(), shop.mesh.batch(open_for=1, queue="home") as batch:
        await batch.dispatch(bounded.call(0))
        key = f"{shop.mesh.prefix}:{{home}}:batch:{batch.id}"
        before = int(server.look.hget(key, "open_until") or 0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(batch.dispatch, bounded.call(1))
            await until(lambda: int(server.look.hget(key, "open_until") or 0) - before >= 500)
            nursery.cancel_scope.cancel()
        await batch.cancel()


async def test_a_batch_that_its_producer_has_left_open_is_cancelled(shop: Shop) -> None:
    mesh = shop.mesh
    async with mesh.join():
        block = mesh.batch(open_for=0.2, otherwise=shop.done.call("alarm"))
        batch = await block.__aenter__()
        await batch.dispatch(shop.work.options(delay=600).call(1))
        info = await batch.wait(PATIENCE)
        assert (info.cancelled, info.cancel_reason) == (1, "its producer left it open")
        await eventually(lambda: _words(shop), ["alarm"])
        with pytest.raises(BatchEnded, match="was cancelled: its producer left it open"):
            await batch.dispatch(shop.work.call(1))
        await block.__aexit__(None, None, None)


async def _words(shop: Shop) -> list[str]:
    return [word for word, _ in shop.told]


async def test_a_block_that_is_cancelled_cancels_its_batch_although_the_connection_ends(
    shop: Shop, other: worqr.Mesh
) -> None:
    with trio.CancelScope() as scope:
        async with shop.mesh.connect(), shop.mesh.batch() as batch:
            await batch.dispatch(shop.work.options(delay=600).call(1))
            scope.cancel()
            await trio.sleep_forever()
    async with other.connect():
        assert (await other.queue("work").batch(batch.id).info()).cancel_reason == "its block ended with Cancelled"
        await other.queue("work").batch(batch.id).cancel()
        assert await _ended(other, batch.id)


async def test_a_block_that_is_cancelled_at_its_end_cancels_its_batch(shop: Shop) -> None:
    async with shop.mesh.connect():
        with trio.CancelScope() as scope:
            async with shop.mesh.batch() as batch:
                await batch.dispatch(shop.work.options(delay=600).call(1))
                scope.cancel()
        assert scope.cancelled_caught
        assert (await batch.info()).cancel_reason == "its block ended with Cancelled"
        await batch.cancel()
        await eventually(lambda: _state(batch), "ended")


@pytest.mark.parametrize("given_up", ["the block", "the first addition"])
async def test_a_batch_whose_opening_is_cancelled_does_not_stay_open(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, given_up: str
) -> None:
    async def arrive(link: Link, command: Command[Any]) -> Any:
        with trio.CancelScope(shield=True):
            await call(link, command)
        scope.cancel()  # the reply comes too late
        await trio.lowlevel.checkpoint()

    async with shop.mesh.connect():
        call, scope = Link.call, trio.CancelScope()
        if given_up == "the block":
            with scope:
                monkeypatch.setattr(Link, "call", arrive)
                async with shop.mesh.batch(queue="work"):
                    pytest.fail("it began")
        else:
            async with shop.mesh.batch() as batch:
                with scope:
                    monkeypatch.setattr(Link, "call", arrive)
                    await batch.dispatch(shop.work.call(1))
                monkeypatch.undo()
        monkeypatch.undo()
        assert scope.cancelled_caught
        [info] = await shop.mesh.queue("work").batches()
        assert (info.state, info.jobs) == ("ended", 0)


async def _state(batch: worqr.Batch) -> str:
    return (await batch.info()).state


async def _ended(mesh: worqr.Mesh, name: str) -> bool:
    async with mesh.join():
        return (await mesh.queue("work").batch(name).wait(PATIENCE)).cancelled == 1


def test_a_task_of_asyncio_that_is_cancelled_cancels_its_batch_although_the_connection_ends(
    shop: Shop, new_mesh: NewMesh
) -> None:
    found: list[worqr.Batch] = []

    async def produce(begun: asyncio.Event) -> None:
        async with shop.mesh.connect(), shop.mesh.batch() as batch:
            found.append(batch)
            await batch.dispatch(shop.work.options(delay=600).call(1))
            begun.set()
            await asyncio.sleep(PATIENCE)

    async def main() -> None:
        begun = asyncio.Event()
        task = asyncio.create_task(produce(begun))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    other = new_mesh()
    other.task(name="nothing")(lambda: None)
    with other.join_in_thread():
        info = worqr.sync(other.queue("work").batch(found[0].id).wait, PATIENCE)
    other.close()
    assert (info.cancelled, info.cancel_reason) == (1, "its block ended with CancelledError")


async def test_a_record_that_was_deleted_is_no_silent_end(shop: Shop, server: Server) -> None:
    async with shop.mesh.connect():
        with pytest.raises(BatchEnded, match="was deleted, so its follow-up will not run"):
            async with shop.mesh.batch(queue="home") as batch:
                await batch.dispatch(shop.work.call(1))
                for key in server.look.keys(f"{shop.mesh.prefix}:{{home}}*"):
                    server.look.delete(key)
        await shop.mesh.queue("work").delete()


# Messages between queues


async def test_who_waits_delivers_the_messages_where_no_leader_does(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker that leads delivers nothing: the caller delivers the report and then the follow-up."""

    async def deliver_nothing(*_: Any) -> None:
        await trio.lowlevel.checkpoint()

    monkeypatch.setattr(leader_relay, "relay_and_check", deliver_nothing)
    async with shop.mesh.join():
        async with shop.mesh.batch(then=shop.done.call(), queue="home") as batch:
            await batch.dispatch_many([shop.work.call(1), shop.spread.call(1)])
        assert await batch.result(PATIENCE) == "done"
        assert (await batch.info()).finished == 3
        async with shop.mesh.batch(then=shop.done.call("next"), queue="hold") as batch:
            await batch.dispatch(shop.hold.call())
        shop.gate.set()
        assert await batch.result(PATIENCE) == "next", (
            "the job ends the batch at its home, and the follow-up is elsewhere"
        )


async def test_a_queue_that_cannot_be_reached_delays_no_message_for_others() -> None:
    """And what it would get stays in the outbox."""
    keys, down = QueueKeys("p", "part"), "p:{down}"
    posted = [message(n, down if n % 2 else f"p:{{up{n}}}") for n in range(300)]
    reached: list[str] = []

    async def ask(call: Any) -> Any:
        name = call.script.name
        if name == "take_outbox":
            return posted[: int(call.args[0])]
        if name == "drop_outbox":
            for topic in call.args[::2]:
                posted[:] = [each for each in posted if each.topic != topic]
            return "ok"
        if call.base == down:
            raise worqr.Unavailable("down", sent=False)
        reached.append(call.base)
        return "ok"

    with pytest.raises(worqr.Unavailable):
        await relay_messages(ask, "p", keys)
    assert len(reached) == 150
    assert len(posted) == 150


def message(number: int, home: str) -> ops.OutboxMessage:
    parts = [home.encode(), b"id", b"token", b"p:{part}", b"1", b"1", b"1 1 0 0 0 0"]
    return ops.OutboxMessage(b"report %d" % number, b"m%d" % number, "report", parts)


async def test_what_another_application_has_put_there_is_dropped() -> None:
    odd = [[b"p:{x}", b"?"], [b"p:{x}", b"t", b"then", b"1e9", b""], [b"p:{x}", b"t:x", b"then", b"1", b""], []]
    odd += [[b"p:{x}", b"b", b"t", b"p:{y}", b"1", b"1", b"1 1 x 0 0 0"], [b"p:{x}", b"t", b"-1"], [b"\xff"] * 9]
    kinds = ("report", "cancel", "release", "keep", "?", "")
    posted = [ops.OutboxMessage(b"x", b"x", kind, parts) for kind in kinds for parts in odd]

    async def ask(call: Any) -> Any:
        if call.script.name == "take_outbox":
            return list(posted)
        posted.clear()
        return "ok"

    await relay_messages(ask, "p", QueueKeys("p", "part"))
    assert posted == []


async def test_what_it_has_put_there_is_read_whatever_it_is() -> None:
    read = ops.take_outbox(QueueKeys("p", "part")).read
    stored = [
        None,
        b"x",
        5,
        [],
        [1, 2],
        [None, b"x"],
        [b"keep", [b"x"]],
        [b"follow_up", b"p:{x}", b"t", 1, b"", b"task"],
    ]
    found = read([b"ok", *([b"topic", b"message", each] for each in stored)])
    assert [message.kind for message in found] == [*[""] * 4, "1", "", "", "follow_up"]
    assert found[-1].parts == [b"p:{x}", b"t", b"1", b"", b"task"]


async def test_a_follow_up_that_its_queue_does_not_hold_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    parts = [b"p:{there}", b"token", b"then", b"1", b"\x80"]
    posted = [ops.OutboxMessage(b"%d" % n, b"m", "release", parts) for n in range(5)]
    replies = iter(["ok", "unknown", "stored", "unknown", "unknown"])

    async def ask(call: Any) -> Any:
        if call.script.name == "take_outbox":
            return list(posted)
        if call.script.name == "put_follow_up":
            return next(replies)
        posted.clear()
        return "ok"

    await relay_messages(ask, "p", QueueKeys("p", "part"))
    [line] = caplog.records
    assert line.levelname == "ERROR"
    assert line.getMessage().startswith("relay: 3 follow-ups of queue 'part' were not enqueued")
    assert "@token.then of 'there'" in line.getMessage()


async def test_a_part_that_cannot_be_told_delays_no_other_check() -> None:
    told: list[str] = []
    checks = [ops.BatchCheck(f"b{n}", "t", None, "1", (("p:{down}", 1), (f"p:{{up{n}}}", 1))) for n in range(3)]

    async def ask(call: Any) -> Any:
        if call.script.name == "check_batches":
            return False, checks
        if call.script.name == "take_outbox":
            return []
        told.append(call.base)
        if call.base == "p:{down}":
            raise worqr.Unavailable("down", sent=False)
        return "ok"

    relay = Relay(ask, "p")
    await relay.checks(QueueKeys("p", "home"))
    assert told == ["p:{down}", "p:{up0}", "p:{up1}", "p:{up2}"], "the one that is down is asked once"
    with pytest.raises(worqr.Unavailable):
        relay.end()


# Replicas


async def test_too_few_replicas_stop_no_job_and_are_told_at_the_end(
    shop: Shop, new_mesh: NewMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "REPLICAS_WAIT", 0.3)
    mesh = new_mesh(replicas=1)
    async with mesh.connect():
        with pytest.raises(worqr.NotReplicated) as caught:
            async with mesh.batch() as batch:
                await batch.dispatch_many([mesh.call(f"q{n % 3}", b"x") for n in range(1500)])
        assert caught.value.job is None
        info = await batch.info()
        assert info.jobs == 1500
        async with mesh.batch() as one:
            with pytest.raises(worqr.NotReplicated) as late:
                await one.dispatch(mesh.call("q1", b"x"))
            assert late.value.job is not None
            assert late.value.job.queue == "q1"
            await one.cancel()
        for n in range(3):
            await mesh.queue(f"q{n}").delete()
