"""`RunCounter`: counts the runs of a peer by queue, and adds the counts to the queue's totals on the server once a second.

It sends nothing while no run ends. A request carries a number, so a resend adds nothing twice. If the server refuses the counts,
they stay here and are sent with later ones. A worker that leaves a queue sends its last counts first. A worker that dies loses
those of its last second.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any, Final, Protocol

import trio
from trio_util import RepeatedEvent

from worqr import ops
from worqr.errors import ClaimLost
from worqr.keys import QueueKeys
from worqr.link import Link
from worqr.log_events import emit
from worqr.peer.lifecycle import Lifecycle
from worqr.peer.registration import Registration
from worqr.peer.run import Run
from worqr.run_counts import OUTCOMES, RunCounts, waited_ms

logger: logging.Logger = logging.getLogger(__name__)

SEND_EVERY: Final = 1.0
"""Seconds between two requests about one queue."""
QUEUES_AT_ONCE: Final = 100
"""Queues whose counts are sent in one second. The others follow in the next."""


class CountedConsumer(Protocol):
    """What the counter uses of a consumer."""

    keys: QueueKeys
    lifecycle: Lifecycle

    @property
    def queue(self) -> str:
        """The queue's name."""
        ...

    @property
    def registration(self) -> Registration | None:
        """The registration under which the consumer serves the queue."""
        ...


class RunCounter:
    """The counts of one peer that are not on the server yet. Changed only in the loop.

    Attributes:
        totals: how many runs ended since the peer began, by queue and outcome.
        lost: how many counted runs never reached the totals of their queue, because the worker had left it.
    """

    def __init__(self, link: Link) -> None:
        self.totals: Counter[tuple[str, str]] = Counter()
        self.lost: int = 0
        self._link = link
        self._counts: dict[CountedConsumer, RunCounts] = {}
        self._sending: set[CountedConsumer] = set()
        self._counted = RepeatedEvent()

    # Counting

    def returned(self, consumer: CountedConsumer, runs: Sequence[Run[Any]]) -> None:
        """Count runs of this consumer whose handlers have returned in this turn of the loop."""
        began = [run.began for run in runs if run.cancel_reason != "cancel"]
        counts = self._counts.get(consumer) or self._counts_of(consumer)
        if began:
            counts.add_returned(began, monotonic())
            self.totals[consumer.queue, "ok"] += len(began)
        for _ in range(len(runs) - len(began)):
            self.ended(consumer, "cancelled")
        jobs = [run for run in runs if run.record is not None]
        if jobs:
            waits = [waited_ms(run.record, run.fence) for run in jobs if run.record is not None]
            counts.add_waits([ms for ms in waits if ms is not None])

    def ended(self, consumer: CountedConsumer, outcome: str) -> None:
        """Count a run of this consumer that ended in another way (`worqr.run_counts.OUTCOMES`)."""
        (self._counts.get(consumer) or self._counts_of(consumer)).add(outcome)
        self.totals[consumer.queue, outcome] += 1

    def _counts_of(self, consumer: CountedConsumer) -> RunCounts:
        """Return the counts of a consumer that has no unsent ones, and wake the task that sends them."""
        self._counted.set()
        return self._counts.setdefault(consumer, RunCounts())

    # Sending

    async def send_forever(self) -> None:
        """Send the counts of queues where runs ended, once a second."""
        while True:
            if not any(self._counts.values()):
                await self._counted.wait()
            await trio.sleep(SEND_EVERY)
            self.send_some()

    def send_some(self) -> None:
        """Send the counts of some queues, those that wait longest first."""
        ready = [consumer for consumer, counts in self._counts.items() if counts and consumer not in self._sending]
        with self._link.together():
            for consumer in ready[:QUEUES_AT_ONCE]:
                self._counts[consumer] = self._counts.pop(consumer)  # to the end of the line
                self._send(consumer)

    def _send(self, consumer: CountedConsumer) -> None:
        registration = consumer.registration
        if registration is None or registration.dead:
            return
        taken = self._counts[consumer].take()
        call = ops.note_runs(consumer.keys, registration.worker, registration.next_number(), taken)

        def answered(word: str | None, failure: Exception | None) -> None:
            self._sending.discard(consumer)
            self._answered(consumer, taken, word, failure)

        self._sending.add(consumer)
        self._link.post(call, answered, owner=registration)

    def _answered(
        self, consumer: CountedConsumer, taken: Mapping[str, int], word: str | None, failure: Exception | None
    ) -> None:
        if word == "ok":
            return
        if consumer.lifecycle.left.is_set():
            self.lost += _runs_of(taken)
            return
        if failure is not None and not isinstance(failure, ClaimLost):
            text = "queue %(queue)r: the counts of runs were not stored: %(error)s"
            emit(logger, "note_runs", text, queue=consumer.queue, error=str(failure))
        self._counts_of(consumer).put_back(taken)

    def leaves(self, consumer: CountedConsumer) -> None:
        """Send the last counts of a consumer that is about to leave its queue."""
        if self._counts.get(consumer):
            self._send(consumer)

    def left(self, consumer: CountedConsumer) -> None:
        """Drop the counts of a consumer that has left its queue."""
        counts = self._counts.pop(consumer, None)
        if counts is not None:
            self.lost += _runs_of(counts.take())


def _runs_of(taken: Mapping[str, int]) -> int:
    return sum(taken.get(outcome, 0) for outcome in OUTCOMES)
