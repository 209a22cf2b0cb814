"""`Claims`: the application claims tasks itself, one by one or in batches, and settles each.

Only as many tasks are claimed as the application waits for. The application iterates over `Claims`. A `ManualConsumer` claims for
it, one for each shard of the queue. `ClaimBuffer` holds the claims that no call has taken yet. Claims that are not settled when
the block ends return to the front of the queue, uncounted.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, ClassVar, cast

import trio

from worqr import ops
from worqr.codecs import WrongKey
from worqr.command import Command
from worqr.errors import ClaimLost, ClaimSettled, Unavailable, UsageError
from worqr.keys import QueueKeys
from worqr.log_events import emit
from worqr.ops import MAX_ITEMS, Result
from worqr.peer.consumer import ConsumerServices, QueueConsumer
from worqr.peer.context import Context
from worqr.peer.run import Run, encode_result
from worqr.peer.scheduler import Share
from worqr.peer.session import Registration
from worqr.peer.settler import Make, finisher, settle_call, snooze_call
from worqr.peer.task_log import log_failure, log_snoozed
from worqr.policy import Failure, Policy, Retry, RetryDecision, Snooze, Undecodable
from worqr.records import CancelReason, Outcome
from worqr.remote_error import error_from_text
from worqr.tracebacks import is_a
from worqr.validation import Seconds, check_count, seconds

# `Claim`: a task that an application claimed itself, and settles itself.
#
# A claim is settled once.


logger: logging.Logger = logging.getLogger(__name__)


class HeldRun(Run["QueueConsumer"]):
    """The run of a claim by hand: the claim's block is its handler."""

    __slots__ = ("cancelled",)

    def __init__(self, host: QueueConsumer, registration: Registration, fence: int, entry: Any, began: float) -> None:
        super().__init__(host, registration, fence, entry, began)
        self.cancelled: trio.Event = trio.Event()

    @property
    def owner(self) -> ManualConsumer:
        """The consumer that made it."""
        return cast("ManualConsumer", self.host)

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
    def _owner(self) -> ManualConsumer:
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
        lost = await self._owner.finish(
            [self], {self.fence: encode_result(result, self._owner.max_result, self._owner.values)}
        )
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
        decision = self._held.decide(Retry("given back by hand", delay=delay, run_at=run_at, counted=counted))
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
        error = self._held.host.as_stored(error_from_text("Failure", why))
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
            if error is None:
                await self._end(None, returned=True)
            elif ended_by_cancel:
                await self._end(None)
            elif is_a(error, Exception) or is_a(error, Snooze):
                await self._end(error)
            else:
                self._owner.give_back([self])
                return False
        except ClaimLost:
            text = "queue %(queue)r, job %(job)s: the task was reassigned to another worker; how it ended here does not count"
            emit(logger, "claim.lost", text, queue=self.queue, job=self.id)
        return error is not None

    async def _end(self, error: BaseException | None, *, returned: bool = False) -> None:
        """Settle as the run of a handler would be settled. `returned`: the block came to its end."""
        if self.cancel_reason == "lost":
            self._owner.release(self)
            self._owner.count(self._held, "lost")
        elif error is not None and self.cancel_reason is None:
            decision = self._held.decide(error)
            is_snooze = is_a(decision.error, Snooze)
            if is_snooze:
                call = snooze_call(self._held, decision)
                log_snoozed(self._held, decision)
            else:
                call = settle_call(self._held, decision, self._held.describe(decision.error).error)
                log_failure(self._held, decision)
            self._held.forget_errors()
            self._check(await self._settle(call, None if is_snooze else "raised"), "retried")
        elif self.cancel_reason == "leaving" and not returned:
            self._owner.give_back([self])
        else:
            await self.finish()

    async def _settle(self, call: Command[Any], outcome: Outcome | None = None) -> Any:
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


# The private fields of Claim are hidden from users, not from this module.
# pyright: reportPrivateUsage=false


class Answer:
    """The reply to a settle: its value, or the error."""

    def __init__(self) -> None:
        self._done = trio.Event()
        self._value: Any = None
        self._failure: Exception | None = None

    def deliver(self, value: Any, failure: Exception | None) -> None:
        """Note the reply."""
        self._value, self._failure = value, failure
        self._done.set()

    async def wait(self, patience: float) -> Any:
        """Wait up to `patience` seconds for the reply, and return or raise what it says."""
        with trio.move_on_after(patience):
            await self._done.wait()
        if not self._done.is_set():
            raise Unavailable(f"no answer within {patience:g} s; it will be sent until there is one", sent=None)
        if self._failure is not None:
            raise self._failure
        return self._value


class ManualConsumer(QueueConsumer):
    """Consumes a queue whose claims go to `Claims`."""

    run_class: ClassVar[type[Run[Any]]] = HeldRun

    def __init__(
        self,
        keys: QueueKeys,
        services: ConsumerServices,
        policy: Policy,
        share: Share,
        buffer: ClaimBuffer,
        *,
        max_result: int,
        state: object = None,
    ) -> None:
        super().__init__(keys, services, policy, share, state)
        self.max_result: int = max_result
        self.buffer: ClaimBuffer = buffer
        self._some_ended = trio.Event()
        buffer.add(self)

    def capacity_wanted(self) -> int:
        return self.buffer.wanted + self.request.reserved

    def accept(self, runs: Sequence[Run[Any]]) -> None:
        claims = [Claim(run) for run in runs if isinstance(run, HeldRun)]
        if self.values is not None:
            claims = [claim for claim in claims if self._is_open(claim)]
        if self.lifecycle.is_leaving and not self.buffer.has_waiting_calls:
            self.give_back(claims)
        else:
            self.buffer.put(claims)

    def _is_open(self, claim: Claim) -> bool:
        """Decode the payload of a claim. Return False if that cannot be done, after the claim was settled."""
        run = claim._held
        try:
            self.open_run(run)
        except (WrongKey, Undecodable) as error:
            decision = run.decide(error)
            call = settle_call(run, decision, run.describe(error).error)
            self.release(claim)
            self._settles.send(self.keys, run.registration, [run.fence], lambda _: call, lambda _word, _failure: None)
            log_failure(run, decision)
            return False
        return True

    def give_back_unstarted(self) -> None:
        """Give back claims that were not taken, and wake all waiting calls, because no more claims arrive."""
        self.give_back(self.buffer.remove(self))

    def withdraw(self, run: HeldRun) -> None:
        """Give back a claim that was cancelled, if no call has taken it. A stop settles a cancelled claim too."""
        claim = self.buffer.withdraw(run)
        if claim is not None:
            self.give_back([claim])

    async def wait_blocks(self) -> None:
        """Wait until no block of a claim runs."""
        while any(run.scope is not None for run in self.running.values()):
            self._some_ended = trio.Event()
            await self._some_ended.wait()

    def ended(self, run: Run[Any]) -> None:
        super().ended(run)
        self._some_ended.set()

    def release(self, claim: Claim) -> None:
        """Note that the claim is being settled: its units are free, and it may not be settled again.

        Raises:
            ClaimLost: it went back when its queue was left.
            ClaimSettled: it was settled before.
        """
        claim._settle_now()
        self.ended(claim._held)
        self.scheduler.dispatch_soon()

    def count(self, run: HeldRun, outcome: Outcome) -> None:
        """Count a claim that ended otherwise than finished."""
        self._services.settler.counter.ended(run, outcome)

    def give_back(self, claims: Iterable[Claim]) -> None:
        """Stop claims of one registration without waiting for the reply.

        While the queue is being left, no request is needed: they go back together with the queue.
        """
        stopped = list(claims)
        for claim in stopped:
            self.release(claim)
        alive = [claim.fence for claim in stopped if not claim._held.registration.dead]
        if alive and not self.lifecycle.holds_stops:
            registration = stopped[0]._held.registration
            self._settles.give_back(self.keys, registration, alive)

    async def send(self, claims: Sequence[int], make: Make, registration: Registration) -> Any:
        """Send a settle and wait for the reply. It is repeated until the server accepts it or the worker id is dead."""
        return await self._post(claims, make, registration).wait(self._services.link.settings.patience)

    def _post(self, claims: Sequence[int], make: Make, registration: Registration) -> Answer:
        """Send a settle, as `send` does, and return its reply to come."""
        answer = Answer()
        self._settles.send(self.keys, registration, claims, make, answer.deliver)
        return answer

    async def finish(self, claims: Sequence[Claim], results: Mapping[int, Result] | None = None) -> list[Claim]:
        """Finish claims; return those that were lost."""
        lost = [claim for claim in claims if claim._held.settled]
        alive: dict[Registration, list[Claim]] = {}
        for claim in claims:
            if claim._held.settled:
                continue
            self.release(claim)
            if claim._held.registration.dead:
                lost.append(claim)
                self.count(claim._held, "lost")
            else:
                alive.setdefault(claim._held.registration, []).append(claim)
        sent: list[tuple[list[Claim], Answer]] = []
        for registration, held in alive.items():
            self._services.settler.counter.returned(self, [claim._held for claim in held])
            make = finisher(self, registration, results or {})
            for start in range(0, len(held), MAX_ITEMS):
                some = held[start : start + MAX_ITEMS]
                sent.append((some, self._post([claim.fence for claim in some], make, registration)))
        for some, answer in sent:  # all were sent before: the wait may be cancelled, or raise
            lost += await self._lost_of(some, answer)
        return lost

    async def _lost_of(self, claims: Sequence[Claim], answer: Answer) -> list[Claim]:
        try:
            ended = await answer.wait(self._services.link.settings.patience)
        except ClaimLost:
            return list(claims)
        return [claim for claim in claims if ended.get(claim.fence) == "lost"]


class ClaimBuffer:
    """The claims of one queue that no call has taken yet, and the calls that wait for claims. Changed only in the loop.

    Attributes:
        consumers: those of all shards.
    """

    def __init__(self) -> None:
        self.consumers: list[ManualConsumer] = []
        self._ready: deque[Claim] = deque()
        self._waiting_calls: dict[object, int] = {}
        self._arrived = trio.Event()

    def add(self, consumer: ManualConsumer) -> None:
        """Add the consumer of a shard."""
        self.consumers.append(consumer)

    @property
    def queue(self) -> str:
        """The queue's name."""
        return self.consumers[0].queue

    @property
    def is_leaving(self) -> bool:
        """The queue is being left: no more claims arrive."""
        return all(consumer.lifecycle.is_leaving for consumer in self.consumers)

    @property
    def wanted(self) -> int:
        """The number of claims that calls of `take` wait for, beyond those that are ready and those that are requested."""
        asked = (
            sum(self._waiting_calls.values())
            - len(self._ready)
            - sum(consumer.request.reserved for consumer in self.consumers)
        )
        return max(0, asked)

    @property
    def has_waiting_calls(self) -> bool:
        """A call waits for claims."""
        return bool(self._waiting_calls)

    def put(self, claims: Iterable[Claim]) -> None:
        """Add claims, and wake a call that waits."""
        self._ready.extend(claims)
        self._arrived.set()

    def put_back(self, claims: Sequence[Claim]) -> None:
        """Put back claims that were not taken, so that the next call gets them first."""
        for claim in reversed(claims):
            consumer = consumer_of(claim)
            if not consumer.lifecycle.is_leaving:
                self._ready.appendleft(claim)
            elif not claim._held.settled:
                consumer.give_back([claim])
        self._arrived.set()

    def remove(self, consumer: ManualConsumer) -> list[Claim]:
        """Take out the claims of this shard, and wake all waiting calls, because no more claims of it arrive."""
        removed = [claim for claim in self._ready if consumer_of(claim) is consumer]
        self._ready = deque(claim for claim in self._ready if consumer_of(claim) is not consumer)
        self._arrived.set()
        return removed

    def withdraw(self, run: HeldRun) -> Claim | None:
        """Take out the claim of this run; return None if a call has taken it."""
        claim = next((claim for claim in self._ready if claim._held is run), None)
        if claim is not None:
            self._ready.remove(claim)
        return claim

    async def collect(self, n: int) -> list[Claim]:
        """Wait for claims, and return 1 to n of them; none if the peer leaves."""
        key = object()
        await trio.lowlevel.checkpoint()
        try:
            while not self._ready:
                if self.is_leaving:
                    return []
                self._waiting_calls[key] = n
                self._arrived = trio.Event() if self._arrived.is_set() else self._arrived
                self.consumers[0].scheduler.dispatch()
                await self._arrived.wait()
            return [self._ready.popleft() for _ in range(min(n, len(self._ready)))]
        finally:
            self._waiting_calls.pop(key, None)

    async def finish(self, claims: Sequence[Claim], results: Mapping[int, Result] | None = None) -> list[Claim]:
        """Finish claims of all shards together; return those that were lost, or raise the first error."""
        by_consumer: dict[ManualConsumer, list[Claim]] = {}
        for claim in claims:
            by_consumer.setdefault(consumer_of(claim), []).append(claim)
        lost: list[Claim] = []
        errors: list[Exception] = []

        async def finish(consumer: ManualConsumer, some: Sequence[Claim]) -> None:
            try:
                lost.extend(await consumer.finish(some, results))
            except Exception as error:
                errors.append(error)

        if len(by_consumer) == 1:
            return await consumer_of(claims[0]).finish(claims, results)
        async with trio.open_nursery() as nursery:
            for consumer, some in by_consumer.items():
                nursery.start_soon(finish, consumer, some)
        if errors:
            raise errors[0]
        return lost


def consumer_of(claim: Claim) -> ManualConsumer:
    """Return the consumer that made this claim."""
    return cast("ManualConsumer", claim._held.host)


class Claims(AsyncIterator[Claim]):
    """The claims of one queue, as an async iterator; ``peer.work(queue)`` makes it. It ends when the peer leaves.

    A claim counts against the peer's `concurrency` until it is settled. Iteration and `take` pause when the limit is reached.
    """

    def __init__(self, buffer: ClaimBuffer, noted: Callable[[int, Sequence[Claim]], None] | None = None) -> None:
        self._buffer = buffer
        self._noted = noted
        self._open = True

    def _now_ns(self) -> int:
        return 0 if self._noted is None else time.time_ns()

    def _note(self, began_ns: int, claims: Sequence[Claim]) -> None:
        """Tell the tracing of the mesh, if there is one, which claims were taken."""
        if claims and self._noted is not None:
            self._noted(began_ns, claims)

    def _check_open(self) -> None:
        if not self._open:
            raise UsageError(f"these claims of queue {self._buffer.queue!r} ended with their block: use them inside it")

    async def __anext__(self) -> Claim:
        self._check_open()
        began_ns = self._now_ns()
        claims = await self._buffer.collect(1)
        if not claims:
            raise StopAsyncIteration
        self._note(began_ns, claims)
        return claims[0]

    async def take(self, n: int, *, within: Seconds = 0) -> list[Claim]:
        """Take up to n tasks in one request, oldest first. Wait for the first one.

        If you cancel the call, nothing is taken; tasks on their way are kept for the next call. With several shards, the
        tasks come from one of them if it has enough.

        Args:
            n: At least 1. No more than the peer's `concurrency` can be held at once.
            within: Seconds to wait, after the first task, for the batch to fill.

        Returns:
            1 to n claims; an empty list once the peer leaves.

        Raises:
            UsageError: `n` or `within` is not valid, or the block of the claims has ended.
        """
        self._check_open()
        check_count(n, "n of take")
        wait = seconds(within, "within")
        began_ns = self._now_ns()
        taken = await self._buffer.collect(n)
        if taken and wait > 0:
            try:
                with trio.move_on_after(wait):
                    while len(taken) < n and (more := await self._buffer.collect(n - len(taken))):
                        taken += more
            except trio.Cancelled:
                self._buffer.put_back(taken)
                raise
        self._note(began_ns, taken)
        return taken

    async def finish(self, claims: Iterable[Claim]) -> list[Claim]:
        """Finish claims in one round trip; with several shards, in one each, at the same time.

        Args:
            claims: Claims of this queue.

        Returns:
            The claims that were lost: their tasks run, or ran, elsewhere.

        Raises:
            UsageError: A claim is of another queue, or is in the list twice. Nothing was sent.
            ClaimSettled: A claim was settled before. Nothing was sent.
            Unavailable: The server did not reply within `patience`. The request may have taken effect.
        """
        batch = list(claims)
        for claim in batch:
            if consumer_of(claim).buffer is not self._buffer:
                raise UsageError(f"{claim!r} is not a claim of these claims of queue {self._buffer.queue!r}")
            if claim._held.settled and claim.cancel_reason != "lost":
                raise claim._settled_error()
        if len(set(batch)) != len(batch):
            raise UsageError("the same claim stands twice among those to finish")
        if not batch:
            await trio.lowlevel.checkpoint()
            return []
        return await self._buffer.finish(batch)

    def _close(self) -> None:
        """Note that the block has ended."""
        self._open = False
