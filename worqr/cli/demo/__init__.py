"""``worqr demo``: run workers on this machine, kill one, cancel a task, and check that nothing was lost.

Here are the command and its output: a live table on a terminal, plain lines everywhere else. ``scenario`` has the steps,
``state`` the work, the messages of the workers, the state and its checks. ``worker_processes`` starts the workers, and has their
program.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
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

import worqr
from worqr.cli.demo.worker_processes import (
    FILES,
    LONG,
    LONG_TASK,
    ORDER,
    ORDERS,
    RESULTS,
    SLOTS,
    DemoState,
    FileResults,
    Killed,
    Line,
    WorkerDied,
    WorkerProcess,
    WorkerProcesses,
    WorkerRow,
    decode,
    find_files,
    is_good,
    plural,
    start_workers,
    summarise,
)
from worqr.cli.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_INVALID
from worqr.cli.options import flag
from worqr.embedded import open_embedded
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
        flag("Instead, run a shop with failures and schedules, and show it in the dashboard."),
    ] = False,
    port: Annotated[int, Parameter(metavar="N", help="With --dashboard: its port on 127.0.0.1.")] = 9090,
) -> int:
    """Run a demo: kill a worker, cancel a task, lose nothing.

    Starts a private server and some workers, which count the tokens of Python's standard library. Kills the worker of a workflow,
    and cancels a long task from another process. Exit code 1 if a result is missing, or the workflow did not go on.
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


# The steps of the demo: a workflow waits, files are enqueued, a worker is killed, a task is cancelled, and nothing is
# missing.
#
# The demo itself is a worker of the mesh too: it takes the results with `peer.work`, and adds them to the `DemoState`.

REFRESH_EVERY = 0.2
READY_WITHIN = 60.0
KILL_AFTER = 0.3
"""The part of the files that is done when the worker is killed."""
SETTLE = 0.03
"""Seconds after which a frozen process has really stopped."""
LONG_RUNS_FOR = 0.5
CANCEL_WAIT = 10.0
WORKER_ID = re.compile(r":[0-9a-f]{32}")
"""The random part of a worker id; the part before it suffices here."""
NOTHING_NEW = 30.0
"""Seconds without a new result after which the missing ones are called lost."""


async def run_scenario(files: list[str], workers: int, show: Callable[[DemoState], None]) -> DemoState:
    """Run the whole demo, and return its state at the end. `show` is called several times a second."""
    names = [f"worker-{i}" for i in range(1, workers + 1)]
    state = DemoState(FileResults(frozenset(files)), [WorkerRow(name) for name in names], SLOTS)
    with _log_shown(state):
        await _run_on_server(state, show)
    state.clock.stop()
    show(state)
    return state


async def _run_on_server(state: DemoState, show: Callable[[DemoState], None]) -> None:
    show(state)
    async with open_embedded() as server:
        mesh = worqr.Mesh(server.url, app="worqr-demo")
        async with (
            mesh.join(grace=0) as peer,
            peer.work(RESULTS) as results,
            start_workers(server.url, len(state.workers)) as processes,
        ):
            async with _background(partial(_collect, results, state), partial(_watch, mesh, processes, state, show)):
                await _play(mesh, processes, state)
            await processes.stop()


class _NewsHandler(logging.Handler):
    """Show log lines of the mesh as news: a worker was found dead, its tasks were requeued."""

    def __init__(self, state: DemoState) -> None:
        super().__init__()
        self.state = state

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        requeued = getattr(record, "event", "") == "fail_worker" and getattr(record, "returned", 0) > 0
        if record.levelno >= logging.WARNING or requeued:
            self.state.tell("log: " + WORKER_ID.sub("", text).replace("worker worker-", "worker-"))


@contextmanager
def _log_shown(state: DemoState) -> Generator[None]:
    """Show the log of the demo's own worker as news, and nowhere else, inside the block."""
    logger, handler = logging.getLogger("worqr"), _NewsHandler(state)
    level, propagate = logger.level, logger.propagate
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


@asynccontextmanager
async def _background(*loops: Callable[[], Awaitable[None]]) -> AsyncGenerator[None]:
    """Run these functions for the length of the block. Their errors are raised unchanged, not as a group."""
    try:
        async with trio.open_nursery() as nursery:
            for loop in loops:
                nursery.start_soon(loop)
            yield
            nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        _, errors = group.split(trio.Cancelled)
        raise (errors or group).exceptions[0] from None


async def _collect(results: worqr.Claims, state: DemoState) -> None:
    """Take the results in batches. Each is added first and finished then, so that none is lost."""
    while batch := await results.take(100):
        for claim in batch:
            state.add(decode(claim.task))
        await results.finish(batch)


async def _watch(
    mesh: worqr.Mesh, processes: WorkerProcesses, state: DemoState, show: Callable[[DemoState], None]
) -> None:
    """Read the mesh as an operator would, a few times a second, and show it."""
    while True:
        processes.check()
        await _refresh(mesh, processes, state)
        show(state)
        await trio.sleep(REFRESH_EVERY)


async def _refresh(mesh: worqr.Mesh, processes: WorkerProcesses, state: DemoState) -> None:
    info = await mesh.queue(FILES).info()
    state.set_counts(info.waiting, info.running)
    workers = {worker.app: worker for worker in await mesh.workers()}
    for row, process in zip(state.workers, processes.all, strict=True):
        worker = workers.get(row.name)
        running = worker.running if worker and info.running and not process.killed else 0
        if process.killed:
            word = "killed" if worker else "killed, tasks requeued"
        elif worker:
            word = "busy" if running else "idle"
        else:
            word = row.state
        row.update(process.pid, word, running)


async def _play(mesh: worqr.Mesh, processes: WorkerProcesses, state: DemoState) -> None:
    files, total = mesh.queue(FILES), len(state.results.files)
    await _all_joined(mesh, processes)
    await _order(mesh, state)
    state.clock.restart()
    await files.enqueue(*map(os.fsencode, sorted(state.results.files)))
    state.tell(f"enqueued {total} files, one task each")
    await state.until(lambda: len(state.results.first) >= total * KILL_AFTER)
    await _approve(mesh, state)
    await _kill_one(mesh, processes, state)
    await _cancel_long_task(mesh, state)
    await _wait_for_results(state)
    await _wait_for_order(state)
    state.set_left(await _all_settled(mesh))
    await _refresh(mesh, processes, state)  # so that the last picture is that of the end


async def _all_joined(mesh: worqr.Mesh, processes: WorkerProcesses) -> None:
    """Wait until every worker serves its queues."""
    with trio.move_on_after(READY_WITHIN):
        while True:
            workers = await mesh.workers()
            if sum({FILES, LONG, ORDERS} <= worker.queues for worker in workers) == len(processes.all):
                return
            await trio.sleep(0.05)
    raise WorkerDied(f"the workers did not start within {READY_WITHIN:g} s")


async def _order(mesh: worqr.Mesh, state: DemoState) -> None:
    """Dispatch the workflow, and wait until it waits."""
    job = await mesh.queue(ORDERS).dispatch(b"{}", id=ORDER)
    await state.until(lambda: bool(state.order.of("charged")))
    with trio.move_on_after(CANCEL_WAIT):
        async with job.watch() as states:
            async for status in states:
                state.order.wait(status.state)
                if status.state == "suspended":
                    break
    state.tell("a workflow charged a card, and waits for an approval: no worker has it")


async def _approve(mesh: worqr.Mesh, state: DemoState) -> None:
    """Send the approval, and wait until a worker ships the order."""
    state.order.approve()
    await mesh.queue(ORDERS).job(ORDER).send("approved", True)
    await state.until(lambda: bool(state.order.of("shipping")))
    state.tell(f"the approval has come: the workflow ships on {state.order.of('shipping')[0].worker}")


async def _wait_for_order(state: DemoState) -> None:
    """Wait until the order is shipped, or no report has come for a long time."""
    with trio.move_on_after(NOTHING_NEW):
        await state.until(lambda: bool(state.order.of("shipped")))


async def _kill_one(mesh: worqr.Mesh, processes: WorkerProcesses, state: DemoState) -> None:
    """Kill the worker that ships, while it holds files. It is frozen first, so that the count of its files is exact."""
    ids = {worker.pid: worker.id for worker in await mesh.workers()}
    ships = state.order.of("shipping")[0].worker
    while len(state.results.first) < len(state.results.files):
        for process in [each for each in processes.all if each.name == ships]:
            process.freeze()
            held = await _held_by(mesh, ids[process.pid])
            if held:
                return _kill(process, held, state)
            process.resume()
    state.tell("no worker was running a file, so none was killed")
    return None


async def _held_by(mesh: worqr.Mesh, worker: str) -> int:
    """Return how many files a frozen worker holds.

    The first read makes the server process everything that the worker had sent before.
    """
    await trio.sleep(SETTLE)
    await mesh.queue(FILES).running()
    return sum(status.worker == worker for status in await mesh.queue(FILES).running())


def _kill(process: WorkerProcess, held: int, state: DemoState) -> None:
    at = time.monotonic()
    process.kill()
    state.set_killed(Killed(process.name, process.pid, at, held))
    state.tell(f"killed {process.name} with SIGKILL while it ran {plural(held, 'file')} and the workflow")


async def _cancel_long_task(mesh: worqr.Mesh, state: DemoState) -> None:
    """Enqueue the long task, wait until it has begun, and cancel it from this process."""
    queue, long_task = mesh.queue(LONG), state.long_task
    await queue.enqueue(LONG_TASK)
    await state.until(lambda: long_task.runs > 0)
    state.tell(f"a long task started on {long_task.worker}")
    await trio.sleep(LONG_RUNS_FOR)
    long_task.call_cancel()
    count = await queue.cancel(LONG_TASK, wait=CANCEL_WAIT)
    long_task.acknowledge_cancel(count.acknowledged)
    with trio.move_on_after(CANCEL_WAIT):
        await state.until(lambda: long_task.cancelled_at is not None)
    state.tell(f"cancelled the long task from this process: {count.acknowledged} of {count.running} runs ended")


def _more_than(state: DemoState, files: int) -> bool:
    return len(state.results.first) > files


async def _wait_for_results(state: DemoState) -> None:
    """Wait until every file has its result, or no result has come for a long time."""
    total = len(state.results.files)
    while len(state.results.first) < total:
        before = len(state.results.first)
        with trio.move_on_after(NOTHING_NEW) as waiting:
            await state.until(partial(_more_than, state, before))
        if waiting.cancelled_caught:
            state.tell(f"no result for {NOTHING_NEW:g} s; {total - len(state.results.first)} files are missing")
            return
    state.tell("every file has a result")


async def _all_settled(mesh: worqr.Mesh) -> dict[str, int]:
    """Wait until every task is finished; return how many tasks each queue still has, in any state."""
    left: dict[str, int] = {}
    with trio.move_on_after(CANCEL_WAIT):
        while True:
            for name in (FILES, LONG, ORDERS, RESULTS):
                info = await mesh.queue(name).info()
                left[name] = info.waiting + info.running + info.scheduled + info.failed + info.undecodable
            if not any(left.values()):
                break
            await trio.sleep(0.02)
    return left
