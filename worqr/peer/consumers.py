"""`ActiveConsumers`: the consumers of one peer, by the names of their queues.

Not here: entering and leaving queues (`consumer_runner`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import trio
from trio_util import periodic

from worqr import ops
from worqr.errors import ClaimLost
from worqr.keys import QueueKeys, RegistryKeys
from worqr.link import Link
from worqr.log_events import emit
from worqr.ops import MAX_ITEMS, NOTE_EVERY
from worqr.peer.consumer import QueueConsumer
from worqr.peer.departures import Departures
from worqr.peer.error_throttle import ErrorThrottle, sleep_aligned
from worqr.peer.session import Registration

# `WorkMapRefresher`: sends the queues that this worker serves to the registry, after each new connection.
#
# A registry that failed over to a replica may have lost its last writes, for example a map_work. Then the leader would not
# recover the claims of this queue if the worker died. So after each new connection, map_work is sent once more for every queue
# that the worker serves. Queues where runs were left behind are included. A refused map_work is repeated, with growing pauses,
# until the server accepts it.
#
# Invariant: no map_work is sent for a queue between its unmap_work and the reply to that (`Departures.is_open`). An earlier
# map_work reaches the same node first.


logger: logging.Logger = logging.getLogger(__name__)

CHECK_EVERY = 2.0
LONGEST_PAUSE = 30.0
"""Seconds between checks for a new connection. The pause is doubled after each refusal, up to the second value."""


class WorkMapRefresher:
    """Sends the queues of one peer. `lost` ends a registration. Changed only in the loop."""

    def __init__(
        self,
        link: Link,
        keys: RegistryKeys,
        consumers: ActiveConsumers,
        departures: Departures,
        lost: Callable[[Registration, str], None],
    ) -> None:
        self._link = link
        self._keys = keys
        self._consumers = consumers
        self._departures = departures
        self._lost = lost
        self._pending: set[QueueConsumer] = set()
        self._refused = False
        self._throttle = ErrorThrottle(logger)

    async def refresh_forever(self) -> None:
        """Check periodically for new connections."""
        pause = CHECK_EVERY
        while True:
            await sleep_aligned(pause)
            pause = min(2 * pause, LONGEST_PAUSE) if self._refused else CHECK_EVERY
            self.refresh_once()

    def refresh_once(self) -> None:
        """Send every queue that was not sent to the registry on the newest connection. Never waits."""
        self._refused = False
        connections = self._link.connections
        for consumer in self._consumers.held():
            admission, registration = consumer.admission, consumer.registration
            if admission.mapped_on == connections or consumer in self._pending:
                continue
            if registration is None or registration.dead or self._departures.is_open(registration, consumer.name):
                continue  # unmap_work may be on its way
            self._pending.add(consumer)
            call = ops.map_work(self._keys, registration.worker, consumer.name)
            self._link.post(call, partial(self._answered, consumer, registration, connections), owner=registration)

    def _answered(
        self,
        consumer: QueueConsumer,
        registration: Registration,
        connections: int,
        word: str | None,
        failure: Exception | None,
    ) -> None:
        self._pending.discard(consumer)
        if word == "dead":
            self._lost(registration, "it is not registered any more")
        elif failure is None:
            consumer.admission.mapped(connections)
            self._throttle.resolve(consumer.name)
        elif not isinstance(failure, ClaimLost):
            self._refused = True
            text = "queue %(queue)r: the server does not record that this worker serves it, trying again: %(error)s"
            self._throttle.error(consumer.name, "map_work", text, queue=consumer.queue, error=str(failure))


# `WaitingQueues`: handles the queues with waiting tasks that the reply to a heartbeat names.
#
# The leader's scan finds such queues, because a wake-up for them may have been lost.


class WaitingQueues:
    """Makes the consumers of one peer request tasks. Changed only in the loop."""

    def __init__(self, prefix: str, consumers: ActiveConsumers) -> None:
        self._prefix = prefix
        self._consumers = consumers
        self._unserved: set[str] = set()

    def on_waiting(self, names: Iterable[str]) -> None:
        """Request the tasks of these queues, which have waiting tasks."""
        for name in names:
            consumer = self._consumers.get(name)
            if consumer is not None and consumer.admission.was_admitted:
                consumer.request_soon()
            elif consumer is None and name.startswith("{") and name not in self._unserved:
                self._report_unserved(name)

    def _report_unserved(self, name: str) -> None:
        """Warn if this queue with waiting tasks is a shard of a served queue: then this peer joined before the shard was
        declared.
        """
        queue = QueueKeys.of(self._prefix, name).display_name
        if queue != name and self._consumers.get(queue) is not None:
            self._unserved.add(name)
            text = (
                "queue %(queue)r has shards that this worker does not serve, because it joined before they were declared: "
                "restart it"
            )
            emit(logger, "shards.unserved", text, queue=queue)


# Store the names of the queues that a peer serves, so that callers and the leader find them.


async def register_queues_forever(link: Link, keys: RegistryKeys, names: Callable[[], Sequence[str]]) -> None:
    """Store them every NOTE_EVERY seconds, including queues that the peer is still entering.

    `map_work` has stored each of them once when the peer entered it.
    """
    async for _ in periodic(NOTE_EVERY):
        register_queues(link, keys, names())


def register_queues(link: Link, keys: RegistryKeys, names: Sequence[str]) -> None:
    """Store these names. A request that the server does not accept within NOTE_EVERY is dropped, because the next one follows."""
    for start in range(0, len(names), MAX_ITEMS):
        call = ops.note_queues(keys, names[start : start + MAX_ITEMS])
        link.post(call, lambda _word, _failure: None, patience=NOTE_EVERY)


class ActiveConsumers:
    """The consumers of one peer. A queue of several shards has one consumer for each. Changed only in the loop.

    Attributes:
        closed: the peer leaves, and enters no more queues.
        used: set after a queue was served.
    """

    def __init__(self) -> None:
        self.closed: bool = False
        self.used: trio.Event = trio.Event()
        self._by_name: dict[str, QueueConsumer] = {}
        self._detached: list[QueueConsumer] = []

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[QueueConsumer]:
        """Iterate over a copy: consumers are added and removed. From any thread, for the probes."""
        return iter(self._by_name.copy().values())  # of one step, where tuple() would be two

    def names(self) -> list[str]:
        """Return the names of all queues that are served, including those that are still being entered."""
        return list(self._by_name)

    def get(self, name: str) -> QueueConsumer | None:
        """Return the consumer of this queue, or None."""
        return self._by_name.get(name)

    def close(self) -> None:
        """Note that the peer leaves."""
        self.closed = True

    def add(self, consumer: QueueConsumer) -> None:
        """Add the consumer of a queue."""
        self._by_name[consumer.name] = consumer

    def remove(self, consumer: QueueConsumer) -> None:
        """Remove a consumer whose queue was left."""
        del self._by_name[consumer.name]

    def detach(self, consumer: QueueConsumer) -> None:
        """Keep a consumer whose queue counts as left, except for runs that were left behind and have not ended."""
        self._detached.append(consumer)

    def forget_detached(self, consumer: QueueConsumer) -> None:
        """Remove a detached consumer whose last run has ended."""
        self._detached.remove(consumer)

    @property
    def detached(self) -> Sequence[QueueConsumer]:
        """The consumers whose queues were left except for some runs."""
        return tuple(self._detached)

    def entered(self) -> list[QueueConsumer]:
        """Return the consumers whose queues are served now."""
        return [each for each in self if each.admission.was_admitted and not each.lifecycle.left.is_set()]

    def held(self) -> list[QueueConsumer]:
        """Return the consumers whose queues are served now, and the detached ones."""
        return [*self.entered(), *self._detached]

    def of(self, name: str) -> list[QueueConsumer]:
        """Return all consumers of this queue: the one that serves it, and the detached ones."""
        return [consumer for consumer in (*self, *self._detached) if consumer.name == name]

    def is_replaced(self, consumer: QueueConsumer) -> bool:
        """Return True if another consumer serves the queue that this one has left.

        Both receive each wake-up, but only one of them may request tasks. The server keeps only the reply to the worker's last
        request, for the case that this request is repeated.
        """
        return self._by_name.get(consumer.name) not in {None, consumer}

    def is_shared(self, consumer: QueueConsumer) -> bool:
        """Return True if another consumer of this peer has the same queue: it serves the queue again, or it is detached."""
        return any(other is not consumer for other in self.of(consumer.name))
