"""The events of a queue: `Event`, and the iterator of ``queue.events()``; and those of the connection: `ConnectionEvent`, of
``mesh.connection_events()``.

A script publishes an event after it has counted it, and only while a client listens. It publishes the ids before, on a channel
of their own, so that listeners of older versions still understand the event; and how runs ended on a third one, only while a
client listens to that. The messages of one event arrive one after the other, because one script publishes all of them.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Final, Literal

from worqr import ops
from worqr.client.notifications import POLL_EVERY, EventStream, subscribed_to
from worqr.codecs import StoredValues
from worqr.command import error_of, text
from worqr.keys import QueueKeys, RegistryKeys
from worqr.link import Change, Link
from worqr.log_events import emit
from worqr.records import RemoteError
from worqr.stored_values import public_name, whole

if TYPE_CHECKING:
    from worqr.client.client import Client

logger: logging.Logger = logging.getLogger("worqr.events")  # a documented name

BUFFERED: Final = 1000
"""Events that an iterator keeps for a slow reader. If there are more, it drops the oldest."""


@dataclass(frozen=True, slots=True)
class EndedTask:
    """How one run ended for good. See `Event.ends`. Of a long text there is the first KiB."""

    worker: str
    """The id of the worker that ran it. If it was lost with its worker, of that worker."""
    id: str | None = None
    """The id of the job; None for a plain task."""
    task: bytes | None = None
    """The payload of a plain task; None for a job, which `Queue.read` finds by its id."""
    result: bytes | None = None
    """The result as it is stored: JSON, or the bytes that a raw handler returned. None: none is kept."""
    error: RemoteError | None = None
    """The type and the message of the error, of events ``failed`` and ``undecodable``."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to tasks of a queue. See ``queue.events()``."""

    queue: str
    """The queue's name."""
    type: str
    """The kind of event: ``enqueued``, ``claimed``, ``finished``, ``retried``, ``failed``, ... , as in `QueueInfo.counts`."""
    count: int
    """The number of tasks."""
    ids: tuple[str, ...] = ()
    """The ids of those tasks that have one, at most 100. A plain task gets an id when it is retried, stalls or moves to the
    dead-letter queue.
    """
    ends: tuple[EndedTask, ...] = ()
    """How those runs ended, at most 100: of events ``finished``, ``failed`` and ``undecodable``, if you passed ``ends=True``."""


@dataclass(frozen=True, slots=True)
class ConnectionEvent:
    """The connection to a server was lost, or is back. See ``mesh.connection_events()``."""

    type: Literal["lost", "back"]
    """``lost``: the server cannot be reached, or reports that it cannot work; worqr reconnects by itself. ``back``: it can be
    used again, or the node does not belong to the cluster any more.
    """
    server: str
    """The server's address, without the password. A cluster has one connection for each node."""
    cause: str
    """Why the connection was lost, as in the log."""
    seconds: float
    """Seconds since the connection was lost."""


class _EventDecoder:
    """Decodes the messages of one shard into events."""

    def __init__(
        self, name: str, keys: QueueKeys, put: Callable[[Event], None], values: StoredValues | None = None
    ) -> None:
        self._values = values
        self._name = name
        self._keys = keys
        self._put = put
        self._ahead: dict[str, Event] = {}
        self._ignored = False

    def on_message(self, channel: str, message: bytes) -> None:
        """Decode a message of one of the channels. Called in the loop."""
        event, _, rest = message.partition(b"\n")
        kind, _, count = event.decode("utf-8", "replace").partition(" ")
        try:
            received = Event(self._name, public_name(kind), _count(count))
            if channel == self._keys.event_ids_channel:
                received = replace(received, ids=tuple(rest.decode("utf-8", "replace").split("\n")))
            elif channel == self._keys.event_ends_channel:
                received = replace(received, ends=tuple(map(self._opened, _ends(rest))))
        except ValueError:
            if not self._ignored:
                self._ignored = True
                text = "queue %(queue)r: ignored a message of another program, as all further ones"
                emit(logger, "events", text, queue=self._name)
            return
        if channel == self._keys.events_channel:
            ahead, self._ahead = self._ahead.values(), {}
            same = [each for each in ahead if (each.type, each.count) == (received.type, received.count)]
            ids, ends = (
                next((found for each in same if (found := getattr(each, name))), ()) for name in ("ids", "ends")
            )
            self._put(replace(received, ids=ids, ends=ends))
        else:
            self._ahead[channel] = received

    def _opened(self, end: EndedTask) -> EndedTask:
        """Return how a run ended, with its values decoded if the codec of the mesh can do that. Large ones are cut."""
        if (values := self._values) is None:
            return end
        task, result = (None if each is None else values.readable(each) for each in (end.task, end.result))
        return replace(end, task=task, result=result)

    def on_subscribed(self) -> None:
        """Forget what belongs to an event that was lost with the connection. Called after each subscription."""
        self._ahead.clear()


def _count(text: str) -> int:
    """Return the number of an event. Raises ValueError if another program has published something else."""
    found = whole(text)
    if found is None:
        raise ValueError(text[:40])
    return found


def _ends(packed: bytes) -> tuple[EndedTask, ...]:
    """Return how runs ended: after a line with the lengths of all values, -1 for none, there are seven values for each run.

    Raises:
        ValueError: it is something else.
    """
    line, _, texts = packed.partition(b"\n")
    lengths = [-1 if length == b"-1" else _count(text(length)) for length in line.split()]
    ends = list(accumulate(max(0, length) for length in lengths))
    if len(lengths) % 7 or ends[-1:] != [len(texts)]:
        raise ValueError("the lengths do not fit")
    values = [None if length < 0 else texts[end - length : end] for length, end in zip(lengths, ends, strict=True)]
    found: list[EndedTask] = []
    for worker, name, task, _, result, error_type, message in zip(*[iter(values)] * 7, strict=True):
        job = None if name is None else text(name)
        found.append(EndedTask(text(worker or b""), job, task, result, error_of(error_type, message)))
    return tuple(found)


@asynccontextmanager
async def events_of(client: Client, queue: QueueKeys, *, ends: bool) -> AsyncGenerator[AsyncIterator[Event]]:
    """Return the events of a queue, from all of its shards."""
    link = client.link
    stream = EventStream[Event](link, BUFFERED)
    async with AsyncExitStack() as stack:
        stack.enter_context(stream)
        for keys in await client.sharding.shards(queue):
            decoder = _EventDecoder(queue.display_name, keys, stream.put, client.values)
            channels = (keys.events_channel, keys.event_ids_channel, *((keys.event_ends_channel,) if ends else ()))
            await stack.enter_async_context(subscribed_to(link, channels, decoder.on_message, decoder.on_subscribed))
        yield stream


class _ConnectionEvents(AsyncIterator[ConnectionEvent]):
    """The iterator of connection events.

    The loss of an idle connection is noticed only when it is used. So the iterator sends a request every `POLL_EVERY` seconds
    while it waits.
    """

    def __init__(self, link: Link, prefix: str, stream: EventStream[ConnectionEvent]) -> None:
        self._link = link
        self._registry = RegistryKeys(prefix)
        self._stream = stream
        self._asking = False

    async def __anext__(self) -> ConnectionEvent:
        while True:
            with self._link.driver.move_on_after(POLL_EVERY):
                return await anext(self._stream)
            if not self._asking:
                self._asking = True
                self._link.post(ops.list_shards(self._registry), self._answered)

    def _answered(self, _shards: object, _failure: Exception | None) -> None:
        self._asking = False


@asynccontextmanager
async def connection_events_of(client: Client) -> AsyncGenerator[AsyncIterator[ConnectionEvent]]:
    """Return the connection events of the running loop. It begins with one event for each server that is lost already."""
    link = client.link
    stream = EventStream[ConnectionEvent](link, BUFFERED)

    def on_change(change: Change) -> None:
        link.driver.post(partial(stream.put, ConnectionEvent(*change)))

    with stream:
        link.watchers.add(on_change)
        try:
            yield _ConnectionEvents(link, client.settings.prefix, stream)
        finally:
            link.watchers.remove(on_change)
