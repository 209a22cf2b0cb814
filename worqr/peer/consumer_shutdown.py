"""Leaving a queue: stop claiming, drain, cancel, give back. Several callers may request it.

It runs in the engine, so that a caller who is cancelled meanwhile does not leave the queue half-way. `station.left` is set at
the end; `station.hurry` skips the rest of the grace. The caller waits for a server that does not reply for `LEAVE_PATIENCE`
only; the queue is left on the server as soon as the server replies again (`departures`).

A handler may ignore its cancellation. On the Trio loop the peer waits for it, and logs it now and then. In a thread or on the
asyncio loop it is left behind after `LET_GO`: callers that wait for the queue to be left go on. The run *lingers*: it keeps its
claim, and if it ends before the peer does, the claim is settled then and the queue left for good. Otherwise the peer ends like
a worker that dies, without deregistering. The leader then recovers the claim when the keepalive has expired. Until then the
handler may still run in a process that is about to end.
"""

# The private fields of Context are hidden from users, not from its neighbours.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from worqr.log_events import emit, emit_fields
from worqr.peer.claims import HandStation
from worqr.peer.consumer import Station
from worqr.peer.departures import Departure
from worqr.peer.session import Membership
from worqr.peer.settling import Settler
from worqr.peer.task_log import RUN

if TYPE_CHECKING:
    from worqr.peer.stuck_handlers import Stuck

logger: logging.Logger = logging.getLogger(__name__)

LEAVE_PATIENCE = 2.0
AWAY_PATIENCE = 0.1
"""Seconds to deregister, and to wait for a server that has not confirmed that the queues were left."""
UNWIND = 1.0
"""Seconds that cancelled handlers have to unwind together, so that their tasks go back in one request and in order."""
LET_GO = 5.0
"""Seconds after their cancellation until handlers in threads and on asyncio loops are left behind. With the default grace it
fits into Kubernetes's 30 s."""
REMIND = 30.0
"""Seconds between two reports of a handler on the loop that keeps the peer from leaving."""


class Leaving:
    """Lets stations leave. Changed only in the loop.

    Attributes:
        heard: False once the server did not reply to a request: it may be gone.
        lingering: stations that count as left, except for runs that were left behind and have not ended.
    """

    def __init__(
        self,
        membership: Membership,
        settler: Settler,
        stuck: Stuck,
        served: Callable[[], Iterable[Station]],
        spawn: Callable[[Callable[[], Awaitable[Any]]], bool],
    ) -> None:
        self.heard: bool = True
        self.lingering: list[Station] = []
        self._membership = membership
        self._settler = settler
        self._stuck = stuck
        self._served = served
        self._spawn = spawn

    def begin(self, station: Station, grace: float) -> None:
        """Leave a queue, in the engine; `station.left` is set when it is done. May be called twice."""
        if not station.quiet:
            station.quiet = True
            station.entering.cancel()
            if isinstance(station, HandStation):
                station.end_waiting()
            if not self._spawn(partial(self._leave, station, grace)):
                station.left.set()

    async def _leave(self, station: Station, grace: float) -> None:
        """Stop claiming, drain for `grace` or until `hurry` is set, cancel, give back."""
        try:
            if grace > 0 and not station.hurry.is_set():
                with trio.move_on_after(grace):
                    await _drain_or_hurry(station)
            station.hurry.set()
            await self._unwind(station)
            if stay := self._is_needed_by_another(station):
                self._give_back(station, station.running)
            self._settler.flush()
            if departure := self._membership.leave(station, stay=stay):
                await self._wait_gone(departure)
        finally:
            self._settler.left(station)
            for context in tuple(station.running.values()):
                context._cancel("lost")
                context._settled = True
                station.ended(context)
            station.left.set()

    async def _wait_gone(self, departure: Departure) -> None:
        """Wait while the server replies. If it does not, the queue counts as left here; the departure goes on by itself."""
        while not departure.done.is_set() and departure.refused is None:
            answers = departure.answers
            with trio.move_on_after(LEAVE_PATIENCE):
                await departure.done.wait()
            if departure.answers == answers and not departure.done.is_set():
                self.heard = False
                text = "queue %(queue)r: the server has not answered for %(duration)g s; its tasks are given back when it does"
                emit(logger, "leave.unanswered", text, queue=departure.keys.shown, duration=LEAVE_PATIENCE)
                return

    async def _unwind(self, station: Station) -> None:
        """Cancel running tasks, and wait for their end: a task that goes back may start elsewhere at once.

        Runs that end within `UNWIND` go back in one script with all other claims of the worker, in their old order. Slower
        handlers are not waited for. A claim by hand outside a block has nothing to unwind.
        """
        station.unwinding = True
        station.cancel_running("leaving")
        with trio.move_on_after(UNWIND):
            await (station.wait_blocks() if isinstance(station, HandStation) else station.wait_idle())
        if not isinstance(station, HandStation) and station.running:
            station.unwinding = False
            self._settler.flush()
            await self._outwait(station)

    async def _outwait(self, station: Station) -> None:
        """Wait for handlers that do not unwind; leave them behind if that is possible."""
        report_at = 0.0
        while True:
            with trio.move_on_after(LET_GO - UNWIND):
                await station.wait_idle()
                return
            runs = [context._elsewhere for context in station.running.values()]
            free = all(run is not None and run.can_be_let_go for run in runs)
            if free or trio.current_time() >= report_at:
                report_at = trio.current_time() + REMIND
                self._report(
                    station, "the queue is left without it" if free else "the worker cannot leave before it does"
                )
            if free:
                await self._linger(station)
                return

    def _report(self, station: Station, what: str) -> None:
        """Log each handler that still runs."""
        for context in station.running.values():
            fields = {**self._stuck.fields(context), "reason": what}
            text = f"{RUN}: %(handler)s was cancelled, but does not end; %(reason)s; it is at\n%(where)s"
            emit_fields(logger, "task.unending", text, fields)

    async def _linger(self, station: Station) -> None:
        """The queue counts as left, except for the runs that remain there. Returns when they have ended."""
        self.lingering.append(station)
        station.left.set()
        while station.running:
            self._give_back(station)
            station.idle = trio.Event()
            await station.idle.wait()
        self.lingering.remove(station)

    def _give_back(self, station: Station, held: Iterable[int] = ()) -> None:
        """Give back one by one the claims that would go back with the queue: it is not left yet."""
        station.unwinding = False
        claims = {*station.turned_away, *held}
        station.turned_away.clear()
        registration = station.registration
        if registration is not None and not registration.dead:
            self._membership.settles.give_back(station.keys, registration, claims)

    def _is_needed_by_another(self, station: Station) -> bool:
        """Another station of this peer has the same queue: it is served again, or runs linger there."""
        others = [*self._served(), *self.lingering]
        return any(other.name == station.name and other is not station for other in others)

    def holds_claims(self) -> bool:
        """Runs that were left behind hold claims of the present registration."""
        present = self._membership.registration
        return any(c._registration is present for station in self.lingering for c in station.running.values())

    def let_go(self) -> None:
        """The peer ends: stop waiting for runs that were left behind. The leader recovers their claims."""
        for station in self.lingering:
            for context in station.running.values():
                context._settled = True
                if context._elsewhere is not None:
                    context._elsewhere.let_go()


async def _drain_or_hurry(station: Station) -> None:
    """Wait until nothing runs there any more, or `hurry` is set."""
    async with trio.open_nursery() as nursery:

        async def idle() -> None:
            await station.wait_idle()
            nursery.cancel_scope.cancel()

        nursery.start_soon(idle)
        await station.hurry.wait()
        nursery.cancel_scope.cancel()
