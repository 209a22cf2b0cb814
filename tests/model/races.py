"""`first`: a durable function that waits until one of two jobs has ended, with a timeout, and sleeps afterwards.

Which one was first is decided by the server, when a run asks for it or a later run begins, and is stored. The
jobs are started already; how they are started and how their ends arrive once is searched in `tests.model.workflows`. One fault
may come at any point: a crash, a live worker that is declared dead and goes on, a reply that is lost, a message that comes twice.
It may be let run again from this wait: then it is decided anew.

Promised: each run is told the same; the winner has ended, and a timeout has passed; no wake-up is lost; the mesh comes to rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, NamedTuple

from tests.model.search import By, Model

JOBS = ("a", "b")


class Run(NamedTuple):
    """A run: its claim, its next request (nothing: the function goes on), and what it knows of the record."""

    claim: int
    asks: str
    ends: frozenset[str]
    winner: str
    sleep: str
    again: int


class Race(NamedTuple):
    """All of it."""

    place: str = "line"
    """line, active, suspended or gone."""
    claim: int = 0
    waits: str = ""
    """What a suspended job waits for: ``first`` or ``sleep``."""
    deadline: str = ""
    """That of the wait: nothing, stored or passed; likewise that of the sleep."""
    sleep: str = ""
    ends: frozenset[str] = frozenset()
    winner: str = ""
    """a, b or timeout, once it is decided."""
    again: int = 0
    """How often it was let run again."""
    runs: tuple[Run, ...] = ()
    running: frozenset[str] = frozenset(JOBS)
    outbox: frozenset[str] = frozenset()
    """Jobs whose ends are under way."""
    copies: frozenset[str] = frozenset()
    seen: frozenset[tuple[int, str]] = frozenset()
    """The winners that runs were told."""
    faults: int = 1
    rewinds: int = 1


Steps = Iterator[tuple[str, str, Race]]


class Races(Model[Race]):
    """See the module."""

    moves: ClassVar[Mapping[str, By]] = {
        "start_tasks": By.MESH,
        "the run goes on": By.MESH,
        "a request runs": By.MESH,
        "a claim is recovered": By.MESH,
        "a message arrives": By.MESH,
        "a late copy arrives": By.MESH,
        "the sleep is over": By.MESH,
        "the wait's time is over": By.USER,
        "a job ends": By.USER,
        "rewind_job": By.USER,
        "a reply is lost": By.FAULT,
        "a worker crashes": By.FAULT,
        "a live worker is declared dead": By.FAULT,
        "a message is under way twice": By.FAULT,
    }
    mistakes: ClassVar[Mapping[str, int]] = {
        "a run decides by the ends that it knows": 12,
        "what was decided is not stored": 13,
        "a suspension does not look at the ends": 5,
        "only the end of the last job wakes it": 6,
    }
    least: ClassVar[int] = 10_000

    def starts(self) -> Iterator[Race]:
        yield Race()

    def _keeps(self, mistake: str) -> bool:
        return self.mistake != mistake

    # What the server does

    def _decided(self, state: Race) -> str:
        """The winner by now; nothing if there is none."""
        if state.winner:
            return state.winner
        ended = [job for job in JOBS if job in state.ends]
        return ended[0] if ended else "timeout" if state.deadline == "passed" else ""

    def _started(self, state: Race) -> Race:
        """`start_tasks`: what the open wait waits for is decided, and stored."""
        winner = self._decided(state) if state.waits == "first" else state.winner
        stored = winner if self._keeps("what was decided is not stored") else state.winner
        run = Run(2, "", state.ends, winner, state.sleep, state.again)
        return state._replace(place="active", claim=2, winner=stored, waits="", runs=(*state.runs, run))

    def _suspend(self, state: Race, run: Run) -> tuple[Race, Run | None]:
        """`suspend_task`: the run goes on with what it waits for, or is gone."""
        if run.asks == "first":
            state = state._replace(deadline=state.deadline or "stored")
            winner = self._decided(state) if self._keeps("a suspension does not look at the ends") else state.winner
            if winner:
                stored = winner if self._keeps("what was decided is not stored") else ""
                return state._replace(winner=stored), run._replace(asks="", winner=winner, ends=state.ends)
        else:
            state = state._replace(sleep=state.sleep or "stored")
            if state.sleep == "passed":
                return state, run._replace(asks="", sleep="passed")
        return state._replace(place="suspended", claim=0, waits=run.asks), None

    def _execute(self, state: Race, run: Run) -> tuple[Race, Run | None]:
        """A request at the server, and the run afterwards: None, if it has no claim any more."""
        if state.place != "active" or state.claim != run.claim:
            return state, None
        if run.asks == "finish":
            return state._replace(place="gone", claim=0), None
        return self._suspend(state, run)

    def _wake(self, state: Race, wait: str) -> Race:
        return state._replace(place="line") if state.place == "suspended" and state.waits == wait else state

    def _deliver(self, state: Race, job: str) -> Race:
        if state.place == "gone" or job in state.ends:
            return state
        after = state._replace(ends=state.ends | {job})
        wakes = len(after.ends) == len(JOBS) or self._keeps("only the end of the last job wakes it")
        return self._wake(after, "first") if wakes else after

    # What happens

    def steps(self, state: Race) -> Steps:
        for name, detail, after in self._all_steps(state):
            yield name, detail, self._normal(after)

    def _all_steps(self, state: Race) -> Steps:
        if state.place == "line" and len(state.runs) < 2:
            yield "start_tasks", "", self._started(state)
        if state.place == "active" and all(run.claim != state.claim for run in state.runs):
            yield "a claim is recovered", "", state._replace(place="line", claim=0)
        if state.deadline == "stored" and not state.winner and state.place != "gone":
            yield "the wait's time is over", "", self._wake(state._replace(deadline="passed"), "first")
        if state.sleep == "stored":
            yield "the sleep is over", "", self._wake(state._replace(sleep="passed"), "sleep")
        for number, run in enumerate(state.runs):
            yield from self._run_steps(state, run, state.runs[:number] + state.runs[number + 1 :])
        yield from self._message_steps(state)
        if state.rewinds and state.place in ("line", "suspended") and (state.winner or state.deadline):
            fresh = state._replace(place="line", waits="", deadline="", sleep="", winner="")
            yield "rewind_job", "", fresh._replace(rewinds=0, again=state.again + 1)

    def _run_steps(self, state: Race, run: Run, others: tuple[Run, ...]) -> Steps:
        left = state._replace(runs=others)
        if run.asks:
            after, goes_on = self._execute(left, run)
            yield "a request runs", run.asks, after._replace(runs=(*others, goes_on) if goes_on else others)
            if state.faults:
                yield "a reply is lost", run.asks, after._replace(runs=(*others, run), faults=0)
                yield "a worker crashes", f"after {run.asks}", after._replace(faults=0)
        else:
            yield "the run goes on", "", self._told(left, run)
            if state.faults:
                yield "a worker crashes", "", left._replace(faults=0)
        if state.faults and state.place == "active" and state.claim == run.claim:
            yield "a live worker is declared dead", "", state._replace(place="line", claim=0, faults=0)

    def _told(self, state: Race, run: Run) -> Race:
        """The function goes on to its next request. `state` is without the run."""
        known = [job for job in JOBS if job in run.ends]
        if not run.winner and known and not self._keeps("a run decides by the ends that it knows"):
            run = run._replace(winner=known[0])
        if not run.winner:
            return state._replace(runs=(*state.runs, run._replace(asks="first")))
        asks = "finish" if run.sleep == "passed" else "sleep"
        seen = state.seen | {(run.again, run.winner)}
        return state._replace(seen=seen, runs=(*state.runs, run._replace(asks=asks)))

    def _message_steps(self, state: Race) -> Steps:
        for job in state.running:
            yield "a job ends", job, state._replace(running=state.running - {job}, outbox=state.outbox | {job})
        for job in state.outbox:
            after = self._deliver(state, job)._replace(outbox=state.outbox - {job})
            yield "a message arrives", job, after
            if state.faults:
                yield "a message is under way twice", job, after._replace(copies=frozenset(job), faults=0)
        for job in state.copies:
            yield "a late copy arrives", job, self._deliver(state, job)._replace(copies=frozenset())

    def _normal(self, state: Race) -> Race:
        """The same state, with claims as 1 (the one that is held) or 0."""
        held = state.claim if state.place == "active" else -1
        runs = tuple(sorted(run._replace(claim=int(run.claim == held)) for run in state.runs))
        return state._replace(claim=int(held > 0), runs=runs)

    # What is promised

    def broken(self, state: Race) -> str | None:
        if len({again for again, _ in state.seen}) < len(state.seen):
            return "two winners are seen"
        if any(winner in JOBS and winner not in state.ends for _, winner in state.seen):
            return "the winner has not ended"
        return None

    def restless(self, state: Race) -> str | None:
        if state.place not in ("gone", "suspended") or state.runs or state.outbox:
            return "something is left"
        if state.place == "suspended" and (state.waits == "sleep" or state.ends or state.deadline == "passed"):
            return "it is suspended, though what it waits for has come"
        return None
