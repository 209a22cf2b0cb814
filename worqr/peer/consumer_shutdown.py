"""`ConsumerShutdown`: leaves a queue: stop claiming, drain, cancel, give back. Several callers may request it.

It runs in the engine, so that a caller who is cancelled meanwhile does not leave the queue half-way. `Lifecycle` has the phases
of a consumer that leaves. The caller waits for a server that does not reply for `LEAVE_PATIENCE` only; the queue is left on the
server as soon as the server replies again (`departures`).

A handler may ignore its cancellation. On the Trio loop the peer waits for it, and logs it now and then. In a thread or on the
asyncio loop it is left behind after `DETACH_AFTER`: callers that wait for the queue to be left go on. The consumer is *detached*:
the run keeps its claim, and if it ends before the peer does, the claim is settled then and the queue left for good. Otherwise the
peer ends like a worker that dies, without deregistering. The leader then recovers the claim when the keepalive has expired. Until
then the handler may still run in a process that is about to end.
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
from worqr.peer.manual_consumer import ManualConsumer
from worqr.peer.registration import Registration
from worqr.peer.run import Run
from worqr.peer.settler import Settler
from worqr.peer.settles import Settles
from worqr.peer.task_log import RUN

logger: logging.Logger = logging.getLogger(__name__)

LEAVE_PATIENCE = 2.0
UNREACHABLE_PATIENCE = 0.1
"""Seconds to deregister, and to wait for a server that has not confirmed that the queues were left."""
UNWIND_WITHIN = 1.0
"""Seconds that cancelled handlers have to unwind together, so that their tasks go back in one request and in order."""
DETACH_AFTER = 5.0
"""Seconds after their cancellation until handlers in threads and on asyncio loops are left behind. With the default grace it
fits into Kubernetes's 30 s."""
REMIND = 30.0
"""Seconds between two reports of a handler on the loop that keeps the peer from leaving."""


class ConsumerShutdown:
    """Lets consumers leave. Changed only in the loop.

    Args:
        consumers: all of the peer.
        settler: ends claims.
        settles: the settles that the server has not accepted yet.
        departures: leave the queues on the server.
        describe: the fields for a log line about a run, with the stack of its handler.
        spawn: runs a task behind the shield of the engine; returns False if the engine does not run.

    Attributes:
        server_answers: False once the server did not reply to a request: it may be gone.
    """

    def __init__(
        self,
        consumers: ActiveConsumers,
        settler: Settler,
        settles: Settles,
        departures: Departures,
        describe: Callable[[Run[QueueConsumer]], dict[str, object]],
        spawn: Callable[[Callable[[], Awaitable[Any]]], bool],
    ) -> None:
        self.server_answers: bool = True
        self._consumers = consumers
        self._settler = settler
        self._settles = settles
        self._departures = departures
        self._describe = describe
        self._spawn = spawn

    def begin(self, consumer: QueueConsumer, grace: float) -> None:
        """Leave a queue, in the engine; `lifecycle.left` is set when it is done. May be called twice."""
        if consumer.lifecycle.drain():
            if isinstance(consumer, ManualConsumer):
                consumer.close_buffer()
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
            if departure := self._depart(consumer, stay=stay):
                await self._wait_left(departure)
        finally:
            self._settler.left(consumer)
            for run in tuple(consumer.running.values()):
                run.cancel("lost")
                run.settle()
                consumer.ended(run)
            lifecycle.leave()

    def _depart(self, consumer: QueueConsumer, *, stay: bool) -> Departure | None:
        """Begin to leave a queue on the server: all claims go back to the front, and the registry forgets that we serve it.

        With `stay`, another consumer of this peer needs the worker's admission: only the channels are left.

        Returns:
            The departure, which goes on without the caller; None if there is nothing to leave.
        """
        registration = consumer.registration
        consumer.admission.unsubscribe()
        if registration is None or registration.dead or stay:
            return None
        return self._departures.begin(consumer.keys, registration)

    async def _wait_left(self, departure: Departure) -> None:
        """Wait while the server replies. If it does not, the queue counts as left here; the departure goes on by itself."""
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
        """Cancel running tasks, and wait for their end: a task that goes back may start elsewhere at once.

        Runs that end within `UNWIND_WITHIN` go back in one script with all other claims of the worker, in their old order. Slower
        handlers are not waited for. A claim by hand outside a block has nothing to unwind.
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
        """Wait for handlers that do not unwind; leave them behind if that is possible."""
        report_at = 0.0
        while True:
            with trio.move_on_after(DETACH_AFTER - UNWIND_WITHIN):
                await consumer.wait_idle()
                return
            runs = [run.offloaded for run in consumer.running.values()]
            free = all(run is not None and run.detachable for run in runs)
            if free or trio.current_time() >= report_at:
                report_at = trio.current_time() + REMIND
                self._report(
                    consumer, "the queue is left without it" if free else "the worker cannot leave before it does"
                )
            if free:
                await self._detach(consumer)
                return

    def _report(self, consumer: QueueConsumer, what: str) -> None:
        """Log each handler that still runs."""
        for run in consumer.running.values():
            fields = {**self._describe(run), "reason": what}
            text = f"{RUN}: %(handler)s was cancelled, but does not end; %(reason)s; it is at\n%(where)s"
            emit_fields(logger, "task.unending", text, fields)

    async def _detach(self, consumer: QueueConsumer) -> None:
        """The queue counts as left, except for the runs that remain there. Returns when they have ended."""
        self._consumers.detach(consumer)
        consumer.lifecycle.detach()
        while consumer.running:
            self._give_back(consumer)
            await consumer.lifecycle.wait_idle()
        self._consumers.forget_detached(consumer)

    def _give_back(self, consumer: QueueConsumer, held: Iterable[int] = ()) -> None:
        """Give back one by one the claims that would go back with the queue: it is not left yet."""
        consumer.lifecycle.return_claims()
        claims = {*consumer.lifecycle.take_rejected(), *held}
        registration = consumer.registration
        if registration is not None and not registration.dead:
            self._settles.give_back(consumer.keys, registration, claims)

    def holds_claims(self, registration: Registration | None) -> bool:
        """Runs that were left behind hold claims of this registration."""
        detached = self._consumers.detached
        return any(c.registration is registration for consumer in detached for c in consumer.running.values())

    def abandon_detached(self) -> None:
        """The peer ends: stop waiting for runs that were left behind. The leader recovers their claims."""
        for consumer in self._consumers.detached:
            for run in consumer.running.values():
                run.settle()
                if run.offloaded is not None:
                    run.offloaded.detach()


async def _drain_or_skip(consumer: QueueConsumer) -> None:
    """Wait until nothing runs there any more, or the grace is skipped."""
    async with trio.open_nursery() as nursery:

        async def idle() -> None:
            await consumer.wait_idle()
            nursery.cancel_scope.cancel()

        nursery.start_soon(idle)
        await consumer.lifecycle.grace_over.wait()
        nursery.cancel_scope.cancel()
