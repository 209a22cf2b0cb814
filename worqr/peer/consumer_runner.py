"""`ConsumerRunner`: makes the consumers of a queue, and runs them until the peer leaves the queue."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, TypeVar, cast

import trio
from trio_util import periodic

from worqr import ops
from worqr.command import Command
from worqr.errors import ClaimLost, Unavailable, UsageError, WorqrBug, WorqrError
from worqr.handler_options import PATIENT, Handling, RunsIn, is_async, policy_for
from worqr.keys import QueueKeys, RegistryKeys, check_name
from worqr.limits import NO_RULES, describe_limits, limits_text, parse_limits, wire_rules
from worqr.link import Link
from worqr.log_events import emit, emit_fields
from worqr.ops import MAX_ITEMS, NOTE_EVERY
from worqr.peer.consumer import (
    ActiveConsumers,
    ConsumerServices,
    HandlerConsumer,
    LimitedConsumer,
    QueueConsumer,
    QueueOptions,
    SharedLimit,
    Slots,
    lane_in_shard,
)
from worqr.peer.durable import as_workflow
from worqr.peer.error_throttle import ErrorThrottle, sleep_aligned
from worqr.peer.executors.executors import Executors
from worqr.peer.executors.offloaded import Handler, describe, name_of, named_after
from worqr.peer.lifespans import with_middleware
from worqr.peer.list_consumer import ListConsumer, taking_calls
from worqr.peer.list_run import ListRun
from worqr.peer.manual_consumer import ClaimBuffer, Claims, ManualConsumer
from worqr.peer.options import PeerSettings
from worqr.peer.run import SETTLED, Run, current_run, failed_of
from worqr.peer.scheduler import Pool, Share
from worqr.peer.session import Registration, Session, ignore_outcome
from worqr.peer.settler import FIRST_PAUSE, LONGEST_PAUSE, Settler, Settles
from worqr.peer.task_log import RUN, run_fields
from worqr.policy import RetryPolicy, shown_fields
from worqr.tracebacks import is_a, leaves_of, one_line

# `StuckHandlerMonitor`: reports runs that were cancelled, for any reason, and do not end.
#
# The peer cannot end such a run. Its coroutine swallows Trio's cancellation, its thread does not check for one, or its task
# blocks the asyncio loop. After some time, the monitor logs it once, with the name and the stack of its handler. It gives the
# slot to another task, so that the peer does not run out of slots. The run keeps its claim, so that its task does not run a
# second time in parallel. When the run ends, the claim is settled like any other cancelled one.
#
# It also finds *orphans*: runs that hold units while no slot has them, because an error ended the slot before the claim was
# settled. That is a bug of worqr. The peer is not ready from then on, and gives their claims back when it leaves.

logger: logging.Logger = logging.getLogger(__name__)

CHECK_EVERY = 1.0
"""Seconds between two checks of cancelled runs, at most."""
OVERDUE_AFTER = 1.0
"""Seconds after its timeout within which a cancelled coroutine should end. A thread is reported at once, because it cannot be
stopped.
"""
TRIO_REMEDY = "it swallows trio.Cancelled, or shields itself from it: let it pass, and put a deadline on each shield"


class StuckHandlerMonitor:
    """Watches the runs of one peer; `after`: seconds until a cancelled one counts as stuck. Changed only in the loop.

    Attributes:
        orphaned: how many runs no slot had at the last check.
    """

    def __init__(self, consumers: ActiveConsumers, slots: Slots, *, after: float) -> None:
        self.after: float = after
        self.orphaned: int = 0
        self._consumers = consumers
        self._slots = slots
        self._since: dict[Run[QueueConsumer], float] = {}
        self._reported: set[Run[QueueConsumer]] = set()
        self._overdue: set[Run[QueueConsumer]] = set()

    @property
    def stuck(self) -> int:
        """How many runs are stuck; from any thread."""
        return len(self._reported)

    async def watch_forever(self) -> None:
        """Check the runs periodically."""
        while True:
            await sleep_aligned(min(CHECK_EVERY, self.after / 4))
            self.check_once()
            self._check_orphans()

    def check_once(self) -> None:
        """Find cancelled runs, log those that were cancelled long ago, and forget those that have ended.

        A run is found in its consumer's `running`, even after the queue was left without it.
        """
        now = trio.current_time()
        for consumer in self._consumers:
            if isinstance(consumer, HandlerConsumer):
                for run in consumer.executing.values():
                    if run.cancel_reason is not None and not _awaits_suspension(run):
                        self._since.setdefault(run, now)
        for run, since in tuple(self._since.items()):
            if run.host.executing.get(run.fence) is not run or _awaits_suspension(run):
                self._forget(run, now - since)
            else:
                self._check(run, now - since)

    def orphans_of(self, consumer: QueueConsumer) -> list[Run[Any]]:
        """Return the runs, or the list runs, of a consumer that no slot has. A run that is being suspended keeps its units until
        the server has replied.
        """
        if not isinstance(consumer, HandlerConsumer):
            return []
        held = self._slots.held()
        return [run for run in consumer.executing.values() if run not in held and run.suspension is None]

    def _check_orphans(self) -> None:
        found = [run for consumer in self._consumers for run in self.orphans_of(consumer)]
        if len(found) > self.orphaned:
            text = (
                f"{RUN}: no handler runs this task any more, and its slot is lost; this is a bug of worqr, please report it, and "
                "restart this worker"
            )
            emit_fields(logger, "task.orphaned", text, run_fields(found[-1]))
        self.orphaned = len(found)

    def _check(self, run: Run[QueueConsumer], seconds: float) -> None:
        if run.cancel_reason == "timeout" and run not in self._overdue:
            offloaded = run.offloaded
            if seconds >= OVERDUE_AFTER or (
                offloaded is not None and not offloaded.stoppable and offloaded.current_stack()
            ):
                self._overdue.add(run)
                self._report_overdue(run)
        if seconds >= self.after and run not in self._reported:
            self._report(run, seconds)

    def _report_overdue(self, run: Run[QueueConsumer]) -> None:
        remedy = (run.offloaded.overdue_remedy if run.offloaded is not None else "") or TRIO_REMEDY
        fields = {**self.fields(run), "timeout": run.policy.timeout}
        text = f"{RUN}: %(handler)s still runs after its timeout of %(timeout)g s; {remedy}; it is at\n%(where)s"
        emit_fields(logger, "task.overdue", text, fields)

    def _report(self, run: Run[QueueConsumer], seconds: float) -> None:
        self._reported.add(run)
        text = (
            f"{RUN}: %(handler)s still runs %(duration)s s after it was cancelled (%(reason)s); another task gets its slot; "
            "it is at\n%(where)s"
        )
        fields = {**self.fields(run), "duration": round(seconds, 1), "reason": run.cancel_reason}
        emit_fields(logger, "task.stuck", text, fields)
        offloaded = run.offloaded
        run.host.release_slot_of_stuck_run(run, place=offloaded is not None and offloaded.allow_replacement())

    def _forget(self, run: Run[QueueConsumer], seconds: float) -> None:
        del self._since[run]
        self._overdue.discard(run)
        if run in self._reported:
            self._reported.discard(run)
            fields = {**run_fields(run), "handler": self._name(run), "duration": round(seconds, 1)}
            text = f"{RUN}: %(handler)s ended %(duration)s s after it was cancelled"
            emit_fields(logger, "task.unstuck", text, fields)

    def fields(self, run: Run[QueueConsumer]) -> dict[str, object]:
        """Return the fields for a log line about a run, with the present stack of its handler."""
        return {**run_fields(run), "handler": self._name(run), "where": self.where(run)}

    def _name(self, run: Run[QueueConsumer]) -> str:
        consumer = run.host
        return name_of(consumer.handler) if isinstance(consumer, HandlerConsumer) else ""

    def where(self, run: Run[QueueConsumer]) -> str:
        """Return the present stack of its handler, formatted as in a traceback."""
        offloaded = run.offloaded
        where = "" if offloaded is None else offloaded.current_stack()
        return where or describe(self._slots.frames_of(run))


def _awaits_suspension(run: Run[QueueConsumer]) -> bool:
    """Return True if the handler of a run has ended, and the server has not replied to its suspension yet."""
    return run.suspension is not None and run.state is SETTLED


# `ConsumerRunner`: makes the consumers of a queue, and runs them until the peer leaves the queue.

# `Departures`: leaves queues on the server. It sends stop_work, then unmap_work, until the server has accepted both.
#
# A departure belongs to a registration. It runs in the engine instead of the caller. A caller waits for a limited time, and the
# departure continues until the registration ends. The link repeats its requests over lost connections. Requests that the server
# refuses are repeated here, with growing pauses. If the registration is declared dead, the leader gives the claims back.
#
# Invariant: stop_work gives back *all* claims that the worker holds on a queue. So nothing may be claimed there between the
# first stop_work of a departure and the reply to its last one. `ConsumerRunner.enter` waits for the departure of the same queue
# before it sends start_work (see `wait_left`). A consumer begins no departure while another consumer of this peer has the
# queue. Then its claims go back one by one, by their ids.
#
# Settles come first: stop_work is sent when the server has replied to every settle of the queue. Otherwise a finished task
# could go back with the queue because its finish came later. A settle that the server refuses is tried once more. If the server
# refuses it again, its task goes back with the queue and runs again.


T = TypeVar("T")
Spawn = Callable[[Callable[[], Awaitable[Any]]], bool]
"""Runs a task behind the shield of the engine; returns False if the engine does not run."""


class Departure:
    """One queue that one registration leaves.

    Attributes:
        done: set when the queue was left, or the registration was declared dead.
        answers: the number of replies from the server.
        refused: the last refusal, if the server refuses the request.
    """

    def __init__(self, registration: Registration, keys: QueueKeys) -> None:
        self.registration: Registration = registration
        self.keys: QueueKeys = keys
        self.done: trio.Event = trio.Event()
        self.answers: int = 0
        self.refused: Exception | None = None

    def answered(self) -> None:
        """Count a reply from the server."""
        self.answers += 1

    def refuse(self, failure: Exception | None) -> None:
        """Store that the server refuses the request."""
        self.refused = failure


class Departures:
    """The departures of one peer that are under way. Changed only in the loop."""

    def __init__(self, link: Link, keys: RegistryKeys, settles: Settles, spawn: Spawn) -> None:
        self._link = link
        self._keys = keys
        self._settles = settles
        self._spawn = spawn
        self._open: dict[tuple[Registration, str], Departure] = {}
        self._throttle = ErrorThrottle(logger)

    def begin(self, keys: QueueKeys, registration: Registration) -> Departure:
        """Begin to leave a queue, in the engine. If a departure is under way already, return that one."""
        place = registration, keys.name
        departure = self._open.get(place)
        if departure is None:
            departure = self._open[place] = Departure(registration, keys)
            if not self._spawn(partial(self._leave, departure)):
                self._end(departure)
        return departure

    def is_open(self, registration: Registration, name: str) -> bool:
        """Return True while `registration` leaves this queue."""
        return (registration, name) in self._open

    async def wait_left(self, keys: QueueKeys, registration: Registration) -> None:
        """Wait until no departure of this queue is under way.

        Raises:
            Unavailable: the server has not accepted it within the mesh's patience.
        """
        departure = self._open.get((registration, keys.name))
        if departure is None:
            return
        patience = self._link.settings.patience
        with trio.move_on_after(patience):
            await departure.done.wait()
        if not departure.done.is_set():
            why = f": {departure.refused}" if departure.refused is not None else ""
            raise Unavailable(
                f"queue {keys.display_name!r}: this worker left it before, and the server has not accepted that within "
                f"{patience:g} s{why}"
            )

    async def _leave(self, departure: Departure) -> None:
        keys, worker = departure.keys, departure.registration.worker
        try:
            await self._settles.wait_answered(keys.name)
            while (await self._send_until_accepted(departure, partial(ops.stop_work, keys, worker))).more:
                pass
            self._settles.drop(keys.name)
            await self._send_until_accepted(departure, partial(ops.unmap_work, self._keys, worker, keys.name))
        except ClaimLost:
            pass  # the leader gives back its claims
        finally:
            self._end(departure)

    def _end(self, departure: Departure) -> None:
        self._open.pop((departure.registration, departure.keys.name), None)
        departure.done.set()

    async def _send_until_accepted(self, departure: Departure, make: Callable[[], Command[T]]) -> T:
        """Send a request until the server accepts it.

        Raises:
            ClaimLost: the registration was declared dead.
        """
        pause, queue = FIRST_PAUSE, departure.keys.display_name
        while True:
            value, failure = await self._send(departure, make())
            departure.answered()
            if value is not None:
                if self._throttle.resolve(queue):
                    emit(
                        logger,
                        "leave.accepted",
                        "queue %(queue)r: the server lets this worker leave again",
                        queue=queue,
                    )
                return value
            if departure.registration.dead or isinstance(failure, ClaimLost):
                raise ClaimLost(f"worker {departure.registration.worker} died while it left queue {queue!r}")
            departure.refuse(failure)
            text = "queue %(queue)r: the server does not let this worker leave, trying again: %(error)s"
            self._throttle.error(queue, "leave.refused", text, queue=queue, error=str(failure))
            await trio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _send(self, departure: Departure, call: Command[T]) -> tuple[T | None, Exception | None]:
        answered = trio.Event()
        answers: list[tuple[T | None, Exception | None]] = []

        def deliver(value: T | None, failure: Exception | None) -> None:
            answers.append((value, failure))
            answered.set()

        self._link.post(call, deliver, owner=departure.registration)
        await answered.wait()
        return answers[0]


# `WorkMapRefresher`: sends the queues that this worker serves to the registry, after each new connection.
#
# A registry that failed over to a replica may have lost its last writes, for example a map_work. Then the leader would not
# recover the claims of this queue if the worker died. So after each new connection, map_work is sent once more for every queue
# that the worker serves. Queues where runs were left behind are included. A refused map_work is repeated, with growing pauses,
# until the server accepts it.
#
# Invariant: no map_work is sent for a queue between its unmap_work and the reply to that (`Departures.is_open`). An earlier
# map_work reaches the same node first.


MAP_CHECK_EVERY = 2.0
MAP_LONGEST_PAUSE = 30.0
"""Seconds between checks for a new connection. The pause is doubled after each refusal, up to the second value."""


class WorkMapRefresher:
    """Sends the queues of one peer. Changed only in the loop."""

    def __init__(
        self, link: Link, keys: RegistryKeys, consumers: ActiveConsumers, departures: Departures, session: Session
    ) -> None:
        self._link = link
        self._keys = keys
        self._consumers = consumers
        self._departures = departures
        self._session = session
        self._pending: set[QueueConsumer] = set()
        self._refused = False
        self._throttle = ErrorThrottle(logger)

    async def refresh_forever(self) -> None:
        """Check periodically for new connections."""
        pause = MAP_CHECK_EVERY
        while True:
            await sleep_aligned(pause)
            pause = min(2 * pause, MAP_LONGEST_PAUSE) if self._refused else MAP_CHECK_EVERY
            self.refresh_once()

    def refresh_once(self) -> None:
        """Send every queue that was not sent to the registry on the newest connection. Never waits."""
        self._refused = False
        connections = self._link.connections
        for consumer in self._consumers.held():
            admission, registration = consumer.admission, consumer.registration
            if admission.mapped_on == connections or consumer in self._pending:
                continue
            if registration is None or registration.dead or self._departures.is_open(registration, consumer.name):
                continue  # unmap_work may be on its way
            self._pending.add(consumer)
            call = ops.map_work(self._keys, registration.worker, consumer.name)
            self._link.post(call, partial(self._answered, consumer, registration, connections), owner=registration)

    def _answered(
        self,
        consumer: QueueConsumer,
        registration: Registration,
        connections: int,
        word: str | None,
        failure: Exception | None,
    ) -> None:
        self._pending.discard(consumer)
        if word == "dead":
            self._session.lost(registration, "it is not registered any more")
        elif failure is None:
            consumer.admission.mapped(connections)
            self._throttle.resolve(consumer.name)
        elif not isinstance(failure, ClaimLost):
            self._refused = True
            text = "queue %(queue)r: the server does not record that this worker serves it, trying again: %(error)s"
            self._throttle.error(consumer.name, "map_work", text, queue=consumer.queue, error=str(failure))


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


# `ConsumerShutdown`: lets a consumer leave its queue. It stops claiming, drains, cancels, and gives the claims back.
#
# Several callers may request it. It runs in the engine, so a caller that is cancelled does not leave the queue half-way.
# `Lifecycle` has the phases of a consumer that leaves. If the server does not reply, a caller waits for `LEAVE_PATIENCE` only.
# The queue is left on the server when the server replies again (`departures`).
#
# A handler may ignore its cancellation. On the Trio loop the peer waits for it, and logs it every `REMIND` seconds. In a thread
# or on the asyncio loop, the run is left behind after `DETACH_AFTER`, and callers that wait for the queue continue. The
# consumer is then *detached*, and the run keeps its claim. If the run ends before the peer does, the claim is settled, and the
# queue is left completely. Otherwise the peer ends without deregistering, like a worker that dies. The leader then recovers the
# claim when the keepalive has expired. Until then the handler may still run in a process that is about to end.


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

    Attributes:
        server_answers: False after a request to which the server did not reply in time.
    """

    def __init__(
        self,
        consumers: ActiveConsumers,
        settler: Settler,
        departures: Departures,
        stuck: StuckHandlerMonitor,
        spawn: Spawn,
    ) -> None:
        self.server_answers: bool = True
        self._consumers = consumers
        self._settler = settler
        self._departures = departures
        self._stuck = stuck
        self._spawn = spawn

    def begin(self, consumer: QueueConsumer, grace: float) -> None:
        """Begin to leave a queue, in the engine. `lifecycle.left` is set when the queue was left. May be called twice."""
        if consumer.lifecycle.drain():
            consumer.give_back_unstarted()
            consumer.stop_waiting()
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
            self._settler.counter.leaves(consumer)
            if departure := self._depart(consumer, stay=stay):
                await self._wait_left(departure)
        finally:
            self._settler.left(consumer)
            for run in tuple(consumer.running.values()):
                run.cancel("lost")
                run.settle()
                consumer.ended(run)
            self._settler.counter.left(consumer)
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
        """Give back the claims of runs that no slot has: nothing else would end them. Free runs that only wait for the reply to
        their suspension, for which the departure waits.
        """
        for run in tuple(consumer.running.values()):
            if _awaits_suspension(run):
                consumer.ended(run)
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
            self._settler.settles.give_back(consumer.keys, registration, claims)

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


# A queue is entered in the registry first, and then in its own set of admitted workers. It is left in the opposite order. So the
# leader finds the claims of a worker that dies in between.


class ConsumerRunner:
    """Runs the consumers of one peer, whose worker id may change in the meantime. Changed only in the loop."""

    def __init__(
        self,
        settings: PeerSettings,
        services: ConsumerServices,
        executors: Executors,
        consumers: ActiveConsumers,
        stuck: StuckHandlerMonitor,
        spawn: Spawn,
    ) -> None:
        self._settings = settings
        self._keys = RegistryKeys(settings.prefix)
        self._services = services
        self._executors = executors
        self._consumers = consumers
        self._departures = Departures(services.link, self._keys, services.settler.settles, spawn)
        self.shutdown: ConsumerShutdown = ConsumerShutdown(consumers, services.settler, self._departures, stuck, spawn)
        self.work_map: WorkMapRefresher = WorkMapRefresher(
            services.link, self._keys, consumers, self._departures, services.session
        )

    async def note_queues_forever(self) -> None:
        """Store the names of the queues, also of those that are still being entered: callers and the leader find them there."""
        async for _ in periodic(NOTE_EVERY):
            self._note_queues(self._consumers.names(), NOTE_EVERY)

    def _note_queues(self, names: Sequence[str], patience: float) -> None:
        """Store these names. A request that the server does not accept in this time is dropped, because the next one follows."""
        for start in range(0, len(names), MAX_ITEMS):
            call = ops.note_queues(self._keys, names[start : start + MAX_ITEMS])
            self._services.link.post(call, ignore_outcome, patience=patience)

    # Serving a queue

    async def _check_free(self, queue: str) -> tuple[QueueKeys, ...]:
        """Return the keys of all shards of `queue`. Raise UsageError if the peer cannot serve it, or serves it already."""
        keys, sharding = QueueKeys.of(self._settings.prefix, queue), self._settings.sharding
        shards = (keys,) if sharding is None else await sharding.shards(keys)
        if self._consumers.closed:
            raise UsageError(f"queue {queue!r}: this peer has left the mesh; join again for another one")
        if any(self._consumers.get(keys.name) is not None for keys in shards):
            raise UsageError(
                f"queue {queue!r} is served by this peer already; use one handler with a higher concurrency"
            )
        return shards

    async def serve(
        self, queue: str, handler: Callable[[bytes], object], how: Handling, *, task_status: trio.TaskStatus[None]
    ) -> None:
        """Serve a queue until cancelled, or until the peer has left; see ``Peer.serve``. Started means subscribed."""
        shards = await self._check_free(check_name(queue))
        async with AsyncExitStack() as stack:
            place = self._executors.resolve_runs_in(handler, how.runs_in)
            if how.policy.workflow and place != "process":  # a process does so itself
                handler = as_workflow(handler)
            consumers = self._new_consumers(shards, *self._executors.prepare(handler, how.runs_in), how, place)
            if how.on_failure is not None:
                failing = await self._failure_consumers(shards[0], how)
                await stack.enter_async_context(self.entered(failing))
            await stack.enter_async_context(self.entered(consumers))
            task_status.started()
            await _wait_left(consumers)

    async def serve_all(
        self, nursery: trio.Nursery, handlers: Iterable[tuple[str, Callable[[bytes], object], Handling]]
    ) -> None:
        """Serve these queues in a nursery; return when all are subscribed."""

        async def serve(
            queue: str, handler: Callable[[bytes], object], how: Handling, task_status: trio.TaskStatus[None]
        ) -> None:
            await self.serve(queue, handler, how, task_status=task_status)

        try:
            async with trio.open_nursery() as subscribing:
                for each in handlers:
                    subscribing.start_soon(nursery.start, partial(serve, *each))
        except BaseExceptionGroup as group:
            raise unwrap_error(group) from None

    def _new_consumers(
        self, shards: Sequence[QueueKeys], run: Handler, pool: Pool | None, how: Handling, place: RunsIn
    ) -> list[HandlerConsumer]:
        """Make one consumer for each shard. Together they have the concurrency and the priority of the queue."""
        limit = None if how.concurrency is None else Pool(how.concurrency)
        priority = how.priority if len(shards) == 1 else how.priority / len(shards)
        if how.batch_size is not None:
            run = taking_calls(run)
        run, state = with_middleware(run, self._settings.middleware, place), self._executors.state_in(place)
        consumers: list[HandlerConsumer] = []
        for n, keys in enumerate(shards):
            limits = limits_text(how.own, keys.display_name, len(shards), n)
            lane_of = lane_in_shard(how.lane_of, shards, keys)
            shared = tuple(SharedLimit.of(keys.prefix, each, how.cost_of(each)) for each in how.shared)
            options = QueueOptions(how.recent, limits, wire_rules(how.lanes, keys.display_name), lane_of, shared)
            share = Share(how.size, priority, pool, limit)
            consumers.append(self._new_consumer(keys, how, share, run, state, options))
        return consumers

    def _new_consumer(
        self, keys: QueueKeys, how: Handling, share: Share, run: Handler, state: object, options: QueueOptions
    ) -> HandlerConsumer:
        """Make the consumer of one shard, for a handler that takes one task or a list."""
        if how.batch_size is None:
            kind = LimitedConsumer if how.shared else HandlerConsumer
            return kind(keys, self._services, how.policy, share, run, state, options)
        return ListConsumer(
            *(keys, self._services, how.policy, share, run, state, options), size=how.batch_size, wait=how.batch_wait
        )

    async def _failure_consumers(self, keys: QueueKeys, how: Handling) -> list[HandlerConsumer]:
        """Make the consumers of the failure jobs of a queue.

        An async function runs on the mesh's loop for async functions, unless the handler names a loop. A plain function runs in a
        thread.
        """
        queue = keys.queue
        shards = await self._check_free(QueueKeys(keys.prefix, queue, failures=True).name)
        on_failure: Any = how.on_failure
        if hasattr(on_failure, "__worqr_handler__"):  # a declared function takes the record, not an encoded payload
            on_failure = on_failure.__wrapped__
        loop = how.runs_in if how.runs_in in {"loop", "asyncio"} and is_async(on_failure) else None
        handle, pool = self._executors.prepare(on_failure, loop)

        async def run(_task: bytes) -> object:
            return await cast("Any", handle)(failed_of(current_run.get(), queue))

        self._note_queues([failures.name for failures in shards], self._services.link.settings.patience)
        place = self._executors.resolve_runs_in(on_failure, loop)
        return self._new_consumers(shards, named_after(on_failure, run), pool, Handling(how.failing or PATIENT), place)

    @asynccontextmanager
    async def work(self, queue: str, retry: RetryPolicy | None, keep_failed: int) -> AsyncGenerator[Claims]:
        """Enter a block in which the application claims the tasks of a queue itself; see ``Peer.work``."""
        check_name(queue)
        policy, size = policy_for(retry, keep_failed=keep_failed), self._settings.max_payload
        shards = await self._check_free(queue)
        buffer = ClaimBuffer()
        priority = 100 if len(shards) == 1 else 100 / len(shards)
        for keys in shards:
            ManualConsumer(
                *(keys, self._services, policy, Share(priority=priority), buffer),
                max_result=size,
                state=self._settings.state,
            )
        tracing, server = self._settings.tracing, self._services.link.settings.address
        claims = Claims(buffer, None if tracing is None else partial(tracing.taken, queue, server))
        async with self.entered(buffer.consumers):
            try:
                yield claims
            finally:
                claims._close()  # pyright: ignore[reportPrivateUsage]

    # Entering queues

    @asynccontextmanager
    async def entered(self, consumers: Sequence[QueueConsumer]) -> AsyncGenerator[None]:
        """Serve a queue, with all its shards, for the length of a block."""
        here: list[QueueConsumer] = []
        try:
            for consumer in consumers:
                self._services.scheduler.add(consumer)
                self._consumers.add(consumer)
                here.append(consumer)
            self._consumers.used.set()
            if self._consumers.closed:  # drained after `_check_free`, while the peer entered another queue
                for consumer in here:
                    self.shutdown.begin(consumer, 0)
            await self._enter_all(consumers)
            yield
        finally:
            with trio.CancelScope(shield=True):
                for consumer in here:
                    self.shutdown.begin(consumer, 0)
                    consumer.lifecycle.skip_grace()
                for consumer in here:
                    await consumer.lifecycle.left.wait()
                    self._services.scheduler.remove(consumer)
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
            registration = await self._services.session.wait_registered()
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
        consumer.admission.enter(registration, self._services.link.connections)
        await self._departures.wait_left(consumer.keys, registration)
        if await self._services.link.call(ops.map_work(self._keys, registration.worker, consumer.name)) == "dead":
            self._services.session.lost(registration, "the registry does not know it")
        if not _should_continue(consumer, registration):
            return
        policy = consumer.policy
        changed = await self._services.link.call(
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
                deploy=consumer.deploy,
                secret=registration.secret_of(consumer.keys),
                handoffs=consumer.takes_handoffs,
            )
        )
        if changed:
            _log_changed(consumer, limits_changed=changed == "limits")
        if not _should_continue(consumer, registration):
            return
        consumer.admission.admit()
        consumer.lifecycle.admitted()
        await self._services.reconciler.subscribe(consumer)


async def _wait_left(consumers: Sequence[HandlerConsumer]) -> None:
    """Wait until the queue was left. Meanwhile, end the waits of its list runs, and ask for permits again in time."""
    async with trio.open_nursery() as nursery:
        for consumer in consumers:
            if isinstance(consumer, ListConsumer):
                nursery.start_soon(consumer.close_forever)
            if isinstance(consumer, LimitedConsumer):
                nursery.start_soon(consumer.permits.watch_forever)
        for consumer in consumers:
            await consumer.lifecycle.left.wait()
        nursery.cancel_scope.cancel()


def unwrap_error(group: BaseException) -> BaseException:
    """Return the error that ended the engine, without the exception groups of internal nurseries."""
    group = next((leaf for leaf, _ in leaves_of(group)), group)
    if is_a(group, WorqrError) or not is_a(group, Exception):
        return group
    bug = WorqrBug(f"the peer ended, because one of its duties failed ({one_line(group)}); please report this")
    bug.__cause__ = group
    return bug
