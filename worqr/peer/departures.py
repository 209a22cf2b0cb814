"""`Departures`: leaves queues on the server. It sends stop_work, then unmap_work, until the server has accepted both.

A departure belongs to a registration. It runs in the engine instead of the caller. A caller waits for a limited time, and the
departure continues until the registration ends. The link repeats its requests over lost connections. Requests that the server
refuses are repeated here, with growing pauses. If the registration is declared dead, the leader gives the claims back.

Invariant: stop_work gives back *all* claims that the worker holds on a queue. So nothing may be claimed there between the first
stop_work of a departure and the reply to its last one. `ConsumerStartup.enter` waits for the departure of the same queue before
it sends start_work (see `wait_left`). A consumer begins no departure while another consumer of this peer has the queue. Then its
claims go back one by one, by their ids.

Settles come first: stop_work is sent when the server has replied to every settle of the queue. Otherwise a finished task could go
back with the queue because its finish came later. A settle that the server refuses is tried once more. If the server refuses it
again, its task goes back with the queue and runs again.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import trio

from worqr import ops
from worqr.errors import ClaimLost, Unavailable
from worqr.keys import QueueKeys, RegistryKeys
from worqr.link import Link
from worqr.log_events import emit
from worqr.peer.error_throttle import ErrorThrottle
from worqr.peer.session import Registration
from worqr.peer.settles import FIRST_PAUSE, LONGEST_PAUSE, Settles
from worqr.script_call import Call

logger: logging.Logger = logging.getLogger(__name__)

T = TypeVar("T")


class Departure:
    """One queue that one registration leaves.

    Attributes:
        done: set when the queue was left, or the registration was declared dead.
        answers: the number of replies from the server.
        refused: the last refusal, if the server refuses the request.
    """

    def __init__(self, registration: Registration, keys: QueueKeys) -> None:
        self.registration: Registration = registration
        self.keys: QueueKeys = keys
        self.done: trio.Event = trio.Event()
        self.answers: int = 0
        self.refused: Exception | None = None

    def answered(self) -> None:
        """Count a reply from the server."""
        self.answers += 1

    def refuse(self, failure: Exception | None) -> None:
        """Store that the server refuses the request."""
        self.refused = failure


class Departures:
    """The departures of one peer that are under way. Changed only in the loop."""

    def __init__(
        self, link: Link, keys: RegistryKeys, settles: Settles, spawn: Callable[[Callable[[], Awaitable[Any]]], bool]
    ) -> None:
        self._link = link
        self._keys = keys
        self._settles = settles
        self._spawn = spawn
        self._open: dict[tuple[Registration, str], Departure] = {}
        self._throttle = ErrorThrottle(logger)

    def begin(self, keys: QueueKeys, registration: Registration) -> Departure:
        """Begin to leave a queue, in the engine. If a departure is under way already, return that one."""
        place = registration, keys.name
        departure = self._open.get(place)
        if departure is None:
            departure = self._open[place] = Departure(registration, keys)
            if not self._spawn(partial(self._leave, departure)):
                self._end(departure)
        return departure

    def is_open(self, registration: Registration, name: str) -> bool:
        """Return True while `registration` leaves this queue."""
        return (registration, name) in self._open

    async def wait_left(self, keys: QueueKeys, registration: Registration) -> None:
        """Wait until no departure of this queue is under way.

        Raises:
            Unavailable: the server has not accepted it within the mesh's patience.
        """
        departure = self._open.get((registration, keys.name))
        if departure is None:
            return
        patience = self._link.settings.patience
        with trio.move_on_after(patience):
            await departure.done.wait()
        if not departure.done.is_set():
            why = f": {departure.refused}" if departure.refused is not None else ""
            raise Unavailable(
                f"queue {keys.display_name!r}: this worker left it before, and the server has not accepted that within "
                f"{patience:g} s{why}"
            )

    async def _leave(self, departure: Departure) -> None:
        keys, worker = departure.keys, departure.registration.worker
        try:
            await self._settles.wait_answered(keys.name)
            while (await self._send_until_accepted(departure, partial(ops.stop_work, keys, worker))).more:
                pass
            self._settles.drop(keys.name)
            await self._send_until_accepted(departure, partial(ops.unmap_work, self._keys, worker, keys.name))
        except ClaimLost:
            pass  # the leader gives back its claims
        finally:
            self._end(departure)

    def _end(self, departure: Departure) -> None:
        self._open.pop((departure.registration, departure.keys.name), None)
        departure.done.set()

    async def _send_until_accepted(self, departure: Departure, make: Callable[[], Call[T]]) -> T:
        """Send a request until the server accepts it.

        Raises:
            ClaimLost: the registration was declared dead.
        """
        pause, queue = FIRST_PAUSE, departure.keys.display_name
        while True:
            value, failure = await self._send(departure, make())
            departure.answered()
            if value is not None:
                if self._throttle.resolve(queue):
                    emit(
                        logger,
                        "leave.accepted",
                        "queue %(queue)r: the server lets this worker leave again",
                        queue=queue,
                    )
                return value
            if departure.registration.dead or isinstance(failure, ClaimLost):
                raise ClaimLost(f"worker {departure.registration.worker} died while it left queue {queue!r}")
            departure.refuse(failure)
            text = "queue %(queue)r: the server does not let this worker leave, trying again: %(error)s"
            self._throttle.error(queue, "leave.refused", text, queue=queue, error=str(failure))
            await trio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _send(self, departure: Departure, call: Call[T]) -> tuple[T | None, Exception | None]:
        answered = trio.Event()
        answers: list[tuple[T | None, Exception | None]] = []

        def deliver(value: T | None, failure: Exception | None) -> None:
            answers.append((value, failure))
            answered.set()

        self._link.post(call, deliver, owner=departure.registration)
        await answered.wait()
        return answers[0]
