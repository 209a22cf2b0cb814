"""Leaving a queue: quiet, drain, cancel, give back, whoever asks for it and however often.

It runs in the engine, so that a caller who is cancelled meanwhile does not leave the queue half-way. `station.left` tells the
end; `station.hurry` makes it skip what is left of the grace.
"""

# The private fields of Context are hidden from users, not from its neighbours.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import trio

from worqr.errors import WorqrError
from worqr.peer.claiming import Station
from worqr.peer.claims import HandStation
from worqr.peer.membership import Membership
from worqr.peer.settling import Settler

logger: logging.Logger = logging.getLogger(__name__)

LEAVE_PATIENCE = 2.0
AWAY_PATIENCE = 0.1
"""Seconds to say good-bye, and to a server that has not heard us leave the queues."""
UNWIND = 1.0
"""Seconds that cancelled handlers have to unwind together, so that their tasks go back in one request and in order."""


class Leaving:
    """Lets stations leave. `heard` turns False when the server did not answer one of them: it may be gone."""

    def __init__(
        self, membership: Membership, settler: Settler, spawn: Callable[[Callable[[], Awaitable[Any]]], bool]
    ) -> None:
        self.heard: bool = True
        self._membership = membership
        self._settler = settler
        self._spawn = spawn

    def begin(self, station: Station, grace: float) -> None:
        """Leave a queue, in the engine; `station.left` tells when it is done. Twice is harmless."""
        if not station.quiet:
            station.quiet = True
            station.entering.cancel()
            if isinstance(station, HandStation):
                station.end_waiting()
            if not self._spawn(partial(self._leave, station, grace)):
                station.left.set()

    async def _leave(self, station: Station, grace: float) -> None:
        """Quiet, drain for `grace` or until somebody is in a hurry, cancel, give back."""
        try:
            if grace > 0 and not station.hurry.is_set():
                with trio.move_on_after(grace):
                    await _drain_or_hurry(station)
            station.hurry.set()
            await self._unwind(station)
            self._settler.flush()
            await self._membership.leave(station, LEAVE_PATIENCE)
        except WorqrError as error:
            self.heard = False
            logger.warning(
                "stop_work: queue %r: left without saying so, the others will notice: %s", station.name, error
            )
        finally:
            self._settler.left(station)
            for context in tuple(station.running.values()):
                context._cancel("lost")
                context._settled = True
                station.ended(context)
            station.left.set()

    async def _unwind(self, station: Station) -> None:
        """Cancel what runs, and wait for its end: a task that goes back may start elsewhere at once.

        What has unwound within `UNWIND` goes back in one script with all else that the worker holds, in its old order; nobody
        waits longer for a handler that takes its time. A claim by hand outside a block has nothing that could unwind.
        """
        station.unwinding = True
        station.cancel_running("leaving")
        with trio.move_on_after(UNWIND):
            await (station.wait_blocks() if isinstance(station, HandStation) else station.wait_idle())
        if not isinstance(station, HandStation) and station.running:
            station.unwinding = False
            self._settler.flush()
            await station.wait_idle()


async def _drain_or_hurry(station: Station) -> None:
    """Until nothing runs there any more, or somebody cannot wait."""
    async with trio.open_nursery() as nursery:

        async def idle() -> None:
            await station.wait_idle()
            nursery.cancel_scope.cancel()

        nursery.start_soon(idle)
        await station.hurry.wait()
        nursery.cancel_scope.cancel()
