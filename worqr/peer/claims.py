"""Claims by hand: the application takes tasks itself, one by one or in batches, and settles each.

Only as many tasks are claimed as the application waits for. A claim can be settled once; claims that are not settled when the
block ends return to the front of the queue, uncounted.
"""

# The private fields of Context are hidden from users, not from its neighbours.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any

import trio

from worqr import ops
from worqr.errors import ClaimLost, ClaimSettled, Unavailable, UsageError
from worqr.log_events import emit
from worqr.ops import MAX_ITEMS, Result
from worqr.peer.consumer import Station
from worqr.peer.context import Context
from worqr.peer.desk import Desk, station_of
from worqr.peer.settles import Make
from worqr.peer.settling import encode_result, finisher, settle_call
from worqr.peer.task_log import log_failure
from worqr.policy import Failure, Policy, Retry, Verdict, judge
from worqr.records import CancelReason
from worqr.remote_error import told_error
from worqr.script_call import Call
from worqr.validation import Seconds

if TYPE_CHECKING:
    from worqr.keys import QueueKeys
    from worqr.peer.scheduler import Capacity
    from worqr.peer.session import Membership, Registration

logger: logging.Logger = logging.getLogger(__name__)


class Claim(Context):
    """A task that you took by hand. Settle it with exactly one of `finish`, `stop`, `retry` and `fail`, or use it as a block.

    ``async with claim:`` finishes the task at the end of the block. An exception counts as a failure, is logged, and does not
    leave the block. If the task is cancelled, the block is cancelled too. If the block is cancelled from outside, the task
    returns to its queue without counting a failure.
    """

    __slots__ = ("_cancelled",)

    def __init__(self, station: Station, registration: Registration, fence: int, entry: Any) -> None:
        super().__init__(station, registration, fence, entry)
        self._cancelled = trio.Event()

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
        if self._settled:
            raise self._settled_error()
        hand = station_of(self)
        if result is not None and not isinstance(result, bytes):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"a result must be bytes or None, not {type(result).__name__}")
        lost = await hand.finish([self], {self.fence: encode_result(result, hand.max_result)})
        if lost:
            raise ClaimLost(f"{self!r} was lost before it was finished: it runs or ran elsewhere")

    async def stop(self) -> None:
        """Return the task to the front of its queue, without counting the attempt.

        Raises:
            ClaimLost: The worker was declared dead, or left the queue.
            ClaimSettled: The claim was settled before.
            Unavailable: The server did not reply within `patience`. The request may have taken effect.
        """
        station, worker = self._station, self._registration.worker
        ended = await self._settle(ops.stop_tasks(station.keys, worker, [self.fence]))
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
        verdict = judge(
            Retry("given back by hand", delay=delay, run_at=run_at, counted=counted), self._policy, self.failures
        )
        self._check(await self._settle(settle_call(self, verdict)), "retried")
        log_failure(self, verdict)

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
        error = told_error("Failure", why)
        call = ops.fail_task(self._station.keys, self._registration.worker, self.fence, error)
        self._check(await self._settle(call), "failed")
        log_failure(self, Verdict("fail", Failure(why)))

    async def wait_cancelled(self) -> None:
        """Wait until this task is cancelled; `cancel_reason` has the reason. Then settle it as you like."""
        await self._cancelled.wait()

    async def __aenter__(self) -> Claim:
        if self._settled:
            raise self._settled_error()
        self._scope = trio.CancelScope()
        self._scope.__enter__()
        if self.cancel_reason is not None:
            self._scope.cancel()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> bool:
        scope = self._scope
        assert scope is not None
        self._scope = None
        ended_by_cancel = bool(scope.__exit__(kind, error, tb))
        if self._settled:
            return ended_by_cancel
        try:
            if error is None or ended_by_cancel:
                await self._end(None)
            elif isinstance(error, Exception):
                await self._end(error)
            else:
                station_of(self).give_back([self])
                return False
        except ClaimLost:
            text = "queue %(queue)r, job %(job)s: the task was reassigned to another worker; how it ended here does not count"
            emit(logger, "claim.lost", text, queue=self.queue, job=self.id)
        return error is not None

    async def _end(self, error: Exception | None) -> None:
        """Settle as the run of a handler would be settled."""
        if self.cancel_reason == "lost":
            station_of(self).release(self)
        elif error is not None and self.cancel_reason is None:
            verdict = judge(error, self._policy, self.failures)
            log_failure(self, verdict)
            self._check(await self._settle(settle_call(self, verdict)), "retried")
        elif self.cancel_reason == "leaving":
            station_of(self).give_back([self])
        else:
            await self.finish()

    async def _settle(self, call: Call[Any]) -> Any:
        """Send the request that settles this claim. Whatever the outcome, the claim counts as settled from now on."""
        hand = station_of(self)
        hand.release(self)
        if self._registration.dead:
            raise ClaimLost(f"{self!r} was lost: its worker was declared dead and the task runs or ran elsewhere")
        return await hand.send([self.fence], lambda _: call, self._registration)

    def _settled_error(self) -> ClaimLost | ClaimSettled:
        """The error for a second settle of this claim."""
        if self.cancel_reason == "lost":
            return ClaimLost(
                f"{self!r} is no longer ours: it was lost or went back to its queue, and runs or ran elsewhere"
            )
        return ClaimSettled(f"{self!r} is settled already: a claim is settled exactly once")

    def _check(self, word: str, verb: str) -> None:
        if word == "lost":  # `mine` is the reply to a settle that was sent again
            raise ClaimLost(f"{self!r} was lost before it was {verb}: it runs or ran elsewhere")

    def _cancel(self, reason: CancelReason) -> None:
        super()._cancel(reason)
        self._cancelled.set()
        hand = station_of(self)
        if self in hand.desk.ready:  # not taken yet: a stop settles a cancelled claim too
            hand.desk.ready.remove(self)
            hand.give_back([self])


class HandStation(Station):
    """A queue whose claims go to `Claims`."""

    def __init__(
        self,
        keys: QueueKeys,
        membership: Membership,
        capacity: Capacity,
        policy: Policy,
        desk: Desk,
        *,
        max_result: int,
        priority: float = 100,
    ) -> None:
        super().__init__(keys, membership, capacity, policy, priority=priority)
        self.max_result: int = max_result
        self.desk: Desk = desk
        self._some_ended = trio.Event()
        desk.stations.append(self)

    @property
    def reserved(self) -> int:
        """How many claims it is requesting."""
        return self._reserved

    def demand(self) -> int:
        return self.desk.wanted + self._reserved

    def new_context(self, registration: Registration, fence: int, entry: object) -> Context:
        return Claim(self, registration, fence, entry)

    def take_in(self, contexts: Sequence[Context]) -> None:
        claims = [context for context in contexts if isinstance(context, Claim)]
        if self.quiet and not self.desk.is_asked:
            self.give_back(claims)
        else:
            self.desk.put(claims)

    def end_waiting(self) -> None:
        """Give back claims that were not taken, and wake all calls that wait: no more will come."""
        self.desk.clear(self)

    async def wait_blocks(self) -> None:
        """Wait until no claim's own block runs any more."""
        while any(claim._scope is not None for claim in self.running.values()):
            self._some_ended = trio.Event()
            await self._some_ended.wait()

    def ended(self, context: Context) -> None:
        super().ended(context)
        self._some_ended.set()

    def release(self, claim: Claim) -> None:
        """Note that the claim is being settled: it may not be settled again, and its units are free.

        Raises:
            ClaimLost: it went back when its queue was left.
            ClaimSettled: it was settled before.
        """
        if claim._settled:
            raise claim._settled_error()
        claim._settled = True
        self.ended(claim)
        self._capacity.offer_soon()

    def give_back(self, claims: Iterable[Claim]) -> None:
        """Stop claims of one registration without waiting for the reply. While the queue is being left, that gives them back."""
        stopped = list(claims)
        for claim in stopped:
            self.release(claim)
        alive = [claim.fence for claim in stopped if not claim._registration.dead]
        if alive and not self.unwinding:
            registration = stopped[0]._registration
            self._membership.settles.give_back(self.keys, registration, alive)

    async def send(self, claims: Sequence[int], make: Make, registration: Registration) -> Any:
        """Send a settle and wait for the reply; repeat it until the server accepts it or the worker id is dead."""
        done = trio.Event()
        answers: list[tuple[Any, Exception | None]] = []

        def deliver(value: Any, failure: Exception | None) -> None:
            answers.append((value, failure))
            done.set()

        self._membership.settles.send(self.keys, registration, claims, make, deliver)
        patience = self._membership.link.settings.patience
        with trio.move_on_after(patience):
            await done.wait()
        if not answers:
            raise Unavailable(f"no answer within {patience:g} s; it will be sent until there is one", sent=None)
        value, failure = answers[0]
        if failure is not None:
            raise failure
        return value

    async def finish(self, claims: Sequence[Claim], results: Mapping[int, Result] | None = None) -> list[Claim]:
        """Finish claims; return those that were lost."""
        lost = [claim for claim in claims if claim._settled]
        alive: dict[Registration, list[Claim]] = {}
        for claim in claims:
            if claim._settled:
                continue
            self.release(claim)
            if claim._registration.dead:
                lost.append(claim)
            else:
                alive.setdefault(claim._registration, []).append(claim)
        for registration, held in alive.items():
            for start in range(0, len(held), MAX_ITEMS):
                lost += await self._finish_some(registration, held[start : start + MAX_ITEMS], results)
        return lost

    async def _finish_some(
        self, registration: Registration, claims: Sequence[Claim], results: Mapping[int, Result] | None
    ) -> list[Claim]:
        make = finisher(self, registration, results or {})
        try:
            ended = await self.send([claim.fence for claim in claims], make, registration)
        except ClaimLost:
            return list(claims)
        return [claim for claim in claims if ended.get(claim.fence) == "lost"]
