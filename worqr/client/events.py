"""The events of a queue: `Event`, and the iterator of ``queue.events()``; and those of the connection: `ConnectionEvent`, of
``mesh.connection_events()``.

A script publishes an event after it has counted it, and only while a client listens. It publishes the ids before, on a channel
of their own, so that listeners of older versions still understand the event. The two messages of one event arrive one after the
other, because one script publishes both.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

from worqr import ops
from worqr.client.client import Client
from worqr.client.notifications import POLL_EVERY, EventStream, subscribed_to
from worqr.keys import QueueKeys, RegistryKeys
from worqr.link import Change, Link
from worqr.log_events import emit
from worqr.stored_values import whole

logger: logging.Logger = logging.getLogger("worqr.events")  # a documented name

BUFFERED: Final = 1000
"""Events that an iterator keeps for a slow reader. If there are more, it drops the oldest."""


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

    def __init__(self, name: str, keys: QueueKeys, put: Callable[[Event], None]) -> None:
        self._name = name
        self._keys = keys
        self._put = put
        self._ids_event: Event | None = None
        self._ignored = False

    def on_message(self, channel: str, message: bytes) -> None:
        """Decode a message of one of the two channels. Called in the loop."""
        event, *ids = message.decode("utf-8", "replace").split("\n")
        kind, _, count = event.partition(" ")
        number = whole(count)
        if number is None:
            if not self._ignored:
                self._ignored = True
                text = "queue %(queue)r: ignored a message of another program, as all further ones"
                emit(logger, "events", text, queue=self._name)
            return
        received = Event(self._name, kind, number, tuple(ids))
        named, self._ids_event = self._ids_event, None
        if channel == self._keys.event_ids_channel:
            self._ids_event = received
        else:
            same = named is not None and (named.type, named.count) == (received.type, received.count)
            self._put(named if named is not None and same else received)

    def on_subscribed(self) -> None:
        """Forget the ids of an event that was lost with the connection. Called after each subscription."""
        self._ids_event = None


@asynccontextmanager
async def events_of(client: Client, queue: QueueKeys) -> AsyncGenerator[AsyncIterator[Event]]:
    """Return the events of a queue, from all of its shards."""
    link = client.link
    stream = EventStream[Event](link, BUFFERED)
    async with AsyncExitStack() as stack:
        stack.enter_context(stream)
        for keys in await client.sharding.shards(queue):
            decoder = _EventDecoder(queue.display_name, keys, stream.put)
            channels = (keys.events_channel, keys.event_ids_channel)
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
