"""Batches on a bench: they end in `run_until_empty`, and `advance` moves what the leader does at a time."""

from __future__ import annotations

from typing import Any

import pytest

import worqr
from tests.support.servers import Server
from worqr import testing

pytestmark = pytest.mark.one_server


class Shop:
    """Functions on queues of their own, and what the follow-ups were told."""

    def __init__(self, mesh: worqr.Mesh) -> None:
        self.told: list[tuple[str, worqr.BatchInfo | None]] = []

        @mesh.task(name="work")
        async def work(n: int) -> None:
            if n < 0:
                raise worqr.Failure("below zero")

        @mesh.task(name="spread")
        async def spread(n: int) -> None:
            batch = mesh.current_batch()
            assert batch is not None
            await batch.dispatch_many(work.call(i) for i in range(n))

        @mesh.task(name="done", result_ttl=60)
        async def done(word: str) -> str:
            self.told.append((word, worqr.current().ended_batch))
            return word

        self.work, self.spread, self.done = work, spread, done


@pytest.fixture
def shop(mesh: worqr.Mesh) -> Shop:
    return Shop(mesh)


async def test_a_batch_ends_and_its_follow_up_runs(mesh: worqr.Mesh, server: Server, shop: Shop) -> None:
    async with testing.bench(mesh, url=server.url) as bench:
        async with mesh.batch(then=shop.done.call("all"), queue="home", meta={"k": "v"}) as batch:
            await batch.dispatch(shop.work.call(1))
            await batch.dispatch(shop.spread.call(3))
        assert await bench.run_until_empty() == testing.Summary(6, 0, 0, 0)
        assert await batch.result(0) == "all"
        assert bench.sent(shop.work) == [shop.work.call(n) for n in (1, 0, 1, 2)]
        assert bench.sent(shop.done) == []
    ((word, told),) = shop.told
    assert told is not None
    assert (word, told.jobs, told.meta) == ("all", 5, {"k": "v"})


async def test_a_failure_makes_the_other_follow_up_run(mesh: worqr.Mesh, server: Server, shop: Shop) -> None:
    async with testing.bench(mesh, url=server.url) as bench:
        options: dict[str, Any] = {"then": shop.done.call("all"), "otherwise": shop.done.call("not all")}
        async with mesh.batch(on_failed="cancel", **options) as batch:
            await batch.dispatch(shop.work.options(delay=600).call(1))
            await batch.dispatch(shop.work.call(-1))
        summary = await bench.run_until_empty(raise_errors=False, scheduled=True)
        assert (summary.finished, summary.failed, summary.cancelled) == (1, 1, 1)
        assert [word for word, _ in shop.told] == ["not all"]
        assert (await batch.info()).cancel_reason == "a job of the batch failed"


async def test_jobs_for_later_end_a_batch_and_its_own_times_move_no_clock(
    mesh: worqr.Mesh, server: Server, shop: Shop
) -> None:
    """The leader looks at a batch 10 s after it is sealed, and forgets it after a day: nothing that a test waits for."""
    async with testing.bench(mesh, url=server.url) as bench:
        async with mesh.batch(then=shop.done.call("all"), keep=86400) as batch:
            await batch.dispatch(shop.work.options(delay=3600).call(1))
        await bench.run_until_empty(scheduled=True)
        assert await batch.result(0) == "all"
        before = (await batch.info()).ended
        await bench.run_until_empty(scheduled=True)
        await bench.advance(3600)
        assert (await batch.info()).ended == before
        await bench.advance(86400)
        assert await mesh.queue("done").batches() == []


async def test_a_batch_that_was_left_open_is_cancelled_when_the_clock_moves(
    mesh: worqr.Mesh, server: Server, shop: Shop
) -> None:
    async with testing.bench(mesh, url=server.url) as bench:
        block = mesh.batch(otherwise=shop.done.call("left"), open_for=60)
        batch = await block.__aenter__()
        await batch.dispatch(shop.work.options(delay=600).call(1))
        await bench.advance(59)
        await bench.run_until_empty()
        assert (await batch.info()).state == "open"
        await bench.advance(60)
        await bench.run_until_empty()
        assert [word for word, _ in shop.told] == ["left"]
        assert (await batch.info()).cancel_reason == "its producer left it open"
        await block.__aexit__(None, None, None)


def test_a_bench_of_plain_threads(mesh: worqr.Mesh, server: Server, shop: Shop) -> None:
    with worqr.sync_block(testing.bench, mesh, url=server.url) as bench:
        with worqr.sync_block(mesh.batch, then=shop.done.call("all"), queue="home") as batch:
            worqr.sync(batch.dispatch, shop.work.call(1))
        worqr.sync(bench.run_until_empty)
        assert worqr.sync(batch.result, 0) == "all"


async def test_a_handler_that_is_called_directly_sees_the_batches_of_the_test(mesh: worqr.Mesh, shop: Shop) -> None:
    ended = worqr.BatchInfo("b", "home", "ended", 3, 2, 1, 0, 1)
    job = worqr.EndedJob("7", "export", "finished")
    with testing.context(ended_job=job, ended_result={"rows": 3}) as of_job:
        assert of_job.ended_job is not None
        assert (of_job.ended_job.result(dict[str, int]), of_job.ended_job.result_size) == ({"rows": 3}, 10)
    with testing.context(ended_batch=ended, batch=worqr.BatchRef("home", "outer")) as context:
        assert await shop.done("x") == "x"
        assert context.batch is not None
        assert context.batch.id == "outer"
        assert context.batch_end() is ended
    assert shop.told == [("x", ended)]
    with testing.context() as alone:
        assert (alone.batch, alone.ended_batch) == (None, None)
        with pytest.raises(worqr.UsageError, match="is for the follow-up of a batch"):
            alone.batch_end()
