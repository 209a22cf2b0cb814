"""Wait on an event loop, asyncio's or Trio's, for the thread of a peer. For `thread_peer` and `asyncio_peer`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import trio

from worqr.hosting.peer_thread import PeerThread


async def wait_done(future: Future[Any]) -> None:
    """Wait until the future is done. A wait that is cancelled leaves the future alone."""
    if trio.lowlevel.in_trio_task():
        event = trio.Event()
        _when_done(future, trio.lowlevel.current_trio_token().run_sync_soon, event.set)
        await event.wait()
    else:
        import asyncio  # as late as this: most programs with Trio do without

        loop = asyncio.get_running_loop()
        told = asyncio.Event()
        _when_done(future, loop.call_soon_threadsafe, told.set)
        await told.wait()


def _when_done(future: Future[Any], soon: Callable[[Callable[[], None]], object], tell: Callable[[], None]) -> None:
    def done(_: Future[Any]) -> None:
        with suppress(RuntimeError):  # of either kind: the loop has ended, and the task that waited there
            soon(tell)

    future.add_done_callback(done)


async def wait_done_anyhow(future: Future[Any]) -> None:
    """Wait until the future is done. A cancellation is raised afterwards, so the wait must be short."""
    if trio.lowlevel.in_trio_task():
        with trio.CancelScope(shield=True):
            await wait_done(future)
        return
    import asyncio

    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await wait_done(future)
        except asyncio.CancelledError as error:
            cancelled = error
    try:
        if cancelled is not None:
            raise cancelled
    finally:
        del cancelled  # its traceback knows this frame


async def wait_gone(thread: PeerThread) -> None:
    """Wait until the thread has ended. A cancellation is raised afterwards, because the end is near."""
    try:
        await wait_done_anyhow(thread.ended)
    finally:
        thread.join()


async def entered(thread: PeerThread) -> None:
    """Start the thread, and wait until its peer has joined. If that fails or is cancelled, nothing is left running."""
    try:
        await wait_done(thread.joined)
    except BaseException:
        thread.request_stop(0)
        await wait_gone(thread)
        raise
    thread.raise_if_not_joined()


async def left(thread: PeerThread, grace: float, error: BaseException | None) -> None:
    """Let the peer leave at the end of a block, and wait until the thread has ended. `error` is what ended the block."""
    thread.request_stop(grace if error is None else 0)
    try:
        if error is None:
            await wait_done(thread.ended)
    except BaseException:
        thread.request_stop(0)
        raise
    finally:
        await wait_gone(thread)
    if error is None:
        thread.raise_what_ended_it()
