"""Rules about the end of a run: results, dead-letter records, schedules, keys, and the processes themselves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Final

from benchmarks.chaos.case import Case, Rule, Violation, violation
from benchmarks.chaos.history import History, Run, Subject
from benchmarks.chaos.workload import (
    HAND,
    MAX_FAILURES,
    MAX_STALLS,
    MAX_TIMEOUTS,
    OWED,
    PREFIX,
    SCHEDULES,
    WAITING,
    result_of,
    starters_of,
)

LONGEST_EXPIRY: Final = 31 * 24 * 3600.0
"""Seconds: counters and lists of names are kept for 30 days."""
OF_SCHEDULES: Final = ("*:outcomes", "*:done", "*:done_fired", "*:done_total", "*:done:*", "*:done_id:*")
"""Keys about the last runs of schedules."""
OF_SCHEDULES_EXPIRY: Final = (400 * 24 + 1) * 3600.0
"""Seconds: they are kept longer, because some schedules fire once a year; their list for an hour more."""
MAY_STAY: Final = (
    f"{{{PREFIX}}}:version",
    f"{{{PREFIX}}}:topics",
    f"{PREFIX}:{{*}}:batch:*",
    f"{PREFIX}:{{*}}:batches",
    f"{PREFIX}:{{*}}:part:*:follow_ups",
)
"""Keys without an expiry that are no leak: the leader deletes batches when their `keep` has passed, and then their follow-ups."""


def results(case: Case) -> Iterator[Violation]:
    """A result is the handler's return value; a failure or a cancellation did happen; no kept result is missing."""
    history, dead = case.history, {(entry.queue, entry.task) for entry in case.history.dead}
    for result in history.results:
        subject = result.queue, result.task
        true = {
            "finished": result.value == result_of(result.task) and _returned(history, subject),
            "failed": subject in dead or (subject in history.buried and result.task in history.put_back),
            "cancelled": any(cancel.may_have_hit for cancel in history.cancels.get(subject, ())),
            "none": False,
            "unknown": True,
        }[result.outcome]
        why = "failover" if not true and case.excuses.in_failover(result.t - 60, result.t) else None
        if not true and not case.explain("a result was not true", why):
            text = f"{result.queue} {result.task}: {result.outcome} {result.value!r} at {result.t:.3f}"
            yield violation("a result was not true", text, result.task)


def _returned(history: History, subject: Subject) -> bool:
    return any(run.how == "returned" for run in history.runs.get(subject, ()))


def dead_letters(case: Case) -> Iterator[Violation]:
    """A dead letter has its reason, and its failure handler was called; no other task's was."""
    history, dead = case.history, set[Subject]()
    for entry in history.dead:
        subject = entry.queue, entry.task
        if entry.queue.endswith("-fail"):
            yield violation("a failure handler failed", f"{entry.queue} {entry.task}: {entry.reason}", entry.task)
            continue
        dead.add(subject)
        if not _is_due(history, entry.reason, entry.queue, history.runs.get(subject, [])):
            text = f"{entry.queue} {entry.task}: {entry.reason}"
            yield violation("a task was dead-lettered without its reason", text, entry.task)
        if entry.queue != HAND and subject not in history.buried:
            yield violation("a failure handler was not called", f"{entry.queue} {entry.task}", entry.task)
    for queue, task in sorted(history.buried - dead):
        request = history.by_task.get((queue, task))
        names = {task, *(name for _, name in starters_of(task)), *([request.batch] if request else [])}
        if not names.isdisjoint(history.put_back):
            continue
        why = "failover" if history.failovers else None
        if not case.explain("a failure handler was called for a task that did not fail", why):
            rule = "a failure handler was called for a task that did not fail"
            yield violation(rule, f"{queue} {task}", task)


def _is_due(history: History, reason: str, queue: str, runs: list[Run]) -> bool:
    """The runs allow this reason; a settle that was lost may have counted as a stall instead."""
    match reason:
        case "failed":
            return any(run.how == "failure" for run in runs) or sum(run.counted for run in runs) >= MAX_FAILURES
        case "undecodable":
            return any(run.how == "undecodable" for run in runs)
        case "timeout":
            return sum(run.how == "cancelled: timeout" for run in runs) >= MAX_TIMEOUTS
        case "stalled":
            lost = (
                len(history.killed) + len(history.frozen) + sum(len(each) - 1 for each in history.registered.values())
            )
            return queue in MAX_STALLS and lost >= MAX_STALLS[queue]
        case _:
            return False


def schedules(case: Case) -> Iterator[Violation]:
    """Every moment fires once (`ended_twice` has the exceptions), from the first one on, until the calm phase."""
    fired: dict[str, dict[int, float]] = defaultdict(dict)
    for runs in case.history.runs.values():
        nominal = runs[0].nominal
        if nominal is not None:
            fired[runs[0].id.removeprefix("cron:")][nominal] = min(run.began for run in runs)
    for name, moments in fired.items():
        beat = SCHEDULES.get(name)
        period = 0 if beat is None else round(beat.period * 1000)
        if beat is None or any(moment % period for moment in moments):
            yield violation("a schedule fired at a moment that it does not have", name, f"cron:{name}")
        elif beat.complete:
            yield from _missed(case, name, moments, period)
    for name in SCHEDULES.keys() - fired.keys():
        yield violation("a schedule never fired", name)


def _missed(case: Case, name: str, began: dict[int, float], period: int) -> Iterator[Violation]:
    """The moments between those that fired. `began`: when the first run of each began."""
    rule = "a moment of a schedule did not fire"
    for before, after in pairwise(sorted(began)):
        missing = (after - before) // period - 1
        if missing <= 0:
            continue
        at = before / 1000 - case.history.calm.get("epoch", 0.0)
        why = "failover" if case.excuses.in_failover(at - 10, at + 10) else None
        if missing >= OWED:
            why = "more moments than are made up for"
        if case.excuses.latest_clock(began[before], began[after]) - after / 1000 >= (WAITING - 1) * period / 1000:
            why = "more firings waited than are kept"
        if not case.explain(rule, why):
            yield violation(rule, f"{name}: {missing} between {before} and {after}", f"cron:{name}")


def keys(case: Case) -> Iterator[Violation]:
    """No key is left but what expires, in time."""
    for key in case.history.keys:
        name, expires = key["name"], key["expires"]
        if expires is None and not any(fnmatchcase(name, pattern) for pattern in MAY_STAY):
            yield violation("a key was left", f"{name} ({key['type']}) never expires", name)
        elif expires is not None and expires > _longest(name):
            yield violation("a key was left", f"{name} ({key['type']}) expires in {expires:.0f} s", name)


def _longest(name: str) -> float:
    return OF_SCHEDULES_EXPIRY if any(fnmatchcase(name, each) for each in OF_SCHEDULES) else LONGEST_EXPIRY


FOUND: Final = {
    "undrained": "a queue did not become empty",
    "silent": "a schedule stopped firing",
    "died": "a process died by itself",
    "hung": "a process did not end",
}


def found_by_world(case: Case) -> Iterator[Violation]:
    """Observations while the run ended."""
    for entry in case.history.findings:
        text = " ".join(f"{name}={value}" for name, value in entry.facts.items())
        yield violation(FOUND[entry.what], text, entry.facts.get("who"))


def unfinished(case: Case) -> Iterator[Violation]:
    """A ledger that ends early proves nothing."""
    if not case.history.calm:
        yield violation("the run did not come to its end", "no calm phase in the ledger")


END_RULES: list[Rule] = [results, dead_letters, schedules, keys, found_by_world, unfinished]
