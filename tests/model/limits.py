"""What may start: a queue with a concurrency limit, a rate limit, and pauses that end by themselves. Workers have a place or two.

A wake-up is sent only if a task may start, and that is computed from facts each time: the claims that run, the starts in the
window, the pause. No flag says that the queue is full. If only time will make room, the script that would have sent a wake-up
tells the leader when (a hint), and the leader runs `promote_due` then.

Promised, without faults and without the scan that repairs lost messages: the limit is never exceeded; no wake-up is sent while
nothing may start; when the mesh rests, no task waits that may start while a worker has room. With a crash: the same after
`fail_worker` and one scan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, NamedTuple

from tests.model.search import By, Model


class Worker(NamedTuple):
    """One worker."""

    phase: str = "serving"
    """serving, left, crashed, or dead: its claims went back."""
    busy: int = 0
    """Claims that it holds."""
    places: int = 1
    wants: bool = True
    """Asks as soon as it has room; False: relies on being in `hungry`."""
    woken: bool = False
    """Has a wake-up that no request has used yet."""


class Limiting(NamedTuple):
    """The queue, its limits, and the messages on their way."""

    workers: tuple[Worker, ...]
    limit: int = 1
    """Claims that may run at once."""
    rate: int = 9
    """Starts that may be in the window."""
    waiting: int = 0
    hungry: frozenset[int] = frozenset()
    messages: frozenset[int] = frozenset()
    started: int = 0
    """Starts in the window."""
    paused: bool = False
    """By a rate-limited run: it ends by itself."""
    hint: bool = False
    """The leader knows when there may be room again."""
    promoting: bool = False
    """That moment has come: `promote_due` is under way."""
    loud: bool = False
    """A wake-up was sent while nothing could start."""
    enqueues: int = 0
    refusals: int = 0
    """How often a run may say that it is rate limited."""
    raises: int = 0
    """How often an operator may raise the limit by one."""
    leaves: int = 0
    crashes: int = 0

    @property
    def room(self) -> int:
        """How many tasks may start now."""
        running = sum(worker.busy for worker in self.workers)
        return 0 if self.paused else max(0, min(self.limit - running, self.rate - self.started))

    @property
    def waits_for_time(self) -> bool:
        """Only time will make room."""
        return self.paused or self.started >= self.rate


class Limits(Model[Limiting]):
    """`start_tasks`, the ends of claims, `promote_due` and `set_limits`, as far as limits go; see the module."""

    moves: ClassVar[Mapping[str, By]] = {
        "enqueue": By.USER,
        "a handler returns": By.USER,
        "a handler is rate limited": By.USER,
        "the limit is raised": By.USER,
        "a worker leaves": By.USER,
        "start_tasks": By.MESH,
        "a wake-up is passed on": By.MESH,
        "a wake-up arrives": By.MESH,
        "a start leaves the window": By.MESH,
        "the pause ends": By.MESH,
        "promote_due": By.MESH,
        "fail_worker": By.MESH,
        "the leader scans": By.MESH,
        "a worker crashes": By.FAULT,
    }
    mistakes: ClassVar[Mapping[str, int]] = {
        "the limit is not looked at": 6,
        "an end wakes nobody": 7,
        "an end wakes without looking": 7,
        "an enqueue wakes without looking": 7,
        "a limited worker is not hungry": 7,
        "a full window is not announced": 9,
        "a pause is not announced": 9,
        "promote_due wakes nobody": 9,
        "promote_due does not announce the next moment": 14,
        "a raised limit wakes nobody": 9,
        "a leaver takes its wake-up along": 9,
        "a start leaves room behind silently": 12,
    }
    least: ClassVar[int] = 5_000

    def starts(self) -> Iterator[Limiting]:
        two, three = (Worker(), Worker()), (Worker(), Worker(), Worker())
        wide = (Worker(places=2), Worker(places=2))
        yield Limiting(wide, enqueues=4)
        yield Limiting(wide, limit=3, enqueues=4)
        yield Limiting(wide, limit=2, rate=1, enqueues=3, leaves=1)
        yield Limiting(three, enqueues=4)
        yield Limiting(three, limit=2, enqueues=4)
        yield Limiting(three, enqueues=3, leaves=1)
        yield Limiting(three, enqueues=3, crashes=1)
        yield Limiting(two, limit=2, rate=1, enqueues=4)
        yield Limiting(two, limit=1, rate=2, enqueues=3, crashes=1)
        yield Limiting(three, limit=2, rate=2, enqueues=3, leaves=1)
        yield Limiting(two, limit=2, enqueues=3, refusals=2)
        yield Limiting(two, limit=1, rate=1, enqueues=3, refusals=1, leaves=1)
        yield Limiting(three, enqueues=3, raises=2)

    def steps(self, state: Limiting) -> Iterator[tuple[str, str, Limiting]]:
        if state.enqueues:
            after = state._replace(enqueues=state.enqueues - 1, waiting=state.waiting + 1)
            yield "enqueue", "one task", self._wake(after, blind=self.mistake == "an enqueue wakes without looking")
        if state.raises:
            after = state._replace(limit=state.limit + 1, raises=state.raises - 1)
            silent = self.mistake == "a raised limit wakes nobody"
            yield "the limit is raised", f"to {after.limit}", after if silent else self._wake(after)
        for index, worker in enumerate(state.workers):
            yield from self._worker_steps(state, index, worker)
        for index in state.messages:
            after = state._replace(messages=state.messages - {index})
            if after.workers[index].phase == "serving":
                after = put(after, index, after.workers[index]._replace(woken=True))
            yield "a wake-up arrives", f"at W{index}", after
        yield from self._time(state)
        if self._is_orphaned(state):
            wants = tuple(worker._replace(wants=True) for worker in state.workers)
            yield "the leader scans", "the workers ask", state._replace(workers=wants)

    def _time(self, state: Limiting) -> Iterator[tuple[str, str, Limiting]]:
        """A moment that a hint named: the leader runs `promote_due`."""
        due = {"hint": False, "promoting": state.promoting or state.hint}
        if state.started:
            yield "a start leaves the window", "", state._replace(started=state.started - 1, **due)
        if state.paused:
            yield "the pause ends", "", state._replace(paused=False, **due)
        if state.promoting:
            after = state._replace(promoting=False)
            if self.mistake != "promote_due wakes nobody":
                after = self._wake(after, silent=self.mistake == "promote_due does not announce the next moment")
            yield "promote_due", f"{after.waiting} waiting, room for {after.room}", after

    def _worker_steps(self, state: Limiting, index: int, worker: Worker) -> Iterator[tuple[str, str, Limiting]]:
        name = f"W{index}"
        if worker.phase == "crashed":
            after = put(state, index, Worker("dead"))._replace(hungry=state.hungry - {index})
            yield "fail_worker", name, self._wake(after._replace(waiting=state.waiting + worker.busy))
        if worker.phase != "serving":
            return
        free = worker.places - worker.busy
        if free and (worker.wants or worker.woken):
            yield "start_tasks", *self._start(state, index, worker)
        if not free and worker.woken:
            after = put(state, index, worker._replace(woken=False, wants=True))
            yield "a wake-up is passed on", f"by {name}", self._wake(after)
        if worker.busy:
            after = put(state, index, worker._replace(busy=worker.busy - 1))
            blind = self.mistake == "an end wakes without looking"
            ended = after if self.mistake == "an end wakes nobody" else self._wake(after, blind=blind)
            yield "a handler returns", name, ended
            if state.refusals:
                after = after._replace(waiting=state.waiting + 1, paused=True, refusals=state.refusals - 1)
                yield (
                    "a handler is rate limited",
                    name,
                    self._wake(after, silent=self.mistake == "a pause is not announced"),
                )
        if state.leaves:
            after = put(state, index, Worker("left"))._replace(hungry=state.hungry - {index}, leaves=state.leaves - 1)
            after = after._replace(waiting=state.waiting + worker.busy, messages=state.messages - {index})
            silent = self.mistake == "a leaver takes its wake-up along"
            yield "a worker leaves", name, after if silent else self._wake(after)
        if state.crashes:
            after = put(state, index, Worker("crashed", worker.busy))
            yield "a worker crashes", name, after._replace(messages=state.messages - {index}, crashes=state.crashes - 1)

    def _start(self, state: Limiting, index: int, worker: Worker) -> tuple[str, Limiting]:
        wanted = worker.places - worker.busy
        room = max(state.room, 1) if self.mistake == "the limit is not looked at" and not state.paused else state.room
        taken = min(wanted, state.waiting, room)
        left, wants = state.waiting - taken, taken == wanted
        after = put(state, index, worker._replace(busy=worker.busy + taken, wants=wants, woken=False))
        after = after._replace(waiting=left, started=state.started + taken * (state.rate < 9))
        limited = not wants and left > 0
        said = f"W{index} takes {taken}, {'limited' if limited else 'the rest is left' if left else 'nothing left'}"
        hungry = not wants and not (limited and self.mistake == "a limited worker is not hungry")
        after = after._replace(hungry=state.hungry | {index} if hungry else state.hungry - {index})
        silent = self.mistake in {"a full window is not announced", "a pause is not announced"}
        if limited and after.waits_for_time and not silent:
            after = after._replace(hint=True)
        if not wants or self.mistake == "a start leaves room behind silently":
            return said, after
        return said, self._wake(after)

    def _wake(self, state: Limiting, *, blind: bool = False, silent: bool = False) -> Limiting:
        """The shared piece: a wake-up if a task waits that may start; a hint if only time makes room."""
        if not state.waiting or not state.hungry:
            return state
        if not state.room and not blind:
            if state.waits_for_time and not silent and self.mistake != "a full window is not announced":
                return state._replace(hint=True)
            return state
        for index in sorted(state.hungry):
            state = state._replace(hungry=state.hungry - {index})
            if state.workers[index].phase == "serving":
                return state._replace(messages=state.messages | {index}, loud=not state.room)
        return state

    def _is_orphaned(self, state: Limiting) -> bool:
        """A wake-up died with its worker: the scan finds the room."""
        dead = any(worker.phase == "dead" for worker in state.workers)
        awake = any(has_place(worker) and (worker.wants or worker.woken) for worker in state.workers)
        return dead and state.waiting > 0 and state.room > 0 and not awake and not state.messages

    def broken(self, state: Limiting) -> str | None:
        if sum(worker.busy for worker in state.workers) > state.limit:
            return "more run than the limit allows"
        if state.started > state.rate:
            return "more started than the rate allows"
        return "a wake-up was sent although nothing could start" if state.loud else None

    def restless(self, state: Limiting) -> str | None:
        free = [f"W{index}" for index, worker in enumerate(state.workers) if has_place(worker)]
        if state.waiting and state.room and free:
            return f"a task waits that may start, and {' and '.join(free)} could run it"
        return None


def has_place(worker: Worker) -> bool:
    """True if it may claim one more task."""
    return worker.phase == "serving" and worker.busy < worker.places


def put(state: Limiting, index: int, worker: Worker) -> Limiting:
    """The state with one worker replaced."""
    return state._replace(workers=(*state.workers[:index], worker, *state.workers[index + 1 :]))
