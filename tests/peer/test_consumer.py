"""The room of a peer: shared fairly between its queues, never exceeded, never leaked."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import trio

import worqr
from tests.peer.tools import QUICK, SCRIPTS, Held, Runs, eventually, services_of, serving, spying, until
from tests.support.servers import Server
from worqr.keys import QueueKeys
from worqr.ops import StartReply
from worqr.peer.consumer import HandlerConsumer, Lifecycle, Phase
from worqr.peer.scheduler import PATIENCE, ClaimRequest, Pool, RequestState, Scheduler, Share
from worqr.peer.session import Registration
from worqr.policy import Policy

pytestmark = pytest.mark.one_server


def numbers(n: int) -> list[bytes]:
    return [b"%d" % i for i in range(n)]


class Busy(Runs):
    """Notes how many runs there are at once; none ends before there were as many as there is `room` for."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.room = room
        self.full = trio.Event()

    async def __call__(self, task: bytes) -> None:
        queue = worqr.current().queue
        for name in (queue, "all"):
            self.now[name] += 1
            self.most[name] = max(self.most[name], self.now[name])
        if self.now["all"] == self.room:
            self.full.set()
        await self.full.wait()
        await trio.sleep(random.random() / 500)
        self.begin(task)
        for name in (queue, "all"):
            self.now[name] -= 1
        if task.endswith(b"7"):
            raise ValueError


@pytest.mark.leaves("{Q?}:failed", "{Q?}:aside*")
async def test_room_is_used_up_and_never_exceeded_nor_leaked(mesh: worqr.Mesh) -> None:
    busy = Busy(10)
    async with mesh.join(concurrency=10) as peer, trio.open_nursery() as nursery:
        await nursery.start(partial(peer.serve, "Q1", busy, concurrency=4, retry=QUICK))
        await nursery.start(partial(peer.serve, "Q2", busy, retry=QUICK))
        await nursery.start(partial(peer.serve, "Q3", busy, concurrency=1, retry=QUICK))
        for name in ("Q1", "Q2", "Q3"):
            await mesh.queue(name).enqueue(*numbers(100))
        await busy.wait(3 * (90 + 10 * 10))
        for name in ("Q1", "Q2", "Q3"):
            await eventually(mesh.queue(name).running, [])
        assert (busy.most["all"], busy.most["Q1"], busy.most["Q3"]) == (10, 4, 1)
        # A last start request may still be under way.
        await until(
            lambda: (peer._engine.scheduler.running, peer._engine.scheduler.room, peer.health().room) == (0, 10, 10)
        )
        nursery.cancel_scope.cancel()


async def test_a_queue_gets_all_the_room_that_is_left(mesh: worqr.Mesh) -> None:
    held = Held()
    async with mesh.connect(), serving(mesh, "Q1", held, room=7) as peer:
        await mesh.queue("Q1").enqueue(*numbers(20))
        await held.wait(7)
        await trio.sleep(0.05)
        assert len(held.tasks) == 7
        assert (peer.health().running, peer.health().room) == (7, 0)
        held.gate.set()
        await held.wait(20)
        await eventually(mesh.queue("Q1").running, [])
        await until(lambda: peer._engine.scheduler.room == 7)  # a last start request may still be under way


async def test_neither_of_two_queues_starves(mesh: worqr.Mesh) -> None:
    order: list[str] = []
    both, done = trio.Event(), trio.Event()

    async def handler(task: bytes) -> None:
        await both.wait()
        await trio.sleep(0.001)
        order.append(worqr.current().queue)
        if len(order) == 200:
            done.set()

    async with mesh.join(concurrency=2) as peer, trio.open_nursery() as nursery:
        await mesh.queue("Q1").enqueue(*numbers(150))
        await nursery.start(partial(peer.serve, "Q1", handler))
        await nursery.start(partial(peer.serve, "Q2", handler))
        await mesh.queue("Q2").enqueue(*numbers(50))
        both.set()
        await done.wait()
        nursery.cancel_scope.cancel()
    last_of_q2 = max(place for place, queue in enumerate(order) if queue == "Q2")
    assert last_of_q2 < 150, order  # in turn, not after all of Q1
    assert order[:20].count("Q1") >= 5


@pytest.mark.usefixtures("without_scans")
async def test_room_that_one_queue_frees_is_offered_to_the_other(mesh: worqr.Mesh) -> None:
    first, second = Held(), Runs()
    async with mesh.join(concurrency=1) as peer, trio.open_nursery() as nursery:
        await nursery.start(partial(peer.serve, "Q1", first))
        await nursery.start(partial(peer.serve, "Q2", second))
        await mesh.queue("Q1").enqueue(b"a")
        await first.wait(1)
        await mesh.queue("Q2").enqueue(b"b")
        await trio.sleep(0.05)
        assert second.tasks == []
        first.gate.set()
        await second.wait(1)
        await eventually(mesh.queue("Q2").running, [])
        nursery.cancel_scope.cancel()


async def test_room_comes_back_after_every_kind_of_end(mesh: worqr.Mesh, other: worqr.Mesh) -> None:
    held = Held()

    async def handler(task: bytes) -> None:
        if task == b"fail" and worqr.current().failures == 0:
            raise ValueError
        if task == b"hold":
            await held(task)

    async with other.connect(), serving(mesh, "Q1", handler, room=3, retry=QUICK) as peer:
        q = other.queue("Q1")
        for n in range(5):
            await q.enqueue(b"ok", b"fail", b"hold")
            await held.wait(n + 1)
            await q.cancel(b"hold", wait=30)
            await eventually(q.count, 0)
            await eventually(q.running, [])
            await until(lambda: peer._engine.scheduler.running == 0)
        await until(lambda: peer.health().room == 3)


@pytest.mark.parametrize("name", ["threads", "processes", "process_memory", "runs_per_process", "memory_per_process"])
@pytest.mark.parametrize("value", [0, -5, True, "lots"])
async def test_a_pool_is_a_whole_number_of_at_least_1(mesh: worqr.Mesh, name: str, value: Any) -> None:
    with pytest.raises(worqr.UsageError, match=f"{name} must be a whole number of at least 1, not {value!r}"):
        async with mesh.join(**{name: value}):
            pass


@pytest.mark.parametrize("n", [0, -1, True, 1.5, "3", None])
async def test_concurrency_is_a_whole_number(mesh: worqr.Mesh, n: Any) -> None:
    with pytest.raises(worqr.UsageError, match=f"concurrency must be a whole number.* at least 1.* not {n!r}"):
        async with mesh.join(concurrency=n):
            pytest.fail("it must not join")
    async with mesh.join() as peer:
        with pytest.raises(worqr.UsageError, match=f"concurrency must be a whole number.* at least 1.* not {n!r}"):
            peer.set_concurrency(n)
        if n is not None:
            with pytest.raises(worqr.UsageError, match=f"concurrency of serve.*must be a whole number.*{n!r}"):
                await peer.serve("Q1", Runs(), concurrency=n)


# Units


class Units(Runs):
    """Notes how many units are in use at once; `sizes` by queue."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        self.sizes = sizes
        self.now = self.most = 0

    async def __call__(self, task: bytes) -> None:
        size = self.sizes[worqr.current().queue]
        self.now += size
        self.most = max(self.most, self.now)
        await trio.sleep(random.random() / 500)
        self.now -= size
        self.begin(task)


async def test_runs_take_their_size_and_never_more_than_there_is(mesh: worqr.Mesh) -> None:
    units = Units({"Q1": 4, "Q2": 3, "Q3": 1, "Q4": 10})
    async with mesh.join(concurrency=10) as peer, trio.open_nursery() as nursery:
        for name, size in units.sizes.items():
            await nursery.start(partial(peer.serve, name, units, size=size))
        for name, size in units.sizes.items():
            await mesh.queue(name).enqueue(*numbers(120 // size))
        await units.wait(sum(120 // size for size in units.sizes.values()), within=30)
        assert 8 <= units.most <= 10
        await until(
            lambda: (peer._engine.scheduler.used, peer._engine.scheduler.room, peer.health().room) == (0, 10, 10)
        )
        nursery.cancel_scope.cancel()


async def test_room_that_is_too_small_is_no_room(mesh: worqr.Mesh) -> None:
    small, large = Held(), Held()
    async with mesh.join(concurrency=5) as peer, trio.open_nursery() as nursery:
        await nursery.start(partial(peer.serve, "Q1", small))
        await nursery.start(partial(peer.serve, "Q2", large, size=3))
        await mesh.queue("Q1").enqueue(*numbers(3))
        await small.wait(3)
        await mesh.queue("Q2").enqueue(b"large")
        await eventually(mesh.queue("Q2").count, 1)
        await until(lambda: (peer.health().running, peer.health().room) == (3, 2))
        assert large.tasks == []
        small.gate.set()
        await large.wait(1)
        large.gate.set()
        await until(lambda: peer._engine.scheduler.room == 5)
        nursery.cancel_scope.cancel()


async def test_a_size_that_never_fits_is_refused_before_anything_is_sent(mesh: worqr.Mesh) -> None:
    runs = Runs()
    async with mesh.join(concurrency=10) as peer, trio.open_nursery() as nursery:
        with pytest.raises(worqr.UsageError, match=r"'Q1': a run of size 11 .* concurrency of this peer is 10 units"):
            await peer.serve("Q1", runs, size=11, on_failure=print)
        assert await mesh.queues() == []
        await nursery.start(partial(peer.serve, "Q1", runs, size=10))
        with pytest.raises(worqr.UsageError, match=r"'Q1': a run of size 10 .* concurrency of this peer is 9 units"):
            peer.set_concurrency(9)
        await mesh.queue("Q1").enqueue(b"fits")
        await runs.wait(1)
        peer.set_concurrency("auto")
        with pytest.raises(worqr.UsageError, match=r"'Q2': a run of size 1001 .* at most 1000 units"):
            await peer.serve("Q2", runs, size=1001)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("option", ["size", "priority"])
@pytest.mark.parametrize("n", [0, -1, True, 1.5, "3"])
async def test_size_and_priority_are_whole_numbers(mesh: worqr.Mesh, option: str, n: Any) -> None:
    async with mesh.join() as peer:
        with pytest.raises(worqr.UsageError, match=f"{option} of serve.*must be a whole number.*{n!r}"):
            await peer.serve("Q1", Runs(), **{option: n})


async def test_the_higher_priority_gets_more_turns_and_the_lower_some(mesh: worqr.Mesh) -> None:
    order: list[str] = []
    both, done = trio.Event(), trio.Event()

    async def handler(task: bytes) -> None:
        await both.wait()
        await trio.sleep(0.001)
        order.append(worqr.current().queue)
        if len(order) == 200:
            done.set()

    async with mesh.join(concurrency=2) as peer, trio.open_nursery() as nursery:
        for name in ("high", "low"):
            await mesh.queue(name).enqueue(*numbers(100))
        await nursery.start(partial(peer.serve, "low", handler, priority=10))
        await nursery.start(partial(peer.serve, "high", handler, priority=100))
        both.set()
        await done.wait()
        nursery.cancel_scope.cancel()
    before_the_last_high = order[: max(place for place, queue in enumerate(order) if queue == "high")]
    assert 1 <= before_the_last_high.count("low") <= 50, order


# Changed while it runs


class Each(Runs):
    """A handler whose runs are let go one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.gates: list[trio.Event] = []

    async def __call__(self, task: bytes) -> None:
        gate = trio.Event()
        self.gates.append(gate)
        self.begin(task)
        await gate.wait()

    def let_go(self, n: int) -> None:
        for _ in range(n):
            self.gates.pop(0).set()


async def test_more_concurrency_is_used_at_once_and_less_when_enough_has_ended(mesh: worqr.Mesh) -> None:
    each = Each()
    async with mesh.connect(), serving(mesh, "Q1", each, room=2) as peer:
        await mesh.queue("Q1").enqueue(*numbers(20))
        await each.wait(2)
        peer.set_concurrency(6)
        await each.wait(6)
        peer.set_concurrency(2)
        assert (peer.health().running, peer.health().room, peer._engine.scheduler.room) == (6, 0, -4)
        each.let_go(4)
        await eventually(mesh.queue("Q1").count, 14)
        await until(lambda: peer._engine.scheduler.room == 0)
        assert len(each.tasks) == 6  # nothing was claimed meanwhile: the room had to come back first
        each.let_go(1)
        await each.wait(7)
        assert len(each.tasks) == 7
        peer.set_concurrency(100)
        await each.wait(20)
        each.let_go(15)
        await until(lambda: peer._engine.scheduler.room == 100)


# A second limit


class Blocked(Runs):
    """A plain function that waits in its thread until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def __call__(self, task: bytes) -> None:  # type: ignore[override]
        trio.from_thread.run_sync(self.begin, task)
        self.gate.wait()


async def test_a_run_that_would_wait_for_a_thread_is_not_claimed(mesh: worqr.Mesh) -> None:
    blocked, loop = Blocked(), Held()
    async with mesh.join(concurrency=20, threads=3) as peer, trio.open_nursery() as nursery:
        await nursery.start(partial(peer.serve, "Q1", blocked))
        await nursery.start(partial(peer.serve, "Q2", blocked))
        await nursery.start(partial(peer.serve, "Q3", loop))
        for name in ("Q1", "Q2", "Q3"):
            await mesh.queue(name).enqueue(*numbers(10))
        await blocked.wait(3)
        await loop.wait(10)
        await until(lambda: (peer.health().running, peer.health().room) == (13, 7))
        assert len(blocked.tasks) == 3
        assert await mesh.queue("Q1").count() + await mesh.queue("Q2").count() == 17
        blocked.gate.set()
        loop.gate.set()
        await blocked.wait(20)
        await until(lambda: peer._engine.scheduler.room == 20)
        nursery.cancel_scope.cancel()


async def test_a_queue_of_long_runs_does_not_take_all_threads(mesh: worqr.Mesh) -> None:
    long, short = Blocked(), Runs()

    def quick(task: bytes) -> None:
        trio.from_thread.run_sync(short.begin, task)

    async with mesh.join(threads=4) as peer, trio.open_nursery() as nursery:
        await mesh.queue("short").enqueue(*numbers(300))
        await nursery.start(partial(peer.serve, "short", quick))
        await nursery.start(partial(peer.serve, "long", long))
        await mesh.queue("long").enqueue(*numbers(10))
        await short.wait(300, within=30)
        long.gate.set()
        await long.wait(10)
        await until(lambda: peer._engine.scheduler.running == 0)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("lacks", ["units", "threads", "its own limit"])
async def test_a_wake_up_that_finds_no_room_of_any_kind_is_handed_on(
    mesh: worqr.Mesh, server: Server, prefix: str, lacks: str
) -> None:
    blocked, other = Blocked(), Blocked()
    size, limit = (8 if lacks == "units" else 1), (1 if lacks == "its own limit" else None)
    async with mesh.join(concurrency=10, threads=9 - 8 * (lacks == "threads")) as peer, trio.open_nursery() as nursery:
        await nursery.start(partial(peer.serve, "Q1", blocked, size=size, concurrency=limit))
        await nursery.start(partial(peer.serve, "Q2", other, size=3))
        await mesh.queue("Q1" if lacks == "its own limit" else "Q2").enqueue(b"fills it")
        await until(lambda: peer._engine.scheduler.running == 1)
        with spying(server, prefix) as spy:
            server.client().publish(f"{prefix}:{{Q1}}:wake:{peer.id}", "1")
            await until(lambda: any(asks_for_nothing(line, "{Q1}") for line in spy.seen()))
        assert peer._engine.scheduler.running == 1
        for handler in (blocked, other):
            handler.gate.set()
        await until(lambda: peer._engine.scheduler.room == 10)
        nursery.cancel_scope.cancel()


def asks_for_nothing(line: dict[str, Any], queue: str) -> bool:
    """A start request that only hands a wake-up on."""
    words = line["command"].split(" ")
    if len(words) < 2 or SCRIPTS.get(words[1]) != "start_tasks":
        return False
    arguments = words[3 + int(words[2]) :]
    return queue in words[3] and arguments[2] == "0"


# The books of a consumer, with made-up answers


class Books:
    """A consumer that its queue has admitted, whose requests go nowhere: `asked` has how many tasks each was for."""

    def __init__(self, scheduler: Scheduler, name: str = "Q1", **options: Any) -> None:
        self.asked: list[int] = []
        self.scheduler = scheduler
        self._answers: list[Callable[..., None]] = []
        options["limit"] = Pool(options["limit"]) if "limit" in options else None
        services = services_of(scheduler, self)
        self.consumer = HandlerConsumer(QueueKeys("t", name), services, Policy(), Share(**options), Runs())
        self.consumer.admission.enter(Registration("w"), 1)
        self.consumer.admission.admit()
        self.consumer.lifecycle.admitted()
        scheduler.add(self.consumer)

    def post(self, call: Any, deliver: Callable[..., None], **_options: Any) -> None:
        self.asked.append(int(call.args[2]))
        self._answers.append(deliver)

    def answer(self, n: int) -> None:
        """`n` tasks come."""
        word = "ok" if n == self.asked[-1] else "short"
        first = 1 + len(self.asked) * 1000
        self._answers.pop()(StartReply(word, first, [b"task"] * n), None)

    def end(self, n: int) -> None:
        for context in list(self.consumer.running.values())[:n]:
            self.consumer.ended(context)
        self.scheduler.dispatch()


def test_what_is_asked_for_is_reserved_in_units_and_in_places() -> None:
    capacity, pool = Scheduler(20), Pool(3)
    books = Books(capacity, size=4, pool=pool)
    books.consumer.request_soon()
    assert books.asked == [3]
    assert (capacity.room, pool.room) == (8, 0)
    books.answer(2)
    assert (capacity.room, capacity.used, pool.room) == (12, 8, 1)
    books.end(2)
    assert (capacity.room, capacity.used, pool.room) == (20, 0, 3)
    books.consumer.request_soon()
    books.consumer.lifecycle.drain()
    books.consumer.lifecycle.skip_grace()
    books.answer(1)
    assert (capacity.room, capacity.used, pool.room) == (20, 0, 3)
    assert len(books.consumer.lifecycle.take_rejected()) == 1


def test_a_wake_up_that_came_during_a_request_is_handed_on_if_that_took_the_room() -> None:
    books = Books(Scheduler(2))
    books.consumer.request_soon()
    books.consumer.on_wakeup()
    books.answer(2)
    assert books.asked == [2, 0]
    books.answer(0)
    books.end(1)
    assert books.asked == [2, 0, 1]


def test_a_wake_up_that_there_is_room_for_is_not_handed_on() -> None:
    books = Books(Scheduler(2))
    books.consumer.on_wakeup()
    books.answer(0)
    books.consumer.on_wakeup()
    assert books.asked == [2, 2]


def test_room_that_is_kept_for_a_large_run_is_no_room_for_a_wake_up() -> None:
    capacity = Scheduler(4)
    small, large, woken = (Books(capacity, name, size=size) for name, size in (("Q1", 1), ("Q2", 4), ("Q3", 1)))
    small.consumer.request_soon()
    small.answer(4)
    large.consumer.request_soon()
    for _ in range(PATIENCE):
        small.end(1)
        small.answer(1)
    small.end(2)
    assert (capacity.room, large.asked) == (2, [])
    woken.consumer.on_wakeup()
    assert woken.asked == [0]
    assert large.consumer.share.times_bypassed == PATIENCE
    small.end(2)
    assert (large.asked, large.consumer.share.times_bypassed) == ([1], 0)


def test_a_queue_that_had_nothing_to_do_begins_where_the_others_are() -> None:
    capacity = Scheduler(10)
    busy, idle = Books(capacity, "Q1"), Books(capacity, "Q2")
    busy.consumer.request_soon()
    for _ in range(20):
        busy.answer(10)
        busy.end(10)
    idle.consumer.request_soon()
    assert idle.consumer.share.virtual_time == pytest.approx(busy.consumer.share.virtual_time, abs=0.2)
    assert idle.consumer.share.virtual_time > 1


def test_a_queue_is_brief_only_while_all_its_runs_are_over_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("worqr.peer.scheduler.monotonic", lambda: now)
    books = Books(Scheduler(10))
    books.consumer.request_soon()
    books.answer(10)
    assert not books.consumer.share.short_runs
    now += 0.01
    books.end(10)
    assert books.consumer.share.short_runs
    books.answer(10)
    for _ in range(10):  # never all over
        now += 0.01
        books.end(9)
        books.answer(9)
        assert not books.consumer.share.short_runs
    books.end(10)
    assert not books.consumer.share.short_runs


def test_a_station_whose_runs_never_find_room_is_not_made() -> None:
    with pytest.raises(worqr.UsageError, match="'Q1': a run of size 3 would never find room"):
        HandlerConsumer(QueueKeys("t", "Q1"), services_of(Scheduler(2), None), Policy(), Share(3), Runs())


# Stuck runs


@pytest.mark.parametrize("place", [False, True])
def test_a_slot_that_is_given_away_is_free_once(place: bool) -> None:
    capacity, pool = Scheduler(10), Pool(2)
    offers: list[None] = []
    capacity.dispatch_with(lambda: offers.append(None))
    share = Share(4, 100, pool, Pool(1))
    consumer = HandlerConsumer(QueueKeys("t", "Q1"), services_of(capacity, None), Policy(), share, Runs())
    stuck, fresh = (SimpleNamespace(fence=fence) for fence in (1, 2))

    def begin(context: Any) -> None:
        capacity.take(share, 1, first=not consumer.running)
        consumer.running[context.fence] = context

    def books() -> tuple[int, int, int]:
        return capacity.room, pool.room, consumer.capacity_wanted()

    begin(stuck)
    assert books() == (6, 1, 0)
    for _ in range(2):
        consumer.release_slot_of_stuck_run(stuck, place=place)  # type: ignore[arg-type]
        assert books() == (10, 1 + place, 1)
        assert offers.pop() is None
        assert list(consumer.running) == [1]
    begin(fresh)
    assert books() == (6, place, 0)
    consumer.release_slot_of_stuck_run(SimpleNamespace(fence=3))  # type: ignore[arg-type]
    assert books() == (6, place, 0)
    for _ in range(2):
        consumer.ended(stuck)  # type: ignore[arg-type]
        assert books() == (6, 1, 0)
    consumer.ended(fresh)  # type: ignore[arg-type]
    consumer.release_slot_of_stuck_run(fresh, place=True)  # type: ignore[arg-type]
    assert books() == (10, 2, 1)


def test_a_place_may_be_given_away_later_than_the_units() -> None:
    capacity, pool = Scheduler(10), Pool(2)
    share = Share(pool=pool)
    consumer = HandlerConsumer(QueueKeys("t", "Q1"), services_of(capacity, None), Policy(), share, Runs())
    capacity.take(share, 1, first=not consumer.running)
    consumer.running[1] = stuck = SimpleNamespace(fence=1)  # type: ignore[assignment]
    consumer.release_slot_of_stuck_run(stuck)  # type: ignore[arg-type]
    assert (capacity.room, pool.room) == (10, 1)
    consumer.release_slot_of_stuck_run(stuck, place=True)  # type: ignore[arg-type]
    consumer.ended(stuck)  # type: ignore[arg-type]
    assert (capacity.room, pool.room) == (10, 2)


async def test_the_slot_of_a_stuck_run_goes_to_another_task_and_its_claim_stays(mesh: worqr.Mesh) -> None:
    held = Held()
    async with mesh.connect(), serving(mesh, "Q1", held, room=1) as peer:
        await mesh.queue("Q1").enqueue(b"stuck", b"next")
        await held.wait(1)
        held.contexts[0]._run.host.release_slot_of_stuck_run(held.contexts[0]._run)
        await held.wait(2)
        assert len(await mesh.queue("Q1").running()) == peer.health().running == 2
        held.gate.set()
        await until(lambda: peer._engine.scheduler.room == 1 and peer._engine.scheduler.running == 0)


# The phases of a consumer, as the table in the docstring of `Lifecycle` has them.


STEPS: dict[Phase, Callable[[Lifecycle], object]] = {
    Phase.SERVING: Lifecycle.admitted,
    Phase.DRAINING: Lifecycle.drain,
    Phase.STOPPING: Lifecycle.skip_grace,
    Phase.CANCELLING: Lifecycle.cancel,
    Phase.RETURNING: Lifecycle.return_claims,
    Phase.DETACHED: Lifecycle.detach,
    Phase.LEFT: Lifecycle.leave,
}


def lifecycle_in(phase: Phase) -> Lifecycle:
    lifecycle = Lifecycle()
    for each, step in STEPS.items():
        if each <= phase:
            step(lifecycle)
    assert lifecycle.phase is phase
    return lifecycle


@pytest.mark.parametrize("before", Phase)
@pytest.mark.parametrize("to", STEPS)
def test_a_phase_is_never_followed_by_an_earlier_one(before: Phase, to: Phase) -> None:
    lifecycle = lifecycle_in(before)
    STEPS[to](lifecycle)
    assert lifecycle.phase is max(before, to)


@pytest.mark.parametrize("phase", Phase)
async def test_each_phase_allows_what_the_table_says(phase: Phase) -> None:
    lifecycle = lifecycle_in(phase)
    assert lifecycle.is_leaving == (phase >= Phase.DRAINING)
    assert lifecycle.entering.cancel_called == (phase >= Phase.DRAINING)
    assert lifecycle.grace_over.is_set() == (phase >= Phase.STOPPING)
    assert lifecycle.left.is_set() == (phase >= Phase.DETACHED)
    assert lifecycle.holds_stops == (phase in {Phase.CANCELLING, Phase.LEFT})


def test_a_second_drain_changes_nothing() -> None:
    lifecycle = Lifecycle()
    assert [lifecycle.drain(), lifecycle.drain()] == [True, False]


def test_claims_that_were_rejected_are_taken_once() -> None:
    lifecycle = Lifecycle()
    lifecycle.reject(range(3, 5))
    lifecycle.reject([7])
    assert [lifecycle.take_rejected(), lifecycle.take_rejected()] == [[3, 4, 7], []]


def test_every_phase_has_a_step() -> None:
    assert [Phase.NEW, *STEPS] == list(Phase)
    assert all(earlier < later for earlier, later in pairwise(Phase))


# The states of a start request, as the table in the docstring of `ClaimRequest` has them.


IDLE, WANTED, IN_FLIGHT, AGAIN, REJOINING = RequestState

Event = Callable[[ClaimRequest], object]


def request_in(state: RequestState, reserved: int = 0) -> ClaimRequest:
    """A request in this state, reached by its methods."""
    request = ClaimRequest()
    if state is not IDLE:
        request.want()
    if state is REJOINING:
        request.rejoin()
    if state in {IN_FLIGHT, AGAIN}:
        if reserved:
            request.send(reserved)
        else:
            request.refused()
            request.send(0)
        if state is AGAIN:
            request.want()
    assert (request.state, request.reserved) == (state, reserved)
    return request


WANT: Event = ClaimRequest.want
MORE: Event = lambda request: request.replied(True, 0)  # noqa: E731
SHORT: Event = lambda request: request.replied(False, 0)  # noqa: E731
TABLE = [
    (IDLE, 0, WANT, WANTED),
    (WANTED, 0, WANT, WANTED),
    (IN_FLIGHT, 3, WANT, AGAIN),
    (IN_FLIGHT, 0, WANT, AGAIN),
    (AGAIN, 3, WANT, AGAIN),
    (IDLE, 0, lambda request: request.send(0), IN_FLIGHT),
    (WANTED, 0, lambda request: request.send(3), IN_FLIGHT),
    (WANTED, 0, lambda request: request.send(0), AGAIN),
    (IN_FLIGHT, 3, MORE, WANTED),
    (IN_FLIGHT, 3, SHORT, IDLE),
    (IN_FLIGHT, 0, MORE, IDLE),
    (IN_FLIGHT, 0, SHORT, IDLE),
    (AGAIN, 3, SHORT, WANTED),
    (AGAIN, 0, SHORT, WANTED),
    (IN_FLIGHT, 3, ClaimRequest.refused, IDLE),
    (IN_FLIGHT, 0, ClaimRequest.refused, IDLE),
    (AGAIN, 3, ClaimRequest.refused, IDLE),
    (IN_FLIGHT, 3, ClaimRequest.discarded, WANTED),
    (IN_FLIGHT, 0, ClaimRequest.discarded, IDLE),
    (AGAIN, 0, ClaimRequest.discarded, WANTED),
    (AGAIN, 3, ClaimRequest.discarded, WANTED),
    (WANTED, 0, ClaimRequest.rejoin, REJOINING),
    (REJOINING, 0, WANT, WANTED),
    (REJOINING, 0, lambda request: request.send(0), IN_FLIGHT),
    (REJOINING, 0, lambda request: request.rejoined(1, 2), IDLE),
    (REJOINING, 0, lambda request: request.rejoined(1, 0), WANTED),
    (REJOINING, 0, lambda request: request.rejoined(0, 2), REJOINING),  # the reply to an earlier one
    (IDLE, 0, lambda request: request.rejoined(0, 0), IDLE),
    (WANTED, 0, lambda request: request.rejoined(0, 2), WANTED),
    (IN_FLIGHT, 3, lambda request: request.rejoined(0, 2), IN_FLIGHT),
]


@pytest.mark.parametrize(("before", "reserved", "event", "after"), TABLE)
def test_the_states_follow_each_other_as_the_table_says(
    before: RequestState, reserved: int, event: Event, after: RequestState
) -> None:
    request = request_in(before, reserved)
    event(request)
    assert request.state is after
    assert request.in_flight == (after in {IN_FLIGHT, AGAIN})
    if not request.in_flight:
        assert request.reserved == 0


@pytest.mark.parametrize(
    ("before", "reserved", "began"),
    [(IDLE, 0, True), (WANTED, 0, False), (IN_FLIGHT, 3, False), (IN_FLIGHT, 0, True), (REJOINING, 0, True)],
)
def test_want_tells_whether_there_was_no_reason_before(before: RequestState, reserved: int, began: bool) -> None:
    assert request_in(before, reserved).want() is began


@pytest.mark.parametrize("before", [IDLE, WANTED])
@pytest.mark.parametrize("wanted", [0, 3])
def test_a_wake_up_is_pending_until_the_next_request(before: RequestState, wanted: int) -> None:
    request = request_in(before)
    request.wake()
    assert request.wakeup_pending
    request.send(wanted)
    assert not request.wakeup_pending
    request.wake()
    request.replied(False, 0)
    assert request.wakeup_pending


def test_a_recheck_is_taken_once() -> None:
    request = request_in(IN_FLIGHT, 3)
    request.recheck()
    assert [request.take_recheck(), request.take_recheck()] == [True, False]
