"""Drawing ``worqr top``: one line for each row, as wide and as high as the terminal."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from worqr.cli import formatting
from worqr.cli.output import escape
from worqr.cli.terminal import GAP, Column, cut
from worqr.cli.top.browser import Browser, Mode, Picture
from worqr.cli.top.views import COLUMNS, Row, View

if TYPE_CHECKING:
    from rich.text import Text

    from worqr.mesh_records import MeshInfo, QueueInfo

SAMPLES: Final = 60
"""Readings that the graphs of the header show."""
_BARS: Final = " ▁▂▃▄▅▆▇█"
_ASCII_BARS: Final = " .:-=+*#@"
LEAST: Final = 6
"""Characters that a column keeps, if it does not say more."""
HEADER: Final = 4
FOOTER: Final = 1
HELP: Final = (
    "1 to 7      choose a table",
    "up, down    select a row; also j and k, page up, page down, home, end",
    "Enter       show only the tasks of the selected queue",
    "l           show the lanes of the selected queue",
    "Escape      clear the filter, then show all queues again",
    "/           show only rows that contain a text",
    "s           sort by the next column",
    "p           pause or resume the selected queue, lane or schedule",
    "c           cancel the selected running job, or all jobs of the selected lane",
    "r           retry the selected failed task, or all of the selected queue",
    "d           delete the selected failed task, or all of the selected queue",
    "w           ask the selected worker to be quiet, resume, drain, or run N tasks;",
    "            or set the weight of the selected lane",
    "m           limit what may start in the selected lane",
    "q           quit; also Ctrl-C",
)


class Rates:
    """How many tasks finished and failed per second, computed from the totals of successive readings."""

    def __init__(self) -> None:
        self.finished: deque[float] = deque(maxlen=SAMPLES)
        self.failed: deque[float] = deque(maxlen=SAMPLES)
        self._last: tuple[float, int, int] | None = None

    def add(self, mesh: MeshInfo) -> None:
        """Note the totals of a snapshot; one that was noted before adds nothing."""
        now, queues = mesh.at.timestamp(), _all(mesh)
        finished = sum(info.counts.get("finished", 0) for info in queues)
        failed = sum(info.counts.get("failed", 0) for info in queues)
        if self._last is not None and now > self._last[0]:
            seconds = now - self._last[0]
            self.finished.append(max(0, finished - self._last[1]) / seconds)
            self.failed.append(max(0, failed - self._last[2]) / seconds)
        self._last = (now, finished, failed)


@dataclass(frozen=True, slots=True)
class Header:
    """What is drawn above the table."""

    prefix: str
    mesh: MeshInfo | None
    rates: Rates
    problem: str
    more: str


def sparkline(values: Sequence[float], width: int, *, unicode: bool = True) -> str:
    """Return the last `width` values as a line of bars, the highest one as high as a character."""
    bars, highest = (_BARS if unicode else _ASCII_BARS), max(values, default=0.0)
    if not highest:
        return ""
    return "".join(bars[round(value / highest * (len(bars) - 1))] for value in list(values)[-width:])


def draw(browser: Browser, header: Header, width: int, height: int) -> Text:
    """Return the whole screen."""
    from rich.text import Text

    room = max(1, height - HEADER - FOOTER)
    browser.resize(room)
    lines = _header(browser, header, width)
    if browser.mode is Mode.HELP:
        lines += [Text(cut(line, width)) for line in HELP[: room + 1]]
    else:
        lines += table(COLUMNS[browser.view], browser.picture(), width, room)
        if not browser.picture().rows:
            lines.append(Text(cut(_nothing(browser), width), "dim"))
    lines = lines[: height - FOOTER]
    lines += [Text() for _ in range(height - FOOTER - len(lines))]
    return Text("\n").join([*lines, _footer(browser, header, width)])


def table(columns: Sequence[Column], picture: Picture, width: int, room: int) -> list[Text]:
    """Return the heading and at most `room` rows around the selected one, each on one line."""
    first = max(0, min(picture.selected - room // 2, len(picture.rows) - room))
    rows = picture.rows[first : first + room]
    kept = [place for place, column in enumerate(columns) if place == 0 or _holds(column, place, picture.rows)]
    cells = [[columns[place].text(row.values[place]) for place in kept] for row in rows]
    shown = [columns[place] for place in kept]
    titles = [
        column.title + (" *" if picture.sorted_by == place else "") for place, column in zip(kept, shown, strict=True)
    ]
    widths = _widths(shown, titles, cells, width)
    lines = [_line(shown, titles, ["bold"] * len(shown), widths)]
    for number, (row, texts) in enumerate(zip(rows, cells, strict=True), first):
        styles = [column.colour(row.values[place]) for column, place in zip(shown, kept, strict=True)]
        line = _line(shown, texts, styles, widths)
        if number == picture.selected:
            line.pad_right(max(0, width - line.cell_len))
            line.stylize("reverse")
        lines.append(line)
    return lines


def _holds(column: Column, place: int, rows: Sequence[Row]) -> bool:
    return any(column.text(row.values[place]) not in ("", "-", "0") for row in rows)


def _widths(columns: Sequence[Column], titles: Sequence[str], cells: Sequence[Sequence[str]], width: int) -> list[int]:
    """Return the widths of the columns: the widest lose first, and the last columns are left out if that is not enough."""
    from rich.cells import cell_len

    widths = [max([cell_len(title), *(cell_len(row[place]) for row in cells)]) for place, title in enumerate(titles)]
    least = [
        min(wide, column.least if column.fit == "cut" else wide) for wide, column in zip(widths, columns, strict=True)
    ]
    while sum(widths) + len(GAP) * (len(widths) - 1) > width:
        able = [place for place, wide in enumerate(widths) if wide > least[place]]
        if able:
            widths[max(able, key=widths.__getitem__)] -= 1
        elif len(widths) > 1:
            widths.pop()
        else:
            return [max(1, width)]
    return widths


def _line(columns: Sequence[Column], texts: Sequence[str], styles: Sequence[str], widths: Sequence[int]) -> Text:
    from rich.cells import cell_len
    from rich.text import Text

    line = Text()
    for place, wide in enumerate(widths):
        text = cut(texts[place], wide, anywhere=True)
        fill = " " * (wide - cell_len(text))
        right = columns[place].right
        line.append((fill if right else "") + text + ("" if right else fill), styles[place])
        if place < len(widths) - 1:
            line.append(GAP)
    return line


def _header(browser: Browser, header: Header, width: int) -> list[Text]:
    from rich.text import Text

    infos = () if header.mesh is None else _all(header.mesh)
    totals = {
        name: sum(getattr(info, name) for info in infos) for name in ("waiting", "scheduled", "running", "failed")
    }
    text = "   ".join(f"{name} {count:,}" for name, count in totals.items())
    rates = header.rates
    graph = sparkline(rates.finished, 30, unicode=cut("…" * 3, 2).endswith("…"))
    if rates.finished:
        text += f"   finished {rates.finished[-1]:,.0f}/s {graph}"
    title = f"worqr top   prefix {header.prefix}   {_source(header.mesh)}"
    tabs = Text()
    for place, view in enumerate(View, 1):
        tabs.append(f" {place} {view.value}", "reverse" if view is browser.view else "dim")
    if browser.queue:
        tabs.append(f"  of {escape(browser.queue)}", "bold")
    tabs.truncate(width)
    problem = Text(cut(escape(header.problem), width), "bold red") if header.problem else Text(cut(text, width))
    return [Text(cut(title, width), "dim"), problem, tabs]


def _all(mesh: MeshInfo) -> Sequence[QueueInfo]:
    return mesh.queues if mesh.others is None else (*mesh.queues, mesh.others)


def _source(mesh: MeshInfo | None) -> str:
    """Return when the figures were read, and who leads the mesh."""
    if mesh is None:
        return "reading"
    leader = "no worker leads" if mesh.leader is None else f"leader {escape(formatting.short_worker_id(mesh.leader))}"
    return f"figures of {mesh.at.astimezone():%H:%M:%S}   {leader}"


def _nothing(browser: Browser) -> str:
    if browser.filter:
        return f"nothing contains {escape(browser.filter)!r}: press Escape to clear the filter"
    nothing = {
        View.QUEUES: "no queue holds tasks or has workers",
        View.RUNNING: "no task is running",
        View.WORKERS: "no worker is registered",
        View.FAILED: "no task has failed for good",
        View.SCHEDULES: "no worker has declared a schedule",
        View.LOG: "nothing has happened yet",
        View.LANES: "no lane has tasks, is paused, or was set by an operator"
        if browser.queue
        else "no task waits in a lane; for other lanes, select a queue and press l",
    }
    return nothing[browser.view]


def _footer(browser: Browser, header: Header, width: int) -> Text:
    from rich.cells import cell_len
    from rich.text import Text

    if browser.mode is Mode.FILTER:
        return Text(cut(f"/{escape(browser.filter)}_", width), "bold")
    if browser.mode is Mode.ASK and browser.pending is not None:
        what = browser.pending.name or "one"
        answer = f"type {what} and Enter: {browser.typed}_" if browser.pending.is_typed else "y: yes, any other key: no"
        question, answer = f"{escape(browser.pending.question)}? ", escape(answer)
        beside = width - cell_len(answer)  # for the question, which is cut first: what you type stays in sight
        return Text(cut(cut(question, max(LEAST, beside)) + answer, width), "bold yellow")
    if browser.notice:
        return Text(cut(escape(browser.notice), width), "bold")
    said = f"filter: {escape(browser.filter)}   " if browser.filter else ""
    said += f"{header.more}   " if header.more else ""
    return Text(cut(f"{said}? help   / filter   s sort   Enter open   q quit", width), "dim")
