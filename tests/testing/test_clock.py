"""The clock of a bench: moved by the test alone, known to nobody else, and what goes by it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
import trio

import worqr
from tests.peer.tools import Runs, spying
from tests.support.servers import Server
from worqr import testing
from worqr.link import Link
from worqr.lua import all_scripts
from worqr.testing.bench_run import BenchLink, bench_scripts

HOUR = timedelta(hours=1)
DAY = timedelta(days=1)


@pytest.fixture
def note(mesh: worqr.Mesh) -> worqr.Function[[int], int]:
    @mesh.task(name="note", result_ttl=3600)
    async def note(n: int) -> int:
        return n

    return note


Note = worqr.Function[[int], int]


# Nobody else's


def test_every_script_that_asks_for_the_time_asks_the_bench() -> None:
    moved = bench_scripts()
    assert moved.keys() == {each.name for each in all_scripts()}
    for each in all_scripts():
        mine = moved[each.name]
        assert (mine.name, mine.tail) == (each.name, each.tail)
        assert ":clock" not in each.source
        if "'TIME'" in each.source:
            assert mine.sha != each.sha
            assert mine.source.count("'TIME'") == 1
            assert mine.source.count("moved_time()") > 1
            assert mine.source.startswith(each.source.partition("\n")[0] + "\n")
        else:
            assert mine is each
    assert len({mine.sha for mine in moved.values()} - {each.sha for each in all_scripts()}) > 20


def test_everything_that_a_link_sends_is_made_the_bench_s() -> None:
    sends = {
        name
        for name, method in vars(Link).items()
        if not name.startswith("_")
        and "Command[" in str([*getattr(method, "__annotations__", {}).values()]).replace("Callable[", "")
    }
    assert sends == {"call", "call_all", "post", "heartbeat"}
    assert sends <= vars(BenchLink).keys()


async def test_a_mesh_that_is_on_no_bench_asks_for_no_clock(server: Server, prefix: str) -> None:
    mesh, runs = worqr.Mesh(server.url, prefix=prefix), Runs()
    async with mesh.join(grace=0) as peer, trio.open_nursery() as nursery:
        await nursery.start(partial(peer.serve, "Q1", runs))
        with spying(server, prefix) as spy:
            await mesh.queue("Q1").dispatch(b"T1", id="x")
            await runs.wait(1)
            while await mesh.queue("Q1").running():
                await trio.sleep(0.01)
            lines = [line for line in spy.seen() if prefix in line["command"]]
        nursery.cancel_scope.cancel()
    assert lines
    assert not any("clock" in line["command"] for line in lines)


async def test_keys_of_a_bench_do_not_move_the_clock_of_others(server: Server, prefix: str) -> None:
    mesh = worqr.Mesh(server.url, prefix=prefix)
    with server.client() as client:
        client.set(f"{{{prefix}}}:clock", 3_600_000)
        async with mesh.connect():
            await mesh.queue("Q1").dispatch(b"T1", delay=60)
            info = await mesh.queue("Q1").info()
            await mesh.queue("Q1").delete()
        client.delete(f"{{{prefix}}}:clock")
    assert (info.scheduled, info.waiting) == (1, 0)


# What goes by it


async def test_a_delay_passes(bench: testing.Bench, note: Note) -> None:
    await note.options(delay=DAY).dispatch(1)
    await bench.advance(DAY - HOUR)
    assert (await bench.run_until_empty()).finished == 0
    await bench.advance(HOUR)
    assert (await bench.run_until_empty()).finished == 1


async def test_a_moment_comes(bench: testing.Bench, note: Note) -> None:
    await note.options(run_at=datetime.now(UTC) + DAY).dispatch(1)
    await bench.advance(DAY - HOUR)
    assert (await bench.run_until_empty()).finished == 0
    await bench.advance(HOUR)
    assert (await bench.run_until_empty()).finished == 1


async def test_seconds_may_be_a_number(bench: testing.Bench, note: Note) -> None:
    await note.options(delay=90).dispatch(1)
    await bench.advance(89.5 + 0.5)
    assert (await bench.run_until_empty()).finished == 1


@pytest.mark.parametrize("bad", [-1, float("nan"), float("inf"), "5", None, timedelta(days=-1)])
async def test_time_does_not_go_back(bench: testing.Bench, bad: object) -> None:
    with pytest.raises(worqr.UsageError, match="seconds of advance"):
        await bench.advance(bad)  # type: ignore[arg-type]


async def test_a_backoff_passes(bench: testing.Bench, mesh: worqr.Mesh) -> None:
    @mesh.task(name="second")
    async def second() -> None:
        if worqr.current().attempt == 1:
            raise ValueError

    await second.enqueue()
    assert (await bench.run_until_empty(raise_errors=False)).retried == 1
    await bench.advance(2)
    assert (await bench.run_until_empty()).finished == 1


async def test_tasks_expire(bench: testing.Bench, note: Note) -> None:
    await note.options(expires=HOUR).dispatch(1)
    await note.options(expires=2 * DAY).dispatch(2)
    await bench.advance(DAY)
    assert await bench.run_until_empty() == testing.Summary(finished=1, failed=1, retried=0, cancelled=0)
    (failed,) = await note.queue.failed.list()
    assert failed.reason == "expired"


async def test_results_expire(bench: testing.Bench, note: Note) -> None:
    job = await note.dispatch(1)
    await bench.run_until_empty()
    await bench.advance(timedelta(minutes=50))
    assert await job.result() == 1
    await bench.advance(timedelta(minutes=11))
    with pytest.raises(worqr.NoResult):
        await job.result()


async def test_kept_jobs_the_last_runs_and_results_of_earlier_jobs_expire(
    bench: testing.Bench, mesh: worqr.Mesh, note: Note
) -> None:
    @mesh.task(name="kept", keep=worqr.Keep(days=1), recent=10)
    async def kept() -> None: ...

    await kept.dispatch()
    once = note.options(id="x")
    earlier = await once.dispatch(1)
    await bench.run_until_empty()
    await once.dispatch(2)
    assert (len(await kept.queue.jobs(state="ended")), len(await kept.queue.recent())) == (1, 1)
    assert await earlier.result() == 1
    await bench.advance(DAY)
    assert (await kept.queue.jobs(state="ended"), await kept.queue.recent()) == ([], [])
    with pytest.raises(worqr.NoResult):
        await earlier.result()


async def test_an_id_is_taken_only_so_long(bench: testing.Bench, note: Note) -> None:
    once = note.options(id="x", unique_for=DAY, if_exists="skip")
    assert (await once.dispatch(1)).outcome == "created"
    await bench.run_until_empty()
    await bench.advance(DAY - HOUR)
    assert (await once.dispatch(2)).outcome == "unchanged"
    await bench.advance(HOUR)
    assert (await once.dispatch(3)).outcome == "created"


async def test_many_results_expire(bench: testing.Bench, mesh: worqr.Mesh, note: Note) -> None:
    jobs = await mesh.dispatch_many(note.call(n) for n in range(1500))
    assert (await bench.run_until_empty()).finished == 1500
    await bench.advance(DAY)
    for job in (jobs[0], jobs[-1]):
        with pytest.raises(worqr.NoResult):
            await job.result()


async def test_a_handler_sees_when_it_was_due(bench: testing.Bench, mesh: worqr.Mesh) -> None:
    seen: list[tuple[datetime, int]] = []

    @mesh.task(name="look")
    async def look() -> None:
        seen.append((worqr.current().run_at, worqr.current().fence))

    begun = datetime.now(UTC)
    await look.enqueue()
    await bench.run_until_empty()
    await look.options(delay=DAY).dispatch()
    await bench.advance(2 * DAY)
    await bench.run_until_empty()
    await look.enqueue()
    await bench.run_until_empty()
    late = timedelta(minutes=5)
    assert [-late < at - begun - after < late for (at, _), after in zip(seen, (0 * DAY, DAY, 2 * DAY), strict=True)]
    fences = [fence for _, fence in seen]
    assert fences == sorted(set(fences))
    assert fences[1] - fences[0] > 86400 * 10**6


async def test_failures_are_listed_by_the_clock_of_the_bench(bench: testing.Bench, mesh: worqr.Mesh) -> None:
    @mesh.task(name="never")
    async def never(n: int) -> None:
        raise worqr.Failure

    for n in range(2):
        await never.enqueue(n)
        await bench.run_until_empty(raise_errors=False)
        await bench.advance(DAY)
    newest, oldest = await never.queue.failed.list()
    assert timedelta(hours=23) < newest.at - oldest.at < timedelta(hours=25)
    assert never.decode(newest.task).args == (1,)


async def test_what_is_due_goes_to_a_peer_of_the_test_at_once(bench: testing.Bench, mesh: worqr.Mesh) -> None:
    runs = Runs()
    async with mesh.join(grace=0) as peer, trio.open_nursery() as nursery:
        await nursery.start(partial(peer.serve, "Q1", runs))
        await mesh.queue("Q1").dispatch(b"T1", delay=3600)
        await bench.advance(HOUR)
        assert await runs.wait(1) == [b"T1"]
        nursery.cancel_scope.cancel()


async def test_the_clock_goes_on_between_runs(bench: testing.Bench, mesh: worqr.Mesh, note: Note) -> None:
    runs = Runs()
    await note.enqueue(1)
    assert (await bench.run_until_empty()).finished == 1
    async with mesh.join(grace=0) as peer, trio.open_nursery() as nursery:
        await nursery.start(partial(peer.serve, "Q1", runs))
        await mesh.queue("Q1").dispatch(b"T1", delay=0.05)
        assert await runs.wait(1) == [b"T1"]
        nursery.cancel_scope.cancel()


async def test_every_operation_works_on_a_bench(bench: testing.Bench, mesh: worqr.Mesh) -> None:
    """Each script that asks for the time is asked here, by the way through the public face."""
    queue = mesh.queue("Q1")
    assert await queue.enqueue(b"a", b"b", unique=True) == 2
    with pytest.raises(worqr.Duplicate):
        await queue.enqueue(b"a", unique=True)
    async with mesh.join(grace=0) as peer, peer.work("Q1", retry=worqr.RetryPolicy(max_failures=2)) as claims:
        claim, second = await claims.take(2)
        await claim.retry(delay=3600)
        await second.fail("why")
        await bench.advance(HOUR)
        (claim,) = await claims.take(1, within=10)
        assert claim.failures == 1
        claim.progress(0.5)
        await claim.stop()
        (claim,) = await claims.take(1, within=10)
        await claim.finish()
    (failed,) = await queue.failed.list()
    assert await queue.failed.retry(failed.id) == 1
    await queue.dispatch(b"c", id="x", delay=60)
    assert (await queue.job("x").cancel()).waiting == 1
    await queue.pause()
    await queue.resume()
    await queue.enqueue(b"d", b"e")
    assert (await queue.cancel(b"d")).waiting == 1
    assert (await queue.cancel_all()).waiting == 2
    await queue.delete()
    assert (await queue.info()).counts["finished"] == 1
