"""`Settler`: ends claims in batches. The run does not wait for it, and its slot is free.

The finishes and stops of one turn of the loop are sent as one request per queue. Every settle carries its registration. A settle
of a dead registration is not sent, because the task belongs to another worker by then. `Settles` repeats each request, over lost
connections and refusals, until the server accepts it or the worker id is dead. `RunCounter` counts the runs that have ended.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

import trio
from trio_util import RepeatedEvent

from worqr import ops
from worqr.codecs import WrongKey
from worqr.command import Command, in_chunks
from worqr.errors import ClaimLost, UsageError
from worqr.history_records import OUTCOMES, RunCounts, waited_ms
from worqr.keys import QueueKeys
from worqr.link import Link, WorkerHandle
from worqr.log_events import emit, emit_fields
from worqr.ops import MAX_ITEMS, Result, Suspended, Wait
from worqr.peer.context import Context
from worqr.peer.durable import SWALLOWED, Swallowed
from worqr.peer.error_throttle import ErrorThrottle
from worqr.peer.executors.offloaded import with_wrong_loop_remedy
from worqr.peer.run import FULL, SETTLED, Run, encode_result
from worqr.peer.task_log import log_failure, log_finished, log_late, log_snoozed, log_suspended, log_timeout
from worqr.policy import Failure, RetryDecision, Snooze, Undecodable
from worqr.records import Outcome, RemoteError, StoredRun, encode_run
from worqr.remote_error import error_from_text, with_stderr
from worqr.tracebacks import format_error, is_a, one_line, text_of
from worqr.validation import qualname_of

if TYPE_CHECKING:
    from worqr.peer.consumer import HandlerConsumer, QueueConsumer
    from worqr.peer.options import RunObserver
    from worqr.peer.run_reports import RunReports
    from worqr.peer.scheduler import Scheduler
    from worqr.peer.session import Registration

logger: logging.Logger = logging.getLogger(__name__)


TIMEOUT: Final = "Timeout"
"""The type of the error of a run that took too long."""
HANDOFF_REST: Final = 0.001
"""Seconds after a hand-off until the next request for tasks, unless its run ends before."""
TOO_MANY: Final = (
    "the workflow waits for {:,} things at the same time, and a run may wait for {:,}: wait for some after the others, or in "
    "jobs that it starts"
)


class Settler:
    """Ends claims.

    `observer` is called with each run that raised.

    Attributes:
        settles: the requests that end claims.
        counter: counts the runs.
    """

    def __init__(
        self,
        link: Link,
        scheduler: Scheduler,
        reports: RunReports,
        *,
        max_result: int,
        observer: RunObserver | None = None,
    ) -> None:
        self.settles: Settles = Settles(link, reports)
        self.counter: RunCounter = RunCounter(link)
        self._link = link
        self._scheduler = scheduler
        self._max_result = max_result
        self._observer = observer
        self._flusher: trio.lowlevel.Task | None = None
        self._dirty: dict[HandlerConsumer, list[Run[HandlerConsumer]]] = {}
        self._results: dict[QueueConsumer, dict[int, Result]] = {}
        self._stopped: dict[QueueConsumer, list[int]] = {}
        self._cancelled: dict[tuple[QueueConsumer, int], str] = {}
        """The ids of the jobs of cancelled runs, by claim, until the server has recorded how they ended."""
        self._flush_requested = False
        self._resting: list[QueueConsumer] = []
        self._rest = trio.CancelScope()
        scheduler.dispatch_with(self.request_flush)

    def ended(self, run: Run[HandlerConsumer], returned: bool, value: object, error: BaseException | None) -> None:
        """Settle the claim of a run that has ended in its slot, according to the outcome, and free its units.

        Whatever is raised meanwhile, by a bug or by an object of the user, the claim is settled, and the units are free. A run
        that is suspended keeps them until the server has replied.
        """
        held = False
        try:
            reason = run.cancel_reason
            if run.state is SETTLED:
                pass  # its queue was left, and the claim went back
            elif reason == "lost" or run.registration.dead:
                run.settle()
                self.counter.ended(run, "lost")
            elif reason == "suspended":
                held = self._suspend(run, returned, error)
            elif returned:
                if reason == "timeout":
                    log_late(run)
                elif reason == "cancel":
                    self._note_cancelled(run)
                self.finish(run, value)
            elif reason == "timeout":
                self.time_out(run)
            elif reason is not None or error is None:
                self.stop(run)  # a marked claim ends on the server, others return
            else:
                self.fail_run(run, with_wrong_loop_remedy(run, error))
        except BaseException as raised:
            self._fail_anyway(run, raised)
            if is_a(raised, KeyboardInterrupt):
                raise  # Python raised Ctrl-C here by chance: the slot reports it
        finally:
            if not held:
                run.host.ended(run)
            if not self._scheduler.used:  # no other run can end in this turn of the loop
                with self._link.together:
                    self.flush()
            elif not self._flush_requested:
                self.request_flush()

    def _suspend(self, run: Run[HandlerConsumer], returned: bool, error: BaseException | None) -> bool:
        """End the claim of a run that only waits. Return False if its handler went on all the same, which is a failure."""
        if run.suspension is None or returned or is_a(error, Swallowed):
            self.fail_run(run, Swallowed(SWALLOWED))
            return False
        waits, progress = run.suspension
        if len(waits) > MAX_ITEMS:
            self.fail_run(run, Failure(TOO_MANY.format(len(waits), MAX_ITEMS)))
            return False
        record: Mapping[bytes, bytes] = run.record or {}
        run.settle()

        def make(_: object) -> Command[Suspended]:
            return ops.suspend_task(run.host.keys, run.registration.worker, run.fence, waits, progress=progress)

        def answered(reply: Suspended | None, _failure: Exception | None) -> None:
            if progress and reply is not None and any(b"wait:" + wait.key.encode() not in record for wait in waits):
                run.note_progress()
            self._suspended(run, waits, reply)

        self.settles.send(run.host.keys, run.registration, [run.fence], make, answered)
        return True

    def _suspended(self, run: Run[HandlerConsumer], waits: Sequence[Wait], reply: Suspended | None) -> None:
        """Use the reply to a suspension. None: the server refuses it for now, or the worker is dead."""
        status = "" if reply is None else reply.status
        if reply is not None and status == "ready":  # a wait has ended meanwhile, and the claim is still held
            try:
                run.host.resume(run, waits, reply.ends)
            except (WrongKey, Undecodable) as error:
                self.fail_run(run, error)
            else:
                return
        elif status == "full":
            self.fail_run(run, Failure(f"the workflow cannot keep its {len(waits)} waits: {FULL}"))
        elif status == "suspended":
            log_suspended(run, waits)
        elif status:
            _answered(self._cancelled, run.host, {run.fence: status}, None)
        run.host.ended(run)

    def _fail_anyway(self, run: Run[HandlerConsumer], raised: BaseException) -> None:
        """Settle a claim as failed, if its run could not be settled because of `raised`, and log that."""
        told = qualname_of(type(raised))
        with suppress(BaseException):
            told = one_line(raised)
        if run.state is not SETTLED:
            run.settle()
            self._send_one(run, unsettled_call(run, told))
        with suppress(BaseException):  # handlers of the log are code of the user
            text = "queue %(queue)r, job %(job)s: settling its run raised an error, so it counts as failed: %(error)s"
            fields = {"queue": run.queue, "job": run.id, "error": told}
            trace = type(raised), raised, raised.__traceback__
            emit_fields(logger, "task.unsettled", text, fields, exc_info=trace, exc_text=format_error(raised))

    def finish(self, run: Run[HandlerConsumer], value: object) -> None:
        """End a claim as finished, with the next flush; a claim with a cancel mark ends as cancelled there.

        A result that cannot be stored fails the task without a retry, because another run would end in the same way.
        """
        if run.record is not None and run.keeps_result():
            try:
                result = encode_result(value, self._max_result, run.host.values)
            except UsageError as error:
                self.fail_run(run, Failure(str(error)))
                return
            self._results.setdefault(run.host, {})[run.fence] = result
        run.settle()
        self._dirty.setdefault(run.host, []).append(run)

    def finish_plain(self, consumer: HandlerConsumer, runs: Sequence[Run[HandlerConsumer]]) -> None:
        """End claims of one registration as finished, without results, with the next flush. None of them is cancelled."""
        for run in runs:
            run.settle()
        self._dirty.setdefault(consumer, []).extend(runs)
        self.request_flush()

    def request_flush(self) -> None:
        """Flush after all tasks that can run in this turn of the loop have run."""
        if not self._flush_requested:
            self._flush_requested = True
            if self._flusher is not None:
                task, self._flusher = self._flusher, None
                trio.lowlevel.reschedule(task)

    def rest(self, consumer: QueueConsumer) -> None:
        """Let a consumer request more tasks when the run of its hand-off has ended, so that they go together, or soon."""
        if not self._resting:
            self._rest.deadline = trio.current_time() + HANDOFF_REST
        self._resting.append(consumer)

    async def flush_forever(self) -> None:
        """Flush after each turn that requests it, and after each rest. A parked task costs less than a callback, which needs a
        system call; a deadline costs no turn of the loop if the rest ends before.
        """
        while True:
            with self._rest:
                await self._flush_turns()
            self._rest = trio.CancelScope()
            resting, self._resting = self._resting, []
            for consumer in resting:
                consumer.request.end_long_rest()
            with self._link.together:
                self.flush()

    async def _flush_turns(self) -> None:
        while True:
            if not self._flush_requested:
                self._flusher = trio.lowlevel.current_task()
                await trio.lowlevel.wait_task_rescheduled(self._unpark)
            if self._flush_requested:
                with self._link.together:
                    self.flush()

    def _unpark(self, _: object) -> trio.lowlevel.Abort:
        self._flusher = None
        return trio.lowlevel.Abort.SUCCEEDED

    def flush(self) -> None:
        """Send the finishes and stops of this turn, except those of a queue that is just being left."""
        self._flush_requested = False
        if self._dirty:
            dirty, self._dirty = self._dirty, {}
            results, self._results = self._results, {}
            for consumer, runs in dirty.items():
                claims = [run.fence for run in runs]
                self.counter.returned(consumer, runs)
                if consumer.begun:
                    log_finished(consumer, claims)
                self._send_finishes(consumer, claims, results.get(consumer))
        if self._stopped:
            for each in [each for each in self._stopped if not each.lifecycle.holds_stops]:
                claims = sorted(self._stopped.pop(each), reverse=True)  # newest first: restores the old order
                self._send(each, claims, ops.stop_tasks)
        if self._resting and not any(each.request.resting for each in self._resting):
            self._resting.clear()
            self._rest.deadline = math.inf
        self._scheduler.dispatch()

    def _send(self, consumer: QueueConsumer, claims: list[int], settle: Callable[..., Command[Any]]) -> None:
        registration = consumer.registration
        if registration is None or registration.dead:
            return
        make, answered = (
            partial(settle, consumer.keys, registration.worker),
            partial(_answered, self._cancelled, consumer),
        )
        for start in range(0, len(claims), MAX_ITEMS):
            self.settles.send(consumer.keys, registration, claims[start : start + MAX_ITEMS], make, answered)

    def _send_finishes(self, consumer: QueueConsumer, claims: list[int], results: dict[int, Result] | None) -> None:
        if not results:
            if len(claims) > MAX_ITEMS or not self._rejoin(consumer, claims):
                self._send(consumer, claims, ops.finish_tasks)
        elif (registration := consumer.registration) is not None and not registration.dead:
            make, answered = finisher(consumer, registration, results), partial(_answered, self._cancelled, consumer)
            sizes = dict.fromkeys(claims, 0) | {claim: len(value) for claim, (_, value) in results.items()}
            for some in in_chunks(claims, sizes.__getitem__):
                self.settles.send(consumer.keys, registration, some, make, answered)

    def _rejoin(self, consumer: QueueConsumer, claims: list[int]) -> bool:
        """Send these finishes so that the worker waits for tasks again, if that saves a request. Return False if it does not.

        If the server refuses that, the finishes alone are sent again.
        """
        registration = consumer.registration
        if registration is None or registration.dead or (rejoined := consumer.rejoin()) is None:
            return False
        ending, last_start = rejoined
        replied = False

        def make(claims: Sequence[int]) -> Command[ops.Ended]:
            rejoins = None if replied else last_start
            return ops.finish_tasks(consumer.keys, registration.worker, claims, rejoins=rejoins)

        def answered(ended: ops.Ended | None, failure: Exception | None) -> None:
            nonlocal replied
            _answered(self._cancelled, consumer, ended, failure)
            if not replied:
                replied = True
                consumer.rejoined(ending, 0 if ended is None else ended.waiting_workers)

        self.settles.send(consumer.keys, registration, claims, make, answered)
        return True

    def forget(self, registration: Registration) -> None:
        """Drop the unsent and the refused settles of a registration that was declared dead."""
        self.settles.forget(registration)
        self._dirty.clear()
        self._results.clear()
        self._stopped.clear()
        self._cancelled.clear()

    def left(self, consumer: QueueConsumer) -> None:
        """Drop the stopped claims of a queue that was left, because they went back with all other claims of the worker."""
        self._stopped.pop(consumer, None)
        for each in [each for each in self._cancelled if each[0] is consumer]:
            del self._cancelled[each]

    def stop(self, run: Run[QueueConsumer]) -> None:
        """Give a claim back to the front, uncounted, with the next flush."""
        run.settle()
        if run.cancel_reason == "cancel":
            self.counter.ended(run, "cancelled")
            self._note_cancelled(run)
        self._stopped.setdefault(run.host, []).append(run.fence)

    def _note_cancelled(self, run: Run[QueueConsumer]) -> None:
        if len(self._cancelled) >= MAX_ITEMS:
            self._cancelled.clear()  # the ids are for the log only
        self._cancelled[run.host, run.fence] = run.id

    def give_back(self, consumer: QueueConsumer, claims: Iterable[int]) -> None:
        """Give claims back to the front, uncounted, with the next flush, and after the finishes that wait for it."""
        self._stopped.setdefault(consumer, []).extend(claims)
        self.request_flush()

    def fail_run(self, run: Run[QueueConsumer], error: BaseException) -> None:
        """End a claim whose run raised: retry the task, or move it to the dead-letter queue, as the policy decides."""
        decision = run.decide(error)
        if is_a(decision.error, Snooze):
            call = snooze_call(run, decision)
            run.settle()
            self._send_one(run, call)
            log_snoozed(run, decision)
            return
        described = run.describe(decision.error).error
        call = settle_call(run, decision, described)
        run.settle()
        self._send_one(run, call)
        self.counter.ended(run, "raised", described.type)
        log_failure(run, decision)
        run.forget_errors()
        if self._observer is not None:
            self._observer(Context(run), error)

    def time_out(self, run: Run[QueueConsumer]) -> None:
        """End a claim whose run took too long: retry the task, up to the limit of timeouts."""
        run.settle()
        self.counter.ended(run, "timeout", TIMEOUT)
        timeouts = 0 if run.progressed else run.timeouts
        error, delay = f"it ran longer than {run.policy.timeout:g} s", run.delay_after(timeouts, TIMEOUT)
        last = not run.has_time_for(delay)
        self._send_one(run, timeout_call(run, error, delay, last=last))
        log_timeout(run, delay, error, last=last)
        if self._observer is not None:
            self._observer(Context(run), TimeoutError(error))

    def _send_one(self, run: Run[QueueConsumer], call: Command[str]) -> None:
        def answered(word: str | None, _failure: Exception | None) -> None:
            _answered(self._cancelled, run.host, None if word is None else {run.fence: word}, None)

        self.settles.send(run.host.keys, run.registration, [run.fence], lambda _: call, answered)


def _answered(
    cancelled: dict[tuple[QueueConsumer, int], str],
    consumer: QueueConsumer,
    ended: dict[int, str] | None,
    _failure: Exception | None,
) -> None:
    """Log the claims that did not end as requested; `Settles` logs refusals."""
    for claim, word in (ended or {}).items():
        job = cancelled.pop((consumer, claim), "") if cancelled else ""
        if word == "lost":
            text = (
                "queue %(queue)r, claim %(claim)d: the task was reassigned to another worker, because this one missed its "
                "heartbeat or left the queue; how it ended here does not count"
            )
            emit(logger, "claim.lost", text, queue=consumer.queue, claim=claim)
        elif word == "cancelled":
            which = "job %(job)s" if job else "claim %(claim)d"
            text = f"queue %(queue)r, {which}: the task was cancelled"
            emit(logger, "task.cancelled", text, queue=consumer.queue, claim=claim, job=job)
        elif word == "dropped":
            text = "queue %(queue)r, claim %(claim)d: the task was not given back, because the queue was deleted"
            emit(logger, "task.dropped", text, queue=consumer.queue, claim=claim)


def finisher(consumer: QueueConsumer, registration: Registration, results: Mapping[int, Result]) -> Make:
    """Return a function that makes the call which finishes some claims, with their results."""

    def make(claims: Sequence[int]) -> Command[ops.Ended]:
        kept = {claim: results[claim] for claim in claims if claim in results}
        return ops.finish_tasks(consumer.keys, registration.worker, claims, kept)

    return make


def settle_call(run: Run[QueueConsumer], decision: RetryDecision, error: RemoteError) -> Command[str]:
    """Return the call that ends a claim whose run raised. `error`: that of the decision, as text."""
    keys, worker, error = run.host.keys, run.registration.worker, run.host.as_stored(error)
    if decision.kind != "retry":
        return ops.fail_task(keys, worker, run.fence, error, undecodable=decision.kind == "undecodable")
    return ops.retry_task(
        *(keys, worker, run.fence, error),
        counter="stalls" if decision.stalled else "failures" if decision.counted else "",
        limit=0 if decision.last else run.policy.max_stalls if decision.stalled else run.policy.max_failures,
        since_ms=run.failing_since if decision.counted and not decision.stalled else None,
        delay_ms=round(decision.delay * 1000),
        run_at_ms=decision.run_at_ms,
        pause_ms=None if decision.pause is None else max(1, round(decision.pause * 1000)),
    )


def snooze_call(run: Run[QueueConsumer], decision: RetryDecision) -> Command[str]:
    """Return the call that ends a claim whose run has raised `Snooze`: what it waits for is no error."""
    return settle_call(run, decision, error_from_text("", text_of(decision.error)))


def unsettled_call(run: Run[QueueConsumer], why: str) -> Command[str]:
    """Return the call that ends a claim as failed, because settling its run raised an error. It reads nothing of its job."""
    error, policy = error_from_text("Unsettled", f"worqr could not settle the run as it ended: {why}"), run.policy
    return ops.retry_task(
        *(run.host.keys, run.registration.worker, run.fence, run.host.as_stored(error)),
        counter="failures",
        limit=policy.max_failures,
        delay_ms=round(policy.delay(0) * 1000),
    )


def timeout_call(run: Run[QueueConsumer], why: str, delay: float, *, last: bool) -> Command[str]:
    """Return the call that ends a claim whose run took too long. Its task is tried again after `delay` seconds, unless this was
    the `last` try.
    """
    error = error_from_text(TIMEOUT, why)
    if run.offloaded is not None and run.offloaded.killed_output:
        error = with_stderr(error, run.offloaded.killed_output)
    return ops.retry_task(
        *(run.host.keys, run.registration.worker, run.fence, run.host.as_stored(error)),
        counter="timeouts",
        limit=0 if last else run.policy.max_timeouts,
        since_ms=run.failing_since,
        delay_ms=round(delay * 1000),
    )


# `Settles`: the requests that end claims (settles), until the server has accepted them.
#
# Every settle of a peer is sent from here. The link repeats a request when a connection is lost. This module repeats it when
# the server *refused* it: a permission is missing, or a key has another type. It waits 1 s before the second try, and up to 30
# s before later ones. A batch that was refused is tried again claim by claim, so that one bad record does not delay the others.
# Each claim keeps its outcome: a finish stays a finish, with its result.
#
# Invariant: from `send` until the server accepts the settle, the claim is in `claims_of(name)`, or its registration is dead, or
# its queue was left (`drop`). So if the server lists a claim for this worker that is neither running nor in `claims_of`, no
# worker holds it. Settles are fenced by the claim, so sending one again is safe.


FIRST_PAUSE = 1.0
LONGEST_PAUSE = 30.0
"""Seconds before a refused request is sent again: each pause is twice the one before it."""
CROWDED = 1000
"""Number of refused settles of one queue above which this peer requests no more tasks there, because it could not settle them."""

Make = Callable[[Sequence[int]], Command[Any]]
Answered = Callable[[Any, Exception | None], object]


class Settle:
    """One request that ends `claims`. `make` makes the call for all of them, or for some."""

    __slots__ = ("answered", "at", "claims", "keys", "make", "pause", "registration")

    def __init__(
        self, keys: QueueKeys, registration: Registration, claims: Sequence[int], make: Make, answered: Answered
    ) -> None:
        self.keys: QueueKeys = keys
        self.registration: Registration = registration
        self.claims: Sequence[int] = claims
        self.make: Make = make
        self.answered: Answered = answered
        self.pause: float = 0.0
        self.at: float = math.inf


class Settles:
    """The unaccepted settles of one peer, by the name of their queue. Changed only in the loop.

    What runs have reported is sent before each request that ends their claims.

    Attributes:
        crowded: names of queues where so many settles are refused that no more tasks are taken there.
    """

    def __init__(self, link: Link, reports: RunReports | None = None) -> None:
        self.crowded: set[str] = set()
        self._link = link
        self._reports = reports
        self._sent: dict[str, set[Settle]] = {}
        self._refused: dict[str, set[Settle]] = {}
        self._throttle = ErrorThrottle(logger)
        self._earlier = RepeatedEvent()
        self._some_answered: trio.Event | None = None

    def send(
        self, keys: QueueKeys, registration: Registration, claims: Sequence[int], make: Make, answered: Answered
    ) -> None:
        """Send a settle, and repeat it until the server accepts it. Never waits.

        Args:
            make: makes the call for the given claims: all of `claims`, or one of them after a refusal.
            answered: called with (value, None) for each reply, with (None, error) at the first refusal, and with
                (None, ClaimLost) if the registration was declared dead.
        """
        self._send(Settle(keys, registration, claims, make, answered))

    def give_back(self, keys: QueueKeys, registration: Registration, claims: Iterable[int]) -> None:
        """Give claims back to the front of their queue, uncounted.

        A claim that already went back with its queue is not found, which is not an error.
        """
        newest_first = sorted(claims, reverse=True)  # which restores the old order
        make = partial(ops.stop_tasks, keys, registration.worker)
        for start in range(0, len(newest_first), MAX_ITEMS):
            self.send(keys, registration, newest_first[start : start + MAX_ITEMS], make, lambda _ended, _failure: None)

    def claims_of(self, name: str) -> set[int]:
        """Return the claims of this queue whose settle the server has not accepted yet."""
        settles = (*self._sent.get(name, ()), *self._refused.get(name, ()))
        return {claim for settle in settles for claim in settle.claims}

    async def wait_answered(self, name: str) -> None:
        """Try refused settles of this queue once more, then wait until the server has replied to all of its settles."""
        self._resend(list(self._refused.get(name, ())))
        while name in self._sent:
            if self._some_answered is None or self._some_answered.is_set():
                self._some_answered = trio.Event()
            await self._some_answered.wait()

    def drop(self, name: str) -> None:
        """Drop the refused settles of a queue that was left, because every claim was given back."""
        self._refused.pop(name, None)
        self.crowded.discard(name)

    def forget(self, registration: WorkerHandle) -> None:
        """Drop the refused settles of a registration that was declared dead, because its claims belong to other workers."""
        for name, settles in list(self._refused.items()):
            self._remove_refused(name, [settle for settle in settles if settle.registration is registration])

    async def retry_forever(self) -> None:
        """Send refused settles again when their pause is over."""
        while True:
            with trio.move_on_at(min((s.at for refused in self._refused.values() for s in refused), default=math.inf)):
                await self._earlier.wait()
            now = trio.current_time()
            self._resend([s for refused in self._refused.values() for s in refused if s.at <= now])

    def _resend(self, settles: list[Settle]) -> None:
        """Send settles again, newest claim first.

        Tasks that go back to the front of their queue then keep their old order.
        """
        for settle in sorted(settles, key=lambda settle: settle.claims[0], reverse=True):
            self._remove_refused(settle.keys.name, [settle])
            self._send(settle)

    def _send(self, settle: Settle) -> None:
        self._sent.setdefault(settle.keys.name, set()).add(settle)
        if self._reports is not None and self._reports.unsent:
            self._reports.send_before_end(settle.keys, settle.registration, settle.claims)
        self._link.post(settle.make(settle.claims), partial(self._replied, settle), owner=settle.registration)

    def _replied(self, settle: Settle, value: Any, failure: Exception | None) -> None:
        name = settle.keys.name
        sent = self._sent[name]
        sent.discard(settle)
        lost = settle.registration.dead or (failure is not None and isinstance(failure, ClaimLost))
        if failure is not None and not lost:
            self._refuse(settle, failure)
        elif settle.pause and failure is None:
            self._accepted(settle)
        if not sent:
            del self._sent[name]
            if self._some_answered is not None:
                self._some_answered.set()
        if failure is None or lost or settle.pause == FIRST_PAUSE:
            settle.answered(value, failure)

    def _accepted(self, settle: Settle) -> None:
        """Log that the server accepts settles again, when it has accepted all settles of the queue."""
        name = settle.keys.name
        if name not in self._refused and not any(other.pause for other in self._sent[name]):
            self._throttle.resolve(name)
            text = "queue %(queue)r: the server has recorded how all tasks ended"
            emit(logger, "settle.accepted", text, queue=settle.keys.display_name)

    def _refuse(self, settle: Settle, failure: Exception) -> None:
        """Keep each claim of a refused settle, to be tried again alone."""
        name = settle.keys.name
        settle.pause = min(settle.pause * 2 or FIRST_PAUSE, LONGEST_PAUSE)
        settle.at = trio.current_time() + settle.pause
        refused = self._refused.setdefault(name, set())
        if len(settle.claims) == 1:
            refused.add(settle)
        else:
            for claim in settle.claims:
                one = Settle(settle.keys, settle.registration, [claim], settle.make, settle.answered)
                one.pause, one.at = settle.pause, settle.at
                refused.add(one)
        if len(refused) >= CROWDED:
            self.crowded.add(name)
        text = "queue %(queue)r: the server refuses to record how tasks ended, trying again: %(error)s"
        self._throttle.error(name, "settle.refused", text, queue=settle.keys.display_name, error=str(failure))
        self._earlier.set()

    def _remove_refused(self, name: str, settles: list[Settle]) -> None:
        refused = self._refused.get(name)
        if refused is None:
            return
        refused.difference_update(settles)
        if len(refused) < CROWDED:
            self.crowded.discard(name)
        if not refused:
            del self._refused[name]


# `RunCounter`: counts the runs of a peer by queue, and adds the counts to the queue's totals on the server once a second.
#
# It sends nothing while no run ends. With the counts go the runs that ended last, of queues that keep some
# (``serve(recent=...)``). A request carries a number, so a resend adds nothing twice. If the server refuses the counts, they
# stay here and are sent with later ones. A worker that leaves a queue sends its last counts first. A worker that dies loses
# those of its last second.


SEND_EVERY: Final = 1.0
"""Seconds between two requests about one queue."""
QUEUES_AT_ONCE: Final = 100
"""Queues whose counts are sent in one second. The others follow in the next."""


class RunCounter:
    """The counts of one peer that are not on the server yet. Changed only in the loop.

    Attributes:
        totals: how many runs ended since the peer began, by queue and outcome.
        lost: how many counted runs never reached the totals of their queue, because the worker had left it.
    """

    def __init__(self, link: Link) -> None:
        self.totals: Counter[tuple[str, str]] = Counter()
        self.lost: int = 0
        self._link = link
        self._counts: dict[QueueConsumer, RunCounts] = {}
        self._sending: set[QueueConsumer] = set()
        self._counted = RepeatedEvent()

    # Counting

    def returned(self, consumer: QueueConsumer, runs: Sequence[Run[QueueConsumer]]) -> None:
        """Count runs of this consumer whose handlers have returned in this turn of the loop."""
        counts, now, jobs = self._counts.get(consumer) or self._counts_of(consumer), monotonic(), False
        returned: list[Run[QueueConsumer]] = []
        for run in runs:
            if run.cancel_reason == "cancel":
                self.ended(run, "cancelled")
            else:
                returned.append(run)
            jobs = jobs or run.record is not None
        if returned:
            self.totals[consumer.queue, "ok"] += counts.add_returned([run.began for run in returned], now)
            if consumer.recent:
                counts.keep([_stored(run, "ok", now) for run in returned])
        if jobs:
            waits = [waited_ms(run.record, run.fence) for run in runs if run.record is not None]
            counts.add_waits([ms for ms in waits if ms is not None])

    def ended(self, run: Run[QueueConsumer], outcome: Outcome, error: str = "") -> None:
        """Count a run that ended in another way.

        Args:
            run: of a consumer of this peer.
            outcome: one of `worqr.history_records.OUTCOMES`.
            error: the type of its error; empty if it had none.
        """
        consumer = run.host
        counts = self._counts.get(consumer) or self._counts_of(consumer)
        counts.add(outcome)
        self.totals[consumer.queue, outcome] += 1
        if consumer.recent:
            counts.keep([_stored(run, outcome, monotonic(), error)])

    def _counts_of(self, consumer: QueueConsumer) -> RunCounts:
        """Return the counts of a consumer that has no unsent ones, and wake the task that sends them."""
        self._counted.set()
        return self._counts.setdefault(consumer, RunCounts(consumer.recent))

    # Sending

    async def send_forever(self) -> None:
        """Send the counts of queues where runs ended, once a second."""
        while True:
            if not any(self._counts.values()):
                await self._counted.wait()
            await trio.sleep(SEND_EVERY)
            self.send_some()

    def send_some(self) -> None:
        """Send the counts of some queues, those that wait longest first."""
        ready = [consumer for consumer, counts in self._counts.items() if counts and consumer not in self._sending]
        with self._link.together:
            for consumer in ready[:QUEUES_AT_ONCE]:
                self._counts[consumer] = self._counts.pop(consumer)  # to the end of the line
                self._send(consumer)

    def _send(self, consumer: QueueConsumer) -> None:
        registration = consumer.registration
        if registration is None or registration.dead:
            return
        taken, runs = self._counts[consumer].take()
        number = registration.next_number()
        call = ops.note_runs(consumer.keys, registration.worker, number, taken, runs, consumer.recent)

        def answered(word: str | None, failure: Exception | None) -> None:
            self._sending.discard(consumer)
            if word != "ok":
                self._failed(consumer, taken, runs, failure)

        self._sending.add(consumer)
        self._link.post(call, answered, owner=registration)

    def _failed(
        self, consumer: QueueConsumer, taken: Mapping[str, int], runs: Sequence[bytes], failure: Exception | None
    ) -> None:
        """Keep what was not stored for the next request, if there will be one."""
        if consumer.lifecycle.left.is_set():
            self.lost += _runs_of(taken)
            return
        if failure is not None and not isinstance(failure, ClaimLost):
            text = "queue %(queue)r: the counts of runs were not stored: %(error)s"
            emit(logger, "note_runs", text, queue=consumer.queue, error=str(failure))
        self._counts_of(consumer).put_back(taken, runs)

    def leaves(self, consumer: QueueConsumer) -> None:
        """Send the last counts of a consumer that is about to leave its queue."""
        if self._counts.get(consumer):
            self._send(consumer)

    def left(self, consumer: QueueConsumer) -> None:
        """Drop the counts of a consumer that has left its queue."""
        counts = self._counts.pop(consumer, None)
        if counts is not None:
            taken, _ = counts.take()
            self.lost += _runs_of(taken)


def _stored(run: Run[QueueConsumer], outcome: Outcome, now: float, error: str = "") -> bytes:
    """Return a run that ended at `now` in the form in which it is stored."""
    ms = max(0, round((now - run.began) * 1000))
    job = None if run.record is None else run.id
    return encode_run(StoredRun(run.fence, job, outcome, ms, run.registration.worker, error))


def _runs_of(taken: Mapping[str, int]) -> int:
    return sum(taken.get(outcome, 0) for outcome in OUTCOMES)
