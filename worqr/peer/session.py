"""Membership: a peer's registration in the mesh, from start_worker to stop_worker, and again after it was declared dead.

A registration is one worker id. A thread sends its heartbeats. The reply `dead` to a heartbeat, or a queue that does not list
the worker, ends it at once: none of its requests is sent any more, its running handlers are cancelled as lost, and a new
registration serves the same queues. A queue is entered in the work map first, then in the fence; it is left in the opposite
order. So the leader finds the claims of a worker that dies in between.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import trio
from trio_util import RepeatedEvent

from worqr import ops
from worqr.errors import ClaimLost, WorqrError
from worqr.keys import RegistryKeys
from worqr.link import Heartbeat, Link, WorkerHandle, answer_timeout, boottime
from worqr.log_events import emit
from worqr.ops import Beat
from worqr.peer.departures import Departure, Departures
from worqr.peer.settles import Settles
from worqr.version import __version__

if TYPE_CHECKING:
    from worqr.peer.consumer import Station
    from worqr.peer.context import Context
    from worqr.peer.engine import Engine

logger: logging.Logger = logging.getLogger(__name__)

BEAT_EVERY = 1.0
LEASE = 2.0
UNDO_PATIENCE = 1.0


class Registration(WorkerHandle):
    """One worker id. `dead` is set when the registration is over; its requests are not sent any more.

    Attributes:
        alive_at: when the newest heartbeat was sent that the server answered with "alive"; minus infinity once it has answered
            "dead". Set in the heartbeat thread when the reply is read, which is before the loop handles it.
    """

    def __init__(self, label: str) -> None:
        worker = f"{label}:{secrets.token_hex(16)}"
        super().__init__(worker)
        self.worker: str = worker
        self.alive_at: float = boottime()
        self.heartbeat: Heartbeat[Beat] | None = None
        self.number: int = 0

    def noting(self, call: ops.Call[Beat]) -> ops.Call[Beat]:
        """A heartbeat whose reply sets `alive_at`. Called in the heartbeat thread, before it sends the heartbeat."""
        sent, read = boottime(), call.read

        def note(reply: list[Any]) -> Beat:
            beat = read(reply)
            self.alive_at = sent if beat.alive else -math.inf
            return beat

        call.read = note
        return call

    def next_number(self) -> int:
        """The number of its next start request, the same counter for all queues: it only has to grow."""
        self.number += 1
        return self.number


class Membership:
    """Keeps a peer registered. Changed only in the loop."""

    def __init__(self, engine: Engine, link: Link, keys: RegistryKeys, *, label: str, keepalive: float | None) -> None:
        self.link = link
        self.keys = keys
        self.registration: Registration | None = None
        self.settles: Settles = Settles(link)
        self.departures: Departures = Departures(link, keys, self.settles, engine.spawn)
        self._engine = engine
        self._label = label
        self._keepalive = keepalive
        self._held: list[tuple[Registration, Callable[[], None]]] = []
        self._changed = RepeatedEvent()

    # Registering

    @property
    def keepalive_ms(self) -> int:
        return 0 if self._keepalive is None else round(self._keepalive * 1000)

    async def register(self) -> Registration:
        """Take a fresh worker id and start sending heartbeats."""
        registration = Registration(self._label)
        facts: list[tuple[str, str | int]] = [
            *(
                ("host", socket.gethostname()),
                ("pid", os.getpid()),
                ("app", self._engine.app),
                ("version", __version__),
            ),
            *(("capacity", self._engine.capacity.concurrency), ("keepalive_ms", self.keepalive_ms)),
            *(("running", 0), ("room", self._engine.capacity.concurrency)),
        ]
        heartbeat = registration.heartbeat = self._new_heartbeat(registration)
        heartbeat.open()  # meanwhile: on a slow network the key would expire before it has connected
        sent = boottime()
        try:
            await self.link.call(
                ops.start_worker(self.keys, registration.worker, keepalive_ms=self.keepalive_ms, facts=facts)
            )
        except trio.Cancelled:
            with trio.CancelScope(shield=True):  # start_worker may be on its way
                await self._end(registration, UNDO_PATIENCE)
            raise
        except BaseException:
            heartbeat.stop()
            raise
        registration.alive_at = sent
        heartbeat.start()
        self.registration = registration
        self._changed.set()
        emit(logger, "start_worker", "worker %(worker)s has joined the mesh", worker=registration.worker)
        return registration

    def _new_heartbeat(self, registration: Registration) -> Heartbeat[Beat]:
        engine = self._engine

        def make(n: int, turning: bool) -> ops.Call[Beat]:
            return ops.keep_worker_alive(
                *(self.keys, registration.worker, n),
                keepalive_ms=self.keepalive_ms,
                lease_ms=round(LEASE * 1000) if turning and engine.leader.is_fresh() else 0,
                running=engine.capacity.running,
                room=max(0, engine.capacity.room),
                standing=engine.leader.standing_lease(),
            )

        return self.link.heartbeat(
            make=lambda n, turning: registration.noting(make(n, turning)),
            replied=lambda beat: self._beat(registration, beat),
            every=BEAT_EVERY if self._keepalive is None else min(BEAT_EVERY, self._keepalive / 3),
            timeout=answer_timeout(self._keepalive),
            block_limit=engine.block_limit,
            describe=engine.describe_running,
        )

    async def registered(self) -> Registration:
        """The present registration; wait while a new one is being made."""
        while self.registration is None or self.registration.dead:
            await self._changed.wait()
        return self.registration

    # Heartbeats

    def beat_is_fresh(self) -> bool:
        """Return True while no leader can have declared this worker dead.

        The newest acknowledged heartbeat was sent less than a keepalive ago, and its reply was "alive".
        """
        registration = self.registration
        if registration is None or registration.dead:
            return False
        return self._keepalive is None or boottime() - registration.alive_at < self._keepalive

    def after_beat(self, registration: Registration, go_on: Callable[[], None]) -> None:
        """Run `go_on` when a heartbeat has shown whether this worker is registered; it finds the registration dead if not.

        Invariant: a claim whose reply came while `beat_is_fresh()` was false reaches its handler only when that is true again.
        The reply to an old heartbeat does not count: after a freeze it may have been in the socket since before, while the claim
        was recovered and its task runs elsewhere.
        """
        self._held.append((registration, go_on))

    def _beat(self, registration: Registration, beat: Beat) -> None:
        if registration.dead:
            return
        if not beat.alive:
            self.lost(registration, "it was declared dead and its tasks were given back")
            return
        if beat.revived:
            text = "worker %(worker)s missed its heartbeat deadline but was not reassigned; continuing"
            emit(logger, "keep_worker_alive", text, worker=registration.worker)
        if self._held and self.beat_is_fresh():
            held, self._held = self._held, []
            for _, go_on in held:
                go_on()
        heartbeat = registration.heartbeat
        if beat.leads and heartbeat is not None:
            self._engine.leader.lease(until=(heartbeat.heard_at or boottime()) + LEASE)
        self._engine.leader.saw_lease(beat.lease)
        self._engine.hear_of_waiting(beat.waiting)

    def lost(self, registration: Registration, why: str) -> None:
        """This registration is over: cancel all its runs, and register again."""
        if registration.dead:
            return
        text = "worker %(worker)s is out of the mesh: %(reason)s; it joins again under a new id"
        emit(logger, "worker.lost", text, worker=registration.worker, reason=why)
        registration.dead = True
        if registration.heartbeat is not None:
            registration.heartbeat.stop()
        held, self._held = self._held, []
        for _, go_on in held:
            go_on()
        self._engine.forget_claims(registration)
        if not self._engine.leaving:
            self._engine.spawn(self.rejoin)

    async def rejoin(self) -> None:
        """Register under a fresh worker id and serve all queues again; repeat until it works or the peer leaves."""
        while not self._engine.leaving:
            try:
                registration = await self.register()
            except WorqrError as error:
                text = "this worker could not join again, next try in %(retry_in)s s: %(error)s"
                emit(logger, "start_worker", text, level=logging.WARNING, retry_in=1, error=str(error))
                await trio.sleep(1)
            else:
                async with trio.open_nursery() as nursery:
                    for station in self._engine.entered_stations():
                        nursery.start_soon(self._enter_again, station, registration)
                return

    async def _enter_again(self, station: Station, registration: Registration) -> None:
        """Retry without limit: on a cluster the node of one queue may be away while those of the others are not."""
        while not (registration.dead or station.quiet):
            try:
                await self.enter(station, registration)
            except ClaimLost:
                return  # lost again: another rejoin has been started
            except WorqrError as error:
                text = "queue %(queue)r could not be entered again, next try in %(retry_in)s s: %(error)s"
                emit(logger, "start_work", text, queue=station.name, retry_in=1, error=str(error))
                await trio.sleep(1)
            else:
                return

    def check_marks(self, station: Station) -> None:
        """A cancel message, or a check for strays, came while claims were on their way: now they are known."""
        self._engine.cancelling.reconcile(station)
        self._engine.strays.look(station)

    def says(self, context: Context) -> None:
        """A run reported its progress; from any thread."""
        self._engine.saying.says(context)

    def extends(self, context: Context, seconds: float) -> None:
        """A run asks for more time; from any thread."""
        self._engine.deadlines.extends(context, seconds)

    # Entering and leaving queues

    async def enter(self, station: Station, registration: Registration) -> None:
        """Serve a queue under `registration`: work map, fence, subscription, and the first start request.

        Returns early if the queue is being left meanwhile. If this worker is still leaving it, wait for that first.

        Raises:
            ClaimLost: the registration died meanwhile.
        """
        station.registration = registration
        station.in_fence = False  # request nothing before the fence has this registration
        station.compared_at = station.mapped_at = self.link.connections
        await self.departures.wait_gone(station, registration)
        if await self.link.call(ops.map_work(self.keys, registration.worker, station.name)) == "dead":
            self.lost(registration, "the registry does not know it")
        if registration.dead:
            raise ClaimLost(f"worker {registration.worker} was swept while it entered queue {station.queue!r}")
        if station.quiet:
            return
        policy = station.policy
        await self.link.call(
            ops.start_work(
                *(station.keys, registration.worker),
                max_stalls=policy.max_stalls,
                keep_failed=policy.keep_failed,
                last=registration.number,
                on_failure=policy.on_failure,
                result_ttl_ms=round(policy.result_ttl * 1000) if policy.result_ttl > 0 else None,
            )
        )
        if registration.dead:
            raise ClaimLost(f"worker {registration.worker} was swept while it entered queue {station.queue!r}")
        if station.quiet:
            return
        station.entered = station.in_fence = True
        await self._engine.cancelling.subscribe(station)

    def leave(self, station: Station, *, stay: bool = False) -> Departure | None:
        """Begin to leave a queue: out of the fence, all claims back to the front, then out of the work map.

        With `stay`, another station of this peer needs the worker's place in the fence: only the channels are left.

        Returns:
            The departure, which goes on without the caller; None if there is nothing to leave.
        """
        registration = station.registration
        self._engine.cancelling.unsubscribe(station)
        if registration is None or registration.dead or stay:
            return None
        return self.departures.begin(station, registration)

    async def unregister(self, patience: float) -> None:
        """Leave the mesh. If the time does not suffice, the leader gives the remaining claims back."""
        if self.registration is not None:
            await self._end(self.registration, patience)

    def vanish(self) -> None:
        """Leave the mesh without deregistering, like a worker that dies, because our claims must not be given back yet."""
        registration = self.registration
        if registration is not None and not registration.dead:
            text = "worker %(worker)s leaves without deregistering, because some of its handlers do not end; "
            if self._keepalive is None:
                text += "its tasks stay with it, because of keepalive=None"
            else:
                text += "other workers give back its tasks in about %(retry_in)s s"
            after = None if self._keepalive is None else round(self._keepalive + 2, 1)
            emit(logger, "worker.vanished", text, worker=registration.worker, retry_in=after)
            registration.dead = True
            if registration.heartbeat is not None:
                registration.heartbeat.stop()

    async def _end(self, registration: Registration, patience: float) -> None:
        try:
            if not registration.dead:
                await self._stop_worker(registration, patience)
        except WorqrError as error:
            text = (
                "this worker could not deregister: %(error)s; its tasks are given back after its keepalive has expired"
            )
            emit(logger, "stop_worker", text, level=logging.WARNING, worker=registration.worker, error=str(error))
        finally:
            registration.dead = True
            if registration.heartbeat is not None:
                registration.heartbeat.stop()

    async def _stop_worker(self, registration: Registration, patience: float) -> None:
        while mapped := await self.link.call(ops.stop_worker(self.keys, registration.worker), patience=patience):
            for queue in mapped:
                keys = self._engine.queue_keys(queue)
                while (await self.link.call(ops.stop_work(keys, registration.worker), patience=patience)).more:
                    pass
                await self.link.call(ops.unmap_work(self.keys, registration.worker, queue), patience=patience)
        emit(logger, "stop_worker", "worker %(worker)s has left the mesh", worker=registration.worker)
