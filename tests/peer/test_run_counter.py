"""The totals of runs on the server say what became of the runs that there were."""

from __future__ import annotations

import json
import threading
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

import worqr
from tests.peer.conftest import NewMesh
from tests.peer.tools import Runs, eventually, serving
from tests.support.proxy import FaultProxy, sent_as
from tests.support.servers import Server
from worqr.errors import ClaimLost, RefusedByServer
from worqr.history_records import OUTCOMES, RUN_FIELDS, WAIT_FIELDS
from worqr.keys import QueueKeys
from worqr.peer.consumer import Lifecycle
from worqr.peer.session import Registration
from worqr.peer.settler import QUEUES_AT_ONCE, SEND_EVERY, RunCounter

FAILED = ("{Q1}:failed", "{Q1}:aside*")


def totals(server: Server, prefix: str) -> dict[str, int]:
    found = server.client().hgetall(QueueKeys(prefix, "Q1").runs)
    return {field.decode(): int(n) for field, n in found.items()}


def outcomes(server: Server, prefix: str) -> Callable[[], Awaitable[dict[str, int]]]:
    async def look() -> dict[str, int]:
        return {field: n for field, n in totals(server, prefix).items() if field in OUTCOMES}

    return look


@pytest.mark.leaves(*FAILED)
async def test_each_way_to_end_has_its_count(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    async def handler(task: bytes) -> None:
        if task == b"raise":
            raise worqr.Failure("as told")
        if task in (b"hold", b"late"):
            await trio.sleep_forever()

    async with serving(mesh, "Q1", handler, retry=worqr.RetryPolicy(max_timeouts=1)):
        q = mesh.queue("Q1")
        await q.enqueue(b"a", b"b", b"raise")
        job = await q.dispatch(b"hold")
        await q.dispatch(b"late", timeout=0.1)
        await eventually(outcomes(server, prefix), {"ok": 2, "raised": 1, "timeout": 1})
        await job.cancel(wait=60)
        await eventually(outcomes(server, prefix), {"ok": 2, "raised": 1, "timeout": 1, "cancelled": 1})


async def test_a_run_that_returns_in_spite_of_its_cancellation_counts_as_cancelled(
    mesh: worqr.Mesh, server: Server, prefix: str
) -> None:
    runs = Runs()

    async def handler(task: bytes) -> None:
        runs.begin(task)
        with trio.CancelScope(shield=True):
            while worqr.current().cancel_reason is None:
                await trio.sleep(0.01)

    async with serving(mesh, "Q1", handler):
        job = await mesh.queue("Q1").dispatch(b"a")
        await runs.wait(1)
        await job.cancel(wait=60)
        await eventually(outcomes(server, prefix), {"cancelled": 1})


async def test_runs_that_returned_have_run_times_and_jobs_have_waiting_times(
    mesh: worqr.Mesh, server: Server, prefix: str
) -> None:
    q, took = mesh.queue("Q1"), 0.3

    async def handler(task: bytes) -> None:
        await trio.sleep(took)

    async with mesh.connect():
        await q.enqueue(b"a", b"b")
        await q.dispatch(b"c")
        await q.dispatch(b"d", run_at=datetime(2001, 1, 1, tzinfo=UTC))
        await trio.sleep(took)
    async with serving(mesh, "Q1", handler):
        await eventually(outcomes(server, prefix), {"ok": 4})
    found = totals(server, prefix)
    assert sum(found.get(field, 0) for field in RUN_FIELDS) == 4
    assert not any(found.get(field) for field in RUN_FIELDS[:9]), "none took less than 256 ms"
    assert found["rs"] >= 4 * took * 1000 - 1
    assert sum(found.get(field, 0) for field in WAIT_FIELDS) == 2
    assert 2 * took * 1000 <= found["ws"] < 10_000_000, "since the dispatch, not since 2001"


async def test_threads_count_too(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    def handler(task: bytes) -> None:
        threading.Event().wait(0.01)

    async with serving(mesh, "Q1", handler):
        await mesh.queue("Q1").enqueue(b"a")
        await eventually(outcomes(server, prefix), {"ok": 1})
    assert totals(server, prefix)["rs"] >= 10


@pytest.mark.leaves(*FAILED)
async def test_claims_by_hand_count_until_they_are_settled(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    async with mesh.join() as peer, peer.work("Q1") as claims:
        await mesh.queue("Q1").enqueue(*[b"%d" % n for n in range(6)])
        finish, fail, retry, stop, block, last = await claims.take(6, within=60)
        await trio.sleep(0.05)
        await finish.finish()
        await fail.fail("by hand")
        await retry.retry(delay=0)
        async with block:
            raise ValueError
        assert await claims.finish([last]) == []
        await eventually(outcomes(server, prefix), {"ok": 2, "raised": 3})
        assert totals(server, prefix)["rs"] >= 2 * 50
        await stop.stop()
        await mesh.queue("Q1").cancel_all()


async def test_the_last_counts_are_sent_before_the_worker_leaves(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    runs = Runs()
    async with serving(mesh, "Q1", runs):
        await mesh.queue("Q1").enqueue(*[b"%d" % n for n in range(50)])
        await runs.wait(50)
    assert totals(server, prefix)["ok"] == 50


@pytest.mark.parametrize("fault", ["drop_reply", "drop_request"])
async def test_counts_are_added_once_when_the_connection_is_cut(
    new_mesh: NewMesh, server: Server, proxy: FaultProxy, prefix: str, fault: str
) -> None:
    mesh, runs = new_mesh(url=proxy.url), Runs()
    cut = getattr(proxy, fault)(sent_as("note_runs"))
    async with serving(mesh, "Q1", runs):
        await mesh.queue("Q1").enqueue(*[b"%d" % n for n in range(50)])
        await cut.wait_fired()
        await eventually(outcomes(server, prefix), {"ok": 50})
        await mesh.queue("Q1").enqueue(b"one more")
        await eventually(outcomes(server, prefix), {"ok": 51})


# Its requests, with made-up replies and a clock that jumps


class Consumer:
    """What the counter uses of a consumer."""

    def __init__(self, name: str) -> None:
        self.keys = QueueKeys("t", name)
        self.queue = name
        self.recent = 0
        self.registration: Registration | None = Registration("w")
        self.lifecycle = Lifecycle()


class Desk:
    """Takes the requests of a counter: `sent` has the queue and the counts of each."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.sent: list[tuple[str, dict[str, int]]] = []
        self.ended: list[list[bytes]] = []
        self.counter = RunCounter(self)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        self._answers: list[Callable[..., None]] = []
        nursery.start_soon(self.counter.send_forever)

    together = nullcontext()

    def post(self, call: Any, deliver: Callable[..., None], **_options: Any) -> None:
        _, _, _, lines, *flat = call.args
        self.ended.append(lines.splitlines())
        name = call.base.partition("{")[2].rstrip("}")
        self.sent.append((name, dict(zip(flat[::2], flat[1::2], strict=True))))
        self._answers.append(deliver)

    def answer(self, word: str | None = "ok", failure: Exception | None = None) -> None:
        self._answers.pop(0)(word, failure)


@pytest.fixture
def consumer() -> Consumer:
    return Consumer("Q1")


@pytest.fixture
async def desk(nursery: trio.Nursery) -> Desk:
    return Desk(nursery)


def a_run(consumer: Consumer, fence: int = 1) -> Any:
    return SimpleNamespace(
        host=consumer, registration=consumer.registration, began=0.0, cancel_reason=None, record=None, fence=fence
    )


async def test_nothing_is_sent_while_no_run_ends(autojump_clock: MockClock, desk: Desk, consumer: Consumer) -> None:
    await trio.sleep(1000)
    assert desk.sent == []
    desk.counter.ended(a_run(consumer), "raised")
    await trio.sleep(2 * SEND_EVERY)
    desk.answer()
    await trio.sleep(1000)
    assert desk.sent == [("Q1", {"raised": 1})]


async def test_a_queue_is_sent_once_a_second_and_never_twice_at_the_same_time(
    autojump_clock: MockClock, desk: Desk, consumer: Consumer
) -> None:
    for _ in range(300):
        desk.counter.ended(a_run(consumer), "raised")
        await trio.sleep(SEND_EVERY / 100)
    assert len(desk.sent) == 1
    desk.answer()
    await trio.sleep(2 * SEND_EVERY)
    assert len(desk.sent) == 2
    assert sum(counts["raised"] for _, counts in desk.sent) == 300
    assert desk.counter.totals["Q1", "raised"] == 300


async def test_counts_that_the_server_refuses_are_sent_again(
    autojump_clock: MockClock, desk: Desk, consumer: Consumer
) -> None:
    desk.counter.ended(a_run(consumer), "raised")
    await trio.sleep(2 * SEND_EVERY)
    desk.answer(None, RefusedByServer("OOM"))
    desk.counter.ended(a_run(consumer), "raised")
    await trio.sleep(2 * SEND_EVERY)
    assert desk.sent == [("Q1", {"raised": 1}), ("Q1", {"raised": 2})]
    assert desk.counter.lost == 0


@pytest.mark.parametrize(("word", "failure"), [("gone", None), (None, ClaimLost("dead"))])
async def test_counts_of_a_dead_registration_are_sent_by_the_next(
    autojump_clock: MockClock, desk: Desk, consumer: Consumer, word: str | None, failure: Exception | None
) -> None:
    desk.counter.ended(a_run(consumer), "lost")
    await trio.sleep(2 * SEND_EVERY)
    assert consumer.registration is not None
    consumer.registration.end()
    desk.answer(word, failure)
    await trio.sleep(10 * SEND_EVERY)
    assert len(desk.sent) == 1
    consumer.registration = Registration("w2")
    await trio.sleep(2 * SEND_EVERY)
    assert desk.sent == [("Q1", {"lost": 1})] * 2


async def test_counts_that_cannot_be_sent_any_more_are_counted(
    autojump_clock: MockClock, desk: Desk, consumer: Consumer
) -> None:
    desk.counter.ended(a_run(consumer), "raised")
    desk.counter.leaves(consumer)
    desk.counter.ended(a_run(consumer), "raised")
    desk.counter.left(consumer)
    consumer.lifecycle.drain()
    consumer.lifecycle.leave()
    desk.answer("gone")
    await trio.sleep(2 * SEND_EVERY)
    assert len(desk.sent) == 1
    assert desk.counter.lost == 2


async def test_of_very_many_queues_some_are_sent_each_second(autojump_clock: MockClock, desk: Desk) -> None:
    for n in range(250):
        desk.counter.returned(one := Consumer(f"Q{n}"), [a_run(one)])
    for sent in (100, 200, 250):
        await trio.sleep(SEND_EVERY * 1.01)
        assert len(desk.sent) == sent
    assert QUEUES_AT_ONCE == 100
    assert len({name for name, _ in desk.sent}) == 250


# The runs that ended last


def claims_of(runs: list[bytes]) -> list[int]:
    return [json.loads(run)[0] for run in runs]


async def test_of_many_runs_the_last_are_sent_and_a_refusal_loses_none_of_them(
    autojump_clock: MockClock, desk: Desk, consumer: Consumer
) -> None:
    consumer.recent = 3
    for fence in range(1, 6):
        desk.counter.returned(consumer, [a_run(consumer, fence)])
    await trio.sleep(2 * SEND_EVERY)
    assert claims_of(desk.ended[0]) == [3, 4, 5]
    desk.counter.ended(a_run(consumer, 6), "raised", "ValueError")
    desk.answer(None, RefusedByServer("OOM"))
    await trio.sleep(2 * SEND_EVERY)
    assert claims_of(desk.ended[1]) == [4, 5, 6]
    desk.answer()
    desk.counter.ended(a_run(consumer, 7), "timeout", "Timeout")
    await trio.sleep(2 * SEND_EVERY)
    assert claims_of(desk.ended[2]) == [7]


async def test_a_queue_that_keeps_no_runs_sends_none(autojump_clock: MockClock, desk: Desk, consumer: Consumer) -> None:
    desk.counter.returned(consumer, [a_run(consumer)])
    desk.counter.ended(a_run(consumer), "raised", "ValueError")
    await trio.sleep(2 * SEND_EVERY)
    assert desk.ended == [[]]


@pytest.mark.leaves(*FAILED, "{Q1}:recent")
async def test_the_last_runs_of_a_queue_can_be_listed(mesh: worqr.Mesh, server: Server, prefix: str) -> None:
    async def handler(task: bytes) -> None:
        if task == b"raise":
            raise worqr.Failure("as told")
        if task in (b"hold", b"late"):
            await trio.sleep_forever()
        await trio.sleep(0.05)

    q = mesh.queue("Q1")
    async with serving(mesh, "Q1", handler, retry=worqr.RetryPolicy(max_timeouts=1), recent=4) as peer:
        await q.enqueue(b"dropped, because four later ones follow")
        await eventually(outcomes(server, prefix), {"ok": 1})
        await q.enqueue(b"plain")
        await q.dispatch(b"raise", id="raises")
        await q.dispatch(b"late", id="late", timeout=0.1)
        held = await q.dispatch(b"hold", id="held")
        await eventually(outcomes(server, prefix), {"ok": 2, "raised": 1, "timeout": 1})
        await held.cancel(wait=60)
        await eventually(outcomes(server, prefix), {"ok": 2, "raised": 1, "timeout": 1, "cancelled": 1})
        found = {run.id: run for run in await q.recent()}
        now = datetime.now(UTC)
        worker = peer.id
    assert {name: (run.outcome, run.error) for name, run in found.items()} == {
        None: ("ok", None),
        "raises": ("raised", "worqr.Failure"),
        "late": ("timeout", "Timeout"),
        "held": ("cancelled", None),
    }
    assert {run.worker for run in found.values()} == {worker}
    assert found[None].seconds >= 0.05
    assert found["late"].seconds >= 0.1
    assert all(run.started < now and run.claim.isdecimal() for run in found.values())
    async with mesh.connect():
        assert [run.id for run in await q.recent(1)] == ["held"]
        assert server.client().ttl(QueueKeys(prefix, "Q1").recent) > 23 * 3600


@pytest.mark.parametrize("fault", ["drop_reply", "drop_request"])
@pytest.mark.leaves("{Q1}:recent")
async def test_ended_runs_are_stored_once_when_the_connection_is_cut(
    new_mesh: NewMesh, server: Server, proxy: FaultProxy, prefix: str, fault: str
) -> None:
    mesh, runs = new_mesh(url=proxy.url), Runs()
    cut = getattr(proxy, fault)(sent_as("note_runs"))
    async with serving(mesh, "Q1", runs, recent=1000):
        await mesh.queue("Q1").enqueue(*[b"%d" % n for n in range(50)])
        await cut.wait_fired()
        await eventually(outcomes(server, prefix), {"ok": 50})
        claims = [run.claim for run in await mesh.queue("Q1").recent(1000)]
    assert len(claims) == len(set(claims)) == 50


@pytest.mark.parametrize("recent", [-1, 1001, 2.5, True, "9"])
async def test_a_number_of_ended_runs_that_no_queue_keeps_is_refused(mesh: worqr.Mesh, recent: Any) -> None:
    with pytest.raises(worqr.UsageError, match="recent must be a whole number from 0 to 1,000"):
        mesh.task(recent=recent)(lambda: None)
