"""The data that all rules share: a history with its excuses, and the class of violations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from benchmarks.chaos.excuses import Excuses
from benchmarks.chaos.history import History, Run


@dataclass(frozen=True)
class Violation:
    """A promise that was broken. `words`: what to look for in the ledger."""

    rule: str
    text: str
    words: frozenset[str | int] = frozenset()


@dataclass
class Case:
    """A history, and what faults have explained so far: `explained` counts by rule and fault."""

    history: History
    excuses: Excuses
    explained: Counter[str] = field(default_factory=Counter[str])

    def explain(self, rule: str, why: str | None) -> bool:
        """Count an explanation; False: there is none."""
        if why is not None:
            self.explained[f"{rule}: {why}"] += 1
        return why is not None


Rule = Callable[[Case], Iterable[Violation]]


def violation(rule: str, text: str, *about: Run | str | None) -> Violation:
    """A violation, and what to look for: of a run its task, of a firing's run its claim, for the task has only one name."""
    words = [(each.task if each.nominal is None else each.fence) if isinstance(each, Run) else each for each in about]
    return Violation(rule, text, frozenset(word for word in words if word))


def told(run: Run) -> str:
    """A run in words."""
    end = "did not end" if run.ended is None else f"{run.how} at {run.ended:.3f}"
    return f"{run.peer} claim {run.fence} began at {run.began:.3f}, {end}"
