"""Buffers claims until `Claims` takes them: one desk for a queue with all its shards.

Claims are requested from one shard first, and from the next if that one had too few. So no more tasks are claimed than calls
wait for. A call that waits is woken when claims have come, or when no more will come.
"""

# The private fields of Context are hidden from users, not from its neighbours.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import trio

from worqr.ops import Result

if TYPE_CHECKING:
    from worqr.peer.claims import Claim, HandStation


class Desk:
    """The claims of one queue that are ready to be taken, and the calls that wait for claims. Changed only in the loop.

    Attributes:
        stations: of all shards; each adds itself when it is made.
        ready: claims that were not taken yet.
        reserved: claims that the stations are requesting.
    """

    def __init__(self) -> None:
        self.stations: list[HandStation] = []
        self.ready: deque[Claim] = deque()
        self._asked: dict[object, int] = {}
        self._arrived = trio.Event()

    @property
    def queue(self) -> str:
        """The queue's name."""
        return self.stations[0].queue

    @property
    def quiet(self) -> bool:
        """The queue is being left: no claims will come any more."""
        return all(station.quiet for station in self.stations)

    @property
    def wanted(self) -> int:
        """The number of claims that calls of `take` wait for, beyond those that are ready and those that are requested."""
        asked = sum(self._asked.values()) - len(self.ready) - sum(station.reserved for station in self.stations)
        return max(0, asked)

    @property
    def is_asked(self) -> bool:
        """A call waits for claims."""
        return bool(self._asked)

    def put(self, claims: Iterable[Claim]) -> None:
        """Add claims, and wake a call that waits."""
        self.ready.extend(claims)
        self._arrived.set()

    def put_back(self, claims: Sequence[Claim]) -> None:
        """Put claims back that were not taken: the next call gets them first."""
        for claim in reversed(claims):
            station = station_of(claim)
            if not station.quiet:
                self.ready.appendleft(claim)
            elif not claim._settled:
                station.give_back([claim])
        self._arrived.set()

    def clear(self, station: HandStation) -> None:
        """Give back the claims of this shard that were not taken, and wake all calls that wait: no more will come from it."""
        mine = [claim for claim in self.ready if station_of(claim) is station]
        self.ready = deque(claim for claim in self.ready if station_of(claim) is not station)
        station.give_back(mine)
        self._arrived.set()

    async def collect(self, n: int) -> list[Claim]:
        """Return 1 to n claims, as soon as there is one; none once the peer leaves."""
        key = object()
        await trio.lowlevel.checkpoint()
        try:
            while not self.ready:
                if self.quiet:
                    return []
                self._asked[key] = n
                self._arrived = trio.Event() if self._arrived.is_set() else self._arrived
                self.stations[0].claim()
                await self._arrived.wait()
            return [self.ready.popleft() for _ in range(min(n, len(self.ready)))]
        finally:
            self._asked.pop(key, None)

    async def finish(self, claims: Sequence[Claim], results: Mapping[int, Result] | None = None) -> list[Claim]:
        """Finish claims of all shards together; return those that were lost, or raise the first error."""
        by_station: dict[HandStation, list[Claim]] = {}
        for claim in claims:
            by_station.setdefault(station_of(claim), []).append(claim)
        lost: list[Claim] = []
        errors: list[Exception] = []

        async def finish(station: HandStation, some: Sequence[Claim]) -> None:
            try:
                lost.extend(await station.finish(some, results))
            except Exception as error:
                errors.append(error)

        if len(by_station) == 1:
            return await station_of(claims[0]).finish(claims, results)
        async with trio.open_nursery() as nursery:
            for station, some in by_station.items():
                nursery.start_soon(finish, station, some)
        if errors:
            raise errors[0]
        return lost


def station_of(claim: Claim) -> HandStation:
    """The station of this claim."""
    return cast("HandStation", claim._station)
