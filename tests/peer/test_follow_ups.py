"""Follow-ups of one job: ``then=`` and ``otherwise=`` of its dispatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio

import worqr
from tests.peer.tools import eventually, until
from worqr import EndedJob, Failure, RetryPolicy

LEFT = ("{*}:failed", "{*}:aside*", "{*}:outbox", "{*}:batch*")


class Chain:
    """A mesh with a job, and what follows it."""

    def __init__(self, mesh: worqr.Mesh) -> None:
        self.seen: list[tuple[str, EndedJob | None]] = []
        self.runs = 0

        @mesh.task(name="work", retry=RetryPolicy(max_failures=1))
        async def work(how: str) -> dict[str, int] | str:
            self.runs += 1
            if how == "fail" or (how == "fail once" and self.runs == 1):
                raise ValueError("no")
            if how == "wait":
                await trio.sleep_forever()
            return "x" * 70_000 if how == "large" else {"rows": 3}

        @mesh.task(name="after")
        async def after(label: str) -> None:
            self.seen.append((label, worqr.current().ended_job))

        @mesh.task(name="work.after")
        async def here(label: str) -> None:
            self.seen.append((label, worqr.current().ended_job))

        self.work, self.after, self.here = work, after, here

    def options(self, **more: Any) -> Any:
        return self.work.options(then=self.after.call("then"), otherwise=self.after.call("otherwise"), **more)

    async def ended(self, number: int = 1) -> tuple[str, EndedJob]:
        await until(lambda: len(self.seen) >= number)
        label, job = self.seen[number - 1]
        assert job is not None
        return label, job


@pytest.fixture
def chain(mesh: worqr.Mesh, expects_left: Callable[..., None]) -> Chain:
    expects_left(*LEFT)
    return Chain(mesh)


async def test_a_job_that_finishes_is_followed_by_then_which_reads_its_result(mesh: worqr.Mesh, chain: Chain) -> None:
    async with mesh.join():
        job = await chain.options(meta={"tenant": "a"}).dispatch("")
        label, ended = await chain.ended()
    assert (label, ended.id, ended.queue, ended.outcome, ended.reason) == ("then", job.id, "work", "finished", "")
    assert ended.result(dict[str, int]) == ended.result() == {"rows": 3}
    assert (ended.error, ended.meta, ended.result_size) == (None, {"tenant": "a"}, len('{"rows":3}'))
    with pytest.raises(worqr.UsageError, match="is no <class 'int'>"):
        ended.result(int)


@pytest.mark.leaves("{*}:part:*")  # until the dead letter is dropped
async def test_a_job_that_fails_is_followed_by_otherwise_which_reads_its_error(mesh: worqr.Mesh, chain: Chain) -> None:
    async with mesh.join():
        await chain.options().dispatch("fail")
        label, ended = await chain.ended()
    assert (label, ended.outcome, ended.reason, ended.result_size) == ("otherwise", "failed", "failed", None)
    assert ended.error is not None
    assert (ended.error.type, ended.error.message) == ("ValueError", "no")
    assert 'raise ValueError("no")' in ended.error.traceback
    with pytest.raises(worqr.UsageError, match="has failed, and has no result"):
        ended.result()


@pytest.mark.parametrize("running", [True, False])
async def test_a_cancelled_job_is_followed_by_otherwise(mesh: worqr.Mesh, chain: Chain, running: bool) -> None:
    async with mesh.join():
        job = await chain.options(**({} if running else {"delay": 3600})).dispatch("wait")
        if running:
            await until(lambda: chain.runs)
        await job.cancel(reason="not needed")
        label, ended = await chain.ended()
    assert (label, ended.outcome, ended.reason, ended.error) == ("otherwise", "cancelled", "not needed", None)


@pytest.mark.leaves("{*}:part:*")  # until the dead letter is dropped
async def test_an_expired_job_is_followed_by_otherwise(mesh: worqr.Mesh, chain: Chain) -> None:
    async with mesh.connect():
        await chain.options(expires=0).dispatch("")
        await trio.sleep(0.01)
        async with mesh.join():
            label, ended = await chain.ended()
    assert (label, ended.outcome, ended.reason) == ("otherwise", "failed", "expired")


async def test_of_a_large_result_the_follow_up_gets_the_size(mesh: worqr.Mesh, chain: Chain) -> None:
    async with mesh.join():
        await chain.options().dispatch("large")
        label, ended = await chain.ended()
    assert (label, ended.outcome) == ("then", "finished")
    with pytest.raises(worqr.UsageError, match=r"a result of 70,0\d\d bytes, and a follow-up gets at most 64 KiB"):
        ended.result()


async def test_a_job_that_is_put_back_has_a_follow_up_at_each_end(mesh: worqr.Mesh, chain: Chain) -> None:
    async with mesh.join():
        await chain.options(id="x").dispatch("fail once")
        assert (await chain.ended())[0] == "otherwise"
        await chain.work.queue.failed.retry("x")
        assert (await chain.ended(2))[0] == "then"
    assert len(chain.seen) == 2


async def test_a_chain_of_three(mesh: worqr.Mesh, chain: Chain) -> None:
    async with mesh.join():
        last = chain.after.call("last")
        await chain.work.options(then=chain.work.options(then=last).call("second")).dispatch("first")
        assert (await chain.ended())[0] == "last"
    assert (chain.runs, len(chain.seen)) == (2, 1)


async def test_a_follow_up_in_the_queue_of_the_job_itself(mesh: worqr.Mesh, chain: Chain) -> None:
    async with mesh.join():
        job = await chain.work.options(then=chain.work.options(meta={"n": "2"}).call("again")).dispatch("")
        await until(lambda: chain.runs == 2)
        await eventually(lambda: finished(chain.work.queue), 2)
    assert job


async def finished(queue: worqr.Queue) -> int:
    return (await queue.info()).counts.get("finished", 0)


@pytest.mark.leaves("{*}:part:*")  # until the dead letter is dropped
async def test_many_jobs_of_one_call_and_those_of_a_batch_have_follow_ups(mesh: worqr.Mesh, chain: Chain) -> None:
    async with mesh.join():
        await mesh.dispatch_many([chain.options().call(""), chain.work.call(""), chain.options().call("fail")])
        async with mesh.batch() as batch:
            await batch.dispatch(chain.options().call(""))
        await until(lambda: len(chain.seen) == 3)
    assert sorted(label for label, _ in chain.seen) == ["otherwise", "then", "then"]


@pytest.mark.leaves("{*}:part:*")  # until the dead letter is dropped
async def test_a_raw_job_has_follow_ups_too(mesh: worqr.Mesh, chain: Chain) -> None:
    async with mesh.connect(), mesh.join() as peer, peer.work("raw") as claims:
        await mesh.queue("raw").dispatch(b"t", otherwise=chain.after.call("otherwise"), id="x")
        async with (await claims.take(1))[0]:
            raise Failure("no")
        assert [(await chain.ended())[1].id] == ["x"]


async def test_a_dispatch_that_replaces_a_waiting_job_replaces_its_follow_ups(mesh: worqr.Mesh, chain: Chain) -> None:
    async with mesh.connect():
        await chain.options(id="x").dispatch("fail")
        await chain.work.options(id="x", then=chain.after.call("other")).dispatch("")
        async with mesh.join():
            assert (await chain.ended())[0] == "other"
        await chain.options(id="y").dispatch("")
        await chain.work.options(id="y").dispatch("")
        async with mesh.join():
            await eventually(lambda: finished(chain.work.queue), 2)
            assert len(chain.seen) == 1


@pytest.mark.leaves("shards", "{*}-shard*:failed", "{*}-shard*:aside*", "{*}-shard*:part:*", "{*}:part:*")
async def test_shards_have_follow_ups(mesh: worqr.Mesh, chain: Chain) -> None:
    @mesh.task(name="split", shards=3, retry=RetryPolicy(max_failures=1))
    async def split(n: int) -> int:
        if n % 2:
            raise ValueError(n)
        return n

    async with mesh.join():
        for n in range(6):
            await split.options(then=chain.after.call("then"), otherwise=split.call(8), id=f"x{n}").dispatch(n)
        await until(lambda: len(chain.seen) == 3)
        await eventually(lambda: finished(split.queue), 6)
    assert sorted(job.result(int) for _, job in chain.seen if job is not None) == [0, 2, 4]


def otherwise_twice(chain: Chain) -> Any:
    return chain.work.options(otherwise=chain.options().call("x"))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda chain: chain.work.options(then=chain.after), r"then must be a call: write then=function.call\(...\)"),
        (lambda chain: chain.work.options(then=chain.after.options(id="x").call("a")), "leave id= out"),
        (otherwise_twice, "may run more than once"),
    ],
)
async def test_what_cannot_follow_is_refused(mesh: worqr.Mesh, chain: Chain, make: Any, why: str) -> None:
    async with mesh.connect():
        with pytest.raises(worqr.UsageError, match=why):
            await make(chain).dispatch("")


async def test_the_records_of_both_jobs_name_the_other_queue(mesh: worqr.Mesh, chain: Chain) -> None:
    async with mesh.connect():
        job = await chain.work.options(then=chain.here.options(delay=3600).call("x")).dispatch("")
        record = await chain.work.queue.read(job.id)
        assert (record.then, record.otherwise, record.follows) == ("work.after", "", None)
        async with mesh.join():
            await eventually(lambda: scheduled(chain.here.queue), 1)
        [after] = await chain.here.queue.jobs(state="scheduled")
        assert (await chain.here.queue.read(after.id or "")).follows == ("work", job.id)
        await chain.here.job(after.id or "").cancel()


async def scheduled(queue: worqr.Queue) -> int:
    return (await queue.info()).scheduled


@pytest.mark.leaves("{*}:done*", "{*}:part:*")
async def test_a_follow_up_that_was_kept_runs_again_with_what_had_ended(mesh: worqr.Mesh, chain: Chain) -> None:
    fails = mesh.queue("fails")

    @mesh.task(name="fails", retry=RetryPolicy(max_failures=1))
    async def fail(label: str) -> None:
        chain.seen.append((label, worqr.current().ended_job))
        raise ValueError("no")

    @mesh.task(name="sum")
    async def total(label: str) -> None:
        assert worqr.current().batch_end().finished == 1
        chain.seen.append((label, None))

    keep = worqr.Keep()
    async with mesh.join():
        for n, function in enumerate((chain.after, fail)):
            call = function.options(keep=keep).call("kept")
            await chain.work.options(then=call).dispatch("")
            first = await chain.ended(2 * n + 1)
            await eventually(lambda function=function: _kept(function.queue), 1)
            [found] = await function.queue.jobs(state="ended")
            await function.queue.run_again(found.kept or "")
            assert await chain.ended(2 * n + 2) == first
        async with mesh.batch(then=total.options(keep=keep).call("all")) as batch:
            await batch.dispatch(chain.work.call(""))
        await eventually(lambda: _kept(total.queue), 1)
        await total.queue.run_again((await total.queue.jobs(state="ended"))[0].kept or "")
        await until(lambda: len(chain.seen) == 6)
        await eventually(lambda: _kept(fails), 2)


async def _kept(queue: worqr.Queue) -> int:
    return len(await queue.jobs(state="ended"))
