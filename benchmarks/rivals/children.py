"""The processes of a contender: its worker, which may start more, and its producer, which takes commands."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.rivals.environments import Prepared

REPLY_WITHIN = 60.0
LOG_LINES = 3


class Failed(Exception):
    """A contender did not do what was asked; the text says what happened."""


def descendants(root: int) -> list[int]:
    """Return the processes that `root` and its children started and that are still below it."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    todo = [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def _parents() -> Iterator[tuple[int, int]]:
    if Path("/proc/self/stat").exists():
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    stat = (folder / "stat").read_text("utf-8", "replace")
                except OSError:  # it has ended
                    continue
                yield int(folder.name), int(stat.rpartition(")")[2].split()[1])
        return
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    for line in listed.splitlines():
        pid, parent = line.split()
        yield int(pid), int(parent)


def kill(process: subprocess.Popen[Any]) -> None:
    """Send SIGKILL to the process and to all that it started, and wait for the process."""
    below = descendants(process.pid) if process.poll() is None else []
    process.kill()
    for pid in below:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    process.wait()


class Lines:
    """Reads lines from a descriptor, and waits for each no longer than `within`."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._rest = b""

    def next(self, within: float) -> str | None:
        """Return the next line; None: there was none in time, or the other end is closed."""
        ends = time.monotonic() + within
        while b"\n" not in self._rest:
            left = ends - time.monotonic()
            if left < 0 or not select.select([self.fd], [], [], left)[0]:
                return None
            data = os.read(self.fd, 65536)
            if not data:
                return None
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()


class Producer:
    """The contender's producer, which takes one command at a time."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        assert process.stdout is not None
        self._process = process
        self._log = log
        self._lines = Lines(process.stdout.fileno())

    def ask(self, do: str, within: float = REPLY_WITHIN, **values: object) -> dict[str, Any]:
        """Send a command and return the reply.

        Raises:
            Failed: There is no reply in time, or the process ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **values}).encode() + b"\n")
            self._process.stdin.flush()
            line = self._lines.next(within)
        except BrokenPipeError:
            line = None
        if line is None:
            raise Failed(f"no reply to {do!r}; {end_of(self._log)}")
        reply: dict[str, Any] = json.loads(line)
        return reply


def end_of(log: Path) -> str:
    """The last lines of a log, in one."""
    lines = log.read_text("utf-8", "replace").strip().splitlines()[-LOG_LINES:]
    return "its log ends with: " + " / ".join(lines) if lines else "its log is empty"


@contextmanager
def started(
    command: list[str], prepared: Prepared, env: dict[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program of the contender, and kill it with all that it started on leaving. Ctrl-C does not reach it."""
    with log.open("ab") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if command[-1] == "produce" else file,
            stderr=file,
            env={**prepared.env, **env},
            cwd=prepared.contender.path.parent,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        kill(process)
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    pass
