"""Rules about tasks: an acknowledged task ends, and a cancelled one does not run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from benchmarks.chaos.case import Case, Rule, Violation, told, violation
from benchmarks.chaos.excuses import SLACK
from benchmarks.chaos.history import Cancel, History, Request, Run, Subject, replaceable
from benchmarks.chaos.workload import FOLLOW_UPS, ROWS, STARTED

# Nothing is lost


def lost(case: Case) -> Iterator[Violation]:
    """Every task that was acknowledged ends, and so does every task that has begun, or was stored with one of these."""
    history, dead = case.history, {(entry.queue, entry.task) for entry in case.history.dead}
    cancelled = {batch.name for batch in history.batches if batch.was_cancelled}
    ends = _ends_by_id(history)
    for request in history.requests:
        seen = any((request.queue, task) in history.runs for task in request.tasks)
        if not (request.stored or (seen and not request.refused)):
            continue
        rule = (
            "an acknowledged task did not end" if request.stored else "a task began, or its neighbour, and did not end"
        )
        for task in request.tasks:
            subject = request.queue, task
            if subject in dead or _has_ended(history.runs.get(subject, ())) or _cancelled(history, subject):
                continue
            if request.batch in cancelled:
                continue
            if request.id is not None and replaceable(request.queue) and _replaced(request, ends):
                continue
            why = (
                "failover"
                if not request.stored and case.excuses.in_failover(request.sent - 10, request.sent + 60)
                else None
            )
            if not case.explain(rule, why):
                yield violation(rule, f"{request.queue} {task}, sent at {request.sent:.3f} by {request.producer}", task)


def kept_end(case: Case) -> Iterator[Violation]:
    """Every firing of a schedule ends."""
    for (queue, task), runs in case.history.runs.items():
        if runs[0].nominal is not None and not _has_ended(runs):
            yield violation("a firing did not end", f"{queue} {task}: {told(runs[-1])}", *runs)


def _has_ended(runs: Iterable[Run]) -> bool:
    return any(run.is_final for run in runs)


def _cancelled(history: History, subject: Subject) -> bool:
    return any(cancel.may_have_hit for cancel in history.cancels.get(subject, ()))


def _ends_by_id(history: History) -> dict[tuple[str, str], list[tuple[float, Request]]]:
    """For each id: when its runs ended for good, and the request of each run."""
    found: dict[tuple[str, str], list[tuple[float, Request]]] = defaultdict(list)
    dead = {(entry.queue, entry.task) for entry in history.dead}
    for request in history.requests:
        if request.id is None or not replaceable(request.queue):
            continue
        subject = request.queue, request.tasks[0]
        ends = [run.ended for run in history.runs.get(subject, ()) if run.is_final and run.ended is not None]
        if not ends and subject in dead:
            ends = [run.ended for run in history.runs.get(subject, ()) if run.ended is not None]
        if ends:
            found[request.queue, request.id].append((max(ends), request))
    return found


def _replaced(request: Request, ends: dict[tuple[str, str], list[tuple[float, Request]]]) -> bool:
    """A later dispatch of the id ended in its place; of one that leaves the data alone, any that ended later."""
    assert request.id is not None
    for ended, other in ends.get((request.queue, request.id), ()):
        is_later = other.answered >= request.sent
        if (is_later or request.keeps_data) and ended >= request.sent:
            return True
    return False


def rows(case: Case) -> Iterator[Violation]:
    """Each row of an outbox that was committed is one job, which ends; one that was rolled back is none."""
    history, dead = case.history, {(entry.queue, entry.task) for entry in case.history.dead}
    for subject in history.committed:
        runs = history.runs.get(subject, [])
        if subject not in dead and not _has_ended(runs):
            yield violation("a row that was committed is no job that ended", f"{subject}", subject[1])
        if len({run.id for run in runs}) > 1:
            yield violation("a row became several jobs", f"{subject}: {', '.join(map(told, runs))}", subject[1])
    for subject in history.runs:
        if subject[0] == ROWS and subject not in history.committed:
            yield violation("a job ran whose row was not committed", f"{subject}", subject[1])


# Nothing runs that must not


def refused_ran(case: Case) -> Iterator[Violation]:
    """A refused task never runs. No task runs that no producer sent."""
    for (queue, task), runs in case.history.runs.items():
        if runs[0].nominal is not None or queue in {FOLLOW_UPS, *STARTED}:
            continue
        request = case.history.by_task.get((queue, task))
        if request is None:
            yield violation("a task ran that no producer sent", f"{queue} {task}: {told(runs[0])}", task)
        elif request.refused:
            yield violation("a refused task ran", f"{queue} {task}: {told(runs[0])}", task)


def cancelled_ran(case: Case) -> Iterator[Violation]:
    """After an acknowledged cancellation no new run begins; among running tasks, at most the one claim that was being started."""
    rule = "a cancelled task came back"
    for (queue, task), cancels in case.history.cancels.items():
        runs = case.history.runs.get((queue, task), [])
        for cancel in cancels:
            if cancel.answered is None or not cancel.waiting + cancel.running:
                continue
            late = [run for run in runs if run.began > cancel.answered + SLACK]
            if not _was_starting(case, runs, late, cancel):
                why = "failover" if case.excuses.in_failover(cancel.sent - 10, late[0].began) else None
                if not case.explain(rule, why):
                    yield violation(rule, f"{queue} {task}: cancelled at {cancel.answered:.3f}; {told(late[0])}", task)


def _was_starting(case: Case, runs: list[Run], late: list[Run], cancel: Cancel) -> bool:
    """The late runs may have been claimed before: the reply was on its way, or its worker was frozen."""
    earlier = [run for run in runs if run not in late]
    assert cancel.answered is not None
    was_hit = any(
        (run.ended is None or run.ended > cancel.answered or run.how == "cancelled: cancel")
        and case.excuses.lost_claim(run, cancel.sent) is None
        for run in earlier
    )
    allowed = 1 if cancel.running and not was_hit else 0
    newest = max((run.fence for run in earlier), default=0)
    return len([run for run in late if run.fence > newest]) <= allowed


def replaced_ran(case: Case) -> Iterator[Violation]:
    """A payload that an update has replaced does not begin any more."""
    rule = "a replaced payload ran"
    by_id: dict[tuple[str, str], list[Request]] = defaultdict(list)
    for request in case.history.requests:
        if request.id is not None and replaceable(request.queue) and request.answer == "acked":
            by_id[request.queue, request.id].append(request)
    for (queue, _), requests in by_id.items():
        updates = [each for each in requests if each.outcome == "updated" and not each.keeps_data]
        for old in requests:
            for run in case.history.runs.get((queue, old.tasks[0]), ()):
                newer = [u for u in updates if u.sent >= old.answered and u.answered + SLACK < run.began]
                if newer and not case.explain(rule, case.excuses.lost_claim(run, run.began)):
                    text = f"{queue} {old.tasks[0]}, replaced at {newer[0].answered:.3f}: {told(run)}"
                    yield violation(rule, text, old.tasks[0], newer[0].tasks[0])


def too_early(case: Case) -> Iterator[Violation]:
    """A job does not begin before it is due."""
    for request in case.history.requests:
        if not request.delay or replaceable(request.queue):
            continue
        for run in case.history.runs.get((request.queue, request.tasks[0]), ()):
            early = request.sent + request.delay - run.began
            if early > SLACK and not case.excuses.jumped(request.sent - SLACK, run.began):
                text = f"{request.queue} {request.tasks[0]}, {early:.3f} s early: {told(run)}"
                yield violation("a job began before it was due", text, request.tasks[0])


TASK_RULES: list[Rule] = [lost, kept_end, rows, refused_ran, cancelled_ran, replaced_ran, too_early]
