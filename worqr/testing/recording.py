"""Record calls without a server: for tests of code that only enqueues."""

# The private fields of Call and Batch are hidden from users, not from the sender.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterable, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NoReturn, TypeVar, cast, overload

from worqr.batches import BatchInfo, BatchRef, BatchState
from worqr.client.batch import Batch, BatchMaker, OpenBatch, Plan
from worqr.client.client import Client, Connection, ConnectionRegistry
from worqr.client.job import Job
from worqr.client.producer import Call, Producer
from worqr.embedded import Relocation
from worqr.errors import BatchEnded, NoResult, UsageError
from worqr.functions.function import Function
from worqr.inside import client_of, set_server
from worqr.keys import QueueKeys
from worqr.mesh import Mesh
from worqr.peer.options import RunObserver
from worqr.records import CancelCount, Status
from worqr.remote_error import meta_of
from worqr.validation import Seconds

# Put a mesh on the server of a test, or on none, for the length of a block.


@contextmanager
def patched(
    mesh: Mesh[Any],
    *,
    producer: Producer,
    connections: ConnectionRegistry,
    url: str | None = None,
    prefix: str | None = None,
    observer: RunObserver | None = None,
    batch_maker: BatchMaker | None = None,
) -> Generator[None]:
    """Use these connections, this producer and this server inside the block, instead of the mesh's own.

    Raises:
        UsageError: the mesh is connected, on a bench, or recording already.
    """
    client = client_of(mesh)
    if type(client.connections) is not ConnectionRegistry:
        raise UsageError(f"{mesh!r} is on a bench, or in a recording, already")
    if client.connections.any:
        raise UsageError(f"{mesh!r} is connected: a test takes a mesh before anything connects it")
    own_url, own_prefix, own_credentials = mesh.url, mesh.prefix, mesh.credentials
    credentials = own_credentials if url is None else None  # another server does not have the users of the mesh's own
    set_server(mesh, url=url or own_url, prefix=prefix or own_prefix, credentials=credentials)
    relocation = None if url is None else Relocation(own_url, own_prefix, url, mesh.prefix)
    try:
        with client.replaced(
            producer=producer,
            connections=connections,
            observer=observer,
            relocation=relocation,
            batch_maker=batch_maker,
        ):
            yield
    finally:
        set_server(mesh, url=own_url, prefix=own_prefix, credentials=own_credentials)


# Batches that are recorded and never stored.


# The calls that a test has sent, or recorded, through the functions of a mesh.


R = TypeVar("R")


class Sent:
    """The calls that were sent through the functions of a mesh, in order. `recording` makes it."""

    def __init__(self, calls: list[Call[Any]], batches: list[SentBatch] | None = None) -> None:
        self._calls = calls
        self._batches = [] if batches is None else batches

    @property
    def batches(self) -> list[SentBatch]:
        """The batches that were made so far, in order, with the calls of their jobs.

        The jobs that a handler adds to ``mesh.current_batch()`` are in a batch of their own, without a follow-up.
        """
        return list(self._batches)

    def all(self) -> list[Call[Any]]:
        """Return the calls of all functions so far, in order."""
        return list(self._calls)

    @overload
    def calls(self, fn: Function[..., R]) -> list[Call[R]]: ...
    @overload
    def calls(self, fn: str) -> list[Call[Any]]: ...
    def calls(self, fn: Function[..., Any] | str) -> list[Call[Any]]:
        """Return the calls of a function so far.

        They are equal to what ``fn.call(...)`` or ``mesh.call(name, ...)`` returns for the same arguments, whatever the
        options.

        Args:
            fn: The function, or its name.
        """
        name = fn if isinstance(fn, str) else fn.name
        return [call for call in self._calls if call.queue == name]


@dataclass(frozen=True)
class SentBatch:
    """A batch that was recorded."""

    calls: list[Call[Any]] = field(default_factory=list[Call[Any]])
    """The calls of its jobs, in order."""
    then: Call[Any] | None = None
    """The call that would be enqueued when all jobs have finished."""
    otherwise: Call[Any] | None = None
    """The call that would be enqueued instead when a job failed or was cancelled."""
    meta: Mapping[str, str] = field(default_factory=dict[str, str])
    """The `meta` that it was given."""
    cancelled: list[str] = field(default_factory=list[str])
    """The reason of each cancel; empty if it was not cancelled."""


class RecordingBatchMaker(BatchMaker):
    """Makes batches that are recorded."""

    def __init__(self, sent: list[SentBatch]) -> None:
        self._sent = sent
        self._numbers = count(1)

    def open(self, client: Client, plan: Plan, parent: Batch | None) -> OpenBatch:
        """Record a new batch."""
        then, otherwise = (
            call if call is None else client.producer.follow_up(call) for call in (plan.then, plan.otherwise)
        )
        batch = SentBatch([], then, otherwise, meta_of(plan.facts.get("meta", "")))
        self._sent.append(batch)
        return RecordedBatch(client, plan, batch, f"@{next(self._numbers)}")

    def of_ref(self, client: Client, ref: BatchRef) -> Batch:
        """Record a batch for the jobs that a handler adds to the batch of its own job."""
        batch = SentBatch()
        self._sent.append(batch)
        return RecordedBatch(client, None, batch, ref.id, ref.queue)


class RecordedBatch(OpenBatch):
    """A batch whose jobs are recorded and never sent. Its coroutines never wait."""

    def __init__(self, client: Client, plan: Plan | None, batch: SentBatch, id: str, queue: str | None = None) -> None:
        super().__init__(client, plan or Plan(None, None, queue, id, 0, 0, {}))
        self._batch = batch
        self._name = id
        self._producing = plan is not None
        if self._plan.queue is not None:
            self._put_at(self._plan.queue)

    async def begin(self) -> None:
        """Do nothing."""

    def _put_at(self, queue: str) -> None:
        keys = QueueKeys(self._client.settings.prefix, queue)
        self._known = self._known or (keys, self._plan.id or self._name)

    async def _add_many(self, calls: Iterable[Call[R]]) -> list[Job[R]]:
        return [await self._add_one(call) for call in calls]

    async def _add_one(self, call: Call[R]) -> Job[R]:
        if self._batch.cancelled:
            raise BatchEnded(
                f"{self!r} was cancelled" + (f": {self._batch.cancelled[0]}" if self._batch.cancelled[0] else "")
            )
        if self._sealed:
            raise BatchEnded(self._sealed_text())
        job = await self._client.producer.dispatch(call)
        self._put_at(call.queue)
        self._batch.calls.append(call)
        return job

    async def info(self) -> BatchInfo:
        """Return the number of recorded calls. None of them ends."""
        state: BatchState = "sealed" if self._sealed or not self._producing else "open"
        queue, name = ("", "") if self._known is None else (self.queue, self.id)
        reason = self._batch.cancelled[0] if self._batch.cancelled else None
        queues = tuple(sorted({call.queue for call in self._batch.calls}))
        jobs = len(self._batch.calls)
        return BatchInfo(
            name, queue, state, jobs, 0, 0, 0, 0, meta=self._batch.meta, cancel_reason=reason, queues=queues
        )

    def _never(self) -> NoReturn:
        raise NoResult(f"{self!r} was recorded and never sent: to see it run, use worqr.testing.bench")

    async def wait(self, timeout: Seconds | None = None) -> BatchInfo:
        """Raise `NoResult`, at once."""
        self._never()

    async def result(self, timeout: Seconds | None = None) -> Any:
        """Raise `NoResult`, at once."""
        self._never()

    @asynccontextmanager
    async def watch(self, timeout: Seconds | None = None) -> AsyncGenerator[AsyncIterator[BatchInfo]]:
        """Raise `NoResult`, at once."""
        self._never()
        yield cast("AsyncIterator[BatchInfo]", None)  # pyright: ignore[reportUnreachable]

    async def cancel(self, *, reason: str = "") -> bool:
        """Note that the batch was cancelled, and return True."""
        self._batch.cancelled.append(reason)
        return True

    async def retry_failed(self) -> int:
        """Return 0, because no job has failed."""
        return 0

    async def seal(self) -> None:
        """Note that no more jobs are added."""
        self._sealed = True

    async def abandon(self, error: BaseException) -> None:
        """Note that the batch was cancelled."""
        self._sealed = True
        await self.cancel(reason=f"its block ended with {type(error).__name__}")


class RecordedJob(Job[R]):
    """The handle of a job that was recorded and never sent."""

    __slots__ = ()

    async def status(self, kind: Any = None) -> Status:
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

    @property
    def records(self) -> bool:
        """True."""
        return True

    def note_row(self, call: Call[Any]) -> bool:
        """Record a call that goes into an outbox. No row is stored."""
        self._note((self.prepared(call),))
        return True

    async def enqueue(self, call: Call[Any]) -> None:
        """Record a call."""
        self._note((self.prepared(call),))

    async def dispatch(self, call: Call[R]) -> Job[R]:
        """Record a call, and return a handle of it."""
        call = self._checked(call)
        self._with_stored_follow_ups(dict(call._options))  # checks them
        self._note((call,))
        name = cast("str", call._options.get("id") or f"@{next(self._ids)}")
        return RecordedJob(self._client, QueueKeys(self._client.settings.prefix, call.queue), name, outcome="created")

    async def enqueue_many(self, calls: Iterable[Call[Any]]) -> int:
        """Record calls, all or none."""
        noted = [self._checked(call, plain=True) for call in calls]
        self._note(noted)
        return len(noted)

    async def dispatch_many(
        self, calls: Iterable[Call[R]], places: Mapping[str, QueueKeys] | None = None
    ) -> list[Job[R]]:
        """Record calls, all or none, and return their handles."""
        return [await self.dispatch(call) for call in [*map(self._checked, calls)]]


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
