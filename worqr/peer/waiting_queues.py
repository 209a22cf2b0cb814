"""`WaitingQueues`: handles the queues with waiting tasks that the reply to a heartbeat names.

The leader's scan finds such queues, because a wake-up for them may have been lost.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from worqr.keys import QueueKeys
from worqr.log_events import emit
from worqr.peer.consumers import ActiveConsumers

logger: logging.Logger = logging.getLogger(__name__)


class WaitingQueues:
    """Makes the consumers of one peer request tasks. Changed only in the loop."""

    def __init__(self, prefix: str, consumers: ActiveConsumers) -> None:
        self._prefix = prefix
        self._consumers = consumers
        self._unserved: set[str] = set()

    def on_waiting(self, names: Iterable[str]) -> None:
        """Request the tasks of these queues, which have waiting tasks."""
        for name in names:
            consumer = self._consumers.get(name)
            if consumer is not None and consumer.admission.was_admitted:
                consumer.request_soon()
            elif consumer is None and name.startswith("{") and name not in self._unserved:
                self._report_unserved(name)

    def _report_unserved(self, name: str) -> None:
        """Warn if this queue with waiting tasks is a shard of a served queue: then this peer joined before the shard was
        declared.
        """
        queue = QueueKeys.of(self._prefix, name).display_name
        if queue != name and self._consumers.get(queue) is not None:
            self._unserved.add(name)
            text = (
                "queue %(queue)r has shards that this worker does not serve, because it joined before they were declared: "
                "restart it"
            )
            emit(logger, "shards.unserved", text, queue=queue)
