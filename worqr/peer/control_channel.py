"""`ControlChannel`: the channels of a peer's queues, on which wake-ups and hints about cancelled tasks arrive.

A message is a hint, which any client could forge; the server decides. After a wake-up, a consumer requests tasks. After a message
about a cancelled task, the `Reconciler` asks the server which claims are marked.

The `Reconciler` asks in three cases:

* a message names a claim of this worker;
* `c` arrives on the worker's own wake channel, and stands for any number of claims;
* the channels are subscribed, for the first time or again.
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
from worqr.stored_values import whole

ASKERS: Final = 3
"""How many waiting workers, on average, request a task after a producer in another language announces it to all of them."""
TO_ALL: Final = (b"resumed", b"deleted")
"""Messages on the queue's own channel after which every worker requests tasks."""
CHECK_MARKS: Final = b"c"
"""The message on a worker's own wake channel after which it asks which of its claims are marked for cancellation. Any other
message on that channel is a wake-up.
"""


class ControlChannel:
    """Listens on the channels of one peer. Changed only in the loop.

    Args:
        link: of the peer.
        reconciler: asks the server which claims are cancelled.
        leads: returns True if the peer is the leader of the mesh.
        is_replaced: returns True if another consumer serves the queue that this one has left.
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
        """Listen to the queue's channels under the consumer's present registration. Return when the server has confirmed it."""
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
                return  # the queue was left, or is served by another consumer now
        if waiting.cancelled_caught:
            raise Unavailable(
                f"queue {consumer.queue!r}: the server did not confirm the subscription within {patience:g} s",
                sent=None,
            )

    def _confirmed(self, consumer: QueueConsumer) -> None:
        """Check running tasks, then waiting ones: messages before this subscription may have been missed."""
        consumer.admission.confirm()
        self._reconciler.check(consumer, named=True)
        consumer.request_soon()

    def _on_announcement(self, consumer: QueueConsumer, message: bytes) -> None:
        """Handle a message on the queue's own channel, which every worker of the queue receives. No worker has to react.

        A worker without a free slot sends nothing. Of the waiting workers, a few request tasks, among them the leader of the
        mesh. If none of them does, and the leader does not serve the queue, the scan finds the task. While the queue is paused,
        no worker requests tasks.
        """
        request = consumer.request
        few = self._leads() or request.in_flight or random() * request.workers_waiting < ASKERS
        if few or message in TO_ALL:
            consumer.request_soon()

    def _on_cancel_hint(self, consumer: QueueConsumer, message: bytes) -> None:
        # An unknown claim may be in a reply that has not arrived yet. Then the check follows the reply.
        claim = whole(message)
        if claim is None:
            return
        if claim in consumer.running:
            self._reconciler.check(consumer)
        elif consumer.request.in_flight:
            consumer.request.recheck()

    def _on_marks(self, consumer: QueueConsumer) -> None:
        """Check all claims: one message stands for many of them."""
        if consumer.request.in_flight:
            consumer.request.recheck()
        self._reconciler.check(consumer)
