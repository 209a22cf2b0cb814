"""``worqr run --reload``: a supervisor that restarts the worker, its child, when a ``.py`` file of the project changes.

Supervisor and child share the terminal, so that a debugger works in a handler, and Ctrl-C reaches both. They are connected by a
pipe, the leash: the supervisor writes into it how urgently the child should leave (see
`worqr.hosting.service.Urgency`). The end of the pipe means that the supervisor has ended. Repeated messages do no harm.
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

LEASH: Final = "WORQR_RELOAD_LEASH"
"""The environment variable with the number of the child's end of the leash."""
LOOK_EVERY: Final = 0.3
"""Seconds between two checks of the files; a change takes effect when two checks in a row find the same."""
LET_GO: Final = 10.0
"""Seconds that a child has to cancel its handlers and give their tasks back; then it is killed."""
SKIPPED: Final = frozenset({"__pycache__", "node_modules", "site-packages", "venv", "env", "build", "dist"})

Seen = dict[str, tuple[int, int]]
"""Of each file the time of its last change, and its size."""


def supervise(command: Sequence[str], folder: Path) -> int:
    """Run `command` as a child, and restart it after each change below `folder`, until a signal; return the exit code."""
    supervisor = _Supervisor(command, folder)
    before = [(number, signal.signal(number, supervisor.hear)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        return supervisor.run()
    finally:
        for number, handler in before:
            signal.signal(number, handler)


class _Supervisor:
    """Changed by its own signal handler: `_urgency`; everything else in `run`."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self._command = command
        self._folder = folder
        self._urgency = 0
        self._child: subprocess.Popen[bytes] | None = None
        self._leash = -1

    def hear(self, _number: int, _frame: FrameType | None) -> None:
        """A signal: pass it on. The child may have had it from the terminal, too."""
        self._urgency += 1
        self._pull(self._urgency)

    def run(self) -> int:
        seen = look(self._folder)
        self._start()
        while True:
            code = self._wait(LOOK_EVERY)
            if code is not None and self._urgency:
                return code
            if self._urgency or (now := look(self._folder)) == seen:
                continue
            now = self._settled(now)
            print_error(f"{changed(seen, now)} changed; restarting")
            seen = now
            self._end()
            if self._urgency:
                return 0
            self._start()

    def _settled(self, now: Seen) -> Seen:
        """Return the files, once two checks in a row find the same."""
        while True:
            time.sleep(LOOK_EVERY)
            before, now = now, look(self._folder)
            if now == before:
                return now

    def _start(self) -> None:
        ours, self._leash = os.pipe()
        environment = {**os.environ, LEASH: str(ours)}
        try:
            self._child = subprocess.Popen(self._command, env=environment, pass_fds=(ours,))
        finally:
            os.close(ours)
        self._pull(self._urgency)  # a signal may have come before there was a child

    def _wait(self, seconds: float) -> int | None:
        """Its exit code, if it has ended; logged once, unless the supervisor is ending too."""
        if self._child is None:
            time.sleep(seconds)
            return 0 if self._urgency else None
        try:
            code = self._child.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        self._let_go()
        if not self._urgency:
            print_error(f"the worker ended with exit code {code}; it restarts when a file changes")
        return code if code >= 0 else 1

    def _end(self) -> None:
        """Have the child leave at once, its tasks given back."""
        child = self._child
        if child is None:
            return
        self._pull(2)
        try:
            child.wait(LET_GO)
        except subprocess.TimeoutExpired:
            print_error(
                f"the worker did not end within {LET_GO:g} s and was killed; its tasks return to their queues within 5 s"
            )
            child.kill()
            child.wait()
        self._let_go()

    def _let_go(self) -> None:
        self._child = None
        os.close(self._leash)
        self._leash = -1

    def _pull(self, urgency: int) -> None:
        if urgency and self._leash >= 0:
            with contextlib.suppress(OSError):  # it has ended
                os.write(self._leash, str(min(urgency, 3)).encode())


def look(folder: Path) -> Seen:
    """All Python files below `folder`; hidden folders and environments are left out."""
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


def changed(before: Seen, now: Seen) -> str:
    """The changed files, for people."""
    names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    return os.path.relpath(names[0]) + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def on_leash(heed: Callable[[int], None]) -> bool:
    """In a child: call `heed`, in a thread, with the messages from the leash. Return False if there is no leash."""
    number = os.environ.pop(LEASH, "")
    if not number:
        return False
    threading.Thread(target=_hold, args=(int(number), heed), name="worqr-leash", daemon=True).start()
    return True


def _hold(leash: int, heed: Callable[[int], None]) -> None:
    while told := os.read(leash, 64):
        heed(int(max(told.decode())))
    heed(2)  # the supervisor has ended


def command_without_reload() -> list[str]:
    """The command of this process as the child's."""
    return [sys.executable, "-m", "worqr", *(word for word in sys.argv[1:] if word != "--reload")]
