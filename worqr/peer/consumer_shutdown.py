"""`ConsumerShutdown`: lets a consumer leave its queue. It stops claiming, drains, cancels, and gives the claims back.

Several callers may request it. It runs in the engine, so a caller that is cancelled does not leave the queue half-way.
`Lifecycle` has the phases of a consumer that leaves. If the server does not reply, a caller waits for `LEAVE_PATIENCE` only. The
queue is left on the server when the server replies again (`departures`).

A handler may ignore its cancellation. On the Trio loop the peer waits for it, and logs it every `REMIND` seconds. In a thread or
on the asyncio loop, the run is left behind after `DETACH_AFTER`, and callers that wait for the queue continue. The consumer is
then *detached*, and the run keeps its claim. If the run ends before the peer does, the claim is settled, and the queue is left
completely. Otherwise the peer ends without deregistering, like a worker that dies. The leader then recovers the claim when the
keepalive has expired. Until then the handler may still run in a process that is about to end.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any

import trio

from worqr.log_events import emit, emit_fields
from worqr.peer.consumer import QueueConsumer
from worqr.peer.consumers import ActiveConsumers
from worqr.peer.departures import Departure, Departures
from worqr.peer.list_run import ListRun
from worqr.peer.manual_consumer import ManualConsumer
from worqr.peer.registration import Registration
from worqr.peer.run import SETTLED
from worqr.peer.run_counter import RunCounter
from worqr.peer.settler import Settler
from worqr.peer.settles import Settles
from worqr.peer.stuck_handlers import StuckHandlerMonitor
from worqr.peer.task_log import RUN

logger: logging.Logger = logging.getLogger(__name__)

LEAVE_PATIENCE = 2.0
UNREACHABLE_PATIENCE = 0.1
"""Seconds to wait for a reply, and to deregister. The second value: to deregister if the server did not reply in that time."""
UNWIND_WITHIN = 1.0
"""Seconds that cancelled handlers have to end together, so that their tasks go back in one request and in order."""
DETACH_AFTER = 5.0
"""Seconds after their cancellation until handlers in threads and on asyncio loops are left behind. Together with the default
grace this fits into the 30 s of Kubernetes.
"""
REMIND = 30.0
"""Seconds between two reports of a handler on the loop that keeps the peer from leaving."""


class ConsumerShutdown:
    """Makes consumers leave their queues. Changed only in the loop.

    Args:
        consumers: all consumers of the peer.
        settler: ends claims.
        settles: the settles that the server has not accepted yet.
        counter: counts the runs.
        departures: leave the queues on the server.
        stuck: describes runs that do not end, and finds those that no slot has.
        spawn: runs a task behind the shield of the engine; returns False if the engine does not run.

    Attributes:
        server_answers: False after a request to which the server did not reply in time.
    """

    def __init__(
        self,
        consumers: ActiveConsumers,
        settler: Settler,
        settles: Settles,
        counter: RunCounter,
        departures: Departures,
        stuck: StuckHandlerMonitor,
        spawn: Callable[[Callable[[], Awaitable[Any]]], bool],
    ) -> None:
        self.server_answers: bool = True
        self._consumers = consumers
        self._settler = settler
        self._settles = settles
        self._counter = counter
        self._departures = departures
        self._stuck = stuck
        self._spawn = spawn

    def begin(self, consumer: QueueConsumer, grace: float) -> None:
        """Begin to leave a queue, in the engine. `lifecycle.left` is set when the queue was left. May be called twice."""
        if consumer.lifecycle.drain():
            consumer.give_back_unstarted()
            if not self._spawn(partial(self._leave, consumer, grace)):
                consumer.lifecycle.leave()

    async def _leave(self, consumer: QueueConsumer, grace: float) -> None:
        """Stop claiming, drain for `grace` or until it is skipped, cancel, give back."""
        lifecycle = consumer.lifecycle
        try:
            if grace > 0 and not lifecycle.grace_over.is_set():
                with trio.move_on_after(grace):
                    await _drain_or_skip(consumer)
            lifecycle.skip_grace()
            await self._unwind(consumer)
            if stay := self._consumers.is_shared(consumer):
                self._give_back(consumer, consumer.running)
            self._settler.flush()
            self._counter.leaves(consumer)
            if departure := self._depart(consumer, stay=stay):
                await self._wait_left(departure)
        finally:
            self._settler.left(consumer)
            for run in tuple(consumer.running.values()):
                run.cancel("lost")
                run.settle()
                consumer.ended(run)
            self._counter.left(consumer)
            lifecycle.leave()

    def _depart(self, consumer: QueueConsumer, *, stay: bool) -> Departure | None:
        """Begin to leave a queue on the server: all claims go back to the front, and the registry removes the worker from the
        queue.

        With `stay`, another consumer of this peer needs the worker's admission. Then only the channels are left.

        Returns:
            The departure, which continues without the caller; None if there is nothing to leave.
        """
        registration = consumer.registration
        if registration is None or registration.dead or stay:
            consumer.admission.unsubscribe()
            return None
        consumer.admission.leave()
        return self._departures.begin(consumer.keys, registration)

    async def _wait_left(self, departure: Departure) -> None:
        """Wait while the server replies.

        If the server stops replying, the queue counts as left here, and the departure continues without this call.
        """
        while not departure.done.is_set() and departure.refused is None:
            answers = departure.answers
            with trio.move_on_after(LEAVE_PATIENCE):
                await departure.done.wait()
            if departure.answers == answers and not departure.done.is_set():
                self.server_answers = False
                text = "queue %(queue)r: the server has not answered for %(duration)g s; its tasks are given back when it does"
                emit(logger, "leave.unanswered", text, queue=departure.keys.display_name, duration=LEAVE_PATIENCE)
                return

    async def _unwind(self, consumer: QueueConsumer) -> None:
        """Cancel running tasks, and wait for their end, because a task that went back may start on another worker immediately.

        Runs that end within `UNWIND_WITHIN` go back in one script with all other claims of the worker, in their old order. Slower
        handlers are not waited for. A claim that the application holds outside a block has no handler to wait for.
        """
        consumer.lifecycle.cancel()
        consumer.cancel_running("leaving")
        with trio.move_on_after(UNWIND_WITHIN):
            await (consumer.wait_blocks() if isinstance(consumer, ManualConsumer) else consumer.wait_idle())
        if not isinstance(consumer, ManualConsumer) and consumer.running:
            consumer.lifecycle.return_claims()
            self._settler.flush()
            await self._wait_unresponsive(consumer)

    async def _wait_unresponsive(self, consumer: QueueConsumer) -> None:
        """Wait for handlers that do not end; detach the consumer if that is possible."""
        report_at = 0.0
        while True:
            self._release_orphans(consumer)
            with trio.move_on_after(DETACH_AFTER - UNWIND_WITHIN):
                await consumer.wait_idle()
                return
            runs = [run.offloaded for run in consumer.executing.values()]
            free = all(run is not None and run.detachable for run in runs)
            if free or trio.current_time() >= report_at:
                report_at = trio.current_time() + REMIND
                self._report(
                    consumer, "the queue is left without it" if free else "the worker cannot leave before it does"
                )
            if free:
                await self._detach(consumer)
                return

    def _release_orphans(self, consumer: QueueConsumer) -> None:
        """Give back the claims of runs that no slot has: nothing else would end them."""
        for orphan in self._stuck.orphans_of(consumer):
            for run in orphan.claimed if isinstance(orphan, ListRun) else (orphan,):
                if consumer.running.get(run.fence) is run:
                    if run.state is not SETTLED:
                        run.settle()
                        self._give_back(consumer, [run.fence])
                    consumer.ended(run)

    def _report(self, consumer: QueueConsumer, what: str) -> None:
        """Log each handler that still runs."""
        for run in consumer.executing.values():
            fields = {**self._stuck.fields(run), "reason": what}
            text = f"{RUN}: %(handler)s was cancelled, but does not end; %(reason)s; it is at\n%(where)s"
            emit_fields(logger, "task.unending", text, fields)

    async def _detach(self, consumer: QueueConsumer) -> None:
        """Count the queue as left, except for the remaining runs. Return when these runs have ended."""
        self._consumers.detach(consumer)
        consumer.lifecycle.detach()
        while consumer.running:
            self._give_back(consumer)
            await consumer.lifecycle.wait_idle()
        self._consumers.forget_detached(consumer)

    def _give_back(self, consumer: QueueConsumer, held: Iterable[int] = ()) -> None:
        """Give claims back one by one, because the queue, with which they would go back together, is not left yet."""
        consumer.lifecycle.return_claims()
        claims = {*consumer.lifecycle.take_rejected(), *held}
        registration = consumer.registration
        if registration is not None and not registration.dead:
            self._settles.give_back(consumer.keys, registration, claims)

    def holds_claims(self, registration: Registration | None) -> bool:
        """Return True if runs that were left behind hold claims of this registration."""
        detached = self._consumers.detached
        return any(c.registration is registration for consumer in detached for c in consumer.running.values())

    def abandon_detached(self) -> None:
        """Stop waiting for runs that were left behind, because the peer ends. The leader recovers their claims."""
        for consumer in self._consumers.detached:
            for run in consumer.running.values():
                run.settle()
                if run.offloaded is not None:
                    run.offloaded.detach()


async def _drain_or_skip(consumer: QueueConsumer) -> None:
    """Wait until nothing runs there, or until the grace is skipped."""
    async with trio.open_nursery() as nursery:

        async def idle() -> None:
            await consumer.wait_idle()
            nursery.cancel_scope.cancel()

        nursery.start_soon(idle)
        await consumer.lifecycle.grace_over.wait()
        nursery.cancel_scope.cancel()
