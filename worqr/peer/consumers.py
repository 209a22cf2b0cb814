"""`ActiveConsumers`: the consumers of one peer, by the names of their queues.

Here: which consumers there are, and in which phase. Not here: entering queues (`consumer_startup`), and leaving them
(`consumer_shutdown`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import trio

from worqr.peer.consumer import QueueConsumer


class ActiveConsumers:
    """The consumers of one peer; a queue of several shards has one for each. Changed only in the loop.

    Attributes:
        closed: the peer leaves: it enters no more queues.
        used: set once a queue was served.
    """

    def __init__(self) -> None:
        self.closed: bool = False
        self.used: trio.Event = trio.Event()
        self._by_name: dict[str, QueueConsumer] = {}
        self._detached: list[QueueConsumer] = []

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[QueueConsumer]:
        """Iterate over a copy: consumers are added and removed."""
        return iter(tuple(self._by_name.values()))

    def names(self) -> list[str]:
        """The names of all queues that are served, also of those that are still being entered."""
        return list(self._by_name)

    def get(self, name: str) -> QueueConsumer | None:
        """The consumer of this queue, if it is served here."""
        return self._by_name.get(name)

    def close(self) -> None:
        """The peer leaves."""
        self.closed = True

    def add(self, consumer: QueueConsumer) -> None:
        """The queue of this consumer is served from now on."""
        self._by_name[consumer.name] = consumer

    def remove(self, consumer: QueueConsumer) -> None:
        """The queue of this consumer was left."""
        del self._by_name[consumer.name]

    def detach(self, consumer: QueueConsumer) -> None:
        """The queue of this consumer counts as left, except for runs that were left behind and have not ended."""
        self._detached.append(consumer)

    def forget_detached(self, consumer: QueueConsumer) -> None:
        """The last run that was left behind has ended."""
        self._detached.remove(consumer)

    @property
    def detached(self) -> Sequence[QueueConsumer]:
        """The consumers whose queues were left except for some runs."""
        return tuple(self._detached)

    def entered(self) -> list[QueueConsumer]:
        """The consumers whose queues are served now."""
        return [each for each in self if each.admission.was_admitted and not each.lifecycle.left.is_set()]

    def held(self) -> list[QueueConsumer]:
        """The consumers whose queues are served now, and those where runs were left behind."""
        return [*self.entered(), *self._detached]

    def of(self, name: str) -> list[QueueConsumer]:
        """All consumers of this queue: the one that serves it, and those where runs were left behind."""
        return [consumer for consumer in (*self, *self._detached) if consumer.name == name]

    def is_replaced(self, consumer: QueueConsumer) -> bool:
        """Return True if another consumer serves the queue that this one has left.

        Both hear each wake-up, but only one may request tasks. In case a reply is lost and its request is repeated, the server
        keeps the reply to the worker's last request, and no other.
        """
        return self._by_name.get(consumer.name) not in {None, consumer}

    def is_shared(self, consumer: QueueConsumer) -> bool:
        """Return True if another consumer of this peer has the same queue: it is served again, or runs were left behind there."""
        return any(other is not consumer for other in self.of(consumer.name))
