"""A queue as producers and operators see it: put in, look, cancel, pause, delete, listen."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import trio
import trio.testing

import worqr
from tests.peer.conftest import NewMesh, mesh, new_mesh, other, without_scans  # noqa: F401 - fixtures
from tests.peer.tools import QUICK, Held, Runs, at_most, eventually, serving, spying, until
from tests.support.leaks import dump, short
from tests.support.patience import PATIENCE, have_patience
from tests.support.servers import Server
from worqr.client import notifications

MIB = 1 << 20
FAILED = ("{Q1}:failed", "{Q1}:aside*")
WAITING_JOBS = ("{Q1}:job:*", "{Q1}:twins:*")


def numbers(n: int, start: int = 0) -> list[bytes]:
    return [b"%d" % i for i in range(start, start + n)]


async def in_order(q: worqr.Queue, limit: int = 10_000) -> list[bytes]:
    return (await q.tasks(limit))[::-1]


# Enqueueing


async def test_enqueue_takes_all_kinds_of_bytes(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        q = mesh.queue("Q1")
        assert await q.enqueue(b"bytes", bytearray(b"bytearray"), memoryview(b"memoryview"), b"") == 4
        assert await in_order(q) == [b"bytes", b"bytearray", b"memoryview", b""]


async def test_enqueue_of_nothing_sends_nothing(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    async with mesh.connect():
        with spying(server, prefix) as spy:
            assert await mesh.queue("Q1").enqueue() == 0
            await trio.sleep(0.02)
            calls = spy.calls()
            assert calls["enqueue"] == calls["note_queues"] == 0
        with trio.CancelScope() as scope:
            scope.cancel()
            await mesh.queue("Q1").enqueue()
        assert scope.cancelled_caught  # still a checkpoint
        assert await mesh.queues() == []


async def test_one_call_is_one_request(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    async with mesh.connect():
        q = mesh.queue("Q1")
        await q.enqueue(b"first")
        with spying(server, prefix) as spy:
            assert await q.enqueue(*numbers(1000)) == 1000
            assert await q.enqueue(*numbers(1001)) == 1001
            assert spy.calls()["enqueue"] == 3


async def test_many_and_large_tasks_are_sent_in_parts_and_stay_in_order(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        q = mesh.queue("Q1")
        assert await q.enqueue(*numbers(3500)) == 3500
        assert await q.count() == 3500
        assert await in_order(q) == numbers(3500)
        await q.delete()
        large = [b"%d" % i * MIB for i in range(10)]
        large.insert(5, b"L" * (9 * MIB))
        assert await q.enqueue(*large) == 11
        runs = Runs()
        async with serving(mesh, "Q1", runs, room=1):
            assert [task[:2] for task in await runs.wait(11)] == [task[:2] for task in large]
            await eventually(q.running, [])


async def test_front_puts_tasks_before_all_others_in_their_order(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        q = mesh.queue("Q1")
        await q.enqueue(b"x", b"y")
        assert await q.enqueue(b"a", b"b", b"c", front=True) == 3
        assert await in_order(q) == [b"a", b"b", b"c", b"x", b"y"]
        assert await q.enqueue(*numbers(2500), front=True) == 2500
        assert await in_order(q) == [*numbers(2500), b"a", b"b", b"c", b"x", b"y"]


async def test_a_full_queue_refuses_all_of_a_call(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        q = mesh.queue("Q1")
        assert await q.enqueue(*numbers(3), max_length=5) == 3
        with pytest.raises(worqr.QueueFull, match=r"'Q1' holds 3 tasks, 3 more.*max_length of 5"):
            await q.enqueue(*numbers(3), max_length=5)
        assert await q.count() == 3
        assert await q.enqueue(b"a", b"b", max_length=5) == 2
        with pytest.raises(worqr.QueueFull):
            await q.enqueue(b"c", max_length=5, front=True)
        assert await q.enqueue(b"c") == 1  # who says no bound has none
        assert (await q.info()).counts["enqueued"] == 6


async def test_a_bounded_call_must_fit_one_request(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        q = mesh.queue("Q1")
        with pytest.raises(worqr.UsageError, match=r"1000 tasks.*not 1,001 tasks"):
            await q.enqueue(*numbers(1001), max_length=10_000)
        with pytest.raises(worqr.UsageError, match=r"8,388,608 bytes.*9,437,184 bytes"):
            await q.enqueue(*[b"x" * MIB] * 9, max_length=10_000)
        assert await q.count() == 0
        assert await mesh.queues() == []


@pytest.mark.parametrize("bound", [0, -1, True, 1.5, "5"])
async def test_a_bound_is_a_whole_number(mesh: worqr.Mesh, bound: Any) -> None:
    async with mesh.connect():
        with pytest.raises(worqr.UsageError, match=f"max_length must be a whole number of at least 1, not {bound!r}"):
            await mesh.queue("Q1").enqueue(b"a", max_length=bound)


async def test_bounded_producers_side_by_side_never_go_over(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    full = 0

    async def produce(q: worqr.Queue, task: bytes) -> None:
        nonlocal full
        try:
            await q.enqueue(task, task, max_length=7)
        except worqr.QueueFull:
            full += 1

    async with mesh.connect(), other.connect():
        async with trio.open_nursery() as nursery:
            for n in range(20):
                nursery.start_soon(produce, (mesh, other)[n % 2].queue("Q1"), b"%d" % n)
        assert await mesh.queue("Q1").count() == 6
        assert full == 17


async def test_enqueues_side_by_side_are_all_stored(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        q = mesh.queue("Q1")
        async with trio.open_nursery() as nursery:
            for task in numbers(500):
                nursery.start_soon(q.enqueue, task)
        assert sorted(await in_order(q)) == sorted(numbers(500))


async def test_a_call_in_parts_that_breaks_off_says_how_much_was_stored(own_server: Server, prefix: str) -> None:
    mesh = worqr.Mesh(own_server.url, prefix=prefix, patience=5)
    async with mesh.connect():
        q = mesh.queue("Q1")
        client = own_server.client()
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", str(int(client.info("memory")["used_memory"]) + 20 * MIB))
        with pytest.raises(worqr.QueueFull) as caught:
            await q.enqueue(*[b"%02d" % i + b"x" * MIB for i in range(60)])
        client.config_set("maxmemory", "0")
        stored = await q.count()
        assert 0 < stored < 60
        assert stored % 7 == 0
        assert caught.value.__notes__ == [f"of 60 tasks in several requests the first {stored} were stored before"]
        assert [task[:2] for task in (await in_order(q))[-3:]] == [b"%02d" % i for i in range(stored)][-3:]


# Looking


async def test_an_empty_queue(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    async with mesh.connect():
        q = mesh.queue("Q1")
        assert q.name == "Q1"
        assert repr(q) == "<Queue 'Q1'>"
        assert (await q.count(), await q.peek(), await q.tasks(), await q.running()) == (0, None, [], [])
        assert await q.info() == worqr.QueueInfo("Q1", 0, 0, 0, 0, 0, 0, None, None, 0, {})
    assert dump(server.client(), prefix) == {}


async def test_peek_shows_what_comes_next_and_leaves_it(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        q = mesh.queue("Q1")
        await q.enqueue(b"", b"b")
        assert await q.peek() == b""
        assert await q.count() == 2
        await q.enqueue(b"x", front=True)
        assert await q.peek() == b"x"


async def test_tasks_are_listed_newest_first_up_to_a_limit(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        q = mesh.queue("Q1")
        await q.enqueue(*numbers(250))
        assert await q.tasks() == numbers(250)[:149:-1]
        assert await q.tasks(3) == [b"249", b"248", b"247"]
        assert await q.tasks(100_000) == numbers(250)[::-1]
        for limit in (0, -1, True, 2.5):
            with pytest.raises(worqr.UsageError, match="limit"):
                await q.tasks(limit)  # type: ignore[arg-type]


async def test_a_listing_of_large_tasks_is_cut(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        q = mesh.queue("Q1")
        await q.enqueue(*[b"x" * (3 * MIB)] * 5)
        assert [len(task) for task in await q.tasks()] == [3 * MIB] * 3
        assert await q.count() == 5


async def test_running_names_the_job_or_shows_the_beginning_of_the_task(mesh: worqr.Mesh) -> None:
    held = Held()
    async with mesh.connect(), serving(mesh, "Q1", held), at_most(60):
        q = mesh.queue("Q1")
        for n in (1, 2):
            await q.dispatch(b"film", id=f"film-{n}")
        await q.enqueue(b"plain" * 100)
        await held.wait(3)
        found = {(task.id, task.task) for task in await q.running()}
        assert found == {("film-1", b"film"), ("film-2", b"film"), (None, b"plain" * 20)}
        (second,) = [task for task in await q.running() if task.id == "film-2"]
        assert second.id is not None
        assert (await q.job(second.id).cancel(wait=30)).acknowledged == 1
        assert {task.id for task in await q.running()} == {"film-1", None}
        held.gate.set()
        await eventually(q.running, [])


async def test_jobs_are_listed_by_their_state_page_by_page(mesh: worqr.Mesh) -> None:
    held = Held()
    async with mesh.connect(), serving(mesh, "Q1", held, room=3), at_most(60):
        q = mesh.queue("Q1")
        for n in range(2):
            await q.dispatch(b"runs", id=f"runs {n}")
        await q.enqueue(b"raw")
        await held.wait(3)
        for n in range(2):
            await q.dispatch(b"twin", id=f"runs {n}")
        for n in range(5):
            await q.dispatch(b"waits", id=f"waits {n}")
            await q.dispatch(b"due", id=f"due {n}", delay=3600 + n)
        await q.enqueue(b"plain")
        expected: dict[Any, list[str | None]] = {
            "waiting": [*(f"waits {n}" for n in range(5)), None],
            "scheduled": [f"due {n}" for n in range(5)],
            "blocked": ["runs 0", "runs 1"],
            "active": ["runs 0", "runs 1", None],
        }
        for state, ids in expected.items():
            for limit in (1, 2, 100):
                found: list[worqr.TaskInfo] = []
                while page := await q.jobs(state=state, limit=limit, after=found[-1].cursor if found else ""):
                    assert len(page) <= limit
                    found += page
                assert sorted(str(each.id) for each in found) == sorted(map(str, ids)), (state, limit)
                assert {each.state for each in found} == {state}
        (one, *_) = await q.jobs(state="active")
        assert one.worker is not None
        assert one.since is not None
        (first, *_) = await q.jobs(state="scheduled")
        assert first.next_run == first.run_at is not None
        for state, wrong in (
            ("waiting", first.cursor),
            ("scheduled", "scheduled"),
            ("scheduled", "scheduled 7 1 x"),
            ("scheduled", "scheduled x 1"),
        ):
            with pytest.raises(worqr.UsageError, match=r"after= must be the cursor of an entry of jobs\(state="):
                await q.jobs(state=state, after=wrong)  # type: ignore[arg-type]
        with pytest.raises(worqr.UsageError, match="one of 'waiting', 'scheduled', 'suspended', 'blocked', 'active'"):
            await q.jobs(state="dead")  # type: ignore[arg-type]
        await q.cancel_all()
        held.gate.set()
        await eventually(q.running, [])


async def test_running_tells_worker_and_time(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    held = Held()
    async with mesh.connect(), serving(mesh, "Q1", held) as one, serving(other, "Q1", held, room=1) as two:
        q = mesh.queue("Q1")
        before = datetime.now(UTC) - timedelta(seconds=1)
        async with at_most(60):
            while {context._run.registration.name for context in held.contexts} != {one.id, two.id}:
                await q.enqueue(b"a")
                await trio.sleep(0.01)
        running = await q.running()
        assert {status.state for status in running} == {"active"}
        assert {status.worker for status in running} == {one.id, two.id}
        assert all(status.since and before <= status.since <= datetime.now(UTC) for status in running)
        held.gate.set()
        await eventually(q.running, [])


@pytest.mark.leaves(*FAILED)
async def test_info_counts_what_waits_runs_and_failed(mesh: worqr.Mesh) -> None:
    held = Held()

    async def handler(task: bytes) -> None:
        if task == b"bad":
            raise ValueError
        await held(task)

    async with mesh.connect(), serving(mesh, "Q1", handler, room=2, retry=QUICK):
        q = mesh.queue("Q1")
        await q.enqueue(b"bad")
        await eventually(lambda: failed(q), 1)
        await q.enqueue(b"a", b"b", b"c", b"d", b"e")
        await held.wait(2)
        await q.pause("to look at it")
        info = await q.info()
        assert (info.waiting, info.running, info.failed, info.undecodable, info.scheduled) == (3, 2, 1, 0, 0)
        assert (info.paused, info.workers, info.name) == ("to look at it", 1, "Q1")
        assert info.counts == {"enqueued": 6, "claimed": 12, "retried": 9, "failed": 1, "paused": 1}
        await q.resume()
        held.gate.set()
        await held.wait_for(lambda: len(held.done) == 5)
        await eventually(q.running, [])


async def failed(q: worqr.Queue) -> int:
    return (await q.info()).failed


@pytest.mark.leaves(*WAITING_JOBS)
async def test_a_task_that_failed_is_seen_as_its_payload(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        q = mesh.queue("Q1")
        async with mesh.join() as peer, peer.work("Q1") as claims:
            await q.enqueue(b"\x00failed\xff")
            await (await anext(claims)).retry(delay=0)
        assert await q.tasks() == [b"\x00failed\xff"]
        assert await q.peek() == b"\x00failed\xff"
        assert await q.count() == 1


# Cancelling


async def test_cancel_removes_all_equal_tasks_that_wait(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        q, elsewhere = mesh.queue("Q1"), mesh.queue("Q2")
        await q.enqueue(b"x", b"y", b"x", b"xx", b"")
        await elsewhere.enqueue(b"x")
        assert await q.cancel(b"x") == worqr.CancelCount(2, 0, 0)
        assert await in_order(q) == [b"y", b"xx", b""]
        assert await q.cancel(bytearray(b"")) == worqr.CancelCount(1, 0, 0)
        assert await q.cancel(b"x", wait=30) == worqr.CancelCount(0, 0, 0)
        assert await q.cancel(b"nothing") == worqr.CancelCount(0, 0, 0)
        assert await elsewhere.tasks() == [b"x"]
        assert (await q.info()).counts == {"enqueued": 5, "cancelled": 3}


async def test_cancel_reaches_running_tasks_on_all_peers(
    mesh: worqr.Mesh, other: worqr.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worqr.peer.consumer.RECONCILE_EVERY", 1e9)  # nobody looks: messages go there and back
    monkeypatch.setattr(notifications, "POLL_EVERY", 3600)
    held = Held()
    async with mesh.connect(), serving(mesh, "Q1", held, room=1), serving(other, "Q1", held, room=1):
        q = mesh.queue("Q1")
        await q.enqueue(b"x", b"x", b"x", b"y")
        await held.wait(2)
        assert await q.cancel(b"x", wait=30) == worqr.CancelCount(1, 2, 2)
        assert held.cancelled == [(b"x", "cancel")] * 2
        await held.wait(3)
        assert held.tasks == [b"x", b"x", b"y"]
        assert await q.cancel(b"x", wait=1) == worqr.CancelCount(0, 0, 0)
        held.gate.set()
        await held.wait_for(lambda: held.done == [b"y"])
        await eventually(q.running, [])
        assert (await q.info()).counts == {"enqueued": 4, "claimed": 3, "cancelled": 3, "finished": 1}


async def test_a_cancel_does_not_touch_equal_tasks_of_other_queues(mesh: worqr.Mesh) -> None:
    held = Held()
    async with mesh.connect(), serving(mesh, "Q1", held), serving(mesh, "Q2", held):
        await mesh.queue("Q1").enqueue(b"x")
        await mesh.queue("Q2").enqueue(b"x")
        await held.wait(2)
        assert await mesh.queue("Q1").cancel(b"x", wait=30) == worqr.CancelCount(0, 1, 1)
        assert len(held.cancelled) == 1
        held.gate.set()
        await held.wait_for(lambda: held.done == [b"x"])
        await eventually(mesh.queue("Q2").running, [])
        assert (await mesh.queue("Q2").info()).counts["finished"] == 1


async def test_a_cancel_without_wait_does_not_wait(mesh: worqr.Mesh) -> None:
    held = Held()
    async with mesh.connect(), serving(mesh, "Q1", held):
        q = mesh.queue("Q1")
        await q.enqueue(b"x")
        await held.wait(1)
        assert await q.cancel(b"x") == worqr.CancelCount(0, 1, 0)
        await held.wait_for(lambda: held.cancelled == [(b"x", "cancel")])
        await eventually(q.running, [])


async def test_a_handler_that_takes_its_time_is_not_acknowledged_before_it_has_unwound(mesh: worqr.Mesh) -> None:
    runs, slow = Runs(), trio.Event()

    async def handler(task: bytes) -> None:
        runs.begin(task)
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await slow.wait()

    async with mesh.connect(), serving(mesh, "Q1", handler), trio.open_nursery() as nursery:
        q = mesh.queue("Q1")
        await q.enqueue(b"x")
        await runs.wait(1)
        start = trio.current_time()
        assert await q.cancel(b"x", wait=1.2) == worqr.CancelCount(0, 1, 0)  # and no error
        assert 1.2 <= trio.current_time() - start < 20
        counts: list[worqr.CancelCount] = []

        async def cancel_again() -> None:
            counts.append(await q.cancel(b"x", wait=timedelta(seconds=30)))

        nursery.start_soon(cancel_again)
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert counts == []
        slow.set()
        await until(lambda: counts == [worqr.CancelCount(0, 1, 1)])
        assert (await q.info()).counts["cancelled"] == 1


async def test_a_plain_handler_that_never_looks_ends_cancelled_all_the_same(mesh: worqr.Mesh) -> None:
    begun, let_go = threading.Event(), threading.Event()

    def handler(task: bytes) -> None:
        begun.set()
        let_go.wait(60)

    async with mesh.connect(), serving(mesh, "Q1", handler):
        q = mesh.queue("Q1")
        await q.enqueue(b"x")
        await until(begun.is_set)
        assert await q.cancel(b"x", wait=0.05) == worqr.CancelCount(0, 1, 0)
        let_go.set()
        await eventually(q.running, [])
        assert (await q.info()).counts == {"enqueued": 1, "claimed": 1, "cancelled": 1}


@pytest.mark.leaves(*WAITING_JOBS)
async def test_a_task_that_failed_before_is_found_by_its_payload(mesh: worqr.Mesh) -> None:
    held, runs = Held(), Runs()

    async def handler(task: bytes) -> None:
        runs.begin(task)
        if worqr.current().failures == 0:
            raise ValueError
        await held(task)

    async with mesh.connect():
        q = mesh.queue("Q1")
        async with serving(mesh, "Q1", handler, room=1, retry=QUICK):
            await q.enqueue(b"x", b"x")
            await held.wait(1)
            assert await q.cancel(b"x", wait=30) == worqr.CancelCount(1, 1, 1)
            assert await q.count() == 0
        assert await q.tasks() == []


@pytest.mark.parametrize("wait", [-1, float("nan"), float("inf"), "1", True])
async def test_wait_is_a_duration(mesh: worqr.Mesh, wait: Any) -> None:
    async with mesh.connect():
        await mesh.queue("Q1").enqueue(b"x")
        with pytest.raises(worqr.UsageError, match="wait must be"):
            await mesh.queue("Q1").cancel(b"x", wait=wait)
        with pytest.raises(worqr.UsageError, match="wait must be"):
            await mesh.queue("Q1").cancel_all(wait=wait)
        assert await mesh.queue("Q1").count() == 1


async def test_cancel_all_cancels_what_waits_and_what_runs(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    held = Held()
    async with mesh.connect(), serving(mesh, "Q1", held, room=2), serving(other, "Q1", held, room=1):
        q = mesh.queue("Q1")
        await q.enqueue(*numbers(2010))
        await mesh.queue("Q2").enqueue(b"stays")
        await held.wait(3)
        assert await q.cancel_all(wait=30) == worqr.CancelCount(2007, 3, 3)
        assert len(held.cancelled) == 3
        assert await q.cancel_all() == worqr.CancelCount(0, 0, 0)
        assert await mesh.queue("Q2").count() == 1
        await q.enqueue(b"new")
        await held.wait(4)
        assert held.tasks[-1] == b"new"
        held.gate.set()
        await held.wait_for(lambda: held.done == [b"new"])
        await eventually(q.running, [])


async def test_a_cancel_with_wait_does_not_hang_when_the_server_is_away(own_server: Server, prefix: str) -> None:
    mesh = worqr.Mesh(own_server.url, prefix=prefix)
    async with mesh.connect():
        have_patience(mesh, 1.5)
        own_server.stop()
        for wait in (0, 3):
            async with at_most(20):
                with pytest.raises(worqr.Unavailable) as caught:
                    await mesh.queue("Q1").cancel(b"x", wait=wait)
            assert caught.value.sent is not True
        async with at_most(20):
            with pytest.raises(worqr.Unavailable):
                async with mesh.queue("Q1").events():
                    pytest.fail("nobody confirmed it")


# Pausing


@pytest.mark.usefixtures("without_scans")
async def test_a_paused_queue_is_not_claimed_and_goes_on_at_once(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    held = Held()
    async with mesh.connect(), serving(mesh, "Q1", held, room=1), serving(other, "Q1", held, room=1):
        q = mesh.queue("Q1")
        await q.enqueue(b"a")
        await held.wait(1)
        await q.pause("deploying")
        assert await q.enqueue(b"b", b"c") == 2
        held.gate.set()  # what ran goes on
        await held.wait_for(lambda: held.done == [b"a"])
        await eventually(q.running, [])
        await trio.sleep(0.1)
        assert held.tasks == [b"a"]
        assert (await q.info()).paused == "deploying"
        await q.pause("still deploying")
        assert (await q.info()).paused == "still deploying"
        await q.resume()
        await held.wait(3)
        await q.resume()
        assert (await q.info()).paused is None
        await eventually(q.running, [])


@pytest.mark.usefixtures("without_scans")
async def test_a_queue_paused_without_a_reason_is_paused(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        q = mesh.queue("Q1")
        await q.pause()
        assert (await q.info()).paused == ""
        assert [info.name for info in await mesh.queues()] == ["Q1"]
        runs = Runs()
        await q.enqueue(b"a")
        async with serving(mesh, "Q1", runs):  # a peer that comes later
            await trio.sleep(0.1)
            assert runs.tasks == []
            await q.resume()
            await runs.wait(1)
            await eventually(q.running, [])


async def test_a_paused_queue_still_takes_back_and_cancels(mesh: worqr.Mesh) -> None:
    held = Held()
    async with mesh.connect():
        q = mesh.queue("Q1")
        async with serving(mesh, "Q1", held):
            await q.enqueue(b"a", b"b")
            await held.wait(2)
            await q.pause()
            assert (await q.cancel(b"b", wait=30)).acknowledged == 1
        assert await q.tasks() == [b"a"]
        await q.resume()


async def test_hungry_peers_are_not_worn_out_by_a_paused_queue(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    async with mesh.connect(), serving(mesh, "Q1", Runs()):
        q = mesh.queue("Q1")
        await q.pause()
        with spying(server, prefix) as spy:
            await q.enqueue(*numbers(5))
            await trio.sleep(1.2)
            assert spy.calls()["start_tasks"] <= 2
        await q.resume()
        await eventually(q.count, 0)
        await eventually(q.running, [])


# Deleting


async def test_delete_drops_what_waits(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    async with mesh.connect():
        q = mesh.queue("Q1")
        await q.enqueue(*numbers(2500))
        await q.delete()
        assert (await q.count(), await q.peek(), await q.tasks()) == (0, None, [])
        await q.delete()
        assert await q.enqueue(b"new") == 1
        assert await q.tasks() == [b"new"]
        await q.delete()
        left = [short(key, prefix) for key, entry in dump(server.client(), prefix).items() if not entry.expires]
        assert left == []


@pytest.mark.leaves(*WAITING_JOBS)
async def test_delete_drops_jobs_with_their_records(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    async with mesh.connect():
        q = mesh.queue("Q1")
        async with mesh.join() as peer, peer.work("Q1") as claims:
            await q.enqueue(b"a", b"b")
            for delay, claim in enumerate(await claims.take(2)):
                await claim.retry(delay=delay * 60)
        assert ((await q.info()).waiting, (await q.info()).scheduled) == (1, 1)
        await q.delete()
        left = dump(server.client(), prefix)
        assert not [key for key in left if b":job:" in key or b":twins:" in key or b":due" in key]


async def test_what_runs_on_a_deleted_queue_may_finish_and_is_dropped_when_given_back(mesh: worqr.Mesh) -> None:
    held = Held()
    async with mesh.connect():
        q = mesh.queue("Q1")
        async with serving(mesh, "Q1", held, room=2) as peer:
            await q.enqueue(b"a", b"b", b"c")
            await held.wait(2)
            await q.delete()
            assert held.cancelled == []
            assert await q.count() == 0
            held.gate.set()
            await held.wait_for(lambda: len(held.done) == 2)
            await eventually(q.running, [])
            assert (await q.info()).counts["finished"] == 2
            held.gate = trio.Event()
            await q.enqueue(b"d", b"e")  # the peer goes on with the new queue
            await held.wait(4)
            assert peer.health().ready
            await q.delete()
            await q.enqueue(b"new")
        assert sorted(held.cancelled) == [(b"d", "leaving"), (b"e", "leaving")]
        assert await q.tasks() == [b"new"]  # d and e were dropped


async def test_a_failure_on_a_deleted_queue_is_dropped(mesh: worqr.Mesh) -> None:
    held = Held()

    async def handler(task: bytes) -> None:
        await held(task)
        raise ValueError

    async with mesh.connect(), serving(mesh, "Q1", handler):
        q = mesh.queue("Q1")
        await q.enqueue(b"a")
        await held.wait(1)
        await q.delete()
        held.gate.set()
        await eventually(q.running, [])
        assert await q.count() == 0
        await trio.sleep(0.05)
        assert held.tasks == [b"a"]


# Listening


async def test_events_tell_what_happens(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    seen: list[tuple[str, int]] = []
    runs = Runs()

    async def handler(task: bytes) -> None:
        runs.begin(task)
        if task == b"bad" and worqr.current().failures == 0:
            raise ValueError

    async with mesh.connect(), other.connect():
        q = mesh.queue("Q1")
        await q.enqueue(b"before")
        async with other.queue("Q1").events() as events, trio.open_nursery() as nursery:

            async def listen() -> None:
                async for event in events:
                    assert event.queue == "Q1"
                    seen.append((event.type, event.count))

            nursery.start_soon(listen)
            await q.enqueue(b"a", b"b")
            await q.cancel(b"b")
            await q.pause()
            await q.resume()
            await q.enqueue(b"bad")
            await until(lambda: len(seen) == 5)
            assert seen == [("enqueued", 2), ("cancelled", 1), ("paused", 1), ("resumed", 1), ("enqueued", 1)]
            seen.clear()
            async with serving(mesh, "Q1", handler, room=1, retry=QUICK):
                await runs.wait(4)
                await eventually(q.running, [])
            await q.enqueue(b"x")
            await q.delete()
            await until(lambda: ("deleted", 1) in seen)
            nursery.cancel_scope.cancel()
    assert sum(count for kind, count in seen if kind == "claimed") == 4
    assert sum(count for kind, count in seen if kind == "finished") == 3
    assert ("retried", 1) in seen


async def test_nothing_is_published_while_nobody_listens(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    async with mesh.connect():
        q = mesh.queue("Q1")
        async with q.events() as events:
            await q.enqueue(b"a")
            assert await anext(events) == worqr.Event("Q1", "enqueued", 1)
        await until(lambda: server.look.pubsub_numsub(f"{prefix}:{{Q1}}:events")[0][1] == 0)
        with spying(server, prefix) as spy:
            await q.enqueue(b"a")
            assert spy.published(spy.seen(), "events") == 0


async def test_a_slow_listener_loses_the_oldest_events_and_delays_nobody(mesh: worqr.Mesh) -> None:
    async with mesh.connect():
        q = mesh.queue("Q1")
        async with q.events() as slow, q.events() as quick, trio.open_nursery() as nursery:
            all_sent = trio.Event()
            nursery.start_soon(read_to_the_end, quick, all_sent)
            for _ in range(1100):
                await q.enqueue(b"a")
            await q.enqueue(b"b", b"b")
            await all_sent.wait()
            seen: list[int] = []
            while 2 not in seen:
                seen.append((await anext(slow)).count)
            assert len(seen) == 1000


async def read_to_the_end(events: AsyncIterator[worqr.Event], end: trio.Event) -> None:
    with trio.fail_after(PATIENCE):
        while (await anext(events)).count != 2:
            pass
    end.set()


async def test_what_strangers_publish_harms_no_listener(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    held = Held()
    async with mesh.connect(), serving(mesh, "Q1", held) as peer:
        q, client, base = mesh.queue("Q1"), server.client(), f"{prefix}:{{Q1}}"
        await q.enqueue(b"x")
        await held.wait(1)
        async with q.events() as events:
            for channel in (base, f"{base}_cancel", f"{base}_cancelled", f"{base}:events", f"{base}:wake:{peer.id}"):
                for message in (b"", b"\xff\x00", b"nonsense", b"9" * 5000, b"-1", b"1.5", b"\xc2\xb2", b"finished x"):
                    client.publish(channel, message)
            client.publish(f"{base}_cancel", str(held.contexts[0].fence))  # forged: nobody has marked it
            await q.enqueue(b"y")
            with trio.fail_after(PATIENCE):
                while (await anext(events)).type != "enqueued":
                    pass
        await held.wait(2)
        assert held.cancelled == []
        assert await q.cancel(b"x", wait=30) == worqr.CancelCount(0, 1, 1)
        held.gate.set()
        await eventually(q.running, [])
        assert peer.health().ready


# Used wrongly


USES: dict[str, Callable[[worqr.Queue], Any]] = {
    "enqueue": lambda q: q.enqueue(b"a"),
    "enqueue nothing": lambda q: q.enqueue(),
    "count": lambda q: q.count(),
    "peek": lambda q: q.peek(),
    "tasks": lambda q: q.tasks(),
    "running": lambda q: q.running(),
    "jobs": lambda q: q.jobs(),
    "jobs that run": lambda q: q.jobs(state="active"),
    "info": lambda q: q.info(),
    "read": lambda q: q.read("x"),
    "payload": lambda q: q.payload("x"),
    "cancel_claims": lambda q: q.cancel_claims("7"),
    "run_now": lambda q: q.run_now("x"),
    "cancel": lambda q: q.cancel(b"a"),
    "cancel and wait": lambda q: q.cancel(b"a", wait=1),
    "cancel_all": lambda q: q.cancel_all(),
    "pause": lambda q: q.pause(),
    "resume": lambda q: q.resume(),
    "delete": lambda q: q.delete(),
    "events": lambda q: q.events().__aenter__(),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
async def test_a_queue_needs_a_connected_mesh(mesh: worqr.Mesh, use: Callable[[worqr.Queue], Any]) -> None:
    q = mesh.queue("Q1")
    with pytest.raises(worqr.UsageError, match=r"not connected.*mesh\.connect\(\)"):
        await use(q)
    async with mesh.connect():
        await q.count()
    with pytest.raises(worqr.UsageError, match="not connected"):
        await use(q)


@pytest.mark.parametrize("reason", [7, None, b"x", "\udcff"])
async def test_a_reason_is_a_text(mesh: worqr.Mesh, reason: Any) -> None:
    async with mesh.connect():
        with pytest.raises(worqr.UsageError, match="reason"):
            await mesh.queue("Q1").pause(reason)
        assert (await mesh.queue("Q1").info()).paused is None


async def test_queues_of_one_name_are_one_queue(mesh: worqr.Mesh, new_mesh: NewMesh) -> None:
    second = new_mesh()
    async with mesh.connect(), second.connect():
        await mesh.queue("Q1").enqueue(b"a")
        await second.queue("Q1").enqueue(b"b")
        await mesh.queue("Q1").enqueue(b"c")
        assert await in_order(second.queue("Q1")) == [b"a", b"b", b"c"]


async def test_odd_names_are_good_names(mesh: worqr.Mesh) -> None:
    names = [
        "a:b",
        "error",
        "*",
        "[x]",
        "with blanks",
        "\u00fc\u20ac\U0001f600",
        "x" * 200,
        "_cancel",
        "0",
        "Q1:claims",
        "'\"\\",
    ]
    async with mesh.connect():
        for name in names:
            runs = Runs()
            async with serving(mesh, name, runs):
                await mesh.queue(name).enqueue(name.encode())
                assert await runs.wait(1) == [name.encode()]
                await eventually(mesh.queue(name).running, [])
                assert [info.name for info in await mesh.queues()] == [name]
