"""``worqr demo``: run workers on this machine, kill one, cancel a task, and check that nothing was lost.

Here is the command. ``story`` has the steps, ``board`` the state, ``view`` the display, ``summary`` the checks, ``fleet`` and
``peer`` the processes of the workers, ``work`` their handler, ``report`` the messages that they send.
"""

from __future__ import annotations

import sys
from typing import Annotated

import trio
from cyclopts import Parameter

from worqr.cli.demo.story import tell_story
from worqr.cli.demo.summary import is_good, summarise
from worqr.cli.demo.view import open_view
from worqr.cli.demo.work import find_files
from worqr.errors import WorqrError

FILES_PER_PEER = 20
"""With fewer the queue would be empty when the worker is killed."""
MOST_PEERS = 32
WRONG_USE = 2
INTERRUPTED = 130


def demo(
    *,
    files: Annotated[
        int | None, Parameter(metavar="N", help="Count only the N largest files. Default: all files.")
    ] = None,
    peers: Annotated[
        int, Parameter(name="--workers", metavar="N", help="Number of workers, each in its own process.")
    ] = 4,
) -> int:
    """Run a demo: kill a worker, cancel a task, lose nothing.

    Starts a private server and some workers, which count the tokens of every source file in Python's standard library. Kills one
    worker, cancels a long task from another process, and checks that every file has its result.
    """
    if wrong := _wrong(files, peers):
        print(f"worqr: {wrong}", file=sys.stderr)
        return WRONG_USE
    try:
        good = _run(find_files(files), peers)
    except BaseException as error:
        if _is_interrupt(error):
            print("worqr: interrupted; the workers and the server are stopped", file=sys.stderr)
            return INTERRUPTED
        if isinstance(error, WorqrError):
            print(f"worqr: {error}", file=sys.stderr)
            return 1
        raise
    return 0 if good else 1


def _run(paths: list[str], peers: int) -> bool:
    with open_view() as view:
        lines = summarise(trio.run(tell_story, paths, peers, view.show))
        view.end(lines)
        return is_good(lines)


def _wrong(files: int | None, peers: int) -> str:
    """Return the error in the options, if there is one."""
    if not 2 <= peers <= MOST_PEERS:
        return f"--workers must be from 2 (one is killed) to {MOST_PEERS}, got {peers}"
    fewest = FILES_PER_PEER * peers
    if files is not None and files < fewest:
        why = "files must be left in the queue when a worker is killed"
        return f"--files must be at least {fewest} for {peers} workers, got {files}: {why}"
    return ""


def _is_interrupt(error: BaseException) -> bool:
    """True for Ctrl-C, alone or in an exception group."""
    return bool(BaseExceptionGroup("any", [error]).subgroup(KeyboardInterrupt))
