"""Wait on an event loop, asyncio's or Trio's, for the thread of a peer. For `thread_peer` and `asyncio_peer`."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import trio

from worqr.hosting.peer_thread import PeerThread
from worqr.peer.futures import wait_done


async def wait_done_shielded(future: Future[Any]) -> None:
    """Wait until the future is done. A cancellation is raised only afterwards, so use it for short waits."""
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
        del cancelled  # its traceback refers to this frame: a cycle


async def wait_finished(thread: PeerThread) -> None:
    """Wait until the thread has finished, which it is about to do. A cancellation is raised only afterwards."""
    try:
        await wait_done_shielded(thread.ended)
    finally:
        thread.join()


async def wait_joined(thread: PeerThread) -> None:
    """Wait until the peer of a started thread has joined. If that fails or is cancelled, wait until the thread has finished."""
    try:
        await wait_done(thread.joined)
    except BaseException:
        thread.request_stop(0)
        await wait_finished(thread)
        raise
    thread.raise_if_not_joined()


async def leave_and_wait(thread: PeerThread, grace: float, error: BaseException | None) -> None:
    """Let the peer leave at the end of a block, and wait until the thread has finished. `error` ended the block, if not None."""
    thread.request_stop(grace if error is None else 0)
    try:
        if error is None:
            await wait_done(thread.ended)
    except BaseException:
        thread.request_stop(0)
        raise
    finally:
        await wait_finished(thread)
    if error is None:
        thread.raise_end_error()
