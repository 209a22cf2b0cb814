"""Rules about workflows: what waits return, the jobs that they start, and their follow-ups. Steps: `room_rules.steps`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Final

from benchmarks.chaos.case import Case, Rule, Violation, told, violation
from benchmarks.chaos.excuses import SLACK
from benchmarks.chaos.history import Run, Step, Subject
from benchmarks.chaos.workload import FLOW_JOBS, FLOWS, FOLLOW_UPS, SLEPT, TIMED_OUT, follow_up_of, script_of

CANCELS_WITHIN: Final = 10.0
"""Seconds between the end of a workflow that was cancelled and that of its jobs: 5 s for each message, if a leader dies."""


def _flows(case: Case) -> Iterator[tuple[Subject, list[Run]]]:
    for subject, runs in case.history.runs.items():
        if subject[0] in FLOWS:
            yield subject, runs


def _failover(case: Case, begin: float, end: float) -> str | None:
    return "failover" if case.excuses.in_failover(begin - SLACK, end + SLACK) else None


def _values(runs: list[Run], kind: str) -> Iterator[tuple[Run, Step]]:
    """What the waits of a kind have returned to each run."""
    for run in runs:
        yield from ((run, step) for step in run.steps if step.name.startswith(kind) and step.value is not None)


# Waits


def events(case: Case) -> Iterator[Violation]:
    """A wait returns a value that was sent before, and not refused. Each value ends one wait."""
    for subject, runs in _flows(case):
        sent = {signal.value: signal for signal in case.history.signals.get(subject, ())}
        taken: dict[str, str] = {}
        for run, step in _values(runs, "event"):
            value = str(step.value)
            if value == TIMED_OUT:
                continue
            signal = sent.get(value)
            if signal is None or signal.sent > step.t or signal.answer not in {None, "woke", "stored"}:
                rule = "a wait returned what was not sent"
            elif taken.setdefault(value, step.name) != step.name:
                rule = "a value ended two waits"
            else:
                continue
            if not case.explain(rule, _failover(case, runs[0].began, step.t)):
                yield violation(rule, f"{subject[1]}: {step.name} {value!r}: {told(run)}", subject[1])


def times(case: Case) -> Iterator[Violation]:
    """No sleep and no wait is over before its time, and no wait times out for which a value was stored in time."""
    for subject, runs in _flows(case):
        script, began = script_of(subject[1]), runs[0].began
        asleep = {"sleep": began + script.seconds}
        deadlines = asleep | {f"event {n}": asleep["sleep"] + least for n, least in enumerate(script.timeouts)}
        values = {step.name: step.value for _, step in _values(runs, "event")}
        for run, step in _values(runs, ""):
            if step.name not in deadlines or step.value not in {TIMED_OUT, SLEPT}:
                continue
            deadline = deadlines[step.name]
            stored = [
                each for each in case.history.signals.get(subject, ()) if each.stored and each.answered < deadline
            ]
            taken = [name for name, value in values.items() if name < step.name and value != TIMED_OUT]
            if step.t < deadline - SLACK:
                rule = "a wait was over before its time"
            elif step.value == TIMED_OUT and len(stored) > len(taken):
                rule = "a wait missed its value"
            else:
                continue
            why = "clock jump" if case.excuses.jumped(began - SLACK, step.t) else _failover(case, began, step.t)
            if not case.explain(rule, why):
                yield violation(rule, f"{subject[1]}: {step.name}: {told(run)}", subject[1])


# Jobs of workflows


def origins(case: Case) -> Iterator[Violation]:
    """Only the jobs of accepted workflows run, and each under one id."""
    for (queue, task), runs in case.history.runs.items():
        if queue != FLOW_JOBS:
            continue
        flow = task.rpartition("/")[0]
        request = case.history.by_task.get((flow.partition("/")[0], flow))
        if request is None or request.refused or task not in script_of(flow).jobs:
            yield violation("a job ran that no workflow started", f"{task}: {told(runs[0])}", task)
        if len({run.id for run in runs}) > 1:
            yield violation("a job of a workflow ran under two ids", f"{task}: {', '.join(map(told, runs))}", task)


def outcomes(case: Case) -> Iterator[Violation]:
    """A workflow sees how its jobs have ended, and each of its jobs has ended when all is over."""
    dead = {entry.task for entry in case.history.dead if entry.queue == FLOW_JOBS}
    for subject, runs in _flows(case):
        jobs = script_of(subject[1]).jobs
        for run, step in [*_values(runs, "job "), *_values(runs, "first")]:
            about = jobs if step.name == "first" else [step.name.removeprefix("job ")]
            rule = "a workflow saw a false end of its job"
            if step.value == TIMED_OUT or any(_is_true(case, job, str(step.value), dead) for job in about):
                continue
            if not case.explain(rule, _failover(case, runs[0].began, step.t)):
                text = f"{subject[1]}: {step.name}: {step.value}: {told(run)}"
                yield violation(rule, text, subject[1], *about)
        rule = "a job of a workflow did not end"
        for job in jobs if any(run.how == "returned" for run in runs) else ():
            has_ended = any(run.is_final for run in case.history.runs.get((FLOW_JOBS, job), ()))
            if has_ended or job in dead or _cancelled(case, (FLOW_JOBS, job)) or _cancelled(case, subject):
                continue
            if not case.explain(rule, "failover" if case.history.failovers else None):
                yield violation(rule, f"{job}, of {told(runs[-1])}", subject[1], job)


def _is_true(case: Case, job: str, outcome: str, dead: set[str]) -> bool:
    """The job ended as its workflow saw it."""
    how, _, number = outcome.partition(" ")
    if how == "finished":
        ends = case.history.runs.get((FLOW_JOBS, job), [])
        return any(run.how == "returned" and run.fence == int(number) for run in ends)
    return job in dead if how == "failed" else how == "cancelled" and _cancelled(case, (FLOW_JOBS, job))


def _cancelled(case: Case, subject: Subject) -> bool:
    return any(cancel.may_have_hit for cancel in case.history.cancels.get(subject, ()))


def cancelled_with_it(case: Case) -> Iterator[Violation]:
    """After a workflow was cancelled, its jobs do not begin any more."""
    rule = "a job began long after its workflow was cancelled"
    for subject, runs in _flows(case):
        hits = [each for each in case.history.cancels.get(subject, ()) if each.waiting + each.running]
        if not hits or any(run.is_final for run in runs):
            continue
        at = max([hits[0].answered or hits[0].sent, *(run.ended or run.began for run in runs)])
        for job in script_of(subject[1]).jobs:
            for run in case.history.runs.get((FLOW_JOBS, job), ()):
                late = run.began - at - case.excuses.trouble("world", at, run.began)
                if late > CANCELS_WITHIN and not case.explain(rule, _failover(case, at, run.began)):
                    text = f"{subject[1]}: cancelled at {at:.3f}; {job}: {told(run)}"
                    yield violation(rule, text, subject[1], job)


# Follow-ups


def followed(case: Case) -> Iterator[Violation]:
    """The end of a workflow enqueues its one follow-up, which ends: `then` if it has finished, else `otherwise`."""
    rule, history = "a workflow did not have its one follow-up", case.history
    found: dict[str, list[list[Run]]] = defaultdict(list)
    for (queue, _), runs in history.runs.items():
        if queue == FOLLOW_UPS:
            found[runs[0].task].append(runs)
    dead = {(entry.queue, entry.task) for entry in history.dead}
    for request in history.requests:
        subject = request.queue, request.tasks[0]
        if not request.follows:
            continue
        kinds = [(kind, runs) for kind in ("then", "otherwise") for runs in found[follow_up_of(subject[1], kind)]]
        due = {"then"} if any(run.how == "returned" for run in history.runs.get(subject, ())) else set[str]()
        due |= {"otherwise"} if subject in dead or _cancelled(case, subject) else set()
        least = 1 if request.stored else 0
        is_right = least <= len(kinds) <= 1 and all(
            kind in due and any(run.is_final for run in runs) for kind, runs in kinds
        )
        if not is_right and not case.explain(rule, "failover" if history.failovers else None):
            text = f"{subject[1]}: due {sorted(due)}, ran {[kind for kind, _ in kinds]}"
            yield violation(rule, text, subject[1], *(follow_up_of(subject[1], kind) for kind in ("then", "otherwise")))


FLOW_RULES: list[Rule] = [events, times, origins, outcomes, cancelled_with_it, followed]
