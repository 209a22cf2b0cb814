"""What happens to a queue, for those who listen: `Event`, and the iterator behind ``queue.events()``.

The scripts publish an event after they have counted it, and only while somebody listens. The ids come first, on a channel of
their own, so that a listener of an older version reads the event itself as ever; the two messages of one event come one
right after the other, because one script publishes both.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from worqr.keys import QueueKeys
from worqr.listening import Latest, listening_to
from worqr.log_events import emit

if TYPE_CHECKING:
    from worqr.mesh import Mesh

logger: logging.Logger = logging.getLogger(__name__)

BUFFERED: Final = 1000
"""Events that an iterator keeps for somebody who is slow."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to `count` tasks of a queue: enqueued, claimed, finished, stopped, retried, failed, ...

    Attributes:
        ids: the ids of those tasks that have one: jobs, and also plain tasks that were retried, stalled or set aside, which get
            an id then. At most 100 of one event; `count` is exact.
    """

    queue: str
    type: str
    count: int
    ids: tuple[str, ...] = ()


class _Reader:
    """Makes events of the messages of one shard."""

    def __init__(self, name: str, keys: QueueKeys, put: Callable[[Event], None]) -> None:
        self._name = name
        self._keys = keys
        self._put = put
        self._named: Event | None = None

    def hear(self, channel: str, message: bytes) -> None:
        """A message has come on one of the two channels; called in the loop."""
        event, *ids = message.decode("utf-8", "replace").split("\n")
        kind, _, count = event.partition(" ")
        try:
            told = Event(self._name, kind, int(count), tuple(ids))
        except ValueError:
            emit(logger, "events", "queue %(queue)r: ignored a message of another program", queue=self._name)
            return
        named, self._named = self._named, None
        if channel == self._keys.event_ids_channel:
            self._named = told
        else:
            same = named is not None and (named.type, named.count) == (told.type, told.count)
            self._put(named if named is not None and same else told)

    def begin(self) -> None:
        """The channels were subscribed, perhaps anew: ids whose event was lost belong to no other one."""
        self._named = None


@asynccontextmanager
async def events_of(mesh: Mesh[Any], queue: QueueKeys) -> AsyncGenerator[AsyncIterator[Event]]:
    """What happens to a queue, all of its shards."""
    link = mesh.link
    latest = Latest[Event](link, BUFFERED)
    async with AsyncExitStack() as stack:
        stack.enter_context(latest)
        for keys in await mesh.sharding.of(queue):
            reader = _Reader(queue.shown, keys, latest.put)
            channels = (keys.events_channel, keys.event_ids_channel)
            await stack.enter_async_context(listening_to(link, channels, reader.hear, reader.begin))
        yield latest
