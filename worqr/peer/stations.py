"""The queues that a peer serves now: entering one for the length of a block, whoever dies or leaves meanwhile."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

from worqr.errors import ClaimLost, UsageError
from worqr.keys import QueueKeys
from worqr.peer.capacity import Capacity
from worqr.peer.leaving import Leaving

if TYPE_CHECKING:
    from worqr.peer.claiming import Station
    from worqr.peer.membership import Membership


class Stations:
    """The stations of one peer, by the names of their queues. `closed`: the peer leaves. Changed only in the loop."""

    def __init__(self, prefix: str, membership: Membership, capacity: Capacity, leaver: Leaving) -> None:
        self.closed: bool = False
        self._prefix = prefix
        self._membership = membership
        self._capacity = capacity
        self._leaver = leaver
        self._by_name: dict[str, Station] = {}
        self.used: trio.Event = trio.Event()
        """Some queue is, or was, served."""

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[Station]:
        """Over a copy: they come and go."""
        return iter(tuple(self._by_name.values()))

    def get(self, queue: str) -> Station | None:
        """The station of `queue`, if it is served here."""
        return self._by_name.get(queue)

    def check_free(self, queue: str) -> QueueKeys:
        """The keys of `queue`; UsageError if the peer cannot serve it, or does already."""
        if self.closed:
            raise UsageError(f"queue {queue!r}: this peer has left the mesh; join again for another one")
        if queue in self._by_name:
            raise UsageError(
                f"queue {queue!r} is served by this peer already; use one handler with a higher concurrency"
            )
        return QueueKeys.of(self._prefix, queue)

    @asynccontextmanager
    async def stationed(self, station: Station) -> AsyncGenerator[None]:
        """Serve a queue for the length of a block."""
        self._capacity.add(station)
        self._by_name[station.name] = station
        self.used.set()
        try:
            with station.entering:  # cancelled when the peer leaves meanwhile
                await self._enter(station)
            yield
        finally:
            with trio.CancelScope(shield=True):
                station.hurry.set()
                self._leaver.begin(station, 0)
                await station.left.wait()
                self._capacity.remove(station)
                del self._by_name[station.name]

    async def _enter(self, station: Station) -> None:
        while True:
            registration = await self._membership.registered()
            try:
                await self._membership.enter(station, registration)
            except ClaimLost:
                continue
            return
