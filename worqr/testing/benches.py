"""A bench: the application's own mesh on a test server, for the length of a test, with a clock that can be moved.

Everything is real: the scripts, the records, the peer that runs the handlers. The test has its own prefix, whose keys are deleted
at the end; its own clock (`worqr.testing.clock`); and its own times for schedules (`worqr.testing.firing`). Exceptions of
handlers are raised in the test.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncGenerator, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import datetime
from typing import Any, Final, TypeVar, Unpack, overload

import trio

from worqr.client.client import Client
from worqr.client.connections import Connection, Connections
from worqr.client.job import Job
from worqr.client.producer import Sender
from worqr.errors import UsageError
from worqr.functions.function import Call, Function
from worqr.inside import client_of
from worqr.keys import RegistryKeys
from worqr.link import Link, LinkSettings, driver_here, loop_here, loop_name_here
from worqr.mesh import Mesh
from worqr.peer.context import Context
from worqr.peer.options import JoinOptions
from worqr.policy import ChildError, Retry, judge
from worqr.testing.clock import BenchLink, Clock, delete_keys
from worqr.testing.firing import Firing
from worqr.testing.running import Run, Summary, look, promote
from worqr.testing.servers import kept_server
from worqr.testing.staging import Sent, staged
from worqr.validation import Seconds, to_ms
from worqr.validation import seconds as seconds_of

R = TypeVar("R")

SERVER: Final = "WORQR_TEST_URL"
"""The variable with the URL of a server to use instead of the embedded one."""
CLEAN_WITHIN: Final = 5.0


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
        self._firing = Firing(mesh)

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
        included. Queues that no worker serves, and paused queues, do not count; queues that peers of the test serve do.
        Failure handlers are not counted in `Summary`, but their exceptions propagate to the test. If you cancel the call,
        running tasks return to their queues.

        Args:
            scheduled: Run scheduled tasks too: when no task waits, move the clock to the next due time, until none is
                scheduled. Schedules do not fire.
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
        run = Run(self._mesh, self._clock, self._firing, options)
        summary = await run.until_empty(scheduled=scheduled, enough=lambda: raise_errors and bool(self._errors))
        if raise_errors:
            self._raise_errors()
        return summary

    async def advance(self, seconds: Seconds) -> None:
        """Move the clock of the mesh: scheduled tasks become due, results and reserved ids end, tasks expire, schedules fire.

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
        await self._firing.advance(ms)
        await promote(self._client, await look(self._client))

    async def _begin(self, now: datetime | None) -> None:
        """Set the clock; firings of schedules count from then on."""
        if now is not None:
            await self._clock.begin_at(to_ms(now, "now of bench"))
        await self._firing.begin(await self._clock.now_ms())

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


class BenchConnections(Connections):
    """The connections of a mesh on a bench."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[Connection] = []

    async def keep(self, client: Client) -> None:
        """Connect the running loop until `end_kept`."""
        loop = loop_here()
        connection = self._by_loop.get(loop) or await self._make(client, loop)
        connection.users += 1
        self._kept.append(connection)
        await connection.link.wait_ready()
        await connection.sharding.begin()

    def end_kept(self) -> None:
        """Disconnect the loops that were connected by `keep`; from any thread."""
        for loop, connection in list(self._by_loop.items()):
            if connection in self._kept:
                del self._by_loop[loop]
                connection.link.close()

    def new_link(self, settings: LinkSettings) -> Link:
        """A link that uses the clock of the bench."""
        return BenchLink(settings, driver_here())


class BenchSender(Sender):
    """Sends calls, and records them."""

    def __init__(self, client: Client, sent: list[Call[Any]]) -> None:
        super().__init__(client)
        self._sent = sent

    async def enqueue(self, call: Call[Any]) -> None:
        """As `Sender.enqueue`."""
        await super().enqueue(call)
        self._sent.append(call)

    async def dispatch(self, call: Call[R]) -> Job[R]:
        """As `Sender.dispatch`."""
        job = await super().dispatch(call)
        self._sent.append(call)
        return job

    async def enqueue_many(self, calls: Iterable[Call[Any]]) -> int:
        """As `Sender.enqueue_many`."""
        sent = list(calls)
        stored = await super().enqueue_many(sent)
        self._sent.extend(sent)
        return stored

    async def dispatch_many(self, calls: Iterable[Call[R]]) -> list[Job[R]]:
        """As `Sender.dispatch_many`."""
        sent = list(calls)
        jobs = await super().dispatch_many(sent)
        self._sent.extend(sent)
        return jobs


def bench(
    mesh: Mesh[Any], *, url: str | None = None, now: datetime | None = None
) -> AbstractAsyncContextManager[Bench]:
    """Put the application's own mesh on a test server for the length of a block, connected, under Trio or asyncio.

    Its functions, queues and jobs then have a prefix of their own; all keys are deleted at the end of the block. One server
    serves all benches of a process: the first starts it, in a tenth of a second; the others take 4 ms. Under Trio, handlers
    run on the loop of the test. Under asyncio, they run in other threads, also those with ``runs_in="asyncio"``. In a test
    without an event loop, use `blocking_bench`.

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
    match loop_name_here():
        case "Trio":
            return bench_on_trio(mesh, url=url, now=now)
        case "asyncio":
            from worqr.testing.threaded import bench_on_asyncio  # asyncio is imported by those who need it

            return bench_on_asyncio(mesh, url=url, now=now)
        case _:
            raise UsageError(
                "testing.bench() needs a running event loop, Trio or asyncio: install pytest-trio or pytest-asyncio and mark "
                "the test; in a plain test use `with testing.blocking_bench(mesh) as bench:`"
            )


@asynccontextmanager
async def bench_on_trio(mesh: Mesh[Any], *, url: str | None, now: datetime | None) -> AsyncGenerator[Bench]:
    """As `bench`, on the running Trio loop."""
    url = url or os.environ.get(SERVER) or (await trio.to_thread.run_sync(kept_server)).url
    sent, errors = list[Call[Any]](), list[BaseException]()

    def look_on(context: Context, error: BaseException) -> None:
        if not _is_planned(context, error):
            said = f"raised by the handler of {context.queue!r}, in attempt {context.attempt} of job {context.id}"
            error.add_note(f"{error.remote.traceback}{said}" if isinstance(error, ChildError) else said)
            errors.append(error)

    with staged(
        mesh,
        sender=BenchSender(client_of(mesh), sent),
        connections=BenchConnections(),
        url=url,
        prefix=f"bench{secrets.token_hex(6)}",
        onlooker=look_on,
    ):
        async with mesh.connect():
            made = Bench(mesh, Sent(sent), errors)
            try:
                await made._begin(now)  # pyright: ignore[reportPrivateUsage]
                yield made
            finally:
                with trio.CancelScope(shield=True), trio.move_on_after(CLEAN_WITHIN):
                    await trio.to_thread.run_sync(mesh.blocking.close)
                    await delete_keys(client_of(mesh).link, RegistryKeys(mesh.prefix))


def _is_planned(context: Context, error: BaseException) -> bool:
    """True for errors that a handler raises to be run again."""
    verdict = judge(error, context._policy, context.failures, context.stalls)  # pyright: ignore[reportPrivateUsage]
    return isinstance(verdict.error, Retry) and not (verdict.counted and context.last_attempt)
