"""``worqr history``: what has happened in a queue lately, as curves and as a table."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import Parameter

from worqr.cli.errors import InvalidArguments
from worqr.cli.options import (
    FROM_ENVIRONMENT,
    ConnectOptions,
    JsonLines,
    QueueName,
    queue_by_name,
    run_connected,
    unknown_queue_hint,
)
from worqr.cli.output import is_terminal, print_error, print_json, show_table
from worqr.client.inspection import MAX_MINUTES
from worqr.escaping import escape
from worqr.history_records import COUNTERS, History, HistoryPoint, RunTimes, sum_of_times
from worqr.views.tables import HISTORY
from worqr.views.values import span

if TYPE_CHECKING:
    from worqr.mesh import Mesh


_BARS: Final = "▁▂▃▄▅▆▇█"
_NO_RECORD: Final = "·"
ROWS: Final = 12
"""Rows of the table on a terminal, at most: each is the sum of several points. In a pipe, each point is a row."""
WIDEST: Final = 60
"""Characters of a curve, at most."""


@dataclass(frozen=True, slots=True)
class _Curve:
    """One curve above the table: a value of each point, how several points become one character, and how it is written."""

    title: str
    values: list[float | None]
    total: str

    def line(self, width: int) -> str:
        """Return the curve in at most this many characters, with its largest value."""
        size = -(-len(self.values) // width)
        groups = [self.values[start : start + size] for start in range(0, len(self.values), size)]
        heights = [max((value for value in group if value is not None), default=None) for group in groups]
        most = max((height for height in heights if height is not None), default=0.0)
        return "".join(_NO_RECORD if height is None else _bar(height, most) for height in heights)


def _bar(height: float, most: float) -> str:
    return _BARS[min(7, -(-int(height * 7_000_000 / most) // 1_000_000))] if most else _BARS[0]


def history(
    queue: QueueName,
    /,
    *,
    minutes: Annotated[
        int, Parameter(metavar="N", help="How many minutes, up to 4320. Above 480, each point has ten minutes.")
    ] = 60,
    json: JsonLines = False,
    connect: ConnectOptions = FROM_ENVIRONMENT,
) -> None:
    """Show what has happened in a queue lately: tasks, failures, run times and waiting times.

    A terminal shows curves, and sums of several minutes. In a pipe, each minute is a row.
    """
    if not 1 <= minutes <= MAX_MINUTES:
        raise InvalidArguments(f"--minutes must be 1 to {MAX_MINUTES}, not {minutes}")

    async def command(mesh: Mesh) -> tuple[History, str]:
        found = await queue_by_name(mesh, queue).history(minutes)
        used = any(found.total(name) for name in COUNTERS) or (found.points[-1].waiting or 0) > 0
        return found, "" if used else await unknown_queue_hint(mesh, queue)

    found, hint = run_connected(connect, command)
    if json:
        for point in found.points:
            print_json(_as_json(point))
    elif not hint:
        _show(found, minutes)
    if hint:
        print_error(hint)
    elif found.points[0].is_gap and all(point.is_gap for point in found.points[:-1]):
        print_error(f"queue {queue!r} has no records yet; the leader stores one a minute while tasks come and go")


def _as_json(point: HistoryPoint) -> dict[str, Any]:
    return {**asdict(point), "gap": point.is_gap, "runs": _times(point.runs), "waits": _times(point.waits)}


def _times(times: RunTimes) -> dict[str, float | int | None]:
    quantiles = {f"p{share}": times.quantile(share / 100) for share in (50, 95, 99)}
    return {"count": times.count, "mean": times.mean, **quantiles}


def _show(found: History, minutes: int) -> None:
    points: Sequence[HistoryPoint] = found.points
    if is_terminal():
        print(f"{escape(found.queue)}, the last {_span(minutes)}")
        for line in _curves(found, min(WIDEST, shutil.get_terminal_size().columns - 24)):
            print(line)
        print()
        points = _merged(points)
    show_table(HISTORY, points)


def _span(minutes: int) -> str:
    hours, rest = divmod(minutes, 60)
    return f"{hours} h" if hours > 1 and not rest else f"{minutes} min"


def _curves(found: History, width: int) -> list[str]:
    """Return the curves of what happens in the queue, each with its highest value and what it adds up to."""
    points = found.points
    finished, failed = found.total("finished"), found.total("failed")
    curves = [_Curve("finished", [_rate(point, point.finished) for point in points], f"{finished:,}")]
    if failed:
        curves.append(_Curve("failed", [_rate(point, point.failed) for point in points], f"{failed:,}"))
    waiting = [None if point.is_gap else float(point.waiting or 0) for point in points]
    curves.append(_Curve("waiting", waiting, f"{points[-1].waiting or 0:,} now"))
    if (p95 := found.runs.quantile(0.95)) is not None:
        slow = [None if point.is_gap else point.runs.quantile(0.95) or 0.0 for point in points]
        curves.append(_Curve("run p95", slow, span(p95)))
    return [f"  {curve.title:9}{curve.line(max(10, width))}  {curve.total}" for curve in curves]


def _rate(point: HistoryPoint, counter: int | None) -> float | None:
    return None if counter is None else counter / max(point.seconds, 1.0)


def _merged(points: Sequence[HistoryPoint]) -> list[HistoryPoint]:
    """Return at most ROWS points, each the sum of as many of these."""
    size = -(-len(points) // ROWS)
    first = len(points) % size or size
    starts = [0, *range(first, len(points), size)]
    return [_sum(points[start:end]) for start, end in zip(starts, [*starts[1:], len(points)], strict=True)]


def _sum(points: Sequence[HistoryPoint]) -> HistoryPoint:
    """Return what happened in all of these points, and the state at the end of the last one with a record."""
    known = [point for point in points if not point.is_gap]
    if not known:
        return HistoryPoint(points[-1].at, sum(point.seconds for point in points))
    last, counters = known[-1], {name: sum(getattr(point, name) for point in known) for name in COUNTERS}
    return HistoryPoint(
        at=points[-1].at,
        seconds=sum(point.seconds for point in known),
        **counters,
        waiting=last.waiting,
        scheduled=last.scheduled,
        running=last.running,
        failed_now=last.failed_now,
        workers=last.workers,
        age=last.age,
        runs=sum_of_times([point.runs for point in known]),
        waits=sum_of_times([point.waits for point in known]),
    )
