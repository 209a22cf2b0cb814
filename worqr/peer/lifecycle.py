"""`Lifecycle`: the phases of a consumer, from its creation until its queue was left.

Not here: what happens in each phase when a consumer leaves (`consumer_runner`).
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from worqr.link import Subscription
    from worqr.peer.session import Registration


# `Admission`: under which worker id a queue has admitted a consumer, and whether its channels are subscribed.
#
# A peer that was declared dead registers again under a new worker id, and enters all its queues again under that id. An
# `Admission` belongs to the present id. Not here: entering a queue and leaving it (`consumer_runner`).


class Admission:
    """The registration under which a consumer serves its queue. Changed only in the loop.

    Attributes:
        registration: the registration under which the queue was entered, or is being entered.
        admitted: the queue lists the worker, so the consumer may request tasks.
        was_admitted: the queue has listed the worker once, under this registration or under an earlier one.
        leaving: the queue is being left, so it may list the worker no longer.
        subscription: the subscription of the consumer's channels.
        listening: the server has confirmed the subscription.
        mapped_on: the number of the connection on which the registry recorded that this worker serves the queue.
        checked_on: the number of the connection since which the consumer's claims agree with those of the server.
    """

    def __init__(self) -> None:
        self.registration: Registration | None = None
        self.admitted: bool = False
        self.was_admitted: bool = False
        self.leaving: bool = False
        self.subscription: Subscription | None = None
        self.listening: bool = False
        self.mapped_on: int = 0
        self.checked_on: int = 0

    @property
    def is_live(self) -> bool:
        """The queue lists the worker, and the worker is not known to be dead."""
        return self.admitted and self.registration is not None and not self.registration.dead

    def enter(self, registration: Registration, connection: int) -> None:
        """Begin to enter the queue under `registration`. The consumer requests no tasks until the queue lists the worker."""
        self.registration = registration
        self.admitted = False
        self.mapped_on = self.checked_on = connection

    def admit(self) -> None:
        """Store that the queue lists the worker."""
        self.admitted = self.was_admitted = True

    def subscribe(self, subscription: Subscription) -> None:
        """Store the subscription of the channels, which is not confirmed yet."""
        self.subscription = subscription

    def confirm(self) -> None:
        """Store that the server has confirmed the subscription, for the first time or on a new connection."""
        self.listening = True

    def leave(self) -> None:
        """Store that the queue is being left, and close the subscription."""
        self.leaving = True
        self.unsubscribe()

    def unsubscribe(self) -> None:
        """Close the subscription."""
        if self.subscription is not None:
            self.subscription.close()
            self.subscription = None
            self.listening = False

    def mapped(self, connection: int) -> None:
        """Store that the registry recorded on this connection that the worker serves the queue."""
        self.mapped_on = connection

    def checked(self, connection: int) -> None:
        """Store that the claims agreed with those of the server on this connection."""
        self.checked_on = connection


class Phase(IntEnum):
    """The phases of a consumer, in their order; `Lifecycle` has the table."""

    NEW = 0
    SERVING = 1
    DRAINING = 2
    STOPPING = 3
    CANCELLING = 4
    RETURNING = 5
    DETACHED = 6
    LEFT = 7


class Lifecycle:
    """The phase of one consumer. A phase is never followed by an earlier one. Changed only in the loop.

    ==========  ======================================  ========  =============  ==========  ================================
    phase       begins with                             requests  forwards       uses        claims that are stopped
                                                        tasks     a wake-up      replies
    ==========  ======================================  ========  =============  ==========  ================================
    NEW         its creation; also while it enters      no        no             no          -
    SERVING     `admitted`: its queue has admitted it   yes       yes            yes         go back at once
    DRAINING    `drain`: the queue is to be left        no        yes            yes         go back at once
    STOPPING    `skip_grace`: the grace is over         no        yes            no          go back at once
    CANCELLING  `cancel`: its runs are cancelled        no        yes            no          go back together with the queue
    RETURNING   `return_claims`: runs do not end, or    no        yes            no          go back at once
                another consumer has the queue
    DETACHED    `detach`: runs were left behind         no        yes            no          go back at once
    LEFT        `leave`: the queue was left             no        yes            no          nothing is stopped any more
    ==========  ======================================  ========  =============  ==========  ================================

    Every later phase can follow an earlier one directly. A call for the present phase or for an earlier one changes nothing.
    Requesting and forwarding also need a live registration that the queue has admitted. No wake-up arrives in LEFT, but one may
    be pending then.

    Attributes:
        phase: see the table.
        entering: the scope in which the queue is entered for the first time; cancelled by `drain`.
        grace_over: set from STOPPING on.
        left: set from DETACHED on. Calls that wait until the queue was left then continue.
        idle: set when the last run has ended and when a reply has arrived.
        rejected_claims: claims of replies that were not used. They go back together with the queue.
    """

    def __init__(self) -> None:
        self.phase: Phase = Phase.NEW
        self.entering: trio.CancelScope = trio.CancelScope()
        self.grace_over: trio.Event = trio.Event()
        self.left: trio.Event = trio.Event()
        self.idle: trio.Event = trio.Event()
        self.rejected_claims: list[int] = []

    @property
    def is_leaving(self) -> bool:
        """The consumer requests no more tasks."""
        return self.phase >= Phase.DRAINING

    @property
    def holds_stops(self) -> bool:
        """Claims that are stopped need no request of their own, because they go back together with the queue."""
        return self.phase is Phase.CANCELLING or self.phase is Phase.LEFT

    def admitted(self) -> None:
        """Begin SERVING: the queue has admitted the consumer."""
        self._advance(Phase.SERVING)

    def drain(self) -> bool:
        """Request no more tasks, and stop entering the queue. Return False if it was being left already."""
        if self.phase >= Phase.DRAINING:
            return False
        self.phase = Phase.DRAINING
        self.entering.cancel()
        return True

    def skip_grace(self) -> None:
        """End the grace of running tasks. Replies that arrive from now on are not used."""
        self._advance(Phase.STOPPING)
        self.grace_over.set()

    def cancel(self) -> None:
        """Begin CANCELLING: running tasks are cancelled now."""
        self._advance(Phase.CANCELLING)

    def return_claims(self) -> None:
        """Begin RETURNING: claims go back one by one from now on."""
        self._advance(Phase.RETURNING)

    def detach(self) -> None:
        """Begin DETACHED: the queue counts as left, except for runs that were left behind."""
        self._advance(Phase.DETACHED)
        self.left.set()

    def leave(self) -> None:
        """Begin LEFT: the queue was left."""
        self._advance(Phase.LEFT)
        self.left.set()

    def _advance(self, phase: Phase) -> None:
        if self.phase < phase:
            self.phase = phase

    def reject(self, claims: Iterable[int]) -> None:
        """Keep the claims of a reply that is not used."""
        self.rejected_claims += claims

    def take_rejected(self) -> list[int]:
        """Return the rejected claims, once."""
        rejected, self.rejected_claims = self.rejected_claims, []
        return rejected

    async def wait_idle(self) -> None:
        """Wait until the last run ends or a reply arrives."""
        self.idle = trio.Event()
        await self.idle.wait()
