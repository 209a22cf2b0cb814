"""What was set aside, as people deal with it: listed, narrowed down, put back, forgotten; capped, or kept until they do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import trio

import worqr
from tests.peer.conftest import mesh, new_mesh, other  # noqa: F401 - fixtures
from tests.peer.tools import Held, Runs, eventually, serving, spying
from tests.support.leaks import dump
from tests.support.servers import Server
from worqr import Failed, RetryPolicy, Undecodable, ops
from worqr.client import dead_letters
from worqr.inside import client_of

pytestmark = pytest.mark.leaves("{Q1}:failed", "{Q1}:broken", "{Q1}:aside*")
ONCE = RetryPolicy(max_failures=1)


class Boom(Exception):
    """An error of an application."""


ERRORS = {b"boom": Boom, b"value": ValueError, b"timeout": TimeoutError}


async def failing(task: bytes) -> None:
    raise ERRORS.get(task, LookupError)(task.decode("latin-1"))


async def breaking(task: bytes) -> None:
    raise Undecodable(repr(task))


async def count(q: worqr.Queue) -> tuple[int, int]:
    info = await q.info()
    return info.failed, info.undecodable


async def fail_all(mesh: worqr.Mesh, *tasks: bytes, **options: Any) -> worqr.Queue:
    """Have these fail on Q1, in their order, with the error that belongs to each."""
    q = mesh.queue("Q1")
    before = await total(q, "failed")
    async with serving(mesh, "Q1", failing, room=1, retry=ONCE, **options):
        await q.enqueue(*tasks)
        await eventually(lambda: total(q, "failed"), before + len(tasks))
    return q


async def total(q: worqr.Queue, counter: str) -> int:
    return (await q.info()).counts.get(counter, 0)


def tasks(records: list[Failed]) -> list[bytes]:
    return [record.task for record in records]


# Listed


async def test_what_failed_is_listed_newest_first(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        q = await fail_all(mesh, b"1", b"2", b"3")
        records = await q.failed.list()
        assert tasks(records) == [b"3", b"2", b"1"]
        assert tasks(await q.failed.list(2)) == [b"3", b"2"]
        assert [record.at for record in records] == sorted((record.at for record in records), reverse=True)
        assert len({record.id for record in records}) == 3
        assert await q.undecodable.list() == []
        assert await mesh.queue("Q2").failed.list() == []
        assert (await count(q)) == (3, 0)
        assert "failed of 'Q1'" in repr(q.failed) and "undecodable of 'Q1'" in repr(q.undecodable)


async def test_a_record_tells_all_there_is(mesh: worqr.Mesh) -> None:
    start = datetime.now(UTC)
    async with mesh.connect(), serving(mesh, "Q1", failing, retry=ONCE) as peer:
        q = mesh.queue("Q1")
        await q.dispatch(b"boom", id="x", meta={"trace": "7"})
        await eventually(lambda: count(q), (1, 0))
        (record,) = await q.failed.list()
        assert (record.id, record.queue, record.task, record.reason) == ("x", "Q1", b"boom", "failed")
        assert (record.failures, record.stalls, record.timeouts) == (1, 0, 0)
        assert (record.error.type, record.error.message) == (f"{__name__}.Boom", "boom")
        assert "in failing" in record.error.traceback
        assert (record.worker, record.meta) == (peer.id, {"trace": "7"})
        assert abs((record.at - start).total_seconds()) < 20
        with pytest.raises(AttributeError):
            record.id = "y"  # type: ignore[misc]


@pytest.mark.parametrize(
    "task", [b"", b"\x00", b"\x00worqr\x00", b"\x00worqr\x00x", bytes(range(256)), b"\xff" * 10_000]
)
@pytest.mark.parametrize("which", ["failed", "undecodable"])
async def test_a_payload_is_kept_byte_for_byte_and_comes_back_so(mesh: worqr.Mesh, which: str, task: bytes) -> None:
    runs = Runs()
    async with mesh.connect():
        q = mesh.queue("Q1")
        aside = q.failed if which == "failed" else q.undecodable
        async with serving(mesh, "Q1", failing if which == "failed" else breaking, retry=ONCE):
            await q.enqueue(task)
            await eventually(lambda: count(q), (1, 0) if which == "failed" else (0, 1))
        (record,) = await aside.list()
        assert (record.task, record.reason) == (task, which)
        async with serving(mesh, "Q1", runs):
            assert await aside.retry(record.id) == 1
            assert await runs.wait(1) == [task]
            await eventually(q.running, [])


@pytest.mark.parametrize(
    ("error", "found"),
    [
        ("ValueError", [b"value"]),
        ("TimeoutError", [b"timeout"]),
        (f"{__name__}.Boom", [b"boom"]),
        ("Boom", [b"boom"]),
        ("test_dead_letters.Boom", [b"boom"]),
        ("Error", []),
        ("oom", []),
        (".Boom", []),
        ("*", []),
        ("", [b"other", b"timeout", b"value", b"boom"]),
        (None, [b"other", b"timeout", b"value", b"boom"]),
    ],
)
async def test_a_list_is_narrowed_down_by_the_type_of_the_error(
    mesh: worqr.Mesh, error: str | None, found: list[bytes]
) -> None:
    async with mesh.connect():
        q = await fail_all(mesh, b"boom", b"value", b"timeout", b"other")
        assert tasks(await q.failed.list(error=error)) == found
        assert tasks(await q.failed.list(1, error=error)) == found[:1]
        assert await q.failed.drop_all(error=error) == len(found)
        assert (await count(q))[0] == 4 - len(found)


async def test_a_list_is_narrowed_down_by_time(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        q = await fail_all(mesh, b"1", b"value")
        await trio.sleep(0.01)
        q = await fail_all(mesh, b"3", b"value")
        third = (await q.failed.list())[1].at
        assert tasks(await q.failed.list(before=third)) == [b"value", b"1"]
        assert tasks(await q.failed.list(before=third + timedelta(milliseconds=0))) == [b"value", b"1"]
        assert len(await q.failed.list(before=datetime.now(UTC) + timedelta(1))) == 4
        assert await q.failed.list(before=datetime(1999, 1, 1, tzinfo=UTC)) == []
        assert tasks(await q.failed.list(since=third)) == [b"value", b"3"]
        assert tasks(await q.failed.list(since=third, error="ValueError")) == [b"value"]
        assert await q.failed.count(since=third) == await q.failed.count(before=third) == 2
        assert await q.failed.count(error="ValueError") == 2
        assert await q.failed.count() == 4
        assert await q.failed.retry_all(since=datetime.now(UTC) + timedelta(1)) == 0
        assert await q.failed.drop_all(error="ValueError", before=third) == 1
        assert tasks(await q.failed.list()) == [b"value", b"3", b"1"]
        assert await q.failed.drop_all(before=third) == 1
        assert tasks(await q.failed.list()) == [b"value", b"3"]
        assert await q.failed.retry_all(before=third) == 0
        assert await q.failed.retry_all(before=datetime.now(UTC) + timedelta(1), limit=1) == 1
        assert await q.failed.drop_all(limit=1) == 1
        assert await q.failed.list() == []
        assert await q.tasks() == [b"value"]
        await q.cancel_all()


async def test_the_beginning_of_payloads_is_listed(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        q = await fail_all(mesh, b"small", b"x" * 5000)
        large, small = await q.failed.list(payload=False)
        assert (large.task, large.size, small.task, small.size) == (b"x" * 4096, 5000, b"small", 5)
        assert [(failed.task, failed.size) for failed in await q.failed.list()] == [(b"x" * 5000, 5000), (b"small", 5)]
        assert await q.failed.drop_all() == 2


async def test_thousands_are_listed_put_back_and_dropped(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    names = [b"%d" % n for n in range(2300)]
    async with mesh.connect():
        q = mesh.queue("Q1")
        async with serving(mesh, "Q1", breaking):  # those are not capped
            await q.enqueue(*names)
            await eventually(lambda: count(q), (0, 2300), within=20)
        with spying(server, prefix) as spy:
            assert len(await q.undecodable.list(250)) == 250
            assert spy.calls()["list_aside"] == 3, "a request reads 100, so that none occupies the server for long"
        assert len(await q.undecodable.list(2200)) == 2200
        assert sorted(tasks(await q.undecodable.list(5000))) == sorted(names)
        assert await q.undecodable.retry_all(limit=1100) == 1100
        assert (await q.count(), (await count(q))[1]) == (1100, 1200)
        assert await q.undecodable.drop_all() == 1200
        assert await q.undecodable.list() == []
        await q.delete()
        assert not [key for key in dump(server.client(), prefix) if b"{Q1}:aside" in key or b"{Q1}:job:" in key]


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, "3", None])
async def test_a_limit_is_a_whole_number(mesh: worqr.Mesh, limit: Any) -> None:
    async with mesh.connect():
        with pytest.raises(worqr.UsageError, match="limit must be a whole number"):
            await mesh.queue("Q1").failed.list(limit)
        if limit is not None:
            with pytest.raises(worqr.UsageError, match="limit must be a whole number"):
                await mesh.queue("Q1").failed.retry_all(limit=limit)


async def test_what_cannot_narrow_a_list_is_refused(mesh: worqr.Mesh) -> None:
    calls: list[tuple[Callable[[worqr.DeadLetters], Any], str]] = [
        (lambda aside: aside.list(error=7), "error must be a str"),  # type: ignore[arg-type]
        (lambda aside: aside.list(before=datetime(2030, 1, 1)), "timezone"),
        (lambda aside: aside.list(since=datetime(2030, 1, 1)), "timezone"),
        (lambda aside: aside.drop_all(before=17), "before must be a datetime"),  # type: ignore[arg-type]
        (lambda aside: aside.retry_all(error=b"x"), "error must be a str"),  # type: ignore[arg-type]
        (lambda aside: aside.retry(7), "must be a str"),  # type: ignore[arg-type]
        (lambda aside: aside.drop("a", ""), "1 to 200 bytes"),
    ]
    async with mesh.connect():
        for call, words in calls:
            with pytest.raises(worqr.UsageError, match=words):
                await call(mesh.queue("Q1").failed)


# The cap


@pytest.mark.parametrize("keep", [0, 1, 2])
async def test_only_the_newest_failures_are_kept(mesh: worqr.Mesh, server: Server, prefix: str, keep: int) -> None:
    async with mesh.connect():
        q = await fail_all(mesh, b"1", b"2", b"3", b"4", keep_failed=keep)
        assert tasks(await q.failed.list()) == [b"4", b"3", b"2", b"1"][:keep]
        assert (await count(q), (await q.info()).counts["failed"]) == ((keep, 0), 4)
        records = [key for key in dump(server.client(), prefix) if b"{Q1}:aside:" in key]
        assert len(records) == keep


async def test_a_lower_cap_takes_effect_with_the_next_failure(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        await fail_all(mesh, *[b"%d" % n for n in range(8)])
        q = await fail_all(mesh, b"8", keep_failed=3)
        assert tasks(await q.failed.list()) == [b"8", b"7", b"6"]


async def test_what_is_undecodable_is_not_capped(mesh: worqr.Mesh) -> None:
    async with mesh.connect(), serving(mesh, "Q1", breaking, keep_failed=0):
        q = mesh.queue("Q1")
        await q.enqueue(*[b"%d" % n for n in range(20)])
        await eventually(lambda: count(q), (0, 20))
        assert len(await q.undecodable.list()) == 20


# Put back


async def test_what_is_put_back_goes_to_the_back_with_its_counters_at_zero(mesh: worqr.Mesh) -> None:
    runs = Runs()
    async with mesh.connect():
        q = mesh.queue("Q1")
        async with serving(mesh, "Q1", failing, retry=RetryPolicy(max_failures=3, min_backoff=0)):
            await q.dispatch(b"a", id="x", meta={"k": "v"}, timeout=7)
            await eventually(lambda: count(q), (1, 0))
        await q.enqueue(b"before")
        assert await q.failed.retry("x") == 1
        assert await q.failed.retry("x") == 0
        assert (await q.failed.list(), await count(q)) == ([], (0, 0))
        assert (await q.job("x").status()).state == "waiting"
        async with serving(mesh, "Q1", runs, room=1):
            assert await runs.wait(2) == [b"before", b"a"]
            await eventually(q.running, [])
    again = runs.contexts[1]
    assert (again.id, again.meta, again.attempt, again.failures) == ("x", {"k": "v"}, 1, 0)
    assert again._run.policy.timeout == 7.0


async def test_a_raw_task_that_is_put_back_is_still_found_by_its_payload(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        q = await fail_all(mesh, b"a")
        (record,) = await q.failed.list()
        assert await q.failed.retry(record.id) == 1
        assert await q.tasks() == [b"a"]
        assert await q.cancel(b"a") == worqr.CancelCount(1, 0, 0)


async def test_all_are_put_back_the_oldest_first(mesh: worqr.Mesh) -> None:
    runs = Runs()
    async with mesh.connect():
        q = await fail_all(mesh, b"1", b"value", b"3", b"value", b"5")
        assert await q.failed.retry_all(error="ValueError", limit=1) == 1
        assert tasks(await q.failed.list()) == [b"5", b"3", b"value", b"1"]
        assert await q.failed.retry_all(limit=3) == 3
        assert await q.failed.retry_all() == 1
        assert await q.failed.retry_all() == 0
        async with serving(mesh, "Q1", runs, room=1):
            assert await runs.wait(5) == [b"value", b"value", b"3", b"5", b"1"]
            await eventually(q.running, [])


async def test_some_are_put_back_or_dropped_by_their_ids(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        q = await fail_all(mesh, b"1", b"2", b"3", b"4", b"5")
        ids = [record.id for record in (await q.failed.list())[::-1]]
        assert await q.failed.retry(ids[0], "nobody", ids[3]) == 2
        assert await q.failed.drop(ids[1], ids[1], "nobody") == 1
        assert tasks(await q.failed.list()) == [b"5", b"3"]
        assert await q.failed.retry() == await q.failed.drop() == 0
        assert await q.undecodable.retry(ids[2]) == await q.undecodable.drop(ids[2]) == 0  # it is in the other list
        await q.delete()


async def test_an_id_that_is_there_several_times_means_its_newest(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        q = mesh.queue("Q1")
        async with serving(mesh, "Q1", failing, retry=ONCE):
            for n in range(3):
                await q.dispatch(b"%d" % n, id="x")
                await eventually(lambda n=n: count(q), (n + 1, 0))  # type: ignore[misc]
        assert await q.failed.drop("x") == 1
        assert tasks(await q.failed.list()) == [b"1", b"0"]
        assert await q.failed.retry("x", "x") == 1  # as one job, which waits then
        assert await q.tasks() in ([b"1"], [b"0"])
        assert (await count(q))[0] == 1
        assert await q.failed.drop("x", "x") == 1
        await q.delete()


async def test_one_whose_id_waits_stays_where_it_is(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        q = mesh.queue("Q1")
        async with serving(mesh, "Q1", failing, retry=ONCE):
            await q.dispatch(b"old", id="x")
            await eventually(lambda: count(q), (1, 0))
        await q.dispatch(b"new", id="x", delay=60)
        assert await q.failed.retry("x") == await q.failed.retry_all() == 0
        assert tasks(await q.failed.list()) == [b"old"]
        assert await q.job("x").cancel() == worqr.CancelCount(1, 0, 0)
        assert await q.failed.retry("x") == 1
        await q.delete()


async def test_one_whose_id_runs_stays_until_that_ends(mesh: worqr.Mesh) -> None:
    held = Held()
    async with mesh.connect():
        q = mesh.queue("Q1")
        async with serving(mesh, "Q1", failing, retry=ONCE):
            await q.dispatch(b"old", id="x")
            await eventually(lambda: count(q), (1, 0))
        async with serving(mesh, "Q1", held):
            await q.dispatch(b"new", id="x")
            await held.wait(1)
            assert await q.failed.retry("x") == await q.failed.retry_all() == 0
            held.gate.set()
            await held.wait_for(lambda: held.done == [b"new"])
            await eventually(q.running, [])
            assert await q.failed.retry("x") == 1
            await held.wait_for(lambda: held.done == [b"new", b"old"])
            await eventually(q.running, [])


async def test_what_is_put_back_while_others_fail_is_put_back_once(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    counts: list[int] = []

    async def put_back(q: worqr.Queue) -> None:
        counts.append(await q.failed.retry_all())

    async with mesh.connect(), other.connect():
        q = await fail_all(mesh, *[b"%d" % n for n in range(100)])
        async with trio.open_nursery() as nursery:
            for n in range(8):
                nursery.start_soon(put_back, (mesh, other)[n % 2].queue("Q1"))
        assert sum(counts) == 100
        assert sorted(await q.tasks(1000)) == sorted(b"%d" % n for n in range(100))
        await q.delete()


async def test_a_deleted_queue_keeps_what_was_set_aside(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        q = await fail_all(mesh, b"a")
        await q.delete()
        assert tasks(await q.failed.list()) == [b"a"]
        assert await q.failed.retry_all() == 1
        assert await q.tasks() == [b"a"]
        await q.delete()


async def test_nothing_is_left_of_what_was_dropped(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    async with mesh.connect():
        q = await fail_all(mesh, b"1", b"2", b"3")
        assert await q.failed.drop_all() == 3
        left = [key for key in dump(server.client(), prefix) if b"aside" in key or b"failed" in key or b"twins" in key]
        assert left == []


# In pieces


async def test_errors_are_counted_by_their_type_the_most_frequent_first(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        q = await fail_all(mesh, b"boom", b"value", b"timeout", b"value")
        assert list((await q.failed.errors()).items()) == [
            ("ValueError", 2),
            ("TimeoutError", 1),
            (f"{__name__}.Boom", 1),
        ]
        assert await q.undecodable.errors() == {}


async def test_errors_of_many_are_counted_in_several_requests(
    mesh: worqr.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with mesh.connect():
        q = await fail_all(mesh, *[b"value"] * 5, b"boom")
        monkeypatch.setattr(dead_letters, "MAX_ITEMS", 4)
        count_errors = ops.count_errors
        monkeypatch.setattr(ops, "count_errors", lambda keys, which, rank: count_errors(keys, which, rank, 4))
        assert await q.failed.errors() == {"ValueError": 5, f"{__name__}.Boom": 1}


@pytest.mark.parametrize("verb", ["retry_all", "drop_all"])
async def test_many_are_changed_in_small_pieces_with_pauses_and_progress(
    mesh: worqr.Mesh, server: Server, prefix: str, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    seen: list[tuple[int, int]] = []
    pauses: list[float] = []

    async def pause(_link: object, seconds: float) -> None:
        pauses.append(seconds)

    async with mesh.connect():
        q = await fail_all(mesh, *[b"value"] * 250)
        monkeypatch.setattr(dead_letters, "sleep", pause)
        with spying(server, prefix) as spy:
            assert await getattr(q.failed, verb)(progress=lambda *numbers: seen.append(numbers)) == 250
            assert spy.calls()[verb.replace("all", "aside")] == 25
        assert seen == [(tried, 250) for tried in range(10, 260, 10)]
        assert len(pauses) == 24
        assert all(0 < seconds < 60 for seconds in pauses)
        assert await getattr(q.failed, verb)(progress=lambda *numbers: seen.append(numbers)) == 0
        assert len(seen) == 25
        await q.delete()


async def test_a_cancelled_change_leaves_the_rest_where_it_is(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        q = await fail_all(mesh, *[b"value"] * 150)
        with trio.CancelScope() as scope:
            await q.failed.drop_all(progress=lambda done, of: scope.cancel())
        assert scope.cancelled_caught
        assert await count(q) == (140, 0)
        assert await q.failed.drop_all() == 140


async def test_the_pause_is_one_on_asyncio_and_without_a_loop_too(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        q = await fail_all(mesh, *[b"value"] * 150)

    async def drop() -> int:
        async with mesh.connect():
            return await q.failed.drop_all(limit=120)

    assert await trio.to_thread.run_sync(asyncio.run, drop()) == 120
    await trio.to_thread.run_sync(worqr.sync, sleep_a_little, mesh)
    await trio.to_thread.run_sync(mesh.close)


async def sleep_a_little(mesh: worqr.Mesh) -> None:
    await dead_letters.sleep(client_of(mesh).link, 0.01)
