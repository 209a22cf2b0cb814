"""The queue and the producer of a mesh with ``tracing=``. A mesh without it uses `Queue` and `Producer` themselves.

A span is around each call that sends. The context of the trace goes into the `meta` of jobs, and on request of plain tasks.
"""

# Call hides its private fields from users; this module reads them.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, Unpack, cast

import msgspec

from worqr.client.call import Call
from worqr.client.client import Client
from worqr.client.dispatcher import traced
from worqr.client.job import Job
from worqr.client.producer import Producer
from worqr.client.queue import Queue
from worqr.client.raw_options import EnqueueOptions
from worqr.errors import NotReplicated
from worqr.job_options import JobOptions
from worqr.keys import QueueKeys
from worqr.ops import Dispatched
from worqr.remote_error import meta_of
from worqr.script_call import Call as Request
from worqr.tracing import Carrier, Server, Tracing, meta_with

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

    async def enqueue(self, *tasks: bytes | bytearray | memoryview, **options: Unpack[EnqueueOptions]) -> int:
        """Enqueue raw tasks inside a span; see `Queue.enqueue`."""
        tracing = cast("Tracing", self._client.settings.tracing)
        with tracing.sending("enqueue", self.name, server_of(self._client)) as span:
            stored = await super().enqueue(*tasks, **options)
            span.sent(stored, None)
            return stored

    async def dispatch(self, task: bytes | bytearray | memoryview, **options: Unpack[JobOptions]) -> Job[bytes]:
        """Dispatch a job inside a span, whose context travels in `meta`; see `Queue.dispatch`."""
        tracing = cast("Tracing", self._client.settings.tracing)
        with tracing.sending("dispatch", self.name, server_of(self._client)) as span:
            meta = options.get("meta", {})
            if isinstance(meta, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] - else the dispatch refuses it
                options["meta"] = meta_with(tracing.carrier(), meta)
            job = await super().dispatch(task, **options)
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
    given = call._options.get("meta")
    meta = meta_of(given if isinstance(given, str) else "")
    encoded = msgspec.json.encode(meta_with(carrier, meta)).decode()
    return replace(call, _options={**call._options, "meta": encoded})


def server_of(client: Client) -> Server:
    """Return the server of the mesh; UsageError outside `connect`."""
    return client.link.settings.address
