"""`bench`: opens a bench where the test runs. Beside Trio, a thread runs it on a Trio loop of its own.

This module has that thread, and `ThreadedBench`, whose calls wait for it. The bench itself is in `worqr.testing.trio_bench`.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import Future, wait
from contextlib import AbstractAsyncContextManager, suppress
from contextvars import copy_context
from datetime import datetime
from typing import Any, Generic, TypeVar, Unpack

import trio

from worqr.client.connections import async_block
from worqr.errors import UsageError
from worqr.inside import client_of
from worqr.link import can_wait_here, driver_here, loop_name_here
from worqr.mesh import Mesh
from worqr.peer.options import JoinOptions
from worqr.testing.bench_run import Summary
from worqr.testing.trio_bench import BENCH_HINT, Bench, BenchConnections, bench_on_trio
from worqr.validation import Seconds

T = TypeVar("T")
R = TypeVar("R")

Operation = Callable[[Bench], Awaitable[T]]


class _BenchCall(Generic[T]):
    """One call of the bench, made in another thread. `future` is done when the call has ended."""

    def __init__(self, operation: Operation[T]) -> None:
        self.future: Future[T] = Future()
        self.future.set_running_or_notify_cancel()  # the thread that waits for it cannot cancel it
        self._operation = operation
        self._scope = trio.CancelScope()
        self._variables = copy_context()

    def start(self, nursery: trio.Nursery, bench: Bench) -> None:
        """Start the call; in the loop of the bench."""
        self._variables.run(nursery.start_soon, self._run, bench)

    def cancel(self) -> None:
        """Cancel the call; in the loop of the bench."""
        self._scope.cancel()

    async def _run(self, bench: Bench) -> None:
        try:
            with self._scope:
                self.future.set_result(await self._operation(bench))
        except trio.Cancelled:
            self.future.set_exception(UsageError("the bench has ended during this call"))
            raise
        except BaseException as error:  # also an exception of a handler
            self.future.set_exception(error)
        if not self.future.done():
            self.future.set_exception(UsageError("this call of the bench was cancelled"))


class BenchThread:
    """The thread of one bench. The thread sets `bench`, `_token`, `_nursery`, `_stop_requested` and `_connections` once."""

    def __init__(self, mesh: Mesh[Any], url: str | None, now: datetime | None) -> None:
        self.bench: Bench
        self._mesh = mesh
        self._url = url
        self._now = now
        self._started: Future[None] = Future()
        self._ended: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="worqr bench", daemon=True)
        self._token: trio.lowlevel.TrioToken
        self._nursery: trio.Nursery
        self._stop_requested: trio.Event
        self._connections: BenchConnections

    def start(self) -> None:
        """Start the thread, and wait until the mesh is on the bench. Raise the errors of `bench`."""
        self._thread.start()
        self._started.result()

    def stop(self) -> None:
        """Take the mesh off the bench, and wait until the thread has ended. Loops that stay connected are disconnected."""
        self._connections.end_kept()
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._stop_requested.set)
        self._thread.join()
        self._ended.result()

    async def keep_connected(self) -> None:
        """Connect the running loop until the bench ends."""
        await self._connections.keep()

    def start_call(self, operation: Operation[T]) -> _BenchCall[T]:
        """Start a call of the bench."""
        call = _BenchCall(operation)
        if self._ended.done():
            raise UsageError("this bench has ended")
        self._token.run_sync_soon(call.start, self._nursery, self.bench)
        return call

    def cancel(self, call: _BenchCall[Any]) -> None:
        """Cancel a call, and wait until it has ended."""
        self._token.run_sync_soon(call.cancel)
        wait([call.future])

    # In the thread

    def _run(self) -> None:
        try:
            trio.run(self._run_bench)
        except BaseException as error:
            (self._ended if self._started.done() else self._started).set_exception(error)
        else:
            self._ended.set_result(None)

    async def _run_bench(self) -> None:
        async with bench_on_trio(self._mesh, url=self._url, now=self._now) as self.bench:
            connections = client_of(self._mesh).connections
            assert isinstance(connections, BenchConnections)
            self._connections = connections
            self._token, self._stop_requested = trio.lowlevel.current_trio_token(), trio.Event()
            async with trio.open_nursery() as self._nursery:
                self._started.set_result(None)
                await self._stop_requested.wait()
                self._nursery.cancel_scope.cancel()


class ThreadedBench(Bench):
    """A `Bench` whose calls are awaited on asyncio, or run by `worqr.sync` in a test without an event loop."""

    def __init__(self, thread: BenchThread) -> None:
        self._thread = thread
        self._sent = thread.bench._sent

    async def run_until_empty(
        self, *, scheduled: bool = False, raise_errors: bool = True, **options: Unpack[JoinOptions]
    ) -> Summary:
        """As `Bench.run_until_empty`."""
        return await self._ask(
            lambda bench: bench.run_until_empty(scheduled=scheduled, raise_errors=raise_errors, **options)
        )

    async def advance(self, seconds: Seconds) -> None:
        """As `Bench.advance`."""
        await self._ask(lambda bench: bench.advance(seconds))

    async def _ask(self, operation: Operation[T]) -> T:
        call = self._thread.start_call(operation)
        if not loop_name_here():
            try:
                return call.future.result()
            except KeyboardInterrupt:
                self._thread.cancel(call)
                raise
        import asyncio  # imported here: plain tests do not need it

        try:
            return await asyncio.wrap_future(call.future)
        except asyncio.CancelledError:
            await driver_here().in_thread(lambda: self._thread.cancel(call))
            raise


@async_block(BENCH_HINT)
async def bench_in_thread(mesh: Mesh[Any], *, url: str | None, now: datetime | None) -> AsyncGenerator[Bench]:
    """As `bench`, in a test on asyncio, or in one without an event loop."""
    thread = BenchThread(mesh, url, now)
    made = await open_threaded_bench(thread)
    try:
        yield made
    finally:
        await driver_here().in_thread(thread.stop)


async def open_threaded_bench(thread: BenchThread) -> ThreadedBench:
    """Start the thread. If a loop runs here, connect it until the thread is stopped."""
    started = False

    def start() -> None:
        nonlocal started
        thread.start()
        started = True

    try:
        await driver_here().in_thread(start)
        if loop_name_here():
            await thread.keep_connected()
    except BaseException:
        if started:
            await driver_here().in_thread(thread.stop)
        raise
    return ThreadedBench(thread)


def bench(
    mesh: Mesh[Any], *, url: str | None = None, now: datetime | None = None
) -> AbstractAsyncContextManager[Bench]:
    """Put the application's own mesh on a test server for the length of a block, connected, under Trio or asyncio.

    Its functions, queues and jobs then have a prefix of their own; all keys are deleted at the end of the block. One server
    serves all benches of a process: the first starts it, in a tenth of a second; the others take 4 ms. Under Trio, handlers
    run on the loop of the test. Under asyncio, they run in other threads, also those with ``runs_in="asyncio"``. In a test
    without an event loop, write ``with worqr.sync_block(testing.bench, mesh) as bench:``, and
    ``worqr.sync(bench.run_until_empty)``; handlers then run in other threads, and only during that call.

    Args:
        mesh: Any mesh. The server that it would connect to does not matter.
        url: The server. Default: ``$WORQR_TEST_URL``, else an embedded one (``pip install 'worqr[embedded]'``).
        now: A timezone-aware datetime at which the clock of the bench begins, for tests of schedules. Default: the present
            time.

    Returns:
        An async context manager, which gives the bench.

    Raises:
        UsageError: The mesh is connected, on a bench or recording already, no server program is installed, `now` has no
            timezone, or no event loop runs.
    """
    if loop_name_here() == "Trio":
        return bench_on_trio(mesh, url=url, now=now)
    if can_wait_here():
        return bench_in_thread(mesh, url=url, now=now)
    raise UsageError(
        "testing.bench() needs a running event loop, Trio or asyncio: install pytest-trio or pytest-asyncio and mark "
        "the test; in a plain test write `with worqr.sync_block(testing.bench, mesh) as bench:`"
    )
