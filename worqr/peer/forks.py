"""Forks that handlers make: a child that comes out of its handler ends, instead of going on as a copy of the worker.

The child would have copies of all sockets of the worker, and none of its other threads. It ends like a program: with code 0 if
the handler returned, with the code of ``sys.exit``, or with code 1 and a line on the standard error if the handler raised.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn

from worqr.tracebacks import one_line

FLUSH_WITHIN = 5
"""Seconds for flushing the standard streams. A thread of the parent may have held their locks when it was forked."""

count: int = 0
"""How many forks lie between the first process and this one."""


def _after_in_child() -> None:
    global count  # noqa: PLW0603
    count += 1


os.register_at_fork(after_in_child=_after_in_child)


class EndForks:
    """Around the call of a handler: a fork that comes out of it ends here, by a return or by an error."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = count

    def __exit__(self, _type: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        if count != self._before:
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
