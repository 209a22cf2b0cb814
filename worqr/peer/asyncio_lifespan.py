"""The lifespan on the asyncio loop of a peer: ``Mesh(asyncio_lifespan=...)``.

It is one task of that loop, from before the peer takes any task until the peer has left. This module has that task, as seen from
Trio, and the block of `join` around the peer. Handlers on that loop are run by `executors.asyncio_loop`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import copy_context
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import trio

from worqr.errors import UsageError
from worqr.log_events import emit
from worqr.peer.executors.asyncio_loop import AsyncioLoop
from worqr.peer.lifespans import ASYNCIO_LIFESPAN, enter_lifespan

if TYPE_CHECKING:
    from worqr.peer.options import PeerSettings

logger: logging.Logger = logging.getLogger(__name__)

LEAVE_WITHIN: Final = 5.0
"""Seconds that the lifespan has to end when its peer has left; then the peer ends without it."""


@asynccontextmanager
async def with_asyncio_lifespan(
    lifespan: Callable[[], AbstractAsyncContextManager[object]], settings: PeerSettings
) -> AsyncGenerator[PeerSettings]:
    """Enter the lifespan around a peer, and yield the settings with its loop and its state.

    A lifespan that ends by itself cancels the block, which then raises the lifespan's error.
    """
    loop, block = settings.asyncio_loop or AsyncioLoop(settings.hosting), trio.CancelScope()
    life = _LifespanTask(loop, lifespan, block.cancel)
    with block:
        try:
            state = await life.enter()
            yield replace(settings, asyncio_loop=loop, asyncio_state=state)
        except BaseException:
            life.raises = block.cancel_called
            raise
        finally:
            with trio.CancelScope(shield=True):
                await life.leave()
                await loop.end()
    life.raise_error()


class _LifespanTask:
    """The task of one lifespan. Set in the asyncio loop: `_state`, `_error`, `_task`, `_leave`, `_inside`; in the Trio loop: the
    rest.

    Attributes:
        raises: the task that entered the lifespan raises its error; otherwise the error is logged.
    """

    def __init__(
        self,
        loop: AsyncioLoop,
        lifespan: Callable[[], AbstractAsyncContextManager[object]],
        on_early_end: Callable[[], object],
    ) -> None:
        self._loop = loop
        self._lifespan = lifespan
        self._on_early_end = on_early_end
        self._state: object = None
        self._error: BaseException | None = None
        self._task: asyncio.Task[None] | None = None
        self._leave: asyncio.Event | None = None
        self._inside = False
        self._left = False
        self.raises: bool = True
        self._entered = trio.Event()
        self._ended = trio.Event()

    # In the Trio loop

    async def enter(self) -> object:
        """Wait until the lifespan has been entered, and return what it yielded. Raises what it raised."""
        variables = copy_context()

        def begin() -> None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name=ASYNCIO_LIFESPAN, context=variables)

        self._loop.call_or_open(begin)
        await self._entered.wait()
        self.raise_error()
        return self._state

    async def leave(self) -> None:
        """Wait until the lifespan has ended; within `LEAVE_WITHIN`."""
        self._left = True
        if not self._loop.call_if_open(self._request_exit):
            return
        with trio.move_on_after(LEAVE_WITHIN):
            await self._ended.wait()
            if self._error is not None and not self.raises:
                text = f"{ASYNCIO_LIFESPAN} raised an error while its worker left"
                emit(logger, "asyncio.raised", text, exc_info=self._error)
            return
        text = f"{ASYNCIO_LIFESPAN} has not ended within %(duration)g s after its worker had left; the worker ends without it"
        emit(logger, "asyncio.stuck", text, duration=LEAVE_WITHIN)

    def raise_error(self) -> None:
        """Raise the error that ended the lifespan, if there was one; once."""
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error

    def _has_ended(self) -> None:
        """Handle the end of the task. If the peer has not left yet, end the peer."""
        ended_early = self._entered.is_set() and not self._left
        self._entered.set()
        self._ended.set()
        if ended_early:
            text = f"{ASYNCIO_LIFESPAN} has ended by itself, and the worker leaves; let it run until its block ends"
            emit(logger, "asyncio.ended", text)
            self._on_early_end()

    # In the asyncio loop

    async def _run(self) -> None:
        self._leave = asyncio.Event()
        try:
            async with enter_lifespan(ASYNCIO_LIFESPAN, self._lifespan) as self._state:
                self._inside = True
                self._loop.call_in_trio(self._entered.set)
                await self._leave.wait()
        except asyncio.CancelledError as error:
            if not self._left:
                self._error = UsageError(f"something on its asyncio loop has cancelled the task of {ASYNCIO_LIFESPAN}")
                self._error.__cause__ = error
        except BaseException as error:  # SystemExit too, which would end the loop
            self._error = error
        self._loop.call_in_trio(self._has_ended)

    def _request_exit(self) -> None:
        """End the block of the lifespan; a lifespan that is still being entered is cancelled."""
        if self._inside and self._leave is not None:
            self._leave.set()
        elif self._task is not None:
            self._task.cancel()
