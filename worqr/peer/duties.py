"""The duties of a peer, in two groups: those about its runs, and those about its queues.

Here: which duties there are, and what each of them is given. A duty is given what it uses, and never the engine. Not here: the
session, the leader and the lifetime of all duties (`engine`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import trio

from worqr.keys import RegistryKeys
from worqr.link import Link, end_waits_by
from worqr.peer.adaptive_concurrency import AdaptiveConcurrency
from worqr.peer.consumer import ConsumerServices
from worqr.peer.consumer_runner import ConsumerRunner, RunStarters
from worqr.peer.consumer_shutdown import ConsumerShutdown
from worqr.peer.consumer_startup import ConsumerStartup
from worqr.peer.consumers import ActiveConsumers
from worqr.peer.control_channel import ControlChannel
from worqr.peer.deadlines import Deadlines
from worqr.peer.departures import Departures
from worqr.peer.executors.executors import Executors
from worqr.peer.executors.stacks import Frames
from worqr.peer.list_run import ListRun
from worqr.peer.progress import ProgressReporter
from worqr.peer.queue_registrar import register_queues_forever
from worqr.peer.reconciler import Reconciler
from worqr.peer.registration import Registration
from worqr.peer.run import Run, current_run
from worqr.peer.run_counter import RunCounter
from worqr.peer.scheduler import Scheduler
from worqr.peer.session import Session
from worqr.peer.settings import PeerSettings
from worqr.peer.settler import Settler
from worqr.peer.settles import Settles
from worqr.peer.slots import Slots
from worqr.peer.state_saver import StateSaver
from worqr.peer.stuck_handlers import StuckHandlerMonitor
from worqr.peer.waiting_queues import WaitingQueues
from worqr.peer.work_map_refresher import WorkMapRefresher


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
