"""`WorkMapRefresher`: sends the queues that this worker serves to the registry, after each new connection.

A registry that failed over to a replica may have lost its last writes, for example a map_work. Then the leader would not recover
the claims of this queue if the worker died. So after each new connection, map_work is sent once more for every queue that the
worker serves. Queues where runs were left behind are included. A refused map_work is repeated, with growing pauses, until the
server accepts it.

Invariant: no map_work is sent for a queue between its unmap_work and the reply to that (`Departures.is_open`). An earlier
map_work reaches the same node first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from worqr import ops
from worqr.errors import ClaimLost
from worqr.keys import RegistryKeys
from worqr.link import Link
from worqr.peer.aligned_sleep import sleep_aligned
from worqr.peer.consumer import QueueConsumer
from worqr.peer.consumers import ActiveConsumers
from worqr.peer.departures import Departures
from worqr.peer.error_throttle import ErrorThrottle
from worqr.peer.registration import Registration

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
