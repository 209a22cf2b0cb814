"""The display of the demo: a live table on a terminal, plain lines everywhere else. It does not judge."""

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

from worqr.cli.demo.board import Board, PeerLine
from worqr.cli.demo.summary import Line, is_good

PLAIN_EVERY = 1.0
WIDEST = 100
MARKS: dict[bool | None, tuple[str, str]] = {True: ("✓", "green"), False: ("✗", "bold red"), None: (" ", "")}
STATES = {"busy": "green", "killed": "bold red", "killed, tasks requeued": "red"}


class View(Protocol):
    """One way to show it."""

    def show(self, board: Board) -> None:
        """The board as it is now; called several times a second."""
        ...

    def end(self, lines: list[Line]) -> None:
        """The summary."""
        ...


@contextmanager
def open_view() -> Generator[View]:
    """The live table if the standard output is a suitable terminal, else plain lines."""
    takes_it = os.environ.get("TERM") != "dumb" and sys.stdout.encoding.lower().startswith("utf")
    if sys.stdout.isatty() and takes_it and not os.environ.get("NO_COLOR"):
        with Live(console=Console(), auto_refresh=False) as live:
            yield LiveView(live)
    else:
        yield PlainView()


def headline(board: Board) -> str:
    """The current step."""
    return f"{len(board.files)} source files of Python {platform.python_version()}, {len(board.peers)} workers"


def verdict(lines: list[Line]) -> str:
    """The last sentence."""
    if is_good(lines):
        return "Nothing was lost."
    return "FAILED: " + ", ".join(line.what for line in lines if line.ok is False) + "."


class PlainView:
    """Lines without any escape codes: events, and once a second the progress."""

    def __init__(self) -> None:
        self._told = -1
        self._next = 0.0

    def show(self, board: Board) -> None:
        if self._told < 0:
            print(f"worqr demo: {headline(board)}", flush=True)
            self._told = 0
        for news in board.news[self._told :]:
            print(f"{board.seconds:5.1f} s  * {news}", flush=True)
        self._told = len(board.news)
        if board.waiting + board.running and board.seconds >= self._next:
            self._next = board.seconds + PLAIN_EVERY
            how_far = f"{len(board.first)} of {len(board.files)} files done, {board.rate:.0f}/s"
            print(f"{board.seconds:5.1f} s    {how_far}; {board.waiting} waiting, {board.running} running", flush=True)

    def end(self, lines: list[Line]) -> None:
        print()
        wide = max(len(line.what) for line in lines)
        values = max(len(line.value) for line in lines if line.note)
        for line in lines:
            mark = {True: "ok", False: "NO", None: ""}[line.ok]
            print(f"  {mark:2}  {line.what:<{wide}}  {line.value:<{values}}  {line.note}".rstrip())
        print(f"\n{verdict(lines)}", flush=True)


class LiveView:
    """The table, redrawn in place."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def show(self, board: Board) -> None:
        self._live.update(picture(board), refresh=True)

    def end(self, lines: list[Line]) -> None:
        self._live.stop()
        self._live.console.print(picture_of_end(lines))


def picture(board: Board) -> Panel:
    """The whole table."""
    news = (
        Text("\n").join(Text(f"● {text}", style="cyan") for text in board.news)
        if board.news
        else Text("starting the workers", "dim")
    )
    body = Group(_peers(board), Padding(_progress(board), (1, 0)), news)
    return Panel(
        body,
        title="[bold]worqr demo",
        subtitle=f"[dim]{headline(board)}",
        box=box.ROUNDED,
        padding=(1, 2),
        width=_width(),
    )


def _width() -> int:
    return min(WIDEST, Console().width)


def _peers(board: Board) -> Table:
    table = Table(box=box.SIMPLE_HEAD, expand=True, pad_edge=False, show_edge=False)
    table.add_column("worker")
    table.add_column("pid", justify="right", style="dim")
    table.add_column("state", min_width=24)
    table.add_column("running")
    table.add_column("files done", justify="right")
    for line in board.peers:
        style = STATES.get(line.state, "dim")
        table.add_row(
            line.name, str(line.pid or ""), Text(line.state, style), _slots(line, board.at_once), str(line.files)
        )
    return table


def _slots(line: PeerLine, at_once: int) -> Text:
    return Text("■" * line.running, "green") + Text("·" * max(0, at_once - line.running), "dim")


def _progress(board: Board) -> Group:
    done, total = len(board.first), len(board.files)
    numbers = Table.grid(expand=True)
    numbers.add_column()
    numbers.add_column(justify="right")
    queue = Text.assemble(
        "queue  ", (f"{board.waiting}", "bold"), " waiting  ", (f"{board.running}", "bold"), " running"
    )
    rate = Text.assemble(
        (f"{board.rate:.0f}", "bold"), " files/s   ", (f"{done}", "bold"), f" of {total}   {board.seconds:.1f} s"
    )
    numbers.add_row(queue, rate)
    return Group(numbers, ProgressBar(total=total, completed=done, complete_style="green", finished_style="green"))


def picture_of_end(lines: list[Line]) -> Panel:
    """The summary as a table."""
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
