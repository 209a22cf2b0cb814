"""A bench: the application's own mesh, for the length of a test on a server of the test's, with a clock that can be moved.

Everything is real: the scripts, the records, the peer that runs the handlers. What is the test's own: the prefix, whose keys
are deleted in the end; the clock (`worqr.testing.clock`); when schedules fire (`worqr.testing.firing`); and that what a
handler raises is raised in the test.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncGenerator, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import datetime
from typing import Any, Final, TypeVar, Unpack, overload

import trio

from worqr.client import Client
from worqr.connecting import Connection, Connections
from worqr.errors import UsageError
from worqr.function import Call, Function
from worqr.inside import client_of
from worqr.job import Job
from worqr.keys import RegistryKeys
from worqr.link import Link, LinkSettings, loop_here, loop_name_here, mailbox_here
from worqr.mesh import Mesh
from worqr.peer.context import Context
from worqr.peer.options import JoinOptions
from worqr.policy import ChildError, Retry, judge
from worqr.sending import Sender
from worqr.task import Seconds, to_ms
from worqr.task import seconds as seconds_of
from worqr.testing.clock import BenchLink, Clock, delete_keys
from worqr.testing.firing import Firing
from worqr.testing.running import Run, Summary, look, promote
from worqr.testing.servers import kept_server
from worqr.testing.staging import Sent, staged

R = TypeVar("R")

SERVER: Final = "WORQR_TEST_URL"
"""The variable that names another server than the embedded one."""
CLEAN_WITHIN: Final = 5.0


class Bench:
    """A mesh on a bench. Made by `bench`; used in the loop, by one task. On asyncio the bench itself runs in another thread."""

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
        """The calls of a function (or of its name) that were enqueued or dispatched on this bench, in order.

        They are equal to what ``fn.call(...)`` makes of the same arguments, whatever the options. Those that have run and those
        that handlers sent are among them; firings of schedules, and what was sent to the raw queue, are not.
        """
        return self._sent.calls(fn)

    async def run_until_empty(
        self, *, scheduled: bool = False, raise_errors: bool = True, **options: Unpack[JoinOptions]
    ) -> Summary:
        """Join as a peer that serves all functions of the mesh, run until nothing waits or runs any more, and leave.

        Meanwhile the clock of the mesh stands still: what is not due when it begins stays, retries with a backoff among it.
        Queues that nobody serves, and paused ones, do not count; those that peers of the test serve do.

        Args:
            scheduled: run what is scheduled for later as well: when nothing waits, the clock is moved to the next due time, until
                nothing is scheduled. Schedules do not fire by that.
            raise_errors: raise what handlers raised, unless it is `Retry`: when nothing waits or runs any more, and before the
                clock is moved, so that an error ends the run at its first try. Several errors are an ExceptionGroup. A run
                that took too long is a TimeoutError. False: errors are only counted.
            options: as for ``mesh.join``: with ``concurrency=1`` tasks run one after the other, with ``only=["shop.*"]`` these
                functions alone.

        Returns:
            How many finished, failed, were retried and cancelled, in this run.

        Raises:
            Whatever handlers raised: the object itself, with its traceback; of a handler in a process of its own, an error with
                the name and the text of what was raised there.
            UsageError: over 1,000 due times one after the other.

        Cancelling it cancels what runs; its tasks go back to the front.
        """
        self._errors.clear()
        run = Run(self._mesh, self._clock, self._firing, options)
        summary = await run.until_empty(scheduled=scheduled, enough=lambda: raise_errors and bool(self._errors))
        if raise_errors:
            self._raise_errors()
        return summary

    async def advance(self, seconds: Seconds) -> None:
        """Let time pass for the mesh: what is due by then is put in line, results and ids taken by ``unique_for`` end, tasks
        expire, schedules fire. Nothing runs before the next `run_until_empty`, and no peer or handler sees its own clock move.

        Args:
            seconds: or a timedelta. Letting a day pass fires a daily schedule once; one with ``overlap="skip"`` has one
                firing however many passed, because nothing ran in between.
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
        """A link that goes by the clock of the bench."""
        return BenchLink(settings, mailbox_here())


class BenchSender(Sender):
    """Sends, and notes what was sent."""

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
    """Put the application's own mesh on a bench, connected, for the length of a block, under Trio or asyncio.

    Its functions, queues and jobs then live under a prefix of the bench's own, whose keys are deleted in the end, however the
    block ends. One server serves all benches of a process: the first starts it, in a tenth of a second; all others take 4 ms.

    Under Trio the handlers run on the loop of the test. Under asyncio they run in other threads, also those with
    ``runs_in="asyncio"``. In a test without an event loop use `blocking_bench`.

    Args:
        mesh: any mesh, as it is declared; where it would connect to does not matter.
        url: the server; default: ``$WORQR_TEST_URL``, else an embedded one (``pip install 'worqr[embedded]'``).
        now: an aware datetime at which the clock of the bench begins, for tests of schedules; default: what time it is.

    Raises:
        UsageError: `mesh` is connected, on a bench or recording already; there is no server program; `now` has no timezone; no
            event loop runs.
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
    """True for what a handler raises to be run again."""
    verdict = judge(error, context._policy, context.failures, context.stalls)  # pyright: ignore[reportPrivateUsage]
    return isinstance(verdict.error, Retry) and not (verdict.counted and context.last_attempt)
