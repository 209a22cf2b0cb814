"""`ConsumerStartup`: lets a consumer enter its queue: registry, admission, channels, and the first start request.

A queue is entered in the registry first, and then in its own set of admitted workers. It is left in the opposite order. So the
leader finds the claims of a worker that dies in between. Not here: leaving (`consumer_shutdown`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import trio

from worqr import ops
from worqr.errors import ClaimLost, WorqrError
from worqr.keys import RegistryKeys
from worqr.lanes import NO_RULES
from worqr.limits import describe_limits, parse_limits
from worqr.link import Link
from worqr.log_events import emit
from worqr.peer.consumer import QueueConsumer
from worqr.peer.consumer_shutdown import ConsumerShutdown
from worqr.peer.consumers import ActiveConsumers
from worqr.peer.control_channel import ControlChannel
from worqr.peer.departures import Departures
from worqr.peer.registration import Registration
from worqr.peer.scheduler import Scheduler
from worqr.peer.session import Session
from worqr.policy import shown_fields

logger: logging.Logger = logging.getLogger(__name__)


class ConsumerStartup:
    """Enters the queues of one peer, whose worker id may change in the meantime. Changed only in the loop."""

    def __init__(
        self,
        link: Link,
        keys: RegistryKeys,
        session: Session,
        scheduler: Scheduler,
        consumers: ActiveConsumers,
        channel: ControlChannel,
        departures: Departures,
        shutdown: ConsumerShutdown,
    ) -> None:
        self._link = link
        self._keys = keys
        self._session = session
        self._scheduler = scheduler
        self._consumers = consumers
        self._channel = channel
        self._departures = departures
        self._shutdown = shutdown

    @asynccontextmanager
    async def entered(self, consumers: Sequence[QueueConsumer]) -> AsyncGenerator[None]:
        """Serve a queue, with all its shards, for the length of a block."""
        here: list[QueueConsumer] = []
        try:
            for consumer in consumers:
                self._scheduler.add(consumer)
                self._consumers.add(consumer)
                here.append(consumer)
            self._consumers.used.set()
            if self._consumers.closed:  # drained after `_check_free`, while the peer entered another queue
                for consumer in here:
                    self._shutdown.begin(consumer, 0)
            await self._enter_all(consumers)
            yield
        finally:
            with trio.CancelScope(shield=True):
                for consumer in here:
                    self._shutdown.begin(consumer, 0)
                    consumer.lifecycle.skip_grace()
                for consumer in here:
                    await consumer.lifecycle.left.wait()
                    self._scheduler.remove(consumer)
                    self._consumers.remove(consumer)

    async def _enter_all(self, consumers: Sequence[QueueConsumer]) -> None:
        """Enter all of them at the same time; raise the first error."""
        errors: list[Exception] = []

        async def enter(consumer: QueueConsumer) -> None:
            try:
                with consumer.lifecycle.entering:  # cancelled if the peer leaves
                    await self._enter_now(consumer)
            except Exception as error:
                errors.append(error)
                nursery.cancel_scope.cancel()

        if len(consumers) == 1:
            with consumers[0].lifecycle.entering:
                await self._enter_now(consumers[0])
            return
        async with trio.open_nursery() as nursery:
            for consumer in consumers:
                nursery.start_soon(enter, consumer)
        if errors:
            raise errors[0]

    async def _enter_now(self, consumer: QueueConsumer) -> None:
        while True:
            registration = await self._session.wait_registered()
            try:
                await self.enter(consumer, registration)
            except ClaimLost:
                continue
            return

    async def enter_again(self, registration: Registration) -> None:
        """Enter all queues that the peer serves under a new registration."""
        async with trio.open_nursery() as nursery:
            for consumer in self._consumers.entered():
                nursery.start_soon(self._enter_again, consumer, registration)

    async def _enter_again(self, consumer: QueueConsumer, registration: Registration) -> None:
        """Enter a queue; retry without limit. On a cluster, the node of one queue may be unavailable while other nodes work."""
        while not (registration.dead or consumer.lifecycle.is_leaving):
            try:
                await self.enter(consumer, registration)
            except ClaimLost:
                return  # the peer has begun to register once more
            except WorqrError as error:
                text = "queue %(queue)r could not be entered again, next try in %(retry_in)s s: %(error)s"
                emit(logger, "start_work", text, queue=consumer.name, retry_in=1, error=str(error))
                await trio.sleep(1)
            else:
                return

    async def enter(self, consumer: QueueConsumer, registration: Registration) -> None:
        """Serve a queue under `registration`.

        Returns early if the queue is being left. If an earlier departure of this worker from the queue is under way, waits for
        its end first.

        Raises:
            ClaimLost: the registration died.
        """
        consumer.admission.enter(registration, self._link.connections)
        await self._departures.wait_left(consumer.keys, registration)
        if await self._link.call(ops.map_work(self._keys, registration.worker, consumer.name)) == "dead":
            self._session.lost(registration, "the registry does not know it")
        if not _should_continue(consumer, registration):
            return
        policy = consumer.policy
        changed = await self._link.call(
            ops.start_work(
                *(consumer.keys, registration.worker),
                max_stalls=policy.max_stalls,
                keep_failed=policy.keep_failed,
                last=registration.number,
                on_failure=policy.on_failure,
                result_ttl_ms=round(policy.result_ttl * 1000) if policy.result_ttl > 0 else None,
                limits=consumer.options.limits,
                lanes=consumer.options.lanes,
                options=json.dumps(shown_fields(policy), separators=(",", ":")),
            )
        )
        if changed:
            _log_changed(consumer, limits_changed=changed == "limits")
        if not _should_continue(consumer, registration):
            return
        consumer.admission.admit()
        consumer.lifecycle.admitted()
        await self._channel.subscribe(consumer)


def _log_changed(consumer: QueueConsumer, *, limits_changed: bool) -> None:
    """Log the limits that this worker declares, if they hold now, and that it declares other rules of lanes."""
    has_rules = consumer.options.lanes not in {b"", NO_RULES}
    limits = describe_limits(parse_limits(consumer.options.limits))
    text = "queue %(queue)r: its workers declare other rules of its lanes"
    if limits_changed:
        text = "queue %(queue)r: what may start in the mesh is now %(limits)s"
        limits += "; its lanes have rules of their own" if has_rules else ""
    emit(logger, "limits.changed", text, queue=consumer.name, limits=limits)


def _should_continue(consumer: QueueConsumer, registration: Registration) -> bool:
    """Return False if the queue is being left. Raise ClaimLost if the registration has died."""
    if registration.dead:
        raise ClaimLost(f"worker {registration.worker} was swept while it entered queue {consumer.queue!r}")
    return not consumer.lifecycle.is_leaving
