"""``worqr demo``: run workers on this machine, kill one, cancel a task, and check that nothing was lost.

Here is the command. ``scenario`` has the steps, ``state`` the work, the messages of the workers and the state, ``display``
the output, and ``summary`` the checks. ``worker_processes`` starts the workers, and has their program.
"""

from __future__ import annotations

import sys
from typing import Annotated

import trio
from cyclopts import Parameter

from worqr.cli.demo.display import open_display
from worqr.cli.demo.scenario import run_scenario
from worqr.cli.demo.state import find_files
from worqr.cli.demo.summary import is_good, summarise
from worqr.cli.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_INVALID
from worqr.cli.options import flag
from worqr.errors import UsageError, WorqrError

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
