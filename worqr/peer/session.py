"""`Session`: registers the worker of a peer, sends its heartbeats, and registers it again after it was declared dead.

A session has one registration after the other, each under a worker id of its own. A thread sends the heartbeats. A registration
ends when the reply to a heartbeat is `dead`, or when a queue does not list the worker. From then on, none of its requests is
sent. `Engine.on_lost` has what follows. Not here: entering queues under a registration (`consumer_runner`).

The session is the one part that knows the engine, because heartbeats report what all parts of a peer do.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import platform
import re
import secrets
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio
from msgspec.structs import replace
from trio_util import RepeatedEvent

from worqr import ops
from worqr.errors import UsageError, WorqrError
from worqr.keys import QueueKeys, RegistryKeys
from worqr.link import Heartbeat, Link, WorkerHandle, answer_timeout, boottime
from worqr.log_events import emit
from worqr.ops import Beat
from worqr.peer.options import check_concurrency
from worqr.version import __version__

if TYPE_CHECKING:
    from worqr.peer.engine import Engine
    from worqr.peer.options import PeerSettings
    from worqr.peer.scheduler import Scheduler

# `Registration`: one worker id, from start_worker until it is unregistered or declared dead.


BEAT_EVERY: Final = 1.0
"""Seconds between two heartbeats, at most."""
SOON: Final = 5.0
"""Seconds of the keepalive up to which a dead worker is missed soon."""
LEASE: Final = 2.0
"""Seconds for which a heartbeat extends the lease of the leader."""


class Registration(WorkerHandle):
    """One worker id. `dead` is set when the registration is over; from then on its requests are not sent.

    Attributes:
        alive_at: when the newest heartbeat was sent that the server acknowledged with "alive"; minus infinity after a reply
            of "dead". The heartbeat thread sets it when it has read the reply, before the loop handles the reply.
    """

    def __init__(self, label: str) -> None:
        worker = f"{label}:{secrets.token_hex(16)}"
        super().__init__(worker)
        self.worker: str = worker
        self._key = secrets.token_bytes(16)
        self.alive_at: float = boottime()
        self.heartbeat: Heartbeat[Beat] | None = None
        self.number: int = 0

    @property
    def lag(self) -> float:
        """Seconds for which the Trio loop has had no turn; from any thread."""
        return 0.0 if self.heartbeat is None else self.heartbeat.lag

    def secret_of(self, queue: QueueKeys) -> str:
        """Return what the queue's scripts know besides the worker alone: it proves that a message comes from one of them. Each
        queue has another.
        """
        return hashlib.blake2b(queue.base.encode(), key=self._key, digest_size=16).hexdigest()

    def record_replies(self, call: ops.Command[Beat]) -> ops.Command[Beat]:
        """Return a heartbeat whose reply sets `alive_at`.

        Called in the heartbeat thread, before it sends the heartbeat.
        """
        sent, read = boottime(), call.read

        def note(reply: list[Any]) -> Beat:
            beat = read(reply)
            self.alive_at = sent if beat.alive else -math.inf
            return beat

        return replace(call, read=note)

    def open(self, heartbeat: Heartbeat[Beat]) -> None:
        """Connect for its heartbeats before the server registers the worker.

        On a slow network, the worker's key would expire before a later connection is open.
        """
        self.heartbeat = heartbeat
        heartbeat.open()

    def begin(self, sent: float) -> None:
        """Start its heartbeats, because the server has registered the worker id. `sent`: when that request was sent."""
        self.alive_at = sent
        if self.heartbeat is not None:
            self.heartbeat.start()

    def abandon(self) -> None:
        """Send no heartbeats, because the server did not register the worker id."""
        if self.heartbeat is not None:
            self.heartbeat.stop()

    def end(self) -> None:
        """End the registration: none of its requests is sent any more."""
        self.dead = True
        self.abandon()

    def next_number(self) -> int:
        """Return the number of its next start request. All queues share the counter, because the numbers only have to grow."""
        self.number += 1
        return self.number


def ignore_outcome(_value: object, _error: Exception | None) -> None:
    """Take the outcome of a request that may fail: an entry in the log of the mesh."""


# `OperatorRequests`: what operators ask of this peer, as its heartbeats read it, and what it answers.
#
# A request is ``ID MODE CONCURRENCY``; ``-`` stands for a part that was not asked for. Each heartbeat brings it again until the
# server has the answer, which the following heartbeats carry. So a lost reply loses no request, and a repeated one does
# nothing.


logger: logging.Logger = logging.getLogger(__name__)

LONGEST_ANSWER: Final = 200
"""Characters."""


class OperatorRequests:
    """Carries out requests. Changed only in the loop; `answer` is read in the heartbeat thread.

    Args:
        units: changed by requests.
        drain: lets the peer leave, as at the end of `join`.
        report: called with what was asked and the outcome, for the log of the mesh.

    Attributes:
        answer: the id of the last request and its outcome, for the next heartbeat; empty when the server has it.
    """

    def __init__(self, units: Scheduler, drain: Callable[[], object], report: Callable[[str], None]) -> None:
        self.answer: str = ""
        self._units = units
        self._drain = drain
        self._report = report
        self._last = ""

    def on_request(self, request: str) -> None:
        """Carry out the request that the reply to a heartbeat has; empty: there is none that was not answered."""
        if not request:
            self.answer = ""
            return
        number, _, wanted = request.partition(" ")
        if number == self._last:
            return
        self._last = number
        outcome = "done"
        try:
            self._carry_out(*wanted.split(" "))
        except (UsageError, TypeError, ValueError) as error:  # TypeError and ValueError: from a newer version
            outcome = f"refused: {error}"
        self.answer = f"{number} {outcome[:LONGEST_ANSWER]}"
        text = "an operator asked this worker for %(reason)s: %(outcome)s"
        emit(logger, "worker.asked", text, reason=wanted, outcome=outcome)
        self._report(f"{wanted}: {outcome}")

    def _carry_out(self, mode: str, concurrency: str) -> None:
        if mode not in ("-", "quiet", "resume", "drain"):
            raise UsageError(f"this version of worqr does not know {mode[:40]!r}")
        if concurrency != "-":
            self._units.set_concurrency(check_concurrency("auto" if concurrency == "auto" else int(concurrency)))
        if mode == "quiet":
            self._units.be_quiet()
        elif mode == "resume":
            self._units.resume()
        elif mode == "drain":
            self._drain()


UNDO_PATIENCE = 1.0


class HeartbeatCounts(msgspec.Struct, frozen=True):
    """How many heartbeats failed, and how often the loop was found blocked for over a second."""

    failed: int = 0
    blocks: int = 0

    def plus(self, failed: int, blocks: int) -> HeartbeatCounts:
        """Return the sums."""
        return HeartbeatCounts(self.failed + failed, self.blocks + blocks)


class Session:
    """Keeps one peer registered. Changed only in the loop."""

    def __init__(self, link: Link, settings: PeerSettings, engine: Engine) -> None:
        self.registration: Registration | None = None
        self.registrations: int = 0
        self._earlier = HeartbeatCounts()
        self._link = link
        self._keys = RegistryKeys(settings.prefix)
        self._settings = settings
        self._keepalive_ms = 0 if settings.keepalive is None else round(settings.keepalive * 1000)
        self._engine = engine
        self._requests = OperatorRequests(
            engine.scheduler, lambda: engine.spawn(engine.drain), self._note_answered_request
        )
        self._deferred: list[Callable[[], None]] = []
        self._changed = RepeatedEvent()

    @property
    def heartbeat_counts(self) -> HeartbeatCounts:
        """What went wrong with the heartbeats of all registrations so far; from any thread."""
        registration = self.registration
        heartbeat = None if registration is None else registration.heartbeat
        return self._earlier if heartbeat is None else self._earlier.plus(heartbeat.errors, heartbeat.blocks)

    # Registering

    async def register(self) -> Registration:
        """Take a new worker id and start sending heartbeats."""
        label = re.sub(r"[^A-Za-z0-9._-]", "-", self._settings.app or socket.gethostname())[:60]
        registration = Registration(label)
        registration.open(self._new_heartbeat(registration))
        sent = boottime()
        try:
            await self._link.call(
                ops.start_worker(
                    *(self._keys, registration.worker),
                    keepalive_ms=self._keepalive_ms,
                    facts=self._facts(),
                    text=f"{socket.gethostname()}, pid {os.getpid()}, worqr {__version__}",
                )
            )
        except trio.Cancelled:
            with trio.CancelScope(shield=True):  # the server may have executed start_worker
                await self._end(registration, UNDO_PATIENCE)
            raise
        except BaseException:
            registration.abandon()
            raise
        registration.begin(sent)
        self._earlier = self.heartbeat_counts
        self.registration = registration
        self.registrations += 1
        self._changed.set()
        emit(logger, "start_worker", "worker %(worker)s has joined the mesh", worker=registration.worker)
        return registration

    def _facts(self) -> list[tuple[str, str | int]]:
        concurrency, settings = self._engine.scheduler.concurrency, self._settings
        return [
            *(("host", socket.gethostname()), ("pid", os.getpid()), ("app", settings.app), ("version", __version__)),
            *(("capacity", concurrency), ("keepalive_ms", self._keepalive_ms)),
            *(("running", 0), ("room", concurrency), ("python", platform.python_version())),
            *(("threads", settings.threads), ("processes", settings.processes), ("deploy", settings.deploy)),
        ]

    def _new_heartbeat(self, registration: Registration) -> Heartbeat[Beat]:
        settings, engine = self._settings, self._engine
        scheduler, leader = engine.scheduler, engine.leader

        def make(n: int, turning: bool) -> ops.Command[Beat]:
            """Called in the heartbeat thread."""
            call = ops.keep_worker_alive(
                *(self._keys, registration.worker, n),
                keepalive_ms=self._keepalive_ms,
                lease_ms=round(LEASE * 1000) if turning and leader.may_request_lease() else 0,
                running=scheduler.running,
                room=max(0, scheduler.room),
                lag_ms=round(1000 * max(engine.executors.asyncio_lag, registration.lag)),
                leaving=engine.leaving,
                quiet=scheduler.quiet,
                stale_lease=leader.stale_lease(),
                answer=self._requests.answer,
            )
            return registration.record_replies(call)

        return self._link.heartbeat(
            make=make,
            replied=lambda beat: self._on_beat(registration, beat),
            every=BEAT_EVERY if settings.keepalive is None else min(BEAT_EVERY, settings.keepalive / 3),
            timeout=answer_timeout(settings.keepalive),
            block_limit=settings.block_limit,
            describe=engine.slots.describe_blocking,
        )

    async def wait_registered(self) -> Registration:
        """Return the present registration; wait while a new one is being made."""
        while self.registration is None or self.registration.dead:
            await self._changed.wait()
        return self.registration

    # Heartbeats

    @property
    def is_missed_soon(self) -> bool:
        """If the machine vanishes, the tasks of this worker run elsewhere within seconds."""
        keepalive = self._settings.keepalive
        return keepalive is not None and keepalive <= SOON

    def beat_is_fresh(self) -> bool:
        """Return True while no leader can have declared this worker dead.

        The newest acknowledged heartbeat was sent less than a keepalive ago, and its reply was "alive".
        """
        registration = self.registration
        if registration is None or registration.dead:
            return False
        keepalive = self._settings.keepalive
        return keepalive is None or boottime() - registration.alive_at < keepalive

    def defer_until_beat(self, registration: Registration, callback: Callable[[], None]) -> None:
        """Call `callback` when a heartbeat has shown whether this worker is registered. If it is not, the registration is dead by
        then.

        Invariant: a claim whose reply came while `beat_is_fresh()` was false reaches its handler only when that is true again.
        The reply to an old heartbeat does not count. After a freeze, that reply may have waited in the socket, while the claim
        was recovered and its task runs elsewhere.
        """
        self._deferred.append(callback)

    def _run_deferred(self) -> None:
        deferred, self._deferred = self._deferred, []
        for callback in deferred:
            callback()

    def _on_beat(self, registration: Registration, beat: Beat) -> None:
        if registration.dead:
            return
        trouble = "" if registration.heartbeat is None else registration.heartbeat.trouble
        why = trouble and f"; its heartbeats had failed: {trouble}"
        if not beat.alive:
            self.lost(registration, f"it was declared dead and its tasks were given back{why}")
            return
        if beat.revived:
            text = "worker %(worker)s missed its heartbeat deadline but was not reassigned; continuing"
            text += "; its heartbeats had failed: %(error)s" if trouble else ""
            emit(logger, "keep_worker_alive", text, worker=registration.worker, error=trouble)
        if self._deferred and self.beat_is_fresh():
            self._run_deferred()
        engine, heartbeat = self._engine, registration.heartbeat
        if beat.leads and heartbeat is not None:
            until = (heartbeat.heard_at or boottime()) + LEASE
            engine.leader.on_lease_granted(until=until, worker=registration.worker)
        engine.leader.on_lease_seen(beat.lease)
        engine.consumers.request_waiting(beat.waiting)
        self._requests.on_request(beat.request)

    def _note_answered_request(self, text: str) -> None:
        self.note("worker_answered", text)

    def note(self, kind: str, text: str) -> None:
        """Append an entry about this worker to the log of the mesh, if the server can be reached."""
        worker = "" if self.registration is None else self.registration.worker
        call = ops.note_event(self._keys, kind, who=self._settings.app, worker=worker, text=text)
        self._link.post(call, ignore_outcome, patience=LEASE)

    def lost(self, registration: Registration, why: str) -> None:
        """End this registration: its tasks belong to other workers."""
        if registration.dead:
            return
        text = "worker %(worker)s is out of the mesh: %(reason)s; it joins again under a new id, or leaves"
        emit(logger, "worker.lost", text, worker=registration.worker, reason=why)
        registration.end()
        self._run_deferred()
        self._engine.on_lost(registration)

    async def register_again(self) -> Registration | None:
        """Register under a new worker id; retry until it works. Return None if the peer leaves before that."""
        while not self._engine.leaving:
            try:
                return await self.register()
            except WorqrError as error:
                text = "this worker could not join again, next try in %(retry_in)s s: %(error)s"
                emit(logger, "start_worker", text, level=logging.WARNING, retry_in=1, error=str(error))
                await trio.sleep(1)
        return None

    # Leaving the mesh

    async def unregister(self, patience: float) -> None:
        """Leave the mesh. If `patience` is too short, the leader gives the remaining claims back."""
        if self.registration is not None:
            await self._end(self.registration, patience)

    def leave_silently(self) -> None:
        """Leave the mesh without deregistering, like a worker that dies.

        The peer's claims must not be given back yet, because their handlers still run.
        """
        registration = self.registration
        if registration is not None and not registration.dead:
            keepalive = self._settings.keepalive
            text = "worker %(worker)s leaves without deregistering, because some of its handlers do not end; "
            if keepalive is None:
                text += "its tasks stay with it, because of keepalive=None"
            else:
                text += "other workers give back its tasks in about %(retry_in)s s"
            after = None if keepalive is None else round(keepalive + 2, 1)
            emit(logger, "worker.vanished", text, worker=registration.worker, retry_in=after)
            registration.end()

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
            registration.end()

    async def _stop_worker(self, registration: Registration, patience: float) -> None:
        while mapped := await self._link.call(ops.stop_worker(self._keys, registration.worker), patience=patience):
            for queue in mapped:
                keys = QueueKeys.of(self._keys.prefix, queue)
                while (await self._link.call(ops.stop_work(keys, registration.worker), patience=patience)).more:
                    pass
                await self._link.call(ops.unmap_work(self._keys, registration.worker, queue), patience=patience)
        emit(logger, "stop_worker", "worker %(worker)s has left the mesh", worker=registration.worker)
