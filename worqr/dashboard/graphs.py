"""The graphs of a queue: which values of its history are drawn, and the table of the same values. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

from worqr.client.inspection import read_histories
from worqr.client.queue import queue_named
from worqr.dashboard.request import Visit
from worqr.errors import RefusedByServer
from worqr.history_records import History, HistoryPoint, sum_of_times
from worqr.inside import client_of
from worqr.keys import QueueKeys
from worqr.views.values import count, rate, span

# Charts from numbers: scales, ticks, and the paths of lines, bands and bars. Pure.
#
# A chart is 1,000 wide and 100 high, and its template stretches it to any size. Texts are not part of the paths, so they are
# not stretched. A value of None is a gap: no line crosses it, and no bar stands there.


WIDTH: Final = 1000
HEIGHT: Final = 100
MOST_LINES: Final = 4
"""Lines of the grid above zero."""
NARROW: Final = 0.04
"""The part of the width at both ends where no time is written: its text would leave the chart."""
_UNITS: Final = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
_TIME_STEPS: Final = (5, 15, 30, 60, 120, 180, 360, 720, 1440, 2880)
"""Minutes between two times on an axis."""

Values = Sequence[float | None]
Look = Literal["line", "dashed", "area", "band", "bars"]
Tone = Literal["main", "quiet", "bad"]


@dataclass(frozen=True, slots=True)
class Series:
    """Values at equal distances in time, the oldest first. A band is drawn from `base` to `values`."""

    name: str
    values: Values
    look: Look = "line"
    tone: Tone = "main"
    base: Values = ()


@dataclass(frozen=True, slots=True)
class Tick:
    """A place on an axis, in percent from the left or from the top. `at` is the time of a tick of the time axis."""

    place: str
    text: str
    at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """One series as a path. `fill` is the path of the area below it, or of the band; empty if there is none."""

    series: Series
    path: str
    fill: str
    latest: str


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart as its template draws it. `label` describes it for people who do not see it."""

    title: str
    shapes: Sequence[Shape]
    rows: Sequence[Tick]
    columns: Sequence[Tick]
    label: str


def chart(
    title: str,
    series: Sequence[Series],
    *,
    start: datetime,
    end: datetime,
    text: Callable[[float | None], str],
    seconds: bool = False,
) -> Chart:
    """Return a chart of values between two times.

    Args:
        title: what it shows, with the unit.
        series: what is drawn, the last on top. All have the same number of values.
        start: where the first value begins.
        end: where the last value ends.
        text: writes a value.
        seconds: the values are durations, in seconds.
    """
    top, step, label = _duration_axis(_highest(series)) if seconds else _count_axis(_highest(series))
    lines = [step * number for number in range(round(top / step) + 1)]
    rows = [Tick(_percent(1 - line / top), label(line)) for line in lines]
    shapes = [_shape(each, top, text) for each in series]
    return Chart(title, shapes, rows, time_ticks(start, end), f"{title}. {' '.join(_in_words(series, text))}")


def sparkline(values: Values) -> Shape:
    """Return a small chart without axes: its highest value is at the top."""
    series = Series("", values, "area")
    return _shape(series, _highest([series]) or 1.0, lambda _: "")


def nice_scale(highest: float, smallest: float = 0.0) -> tuple[float, float]:
    """Return the top of an axis, and the distance of its lines: 1, 2 or 5 times a power of ten, and `smallest` at least."""
    if highest <= 0:
        return (smallest or 1.0, smallest or 1.0)
    step = max(_nice_above(highest / MOST_LINES), smallest)
    return (step * max(math.ceil(highest / step - 1e-9), 1), step)


def time_ticks(start: datetime, end: datetime) -> list[Tick]:
    """Return times of the axis in UTC: whole hours, or whole parts of one, four at most. Days have their name."""
    minutes = (end - start).total_seconds() / 60
    step = next((each for each in _TIME_STEPS if minutes / each <= MOST_LINES + 0.5), _TIME_STEPS[-1])
    midnight = start.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    first = math.ceil((start - midnight).total_seconds() / 60 / step)
    times = [midnight + timedelta(minutes=step * (first + number)) for number in range(MOST_LINES + 2)]
    shape = "%H:%M" if minutes <= 1440 else "%a %H:%M"
    places = [(at, (at - start) / (end - start)) for at in times]
    return [Tick(_percent(x), f"{at:{shape}}", at) for at, x in places if NARROW <= x <= 1 - NARROW]


def compact(number: float) -> str:
    """Return a number in few characters, for an axis: ``0.5``, ``1,200``, ``15k``, ``2.5M``."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 10 * size or (number >= size and letter != "k"):
            return f"{number / size:g}{letter}"
    return f"{number:,.0f}" if number >= 1000 else f"{number:g}"


def merged(values: Values, size: int, merge: Callable[[Sequence[float]], float]) -> list[float | None]:
    """Return one value for each `size` values, made of those that are known; None if none is."""
    groups = [[each for each in values[at : at + size] if each is not None] for at in range(0, len(values), size)]
    return [merge(group) if group else None for group in groups]


def _highest(series: Sequence[Series]) -> float:
    return max((value for each in series for value in each.values if value is not None), default=0.0)


def _nice_above(number: float) -> float:
    power = 10.0 ** math.floor(math.log10(number))
    return next(part * power for part in (1.0, 2.0, 5.0, 10.0) if part * power >= number * (1 - 1e-9))


def _count_axis(highest: float) -> tuple[float, float, Callable[[float], str]]:
    return (*nice_scale(highest, 1.0), compact)


def _duration_axis(highest: float) -> tuple[float, float, Callable[[float], str]]:
    """Return an axis of durations whose texts all have the same unit."""
    size, unit = next(
        (each for each in _UNITS if highest >= 2 * each[0]), (0.001, "ms") if highest < 0.5 else _UNITS[-1]
    )
    top, step = nice_scale(highest / size, 1.0 if unit == "ms" else 0.0)
    return (top * size, step * size, lambda value: f"{round(value / size, 6):g} {unit}" if value else "0")


def _percent(part: float) -> str:
    return f"{round(part * 100, 2):g}%"


def _shape(series: Series, top: float, text: Callable[[float | None], str]) -> Shape:
    ys = [None if value is None else HEIGHT * (1 - min(value / top, 1.0)) for value in series.values]
    latest = text(series.values[-1] if series.values else None)
    if series.look == "bars":
        return Shape(series, "", "".join(_bars(ys)), latest)
    runs, fill = list(_runs(ys)), ""
    if series.look == "area":
        fill = "".join(_closed(run, [(x, HEIGHT) for x, _ in run]) for run in runs)
    elif series.look == "band":
        lows = [None if value is None else HEIGHT * (1 - min(value / top, 1.0)) for value in series.base]
        both = [y if low is not None else None for y, low in zip(ys, lows, strict=True)]
        fill = "".join(_closed(run, [(x, lows[_index(x, len(lows))] or 0.0) for x, _ in run]) for run in _runs(both))
    return Shape(series, "".join(_line(run) for run in runs), fill, latest)


def _runs(ys: Values) -> Iterator[list[tuple[float, float]]]:
    """Yield the points of each stretch without a gap."""
    run: list[tuple[float, float]] = []
    for index, y in enumerate(ys):
        if y is not None:
            run.append((WIDTH * (index + 0.5) / len(ys), y))
        elif run:
            yield run
            run = []
    if run:
        yield run


def _index(x: float, count: int) -> int:
    return round(x * count / WIDTH - 0.5)


def _line(run: Sequence[tuple[float, float]]) -> str:
    """Return a line through points; a single point is a line of no length, whose round ends are visible."""
    points = "L".join(f"{x:.5g} {y:.4g}" for x, y in run)
    return f"M{points}" if len(run) > 1 else f"M{points}h0"


def _closed(there: Sequence[tuple[float, float]], back: Sequence[tuple[float, float]]) -> str:
    points = "L".join(f"{x:.5g} {y:.4g}" for x, y in [*there, *reversed(back)])
    return f"M{points}Z" if len(there) > 1 else ""


def _bars(ys: Values) -> Iterator[str]:
    width = WIDTH / max(len(ys), 1)
    for index, y in enumerate(ys):
        if y is not None and y < HEIGHT:
            yield f"M{width * (index + 0.15):.5g} {HEIGHT}V{y:.4g}h{width * 0.7:.4g}V{HEIGHT}Z"


def _in_words(series: Sequence[Series], text: Callable[[float | None], str]) -> Iterator[str]:
    for each in series:
        known = [value for value in each.values if value is not None]
        if known:
            yield f"{each.name}: {text(known[-1])} at the end, at most {text(max(known))}."
        else:
            yield f"{each.name}: no values."


# Reads the histories of queues for the pages that draw them. Pages that are opened within a moment share what was read.


FRESH: Final = 30.0
"""Seconds for which pages use the same history: it gets a new record once a minute."""


async def read_graphs(visit: Visit, queue: str, span: str) -> Graphs | None:
    """Return the graphs of a queue for one of `RANGES`; None if nothing is known of that time."""
    minutes, size = RANGES[span]

    async def read(_before: object) -> Graphs | None:
        try:
            return graphs_of(await queue_named(visit.mesh.queue, queue).history(minutes), size)
        except RefusedByServer:  # the dashboard's user may read the queue, but not its history
            return None

    return await visit.looks.get(("graphs", queue, span), read, within=FRESH)


async def read_sparklines(
    visit: Visit, queues: Iterable[str], minutes: int, counter: str, what: str
) -> dict[str, Sparkline]:
    """Return the sparklines of those queues of which something is known. They are read in one batch.

    Args:
        visit: the request.
        queues: the names of the queues, as many as a page has rows.
        minutes: how long a time the sparklines show.
        counter: the total whose rate they show.
        what: the same in words.
    """
    names = sorted(queues)

    async def read(_before: object) -> dict[str, Sparkline]:
        keys = [QueueKeys.of(visit.mesh.prefix, name) for name in names]
        histories = await read_histories(client_of(visit.mesh), keys, minutes)
        drawn = {name: sparkline_of(each, counter, what) for name, each in zip(names, histories, strict=True) if each}
        return {name: spark for name, spark in drawn.items() if spark is not None}

    return await visit.looks.get(("sparks", tuple(names), counter, minutes), read, within=FRESH)


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
        rate,
        (Line("enqueued", per_minute("enqueued"), tone="quiet"), Line("finished", per_minute("finished"))),
    ),
    Plan(
        "Failures per minute",
        rate,
        (
            Line("retried", per_minute("retried"), "bars", "quiet"),
            Line("given up", per_minute("failed"), "bars", "bad"),
        ),
    ),
    Plan(
        "Run time",
        span,
        (
            Line("p50", quantile("runs", 0.5), column="run time p50"),
            Line("p95", quantile("runs", 0.95), "band", column="run time p95"),
            Line("p99", quantile("runs", 0.99), "dashed", "quiet", "run time p99"),
        ),
        seconds=True,
    ),
    Plan("Waiting", count, (Line("tasks", highest("waiting"), "area", column="waiting"),)),
    Plan(
        "Waiting time",
        span,
        (
            Line("oldest task", oldest, "area"),
            Line("p95 of jobs", quantile("waits", 0.95), "dashed", "quiet", "wait of jobs p95"),
        ),
        seconds=True,
    ),
    Plan(
        "Running",
        count,
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
    text = f"{what} per minute: {rate(known[-1])} now, at most {rate(max(known))}"
    return Sparkline(sparkline(values), text)
