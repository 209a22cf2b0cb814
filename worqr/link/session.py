"""`Session`: the requests on one open connection, from packing to outcome. It never waits.

A session ends with its connection. It sends one batch at a time; requests that are submitted meanwhile form the next one. An
error reply concerns one request: the rest of the batch is read to the end.

Not here: the order of requests (`requests`), the recovery of unanswered requests (`node`), sockets (`connector`).

Phases, and the kind of the next reply:

=========  =======================================  ======================================================
phase      the next reply is                        then
=========  =======================================  ======================================================
IDLE       invalid: the connection is lost          `send` (-> LOADING, REPLYING), `count_replicas` (-> COUNTING)
LOADING    that of the oldest SCRIPT LOAD           -> REPLYING, when the last script is loaded
REPLYING   that of the oldest request of the batch  -> COUNTING, if replicas are counted; else -> IDLE
COUNTING   that of WAIT                             -> IDLE
LOST       none                                     -
=========  =======================================  ======================================================
"""

from __future__ import annotations

import copy
import enum
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, Final, cast

import hiredis
import msgspec
from msgspec.structs import replace

from worqr.command import Command
from worqr.errors import (
    ClaimLost,
    NotReplicated,
    QueueFull,
    RefusedByServer,
    Unavailable,
    UsageError,
    WorqrBug,
    WorqrError,
    has_foreign_type,
)
from worqr.keys import NONEXISTENT
from worqr.link.connector import Transport, loading, pack, pause_after
from worqr.link.driver import Waiter, settle_all, wake_all
from worqr.link.failures import ConnectionLost, ErrorAction, ErrorReply, error_reply, is_no_longer_primary, redis_py
from worqr.link.log_thread import boottime
from worqr.lua import Script
from worqr.stored_values import as_bytes

# The unanswered requests of one server, in the order in which they will be sent. No I/O; the driver's loop uses it.
#
# Here: the choice of the next batch, the requests that have waited too long, and the requests to resend. Not here: sockets,
# waiting, logs.
#
# `put_back` moves requests to the front in their old order. So the server sees requests in the order in which they were made.
#
# Blame: a request that was in flight when two healthy connections were lost is then sent alone, so that the next loss
# identifies it. If it loses three more connections, it fails. One with an owner is held alone instead: it is tried now and
# then, behind the others.
#
# Requests of one base (a queue, or the registry) are sent in the order in which they were added. While the slot of a base is
# being moved, `set_aside` holds all requests of this base, including later ones; other bases continue. A worker's shutdown
# depends on this order: its `stop_work` must not overtake the `finish_tasks` that was sent before. Requests that are held
# alone are the exception: later requests of their base overtake them. Otherwise a request that breaks every connection would
# block its queue for ever.
#
# A numbered request is not resent 50 minutes after it was first sent. The server may have forgotten the reply by then, and
# would execute the request again. The clock also counts the time in which the machine sleeps. Settles and starts have no
# numbers: they name claims and start requests, which the server keeps for as long as they matter.

# One call to the server: its deadline, its number and its outcome. No I/O; the driver's loop uses it.
#
# Here: `Request`, `MergedRequest`, `WorkerHandle`, and `SequenceNumbers`, by which the server recognises a resent request. Not
# here: sending (`node`, `session`).


NEVER: Final = math.inf
"""The time at which a request was first sent, if it was not sent yet."""

SEND_AGAIN_WITHIN = 3000.0
"""Seconds after a numbered request was first sent; the server forgets its reply after 3600."""

FORGET_AFTER = 4500.0
"""Seconds without a new number after which a base may be forgotten: the server keeps replies for 3600."""


class WorkerHandle:
    """A worker registration. Its starts and settles are resent until the server replies or the registration is dead.

    Attributes:
        name: the worker id, for messages.
        dead: set by the peer, in the loop, when the worker was declared dead or has left.
    """

    __slots__ = ("dead", "name")

    def __init__(self, name: str = "") -> None:
        self.name: str = name
        self.dead: bool = False


Deliver = Callable[[Any, Exception | None], None]
"""Called with the value or the error of a call."""


class Request(Waiter):
    """A call, and the state that the link keeps for it.

    Attributes:
        patience, deadline: seconds; the deadline on the monotonic clock.
        number: assigned when it is first packed, and kept when it is resent; 0: none.
        written_at: when it was first sent, on the clock of `boottime`; `NEVER`: not yet, so it has no effect.
        losses: healthy connections that were lost while it was in flight.
        redirects: by nodes of a cluster.
        value: the outcome, if the call succeeded.

    Args:
        deliver: called in the loop with the outcome, if no task waits for it.
    """

    __slots__ = ("call", "deadline", "losses", "number", "owner", "patience", "redirects", "value", "written_at")

    def __init__(
        self,
        call: Command[Any],
        patience: float,
        now: float,
        owner: WorkerHandle | None = None,
        deliver: Deliver | None = None,
    ) -> None:
        self.settled = False
        self.abandoned = False
        self.wake: Callable[[], object] | None = None if deliver is None else partial(_deliver, self, deliver)
        self.error: Exception | None = None
        self.call: Command[Any] = call
        self.owner: WorkerHandle | None = owner
        self.patience: float = patience
        self.deadline: float = now + patience
        self.number: int = 0
        self.written_at: float = NEVER
        self.losses: int = 0
        self.redirects: int = 0
        self.value: Any = None

    @property
    def sent(self) -> bool | None:
        """The value of ``Unavailable.sent`` if the request ends without a reply."""
        return False if self.written_at == NEVER else None

    def is_unwanted(self) -> bool:
        """Return True if no caller waits for its outcome any more."""
        return self.settled or self.abandoned

    def fail_with_copy(self, error: WorqrError) -> None:
        if isinstance(error, Unavailable):
            self.error = Unavailable(*error.args, sent=self.sent)
            self.error.__cause__ = error.__cause__
        else:
            super().fail_with_copy(error)

    def read(self, reply: Any) -> bool:
        """Set the value, or the error, from the reply. Return True if it succeeded, and waits for replicas."""
        call = self.call
        try:
            self.value = call.read(reply)
        except WorqrError as exc:
            self.error = exc
        except Exception as exc:
            text = f"the reply to {call.script.name} could not be read ({type(exc).__name__}); please report this"
            self.error = WorqrBug(text)
            self.error.__cause__ = exc
        else:
            return call.replicas > 0
        return False

    # Failed attempts

    def count_loss(self) -> int:
        """Count a healthy connection that was lost; return how many there have been."""
        self.losses += 1
        return self.losses

    def may_have_run(self) -> None:
        """An earlier copy may have been executed, though the request did not cause the loss of its connection."""
        self.losses = self.losses or 1

    def count_redirect(self) -> int:
        """Count a redirect; return how many there have been."""
        self.redirects += 1
        return self.redirects


def _deliver(request: Request, deliver: Deliver) -> None:
    """Deliver the outcome. The request forgets the error, because its traceback would keep the request alive."""
    error, request.error = request.error, None
    deliver(request.value, error)


def give_up(late: Iterable[Request], orphans: Iterable[Request], outage: str) -> None:
    """Set the errors of requests whose patience has ended, and of those whose owner is dead."""
    for request in late:
        fate = "was withdrawn" if request.sent is False else "was sent and may have taken effect"
        text = f"{outage} The request {request.call.script.name} waited {request.patience:.1f} s and {fate}."
        request.fail(Unavailable(text, sent=request.sent))
    for request in orphans:
        name = request.owner.name if request.owner else ""
        request.fail(ClaimLost(f"worker {name} is dead; {request.call.script.name} was given up"))


def too_old(requests: Iterable[Request]) -> None:
    """Set the errors of requests that are not sent any more: the server may have forgotten the reply, or it is too late."""
    for request in requests:
        if request.written_at == NEVER:
            text = f"{request.call.script.name} was not sent in time, and is not sent any more"
            request.fail(Unavailable(text, sent=False))
            continue
        minutes = SEND_AGAIN_WITHIN / 60
        text = (
            f"{request.call.script.name} was first sent over {minutes:.0f} minutes ago, or its time has passed: the server may "
            "have forgotten it; it is not sent again; whether it took effect is unknown"
        )
        request.fail(Unavailable(text, sent=None))


def guilty(requests: Iterable[Request], address: str, cause: str) -> None:
    """Set the errors of requests that have lost several connections, each time alone."""
    for request in requests:
        alone = request.losses - SUSPECT_AFTER
        text = (
            f"{request.call.script.name} alone lost {alone} connections to the server at {address} ({cause}); "
            "whether it took effect is unknown"
        )
        request.fail(Unavailable(text, sent=None))


class Posted(list[Request]):
    """Requests that are submitted together.

    Attributes:
        is_block: they are all that a turn of the loop had to send, and wait for no others.
    """

    is_block: bool = False

    def end_block(self) -> None:
        """Note that the turn of the loop has no more to send."""
        self.is_block = True

    def settle_last(self, together: Waiter) -> None:
        """Settle and wake `together` when the last request has its outcome."""
        left = len(self)

        def settled() -> None:
            nonlocal left
            left -= 1
            if not left:
                together.settle()
                wake_all((together,))

        for request in self:
            request.wake = settled

    def abandon(self) -> None:
        """The caller has given up."""
        for request in self:
            request.wake, request.abandoned = None, True


class MergedRequest(Request):
    """Requests that are sent as one and share its outcome. They are merged when they are first written; until then each of
    them can be withdrawn.
    """

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Request]) -> None:
        merge = parts[0].call.merge
        assert merge is not None, "only calls that say how are merged"
        call, replicas = merge.join([part.call for part in parts]), parts[0].call.replicas
        if call.replicas != replicas:
            call = replace(call, replicas=replicas)
        super().__init__(call, parts[0].patience, 0)
        self.deadline: float = max([part.deadline for part in parts])
        self.parts: Sequence[Request] = parts
        self.wake: Callable[[], object] | None = self._share

    def is_unwanted(self) -> bool:
        return self.settled or all(part.is_unwanted() for part in self.parts)

    def expire(self, now: float) -> list[Request]:
        """Give up the parts that have waited too long, and return them; the others wait on."""
        late = [part for part in self.parts if part.deadline <= now and not part.is_unwanted()]
        for part in late:
            part.settled, part.written_at = True, self.written_at
        return late

    def next_deadline(self) -> float:
        """Return when the next part expires."""
        return min((part.deadline for part in self.parts if not part.is_unwanted()), default=math.inf)

    def _share(self) -> None:
        """In the loop: give each part its share of the outcome, or its own copy of the error."""
        error = self.error
        self.error: Exception | None = None
        has_value = error is None or isinstance(error, NotReplicated)
        before = 0
        for part in self.parts:
            merge: Any = part.call.merge
            if not part.settled:  # otherwise it has waited too long
                if error is not None:
                    part.error = copy.copy(error)
                    part.error.__cause__ = error.__cause__
                if has_value:
                    part.value = merge.shared_result if merge.pick is None else merge.pick(self.value, before)
                part.settled = True
            before += merge.items
        wake_all(self.parts)


class SequenceNumbers:
    """Counts the numbered requests of one producer per base, and returns the lowest number that is still open.

    Replies come nearly in order. A base with open requests has a deque of their numbers; a base without costs one integer. A
    base that has been quiet for one to two periods of `FORGET_AFTER` costs nothing: the server has forgotten its replies by
    then.

    If the server's clock was set back, it may still have old replies. They cannot be confused with new ones: a forgotten base
    continues above all numbers that any forgotten base had.

    The clients of all nodes of a cluster share one instance: a base can move to another node while its requests are in flight.

    Attributes:
        open: the numbers without a reply, of the bases that have some; the lowest is the first.
    """

    def __init__(self) -> None:
        self._last: dict[str, int] = {}  # of bases that were used since the last turn
        self._older: dict[str, int] = {}  # of those that were used between the last turn and the one before
        self._turn_at = time.monotonic() + FORGET_AFTER
        self._floor = 0
        self.open: dict[str, deque[int]] = {}
        self._early: set[tuple[str, int]] = set()  # answered or given up before a lower number was

    def give(self, request: Request, now: float) -> int:
        """Give `request` the next number of its base, and return it. The number is open now (a monotonic time)."""
        base = request.call.base
        if now >= self._turn_at:
            self._turn(now)
        last = self._last[base] if base in self._last else self._older.pop(base, self._floor)
        number = request.number = self._last[base] = last + 1
        if base in self.open:
            self.open[base].append(number)
        else:
            self.open[base] = deque((number,))
        return number

    def settle(self, requests: Iterable[Request]) -> None:
        """The requests have their outcome, so their numbers are not open any more."""
        for request in requests:
            request.settled = True
            if request.number:
                base = request.call.base
                open_here = self.open[base]
                if open_here[0] == open_here[-1]:  # it is the only one
                    del self.open[base]
                else:
                    self.done(base, request.number)
                request.number = 0

    def drop(self, request: Request) -> None:
        """No caller waits for the request: its number does not hold back the lowest open number any more."""
        if request.number:
            self.done(request.call.base, request.number)
            request.number = 0

    def _turn(self, now: float) -> None:
        """Forget the bases that were quiet for a period."""
        self._turn_at = now + FORGET_AFTER
        self._floor = max(self._floor, max(self._older.values(), default=0))
        self._older, self._last = self._last, {}

    def done(self, base: str, number: int) -> None:
        """`number` got its reply, or was given up for good."""
        waiting = self.open[base]
        if waiting[0] != number:
            self._early.add((base, number))
            return
        del waiting[0]
        while waiting and (base, waiting[0]) in self._early:
            self._early.discard((base, waiting.popleft()))
        if not waiting:
            del self.open[base]


# Answered requests that wait until enough replicas have their writes. No I/O; the driver's loop uses it.
#
# Here: the time of each WAIT, the requests that its reply satisfies, and the requests that have waited too long. Not here:
# sockets.
#
# WAIT counts the replicas that have all writes of its own connection. So it is sent behind a batch on the same connection, once
# for all requests of the batch; it does not work inside a script. While WAIT runs, all other requests on that connection wait.
# So its timeout is one short slice of time: usually the replicas confirm within one round trip.
#
# If they do not, the next WAIT is sent after a pause in which other requests are sent, with a longer slice. In a steady stream
# of writes, the confirmation must come within one slice. A replica that is up to 0.1 s behind is still counted. A missing
# replica delays other requests by at most 0.1 s at a time.
#
# An answered request keeps its number, and the server its reply. After a lost connection the request is sent again: the stored
# reply comes back with a fresh write. If the new server is a replica that was promoted without the reply, it executes the
# request.


REPLICAS_WAIT = 2.0
"""Seconds from the reply on for which a request waits for replicas, within its caller's patience."""
FIRST_SLICE = 0.02
LONGEST_SLICE = 0.1
_PAUSE = 2.0  # slices that the others have the connection for themselves between two tries
_STORED = "what was sent is stored on the primary all the same, and only a failover can lose it"


class Replication:
    """The requests that wait for replicas.

    Attributes:
        waiting: answered requests, each with the monotonic time at which it gives up.
        not_before: when WAIT may be sent again; -inf: at once.
    """

    def __init__(self) -> None:
        self.waiting: list[tuple[Request, float]] = []
        self.not_before: float = -math.inf
        self._slice = FIRST_SLICE
        self._reached = 0

    def add(self, requests: Iterable[Request], now: float) -> None:
        """These were answered."""
        self.waiting += [(request, min(now + REPLICAS_WAIT, request.deadline)) for request in requests]

    def question(self, wanted: int, now: float) -> tuple[str, int, int] | None:
        """Return the WAIT for the waiting requests and for a batch that requires up to `wanted` replicas; None: not now."""
        if now < self.not_before:
            return None
        most = max((request.call.replicas for request, _ in self.waiting), default=0)
        most = max(most, wanted)
        return ("WAIT", most, round(self._slice * 1000)) if most else None

    def answered(self, reached: int, took: float, now: float) -> list[Request]:
        """This number of replicas confirmed all writes within `took` seconds; return the requests that are satisfied."""
        self._reached = reached
        met = [request for request, _ in self.waiting if request.call.replicas <= reached]
        self.waiting = [each for each in self.waiting if each[0].call.replicas > reached]
        if self.waiting:
            self.not_before = now + _PAUSE * self._slice
            self._slice = min(2 * self._slice, LONGEST_SLICE)
        else:
            self.not_before = -math.inf
            self._slice = min(max(2 * took, FIRST_SLICE), LONGEST_SLICE)
        return met

    def refused(self, why: Exception) -> list[Request]:
        """The server refuses WAIT: return all waiting requests, with their error."""
        failed = [request for request, _ in self.waiting]
        text = f"the server refused to say which replicas have it: {why} (its user needs +wait); {_STORED}"
        for request in failed:
            error = NotReplicated(text, wanted=request.call.replicas)
            error.__cause__ = why
            request.fail(error)
        self._forget()
        return failed

    def overdue(self, now: float) -> list[Request]:
        """Return the requests that have waited too long, with their error, and those that no caller waits for."""
        late = [request for request, end in self.waiting if end <= now or request.is_unwanted()]
        if late:
            self.waiting = [each for each in self.waiting if each[1] > now and not each[0].is_unwanted()]
            for request in late:
                wanted = request.call.replicas
                text = f"{self._reached} of {wanted} replicas had it in time; {_STORED}"
                request.fail(NotReplicated(text, wanted=wanted, reached=self._reached))
            if not self.waiting:
                self._forget()
        return late

    def withdraw(self, leaves: Callable[[Request], bool] | None = None) -> list[Request]:
        """Return requests that must be sent again, in this order: by default all, because the connection is lost."""
        again = [request for request, _ in self.waiting if leaves is None or leaves(request)]
        self.waiting = [each for each in self.waiting if leaves is not None and not leaves(each[0])]
        for request in again:
            request.may_have_run()
        if not self.waiting:
            self._forget()
        return again

    def _forget(self) -> None:
        """Reset the slices and forget all waiting requests."""
        self.waiting = []
        self.not_before = -math.inf
        self._slice = FIRST_SLICE
        self._reached = 0


MAX_CALLS = 512  # a batch: more would not make it cheaper, and all its callers wait for its end
MAX_BYTES = 8 * 1024 * 1024
MAX_ITEMS = 1000  # in one merged request
SUSPECT_AFTER = 2  # lost connections: from then on a request is sent alone
GUILTY_AFTER = SUSPECT_AFTER + 3  # lost connections, the last of them alone: it has caused them
_HELD_ALONE = 1.0  # seconds; doubles with each further loss
_HELD_ALONE_MAX = 30.0
_SCAN_PAUSE = 0.05  # seconds: how late an expiry may be noticed; keeps thousands of deadlines from costing a scan each


class Held(msgspec.Struct):
    """The requests of one base in their order, or a request that is held alone. None of them is sent before `until`."""

    until: float
    requests: deque[Request] = msgspec.field(default_factory=deque[Request])


class RequestQueue:
    """The requests of one server.

    Every unsettled request is in exactly one state. The state is the collection that has the request:

    =============  ======================================  ==============================================================
    state          collection                              leads to
    =============  ======================================  ==============================================================
    QUEUED         `pending`                               IN_FLIGHT by `take`
    IN_FLIGHT      `in_flight`                             SETTLED; WAITING when it requires replicas; after a loss, or a
                                                           refusal that permits another try, QUEUED or HELD
    HELD           `held`: those of a base, or one alone   QUEUED by `release_due`, with the others that it is held with
    WAITING        `replication.waiting`                   SETTLED; QUEUED when the connection is lost
    SETTLED        none: `Request.settled`                 -
    =============  ======================================  ==============================================================

    From every state, requests that have waited too long are settled. In flight they also stay in the batch, for their replies.
    """

    def __init__(self, numbers: SequenceNumbers | None = None) -> None:
        self.pending: deque[Request] = deque()
        self.in_flight: list[Request] = []
        self.held: dict[str | Request, Held] = {}  # by base; one that is held alone by itself
        self.too_old: list[Request] = []  # `take` does not send them again: they fail
        self.replication: Replication = Replication()
        self.numbers: SequenceNumbers = numbers or SequenceNumbers()
        self.next_deadline: float = math.inf  # when a request may have waited too long

    def add(self, request: Request | Posted) -> None:
        if type(request) is Request and not self.held and request.deadline >= self.next_deadline:
            self.pending.append(request)  # as nearly all are
            return
        for each in request if isinstance(request, Posted) else (request,):
            line = self._line(each) if self.held else self.pending
            line.append(each)
            if each.deadline < self.next_deadline:
                self.next_deadline = each.deadline

    def _line(self, request: Request) -> deque[Request]:
        """Return the queue for `request`: the held requests of its base, if there are any."""
        held = self.held.get(request.call.base)
        return self.pending if held is None else held.requests

    def take(self) -> list[Request]:
        """Return the next batch, now in flight: up to 512 calls or 8 MiB, or one call that is larger or under suspicion. From
        now on its requests count as written.
        """
        batch: list[Request] = []
        size = calls = 0
        pending = self.pending
        while pending and calls < MAX_CALLS:
            request = pending[0]
            if request.settled or request.abandoned or (type(request) is MergedRequest and request.is_unwanted()):
                self.numbers.drop(pending.popleft())
                continue
            if (request.number and boottime() - request.written_at > SEND_AGAIN_WITHIN) or (
                request.call.not_after != math.inf and boottime() > request.call.not_after
            ):
                self.too_old.append(pending.popleft())
                continue
            size += request.call.size
            alone = request.losses >= SUSPECT_AFTER
            if batch and (size > MAX_BYTES or alone):
                break
            batch.append(pending.popleft())
            calls += 1
            if alone:
                break
        if calls > 1:
            batch = _merged(batch)
        now = boottime()
        for request in batch:
            if request.written_at == NEVER:
                request.written_at = now
        self.in_flight = batch
        return batch

    def take_alone(self, request: Request) -> list[Request]:
        """Return a batch of one new request, which has not waited, because no other does."""
        request.written_at = boottime()
        if request.deadline < self.next_deadline:
            self.next_deadline = request.deadline
        batch = self.in_flight = [request]
        return batch

    def is_empty(self) -> bool:
        """Return True if there are no requests."""
        return not (self.pending or self.in_flight or self.held or self.replication.waiting)

    def bases(self) -> set[str]:
        """Return the bases of the requests that wait here or are in flight. Later requests may overtake those held alone."""
        held = {base for base in self.held if isinstance(base, str)}
        return {request.call.base for request in (*self.in_flight, *self.pending)} | held

    def end_batch(self) -> list[Request]:
        """Return the batch; nothing is in flight any more."""
        batch, self.in_flight = self.in_flight, []
        return batch

    def take_too_old(self) -> list[Request]:
        """Return the requests that must not be sent again."""
        requests, self.too_old = self.too_old, []
        return requests

    def put_back(self, requests: Iterable[Request]) -> None:
        """The batch has ended: move these requests to the front, in their order. `take` drops those that no caller waits for."""
        self.in_flight = []
        self.pending.extendleft(reversed(list(requests)))

    def blame(self, unanswered: list[Request], now: float) -> list[Request]:
        """A healthy connection was lost while these were in flight. Put them back; return the guilty ones, which fail."""
        failed: list[Request] = []
        again: list[Request] = []
        for request in unanswered:
            more = request.count_loss() - GUILTY_AFTER
            if more < 0 or request.is_unwanted():
                again.append(request)
            elif request.owner is None and not isinstance(request, MergedRequest):
                request.settle()
                failed.append(request)
            else:
                pause = min(_HELD_ALONE * 2 ** min(more, 10), _HELD_ALONE_MAX)
                self.held[request] = Held(now + pause, deque((request,)))
        self.put_back(again)
        return failed

    def set_aside(self, bases: Iterable[str], until: float) -> None:
        """Send no requests of these bases before `until`. Call `put_back` first for requests of the present batch."""
        chosen = {base: self.held.setdefault(base, Held(until)) for base in bases}
        if not chosen:
            return
        pending: deque[Request] = deque()
        taken: dict[str, list[Request]] = {base: [] for base in chosen}
        for request in self.pending:
            taken.get(request.call.base, pending).append(request)
        self.pending = pending
        for base, held in chosen.items():
            held.until = until
            held.requests.extendleft(reversed(taken[base]))  # requests that are already held were added later
            if not held.requests:
                del self.held[base]

    def remove(self, belongs: Callable[[Request], bool]) -> list[Request]:
        """Remove and return the waiting requests that do not belong to this node, in their order.

        Requests in flight stay, and so do all later requests of the same base. Those that are held alone stay until their pause
        is over.
        """
        flying = {request.call.base for request in self.in_flight}

        def leaves(request: Request) -> bool:
            return request.call.base not in flying and not belongs(request)

        answered = self.replication.withdraw(lambda request: not belongs(request))
        waiting = [request for base, held in self.held.items() if isinstance(base, str) for request in held.requests]
        strangers = [*answered, *(request for request in (*waiting, *self.pending) if leaves(request))]
        if strangers:
            gone = set(map(id, strangers))
            self._keep(lambda request: id(request) not in gone)
        return strangers

    def _keep(self, wanted: Callable[[Request], bool]) -> None:
        """Keep only these requests among those that wait."""
        self.pending = deque(request for request in self.pending if wanted(request))
        for base, held in list(self.held.items()):
            held.requests = deque(request for request in held.requests if wanted(request))
            if not held.requests:
                del self.held[base]

    def release_due(self, now: float) -> None:
        """Move the requests whose pause is over behind the others."""
        due = [self.held.pop(base) for base, held in list(self.held.items()) if held.until <= now]
        for held in due:
            for request in held.requests:
                self._line(request).append(request)

    def next_pause(self) -> float:
        """Return when the next pause ends: of requests that are held, or of WAIT."""
        replication = self.replication.not_before if self.replication.waiting else math.inf
        return min(*(held.until for held in self.held.values()), replication, math.inf)

    def overdue(self, now: float, *, owners: bool = False) -> tuple[list[Request], list[Request]]:
        """Return the requests whose patience has ended, and those whose owner is dead. Scans only when one may be due, or on
        request.

        The requests are settled and no longer wait. In flight they stay, so that their replies are skipped.

        Args:
            now: on the monotonic clock.
            owners: scan in any case; an owner may have died meanwhile.
        """
        if now < self.next_deadline and not owners:
            return [], []
        late: list[Request] = []
        orphans: list[Request] = []
        unwanted: list[Request] = []
        next_deadline = math.inf
        for request in (*self.in_flight, *self._waiting()):
            if request.settled:
                continue
            if request.abandoned:
                unwanted.append(request)
            elif request.owner is not None and request.owner.dead:
                orphans.append(request)
            elif type(request) is MergedRequest:
                late += request.expire(now)
                next_deadline = min(next_deadline, request.next_deadline())
                if request.is_unwanted():
                    unwanted.append(request)
            elif request.deadline <= now:
                late.append(request)
            elif request.deadline < next_deadline:
                next_deadline = request.deadline
        self.next_deadline = max(next_deadline, now + _SCAN_PAUSE)
        dropped = (*late, *orphans, *unwanted)
        settle_all(dropped)
        if dropped:
            self._forget_settled()
        return late, orphans

    def _waiting(self) -> list[Request]:
        """Return all requests except those in flight."""
        held = [request for each in self.held.values() for request in each.requests]
        return [*held, *self.pending]

    def _forget_settled(self) -> None:
        for request in self._waiting():
            if request.settled:
                self.numbers.drop(request)
        self._keep(lambda request: not request.settled)

    def clear(self) -> list[Request]:
        """Return all unanswered requests, for the end of the link."""
        answered = self.replication.withdraw()
        everything = [r for r in (*answered, *self.in_flight, *self._waiting()) if not r.settled]
        self.pending.clear()
        self.held.clear()
        self.in_flight = []
        settle_all(everything)
        return everything


def _merged(batch: list[Request]) -> list[Request]:
    """Return the batch with mergeable requests joined: running one script per task is most of the cost of a small task.

    Requests of one base keep their order; requests of different queues have no order.
    """
    groups: list[list[Request]] = []
    last: dict[str, list[Request]] = {}  # of each base, while it may grow
    items: dict[str, int] = {}
    for request in batch:
        call = request.call
        base, merge = call.base, call.merge if request.written_at == NEVER else None
        if merge is None:
            last.pop(base, None)
            groups.append([request])
            continue
        group = last.get(base)
        if (
            group is not None
            and items[base] + merge.items <= MAX_ITEMS
            and (first := group[0]).patience == request.patience
            and (other := first.call).replicas == call.replicas
            and (other.merge is merge or (other.merge is not None and other.merge.join is merge.join))
        ):
            group.append(request)
            items[base] += merge.items
        else:
            group = last[base] = [request]
            items[base] = merge.items
            groups.append(group)
    return [MergedRequest(group) if len(group) > 1 else group[0] for group in groups]


# `Session`: the requests on one open connection, from packing to outcome.

# The wire form of calls and replies. No I/O.
#
# Here: the script and keys of a call, for one server and for a node of a cluster, and the parser of replies, whose bytes may
# arrive split anywhere. hiredis parses; an error reply is returned.
#
# On a cluster the channels of a queue are sharded, so the scripts that publish there have a variant (`Script.sharded`).
#
# Every call on a cluster names one more key (`keys.NONEXISTENT`), which is never written. While a slot is moved key by key, a
# node executes commands whose keys it still has all. A script would then find half of a queue. The missing key makes the node
# reply TRYAGAIN or ASK instead, and the call waits until the slot has moved.


SLOTS = 16384

NOT_YET: Final = object()
"""The result of a parser's `gets` when no whole reply has arrived."""


def as_sent(call: Command[Any], *, clustered: bool) -> tuple[Script, tuple[str, ...]]:
    """Return the script of `call` and its KEYS: the base, and in a cluster the key that never exists."""
    if clustered:
        return call.script.sharded, (call.base, call.base + NONEXISTENT)
    return call.script, (call.base,)


@lru_cache(maxsize=10_000)
def slot_of(name: str) -> int:
    """Return the hash slot of a key, a channel, or a base: 0 to 16383."""
    slot: int = redis_py().crc.key_slot(as_bytes(name))
    return slot


class NotRedis(Exception):
    """Bytes that are no reply of a Redis server."""


def new_reader() -> hiredis.Reader:
    """Return a parser for a connection that has just been made. An error reply is an `ErrorReply`."""
    return hiredis.Reader(protocolError=NotRedis, replyError=error_reply, notEnoughData=NOT_YET)


LOAD_REMEDY: Final = (
    "this user may not load scripts: start a worker or producer of the same version of worqr once, which loads them, or grant "
    "the user +script|load"
)
PER_SEND: Final = 64
"""Requests to pack before the first bytes are sent: the server works on them while the next ones are packed."""

IDLE_CHECK: Final = 0.05
"""Seconds without a request, after which a connection is read before it is used."""

_NOSCRIPT_ROUNDS = 3  # another program keeps flushing scripts: from here on, pause between the tries


class Phase(enum.Enum):
    """The kind of the next reply on the connection."""

    IDLE = "nothing is under way"
    LOADING = "scripts are being loaded"
    REPLYING = "requests are being answered"
    COUNTING = "replicas are being counted"
    LOST = "the connection is lost"


class BatchResult(msgspec.Struct):
    """The requests of a batch that do not have their outcome yet.

    Attributes:
        answered: they took effect, and wait for replicas.
        again: they were refused and will be sent again, by what has to happen before.
        moved: with the redirect of the node, ``SLOT HOST:PORT``.
        unanswered: the connection was lost before the reply.
        lost: the reason of the loss.
        cause: the error reply to some that were refused.
        settled: at least one request of the batch has its outcome.
    """

    answered: list[Request] = msgspec.field(default_factory=list[Request])
    again: dict[ErrorAction, list[Request]] = msgspec.field(default_factory=dict[ErrorAction, list[Request]])
    moved: list[tuple[Request, str]] = msgspec.field(default_factory=list[tuple[Request, str]])
    unanswered: list[Request] = msgspec.field(default_factory=list[Request])
    lost: ConnectionLost | None = None
    cause: str = ""
    settled: bool = False


class Session:
    """The requests on one connection.

    Attributes:
        transport: its socket.
        phase: the kind of the next reply.
        result: the present batch, or the last one.
        used_at: when a batch was last sent.
        heard_at: when bytes last came or went, while something is under way. Moved on by the time in which the loop was blocked.
        held_until: do not send before; -inf: send.
        gathers: the last batch had several requests: let the next ones join before it is sent.
        troubled: not every batch was answered lately.
    """

    def __init__(self, transport: Transport, requests: RequestQueue, producer: str, *, clustered: bool) -> None:
        self.transport: Transport = transport
        self.phase: Phase = Phase.IDLE
        self.result: BatchResult = BatchResult()
        self.used_at: float = time.monotonic()
        self.heard_at: float = self.used_at
        self.held_until: float = -math.inf
        self.gathers: bool = False
        self.troubled: bool = False
        self._requests = requests
        self._producer = producer
        self._clustered = clustered
        self._reader = new_reader()
        self._expected: deque[Request] = deque()
        self._settled: list[Request] = []  # until `take_settled`
        self._loads: deque[Script] = deque()  # to be loaded in front of the next batch, or being loaded
        self._unloadable: dict[str, ErrorReply] = {}  # by SHA: why the server refuses to load a script
        self._replicas = 0  # the most that a request of the batch requires; -1: WAIT was sent behind the batch
        self._since = 0.0  # when WAIT was sent
        self._holds = 0  # replies in a row that the server cannot work
        self._noscript_rounds = 0  # batches in a row of which nothing was executed, because scripts were missing

    # Sending

    def send(self, batch: list[Request], now: float) -> ConnectionLost | None:
        """Send a batch, and in front of it the scripts that are to be loaded, so that SCRIPT FLUSH of another program is
        unlikely in between. Return why the connection was lost meanwhile, if it was: then, too, all requests count as sent.
        """
        assert self.phase is Phase.IDLE, "one batch at a time"
        self.used_at = self.heard_at = now
        self.gathers = len(batch) > 1 or type(batch[0]) is MergedRequest
        self._replicas, self._unloadable, self.result.settled = 0, {}, False
        pieces = loading(self._loads) if self._loads else []
        self.phase = Phase.LOADING if pieces else Phase.REPLYING
        lost: ConnectionLost | None = None
        if self.gathers:
            for start in range(0, len(batch), PER_SEND):
                if start:
                    lost, pieces = lost or self._write(pieces), []
                pieces += self._packed(batch[start : start + PER_SEND], now)
        else:
            pieces += self._packed(batch, now)
        replication = self._requests.replication
        if self._replicas or replication.waiting:
            question = replication.question(self._replicas, now)
            self._replicas = 0 if question is None else -1
            pieces += [] if question is None else [pack(question)]
        try:
            if lost is None and pieces:
                self.transport.send(pieces)
        except ConnectionLost as error:
            lost = error
        if not self._expected and self.phase is Phase.REPLYING:  # none of them could be packed
            self._end_of_replies(now)
        return lost

    def count_replicas(self, now: float) -> ConnectionLost | None:
        """Ask how many replicas have the writes that requests wait for, unless it is too early to ask again. Return the reason
        if the connection was lost meanwhile.
        """
        assert self.phase is Phase.IDLE, "one batch at a time"
        question = self._requests.replication.question(0, now)
        if question is None:
            return None
        self.phase, self._since = Phase.COUNTING, now
        self.used_at = self.heard_at = now
        return self._write([pack(question)])

    def _write(self, pieces: list[bytes]) -> ConnectionLost | None:
        try:
            if pieces:
                self.transport.send(pieces)
        except ConnectionLost as lost:
            return lost
        return None

    def _packed(self, requests: list[Request], now: float) -> list[bytes]:
        """Return the bytes of some requests. A numbered request gets its number here, and keeps it when it is sent again. A
        request that cannot be packed gets its error, and no bytes.
        """
        pieces: list[bytes] = []
        numbers = self._requests.numbers
        for request in requests:
            call = request.call
            base = call.base
            try:
                args = call.args
                if call.numbered:
                    args = (self._producer, request.number or numbers.give(request, now), numbers.open[base][0], *args)
                script = call.script
                if self._clustered:
                    pieces += (
                        pack((b"EVALSHA", script.sharded.sha, 2, base, base + NONEXISTENT, *args, *script.tail)),
                    )
                else:
                    pieces += (pack((b"EVALSHA", script.sha, 1, base, *args, *script.tail)),)
            except Exception as exc:
                request.fail(UsageError(f"an argument of {call.script.name} cannot be sent ({type(exc).__name__})"))
                self._settled.append(request)
                continue
            self._expected.append(request)
            if call.replicas > self._replicas:
                self._replicas = call.replicas
        return pieces

    # Receiving

    def is_still_there(self) -> bool:
        """Return False if the server has closed this idle connection, or sent something unasked."""
        return self.receive() is None

    def receive(self) -> ConnectionLost | None:
        """Read the input; return the reason if the connection was lost, or if the bytes are no replies that are awaited."""
        try:
            if not self.transport.read(self._reader.feed):
                return None
            self.heard_at = now = time.monotonic()
            gets, expected, settled = self._reader.gets, self._expected, self._settled
            while (reply := gets()) is not NOT_YET:
                if self.phase is not Phase.REPLYING:
                    self._other_reply(reply, now)
                    continue
                request = expected.popleft()
                if request.settled:  # it has expired, and has its error
                    settled.append(request)
                elif type(reply) is ErrorReply:
                    self._refused(request, reply)
                elif request.read(reply):
                    self.result.answered.append(request)
                else:
                    settled.append(request)
                if expected:
                    continue
                if self._replicas or self.result.answered or self.result.moved:
                    self._end_of_replies(now)
                else:
                    self.phase = Phase.IDLE
        except ConnectionLost as lost:
            return lost
        except NotRedis as error:
            return ConnectionLost(f"the server sent something that is no reply ({error})")
        return None

    def _other_reply(self, reply: object, now: float) -> None:
        match self.phase:
            case Phase.LOADING:
                script = self._loads.popleft()
                if isinstance(reply, ErrorReply):
                    self._unloadable[script.sha] = reply
                if not self._loads:
                    self.phase = Phase.REPLYING
                    if not self._expected:
                        self._end_of_replies(now)
            case Phase.COUNTING:
                self._counted(reply, now)
            case _:
                text = f": {reply}" if isinstance(reply, ErrorReply) else ""
                raise ConnectionLost(f"the server sent a reply that no request waits for{text}", innocent=True)

    def _refused(self, request: Request, refused: ErrorReply) -> None:
        """Sort the request into `result` if it can succeed when it is sent again; else it has its error."""
        match refused.action:
            case ErrorAction.MOVED if self._clustered:
                self.result.moved.append((request, refused.text))
            case (ErrorAction.DROP | ErrorAction.HOLD) as action:
                self.result.again.setdefault(action, []).append(request)
            case ErrorAction.MOVING as action if self._clustered:
                self.result.again.setdefault(action, []).append(request)
            case ErrorAction.FULL if request.losses:
                # The server refuses before it checks whether an earlier copy, whose reply was lost, has been executed.
                self.result.again.setdefault(ErrorAction.HOLD, []).append(request)
            case ErrorAction.NOSCRIPT as action if self._script(request).sha not in self._unloadable:
                self.result.again.setdefault(action, []).append(request)
                return
            case _:
                error = self._final_error(request, refused)
                error.__cause__ = refused
                request.fail(error)
                self._settled.append(request)
                return
        self.result.cause = str(refused)

    def _final_error(self, request: Request, refused: ErrorReply) -> WorqrError:
        """Return the error of a request that must not be sent again."""
        script = self._script(request)
        text = f"the server refused {script.name}: {refused}"
        match refused.action:
            case ErrorAction.MOVED | ErrorAction.MOVING:
                text += "; it is a node of a cluster: write redis+cluster://"
            case ErrorAction.NOSCRIPT:
                text = f"the server refused to load the script {script.name}: {self._unloadable[script.sha]}"
                if self._unloadable[script.sha].word == "NOPERM":
                    text += "; " + LOAD_REMEDY
            case ErrorAction.REFUSED if has_foreign_type(refused):
                text += (
                    f". Another program has written one of these keys, or another key that begins with {request.call.base}: "
                    f"{', '.join(request.call.base + each for each in request.call.script.suffixes)}. "
                    "Find it with `redis-cli TYPE KEY`, and rename or delete it"
                )
            case ErrorAction.FULL:
                return QueueFull(
                    "the server is out of memory (maxmemory), nothing was stored; let queues drain, or add memory"
                )
            case _:
                pass
        if request.losses:
            text += "; an earlier copy, whose reply was lost with a connection, may have taken effect"
        return RefusedByServer(text)

    def _script(self, request: Request) -> Script:
        script = request.call.script
        return script.sharded if self._clustered else script

    # The end of a batch

    def _end_of_replies(self, now: float) -> None:
        """All requests are answered. The reply to WAIT follows, if replicas are counted."""
        if self.result.answered or self.result.moved:
            self._note_answered(now)
        if self._replicas < 0:
            self.phase, self._since = Phase.COUNTING, now
        else:
            self.phase = Phase.IDLE

    def _note_answered(self, now: float) -> None:
        """The requests that were answered wait for replicas. One that moves to another node must not overtake a request of the
        same base that is resent to this node.
        """
        result = self.result
        if result.moved and result.again:
            stays = {request.call.base for requests in result.again.values() for request in requests}
            moving = [request for request, _ in result.moved if request.call.base in stays]
            result.again.setdefault(ErrorAction.MOVING, []).extend(moving)
            result.moved = [each for each in result.moved if each[0].call.base not in stays]
        if result.answered:
            self._requests.replication.add(result.answered, now)
            result.answered = []

    def _counted(self, reply: object, now: float) -> None:
        """Handle the reply to WAIT: how many replicas have all earlier writes of this connection."""
        replication = self._requests.replication
        self.phase = Phase.IDLE
        if isinstance(reply, ErrorReply):
            if reply.action is ErrorAction.REFUSED and not is_no_longer_primary(reply):
                self._settled += replication.refused(reply)
                return
            if reply.action is not ErrorAction.HOLD:
                raise ConnectionLost(str(reply), innocent=True)
            reply = 0
        self._settled += replication.answered(cast("int", reply), now - self._since, now)

    def take_settled(self) -> list[Request]:
        """Return the requests that have their outcome."""
        settled, self._settled = self._settled, []
        if settled:
            self.result.settled = True
        return settled

    def take_result(self) -> BatchResult:
        """Return what the batch that ended left to do. It is returned once."""
        result, self.result = self.result, BatchResult()
        return result

    def lose(self, lost: ConnectionLost, now: float) -> None:
        """The connection is lost: `result` gets the unanswered requests. It keeps what a batch that has just ended left to do.
        Idempotent.
        """
        if self.phase is not Phase.LOST:
            self.result.lost = lost
            self.result.unanswered = list(self._expected)
            self._expected.clear()
            if self.phase in (Phase.LOADING, Phase.REPLYING):
                self._note_answered(now)
            self.phase = Phase.LOST

    # What the next batch needs

    def works(self) -> None:
        """A whole batch was answered."""
        self.held_until, self._holds, self._noscript_rounds, self.troubled = -math.inf, 0, 0, False

    def hold(self) -> None:
        """The server replied that it cannot work at the moment: pause, longer each time."""
        self._holds += 1
        self.troubled = True
        self.held_until = time.monotonic() + pause_after(self._holds + 1)

    def load(self, missing: Collection[Request], *, executed: bool) -> bool:
        """Load the scripts of these requests in front of the next batch. Return False if they vanish as soon as they are
        loaded.

        Args:
            missing: the server does not have their scripts.
            executed: some requests of the batch had other scripts, and were executed.
        """
        self._loads.extend({script.sha: script for script in map(self._script, missing)}.values())
        self._noscript_rounds = 0 if executed else self._noscript_rounds + 1
        self.troubled = True
        return self._noscript_rounds <= _NOSCRIPT_ROUNDS

    def progress(self) -> None:
        """The system accepted more bytes, or the server sent some."""
        self.heard_at = time.monotonic()

    def forgive(self, seconds: float) -> None:
        """The loop was blocked for this time, so the server is not to blame for its silence."""
        self.heard_at += seconds
