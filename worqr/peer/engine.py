"""`Engine`: runs a peer. This module has its lifetime, and the calls between its duties; each duty has a file of its own.

Lifetimes are nested, so that leaving is an orderly shutdown: the link outlives the registration, which outlives settling, which
outlives the handlers, which outlive claiming. The engine (slots, chores, reconciling) runs behind a shield in one task of `join`.
An outer cancellation therefore reaches the application's own tasks only; the peer then leaves in order, with a deadline.
"""

# The private fields of Context are hidden from users, not from its neighbours.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import logging
import re
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, Literal

import trio

from worqr.errors import UsageError
from worqr.keys import QueueKeys, RegistryKeys
from worqr.link import Link
from worqr.log_events import emit
from worqr.peer.adaptive_concurrency import Pacer
from worqr.peer.consumer import Station
from worqr.peer.consumer_shutdown import AWAY_PATIENCE, LEAVE_PATIENCE, Leaving
from worqr.peer.consumers import Stations
from worqr.peer.context import Context
from worqr.peer.control_channel import Cancelling
from worqr.peer.deadlines import Deadlines
from worqr.peer.leading import Leader
from worqr.peer.mapping import Mapping
from worqr.peer.noting import note_forever
from worqr.peer.options import Handling, check_concurrency
from worqr.peer.progress import Saying
from worqr.peer.reconciler import Strays
from worqr.peer.runners import Runners
from worqr.peer.running import Slots
from worqr.peer.scheduler import Capacity
from worqr.peer.serving import Serving, our_own
from worqr.peer.session import Membership, Registration
from worqr.peer.settings import PeerSettings
from worqr.peer.settling import Settler
from worqr.peer.stuck_handlers import Stuck
from worqr.peer.ticking import Ticker
from worqr.peer.wrong_loop import error_of_run
from worqr.validation import Seconds, seconds

logger: logging.Logger = logging.getLogger(__name__)

DEFAULT_KEEPALIVE = 3.0
SETTLE = 1.0
"""Seconds within which a program must begin to serve a queue by hand, while one of its tasks already waits for the peer."""
REST = 1.0
"""Seconds that a leader has to end its round of chores before the peer leaves."""


class Engine:
    """The duties of one peer, and its lifetime; `Peer` is for users. Under Trio only; set once: `settings`, the duties."""

    def __init__(self, settings: PeerSettings, link: Link) -> None:
        self.settings = settings
        self.capacity: Capacity = Capacity(settings.concurrency)
        self._link = link
        self._drained = trio.Event()
        self._spawned: trio.Nursery | None = None
        self._runners = Runners(settings)
        registry = RegistryKeys(settings.prefix)
        label = re.sub(r"[^A-Za-z0-9._-]", "-", settings.app or socket.gethostname())[:60]
        self.membership: Membership = Membership(self, link, registry, label=label, keepalive=settings.keepalive)
        self.cancelling: Cancelling = Cancelling(self, link)
        self.leader: Leader = Leader(self, link, registry, keepalive=settings.keepalive or DEFAULT_KEEPALIVE)
        self._ticker = Ticker(self, link, registry, settings.schedules)
        self._settler = Settler(
            *(link, self.membership.settles, self.capacity.offer),
            max_result=settings.max_payload,
            onlooker=settings.onlooker,
        )
        self.capacity.offer_soon = self._settler.touch
        self.strays: Strays = Strays(self, link, self._settler)
        self._mapping = Mapping(self, link)
        self.deadlines: Deadlines = Deadlines()
        self._slots = Slots(self._run_ended, self._interrupted, self.deadlines)
        self.stuck: Stuck = Stuck(self._served, self._slots, after=settings.stuck_after)
        self._leaver = Leaving(self.membership, self._settler, self.stuck, self._served, self.spawn)
        self._stations = Stations(settings, self.membership, self.capacity, self._leaver)
        self.serving: Serving = Serving(link, settings, self._runners, self._slots, self._stations)
        self.saying: Saying = Saying(link)
        self._pacer = Pacer(self.capacity)
        self.interrupt: KeyboardInterrupt | None = None
        self.body: trio.CancelScope = trio.CancelScope()
        self._unserved: set[str] = set()

    # Reading its state

    @property
    def id(self) -> str:
        """The present worker id; a peer that was declared dead joins again under a new one."""
        registration = self.membership.registration
        return "" if registration is None else registration.worker

    @property
    def leaving(self) -> bool:
        """It claims no more tasks, and is leaving its queues."""
        return self._stations.closed

    @property
    def app(self) -> str:
        return self.settings.app

    @property
    def block_limit(self) -> float:
        return self.settings.block_limit

    def set_concurrency(self, n: int | Literal["auto"]) -> None:
        """Change how many units of work the peer holds at once. Tasks that run already are not affected."""
        self.capacity.set_concurrency(check_concurrency(n))

    def queue_keys(self, queue: str) -> QueueKeys:
        """The keys of a queue of this mesh."""
        return QueueKeys.of(self.settings.prefix, queue)

    async def shards_of(self, queue: str) -> tuple[QueueKeys, ...]:
        """The keys of all shards of a queue of this mesh."""
        keys, sharding = self.queue_keys(queue), self.settings.sharding
        return (keys,) if sharding is None else await sharding.of(keys, declare=False)

    def entered_stations(self) -> list[Station]:
        """The queues it serves now."""
        return [station for station in self._stations if station.entered and not station.left.is_set()]

    def held_stations(self) -> list[Station]:
        """The queues it serves now, and those where runs were left behind."""
        return [*self.entered_stations(), *self._leaver.lingering]

    def is_served_anew(self, station: Station) -> bool:
        """Return True if another station serves the queue that this one has left.

        Both hear each wake-up, but only one may request tasks. In case a reply is lost and its request is repeated, the server
        keeps the reply to the worker's last request, and no other.
        """
        return self._stations.get(station.name) not in {None, station}

    def claims_of(self, name: str) -> set[int]:
        """The claims of a queue that this peer knows of. They run (where the queue is served, or where runs were
        left behind), are on their way back, or wait until the server accepts their settle.
        """
        stations = [station for station in (*self._stations, *self._leaver.lingering) if station.name == name]
        known = self.membership.settles.claims_of(name)
        return known.union(*(station.running for station in stations), *(station.turned_away for station in stations))

    def _served(self) -> list[Station]:
        return list(self._stations)

    async def serve_all(self, handlers: Iterable[tuple[str, Callable[[bytes], object], Handling]]) -> None:
        """Serve these queues until the peer leaves; return when all are subscribed."""
        assert self._spawned is not None
        await self.serving.serve_all(self._spawned, handlers)

    # Called by its duties

    def _run_ended(self, context: Context, returned: bool, error: BaseException | None) -> None:
        if error is not None:
            error = error_of_run(context, error)
        self._settler.ended(context, returned, error)
        context._station.ended(context)
        self._settler.touch()

    def _interrupted(self, interrupt: KeyboardInterrupt) -> None:
        """Ctrl-C arrived in a handler: end the block of `join`, which raises it once the peer has left."""
        self.interrupt = interrupt
        self.body.cancel()

    def hear_of_waiting(self, queues: list[str]) -> None:
        """A heartbeat's reply named the queues with waiting tasks: a wake-up may have been lost."""
        for queue in queues:
            station = self._stations.get(queue)
            if station is not None and station.entered:
                station.look()
            elif station is None and queue.startswith("{") and queue not in self._unserved:
                self._look_at_unserved(queue)

    def _look_at_unserved(self, name: str) -> None:
        """A queue that is not served here has waiting tasks. If it is a shard of a served queue, this peer joined too early."""
        queue = self.queue_keys(name).shown
        if queue != name and self._stations.get(queue) is not None:
            self._unserved.add(name)
            text = (
                "queue %(queue)r has shards that this worker does not serve, because it joined before they were declared: "
                "restart it"
            )
            emit(logger, "shards.unserved", text, queue=queue)

    def forget_claims(self, registration: Registration) -> None:
        """A registration was declared dead: its running tasks are lost."""
        self._settler.forget()
        self.membership.settles.forget(registration)
        for station in self._stations:
            for context in tuple(station.running.values()):
                if context._registration is registration:
                    context._cancel("lost")

    def describe_running(self) -> str:
        """The handler that blocks the loop, for the log; called from the heartbeat thread."""
        return self._slots.describe_blocking()

    def spawn(self, task: Callable[[], Awaitable[Any]]) -> bool:
        """Run an internal task behind the engine's shield; return False if the engine does not run."""
        if self._spawned is None:
            return False
        self._spawned.start_soon(task)
        return True

    # Its lifetime

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """The engine: registers, then runs all duties until `leave` ends it. Started means registered, with a heartbeat."""
        if self.settings.sharding is not None:
            await self.settings.sharding.learn()
            await self.settings.sharding.declare()
        await self.membership.register()
        await self._ticker.declarer.declare()
        with trio.CancelScope() as self._shield:
            try:
                async with trio.open_nursery() as nursery:
                    self._spawned = nursery
                    await nursery.start(self._slots.run_forever)
                    await nursery.start(self._runners.run_forever)
                    nursery.start_soon(self._settler.flush_forever)
                    nursery.start_soon(self.membership.settles.try_again_forever)
                    nursery.start_soon(self.deadlines.watch_forever)
                    nursery.start_soon(self.stuck.watch_forever)
                    nursery.start_soon(self.saying.send_forever)
                    nursery.start_soon(self._pacer.pace_forever)
                    nursery.start_soon(self.leader.lead_forever)
                    nursery.start_soon(self.leader.sweeper.sweep_forever)
                    nursery.start_soon(self.leader.scanner.scan_forever)
                    nursery.start_soon(self.leader.promoter.promote_forever)
                    nursery.start_soon(note_forever, self._link, self.membership.keys, self._served)
                    if self.settings.onlooker is None:
                        nursery.start_soon(self._ticker.tick_forever)
                    nursery.start_soon(self.cancelling.reconcile_forever)
                    nursery.start_soon(self.strays.look_forever)
                    nursery.start_soon(self._mapping.map_forever)
                    await trio.lowlevel.checkpoint_if_cancelled()  # before the shield: `join` may be cancelled already
                    self._shield.shield = True
                    task_status.started()
            finally:
                self._spawned = None

    @asynccontextmanager
    async def joined(self) -> AsyncGenerator[Engine]:
        """The peer's lifetime around the block of `join`. Raises the block's own error, never an internal exception group."""
        error: BaseException | None = None
        try:
            async with trio.open_nursery() as nursery:
                try:
                    await nursery.start(self.run)
                    with self.body:
                        yield self
                        await self.drain()
                except BaseException as raised:
                    error = raised  # raised again below, after all claims are given back
                await self.leave()
        except BaseExceptionGroup as group:
            _, broken = group.split(trio.Cancelled)
            if broken is None:
                raise
            error = our_own(broken)
        if self.interrupt is not None:
            raise self.interrupt
        if error is not None:
            raise error

    async def drain(self, grace: Seconds | None = None) -> None:
        """Claim no more tasks, let running ones end within `grace` seconds (default: that of join), give back the rest, leave.

        Returns when all queues are left. May be called twice. Cancelling the call does not stop the leaving.
        """
        wait = self.settings.grace if grace is None else seconds(grace, "grace")
        if not self.leaving:
            text = "worker %(worker)s takes no more tasks, and leaves within %(grace)g s"
            emit(logger, "drain", text, worker=self.id, grace=wait)
        self._stations.closed = True
        stations = list(self._stations)
        for station in stations:
            self._leaver.begin(station, wait)
        with trio.move_on_after(wait):  # of several calls, the shortest grace applies
            for station in stations:
                await station.left.wait()
        for station in stations:
            station.hurry.set()
        for station in stations:
            await station.left.wait()
        self._drained.set()
        await trio.lowlevel.checkpoint()

    async def wait(self) -> None:
        """Wait until the peer has drained.

        Raises:
            UsageError: it would never drain: it serves no queue and declares no schedule.
        """
        if self.settings.nothing and not self._drained.is_set():
            with trio.move_on_after(SETTLE):
                await self._stations.used.wait()
            if not (self._stations.used.is_set() or self._drained.is_set()):
                raise UsageError(
                    f"this peer serves nothing: {self.settings.nothing}; import the module that declares them, or serve "
                    "a queue with peer.serve() before peer.wait()"
                )
        await self._drained.wait()

    async def leave(self) -> None:
        """The end of `join`: cancel running tasks, give them back, then leave the registry, all within a deadline.

        Handlers on the Trio loop that ignore their cancellation delay it, because Trio cannot end them.
        """
        with trio.CancelScope(shield=True):
            for station in self._stations:
                station.hurry.set()
            await self.drain(0)
            with trio.move_on_after(REST if self._leaver.heard else 0):
                await self.leader.rest()
            if self._leaver.holds_claims():
                self.membership.vanish()
            else:
                await self.membership.unregister(LEAVE_PATIENCE if self._leaver.heard else AWAY_PATIENCE)
            self._leaver.let_go()
            if self._spawned is not None:
                self._shield.cancel()
