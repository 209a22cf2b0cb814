"""Sends the registry, after each new connection, the queues that this worker serves.

A registry that failed over to a replica may have lost its last writes, a map_work among them. The worker then serves a
queue whose claims would not be recovered if it died. So after each new connection map_work is sent once more for every queue
that is served, or where runs were left behind. It is repeated, with growing pauses, until the server accepts it.

Invariant: no map_work is sent for a queue between its unmap_work and the reply to that (`Departures.is_open`). A map_work that
was sent before reaches the same node first.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from worqr import ops
from worqr.errors import ClaimLost
from worqr.link import Link
from worqr.peer.complaints import Complaints
from worqr.peer.in_step import next_step

if TYPE_CHECKING:
    from worqr.peer.consumer import Station
    from worqr.peer.engine import Engine
    from worqr.peer.session import Registration

logger: logging.Logger = logging.getLogger(__name__)

LOOK_EVERY = 2.0
LONGEST_PAUSE = 30.0
"""Seconds between checks for a new connection; doubled after each refusal, up to the second value."""


class Mapping:
    """Does so for one peer. Changed only in the loop."""

    def __init__(self, engine: Engine, link: Link) -> None:
        self._engine = engine
        self._link = link
        self._asking: set[Station] = set()
        self._refused = False
        self._complaints = Complaints(logger)

    async def map_forever(self) -> None:
        """Look for new connections."""
        pause = LOOK_EVERY
        while True:
            await next_step(pause)
            pause = min(2 * pause, LONGEST_PAUSE) if self._refused else LOOK_EVERY
            self.map_once()

    def map_once(self) -> None:
        """Send every queue that was not sent to the registry since the newest connection. Never waits."""
        self._refused = False
        connections = self._link.connections
        for station in self._engine.held_stations():
            registration = station.registration
            if station.mapped_at == connections or station in self._asking or registration is None or registration.dead:
                continue
            if self._engine.membership.departures.is_open(registration, station.name):
                continue  # unmap_work may be on its way
            self._asking.add(station)
            call = ops.map_work(self._engine.membership.keys, registration.worker, station.name)
            self._link.post(call, partial(self._answered, station, registration, connections), owner=registration)

    def _answered(
        self,
        station: Station,
        registration: Registration,
        connections: int,
        word: str | None,
        failure: Exception | None,
    ) -> None:
        self._asking.discard(station)
        if word == "dead":
            self._engine.membership.lost(registration, "it is not registered any more")
        elif failure is None:
            station.mapped_at = connections
            self._complaints.resolve(station.name)
        elif not isinstance(failure, ClaimLost):
            self._refused = True
            text = "queue %(queue)r: the server does not record that this worker serves it, trying again: %(error)s"
            self._complaints.error(station.name, "map_work", text, queue=station.queue, error=str(failure))
