"""Records both ways, and the points between them: gaps, rest, totals that began anew or passed 2^32."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worqr.history_records import (
    COUNTERS,
    FROM_ZERO,
    NO_RUNS,
    RECORD_BYTES,
    RUN_BUCKETS,
    WAIT_BUCKETS,
    Record,
    decode_record,
    decode_records,
    encode_record,
    history_points,
    state_of,
)

U32 = st.integers(0, 2**32 - 1)
MINUTE = 60_000
T = 29_000_000
"""A minute since 1970."""


def record(minute: float, finished: int = 0, *, since: int = 0, **fields: object) -> Record:
    """The record of a minute, with so many tasks enqueued, claimed and finished."""
    totals = {"enqueued": finished, "claimed": finished, "finished": finished}
    known = Record(
        at_ms=round(minute * MINUTE),
        since=since,
        workers=1,
        age_ms=None,
        gauges=(0, 0, 0, 0),
        totals=tuple(totals.get(name, 0) % 2**32 for name in (*COUNTERS, "", "")),
        runs=(0,) * RUN_BUCKETS,
        waits=(0,) * WAIT_BUCKETS,
    )
    return replace(known, **fields)  # type: ignore[arg-type]


def finished(records: list[Record], now: Record, number: int = 5, step: int = 1) -> list[int | None]:
    return [point.finished for point in history_points(records, now, number, step)]


# Both ways


@given(
    st.builds(
        Record,
        at_ms=st.integers(MINUTE, 2**32 * MINUTE - 1),
        since=U32,
        workers=st.integers(0, 2**16 - 1),
        age_ms=st.none() | st.integers(0, 2**32 - 2),
        gauges=st.tuples(U32, U32, U32, U32),
        totals=st.tuples(*[U32] * 14),
        runs=st.tuples(*[U32] * RUN_BUCKETS),
        waits=st.tuples(*[U32] * WAIT_BUCKETS),
    )
)
def test_a_record_is_decoded_as_it_was_encoded(known: Record) -> None:
    stored = encode_record(known)
    assert len(stored) == RECORD_BYTES == 232
    assert decode_record(stored) == known


def test_the_layout_is_the_documented_one() -> None:
    stored = encode_record(
        record(T + 0.5, since=7, workers=3, age_ms=9, gauges=(1, 2, 3, 4), totals=tuple(range(100, 114)))
    )
    assert stored[:16] == bytes.fromhex(f"{T:08x} 00000007 7530 0003 00000009")
    assert stored[16:32] == bytes.fromhex("00000001 00000002 00000003 00000004")
    assert stored[32:88] == b"".join(n.to_bytes(4, "big") for n in range(100, 114))


def test_an_age_of_50_days_is_cut_and_places_never_written_are_skipped() -> None:
    known = record(T, age_ms=2**40)
    assert decode_record(encode_record(known)) == replace(known, age_ms=2**32 - 2)
    assert decode_record(bytes(RECORD_BYTES)) is None
    assert list(decode_records(bytes(RECORD_BYTES) + encode_record(record(T)) + b"rest")) == [record(T)]


def test_the_state_of_a_queue_equals_that_of_its_record() -> None:
    counts = {"enqueued": 2**32 + 5, "finished": 3, "paused": 8}
    known = record(T, gauges=(4, 3, 2, 1), workers=6, totals=(5, 0, 3, *[0] * 11))
    assert state_of(counts, 4, 3, 2, 1, 6) == known.state


# Points


def test_points_are_the_differences_between_records() -> None:
    records = [record(T + n + 0.5, 10 * n) for n in range(5)]
    now = record(T + 5.25, 47)
    points = history_points(records, now, 5, 1)
    assert [point.finished for point in points] == [10, 10, 10, 10, 7]
    assert [point.seconds for point in points] == [60, 60, 60, 60, 45]
    assert not any(point.is_gap for point in points)


def test_now_takes_the_place_of_the_record_of_its_minute() -> None:
    records = [record(T + n + 0.5, 10 * n) for n in range(5)]
    points = history_points(records, record(T + 4.75, 43), 3, 1)
    assert [point.finished for point in points] == [10, 10, 13]
    assert points[-1].seconds == 75


def test_missed_minutes_are_gaps_and_the_next_point_has_their_sum() -> None:
    points = history_points([record(T, 0), record(T + 3, 30)], record(T + 4, 40), 5, 1)
    assert [point.finished for point in points][1:] == [None, None, 30, 10]
    assert points[3].seconds == 180
    assert points[1].is_gap
    assert points[1].waiting is None


def test_minutes_at_rest_are_points_of_zeros() -> None:
    assert finished([record(T, 7)], record(T + 4, 7))[1:] == [0, 0, 0, 0]
    points = history_points([record(T, 7), record(T + 3.5, 9, since=T + 3)], record(T + 4, 9), 5, 1)
    assert [point.finished for point in points][1:] == [0, 0, 2, 0]
    assert points[3].seconds == 30
    assert points[1].seconds == 60
    assert points[1].workers == 1


def test_a_point_after_a_rest_is_about_its_own_minute() -> None:
    points = history_points([record(T, 7)], record(T + 4.25, 7), 5, 1)
    assert [point.seconds for point in points][1:] == [60, 60, 60, 15]


def test_rest_that_a_leader_has_seen_only_in_part_leaves_a_gap() -> None:
    known = [record(T, 7), record(T + 4.5, 9, since=T + 2)]
    assert finished(known, record(T + 5, 9)) == [0, 0, None, 2, 0]


def test_the_first_record_counts_from_zero_only_if_the_leader_has_seen_zeros() -> None:
    unknown, known = record(T + 2, 7), record(T + 2, 7, since=(T + 2) | FROM_ZERO)
    assert finished([unknown], record(T + 3, 8)) == [None, None, None, None, 1]
    assert finished([known], record(T + 3, 8)) == [None, None, None, 7, 1]
    later = [record(T, 3), known]  # then zero is not what came before
    assert finished(later, record(T + 3, 8)) == [None, None, 0, 4, 1]


def test_a_history_that_begins_in_this_minute_counts_from_its_first_record() -> None:
    points = history_points([record(T + 0.25, 7)], record(T + 0.5, 9), 2, 1)
    assert [point.finished for point in points] == [None, 2]
    assert points[1].seconds == 15


def test_a_queue_that_was_never_used_was_at_rest() -> None:
    assert finished([], record(T + 4)) == [0, 0, 0, 0, 0]
    assert finished([], record(T + 4, 5)) == [None] * 5


def test_totals_that_became_smaller_are_a_gap_and_never_a_rate() -> None:
    known = [record(T, 100), record(T + 1, 110), record(T + 2, 3), record(T + 3, 8)]
    points = history_points(known, record(T + 4, 8), 4, 1)
    assert [point.finished for point in points] == [10, None, 5, 0]
    assert points[1].workers == 1


def test_totals_may_pass_2_to_the_32() -> None:
    known = [record(T + n, 2**32 - 15 + 10 * n) for n in range(4)]
    assert finished(known, record(T + 3, 2**32 + 15), 3) == [10, 10, 10]


def test_the_sum_of_run_times_is_told_by_the_buckets_when_it_passes_2_to_the_32() -> None:
    runs = [0] * RUN_BUCKETS
    runs[19] = 50_000  # at least 262 s each
    before, after = record(T, 0), record(T + 1, 50_000)
    ms = 50_000 * 300_000
    totals = (*after.totals[:-2], ms % 2**32, 0)
    [point] = history_points([before], replace(after, totals=totals, runs=tuple(runs)), 1, 1)
    assert point.runs.count == 50_000
    assert abs(point.runs.seconds * 1000 - ms) < 2**32
    assert point.runs.seconds >= 50_000 * 262.144


def test_run_times_that_began_anew_are_left_out_and_the_counters_are_not() -> None:
    had = (5, *[0] * (RUN_BUCKETS - 1))
    [point] = history_points([record(T, 1, runs=had)], record(T + 1, 2), 1, 1)
    assert point.finished == 1
    assert point.runs == NO_RUNS


def test_records_of_ten_minutes_make_points_of_ten_minutes() -> None:
    base = T - T % 10
    known = [record(base + 10 * n + 9.5, 100 * n) for n in range(4)]
    points = history_points(known, record(base + 43, 320), 4, 10)
    assert [point.finished for point in points] == [100, 100, 100, 20]
    assert [point.seconds for point in points] == [600, 600, 600, 210]


def test_a_task_that_waits_gets_older_while_the_queue_rests() -> None:
    waits = record(T + 0.5, 0, age_ms=30_000, gauges=(1, 0, 0, 0))
    points = history_points([waits], replace(waits, at_ms=(T + 3) * MINUTE, age_ms=180_000), 4, 1)
    assert [point.age for point in points] == [30, 120, 180, 180]


def test_a_plain_task_that_waits_since_the_last_record_gets_older_until_now() -> None:
    waits = record(T + 0.5, 3, age_ms=30_000, gauges=(1, 0, 0, 0))
    now = replace(waits, at_ms=(T + 3) * MINUTE, age_ms=None)
    assert history_points([waits], now, 3, 1)[-1].age == 180
    for other in (record(T + 3, 4, gauges=(1, 0, 0, 0)), record(T + 3, 3)):  # another task waits, or none
        assert history_points([waits], other, 3, 1)[-1].age is None


def test_the_estimate_of_the_leader_is_the_age_now_while_a_task_waits() -> None:
    sampled = record(T + 0.25, 0, age_ms=30_000, gauges=(1, 0, 0, 0))
    still = record(T + 0.5, 0, gauges=(1, 0, 0, 0))
    assert history_points([sampled], still, 1, 1)[0].age == 30
    assert history_points([sampled], record(T + 0.5, 0), 1, 1)[0].age is None


def test_records_of_the_future_are_left_out_and_very_old_ones_are_not_counted_off() -> None:
    ancient, ahead = record(1, 3), record(2**31, 5)
    assert finished([ancient, ahead], record(T, 5), 3) == [None, None, 2]


def test_a_minute_of_the_future_says_nothing_about_rest() -> None:
    """The server's clock was set back: the leader knew the minute by the clock as it was before."""
    points = history_points([record(T, 1), record(T + 2, 7, since=T + 500)], record(T + 2.5, 7), 3, 1)
    assert points[-1].finished == 6
    assert points[-1].seconds == 150


@st.composite
def stories(draw: st.DrawFn) -> tuple[list[int], set[int], set[int]]:
    """How much each minute finished, in which minutes a record was stored, and in which a leader watched."""
    n = draw(st.integers(2, 30))
    done = draw(st.lists(st.integers(0, 3).map(lambda k: max(0, k - 1) * 5), min_size=n, max_size=n))
    led = draw(st.sets(st.integers(0, n - 1)))
    return done, {0} | {minute for minute in led if done[minute] or draw(st.booleans())}, led


@given(stories(), st.integers(0, 2**33), st.sampled_from([1, 10]))
def test_the_sum_of_all_points_is_what_happened_and_no_known_point_is_wrong(
    story: tuple[list[int], set[int], set[int]], offset: int, step: int
) -> None:
    done, stored, led = story
    records, total, quiet = [], offset, 0
    for minute, number in enumerate(done):
        total += number
        if minute in led and not number and quiet:
            quiet = T + minute
        if minute in stored:
            records.append(record(T + minute + 0.9, total, since=quiet))
        if minute not in led:
            quiet = 0
        elif minute in stored:
            quiet = T + minute
    newest = {each.minute // step: each for each in records}.values()  # a ring keeps the last record of each place
    first = min(newest, key=lambda each: each.at_ms)
    now = record(T + len(done) - 1 + 0.95, total)
    points = history_points(newest, now, 31, step)
    assert len(points) == 31
    assert all(earlier.at < later.at for earlier, later in pairwise(points))
    expected = (now.totals[2] - first.totals[2]) % 2**32
    if first.minute // step == now.minute // step:
        expected = (now.totals[2] - max(newest, key=lambda each: each.at_ms).totals[2]) % 2**32
    assert sum(point.finished or 0 for point in points) == expected
    for point in points:
        if step == 1 and not point.is_gap and point.seconds <= 60:
            at = round(point.at.timestamp() / 60 - T - 0.5)
            if 0 < at < len(done) and round(point.at.timestamp() * 1000) % MINUTE:
                assert point.finished == done[at], (at, point)


def test_a_step_of_a_story_without_records_has_only_its_state() -> None:
    [point] = history_points([], record(T, 3, gauges=(1, 2, 3, 4), workers=5), 1, 1)
    assert (point.waiting, point.scheduled, point.running, point.failed_now, point.workers) == (1, 2, 3, 4, 5)
    assert point.is_gap
    with pytest.raises(AttributeError):
        point.waiting = 2  # type: ignore[misc]
