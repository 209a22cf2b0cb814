"""The end of a worker process with its parent: in every way there is, also those that this system does not need."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from tests.peer.processes import wait_dead
from tests.support.children import ROOT

PROGRAM = """
import os, socket, subprocess, sys, time
from worqr.peer.executors.processes import worker_main as lifeline

for name in sys.argv[3:]:
    setattr(lifeline, name, lambda *_: False)
line = socket.socket(fileno=int(sys.argv[2]))
lifeline.die_with_parent(int(sys.argv[1]), line)
print(subprocess.Popen(["sleep", "100"], stdout=subprocess.DEVNULL).pid, flush=True)
time.sleep(100)
"""
WAYS = ("_kill_group_at_hangup", "_ask_for_death_signal")


@contextmanager
def started(parent: int, *without: str) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    """A process that `parent` is said to have started, and the parent's end of its lifeline."""
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(parent), str(theirs.fileno()), *without],
        stdout=subprocess.PIPE,
        pass_fds=[theirs.fileno()],
        start_new_session=True,
        cwd=ROOT,
    )
    theirs.close()
    assert process.stdout is not None
    with ours, process.stdout:
        try:
            yield process, ours
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.parametrize("without", [(), WAYS[:1], WAYS[1:], WAYS], ids=str)
async def test_it_and_what_it_started_end_when_the_other_end_is_closed(without: tuple[str, ...]) -> None:
    with started(os.getpid(), *without) as (process, ours):
        assert process.stdout is not None
        grandchild = int(process.stdout.readline())
        assert process.poll() is None
        ours.close()
        await wait_dead(process.pid, grandchild)
        assert process.wait() == -signal.SIGKILL


@pytest.mark.parametrize("gone", ["closed", "another parent"])
async def test_one_whose_parent_was_gone_before_it_could_ask_ends_at_once(gone: str) -> None:
    with started(os.getppid() if gone == "another parent" else os.getpid()) as (process, ours):
        if gone == "closed":
            ours.close()
        assert process.stdout is not None
        assert process.stdout.readline() == b""
        assert process.wait() == -signal.SIGKILL
