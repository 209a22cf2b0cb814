"""Cancelling: how a running handler learns that a caller cancelled it, or that its claim is gone.

A message is a hint that any client could forge; the mark on the server decides. So a peer asks the server (`reconcile`) when a
message names one of its claims, when `c` comes on its own wake channel (which stands for any number of claims), at every
(re)subscription, and once a second while tasks run. This module also has the three channels of each queue of a peer.
"""

# The private fields of Context are hidden from users, not from its neighbours.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import logging
from functools import partial
from random import random
from typing import TYPE_CHECKING
from weakref import WeakSet

import trio

from worqr import ops
from worqr.errors import Unavailable, UsageError
from worqr.link import Link
from worqr.log_events import emit, emit_fields
from worqr.ops import MAX_ITEMS
from worqr.peer.in_step import next_step
from worqr.peer.task_log import RUN, run_fields

if TYPE_CHECKING:
    from worqr.peer.consumer import Station
    from worqr.peer.engine import Engine
    from worqr.peer.session import Registration

logger: logging.Logger = logging.getLogger(__name__)

RECONCILE_EVERY = 1.0
ASKERS = 3
"""How many waiting workers, on average, request a task that a foreign producer announces to all of them."""
TO_ALL = (b"resumed", b"deleted")
"""Messages on the queue's own channel after which every worker looks."""
LOOK_AT_MARKS = b"c"
"""The message on a worker's own wake channel that makes it ask which of its claims are marked for cancellation. Any other
message there is a wake-up."""

Reconciled = tuple[list[int], list[int]] | None


class Cancelling:
    """Listens on behalf of one peer. Changed only in the loop."""

    def __init__(self, engine: Engine, link: Link) -> None:
        self._engine = engine
        self._link = link
        self._asking: dict[Station, bool] = {}
        self._complained: WeakSet[Station] = WeakSet()

    async def subscribe(self, station: Station) -> None:
        """Listen to the queue's channels under its present registration; return when the server has confirmed it."""
        self.unsubscribe(station)
        registration = station.registration
        assert registration is not None
        keys, wake = station.keys, station.keys.wake_channel(registration.worker)

        def deliver(channel: str, message: bytes) -> None:
            if channel == keys.cancel_channel:
                self._hint(station, message)
            elif channel == keys.base:
                self._hear(station, message)
            elif message == LOOK_AT_MARKS:
                self._told_to_look(station)
            elif not self._engine.is_served_anew(station):
                station.wake()

        subscription = self._link.subscriptions.open(
            [keys.base, keys.cancel_channel, wake], deliver, partial(self._confirmed, station)
        )
        station.subscription = subscription
        patience = self._link.settings.patience
        with trio.move_on_after(patience) as waiting:
            try:
                await subscription.wait_confirmed()
            except UsageError:
                if station.subscription is subscription:
                    raise
                return  # the queue was left, or served anew, while we waited
        if waiting.cancelled_caught:
            raise Unavailable(
                f"queue {station.queue!r}: the server did not confirm the subscription within {patience:g} s", sent=None
            )

    def unsubscribe(self, station: Station) -> None:
        """Stop listening."""
        if station.subscription is not None:
            station.subscription.close()
            station.subscription = None
            station.listening = False

    def _confirmed(self, station: Station) -> None:
        """(Re)subscribed: messages may have been missed. First check running tasks, then waiting ones."""
        station.listening = True
        self.reconcile(station, named=True)
        station.look()

    def _hear(self, station: Station, message: bytes) -> None:
        """Handle a message on the queue's own channel, which every worker of the queue receives. No worker has to react.

        A worker without a free slot sends nothing. Of the waiting workers a few ask, among them the leader of the mesh. It may
        be none, if the leader does not serve the queue: then the scan finds the task. While the queue is paused, none asks.
        """
        few = self._engine.leader.leads or station.asking or random() * station.workers_waiting < ASKERS
        if few or message in TO_ALL:
            station.look()

    def _hint(self, station: Station, message: bytes) -> None:
        # A claim we do not know may be in a reply that is still on its way: then the reply's arrival asks.
        if not message.isdigit():
            return
        if int(message) in station.running:
            self.reconcile(station)
        elif station.asking:
            station.hinted = True

    def _told_to_look(self, station: Station) -> None:
        """One message for many claims of ours. Some may be in a reply that is still on its way."""
        station.hinted |= station.asking
        self.reconcile(station)

    def reconcile(self, station: Station, *, named: bool = False) -> None:
        """Ask which of the station's claims are marked, and with `named` also which are gone. Never waits."""
        registration = station.registration
        if registration is None or registration.dead or not station.in_fence or not (named or station.running):
            return
        if station in self._asking:
            self._asking[station] = True
            return
        claims = list(station.running) if named else []
        for start in range(0, max(len(claims), 1), MAX_ITEMS):
            call = ops.reconcile(station.keys, registration.worker, claims[start : start + MAX_ITEMS])
            self._asking[station] = False
            self._link.post(call, partial(self._reconciled, station, registration), owner=registration)

    def _reconciled(
        self, station: Station, registration: Registration, answer: Reconciled, failure: Exception | None
    ) -> None:
        again = self._asking.pop(station, False)
        if registration.dead or registration is not station.registration:
            return
        if failure is not None:
            if station not in self._complained:  # once, not each second
                self._complained.add(station)
                text = "queue %(queue)r: the server does not say which tasks are cancelled, trying again: %(error)s"
                emit(logger, "reconcile", text, queue=station.queue, error=str(failure))
        elif answer is None:
            self._engine.membership.lost(registration, f"it was removed from the workers of queue {station.queue!r}")
        else:
            self._complained.discard(station)
            marked, gone = answer
            for claim in marked:
                if context := station.running.get(claim):
                    emit_fields(logger, "task.cancelling", f"{RUN}: cancelled on request", run_fields(context))
                    context._cancel("cancel")
            for claim in gone:
                if (context := station.running.get(claim)) and not context._settled:
                    text = (
                        "queue %(queue)r, job %(job)s: the task was reassigned to another worker; this run is cancelled"
                    )
                    emit(logger, "claim.lost", text, queue=station.queue, job=context.id)
                    context._cancel("lost")
        if again:
            self.reconcile(station)

    async def reconcile_forever(self) -> None:
        """Once a second, for every queue on which something runs, ask without waiting for a message."""
        while True:
            await next_step(RECONCILE_EVERY)
            for station in self._engine.entered_stations():
                if station.running:
                    self.reconcile(station)
