"""`QueueConsumer`: requests the tasks of one queue for a peer when units are free. `HandlerConsumer` passes them to handlers.

Each queue has one start request at a time. Its units are reserved while it is under way (see `ClaimRequest`).

A consumer requests tasks after an event that indicates tasks:

* the queue was entered;
* a wake-up or a scan named it;
* its channels were subscribed again;
* the last reply left tasks behind.

A wake-up without a free unit is forwarded to another worker.

A reply is used only while the last acknowledged heartbeat is younger than the keepalive. A process that was frozen may receive
claims that were reassigned in the meantime.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextvars import Context as Variables
from contextvars import copy_context
from dataclasses import dataclass
from math import inf
from time import monotonic
from typing import Any, ClassVar, Protocol

from worqr import ops
from worqr.errors import ClaimLost
from worqr.keys import QueueKeys
from worqr.lanes import NO_RULES
from worqr.limits import DECLARES_NOTHING
from worqr.link import Link
from worqr.log_events import emit
from worqr.ops import MAX_ITEMS, StartReply
from worqr.peer.admission import Admission
from worqr.peer.claim_request import ClaimRequest
from worqr.peer.handlers import Handler
from worqr.peer.job_policies import policies_over
from worqr.peer.lane_filing import LaneOf, filed_in_lanes
from worqr.peer.lifecycle import Lifecycle, Phase
from worqr.peer.registration import Registration
from worqr.peer.run import PolicyFields, Run, Save
from worqr.peer.run_counter import RunCounter
from worqr.peer.scheduler import Share
from worqr.peer.settles import Settles
from worqr.peer.task_log import Began, note_started
from worqr.peer.task_log import logger as task_log
from worqr.peer.units import Units
from worqr.policy import Broken, Policy
from worqr.records import CancelReason
from worqr.remote_error import remote_error

logger: logging.Logger = logging.getLogger(__name__)

UNREADABLE = (
    "queue %(queue)r, claim %(claim)d: the record of the job cannot be read: %(error)s; "
    "it is in the dead-letter queue: worqr broken %(queue)r"
)
REFUSED = "queue %(queue)r: the server refuses to hand out tasks; the next scan tries again: %(error)s"


class WorkerSession(Protocol):
    """The part of the peer's session that consumers use."""

    def beat_is_fresh(self) -> bool:
        """Return True while no leader can have declared this worker dead."""
        ...

    def defer_until_beat(self, registration: Registration, callback: Callable[[], None]) -> None:
        """Call `callback` when a heartbeat has shown whether this worker is registered."""
        ...

    def lost(self, registration: Registration, why: str) -> None:
        """End the registration."""
        ...


@dataclass(frozen=True, slots=True)
class ConsumerServices:
    """What all consumers of a peer use.

    Attributes:
        recheck: asks the server which claims of a consumer are cancelled, and which are strays.
        counter: counts the runs.
        report_progress: sends the progress of a run; called from any thread.
        extend_deadline: moves the deadline of a run; called from any thread.
        save: sends what a run saves; called from any thread.
    """

    link: Link
    session: WorkerSession
    settles: Settles
    scheduler: Units
    counter: RunCounter
    recheck: Callable[[QueueConsumer], None]
    report_progress: Callable[[Run[Any], float | None, str], None]
    extend_deadline: Callable[[Run[Any], float], None]
    save: Callable[[Run[Any], Save], Future[None]]


@dataclass(frozen=True, slots=True)
class QueueOptions:
    """What a handler declares of its queue, or of one shard of it.

    Attributes:
        recent: how many of the runs that ended last the queue keeps.
        limits: what may start (`worqr.limits`).
        lanes: how its lanes start tasks (`worqr.lanes`).
        lane_of: returns the lane that a payload belongs into; None if no payload belongs into one.
    """

    recent: int = 0
    limits: str = DECLARES_NOTHING
    lanes: bytes = NO_RULES
    lane_of: LaneOf | None = None


class QueueConsumer:
    """Consumes one queue, or one shard of it. Subclasses define how many claims they want, and accept the claims. Changed only in
    the loop.

    The state is divided by owner. `lifecycle` has the phase, and a table of what each phase permits. `request` is the start
    request, also with a table. `admission` has the worker id under which the queue is served. `share` has the units, and only the
    scheduler writes it. `running` has the claims that the consumer holds.
    """

    run_class: ClassVar[type[Run[Any]]] = Run

    def __init__(
        self, keys: QueueKeys, services: ConsumerServices, policy: Policy, share: Share, state: object = None
    ) -> None:
        """Raise UsageError if a run of that size would never fit."""
        services.scheduler.check_fits(keys.display_name, share.size)
        self.keys: QueueKeys = keys
        self.policy: Policy = policy
        self.policy_with: Callable[[PolicyFields], Policy] = policies_over(policy)
        self.variables: Variables = copy_context()
        self.state: object = state
        self.running: dict[int, Run[QueueConsumer]] = {}
        self.share: Share = share
        self.request: ClaimRequest = ClaimRequest()
        self.admission: Admission = Admission()
        self.lifecycle: Lifecycle = Lifecycle()
        self._scheduler = services.scheduler
        self._services = services

    @property
    def name(self) -> str:
        """The name of the queue, or of this shard of it, in the registry."""
        return self.keys.name

    @property
    def queue(self) -> str:
        """The queue's name."""
        return self.keys.display_name

    @property
    def id_suffix(self) -> str:
        """The suffix of the ids that are generated there."""
        return self.keys.id_suffix

    @property
    def registration(self) -> Registration | None:
        """The registration under which the consumer serves the queue."""
        return self.admission.registration

    @property
    def options(self) -> QueueOptions:
        """What the handler declares of the queue."""
        return QueueOptions()

    @property
    def recent(self) -> int:
        """How many of the runs that ended last the queue keeps."""
        return self.options.recent

    @property
    def scheduler(self) -> Units:
        """The units of the peer."""
        return self._scheduler

    @property
    def executing(self) -> Mapping[int, Run[Any]]:
        """The runs of handlers, by claim; of a list handler, by the first claim of each run."""
        return self.running

    def capacity_wanted(self) -> int:
        """Return how many claims it could take now, regardless of free units."""
        raise NotImplementedError

    def wanted(self) -> int:
        """Return how many more claims it would take if units were free, beyond those requested; 0 without a reason to request."""
        request = self.request
        if not request.is_wanted or self.lifecycle.phase >= Phase.DRAINING or not self.admission.is_live:
            return 0
        crowded = self._services.settles.crowded
        if crowded and self.keys.name in crowded:
            return 0
        return min(self.capacity_wanted(), MAX_ITEMS) - request.reserved

    def accept(self, runs: Sequence[Run[Any]]) -> None:
        """Accept new claims: run them, or pass them to a waiting call."""
        raise NotImplementedError

    # Reasons to request tasks

    def request_soon(self) -> None:
        """Request tasks when the scheduler grants units, because there may be tasks."""
        if self.lifecycle.phase >= Phase.DRAINING:
            return
        request = self.request
        if request.want():
            self._scheduler.begin_wanting(self.share)
        if not request.in_flight:
            self._scheduler.dispatch()

    def on_wakeup(self) -> None:
        """Handle a wake-up.

        The wake-up is pending until a start request has been sent. The free units may be in use by then, or the peer may be
        leaving. In both cases it is forwarded to the next waiting worker.
        """
        self.request.wake()
        self.request_soon()
        self.forward_wakeup()

    def forward_wakeup(self) -> None:
        """Forward a pending wake-up for which no unit is free. The scheduler has offered all free units before."""
        if self.request.wakeup_pending and not self.request.in_flight and self.admission.is_live:
            self.send_request(0)

    # Requesting tasks

    def send_request(self, wanted: int) -> None:
        """Request `wanted` tasks, and reserve their units from now on. A request for 0 tasks forwards a wake-up."""
        registration = self.admission.registration
        assert registration is not None
        self.request.send(wanted)
        if wanted:
            self._scheduler.reserve(self.share, wanted)
        call = ops.start_tasks(self.keys, registration.worker, registration.next_number(), wanted)

        def answered(started: StartReply | None, failure: Exception | None) -> None:
            self._answered(registration, started, failure)

        self._services.link.post(call, answered, owner=registration)

    def _answered(self, registration: Registration, started: StartReply | None, failure: Exception | None) -> None:
        """Use the reply now, or when the next heartbeat confirms the registration."""
        session = self._services.session
        if started is not None and started.entries and not session.beat_is_fresh():
            session.defer_until_beat(registration, lambda: self._started(registration, started, failure))
        else:
            self._started(registration, started, failure)

    def _started(self, registration: Registration, started: StartReply | None, failure: Exception | None) -> None:
        request = self.request
        if request.reserved:
            self._scheduler.reserve(self.share, -request.reserved)
        self.lifecycle.idle.set()
        if (
            registration.dead
            or registration is not self.admission.registration
            or self.lifecycle.phase >= Phase.STOPPING
        ):
            request.discarded()
            if started is not None and not registration.dead:
                self._reject(registration, range(started.first, started.first + len(started.entries)))
        elif started is None:
            request.refused()
            if not isinstance(failure, ClaimLost):
                emit(logger, "start_tasks", REFUSED, queue=self.queue, error=str(failure))
        elif started.status == "not_serving":
            request.discarded()
            self._services.session.lost(registration, f"it was removed from the workers of queue {self.queue!r}")
            return
        else:
            self._use(registration, started)
        self._scheduler.dispatch()

    def _reject(self, registration: Registration, claims: range) -> None:
        """Give back claims that arrived too late: together with the queue, or alone if the queue was left already."""
        if self.lifecycle.left.is_set():
            self._services.settles.give_back(self.keys, registration, claims)
        else:
            self.lifecycle.reject(claims)

    def _use(self, registration: Registration, started: StartReply) -> None:
        """Hold the claims of a reply, and run them. Those that belong into a lane go there."""
        word = started.status
        self.request.replied(word in {"ok", "late"}, inf if word == "paused" else started.waiting_workers)
        runs = self.new_claims(registration, started, monotonic()) if started.entries else ()
        lane_of = self.options.lane_of
        if lane_of is not None and runs:
            runs = filed_in_lanes(self.keys, registration, runs, lane_of, self._services.settles)
        if runs:
            self._scheduler.take(self.share, len(runs), first=not self.running)
            for run in runs:
                self.running[run.fence] = run
            self.accept(runs)
        if self.request.take_recheck():
            self._services.recheck(self)

    def new_claims(self, registration: Registration, started: StartReply, now: float) -> Sequence[Run[Any]]:
        """Return the claims of a reply that arrived at `now`, in the form in which `accept` takes them.

        A claim whose job has fields that cannot be read ends as broken, and is left out.
        """
        first, make = started.first, self.run_class
        entries = started.entries
        try:
            return [
                make(self, registration, first + i, entry, now) for i, entry in enumerate(entries) if entry is not None
            ]
        except ValueError:  # another program has written the record of one of them
            claims = [self._readable(registration, first + i, entry, now) for i, entry in enumerate(entries)]
            return [claim for claim in claims if claim is not None]

    def _readable(self, registration: Registration, fence: int, entry: Any, now: float) -> Run[Any] | None:
        """Return the run of a claim. If its record cannot be read, return None, and move the task to the dead-letter queue."""
        try:
            return None if entry is None else self.run_class(self, registration, fence, entry, now)
        except ValueError as error:
            emit(
                logger, "task.broken", UNREADABLE, level=logging.ERROR, queue=self.queue, claim=fence, error=str(error)
            )
            why = remote_error(Broken(f"the record of the job cannot be read: {error}"))
        call = ops.fail_task(self.keys, registration.worker, fence, why, broken=True)
        self._services.settles.send(self.keys, registration, [fence], lambda _: call, lambda _word, _failure: None)
        return None

    # Running tasks

    def report_progress(self, run: Run[Any], done: float | None, message: str) -> None:
        """Send the progress that a run reported. From any thread."""
        self._services.report_progress(run, done, message)

    def extend(self, run: Run[Any], seconds: float) -> None:
        """Move the deadline of a run to `seconds` from now. From any thread."""
        self._services.extend_deadline(run, seconds)

    def save(self, run: Run[Any], save: Save) -> Future[None]:
        """Send what a run saves. From any thread."""
        return self._services.save(run, save)

    # Ending

    def ended(self, run: Run[Any]) -> None:
        """Free the units of a claim that was settled or lost, unless they were freed before."""
        if self.running.pop(run.fence, None) is None:
            return
        last = not self.running
        self._scheduler.release(self.share, run.fence, last)
        if last:
            self.lifecycle.idle.set()

    def release_slot_of_stuck_run(self, run: Run[Any], *, place: bool = False) -> None:
        """Give the units of a stuck run, and its place under the handler's limit, to other runs. May be called twice.

        The claim stays. `ended` must still be called for it, and then frees only the remaining resources.

        Args:
            run: a run of this consumer; a run that has ended is ignored.
            place: free its place in the pool too; only if the thread or process of that place is really free again.
        """
        if run.fence in self.running:
            self._scheduler.release_early(self.share, run.fence, place=place)

    def give_back_unstarted(self) -> None:
        """Give back claims that no handler and no call has taken, because the queue is being left."""

    def cancel_running(self, reason: CancelReason) -> None:
        """Cancel all runs of this consumer."""
        for run in tuple(self.running.values()):
            run.cancel(reason)

    async def wait_idle(self) -> None:
        """Wait until nothing runs here. A reply that arrives after the grace starts nothing, so it is not waited for."""
        while self.running or (self.request.in_flight and not self.lifecycle.grace_over.is_set()):
            await self.lifecycle.wait_idle()


class HandlerConsumer(QueueConsumer):
    """Consumes a queue whose tasks run in slots. `begun` is filled while DEBUG is logged.

    `options`: what the handler declares of the queue.
    """

    def __init__(
        self,
        keys: QueueKeys,
        services: ConsumerServices,
        policy: Policy,
        share: Share,
        handler: Handler,
        run: Callable[[Run[Any]], None],
        state: object = None,
        options: QueueOptions | None = None,
    ) -> None:
        super().__init__(keys, services, policy, share, state)
        self._options = QueueOptions() if options is None else options
        self.handler: Handler = handler
        self.begun: dict[int, Began] = {}
        self._run = run

    @property
    def options(self) -> QueueOptions:
        return self._options

    def capacity_wanted(self) -> int:
        limit = self.share.limit
        return MAX_ITEMS if limit is None else limit.room + self.request.reserved

    def accept(self, runs: Sequence[Run[Any]]) -> None:
        if task_log.isEnabledFor(logging.DEBUG):
            note_started(runs)
        for run in runs:
            self._run(run)
