"""The metrics of runs: outcomes, and how long runs took and jobs waited. Workers count them: `worqr.run_counts`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Final

from worqr.metrics.samples import Samples
from worqr.run_counts import (
    OUTCOMES,
    RUN_BOUNDS,
    RUN_FIELDS,
    RUN_SUM,
    WAIT_BOUNDS,
    WAIT_FIELDS,
    WAIT_SUM,
)

BOUNDS: Final = tuple(4**i / 1000 for i in range(1, 10))
"""The upper bounds of the buckets that Prometheus gets, in seconds: 4 ms to 262 s. Fewer bounds are fewer series."""


def add_runs(found: Samples, name: str, queues: Iterable[Mapping[str, int]]) -> None:
    """Add the sums of the totals of these queues."""
    totals: Counter[str] = Counter()
    for each in queues:
        totals.update(each)
    for outcome in OUTCOMES:
        found.add("worqr_runs_total", totals[outcome], name, outcome)
    runs, waits = _buckets(totals, RUN_FIELDS, RUN_BOUNDS), _buckets(totals, WAIT_FIELDS, WAIT_BOUNDS)
    found.add_histogram("worqr_run_seconds", runs, totals[RUN_SUM] / 1000, name)
    found.add_histogram("worqr_wait_seconds", waits, totals[WAIT_SUM] / 1000, name)


def _buckets(totals: Mapping[str, int], fields: Sequence[str], bounds: Sequence[float]) -> dict[str, int]:
    """Return how many values are below each of BOUNDS, and how many there are."""
    below = list(accumulate(totals.get(field, 0) for field in fields))
    return {**{str(bound): below[bounds.index(bound)] for bound in BOUNDS}, "+Inf": below[-1]}
