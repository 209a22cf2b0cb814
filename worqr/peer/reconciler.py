"""`Reconciler`: compares the claims that a peer holds with those that the server lists for it.

A claim is *marked* when a caller cancelled its task. It is *gone* when the server does not list it any more, because its task was
reassigned. In both cases the run is cancelled. The peer asks after a hint, at every subscription, and once a second while tasks
run.

A *stray* is a claim that the server lists although the peer has settled it. A server may lose its latest writes, in a failover to
a replica that had not received them, or by a crash before they were on disk. The leader does not recover a stray, because the
worker is alive. So after each new connection the peer asks for all claims of every queue, and gives strays back. Their tasks run
once more.

A claim that runs is not a stray, even if its queue was left. A claim whose settle the server has not accepted is not a stray
either. The peer asks while no start request is under way; otherwise the list could contain claims whose own reply is still
unread. A stray must be found in two checks, a second apart. On a cluster, requests may overtake each other while slots move.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from weakref import WeakSet

from worqr import ops
from worqr.link import Link
from worqr.log_events import emit, emit_fields
from worqr.ops import MAX_ITEMS
from worqr.peer.aligned_sleep import sleep_aligned
from worqr.peer.consumer import QueueConsumer
from worqr.peer.consumers import ActiveConsumers
from worqr.peer.lifecycle import Phase
from worqr.peer.registration import Registration
from worqr.peer.task_log import RUN, run_fields

logger: logging.Logger = logging.getLogger(__name__)

RECONCILE_EVERY = 1.0
"""Seconds between two checks of running tasks and for a new connection. One task does both, so that an idle peer wakes once."""

Marks = tuple[list[int], list[int]] | None


class Reconciler:
    """Compares the claims of one peer with the server's. Changed only in the loop.

    Args:
        link: the link of the peer.
        consumers: all consumers of the peer.
        unaccepted: returns the claims of a queue whose settle the server has not accepted yet.
        give_back: returns claims to the front of their queue, uncounted.
        lost: ends a registration.
    """

    def __init__(
        self,
        link: Link,
        consumers: ActiveConsumers,
        *,
        unaccepted: Callable[[str], set[int]],
        give_back: Callable[[QueueConsumer, Iterable[int]], None],
        lost: Callable[[Registration, str], None],
    ) -> None:
        self._link = link
        self._consumers = consumers
        self._unaccepted = unaccepted
        self._give_back = give_back
        self._lost = lost
        self._checking: dict[QueueConsumer, bool] = {}
        self._failure_logged: WeakSet[QueueConsumer] = WeakSet()
        self._unchecked: set[QueueConsumer] = set()
        self._comparing: set[QueueConsumer] = set()
        self._seen: dict[QueueConsumer, set[int]] = {}

    def recheck(self, consumer: QueueConsumer) -> None:
        """Check and compare again, after a reply that had to arrive first."""
        self.check(consumer)
        self.compare(consumer)

    def _removed(self, consumer: QueueConsumer, registration: Registration) -> None:
        if consumer.admission.leaving:
            return  # the worker removed itself, and this request overtook or followed that one
        self._lost(registration, f"it was removed from the workers of queue {consumer.queue!r}")

    async def reconcile_forever(self) -> None:
        """Once a second, check the claims of running tasks, and compare the claims of queues that have a new connection."""
        while True:
            await sleep_aligned(RECONCILE_EVERY)
            consumers = self._consumers.entered()
            for consumer in consumers:
                if consumer.running:
                    self.check(consumer)
            self._compare_all(consumers)

    # Marked and gone claims

    def check(self, consumer: QueueConsumer, *, named: bool = False) -> None:
        """Ask which of its claims are marked, and with `named` also which are gone. Never waits."""
        registration = consumer.registration
        if registration is None or not consumer.admission.is_live or not (named or consumer.running):
            return
        if consumer in self._checking:
            self._checking[consumer] = True
            return
        claims = list(consumer.running) if named else []
        for start in range(0, max(len(claims), 1), MAX_ITEMS):
            call = ops.reconcile(consumer.keys, registration.worker, claims[start : start + MAX_ITEMS])
            self._checking[consumer] = False
            self._link.post(call, partial(self._checked, consumer, registration), owner=registration)

    def _checked(
        self, consumer: QueueConsumer, registration: Registration, marks: Marks, failure: Exception | None
    ) -> None:
        again = self._checking.pop(consumer, False)
        if registration.dead or registration is not consumer.registration:
            return
        if failure is not None:
            if consumer not in self._failure_logged:  # once, not each second
                self._failure_logged.add(consumer)
                text = "queue %(queue)r: the server does not say which tasks are cancelled, trying again: %(error)s"
                emit(logger, "reconcile", text, queue=consumer.queue, error=str(failure))
        elif marks is None:
            self._removed(consumer, registration)
        else:
            self._failure_logged.discard(consumer)
            _cancel_marked(consumer, marks[0])
            _cancel_gone(consumer, marks[1])
        if again:
            self.check(consumer)

    # Strays

    def _compare_all(self, consumers: Sequence[QueueConsumer]) -> None:
        """Compare the claims of each queue that was not free of strays since the newest connection."""
        self._seen = {consumer: seen for consumer, seen in self._seen.items() if consumer in consumers}
        connections = self._link.connections
        self._unchecked = {each for each in consumers if each.admission.checked_on != connections}
        for consumer in consumers:
            self.compare(consumer)

    def compare(self, consumer: QueueConsumer) -> None:
        """Ask for all its claims, if there is a reason to. While a start request is under way, wait for its reply by
        `recheck`.
        """
        registration = consumer.registration
        if consumer not in self._unchecked or consumer in self._comparing:
            return
        if registration is None or not consumer.admission.is_live or consumer.lifecycle.phase >= Phase.STOPPING:
            return
        if consumer.request.in_flight:
            consumer.request.recheck()
            return
        self._unchecked.discard(consumer)
        self._comparing.add(consumer)
        connections = self._link.connections
        call = ops.list_own_claims(consumer.keys, registration.worker)
        self._link.post(call, partial(self._compared, consumer, registration, connections), owner=registration)

    def _compared(
        self,
        consumer: QueueConsumer,
        registration: Registration,
        connections: int,
        held: list[int] | None,
        failure: Exception | None,
    ) -> None:
        self._comparing.discard(consumer)
        seen = self._seen.pop(consumer, set())
        if registration.dead or registration is not consumer.registration:
            return
        if failure is not None:
            # `_checked` logs the same refusal, of its own request, as an error
            emit(logger, "list_own_claims", "queue %(queue)r: %(error)s", queue=consumer.queue, error=str(failure))
            return
        if held is None:
            self._removed(consumer, registration)
            return
        strange = set(held) - self._known_claims(consumer.name)
        if not strange:
            consumer.admission.checked(connections)
        elif strays := strange & seen:
            text = "queue %(queue)r: the server forgot how %(count)d runs ended; their tasks are given back, and run once more"
            emit(logger, "claim.stray", text, queue=consumer.queue, count=len(strays))
            self._give_back(consumer, strays)
        self._seen[consumer] = strange

    def _known_claims(self, name: str) -> set[int]:
        """Return the claims of a queue that this peer accounts for.

        They run, are on their way back, or wait until the server accepts their settle. Runs of detached consumers are included.
        """
        known = self._unaccepted(name)
        for consumer in self._consumers.of(name):
            known.update(consumer.running, consumer.lifecycle.rejected_claims)
        return known


def _cancel_marked(consumer: QueueConsumer, marked: Iterable[int]) -> None:
    for claim in marked:
        if run := consumer.running.get(claim):
            emit_fields(logger, "task.cancelling", f"{RUN}: cancelled on request", run_fields(run))
            run.cancel("cancel")


def _cancel_gone(consumer: QueueConsumer, gone: Iterable[int]) -> None:
    for claim in gone:
        if (run := consumer.running.get(claim)) and not run.settled:
            text = "queue %(queue)r, job %(job)s: the task was reassigned to another worker; this run is cancelled"
            emit(logger, "claim.lost", text, queue=consumer.queue, job=run.id)
            run.cancel("lost")
