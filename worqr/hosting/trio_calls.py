"""Calls from an asyncio loop to a Trio loop in another thread. For the methods of a peer that an asyncio program has joined."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from contextvars import copy_context
from typing import Any, Final, Generic, TypeVar

import trio

from worqr.errors import UsageError
from worqr.hosting.thread_waiter import wait_done_shielded
from worqr.peer.futures import wait_done

T = TypeVar("T")

PEER_LEFT: Final = "this peer has left the mesh: use it inside the block of mesh.join()"


class TrioCalls:
    """Runs calls on one Trio loop, inside the block of `accepting`. Only code on the Trio loop changes it."""

    def __init__(self) -> None:
        self._token: trio.lowlevel.TrioToken | None = None
        self._nursery: trio.Nursery | None = None

    @asynccontextmanager
    async def accepting(self) -> AsyncGenerator[None]:
        """Accept calls in this block, on Trio. Calls that still run when the block ends are cancelled."""
        error: BaseException | None = None
        async with trio.open_nursery() as nursery:
            self._token, self._nursery = trio.lowlevel.current_trio_token(), nursery
            try:
                yield
            except BaseException as raised:
                error = raised  # raised again below, because the nursery would wrap it in a group
            self._nursery = None
            nursery.cancel_scope.cancel()
        if error is not None:
            try:
                raise error
            finally:
                del error

    async def call(self, work: Callable[[], Awaitable[T]]) -> T:
        """Await ``work()`` on Trio, for a task of an asyncio loop.

        A cancellation of the caller cancels it there, and is raised in the caller once it has ended.

        Raises:
            UsageError: The block has ended. What `work` raises is raised, too.
        """
        return await self.call_with_status(lambda _status: work(), None)

    async def call_with_status(
        self, work: Callable[[trio.TaskStatus[None]], Awaitable[T]], started: Callable[[], object] | None
    ) -> T:
        """Like `call`; ``started()`` runs in the caller's task as soon as `work` calls ``status.started()``."""
        call, variables = _Call(work), copy_context()
        self._post(lambda: variables.run(self._start, call), call)
        try:
            if started is not None:
                await wait_done(call.began)
                if call.began.result():
                    started()
            await wait_done(call.done)
        except BaseException:
            self._post(call.scope.cancel, None)
            await wait_done_shielded(call.done)
            raise
        return call.done.result()

    def post(self, work: Callable[[], object]) -> None:
        """Run a function on Trio soon, from any thread; do nothing if the block has ended."""
        self._post(work, None)

    def _post(self, callback: Callable[[], object], call: _Call[Any] | None) -> None:
        assert self._token is not None, "calls come from the block of `join`"
        try:
            self._token.run_sync_soon(callback)
        except trio.RunFinishedError:
            if call is not None:
                call.refuse()

    def _start(self, call: _Call[Any]) -> None:
        if self._nursery is None:
            call.refuse()
        else:
            self._nursery.start_soon(call.run)


class _Call(trio.TaskStatus[None], Generic[T]):
    """One call, and its task status.

    Attributes:
        began: done when `work` has called ``started()``, then with True, or when it has ended.
        done: done when `work` has ended, with its result.
        scope: cancels it.
    """

    def __init__(self, work: Callable[[trio.TaskStatus[None]], Awaitable[T]]) -> None:
        self.began: Future[bool] = Future()
        self.done: Future[T] = Future()
        self.scope: trio.CancelScope = trio.CancelScope()
        self._work = work

    async def run(self) -> None:
        try:
            with self.scope:
                self.done.set_result(await self._work(self))
        except trio.Cancelled:
            raise
        except BaseException as error:
            self.done.set_exception(error)
        finally:
            self.refuse()

    def started(self, value: None = None) -> None:
        self.began.set_result(True)

    def refuse(self) -> None:
        """Finish the futures of a call that does not run or was cancelled; do nothing if it has ended."""
        if not self.done.done():
            self.done.set_exception(UsageError(PEER_LEFT))
        if not self.began.done():
            self.began.set_result(False)
