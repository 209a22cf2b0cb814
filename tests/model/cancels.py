"""A cancel together with everything else: a task that is enqueued, claimed, finished, stopped, recovered, and enqueued again.

One payload, enqueued (T1), cancelled by its payload, and after the answer enqueued again by the same caller (T2).
Worker A can crash or fall silent, lose replies and lose the cancel message; worker B cannot. The caller's cancel can
lose its reply as well, and an old copy of it can run late.

Promised: every task that a cancel counted ends as cancelled, never finished and never back in the queue; no task that was
enqueued after the reply is touched; a mark is deleted with its claim; an acknowledgement is true.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, NamedTuple

from tests.model.search import By, Model

TASKS = ("T1", "T2")
CLAIMS = 3


class Place(NamedTuple):
    """Where a task is: nowhere, waiting, claimed, finished or cancelled."""

    word: str = "nowhere"
    worker: str = ""
    claim: int = 0


class Run(NamedTuple):
    """A's handler and the settle that follows it; `reply` is None until the server ran it."""

    task: int
    claim: int
    doing: str = "running"
    """running, cancelled (its scope, by A), finish or stop."""
    reply: str | None = None


class Cancelling(NamedTuple):
    """The queue, the marks, the caller and worker A."""

    places: tuple[Place, Place] = (Place("waiting"), Place())
    last_claim: int = 0
    marks: frozenset[int] = frozenset()
    covered: frozenset[int] = frozenset()
    """Tasks that a cancel counted: the history that the promises are about."""
    asked: str = ""
    """The caller's cancel: nothing, sent, ran, answered, acknowledged."""
    seen: int = 0
    """What the two-step mistake has read before it acts: a claim."""
    kept: bool = False
    late: int = 0
    a: str = "up"
    a_is_in: bool = True
    beats: bool = True
    run: Run | None = None
    told: frozenset[tuple[int, str]] = frozenset()
    message: bool = False
    losses: int = 2
    lost_messages: int = 1
    deaths: int = 1


class Cancels(Model[Cancelling]):
    """`cancel_task`, `reconcile`, and `give_back` with its marks; see the module."""

    moves: ClassVar[Mapping[str, By]] = {
        "cancel": By.USER,
        "cancel_task": By.MESH,
        "the caller reads": By.MESH,
        "the caller polls": By.MESH,
        "enqueue again": By.USER,
        "A starts": By.MESH,
        "A's handler returns": By.USER,
        "A stops its task": By.USER,
        "the server settles": By.MESH,
        "A reads": By.MESH,
        "a cancel message arrives": By.MESH,
        "A reconciles": By.MESH,
        "a cancelled handler unwinds": By.MESH,
        "A hears that it is dead": By.MESH,
        "fail_worker": By.MESH,
        "B starts": By.MESH,
        "B finishes": By.USER,
        "B reconciles": By.MESH,
        "a reply is lost": By.FAULT,
        "a late copy runs": By.FAULT,
        "a cancel message is lost": By.FAULT,
        "A crashes": By.FAULT,
        "A falls silent": By.FAULT,
    }
    mistakes: ClassVar[Mapping[str, int]] = {
        "give_back ignores the cancel mark": 4,
        "a finish ignores the cancel mark": 4,
        "a finish leaves the cancel mark": 4,
        "a cancel without a number": 6,
        "a cancel in two steps": 5,
        "nobody reconciles": 5,
    }
    least: ClassVar[int] = 20_000

    def starts(self) -> Iterator[Cancelling]:
        yield Cancelling(losses=2, deaths=0)
        yield Cancelling(losses=1)

    def steps(self, state: Cancelling) -> Iterator[tuple[str, str, Cancelling]]:
        yield from self._caller_steps(state)
        if state.a == "up":
            yield from self._a_steps(state)
        if not (state.a == "up" and state.beats) and state.a_is_in:
            yield "fail_worker", *self._fail_worker(state)
        if state.message:
            heard = state._replace(message=False)
            yield "a cancel message arrives", "at A, which reconciles", self._reconcile(heard)
            if state.lost_messages:
                yield "a cancel message is lost", "", heard._replace(lost_messages=state.lost_messages - 1)
        yield from self._b_steps(state)

    def _caller_steps(self, state: Cancelling) -> Iterator[tuple[str, str, Cancelling]]:
        if not state.asked:
            yield "cancel", "by payload", state._replace(asked="sent")
        if state.asked == "sent":
            yield "cancel_task", *self._cancel_task(state, "ran")
        if state.asked == "ran":
            yield "the caller reads", "its answer", state._replace(asked="answered")
        if state.asked in ("sent", "ran") and state.losses:
            unread = state.asked == "sent"
            after = state._replace(asked="sent", losses=state.losses - 1, late=state.late + unread)
            yield "a reply is lost", "the cancel is sent again", after
        if state.late:
            detail, after = self._cancel_task(state, state.asked)
            yield "a late copy runs", f"of the cancel: {detail}", after._replace(late=state.late - 1)
        if state.asked == "answered":
            if not any(self._claimed(state, task) for task in state.covered):
                yield "the caller polls", "the claim is gone: acknowledged", state._replace(asked="acknowledged")
            if state.places[1].word == "nowhere":
                yield "enqueue again", "T2", put(state, 1, Place("waiting"))

    def _claimed(self, state: Cancelling, task: int) -> bool:
        return state.places[task].word == "claimed"

    def _cancel_task(self, state: Cancelling, asked: str) -> tuple[str, Cancelling]:
        """The script; `asked` is what the caller's request becomes."""
        if state.kept and self.mistake != "a cancel without a number":
            return "the stored answer again", state._replace(asked=asked)
        if self.mistake == "a cancel in two steps" and not state.seen:
            claims = [place.claim for place in state.places if place.word == "claimed"]
            if claims:
                return f"reads that claim P{claims[0]} holds it", state._replace(seen=claims[0])
        after, words = state._replace(asked=asked, kept=True, seen=0), []
        for task, place in enumerate(state.places):
            if place.word == "waiting":
                after = put(after, task, Place("cancelled"))
            elif place.word == "claimed" and state.seen in (0, place.claim):
                after = after._replace(marks=after.marks | {place.claim}, message=place.worker == "A" or after.message)
            else:
                continue
            words.append(f"{TASKS[task]} was {place.word}")
            after = after._replace(covered=after.covered | {task})
        if state.seen:
            after = after._replace(marks=after.marks | {state.seen})
        return " and ".join(words) or "nothing found", after

    def _start(self, state: Cancelling, worker: str) -> Iterator[tuple[int, Place, Cancelling]]:
        for task, place in enumerate(state.places):
            if place.word == "waiting" and state.last_claim < CLAIMS:
                claim = Place("claimed", worker, state.last_claim + 1)
                yield task, claim, put(state, task, claim)._replace(last_claim=claim.claim)

    def _a_steps(self, state: Cancelling) -> Iterator[tuple[str, str, Cancelling]]:
        run = state.run
        if run is None and state.a_is_in:
            for task, place, after in self._start(state, "A"):
                run = Run(task, place.claim)
                yield "A starts", f"{TASKS[task]} under claim P{place.claim}", after._replace(run=run)
        elif run is not None:
            yield from self._run_steps(state, run)
        if not state.a_is_in:
            yield "A hears that it is dead", "and cancels its handler", state._replace(a="ended", run=None)
        if state.deaths and state.beats:
            after = state._replace(deaths=state.deaths - 1)
            yield "A crashes", "", after._replace(a="crashed", run=None)
            yield "A falls silent", "but goes on", after._replace(beats=False)

    def _run_steps(self, state: Cancelling, run: Run) -> Iterator[tuple[str, str, Cancelling]]:
        name = TASKS[run.task]
        if run.doing == "running":
            yield "A's handler returns", name, state._replace(run=run._replace(doing="finish"))
            if self.mistake != "nobody reconciles":
                yield "A reconciles", "as it does each second", self._reconcile(state)
            yield "A stops its task", name, state._replace(run=run._replace(doing="stop"))
        elif run.doing == "cancelled":
            yield "a cancelled handler unwinds", name, state._replace(run=run._replace(doing="stop"))
        elif run.reply is None:
            reply, after = self._settle(state, run)
            yield "the server settles", f"{run.doing} {name}: {reply}", after._replace(run=run._replace(reply=reply))
        else:
            told = state.told | {(run.task, run.reply)} if run.doing == "finish" else state.told
            yield "A reads", f"{run.doing} {name}: {run.reply}", state._replace(run=None, told=told)
        if run.reply is not None and state.losses:
            after = state._replace(run=run._replace(reply=None), losses=state.losses - 1)
            yield "a reply is lost", f"the {run.doing} of {name} is sent again", after

    def _reconcile(self, state: Cancelling) -> Cancelling:
        """A asks which of its claims are marked, and cancels their handlers."""
        run = state.run
        if run is None or run.doing != "running" or run.claim not in state.marks:
            return state
        return state._replace(run=run._replace(doing="cancelled"))

    def _settle(self, state: Cancelling, run: Run) -> tuple[str, Cancelling]:
        """`finish_tasks` or `stop_tasks`, of A's claim."""
        if state.places[run.task].claim != run.claim:
            return "mine" if state.a_is_in else "lost", state
        return self._finish(state, run.task) if run.doing == "finish" else ("ok", self._give_back(state, run.task))

    def _finish(self, state: Cancelling, task: int) -> tuple[str, Cancelling]:
        claim = state.places[task].claim
        marked = claim in state.marks and self.mistake != "a finish ignores the cancel mark"
        if self.mistake != "a finish leaves the cancel mark":
            state = state._replace(marks=state.marks - {claim})
        if marked:
            return "cancelled", put(state, task, Place("cancelled"))
        return "ok", put(state, task, Place("finished"))

    def _give_back(self, state: Cancelling, task: int) -> Cancelling:
        """The one way back into the queue."""
        claim = state.places[task].claim
        marked = claim in state.marks and self.mistake != "give_back ignores the cancel mark"
        place = Place("cancelled") if marked else Place("waiting")
        return put(state._replace(marks=state.marks - {claim}), task, place)

    def _fail_worker(self, state: Cancelling) -> tuple[str, Cancelling]:
        after, words = state._replace(a_is_in=False), []
        for task, place in enumerate(state.places):
            if place.worker == "A":
                after = self._give_back(after, task)
                words.append(f"{TASKS[task]} is {after.places[task].word}")
        return " and ".join(words) or "nothing to give back", after

    def _b_steps(self, state: Cancelling) -> Iterator[tuple[str, str, Cancelling]]:
        held = [task for task, place in enumerate(state.places) if place.worker == "B"]
        if not held:
            for task, place, after in self._start(state, "B"):
                yield "B starts", f"{TASKS[task]} under claim P{place.claim}", after
        for task in held:
            reply, after = self._finish(state, task)
            yield "B finishes", f"{TASKS[task]}: {reply}", after
            if state.places[task].claim in state.marks:
                yield "B reconciles", f"and stops {TASKS[task]}", self._give_back(state, task)

    def broken(self, state: Cancelling) -> str | None:
        if state.marks - {place.claim for place in state.places}:
            return "a cancel mark outlives its claim"
        for task in state.covered:
            place = state.places[task]
            if place.word != "cancelled" and place.claim not in state.marks:
                return f"{TASKS[task]} was cancelled, and is {place.word}"
            if place.word != "cancelled" and state.asked == "acknowledged":
                return f"acknowledged, but {TASKS[task]} is {place.word}"
        if 1 in state.covered:
            return "a cancel took a task that was enqueued after its answer"
        for task, word in state.told:
            if word == "ok" and state.places[task].word != "finished":
                return f"told ok, but {TASKS[task]} is {state.places[task].word}"
            if word in ("mine", "cancelled") and state.places[task].word not in ("finished", "cancelled"):
                return f"told {word}, but {TASKS[task]} is {state.places[task].word}"
        return None

    def restless(self, state: Cancelling) -> str | None:
        for task, place in enumerate(state.places):
            if place.claim in state.marks:
                return f"{TASKS[task]} was cancelled, and {place.worker} runs it for ever"
            if place.worker == "A" and state.a != "up":
                return f"{TASKS[task]} stays with a dead worker"
        if state.asked == "answered":
            return "nobody acknowledges the cancel"
        return None


def put(state: Cancelling, task: int, place: Place) -> Cancelling:
    """The state with one task put elsewhere."""
    one, two = state.places
    return state._replace(places=(place, two) if task == 0 else (one, place))
