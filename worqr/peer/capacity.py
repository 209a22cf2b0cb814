"""Capacity: how many tasks a peer runs at once, and whose turn it is when room becomes free."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worqr.peer.claiming import Station


class Capacity:
    """The room of one peer, shared by its stations in turn. Changed only in the loop."""

    def __init__(self, concurrency: int) -> None:
        self.concurrency = concurrency
        self.running: int = 0
        self._reserved = 0
        self._stations: deque[Station] = deque()
        self._offering = False
        self.offer_soon: Callable[[], None] = self.offer

    @property
    def room(self) -> int:
        """How many more tasks could be claimed now; what is asked for already is not counted twice."""
        return self.concurrency - self.running - self._reserved

    def reserve(self, n: int) -> None:
        """`n` more (or fewer) are asked for."""
        self._reserved += n

    def take(self, n: int) -> None:
        """`n` more (or fewer) are held."""
        self.running += n

    def add(self, station: Station) -> None:
        self._stations.append(station)

    def remove(self, station: Station) -> None:
        self._stations.remove(station)

    def offer(self) -> None:
        """Let the stations ask for what room there is; who asked first now is last next time."""
        if self._offering:
            return
        self._offering = True
        try:
            for _ in range(len(self._stations)):
                if self.room <= 0:
                    break
                station = self._stations[0]
                self._stations.rotate(-1)
                station.claim()
            for station in self._stations:
                station.pass_on()
        finally:
            self._offering = False
