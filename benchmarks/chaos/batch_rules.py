"""Rules about batches: each ends, its one follow-up runs, and its counts add up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from benchmarks.chaos.case import Case, Rule, Violation, violation
from benchmarks.chaos.history import History, Request
from benchmarks.chaos.workload import FOLLOW_UPS, follow_up_of


def unended(case: Case) -> Iterator[Violation]:
    """Every batch that the server has stored ends, also if its producer was killed."""
    rule = "a batch did not end"
    for batch in case.history.batches:
        if batch.state != "ended" and not case.explain(rule, _failover(case.history)):
            yield violation(rule, f"{batch.name} is {batch.state}", batch.name)


def follow_ups(case: Case) -> Iterator[Violation]:
    """Of the two follow-ups of a batch that has ended, the right one ends, and the other one never begins."""
    rule = "a batch did not have its one follow-up"
    for batch in case.history.batches:
        if batch.state != "ended":
            continue
        succeeded = batch.finished == batch.jobs and batch.reason is None
        due, other = ("then", "otherwise") if succeeded else ("otherwise", "then")
        runs = [case.history.runs.get((FOLLOW_UPS, follow_up_of(batch.name, kind)), []) for kind in (due, other)]
        is_right = any(run.is_final for run in runs[0]) and not runs[1]
        if not is_right and not case.explain(rule, _failover(case.history)):
            text = f"{batch.name}: `{due}` has {len(runs[0])} runs, `{other}` has {len(runs[1])}"
            yield violation(rule, text, batch.name, follow_up_of(batch.name, due))


def counts(case: Case) -> Iterator[Violation]:
    """A batch that has ended counts the jobs that were added to it, each once and with the way in which it ended."""
    rule = "the counts of a batch do not add up"
    members: dict[str, list[Request]] = defaultdict(list)
    for request in case.history.requests:
        members[request.batch].append(request)
    for batch in case.history.batches:
        if batch.state != "ended":
            continue
        asked = members[batch.name]
        least, most = sum(each.stored for each in asked), sum(not each.refused for each in asked)
        adds_up = batch.finished + batch.failed + batch.cancelled == batch.jobs and least <= batch.jobs <= most
        if not adds_up and not case.explain(rule, _failover(case.history)):
            text = f"{batch.name}: {batch}; {least} to {most} jobs were added"
            yield violation(rule, text, batch.name, *(each.tasks[0] for each in asked))


def _failover(history: History) -> str | None:
    return "failover" if history.failovers else None


BATCH_RULES: list[Rule] = [unended, follow_ups, counts]
