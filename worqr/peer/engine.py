"""`Engine`: runs a peer. Here: its lifetime, and its duties.

Lifetimes are nested, so that leaving is an orderly shutdown. The link outlives the registration, which outlives settling, which
outlives the handlers, which outlive claiming. The engine runs slots, chores and checks behind a shield, in one task of `join`. So
a cancellation from outside reaches the application's own tasks only. The peer then leaves in order, with a deadline.
"""

from __future__ import annotations

import logging
import re
import socket
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, Literal

import trio
from trio_util import RepeatedEvent

from worqr import ops
from worqr.errors import ClaimLost, UsageError
from worqr.handler_options import Handling
from worqr.keys import QueueKeys, RegistryKeys
from worqr.link import Link, end_waits_by
from worqr.log_events import emit
from worqr.ops import MAX_ITEMS, Beat
from worqr.peer.consumer import ConsumerServices, QueueConsumer
from worqr.peer.consumer_runner import (
    DETACH_AFTER,
    LEAVE_PATIENCE,
    UNREACHABLE_PATIENCE,
    ConsumerRunner,
    ConsumerShutdown,
    ConsumerStartup,
    RunStarters,
    unwrap_error,
)
from worqr.peer.consumers import ActiveConsumers, WaitingQueues, WorkMapRefresher, register_queues_forever
from worqr.peer.departures import Departures
from worqr.peer.executors.executors import Executors
from worqr.peer.executors.offloaded import Frames
from worqr.peer.leader.leader import Leader
from worqr.peer.leader.schedule_ticker import ScheduleDeclarer, ScheduleTicker
from worqr.peer.list_run import ListRun
from worqr.peer.options import check_concurrency
from worqr.peer.reconciler import ControlChannel, Reconciler
from worqr.peer.run import FULL, Run, Save, current_run
from worqr.peer.run_counter import RunCounter
from worqr.peer.scheduler import AdaptiveConcurrency, Scheduler
from worqr.peer.session import (
    LEASE,
    BeatReport,
    OperatorRequests,
    Registration,
    Session,
    SessionCallbacks,
    SessionSettings,
    ignore_outcome,
)
from worqr.peer.settings import PeerSettings
from worqr.peer.settler import Settler
from worqr.peer.settles import Settles
from worqr.peer.slots import Deadlines, Slots
from worqr.peer.stuck_handlers import StuckHandlerMonitor
from worqr.policy import Failure
from worqr.validation import Seconds, seconds

# `ProgressReporter`: sends the progress of runs, at most ten times a second, and only the latest report of each run.
#
# A handler reports from the loop or from its thread, and never waits. One task per peer collects the reports, and sends one
# request per queue. The last report of a run is sent right before the request that ends its claim: requests of one queue keep
# their order.


# `StateSaver`: sends what runs save, for one peer. A handler saves from the loop, its thread, or an asyncio loop.


LOST: Final = (
    "the task was reassigned to another worker or has ended, so nothing more is saved for it here: let the run end"
)


class StateSaver:
    """Sends what the runs of one peer save.

    A save is resent until the server replies, or until its worker is declared dead. The requests of one queue keep their order,
    so that what a run has saved is stored before its claim ends.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._token = trio.lowlevel.current_trio_token()
        self._thread = threading.get_ident()

    def save(self, run: Run[Any], save: Save) -> Future[None]:
        """Send `save`. From any thread; never waits.

        Returns:
            A future that is done when the server has replied. Its error is ClaimLost, UsageError, Failure or RefusedByServer;
            Unavailable if the peer has left.
        """
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()  # a task that stops waiting does not cancel it
        if threading.get_ident() == self._thread and trio.lowlevel.in_trio_task():
            self._send(run, save, done)
        else:
            try:
                self._token.run_sync_soon(self._send, run, save, done)
            except trio.RunFinishedError:
                done.set_exception(ClaimLost(LOST))
        return done

    def _send(self, run: Run[Any], save: Save, done: Future[None]) -> None:
        def replied(word: str | None, error: Exception | None) -> None:
            if word == "lost" or isinstance(error, ClaimLost):
                run.note_lost()
            outcome = _error_of(save, word, error)
            if outcome is None:
                done.set_result(None)
            else:
                done.set_exception(outcome)

        if run.settled or run.registration.dead:
            replied("lost", None)
            return
        call = ops.save_state(run.host.keys, run.registration.worker, run.fence, save.number, save.step, save.value)
        self._link.post(call, replied, owner=run.registration)


def _error_of(save: Save, word: str | None, error: Exception | None) -> Exception | None:
    """Return the error for the handler, or None."""
    if error is not None:
        return ClaimLost(LOST) if isinstance(error, ClaimLost) else error
    if word == "lost":
        return ClaimLost(LOST)
    if word == "full":
        if save.step:
            return Failure(f"step {save.step!r} was done, but its result cannot be saved: {FULL}")
        return UsageError(f"{len(save.value):,} bytes cannot be saved: {FULL}")
    return None


logger: logging.Logger = logging.getLogger(__name__)

SEND_EVERY = 0.1


class ProgressReporter:
    """The unsent progress of the runs of one peer. `report` is called from any thread, everything else in the loop."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._token = trio.lowlevel.current_trio_token()
        self._thread = threading.get_ident()
        self._unsent: dict[tuple[str, int], tuple[Run[QueueConsumer], float | None, str]] = {}  # by base and claim
        self._reported = RepeatedEvent()

    def report(self, run: Run[QueueConsumer], done: float | None, message: str) -> None:
        """Keep the progress of `run`, to be sent. From any thread: adding to a dict is atomic.

        The thread may run another loop, in which the event of the peer's loop must not be set. The thread may also outlive the
        peer's loop.
        """
        claim = (run.host.keys.base, run.fence)
        is_listed = claim in self._unsent
        self._unsent[claim] = (run, done, message)
        if not is_listed:
            if threading.get_ident() == self._thread and trio.lowlevel.in_trio_task():
                self._reported.set()
            else:
                with suppress(trio.RunFinishedError):
                    self._token.run_sync_soon(self._reported.set)

    async def send_forever(self) -> None:
        """Send the reports, wait, and send those that arrived while it waited."""
        while True:
            if not self._unsent:
                await self._reported.wait()
            self.send_once()
            await trio.sleep(SEND_EVERY)

    def send_once(self) -> None:
        """Send the latest report of each run. The server ignores reports of claims that have ended."""
        reports: dict[QueueConsumer, list[tuple[int, float | None, str]]] = {}
        for claim in list(self._unsent):
            run, done, message = self._unsent.pop(claim)
            if not run.registration.dead:
                reports.setdefault(run.host, []).append((run.fence, done, message))
        for consumer, batch in reports.items():
            registration = consumer.registration
            if registration is not None and not registration.dead:
                for start in range(0, len(batch), MAX_ITEMS):
                    self._send(consumer.keys, registration, batch[start : start + MAX_ITEMS])

    def send_before_end(self, keys: QueueKeys, registration: Registration, claims: Sequence[int]) -> None:
        """Send the unsent reports of claims which the next request ends. Costs nothing if there are none."""
        if self._unsent:
            ending = [(claim, self._unsent.pop((keys.base, claim), None)) for claim in claims]
            reports = [(claim, *report[1:]) for claim, report in ending if report is not None]
            if reports:
                self._send(keys, registration, reports)

    def _send(
        self, keys: QueueKeys, registration: Registration, reports: Sequence[tuple[int, float | None, str]]
    ) -> None:
        self._link.post(ops.note_progress(keys, registration.worker, reports), self._answered, owner=registration)

    @staticmethod
    def _answered(_noted: int | None, failure: Exception | None) -> None:
        if failure is not None:
            emit(logger, "note_progress", "the progress of tasks was not stored: %(error)s", error=str(failure))


# The duties of a peer, in two groups: those about its runs, and those about its queues.
#
# Here: which duties there are, and what each of them is given. A duty is given what it uses, and never the engine.


@dataclass(frozen=True, slots=True)
class RunDuties:
    """The duties of one peer that are about runs: where they run, how many run at the same time, and how they end."""

    scheduler: Scheduler
    executors: Executors
    deadlines: Deadlines
    slots: Slots
    list_slots: Slots
    settles: Settles
    counter: RunCounter
    settler: Settler
    progress: ProgressReporter
    saver: StateSaver
    concurrency: AdaptiveConcurrency

    async def start(self, nursery: trio.Nursery) -> None:
        """Start the tasks of these duties. Return when handlers can run."""
        await nursery.start(self.slots.run_forever)
        await nursery.start(self.list_slots.run_forever)
        await nursery.start(self.executors.run_forever)
        nursery.start_soon(self.settler.flush_forever)
        nursery.start_soon(self.settles.retry_forever)
        nursery.start_soon(self.counter.send_forever)
        nursery.start_soon(self.deadlines.watch_forever)
        nursery.start_soon(self.progress.send_forever)
        nursery.start_soon(self.concurrency.adjust_forever)

    @property
    def starters(self) -> RunStarters:
        """How the runs of the peer begin and end."""
        return RunStarters(self.slots.run, self.list_slots.run, self.settler)

    def held(self) -> set[Run[Any]]:
        """Return the runs, and the list runs, that slots hold."""
        return self.slots.held() | self.list_slots.held()

    def frames_of(self, run: Run[Any]) -> Frames:
        """Return the stacks of the handler of `run` on the loop."""
        return (self.list_slots if run.is_list else self.slots).frames_of(run)


def run_duties(settings: PeerSettings, link: Link, interrupted: Callable[[KeyboardInterrupt], None]) -> RunDuties:
    """Make the duties about runs. `interrupted` is called when Ctrl-C arrives in a handler."""
    end_waits_by(lambda: current_run.get(None))
    scheduler, deadlines, progress = Scheduler(settings.concurrency), Deadlines(), ProgressReporter(link)
    settles, counter = Settles(link, progress.send_before_end), RunCounter(link)
    settler = Settler(
        *(link, settles, counter, scheduler.dispatch), max_result=settings.max_payload, observer=settings.observer
    )
    scheduler.dispatch_with(settler.request_flush)

    return RunDuties(
        scheduler=scheduler,
        executors=Executors(settings, scheduler.dispatch_soon),
        deadlines=deadlines,
        slots=Slots(settler.ended, interrupted, deadlines),
        list_slots=Slots(_list_ended, interrupted, deadlines),
        settles=settles,
        counter=counter,
        settler=settler,
        progress=progress,
        saver=StateSaver(link),
        concurrency=AdaptiveConcurrency(scheduler),
    )


def _list_ended(run: Run[Any], returned: bool, value: object, error: BaseException | None) -> None:
    assert isinstance(run, ListRun)
    run.host.list_ended(run, returned, value, error)


@dataclass(frozen=True, slots=True)
class QueueDuties:
    """The duties of one peer that are about queues: entering, claiming, comparing and leaving."""

    link: Link
    keys: RegistryKeys
    consumers: ActiveConsumers
    reconciler: Reconciler
    work_map: WorkMapRefresher
    stuck: StuckHandlerMonitor
    shutdown: ConsumerShutdown
    startup: ConsumerStartup
    runner: ConsumerRunner
    waiting: WaitingQueues

    def start(self, nursery: trio.Nursery) -> None:
        """Start the tasks of these duties."""
        nursery.start_soon(self.stuck.watch_forever)
        nursery.start_soon(register_queues_forever, self.link, self.keys, self.consumers.names)
        nursery.start_soon(self.reconciler.reconcile_forever)
        nursery.start_soon(self.work_map.refresh_forever)

    def forget_claims(self, registration: Registration) -> None:
        """Cancel the running tasks of a registration that was declared dead: they belong to other workers now."""
        for consumer in self.consumers:
            for run in tuple(consumer.running.values()):
                if run.registration is registration:
                    run.cancel("lost")


def queue_duties(
    settings: PeerSettings,
    link: Link,
    session: Session,
    runs: RunDuties,
    leads: Callable[[], bool],
    spawn: Callable[[Callable[[], Awaitable[Any]]], bool],
) -> QueueDuties:
    """Make the duties about queues.

    Args:
        settings: the settings of the peer.
        link: the link of the peer.
        session: the session of the peer.
        runs: the duties about runs.
        leads: returns True if the peer is the leader of the mesh.
        spawn: runs a task behind the shield of the engine; returns False if the engine does not run.
    """
    keys, consumers = RegistryKeys(settings.prefix), ActiveConsumers()
    departures = Departures(link, keys, runs.settles, spawn)
    reconciler = Reconciler(
        *(link, consumers), unaccepted=runs.settles.claims_of, give_back=runs.settler.give_back, lost=session.lost
    )
    channel = ControlChannel(link, reconciler, leads, consumers.is_replaced)
    stuck = StuckHandlerMonitor(consumers, runs.frames_of, runs.held, after=settings.stuck_after)
    shutdown = ConsumerShutdown(consumers, runs.settler, runs.settles, runs.counter, departures, stuck, spawn)
    startup = ConsumerStartup(link, keys, session, runs.scheduler, consumers, channel, departures, shutdown)
    services = ConsumerServices(
        link=link,
        session=session,
        settles=runs.settles,
        scheduler=runs.scheduler,
        counter=runs.counter,
        recheck=reconciler.recheck,
        report_progress=runs.progress.report,
        extend_deadline=runs.deadlines.request_extension,
        save=runs.saver.save,
    )
    return QueueDuties(
        link=link,
        keys=keys,
        consumers=consumers,
        reconciler=reconciler,
        work_map=WorkMapRefresher(link, keys, consumers, departures, session.lost),
        stuck=stuck,
        shutdown=shutdown,
        startup=startup,
        runner=ConsumerRunner(settings, services, runs.executors, runs.starters, consumers, startup),
        waiting=WaitingQueues(settings.prefix, consumers),
    )


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
        self.settings: PeerSettings = settings
        registry = RegistryKeys(settings.prefix)
        label = re.sub(r"[^A-Za-z0-9._-]", "-", settings.app or socket.gethostname())[:60]
        self.runs: RunDuties = run_duties(settings, link, self._interrupted)
        self.session: Session = Session(
            link,
            registry,
            SessionSettings(
                *(label, settings.app, settings.keepalive, settings.block_limit, settings.threads, settings.processes)
            ),
            SessionCallbacks(self._report, self.describe_running, self._on_beat, self._on_lost),
        )
        self.leader: Leader = Leader(
            *(link, registry),
            keepalive=settings.keepalive or DEFAULT_KEEPALIVE,
            history_queues=settings.history_queues,
        )
        self._ticker = ScheduleTicker(link, registry, self.leader, self.shards_of, settings.tracing)
        self.queues: QueueDuties = queue_duties(
            settings, link, self.session, self.runs, lambda: self.leader.leads, self.spawn
        )
        self.requests: OperatorRequests = OperatorRequests(
            self.scheduler, lambda: self.spawn(self.drain), self._report_request
        )
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
    def scheduler(self) -> Scheduler:
        """The scheduler, which has the units of the peer."""
        return self.runs.scheduler

    @property
    def consumers(self) -> ActiveConsumers:
        """The queues that it serves."""
        return self.queues.consumers

    @property
    def leaving(self) -> bool:
        """The peer claims no more tasks, and is leaving its queues."""
        return self.consumers.closed

    @property
    def app(self) -> str:
        return self.settings.app

    @property
    def block_limit(self) -> float:
        return self.settings.block_limit

    def set_concurrency(self, n: int | Literal["auto"]) -> None:
        """Change how many units of work the peer holds at once. Tasks that run already are not affected."""
        self.scheduler.set_concurrency(check_concurrency(n))

    def queue_keys(self, queue: str) -> QueueKeys:
        """Return the keys of a queue of this mesh."""
        return QueueKeys.of(self.settings.prefix, queue)

    async def shards_of(self, queue: str) -> tuple[QueueKeys, ...]:
        """Return the keys of all shards of a queue of this mesh."""
        keys, sharding = self.queue_keys(queue), self.settings.sharding
        return (keys,) if sharding is None else await sharding.shards(keys, declare=False)

    async def serve_all(self, handlers: Iterable[tuple[str, Callable[[bytes], object], Handling]]) -> None:
        """Serve these queues until the peer leaves; return when all are subscribed."""
        assert self._spawned is not None
        await self.queues.runner.serve_all(self._spawned, handlers)

    # Called by its duties

    def _report(self) -> BeatReport:
        """Return what a heartbeat reports to the server. Called in the heartbeat thread."""
        scheduler = self.scheduler
        return BeatReport(
            scheduler.concurrency,
            scheduler.running,
            max(0, scheduler.room),
            leaving=self.leaving,
            wants_lease=self.leader.may_request_lease(),
            stale_lease=self.leader.stale_lease(),
            quiet=scheduler.quiet,
            answer=self.requests.answer,
            lag=self.runs.executors.asyncio_lag,
        )

    def _on_beat(self, beat: Beat, leads_until: float | None) -> None:
        if leads_until is not None:
            self.leader.on_lease_granted(until=leads_until, worker=self.id)
        self.leader.on_lease_seen(beat.lease)
        self.queues.waiting.on_waiting(beat.waiting)
        self.requests.on_request(beat.request)

    def _report_request(self, text: str) -> None:
        keys = RegistryKeys(self.settings.prefix)
        call = ops.note_event(keys, "worker_answered", who=self.app, worker=self.id, text=text)
        self.queues.link.post(call, ignore_outcome, patience=LEASE)

    def _on_lost(self, registration: Registration) -> None:
        """Forget the tasks of a registration that is over, register again, and serve the same queues."""
        self.runs.settler.forget()
        self.runs.settles.forget(registration)
        self.queues.forget_claims(registration)
        if not self.leaving:
            self.spawn(self._rejoin)

    async def _rejoin(self) -> None:
        registration = await self.session.register_again(lambda: self.leaving)
        if registration is not None:
            await self.queues.startup.enter_again(registration)

    def _interrupted(self, interrupt: KeyboardInterrupt) -> None:
        """End the block of `join`, because Ctrl-C arrived in a handler. `join` raises it when the peer has left."""
        self.interrupt = interrupt
        self.body.cancel()

    def describe_running(self) -> str:
        """Describe the handler that blocks the loop, for the log. From any thread."""
        return self.runs.slots.describe_blocking()

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
        queues, schedules = self.queues, self.settings.schedules
        declarer = ScheduleDeclarer(
            queues.link, queues.keys, schedules, self.shards_of, lambda: self.session.registration
        )
        await declarer.declare()
        with trio.CancelScope() as self._shield:
            try:
                async with trio.open_nursery() as nursery:
                    self._spawned = nursery
                    await self.runs.start(nursery)
                    self.queues.start(nursery)
                    nursery.start_soon(self._stop_after_failure)
                    nursery.start_soon(self.leader.lead_forever)
                    nursery.start_soon(self.leader.sweeper.sweep_forever)
                    nursery.start_soon(self.leader.scanner.scan_forever)
                    nursery.start_soon(self.leader.scanner.history.sample_forever)
                    nursery.start_soon(self.leader.due_jobs.promote_forever)
                    nursery.start_soon(self.leader.due_jobs.relay.relay_forever)
                    if self.settings.observer is None:
                        nursery.start_soon(declarer.declare_forever)
                        nursery.start_soon(self._ticker.tick_forever)
                    await trio.lowlevel.checkpoint_if_cancelled()  # before the shield: `join` may be cancelled already
                    self._shield.shield = True
                    task_status.started()
            finally:
                self._spawned = None

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
                while self.runs.held():  # noqa: ASYNC110 - slots have no event for a failure, which happens once
                    await trio.sleep(HELD_EVERY)
            for run in self.runs.held():
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
