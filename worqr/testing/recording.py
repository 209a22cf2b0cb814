"""Record calls without a server: for tests of code that only enqueues."""

# The private fields of Call are hidden from users, not from the sender.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Iterable
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from typing import Any, TypeVar, cast

from worqr.client.call import Call
from worqr.client.client import Client
from worqr.client.connections import Connection, ConnectionRegistry
from worqr.client.job import Job
from worqr.client.producer import Producer
from worqr.errors import NoResult, UsageError
from worqr.inside import client_of
from worqr.keys import QueueKeys
from worqr.mesh import Mesh
from worqr.records import CancelCount, Status
from worqr.testing.patching import patched
from worqr.testing.recorded_batch import RecordingBatchMaker, Sent, SentBatch
from worqr.validation import Seconds

R = TypeVar("R")


class RecordedJob(Job[R]):
    """The handle of a job that was recorded and never sent."""

    __slots__ = ()

    async def status(self) -> Status:
        """Return the state ``waiting``."""
        return Status("waiting", worker=None, since=None, run_at=None, progress=None, message="", failures=0)

    async def result(self, timeout: Seconds | None = None) -> R:
        """Raise `NoResult`.

        Args:
            timeout: Ignored.

        Raises:
            NoResult: Always, and at once.
        """
        raise NoResult(f"{self!r} was recorded and never sent: to see it run, use worqr.testing.bench")

    async def cancel(self, *, reason: str = "", wait: Seconds = 0) -> CancelCount:
        """Return what cancelling a waiting job returns. The call stays in the recording.

        Args:
            reason: Ignored.
            wait: Ignored.
        """
        return CancelCount(waiting=1, running=0, acknowledged=0)


class RecordingProducer(Producer):
    """Records calls instead of sending them. Its coroutines never wait, so they run without an event loop too."""

    def __init__(self, client: Client, sent: list[Call[Any]]) -> None:
        super().__init__(client, sent=sent)
        self._ids = count(1)

    async def enqueue(self, call: Call[Any]) -> None:
        """Record a call."""
        self._note((call,))

    async def dispatch(self, call: Call[R]) -> Job[R]:
        """Record a call, and return a handle of it."""
        self._note((call,))
        name = cast("str", call._options.get("id") or f"@{next(self._ids)}")
        return RecordedJob(self._client, QueueKeys(self._client.settings.prefix, call.queue), name, outcome="created")

    async def enqueue_many(self, calls: Iterable[Call[Any]]) -> int:
        """Record calls."""
        noted = list(calls)
        for call in noted:
            await self.enqueue(call)
        return len(noted)

    async def dispatch_many(self, calls: Iterable[Call[R]]) -> list[Job[R]]:
        """Record calls, and return their handles."""
        return [await self.dispatch(call) for call in calls]


class NoConnections(ConnectionRegistry):
    """Connects to nothing."""

    def for_current_loop(self) -> Connection:
        """Raise UsageError: there is no server."""
        raise UsageError(
            "this mesh is recording what its functions send, and has no server: for anything else use worqr.testing.bench"
        )

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[None]:
        """Connect to nothing, on any loop."""
        yield


@contextmanager
def recording(mesh: Mesh[Any]) -> Generator[Sent]:
    """Record what is sent through the functions of a mesh inside the block. Nothing is sent, and no server is needed.

    Enqueues and dispatches are recorded, one or many, and ``mesh.connect()`` connects to nothing. Arguments are checked. A
    dispatch returns the handle of a job that waits: its ``result()`` raises `NoResult` at once. So do the jobs of
    ``mesh.batch()``, which are recorded with their batch. Calls that do not go through a function need a server, and raise
    UsageError.

    Args:
        mesh: Any mesh.

    Yields:
        Sent: The calls.

    Raises:
        UsageError: The mesh is connected, on a bench, or recording already.
    """
    sent: list[Call[Any]] = []
    batches: list[SentBatch] = []
    client = client_of(mesh)
    connections = NoConnections(client.settings, client.declared_shards)
    maker = RecordingBatchMaker(batches)
    with patched(mesh, producer=RecordingProducer(client, sent), connections=connections, batch_maker=maker):
        yield Sent(sent, batches)
