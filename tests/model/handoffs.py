"""Who gets a task that comes with its wake-up: hand-offs, the ways in which one gets lost, and who runs it.

Two workers with room for one task each serve one queue; W0 has all faults, W1 none. An enqueue into the empty queue claims the
task for a worker that waits, and sends claim and task on that worker's channel. The worker may have no room by then, may wait for
the reply to a start, may leave, be frozen, or lose its channel. A message takes any time. The end of a run may take the worker
back among those that wait, if no task does.

Promised: a task is in exactly one place; a run begins only under a claim that the server has for this worker; when the mesh has
nothing left to do, no task waits while a live worker has room, and no claim is one that its worker does not know.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, NamedTuple

from tests.model.search import By, Model

ELSEWHERE = -1
"""What fills the room of a worker, if it is no claim of this queue."""


RESERVES_NOTHING = ("", "passing on", "passed on")
"""Calls, and replies, beside which a hand-off finds the room of the worker free."""


class Worker(NamedTuple):
    """One worker: what it does, and what it believes."""

    phase: str = "serving"
    """serving, draining, left or crashed."""
    busy: int = 0
    """The claim that it runs, `ELSEWHERE`, or 0."""
    wants: bool = True
    """Asks as soon as it has room; False: relies on being in `hungry`."""
    call: str = ""
    """The start under way, for one task or (passing on) for none, then its reply."""
    ending: int = 0
    """The claim that a finish under way ends, which takes the worker back."""
    ended: str = ""
    """Its reply, unread: rejoined or not."""
    relies: bool = False
    """It asks only if that reply says that it has not rejoined."""
    woken: bool = False
    kept: tuple[int, ...] = ()
    """Hand-offs that wait for the reply under way."""
    deferred: tuple[int, ...] = ()
    """Hand-offs that wait for a heartbeat."""
    returning: tuple[int, ...] = ()
    """Claims on their way back."""
    fresh: bool = True
    """Its last heartbeat is young enough: no leader can have given its claims away."""
    unsure: bool = False
    """Its claims are to be compared with those of the server."""
    listed: frozenset[int] | None = None
    """The claims that the server has listed; the reply is unread."""
    outdated: bool = False
    """The list was asked for before the last doubt."""
    seen: frozenset[int] = frozenset()
    """Claims that it did not know at the last comparison."""
    listening: bool = True
    """Its channel is confirmed. What arrives before is from an earlier subscription."""
    boundary: int = 0
    """Hand-offs up to this claim were taken or given back."""


class Handing(NamedTuple):
    """The queue, its claims, the messages on their way, and the two workers."""

    workers: tuple[Worker, Worker] = (Worker(), Worker())
    waiting: tuple[str, ...] = ()
    """The front is the left end."""
    claims: tuple[tuple[int, int, str], ...] = ()
    """Claim, worker, task."""
    last_claim: int = 0
    hungry: frozenset[int] = frozenset()
    messages: tuple[tuple[int, int], ...] = ()
    """Worker and claim, 0 for a mere wake-up; those of one worker arrive in this order."""
    admitted: frozenset[int] = frozenset({0, 1})
    finished: tuple[str, ...] = ()
    unfounded: str = ""
    enqueues: int = 2
    distractions: int = 0
    leaves: int = 0
    returns: int = 0
    crashes: int = 0
    freezes: int = 0
    losses: int = 0
    scanned: bool = False
    """The leader's scan finds tasks whose wake-up got lost; without faults, nothing may need it."""


class Handoffs(Model[Handing]):
    """`enqueue` with a hand-off, `start_tasks`, `finish_tasks`, `stop_tasks`, `stop_work`, `fail_worker`, `list_own_claims`; see
    the module.
    """

    moves: ClassVar[Mapping[str, By]] = {
        "enqueue": By.USER,
        "a handler returns": By.USER,
        "another queue fills the room": By.USER,
        "a worker begins to leave": By.USER,
        "stop_work": By.MESH,
        "a worker serves the queue again": By.USER,
        "a channel is confirmed": By.MESH,
        "a worker asks": By.MESH,
        "start_tasks": By.MESH,
        "finish_tasks": By.MESH,
        "a worker reads": By.MESH,
        "a wake-up arrives": By.MESH,
        "a hand-off arrives": By.MESH,
        "stop_tasks": By.MESH,
        "a heartbeat is answered": By.MESH,
        "list_own_claims": By.MESH,
        "a worker compares": By.MESH,
        "fail_worker": By.MESH,
        "the leader scans": By.MESH,
        "a worker crashes": By.FAULT,
        "a worker freezes": By.FAULT,
        "a channel is lost": By.FAULT,
    }
    mistakes: ClassVar[Mapping[str, int]] = {
        "a full worker swallows its hand-off": 6,
        "what waits for a reply is forgotten": 6,
        "what waits for a reply counts as unknown": 17,
        "a worker that took one does not ask again": 8,
        "a lost hand-off is not looked for": 6,
        "an older list settles a newer doubt": 10,
        "a hand-off from before the confirmation runs": 8,
        "a hand-off that was given back runs": 10,
        "a stale worker runs its hand-off": 6,
        "a worker leaves without its hand-offs": 6,
        "a finish rejoins although a task waits": 9,
        "a worker does not ask when its finish has not rejoined": 9,
        "the reply to a finish undoes a hand-off": 13,
    }
    least: ClassVar[int] = 100_000

    def starts(self) -> Iterator[Handing]:
        alone = Handing(workers=(Worker(), Worker(phase="left")), admitted=frozenset({0}), scanned=True)
        yield alone._replace(distractions=1, losses=1)
        yield alone._replace(workers=(Worker(unsure=True), Worker(phase="left")), losses=1)
        yield Handing(enqueues=1, leaves=1, returns=1, scanned=True)
        yield alone._replace(enqueues=1, freezes=1, losses=1)
        yield Handing(enqueues=1, distractions=1, losses=1, scanned=True)
        yield Handing(enqueues=1, leaves=1, losses=1, scanned=True)
        yield Handing(enqueues=1, distractions=1, freezes=1, scanned=True)
        yield Handing(crashes=1, scanned=True)
        yield Handing(enqueues=3, distractions=1)
        yield Handing(leaves=1)

    def steps(self, state: Handing) -> Iterator[tuple[str, str, Handing]]:
        if state.enqueues:
            task = f"T{state.enqueues}"
            yield "enqueue", task, self._enqueue(state._replace(enqueues=state.enqueues - 1), task)
        for index, worker in enumerate(state.workers):
            yield from self._worker_steps(state, index, worker)
            yield from self._faults(state, index, worker)
        for index in {worker for worker, _ in state.messages}:
            yield self._arrival(state, index)

    def _enqueue(self, state: Handing, task: str) -> Handing:
        """The script: a hand-off, if nothing waits; else, or if nobody received it, the list and a wake-up."""
        if not state.waiting and state.hungry:
            index = min(state.hungry)
            state = state._replace(hungry=state.hungry - {index})
            if reachable(state.workers[index]):
                claim = state.last_claim + 1
                state = state._replace(claims=(*state.claims, (claim, index, task)), last_claim=claim)
                return state._replace(messages=(*state.messages, (index, claim)))
        return wake(state._replace(waiting=(*state.waiting, task)))

    def _arrival(self, state: Handing, index: int) -> tuple[str, str, Handing]:
        message = next(each for each in state.messages if each[0] == index)
        at = state.messages.index(message)
        after = state._replace(messages=state.messages[:at] + state.messages[at + 1 :])
        worker, claim = state.workers[index], message[1]
        if worker.phase not in ("serving", "draining"):
            return "a wake-up arrives", f"at W{index}, which has left", after
        early = not worker.listening and self.mistake != "a hand-off from before the confirmation runs"
        if not claim or early:
            return "a wake-up arrives", f"at W{index}", put(after, index, worker._replace(woken=True))
        if claim <= worker.boundary and self.mistake != "a hand-off that was given back runs":
            after = put(after, index, reason(doubt(worker)))
        else:
            after = self._judge(put(after, index, worker._replace(boundary=claim)), index, claim)
        return "a hand-off arrives", f"claim {claim} at W{index}", after

    def _judge(self, state: Handing, index: int, claim: int) -> Handing:
        """What a worker does with a hand-off."""
        worker = reason(state.workers[index])
        if not worker.fresh and self.mistake != "a stale worker runs its hand-off":
            return put(state, index, worker._replace(deferred=(*worker.deferred, claim)))
        if worker.phase == "serving" and not worker.busy and worker.call in RESERVES_NOTHING:
            again = self.mistake != "a worker that took one does not ask again"
            return begin(put(state, index, worker._replace(wants=again)), index, claim)
        if worker.phase == "serving" and not worker.busy and worker.call:
            return put(state, index, worker._replace(kept=(*worker.kept, claim)))
        if self.mistake == "a full worker swallows its hand-off":
            return put(state, index, worker)
        return put(state, index, worker._replace(returning=(*worker.returning, claim)))

    def _worker_steps(self, state: Handing, index: int, worker: Worker) -> Iterator[tuple[str, str, Handing]]:
        if worker.phase == "left" and not index and state.returns:
            after = put(state, index, Worker(listening=False))._replace(returns=0, admitted=state.admitted | {index})
            yield "a worker serves the queue again", f"W{index}, under the same id", after
        if worker.phase not in ("serving", "draining"):
            return
        name, free = f"W{index}", worker.phase == "serving" and not worker.busy
        under_way = worker.ending and not worker.ended
        if under_way:
            yield "finish_tasks", *self._rejoin(state, index, worker)
        elif worker.ending:
            yield "a worker reads", f"{name}: {worker.ended}", self._read_end(state, index, worker)
        if worker.call in ("sent", "passing on"):  # it may overtake a finish
            yield "start_tasks", *self._start_tasks(state, index, worker)
        elif worker.call:
            yield "a worker reads", f"{name}: {worker.call}", self._read(state, index, worker)
        elif worker.woken and not free:
            after = put(state, index, reason(worker)._replace(woken=False, call="passing on"))
            yield "a worker asks", f"{name} has no room: it passes the wake-up on", after
        elif free and (worker.wants or worker.woken):
            after = put(state, index, worker._replace(wants=False, relies=False, woken=False, call="sent"))
            yield "a worker asks", f"{name} has room", after
        if worker.busy and worker.call in RESERVES_NOTHING and not under_way:
            after = put(finish(state, index, worker.busy), index, worker._replace(busy=0))
            yield "a handler returns", f"{name} has room again", after
        rejoins = worker.phase == "serving" and worker.wants and not (worker.call or worker.woken or under_way)
        if worker.busy > 0 and rejoins:
            after = put(state, index, worker._replace(busy=0, ending=worker.busy, ended="", wants=False, relies=True))
            yield "a handler returns", f"{name} rejoins those that wait with the end of its claim", after
        if free and not worker.call and not index and state.distractions:
            after = put(state, index, worker._replace(busy=ELSEWHERE))
            yield "another queue fills the room", f"of {name}", after._replace(distractions=state.distractions - 1)
        for claim in worker.returning:
            rest = tuple(each for each in worker.returning if each != claim)
            yield (
                "stop_tasks",
                f"{name} gives claim {claim} back",
                give_back(put(state, index, worker._replace(returning=rest)), {claim}, index),
            )
        if worker.phase == "serving" and not index and state.leaves:
            after = put(state, index, worker._replace(phase="draining"))
            yield "a worker begins to leave", name, after._replace(leaves=state.leaves - 1)
        if worker.phase == "draining" and not (worker.call or worker.woken or under_way):
            yield "stop_work", name, self._leave(state, index, "left")
        if state.scanned and state.waiting and free and not worker.call and not worker.wants:
            yield "the leader scans", f"and {name} asks", put(state, index, reason(worker))
        if not worker.listening:
            dropped = tuple(each for each in state.messages if each[0] != index)  # those from before it come before it
            confirmed = put(state, index, reason(doubt(worker))._replace(listening=True))
            if dropped == state.messages:
                yield "a channel is confirmed", name, confirmed
        if worker.listed is not None:
            yield "a worker compares", f"{name} reads {sorted(worker.listed)}", self._compare(state, index, worker)
        elif worker.unsure and not worker.call and index in state.admitted:
            held = frozenset(claim for claim, holder, _ in state.claims if holder == index)
            yield "list_own_claims", f"{name}: {sorted(held)}", put(state, index, worker._replace(listed=held))
        if not worker.fresh:
            yield "a heartbeat is answered", *self._beat(state, index, worker)

    def _start_tasks(self, state: Handing, index: int, worker: Worker) -> tuple[str, Handing]:
        name, wanted = f"W{index}", worker.call == "sent"
        if index not in state.admitted:
            return f"{name}: not serving", self._leave(state, index, "left")
        if wanted and not state.waiting:
            after = put(state, index, worker._replace(call="empty"))
            return f"{name}: empty", after._replace(hungry=state.hungry | {index})
        if not wanted:
            return f"{name}: passed on", wake(put(state, index, worker._replace(call="passed on")))
        claim = state.last_claim + 1
        claims = (*state.claims, (claim, index, state.waiting[0]))
        after = state._replace(waiting=state.waiting[1:], claims=claims, last_claim=claim)
        return f"{name}: claim {claim}", wake(put(after, index, worker._replace(call=str(claim))))

    def _rejoin(self, state: Handing, index: int, worker: Worker) -> tuple[str, Handing]:
        """A finish that takes the worker back among those that wait, if no task waits."""
        after = finish(state, index, worker.ending)
        none_waits = not state.waiting or self.mistake == "a finish rejoins although a task waits"
        if index in state.admitted and none_waits:
            after = put(after, index, worker._replace(ended="rejoined"))
            return f"W{index} ends claim {worker.ending}, and waits", after._replace(hungry=state.hungry | {index})
        return f"W{index} ends claim {worker.ending}", put(after, index, worker._replace(ended="not rejoined"))

    def _read_end(self, state: Handing, index: int, worker: Worker) -> Handing:
        """The reply to such a finish. It says nothing if there was another reason to ask since."""
        asks = worker.relies and self.mistake != "a worker does not ask when its finish has not rejoined"
        wants = worker.wants or (worker.ended == "not rejoined" and asks)
        if worker.ended == "rejoined" and self.mistake == "the reply to a finish undoes a hand-off":
            wants = False
        return put(state, index, worker._replace(ending=0, ended="", relies=False, wants=wants))

    def _read(self, state: Handing, index: int, worker: Worker) -> Handing:
        """The reply; then the hand-offs that have waited for it."""
        claim = int(worker.call) if worker.call.isdigit() else 0
        after = put(state, index, worker._replace(call="", kept=(), wants=worker.wants or bool(claim)))
        if claim and (worker.phase != "serving" or not worker.fresh):
            after = self._judge(after, index, claim)  # as a hand-off: it waits for a heartbeat, or goes back
        elif claim:
            after = begin(after, index, claim)
        for kept in worker.kept if self.mistake != "what waits for a reply is forgotten" else ():
            after = self._judge(after, index, kept)
        return after

    def _compare(self, state: Handing, index: int, worker: Worker) -> Handing:
        known = {worker.busy, worker.ending, *worker.deferred, *worker.returning}
        if self.mistake != "what waits for a reply counts as unknown":
            known |= set(worker.kept)
        strange = (worker.listed or frozenset()) - known
        strays = strange & worker.seen
        unsure = bool(strange) or (worker.outdated and self.mistake != "an older list settles a newer doubt")
        worker = worker._replace(listed=None, outdated=False, seen=strange - strays, unsure=unsure)
        if strays:
            boundary = max(worker.boundary, *strays)
            worker = worker._replace(returning=(*worker.returning, *sorted(strays)), boundary=boundary)
        return put(state, index, worker)

    def _beat(self, state: Handing, index: int, worker: Worker) -> tuple[str, Handing]:
        if index not in state.admitted:
            return f"W{index} hears that it is dead", put(state, index, Worker(phase="left"))
        after = put(state, index, worker._replace(fresh=True, deferred=()))
        for claim in worker.deferred:
            after = self._judge(after, index, claim)
        return f"W{index} lives", after

    def _leave(self, state: Handing, index: int, phase: str) -> Handing:
        """stop_work and fail_worker: the admission ends, and all claims go back."""
        known = {state.workers[index].busy}
        held = {claim for claim, holder, _ in state.claims if holder == index}
        if self.mistake == "a worker leaves without its hand-offs":
            held &= known
        if phase == "left":
            state = put(state, index, Worker(phase="left"))
        state = state._replace(hungry=state.hungry - {index}, admitted=state.admitted - {index})
        return give_back(state, held, index)

    def _faults(self, state: Handing, index: int, worker: Worker) -> Iterator[tuple[str, str, Handing]]:
        name = f"W{index}"
        if index:
            return
        if reachable(worker) and state.crashes:
            after = put(state, index, Worker(phase="crashed"))._replace(crashes=state.crashes - 1)
            after = after._replace(messages=tuple(each for each in state.messages if each[0] != index))
            yield "a worker crashes", name, after
        if reachable(worker) and worker.fresh and state.freezes:
            after = put(state, index, worker._replace(fresh=False))
            yield "a worker freezes", name, after._replace(freezes=state.freezes - 1)
        if index in state.admitted and (worker.phase == "crashed" or not worker.fresh):
            yield "fail_worker", name, self._leave(state, index, worker.phase)
        if reachable(worker) and state.losses and any(each[0] == index for each in state.messages):
            doubting = worker if self.mistake == "a lost hand-off is not looked for" else doubt(worker)
            after = put(state, index, reason(doubting))._replace(losses=state.losses - 1)
            after = after._replace(messages=tuple(each for each in state.messages if each[0] != index))
            yield "a channel is lost", f"of {name}", after

    def broken(self, state: Handing) -> str | None:
        places = [*state.waiting, *state.finished, *(task for _, _, task in state.claims)]
        twice = {task for task in places if places.count(task) > 1}
        return state.unfounded or (f"in several places: {sorted(twice)}" if twice else None)

    def restless(self, state: Handing) -> str | None:
        free = [f"W{n}" for n, worker in enumerate(state.workers) if worker.phase == "serving" and not worker.busy]
        if state.waiting and free:
            return f"a task waits though {' and '.join(free)} could take it"
        for claim, index, _ in state.claims:
            if state.workers[index].busy != claim:
                return f"claim {claim} of W{index} is one that does not run"
        return None


def reachable(worker: Worker) -> bool:
    """True if a PUBLISH to it has a receiver."""
    return worker.phase in ("serving", "draining") and worker.listening


def doubt(worker: Worker) -> Worker:
    """Its claims may differ from those of the server."""
    return worker._replace(unsure=True, outdated=worker.listed is not None)


def reason(worker: Worker) -> Worker:
    """It has a reason to ask that does not depend on what is under way."""
    return worker._replace(wants=True, relies=False)


def put(state: Handing, index: int, worker: Worker) -> Handing:
    """The state with one worker replaced."""
    one, two = state.workers
    return state._replace(workers=(worker, two) if index == 0 else (one, worker))


def begin(state: Handing, index: int, claim: int) -> Handing:
    """A run begins. It is unfounded without its claim."""
    if not any(each[0] == claim and each[1] == index for each in state.claims):
        state = state._replace(unfounded=f"W{index} runs claim {claim}, which it does not have")
    return put(state, index, state.workers[index]._replace(busy=claim))


def finish(state: Handing, index: int, claim: int) -> Handing:
    """finish_tasks ends a claim, if the worker still has it."""
    ended = [each for each in state.claims if each[:2] == (claim, index)]
    claims = tuple(each for each in state.claims if each not in ended)
    return state._replace(claims=claims, finished=tuple(sorted((*state.finished, *(task for *_, task in ended)))))


def give_back(state: Handing, claims: set[int], index: int) -> Handing:
    """Claims go to the front in their old order, and wake a worker."""
    back = sorted(each for each in state.claims if each[0] in claims and each[1] == index)
    kept = tuple(each for each in state.claims if each not in back)
    return wake(state._replace(claims=kept, waiting=(*(task for _, _, task in back), *state.waiting)))


def wake(state: Handing) -> Handing:
    """Wakes one waiting worker if a task waits; a PUBLISH without a receiver moves on to the next."""
    for index in sorted(state.hungry if state.waiting else ()):
        state = state._replace(hungry=state.hungry - {index})
        if reachable(state.workers[index]):
            return state._replace(messages=(*state.messages, (index, 0)))
    return state
