"""The parts of a figure: some runs of worqr, as many of its limit, and perhaps a bar."""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

Run = Callable[[], Awaitable[float]]
RATES = frozenset({"tasks/s", "jobs/s"})


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure. `quick` is a smoke run: it shows that everything works, its figures mean nothing.

    `figures` is the folder to draw into; None: nothing is drawn. `many`: measure also what takes a large machine.
    """

    quick: bool = False
    figures: Path | None = None
    many: bool = False

    @property
    def runs(self) -> int:
        """Runs of each figure."""
        return 2 if self.quick else 5

    def size(self, full: int, quick: int) -> int:
        """`full`, or `quick` for a smoke run."""
        return quick if self.quick else full

    def seconds(self, full: float) -> float:
        """A time to watch something that is idle."""
        return 1.0 if self.quick else full


@dataclass(frozen=True, slots=True)
class Bar:
    """A goal of the design: at least `value`, or with `most` at most `value`."""

    value: float
    most: bool = False

    def met(self, measured: float) -> bool:
        return measured <= self.value if self.most else measured >= self.value

    def __str__(self) -> str:
        return f"{'<=' if self.most else '>='} {shown(self.value)}"


@dataclass(slots=True)
class Row:
    """One line of a table.

    Attributes:
        what: what was measured.
        unit: of `values` and `limits`; without a bar a rate of `RATES` is better when it is higher, all others when lower.
        values: one per run.
        limits: one per run, of the same thing done with as little as possible; empty: it has none.
        bar: judged by the median, or with `worst` by the worst run.
    """

    what: str
    unit: str
    values: list[float]
    limits: list[float] = field(default_factory=list[float])
    bar: Bar | None = None
    worst: bool = False

    @property
    def more_is_better(self) -> bool:
        return self.unit in RATES if self.bar is None else not self.bar.most

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def best(self) -> float:
        return max(self.values) if self.more_is_better else min(self.values)

    @property
    def worst_run(self) -> float:
        return min(self.values) if self.more_is_better else max(self.values)

    @property
    def limit(self) -> float | None:
        return statistics.median(self.limits) if self.limits else None

    @property
    def ratio(self) -> float | None:
        """Ours by the limit: the median of the pairs, each measured side by side."""
        pairs = ratios(self.values, self.limits)
        return statistics.median(pairs) if pairs else None

    @property
    def met(self) -> bool | None:
        if self.bar is None:
            return None
        return self.bar.met(self.worst_run if self.worst else self.median)


@dataclass(slots=True)
class Table:
    """One subject's lines. `limit` explains the limit; `notes` has what a reader must know."""

    title: str
    limit: str
    rows: list[Row] = field(default_factory=list[Row])
    notes: list[str] = field(default_factory=list[str])


def ratios(values: Sequence[float], limits: Sequence[float]) -> list[float]:
    """Pair by pair; empty if there is no limit."""
    return [value / limit for value, limit in zip(values, limits, strict=True) if limit] if limits else []


def percentile(samples: Sequence[float], percent: float) -> float:
    """The smallest sample that `percent` of them do not exceed."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


async def in_turn(runs: int, *measured: Run) -> list[list[float]]:
    """Measure each `runs` times, by turns and in changing order, so that a disturbance hits all of them alike."""
    values: list[list[float]] = [[] for _ in measured]
    for run in range(runs):
        for offset in range(len(measured)):
            at = (run + offset) % len(measured)
            gc.collect()
            values[at].append(await measured[at]())
    return values


def shown(value: float) -> str:
    """Three digits that matter."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
