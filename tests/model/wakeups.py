"""Who wakes whom: hungry workers, directed wake-ups, and what repairs a wake-up that got lost.

Two workers with room for one task each serve one queue; another queue can fill their room. A start and its reply are
two steps, so a wake-up can overtake the reply. A foreign producer pushes first and publishes afterwards. The scan
lists a bounded number of waiting queues: it must come round to each of them.

Promised: when the mesh has nothing left to do, no task waits while a live worker has room. `Wakeups` says so with
lost messages and a crash, repaired by scan and keepalive; `Tokens` says so without faults and without any repair:
there a task that waits is one that costs up to 5 s on an ordinary day.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, NamedTuple

from tests.model.search import By, Model

ORDINARY_MOVES = {
    "enqueue": By.USER,
    "a foreign producer pushes": By.USER,
    "a foreign producer publishes": By.MESH,
    "pause": By.USER,
    "resume": By.USER,
    "a handler returns": By.USER,
    "another queue fills the room": By.USER,
    "a worker begins to leave": By.USER,
    "stop_work": By.MESH,
    "a worker asks": By.MESH,
    "start_tasks": By.MESH,
    "a worker reads": By.MESH,
    "a wake-up arrives": By.MESH,
}
LEAVING_AND_PAUSING = ("a worker begins to leave", "stop_work", "pause", "resume")
"""Left to `Tokens`, to keep the model with faults small."""


class Worker(NamedTuple):
    """One worker: what it does, and what it believes."""

    phase: str = "serving"
    """serving, draining, left or crashed."""
    busy: str = ""
    """What occupies its capacity: a task of this queue, of another queue, or nothing."""
    wants: bool = True
    """Must claim as soon as it has room; False: relies on being in `hungry`."""
    call: str = ""
    """The start on its way: sent or passing on, then its reply."""
    woken: bool = False
    """Has a wake-up in its hands, until it sent the start that uses it or passes it on."""


class Waking(NamedTuple):
    """The queue, its waiting workers, the messages on their way."""

    workers: tuple[Worker, Worker] = (Worker(), Worker())
    waiting: int = 0
    hungry: frozenset[int] = frozenset()
    messages: frozenset[int] = frozenset()
    unpublished: bool = False
    paused: bool = False
    listed: bool = False
    enqueues: int = 1
    foreign: int = 0
    pauses: int = 0
    distractions: int = 0
    leaves: int = 0
    losses: int = 0
    crashes: int = 0


class Wakeups(Model[Waking]):
    """Directed wake-ups with faults, repaired by scan and keepalive; see the module."""

    moves: ClassVar[Mapping[str, By]] = {
        **{name: by for name, by in ORDINARY_MOVES.items() if name not in LEAVING_AND_PAUSING},
        "the leader scans": By.MESH,
        "a keepalive answers waiting": By.MESH,
        "fail_worker": By.MESH,
        "a wake-up is lost": By.FAULT,
        "a worker crashes": By.FAULT,
    }
    mistakes: ClassVar[Mapping[str, int]] = {
        "keepalive does not answer waiting": 7,
        "the scan lists the same queues always": 6,
    }
    least: ClassVar[int] = 20_000
    repaired: ClassVar[bool] = True

    def starts(self) -> Iterator[Waking]:
        yield Waking(enqueues=2, crashes=1)
        yield Waking(crashes=1, losses=1)
        yield Waking(distractions=1, losses=1)
        yield Waking(enqueues=0, foreign=1, distractions=1, losses=1)

    def steps(self, state: Waking) -> Iterator[tuple[str, str, Waking]]:
        yield from self._user_steps(state)
        if state.unpublished:
            yield "a foreign producer publishes", "to all", wake_all(state._replace(unpublished=False))
        for index, worker in enumerate(state.workers):
            yield from self._worker_steps(state, index, worker)
        for index in state.messages:
            after = state._replace(messages=state.messages - {index})
            yield "a wake-up arrives", f"at W{index}", self._wake_up(after, index)
            if state.losses:
                yield "a wake-up is lost", f"for W{index}", after._replace(losses=state.losses - 1)
        if self.repaired:
            yield from self._repairs(state)

    def _user_steps(self, state: Waking) -> Iterator[tuple[str, str, Waking]]:
        if state.enqueues:
            after = state._replace(enqueues=state.enqueues - 1, waiting=state.waiting + 1)
            yield "enqueue", "one task", wake(after)
        if state.foreign:
            after = state._replace(foreign=state.foreign - 1, waiting=state.waiting + 1, unpublished=True)
            yield "a foreign producer pushes", "one task", after
        if state.pauses and not state.paused:
            yield "pause", "", state._replace(paused=True, pauses=state.pauses - 1)
        if state.paused:
            yield "resume", "and publishes to all", wake_all(state._replace(paused=False))

    def _worker_steps(self, state: Waking, index: int, worker: Worker) -> Iterator[tuple[str, str, Waking]]:
        if worker.phase not in ("serving", "draining"):
            return
        name = f"W{index}"
        if worker.call in ("sent", "passing on"):
            yield "start_tasks", *self._start_tasks(state, index, worker)
        elif worker.call:
            late = self.mistake == "hungry in a second step" and worker.call == "empty"
            after = state._replace(hungry=state.hungry | {index}) if late else state
            yield "a worker reads", f"{name}: {worker.call}", put(after, index, self._read(worker))
        elif worker.woken and not has_room(worker):
            after = put(state, index, worker._replace(woken=False, wants=True, call="passing on"))
            yield "a worker asks", f"{name} has no room: it passes the wake-up on", after
        elif has_room(worker) and (worker.wants or worker.woken):
            after = put(state, index, worker._replace(wants=False, woken=False, call="sent"))
            yield "a worker asks", f"{name} has room", after
        if worker.busy and worker.call in ("", "passing on", "passed on"):
            after = put(state, index, worker._replace(busy=""))
            yield "a handler returns", f"{name} has room again", after
        if has_room(worker) and not worker.call and state.distractions:
            after = put(state, index, worker._replace(busy="elsewhere"))
            yield "another queue fills the room", f"of {name}", after._replace(distractions=state.distractions - 1)
        yield from self._leaving(state, index, worker)

    def _leaving(self, state: Waking, index: int, worker: Worker) -> Iterator[tuple[str, str, Waking]]:
        name = f"W{index}"
        if worker.phase == "serving" and state.leaves:
            after = put(state, index, worker._replace(phase="draining"))
            yield "a worker begins to leave", name, after._replace(leaves=state.leaves - 1)
        if worker.phase == "draining" and not worker.call and not worker.woken:
            after = put(state, index, Worker(phase="left"))
            given_back = worker.busy == "a task"
            after = after._replace(hungry=after.hungry - {index}, messages=after.messages - {index})
            after = after._replace(waiting=after.waiting + given_back)
            after = after if self._stop_work_is_silent(given_back) else wake(after)
            yield "stop_work", f"{name} leaves, {'one task' if given_back else 'nothing'} given back", after
        if state.crashes:
            after = put(state, index, worker._replace(phase="crashed", call="", woken=False, wants=False))
            after = after._replace(messages=after.messages - {index}, crashes=state.crashes - 1)
            yield "a worker crashes", name, after

    def _stop_work_is_silent(self, given_back: bool) -> bool:
        if given_back:
            return self.mistake == "what is given back wakes nobody"
        return self.mistake == "a leaver takes its wake-up along"

    def _start_tasks(self, state: Waking, index: int, worker: Worker) -> tuple[str, Waking]:
        """The script, for one task or (a wake-up passed on) for none."""
        name, wanted = f"W{index}", worker.call == "sent"
        if state.paused:
            word = "paused" if wanted else "passed on"
            return f"{name}: paused", put(state, index, worker._replace(call=word))
        if wanted and not state.waiting:
            hungry = state.hungry if self.mistake == "hungry in a second step" else state.hungry | {index}
            return f"{name}: empty", put(state._replace(hungry=hungry), index, worker._replace(call="empty"))
        taken = 1 if wanted else 0
        busy = "a task" if taken else worker.busy
        after = put(state, index, worker._replace(call="taken" if taken else "passed on", busy=busy))
        after = after._replace(waiting=state.waiting - taken)
        if self.mistake != "a start leaves tasks behind silently":
            after = wake(after)
        return f"{name}: takes {taken}, leaves {after.waiting}", after

    def _read(self, worker: Worker) -> Worker:
        """The reply; a full one: it claims again when it has room."""
        forgets = self.mistake == "a wake-up during a start is forgotten"
        wants = worker.call == "taken" or worker.wants
        return worker._replace(call="", wants=wants, woken=worker.woken and not forgets)

    def _wake_up(self, state: Waking, index: int) -> Waking:
        worker = state.workers[index]
        if not reachable(worker):
            return state
        swallows = self.mistake == "a full worker swallows its wake-up" and not has_room(worker)
        believes = self.mistake == "a wake-up is used up when it is heard" and not worker.call
        if swallows or believes:
            return put(state, index, worker._replace(wants=True))
        return put(state, index, worker._replace(woken=True))

    def _repairs(self, state: Waking) -> Iterator[tuple[str, str, Waking]]:
        ours = state.waiting > 0 and not state.paused
        if self.mistake == "the scan lists the same queues always":
            ours = False
        yield "the leader scans", f"{'lists' if ours else 'does not list'} the queue", state._replace(listed=ours)
        if state.listed and self.mistake != "keepalive does not answer waiting":
            for index, worker in enumerate(state.workers):
                if has_room(worker) and not worker.call:
                    after = put(state, index, worker._replace(wants=True))
                    yield "a keepalive answers waiting", f"to W{index}", after
        for index, worker in enumerate(state.workers):
            if worker.phase == "crashed":
                given_back = worker.busy == "a task"
                after = put(state, index, Worker(phase="left"))
                after = after._replace(waiting=after.waiting + given_back, hungry=after.hungry - {index})
                yield "fail_worker", f"W{index}, {'one task' if given_back else 'nothing'} given back", wake(after)

    def broken(self, state: Waking) -> str | None:
        return None

    def restless(self, state: Waking) -> str | None:
        free = [f"W{index}" for index, worker in enumerate(state.workers) if has_room(worker)]
        if state.waiting and not state.paused and free:
            return f"a task waits though {' and '.join(free)} could take it"
        if any(not reachable(state.workers[index]) for index in state.hungry):
            return "a worker that is gone is still hungry"
        return None


class Tokens(Wakeups):
    """Directed wake-ups without faults and without repair: a wake-up is a token, and no token gets lost."""

    moves: ClassVar[Mapping[str, By]] = ORDINARY_MOVES
    mistakes: ClassVar[Mapping[str, int]] = {
        "hungry in a second step": 5,
        "a start leaves tasks behind silently": 12,
        "a wake-up during a start is forgotten": 6,
        "a full worker swallows its wake-up": 9,
        "a wake-up is used up when it is heard": 9,
        "a leaver takes its wake-up along": 9,
        "what is given back wakes nobody": 9,
    }
    least: ClassVar[int] = 15_000
    repaired: ClassVar[bool] = False

    def starts(self) -> Iterator[Waking]:
        yield Waking(enqueues=2, distractions=1)
        yield Waking(enqueues=2, leaves=1)
        yield Waking(foreign=1, distractions=1)
        yield Waking(distractions=1, leaves=1)
        yield Waking(enqueues=0, foreign=1, pauses=1)
        yield Waking(enqueues=2, pauses=1)


def reachable(worker: Worker) -> bool:
    """True if a PUBLISH to it has a receiver."""
    return worker.phase in ("serving", "draining")


def has_room(worker: Worker) -> bool:
    """True if it may claim."""
    return worker.phase == "serving" and not worker.busy


def put(state: Waking, index: int, worker: Worker) -> Waking:
    """The state with one worker replaced."""
    one, two = state.workers
    return state._replace(workers=(worker, two) if index == 0 else (one, worker))


def wake_all(state: Waking) -> Waking:
    """A message on the queue's own channel, which every worker receives; no worker leaves `hungry`."""
    everybody = frozenset(index for index, worker in enumerate(state.workers) if reachable(worker))
    return state._replace(messages=state.messages | everybody)


def wake(state: Waking) -> Waking:
    """The shared piece: pops one waiting worker if a task waits; a PUBLISH without a receiver moves on to the next."""
    if not state.waiting or state.paused:
        return state
    for index in sorted(state.hungry):
        state = state._replace(hungry=state.hungry - {index})
        if reachable(state.workers[index]):
            return state._replace(messages=state.messages | {index})
    return state
