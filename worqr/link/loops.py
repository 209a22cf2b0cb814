"""Which event loop runs in this thread, and the driver that goes with it.

asyncio is asked only if somebody has imported it: if nobody has, it does not run, and its import takes long.
"""

from __future__ import annotations

import sys
from typing import Literal

import trio

from worqr.link.driver import Driver
from worqr.link.thread_driver import ThreadDriver
from worqr.link.trio_driver import TrioDriver


def loop_here() -> object | None:
    """What runs in this thread: the token of a Trio run, or an asyncio loop; None: neither. Two answers of one loop are equal.

    Of a Trio run that is a guest of an asyncio loop, and of that loop, whichever of the two the caller is a task of.
    """
    if trio.lowlevel.in_trio_task():
        return trio.lowlevel.current_trio_token()
    loop = _asyncio_loop()
    if loop is None and trio.lowlevel.in_trio_run():  # in a callback
        return trio.lowlevel.current_trio_token()
    return loop


def loop_name_here() -> Literal["Trio", "asyncio", ""]:
    """The name of `loop_here`, for messages."""
    loop = loop_here()
    if loop is None:
        return ""
    return "Trio" if isinstance(loop, trio.lowlevel.TrioToken) else "asyncio"


def driver_here() -> Driver:
    """The driver for a link that is made here: that of the running loop, or, where none runs, of plain threads."""
    name = loop_name_here()
    if name == "Trio":
        return TrioDriver()
    if name == "asyncio":
        from worqr.link.asyncio_driver import AsyncioDriver

        return AsyncioDriver()
    return ThreadDriver()


def _asyncio_loop() -> object | None:
    asyncio = sys.modules.get("asyncio")
    if asyncio is None:
        return None
    try:
        loop: object = asyncio.get_running_loop()
    except (RuntimeError, AttributeError):  # there is none; or another thread is just importing it
        return None
    return loop
