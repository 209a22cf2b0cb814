"""A peer in an asyncio program: ``async with mesh.join():`` where asyncio runs.

The peer's Trio loop runs in a thread, as that of ``mesh.join_in_thread()`` does; ``async def`` handlers run on the application's
loop. Trio as a guest of that loop would need no thread, but then a forked child could not run Trio, a loop that is closed inside
the block would leave a Trio run behind that cannot be ended, and a blocked loop would stop the heartbeat.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar, Unpack

import trio

from worqr.errors import UsageError
from worqr.handler_options import HandlerOptions, ListHandlerOptions
from worqr.hosting.peer_factory import PeerFactory
from worqr.hosting.peer_thread import (
    PeerThread,
    is_exiting,
    leave_and_wait,
    no_health,
    stop_at_exit,
    wait_done_shielded,
    wait_joined,
)
from worqr.inside import engine_of
from worqr.mesh_records import Health
from worqr.peer.error_throttle import wait_done
from worqr.peer.executors.asyncio_loop import HostLoop
from worqr.peer.options import GRACE, check_concurrency
from worqr.peer.peer import Peer
from worqr.validation import KEEP_FAILED, Seconds, seconds

if TYPE_CHECKING:
    from worqr.peer.manual_consumer import Claims
    from worqr.policy import RetryPolicy


# Calls from an asyncio loop to a Trio loop in another thread. For the methods of a peer that an asyncio program has joined.


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


@asynccontextmanager
async def joined_under_asyncio(factory: PeerFactory[Any], options: Mapping[str, Any]) -> AsyncGenerator[AsyncioPeer]:
    """Join the mesh for the length of a block, under asyncio; see ``Mesh.join``."""
    factory.check_options(options)
    stop_at_exit()
    grace = seconds(options.get("grace", GRACE), "grace")
    async with factory.client.connections.open():
        host, calls, peers = HostLoop(is_exiting), TrioCalls(), list[Peer]()

        @asynccontextmanager
        async def join() -> AsyncGenerator[Peer]:
            async with calls.accepting(), factory.joined(options, host) as peer:
                peers.append(peer)
                yield peer

        thread = PeerThread(join, copy_context())
        thread.start()
        await wait_joined(thread)
        error: BaseException | None = None
        try:
            yield AsyncioPeer(peers[0], thread, calls)
        except BaseException as raised:
            error = raised
            raise
        finally:
            try:
                await leave_and_wait(thread, grace, error)
            finally:
                del error  # its traceback refers to this frame: a cycle


class AsyncioPeer(Peer):
    """A peer whose methods are used on the asyncio loop of the program that has joined."""

    def __init__(self, peer: Peer, thread: PeerThread, calls: TrioCalls) -> None:
        super().__init__(engine_of(peer))
        self._peer = peer
        self._thread = thread
        self._calls = calls
        self._pid = os.getpid()

    async def serve(
        self,
        queue: str,
        handler: Callable[[bytes], object],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
        **options: Unpack[HandlerOptions],
    ) -> None:
        def serve(status: trio.TaskStatus[None]) -> Awaitable[None]:
            return self._peer.serve(queue, handler, task_status=status, **options)

        await self._calls.call_with_status(serve, task_status.started)

    async def serve_list(
        self,
        queue: str,
        handler: Callable[[list[bytes]], object],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
        **options: Unpack[ListHandlerOptions],
    ) -> None:
        def serve(status: trio.TaskStatus[None]) -> Awaitable[None]:
            return self._peer.serve_list(queue, handler, task_status=status, **options)

        await self._calls.call_with_status(serve, task_status.started)

    def work(
        self, queue: str, *, retry: RetryPolicy | None = None, keep_failed: int = KEEP_FAILED
    ) -> AbstractAsyncContextManager[Claims]:
        raise UsageError(
            "peer.work() needs Trio: under asyncio, use peer.serve(), or take the tasks in a program that runs on Trio"
        )

    def set_concurrency(self, n: int | Literal["auto"]) -> None:
        engine = self._engine
        engine.scheduler.check_concurrency(check_concurrency(n))
        self._calls.post(partial(engine.set_concurrency, n))

    def health(self) -> Health:
        if os.getpid() != self._pid:
            return no_health("it was started before a fork, and runs in the parent only")
        return self._thread.health()

    async def drain(self, grace: Seconds | None = None) -> None:
        await self._calls.call(partial(self._peer.drain, grace))

    async def wait(self) -> None:
        await self._calls.call(self._peer.wait)
