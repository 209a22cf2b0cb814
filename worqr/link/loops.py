"""Detect the event loop of this thread, and return the matching driver.

asyncio is checked only if the program has imported it. Otherwise no asyncio loop can run, and the import is slow.
"""

from __future__ import annotations

import sys
from typing import Literal

import trio

from worqr.link.driver import Driver
from worqr.link.thread_driver import ThreadDriver
from worqr.link.trio_driver import TrioDriver


def loop_here() -> object | None:
    """Return what runs in this thread: the token of a Trio run, or an asyncio loop; None: neither.

    Two results for the same loop are equal. If a Trio run is a guest of an asyncio loop, the result depends on the calling task.
    """
    if trio.lowlevel.in_trio_task():
        return trio.lowlevel.current_trio_token()
    loop = _asyncio_loop()
    if loop is None and trio.lowlevel.in_trio_run():  # in a callback
        return trio.lowlevel.current_trio_token()
    return loop


def loop_name_here() -> Literal["Trio", "asyncio", ""]:
    """Return the name of `loop_here`, for messages."""
    loop = loop_here()
    if loop is None:
        return ""
    return "Trio" if isinstance(loop, trio.lowlevel.TrioToken) else "asyncio"


def driver_here() -> Driver:
    """Return the driver for a link that is created here: that of the running loop, or else that of plain threads."""
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
    except (RuntimeError, AttributeError):  # no asyncio loop; or another thread is importing asyncio now
        return None
    return loop
