"""Scales, ticks and paths of charts; and what is drawn of a history."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from worqr.dashboard.graphs import (
    PLANS,
    Chart,
    Series,
    chart,
    compact,
    graphs_of,
    nice_scale,
    sparkline,
    sparkline_of,
    time_ticks,
)
from worqr.history_records import NO_RUNS, History, HistoryPoint, RunTimes
from worqr.views import values

NOON = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


def drawn(*series: Series, seconds: bool = False) -> Chart:
    return chart("Title", series, start=NOON, end=NOON + timedelta(hours=1), text=values.rate, seconds=seconds)


@pytest.mark.parametrize(
    ("highest", "smallest", "expected"),
    [
        (0, 1, (1, 1)),
        (0, 0, (1, 1)),
        (1, 1, (1, 1)),
        (3, 1, (3, 1)),
        (4.2, 1, (6, 2)),
        (47, 1, (60, 20)),
        (100, 1, (100, 50)),
        (0.03, 0, (0.03, 0.01)),
        (1201, 1, (1500, 500)),
        (8.1e9, 1, (1e10, 5e9)),
    ],
)
def test_scales_have_nice_numbers(highest: float, smallest: float, expected: tuple[float, float]) -> None:
    assert nice_scale(highest, smallest) == pytest.approx(expected)


@pytest.mark.parametrize("highest", [0.0004, 0.02, 0.3, 0.7, 1.4, 3, 59, 61, 130, 3000, 8000, 90_000, 400_000])
def test_the_texts_of_an_axis_have_one_unit(highest: float) -> None:
    rows = drawn(Series("a", [highest]), seconds=True).rows
    texts = [row.text for row in rows]
    assert texts[0] == "0"
    assert len({text.split(" ")[1] for text in texts[1:]}) == 1
    assert 2 <= len(rows) <= 5
    assert len(set(texts)) == len(texts)


def test_numbers_of_an_axis_are_short() -> None:
    texts = ["0", "0.5", "1,200", "15k", "2.5M", "3G"]
    assert [compact(number) for number in (0, 0.5, 1200, 15_000, 2_500_000, 3e9)] == texts


@pytest.mark.parametrize(
    ("start", "hours", "expected"),
    [
        (NOON + timedelta(minutes=7), 1, ["12:15", "12:30", "12:45", "13:00"]),
        (NOON, 8, ["14:00", "16:00", "18:00"]),
        (NOON + timedelta(minutes=2), 72, ["Mon 00:00", "Tue 00:00", "Wed 00:00"]),
        (NOON, 0.3, ["12:05", "12:10", "12:15"]),
    ],
)
def test_times_are_whole(start: datetime, hours: float, expected: list[str]) -> None:
    ticks = time_ticks(start, start + timedelta(hours=hours))
    assert [tick.text for tick in ticks] == expected
    assert all(tick.at and 4 <= float(tick.place[:-1]) <= 96 for tick in ticks)


def test_no_line_crosses_a_gap() -> None:
    (line,) = drawn(Series("a", [0, 2, None, None, 4, None, 1, 1])).shapes
    assert line.path == "M62.5 100L187.5 50M562.5 0h0M812.5 75L937.5 75"
    assert line.path.count("M") == 3
    (area,) = drawn(Series("a", [0, 2, None, 4], "area")).shapes
    assert area.fill == "M125 100L375 50L375 100L125 100Z"  # a single point has no area
    (bars,) = drawn(Series("a", [0, None, 4, 2], "bars")).shapes
    assert bars.path == ""
    assert re.findall(r"M([\d.]+) 100V([\d.]+)", bars.fill) == [("537.5", "0"), ("787.5", "50")]


def test_a_band_is_between_two_lines() -> None:
    _, band = drawn(Series("p50", [1, 1, None, 1]), Series("p95", [4, 2, 2, 3], "band", base=[1, 1, None, 1])).shapes
    assert band.fill == "M125 0L375 50L375 75L125 75Z"
    assert band.path == "M125 0L375 50L625 50L875 25"


def test_a_chart_is_described_in_words() -> None:
    label = drawn(Series("in", [5, None]), Series("out", [3, 2]), Series("lost", [None, None])).label
    assert label == "Title. in: 5 at the end, at most 5. out: 2 at the end, at most 3. lost: no values."


def test_a_chart_without_values_has_axes() -> None:
    for numbers in ([], [None, None], [0, 0]):
        made = drawn(Series("a", numbers), Series("b", numbers, "band", base=numbers), Series("c", numbers, "bars"))
        assert [row.text for row in made.rows] == ["0", "1"]
        assert "nan" not in repr(made)


def test_sparklines() -> None:
    assert sparkline([]).path == ""
    assert sparkline([0, 0]).path == "M250 100L750 100"
    assert sparkline([2, None, 4, 2]).path == "M125 50h0M625 0L875 50"


# Histories


def point(at: datetime, seconds: float = 60.0, **values: object) -> HistoryPoint:
    known = {"enqueued": 6, "claimed": 6, "finished": 5, "failed": 0, "retried": 1, "waiting": 2, "running": 3}
    return replace(HistoryPoint(at, seconds, workers=4, **known), **values)  # type: ignore[arg-type]


def history(*points: HistoryPoint, step: int = 60) -> History:
    return History("mails", step, points)


def test_points_become_charts_and_a_table() -> None:
    runs = replace(NO_RUNS, counts=(0,) * 8 + (10,) + (0,) * 11)
    points = [point(NOON + timedelta(minutes=n + 0.3), age=7.0, runs=runs) for n in range(1, 4)]
    graphs = graphs_of(history(*points, point(NOON + timedelta(minutes=4.5), 30.0, enqueued=6)))
    assert graphs is not None
    assert [made.title for _, made in graphs.charts] == [plan.title for plan in PLANS]
    assert len(graphs.columns) == sum(len(plan.lines) for plan in PLANS)
    assert len(set(graphs.columns)) == len(graphs.columns)
    newest, texts = graphs.rows[0]
    row = dict(zip(graphs.columns, texts, strict=True))
    assert newest == NOON + timedelta(minutes=4)  # the beginning of its minute
    assert graphs.rows[-1][0] == NOON + timedelta(minutes=1)
    assert graphs.until == NOON + timedelta(minutes=4.5)
    assert (row["enqueued"], row["finished"], row["retried"]) == ("12", "10", "2")  # per minute, in half a minute
    assert (row["waiting"], row["running"], row["workers"]) == ("2", "3", "4")
    texts = graphs.rows[1][1]
    row = dict(zip(graphs.columns, texts, strict=True))
    assert (row["run time p50"], row["run time p95"], row["oldest task"]) == ("192 ms", "250 ms", "7.0 s")
    assert row["wait of jobs p95"] == "–"
    for column, made in graphs.charts:  # the legend names the same values
        assert [shape.latest for shape in made.shapes] == graphs.rows[0][1][column : column + len(made.shapes)]


def test_a_gap_stays_a_gap() -> None:
    gap = HistoryPoint(NOON + timedelta(minutes=2), 60.0)
    graphs = graphs_of(
        history(point(NOON), point(NOON + timedelta(minutes=1)), gap, point(NOON + timedelta(minutes=3)))
    )
    assert graphs is not None
    assert set(graphs.rows[1][1]) == {"–"}
    enqueued = graphs.charts[0][1].shapes[0]
    assert enqueued.path == "M125 0L375 0M875 0h0"


def test_several_points_become_one() -> None:
    points = [point(NOON + timedelta(minutes=n), enqueued=n, waiting=n) for n in range(1, 12)]
    points[7] = HistoryPoint(points[7].at, 60.0)
    points[8] = point(points[8].at, 120.0, enqueued=30, waiting=0)  # it has the sum of the gap
    graphs = graphs_of(history(*points), 5)
    assert graphs is not None
    assert [at for at, _ in graphs.rows] == [NOON + timedelta(minutes=7), NOON + timedelta(minutes=2)]
    rows = [dict(zip(graphs.columns, texts, strict=True)) for _, texts in graphs.rows]
    assert [row["waiting"] for row in rows] == ["11", "6"]
    assert [row["enqueued"] for row in rows] == [values.rate((7 + 30 + 10 + 11) / 5), "4"]


def test_a_point_of_a_few_seconds_is_left_out() -> None:
    now = NOON + timedelta(minutes=1, seconds=3)
    graphs = graphs_of(history(point(NOON), point(NOON + timedelta(minutes=0, seconds=59)), point(now, 3.0)))
    assert graphs is not None
    assert [at for at, _ in graphs.rows] == [NOON, NOON - timedelta(minutes=1)]


def test_the_age_is_zero_if_no_task_waits_and_else_unknown() -> None:
    for waiting, age, expected in ((0, None, "0 ms"), (3, None, "–"), (3, 12.0, "12 s")):
        graphs = graphs_of(history(point(NOON, waiting=waiting, age=age)))
        assert graphs is not None
        assert dict(zip(graphs.columns, graphs.rows[0][1], strict=True))["oldest task"] == expected


def test_nothing_is_known() -> None:
    gaps = history(*(HistoryPoint(NOON + timedelta(minutes=n), 60.0) for n in range(3)))
    assert graphs_of(gaps) is None
    assert sparkline_of(gaps, "finished", "Finished") is None
    found = sparkline_of(history(point(NOON), point(NOON + timedelta(minutes=1), finished=9)), "finished", "Finished")
    assert found is not None
    assert found.text == "Finished per minute: 9 now, at most 9"


def test_span() -> None:
    seconds = (None, 0.0, 0.0004, 0.34, 0.9996, 1.86, 9.94, 9.96, 12.4, 59.7, 190.0)
    texts = ["–", "0 ms", "0 ms", "340 ms", "1.0 s", "1.9 s", "9.9 s", "10 s", "12 s", "1 min", "3 min"]
    assert [values.span(each) for each in seconds] == texts


def test_run_times_of_several_points_are_one_distribution() -> None:
    short, long = ((9, 0), (0, 1))
    points = [point(NOON + timedelta(minutes=n), runs=RunTimes(c, (0.1,), 1.0)) for n, c in enumerate([short, long])]
    graphs = graphs_of(history(*points), 2)
    assert graphs is not None
    assert dict(zip(graphs.columns, graphs.rows[0][1], strict=True))["run time p50"] == "56 ms"
