"""Rules about batches: each ends after its jobs and the batches in it, has one follow-up per ending, and counts right."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.chaos.case import Case, Rule, Violation, told, violation
from benchmarks.chaos.excuses import SLACK
from benchmarks.chaos.history import Batch, Cancel, History, Request, Run
from benchmarks.chaos.workload import FLOWS, FOLLOW_UPS, follow_up_of


class FollowUp(NamedTuple):
    """The follow-up of one ending, and its runs."""

    number: int
    kind: str
    runs: list[Run]


class _Batches:
    """The batches of a history, with what belongs to each."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.by_name = {batch.name: batch for batch in history.batches}
        self.inner: dict[str, list[Batch]] = defaultdict(list)
        self.members: dict[str, list[Request]] = defaultdict(list)
        for batch in history.batches:
            self.inner[batch.parent].append(batch)
        for request in history.requests:
            self.members[request.tasks[0] if request.queue in FLOWS else request.batch].append(request)
        self._follow_ups: dict[str, list[list[Run]]] = defaultdict(list)
        for (queue, _), runs in history.runs.items():
            if queue == FOLLOW_UPS:
                self._follow_ups[runs[0].task].append(runs)

    def follow_ups(self, name: str) -> list[FollowUp]:
        """The follow-ups of a batch that have run. The id of one is ``@TOKEN.KIND``, and ``.NUMBER`` from the second one on."""
        found: list[FollowUp] = []
        for kind in ("then", "otherwise"):
            for runs in self._follow_ups[follow_up_of(name, kind)]:
                number = runs[0].id.partition(f".{kind}")[2].removeprefix(".")
                found.append(FollowUp(int(number or 1), kind, runs))
        return sorted(found, key=lambda each: each.number)

    def runs(self, batch: Batch) -> Iterator[Run]:
        """The runs that must have ended before the batch does. Follow-ups of inner batches count where they are at home."""
        for request in self.members[batch.name]:
            yield from self.history.runs.get((request.queue, request.tasks[0]), ())
        for inner in self.inner[batch.name]:
            yield from self.runs(inner)
            if inner.home == FOLLOW_UPS:
                for follow_up in self.follow_ups(inner.name):
                    yield from follow_up.runs

    def life(self, batch: Batch) -> tuple[float, float]:
        """From when to when it was open, or had jobs, at most."""
        began = [run.began for each in self.follow_ups(batch.name) for run in each.runs]
        return self.history.opened.get(batch.name, (0.0, ""))[0] - SLACK, max(began, default=self.history.last)

    def may_lose_follow_ups(self, batch: Batch) -> bool:
        """Its follow-ups are jobs of a batch that was cancelled."""
        outer = self.by_name.get(batch.parent)
        return outer is not None and outer.was_cancelled and batch.home == FOLLOW_UPS

    def most_endings(self, batch: Batch) -> float:
        """How often it may have ended: once, and once more for each job in it that was put back."""
        put_back = self.history.put_back.get(batch.name, ())
        own = sum(each.count if each.answered is not None else float("inf") for each in put_back)
        return 1 + own + sum(self.most_endings(inner) - 1 for inner in self.inner[batch.name])


def unended(case: Case) -> Iterator[Violation]:
    """Every batch that the server has stored ends, also if its producer was killed. Every batch that was opened is stored."""
    rule, batches = "a batch did not end", _Batches(case.history)
    for batch in case.history.batches:
        if batch.state != "ended" and not case.explain(rule, _failover(case.history)):
            yield violation(rule, f"{batch.name} is {batch.state}", batch.name)
    for name, (_, parent) in case.history.opened.items():
        stored = batches.by_name.get(name)
        if (stored is None or stored.parent != parent) and not case.explain(rule, _failover(case.history)):
            yield violation(rule, f"{name}, opened in {parent or 'no batch'}, is {stored}", name)


def follow_ups(case: Case) -> Iterator[Violation]:
    """Each ending of a batch has one follow-up, which ends: the last one by the final counts, and those before `otherwise`.
    A follow-up that is a job of a cancelled batch may be cancelled.
    """
    rule, batches = "a batch did not have its one follow-up", _Batches(case.history)
    for batch in case.history.batches:
        if batch.state != "ended":
            continue
        kinds = ["otherwise"] * (batch.endings - 1) + ["then" if batch.succeeded else "otherwise"]
        due = list(enumerate(kinds, 1))
        found = batches.follow_ups(batch.name)
        ran = [(each.number, each.kind) for each in found]
        is_right = ran == due and all(any(run.is_final for run in each.runs) for each in found)
        if batches.may_lose_follow_ups(batch):
            is_right = len(set(ran)) == len(ran) and set(ran) <= set(due)
        if not is_right and not case.explain(rule, _failover(case.history)):
            text = f"{batch.name}: due {due}, ran {ran}; {batch}"
            yield violation(rule, text, batch.name, *(follow_up_of(batch.name, kind) for kind in ("then", "otherwise")))


def early(case: Case) -> Iterator[Violation]:
    """The follow-up of the last ending begins after all jobs of the batch have ended, also those of batches in it."""
    rule, batches = "a follow-up began before its batch had ended", _Batches(case.history)
    for batch in case.history.batches:
        last = [each for each in batches.follow_ups(batch.name) if each.number == batch.endings]
        if not last:
            continue
        began = min(run.began for run in last[0].runs)
        for run in batches.runs(batch):
            ended = case.history.killed.get(run.peer, float("inf")) if run.ended is None else run.ended
            if max(run.began, ended) <= began + SLACK:
                continue
            why = case.excuses.lost_claim(run, began) or _failover(case.history)
            if not case.explain(rule, why):
                text = f"{batch.name} at {began:.3f}: {run.queue} {run.task}, {told(run)}"
                yield violation(rule, text, batch.name, last[0].runs[0], run)


def parents(case: Case) -> Iterator[Violation]:
    """A batch ends after the batches in it, and no more often than jobs were put back in it."""
    batches = _Batches(case.history)
    for batch in case.history.batches:
        rule, outer = "a batch ended before one in it", batches.by_name.get(batch.parent)
        if outer is not None and outer.state == "ended" and outer.ended_ms < batch.ended_ms:
            why = "clock jump" if case.excuses.jumped(*batches.life(outer)) else _failover(case.history)
            if not case.explain(rule, why):
                yield violation(rule, f"{outer} before {batch}", outer.name, batch.name)
        rule = "a batch ended too often"
        if batch.endings > batches.most_endings(batch) and not case.explain(rule, _failover(case.history)):
            yield violation(rule, f"{batch}, but at most {batches.most_endings(batch):g} times", batch.name)


def counts(case: Case) -> Iterator[Violation]:
    """A batch that has ended counts its jobs, each once and with the way in which it ended last. A batch in it is one of them,
    and so is each of that batch's follow-ups where its home is their queue.
    """
    rule, batches = "the counts of a batch do not add up", _Batches(case.history)
    dead = {(entry.queue, entry.task) for entry in case.history.dead}
    for batch in case.history.batches:
        if batch.state != "ended":
            continue
        asked, inner = batches.members[batch.name], batches.inner[batch.name]
        more = len(inner) + sum(each.endings for each in inner if each.home == FOLLOW_UPS)
        least = sum(each.stored for each in asked) + more
        most = sum(not each.refused for each in asked) + more
        failed = sum((each.queue, each.tasks[0]) in dead for each in asked) + sum(not each.succeeded for each in inner)
        adds_up = batch.finished + batch.failed + batch.cancelled == batch.jobs and least <= batch.jobs <= most
        if not (adds_up and batch.failed == failed) and not case.explain(rule, _failover(case.history)):
            text = f"{batch}; {least} to {most} jobs were added, and {failed} have failed"
            yield violation(rule, text, batch.name, *(each.tasks[0] for each in asked))


def put_back(case: Case) -> Iterator[Violation]:
    """As many jobs run again as were put back, unless the batch is cancelled later. So does a workflow, which ends then."""
    rule, batches = "a job that was put back did not run", _Batches(case.history)
    for name, requests in case.history.put_back.items():
        batch = batches.by_name.get(name)
        runs = [case.history.runs.get((each.queue, each.tasks[0]), []) for each in batches.members[name]]
        for request in requests:
            ran = sum(any(run.began >= request.sent - SLACK for run in each[1:]) for each in runs)
            if request.count <= ran or (batch is not None and batch.was_cancelled):
                continue
            if any(cancel.may_have_hit for each in batches.members[name] for cancel in _cancels(case, each)):
                continue
            if not case.explain(rule, _failover(case.history)):
                yield violation(rule, f"{name}: {request.count} at {request.sent:.3f}, of which {ran} ran", name)


def _cancels(case: Case, request: Request) -> list[Cancel]:
    """The cancellations of a workflow; those of jobs in batches are no excuse."""
    return case.history.cancels.get((request.queue, request.tasks[0]), []) if request.queue in FLOWS else []


def again(case: Case) -> Iterator[Violation]:
    """A workflow that was put back ends again."""
    rule, dead = "a workflow that was put back did not end", {(entry.queue, entry.task) for entry in case.history.dead}
    for subject, runs in case.history.runs.items():
        put_back = [each for each in case.history.put_back.get(subject[1], ()) if each.count]
        if subject[0] not in FLOWS or not put_back or runs[-1].is_final or subject in dead:
            continue
        was_cancelled = any(cancel.may_have_hit for cancel in case.history.cancels.get(subject, ()))
        if not was_cancelled and not case.explain(rule, _failover(case.history)):
            yield violation(rule, f"{subject[1]}, at {put_back[-1].sent:.3f}: {told(runs[-1])}", subject[1])


def _failover(history: History) -> str | None:
    return "failover" if history.failovers else None


BATCH_RULES: list[Rule] = [unended, follow_ups, early, parents, counts, put_back, again]
