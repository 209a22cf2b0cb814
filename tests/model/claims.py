"""Start, settle and recover: worker A with every fault, worker B without, two tasks, one queue.

A sends one start and one settle at a time. Their replies can get lost with the connection; then both are sent again, while
requests that the server had not read may still run, late. A can crash, or fall silent: it is alive, sends no heartbeat, is
condemned and recovered, and notices only later. The recovery gives back one claim per call.

Promised: a task is in exactly one place; a claim is in the fence or about to be recovered; no worker holds a claim without
knowing it; a task whose reply was `ok` or `mine` is finished.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, NamedTuple

from tests.model.search import By, Model

TASKS = ("T1", "T2")
A_STARTS = 2
B_STARTS = 2


class Claim(NamedTuple):
    """One worker's hold on one task."""

    id: int
    worker: str
    task: str


class Call(NamedTuple):
    """A request of A's; `reply` is None until the server ran it."""

    verb: str
    number: int = 0
    claim: Claim | None = None
    reply: tuple[str, Claim | None] | None = None


class Member(NamedTuple):
    """A worker's line in the fence: number and claim of its last start request."""

    worker: str
    number: int = 0
    answer: Claim | None = None


class Claiming(NamedTuple):
    """The queue, its fence, and what A believes."""

    queue: tuple[str, ...] = TASKS[::-1]
    """The front is the right end."""
    claims: frozenset[Claim] = frozenset()
    last_claim: int = 0
    fence: frozenset[Member] = frozenset({Member("A"), Member("B")})
    a_is_in: str = "Workers"
    swept: bool = False
    plan: frozenset[Claim] | None = None
    finished: tuple[str, ...] = ()
    told: frozenset[str] = frozenset()
    a: str = "up"
    beats: bool = True
    number: int = 0
    starting: Call | None = None
    settling: Call | None = None
    holds: frozenset[Claim] = frozenset()
    late: tuple[Call, ...] = ()
    b_starts: int = B_STARTS
    losses: int = 1
    deaths: int = 1

    def member(self, worker: str) -> Member | None:
        """The worker's line in the fence."""
        return next((member for member in self.fence if member.worker == worker), None)


class Claims(Model[Claiming]):
    """`start_tasks`, `finish_tasks`, `stop_tasks`, `condemn_worker`, `fail_worker`; see the module."""

    moves: ClassVar[Mapping[str, By]] = {
        "A asks for a task": By.MESH,
        "A's handler returns": By.USER,
        "A stops a task": By.USER,
        "the server runs": By.MESH,
        "A reads": By.MESH,
        "A hears that it is dead": By.MESH,
        "B starts": By.MESH,
        "B finishes": By.USER,
        "condemn_worker": By.MESH,
        "fail_worker": By.MESH,
        "forget_worker": By.MESH,
        "the connection is lost": By.FAULT,
        "a late copy runs": By.FAULT,
        "A crashes": By.FAULT,
        "A falls silent": By.FAULT,
    }
    mistakes: ClassVar[Mapping[str, int]] = {
        "a resent start takes new tasks": 5,
        "a late start is not refused": 10,
        "a start does not ask the fence": 5,
        "a finish is not fenced": 8,
        "a claim that is gone counts as mine": 9,
        "a sweep in two steps": 6,
        "the fence outlives the sweep": 5,
    }
    least: ClassVar[int] = 35_000

    def starts(self) -> Iterator[Claiming]:
        yield Claiming(losses=2, deaths=0, b_starts=1)
        yield Claiming(losses=1, b_starts=1)
        yield Claiming(losses=0)

    def steps(self, state: Claiming) -> Iterator[tuple[str, str, Claiming]]:
        if state.a == "up":
            yield from self._a_steps(state)
            yield from self._link_steps(state)
        for index, call in enumerate(state.late):
            left = state.late[:index] + state.late[index + 1 :]
            reply, after = self._run(state._replace(late=left), call)
            yield "a late copy runs", f"{words(call)}: {reply[0]}", after
        yield from self._b_steps(state)
        yield from self._sweep_steps(state)

    def _a_steps(self, state: Claiming) -> Iterator[tuple[str, str, Claiming]]:
        if state.starting is None and state.number < A_STARTS:
            call = Call("start", state.number + 1)
            yield "A asks for a task", f"number {call.number}", state._replace(starting=call, number=call.number)
        if state.settling is None:
            for claim in state.holds:
                after = state._replace(holds=state.holds - {claim})
                yield "A's handler returns", claim.task, after._replace(settling=Call("finish", claim=claim))
                yield "A stops a task", claim.task, after._replace(settling=Call("stop", claim=claim))
        if state.a_is_in != "Workers":
            yield "A hears that it is dead", "and cancels its handlers", end(state, "ended")
        if state.deaths and state.beats:
            yield "A crashes", "", end(state, "crashed")._replace(deaths=state.deaths - 1)
            yield "A falls silent", "but goes on", state._replace(beats=False, deaths=state.deaths - 1)

    def _link_steps(self, state: Claiming) -> Iterator[tuple[str, str, Claiming]]:
        for call in (state.starting, state.settling):
            if call is not None and call.reply is None:
                reply, after = self._run(state, call)
                yield "the server runs", f"{words(call)}: {reply[0]}", put(after, call._replace(reply=reply))
            elif call is not None:
                yield "A reads", f"{words(call)}: {call.reply[0] if call.reply else ''}", read(state, call)
        calls = [call for call in (state.starting, state.settling) if call is not None]
        if calls and state.losses:
            unread = [call for call in calls if call.reply is None]
            after = state._replace(losses=state.losses - 1, late=tuple(sorted((*state.late, *unread), key=repr)))
            for call in calls:
                after = put(after, call._replace(reply=None))
            yield "the connection is lost", "what is unanswered is sent again", after

    def _run(self, state: Claiming, call: Call) -> tuple[tuple[str, Claim | None], Claiming]:
        """A's script."""
        if call.verb == "start":
            return self._start_tasks(state, "A", call.number)
        claim = call.claim
        assert claim is not None
        if claim in state.claims:
            claims = state.claims - {claim}
            if call.verb == "finish":
                return ("ok", None), state._replace(claims=claims, finished=done(state, claim.task))
            return ("ok", None), state._replace(claims=claims, queue=(*state.queue, claim.task))
        if self.mistake == "a finish is not fenced" and call.verb == "finish":
            claims = frozenset(other for other in state.claims if other.task != claim.task)
            finished = tuple(sorted({*state.finished, claim.task}))
            return ("ok", None), state._replace(claims=claims, finished=finished)
        mine = state.member("A") is not None or self.mistake == "a claim that is gone counts as mine"
        return ("mine" if mine else "lost", None), state

    def _start_tasks(self, state: Claiming, worker: str, number: int) -> tuple[tuple[str, Claim | None], Claiming]:
        member = state.member(worker)
        if member is None:
            if self.mistake != "a start does not ask the fence":
                return ("gone", None), state
            member = Member(worker)
        if number == member.number and self.mistake != "a resent start takes new tasks":
            return ("the same" if member.answer else "empty", member.answer), state
        if number < member.number and self.mistake != "a late start is not refused":
            return ("late", None), state
        claim = Claim(state.last_claim + 1, worker, state.queue[-1]) if state.queue else None
        if state.member(worker) is not None:
            state = state._replace(fence=state.fence - {member} | {Member(worker, number, claim)})
        if claim is None:
            return ("empty", None), state
        claims = state.claims | {claim}
        return (claim.task, claim), state._replace(queue=state.queue[:-1], claims=claims, last_claim=claim.id)

    def _b_steps(self, state: Claiming) -> Iterator[tuple[str, str, Claiming]]:
        held = [claim for claim in state.claims if claim.worker == "B"]
        if not held and state.queue and state.b_starts:
            number = B_STARTS - state.b_starts + 1
            reply, after = self._start_tasks(state, "B", number)
            yield "B starts", reply[0], after._replace(b_starts=state.b_starts - 1)
        for claim in held:
            after = state._replace(claims=state.claims - {claim}, finished=done(state, claim.task))
            yield "B finishes", claim.task, after

    def _sweep_steps(self, state: Claiming) -> Iterator[tuple[str, str, Claiming]]:
        if state.a_is_in == "Workers" and not (state.a == "up" and state.beats):
            yield "condemn_worker", "A goes from Workers to Dying", state._replace(a_is_in="Dying")
        if state.a_is_in == "Dying" and not state.swept:
            if self.mistake == "a sweep in two steps":
                yield from self._two_steps(state)
            else:
                yield from self._fail_worker(state)
        if state.a_is_in == "Dying" and state.swept:
            yield "forget_worker", "A", state._replace(a_is_in="")

    def _fail_worker(self, state: Claiming) -> Iterator[tuple[str, str, Claiming]]:
        fence = frozenset(member for member in state.fence if member.worker != "A")
        if self.mistake == "the fence outlives the sweep":
            fence = state.fence
        held = sorted(claim for claim in state.claims if claim.worker == "A")
        after = state._replace(fence=fence, swept=len(held) <= 1)
        if held:
            after = after._replace(claims=state.claims - {held[-1]}, queue=(*state.queue, held[-1].task))
        given = f"{held[-1].task} goes to the front" if held else "nothing to give back"
        yield "fail_worker", f"{given}, {'ok' if after.swept else 'more'}", after

    def _two_steps(self, state: Claiming) -> Iterator[tuple[str, str, Claiming]]:
        held = frozenset(claim for claim in state.claims if claim.worker == "A")
        if state.plan is None:
            yield "fail_worker", f"reads {len(held)} claims", state._replace(plan=held)
            return
        fence = frozenset(member for member in state.fence if member.worker != "A")
        back = sorted(claim for claim in state.plan if claim in state.claims)
        queue = (*state.queue, *(claim.task for claim in reversed(back)))
        after = state._replace(fence=fence, swept=True, plan=None, queue=queue)
        yield (
            "fail_worker",
            f"gives back the {len(back)} that it read",
            after._replace(claims=state.claims - state.plan),
        )

    def broken(self, state: Claiming) -> str | None:
        places = [*state.queue, *state.finished, *(claim.task for claim in state.claims)]
        for task in TASKS:
            if places.count(task) != 1:
                where = {"waiting": state.queue, "finished": state.finished, "claims": sorted(state.claims)}
                return f"{task} is in {places.count(task)} places: {where}"
        mine = frozenset(claim for claim in state.claims if claim.worker == "A")
        if mine and state.member("A") is None and (state.swept or not state.a_is_in):
            return "an orphan: a claim of a worker that is in no fence, and nobody will sweep it"
        if untrue := state.told - set(state.finished):
            return f"told ok or mine, but not finished: {sorted(untrue)}"
        settling = state.settling.claim if state.settling else None
        if state.a == "up" and state.starting is None and (unknown := mine - state.holds - {settling}):
            return f"a claim that its living worker does not know: {sorted(unknown)}"
        return None

    def restless(self, state: Claiming) -> str | None:
        alive = state.a == "up" and state.beats
        if not alive and (state.a_is_in or state.member("A")):
            return "A is dead, and something of it is left"
        return None


def words(call: Call) -> str:
    """A request, for the trace."""
    return f"start number {call.number}" if call.claim is None else f"{call.verb} {call.claim.task}"


def done(state: Claiming, task: str) -> tuple[str, ...]:
    """The finished tasks with one more, however often it was finished; their order does not matter."""
    return tuple(sorted((*state.finished, task)))


def put(state: Claiming, call: Call) -> Claiming:
    """Puts A's call where it belongs."""
    return state._replace(starting=call) if call.verb == "start" else state._replace(settling=call)


def read(state: Claiming, call: Call) -> Claiming:
    """A has the reply."""
    assert call.reply is not None
    word, claim = call.reply
    if call.verb == "start":
        return state._replace(starting=None, holds=state.holds | ({claim} if claim else frozenset()))
    if call.verb == "finish" and word in ("ok", "mine") and call.claim is not None:
        state = state._replace(told=state.told | {call.claim.task})
    return state._replace(settling=None)


def end(state: Claiming, how: str) -> Claiming:
    """A's process is over, or at least this worker id of it; what it had sent may still run, late."""
    calls = (state.starting, state.settling)
    unread = [call for call in calls if call is not None and call.reply is None]
    late = tuple(sorted((*state.late, *unread), key=repr))
    return state._replace(a=how, starting=None, settling=None, holds=frozenset(), late=late)
