"""The events of a run, combined from the ledger: requests, runs, cancellations, faults. It does not judge."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from benchmarks.chaos.ledger import Entry
from benchmarks.chaos.workload import FOLLOW_UPS, SHARED_IDS, SUSPENDED

FINAL: Final = frozenset({"returned", "failure", "undecodable"})
"""Ends after which a task does not run again."""


@dataclass(slots=True)
class Request:
    """One enqueue or dispatch. `answer`: acked, refused, unknown, gave_up; None: its producer died before the reply."""

    producer: str
    queue: str
    tasks: list[str]
    sent: float
    id: str | None = None
    delay: float = 0.0
    keeps_data: bool = False
    answer: str | None = None
    answered: float = float("inf")
    outcome: str | None = None
    batch: str = ""
    """The name of the batch that its job belongs to."""
    follows: bool = False
    """It is that of a workflow with follow-ups."""
    wait: float | None = None
    """For how many seconds it waits for room; None: it does not."""
    returned: float | None = None
    """When the call returned or raised; None: its producer died before."""

    @property
    def stored(self) -> bool:
        """The server has acknowledged that it stored the payload, or put it in place of another."""
        if self.answer != "acked" or self.outcome == "unchanged":
            return False
        return not (self.keeps_data and self.outcome == "updated")

    @property
    def refused(self) -> bool:
        """The payload must never run."""
        return self.answer == "refused" or (self.answer == "acked" and not self.stored)


@dataclass(slots=True)
class PutBack:
    """One request that put the failed jobs of a batch, or a workflow, back. `answered` is None if it may or may not have taken
    effect.
    """

    batch: str
    """The name of the batch, or of the workflow."""
    sent: float
    answered: float | None = None
    count: int = 0


@dataclass(slots=True)
class Run:
    """One run of one task by one peer: one claim."""

    peer: str
    queue: str
    task: str
    """Its name; of a firing the schedule and the moment."""
    id: str
    fence: int
    began: float
    nominal: int | None = None
    lane: str = ""
    ended: float | None = None
    how: str | None = None
    counted: bool = False
    answer: str | None = None
    """The server's reply to the settle, if the peer waited for it."""
    found: int = 0
    """The number that earlier runs had saved, in the queue `saves`."""
    saved: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """When the server acknowledged a save, and its number."""
    steps: list[Step] = field(default_factory=list["Step"])

    @property
    def is_final(self) -> bool:
        return self.how in FINAL


class Step(NamedTuple):
    """One line about a step or a wait of a run. `value`: its result, which the server has; None: its function was called."""

    t: float
    name: str
    value: int | str | None


@dataclass(slots=True)
class Signal:
    """One event that was sent to a workflow. `answer`: None if it may or may not have been stored."""

    queue: str
    task: str
    value: str
    sent: float
    answer: str | None = None
    answered: float = float("inf")

    @property
    def stored(self) -> bool:
        return self.answer in {"woke", "stored"}


@dataclass(slots=True)
class Ending:
    """One request that ended a wait of a workflow. `answer`: None if it may or may not have taken effect."""

    wait: str
    sent: float
    answer: str | None = None
    answered: float = float("inf")

    @property
    def may_have_hit(self) -> bool:
        return self.answer in {None, "ended"}


@dataclass(slots=True)
class Cancel:
    """One cancellation. `answered` is None if it may or may not have taken effect."""

    queue: str
    task: str
    sent: float
    answered: float | None = None
    waiting: int = 0
    running: int = 0

    @property
    def may_have_hit(self) -> bool:
        return self.answered is None or self.waiting + self.running > 0


class Result(NamedTuple):
    queue: str
    task: str
    t: float
    outcome: str
    value: str | None


class Dead(NamedTuple):
    queue: str
    task: str
    id: str
    reason: str


class Batch(NamedTuple):
    """What the server has of a batch when the run has ended."""

    name: str
    state: str
    jobs: int
    finished: int
    failed: int
    cancelled: int
    reason: str | None
    home: str
    """The name of its home queue."""
    parent: str
    """The name of the batch that it is a job of."""
    endings: int
    ended_ms: int
    """The server's time of its last ending."""

    @property
    def succeeded(self) -> bool:
        return self.finished == self.jobs and self.reason is None

    @property
    def was_cancelled(self) -> bool:
        """It was cancelled, perhaps before its failed jobs were put back."""
        return self.reason is not None or self.cancelled > 0


class Span(NamedTuple):
    """A stretch of time. `who` None: all processes."""

    begin: float
    end: float
    who: str | None = None
    why: str = ""

    def overlap(self, begin: float, end: float) -> float:
        return max(0.0, min(end, self.end) - max(begin, self.begin))


Subject = tuple[str, str]
"""A queue and the name of a task; of a follow-up also its id, because each ending of a batch has another one."""


@dataclass
class History:
    """Everything that the checker looks at; runs by task, in the order of their claims."""

    requests: list[Request] = field(default_factory=list[Request])
    by_task: dict[Subject, Request] = field(default_factory=dict[Subject, Request])
    runs: dict[Subject, list[Run]] = field(default_factory=lambda: defaultdict[Subject, list[Run]](list))
    twice_begun: list[Run] = field(default_factory=list[Run])
    cancels: dict[Subject, list[Cancel]] = field(default_factory=lambda: defaultdict[Subject, list[Cancel]](list))
    signals: dict[Subject, list[Signal]] = field(default_factory=lambda: defaultdict[Subject, list[Signal]](list))
    endings: dict[Subject, list[Ending]] = field(default_factory=lambda: defaultdict[Subject, list[Ending]](list))
    """By workflow."""
    results: list[Result] = field(default_factory=list[Result])
    dead: list[Dead] = field(default_factory=list[Dead])
    committed: set[Subject] = field(default_factory=set[Subject])
    """Tasks whose rows of the outbox were committed."""
    buried: set[Subject] = field(default_factory=set[Subject])
    killed: dict[str, float] = field(default_factory=dict[str, float])
    leaving: dict[str, float] = field(default_factory=dict[str, float])
    grace: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds that the runs of a leaving peer had to end."""
    left: dict[str, float] = field(default_factory=dict[str, float])
    queues_left: dict[Subject, list[float]] = field(default_factory=lambda: defaultdict[Subject, list[float]](list))
    """When a peer began to leave a queue, and went on with the others; by peer and queue."""
    registered: dict[str, list[float]] = field(default_factory=lambda: defaultdict[str, list[float]](list))
    frozen: list[Span] = field(default_factory=list[Span])
    trouble: list[Span] = field(default_factory=list[Span])
    failovers: list[Span] = field(default_factory=list[Span])
    clock_jumps: list[float] = field(default_factory=list[float])
    offsets: list[float] = field(default_factory=list[float])
    """Of the server's clock against the true time, in seconds, from each of these jumps on."""
    calm: dict[str, Any] = field(default_factory=dict[str, Any])
    findings: list[Entry] = field(default_factory=list[Entry])
    """Problems that the world itself found: undrained, silent, died, hung."""
    keys: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    batches: list[Batch] = field(default_factory=list[Batch])
    opened: dict[str, tuple[float, str]] = field(default_factory=dict[str, tuple[float, str]])
    """When each batch was opened, and the name of the batch that it is a job of."""
    put_back: dict[str, list[PutBack]] = field(default_factory=lambda: defaultdict[str, list[PutBack]](list))
    """By batch, or by workflow."""
    lengths: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """How many tasks waited in the queue `room`."""
    last: float = 0.0

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> History:
        history = cls()
        reader = _Reader(history)
        for entry in entries:
            history.last = max(history.last, entry.t)
            reader.read(entry)
        reader.finish()
        for runs in history.runs.values():
            runs.sort(key=lambda run: run.fence)
        history.lengths.sort()
        return history


class _Reader:
    """Fills a history; remembers what is still open."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._calls: dict[tuple[str, int], Request | Cancel | PutBack | Signal | Ending] = {}
        self._runs: dict[tuple[str, str, int], Run] = {}
        self._again: dict[tuple[str, str, int], list[Run]] = defaultdict(list)
        self._ends: dict[tuple[str, str, int], list[tuple[float, dict[str, Any]]]] = defaultdict(list)
        self._answers: dict[tuple[str, str, int], str] = {}
        self._froze: dict[str, float] = {}
        self._saves: list[Entry] = []

    def read(self, entry: Entry) -> None:
        history, facts, t = self._history, entry.facts, entry.t
        match entry.what:
            case "send" | "cancel" | "retry" | "signal" | "end_wait":
                self._ask(entry)
            case "acked" | "refused" | "unknown" | "gave_up" | "cancelled" | "retried" | "signalled" | "wait_ended":
                self._answer(entry)
            case "opened":
                history.opened[facts["batch"]] = t, facts["parent"]
            case "saved" | "step" | "stepped" | "waited":
                self._saves.append(entry)
            case "result":
                history.results.append(Result(facts["queue"], facts["task"], t, facts["outcome"], facts.get("value")))
            case "began":
                self._begin(entry)
            case "ended":
                self._ends[entry.source, facts["queue"], facts["fence"]].append((t, facts))
            case "settled":
                self._answers[entry.source, facts["queue"], facts["fence"]] = facts["answer"]
            case "registered":
                history.registered[entry.source].append(t)
            case "buried":
                history.buried.add((facts["queue"], facts["task"]))
            case "leaving":
                history.leaving[entry.source] = t
                history.grace[entry.source] = facts.get("grace", 0.0)
            case "left":
                history.left[entry.source] = t
            case "left_queue":
                history.queues_left[entry.source, facts["queue"]].append(facts["at"])
            case "gap":
                history.frozen.append(Span(facts["begin"], facts["end"], entry.source, "no CPU"))
            case _:
                self._read_world(entry)

    def _read_world(self, entry: Entry) -> None:
        history, facts, t = self._history, entry.facts, entry.t
        match entry.what:
            case "killed":
                history.killed[facts["who"]] = t
            case "froze":
                self._froze[facts["who"]] = t
            case "thawed":
                history.frozen.append(Span(self._froze.pop(facts["who"]), t, facts["who"], "SIGSTOP"))
            case "trouble":
                history.trouble.append(Span(facts["begin"], facts["end"], facts.get("who"), facts["why"]))
            case "failover":
                history.failovers.append(Span(facts["begin"], facts["end"], None, "failover"))
            case "clock":
                history.clock_jumps.append(t)
                history.offsets.append(facts["offset"])
            case "calm":
                history.calm = {**facts, "t": t}
            case "dead":
                history.dead.append(Dead(facts["queue"], facts["task"], facts["id"], facts["reason"]))
            case "batch":
                told: dict[str, Any] = {name: facts.get(name) for name in Batch._fields}
                history.batches.append(Batch(**told))
            case "committed":
                history.committed.add((facts["queue"], facts["task"]))
            case "length":
                history.lengths.append((t, facts["waiting"]))
            case "key":
                history.keys.append(facts)
            case "undrained" | "silent" | "died" | "hung":
                history.findings.append(entry)
            case _:
                pass

    def _ask(self, entry: Entry) -> None:
        facts, history = entry.facts, self._history
        if entry.what == "cancel":
            cancel = Cancel(facts["queue"], facts["task"], entry.t)
            history.cancels[cancel.queue, cancel.task].append(cancel)
            self._calls[entry.source, facts["call"]] = cancel
            return
        if entry.what == "retry":
            put_back = PutBack(facts["batch"], entry.t)
            history.put_back[put_back.batch].append(put_back)
            self._calls[entry.source, facts["call"]] = put_back
            return
        if entry.what == "signal":
            signal = Signal(facts["queue"], facts["task"], facts["value"], entry.t)
            history.signals[signal.queue, signal.task].append(signal)
            self._calls[entry.source, facts["call"]] = signal
            return
        if entry.what == "end_wait":
            ending = Ending(facts["name"], entry.t)
            history.endings[facts["queue"], facts["task"]].append(ending)
            self._calls[entry.source, facts["call"]] = ending
            return
        request = Request(
            entry.source,
            facts["queue"],
            facts["tasks"],
            entry.t,
            facts.get("id"),
            facts.get("delay", 0.0),
            facts.get("keeps_data", False),
            batch=facts.get("batch", ""),
            follows=facts.get("follows", False),
            wait=facts.get("wait"),
        )
        history.requests.append(request)
        history.by_task.update({(request.queue, task): request for task in request.tasks})
        self._calls[entry.source, facts["call"]] = request

    def _answer(self, entry: Entry) -> None:
        asked = self._calls.pop((entry.source, entry.facts["call"]))
        if isinstance(asked, Request):
            asked.answer, asked.outcome, asked.returned = entry.what, entry.facts.get("outcome"), entry.t
            if entry.what not in {"unknown", "gave_up"}:  # these may take effect at any later time
                asked.answered = entry.t
        elif isinstance(asked, Signal | Ending):
            if entry.what in {"signalled", "wait_ended"}:
                asked.answered, asked.answer = entry.t, entry.facts["answer"]
        elif isinstance(asked, PutBack):
            if entry.what == "retried":
                asked.answered, asked.count = entry.t, entry.facts["count"]
        elif entry.what == "cancelled":
            asked.answered = entry.t
            asked.waiting, asked.running = entry.facts["waiting"], entry.facts["running"]

    def _begin(self, entry: Entry) -> None:
        facts = entry.facts
        nominal = facts.get("nominal")
        task = facts["task"] if nominal is None else f"{facts['task']} at {nominal}"
        run = Run(
            *(entry.source, facts["queue"], task, facts["id"], facts["fence"], entry.t, nominal),
            lane=facts.get("lane", ""),
            found=facts.get("saved", 0),
        )
        key = (run.peer, run.queue, run.fence)
        if key in self._runs:
            self._again[key].append(run)
            return
        self._runs[key] = run
        subject = f"{run.task} {run.id}" if run.queue == FOLLOW_UPS else run.task  # each ending has another one
        self._history.runs[run.queue, subject].append(run)

    def finish(self) -> None:
        """Put ends to runs, wherever they were written. Of two ends the first counts: a process's own, then its peer's."""
        for who, begin in self._froze.items():  # killed while it was frozen
            self._history.frozen.append(Span(begin, self._history.killed.get(who, self._history.last), who, "SIGSTOP"))
        for key, run in self._runs.items():
            ends = self._goes_on(key, run)
            if ends:
                run.ended, facts = min(ends, key=lambda end: end[0])
                run.how, run.counted = facts["how"], facts.get("counted", False)
            run.answer = self._answers.get(key)
        for entry in self._saves:
            facts = entry.facts
            run = self._runs[entry.source, facts["queue"], facts["fence"]]
            if entry.what == "saved":
                run.saved.append((entry.t, facts["value"]))
            else:
                run.steps.append(Step(entry.t, facts["name"], facts.get("value")))

    def _goes_on(self, key: tuple[str, str, int], run: Run) -> list[tuple[float, dict[str, Any]]]:
        """The ends of a run. A workflow keeps its claim, and begins again, if its wait ends while it is being suspended."""
        ends = sorted(self._ends.get(key, ()), key=lambda end: end[0])
        for again in sorted(self._again.get(key, ()), key=lambda each: each.began):
            run.began, again.began = min(run.began, again.began), max(run.began, again.began)
            before = [facts["how"] for t, facts in ends if t <= again.began]
            if SUSPENDED not in before:
                self._history.twice_begun.append(again)
            else:
                ends = [end for end in ends if end[0] > again.began]
        return ends


def replaceable(queue: str) -> bool:
    """A later dispatch may take the place of a task of this queue."""
    return queue in SHARED_IDS
