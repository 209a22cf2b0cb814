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

import hashlib
import heapq
import logging
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import Context as Variables
from contextvars import copy_context
from enum import IntEnum
from functools import partial
from itertools import count
from math import inf
from random import random
from secrets import compare_digest
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast
from weakref import WeakSet

import msgspec
import trio

from worqr import child_processes, ops
from worqr.client.permits import LEASE, HeldPermits
from worqr.client.producer import random_part
from worqr.codecs import TRY_AGAIN, StoredValues, WrongKey
from worqr.command import Command
from worqr.errors import ClaimLost, Unavailable, UsageError
from worqr.keys import LimitKeys, QueueKeys, shard_of
from worqr.limits import DECLARES_NOTHING, NO_RULES, Limit, limits_text
from worqr.link import Link
from worqr.log_events import emit, emit_fields
from worqr.ops import MAX_ITEMS, Child, NotedChildren, PermitReply, StartReply, Wait
from worqr.peer.error_throttle import ErrorThrottle, sleep_aligned
from worqr.peer.executors.offloaded import Frames, Handler, named_after
from worqr.peer.leader.leader import Leader
from worqr.peer.run import PolicyFields, Run, RunHost, Save, Timer, current_run, opened_fields
from worqr.peer.scheduler import ClaimRequest, Scheduler, Share
from worqr.peer.session import Registration, Session
from worqr.peer.settler import Settler
from worqr.peer.task_log import RUN, Began, note_started, run_fields
from worqr.peer.task_log import logger as task_log
from worqr.policy import Policy, Undecodable
from worqr.records import CancelReason, RemoteError
from worqr.remote_error import redacted, remote_error
from worqr.stored_values import whole
from worqr.tracebacks import is_a, leaves_of, one_line, text_of

if TYPE_CHECKING:
    from worqr.link import Subscription
    from worqr.peer.list_run import ListRun
    from worqr.peer.run_reports import RunReports
    from worqr.peer.settler import Settles

# `Slots`: runs handlers. A slot is a Trio task that runs one handler after another.
#
# A slot parks between two runs and is woken with the next claim, which costs half as much as spawning a task. Every run has
# its own cancel scope and its own copy of the context variables, so a handler leaves nothing behind. A slot whose task was
# left with an open nursery or a broken stack of scopes is discarded. The nursery around each slot receives the resulting
# errors. When a run has ended, its consumer ends its claim (`run_ended`).

# `Deadlines`: the timeouts of runs, in one heap with one task. This costs less than a deadline in each run's cancel scope.
#
# A run that was settled leaves a stopped `Timer` in the heap. The timer is skipped when its time comes, or removed when most
# entries are stopped. A run that is extended gets a new timer; the old one stays in the heap, stopped.
#
# The heap uses Trio's clock. Handlers use ``time.monotonic()``, which threads, an asyncio loop and child processes can read
# too.


BLOCKED = 0.1
GRACE = 1.0
"""Seconds. If a blocked loop could not check deadlines for longer than the first value, runs get the lost time back, up to the
second value. So a run that ended in time keeps its own outcome.
"""
COMPACT_OVER = 1000
"""Number of entries above which stopped timers are removed."""


class Deadlines:
    """The deadlines of one peer's runs. Changed only in the loop; `request_extension` is called from any thread."""

    def __init__(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._thread = threading.get_ident()
        self._heap: list[tuple[float, int, Timer]] = []
        self._numbers = count(1)
        self._compact_at = COMPACT_OVER
        self._earlier = trio.Event()

    def begin(self, run: Run[Any], timeout: float) -> None:
        """Start the timeout of a run, `timeout` seconds from now."""
        self._add(Timer(run, time.monotonic() + timeout), trio.current_time() + timeout)

    def _add(self, timer: Timer, when: float) -> None:
        heap = self._heap
        if not heap or when < heap[0][0]:
            self._earlier.set()
        heapq.heappush(heap, (when, next(self._numbers), timer))
        if len(heap) > self._compact_at:
            heap[:] = [entry for entry in heap if entry[2].run is not None]
            heapq.heapify(heap)
            self._compact_at = max(COMPACT_OVER, 2 * len(heap))

    def request_extension(self, run: Run[Any], seconds: float) -> None:
        """Move a run's deadline to `seconds` from now, without waiting. From any thread.

        A run without a deadline stays without one.
        """
        if run.timer is None or run.cancel_reason is not None:
            return
        run.timer.move_to(time.monotonic() + seconds)
        if threading.get_ident() == self._thread and trio.lowlevel.in_trio_run():
            self._apply_extension(run)
        else:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._apply_extension, run)

    def _apply_extension(self, run: Run[Any]) -> None:
        """Set the changed deadline of a run, unless the run has ended or its old deadline has passed."""
        old = run.timer
        if old is not None and old.stop() is not None:
            self._add(Timer(run, old.deadline), trio.current_time() + old.deadline - time.monotonic())

    async def watch_forever(self) -> None:
        """Cancel runs that pass their deadline."""
        while True:
            self._earlier = trio.Event()
            due = self._heap[0][0] if self._heap else math.inf
            expected = time.monotonic() + due - trio.current_time()
            with trio.move_on_at(due) as waiting:
                await self._earlier.wait()
            late = time.monotonic() - expected
            if waiting.cancelled_caught and late > BLOCKED:
                await trio.sleep(min(late, GRACE))
            self.cancel_late()

    def cancel_late(self) -> None:
        """Cancel the runs whose deadline has passed."""
        now = trio.current_time()
        while self._heap and self._heap[0][0] <= now:
            run = heapq.heappop(self._heap)[2].stop()
            if run is not None:
                run.cancel("timeout")


logger: logging.Logger = logging.getLogger(__name__)

NOT_BLOCKING: Final = 'declare what blocks as a plain def, which runs in a thread, or with runs_in="process"'
"""A remedy for a handler that blocks the loop."""


class _Slot:
    """One slot. `last`: the run by which it ends, if it does. `left_open`: its handler has left a nursery or a scope open."""

    __slots__ = ("_variables", "last", "left_open", "run", "task")

    def __init__(self, run: Run[HandlerConsumer], variables: Variables) -> None:
        self.run: Run[HandlerConsumer] | None = run
        self.task: trio.lowlevel.Task | None = None
        self.last: Run[HandlerConsumer] | None = None
        self.left_open: bool = False
        self._variables: Variables = variables

    def take_variables(self) -> Variables:
        """Return the context variables of its first run, once: it must not keep them."""
        variables = self._variables
        del self._variables
        return variables


class Slots:
    """The slots of one peer. Changed only in the loop.

    `interrupted` is called when Ctrl-C arrives in a handler.

    Attributes:
        deadlines: those of the runs in its slots.
    """

    def __init__(self, interrupted: Callable[[KeyboardInterrupt], None]) -> None:
        self.deadlines: Deadlines = Deadlines()
        self._interrupted = interrupted
        self._idle: list[_Slot] = []
        self._slots: set[_Slot] = set()
        self._nursery: trio.Nursery | None = None
        self._thread = threading.get_ident()
        self._forks = child_processes.forks

    async def run_forever(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Hold the nursery of the slots."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            await trio.sleep_forever()

    def run(self, run: Run[HandlerConsumer]) -> None:
        """Run its handler in a slot, with new context variables. Called in the loop; never waits."""
        variables = run.host.variables.copy()
        variables.run(current_run.set, run)
        if self._idle:
            slot = self._idle.pop()
            task = slot.task
            assert task is not None
            slot.run = run
            task.context = variables  # from its next step on
            trio.lowlevel.reschedule(task)
        else:
            assert self._nursery is not None
            slot = _Slot(run, variables)
            try:
                self._nursery.start_soon(self._guard, slot, name=f"worqr slot for {run.queue}")
                self._slots.add(slot)
            except RuntimeError:  # the peer has failed, and its slots have ended: the claim goes back
                run.cancel("leaving")
                run.host.run_ended(run, False, None, None)

    def describe_blocking(self) -> str:
        """Describe the run that holds the loop's thread now, found on its stack. From any thread."""
        frame = sys._current_frames().get(self._thread)  # pyright: ignore[reportPrivateUsage] - public in all but name
        where = ""
        while frame is not None:
            if not where:
                where = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"
            if frame.f_code is Slots._run_reusing_scope.__code__:
                run = frame.f_locals["slot"].run
                if run is None:
                    return where
                return f"handler of queue {run.queue!r}, claim {run.fence}, at {where} ({NOT_BLOCKING})"
            frame = frame.f_back
        return f"code outside the handlers, at {where}" if where else "unknown code"

    def held(self) -> set[Run[Any]]:
        """Return the runs that slots hold."""
        return {slot.run for slot in self._slots if slot.run is not None}

    def frames_of(self, run: Run[RunHost]) -> Frames:
        """Return the stacks of the handler of `run` and of its tasks on the loop; empty if it is in no slot."""
        assert self._nursery is not None
        for holder in self._nursery.child_tasks:
            for nursery in holder.child_nurseries:
                for task in nursery.child_tasks:
                    if task.context.get(current_run) is run:
                        return [frame for each in _with_children(task) for frame in each.iter_await_frames()]
        return []

    async def _guard(self, slot: _Slot) -> None:
        """Run the task of a slot, and handle what it raises when a handler corrupted it."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._run_forever, slot)
        except BaseExceptionGroup as group:
            other = next((leaf for leaf, _ in leaves_of(group) if not is_a(leaf, trio.Cancelled)), None)
            if self._report_interrupt(group):
                return
            if other is None:
                raise
            if trio.current_effective_deadline() != float("-inf"):
                _report_corrupted(slot, other)

    def _report_interrupt(self, error: BaseException) -> bool:
        """Call `_interrupted` if `error` contains Ctrl-C, so that the peer ends. Return True if it does."""
        for leaf, _ in leaves_of(error):
            if is_a(leaf, KeyboardInterrupt):
                self._interrupted(leaf)
                return True
        return False

    async def _run_forever(self, slot: _Slot) -> None:
        task = slot.task = trio.lowlevel.current_task()
        task.context = slot.take_variables()
        try:
            await trio.lowlevel.cancel_shielded_checkpoint()
            while await self._run_reusing_scope(slot, task):
                self._idle.append(slot)
                await trio.lowlevel.wait_task_rescheduled(partial(self._remove_idle, slot))
        finally:
            self._slots.discard(slot)

    def _remove_idle(self, slot: _Slot, _: object) -> trio.lowlevel.Abort:
        if slot in self._idle:
            self._idle.remove(slot)
        return trio.lowlevel.Abort.SUCCEEDED

    async def _run_reusing_scope(self, slot: _Slot, task: trio.lowlevel.Task) -> bool:
        """Run handlers one after the other in one cancel scope, until one does not simply return.

        A scope that was not cancelled can be used again. Making one for each run would be a quarter of the cost of a run.

        Returns:
            False if the last handler corrupted the task.
        """
        scope = trio.CancelScope()
        returned, value, error = False, None, None
        try:
            with scope:
                while True:
                    run = slot.run
                    assert run is not None
                    run.begin(scope)
                    if run.policy.timeout is not None:
                        self.deadlines.begin(run, run.policy.timeout)
                    value = await run.host.handler(run.task)
                    if child_processes.forks != self._forks:
                        child_processes.leave_fork(None)
                    if run.cancel_reason is not None or task.child_nurseries or not _is_innermost(scope, task):
                        returned = True
                        break
                    slot.run = None
                    try:
                        run.host.run_ended(run, True, value, None)
                    except BaseException:
                        slot.last = run
                        raise
                    del run
                    value = None  # a parked slot must not hold the result
                    self._idle.append(slot)
                    await trio.lowlevel.wait_task_rescheduled(partial(self._remove_idle, slot))
        except BaseException as raised:
            if child_processes.forks != self._forks:
                child_processes.leave_fork(raised)
            if slot.run is None or trio.current_effective_deadline() == float("-inf"):
                raise  # the slot is being cancelled, not the handler
            error = raised
            offloaded = slot.run.offloaded
            if (offloaded is None or not offloaded.raised) and self._report_interrupt(raised):
                slot.run.cancel("leaving")  # Python raised Ctrl-C in this handler by chance
        return self._end_run(slot, task, returned, value, error)

    def _end_run(
        self, slot: _Slot, task: trio.lowlevel.Task, returned: bool, value: object, error: BaseException | None
    ) -> bool:
        """End the run of a slot. Return False if its handler corrupted the task."""
        run, slot.run = slot.run, None
        assert run is not None
        slot.last, slot.left_open = run, bool(task.child_nurseries) or _left_scope_open(error)
        run.host.run_ended(run, returned, value, error)
        for nursery in task.child_nurseries:
            nursery.cancel_scope.cancel()
        if not slot.left_open:
            slot.last = None
        return not slot.left_open


def _with_children(task: trio.lowlevel.Task) -> Iterator[trio.lowlevel.Task]:
    yield task
    for nursery in task.child_nurseries:
        for child in nursery.child_tasks:
            yield from _with_children(child)


def _is_innermost(scope: trio.CancelScope, task: trio.lowlevel.Task) -> bool:
    """Return False if the task has entered a scope inside `scope` and not left it.

    Trio has no public API for this. Without the private one the result is False, which costs a new scope per run.
    """
    try:
        status, innermost = scope._cancel_status, task._cancel_status  # pyright: ignore[reportPrivateUsage]
    except AttributeError:
        return False
    return status is not None and innermost is status


def _left_scope_open(error: BaseException | None) -> bool:
    """Return True for Trio's error about a scope that a handler opened and did not close."""
    return type(error) is RuntimeError and "stack corrupted" in text_of(error, 1000)


def _report_corrupted(slot: _Slot, error: BaseException) -> None:
    """Log why a slot has ended: because of its last handler, or because of an error outside of the handlers."""
    why = (
        "its handler left a nursery or a cancel scope open, close it before it returns"
        if slot.left_open
        else "its slot failed after the handler had ended, please report it"
    )
    run = slot.last
    named = ("", "") if run is None else (run.queue, run.id)
    text = f"queue %(queue)r, job %(job)s: {why}: %(error)s"
    emit(logger, "slot.corrupted", text, queue=named[0], job=named[1], error=one_line(error))


# `QueueConsumer`: requests the tasks of one queue for a peer when units are free.

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
        checked_on: the number of the connection since which the consumer's claims agree with those of the server; 0: of none.
        doubts: how often the claims came into doubt. A list of claims that was asked for before the last time settles nothing.
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
        self.doubts: int = 0

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
        self.distrust()

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

    def distrust(self) -> None:
        """Store that the claims may differ from those of the server, because a hand-off may have been lost."""
        self.checked_on = 0
        self.doubts += 1

    def checked(self, connection: int, doubts: int) -> None:
        """Store that the claims agreed with those of the server on this connection, unless they came into doubt meanwhile."""
        if doubts == self.doubts:
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
        idle: set when the last run has ended and when a reply has arrived; None: nothing has waited for it yet.
        rejected_claims: claims of replies that were not used. They go back together with the queue.
    """

    def __init__(self) -> None:
        self.phase: Phase = Phase.NEW
        self.entering: trio.CancelScope = trio.CancelScope()
        self.grace_over: trio.Event = trio.Event()
        self.left: trio.Event = trio.Event()
        self.idle: trio.Event | None = None
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


UNREADABLE = (
    "queue %(queue)r, claim %(claim)d: the record of the job cannot be read: %(error)s; "
    "it is in the dead-letter queue: worqr undecodable %(queue)r"
)
LARGE = 256 * 1024
"""Bytes of a payload that is decoded in a thread: on the event loop, it would delay all others."""
WRONG_KEY = "queue %(queue)r: its tasks wait, and are tried again every %(retry_in)d s: %(error)s"
REFUSED = "queue %(queue)r: the server refuses to hand out tasks; the next scan tries again: %(error)s"


PERMITS_AT_ONCE: Final = 100
"""Permits in one request, so that one function does not take all that a rate allows."""
REFUSALS: Final = 3
"""Requests for permits that are refused in a row before a function keeps a unit."""
KEEP_UNIT: Final = 1.0
"""Seconds for which it keeps one, at most."""
KEEP_PAUSE: Final = 10.0
"""Seconds for which no function of the worker keeps one, after one was kept for nothing."""
ASK_AGAIN: Final = 1.0
"""Seconds until the next request for permits at the latest, because messages may get lost, and a turn must be kept."""
CROSSED: Final = 0.05
"""Seconds within which it asks again, at a random time, after one limit has refused and permits of another went back. Else two
functions that ask in another order would refuse each other for ever.
"""
NO_PERMITS = "queue %(queue)r: no task starts, because limit %(limit)r grants no permits; trying again: %(error)s"


class SharedLimit(msgspec.Struct, frozen=True):
    """A limit with a name that holds for the handlers of a queue. `cost`: of each run. `text`: see `worqr.limits`."""

    keys: LimitKeys
    text: str
    unit: str
    cost: int

    @classmethod
    def of(cls, prefix: str, limit: Limit, cost: int) -> SharedLimit:
        """Return what a consumer needs of a limit with a name."""
        name = cast("str", limit.name)
        return cls(LimitKeys(prefix, name), limits_text([limit], name), limit.unit, cost)


class StartPermits:
    """The permits of limits with a name under which the runs of one consumer start. Changed only in the loop, but for the
    costs.

    A limit may be in another slot of a cluster than the queue, so permits are taken before tasks are claimed, and those for which
    there is no task go back, as if they had cost nothing. All limits must grant at the same time: a permit that waited for
    another limit would start later than its rate has counted it. If one refuses, the permits of the others go back, and that one
    is asked first from then on.

    Args:
        queue: for the log.
        link: sends the requests.
        held: renews the permits.
        limits: with their costs.
        on_room: called when there may be room again. Returns False if there is no use for permits now.

    Attributes:
        queue: its queue.
        refused: a limit has refused, and there was no sign of room since.
        watches: signs of room are heard.
    """

    def __init__(
        self, queue: str, link: Link, held: HeldPermits, limits: Sequence[SharedLimit], on_room: Callable[[], bool]
    ) -> None:
        self.queue: str = queue
        self.refused: bool = False
        self.watches: bool = False
        self._link = link
        self._held = held
        self._limits = deque(limits)
        self._on_room = on_room
        self._first = random_part()  # the permit that waits keeps its name, and so its turn
        self._has_turn = False
        self._has_news = False  # a sign of room since the last request
        self._granted: list[str] = []
        self._of: dict[int, str] = {}
        self._used: dict[int, int] = {}
        self._ask_at = inf
        self._deaf_until = -inf
        self._changed = trio.Event()
        self._throttle = ErrorThrottle(logger)

    def take(self, n: int, deliver: Callable[[int], None]) -> None:
        """Ask for `n` permits of each limit. `deliver` gets how many there are of all of them."""
        self._has_news = False
        self._ask(0, [self._first, *[random_part() for _ in range(n - 1)]], deliver)

    def _ask(self, index: int, permits: list[str], deliver: Callable[[int], None]) -> None:
        if index == len(self._limits):
            self._first, self._has_turn = random_part(), False
            self._granted += permits
            deliver(len(permits))
            return
        limit = self._limits[index]
        if (note := self._held.note(limit.keys.name, limit.unit)) is not None:
            self._link.post(note, lambda _, error: self._held.noted(limit.keys.name, error))
        call = ops.take_permits(limit.keys, limit.text, permits, limit.cost, round(LEASE * 1000))

        def answered(reply: PermitReply | None, failure: Exception | None) -> None:
            granted = reply.number if reply is not None and reply.word == "ok" else 0
            self._return(list(self._limits)[:index], permits[granted:])
            if granted:
                assert reply is not None
                self._held.tell_other(limit.keys.name, limit.text, reply.other)
                for permit in permits[:granted]:
                    self._held.add(limit.keys, permit)  # another limit may take longer to answer than its lease
                self._ask(index + 1, permits[:granted], deliver)
                return
            self._limits.rotate(-index)
            self._refuse(limit, reply, failure)
            if index and failure is None:  # another function may hold this limit, and ask for what goes back just now
                self._deaf_until = self._ask_at = trio.current_time() + random() * CROSSED
            deliver(0)

        self._link.post(call, answered, patience=self._link.settings.patience)  # the node of a limit may be away alone

    def _refuse(self, limit: SharedLimit, reply: PermitReply | None, failure: Exception | None) -> None:
        wait = ASK_AGAIN
        if reply is not None and reply.word == "wait":
            self._held.tell_other(limit.keys.name, limit.text, reply.other)
            wait, self._has_turn = min(ASK_AGAIN, reply.number / 1000), True
        else:
            error = failure or f"cost {limit.cost:,} is above what it allows"
            self._throttle.error(
                "", "permits.refused", NO_PERMITS, queue=self.queue, limit=limit.keys.name, error=str(error)
            )
        if self._has_news and failure is None:  # the message overtook the reply
            wait = 0.0
        self.refused, self._ask_at = True, trio.current_time() + wait
        self._changed.set()

    def _return(self, limits: Iterable[SharedLimit], permits: Sequence[str], used: int | None = 0) -> None:
        """Give permits back that are not needed, or that were used."""
        for limit in limits:
            for permit in permits:
                self._held.remove(limit.keys, permit)
                self._link.post(ops.return_permit(limit.keys, permit, used), lambda _, _error: None)

    def return_rest(self) -> None:
        """Give the permits back for which there was no task."""
        rest, self._granted = self._granted, []
        self._return(self._limits, rest)

    def assign(self, runs: Iterable[Run[Any]]) -> None:
        """Give each run a permit of each limit."""
        for run in runs:
            if run.fence not in self._of and self._granted:
                self._of[run.fence] = self._granted.pop()

    def note_cost(self, fence: int, used: int) -> None:
        """Note what a run has used, of the limits with a unit. From any thread."""
        if fence in self._of:  # else it has ended, and its permits went back
            self._used[fence] = used

    def run_ended(self, fence: int) -> None:
        """Give the permits of a run back."""
        permit, used = self._of.pop(fence, None), self._used.pop(fence, None)
        if permit is not None:
            for limit in self._limits:
                self._return([limit], [permit], used if limit.unit else None)

    async def watch_forever(self) -> None:
        """Ask again when there may be room: a permit was given back, or the time has come. At the end, give up the turn."""
        channels = [limit.keys.free for limit in self._limits]
        listening = self._link.subscriptions.open(channels, lambda _channel, _message: self._look(), self._look)
        self.watches = True
        try:
            while True:
                self._changed = trio.Event()
                with trio.move_on_at(self._ask_at):
                    await self._changed.wait()
                if trio.current_time() >= self._ask_at:
                    self._look()
        finally:
            listening.close()
            self.watches = False
            self._on_room()  # a unit that is kept is needed no more
            self._give_up_turn()

    def _look(self) -> None:
        self._has_news = True
        if self.refused and trio.current_time() >= self._deaf_until:
            self.refused, self._ask_at = False, inf
            if not self._on_room():
                self._give_up_turn()

    def _give_up_turn(self) -> None:
        """Let others go first, because a permit has no use now."""
        if self._has_turn:
            self._has_turn = False
            self._return(list(self._limits)[:1], [self._first])


class ConsumerServices(msgspec.Struct, frozen=True):
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
    deploy: int = 0
    permits: HeldPermits | None = None


class QueueOptions(msgspec.Struct, frozen=True):
    """What a handler declares of its queue, or of one shard of it.

    Attributes:
        recent: how many of the runs that ended last the queue keeps.
        limits: what may start (`worqr.limits`).
        lanes: how its lanes start tasks (`worqr.limits`).
        lane_of: returns the lane that a payload belongs into; None if no payload belongs into one.
        shared: the limits with a name, of each of which a run takes a permit before it is claimed.
    """

    recent: int = 0
    limits: str = DECLARES_NOTHING
    lanes: bytes = NO_RULES
    lane_of: LaneOf | None = None
    shared: tuple[SharedLimit, ...] = ()


class QueueConsumer:
    """Consumes one queue, or one shard of it. Subclasses define how many claims they want, and accept the claims. Changed only in
    the loop.

    The state is divided by owner. `lifecycle` has the phase, and a table of what each phase permits. `request` is the start
    request, also with a table. `options` has what the handler declares of the queue. `admission` has the worker id under which
    the queue is served. `share` has the units, and only the scheduler writes it. `running` has the claims that the consumer
    holds.
    """

    run_class: ClassVar[type[Run[Any]]] = Run
    wants_while_idle: ClassVar[bool] = False
    """It may want units without a reason to request tasks."""

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
        self._throttle = ErrorThrottle(logger)
        self._settles = services.settler.settles
        self._services = services

    def open_run(self, run: Run[Any]) -> None:
        """Decode the payload of a run, and what its job has saved, by the codec of the mesh.

        Raises:
            WrongKey: The mesh does not have the key. The task is to go back uncounted, until a worker has it.
            Undecodable: A value was changed, or is plain and must not be.
        """
        if (values := self.values) is not None:
            with self._telling_wrong_keys():
                run.open(values)

    @contextmanager
    def _telling_wrong_keys(self) -> Generator[None]:
        try:
            yield
        except WrongKey as error:
            fields = {"queue": self.queue, "retry_in": round(TRY_AGAIN), "error": str(error)}
            self._throttle.error("", "codec.wrong_key", WRONG_KEY, **fields)
            raise

    def as_stored(self, error: RemoteError) -> RemoteError:
        """Return an error as the mesh stores it."""
        return redacted(error) if self._services.redacts else error

    @property
    def hides_arguments(self) -> bool:
        """The mesh has a codec: the names of steps and jobs of workflows have digests of arguments."""
        return self.values is not None

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
        if request.resting:
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
        if self.request.wakeup_pending:
            self.forward_wakeup()

    def stop_waiting(self) -> None:
        """Take the worker off those that wait for tasks, by a request for none, because the queue is being left."""
        self.request.wake()
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
        number = registration.next_number()
        self.request.send(wanted, number)
        if wanted:
            self.reserve(wanted)
        call = ops.start_tasks(self.keys, registration.worker, number, wanted)
        self._services.link.post(call, partial(self._answered, registration), owner=registration)

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
        if self.lifecycle.idle is not None:
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
        else:
            self._use(registration, started)
        if request.handed:
            for claim in tuple(request.handed):
                request.decide(claim)
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
        if self.request.recheck_on_reply and self.request.take_recheck():
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

    # Hand-offs: tasks that come with their wake-up

    @property
    def takes_handoffs(self) -> bool:
        """A script may claim a task for this consumer, and send it along with the wake-up.

        Not if its machine could vanish unnoticed for long: then the task would wait for it, while another worker could run it.
        """
        return False

    def on_handoff(self, registration: Registration, claim: int, task: bytes) -> None:
        """Take a task that a script has claimed for this consumer.

        A message that came before is a wake-up, and so is one so late that its claim was given back as a stray. But another
        program may have deleted the queue's last token. So the claims are compared.
        """
        if self.request.receive(claim):
            try:
                self._decide_handoff(registration, claim, task)
            except BaseException:
                self.admission.distrust()
                raise
        else:
            self.admission.distrust()
            self.on_wakeup()

    def _decide_handoff(self, registration: Registration, claim: int, task: bytes) -> None:
        """Run the task, give it back, or keep it until a heartbeat confirms the registration or the reply under way is there."""
        request, phase, session = self.request, self.lifecycle.phase, self._services.session
        if registration.dead:
            return
        if not session.beat_is_fresh():
            request.keep(claim, partial(self._decide_handoff, registration, claim, task))
            session.defer_until_beat(registration, partial(request.decide, claim))
            return
        takes = phase is Phase.SERVING and registration is self.admission.registration and self.takes_handoffs
        has_room = takes and self.scheduler.fits(self.share) > 0 and self.capacity_wanted() > request.reserved
        if takes and not has_room and request.reserved:
            request.keep(claim, partial(self._decide_handoff, registration, claim, task))
            return
        if phase < Phase.DRAINING and request.want():
            self.scheduler.begin_wanting(self.share)
        if has_room:
            run = self.run_class(self, registration, claim, task, monotonic())
            self.take(1)
            self.running[claim] = run
            self.accept((run,))
            request.rest()
            self._services.settler.rest(self)
        else:
            self._settles.give_back(self.keys, registration, (claim,))
            self.scheduler.dispatch_soon()

    def rejoin(self) -> tuple[int, int] | None:
        """Return a number if the end of a hand-off, which is sent now, can do what the next request would: take the worker back
        among those that wait. Return with it the number of the last start. `rejoined` uses the reply.

        If another consumer wants tasks, the scheduler decides who requests them.
        """
        request, share = self.request, self.share
        if not request.rejoins or request.in_flight or self.wanted() < 1 or self.scheduler.fits(share) < 1:
            return None
        return None if self.scheduler.has_others_for(share) else (request.rejoin(), request.last_start)

    def rejoined(self, ending: int, workers_waiting: int) -> None:
        """Use the reply to such an end: how many workers wait, with this one. 0: it does not wait, or there is no reply."""
        self.request.rejoined(ending, workers_waiting)
        self.scheduler.dispatch()

    # Its units

    def reserve(self, n: int) -> None:
        """Note that `n` more claims are being requested. Less than 0: the reply is there."""
        self.scheduler.reserve(self.share, n)

    def take(self, n: int) -> None:
        """Take the units of `n` more claims, which a reply has brought."""
        self.scheduler.take(self.share, n, first=not self.running)

    # Running tasks

    def report_progress(self, run: Run[Any], done: float | None, message: str, value: bytes = b"") -> None:
        """Send the progress that a run reported. From any thread."""
        self._services.reports.report(run, done, message, value)

    def extend(self, run: Run[Any], seconds: float) -> None:
        """Move the deadline of a run to `seconds` from now. From any thread."""
        self._services.slots.deadlines.request_extension(run, seconds)

    def note_cost(self, run: Run[Any], used: int) -> None:
        """Note how much of limits with a unit a run has used. From any thread. Only handlers have such limits."""

    def save(self, run: Run[Any], save: Save) -> Future[None]:
        """Send what a run saves. From any thread."""
        return self._services.reports.save(run, save)

    @property
    def base(self) -> str:
        """The base of the keys of the queue, or of this shard of it."""
        return self.keys.base

    @property
    def deploy(self) -> int:
        """The number of the version of the application; 0: it has none."""
        return self._services.deploy

    def note_children(self, run: Run[Any], children: Sequence[Child]) -> Future[NotedChildren]:
        """Note that the run of a workflow starts jobs. From any thread."""
        return self._services.reports.note_children(run, children)

    # Ending

    def ended(self, run: Run[Any]) -> None:
        """Free the units of a claim that was settled or lost, unless they were freed before."""
        if self.running.pop(run.fence, None) is None:
            return
        last = not self.running
        self.request.end_rest()
        self.scheduler.release(self.share, run.fence, last)
        if last and self.lifecycle.idle is not None:
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

    @property
    def takes_handoffs(self) -> bool:
        return type(self) is HandlerConsumer and self.options.lane_of is None and self._services.session.is_missed_soon

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

    def resume(self, run: Run[Any], waits: Sequence[Wait], ends: Mapping[str, bytes]) -> None:
        """Run a workflow again with the claim that it still holds, because waits of it ended while it was being suspended.

        Args:
            run: the run that was suspended.
            waits: for what it waits.
            ends: how the waits have ended: fields of the job's record.

        Raises:
            WrongKey, Undecodable: as `open_run`, of a value that was sent. The run still holds its claim.
        """
        if self.lifecycle.phase >= Phase.DRAINING or run.registration.dead:
            self._settles.give_back(self.keys, run.registration, [run.fence])
            self.ended(run)
            return
        ended = {name.encode(): value for name, value in ends.items()}
        if self.values is not None:
            with self._telling_wrong_keys():
                ended = opened_fields(ended, self.values)
        record = run.resumed(waits, ended)
        again = self.run_class(
            self, run.registration, run.fence, [part for pair in record.items() for part in pair], monotonic()
        )
        if run.progressed:
            again.note_progress()
        if run.opened:
            again.note_opened()
        if run.fence not in self.running:  # its units were freed, because the server had refused the suspension
            self.take(1)
        self.running[run.fence] = again
        self.accept([again])


class LimitedConsumer(HandlerConsumer):
    """Consumes a queue whose runs start under limits with a name. Changed only in the loop.

    A request for permits precedes each start request, while its units are reserved. While a limit refuses, the consumer wants no
    units.

    A function that is refused again and again keeps one unit for a while. Otherwise other functions of the worker would take each
    unit that becomes free, and it would never be there when a permit is.

    Attributes:
        permits: those of its runs.
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
        super().__init__(keys, services, policy, share, handler, state, options)
        assert services.permits is not None
        self.permits: StartPermits = StartPermits(
            self.queue, services.link, services.permits, self.options.shared, self.on_room
        )
        self._at_once = 1  # permits of the next request: as many as there were tasks for
        self._refusals = 0
        self._keeps_until: float | None = None
        self._ask_again: Callable[[], None] | None = None

    def wanted(self) -> int:
        return 0 if self.permits.refused else super().wanted()

    def send_request(self, wanted: int) -> None:
        registration = self.admission.registration
        if not wanted or registration is None:
            super().send_request(wanted)
            return
        most = min(wanted, self._at_once)
        woken = self.request.wakeup_pending
        self.request.send(most)
        self.reserve(most)
        self.permits.take(most, lambda granted: self._permitted(registration, granted, woken=woken))

    def _permitted(self, registration: Registration, granted: int, *, woken: bool) -> None:
        """Request as many tasks as permits were granted. If none was, the wake-up goes to another worker, too."""
        is_current = registration is self.admission.registration and self.admission.is_live
        is_current = is_current and self.lifecycle.phase < Phase.DRAINING and not self.scheduler.quiet
        self._refusals = 0 if granted else self._refusals + 1
        if not granted and is_current and self._may_keep_unit():
            self.reserve(1 - self.request.reserved)
            self.request.shrink(1)
            self._ask_again = lambda: self.permits.take(
                1, lambda granted: self._permitted(registration, granted, woken=woken)
            )
            return
        if self._keeps_until is not None:
            self._refusals = 0
            self.scheduler.kept(0 if granted else KEEP_PAUSE)
        self._keeps_until = None
        self.reserve(-self.request.reserved)
        self.request.discarded()
        if self.lifecycle.idle is not None:
            self.lifecycle.idle.set()
        if granted and is_current:
            super().send_request(granted)
            return
        self.permits.return_rest()
        if woken:
            self.request.wake()
        if self.request.take_recheck():
            self._services.reconciler.recheck(self)
        self.scheduler.dispatch()

    def _may_keep_unit(self) -> bool:
        """Return True if a unit is kept for the next request."""
        if not self.permits.watches:
            return False
        now = trio.current_time()
        if self._keeps_until is None and self._refusals > REFUSALS and self.scheduler.may_keep(KEEP_PAUSE):
            self._keeps_until = now + KEEP_UNIT
        return self._keeps_until is not None and now < self._keeps_until

    def on_room(self) -> bool:
        """Ask for permits again, because there may be room. Return False if there are no tasks, or no units for them."""
        if self._ask_again is not None:
            ask, self._ask_again = self._ask_again, None
            ask()
            return True
        if not self.permits.watches:
            return False
        self.scheduler.dispatch()
        return self.request.in_flight

    def _started(self, registration: Registration, started: StartReply | None, failure: Exception | None) -> None:
        if asked := self.request.reserved:
            got = 0 if started is None else len(started.entries)
            self._at_once = min(PERMITS_AT_ONCE, 2 * asked) if got == asked else max(1, got)
        super()._started(registration, started, failure)
        self.permits.return_rest()

    def accept(self, runs: Sequence[Run[Any]]) -> None:
        self.permits.assign(runs)
        super().accept(runs)

    def resume(self, run: Run[Any], waits: Sequence[Wait], ends: Mapping[str, bytes]) -> None:
        if run.fence in self.running:
            super().resume(run, waits, ends)
        else:  # its permits went back with its units, so it starts again with others
            self._settles.give_back(self.keys, run.registration, [run.fence])

    def note_cost(self, run: Run[Any], used: int) -> None:
        self.permits.note_cost(run.fence, used)

    def ended(self, run: Run[Any]) -> None:
        super().ended(run)
        self.permits.run_ended(run.fence)


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


# `Reconciler`: compares the claims that a peer holds with those that the server lists for it.
#
# A claim is *marked* when a caller cancelled its task. It is *gone* when the server does not list it any more, because its
# task was reassigned. In both cases the run is cancelled. The peer asks after a hint, at every subscription, and once a
# second while tasks run.
#
# A *stray* is a claim that the server lists although the peer has settled it. A server may lose its latest writes, in a
# failover to a replica that had not received them, or by a crash before they were on disk. The leader does not recover a
# stray, because the worker is alive. So after each new connection the peer asks for all claims of every queue, and gives
# strays back. Their tasks run once more.
#
# A claim that runs is not a stray, even if its queue was left. A claim whose settle the server has not accepted is not a
# stray either. The peer asks while no start request is under way; otherwise the list could contain claims whose own reply is
# still unread. A stray must be found in two checks, a second apart. On a cluster, requests may overtake each other while
# slots move.

# The channels of a peer's queues, on which wake-ups and hints about cancelled tasks arrive.
#
# A message is a hint, which any client could forge; the server decides. After a wake-up, a consumer requests tasks. A message
# about a cancelled claim has a proof that a script sent it when it marked the claim (`_proven_claim`). Then the
# run is cancelled at once.
#
# The `Reconciler` asks the server which claims are marked in three cases:
#
# * a message without a proof names a claim of this worker;
# * `c` arrives on the worker's own wake channel, and stands for any number of claims;
# * the channels are subscribed, for the first time or again.


ASKERS: Final = 3
"""How many waiting workers, on average, request a task after a producer in another language announces it to all of them."""
TO_ALL: Final = (b"resumed", b"deleted")
"""Messages on the queue's own channel after which every worker requests tasks."""
CHECK_MARKS: Final = b"c"
"""The first word of a message on a worker's own wake channel that cancels one claim; alone, the worker asks which of its claims
are marked for cancellation.
"""
HANDOFF: Final = b"t "
"""What a message on that channel begins with that brings a claimed task. Any other message there is a wake-up."""


RECONCILE_EVERY = 1.0
"""Seconds between two checks of running tasks and for a new connection. One task does both, so that an idle peer wakes once."""

Marks = tuple[list[int], list[int]] | None


class Reconciler:
    """Compares the claims of one peer with the server's. Changed only in the loop."""

    def __init__(
        self, link: Link, consumers: ActiveConsumers, settler: Settler, session: Session, leader: Leader
    ) -> None:
        self._link = link
        self._consumers = consumers
        self._settler = settler
        self._session = session
        self._leader = leader
        self._checking: dict[QueueConsumer, bool] = {}
        self._failure_logged: WeakSet[QueueConsumer] = WeakSet()
        self._unchecked: set[QueueConsumer] = set()
        self._comparing: set[QueueConsumer] = set()
        self._seen: dict[QueueConsumer, set[int]] = {}

    # The channels of a queue

    async def subscribe(self, consumer: QueueConsumer) -> None:
        """Listen to the queue's channels under the consumer's present registration. Return when the server has confirmed it."""
        consumer.admission.unsubscribe()
        registration = consumer.registration
        assert registration is not None
        keys, wake = consumer.keys, consumer.keys.wake_channel(registration.worker)
        secret = registration.secret_of(keys).encode()
        cancels, announces = keys.cancel_channel, keys.base

        def deliver(channel: str, message: bytes) -> None:
            if channel == cancels:
                self._on_cancel_hint(consumer, message)
            elif channel == announces:
                self._on_announcement(consumer, message)
            elif message[:2] in (CHECK_MARKS, CHECK_MARKS + b" "):
                self._on_cancel(consumer, _proven_claim(message, secret))
            elif not self._consumers.is_replaced(consumer):
                _wake(consumer, registration, message, secret)

        subscription = self._link.subscriptions.open(
            [announces, cancels, wake], deliver, partial(self._confirmed, consumer)
        )
        consumer.admission.subscribe(subscription)
        patience = self._link.settings.patience
        with trio.move_on_after(patience) as waiting:
            try:
                await subscription.wait_confirmed()
            except UsageError:
                if consumer.admission.subscription is subscription:
                    raise
                return  # the queue was left, or is served by another consumer now
        if waiting.cancelled_caught:
            raise Unavailable(
                f"queue {consumer.queue!r}: the server did not confirm the subscription within {patience:g} s"
                f"{subscription.problem}",
                sent=None,
            )

    def _confirmed(self, consumer: QueueConsumer) -> None:
        """Check running tasks, then waiting ones: messages before this subscription may have been missed."""
        consumer.admission.confirm()
        self.check(consumer, named=True)
        consumer.request_soon()

    def _on_announcement(self, consumer: QueueConsumer, message: bytes) -> None:
        """Handle a message on the queue's own channel, which every worker of the queue receives. No worker has to react.

        A worker without a free slot sends nothing. Of the waiting workers, a few request tasks, among them the leader of the
        mesh. If none of them does, and the leader does not serve the queue, the scan finds the task. While the queue is paused,
        no worker requests tasks.
        """
        request = consumer.request
        few = self._leader.leads or request.in_flight or random() * request.workers_waiting < ASKERS
        if few or message in TO_ALL:
            consumer.request_soon()

    def _on_cancel_hint(self, consumer: QueueConsumer, message: bytes) -> None:
        # An unknown claim may be in a reply that has not arrived yet. Then the check follows the reply.
        claim = whole(message)
        if claim is None:
            return
        if claim in consumer.running:
            self.check(consumer)
        elif consumer.request.in_flight:
            consumer.request.recheck()

    def _on_cancel(self, consumer: QueueConsumer, claim: int | None) -> None:
        """Cancel the run of the claim. Check all claims if none is proven, if its reply has not arrived yet, or if its run is
        settled: a workflow that is being suspended may get another run under the same claim.
        """
        run = None if claim is None else consumer.running.get(claim)
        if run is not None and not run.settled:
            self._cancel_marked(consumer, (run.fence,))
            return
        if consumer.request.in_flight:
            consumer.request.recheck()
        self.check(consumer)

    # Both comparisons

    def recheck(self, consumer: QueueConsumer) -> None:
        """Check and compare again, after a reply that had to arrive first."""
        self.check(consumer)
        self.compare(consumer)

    def _removed(self, consumer: QueueConsumer, registration: Registration) -> None:
        if consumer.admission.leaving:
            return  # the worker removed itself, and this request overtook or followed that one
        self._session.lost(registration, f"it was removed from the workers of queue {consumer.queue!r}")

    async def reconcile_forever(self) -> None:
        """Once a second, check the claims of running tasks, and compare the claims of queues that have a new connection."""
        while True:
            await sleep_aligned(RECONCILE_EVERY)
            consumers = self._consumers.entered()
            for consumer in consumers:
                if consumer.running:
                    self.check(consumer)
            self._compare_all([each for each in self._consumers.held() if not self._consumers.is_replaced(each)])

    # Marked and gone claims

    def check(self, consumer: QueueConsumer, *, named: bool = False) -> None:
        """Ask which of its claims are marked, and with `named` also which are gone. Never waits."""
        registration = consumer.registration
        if registration is None or not consumer.admission.is_live or not (named or consumer.running):
            return
        if consumer in self._checking:
            self._checking[consumer] = True
            return
        claims = list(consumer.running) if named else []
        for start in range(0, max(len(claims), 1), MAX_ITEMS):
            call = ops.reconcile(consumer.keys, registration.worker, claims[start : start + MAX_ITEMS])
            self._checking[consumer] = False
            self._link.post(call, partial(self._checked, consumer, registration), owner=registration)

    def _checked(
        self, consumer: QueueConsumer, registration: Registration, marks: Marks, failure: Exception | None
    ) -> None:
        again = self._checking.pop(consumer, False)
        if registration.dead or registration is not consumer.registration:
            return
        if failure is not None:
            if consumer not in self._failure_logged:  # once, not each second
                self._failure_logged.add(consumer)
                text = "queue %(queue)r: the server does not say which tasks are cancelled, trying again: %(error)s"
                emit(logger, "reconcile", text, queue=consumer.queue, error=str(failure))
        elif marks is None:
            self._removed(consumer, registration)
        else:
            self._failure_logged.discard(consumer)
            self._cancel_marked(consumer, marks[0])
            _cancel_gone(consumer, marks[1])
        if again:
            self.check(consumer)

    def _cancel_marked(self, consumer: QueueConsumer, marked: Iterable[int]) -> None:
        """Cancel these runs. They are logged two turns of the loop later, because logging takes as long as all before it, and the
        next turn is the handler's.
        """
        post = self._link.driver.post
        for claim in marked:
            if run := consumer.running.get(claim):
                run.cancel("cancel")
                post(partial(post, partial(_log_cancelling, run)))

    # Strays

    def _compare_all(self, consumers: Sequence[QueueConsumer]) -> None:
        """Compare the claims of each queue that was not free of strays since the newest connection."""
        self._seen = {consumer: seen for consumer, seen in self._seen.items() if consumer in consumers}
        connections = self._link.connections
        self._unchecked = {each for each in consumers if each.admission.checked_on != connections}
        for consumer in consumers:
            self.compare(consumer)

    def compare(self, consumer: QueueConsumer) -> None:
        """Ask for all its claims, if there is a reason to. While a start request is under way, wait for its reply by
        `recheck`.
        """
        registration = consumer.registration
        if consumer not in self._unchecked or consumer in self._comparing:
            return
        if registration is None or not consumer.admission.is_live or consumer.lifecycle.holds_stops:
            return
        if consumer.request.in_flight:
            consumer.request.recheck()
            return
        self._unchecked.discard(consumer)
        self._comparing.add(consumer)
        connections = self._link.connections
        call = ops.list_own_claims(consumer.keys, registration.worker)
        asked = connections, consumer.admission.doubts
        self._link.post(call, partial(self._compared, consumer, registration, asked), owner=registration)

    def _compared(
        self,
        consumer: QueueConsumer,
        registration: Registration,
        asked: tuple[int, int],
        held: list[int] | None,
        failure: Exception | None,
    ) -> None:
        self._comparing.discard(consumer)
        seen = self._seen.pop(consumer, set())
        if registration.dead or registration is not consumer.registration:
            return
        if failure is not None:
            # `_checked` logs the same refusal, of its own request, as an error
            emit(logger, "list_own_claims", "queue %(queue)r: %(error)s", queue=consumer.queue, error=str(failure))
            return
        if held is None:
            self._removed(consumer, registration)
            return
        strange = set(held) - self._known_claims(consumer.name)
        if not strange:
            consumer.admission.checked(*asked)
        elif strays := strange & seen:
            text = (
                "queue %(queue)r: the server lists %(count)d claims that do not run here: it forgot how they ended, or a message "
                "was lost; their tasks are given back"
            )
            emit(logger, "claim.stray", text, queue=consumer.queue, count=len(strays))
            consumer.request.gave_back(strays)
            self._settler.give_back(consumer, strays)
        self._seen[consumer] = strange

    def _known_claims(self, name: str) -> set[int]:
        """Return the claims of a queue that this peer accounts for.

        They run, are on their way back, or wait until the server accepts their settle. Runs of detached consumers are included.
        """
        known = self._settler.settles.claims_of(name)
        for consumer in self._consumers.of(name):
            known.update(consumer.running, consumer.request.handed, consumer.lifecycle.rejected_claims)
        return known


def _proven_claim(message: bytes, secret: bytes) -> int | None:
    """Return the claim that a message on the worker's own channel cancels. None: it names none, or its proof is wrong."""
    word, _, rest = message.partition(b" ")
    claim, _, proof = rest.partition(b" ")
    return whole(claim) if word == CHECK_MARKS and _proves(proof, secret, claim) else None


def _proven_task(message: bytes, secret: bytes) -> tuple[int, bytes] | None:
    """Return the claim and the task of a hand-off. None: it is none, or its proof is wrong."""
    words = message.split(b" ", 3)
    if len(words) < 4:
        return None
    _, claim, proof, task = words
    number = whole(claim)
    return (number, task) if number is not None and _proves(proof, secret, b"%s %s" % (claim, task)) else None


def _wake(consumer: QueueConsumer, registration: Registration, message: bytes, secret: bytes) -> None:
    """Handle a wake-up, which may bring a task. Before its channel is confirmed, a message may be from an earlier subscription,
    and the claim of its task over.
    """
    is_handoff = message[:2] == HANDOFF and consumer.admission.listening
    if is_handoff and (handed := _proven_task(message, secret)):
        consumer.on_handoff(registration, *handed)
    else:
        consumer.on_wakeup()


def _proves(proof: bytes, secret: bytes, text: bytes) -> bool:
    expected = hashlib.sha1(b"%s %s" % (secret, text), usedforsecurity=False).hexdigest().encode()
    return compare_digest(proof, expected)


def _log_cancelling(run: Run[Any]) -> None:
    emit_fields(logger, "task.cancelling", f"{RUN}: cancelled on request", run_fields(run))


def _cancel_gone(consumer: QueueConsumer, gone: Iterable[int]) -> None:
    for claim in gone:
        if (run := consumer.running.get(claim)) and not run.settled:
            text = "queue %(queue)r, job %(job)s: the task was reassigned to another worker; this run is cancelled"
            emit(logger, "claim.lost", text, queue=consumer.queue, job=run.id)
            run.cancel("lost")
