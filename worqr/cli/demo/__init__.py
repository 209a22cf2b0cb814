"""``worqr demo``: a mesh at work on this machine, a peer killed, a task cancelled, and a summary that is checked.

Here is the command. ``story`` has what happens, ``board`` what is known of it, ``view`` how it is shown, ``summary``
the checks, ``fleet`` and ``peer`` the peers' processes, ``work`` and ``report`` what they do and tell.
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
"""With fewer there would be nothing left in the queue when the peer is killed."""
MOST_PEERS = 32
WRONG_USE = 2
INTERRUPTED = 130


def demo(
    *,
    files: Annotated[int | None, Parameter(help="Count only the N largest files.")] = None,
    peers: Annotated[int, Parameter(help="How many peers, each a process of its own.")] = 4,
) -> int:
    """Show a mesh at work on this machine: kill a peer, cancel a long task, lose nothing.

    Starts a private server and some peers, has them tokenise and count every source file of Python's own standard
    library, kills one of them midway, cancels one long task from another process, and checks that every file has its
    result. Exit code 1 if anything is missing.
    """
    if wrong := _wrong(files, peers):
        print(f"worqr: {wrong}", file=sys.stderr)
        return WRONG_USE
    try:
        good = _run(find_files(files), peers)
    except BaseException as error:
        if _is_interrupt(error):
            print("worqr: interrupted; the peers and the server are gone", file=sys.stderr)
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
    """What is wrong with the options, if anything is."""
    if not 2 <= peers <= MOST_PEERS:
        return f"--peers must be 2 (one is killed) to {MOST_PEERS}, not {peers}"
    fewest = FILES_PER_PEER * peers
    if files is not None and files < fewest:
        why = "some must be left when one of them is killed"
        return f"--files must be at least {fewest} for {peers} peers, not {files}: {why}"
    return ""


def _is_interrupt(error: BaseException) -> bool:
    """Ctrl-C, bare or in a group of whatever it made fail."""
    return bool(BaseExceptionGroup("any", [error]).subgroup(KeyboardInterrupt))
