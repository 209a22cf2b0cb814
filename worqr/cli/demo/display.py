"""The display of the demo: a live table on a terminal, plain lines everywhere else. The checks are in `summary`."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from worqr.cli.demo.state import DemoState, WorkerRow
from worqr.cli.demo.summary import Line, is_good

PLAIN_EVERY = 1.0
WIDEST = 100
MARKS: dict[bool | None, tuple[str, str]] = {True: ("✓", "green"), False: ("✗", "bold red"), None: (" ", "")}
STATES = {"busy": "green", "killed": "bold red", "killed, tasks requeued": "red"}


class Display(Protocol):
    """One way to show the demo."""

    def show(self, state: DemoState) -> None:
        """Show the state as it is now; called several times a second."""
        ...

    def end(self, lines: list[Line]) -> None:
        """Show the summary."""
        ...


@contextmanager
def open_display() -> Generator[Display]:
    """Open the live table if the standard output is a suitable terminal, else plain lines."""
    takes_it = os.environ.get("TERM") != "dumb" and sys.stdout.encoding.lower().startswith("utf")
    if sys.stdout.isatty() and takes_it and not os.environ.get("NO_COLOR"):
        with Live(console=Console(), auto_refresh=False) as live:
            yield LiveDisplay(live)
    else:
        yield PlainDisplay()


def headline(state: DemoState) -> str:
    """Return the first line: the number of files and workers."""
    return (
        f"{len(state.results.files)} source files of Python {platform.python_version()}, {len(state.workers)} workers"
    )


def verdict(lines: list[Line]) -> str:
    """Return the last sentence: nothing was lost, or the checks that failed."""
    if is_good(lines):
        return "Nothing was lost."
    return "FAILED: " + ", ".join(line.what for line in lines if line.ok is False) + "."


class PlainDisplay:
    """Prints lines without escape codes: events, and once a second the progress."""

    def __init__(self) -> None:
        self._told = -1
        self._next = 0.0

    def show(self, state: DemoState) -> None:
        if self._told < 0:
            print(f"worqr demo: {headline(state)}", flush=True)
            self._told = 0
        for news in state.news[self._told :]:
            print(f"{state.clock.seconds:5.1f} s  * {news}", flush=True)
        self._told = len(state.news)
        if state.waiting + state.running and state.clock.seconds >= self._next:
            self._next = state.clock.seconds + PLAIN_EVERY
            how_far = f"{len(state.results.first)} of {len(state.results.files)} files done, {state.rate:.0f}/s"
            print(
                f"{state.clock.seconds:5.1f} s    {how_far}; {state.waiting} waiting, {state.running} running",
                flush=True,
            )

    def end(self, lines: list[Line]) -> None:
        print()
        wide = max(len(line.what) for line in lines)
        values = max(len(line.value) for line in lines if line.note)
        for line in lines:
            mark = {True: "ok", False: "NO", None: ""}[line.ok]
            print(f"  {mark:2}  {line.what:<{wide}}  {line.value:<{values}}  {line.note}".rstrip())
        print(f"\n{verdict(lines)}", flush=True)


class LiveDisplay:
    """Draws the table again and again in place."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def show(self, state: DemoState) -> None:
        self._live.update(picture(state), refresh=True)

    def end(self, lines: list[Line]) -> None:
        self._live.stop()
        self._live.console.print(picture_of_end(lines))


def picture(state: DemoState) -> Panel:
    """Return the whole table."""
    news = (
        Text("\n").join(Text(f"● {text}", style="cyan") for text in state.news)
        if state.news
        else Text("starting the workers", "dim")
    )
    body = Group(_workers(state), Padding(_progress(state), (1, 0)), news)
    return Panel(
        body,
        title="[bold]worqr demo",
        subtitle=f"[dim]{headline(state)}",
        box=box.ROUNDED,
        padding=(1, 2),
        width=_width(),
    )


def _width() -> int:
    return min(WIDEST, Console().width)


def _workers(state: DemoState) -> Table:
    table = Table(box=box.SIMPLE_HEAD, expand=True, pad_edge=False, show_edge=False)
    table.add_column("worker")
    table.add_column("pid", justify="right", style="dim")
    table.add_column("state", min_width=24)
    table.add_column("running")
    table.add_column("files done", justify="right")
    for row in state.workers:
        style = STATES.get(row.state, "dim")
        table.add_row(row.name, str(row.pid or ""), Text(row.state, style), _slots(row, state.slots), str(row.files))
    return table


def _slots(row: WorkerRow, slots: int) -> Text:
    return Text("■" * row.running, "green") + Text("·" * max(0, slots - row.running), "dim")


def _progress(state: DemoState) -> Group:
    done, total = len(state.results.first), len(state.results.files)
    numbers = Table.grid(expand=True)
    numbers.add_column()
    numbers.add_column(justify="right")
    queue = Text.assemble(
        "queue  ", (f"{state.waiting}", "bold"), " waiting  ", (f"{state.running}", "bold"), " running"
    )
    rate = Text.assemble(
        (f"{state.rate:.0f}", "bold"), " files/s   ", (f"{done}", "bold"), f" of {total}   {state.clock.seconds:.1f} s"
    )
    numbers.add_row(queue, rate)
    return Group(numbers, ProgressBar(total=total, completed=done, complete_style="green", finished_style="green"))


def picture_of_end(lines: list[Line]) -> Panel:
    """Return the summary as a table."""
    good = is_good(lines)
    table = Table(box=None, show_header=False, expand=True, pad_edge=False)
    table.add_column(width=1)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(style="dim", ratio=1)
    for line in lines:
        mark, style = MARKS[line.ok]
        table.add_row(Text(mark, style), line.what, line.value, line.note)
    last = Text(f"\n{verdict(lines)}", "bold green" if good else "bold red")
    return Panel(Group(table, last), title="[bold]result", box=box.ROUNDED, padding=(1, 2), width=_width())
