"""Claims by hand: a loop of the application's own takes tasks, one by one or in batches, and says how each ended.

`Claims` asks the server only for what somebody waits for, so nothing is claimed that nobody works on. A claim can be
settled once; what is unsettled when the block ends goes back to the front, uncounted.
"""

# The private fields of Context are hidden from users, not from its neighbours.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any

import trio

from worqr import ops
from worqr.call import Call
from worqr.errors import ClaimLost, ClaimSettled, Unavailable, UsageError
from worqr.log_events import emit
from worqr.ops import MAX_ITEMS, Result
from worqr.peer.claiming import Station
from worqr.peer.context import Context
from worqr.peer.desk import Desk, station_of
from worqr.peer.settles import Make
from worqr.peer.settling import encode_result, finisher, settle_call
from worqr.peer.task_log import log_failure
from worqr.policy import Failure, Policy, Retry, Verdict, judge
from worqr.records import CancelReason
from worqr.remote import told_error
from worqr.task import Seconds, check_count, seconds

if TYPE_CHECKING:
    from worqr.keys import QueueKeys
    from worqr.peer.capacity import Capacity
    from worqr.peer.membership import Membership, Registration

logger: logging.Logger = logging.getLogger(__name__)


class Claim(Context):
    """One task in your hands. Settle it with exactly one of `finish`, `stop`, `retry`, `fail`, or use it as a block.

    As a block (``async with claim:``) it finishes at the end; an exception counts as a failure, is logged, and ends with the
    block; a cancel from anywhere ends the block too. An outer cancellation gives the task back, uncounted.
    """

    __slots__ = ("_cancelled",)

    def __init__(self, station: Station, registration: Registration, fence: int, entry: Any) -> None:
        super().__init__(station, registration, fence, entry)
        self._cancelled = trio.Event()

    async def finish(self, result: bytes | None = None) -> None:
        """The task is done and never comes back.

        Args:
            result: kept for whoever waits for it, if results of this job are kept.

        Raises:
            UsageError: a result over the mesh's `max_payload`, or not bytes; nothing was sent.
            ClaimLost: the worker was swept, or left the queue, meanwhile; the task runs or ran elsewhere.
            ClaimSettled: it was settled before.
            Unavailable: no answer within the mesh's patience; it may have taken effect.
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
        """Give the task back to the front of its queue; the attempt is not counted. Raises as `finish` does."""
        station, worker = self._station, self._registration.worker
        ended = await self._settle(ops.stop_tasks(station.keys, worker, [self.fence]))
        self._check(ended.get(self.fence, "given"), "stopped")

    async def retry(
        self, *, delay: Seconds | None = None, run_at: datetime | None = None, counted: bool = True
    ) -> None:
        """Put the task to the back of its queue, to be taken again.

        Args:
            delay: seconds; None: the backoff of the policy; 0: now.
            run_at: an aware datetime instead.
            counted: it costs one of its failures, the last of which sets it aside as failed.

        Raises as `finish` does; UsageError for a time that cannot be, then nothing was sent.
        """
        verdict = judge(
            Retry("given back by hand", delay=delay, run_at=run_at, counted=counted), self._policy, self.failures
        )
        self._check(await self._settle(settle_call(self, verdict)), "retried")
        log_failure(self, verdict)

    async def fail(self, why: str) -> None:
        """Set the task aside as failed, for good, with `why` as its error. Raises as `finish` does."""
        if not isinstance(why, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"why must be a str, not {type(why).__name__}")
        error = told_error("Failure", why)
        call = ops.fail_task(self._station.keys, self._registration.worker, self.fence, error)
        self._check(await self._settle(call), "failed")
        log_failure(self, Verdict("fail", Failure(why)))

    async def wait_cancelled(self) -> None:
        """Until somebody cancels this task (`cancel_reason` says why): stop working on it and settle it as you like."""
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
        """Settle as a handler's run would be."""
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
        """Send what ends this claim; whatever comes of it, the claim is out of our hands from now on."""
        hand = station_of(self)
        hand.release(self)
        if self._registration.dead:
            raise ClaimLost(f"{self!r} was lost: its worker was declared dead and the task runs or ran elsewhere")
        return await hand.send([self.fence], lambda _: call, self._registration)

    def _settled_error(self) -> ClaimLost | ClaimSettled:
        """What is wrong with settling it once more."""
        if self.cancel_reason == "lost":
            return ClaimLost(
                f"{self!r} is no longer ours: it was lost or went back to its queue, and runs or ran elsewhere"
            )
        return ClaimSettled(f"{self!r} is settled already: a claim is settled exactly once")

    def _check(self, word: str, verb: str) -> None:
        if word == "lost":  # `mine` answers a settle that was sent again
            raise ClaimLost(f"{self!r} was lost before it was {verb}: it runs or ran elsewhere")

    def _cancel(self, reason: CancelReason) -> None:
        super()._cancel(reason)
        self._cancelled.set()
        hand = station_of(self)
        if self in hand.desk.ready:  # nobody works on it; a stop ends one whose cancellation was asked for
            hand.desk.ready.remove(self)
            hand.give_back([self])


class HandStation(Station):
    """A queue whose claims go to whoever waits for them."""

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
        """How many claims it asks for just now."""
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
        """Give back what nobody has taken, and wake whoever waits for claims: none will come any more."""
        self.desk.clear(self)

    async def wait_blocks(self) -> None:
        """Until no claim's own block runs any more."""
        while any(claim._scope is not None for claim in self.running.values()):
            self._some_ended = trio.Event()
            await self._some_ended.wait()

    def ended(self, context: Context) -> None:
        super().ended(context)
        self._some_ended.set()

    def release(self, claim: Claim) -> None:
        """The claim is being settled: it may not be settled again, and its room is free.

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
        """Stop claims of one registration without waiting for the answer. While the queue is being left, that gives them back."""
        stopped = list(claims)
        for claim in stopped:
            self.release(claim)
        alive = [claim.fence for claim in stopped if not claim._registration.dead]
        if alive and not self.unwinding:
            registration = stopped[0]._registration
            self._membership.settles.give_back(self.keys, registration, alive)

    async def send(self, claims: Sequence[int], make: Make, registration: Registration) -> Any:
        """Send a settle and wait for its answer; it is sent again until the server accepts it or the worker id is dead."""
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
        """Finish claims; answers those that were lost."""
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


class Claims(AsyncIterator[Claim]):
    """The claims of one queue, in the order of the queue, or of each of its shards. Iteration ends when the peer leaves.

    A claim counts against the peer's `concurrency` until it is settled: iteration and `take` pause when it is reached.
    """

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._open = True

    def _check_open(self) -> None:
        if not self._open:
            raise UsageError(f"these claims of queue {self._desk.queue!r} ended with their block: use them inside it")

    async def __anext__(self) -> Claim:
        self._check_open()
        claims = await self._desk.collect(1)
        if not claims:
            raise StopAsyncIteration
        return claims[0]

    async def take(self, n: int, *, within: Seconds = 0) -> list[Claim]:
        """Take up to n claims in one script, oldest first; waits for the first one. Of several shards: from one, if that is
        enough.

        Args:
            n: at least 1; no more than the peer's `concurrency` can be held at once.
            within: seconds to wait, after the first one, for the batch to fill.

        Returns:
            1 to n claims; an empty list once the peer leaves.

        A cancelled call takes nothing: claims that were on their way stay for the next call.
        """
        self._check_open()
        check_count(n, "n of take")
        wait = seconds(within, "within")
        taken = await self._desk.collect(n)
        if taken and wait > 0:
            try:
                with trio.move_on_after(wait):
                    while len(taken) < n and (more := await self._desk.collect(n - len(taken))):
                        taken += more
            except trio.Cancelled:
                self._desk.put_back(taken)
                raise
        return taken

    async def finish(self, claims: Iterable[Claim]) -> list[Claim]:
        """Finish claims in one round trip; answers those that were lost, whose tasks run or ran elsewhere. Of several shards: in
        one round trip each, at the same time.

        Raises:
            UsageError: a claim of another queue, or one that was settled before; then nothing was sent.
            Unavailable: no answer within the mesh's patience; it may have taken effect.
        """
        batch = list(claims)
        for claim in batch:
            if station_of(claim).desk is not self._desk:
                raise UsageError(f"{claim!r} is not a claim of these claims of queue {self._desk.queue!r}")
            if claim._settled and claim.cancel_reason != "lost":
                raise claim._settled_error()
        if len(set(batch)) != len(batch):
            raise UsageError("the same claim stands twice among those to finish")
        if not batch:
            await trio.lowlevel.checkpoint()
            return []
        return await self._desk.finish(batch)

    def _close(self) -> None:
        """The block has ended."""
        self._open = False
