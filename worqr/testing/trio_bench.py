"""A bench on Trio: the application's own mesh on a test server, for the length of a test, with a clock that can be moved.

The scripts, the records and the peer that runs the handlers are the real ones. Each bench has a prefix of its own, whose keys are
deleted at the end. `worqr.testing.clock` has the clock, `worqr.testing.bench_run` the firings of schedules. Benches for
other loops and for plain tests are in `worqr.testing.threaded_bench`.
"""

from __future__ import annotations

import atexit
import os
import secrets
import threading
from collections.abc import AsyncGenerator, Mapping
from contextlib import ExitStack
from datetime import datetime
from typing import Any, Final, TypeVar, Unpack, overload

import trio

from worqr.client.connections import ClientSettings, Connection, ConnectionRegistry, async_block
from worqr.client.producer import Call, Producer
from worqr.embedded import EmbeddedServer, shared_server
from worqr.functions.function import Function
from worqr.inside import client_of
from worqr.keys import RegistryKeys
from worqr.link import Link, LinkSettings, driver_here, loop_here
from worqr.mesh import Mesh
from worqr.peer.context import Context
from worqr.peer.options import JoinOptions
from worqr.policy import ChildError, Retry, decide_retry
from worqr.testing.bench_run import BenchRun, BenchSchedules, Summary, inspect_queues, promote_due_jobs, relay_messages
from worqr.testing.clock import BenchLink, Clock, delete_keys
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
        calls that handlers sent are included; firings of schedules and raw tasks are not.

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
                took too long is a TimeoutError. False: only count errors.
            **options: See `JoinOptions`: with ``concurrency=1`` tasks run one after the other, ``only=["shop.*"]`` selects
                functions.

        Returns:
            The number of tasks that finished, failed, were retried and cancelled, in this call.

        Raises:
            Exception: What handlers raised: the exception itself, with its traceback. For a handler in a process, an error
                with the name and text of that exception.
            UsageError: There were more than 1,000 due times one after the other.
        """
        self._errors.clear()
        run = BenchRun(self._mesh, self._clock, self._schedules, options)
        summary = await run.until_empty(scheduled=scheduled, enough=lambda: raise_errors and bool(self._errors))
        if raise_errors:
            self._raise_errors()
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
            self._errors.clear()


BENCH_HINT: Final = "testing.bench() is a block: write `async with worqr.testing.bench(mesh) as bench:`"


@async_block(BENCH_HINT)
async def bench_on_trio(mesh: Mesh[Any], *, url: str | None, now: datetime | None) -> AsyncGenerator[Bench]:
    """As `bench`, on the running Trio loop."""
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


def _is_planned(context: Context, error: BaseException) -> bool:
    """Return True if the handler has raised `Retry`, and runs again."""
    decision = decide_retry(error, context._run.policy, context.failures, context.stalls)  # pyright: ignore[reportPrivateUsage]
    return is_a(decision.error, Retry) and not (decision.counted and context.last_attempt)
