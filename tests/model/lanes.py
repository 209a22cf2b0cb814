"""Whose turn it is: lanes of a queue with limits of their own, of which only those in the ring are looked at.

A lane with tasks is in the ring if one of them may start, else it is held, and no start looks at it. So all that makes room
has to file it again: the end of a claim, the end of a pause, a change of its limit. A lane that is filed too seldom sleeps for
ever; one that is filed too generously wakes workers in vain.

Promised: the limit of a lane is never exceeded; no wake-up is sent
while nothing may start; when the mesh rests, no task waits that may start while a worker has room, whatever other lanes do. With
a crash: the same after `fail_worker`. (`limits` has workers with several places, and the scan that repairs a lost wake-up.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import ClassVar, NamedTuple

from tests.model.search import By, Model


class Place(Enum):
    """Where a lane is filed."""

    NOWHERE = 0
    RING = 1
    HELD = 2


class Pause(Enum):
    """The pause of a lane, which ends by itself."""

    NONE = 0
    RUNS = 1
    OVER = 2
    """Its moment has come, and nobody has filed the lane since."""


class Lane(NamedTuple):
    """One lane. A lane without a claim and without a task has nothing in the server but its pause."""

    limit: int = 1
    waiting: int = 0
    running: int = 0
    place: Place = Place.NOWHERE
    pause: Pause = Pause.NONE

    @property
    def may_start(self) -> bool:
        """A task of it could be claimed now."""
        return self.waiting > 0 and self.running < self.limit and self.pause is not Pause.RUNS


class Worker(NamedTuple):
    """A worker with one place."""

    phase: str = "serving"
    """serving, left, crashed, or dead: its claim went back."""
    lane: int | None = None
    """The lane of its claim."""
    wants: bool = True
    woken: bool = False

    @property
    def is_free(self) -> bool:
        """It may claim a task."""
        return self.phase == "serving" and self.lane is None


class Turns(NamedTuple):
    """The lanes, the workers, and the messages on their way."""

    workers: tuple[Worker, ...]
    lanes: tuple[Lane, ...]
    hungry: frozenset[int] = frozenset()
    messages: frozenset[int] = frozenset()
    hint: bool = False
    """The leader knows when a pause ends."""
    promoting: bool = False
    loud: bool = False
    """A wake-up was sent while nothing could start."""
    enqueues: int = 0
    refusals: int = 0
    stops: int = 0
    raises: int = 0
    leaves: int = 0
    crashes: int = 0

    @property
    def ring(self) -> list[int]:
        """The lanes that a start looks at."""
        return [index for index, lane in enumerate(self.lanes) if lane.place is Place.RING]

    @property
    def may_start(self) -> bool:
        """Some task could be claimed now."""
        return any(lane.may_start for lane in self.lanes)


class Lanes(Model[Turns]):
    """`start_tasks`, `place`, the ends of claims and `promote_due`, as far as lanes go; see the module."""

    moves: ClassVar[Mapping[str, By]] = {
        "enqueue": By.USER,
        "a handler returns": By.USER,
        "a claim is given back": By.USER,
        "a handler is rate limited": By.USER,
        "the limit is raised": By.USER,
        "a worker leaves": By.USER,
        "start_tasks": By.MESH,
        "a wake-up arrives": By.MESH,
        "a pause ends": By.MESH,
        "promote_due": By.MESH,
        "fail_worker": By.MESH,
        "a worker crashes": By.FAULT,
    }
    mistakes: ClassVar[Mapping[str, int]] = {
        "a full lane stays in the ring": 7,
        "an end does not file its lane": 7,
        "a task that comes back files its lane before it frees the place": 8,
        "a push into a held lane wakes": 7,
        "a lane that enters the ring wakes nobody": 7,
        "a pause is not announced": 7,
        "promote_due files no lane": 8,
        "a lane that opens wakes nobody": 9,
        "a paused lane is filed as if it were open": 7,
        "a raised limit does not file the lane": 7,
        "a start leaves a lane in the ring behind silently": 12,
        "a dead worker's lane is not filed": 9,
    }
    least: ClassVar[int] = 5_000

    def starts(self) -> Iterator[Turns]:
        two, three = (Worker(), Worker()), (Worker(), Worker(), Worker())
        both, one = (Lane(), Lane()), (Lane(),)
        yield Turns(three, both, enqueues=4)
        yield Turns(three, (Lane(2), Lane()), enqueues=4)
        yield Turns(two, both, enqueues=3, stops=2)
        yield Turns(two, both, enqueues=3, refusals=1)
        yield Turns(two, one, enqueues=3, refusals=2)
        yield Turns(two, (Lane(2),), enqueues=4, refusals=2)
        yield Turns(three, one, enqueues=3, raises=2)
        yield Turns(three, both, enqueues=3, leaves=1)
        yield Turns(three, both, enqueues=3, crashes=1)
        yield Turns(two, (Lane(), Lane(), Lane()), enqueues=3, stops=1)

    def steps(self, state: Turns) -> Iterator[tuple[str, str, Turns]]:
        for index, lane in enumerate(state.lanes):
            if state.enqueues:
                pushed = self._push(state._replace(enqueues=state.enqueues - 1), index)
                loud = self.mistake == "a push into a held lane wakes"
                yield "enqueue", f"into L{index}", self._wake(pushed) if loud or index in pushed.ring else pushed
            if state.raises:
                after = put_lane(state._replace(raises=state.raises - 1), index, lane._replace(limit=lane.limit + 1))
                if self.mistake != "a raised limit does not file the lane":
                    after = self._filed(after, index)
                yield "the limit is raised", f"of L{index}", after
            if lane.pause is Pause.RUNS:
                over = put_lane(state, index, lane._replace(pause=Pause.OVER))
                yield "a pause ends", f"of L{index}", over._replace(hint=False, promoting=state.promoting or state.hint)
        for index, worker in enumerate(state.workers):
            yield from self._worker_steps(state, index, worker)
        for index in state.messages:
            after = state._replace(messages=state.messages - {index})
            if after.workers[index].phase == "serving":
                after = put(after, index, after.workers[index]._replace(woken=True))
            yield "a wake-up arrives", f"at W{index}", after
        if state.promoting:
            yield "promote_due", "", self._promote(state)

    def _promote(self, state: Turns) -> Turns:
        after = state._replace(promoting=False)
        if self.mistake == "promote_due files no lane":
            return after
        for index, lane in enumerate(after.lanes):
            if lane.pause is Pause.OVER:
                after = put_lane(after, index, lane._replace(pause=Pause.NONE))
                after = self._filed(after, index, silent=self.mistake == "a lane that opens wakes nobody")
        return after._replace(hint=any(lane.pause is Pause.RUNS for lane in after.lanes))

    def _worker_steps(self, state: Turns, index: int, worker: Worker) -> Iterator[tuple[str, str, Turns]]:
        name, lane = f"W{index}", worker.lane
        if worker.phase == "crashed":
            after = put(state, index, Worker("dead"))._replace(hungry=state.hungry - {index})
            if lane is not None:
                after = self._come_back(after, lane, files=self.mistake != "a dead worker's lane is not filed")
            yield "fail_worker", name, self._wake(after)
        if worker.phase != "serving":
            return
        if lane is None and (worker.wants or worker.woken):
            yield from self._start(state, index)
        if lane is not None:
            free = put(state, index, worker._replace(lane=None, wants=True))
            yield "a handler returns", name, self._end(free, lane)
            if state.stops:
                back = self._come_back(free._replace(stops=state.stops - 1), lane)
                yield "a claim is given back", name, self._wake(back)
            if state.refusals:
                paused = put_lane(free, lane, free.lanes[lane]._replace(pause=Pause.RUNS))
                paused = paused._replace(refusals=state.refusals - 1, hint=self.mistake != "a pause is not announced")
                yield "a handler is rate limited", name, self._wake(self._come_back(paused, lane))
        if state.leaves:
            after = put(state, index, Worker("left"))._replace(
                hungry=state.hungry - {index}, messages=state.messages - {index}, leaves=state.leaves - 1
            )
            yield "a worker leaves", name, self._wake(after if lane is None else self._come_back(after, lane))
        if state.crashes:
            after = put(state, index, Worker("crashed", lane))
            yield "a worker crashes", name, after._replace(messages=state.messages - {index}, crashes=state.crashes - 1)

    def _start(self, state: Turns, index: int) -> Iterator[tuple[str, str, Turns]]:
        """Any lane of the ring may have its turn; without one the worker waits to be woken."""
        if not state.ring:
            after = put(state, index, Worker(wants=False))._replace(hungry=state.hungry | {index})
            yield "start_tasks", f"W{index} finds nothing", after
        for lane_index in state.ring:
            lane = state.lanes[lane_index]
            taken = lane._replace(waiting=lane.waiting - 1, running=lane.running + 1)
            after = put(state, index, Worker(lane=lane_index, wants=False))._replace(hungry=state.hungry - {index})
            after = self._filed(put_lane(after, lane_index, taken), lane_index, silent=True)
            if self.mistake != "a start leaves a lane in the ring behind silently":
                after = self._wake(after)
            yield "start_tasks", f"W{index} takes one of L{lane_index}", after

    def _push(self, state: Turns, index: int) -> Turns:
        lane = state.lanes[index]
        return self._filed(put_lane(state, index, lane._replace(waiting=lane.waiting + 1)), index, silent=True)

    def _free(self, state: Turns, index: int) -> Turns:
        lane = state.lanes[index]
        return put_lane(state, index, lane._replace(running=lane.running - 1))

    def _end(self, state: Turns, index: int) -> Turns:
        freed = self._free(state, index)
        if self.mistake == "an end does not file its lane":
            return self._wake(freed)
        return self._filed(freed, index)

    def _come_back(self, state: Turns, index: int, *, files: bool = True) -> Turns:
        """The claim ends and its task waits again: it is put into its lane first, and then the place is free."""
        state = self._free(self._push(state, index), index)
        if not files or self.mistake == "a task that comes back files its lane before it frees the place":
            return state
        return self._filed(state, index, silent=True)

    def _filed(self, state: Turns, index: int, *, silent: bool = False) -> Turns:
        """The lane where it belongs; a wake-up if it is in the ring now."""
        lane = state.lanes[index]
        may = lane.may_start
        if self.mistake == "a full lane stays in the ring":
            may = lane.waiting > 0 and (may or lane.place is Place.RING)
        if self.mistake == "a paused lane is filed as if it were open":
            may = lane.waiting > 0 and lane.running < lane.limit
        place = Place.RING if may else Place.HELD if lane.waiting else Place.NOWHERE
        after = put_lane(state, index, lane._replace(place=place))
        if silent or place is not Place.RING or self.mistake == "a lane that enters the ring wakes nobody":
            return after
        return self._wake(after)

    def _wake(self, state: Turns) -> Turns:
        """The shared piece: a wake-up if a lane is in the ring."""
        blind = self.mistake == "a push into a held lane wakes" and any(lane.waiting for lane in state.lanes)
        if not state.ring and not blind:
            return state
        for index in sorted(state.hungry):
            state = state._replace(hungry=state.hungry - {index})
            if state.workers[index].phase == "serving":
                return state._replace(messages=state.messages | {index}, loud=not state.may_start)
        return state

    def broken(self, state: Turns) -> str | None:
        if any(lane.running > lane.limit for lane in state.lanes):
            return "more run in a lane than its limit allows"
        return "a wake-up was sent although nothing could start" if state.loud else None

    def restless(self, state: Turns) -> str | None:
        free = [f"W{index}" for index, worker in enumerate(state.workers) if worker.is_free]
        if free and state.may_start:
            return f"a task waits that may start, and {' and '.join(free)} could run it"
        return None


def put(state: Turns, index: int, worker: Worker) -> Turns:
    """The state with one worker replaced."""
    return state._replace(workers=(*state.workers[:index], worker, *state.workers[index + 1 :]))


def put_lane(state: Turns, index: int, lane: Lane) -> Turns:
    """The state with one lane replaced."""
    return state._replace(lanes=(*state.lanes[:index], lane, *state.lanes[index + 1 :]))
