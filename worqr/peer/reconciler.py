"""Strays: claims that the server lists for this worker but that the worker has settled, because the server lost the settle.

A server may lose its latest writes: in a failover to a replica that had not received them, or by a crash before they were on
disk. It then lists claims of ours that ended long ago. The leader does not recover them, because their worker is alive. So
after each new connection the worker asks, for every queue, which claims it holds, and gives back the unknown ones: those tasks
run once more. The opposite case, claims of ours that the server lost, is handled in `cancelling`.

A claim is not a stray if it runs, also where a queue was left, or if the server has not accepted its settle yet.
The worker asks while no start is under way, so that the reply has no claim whose own reply is still unread. A stray must be
found twice, a second apart, because on a cluster requests may overtake each other while slots move.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from worqr import ops
from worqr.link import Link
from worqr.log_events import emit
from worqr.peer.in_step import next_step

if TYPE_CHECKING:
    from worqr.peer.consumer import Station
    from worqr.peer.engine import Engine
    from worqr.peer.session import Registration
    from worqr.peer.settling import Settler

logger: logging.Logger = logging.getLogger(__name__)

LOOK_EVERY = 1.0


class Strays:
    """Looks for them, for one peer. Changed only in the loop."""

    def __init__(self, engine: Engine, link: Link, settler: Settler) -> None:
        self._engine = engine
        self._link = link
        self._settler = settler
        self._asking: set[Station] = set()
        self._seen: dict[Station, set[int]] = {}

    async def look_forever(self) -> None:
        """After each new connection, ask until every queue is free of strays."""
        while True:
            await next_step(LOOK_EVERY)
            stations = self._engine.entered_stations()
            self._seen = {station: seen for station, seen in self._seen.items() if station in stations}
            for station in stations:
                station.looks_for_strays = station.compared_at != self._link.connections
                self.look(station)

    def look(self, station: Station) -> None:
        """Ask for the claims there, if there is reason to; if a start is under way, its reply calls again. Never waits."""
        registration = station.registration
        if not station.looks_for_strays or station in self._asking or station.hurry.is_set():
            return
        if registration is None or registration.dead or not station.in_fence:
            return
        if station.asking:
            station.hinted = True
            return
        station.looks_for_strays = False
        self._asking.add(station)
        connections = self._link.connections
        call = ops.list_own_claims(station.keys, registration.worker)
        self._link.post(call, partial(self._answered, station, registration, connections), owner=registration)

    def _answered(
        self,
        station: Station,
        registration: Registration,
        connections: int,
        held: list[int] | None,
        failure: Exception | None,
    ) -> None:
        self._asking.discard(station)
        seen = self._seen.pop(station, set())
        if registration.dead or registration is not station.registration:
            return
        if failure is not None:
            # `cancelling` logs the same refusal, of its own request, as an error
            emit(logger, "list_own_claims", "queue %(queue)r: %(error)s", queue=station.queue, error=str(failure))
            return
        if held is None:
            self._engine.membership.lost(registration, f"it was removed from the workers of queue {station.queue!r}")
            return
        strange = set(held) - self._engine.claims_of(station.name)
        if not strange:
            station.compared_at = connections
        elif strays := strange & seen:
            text = "queue %(queue)r: the server forgot how %(count)d runs ended; their tasks are given back, and run once more"
            emit(logger, "claim.stray", text, queue=station.queue, count=len(strays))
            self._settler.give_back(station, strays)
        self._seen[station] = strange
