"""How a worker process ends with its parent, however that ends, and takes with it what it has started.

The lifeline is a socket of which the parent holds the other end and nobody ever writes to it: it closes when the parent is gone.
On Linux the kernel is told to answer that with SIGKILL to the whole process group (`F_SETSIG`), which needs no code of ours
to run: it holds while a C extension keeps the interpreter's lock, and for a stopped process. Elsewhere a thread waits for it.
A parent that forks without exec hands its end on; then the death signal of Linux still ends the process itself, though not what
that has started. What has left the process group (setsid) is beyond reach.
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
    """From here on this process and its group live as long as the process `parent` does, at most; `lifeline` must stay open."""
    if sys.platform == "linux":
        _ask_for_death_signal()
        by_kernel = _kill_group_at_hangup(lifeline)
    else:
        by_kernel = False
    if os.getppid() != parent or _has_hung_up(lifeline):  # it was gone before we asked
        _kill_group()
    if not by_kernel:
        threading.Thread(target=_wait_for_hangup, args=(lifeline,), name="worqr lifeline", daemon=True).start()


def _ask_for_death_signal() -> None:
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (OSError, AttributeError):
        pass  # a C library that has none; the lifeline is there


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
