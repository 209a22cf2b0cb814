"""The place of a consumer in its queue: the worker id under which it was admitted, and its channels.

A peer that was declared dead registers again under a new worker id, and enters all its queues again under that id. `Admission`
is what is known of the present id. Entering and leaving a queue is in `worqr.peer.consumer_startup`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worqr.link import Subscription
    from worqr.peer.registration import Registration


class Admission:
    """Under which registration a consumer serves its queue. Changed only in the loop.

    Attributes:
        registration: the registration under which the queue was entered, or is being entered.
        admitted: the queue lists the worker: it may request tasks.
        was_admitted: the queue has listed the worker once, under this registration or under an earlier one.
        subscription: its channels.
        listening: the server has confirmed the subscription.
        mapped_on: the number of the connection on which the registry was told that this worker serves the queue.
        checked_on: the number of the connection since which its claims are known to agree with those of the server.
    """

    def __init__(self) -> None:
        self.registration: Registration | None = None
        self.admitted: bool = False
        self.was_admitted: bool = False
        self.subscription: Subscription | None = None
        self.listening: bool = False
        self.mapped_on: int = 0
        self.checked_on: int = 0

    @property
    def is_live(self) -> bool:
        """The queue lists the worker, and the worker is not known to be dead."""
        return self.admitted and self.registration is not None and not self.registration.dead

    def enter(self, registration: Registration, connection: int) -> None:
        """The queue is entered under `registration`: nothing is requested before the queue lists it."""
        self.registration = registration
        self.admitted = False
        self.mapped_on = self.checked_on = connection

    def admit(self) -> None:
        """The queue lists the worker."""
        self.admitted = self.was_admitted = True

    def subscribe(self, subscription: Subscription) -> None:
        """Its channels are being subscribed."""
        self.subscription = subscription

    def confirm(self) -> None:
        """The server has confirmed the subscription, for the first time or on a new connection."""
        self.listening = True

    def unsubscribe(self) -> None:
        """Close its channels."""
        if self.subscription is not None:
            self.subscription.close()
            self.subscription = None
            self.listening = False

    def mapped(self, connection: int) -> None:
        """The registry was told on this connection that the worker serves the queue."""
        self.mapped_on = connection

    def checked(self, connection: int) -> None:
        """The claims agreed with those of the server on this connection."""
        self.checked_on = connection
