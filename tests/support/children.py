"""Programs run beside a test, as processes of their own: read line by line, frozen, killed, and ended with the test."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import tempfile
import textwrap
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

import trio

from tests.support import forking
from tests.support.forking import ROOT as ROOT
from tests.support.patience import PATIENCE


def is_running(pid: int) -> bool:
    """Return True if there is a process with this id, also if nothing has waited for its end."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class Child:
    """A Python program: a file (`Path`) or code (`str`), with `args`.

    Its standard output is read here, line by line; what it wrote to its standard error is in every failure's message.
    The methods that wait are async, and fail after `within` seconds. With `fresh`, it begins as a new interpreter, for a test of
    imports, of what a program reads when it begins, or of what other programs see of it.
    """

    def __init__(self, program: Path | str, *args: str, env: dict[str, str] | None = None, fresh: bool = False) -> None:
        source = [os.fspath(program)] if isinstance(program, Path) else ["-c", textwrap.dedent(program)]
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        environment = {**os.environ, "PYTHONPATH": os.fspath(ROOT), **(env or {})}
        self.process = forking.start([*source, *args], ROOT, environment, self._errors, fresh=fresh)
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name=f"child-{self.pid}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def errors(self) -> str:
        """All of its standard error so far."""
        return os.pread(self._errors.fileno(), 1 << 20, 0).decode("utf-8", "replace")

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.decode("utf-8", "replace").rstrip("\n"))
        self._lines.put(None)

    async def line(self, within: float = PATIENCE) -> str:
        """The next line it prints."""
        try:
            line = await trio.to_thread.run_sync(self._lines.get, True, within, abandon_on_cancel=True)
        except queue.Empty:
            raise AssertionError(f"the child printed nothing for {within:g} s; its errors:\n{self.errors}") from None
        if line is None:
            self._lines.put(None)
            raise AssertionError(f"the child ended (exit {self.process.wait()}); its errors:\n{self.errors}")
        return line

    async def line_with(self, text: str, within: float = PATIENCE) -> str:
        """The next line that contains `text`; the ones before it are dropped."""
        deadline = time.monotonic() + within
        while text not in (line := await self.line(max(deadline - time.monotonic(), 0.001))):
            pass
        return line

    def send(self, line: str) -> None:
        """A line for its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        self.process.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        self.process.kill()
        self.process.wait()

    def pause(self) -> None:
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    async def ended(self, within: float = PATIENCE) -> int:
        """Its exit code, once it has ended."""
        try:
            return await trio.to_thread.run_sync(self.process.wait, within, abandon_on_cancel=True)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the child runs still after {within:g} s; its errors:\n{self.errors}") from None

    def close(self) -> None:
        if self.process.poll() is None or not is_running(self.pid):  # else the id is that of another process by now
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)  # and what it has started
        self.process.wait()
        self._reader.join()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self._errors.close()
