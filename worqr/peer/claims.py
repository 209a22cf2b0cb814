"""`Claim`: a task that an application claimed itself, and settles itself.

A claim is settled once. Not here: where claims come from, and what happens to claims that are not settled (`manual_consumer`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, cast

import trio

from worqr import ops
from worqr.ended_runs import Outcome
from worqr.errors import ClaimLost, ClaimSettled, UsageError
from worqr.log_events import emit
from worqr.ops import Result
from worqr.peer.context import Context
from worqr.peer.results import encode_result
from worqr.peer.run import Run
from worqr.peer.settler import settle_call
from worqr.peer.settles import Make
from worqr.peer.task_log import log_failure
from worqr.policy import Failure, Retry, RetryDecision, decide_retry
from worqr.records import CancelReason
from worqr.remote_error import error_from_text
from worqr.script_call import Call
from worqr.tracebacks import is_a
from worqr.validation import Seconds

if TYPE_CHECKING:
    from worqr.peer.consumer import QueueConsumer
    from worqr.peer.registration import Registration

logger: logging.Logger = logging.getLogger(__name__)


class ClaimOwner(Protocol):
    """What a claim uses of the consumer that made it."""

    @property
    def max_result(self) -> int:
        """The most bytes of a result."""
        ...

    def release(self, claim: Claim) -> None:
        """Note that the claim is being settled. Raise ClaimSettled or ClaimLost if it may not be."""
        ...

    def count(self, run: HeldRun, outcome: Outcome) -> None:
        """Count a claim that ended otherwise than finished."""
        ...

    def give_back(self, claims: Iterable[Claim]) -> None:
        """Stop claims without waiting for the reply."""
        ...

    def withdraw(self, run: HeldRun) -> None:
        """Give back a claim that was cancelled, if no call has taken it."""
        ...

    async def send(self, claims: Sequence[int], make: Make, registration: Registration) -> Any:
        """Send a settle and wait for the reply."""
        ...

    async def finish(self, claims: Sequence[Claim], results: Mapping[int, Result] | None = None) -> list[Claim]:
        """Finish claims; return those that were lost."""
        ...


class HeldRun(Run["QueueConsumer"]):
    """The run of a claim by hand: the claim's block is its handler."""

    __slots__ = ("cancelled",)

    def __init__(self, host: QueueConsumer, registration: Registration, fence: int, entry: Any, began: float) -> None:
        super().__init__(host, registration, fence, entry, began)
        self.cancelled: trio.Event = trio.Event()

    @property
    def owner(self) -> ClaimOwner:
        """The consumer that made it."""
        return cast("ClaimOwner", self.host)

    def cancel(self, reason: CancelReason) -> None:
        super().cancel(reason)
        self.cancelled.set()
        self.owner.withdraw(self)


class Claim(Context):
    """A task that you took by hand. Settle it with exactly one of `finish`, `stop`, `retry` and `fail`, or use it as a block.

    ``async with claim:`` finishes the task at the end of the block. An exception counts as a failure, is logged, and does not
    leave the block. If the task is cancelled, the block is cancelled too. If the block is cancelled from outside, the task
    returns to its queue without counting a failure.
    """

    __slots__ = ("_held",)

    def __init__(self, held: HeldRun) -> None:
        super().__init__(held)
        self._held = held

    @property
    def _owner(self) -> ClaimOwner:
        return self._held.owner

    async def finish(self, result: bytes | None = None) -> None:
        """Finish the task: it never runs again.

        Args:
            result: Stored if results of this job are kept.

        Raises:
            UsageError: The result is not bytes, or is larger than the mesh's `max_payload`. Nothing was sent.
            ClaimLost: The worker was declared dead, or left the queue. The task runs, or ran, elsewhere.
            ClaimSettled: The claim was settled before.
            Unavailable: The server did not reply within `patience`. The request may have taken effect.
        """
        if self._held.settled:
            raise self._settled_error()
        if result is not None and not isinstance(result, bytes):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"a result must be bytes or None, not {type(result).__name__}")
        lost = await self._owner.finish([self], {self.fence: encode_result(result, self._owner.max_result)})
        if lost:
            raise ClaimLost(f"{self!r} was lost before it was finished: it runs or ran elsewhere")

    async def stop(self) -> None:
        """Return the task to the front of its queue, without counting the attempt.

        Raises:
            ClaimLost: The worker was declared dead, or left the queue.
            ClaimSettled: The claim was settled before.
            Unavailable: The server did not reply within `patience`. The request may have taken effect.
        """
        consumer, worker = self._held.host, self._held.registration.worker
        ended = await self._settle(ops.stop_tasks(consumer.keys, worker, [self.fence]))
        self._check(ended.get(self.fence, "given"), "stopped")

    async def retry(
        self, *, delay: Seconds | None = None, run_at: datetime | None = None, counted: bool = True
    ) -> None:
        """Return the task to the end of its queue, to be run again.

        Args:
            delay: Seconds, or a timedelta. None: the backoff of the retry policy; 0: now.
            run_at: A timezone-aware datetime, instead of `delay`.
            counted: Count it as a failure. At the last failure, the task moves to the dead-letter queue.

        Raises:
            UsageError: The time is not valid. Nothing was sent.
            ClaimLost: The worker was declared dead, or left the queue.
            ClaimSettled: The claim was settled before.
            Unavailable: The server did not reply within `patience`. The request may have taken effect.
        """
        decision = decide_retry(
            Retry("given back by hand", delay=delay, run_at=run_at, counted=counted), self._held.policy, self.failures
        )
        described = self._held.describe(decision.error).error
        self._check(await self._settle(settle_call(self._held, decision, described), "raised"), "retried")
        log_failure(self._held, decision)

    async def fail(self, why: str) -> None:
        """Move the task to the dead-letter queue.

        Args:
            why: The message of its error.

        Raises:
            UsageError: `why` is not a str.
            ClaimLost: The worker was declared dead, or left the queue.
            ClaimSettled: The claim was settled before.
            Unavailable: The server did not reply within `patience`. The request may have taken effect.
        """
        if not isinstance(why, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"why must be a str, not {type(why).__name__}")
        error = error_from_text("Failure", why)
        call = ops.fail_task(self._held.host.keys, self._held.registration.worker, self.fence, error)
        self._check(await self._settle(call, "raised"), "failed")
        log_failure(self._held, RetryDecision("fail", Failure(why)))

    async def wait_cancelled(self) -> None:
        """Wait until this task is cancelled; `cancel_reason` has the reason. Then settle it as you like."""
        await self._held.cancelled.wait()

    async def __aenter__(self) -> Claim:
        if self._held.settled:
            raise self._settled_error()
        scope = trio.CancelScope()
        scope.__enter__()
        self._held.begin(scope)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> bool:
        ended_by_cancel = bool(self._held.end_block().__exit__(kind, error, tb))
        if self._held.settled:
            return ended_by_cancel
        try:
            if error is None or ended_by_cancel:
                await self._end(None)
            elif is_a(error, Exception):
                await self._end(error)
            else:
                self._owner.give_back([self])
                return False
        except ClaimLost:
            text = "queue %(queue)r, job %(job)s: the task was reassigned to another worker; how it ended here does not count"
            emit(logger, "claim.lost", text, queue=self.queue, job=self.id)
        return error is not None

    async def _end(self, error: Exception | None) -> None:
        """Settle as the run of a handler would be settled."""
        if self.cancel_reason == "lost":
            self._owner.release(self)
            self._owner.count(self._held, "lost")
        elif error is not None and self.cancel_reason is None:
            decision = decide_retry(error, self._held.policy, self.failures)
            call = settle_call(self._held, decision, self._held.describe(decision.error).error)
            log_failure(self._held, decision)
            self._held.forget_errors()
            self._check(await self._settle(call, "raised"), "retried")
        elif self.cancel_reason == "leaving":
            self._owner.give_back([self])
        else:
            await self.finish()

    async def _settle(self, call: Call[Any], outcome: Outcome | None = None) -> Any:
        """Send the request that settles this claim. The claim counts as settled from now on, whatever the reply.

        `outcome`: how the run is counted; None: not at all.
        """
        self._owner.release(self)
        if outcome is not None:
            self._owner.count(self._held, "lost" if self._held.registration.dead else outcome)
        if self._held.registration.dead:
            raise ClaimLost(f"{self!r} was lost: its worker was declared dead and the task runs or ran elsewhere")
        return await self._owner.send([self.fence], lambda _: call, self._held.registration)

    def _settle_now(self) -> None:
        """Note that the claim is being settled. Raise ClaimSettled or ClaimLost if it was settled before."""
        if self._held.settled:
            raise self._settled_error()
        self._held.settle()

    def _settled_error(self) -> ClaimLost | ClaimSettled:
        """Return the error for a second settle of this claim."""
        if self.cancel_reason == "lost":
            return ClaimLost(
                f"{self!r} is no longer ours: it was lost or went back to its queue, and runs or ran elsewhere"
            )
        return ClaimSettled(f"{self!r} is settled already: a claim is settled exactly once")

    def _check(self, word: str, verb: str) -> None:
        if word == "lost":  # `mine` is the reply to a settle that was sent again
            raise ClaimLost(f"{self!r} was lost before it was {verb}: it runs or ran elsewhere")
