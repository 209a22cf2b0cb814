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
from collections.abc import Iterable, Sequence
from functools import partial
from random import random
from typing import Final
from weakref import WeakSet

import trio

from worqr import ops
from worqr.errors import Unavailable, UsageError
from worqr.link import Link
from worqr.log_events import emit, emit_fields
from worqr.ops import MAX_ITEMS
from worqr.peer.consumer import ActiveConsumers, Phase, QueueConsumer
from worqr.peer.error_throttle import sleep_aligned
from worqr.peer.leader.leader import Leader
from worqr.peer.session import Registration, Session
from worqr.peer.settler import Settler
from worqr.peer.task_log import RUN, run_fields
from worqr.stored_values import whole

# The channels of a peer's queues, on which wake-ups and hints about cancelled tasks arrive.
#
# A message is a hint, which any client could forge; the server decides. After a wake-up, a consumer requests tasks. After a
# message about a cancelled task, the `Reconciler` asks the server which claims are marked.
#
# The `Reconciler` asks in three cases:
#
# * a message names a claim of this worker;
# * `c` arrives on the worker's own wake channel, and stands for any number of claims;
# * the channels are subscribed, for the first time or again.


ASKERS: Final = 3
"""How many waiting workers, on average, request a task after a producer in another language announces it to all of them."""
TO_ALL: Final = (b"resumed", b"deleted")
"""Messages on the queue's own channel after which every worker requests tasks."""
CHECK_MARKS: Final = b"c"
"""The message on a worker's own wake channel after which it asks which of its claims are marked for cancellation. Any other
message on that channel is a wake-up.
"""


logger: logging.Logger = logging.getLogger(__name__)

RECONCILE_EVERY = 1.0
"""Seconds between two checks of running tasks and for a new connection. One task does both, so that an idle peer wakes once."""

Marks = tuple[list[int], list[int]] | None


class Reconciler:
    """Compares the claims of one peer with the server's. Changed only in the loop."""

    def __init__(
        self, link: Link, consumers: ActiveConsumers, settler: Settler, session: Session, leader: Leader
    ) -> None:
        self._link = link
        self._consumers = consumers
        self._settler = settler
        self._session = session
        self._leader = leader
        self._checking: dict[QueueConsumer, bool] = {}
        self._failure_logged: WeakSet[QueueConsumer] = WeakSet()
        self._unchecked: set[QueueConsumer] = set()
        self._comparing: set[QueueConsumer] = set()
        self._seen: dict[QueueConsumer, set[int]] = {}

    # The channels of a queue

    async def subscribe(self, consumer: QueueConsumer) -> None:
        """Listen to the queue's channels under the consumer's present registration. Return when the server has confirmed it."""
        consumer.admission.unsubscribe()
        registration = consumer.registration
        assert registration is not None
        keys, wake = consumer.keys, consumer.keys.wake_channel(registration.worker)
        cancels, announces = keys.cancel_channel, keys.base

        def deliver(channel: str, message: bytes) -> None:
            if channel == cancels:
                self._on_cancel_hint(consumer, message)
            elif channel == announces:
                self._on_announcement(consumer, message)
            elif message == CHECK_MARKS:
                self._on_marks(consumer)
            elif not self._consumers.is_replaced(consumer):
                consumer.on_wakeup()

        subscription = self._link.subscriptions.open(
            [announces, cancels, wake], deliver, partial(self._confirmed, consumer)
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
        self.check(consumer, named=True)
        consumer.request_soon()

    def _on_announcement(self, consumer: QueueConsumer, message: bytes) -> None:
        """Handle a message on the queue's own channel, which every worker of the queue receives. No worker has to react.

        A worker without a free slot sends nothing. Of the waiting workers, a few request tasks, among them the leader of the
        mesh. If none of them does, and the leader does not serve the queue, the scan finds the task. While the queue is paused,
        no worker requests tasks.
        """
        request = consumer.request
        few = self._leader.leads or request.in_flight or random() * request.workers_waiting < ASKERS
        if few or message in TO_ALL:
            consumer.request_soon()

    def _on_cancel_hint(self, consumer: QueueConsumer, message: bytes) -> None:
        # An unknown claim may be in a reply that has not arrived yet. Then the check follows the reply.
        claim = whole(message)
        if claim is None:
            return
        if claim in consumer.running:
            self.check(consumer)
        elif consumer.request.in_flight:
            consumer.request.recheck()

    def _on_marks(self, consumer: QueueConsumer) -> None:
        """Check all claims: one message stands for many of them."""
        if consumer.request.in_flight:
            consumer.request.recheck()
        self.check(consumer)

    # Both comparisons

    def recheck(self, consumer: QueueConsumer) -> None:
        """Check and compare again, after a reply that had to arrive first."""
        self.check(consumer)
        self.compare(consumer)

    def _removed(self, consumer: QueueConsumer, registration: Registration) -> None:
        if consumer.admission.leaving:
            return  # the worker removed itself, and this request overtook or followed that one
        self._session.lost(registration, f"it was removed from the workers of queue {consumer.queue!r}")

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
            self._settler.give_back(consumer, strays)
        self._seen[consumer] = strange

    def _known_claims(self, name: str) -> set[int]:
        """Return the claims of a queue that this peer accounts for.

        They run, are on their way back, or wait until the server accepts their settle. Runs of detached consumers are included.
        """
        known = self._settler.settles.claims_of(name)
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
