"""Rules about runs: each task ends once, each claim is run once, no id runs twice at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from benchmarks.chaos.case import Case, Rule, Violation, told, violation
from benchmarks.chaos.excuses import SLACK
from benchmarks.chaos.history import History, Run, Subject
from benchmarks.chaos.workload import CONCURRENCY, LIMITED, PERIOD, STARTS, starters_of


def ended_twice(case: Case) -> Iterator[Violation]:
    """A task that has ended does not run again."""
    rule = "a task ran again after its end"
    for (queue, task), runs in case.history.runs.items():
        for first, second in pairwise(runs):
            if not first.is_final or (first.how != "returned" and _was_put_back(case.history, first, second)):
                continue
            if first.id != second.id and any(case.history.put_back.get(name) for _, name in starters_of(task)):
                continue  # the workflow that has started it was started anew
            if not case.explain(rule, _why_again(case, first, second)):
                yield violation(rule, f"{queue} {task}: {told(first)}; {told(second)}", first, second)


def _was_put_back(history: History, first: Run, second: Run) -> bool:
    """The failed jobs of its batch were put back between these runs, or the workflow that has started it, or it is one."""
    request = history.by_task.get((first.queue, first.task))
    names = [first.task, *(name for _, name in starters_of(first.task)), *([request.batch] if request else [])]
    return any(starts_anew(history, name, first, second) for name in names)


def starts_anew(history: History, name: str, first: Run, second: Run) -> bool:
    """A batch or a workflow of this name was put back between these runs."""
    begin = first.began if first.ended is None else first.ended
    return any(
        each.sent <= second.began + SLACK and (each.answered is None or each.answered >= begin)
        for each in history.put_back.get(name, ())
    )


def _why_again(case: Case, first: Run, second: Run) -> str | None:
    """Why a task may run after its end: its worker lost the claim, or it is a moment of a schedule that comes again."""
    why = _why_lost(case, first, second)
    if why is None and first.nominal is not None:
        return case.excuses.rewound(first.nominal, first.began, second.began)
    return why


def _why_lost(case: Case, first: Run, second: Run) -> str | None:
    """Why the earlier claim was lost. It may even begin after the later one, if its worker was frozen with the reply unread."""
    why = case.excuses.lost_claim(first, max(first.began, second.began))
    return f"{why}, and began after the other" if why is not None and first.began > second.began else why


def began_after_result(case: Case) -> Iterator[Violation]:
    """Once a producer has the result, no fault is an excuse: the server had the end."""
    rule = "a task ran again after its result was read"
    for result in case.history.results:
        if result.outcome != "finished":
            continue
        runs = case.history.runs.get((result.queue, result.task), [])
        before = max((run.fence for run in runs if run.began <= result.t), default=0)
        for run in runs:
            if run.began > result.t + SLACK and run.fence > before:
                why = "failover" if case.excuses.in_failover(result.t - 10, run.began) else None
                if not case.explain(rule, why):
                    yield violation(
                        rule, f"{result.queue} {result.task}: result at {result.t:.3f}; {told(run)}", result.task
                    )


def claimed_twice(case: Case) -> Iterator[Violation]:
    """One claim is one run."""
    for run in case.history.twice_begun:
        yield violation("a claim was run twice", f"{run.queue} {run.task}: {told(run)}", run)
    for (queue, task), runs in case.history.runs.items():
        for first, second in pairwise(runs):
            if first.fence == second.fence:
                yield violation(
                    "a claim was held twice", f"{queue} {task}: {told(first)}; {told(second)}", first, second
                )


def at_once(case: Case) -> Iterator[Violation]:
    """No id, and no task, runs twice at once."""
    rule = "an id ran twice at once"
    by_id: dict[Subject, list[Run]] = defaultdict(list)
    for (queue, task), runs in case.history.runs.items():
        for run in runs:  # a raw task gets another id when it becomes a job
            by_id[queue, task if run.id.startswith("@") or run.id == task else f"id {run.id}"].append(run)
    for (queue, name), runs in by_id.items():
        runs.sort(key=lambda run: run.fence)
        for at, first in enumerate(runs):
            for second in runs[at + 1 : at + 4]:
                ends = [_end(case.history, run) for run in (first, second)]
                if max(first.began, second.began) >= min(ends):
                    continue
                if not case.explain(rule, _why_lost(case, first, second)):
                    yield violation(rule, f"{queue} {name}: {told(first)}; {told(second)}", first, second)


def _end(history: History, run: Run) -> float:
    """When it ended at the latest."""
    killed = history.killed.get(run.peer, float("inf"))
    return min(killed + SLACK, float("inf") if run.ended is None else run.ended)


def over_limit(case: Case) -> Iterator[Violation]:
    """Of a queue with a limit, and of each lane with one, no more tasks run at once than it allows."""
    by_group: dict[Subject, list[Run]] = defaultdict(list)
    for (queue, _), runs in case.history.runs.items():
        if queue in CONCURRENCY:
            for run in runs:
                by_group[queue, run.lane].append(run)
    for (queue, lane), runs in by_group.items():
        runs.sort(key=lambda run: run.began)
        running: list[Run] = []
        for run in runs:
            running = [each for each in running if _end(case.history, each) > run.began]
            lost = [why for each in running if (why := case.excuses.lost_claim(each, run.began)) is not None]
            running.append(run)
            over = len(running) - CONCURRENCY[queue]
            why = lost[0] if over > 0 and len(lost) >= over else case.excuses.lost_claim(run, run.began)
            if over > 0 and not case.explain("a limit was exceeded", why):
                text = f"{queue} {lane}: {len(running)} at once: {'; '.join(map(told, running))}"
                yield violation("a limit was exceeded", text, *running)


def over_rate(case: Case) -> Iterator[Violation]:
    """No more tasks start in a period than the rate allows. A claim's number is the server's time in microseconds."""
    claims = sorted(
        (run for (queue, _), runs in case.history.runs.items() if queue == LIMITED for run in runs),
        key=lambda run: run.fence,
    )
    for first, last in zip(claims, claims[STARTS:], strict=False):
        if last.fence - first.fence >= PERIOD * 1e6 - 2000:  # the period is counted in milliseconds
            continue
        begin, end = sorted((first.began, last.began))
        is_new = case.excuses.in_failover(begin - 10, end)
        why = "failover" if is_new else "clock jump" if case.excuses.jumped(begin - 10, end) else None
        if why is None and case.excuses.is_behind(begin - 10):
            why = "clock set back"
        if not case.explain("a rate was exceeded", why):
            text = f"{LIMITED}: {STARTS + 1} starts in {(last.fence - first.fence) / 1e6:.3f} s, to {told(last)}"
            yield violation("a rate was exceeded", text, first, last)


def still_running(case: Case) -> Iterator[Violation]:
    """Every run ends, unless its process was killed."""
    rule = "a run did not end"
    for (queue, task), runs in case.history.runs.items():
        for run in runs:
            hangs = run.ended is None and run.peer not in case.history.killed
            if hangs and not case.explain(rule, case.excuses.never_ended(run)):
                yield violation(rule, f"{queue} {task}: {told(run)}", run)


def lost_workers(case: Case) -> Iterator[Violation]:
    """A worker that is well is not declared dead."""
    rule = "a worker was declared dead"
    for peer, registered in case.history.registered.items():
        for t in registered[1:]:
            if not case.explain(rule, case.excuses.lost_worker(peer, t)):
                yield violation(rule, f"{peer} got a new worker id at {t:.3f}", peer)


RUN_RULES: list[Rule] = [
    ended_twice,
    began_after_result,
    claimed_twice,
    at_once,
    over_limit,
    over_rate,
    still_running,
    lost_workers,
]
