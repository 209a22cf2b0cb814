"""A bench on Trio: the application's own mesh on a test server, for the length of a test, with a clock that can be moved.

The scripts, the records and the peer that runs the handlers are the real ones. Each bench has a prefix of its own, whose keys are
deleted at the end. `worqr.testing.bench_run` has the clock, `worqr.testing.bench_run` the firings of schedules. Benches for
other loops and for plain tests are in `worqr.testing.benches`.
"""

from __future__ import annotations

import atexit
import os
import secrets
import sys
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import AbstractAsyncContextManager, ExitStack, suppress
from contextvars import copy_context
from datetime import datetime
from typing import Any, Final, Generic, TypeVar, Unpack, overload

import trio

from worqr.client.client import ClientSettings, Connection, ConnectionRegistry, async_block
from worqr.client.producer import Call, Producer
from worqr.embedded import EmbeddedServer, shared_server
from worqr.errors import UsageError
from worqr.functions.function import Function
from worqr.inside import client_of
from worqr.keys import RegistryKeys
from worqr.link import Link, LinkSettings, can_wait_here, driver_here, loop_here, loop_name_here
from worqr.mesh import Mesh
from worqr.peer.context import Context
from worqr.peer.options import JoinOptions
from worqr.policy import ChildError, Retry, decide_retry
from worqr.testing.bench_run import (
    BenchLink,
    BenchRun,
    BenchSchedules,
    Clock,
    Summary,
    delete_keys,
    inspect_queues,
    promote_due_jobs,
    relay_messages,
)
from worqr.testing.recording import Sent, patched
from worqr.tracebacks import add_note, is_a
from worqr.validation import Seconds, to_ms
from worqr.validation import seconds as seconds_of

# The connections of a mesh on a bench, which use the clock of the bench.


class BenchConnections(ConnectionRegistry):
    """The connections of a mesh on a bench."""

    def __init__(self, settings: ClientSettings, declared_shards: Mapping[str, int]) -> None:
        super().__init__(settings, declared_shards)
        self._kept: list[Connection] = []

    async def keep(self) -> None:
        """Connect the running loop until `end_kept` is called."""
        loop = loop_here()
        connection = self._by_loop.get(loop) or await self._make(loop)
        connection.add_user()
        self._kept.append(connection)
        await connection.link.wait_ready()
        await connection.sharding.initialize()

    def end_kept(self) -> None:
        """Disconnect the loops that `keep` has connected. Any thread may call this."""
        for loop, connection in list(self._by_loop.items()):
            if connection in self._kept:
                del self._by_loop[loop]
                connection.link.close()

    def new_link(self, settings: LinkSettings) -> Link:
        """Return a link that uses the clock of the bench."""
        return BenchLink(settings, driver_here())


# The embedded server of all benches of a process. The first bench starts it; it ends with the process.


_servers: Final[dict[int, tuple[EmbeddedServer, ExitStack]]] = {}
"""The server and its release, by process id, because a forked child starts a server of its own."""
_lock = threading.Lock()


def bench_server() -> EmbeddedServer:
    """Return the embedded server of this process. The first call starts it, and it runs until the process ends.

    ``worqr.Mesh("embedded:")`` uses the same server.

    Raises:
        UsageError: no server program is installed; the message says what to install.
    """
    with _lock:
        if os.getpid() not in _servers:
            stack = ExitStack()
            _servers[os.getpid()] = stack.enter_context(shared_server(warns=False)), stack
            atexit.register(stack.close)
        return _servers[os.getpid()][0]


def release_bench_server() -> None:
    """Release the server, which ends now unless a mesh uses it. The next bench starts another."""
    with _lock:
        if os.getpid() in _servers:
            _servers.pop(os.getpid())[1].close()


R = TypeVar("R")

SERVER: Final = "WORQR_TEST_URL"
"""The variable with the URL of a server to use instead of the embedded one."""
CLEAN_UP_WITHIN: Final = 5.0


class Bench:
    """A mesh on a test server, with a clock that you can move; `bench` makes it.

    Use it in one task of the loop in which it was made.
    """

    def __init__(self, mesh: Mesh[Any], sent: Sent, errors: list[BaseException]) -> None:
        self._mesh = mesh
        self._sent = sent
        self._errors = errors
        self._keys = RegistryKeys(mesh.prefix)
        self._client = client_of(mesh)
        self._clock = Clock(self._client.link, self._keys)
        self._schedules = BenchSchedules(mesh)

    @overload
    def sent(self, fn: Function[..., R]) -> list[Call[R]]: ...
    @overload
    def sent(self, fn: str) -> list[Call[Any]]: ...
    def sent(self, fn: Function[..., Any] | str) -> list[Call[Any]]:
        """Return the calls of a function that were enqueued or dispatched on this bench, in order.

        They are equal to what ``fn.call(...)`` returns for the same arguments, whatever the options. Calls that have run and
        calls that handlers sent are included; those of handlers in processes, firings of schedules and raw tasks are not.

        Args:
            fn: The function, or its name.
        """
        return self._sent.calls(fn)

    async def run_until_empty(
        self, *, scheduled: bool = False, raise_errors: bool = True, **options: Unpack[JoinOptions]
    ) -> Summary:
        """Run the functions of the mesh until no task waits or runs any more.

        The clock of the mesh stands still meanwhile: tasks that are scheduled for later stay, retries with a backoff
        included. So do tasks that a rate, or a pause that ends by itself, does not let start yet. Queues that no worker serves,
        and paused queues, do not count; queues that peers of the test serve do.
        Failure handlers are not counted in `Summary`, but their exceptions propagate to the test. If you cancel the call,
        running tasks return to their queues.

        Args:
            scheduled: Run scheduled tasks too: when no task may start, move the clock to the next due time, until none is
                scheduled or held back. Schedules do not fire.
            raise_errors: Raise what handlers raised, except `Retry`, when no task waits or runs any more. This is before the
                clock is moved, so an error ends the call at its first try. Several errors are an ExceptionGroup; a run that
                took too long is a TimeoutError. Errors in peers of the test since the last call are raised, too. False: only
                count errors.
            **options: See `JoinOptions`: with ``concurrency=1`` tasks run one after the other, ``only=["shop.*"]`` selects
                functions.

        Returns:
            The number of tasks that finished, failed, were retried and cancelled, in this call.

        Raises:
            Exception: What handlers raised: the exception itself, with its traceback. For a handler in a process, an error
                with the name and text of that exception.
            UsageError: There were more than 1,000 due times one after the other, or an option does not exist or is not valid.
        """
        run = BenchRun(self._mesh, self._clock, self._schedules, options)
        try:
            summary = await run.until_empty(scheduled=scheduled, enough=lambda: raise_errors and bool(self._errors))
            if raise_errors:
                self._raise_errors()
        finally:
            self._errors.clear()
        return summary

    async def advance(self, seconds: Seconds) -> None:
        """Move the clock of the mesh: scheduled tasks become due, results and reserved ids end, tasks expire, schedules fire.
        A batch that was left open for its `open_for` is cancelled.

        No task runs before the next `run_until_empty`. Peers and handlers do not see their own clock move. A daily schedule
        fires once if you advance by a day. A schedule with ``overlap="skip"`` fires once, however many firings pass, because
        no task runs in between.

        Args:
            seconds: Seconds, or a timedelta.

        Raises:
            UsageError: `seconds` is not valid.
        """
        ms = round(seconds_of(seconds, "seconds of advance") * 1000)
        await self._clock.move(ms)
        await self._schedules.advance(ms)
        states = await inspect_queues(self._client)
        await promote_due_jobs(self._client, states)
        await relay_messages(self._client, states)

    async def _begin(self, now: datetime | None) -> None:
        """Set the clock. Firings of schedules count from that time on."""
        if now is not None:
            await self._clock.begin_at(to_ms(now, "now of bench"))
        await self._schedules.begin(await self._clock.now_ms())

    def _raise_errors(self) -> None:
        errors = self._errors[:]
        try:
            if len(errors) == 1:
                raise errors[0]
            if errors:
                raise BaseExceptionGroup(f"{len(errors)} runs raised", errors)
        finally:
            del errors  # which would keep this frame, that the error keeps


MOCK_CLOCK: Final = (
    "testing.bench() waits for a real server, and this test has a clock of Trio that does not go on by itself: remove the "
    "fixture autojump_clock or mock_clock; `await bench.advance(...)` moves the clock of the mesh"
)
BENCH_HINT: Final = "testing.bench() is a block: write `async with worqr.testing.bench(mesh) as bench:`"


@async_block(BENCH_HINT)
async def bench_on_trio(mesh: Mesh[Any], *, url: str | None, now: datetime | None) -> AsyncGenerator[Bench]:
    """As `bench`, on the running Trio loop."""
    if _is_mocked(trio.lowlevel.current_clock()):
        raise UsageError(MOCK_CLOCK)
    url = url or os.environ.get(SERVER) or (await trio.to_thread.run_sync(bench_server)).url
    sent, errors = list[Call[Any]](), list[BaseException]()

    def record_error(context: Context, error: BaseException) -> None:
        if not _is_planned(context, error):
            said = f"raised by the handler of {context.queue!r}, in attempt {context.attempt} of job {context.id}"
            add_note(error, f"{error.remote.traceback}{said}" if is_a(error, ChildError) else said)
            errors.append(error)

    client = client_of(mesh)
    with patched(
        mesh,
        producer=Producer(client, client.settings.tracing, sent),
        connections=BenchConnections(client.settings, client.declared_shards),
        url=url,
        prefix=f"bench{secrets.token_hex(6)}",
        observer=record_error,
    ):
        async with mesh.connect():
            made = Bench(mesh, Sent(sent), errors)
            try:
                await made._begin(now)  # pyright: ignore[reportPrivateUsage]
                yield made
            finally:
                with trio.CancelScope(shield=True), trio.move_on_after(CLEAN_UP_WITHIN):
                    await trio.to_thread.run_sync(mesh.close)
                    await delete_keys(client.link, RegistryKeys(mesh.prefix))


def _is_mocked(clock: trio.abc.Clock) -> bool:
    mocks = sys.modules.get("trio.testing")  # a test with such a clock has imported it
    return mocks is not None and isinstance(clock, mocks.MockClock)


def _is_planned(context: Context, error: BaseException) -> bool:
    """Return True if the handler has raised `Retry`, and runs again."""
    decision = decide_retry(error, context._run.policy, context.failures, context.stalls)  # pyright: ignore[reportPrivateUsage]
    return is_a(decision.error, Retry) and not (decision.counted and context.last_attempt)


# `bench`: opens a bench where the test runs. Beside Trio, a thread runs it on a Trio loop of its own.
#
# This module has that thread, and `ThreadedBench`, whose calls wait for it. The bench itself is in
# `worqr.testing.benches`.

T = TypeVar("T")

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
        UsageError: The mesh is connected, on a bench or recording already, no server program is installed, or `now` has no
            timezone; no event loop runs, or the clock of Trio is a mock.
    """
    if loop_name_here() == "Trio":
        return bench_on_trio(mesh, url=url, now=now)
    if can_wait_here():
        return bench_in_thread(mesh, url=url, now=now)
    raise UsageError(
        "testing.bench() needs a running event loop, Trio or asyncio: install pytest-trio or pytest-asyncio and mark "
        "the test; in a plain test write `with worqr.sync_block(testing.bench, mesh) as bench:`"
    )
