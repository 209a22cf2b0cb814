"""Other processes as seen from this one: started, asked, killed, and ended with their benchmark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from worqr.embedded import EmbeddedServer

ROOT = Path(__file__).parent.parent
READY_WITHIN = 60.0


class Child:
    """One process that runs `benchmarks.child`. It ends when its standard input does, so at the latest with us."""

    def __init__(self, process: trio.Process) -> None:
        self.process = process
        self._rest = b""

    async def line(self) -> str:
        """The next line it writes."""
        assert self.process.stdout is not None
        while b"\n" not in self._rest:
            data = await self.process.stdout.receive_some()
            if not data:
                raise RuntimeError("a child process of the benchmark ended; its error is above")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    async def ask(self, word: str) -> str:
        """Write a line, read a line."""
        assert self.process.stdin is not None
        await self.process.stdin.send_all(word.encode() + b"\n")
        return await self.line()

    async def cpu(self) -> float:
        """Seconds of CPU that it has used so far."""
        return float(await self.ask("cpu"))

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()


@asynccontextmanager
async def open_child(role: str, server: EmbeddedServer, **options: object) -> AsyncGenerator[Child]:
    """Start a process in `role` (a function of `benchmarks.child`); back when it is ready."""
    path = os.pathsep.join(filter(None, (os.fspath(ROOT), os.environ.get("PYTHONPATH"))))
    process = await trio.lowlevel.open_process(
        [sys.executable, "-m", "benchmarks.child", role, json.dumps({"socket": server.socket_path, **options})],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        child = Child(process)
        with trio.fail_after(READY_WITHIN):
            ready = await child.line()
        assert ready == "ready", ready
        yield child
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    await stream.aclose()
