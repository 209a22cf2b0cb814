"""Child processes: their memory, read from outside; a guard of what they import; and the end of those that a handler forks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from worqr.errors import UsageError
from worqr.tracebacks import one_line


def resident_memory(pid: int) -> int:
    """Return the resident memory of a process in bytes; 0: it cannot be read. Elsewhere than on Linux it runs `ps`."""
    with suppress(OSError, ValueError, IndexError):
        if sys.platform == "linux":
            return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        found = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=False)
        return int(found.stdout) * 1024
    return 0


# Keep a script from starting the application again in each of its worker processes.
#
# A worker process imports the module of the function that it runs. If that module starts the application outside of
# ``if __name__ == "__main__":``, `refuse_while_importing` raises.

_importing: list[str] = []

"""The module that this worker process is importing."""


@contextmanager
def importing(module: str) -> Generator[None]:
    """Refuse peers and connections in the block, in which a worker process imports `module`."""
    _importing.append(module)
    try:
        yield
    finally:
        _importing.pop()


def refuse_while_importing(what: str) -> None:
    """Check that this process may start `what`, a connection for instance.

    Raises:
        UsageError: this is a worker process that imports the application.
    """
    if _importing:
        raise UsageError(
            f"no {what} while a worker process imports {_importing[-1]!r}, where it finds a function with "
            "runs_in='process': put what starts the application under `if __name__ == \"__main__\":`"
        )


# Forks that handlers make: a child that comes out of its handler ends, instead of going on as a copy of the worker.
#
# The child would have copies of all sockets of the worker, and none of its other threads. It ends like a program: with code 0 if
# the handler returned, with the code of ``sys.exit``, or with code 1 and a line on the standard error if the handler raised.


FLUSH_WITHIN = 5
"""Seconds for flushing the standard streams. A thread of the parent may have held their locks when it was forked."""

forks: int = 0
"""How many forks lie between the first process and this one."""


def _after_in_child() -> None:
    global forks  # noqa: PLW0603
    forks += 1


os.register_at_fork(after_in_child=_after_in_child)


class EndForks:
    """Around the call of a handler: a fork that comes out of it ends here, by a return or by an error."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = forks

    def __exit__(self, _type: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        if forks != self._before:
            leave_fork(error)


def leave_fork(error: BaseException | None) -> NoReturn:
    """End this process, a fork whose handler has returned, or has raised `error`. Nothing of the worker runs any more."""
    code = 0 if error is None else 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(FLUSH_WITHIN)
        if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
            code = (error.code or 0) & 0xFF
        elif error is not None:
            line = f"worqr: a fork of a handler ended by an error: {one_line(error)}\n"
            os.write(2, line.encode("utf-8", "backslashreplace"))
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
    finally:
        os._exit(code)
