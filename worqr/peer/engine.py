"""`Engine`: runs a peer. Here: its lifetime, and the list of its tasks.

Lifetimes are nested, so that leaving is an orderly shutdown. The link outlives the registration, which outlives settling, which
outlives the handlers, which outlive claiming. The engine runs slots, chores and checks behind a shield, in one task of `join`. So
a cancellation from outside reaches the application's own tasks only. The peer then leaves in order, with a deadline.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final, Literal

import msgspec
import trio

from worqr import ops
from worqr.client.topics import Subscribed
from worqr.errors import Unavailable, UsageError, WorqrError
from worqr.handler_options import Handling
from worqr.keys import QueueKeys, RegistryKeys
from worqr.link import Link, end_waits_by
from worqr.log_events import emit
from worqr.peer.consumer import ActiveConsumers, ConsumerServices, Reconciler, Slots
from worqr.peer.consumer_runner import (
    DETACH_AFTER,
    LEAVE_PATIENCE,
    UNREACHABLE_PATIENCE,
    ConsumerRunner,
    StuckHandlerMonitor,
    unwrap_error,
)
from worqr.peer.error_throttle import ErrorThrottle, sleep_aligned
from worqr.peer.executors.executors import Executors
from worqr.peer.leader.leader import Leader
from worqr.peer.leader.schedule_ticker import ScheduleDeclarer, ScheduleTicker
from worqr.peer.options import PeerSettings, check_concurrency
from worqr.peer.run import current_run
from worqr.peer.run_reports import RunReports
from worqr.peer.scheduler import Scheduler, adjust_forever
from worqr.peer.session import Registration, Session
from worqr.peer.settler import Settler
from worqr.validation import Seconds, seconds

# `SubscriptionDeclarer`: stores what the handlers of an application are subscribed to, at the join and every ten minutes.

logger: logging.Logger = logging.getLogger(__name__)

CHECK_EVERY: Final = 2.0
"""Seconds between two checks for handlers that were declared after the join."""
REDECLARE: Final = 600.0
"""Seconds between two declarations of what has not changed."""


class SubscriptionDeclarer:
    """Keeps the subscriptions of one peer declared.

    After a new registration of `session`, and after a reconnect, all are declared again: a server that took over may lack them.
    """

    def __init__(self, link: Link, settings: PeerSettings, session: Session) -> None:
        self._link = link
        self._keys = RegistryKeys(settings.prefix)
        self._declared: Mapping[str, Subscribed] = settings.subscriptions
        self._owner = settings.owner
        self._session = session
        self._stored: dict[str, Subscribed] = {}
        self._stored_as: object = None
        self._renew_at = 0.0
        self._throttle = ErrorThrottle(logger)

    async def declare(self) -> None:
        """Store the subscriptions that are new, or all if it is time, or if the registry may have lost them."""
        now, wanted = trio.current_time(), dict(self._declared)
        known_by = (self._session.registration, self._link.connected_at)
        if known_by != self._stored_as or now >= self._renew_at:
            self._stored = {}
        new = {queue: each for queue, each in wanted.items() if self._stored.get(queue) != each}
        if new:
            await self._link.call_all(
                [
                    ops.declare_topics(self._keys, queue, msgspec.json.encode(each.facts), each.patterns, self._owner)
                    for queue, each in new.items()
                ]
            )
            former = {alias for each in new.values() for alias in each.facts.aliases} - wanted.keys()
            await self._link.call_all([ops.drop_topics(self._keys, alias) for alias in sorted(former)])
        if not self._stored:
            self._stored_as, self._renew_at = known_by, now + REDECLARE
        self._stored = wanted

    async def declare_forever(self) -> None:
        """Declare what is new, and all again before the registry drops it."""
        while True:
            await sleep_aligned(CHECK_EVERY)
            try:
                await self.declare()
            except Unavailable as error:
                emit(logger, "declare_topics", "the server is away, trying again: %(error)s", error=str(error))
            except WorqrError as error:
                text = "the server refuses the subscriptions, trying again: %(error)s"
                self._throttle.error("", "declare_topics", text, error=str(error))


# `Engine`: runs a peer.

DEFAULT_KEEPALIVE = 3.0
SERVE_WITHIN = 1.0
"""Seconds after the call of `wait` within which the program must begin to serve a queue, if the mesh declares nothing to
serve.
"""
HELD_EVERY = 0.05
"""Seconds between two looks at the handlers that end after a failure."""
CHORES_WITHIN = 1.0
"""Seconds that a leader has to end its round of chores before the peer leaves."""


class Engine:
    """The duties of one peer, and its lifetime. Users hold a `Peer` instead. Under Trio only; set once: `settings`, the
    duties.
    """

    def __init__(self, settings: PeerSettings, link: Link) -> None:
        end_waits_by(lambda: current_run.get(None))
        keys = RegistryKeys(settings.prefix)
        self.settings: PeerSettings = settings
        self.link: Link = link
        self.scheduler: Scheduler = Scheduler(settings.concurrency)
        self.executors: Executors = Executors(settings, self.scheduler)
        self.slots: Slots = Slots(self._interrupted)
        self.reports: RunReports = RunReports(link, settings.values, redacts=settings.redact_errors)
        self.settler: Settler = Settler(
            *(link, self.scheduler, self.reports), max_result=settings.max_payload, observer=settings.observer
        )
        self.consumers: ActiveConsumers = ActiveConsumers()
        self.leader: Leader = Leader(
            link, keys, keepalive=settings.keepalive or DEFAULT_KEEPALIVE, history_queues=settings.history_queues
        )
        self.session: Session = Session(link, settings, self)
        self.reconciler: Reconciler = Reconciler(link, self.consumers, self.settler, self.session, self.leader)
        self.stuck: StuckHandlerMonitor = StuckHandlerMonitor(self.consumers, self.slots, after=settings.stuck_after)
        services = ConsumerServices(
            *(link, self.session, self.scheduler, self.slots, self.settler, self.reports, self.reconciler),
            *(settings.values, settings.redact_errors, settings.deploy),
            permits=settings.permits,
        )
        self.queues: ConsumerRunner = ConsumerRunner(
            settings, services, self.executors, self.consumers, self.stuck, self.spawn
        )
        self._ticker = ScheduleTicker(link, keys, self.leader.lease, self.shards_of, settings.tracing)
        self._drained = trio.Event()
        self._spawned: trio.Nursery | None = None
        self.interrupt: KeyboardInterrupt | None = None
        self.body: trio.CancelScope = trio.CancelScope()

    # Reading its state

    @property
    def id(self) -> str:
        """The present worker id. A peer that was declared dead joins again under a new one."""
        registration = self.session.registration
        return "" if registration is None else registration.worker

    @property
    def leaving(self) -> bool:
        """The peer claims no more tasks, and is leaving its queues."""
        return self.consumers.closed

    def set_concurrency(self, n: int | Literal["auto"]) -> None:
        """Change how many units of work the peer holds at once. Tasks that run already are not affected."""
        self.scheduler.set_concurrency(check_concurrency(n))

    async def shards_of(self, queue: str) -> tuple[QueueKeys, ...]:
        """Return the keys of all shards of a queue of this mesh."""
        keys, sharding = QueueKeys.of(self.settings.prefix, queue), self.settings.sharding
        return (keys,) if sharding is None else await sharding.shards(keys, declare=False)

    async def serve_all(self, handlers: Iterable[tuple[str, Callable[[bytes], object], Handling]]) -> None:
        """Serve these queues until the peer leaves; return when all are subscribed."""
        assert self._spawned is not None
        await self.queues.serve_all(self._spawned, handlers)

    # Called by its parts

    def on_lost(self, registration: Registration) -> None:
        """Forget the tasks of a registration that is over: they belong to other workers. Register again, and serve the same
        queues.
        """
        self.settler.forget(registration)
        for consumer in self.consumers:
            for run in tuple(consumer.running.values()):
                if run.registration is registration:
                    run.cancel("lost")
        if not self.leaving:
            self.spawn(self._rejoin)

    async def _rejoin(self) -> None:
        registration = await self.session.register_again()
        if registration is not None:
            await self.queues.enter_again(registration)

    def _interrupted(self, interrupt: KeyboardInterrupt) -> None:
        """End the block of `join`, because Ctrl-C arrived in a handler. `join` raises it when the peer has left."""
        self.interrupt = interrupt
        self.body.cancel()

    def spawn(self, task: Callable[[], Awaitable[Any]]) -> bool:
        """Run an internal task behind the engine's shield; return False if the engine does not run."""
        if self._spawned is None:
            return False
        try:
            self._spawned.start_soon(task)
        except RuntimeError:  # all tasks have ended, and `run` has not gone on yet
            return False
        return True

    # Its lifetime

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Register, then run all duties until `leave` ends them. It counts as started when the heartbeat runs."""
        if self.settings.sharding is not None:
            await self.settings.sharding.refresh()
            await self.settings.sharding.declare()
        await self.session.register()
        declarer = ScheduleDeclarer(self.link, self.settings, self.shards_of, self.session)
        subscriber = SubscriptionDeclarer(self.link, self.settings, self.session)
        await declarer.declare()
        await subscriber.declare()
        with trio.CancelScope() as self._shield:
            try:
                async with trio.open_nursery() as nursery:
                    self._spawned = nursery
                    await nursery.start(self.slots.run_forever)
                    await nursery.start(self.executors.run_forever)
                    for task in self._tasks(declarer, subscriber):
                        nursery.start_soon(task)
                    await trio.lowlevel.checkpoint_if_cancelled()  # before the shield: `join` may be cancelled already
                    self._shield.shield = True
                    task_status.started()
            finally:
                self._spawned = None

    def _tasks(
        self, declarer: ScheduleDeclarer, subscriber: SubscriptionDeclarer
    ) -> Sequence[Callable[[], Awaitable[None]]]:
        """Return its other tasks, which run until it has left."""
        settler, leader = self.settler, self.leader
        tasks: list[Callable[[], Awaitable[None]]] = [
            *(self.slots.deadlines.watch_forever, self.reports.send_forever, partial(adjust_forever, self.scheduler)),
            *(settler.flush_forever, settler.settles.retry_forever, settler.counter.send_forever),
            *(self.stuck.watch_forever, self.reconciler.reconcile_forever),
            *(self.queues.note_queues_forever, self.queues.work_map.refresh_forever, self._stop_after_failure),
            *(leader.lead_forever, leader.sweeper.sweep_forever, leader.scanner.scan_forever),
            *(
                leader.scanner.history.sample_forever,
                leader.due_jobs.promote_forever,
                leader.due_jobs.relay.relay_forever,
            ),
        ]
        if self.settings.observer is None:
            tasks += [declarer.declare_forever, subscriber.declare_forever, self._ticker.tick_forever]
        return tasks

    async def _stop_after_failure(self) -> None:
        """If a task of the engine fails, use no more replies: its handlers end, and no more can begin. Otherwise all queues were
        left before.

        Handlers in threads and on asyncio loops that do not end are left behind, so that the peer ends in any case.
        """
        try:
            await trio.sleep_forever()
        finally:
            self.consumers.close()
            self._give_up_grace()
            with trio.move_on_after(DETACH_AFTER, shield=True):
                while self.slots.held():  # noqa: ASYNC110 - slots have no event for a failure, which happens once
                    await trio.sleep(HELD_EVERY)
            for run in self.slots.held():
                if run.offloaded is not None:
                    run.offloaded.detach()

    def _give_up_grace(self) -> None:
        """Begin to leave all queues, without a grace."""
        for consumer in self.consumers:
            self.queues.shutdown.begin(consumer, 0)
            consumer.lifecycle.skip_grace()

    @asynccontextmanager
    async def joined(self) -> AsyncGenerator[Engine]:
        """Run the peer for the length of a block, which is the block of `join`.

        Raises the block's own error, never an internal exception group.
        """
        error: BaseException | None = None
        try:
            async with trio.open_nursery() as nursery:
                try:
                    await nursery.start(self.run)
                    with self.body:
                        yield self
                        await self.drain()
                except BaseException as raised:
                    error = raised  # raised again below, when all claims were given back
                await self.leave()
        except BaseExceptionGroup as group:
            _, broken = group.split(trio.Cancelled)
            if broken is None:
                raise
            error = unwrap_error(broken)
        if self.interrupt is not None:
            raise self.interrupt
        if error is not None:
            raise error

    async def drain(self, grace: Seconds | None = None) -> None:
        """Claim no more tasks, let running ones end within `grace` seconds, give back the others, and leave all queues.

        Returns when all queues are left. The default of `grace` is that of `join`. May be called twice. A cancelled call does not
        stop the leaving.
        """
        wait = self.settings.grace if grace is None else seconds(grace, "grace")
        if not self.leaving:
            text = "worker %(worker)s takes no more tasks, and leaves within %(grace)g s"
            emit(logger, "drain", text, worker=self.id, grace=wait)
        self.consumers.close()
        consumers = list(self.consumers)
        for consumer in consumers:
            self.queues.shutdown.begin(consumer, wait)
        with trio.move_on_after(wait):  # of several calls, the shortest grace applies
            for consumer in consumers:
                await consumer.lifecycle.left.wait()
        for consumer in consumers:
            consumer.lifecycle.skip_grace()
        for consumer in consumers:
            await consumer.lifecycle.left.wait()
        self._drained.set()
        await trio.lowlevel.checkpoint()

    async def wait(self) -> None:
        """Wait until the peer has drained.

        Raises:
            UsageError: it would never drain, because it serves no queue and declares no schedule.
        """
        if self.settings.why_idle and not self._drained.is_set():
            with trio.move_on_after(SERVE_WITHIN):
                await self.consumers.used.wait()
            if not (self.consumers.used.is_set() or self._drained.is_set()):
                raise UsageError(
                    f"this peer serves nothing: {self.settings.why_idle}; import the module that declares them, or serve "
                    "a queue with peer.serve() before peer.wait()"
                )
        await self._drained.wait()

    async def leave(self) -> None:
        """End `join`: cancel running tasks, give them back, and deregister, within a deadline.

        Handlers on the Trio loop that ignore their cancellation delay it, because Trio cannot end them.
        """
        shutdown = self.queues.shutdown
        with trio.CancelScope(shield=True):
            self._give_up_grace()
            await self.drain(0)
            with trio.move_on_after(CHORES_WITHIN if shutdown.server_answers else 0):
                await self.leader.stop()
            if shutdown.holds_claims(self.session.registration):
                self.session.leave_silently()
            else:
                await self.session.unregister(LEAVE_PATIENCE if shutdown.server_answers else UNREACHABLE_PATIENCE)
            shutdown.abandon_detached()
            if self._spawned is not None:
                self._shield.cancel()
