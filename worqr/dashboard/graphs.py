"""The graphs of a queue: which values of its history are drawn, and the table of the same values. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from worqr.dashboard import figures
from worqr.dashboard.charts import Chart, Look, Series, Shape, Tone, Values, chart, sparkline
from worqr.history import History, HistoryPoint, sum_of_times

RANGES: Final = {"1h": (60, 1), "8h": (480, 5), "3d": (4320, 3)}
"""The spans of time that the page of a queue offers: the minutes, and how many points become one."""
NAMES: Final = {"1h": "1 hour", "8h": "8 hours", "3d": "3 days"}
HOUR: Final = 60
DAY: Final = 1440
"""Minutes of the sparklines."""
SHORTEST: Final = 20.0
"""Seconds that the last point has to be about. Rates of a shorter time would jump."""

Group = Sequence[HistoryPoint]
"""Points that become one value."""


@dataclass(frozen=True, slots=True)
class Line:
    """One series of a chart, and a column of the table. A band is drawn from the values of the line before it."""

    name: str
    value: Callable[[Group], float | None]
    look: Look = "line"
    tone: Tone = "main"
    column: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """One chart before its values are known. `seconds`: the values are durations."""

    title: str
    text: Callable[[float | None], str]
    lines: Sequence[Line]
    seconds: bool = False


@dataclass(frozen=True, slots=True)
class Graphs:
    """What a page shows of the history of a queue. Each chart comes with the number of its first column in the table."""

    charts: Sequence[tuple[int, Chart]]
    columns: Sequence[str]
    rows: Sequence[tuple[datetime, Sequence[str]]]
    """The rows of the table of values, the newest first. The time is the beginning of what the row is about."""
    until: datetime


def per_minute(counter: str) -> Callable[[Group], float | None]:
    """Return a function that returns the rate of a counter."""

    def value(group: Group) -> float | None:
        known = [point for point in group if getattr(point, counter) is not None]
        seconds = sum(point.seconds for point in known)
        return 60 * sum(getattr(point, counter) for point in known) / seconds if seconds else None

    return value


def highest(name: str) -> Callable[[Group], float | None]:
    """Return a function that returns the highest value of a number that the queue had at the end of each point."""

    def value(group: Group) -> float | None:
        return max((each for point in group if (each := getattr(point, name)) is not None), default=None)

    return value


def oldest(group: Group) -> float | None:
    """Return for how long the oldest task has waited. Zero if no task waited; None if that is not known."""
    if (age := highest("age")(group)) is not None:
        return age
    return 0.0 if highest("waiting")(group) == 0 else None


def quantile(name: str, share: float) -> Callable[[Group], float | None]:
    """Return a function that returns a quantile of the run times or the waiting times."""

    def value(group: Group) -> float | None:
        return sum_of_times([getattr(point, name) for point in group]).quantile(share)

    return value


PLANS: Final = (
    Plan(
        "Tasks per minute",
        figures.rate,
        (Line("enqueued", per_minute("enqueued"), tone="quiet"), Line("finished", per_minute("finished"))),
    ),
    Plan(
        "Failures per minute",
        figures.rate,
        (
            Line("retried", per_minute("retried"), "bars", "quiet"),
            Line("given up", per_minute("failed"), "bars", "bad"),
        ),
    ),
    Plan(
        "Run time",
        figures.span,
        (
            Line("p50", quantile("runs", 0.5), column="run time p50"),
            Line("p95", quantile("runs", 0.95), "band", column="run time p95"),
            Line("p99", quantile("runs", 0.99), "dashed", "quiet", "run time p99"),
        ),
        seconds=True,
    ),
    Plan("Waiting", figures.count, (Line("tasks", highest("waiting"), "area", column="waiting"),)),
    Plan(
        "Waiting time",
        figures.span,
        (
            Line("oldest task", oldest, "area"),
            Line("p95 of jobs", quantile("waits", 0.95), "dashed", "quiet", "wait of jobs p95"),
        ),
        seconds=True,
    ),
    Plan(
        "Running",
        figures.count,
        (
            Line("workers", highest("workers"), "dashed", "quiet"),
            Line("tasks", highest("running"), column="running"),
        ),
    ),
)


def graphs_of(history: History, size: int = 1) -> Graphs | None:
    """Return the charts of a history, in which `size` points become one; None if nothing is known of the time."""
    groups, times = _groups(history, size)
    if all(point.is_gap for group in groups for point in group):
        return None
    charts, columns, texts = list[tuple[int, Chart]](), list[str](), list[list[str]]()
    end = times[-1] + timedelta(seconds=history.step * size)
    for plan in PLANS:
        values = [[line.value(group) for group in groups] for line in plan.lines]
        series = [
            Series(line.name, each, line.look, line.tone, before if line.look == "band" else ())
            for line, each, before in zip(plan.lines, values, [(), *values], strict=False)
        ]
        made = chart(plan.title, series, start=times[0], end=end, text=plan.text, seconds=plan.seconds)
        charts.append((len(columns), made))
        columns += [line.column or line.name for line in plan.lines]
        texts += [[plan.text(value) for value in each] for each in values]
    rows = [(at, [column[place] for column in texts]) for place, at in enumerate(times)]
    return Graphs(charts, columns, rows[::-1], groups[-1][-1].at)


def _groups(history: History, size: int) -> tuple[list[Group], list[datetime]]:
    """Return the points that become one value each, and when each of these times began."""
    points, step = history.points, timedelta(seconds=history.step)
    last = datetime.fromtimestamp(points[-1].at.timestamp() // history.step * history.step, UTC)
    if size == 1 and points[-1].seconds < SHORTEST and len(points) > 1:
        points, last = points[:-1], last - step
    points = points[len(points) % size :]
    starts = [last - step * (len(points) - 1 - place) for place in range(len(points))]
    return [points[at : at + size] for at in range(0, len(points), size)], starts[::size]


@dataclass(frozen=True, slots=True)
class Sparkline:
    """A small chart for a row of a table, and what it shows in words."""

    shape: Shape
    text: str


def sparkline_of(history: History, counter: str, what: str) -> Sparkline | None:
    """Return the rate of a counter as a small chart; None if nothing is known of the time."""
    groups, _ = _groups(history, 1)
    values: Values = [per_minute(counter)(group) for group in groups]
    known = [value for value in values if value is not None]
    if not known:
        return None
    text = f"{what} per minute: {figures.rate(known[-1])} now, at most {figures.rate(max(known))}"
    return Sparkline(sparkline(values), text)
