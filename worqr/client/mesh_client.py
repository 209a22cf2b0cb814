"""`MeshClient`: the client of a mesh, and the producer that sends the calls of its functions.

A `Mesh` has one, and its functions share it. A test replaces the producer and the connections here, and nowhere else.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, TypeVar, cast

import msgspec

from worqr import ops
from worqr.batches import BatchRef
from worqr.client.batch import Batch, BatchMaker, OpenBatch, Plan
from worqr.client.call import Call
from worqr.client.client import Client, SlotWatch
from worqr.client.connections import ConnectionRegistry
from worqr.client.dispatcher import traced
from worqr.client.inspection import all_workers, queue_names, readable_infos
from worqr.client.job import Job
from worqr.client.producer import Producer
from worqr.client.queue import Queue
from worqr.client.raw_options import RawOptions
from worqr.client.settings import ClientSettings
from worqr.embedded import Relocation
from worqr.errors import NotReplicated
from worqr.keys import QueueKeys, RegistryKeys
from worqr.mesh_records import MeshInfo, apps_of, decode_snapshot, is_in_use, most_active, unhealthy_of, unreadable_of
from worqr.ops import Dispatched
from worqr.remote_error import meta_of
from worqr.script_call import Call as Request
from worqr.tracing import Carrier, Server, Tracing, meta_with
from worqr.validation import from_ms

# The whole mesh at one moment: from the leader's snapshot, or read by this process if there is none.
#
# So many programs that look at the mesh cost the server what one costs. Without a worker there is no leader, and no snapshot:
# programs that start the first worker depend on the direct way.


FRESH_FOR: Final = 6.0
"""Seconds for which a snapshot is used: the leader writes one every 3 s."""
DIRECT_EVERY: Final = 5.0
"""Seconds between two direct reads of all queues by one process."""


class MeshInfoReader:
    """Reads the mesh of one client. Any number of loops and threads may use it at once."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._began = float("-inf")
        self._direct: tuple[MeshInfo, float] | None = None

    async def read(self) -> MeshInfo:
        """Return the leader's snapshot if it is fresh, else what this process reads, or has read in the last seconds."""
        found = await self._client.ask(ops.read_snapshot(RegistryKeys(self._client.settings.prefix)))
        if found.stored is not None:
            info = decode_snapshot(found.stored, found.now_ms)
            if info is not None and info.age < FRESH_FOR:
                return replace(info, memory=found.memory)
        known = self._direct
        if known is not None and time.monotonic() - self._began < DIRECT_EVERY:
            info, read_at = known
            return replace(info, age=time.monotonic() - read_at, memory=found.memory)
        self._began = time.monotonic()
        info = replace(await self._read_directly(found.now_ms), memory=found.memory)
        self._direct = info, time.monotonic()
        return info

    async def _read_directly(self, now_ms: int) -> MeshInfo:
        keys = RegistryKeys(self._client.settings.prefix)
        names = await queue_names(self._client.ask, keys)
        infos, refused = await readable_infos(self._client, [QueueKeys.of(keys.prefix, name) for name in names])
        workers = await all_workers(self._client)
        named, left_out, others = most_active(filter(is_in_use, infos))
        return MeshInfo(
            at=from_ms(now_ms),
            source="direct",
            age=0.0,
            leader=next((worker.id for worker in workers if worker.leads), None),
            queues=named,
            queues_left_out=left_out,
            others=others,
            apps=apps_of(workers),
            unhealthy=unhealthy_of(workers),
            unreadable=unreadable_of(refused),
        )


# The queue and the producer of a mesh with ``tracing=``. A mesh without it uses `Queue` and `Producer` themselves.
#
# A span is around each call that sends. The context of the trace goes into the `meta` of jobs, and on request of plain tasks.


# Call hides its private fields from users; this module reads them.
# pyright: reportPrivateUsage=false


R = TypeVar("R")


def queue_of(client: Client, keys: QueueKeys) -> Queue:
    """Return the queue of a mesh, with spans around its sends if the mesh is traced."""
    return Queue(client, keys) if client.settings.tracing is None else TracedQueue(client, keys)


def producer_of(client: Client) -> Producer:
    """Return the producer of a mesh, with spans around its sends if the mesh is traced."""
    tracing = client.settings.tracing
    return Producer(client) if tracing is None else TracedProducer(client, tracing)


class TracedQueue(Queue):
    """A `Queue` whose sends are traced."""

    __slots__ = ()

    async def _enqueue(self, checked: list[bytes], given: RawOptions) -> int:
        tracing = cast("Tracing", self._client.settings.tracing)
        with tracing.sending("enqueue", self.name, server_of(self._client)) as span:
            stored = await super()._enqueue(checked, given)
            span.sent(stored, None)
            return stored

    async def _dispatch(self, checked: bytes, given: Mapping[str, object]) -> Job[bytes]:
        """The context of the span travels in `meta`."""
        tracing = cast("Tracing", self._client.settings.tracing)
        with tracing.sending("dispatch", self.name, server_of(self._client)) as span:
            job = await super()._dispatch(checked, _carried(given, tracing.carrier()))
            span.sent(1, job.id)
            return job


class TracedProducer(Producer):
    """A `Producer` whose sends are traced."""

    def __init__(self, client: Client, tracing: Tracing) -> None:
        super().__init__(client)
        self._tracing = tracing

    async def enqueue(self, call: Call[Any]) -> None:
        """Send one call as a raw task, inside a span."""
        with self._tracing.sending("enqueue", call.queue, server_of(self._client)) as span:
            await super().enqueue(call)
            span.sent(1, None)

    async def _enqueue_of(self, keys: QueueKeys, calls: Sequence[Call[Any]], waiter: str = "") -> Request[int]:
        return traced(self._client, await super()._enqueue_of(keys, calls, waiter))

    async def dispatch(self, call: Call[R]) -> Job[R]:
        """Send one call as a job, inside a span whose context travels in `meta`."""
        with self._tracing.sending("dispatch", call.queue, server_of(self._client)) as span:
            job = await super().dispatch(with_carrier(call, self._tracing.carrier()))
            span.sent(1, job.id)
            return job

    async def enqueue_many(self, calls: Iterable[Call[Any]]) -> int:
        """Send calls as raw tasks, inside one span."""
        with self._tracing.sending("enqueue", None, server_of(self._client)) as span:
            stored = await super().enqueue_many(calls)
            span.sent(stored, None)
            return stored

    async def dispatch_many(self, calls: Iterable[Call[R]]) -> list[Job[R]]:
        """Send calls as jobs, inside one span. The context of each job travels in its `meta`."""
        server = server_of(self._client)
        with self._tracing.sending("dispatch", None, server) as span:
            jobs = await super().dispatch_many(self._created(call, server) for call in calls)
            span.sent(len(jobs), None)
            return jobs

    async def dispatch_members(
        self,
        calls: Sequence[Call[R]],
        options_at: Callable[[QueueKeys], Awaitable[Mapping[str, object]]],
        late: NotReplicated | None = None,
    ) -> tuple[list[tuple[Dispatched, QueueKeys]], NotReplicated | None]:
        """Send calls as jobs of a batch, inside one span. The context of each job travels in its `meta`."""
        server = server_of(self._client)
        with self._tracing.sending("dispatch", None, server) as span:
            created = [self._created(call, server) for call in calls]
            outcomes, late = await super().dispatch_members(created, options_at, late)
            span.sent(sum(done.outcome != "closed" for done, _ in outcomes), None)
            return outcomes, late

    def follow_up(self, call: Call[Any]) -> Call[Any]:
        """Return the call that the server will enqueue when a batch has ended, with the context of the trace in its `meta`."""
        return self._created(super().follow_up(call), server_of(self._client))

    def _created(self, call: Call[R], server: Server) -> Call[R]:
        """Return the call with a context of its own; what is no call is refused later."""
        if not isinstance(call, Call):  # pyright: ignore[reportUnnecessaryIsInstance]
            return call
        return with_carrier(call, self._tracing.creating(call.queue, server))


def with_carrier(call: Call[R], carrier: Carrier) -> Call[R]:
    """Return the call with this carrier in its encoded `meta`."""
    return replace(call, _options=_carried(call._options, carrier))


def _carried(options: Mapping[str, object], carrier: Carrier) -> Mapping[str, object]:
    """Return encoded options with this carrier in their `meta`."""
    given = options.get("meta")
    meta = meta_of(given if isinstance(given, str) else "")
    return {**options, "meta": msgspec.json.encode(meta_with(carrier, meta)).decode()}


def server_of(client: Client) -> Server:
    """Return the server of the mesh; UsageError outside `connect`."""
    return client.link.settings.address


class MeshClient(Client):
    """A `Client` that also sends the calls of functions.

    Attributes:
        producer: sends the calls.
        observer: a test's callback for each run that did not return normally, with its context and error; else None.
        relocation: where a test has moved the mesh to; else None.
        mesh_info: reads the whole mesh.
        batch_maker: makes the batches.
    """

    def __init__(self, settings: ClientSettings, slot_watch: Callable[[str], SlotWatch]) -> None:
        super().__init__(settings, slot_watch)
        self.producer: Producer = producer_of(self)
        self.observer: Callable[[Any, BaseException], None] | None = None
        self.relocation: Relocation | None = None
        self.mesh_info: MeshInfoReader = MeshInfoReader(self)
        self.batch_maker: BatchMaker = BatchMaker()

    def new_batch(self, plan: Plan, parent: Batch | None) -> OpenBatch:
        """Return a new batch, which is stored nowhere yet."""
        return self.batch_maker.open(self, self.producer, plan, parent)

    def batch_of(self, ref: BatchRef) -> Batch:
        """Return a handle of the batch that the record of a job names."""
        return self.batch_maker.of_ref(self, self.producer, ref)

    @contextmanager
    def replaced(
        self,
        *,
        producer: Producer,
        connections: ConnectionRegistry,
        observer: Callable[[Any, BaseException], None] | None = None,
        relocation: Relocation | None = None,
        batch_maker: BatchMaker | None = None,
    ) -> Generator[None]:
        """Use another producer and other connections in the block. For tests, while the mesh is not connected."""
        own = self.producer, self.connections, self.observer, self.relocation, self.mesh_info, self.batch_maker
        self._use(producer, connections, observer, relocation, MeshInfoReader(self), batch_maker or self.batch_maker)
        try:
            yield
        finally:
            self._use(*own)

    def _use(
        self,
        producer: Producer,
        connections: ConnectionRegistry,
        observer: Callable[[Any, BaseException], None] | None,
        relocation: Relocation | None,
        mesh_info: MeshInfoReader,
        batch_maker: BatchMaker,
    ) -> None:
        self.use_connections(connections)
        self.producer = producer
        self.observer = observer
        self.relocation = relocation
        self.mesh_info = mesh_info
        self.batch_maker = batch_maker
