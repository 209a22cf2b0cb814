from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worqr.history_records import (
    FIELDS,
    OUTCOMES,
    RUN_BOUNDS,
    RUN_FIELDS,
    WAIT_BOUNDS,
    WAIT_FIELDS,
    RunCounts,
    run_bucket,
    wait_bucket,
    waited_ms,
)


@pytest.mark.parametrize(
    ("seconds", "bucket"),
    [
        (-1, 0),
        (0, 0),
        (0.0009, 0),
        (0.001, 1),
        (0.0019, 1),
        (0.002, 2),
        (0.25, 8),
        (262.143, 18),
        (262.144, 19),
        (1e9, 19),
    ],
)
def test_run_times_have_buckets_by_powers_of_two(seconds: float, bucket: int) -> None:
    assert run_bucket(seconds) == bucket


@pytest.mark.parametrize(
    ("ms", "bucket"),
    [(-5, 0), (0, 0), (1, 1), (3, 1), (4, 2), (15, 2), (16, 3), (4**14 - 1, 14), (4**14, 15), (10**15, 15)],
)
def test_waiting_times_have_buckets_by_powers_of_four(ms: int, bucket: int) -> None:
    assert wait_bucket(ms) == bucket


@given(st.integers(0, 10**7))
def test_a_bucket_lies_between_its_bounds(ms: int) -> None:
    run, wait = run_bucket(ms / 1000 + 1e-9), wait_bucket(ms)
    for bucket, bounds in ((run, RUN_BOUNDS), (wait, WAIT_BOUNDS)):
        assert bucket == len(bounds) or ms / 1000 < bounds[bucket]
        assert bucket == 0 or ms / 1000 >= bounds[bucket - 1]


def test_each_field_has_one_name() -> None:
    assert len(set(FIELDS)) == len(FIELDS) == 43
    assert (len(RUN_FIELDS), len(RUN_BOUNDS), len(WAIT_FIELDS), len(WAIT_BOUNDS)) == (20, 19, 16, 15)


FENCE = 1_700_000_010_000_000  # µs
NOW = FENCE // 1000


@pytest.mark.parametrize(
    ("record", "waited"),
    [
        ({b"queued": str(FENCE - 250_000).encode(), b"run_at": str(NOW - 250).encode()}, 250),
        ({b"queued": str(FENCE - 9_000_000).encode(), b"run_at": str(NOW - 40).encode()}, 40),  # scheduled
        ({b"queued": str(FENCE - 90_000).encode(), b"run_at": b"1000"}, 90),  # for a time in the past
        ({b"queued": str(FENCE - 90_000).encode()}, 90),
        ({b"queued": str(FENCE - 90_000).encode(), b"started": b"1", b"run_at": b"1000"}, None),  # retried at once
        ({b"queued": str(FENCE - 90_000).encode(), b"started": b"1", b"run_at": str(NOW - 20).encode()}, 20),
        ({b"id": b"x", b"task": b""}, None),
        ({b"queued": str(FENCE + 50_000).encode()}, 0),  # the server's clock was set back
    ],
)
def test_a_job_waited_since_it_was_ready(record: dict[bytes, bytes], waited: int | None) -> None:
    assert waited_ms(record, FENCE) == waited


@pytest.mark.parametrize("odd", [b"", b"abc", b"-1", b"1.5", b"1e308", b"nan", b"\xff", b"9" * 5000])
def test_a_time_that_is_no_number_is_unknown(odd: bytes) -> None:
    assert waited_ms({b"run_at": odd, b"queued": odd}, FENCE) is None
    assert waited_ms({b"run_at": b"%d" % (FENCE // 1000 - 7), b"queued": odd}, FENCE) == 7


def test_runs_of_one_reply_are_counted_together() -> None:
    counts = RunCounts()
    assert not counts
    counts.add_returned([10.0, 10.0, 10.5], 10.75)
    counts.add("raised")
    counts.add_waits([0, 3, 20])
    assert counts
    taken = {"ok": 3, "r10": 2, "r8": 1, "rs": 1750, "raised": 1, "w0": 1, "w1": 1, "w3": 1, "ws": 23}
    assert counts.take() == (taken, ())
    assert not counts
    assert counts.take() == ({}, ())


def test_short_runs_add_up() -> None:
    """A run of 0.3 ms is 0 ms in whole numbers; a thousand of them are 300."""
    counts, total = RunCounts(), 0
    for _ in range(1000):
        counts.add_returned([5.0], 5.0003)
        total += counts.take()[0].get("rs", 0)
    assert total in (299, 300)


@given(st.lists(st.tuples(st.floats(0, 1000), st.sampled_from(OUTCOMES), st.integers(0, 10**6)), max_size=20))
def test_counts_that_were_put_back_are_not_lost(runs: list[tuple[float, str, int]]) -> None:
    counted, expected = RunCounts(), RunCounts()
    for took, outcome, waited in runs:
        for counts in (counted, expected):
            counts.add_returned([0.0], took)
            counts.add(outcome)
            counts.add_waits([waited])
        counted.put_back(*counted.take())
    (found, _), (wanted, _) = counted.take(), expected.take()
    assert abs(found.pop("rs", 0) - wanted.pop("rs", 0)) <= 1
    assert found == wanted
