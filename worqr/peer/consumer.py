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
from math import ceil, inf
from time import monotonic
from typing import Any, ClassVar, Protocol

from worqr import ops
from worqr.errors import ClaimLost
from worqr.keys import QueueKeys
from worqr.limits import DECLARES_NOTHING, NO_RULES
from worqr.link import Link
from worqr.log_events import emit
from worqr.ops import MAX_ITEMS, StartReply
from worqr.peer.executors.offloaded import Handler
from worqr.peer.lifecycle import Admission, Lifecycle, Phase
from worqr.peer.list_run import ListGatherer, ListRun
from worqr.peer.run import PolicyFields, Run, Save
from worqr.peer.run_counter import RunCounter
from worqr.peer.scheduler import ClaimRequest, Share
from worqr.peer.session import Registration
from worqr.peer.settles import Settles
from worqr.peer.task_log import Began, note_started
from worqr.peer.task_log import logger as task_log
from worqr.policy import Broken, Policy
from worqr.records import CancelReason
from worqr.remote_error import remote_error
from worqr.script_call import Call
from worqr.shard_layout import shard_of

# `Units`: what a consumer uses of the scheduler. `ListUnits` is the form for list handlers, whose runs take several claims.
#
# A run takes the units of its handler, however many claims it has. So the units of a list handler are counted in list runs: one
# run for up to `batch_size` claims, and none for claims that are added to a run that waits for more.


class Units(Protocol):
    """The units of a peer, for one consumer. See `worqr.peer.scheduler.Scheduler`, which is one."""

    @property
    def dispatch_soon(self) -> Callable[[], None]:
        """Called when units have become free."""
        ...

    def check_fits(self, queue: str, size: int) -> None: ...
    def begin_wanting(self, share: Share) -> None: ...
    def reserve(self, share: Share, n: int) -> None: ...
    def take(self, share: Share, n: int, *, first: bool) -> None: ...
    def release(self, share: Share, fence: int, last: bool) -> None: ...
    def release_early(self, share: Share, fence: int, *, place: bool) -> None: ...
    def dispatch(self) -> None: ...


class ListUnits:
    """The units of one consumer of a list handler. `reserve` and `take` get numbers of claims, as of every consumer."""

    def __init__(self, scheduler: Units, gatherer: ListGatherer) -> None:
        self._scheduler = scheduler
        self._gatherer = gatherer
        self._reserved = 0
        self._granted = 0

    @property
    def dispatch_soon(self) -> Callable[[], None]:
        """Called when units have become free."""
        return self._scheduler.dispatch_soon

    def check_fits(self, queue: str, size: int) -> None:
        """Raise UsageError if a run of `size` units of `queue` would never fit."""
        self._scheduler.check_fits(queue, size)

    def begin_wanting(self, share: Share) -> None:
        """Note that the consumer has a reason to request tasks again."""
        self._scheduler.begin_wanting(share)

    def dispatch(self) -> None:
        """Let the consumers of the peer request tasks for the free units."""
        self._scheduler.dispatch()

    def reserve(self, share: Share, n: int) -> None:
        """Note that `n` more claims are being requested, some of them for the run that waits. Less than 0: the reply is there."""
        if n > 0:
            self._reserved = ceil(max(0, n - self._gatherer.room) / self._gatherer.size)
            self._scheduler.reserve(share, self._reserved)
        else:
            self._granted, self._reserved = self._reserved, 0
            self._scheduler.reserve(share, -self._granted)

    def take(self, share: Share, n: int, *, first: bool) -> None:
        """Do nothing: `take_for` takes the units of a list run."""

    def take_granted(self, share: Share) -> None:
        """Take the units that the reply was for, for as many runs. Other runs wait for a turn of their consumer."""
        for run in self._gatherer.without_units()[: self._granted]:
            self.take_for(run, share)
        self._granted = 0

    def take_for(self, run: ListRun, share: Share) -> None:
        """Take the units of one list run."""
        self._scheduler.take(share, 1, first=share.held == 0)
        run.reserve_units()

    def release(self, share: Share, fence: int, last: bool) -> None:
        """Release the units of a list run, whose first claim was `fence`."""
        self._scheduler.release(share, fence, last)

    def release_early(self, share: Share, fence: int, *, place: bool) -> None:
        """Release the units of a list run that is stuck; see `Scheduler.release_early`."""
        self._scheduler.release_early(share, fence, place=place)


# `policies_over`: the policies of jobs that have policy fields of their own, each made once.


MANY_POLICIES = 100
"""Limit of cached policies of jobs. If all jobs of a queue have different fields, no cached policy is used twice."""


def policies_over(policy: Policy) -> Callable[[PolicyFields], Policy]:
    """Return a factory of policies for jobs with policy fields of their own.

    Most jobs of a queue have the same fields, so each policy is made once.
    """
    made: dict[PolicyFields, Policy] = {}

    def with_own(own: PolicyFields) -> Policy:
        if (known := made.get(own)) is None:
            if len(made) >= MANY_POLICIES:
                made.clear()
            known = made[own] = policy.with_overrides({name.decode(): value.decode() for name, value in own})
        return known

    return with_own


# Files tasks in their lanes: those that a program without worqr has pushed to the queue of a function with lanes.
#
# Such a task waits in the list of the queue. A worker that has claimed it finds out its lane, and puts it at the back of that
# lane instead of running it. So the limits and the order of a lane hold for all producers. A task whose worker has died before
# is in no lane either, although it is a job then.


LaneOf = Callable[[bytes], str | None]
"""Returns the lane that a payload belongs into; None if it belongs into none."""


def lane_in_shard(lane_of: LaneOf | None, shards: Sequence[QueueKeys], keys: QueueKeys) -> LaneOf | None:
    """Return what finds the lanes of a shard. A lane is in one shard, and no script can move a task to another one."""
    if lane_of is None or len(shards) == 1:
        return lane_of

    def find(task: bytes) -> str | None:
        lane = lane_of(task)
        return lane if lane is not None and shard_of(tuple(shards), lane) == keys else None

    return find


def filed_in_lanes(
    keys: QueueKeys, registration: Registration, runs: Sequence[Run[Any]], lane_of: LaneOf, settles: Settles
) -> Sequence[Run[Any]]:
    """Send claims that belong into a lane there, in their order. Return the others, which run."""
    lanes: dict[int, str] = {}
    for run in runs:
        lane = lane_of(run.task) if _is_in_no_lane(run) else None
        if lane is not None:
            run.settle()
            lanes[run.fence] = lane
    if not lanes:
        return runs

    def make(claims: Sequence[int]) -> Call[dict[int, str]]:
        return ops.file_tasks(keys, registration.worker, {claim: lanes[claim] for claim in claims})

    settles.send(keys, registration, list(lanes), make, lambda _ended, _failure: None)
    return [run for run in runs if run.fence not in lanes]


def _is_in_no_lane(run: Run[Any]) -> bool:
    """Return True for a raw task, and for a job that was one and has no lane. A job that was dispatched without one has none."""
    record = run.record
    return record is None or (b"twin" in record and b"lane" not in record)


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
        lanes: how its lanes start tasks (`worqr.limits`).
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
