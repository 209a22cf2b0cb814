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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextvars import Context as Variables
from contextvars import copy_context
from dataclasses import dataclass
from enum import IntEnum
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar, cast

import trio

from worqr import ops
from worqr.codecs import TRY_AGAIN, StoredValues, WrongKey
from worqr.command import Command
from worqr.errors import ClaimLost
from worqr.keys import QueueKeys, shard_of
from worqr.limits import DECLARES_NOTHING, NO_RULES
from worqr.link import Link
from worqr.log_events import emit
from worqr.ops import MAX_ITEMS, Child, NotedChildren, StartReply
from worqr.peer.error_throttle import ErrorThrottle
from worqr.peer.executors.offloaded import Handler, named_after
from worqr.peer.run import PolicyFields, Run, Save, current_run, opened_fields
from worqr.peer.scheduler import ClaimRequest, Scheduler, Share
from worqr.peer.task_log import Began, note_started
from worqr.peer.task_log import logger as task_log
from worqr.policy import Policy, Undecodable
from worqr.records import CancelReason, RemoteError
from worqr.remote_error import redacted, remote_error

if TYPE_CHECKING:
    from worqr.link import Subscription
    from worqr.peer.list_run import ListRun
    from worqr.peer.reconciler import Reconciler
    from worqr.peer.run_reports import RunReports
    from worqr.peer.session import Registration, Session
    from worqr.peer.settler import Settler, Settles
    from worqr.peer.slots import Slots

# `Lifecycle`: the phases of a consumer, from its creation until its queue was left.
#
# Not here: what happens in each phase when a consumer leaves (`consumer_runner`).


# `Admission`: under which worker id a queue has admitted a consumer, and whether its channels are subscribed.
#
# A peer that was declared dead registers again under a new worker id, and enters all its queues again under that id. An
# `Admission` belongs to the present id. Not here: entering a queue and leaving it (`consumer_runner`).


class Admission:
    """The registration under which a consumer serves its queue. Changed only in the loop.

    Attributes:
        registration: the registration under which the queue was entered, or is being entered.
        admitted: the queue lists the worker, so the consumer may request tasks.
        was_admitted: the queue has listed the worker once, under this registration or under an earlier one.
        leaving: the queue is being left, so it may list the worker no longer.
        subscription: the subscription of the consumer's channels.
        listening: the server has confirmed the subscription.
        mapped_on: the number of the connection on which the registry recorded that this worker serves the queue.
        checked_on: the number of the connection since which the consumer's claims agree with those of the server.
    """

    def __init__(self) -> None:
        self.registration: Registration | None = None
        self.admitted: bool = False
        self.was_admitted: bool = False
        self.leaving: bool = False
        self.subscription: Subscription | None = None
        self.listening: bool = False
        self.mapped_on: int = 0
        self.checked_on: int = 0

    @property
    def is_live(self) -> bool:
        """The queue lists the worker, and the worker is not known to be dead."""
        return self.admitted and self.registration is not None and not self.registration.dead

    def enter(self, registration: Registration, connection: int) -> None:
        """Begin to enter the queue under `registration`. The consumer requests no tasks until the queue lists the worker."""
        self.registration = registration
        self.admitted = False
        self.mapped_on = self.checked_on = connection

    def admit(self) -> None:
        """Store that the queue lists the worker."""
        self.admitted = self.was_admitted = True

    def subscribe(self, subscription: Subscription) -> None:
        """Store the subscription of the channels, which is not confirmed yet."""
        self.subscription = subscription

    def confirm(self) -> None:
        """Store that the server has confirmed the subscription, for the first time or on a new connection."""
        self.listening = True

    def leave(self) -> None:
        """Store that the queue is being left, and close the subscription."""
        self.leaving = True
        self.unsubscribe()

    def unsubscribe(self) -> None:
        """Close the subscription."""
        if self.subscription is not None:
            self.subscription.close()
            self.subscription = None
            self.listening = False

    def mapped(self, connection: int) -> None:
        """Store that the registry recorded on this connection that the worker serves the queue."""
        self.mapped_on = connection

    def checked(self, connection: int) -> None:
        """Store that the claims agreed with those of the server on this connection."""
        self.checked_on = connection


class Phase(IntEnum):
    """The phases of a consumer, in their order; `Lifecycle` has the table."""

    NEW = 0
    SERVING = 1
    DRAINING = 2
    STOPPING = 3
    CANCELLING = 4
    RETURNING = 5
    DETACHED = 6
    LEFT = 7


class Lifecycle:
    """The phase of one consumer. A phase is never followed by an earlier one. Changed only in the loop.

    ==========  ======================================  ========  =============  ==========  ================================
    phase       begins with                             requests  forwards       uses        claims that are stopped
                                                        tasks     a wake-up      replies
    ==========  ======================================  ========  =============  ==========  ================================
    NEW         its creation; also while it enters      no        no             no          -
    SERVING     `admitted`: its queue has admitted it   yes       yes            yes         go back at once
    DRAINING    `drain`: the queue is to be left        no        yes            yes         go back at once
    STOPPING    `skip_grace`: the grace is over         no        yes            no          go back at once
    CANCELLING  `cancel`: its runs are cancelled        no        yes            no          go back together with the queue
    RETURNING   `return_claims`: runs do not end, or    no        yes            no          go back at once
                another consumer has the queue
    DETACHED    `detach`: runs were left behind         no        yes            no          go back at once
    LEFT        `leave`: the queue was left             no        yes            no          nothing is stopped any more
    ==========  ======================================  ========  =============  ==========  ================================

    Every later phase can follow an earlier one directly. A call for the present phase or for an earlier one changes nothing.
    Requesting and forwarding also need a live registration that the queue has admitted. No wake-up arrives in LEFT, but one may
    be pending then.

    Attributes:
        phase: see the table.
        entering: the scope in which the queue is entered for the first time; cancelled by `drain`.
        grace_over: set from STOPPING on.
        left: set from DETACHED on. Calls that wait until the queue was left then continue.
        idle: set when the last run has ended and when a reply has arrived.
        rejected_claims: claims of replies that were not used. They go back together with the queue.
    """

    def __init__(self) -> None:
        self.phase: Phase = Phase.NEW
        self.entering: trio.CancelScope = trio.CancelScope()
        self.grace_over: trio.Event = trio.Event()
        self.left: trio.Event = trio.Event()
        self.idle: trio.Event = trio.Event()
        self.rejected_claims: list[int] = []

    @property
    def is_leaving(self) -> bool:
        """The consumer requests no more tasks."""
        return self.phase >= Phase.DRAINING

    @property
    def holds_stops(self) -> bool:
        """Claims that are stopped need no request of their own, because they go back together with the queue."""
        return self.phase is Phase.CANCELLING or self.phase is Phase.LEFT

    def admitted(self) -> None:
        """Begin SERVING: the queue has admitted the consumer."""
        self._advance(Phase.SERVING)

    def drain(self) -> bool:
        """Request no more tasks, and stop entering the queue. Return False if it was being left already."""
        if self.phase >= Phase.DRAINING:
            return False
        self.phase = Phase.DRAINING
        self.entering.cancel()
        return True

    def skip_grace(self) -> None:
        """End the grace of running tasks. Replies that arrive from now on are not used."""
        self._advance(Phase.STOPPING)
        self.grace_over.set()

    def cancel(self) -> None:
        """Begin CANCELLING: running tasks are cancelled now."""
        self._advance(Phase.CANCELLING)

    def return_claims(self) -> None:
        """Begin RETURNING: claims go back one by one from now on."""
        self._advance(Phase.RETURNING)

    def detach(self) -> None:
        """Begin DETACHED: the queue counts as left, except for runs that were left behind."""
        self._advance(Phase.DETACHED)
        self.left.set()

    def leave(self) -> None:
        """Begin LEFT: the queue was left."""
        self._advance(Phase.LEFT)
        self.left.set()

    def _advance(self, phase: Phase) -> None:
        if self.phase < phase:
            self.phase = phase

    def reject(self, claims: Iterable[int]) -> None:
        """Keep the claims of a reply that is not used."""
        self.rejected_claims += claims

    def take_rejected(self) -> list[int]:
        """Return the rejected claims, once."""
        rejected, self.rejected_claims = self.rejected_claims, []
        return rejected

    async def wait_idle(self) -> None:
        """Wait until the last run ends or a reply arrives."""
        self.idle = trio.Event()
        await self.idle.wait()


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

    def make(claims: Sequence[int]) -> Command[dict[int, str]]:
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
    "it is in the dead-letter queue: worqr undecodable %(queue)r"
)
LARGE = 256 * 1024
"""Bytes of a payload that is decoded in a thread: on the event loop, it would delay all others."""
WRONG_KEY = "queue %(queue)r: its tasks wait, and are tried again every %(retry_in)d s: %(error)s"
REFUSED = "queue %(queue)r: the server refuses to hand out tasks; the next scan tries again: %(error)s"


@dataclass(frozen=True, slots=True)
class ConsumerServices:
    """The parts of a peer that all its consumers use."""

    link: Link
    session: Session
    scheduler: Scheduler
    slots: Slots
    settler: Settler
    reports: RunReports
    reconciler: Reconciler
    values: StoredValues | None = None
    redacts: bool = False


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
    request, also with a table. `options` has what the handler declares of the queue. `admission` has the worker id under which
    the queue is served. `share` has the units, and only the scheduler writes it. `running` has the claims that the consumer
    holds.
    """

    run_class: ClassVar[type[Run[Any]]] = Run

    def __init__(
        self,
        keys: QueueKeys,
        services: ConsumerServices,
        policy: Policy,
        share: Share,
        state: object = None,
        options: QueueOptions | None = None,
    ) -> None:
        """Raise UsageError if a run of that size would never fit."""
        services.scheduler.check_fits(keys.display_name, share.size)
        self.keys: QueueKeys = keys
        self.name: str = keys.name
        self.queue: str = keys.display_name
        self.policy: Policy = policy
        self.policy_with: Callable[[PolicyFields], Policy] = policies_over(policy)
        self.variables: Variables = copy_context()
        self.state: object = state
        self.running: dict[int, Run[QueueConsumer]] = {}
        self.share: Share = share
        self.request: ClaimRequest = ClaimRequest()
        self.admission: Admission = Admission()
        self.lifecycle: Lifecycle = Lifecycle()
        self.options: QueueOptions = options or QueueOptions()
        self.scheduler: Scheduler = services.scheduler
        self.values: StoredValues | None = services.values
        self.hides_arguments: bool = services.values is not None
        self._throttle = ErrorThrottle(logger)
        self._settles = services.settler.settles
        self._services = services

    def open_run(self, run: Run[Any]) -> None:
        """Decode the payload of a run, and what its job has saved, by the codec of the mesh.

        Raises:
            WrongKey: The mesh does not have the key. The task is to go back uncounted, until a worker has it.
            Undecodable: A value was changed, or is plain and must not be.
        """
        if (values := self.values) is None:
            return
        try:
            run.open(values)
        except WrongKey as error:
            fields = {"queue": self.queue, "retry_in": round(TRY_AGAIN), "error": str(error)}
            self._throttle.error("", "codec.wrong_key", WRONG_KEY, **fields)
            raise

    def as_stored(self, error: RemoteError) -> RemoteError:
        """Return an error as the mesh stores it."""
        return redacted(error) if self._services.redacts else error

    @property
    def id_suffix(self) -> str:
        """The suffix of the ids that are generated there."""
        return self.keys.id_suffix

    @property
    def registration(self) -> Registration | None:
        """The registration under which the consumer serves the queue."""
        return self.admission.registration

    @property
    def recent(self) -> int:
        """How many of the runs that ended last the queue keeps."""
        return self.options.recent

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
        if self.name in self._settles.crowded:
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
            self.scheduler.begin_wanting(self.share)
        if not request.in_flight:
            self.scheduler.dispatch()

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
            self.reserve(wanted)
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
            self.reserve(-request.reserved)
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
        self.scheduler.dispatch()

    def _reject(self, registration: Registration, claims: range) -> None:
        """Give back claims that arrived too late: together with the queue, or alone if the queue was left already."""
        if self.lifecycle.left.is_set():
            self._settles.give_back(self.keys, registration, claims)
        else:
            self.lifecycle.reject(claims)

    def _use(self, registration: Registration, started: StartReply) -> None:
        """Hold the claims of a reply, and run them. Those that belong into a lane go there."""
        word = started.status
        self.request.replied(word in {"ok", "late"}, inf if word == "paused" else started.waiting_workers)
        runs = self.new_claims(registration, started, monotonic()) if started.entries else ()
        lane_of = self.options.lane_of
        if lane_of is not None and runs:
            runs = filed_in_lanes(self.keys, registration, runs, lane_of, self._settles)
        if runs:
            self.take(len(runs))
            for run in runs:
                self.running[run.fence] = run
            self.accept(runs)
        if self.request.take_recheck():
            self._services.reconciler.recheck(self)

    def new_claims(self, registration: Registration, started: StartReply, now: float) -> Sequence[Run[Any]]:
        """Return the claims of a reply that arrived at `now`, in the form in which `accept` takes them.

        A claim whose job has fields that cannot be read ends as undecodable, and is left out.
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
                logger,
                "task.undecodable",
                UNREADABLE,
                level=logging.ERROR,
                queue=self.queue,
                claim=fence,
                error=str(error),
            )
            why = remote_error(Undecodable(f"the record of the job cannot be read: {error}"))
        call = ops.fail_task(self.keys, registration.worker, fence, why, undecodable=True)
        self._settles.send(self.keys, registration, [fence], lambda _: call, lambda _word, _failure: None)
        return None

    # Its units

    def reserve(self, n: int) -> None:
        """Note that `n` more claims are being requested. Less than 0: the reply is there."""
        self.scheduler.reserve(self.share, n)

    def take(self, n: int) -> None:
        """Take the units of `n` more claims, which a reply has brought."""
        self.scheduler.take(self.share, n, first=not self.running)

    # Running tasks

    def report_progress(self, run: Run[Any], done: float | None, message: str) -> None:
        """Send the progress that a run reported. From any thread."""
        self._services.reports.report(run, done, message)

    def extend(self, run: Run[Any], seconds: float) -> None:
        """Move the deadline of a run to `seconds` from now. From any thread."""
        self._services.slots.deadlines.request_extension(run, seconds)

    def save(self, run: Run[Any], save: Save) -> Future[None]:
        """Send what a run saves. From any thread."""
        return self._services.reports.save(run, save)

    @property
    def base(self) -> str:
        """The base of the keys of the queue, or of this shard of it."""
        return self.keys.base

    def note_children(self, run: Run[Any], children: Sequence[Child]) -> Future[NotedChildren]:
        """Note that the run of a workflow starts jobs. From any thread."""
        return self._services.reports.note_children(run, children)

    # Ending

    def ended(self, run: Run[Any]) -> None:
        """Free the units of a claim that was settled or lost, unless they were freed before."""
        if self.running.pop(run.fence, None) is None:
            return
        last = not self.running
        self.scheduler.release(self.share, run.fence, last)
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
            self.scheduler.release_early(self.share, run.fence, place=place)

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

    Attributes:
        run_ended: ends a run that has ended in its slot: called with the run, whether its handler returned, the value, and the
            error.
    """

    def __init__(
        self,
        keys: QueueKeys,
        services: ConsumerServices,
        policy: Policy,
        share: Share,
        handler: Handler,
        state: object = None,
        options: QueueOptions | None = None,
    ) -> None:
        super().__init__(keys, services, policy, share, state, options)
        self.handler: Handler = handler if services.values is None else self._opening(handler)
        self.begun: dict[int, Began] = {}
        self.run_ended: Callable[[Run[Any], bool, object, BaseException | None], None] = services.settler.ended

    def capacity_wanted(self) -> int:
        limit = self.share.limit
        return MAX_ITEMS if limit is None else limit.room + self.request.reserved

    def accept(self, runs: Sequence[Run[Any]]) -> None:
        if task_log.isEnabledFor(logging.DEBUG):
            note_started(runs)
        start = self._services.slots.run
        for run in runs:
            start(run)

    def _opening(self, handler: Handler) -> Handler:
        """Return a handler in front of which the payload of each run, and what its job has saved, are decoded.

        A run whose key this mesh does not have goes back uncounted, until a worker has the key. Of a list, each such call is
        settled alone.
        """

        async def open_one(run: Run[Any]) -> None:
            if len(run.task) < LARGE:
                self.open_run(run)
            else:
                await trio.to_thread.run_sync(self.open_run, run)

        async def opened(task: bytes) -> object:
            run = current_run.get()
            if not run.is_list:
                await open_one(run)
                return await handler(run.task)
            calls = cast("ListRun", run)
            for item in tuple(calls.claimed):
                try:
                    await open_one(item)
                except (WrongKey, Undecodable) as error:
                    calls.remove(item)
                    self._services.settler.ended(item, False, None, error)
            calls.use_tasks()
            return await handler(task) if calls.claimed else None

        return named_after(handler, opened)

    def resume(self, run: Run[Any], ends: Mapping[str, bytes]) -> None:
        """Run a workflow again with the claim that it still holds, because waits of it ended while it was being suspended.

        Args:
            run: the run that was suspended.
            ends: how the waits have ended: fields of the job's record.
        """
        if self.lifecycle.phase >= Phase.DRAINING or run.registration.dead:
            self._settles.give_back(self.keys, run.registration, [run.fence])
            self.ended(run)
            return
        assert run.record is not None
        ended = {name.encode(): value for name, value in ends.items()}
        if self.values is not None:
            ended = opened_fields(ended, self.values)
        record = {**run.record.current(), **ended}
        again = self.run_class(
            self, run.registration, run.fence, [part for pair in record.items() for part in pair], monotonic()
        )
        if run.opened:
            again.note_opened()
        if run.fence not in self.running:  # its units were freed, because the server had refused the suspension
            self.take(1)
        self.running[run.fence] = again
        self.accept([again])


class ActiveConsumers:
    """The consumers of one peer. A queue of several shards has one consumer for each. Changed only in the loop.

    Attributes:
        closed: the peer leaves, and enters no more queues.
        used: set after a queue was served.
    """

    def __init__(self) -> None:
        self.closed: bool = False
        self.used: trio.Event = trio.Event()
        self._by_name: dict[str, QueueConsumer] = {}
        self._detached: list[QueueConsumer] = []
        self._unserved: set[str] = set()

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[QueueConsumer]:
        """Iterate over a copy: consumers are added and removed. From any thread, for the probes."""
        return iter(self._by_name.copy().values())  # of one step, where tuple() would be two

    def names(self) -> list[str]:
        """Return the names of all queues that are served, including those that are still being entered."""
        return list(self._by_name)

    def get(self, name: str) -> QueueConsumer | None:
        """Return the consumer of this queue, or None."""
        return self._by_name.get(name)

    def close(self) -> None:
        """Note that the peer leaves."""
        self.closed = True

    def add(self, consumer: QueueConsumer) -> None:
        """Add the consumer of a queue."""
        self._by_name[consumer.name] = consumer

    def remove(self, consumer: QueueConsumer) -> None:
        """Remove a consumer whose queue was left."""
        del self._by_name[consumer.name]

    def detach(self, consumer: QueueConsumer) -> None:
        """Keep a consumer whose queue counts as left, except for runs that were left behind and have not ended."""
        self._detached.append(consumer)

    def forget_detached(self, consumer: QueueConsumer) -> None:
        """Remove a detached consumer whose last run has ended."""
        self._detached.remove(consumer)

    @property
    def detached(self) -> Sequence[QueueConsumer]:
        """The consumers whose queues were left except for some runs."""
        return tuple(self._detached)

    def entered(self) -> list[QueueConsumer]:
        """Return the consumers whose queues are served now."""
        return [each for each in self if each.admission.was_admitted and not each.lifecycle.left.is_set()]

    def held(self) -> list[QueueConsumer]:
        """Return the consumers whose queues are served now, and the detached ones."""
        return [*self.entered(), *self._detached]

    def of(self, name: str) -> list[QueueConsumer]:
        """Return all consumers of this queue: the one that serves it, and the detached ones."""
        return [consumer for consumer in (*self, *self._detached) if consumer.name == name]

    def is_replaced(self, consumer: QueueConsumer) -> bool:
        """Return True if another consumer serves the queue that this one has left.

        Both receive each wake-up, but only one of them may request tasks. The server keeps only the reply to the worker's last
        request, for the case that this request is repeated.
        """
        return self._by_name.get(consumer.name) not in {None, consumer}

    def is_shared(self, consumer: QueueConsumer) -> bool:
        """Return True if another consumer of this peer has the same queue: it serves the queue again, or it is detached."""
        return any(other is not consumer for other in self.of(consumer.name))

    def request_waiting(self, names: Iterable[str]) -> None:
        """Request the tasks of these queues, which have waiting tasks: the leader's scan has found them, and a heartbeat names
        them, because a wake-up may have been lost.
        """
        for name in names:
            consumer = self.get(name)
            if consumer is not None and consumer.admission.was_admitted:
                consumer.request_soon()
            elif consumer is None and name.startswith("{") and name not in self._unserved:
                self._report_unserved(name)

    def _report_unserved(self, name: str) -> None:
        """Warn if this queue with waiting tasks is a shard of a served queue: then this peer joined before the shard was
        declared.
        """
        queue = QueueKeys.of("", name).display_name
        if queue != name and self.get(queue) is not None:
            self._unserved.add(name)
            text = (
                "queue %(queue)r has shards that this worker does not serve, because it joined before they were declared: "
                "restart it"
            )
            emit(logger, "shards.unserved", text, queue=queue)
