"""`ActiveConsumers`: the consumers of one peer, by the names of their queues.

Not here: entering queues (`consumer_startup`), and leaving them (`consumer_shutdown`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import trio

from worqr.peer.consumer import QueueConsumer


class ActiveConsumers:
    """The consumers of one peer. A queue of several shards has one consumer for each. Changed only in the loop.

    Attributes:
        closed: the peer leaves, and enters no more queues.
        used: set after a queue was served.
    """

    def __init__(self) -> None:
        self.closed: bool = False
        self.used: trio.Event = trio.Event()
        self._by_name: dict[str, QueueConsumer] = {}
        self._detached: list[QueueConsumer] = []

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[QueueConsumer]:
        """Iterate over a copy: consumers are added and removed. From any thread, for the probes."""
        return iter(self._by_name.copy().values())  # of one step, where tuple() would be two

    def names(self) -> list[str]:
        """Return the names of all queues that are served, including those that are still being entered."""
        return list(self._by_name)

    def get(self, name: str) -> QueueConsumer | None:
        """Return the consumer of this queue, or None."""
        return self._by_name.get(name)

    def close(self) -> None:
        """Note that the peer leaves."""
        self.closed = True

    def add(self, consumer: QueueConsumer) -> None:
        """Add the consumer of a queue."""
        self._by_name[consumer.name] = consumer

    def remove(self, consumer: QueueConsumer) -> None:
        """Remove a consumer whose queue was left."""
        del self._by_name[consumer.name]

    def detach(self, consumer: QueueConsumer) -> None:
        """Keep a consumer whose queue counts as left, except for runs that were left behind and have not ended."""
        self._detached.append(consumer)

    def forget_detached(self, consumer: QueueConsumer) -> None:
        """Remove a detached consumer whose last run has ended."""
        self._detached.remove(consumer)

    @property
    def detached(self) -> Sequence[QueueConsumer]:
        """The consumers whose queues were left except for some runs."""
        return tuple(self._detached)

    def entered(self) -> list[QueueConsumer]:
        """Return the consumers whose queues are served now."""
        return [each for each in self if each.admission.was_admitted and not each.lifecycle.left.is_set()]

    def held(self) -> list[QueueConsumer]:
        """Return the consumers whose queues are served now, and the detached ones."""
        return [*self.entered(), *self._detached]

    def of(self, name: str) -> list[QueueConsumer]:
        """Return all consumers of this queue: the one that serves it, and the detached ones."""
        return [consumer for consumer in (*self, *self._detached) if consumer.name == name]

    def is_replaced(self, consumer: QueueConsumer) -> bool:
        """Return True if another consumer serves the queue that this one has left.

        Both receive each wake-up, but only one of them may request tasks. The server keeps only the reply to the worker's last
        request, for the case that this request is repeated.
        """
        return self._by_name.get(consumer.name) not in {None, consumer}

    def is_shared(self, consumer: QueueConsumer) -> bool:
        """Return True if another consumer of this peer has the same queue: it serves the queue again, or it is detached."""
        return any(other is not consumer for other in self.of(consumer.name))
