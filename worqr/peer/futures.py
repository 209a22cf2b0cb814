"""Wait on an event loop, asyncio's or Trio's, for what another thread does."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import trio


async def wait_done(future: Future[Any]) -> None:
    """Wait until the future is done. A cancelled wait does not cancel the future."""
    if trio.lowlevel.in_trio_task():
        event = trio.Event()
        _when_done(future, trio.lowlevel.current_trio_token().run_sync_soon, event.set)
        await event.wait()
    else:
        import asyncio  # imported here, because most programs on Trio do not need it

        loop = asyncio.get_running_loop()
        asyncio_event = asyncio.Event()
        _when_done(future, loop.call_soon_threadsafe, asyncio_event.set)
        await asyncio_event.wait()


def _when_done(
    future: Future[Any], call_soon: Callable[[Callable[[], None]], object], callback: Callable[[], None]
) -> None:
    def done(_: Future[Any]) -> None:
        with suppress(RuntimeError):  # trio.RunFinishedError, or asyncio's: the loop has ended, so no task waits
            call_soon(callback)

    future.add_done_callback(done)
