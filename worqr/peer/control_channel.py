"""`ControlChannel`: the channels of a peer's queues, on which wake-ups and hints about cancelled tasks arrive.

A message is a hint that any client could forge; the server decides. So a wake-up makes a consumer request tasks, and a message
about a cancelled task makes the `Reconciler` ask which claims are marked. That happens when a message names one of our claims,
when `c` comes on our own wake channel (which stands for any number of claims), and at every (re)subscription.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import random
from typing import Final

import trio

from worqr.errors import Unavailable, UsageError
from worqr.link import Link
from worqr.peer.consumer import QueueConsumer
from worqr.peer.reconciler import Reconciler

ASKERS: Final = 3
"""How many waiting workers, on average, request a task that a foreign producer announces to all of them."""
TO_ALL: Final = (b"resumed", b"deleted")
"""Messages on the queue's own channel after which every worker looks."""
CHECK_MARKS: Final = b"c"
"""The message on a worker's own wake channel that makes it ask which of its claims are marked for cancellation. Any other
message there is a wake-up."""


class ControlChannel:
    """Listens on behalf of one peer. Changed only in the loop.

    Args:
        link: of the peer.
        reconciler: asks the server which claims are cancelled.
        leads: the peer is the leader of the mesh.
        is_replaced: another consumer serves the queue that this one has left.
    """

    def __init__(
        self,
        link: Link,
        reconciler: Reconciler,
        leads: Callable[[], bool],
        is_replaced: Callable[[QueueConsumer], bool],
    ) -> None:
        self._link = link
        self._reconciler = reconciler
        self._leads = leads
        self._is_replaced = is_replaced

    async def subscribe(self, consumer: QueueConsumer) -> None:
        """Listen to the queue's channels under its present registration; return when the server has confirmed it."""
        consumer.admission.unsubscribe()
        registration = consumer.registration
        assert registration is not None
        keys, wake = consumer.keys, consumer.keys.wake_channel(registration.worker)

        def deliver(channel: str, message: bytes) -> None:
            if channel == keys.cancel_channel:
                self._on_cancel_hint(consumer, message)
            elif channel == keys.base:
                self._on_announcement(consumer, message)
            elif message == CHECK_MARKS:
                self._on_marks(consumer)
            elif not self._is_replaced(consumer):
                consumer.on_wakeup()

        subscription = self._link.subscriptions.open(
            [keys.base, keys.cancel_channel, wake], deliver, partial(self._confirmed, consumer)
        )
        consumer.admission.subscribe(subscription)
        patience = self._link.settings.patience
        with trio.move_on_after(patience) as waiting:
            try:
                await subscription.wait_confirmed()
            except UsageError:
                if consumer.admission.subscription is subscription:
                    raise
                return  # the queue was left, or served anew, while we waited
        if waiting.cancelled_caught:
            raise Unavailable(
                f"queue {consumer.queue!r}: the server did not confirm the subscription within {patience:g} s",
                sent=None,
            )

    def _confirmed(self, consumer: QueueConsumer) -> None:
        """(Re)subscribed: messages may have been missed. First check running tasks, then waiting ones."""
        consumer.admission.confirm()
        self._reconciler.check(consumer, named=True)
        consumer.request_soon()

    def _on_announcement(self, consumer: QueueConsumer, message: bytes) -> None:
        """Handle a message on the queue's own channel, which every worker of the queue receives. No worker has to react.

        A worker without a free slot sends nothing. Of the waiting workers a few ask, among them the leader of the mesh. It may
        be none, if the leader does not serve the queue: then the scan finds the task. While the queue is paused, none asks.
        """
        request = consumer.request
        few = self._leads() or request.in_flight or random() * request.workers_waiting < ASKERS
        if few or message in TO_ALL:
            consumer.request_soon()

    def _on_cancel_hint(self, consumer: QueueConsumer, message: bytes) -> None:
        # A claim we do not know may be in a reply that is still on its way: then the reply's arrival asks.
        if not message.isdigit():
            return
        if int(message) in consumer.running:
            self._reconciler.check(consumer)
        elif consumer.request.in_flight:
            consumer.request.recheck()

    def _on_marks(self, consumer: QueueConsumer) -> None:
        """One message for many claims of ours. Some may be in a reply that is still on its way."""
        if consumer.request.in_flight:
            consumer.request.recheck()
        self._reconciler.check(consumer)
