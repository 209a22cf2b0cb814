"""Settling: claims are ended in batches. The run does not wait for it, and its slot is free.

The finishes and stops of one turn of the loop are sent as one request per queue. Every settle carries its registration and is
repeated, over lost connections and refusals, until the server accepts it or the worker id is dead (see `settles`). A settle of
a dead registration is not sent at all, because the task belongs to another worker by then.
"""

# The private fields of Context are hidden from users, not from its neighbours.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import trio

from worqr import ops
from worqr.errors import UsageError
from worqr.link import Link
from worqr.log_events import emit
from worqr.ops import MAX_ITEMS, Result
from worqr.ops.replies import in_pieces
from worqr.peer.context import Context
from worqr.peer.settles import Make, Settles
from worqr.peer.task_log import log_failure, log_finished, log_late, log_timeout
from worqr.policy import Failure, Verdict, judge
from worqr.remote_error import remote_error, told_error, with_stderr
from worqr.script_call import Call
from worqr.validation import encode_json

if TYPE_CHECKING:
    from worqr.peer.consumer import QueueConsumer
    from worqr.peer.registration import Registration
    from worqr.peer.settings import Onlooker

logger: logging.Logger = logging.getLogger(__name__)


class Settler:
    """Ends claims. `flushed` is called after each flush: units may have become free; `onlooker` with each run that raised."""

    def __init__(
        self,
        link: Link,
        settles: Settles,
        flushed: Callable[[], None],
        *,
        max_result: int,
        onlooker: Onlooker | None = None,
    ) -> None:
        self._link = link
        self._settles = settles
        self._flushed = flushed
        self._max_result = max_result
        self._onlooker = onlooker
        self._flusher: trio.lowlevel.Task | None = None
        self._dirty: dict[QueueConsumer, list[int]] = {}
        self._results: dict[QueueConsumer, dict[int, Result]] = {}
        self._stopped: dict[QueueConsumer, list[int]] = {}
        self._flush_soon = False

    def ended(self, context: Context, returned: bool, error: BaseException | None) -> None:
        """A handler's run ended: settle its claim according to the outcome."""
        if context._settled:
            self.touch()
            return
        reason = context.cancel_reason
        if reason == "lost" or context._registration.dead:
            context._settled = True
            self.touch()
        elif returned:
            if reason == "timeout":
                log_late(context)
            self.finish(context)
        elif reason == "timeout":
            self.time_out(context)
        elif reason is not None or error is None:
            self.stop(context)  # a claim that is marked for cancellation ends there, and does not return
        else:
            self.fail_run(context, error)

    def finish(self, context: Context) -> None:
        """End a claim as finished, with the next flush; a claim with a cancel mark ends as cancelled there.

        A result that cannot be stored fails the task for good: another run would end in the same way.
        """
        if keeps_result(context):
            try:
                result = encode_result(context._value, self._max_result)
            except UsageError as error:
                self.fail_run(context, Failure(str(error)))
                return
            self._results.setdefault(context._station, {})[context.fence] = result
        context._settled = True
        self._dirty.setdefault(context._station, []).append(context.fence)
        self.touch()

    def touch(self) -> None:
        """Flush after all tasks that can run in this turn of the loop have run."""
        if not self._flush_soon:
            self._flush_soon = True
            if self._flusher is not None:
                task, self._flusher = self._flusher, None
                trio.lowlevel.reschedule(task)

    async def flush_forever(self) -> None:
        """Flush after each turn that requests it. A parked task costs less than a callback, which takes a system call."""
        while True:
            if not self._flush_soon:
                self._flusher = trio.lowlevel.current_task()
                await trio.lowlevel.wait_task_rescheduled(self._unpark)
            with self._link.together():
                self.flush()

    def _unpark(self, _: object) -> trio.lowlevel.Abort:
        self._flusher = None
        return trio.lowlevel.Abort.SUCCEEDED

    def flush(self) -> None:
        """Send the finishes and stops of this turn, except those of a queue that is just being left."""
        self._flush_soon = False
        if self._dirty:
            dirty, self._dirty = self._dirty, {}
            results, self._results = self._results, {}
            for station, claims in dirty.items():
                if station.begun:
                    log_finished(station, claims)
                self._send_finishes(station, claims, results.get(station))
        if self._stopped:
            for station in [station for station in self._stopped if not station.lifecycle.holds_stops]:
                claims = sorted(self._stopped.pop(station), reverse=True)  # newest first: restores the old order
                self._send(station, claims, ops.stop_tasks)
        self._flushed()

    def _send(self, station: QueueConsumer, claims: list[int], settle: Callable[..., Call[Any]]) -> None:
        registration = station.registration
        if registration is None or registration.dead:
            return
        make, answered = partial(settle, station.keys, registration.worker), partial(_answered, station)
        for start in range(0, len(claims), MAX_ITEMS):
            self._settles.send(station.keys, registration, claims[start : start + MAX_ITEMS], make, answered)

    def _send_finishes(self, station: QueueConsumer, claims: list[int], results: dict[int, Result] | None) -> None:
        registration = station.registration
        if not results:
            self._send(station, claims, ops.finish_tasks)
        elif registration is not None and not registration.dead:
            make, answered = finisher(station, registration, results), partial(_answered, station)
            for some in in_pieces(claims, lambda claim: len(results[claim][1]) if claim in results else 0):
                self._settles.send(station.keys, registration, some, make, answered)

    def forget(self) -> None:
        """A registration was declared dead: its unsent settles are dropped."""
        self._dirty.clear()
        self._results.clear()
        self._stopped.clear()

    def left(self, station: QueueConsumer) -> None:
        """The queue was left: its stopped claims went back with all other claims of the worker."""
        self._stopped.pop(station, None)

    def stop(self, context: Context) -> None:
        """Give a claim back to the front, uncounted, with the next flush."""
        context._settled = True
        self._stopped.setdefault(context._station, []).append(context.fence)
        self.touch()

    def give_back(self, station: QueueConsumer, claims: Iterable[int]) -> None:
        """Give claims back to the front, uncounted, with the next flush, and after the finishes that wait for it."""
        self._stopped.setdefault(station, []).extend(claims)
        self.touch()

    def fail_run(self, context: Context, error: BaseException) -> None:
        """A run raised: retry the task, or move it to the dead-letter queue, as the policy says."""
        verdict = judge(error, context._policy, context.failures, context.stalls)
        context._settled = True
        self._send_one(context, settle_call(context, verdict))
        self.touch()
        log_failure(context, verdict)
        if self._onlooker is not None:
            self._onlooker(context, error)

    def time_out(self, context: Context) -> None:
        """A run took too long: retry the task, up to the limit of timeouts."""
        context._settled = True
        error, delay = f"it ran longer than {context._policy.timeout:g} s", context._policy.delay(context.timeouts)
        self._send_one(context, timeout_call(context, error, delay))
        self.touch()
        log_timeout(context, delay, error)
        if self._onlooker is not None:
            self._onlooker(context, TimeoutError(error))

    def _send_one(self, context: Context, call: Call[str]) -> None:
        def answered(word: str | None, _failure: Exception | None) -> None:
            _answered(context._station, None if word is None else {context.fence: word}, None)

        self._settles.send(context._station.keys, context._registration, [context.fence], lambda _: call, answered)


def _answered(station: QueueConsumer, ended: dict[int, str] | None, _failure: Exception | None) -> None:
    """Log the claims that did not end as requested; `Settles` logs refusals."""
    for claim, word in (ended or {}).items():
        if word == "lost":
            text = (
                "queue %(queue)r, claim %(claim)d: the task was reassigned to another worker, because this one missed its "
                "heartbeat or left the queue; how it ended here does not count"
            )
            emit(logger, "claim.lost", text, queue=station.queue, claim=claim)
        elif word == "cancelled":
            text = "queue %(queue)r, claim %(claim)d: the task was cancelled"
            emit(logger, "task.cancelled", text, queue=station.queue, claim=claim)
        elif word == "dropped":
            text = "queue %(queue)r, claim %(claim)d: the task was not given back, because the queue was deleted"
            emit(logger, "task.dropped", text, queue=station.queue, claim=claim)


def finisher(station: QueueConsumer, registration: Registration, results: Mapping[int, Result]) -> Make:
    """Make the call that finishes some claims, with their results."""

    def make(claims: Sequence[int]) -> Call[dict[int, str]]:
        kept = {claim: results[claim] for claim in claims if claim in results}
        return ops.finish_tasks(station.keys, registration.worker, claims, kept)

    return make


def keeps_result(context: Context) -> bool:
    """True if the handler's return value is to be stored."""
    is_job = context._record is not None or context._said is not None  # reporting progress makes it a job
    return is_job and context._policy.result_ttl > 0


class LastWords(NamedTuple):
    """What a killed run had written to its standard error, in place of a value."""

    stderr: str


class Encoded(NamedTuple):
    """A result that was encoded where the handler ran."""

    kind: str
    value: bytes


def encode_result(value: object, max_result: int) -> Result:
    """Encode a handler's return value for storage: bytes unchanged, None as None, everything else as JSON.

    Raises:
        UsageError: it cannot be encoded, or is over `max_result` bytes.
    """
    if isinstance(value, Encoded):
        return value
    if value is None:
        return "none", b""
    if isinstance(value, bytes | bytearray | memoryview):
        kind, encoded = "bytes", bytes(cast("bytes", value))
    else:
        try:
            kind, encoded = "json", encode_json(value)
        except Exception as error:  # any error from encoding a user's type
            raise UsageError(
                f"its result cannot be kept: {type(value).__qualname__} is neither bytes nor JSON ({error})"
            ) from error
    if len(encoded) > max_result:
        raise UsageError(
            f"its result cannot be kept: {len(encoded):,} bytes are over the limit of {max_result:,} "
            "(Mesh(max_payload=...)); store it elsewhere and return its name"
        )
    return kind, encoded


def settle_call(context: Context, verdict: Verdict) -> Call[str]:
    """The call that ends a claim whose run raised."""
    keys, worker, error = context._station.keys, context._registration.worker, remote_error(verdict.error)
    if verdict.kind != "retry":
        return ops.fail_task(keys, worker, context.fence, error, broken=verdict.kind == "broken")
    return ops.retry_task(
        *(keys, worker, context.fence, error),
        counter="stalls" if verdict.stalled else "failures" if verdict.counted else "",
        limit=context._policy.max_stalls if verdict.stalled else context._policy.max_failures,
        delay_ms=round(verdict.delay * 1000),
        run_at_ms=verdict.run_at_ms,
    )


def timeout_call(context: Context, why: str, delay: float) -> Call[str]:
    """The call that ends a claim whose run took too long, and whose task is tried again after `delay` seconds."""
    error = told_error("Timeout", why)
    if isinstance(context._value, LastWords):
        error = with_stderr(error, context._value.stderr)
    return ops.retry_task(
        *(context._station.keys, context._registration.worker, context.fence, error),
        counter="timeouts",
        limit=context._policy.max_timeouts,
        delay_ms=round(delay * 1000),
    )
