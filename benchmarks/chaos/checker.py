"""The checker: all rules, applied to a history."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from benchmarks.chaos.batch_rules import BATCH_RULES
from benchmarks.chaos.case import Case, Rule, Violation
from benchmarks.chaos.end_rules import END_RULES
from benchmarks.chaos.excuses import Excuses
from benchmarks.chaos.flow_rules import FLOW_RULES
from benchmarks.chaos.history import History
from benchmarks.chaos.room_rules import ROOM_RULES
from benchmarks.chaos.run_rules import RUN_RULES
from benchmarks.chaos.task_rules import TASK_RULES

RULES: list[Rule] = [*RUN_RULES, *TASK_RULES, *BATCH_RULES, *ROOM_RULES, *FLOW_RULES, *END_RULES]


@dataclass(frozen=True)
class Verdict:
    """The findings. `explained`: apparent violations that a fault explains, by rule and fault."""

    violations: list[Violation] = field(default_factory=list[Violation])
    explained: Counter[str] = field(default_factory=Counter[str])


def check(history: History) -> Verdict:
    """Apply all rules."""
    case = Case(history, Excuses(history))
    found = [violation for rule in RULES for violation in rule(case)]
    return Verdict(found, case.explained)
