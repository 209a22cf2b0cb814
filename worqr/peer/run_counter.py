"""`RunCounter`: counts the runs of a peer by queue, and adds the counts to the queue's totals on the server once a second.

It sends nothing while no run ends. With the counts go the runs that ended last, of queues that keep some (``serve(recent=...)``).
A request carries a number, so a resend adds nothing twice. If the server refuses the counts, they stay here and are sent with
later ones. A worker that leaves a queue sends its last counts first. A worker that dies loses those of its last second.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Final, Protocol

import trio
from trio_util import RepeatedEvent

from worqr import ops
from worqr.errors import ClaimLost
from worqr.keys import QueueKeys
from worqr.link import Link
from worqr.log_events import emit
from worqr.peer.lifecycle import Lifecycle
from worqr.peer.session import Registration
from worqr.records import Outcome, StoredRun, encode_run
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
    def recent(self) -> int:
        """How many of the runs that ended last the queue keeps."""
        ...

    @property
    def registration(self) -> Registration | None:
        """The registration under which the consumer serves the queue."""
        ...


class CountedRun(Protocol):
    """What the counter uses of a run. See `worqr.peer.run.Run`."""

    @property
    def host(self) -> CountedConsumer: ...
    @property
    def registration(self) -> Registration: ...
    @property
    def id(self) -> str: ...
    @property
    def fence(self) -> int: ...
    @property
    def began(self) -> float: ...
    @property
    def record(self) -> dict[bytes, bytes] | None: ...
    @property
    def cancel_reason(self) -> str | None: ...


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

    def returned(self, consumer: CountedConsumer, runs: Sequence[CountedRun]) -> None:
        """Count runs of this consumer whose handlers have returned in this turn of the loop."""
        began = [run.began for run in runs if run.cancel_reason != "cancel"]
        counts, now = self._counts.get(consumer) or self._counts_of(consumer), monotonic()
        if began:
            counts.add_returned(began, now)
            self.totals[consumer.queue, "ok"] += len(began)
            if consumer.recent:
                counts.keep([_stored(run, "ok", now) for run in runs if run.cancel_reason != "cancel"])
        if len(began) < len(runs):
            for run in [run for run in runs if run.cancel_reason == "cancel"]:
                self.ended(run, "cancelled")
        jobs = [run for run in runs if run.record is not None]
        if jobs:
            waits = [waited_ms(run.record, run.fence) for run in jobs if run.record is not None]
            counts.add_waits([ms for ms in waits if ms is not None])

    def ended(self, run: CountedRun, outcome: Outcome, error: str = "") -> None:
        """Count a run that ended in another way.

        Args:
            run: of a consumer of this peer.
            outcome: one of `worqr.run_counts.OUTCOMES`.
            error: the type of its error; empty if it had none.
        """
        consumer = run.host
        counts = self._counts.get(consumer) or self._counts_of(consumer)
        counts.add(outcome)
        self.totals[consumer.queue, outcome] += 1
        if consumer.recent:
            counts.keep([_stored(run, outcome, monotonic(), error)])

    def _counts_of(self, consumer: CountedConsumer) -> RunCounts:
        """Return the counts of a consumer that has no unsent ones, and wake the task that sends them."""
        self._counted.set()
        return self._counts.setdefault(consumer, RunCounts(consumer.recent))

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
        taken, runs = self._counts[consumer].take()
        number = registration.next_number()
        call = ops.note_runs(consumer.keys, registration.worker, number, taken, runs, consumer.recent)

        def answered(word: str | None, failure: Exception | None) -> None:
            self._sending.discard(consumer)
            if word != "ok":
                self._failed(consumer, taken, runs, failure)

        self._sending.add(consumer)
        self._link.post(call, answered, owner=registration)

    def _failed(
        self, consumer: CountedConsumer, taken: Mapping[str, int], runs: Sequence[bytes], failure: Exception | None
    ) -> None:
        """Keep what was not stored for the next request, if there will be one."""
        if consumer.lifecycle.left.is_set():
            self.lost += _runs_of(taken)
            return
        if failure is not None and not isinstance(failure, ClaimLost):
            text = "queue %(queue)r: the counts of runs were not stored: %(error)s"
            emit(logger, "note_runs", text, queue=consumer.queue, error=str(failure))
        self._counts_of(consumer).put_back(taken, runs)

    def leaves(self, consumer: CountedConsumer) -> None:
        """Send the last counts of a consumer that is about to leave its queue."""
        if self._counts.get(consumer):
            self._send(consumer)

    def left(self, consumer: CountedConsumer) -> None:
        """Drop the counts of a consumer that has left its queue."""
        counts = self._counts.pop(consumer, None)
        if counts is not None:
            taken, _ = counts.take()
            self.lost += _runs_of(taken)


def _stored(run: CountedRun, outcome: Outcome, now: float, error: str = "") -> bytes:
    """Return a run that ended at `now` in the form in which it is stored."""
    ms = max(0, round((now - run.began) * 1000))
    job = None if run.record is None else run.id
    return encode_run(StoredRun(run.fence, job, outcome, ms, run.registration.worker, error))


def _runs_of(taken: Mapping[str, int]) -> int:
    return sum(taken.get(outcome, 0) for outcome in OUTCOMES)
