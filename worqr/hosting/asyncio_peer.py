"""A peer in an asyncio program: ``async with mesh.join():`` where asyncio runs.

The peer's Trio loop runs in a thread, as that of ``mesh.join_in_thread()`` does; ``async def`` handlers run on the application's
loop. Trio as a guest of that loop would need no thread, but then a forked child could not run Trio, a loop that is closed inside
the block would leave a Trio run behind that cannot be ended, and a blocked loop would stop the heartbeat.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Unpack

import trio

from worqr.errors import UsageError
from worqr.handler_options import HandlerOptions, ListHandlerOptions
from worqr.hosting.peer_factory import PeerFactory
from worqr.hosting.peer_thread import PeerThread, no_health, stop_at_exit
from worqr.hosting.thread_waiter import leave_and_wait, wait_joined
from worqr.hosting.trio_calls import TrioCalls
from worqr.inside import engine_of
from worqr.mesh_records import Health
from worqr.peer.executors.host_loop import HostLoop
from worqr.peer.interpreter_exit import is_exiting
from worqr.peer.options import GRACE, check_concurrency
from worqr.peer.peer import Peer
from worqr.validation import KEEP_FAILED, Seconds, seconds

if TYPE_CHECKING:
    from worqr.peer.manual_consumer import Claims
    from worqr.policy import RetryPolicy


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
