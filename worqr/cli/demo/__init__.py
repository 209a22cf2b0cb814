"""``worqr demo``: run workers on this machine, kill one, cancel a task, and check that nothing was lost.

Here are the command and its output: a live table on a terminal, plain lines everywhere else. ``scenario`` has the steps,
``state`` the work, the messages of the workers, the state and its checks. ``worker_processes`` starts the workers, and has their
program.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Annotated, Protocol

import trio
from cyclopts import Parameter
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from worqr.cli.demo.scenario import run_scenario
from worqr.cli.demo.worker_processes import DemoState, Line, WorkerRow, find_files, is_good, summarise
from worqr.cli.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_INVALID
from worqr.cli.options import flag
from worqr.errors import UsageError, WorqrError

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


FILES_PER_WORKER = 20

"""With fewer the queue would be empty when the worker is killed."""

MOST_WORKERS = 32


def demo(
    *,
    files: Annotated[
        int | None, Parameter(metavar="N", help="Count only the N largest files. Default: all files.")
    ] = None,
    workers: Annotated[
        int, Parameter(name="--workers", metavar="N", help="Number of workers, each in its own process.")
    ] = 4,
    dashboard: Annotated[
        bool,
        flag("Instead, run a shop with failures, progress and schedules, and show it in the dashboard, until Ctrl-C."),
    ] = False,
    port: Annotated[int, Parameter(metavar="N", help="With --dashboard: its port on 127.0.0.1.")] = 9090,
) -> int:
    """Run a demo: kill a worker, cancel a task, lose nothing.

    Starts a private server and some workers, which count the tokens of every source file in Python's standard library. Kills the
    worker that runs a workflow, and cancels a long task from another process. Checks that every file has its result, and that the
    workflow went on where it was. Exit code 1 if something is missing.
    """
    if wrong := _wrong(files, workers):
        print(f"worqr: {wrong}", file=sys.stderr)
        return EXIT_INVALID
    try:
        good = _run_shop(workers, port) if dashboard else _run(find_files(files), workers)
    except BaseException as error:
        if _is_interrupt(error):
            print("worqr: interrupted; the workers and the server are stopped", file=sys.stderr)
            return EXIT_INTERRUPTED
        if isinstance(error, WorqrError):
            print(f"worqr: {error}", file=sys.stderr)
            return EXIT_FAILED
        raise
    return 0 if good else 1


def _run(paths: list[str], workers: int) -> bool:
    with open_display() as display:
        lines = summarise(trio.run(run_scenario, paths, workers, display.show))
        display.end(lines)
        return is_good(lines)


def _run_shop(workers: int, port: int) -> bool:
    try:
        from worqr.cli.demo.shop_dashboard import run_shop
    except ModuleNotFoundError as error:
        raise UsageError(
            f"the dashboard needs the package {error.name!r}: run `pip install 'worqr[dashboard]'`"
        ) from None

    def tell(address: str) -> None:
        print(address, flush=True)
        print("worqr: open this address in a browser; it works once. Press Ctrl-C to stop the demo", file=sys.stderr)

    trio.run(run_shop, workers, port, tell)
    return True


def _wrong(files: int | None, workers: int) -> str:
    """Return the error in the options, if there is one."""
    if not 2 <= workers <= MOST_WORKERS:
        return f"--workers must be from 2 (one is killed) to {MOST_WORKERS}, got {workers}"
    fewest = FILES_PER_WORKER * workers
    if files is not None and files < fewest:
        why = "files must be left in the queue when a worker is killed"
        return f"--files must be at least {fewest} for {workers} workers, got {files}: {why}"
    return ""


def _is_interrupt(error: BaseException) -> bool:
    """Return True for Ctrl-C, alone or in an exception group."""
    return bool(BaseExceptionGroup("any", [error]).subgroup(KeyboardInterrupt))
