"""`Subscription`: some channels, the callbacks for their messages, and the wait until the channels are confirmed.

Not here: the connection (`subscriptions`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from worqr.errors import UsageError, WorqrError
from worqr.link.driver import BUG, Driver, Waiter, copy_of, wake_all
from worqr.link.pubsub_state import Listener
from worqr.log_events import emit

logger: logging.Logger = logging.getLogger(__name__)


class Hub(Protocol):
    """The object that opened a subscription."""

    driver: Driver
    ended: WorqrError | None

    def forget(self, subscription: Subscription) -> None:
        """Remove the subscription's listener."""
        ...


class ListenerOwner(Protocol):
    """The connection of some subscriptions."""

    def let_go(self, listener: SubscriptionListener) -> None:
        """Remove one listener."""
        ...


class Subscription:
    """Some channels, and the callbacks for their messages. Created by `Subscriptions.open`; all methods belong to the loop.

    Attributes:
        channels: their names, each once; at least one.
        listener: the listener of the connection. Set when the subscription is opened, and replaced when its channels move to
            another node.
    """

    def __init__(
        self,
        hub: Hub,
        channels: Iterable[str],
        deliver: Callable[[str, bytes], object],
        confirmed: Callable[[], object],
    ) -> None:
        self.channels: tuple[str, ...] = tuple(dict.fromkeys(channels))
        if not self.channels:
            raise UsageError("a subscription needs at least one channel")
        self.listener: SubscriptionListener | None = None
        self._hub = hub
        self._deliver = deliver
        self._confirmed = confirmed
        self._closed = False
        self._stood = False
        self._error: Exception | None = None
        self._waiters: list[Waiter] = []

    def move_to(self, hub: ListenerOwner) -> tuple[SubscriptionListener, SubscriptionListener | None]:
        """Return the listener for the connection of `hub`, which is used from now on, and the one before it."""
        before, self.listener = self.listener, SubscriptionListener(self, hub)
        return self.listener, before

    async def wait_confirmed(self) -> None:
        """Return when all channels have been subscribed once.

        Waits through outages: put a deadline around it.

        Raises:
            RefusedByServer: the user has no permission for one of the channels.
            Unavailable: the link was closed.
        """
        driver, waiter = self._hub.driver, Waiter()
        await driver.prepare(waiter)
        self._waiters.append(waiter)  # before the check: in a plain thread the confirmation may come meanwhile
        if not self._stood and self._error is None and self._hub.ended is None:
            await driver.wait(waiter)
        error = self._error or (None if self._stood else self._hub.ended)
        if error is not None:
            raise copy_of(error)

    def close(self) -> None:
        """Receive no more messages. Channels without another subscription are unsubscribed. Idempotent."""
        if not self._closed:
            self._closed = True
            self._hub.forget(self)
            self.fail(UsageError("this subscription was closed"))

    def receive(self, channel: str | None, data: bytes) -> None:
        """In the loop: a message, or (without a channel) the news that all channels are confirmed."""
        if self._closed:
            return
        if channel is not None:
            self._deliver(channel, data)
            return
        self._stood, self._error = True, None
        self._wake()
        self._confirmed()

    def fail(self, error: Exception) -> None:
        """In the loop: the channels cannot be subscribed."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        wake_all(waiters)


class SubscriptionListener(Listener):
    """The listener of a subscription on one connection."""

    def __init__(self, subscription: Subscription, hub: ListenerOwner) -> None:
        super().__init__(subscription.channels)
        self.subscription = subscription
        self.hub: ListenerOwner = hub


def receive_all(news: list[tuple[SubscriptionListener, str | None, bytes]]) -> None:
    """In the loop. One callback that fails does not keep the news from the others."""
    for listener, channel, data in news:
        try:
            if listener.subscription.listener is listener:
                listener.subscription.receive(channel, data)
        except Exception as error:
            emit(logger, "link.deliver", BUG, exc_info=error)
