"""One schedule over a server's clock that jumps: what fires twice, what is left out, and how long it is silent.

The leader here is a plain loop that does what `worqr.peer.leader.schedule_ticker` does: read, judge, fire, note. It runs over a
model of the registry and the queue in Python, and over the scripts, whose clock is moved as a bench moves it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.ops.driver import Desk
from tests.ops.schedules import fire_schedule
from worqr import ops
from worqr.command import Command
from worqr.cron import AHEAD_MS, Definition, Trigger, due_firings
from worqr.keys import QueueKeys
from worqr.ops import Tick
from worqr.testing.bench_run import bench_scripts

T = TypeVar("T")

BEGIN = 1_800_000_000_000
SECOND, MINUTE, HOUR, DAY = 1000, 60_000, 3_600_000, 86_400_000
MOST_LOOKS = 2000


class World(Protocol):
    """The registry and the queue of one schedule. Times are those of the server's clock."""

    def declare(self, now: int) -> None: ...
    def pause(self, now: int, *, paused: bool) -> None: ...
    def turn(self, now: int, trigger: Trigger, *, dies: bool) -> list[int]:
        """The leader looks once, and unless it dies before it has noted, notes: the nominal times that were enqueued."""
        ...

    def next_look(self, now: int) -> int | None:
        """When it is due next."""
        ...


class Model:
    """As the scripts do it."""

    def __init__(self) -> None:
        self.cursor = self.clock = 0
        self.check_at: int | None = None
        self.fence: int | None = None
        self.paused = False

    def note_clock(self, now: int) -> None:
        self.clock = max(self.clock, now)

    def declare(self, now: int) -> None:
        if not self.cursor:
            self.cursor = self.check_at = now
        self.note_clock(now)

    def pause(self, now: int, *, paused: bool) -> None:
        if paused:
            self.check_at = None
        elif self.paused:
            self.cursor = self.check_at = now
            self.note_clock(now)
        self.paused = paused

    def rewind(self, now: int) -> None:
        if self.cursor > now + AHEAD_MS:
            self.cursor = now
            self.check_at = None if self.paused else now
        self.clock = now

    def fire(self, nominal: int, now: int) -> bool:
        if nominal == self.fence or (self.fence is not None and nominal < self.fence <= now + AHEAD_MS):
            return False
        self.fence = nominal
        return True

    def turn(self, now: int, trigger: Trigger, *, dies: bool) -> list[int]:
        if self.clock > now + AHEAD_MS:
            self.rewind(now)
        self.note_clock(now)
        if self.check_at is None or self.check_at > now:
            return []
        decision = due_firings(trigger, self.cursor, now)
        fired = [nominal for nominal in decision.fire if self.fire(nominal, now)]
        if not dies:
            self.cursor, self.check_at = decision.cursor, decision.next
        return fired

    def next_look(self, now: int) -> int | None:
        return self.check_at


class Scripts:
    """The scripts themselves."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.registry = desk.g
        self.queue = QueueKeys(desk.prefix, "Q1")
        desk.wipe()
        for moved in bench_scripts().values():
            desk.client.script_load(moved.source)

    def call(self, call: Command[T], now: int) -> T:
        self.desk.client.set(f"{self.registry.base}:clock", f"0 {now}", px=60_000)
        moved = bench_scripts()[call.script.name]
        return self.desk.call(Command(moved, call.base, call.args, call.read, call.numbered))

    def declare(self, now: int) -> None:
        self.call(ops.declare_schedules(self.registry, [("s", b"x")], replace=True), now)

    def pause(self, now: int, *, paused: bool) -> None:
        self.call(ops.pause_schedule(self.registry, "s", paused=paused), now)

    def fire(self, nominal: int, now: int) -> bool:
        call = fire_schedule(self.queue, "s", nominal, judged_at=now, run_at=nominal, overlap="skip", task=b"")
        self.call(call, now)
        return self.desk.client.delete(self.queue.job("cron:s"), self.queue.base) > 0  # it runs at once

    def turn(self, now: int, trigger: Trigger, *, dies: bool) -> list[int]:
        due = self.call(ops.tick_schedules(self.registry), now)
        if due.clock_set_back:
            assert self.call(ops.rewind_schedules(self.registry), now)[0] == "0"
            due = self.call(ops.tick_schedules(self.registry), now)
        fired: list[int] = []
        for row in due.rows:
            decision = due_firings(trigger, row.last, now)
            fired += [nominal for nominal in decision.fire if self.fire(nominal, now)]
            if not dies:
                tick = Tick(row, decision.cursor, decision.next, decision.next)
                assert self.call(ops.tick_schedules(self.registry, [tick]), now).rows == []
        return fired

    def next_look(self, now: int) -> int | None:
        score = self.desk.client.zscore(self.registry.schedules_due, "s")
        return None if score is None else int(score)


Step = tuple[str, int]

some_time = st.one_of(st.integers(0, 3 * MINUTE), st.integers(0, 30 * MINUTE))
forward = st.sampled_from([SECOND, 11 * SECOND, 59 * SECOND, 61 * SECOND, HOUR, DAY, 2 * DAY, 40 * DAY])
steps_forward = st.one_of(
    st.tuples(st.just("pass"), some_time),
    st.tuples(st.just("jump"), forward),
    st.tuples(st.sampled_from(["die", "pause", "resume", "declare"]), st.just(0)),
)
steps = st.one_of(steps_forward, st.tuples(st.just("jump"), forward.map(lambda ms: -ms)))
periods = st.sampled_from([10 * SECOND, 47 * SECOND, MINUTE, 7 * MINUTE])


class Story:
    """What happened: the true time runs on, the server's clock is that and an offset."""

    def __init__(self, world: World, period: int) -> None:
        self.world = world
        self.trigger = Trigger(Definition(name="s", queue="Q1", task=b"", every_ms=period))
        self.time, self.offset = BEGIN, 0
        self.latest = BEGIN
        self.paused = self.dies = False
        self.fired: dict[int, list[int]] = {}
        self.turned_back = 0
        world.declare(self.now)

    @property
    def now(self) -> int:
        return self.time + self.offset

    def turn(self) -> None:
        if self.latest > self.now + AHEAD_MS:
            self.turned_back += 1
            self.latest = self.now
        self.latest = max(self.latest, self.now)
        found = self.world.turn(self.now, self.trigger, dies=self.dies)
        self.dies = False
        assert not (found and self.paused)
        for nominal in found:
            assert nominal <= self.now
            self.fired.setdefault(nominal, []).append(self.turned_back)

    def pass_by(self, ms: int) -> None:
        """Time passes; the leader looks whenever something is due, and every hour."""
        until = self.time + ms
        self.turn()
        for _ in range(MOST_LOOKS):
            following = self.world.next_look(self.now)
            wait = HOUR if following is None else min(HOUR, max(1, following - self.now))
            if self.time + wait > until:
                break
            self.time += wait
            self.turn()
        else:
            raise AssertionError("it looks again and again")
        self.time = until

    def step(self, what: str, ms: int) -> None:
        match what:
            case "pass":
                self.pass_by(ms)
            case "jump":
                self.offset += ms
                self.turn()
            case "die":
                self.dies = True
            case "declare":  # as it was: it goes on where it stood
                self.world.declare(self.now)
                self.latest = max(self.latest, self.now)
            case _:
                self.paused = what == "pause"
                self.world.pause(self.now, paused=self.paused)

    def tell(self, script: Sequence[Step]) -> None:
        for what, ms in script:
            self.step(what, ms)
        self.check_doubles()
        self.check_silence()

    def check_doubles(self) -> None:
        """A nominal time comes twice only if the clock was set back by more than a minute in between."""
        for times in self.fired.values():
            assert len(times) == len(set(times))

    def check_silence(self) -> None:
        """From a minute after the last change of the clock on, every nominal time is fired, or was fired before."""
        was_paused = self.paused
        if not was_paused:
            period = self.trigger.definition.every_ms
            begin = self.now + AHEAD_MS + 1
            self.pass_by(AHEAD_MS + 3 * period)
            expected = self.trigger.last_between(begin, self.now - 1, 100)
            assert [nominal for nominal in expected if nominal not in self.fired] == []
        else:
            before = dict(self.fired)
            self.pass_by(HOUR)
            assert self.fired == before
        self.check_doubles()


@given(period=periods, script=st.lists(steps, max_size=12))
@settings(max_examples=400, deadline=None)
def test_the_model_neither_doubles_nor_falls_silent(period: int, script: list[Step]) -> None:
    Story(Model(), period).tell(script)


@given(period=periods, script=st.lists(steps_forward, max_size=12))
@settings(max_examples=200, deadline=None)
def test_with_a_clock_that_only_goes_forward_the_model_fires_nothing_twice(period: int, script: list[Step]) -> None:
    story = Story(Model(), period)
    story.tell(script)
    assert {len(times) for times in story.fired.values()} <= {1}


@given(period=periods, script=st.lists(steps, max_size=8))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_scripts_do_as_the_model_does(desk: Desk, period: int, script: list[Step]) -> None:
    stories: list[Any] = []
    for world in (Model(), Scripts(desk)):
        story = Story(world, period)
        story.tell(script)
        stories.append((story.fired, story.world.next_look(story.now)))
    assert stories[0] == stories[1]
    desk.wipe()


def test_a_clock_that_was_a_day_ahead_for_a_moment(desk: Desk) -> None:
    for world in (Model(), Scripts(desk)):
        story = Story(world, MINUTE)
        story.tell([("pass", 5 * MINUTE), ("jump", DAY), ("pass", 4 * SECOND), ("jump", -DAY)])
    desk.wipe()
