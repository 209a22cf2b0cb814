"""The peers' processes: started, frozen and killed by the demo, and ended with it.

Each peer has the reading end of a pipe as its standard input, its leash: when the demo closes it, or ends for any reason, the
peer leaves. The peers have sessions of their own, so that Ctrl-C reaches only the demo, which then ends them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import IO

import trio

from worqr.errors import WorqrError

LEAVE_WITHIN = 12.0
LOG_LINES = 15


class PeerDied(WorqrError):
    """A worker ended by itself; the message has the end of its output."""


@dataclass(slots=True)
class PeerProcess:
    """One peer. `killed`: by the demo, on purpose."""

    name: str
    process: trio.Process
    log: IO[bytes]
    killed: bool = False

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def freeze(self) -> None:
        """Suspend it; it can do nothing until it is resumed."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Resume it."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Send SIGKILL: it cannot react."""
        self.killed = True
        self.process.kill()

    async def let_go(self) -> None:
        """Let it shut down normally."""
        if self.process.stdin is not None:
            await self.process.stdin.aclose()

    def last_words(self) -> str:
        """The end of its standard error."""
        self.log.seek(0)
        return "\n".join(self.log.read().decode("utf-8", "replace").splitlines()[-LOG_LINES:]) or "(no output)"

    def check(self) -> None:
        """Raise PeerDied if it ended by itself."""
        code = self.process.poll()
        if code and not self.killed:
            raise PeerDied(
                f"{self.name} (pid {self.pid}) ended unexpectedly with exit code {code}:\n{self.last_words()}"
            )


@dataclass(frozen=True, slots=True)
class Fleet:
    """All peers."""

    peers: list[PeerProcess]

    def check(self) -> None:
        """Raise PeerDied if one ended by itself."""
        for peer in self.peers:
            peer.check()

    async def leave(self) -> None:
        """Let all of them shut down, and wait until they have ended; raise PeerDied if one could not do so normally."""
        for peer in self.peers:
            if not peer.killed:
                await peer.let_go()
        with trio.move_on_after(LEAVE_WITHIN):
            for peer in self.peers:
                await peer.process.wait()
        self.check()
        left = [peer.name for peer in self.peers if peer.process.poll() is None]
        if left:
            raise PeerDied(f"{', '.join(left)} did not end within {LEAVE_WITHIN:g} s")


@asynccontextmanager
async def open_fleet(url: str, number: int) -> AsyncGenerator[Fleet]:
    """Start that many peers; in any case, none is left afterwards."""
    fleet = Fleet([])
    try:
        for i in range(1, number + 1):
            fleet.peers.append(await _start(url, f"worker-{i}"))
        yield fleet
    finally:
        with trio.CancelScope(shield=True):
            for peer in fleet.peers:
                peer.process.kill()
                await peer.process.wait()
                await peer.let_go()
                peer.log.close()


async def _start(url: str, name: str) -> PeerProcess:
    log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the fleet
    process = await trio.lowlevel.open_process(
        [sys.executable, "-m", "worqr.cli.demo.peer", url, name],
        stdin=subprocess.PIPE,
        stdout=log.fileno(),
        stderr=log.fileno(),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},  # the same worqr as ours
        start_new_session=True,
    )
    return PeerProcess(name, process, log)
