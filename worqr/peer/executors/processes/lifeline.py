"""End a worker process together with its parent, for whatever reason the parent ends, and end its own child processes.

The lifeline is a socket whose other end the parent holds. The parent never writes to it. It closes when the parent has ended. On
Linux the kernel then sends SIGKILL to the whole process group (`F_SETSIG`). This needs no Python code to run, so it works while a
C extension holds the interpreter's lock, and for a stopped process. On other systems a thread waits for the close. If a parent
forks without exec, the fork keeps the parent's end open. Then Linux's death signal still ends the process, but not its child
processes. Processes that have left the process group (setsid) are not ended.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import socket
import sys
import threading
from typing import Final

PR_SET_PDEATHSIG: Final = 1


def die_with_parent(parent: int, lifeline: socket.socket) -> None:
    """End this process and its group when the process `parent` ends. `lifeline` must stay open."""
    if sys.platform == "linux":
        _ask_for_death_signal()
        by_kernel = _kill_group_at_hangup(lifeline)
    else:
        by_kernel = False
    if os.getppid() != parent or _has_hung_up(lifeline):  # the parent had ended before this call
        _kill_group()
    if not by_kernel:
        threading.Thread(target=_wait_for_hangup, args=(lifeline,), name="worqr lifeline", daemon=True).start()


def _ask_for_death_signal() -> None:
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (OSError, AttributeError):
        pass  # a C library without prctl; the lifeline still works


def _kill_group_at_hangup(lifeline: socket.socket) -> bool:
    try:
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    except OSError:
        return False
    return True


def _has_hung_up(lifeline: socket.socket) -> bool:
    return bool(select.select([lifeline], [], [], 0)[0])


def _wait_for_hangup(lifeline: socket.socket) -> None:
    lifeline.recv(1)
    _kill_group()


def _kill_group() -> None:
    os.killpg(os.getpgrp(), signal.SIGKILL)
