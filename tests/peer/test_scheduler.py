"""Whose turn it is: the rule by which contenders share the room of a peer, played with made-up consumers and a made-up clock."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import worqr
from worqr.peer.scheduler import AUTO_MAX, PATIENCE, ClaimRequest, Pool, Scheduler, Share

TRIP = 0.001
"""Seconds that an answer takes."""


class World:
    """A clock, and what happens when."""

    newest: ClassVar[World]

    def __init__(self, concurrency: int | Literal["auto"]) -> None:
        World.newest = self
        self.now = 0.0
        self.scheduler = Scheduler(concurrency)
        self.scheduler.dispatch_with(lambda: self.after(0, self.scheduler.dispatch))
        self.consumers: list[Made] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def after(self, delay: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._numbers), happen))

    def run(self, until: float = float("inf")) -> None:
        """What happens up to then, in order."""
        while self._events and self._events[0][0] <= until:
            self.now, _, happen = heapq.heappop(self._events)
            happen()
            self.check()
        self.now = until

    def check(self) -> None:
        """Nothing is held beyond what there is, and the books are right."""
        used = sum(len(consumer.running) * consumer.share.size for consumer in self.consumers)
        asked = sum(consumer.request.reserved * consumer.share.size for consumer in self.consumers)
        assert self.scheduler.used == used
        assert self.scheduler.room == self.scheduler.concurrency - used - asked
        for consumer in self.consumers:
            share = consumer.share
            assert share.held == len(consumer.running) + consumer.request.reserved
            if (pool := share.pool) is not None:
                mates = [mate for mate in self.consumers if mate.share.pool is pool]
                assert pool.taken == sum(mate.share.held for mate in mates) <= pool.limit
            if share.limit is not None:
                assert share.held == share.limit.taken <= share.limit.limit


@pytest.fixture(autouse=True, scope="module")
def clock() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("worqr.peer.scheduler.monotonic", lambda: World.newest.now)
        yield


class Made:
    """A consumer as `QueueConsumer` is, whose queue is a list of durations."""

    wants_while_idle = False

    def __init__(
        self,
        world: World,
        name: str = "Q",
        *,
        size: int = 1,
        priority: int = 100,
        pool: Pool | None = None,
        limit: int | None = None,
    ) -> None:
        world.scheduler.check_fits(name, size)
        self.world, self.queue = world, name
        self.share = Share(size, priority, pool, None if limit is None else Pool(limit))
        self.request = ClaimRequest()
        self.running: dict[int, float] = {}
        self.line: deque[float] = deque()
        self.started: list[float] = []
        self.ended = 0
        self._numbers = count()
        world.consumers.append(self)
        world.scheduler.add(self)

    def wanted(self) -> int:
        limit = self.share.limit
        demand = 1000 if limit is None else limit.limit - len(self.running)
        return demand - self.request.reserved if self.request.is_wanted else 0

    def fill(self, n: int, duration: float) -> None:
        """`n` tasks more; a wake-up comes with them."""
        self.line.extend([duration] * n)
        self.look()

    def look(self) -> None:
        if self.request.want():
            self.world.scheduler.begin_wanting(self.share)
        if not self.request.in_flight:
            self.world.scheduler.dispatch()

    def send_request(self, wanted: int) -> None:
        assert not self.request.in_flight
        assert wanted > 0
        self.request.send(wanted)
        self.world.scheduler.reserve(self.share, wanted)
        self.world.after(TRIP, self._answer)

    def forward_wakeup(self) -> None:
        raise AssertionError("nobody woke it")

    def _answer(self) -> None:
        wanted = self.request.reserved
        self.world.scheduler.reserve(self.share, -wanted)
        got = [self.line.popleft() for _ in range(min(wanted, len(self.line)))]
        self.request.replied(len(got) == wanted, 0)
        if got:
            self.world.scheduler.take(self.share, len(got), first=not self.running)
        for duration in got:
            number = next(self._numbers)
            self.running[number] = duration
            self.started.append(self.world.now)
            self.world.after(duration, lambda number=number: self._end(number))  # type: ignore[misc]
        self.world.scheduler.dispatch()

    def _end(self, number: int) -> None:
        del self.running[number]
        self.ended += 1
        self.world.scheduler.release(self.share, number, not self.running)
        self.world.after(0, self.world.scheduler.dispatch)


def holders(world: World) -> list[int]:
    return [len(consumer.running) for consumer in world.consumers]


# Shares of the room


def test_work_that_is_over_at_once_is_claimed_in_large_batches() -> None:
    world = World(100)
    asked: list[int] = []
    for _ in range(10):
        consumer = Made(world)

        def ask(wanted: int, ask: Callable[[int], None] = consumer.send_request) -> None:
            asked.append(wanted)
            ask(wanted)

        consumer.send_request = ask  # type: ignore[method-assign]
        consumer.fill(2000, 0)
    world.run()
    assert sum(asked) / len(asked) > 60


@pytest.mark.parametrize("priorities", [(100, 100), (300, 100), (100, 10), (100, 50, 50), (7, 1, 1, 1)])
def test_long_runs_hold_the_room_by_priority(priorities: tuple[int, ...]) -> None:
    world = World(100)
    for priority in priorities:
        Made(world, priority=priority)
    for consumer in world.consumers:
        for _ in range(3000):
            consumer.line.append(random.uniform(0.5, 1.5))
        consumer.look()
    for second in range(5, 20):
        world.run(until=second)
        for consumer, held in zip(world.consumers, holders(world), strict=True):
            assert abs(held - 100 * consumer.share.priority / sum(priorities)) <= len(priorities) + 2
        assert sum(holders(world)) >= 100 - 2 * len(priorities)


def test_it_says_whether_another_consumer_wants_tasks() -> None:
    world = World(1)
    one, two = Made(world), Made(world)
    one.request.want()
    assert not world.scheduler.has_others_for(one.share)
    assert world.scheduler.has_others_for(two.share)
    two.request.want()
    assert world.scheduler.has_others_for(one.share)


def test_long_runs_of_one_queue_do_not_crowd_out_short_ones_of_another() -> None:
    world = World(100)
    short, long = Made(world), Made(world)
    short.fill(100_000, 0.02)
    long.fill(1000, 60)
    world.run(until=30)
    assert len(long.running) <= 51
    assert short.ended > 0.8 * 30 / 0.021 * 50


def test_what_one_does_not_use_the_others_get() -> None:
    world = World(100)
    few, many = Made(world, limit=5, priority=1000), Made(world, priority=1)
    few.fill(10_000, 1)
    many.fill(10_000, 1)
    world.run(until=10)
    assert (len(few.running), len(many.running)) == (5, 95)


def test_a_queue_that_others_leave_alone_gets_all_the_room_at_once() -> None:
    world = World(100)
    one, two = Made(world), Made(world)
    one.fill(1000, 1)
    two.fill(10, 1)
    world.run(until=5)
    assert holders(world) == [100, 0]


# Turns


def order(world: World, until: float) -> list[int]:
    """Which consumer each start was, in order."""
    world.run(until=until)
    starts = [(at, number) for number, consumer in enumerate(world.consumers) for at in consumer.started]
    return [number for _, number in sorted(starts)]


@pytest.mark.parametrize(("concurrency", "duration"), [(1, 0.005), (1, 2), (100, 0), (100, 0.005), (10, 0.2)])
def test_turns_go_by_priority_however_long_the_runs_are(concurrency: int, duration: float) -> None:
    world = World(concurrency)
    high, low = Made(world, priority=100), Made(world, priority=10)
    low.fill(100_000, duration)
    high.fill(100_000, duration)
    world.run(until=(duration + 2 * TRIP) * 400)
    ratio = len(high.started) / len(low.started)
    assert 7 < ratio < 13, ratio
    assert len(high.started) + len(low.started) > 0.6 * concurrency * 200


def test_the_higher_priority_goes_first_among_those_who_come_anew() -> None:
    world = World(1)
    busy, low, high = Made(world), Made(world, priority=10), Made(world, priority=200)
    busy.fill(1000, 1)
    world.run(until=5.5)
    low.fill(1, 1)
    high.fill(1, 1)
    assert order(world, 9.5)[6:9] == [2, 1, 0] or order(world, 9.5)[6:9] == [2, 0, 1]


def test_who_wanted_nothing_for_long_has_no_claim_on_what_comes_now() -> None:
    world = World(1)
    always, seldom = Made(world), Made(world)
    always.fill(100_000, 0.1)
    world.run(until=1000)
    seldom.fill(1000, 0.1)
    before = len(always.started)
    world.run(until=1020)
    assert len(always.started) - before > 80
    assert len(seldom.started) > 80


def test_who_was_held_up_by_its_pool_is_owed_one_round_not_all_it_missed() -> None:
    world, pool = World(1), Pool(0)
    blocked, other = Made(world, pool=pool), Made(world)
    blocked.fill(1000, 0.01)
    other.fill(1000, 0.01)
    world.run(until=5)
    assert not blocked.started
    pool.limit = 1
    before = len(other.started)
    world.run(until=6)
    assert len(other.started) - before > 30
    assert len(blocked.started) > 30


def test_two_queues_of_a_pool_share_its_places() -> None:
    world, threads = World(100), Pool(8)
    long, short, loop = Made(world, pool=threads), Made(world, pool=threads), Made(world)
    short.fill(100_000, 0.02)
    long.fill(1000, 60)
    loop.fill(100_000, 1)
    world.run(until=200)
    assert len(long.running) <= 5
    assert short.ended > 200 / 0.025 * 3
    assert len(loop.running) > 85


# Large runs


@pytest.mark.parametrize("duration", [0.001, 0.02, 1.0])
@pytest.mark.parametrize("others", [1, 5])
@pytest.mark.parametrize("size", [50, 100])
def test_large_runs_are_not_starved_by_small_ones(size: int, others: int, duration: float) -> None:
    world = World(100)
    small = [Made(world, priority=1000) for _ in range(others)]
    for number, consumer in enumerate(small):
        world.after(number * duration / 7, lambda consumer=consumer: consumer.fill(100_000, duration))  # type: ignore[misc]
    world.run(until=duration)
    large = Made(world, size=size)
    large.fill(1000, duration)
    share = size / 100 * (1 + others * 10)  # rounds of the room until its turn comes
    world.run(until=world.now + 10 * (share + PATIENCE + 4) * (duration + 2 * TRIP))
    assert len(large.started) >= 2, len(large.started)
    assert sum(len(consumer.started) for consumer in small) > 100


def test_the_room_is_kept_for_a_large_run_only_when_others_went_ahead_often_enough() -> None:
    world = World(10)
    small, large = Made(world), Made(world, size=10)
    durations = [0.5 + 0.1 * number for number in range(10)]
    small.line.extend(durations + [1] * 1000)
    small.look()
    world.run(until=0.1)
    large.fill(1, 1)
    world.run(until=0.75)
    assert holders(world) == [10, 0]  # what became free was used
    world.run(until=20)
    assert PATIENCE <= len([at for at in small.started[10:] if at < large.started[0]]) <= PATIENCE + 10
    assert large.share.times_bypassed == 0


def test_a_large_run_that_waits_for_a_place_in_its_pool_keeps_no_room() -> None:
    world, processes = World(10), Pool(1)
    large, small = Made(world, size=5, pool=processes), Made(world)
    large.fill(10, 10)
    world.run(until=1)
    small.fill(1000, 0.01)
    world.run(until=9)
    assert small.ended > 3000 / 5


def test_a_single_run_of_the_whole_room_finds_it_though_it_is_not_its_share() -> None:
    world = World(4)
    whole, rest = Made(world, size=4, priority=1), Made(world, priority=100)
    whole.fill(3, 0.1)
    rest.fill(10_000, 0.1)
    world.run(until=1000)
    assert whole.ended == 3


# Whatever comes: nothing beyond the limits, and nothing is left lying

STATIONS = st.lists(
    st.fixed_dictionaries(
        {
            "size": st.integers(1, 12),
            "priority": st.sampled_from([1, 10, 100, 1000]),
            "limit": st.none() | st.integers(1, 5),
            "pool": st.none() | st.integers(0, 1),
            "tasks": st.lists(
                st.tuples(st.floats(0, 3), st.integers(1, 30), st.sampled_from([0, 0.001, 0.03, 0.2, 5])), max_size=8
            ),
        }
    ),
    min_size=1,
    max_size=6,
)


def play(world: World, made: list[dict[str, Any]], pools: list[Pool]) -> Iterator[tuple[Made, int]]:
    for consumer in made:
        pool = None if consumer["pool"] is None else pools[consumer["pool"]]
        one = Made(world, size=consumer["size"], priority=consumer["priority"], limit=consumer["limit"], pool=pool)
        for at, n, duration in consumer["tasks"]:
            world.after(at, lambda one=one, n=n, duration=duration: one.fill(n, duration))  # type: ignore[misc]
        yield one, sum(n for _, n, _ in consumer["tasks"])


@settings(deadline=None, max_examples=60)
@given(made=STATIONS, concurrency=st.integers(12, 40), limits=st.tuples(st.integers(1, 6), st.integers(1, 6)))
def test_all_tasks_run_and_no_limit_is_broken(
    made: list[dict[str, Any]], concurrency: int, limits: tuple[int, int]
) -> None:
    world = World(concurrency)
    consumers = list(play(world, made, [Pool(limit) for limit in limits]))
    world.run()
    assert [consumer.ended for consumer, _ in consumers] == [tasks for _, tasks in consumers]
    assert world.scheduler.room == concurrency
    assert not any(consumer.request.is_wanted for consumer, _ in consumers)


@settings(deadline=None, max_examples=40)
@given(
    made=STATIONS,
    limits=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    changes=st.lists(st.tuples(st.floats(0, 8), st.integers(12, 40))),
)
def test_nor_when_the_concurrency_changes(
    made: list[dict[str, Any]], limits: tuple[int, int], changes: list[tuple[float, int]]
) -> None:
    world = World(12)
    consumers = list(play(world, made, [Pool(limit) for limit in limits]))
    for at, n in changes:
        world.after(at, lambda n=n: world.scheduler.set_concurrency(n))  # type: ignore[misc]
    world.run()
    assert [consumer.ended for consumer, _ in consumers] == [tasks for _, tasks in consumers]


# What is refused


def test_a_run_that_would_never_find_room_is_refused_with_both_numbers() -> None:
    world = World(10)
    with pytest.raises(worqr.UsageError, match=r"'big': a run of size 11 would never.* of this peer is 10 units"):
        Made(world, "big", size=11)
    Made(world, "fits", size=10)
    with pytest.raises(worqr.UsageError, match=r"'fits': a run of size 10 would never.* of this peer is 9 units"):
        world.scheduler.set_concurrency(9)
    assert world.scheduler.concurrency == 10


def test_auto_takes_what_fits_into_its_most_and_holds_the_largest() -> None:
    world = World("auto")
    with pytest.raises(worqr.UsageError, match=f"size {AUTO_MAX + 1} .*'auto' is at most {AUTO_MAX} units"):
        Made(world, size=AUTO_MAX + 1)
    large = Made(world, size=300)
    assert world.scheduler.concurrency == 300
    world.scheduler.resize(1)
    assert world.scheduler.concurrency == 300
    world.scheduler.remove(large)
    world.scheduler.resize(1)
    assert world.scheduler.concurrency == 1


def test_who_came_to_be_too_large_meanwhile_is_refused_when_it_begins() -> None:
    world = World(10)
    late = Made(world, "late", size=10)
    world.scheduler.remove(late)
    world.scheduler.set_concurrency(5)
    with pytest.raises(worqr.UsageError, match="'late': a run of size 10 .* 5 units"):
        world.scheduler.add(late)


def test_more_room_is_offered_at_once() -> None:
    world = World(2)
    consumer = Made(world)
    consumer.fill(10, 1000)
    world.run(until=1)
    world.scheduler.set_concurrency(7)
    world.run(until=2)
    assert len(consumer.running) == 7


def test_a_number_ends_auto_and_auto_goes_on_from_a_number() -> None:
    capacity = Scheduler("auto")
    capacity.set_concurrency(70)
    assert (capacity.concurrency, capacity.auto) == (70, False)
    capacity.set_concurrency("auto")
    assert (capacity.concurrency, capacity.auto) == (70, True)
    capacity.set_concurrency(5000)
    capacity.set_concurrency("auto")
    assert capacity.concurrency == AUTO_MAX


def test_only_what_units_would_help_is_short_of_them() -> None:
    world, pool = World(10), Pool(2)
    threads, loop = Made(world, pool=pool), Made(world, limit=4)
    threads.fill(10, 1)
    loop.fill(10, 1)
    world.run(until=0.5)
    assert holders(world) == [2, 4]
    assert not world.scheduler.is_limiting  # the one waits for its pool, the other for its own limit
    world.scheduler.set_concurrency(6)
    assert world.scheduler.room == 0
    assert not world.scheduler.is_limiting
    Made(world).fill(10, 1)
    world.run(until=0.7)
    assert world.scheduler.is_limiting
