"""The report of a run: faults by kind, tasks and runs, what faults explain, and each violation with its lines of the ledger."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

from benchmarks.chaos.checker import Verdict
from benchmarks.chaos.history import History
from benchmarks.chaos.ledger import lines_about
from benchmarks.chaos.workload import FLOW_NESTED, FLOWS, OVER, STARTED, SUSPENDED
from benchmarks.chaos.world import Outcome, Plan

SHOWN = 12
"""Violations that are shown with their lines; the rest is counted."""


def command(plan: Plan) -> str:
    """How to repeat the run."""
    words = f"python -m benchmarks chaos --minutes {plan.minutes:g} --seed {plan.seed} --server {plan.server}"
    words += f" --peers {plan.peers}" if plan.peers != Plan.peers else ""
    words += f" --producers {plan.producers}" if plan.producers != Plan.producers else ""
    words += f" --spoilt {plan.spoilt:g}" if plan.spoilt else ""
    return words + (f" --program {plan.program}" if plan.program else "")


def figures(history: History) -> dict[str, int]:
    """How much was done."""
    answers = Counter[str]()
    for request in history.requests:
        answers[request.answer or "unknown"] += len(request.tasks)
    runs = [run for each in history.runs.values() for run in each]
    return {
        "tasks acknowledged": answers["acked"],
        "tasks refused": answers["refused"],
        "tasks with an unknown outcome": answers["unknown"],
        "runs": len(runs),
        "tasks that ran more than once": sum(len(each) > 1 for each in history.runs.values()),
        "firings of schedules": sum(each[0].nominal is not None for each in history.runs.values()),
        "cancellations": sum(map(len, history.cancels.values())),
        "results read": len(history.results),
        "calls that may wait for room": len(waits := [each for each in history.requests if each.wait is not None]),
        "of them, calls that waited for a second": sum((each.returned or each.sent) - each.sent >= 1 for each in waits),
        "of them, calls whose producer was killed": sum(each.returned is None for each in waits),
        "batches": len(history.batches),
        "batches in batches": sum(each.parent != "" for each in history.batches),
        "jobs put back": sum(each.count for requests in history.put_back.values() for each in requests),
        "saves": sum(len(run.saved) for run in runs),
        "steps called": sum(step.value is None for run in runs for step in run.steps),
        "results of steps found": sum(step.value not in (None, run.fence) for run in runs for step in run.steps),
        "rows of the outbox committed": len(history.committed),
        "workflows": len(
            flows := [each for (queue, _), each in history.runs.items() if queue in {*FLOWS, FLOW_NESTED}]
        ),
        "of them, workflows that were suspended": sum(any(run.how == SUSPENDED for run in each) for each in flows),
        "ends of waits": len(
            {
                (run.task, step.name)
                for each in flows
                for run in each
                for step in run.steps
                if step.name[:4] in {"even", "mail"}
            }
        ),
        "of them, workflows whose lifetime ended": sum(
            any(step.value == OVER for run in each for step in run.steps) for each in flows
        ),
        "of them, workflows that a workflow started": sum(queue == FLOW_NESTED for queue, _ in history.runs),
        "of them, workflows that were put back": sum(
            any(each.count for each in asked) for name, asked in history.put_back.items() if name.startswith(FLOWS)
        ),
        "waits that were ended": sum(each.answer == "ended" for asked in history.endings.values() for each in asked),
        "jobs that workflows started": sum(queue in STARTED for queue, _ in history.runs),
        "dead letters": len(history.dead),
        "workers declared dead that came back": sum(len(each) - 1 for each in history.registered.values()),
    }


def recoveries(history: History) -> str:
    """How long the tasks of killed workers waited for their next run, in words."""
    waits: list[float] = []
    for runs in history.runs.values():
        for first, second in pairwise(runs):
            killed = history.killed.get(first.peer)
            if killed is not None and first.ended is None and second.began > killed:
                waits.append(second.began - killed)
    return f"{statistics.median(waits):.1f} / {max(waits):.1f}" if waits else "none"


def _table(title: str, rows: Iterable[tuple[str, object]]) -> Iterator[str]:
    lines = [(name, f"{value:,}" if isinstance(value, int) else str(value)) for name, value in rows]
    width = max((len(name) for name, _ in lines), default=0)
    wide = max((len(value) for _, value in lines), default=0)
    yield title
    for name, value in lines:
        yield f"  {name.ljust(width)}  {value.rjust(wide)}"
    yield ""


def report(plan: Plan, outcome: Outcome, history: History, verdict: Verdict, folder: Path) -> str:
    """The whole report, as text."""
    lines = [f"chaos: {plan.minutes:g} min of faults on {plan.server}, seed {plan.seed}", ""]
    lines += _table(f"faults: {outcome.faults.total():,}", sorted(outcome.faults.items()))
    lines += [f"left out: {reason}" for reason in outcome.left_out]
    counts: dict[str, object] = {f"{role} started": count for role, count in sorted(outcome.started.items())}
    counts |= figures(history)
    counts["seconds until the task of a killed worker ran again, median / longest"] = recoveries(history)
    counts |= {
        "seconds until all queues were empty": f"{outcome.drained:.1f}",
        "seconds in all": f"{outcome.seconds:.0f}",
    }
    lines += _table("work", counts.items())
    if verdict.explained:
        lines += _table("explained by faults, as the guarantees say", sorted(verdict.explained.items()))
    lines += _violations(verdict, folder)
    lines += [f"repeat it: {command(plan)}"]
    lines += [f"ledger: {folder}"] if verdict.violations else []
    word = f"FAILED: {len(verdict.violations)} violations" if verdict.violations else "passed: no violation"
    return "\n".join([*lines, f"chaos {word}"])


def _violations(verdict: Verdict, folder: Path) -> Iterator[str]:
    if not verdict.violations:
        return
    yield from _table(
        f"violations: {len(verdict.violations)}", sorted(Counter(each.rule for each in verdict.violations).items())
    )
    shown = Counter[str]()
    for violation in verdict.violations:
        shown[violation.rule] += 1
        if shown[violation.rule] > 3 or shown.total() > SHOWN:
            continue
        yield f"VIOLATION: {violation.rule}: {violation.text}"
        for line in lines_about(folder, set(violation.words)):
            yield f"    {line[:300]}"
        yield ""
