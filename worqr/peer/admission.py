"""`Admission`: under which worker id a queue has admitted a consumer, and whether its channels are subscribed.

A peer that was declared dead registers again under a new worker id, and enters all its queues again under that id. An `Admission`
belongs to the present id. Not here: entering a queue (`consumer_startup`) and leaving it (`consumer_shutdown`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worqr.link import Subscription
    from worqr.peer.registration import Registration


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
