"""What users read of a history: quantiles, sums, and the points of several shards."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worqr.history_records import (
    COUNTERS,
    NO_RUNS,
    NO_WAITS,
    RUN_BOUNDS,
    RUN_BUCKETS,
    History,
    HistoryPoint,
    RunTimes,
    add_points,
    run_bucket,
    sum_of_times,
)

NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)


def times_of(*seconds: float) -> RunTimes:
    counts = [0] * RUN_BUCKETS
    for each in seconds:
        counts[run_bucket(each)] += 1
    return RunTimes(tuple(counts), RUN_BOUNDS, sum(seconds))


def bounds_of(bucket: int) -> tuple[float, float]:
    return (0.0, *RUN_BOUNDS)[bucket], (*RUN_BOUNDS, RUN_BOUNDS[-1])[bucket]


def test_without_times_there_is_no_quantile_and_no_mean() -> None:
    assert NO_RUNS.quantile(0.5) is None
    assert NO_RUNS.mean is None
    assert NO_RUNS.count == 0


def test_times_count_as_evenly_distributed_in_their_bucket() -> None:
    four = times_of(0.3, 0.3, 0.4, 0.5)  # all between 256 and 512 ms
    assert four.quantile(0) == pytest.approx(0.256)
    assert four.quantile(0.5) == pytest.approx(0.384)
    assert four.quantile(1) == pytest.approx(0.512)
    assert four.mean == pytest.approx(0.375)
    assert four.count == 4


def test_a_quantile_above_the_last_bound_is_that_bound() -> None:
    assert times_of(5000.0).quantile(0.5) == RUN_BOUNDS[-1]


def test_a_share_beyond_0_and_1_is_the_nearest_of_them() -> None:
    some = times_of(0.003, 0.1)
    assert some.quantile(-1) == some.quantile(0)
    assert some.quantile(7) == some.quantile(1)


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=50), st.floats(0, 1))
def test_a_quantile_is_in_the_bucket_of_the_exact_one(seconds: list[float], q: float) -> None:
    rank = max(1, -(-q * len(seconds) // 1))
    exact = sorted(seconds)[int(rank) - 1]
    lower, upper = bounds_of(run_bucket(exact))
    found = times_of(*seconds).quantile(q)
    assert found is not None
    assert lower - 1e-9 <= found <= upper + 1e-9


@given(st.lists(st.floats(0, 1000), max_size=50), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_share_never_has_a_smaller_quantile(seconds: list[float], one: float, other: float) -> None:
    low, high = (times_of(*seconds).quantile(q) for q in sorted((one, other)))
    if seconds:
        assert low is not None
        assert high is not None
        assert low <= high + 1e-9


@given(st.lists(st.lists(st.floats(0, 1000), max_size=10), min_size=1, max_size=5))
def test_the_sum_of_times_has_all_of_them(parts: list[list[float]]) -> None:
    together = times_of(*(each for part in parts for each in part))
    added = sum_of_times([times_of(*part) for part in parts])
    assert added.counts == together.counts
    assert added.seconds == pytest.approx(together.seconds)


def point(minute: int, **known: int) -> HistoryPoint:
    numbers = {**dict.fromkeys((*COUNTERS, "waiting", "scheduled", "running", "failed_now", "workers"), 0), **known}
    return HistoryPoint(NOON + timedelta(minutes=minute), 60.0, **numbers)  # type: ignore[arg-type]


def gap(minute: int) -> HistoryPoint:
    return HistoryPoint(NOON + timedelta(minutes=minute), 60.0)


def test_a_history_adds_up_its_points_without_the_gaps() -> None:
    history = History("Q1", 60, (point(0, finished=3), gap(1), point(2, finished=4)))
    assert history.total("finished") == 7
    assert history.total("failed") == 0
    assert history.runs == NO_RUNS
    assert history.waits == NO_WAITS
    assert [each.is_gap for each in history.points] == [False, True, False]


def test_a_counter_that_does_not_exist_is_named() -> None:
    with pytest.raises(KeyError, match=r"no counter 'done'; there are enqueued, claimed, finished, "):
        History("Q1", 60, ()).total("done")


def test_shards_are_added_and_a_gap_in_one_is_a_gap() -> None:
    one = [point(0, finished=1, workers=2, waiting=5), point(1, finished=1)]
    other = [point(0, finished=2, workers=3, waiting=1), gap(1)]
    first, second = add_points([one, other])
    assert (first.finished, first.waiting, first.workers) == (3, 6, 3)
    assert second == gap(1)
    assert add_points([one]) == one
