"""`Settler`: ends claims in batches. The run does not wait for it, and its slot is free.

The finishes and stops of one turn of the loop are sent as one request per queue. Every settle carries its registration. It is
repeated, over lost connections and refusals, until the server accepts it or the worker id is dead (see `settles`). A settle of a
dead registration is not sent, because the task belongs to another worker by then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import trio

from worqr import ops
from worqr.errors import UsageError
from worqr.link import Link
from worqr.log_events import emit, emit_fields
from worqr.ops import MAX_ITEMS, Result
from worqr.ops.replies import in_chunks
from worqr.peer.context import Context
from worqr.peer.run import SETTLED, Run, encode_result
from worqr.peer.run_counter import RunCounter
from worqr.peer.settles import Make, Settles
from worqr.peer.task_log import log_failure, log_finished, log_late, log_timeout
from worqr.peer.wrong_loop import with_wrong_loop_remedy
from worqr.policy import Failure, RetryDecision, decide_retry
from worqr.records import RemoteError
from worqr.remote_error import error_from_text, with_stderr
from worqr.script_call import Call
from worqr.tracebacks import format_error, is_a, one_line
from worqr.validation import qualname_of

if TYPE_CHECKING:
    from worqr.peer.consumer import HandlerConsumer, QueueConsumer
    from worqr.peer.session import Registration
    from worqr.peer.settings import RunObserver

logger: logging.Logger = logging.getLogger(__name__)

TIMEOUT: Final = "Timeout"
"""The type of the error of a run that took too long."""


class Settler:
    """Ends claims.

    `flushed` is called after each flush, because units may have become free. `observer` is called with each run that raised.
    """

    def __init__(
        self,
        link: Link,
        settles: Settles,
        counter: RunCounter,
        flushed: Callable[[], None],
        *,
        max_result: int,
        observer: RunObserver | None = None,
    ) -> None:
        self._link = link
        self._settles = settles
        self._counter = counter
        self._flushed = flushed
        self._max_result = max_result
        self._observer = observer
        self._flusher: trio.lowlevel.Task | None = None
        self._dirty: dict[HandlerConsumer, list[Run[HandlerConsumer]]] = {}
        self._results: dict[QueueConsumer, dict[int, Result]] = {}
        self._stopped: dict[QueueConsumer, list[int]] = {}
        self._cancelled: dict[tuple[QueueConsumer, int], str] = {}
        """The ids of the jobs of cancelled runs, by claim, until the server has recorded how they ended."""
        self._flush_requested = False

    def ended(self, run: Run[HandlerConsumer], returned: bool, value: object, error: BaseException | None) -> None:
        """Settle the claim of a run that has ended in its slot, according to the outcome, and free its units.

        Whatever is raised meanwhile, by a bug or by an object of the user, the claim is settled, and the units are free.
        """
        try:
            self._settle(run, returned, value, error)
        except BaseException as raised:
            self._fail_anyway(run, raised)
            if is_a(raised, KeyboardInterrupt):
                raise  # Python raised Ctrl-C here by chance: the slot reports it
        finally:
            run.host.ended(run)
            if not self._flush_requested:
                self.request_flush()

    def _settle(self, run: Run[HandlerConsumer], returned: bool, value: object, error: BaseException | None) -> None:
        reason = run.cancel_reason
        if run.state is SETTLED:
            pass  # its queue was left, and the claim went back
        elif reason == "lost" or run.registration.dead:
            run.settle()
            self._counter.ended(run, "lost")
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
        if run.keeps_result():
            try:
                result = encode_result(value, self._max_result)
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

    async def flush_forever(self) -> None:
        """Flush after each turn that requests it. A parked task costs less than a callback, which needs a system call."""
        while True:
            if not self._flush_requested:
                self._flusher = trio.lowlevel.current_task()
                await trio.lowlevel.wait_task_rescheduled(self._unpark)
            with self._link.together():
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
                self._counter.returned(consumer, runs)
                if consumer.begun:
                    log_finished(consumer, claims)
                self._send_finishes(consumer, claims, results.get(consumer))
        if self._stopped:
            for each in [each for each in self._stopped if not each.lifecycle.holds_stops]:
                claims = sorted(self._stopped.pop(each), reverse=True)  # newest first: restores the old order
                self._send(each, claims, ops.stop_tasks)
        self._flushed()

    def _send(self, consumer: QueueConsumer, claims: list[int], settle: Callable[..., Call[Any]]) -> None:
        registration = consumer.registration
        if registration is None or registration.dead:
            return
        make, answered = (
            partial(settle, consumer.keys, registration.worker),
            partial(_answered, self._cancelled, consumer),
        )
        for start in range(0, len(claims), MAX_ITEMS):
            self._settles.send(consumer.keys, registration, claims[start : start + MAX_ITEMS], make, answered)

    def _send_finishes(self, consumer: QueueConsumer, claims: list[int], results: dict[int, Result] | None) -> None:
        registration = consumer.registration
        if not results:
            self._send(consumer, claims, ops.finish_tasks)
        elif registration is not None and not registration.dead:
            make, answered = finisher(consumer, registration, results), partial(_answered, self._cancelled, consumer)
            for some in in_chunks(claims, lambda claim: len(results[claim][1]) if claim in results else 0):
                self._settles.send(consumer.keys, registration, some, make, answered)

    def forget(self) -> None:
        """Drop the unsent settles of a registration that was declared dead."""
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
            self._counter.ended(run, "cancelled")
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
        decision = decide_retry(error, run.policy, run.failures, run.stalls)
        described = run.describe(decision.error).error
        call = settle_call(run, decision, described)
        run.settle()
        self._send_one(run, call)
        self._counter.ended(run, "raised", described.type)
        log_failure(run, decision)
        run.forget_errors()
        if self._observer is not None:
            self._observer(Context(run), error)

    def time_out(self, run: Run[QueueConsumer]) -> None:
        """End a claim whose run took too long: retry the task, up to the limit of timeouts."""
        run.settle()
        self._counter.ended(run, "timeout", TIMEOUT)
        error, delay = f"it ran longer than {run.policy.timeout:g} s", run.policy.delay(run.timeouts)
        self._send_one(run, timeout_call(run, error, delay))
        log_timeout(run, delay, error)
        if self._observer is not None:
            self._observer(Context(run), TimeoutError(error))

    def _send_one(self, run: Run[QueueConsumer], call: Call[str]) -> None:
        def answered(word: str | None, _failure: Exception | None) -> None:
            _answered(self._cancelled, run.host, None if word is None else {run.fence: word}, None)

        self._settles.send(run.host.keys, run.registration, [run.fence], lambda _: call, answered)


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

    def make(claims: Sequence[int]) -> Call[dict[int, str]]:
        kept = {claim: results[claim] for claim in claims if claim in results}
        return ops.finish_tasks(consumer.keys, registration.worker, claims, kept)

    return make


def settle_call(run: Run[QueueConsumer], decision: RetryDecision, error: RemoteError) -> Call[str]:
    """Return the call that ends a claim whose run raised. `error`: that of the decision, as text."""
    keys, worker = run.host.keys, run.registration.worker
    if decision.kind != "retry":
        return ops.fail_task(keys, worker, run.fence, error, broken=decision.kind == "broken")
    return ops.retry_task(
        *(keys, worker, run.fence, error),
        counter="stalls" if decision.stalled else "failures" if decision.counted else "",
        limit=run.policy.max_stalls if decision.stalled else run.policy.max_failures,
        delay_ms=round(decision.delay * 1000),
        run_at_ms=decision.run_at_ms,
        pause_ms=None if decision.pause is None else max(1, round(decision.pause * 1000)),
    )


def unsettled_call(run: Run[QueueConsumer], why: str) -> Call[str]:
    """Return the call that ends a claim as failed, because settling its run raised an error. It reads nothing of its job."""
    error, policy = error_from_text("Unsettled", f"worqr could not settle the run as it ended: {why}"), run.policy
    return ops.retry_task(
        *(run.host.keys, run.registration.worker, run.fence, error),
        counter="failures",
        limit=policy.max_failures,
        delay_ms=round(policy.delay(0) * 1000),
    )


def timeout_call(run: Run[QueueConsumer], why: str, delay: float) -> Call[str]:
    """Return the call that ends a claim whose run took too long. Its task is tried again after `delay` seconds."""
    error = error_from_text(TIMEOUT, why)
    if run.offloaded is not None and run.offloaded.killed_output:
        error = with_stderr(error, run.offloaded.killed_output)
    return ops.retry_task(
        *(run.host.keys, run.registration.worker, run.fence, error),
        counter="timeouts",
        limit=run.policy.max_timeouts,
        delay_ms=round(delay * 1000),
    )
