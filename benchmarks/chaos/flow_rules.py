"""Rules about workflows: what waits return, the jobs that they start, and their follow-ups. Steps: `room_rules.steps`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from math import inf
from typing import Final

from benchmarks.chaos.case import Case, Rule, Violation, told, violation
from benchmarks.chaos.excuses import SLACK
from benchmarks.chaos.history import Run, Signal, Step, Subject
from benchmarks.chaos.workload import (
    FLOW_BRIEF,
    FLOW_JOBS,
    FLOW_NESTED,
    FLOWS,
    FOLLOW_UPS,
    HELD_FOR,
    LIFETIME,
    MAIL,
    NESTS,
    NEXT_TRY,
    OVER,
    SLEPT,
    STARTED,
    TIMED_OUT,
    follow_up_of,
    queue_of_job,
    script_of,
    starters_of,
)

ENDS_WITHIN: Final = 20.0
"""Seconds between the request that ends a wait and the run that sees it: runs in between may fail, and workers be killed."""
RECOVERS_WITHIN: Final = 8.0
"""Seconds until the claims of a killed worker are given back, or ended."""
CANCELS_WITHIN: Final = 10.0
"""Seconds between the end of a workflow that was cancelled and that of its jobs: 5 s for each message, if a leader dies."""


def _flows(case: Case) -> Iterator[tuple[Subject, list[Run]]]:
    for subject, runs in case.history.runs.items():
        if subject[0] in FLOWS or subject[0] == FLOW_NESTED:
            yield subject, runs


def _failover(case: Case, begin: float, end: float) -> str | None:
    return "failover" if case.excuses.in_failover(begin - SLACK, end + SLACK) else None


def _jump_or_failover(case: Case, begin: float, end: float) -> str | None:
    return "clock jump" if case.excuses.jumped(begin - SLACK, end) else _failover(case, begin, end)


def _values(runs: list[Run], *kinds: str) -> Iterator[tuple[Run, Step]]:
    """What the waits of some kinds have returned to each run."""
    for run in runs:
        yield from ((run, step) for step in run.steps if step.name.startswith(kinds) and step.value is not None)


# Waits


def events(case: Case) -> Iterator[Violation]:
    """A wait returns a value that was sent before, and not refused. Each value ends one wait, in the order in which they were
    sent.
    """
    for subject, runs in _flows(case):
        sent = {signal.value: signal for signal in case.history.signals.get(subject, ())}
        taken: dict[str, str] = {}
        for run, step in _values(runs, "event", "mail"):
            value = str(step.value)
            if value in {TIMED_OUT, OVER}:
                continue
            signal = sent.get(value)
            if signal is None or signal.sent > step.t or signal.answer not in {None, "woke", "stored"}:
                rule = "a wait returned what was not sent"
            elif taken.setdefault(value, step.name) != step.name:
                rule = "a value ended two waits"
            elif _is_out_of_turn(signal, step.name, {name: sent[each] for each, name in taken.items()}):
                rule = "a wait returned a value out of turn"
            else:
                continue
            if not case.explain(rule, _failover(case, runs[0].began, step.t)):
                yield violation(rule, f"{subject[1]}: {step.name} {value!r}: {told(run)}", subject[1])


def _is_out_of_turn(signal: Signal, wait: str, taken: dict[str, Signal]) -> bool:
    """An earlier wait of the same event has taken a value that was sent after this one was stored."""
    kind, _, number = wait.partition(" ")
    return any(
        name.startswith(f"{kind} ") and int(name.partition(" ")[2]) < int(number) and other.sent > signal.answered
        for name, other in taken.items()
    )


def times(case: Case) -> Iterator[Violation]:
    """No sleep and no wait is over before its time, unless its producer has ended it. No wait times out for which a value was
    stored in time.
    """
    for subject, runs in _flows(case):
        ends = [each for each in case.history.endings.get(subject, ()) if each.may_have_hit]
        deadlines, began = _deadlines(case, subject, runs), runs[0].began
        values = {step.name: str(step.value) for _, step in _values(runs, "event", "mail")}
        for run, step in _values(runs, ""):
            if step.name not in deadlines or step.value not in {TIMED_OUT, SLEPT}:
                continue
            deadline = min([deadlines[step.name], *(each.sent for each in ends if each.wait == step.name)])
            if step.t < deadline - SLACK:
                rule = "a wait was over before its time"
            elif step.value == TIMED_OUT and _missed(case, subject, step.name, values, deadline):
                rule = "a wait missed its value"
            else:
                continue
            if not case.explain(rule, _jump_or_failover(case, began, step.t)):
                yield violation(rule, f"{subject[1]}: {step.name}: {told(run)}", subject[1])


def _deadlines(case: Case, subject: Subject, runs: list[Run]) -> dict[str, float]:
    """The earliest moment at which each wait of a workflow can be over, by its name."""
    script = script_of(subject[1])
    asleep = runs[0].began
    if not any(each.wait == "sleep" and each.may_have_hit for each in case.history.endings.get(subject, ())):
        asleep += script.seconds
    found = {"sleep": runs[0].began + script.seconds, "held": asleep + HELD_FOR}
    found |= {f"event {n}": asleep + least for n, least in enumerate(script.timeouts)}
    sent = {signal.value: signal.sent for signal in case.history.signals.get(subject, ())}
    since = asleep
    for n in range(len(script.mails) + 1):
        found[f"mail {n}"] = since + script.mail
        taken = [str(step.value) for _, step in _values(runs, f"mail {n}") if step.name == f"mail {n}"]
        since = max([since, *(sent.get(value, 0.0) for value in taken)])
    return found


def _missed(case: Case, subject: Subject, wait: str, values: dict[str, str], deadline: float) -> bool:
    """More values were stored before `deadline` than earlier waits of the same event have taken."""
    kind, _, number = wait.partition(" ")
    stored = [
        each
        for each in case.history.signals.get(subject, ())
        if each.stored and each.answered < deadline and (f" {MAIL} " in each.value) == (kind == "mail")
    ]
    earlier = [f"{kind} {n}" for n in range(int(number or 0))]
    taken = [name for name in earlier if values.get(name, TIMED_OUT) not in {TIMED_OUT, OVER}]
    return kind in {"event", "mail"} and len(stored) > len(taken)


def ended_waits(case: Case) -> Iterator[Violation]:
    """A wait that its producer has ended returns soon."""
    rule = "a wait went on that was ended"
    for subject, endings in case.history.endings.items():
        runs = case.history.runs.get(subject, [])
        for ending in endings:
            if ending.answer != "ended" or _cancelled(case, subject):
                continue
            seen = min((step.t for _, step in _values(runs, ending.wait) if step.name == ending.wait), default=inf)
            until = min(seen, case.history.last)
            late = until - ending.answered - case.excuses.trouble("world", ending.answered, until)
            if seen < inf and late <= ENDS_WITHIN:
                continue
            if not case.explain(rule, _jump_or_failover(case, ending.answered, until)):
                text = f"{subject[1]}: {ending.wait}, ended at {ending.answered:.3f}: {told(runs[-1]) if runs else 'no run'}"
                yield violation(rule, text, subject[1])


def lifetimes(case: Case) -> Iterator[Violation]:
    """The waits of a workflow with a lifetime end with it, and not before. Those of others do not end so."""
    for subject, runs in _flows(case):
        request = case.history.by_task.get(subject)
        since = runs[0].began if request is None else request.sent
        over = since + LIFETIME if subject[0] == FLOW_BRIEF else inf
        was_ended = any(each.wait == "held" and each.may_have_hit for each in case.history.endings.get(subject, ()))
        for run, step in _values(runs, ""):
            why = _failover(case, since, step.t)
            if step.value == OVER and step.t < over - SLACK:
                rule, why = "a lifetime was over before its time", _jump_or_failover(case, since, step.t)
            elif step.name == "held" and step.value == TIMED_OUT and over < inf and not was_ended:
                rule, why = "a wait outlived its workflow", why or _ended_by_clock(case, since, runs[0].began)
            else:
                continue
            if not case.explain(rule, why):
                yield violation(rule, f"{subject[1]}: {step.name} at {step.t:.3f}: {told(run)}", subject[1])


def _ended_by_clock(case: Case, sent: float, began: float) -> str | None:
    """Why the time of a wait may be over as soon as the lifetime: the server's clock was moved.

    The end of the lifetime is a time of that clock. If it is set back, the lifetime lasts longer, but no wait that begins later.
    """
    over, out = _reached(case, sent, LIFETIME), _reached(case, began, HELD_FOR)
    was_set_back = any(
        sent <= t <= over + ENDS_WITHIN and to < before
        for t, to, before in zip(
            case.history.clock_jumps, case.history.offsets, [0.0, *case.history.offsets], strict=False
        )
    )
    return "clock jump" if out - over < ENDS_WITHIN or was_set_back else None


def _reached(case: Case, begin: float, seconds: float) -> float:
    """When the server's clock had first gone on by so many seconds."""
    jumps = list(zip(case.history.clock_jumps, case.history.offsets, strict=True))
    offset = next((to for t, to in reversed(jumps) if t <= begin), 0.0)
    target = begin + offset + seconds
    for t, to in [(t, to) for t, to in jumps if t > begin]:
        if t + offset >= target:
            break
        if t + to >= target:
            return t
        offset = to
    return target - offset


# Jobs of workflows


def origins(case: Case) -> Iterator[Violation]:
    """Only the jobs of accepted workflows run, and each under one id, unless its workflow was started anew."""
    for (queue, task), runs in case.history.runs.items():
        if queue not in STARTED:
            continue
        starters = list(starters_of(task))
        request = case.history.by_task.get(starters[-1]) if starters else None
        is_due = starters and task in script_of(starters[0][1]).jobs and queue == queue_of_job(task)
        if request is None or request.refused or not is_due:
            yield violation("a job ran that no workflow started", f"{task}: {told(runs[0])}", task)
        is_anew = any(case.history.put_back.get(name) for _, name in starters[1:])
        if len({run.id for run in runs}) > 1 and not is_anew:
            yield violation("a job of a workflow ran under two ids", f"{task}: {', '.join(map(told, runs))}", task)


def outcomes(case: Case) -> Iterator[Violation]:
    """A workflow sees how its jobs have ended, and each of its jobs has ended when all is over."""
    dead = {entry.task for entry in case.history.dead if entry.queue in STARTED} | {
        task for queue, task in case.history.buried if queue in STARTED
    }
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
        was_over = any(True for _ in _values(runs, NEXT_TRY))  # before it came to its jobs
        for job in jobs if any(run.how == "returned" for run in runs) and not was_over else ():
            found = (queue_of_job(job), job)
            has_ended = any(run.is_final for run in case.history.runs.get(found, ()))
            if has_ended or job in dead or any(_cancelled(case, each) for each in (found, *starters_of(job))):
                continue
            if not case.explain(rule, "failover" if case.history.failovers else None):
                yield violation(rule, f"{job}, of {told(runs[-1])}", subject[1], job)


def _is_true(case: Case, job: str, outcome: str, dead: set[str]) -> bool:
    """The job ended as its workflow saw it."""
    how, _, number = outcome.partition(" ")
    if how == "finished":
        ends = case.history.runs.get((queue_of_job(job), job), [])
        return any(run.how == "returned" and run.fence == int(number) for run in ends)
    return job in dead if how == "failed" else how == "cancelled" and _cancelled(case, (FLOW_JOBS, job))


def _cancelled(case: Case, subject: Subject) -> bool:
    return any(cancel.may_have_hit for cancel in case.history.cancels.get(subject, ()))


def cancelled_with_it(case: Case) -> Iterator[Violation]:
    """After a workflow was cancelled, its jobs do not begin any more, nor the jobs of these."""
    rule = "a job began long after its workflow was cancelled"
    for subject, runs in _flows(case):
        hits = [each for each in case.history.cancels.get(subject, ()) if each.waiting + each.running]
        if not hits or any(run.is_final for run in runs):
            continue
        at = hits[0].answered or hits[0].sent
        for job, begin in _below(case, subject, at):
            for run in case.history.runs.get((queue_of_job(job), job), ()):
                late = run.began - begin - case.excuses.trouble("world", begin, run.began)
                if late > CANCELS_WITHIN and not case.explain(rule, _jump_or_failover(case, at, run.began)):
                    text = f"{subject[1]}: cancelled at {at:.3f}; {job}: {told(run)}"
                    yield violation(rule, text, subject[1], job)


def _below(case: Case, flow: Subject, at: float) -> Iterator[tuple[str, float]]:
    """The jobs below a workflow that is being cancelled since `at`, and since when they are."""
    runs = case.history.runs.get(flow, [])
    if any(run.is_final for run in runs):
        return
    killed = [case.history.killed[run.peer] for run in runs if run.ended is None and run.peer in case.history.killed]
    at = max([at, *(run.ended or run.began for run in runs), *(each + RECOVERS_WITHIN for each in killed)])
    for job in script_of(flow[1]).jobs:
        yield job, at
        if job.endswith(NESTS):
            yield from _below(case, (FLOW_NESTED, job), at + CANCELS_WITHIN)


# Follow-ups


def followed(case: Case) -> Iterator[Violation]:
    """Each end of a workflow enqueues one follow-up, which ends: `then` if it has finished, else `otherwise`. It ends once, and
    once more whenever it is put back.
    """
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
        due |= {"otherwise"} if subject in dead or subject in history.buried or _cancelled(case, subject) else set()
        least = 1 if request.stored else 0
        most = 1 + sum(inf if each.answered is None else each.count for each in history.put_back.get(subject[1], ()))
        is_right = least <= len(kinds) <= most and [kind for kind, _ in kinds].count("then") <= 1
        is_right &= all(kind in due and any(run.is_final for run in runs) for kind, runs in kinds)
        if not is_right and not case.explain(rule, "failover" if history.failovers else None):
            text = f"{subject[1]}: due {sorted(due)}, ran {[kind for kind, _ in kinds]}"
            yield violation(rule, text, subject[1], *(follow_up_of(subject[1], kind) for kind in ("then", "otherwise")))


FLOW_RULES: list[Rule] = [events, times, ended_waits, lifetimes, origins, outcomes, cancelled_with_it, followed]
