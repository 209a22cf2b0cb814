"""The queues that a peer serves now. `stationed` enters one for the length of a block; the worker id may change meanwhile."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

from worqr.errors import ClaimLost, UsageError
from worqr.keys import QueueKeys
from worqr.peer.consumer_shutdown import Leaving
from worqr.peer.scheduler import Capacity

if TYPE_CHECKING:
    from worqr.peer.consumer import Station
    from worqr.peer.session import Membership
    from worqr.peer.settings import PeerSettings


class Stations:
    """The stations of one peer, by the names of their queues; a queue of several shards has one for each. `closed`: the peer
    leaves. Changed only in the loop.
    """

    def __init__(self, settings: PeerSettings, membership: Membership, capacity: Capacity, leaver: Leaving) -> None:
        self.closed: bool = False
        self._prefix = settings.prefix
        self._sharding = settings.sharding
        self.membership: Membership = membership
        self.capacity: Capacity = capacity
        self._leaver = leaver
        self._by_name: dict[str, Station] = {}
        self.used: trio.Event = trio.Event()
        """A queue is, or was, served."""

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[Station]:
        """Iterate over a copy: stations are added and removed."""
        return iter(tuple(self._by_name.values()))

    def get(self, queue: str) -> Station | None:
        """The station of `queue`, if it is served here."""
        return self._by_name.get(queue)

    async def check_free(self, queue: str) -> tuple[QueueKeys, ...]:
        """The keys of all shards of `queue`; UsageError if the peer cannot serve it, or does already."""
        keys = QueueKeys.of(self._prefix, queue)
        shards = (keys,) if self._sharding is None else await self._sharding.of(keys)
        if self.closed:
            raise UsageError(f"queue {queue!r}: this peer has left the mesh; join again for another one")
        if any(keys.name in self._by_name for keys in shards):
            raise UsageError(
                f"queue {queue!r} is served by this peer already; use one handler with a higher concurrency"
            )
        return shards

    @asynccontextmanager
    async def stationed(self, stations: Sequence[Station]) -> AsyncGenerator[None]:
        """Serve a queue, all shards of it, for the length of a block."""
        here: list[Station] = []
        try:
            for station in stations:
                self.capacity.add(station)
                self._by_name[station.name] = station
                here.append(station)
            self.used.set()
            if self.closed:  # the peer was drained after `check_free`, while it entered another queue
                for station in here:
                    self._leaver.begin(station, 0)
            await self._enter_all(stations)
            yield
        finally:
            with trio.CancelScope(shield=True):
                for station in here:
                    station.hurry.set()
                    self._leaver.begin(station, 0)
                for station in here:
                    await station.left.wait()
                    self.capacity.remove(station)
                    del self._by_name[station.name]

    async def _enter_all(self, stations: Sequence[Station]) -> None:
        """Enter them all at once; raise the first error, if there is one."""
        errors: list[Exception] = []

        async def enter(station: Station) -> None:
            try:
                with station.entering:  # cancelled when the peer leaves meanwhile
                    await self._enter(station)
            except Exception as error:
                errors.append(error)
                nursery.cancel_scope.cancel()

        if len(stations) == 1:
            with stations[0].entering:
                await self._enter(stations[0])
            return
        async with trio.open_nursery() as nursery:
            for station in stations:
                nursery.start_soon(enter, station)
        if errors:
            raise errors[0]

    async def _enter(self, station: Station) -> None:
        while True:
            registration = await self.membership.registered()
            try:
                await self.membership.enter(station, registration)
            except ClaimLost:
                continue
            return
