"""`Units`: what a consumer uses of the scheduler. `ListUnits` is the form for list handlers, whose runs take several claims.

A run takes the units of its handler, however many claims it has. So the units of a list handler are counted in list runs: one
run for up to `batch_size` claims, and none for claims that are added to a run that waits for more.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Protocol

from worqr.peer.list_gatherer import ListGatherer
from worqr.peer.list_run import ListRun
from worqr.peer.scheduler import Share


class Units(Protocol):
    """The units of a peer, for one consumer. See `worqr.peer.scheduler.Scheduler`, which is one."""

    @property
    def dispatch_soon(self) -> Callable[[], None]:
        """Called when units have become free."""
        ...

    def check_fits(self, queue: str, size: int) -> None: ...
    def begin_wanting(self, share: Share) -> None: ...
    def reserve(self, share: Share, n: int) -> None: ...
    def take(self, share: Share, n: int, *, first: bool) -> None: ...
    def release(self, share: Share, fence: int, last: bool) -> None: ...
    def release_early(self, share: Share, fence: int, *, place: bool) -> None: ...
    def dispatch(self) -> None: ...


class ListUnits:
    """The units of one consumer of a list handler. `reserve` and `take` get numbers of claims, as of every consumer."""

    def __init__(self, scheduler: Units, gatherer: ListGatherer) -> None:
        self._scheduler = scheduler
        self._gatherer = gatherer
        self._reserved = 0
        self._granted = 0

    @property
    def dispatch_soon(self) -> Callable[[], None]:
        """Called when units have become free."""
        return self._scheduler.dispatch_soon

    def check_fits(self, queue: str, size: int) -> None:
        """Raise UsageError if a run of `size` units of `queue` would never fit."""
        self._scheduler.check_fits(queue, size)

    def begin_wanting(self, share: Share) -> None:
        """Note that the consumer has a reason to request tasks again."""
        self._scheduler.begin_wanting(share)

    def dispatch(self) -> None:
        """Let the consumers of the peer request tasks for the free units."""
        self._scheduler.dispatch()

    def reserve(self, share: Share, n: int) -> None:
        """Note that `n` more claims are being requested, some of them for the run that waits. Less than 0: the reply is there."""
        if n > 0:
            self._reserved = ceil(max(0, n - self._gatherer.room) / self._gatherer.size)
            self._scheduler.reserve(share, self._reserved)
        else:
            self._granted, self._reserved = self._reserved, 0
            self._scheduler.reserve(share, -self._granted)

    def take(self, share: Share, n: int, *, first: bool) -> None:
        """Do nothing: `take_for` takes the units of a list run."""

    def take_granted(self, share: Share) -> None:
        """Take the units that the reply was for, for as many runs. Other runs wait for a turn of their consumer."""
        for run in self._gatherer.without_units()[: self._granted]:
            self.take_for(run, share)
        self._granted = 0

    def take_for(self, run: ListRun, share: Share) -> None:
        """Take the units of one list run."""
        self._scheduler.take(share, 1, first=share.held == 0)
        run.reserve_units()

    def release(self, share: Share, fence: int, last: bool) -> None:
        """Release the units of a list run, whose first claim was `fence`."""
        self._scheduler.release(share, fence, last)

    def release_early(self, share: Share, fence: int, *, place: bool) -> None:
        """Release the units of a list run that is stuck; see `Scheduler.release_early`."""
        self._scheduler.release_early(share, fence, place=place)
