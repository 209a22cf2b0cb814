"""Rules about producers that wait for room, and about what jobs save."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import pairwise
from typing import Final

from benchmarks.chaos.case import Case, Rule, Violation, told, violation
from benchmarks.chaos.excuses import SLACK
from benchmarks.chaos.history import History, Request, Run
from benchmarks.chaos.run_rules import starts_anew
from benchmarks.chaos.workload import ROOM_LENGTH, SAVES, STEP_FAILED, starters_of

ROOM_WITHIN: Final = 4.0
"""Seconds in which a call that waits finds room: it asks once a second."""
LOOKS_WITHIN: Final = 1.0
"""Seconds between two looks at the queue's length, beyond which nothing is known of the time between them."""


def waits_on(case: Case) -> Iterator[Violation]:
    """No call waits on although there is room for its tasks, whichever process is killed or cut off."""
    rule = "a producer waited although there was room"
    for request in case.history.requests:
        if request.wait is None:
            continue
        for begin, end in _with_room(case.history, request):
            seconds = end - begin - case.excuses.trouble(request.producer, begin, end)
            if seconds > ROOM_WITHIN:
                text = f"{request.tasks}, sent at {request.sent:.3f}, from {begin:.3f} to {end:.3f}"
                yield violation(rule, text, *request.tasks)


def _with_room(history: History, request: Request) -> Iterator[tuple[float, float]]:
    """The times in which the call waited and the queue had room for it at each look."""
    ends = (request.returned, history.killed.get(request.producer), history.last)
    until = next(end for end in ends if end is not None)
    looks = history.lengths[bisect_left(history.lengths, (request.sent, 0)) : bisect_right(history.lengths, (until, 0))]
    begin: float | None = None
    for (t, waiting), (following, _) in pairwise([*looks, (until + LOOKS_WITHIN, 0)]):
        has_room = waiting + len(request.tasks) <= ROOM_LENGTH
        if has_room and begin is None:
            begin = t
        if begin is not None and (not has_room or following - t > LOOKS_WITHIN or following > until):
            yield begin, t
            begin = None


def saved(case: Case) -> Iterator[Violation]:
    """A run finds what was saved last: nothing older than a save that the server acknowledged to an earlier run."""
    rule = "a run found an older save than was acknowledged"
    for (queue, task), runs in case.history.runs.items():
        newest, by = 0, None
        for run in runs if queue == SAVES else ():
            if run.found < newest and not case.explain(rule, _failover(case, runs, run)):
                text = f"{queue} {task}: found {run.found}, after {newest} by {by and told(by)}; {told(run)}"
                yield violation(rule, text, task)
            for _, value in run.saved:
                newest, by = max((newest, by), (value, run), key=lambda each: each[0])


def steps(case: Case) -> Iterator[Violation]:
    """A step whose result the server has is not called again under a later claim, and every later run gets the same result.
    Failures are tried again when a workflow was put back, if nothing was stored after them.
    """
    for (queue, task), runs in case.history.runs.items():
        done: dict[str, int | str] = {}
        for before, run in zip([None, *runs], runs, strict=False):
            if before is not None and any(
                starts_anew(case.history, name, before, run) for _, name in starters_of(task)
            ):
                done.clear()
            elif before is not None and starts_anew(case.history, task, before, run):
                done = _without_last_failures(done)
            for step in run.steps:
                if step.name in done and step.value != done[step.name]:
                    rule = "a step ran again" if step.value is None else "a step had another result"
                    if not case.explain(rule, _failover(case, runs, run)):
                        text = f"{queue} {task}: step {step.name} at {step.t:.3f}: {told(run)}"
                        yield violation(rule, text, task)
                if step.value is not None:
                    done[step.name] = step.value


def _without_last_failures(done: dict[str, int | str]) -> dict[str, int | str]:
    """Of the results of steps and waits those that stay when a workflow is put back: failures stay if a step followed."""
    taken = [name for name in done if name.startswith(("step", "undo"))]
    last = max((list(done).index(name) for name in taken), default=-1)
    failed = {STEP_FAILED, "failed", "cancelled", "lost"}
    return {name: value for at, (name, value) in enumerate(done.items()) if at < last or value not in failed}


def _failover(case: Case, runs: list[Run], run: Run) -> str | None:
    """A failover may have lost what was saved last."""
    return "failover" if case.excuses.in_failover(runs[0].began, run.began + SLACK) else None


ROOM_RULES: list[Rule] = [waits_on, saved, steps]
