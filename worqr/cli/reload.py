"""``worqr run --reload``: a supervisor that restarts the worker, its child, when a ``.py`` file of the project changes.

Supervisor and child share the terminal, so a debugger works in a handler, and Ctrl-C reaches both. A pipe connects them. The
supervisor writes into it how urgently the child should stop: see `worqr.hosting.service.StopLevel`. The end of the pipe means
that the supervisor has ended. Repeated messages do no harm.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Final

from worqr.cli.output import print_error

CONTROL_PIPE: Final = "WORQR_RELOAD_PIPE"
"""The environment variable with the file descriptor of the child's end of the pipe."""
POLL_EVERY: Final = 0.3
"""Seconds between two checks of the files; a change takes effect when two checks in a row find the same."""
STOP_WITHIN: Final = 10.0
"""Seconds that a child has to cancel its handlers and give their tasks back; then it is killed."""
SKIPPED: Final = frozenset({"__pycache__", "node_modules", "site-packages", "venv", "env", "build", "dist"})

Snapshot = dict[str, tuple[int, int]]
"""Each file with the time of its last change and its size."""


def supervise(command: Sequence[str], folder: Path) -> int:
    """Run `command` as a child, and restart it after each change below `folder`, until a signal; return the exit code."""
    supervisor = _Supervisor(command, folder)
    before = [
        (number, signal.signal(number, supervisor.on_signal))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    ]
    try:
        return supervisor.run()
    finally:
        for number, handler in before:
            signal.signal(number, handler)


class _Supervisor:
    """The supervisor. Its signal handler changes `_urgency`; `run` changes everything else."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self._command = command
        self._folder = folder
        self._urgency = 0
        self._child: subprocess.Popen[bytes] | None = None
        self._control = -1

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal: pass it on. The child may have received it from the terminal, too."""
        self._urgency = max(1, self._urgency + (number != signal.SIGHUP))
        self._send_request(self._urgency)

    def run(self) -> int:
        """Run and restart the child until a signal comes; return the exit code."""
        known = scan(self._folder)
        self._start()
        while True:
            code = self._wait(POLL_EVERY)
            if code is not None and self._urgency:
                return code
            if self._urgency or (now := scan(self._folder)) == known:
                continue
            now = self._wait_unchanged(now)
            print_error(f"{describe_change(known, now)} changed; restarting")
            known = now
            self._stop_child()
            if self._urgency:
                return 0
            self._start()

    def _wait_unchanged(self, now: Snapshot) -> Snapshot:
        """Return the files as soon as two checks in a row find the same."""
        while True:
            time.sleep(POLL_EVERY)
            before, now = now, scan(self._folder)
            if now == before:
                return now

    def _start(self) -> None:
        child_end, self._control = os.pipe()
        environment = {**os.environ, CONTROL_PIPE: str(child_end)}
        try:
            self._child = subprocess.Popen(self._command, env=environment, pass_fds=(child_end,))
        finally:
            os.close(child_end)
        self._send_request(self._urgency)  # a signal may have come before there was a child

    def _wait(self, seconds: float) -> int | None:
        """Return the exit code of the child if it has ended. Log it once, unless the supervisor is stopping too."""
        if self._child is None:
            time.sleep(seconds)
            return 0 if self._urgency else None
        try:
            code = self._child.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        self._forget_child()
        if not self._urgency:
            print_error(f"the worker ended with exit code {code}; it restarts when a file changes")
        return code if code >= 0 else 1

    def _stop_child(self) -> None:
        """Stop the child: it cancels its handlers, and their tasks return to their queues."""
        child = self._child
        if child is None:
            return
        self._send_request(2)
        try:
            child.wait(STOP_WITHIN)
        except subprocess.TimeoutExpired:
            print_error(
                f"the worker did not end within {STOP_WITHIN:g} s and was killed; its tasks return to their queues within 5 s"
            )
            child.kill()
            child.wait()
        self._forget_child()

    def _forget_child(self) -> None:
        self._child = None
        os.close(self._control)
        self._control = -1

    def _send_request(self, urgency: int) -> None:
        if urgency and self._control >= 0:
            with contextlib.suppress(OSError):  # the child has ended
                os.write(self._control, str(min(urgency, 3)).encode())


def scan(folder: Path) -> Snapshot:
    """Return all Python files below `folder`, except those in hidden folders and virtual environments."""
    return dict(_files(os.fspath(folder)))


def _files(folder: str) -> Iterator[tuple[str, tuple[int, int]]]:
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return  # the file was removed meanwhile
    if any(entry.name == "pyvenv.cfg" for entry in entries):
        return
    for entry in entries:
        if entry.name.startswith(".") or entry.name in SKIPPED:
            continue
        with contextlib.suppress(OSError):
            if entry.is_dir(follow_symlinks=False):
                yield from _files(entry.path)
            elif entry.name.endswith(".py"):
                status = entry.stat()
                yield entry.path, (status.st_mtime_ns, status.st_size)


def describe_change(before: Snapshot, now: Snapshot) -> str:
    """Return the changed files as a text for people."""
    names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    return os.path.relpath(names[0]) + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def follow_supervisor(request_stop: Callable[[int], None]) -> bool:
    """In a child, call `request_stop` in a thread with each message of the supervisor. Return False without a supervisor."""
    number = os.environ.pop(CONTROL_PIPE, "")
    if not number:
        return False
    threading.Thread(target=_read_requests, args=(int(number), request_stop), name="worqr-reload", daemon=True).start()
    return True


def _read_requests(pipe: int, request_stop: Callable[[int], None]) -> None:
    while request := os.read(pipe, 64):
        request_stop(int(max(request.decode())))
    request_stop(2)  # the supervisor has ended


def command_without_reload() -> list[str]:
    """Return the command line of this process, without `--reload`, for the child."""
    return [sys.executable, "-m", "worqr", *(word for word in sys.argv[1:] if word != "--reload")]
