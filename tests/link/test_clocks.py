"""One clock tells how old beats and leases are, on machines that sleep, too."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest
import trio

import worqr
from tests.support.patience import PATIENCE
from tests.support.servers import Server
from worqr.link import boottime

A_MAC_THAT_SLEPT = f"""
import sys, time
# as macOS: no CLOCK_BOOTTIME; CLOCK_MONOTONIC went on during 100 s of sleep, and time.monotonic() did not
if hasattr(time, "CLOCK_BOOTTIME"):
    del time.CLOCK_BOOTTIME
gettime = time.clock_gettime
time.clock_gettime = lambda clock: gettime(clock) + (100 if clock == time.CLOCK_MONOTONIC else 0)

import trio, worqr

async def main(url, prefix):
    done = trio.Event()

    async def run(task):
        done.set()

    mesh = worqr.Mesh(url, prefix=prefix)
    with trio.fail_after({PATIENCE}):
        async with mesh.join() as peer, trio.open_nursery() as nursery:
            await nursery.start(peer.serve, "Q1", run)
            while not peer.health().ready:
                await trio.sleep(0.01)
            await mesh.queue("Q1").dispatch(b"due", delay=0.1)  # which the leader promotes
            await done.wait()
            nursery.cancel_scope.cancel()

trio.run(main, *sys.argv[1:])
"""


@pytest.mark.skipif(not hasattr(time, "clock_gettime"), reason="Windows has one clock")
async def test_a_peer_works_where_the_monotonic_clocks_differ(server: Server, prefix: str) -> None:
    """A beat's age is a difference of two readings: of the thread that beats, and of the loop."""
    command = [sys.executable, "-c", A_MAC_THAT_SLEPT, server.url, prefix]
    ended = await trio.run_process(command, check=False, capture_stderr=True, stdin=subprocess.DEVNULL)
    assert ended.returncode == 0, ended.stderr.decode()[-2000:]


def test_nobody_else_reads_a_clock_that_goes_on_in_sleep() -> None:
    package = Path(worqr.__file__).parent
    readers = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Attribute) and node.attr == "clock_gettime"
    }
    assert readers == {"link/log_thread.py"}


def test_boottime_moves() -> None:
    first = boottime()
    time.sleep(0.002)
    assert 0 < boottime() - first < 60
