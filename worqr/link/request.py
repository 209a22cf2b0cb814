"""One call to the server: its deadline, its number and its outcome. No I/O; the driver's loop uses it.

Here: `Request`, `MergedRequest`, `WorkerHandle`, and `SequenceNumbers`, by which the server recognises a resent request. Not
here: the states of a request (`request_queue`), sending (`pipeline`, `session`).
"""

from __future__ import annotations

import copy
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from worqr.errors import ClaimLost, NotReplicated, Unavailable, WorqrBug, WorqrError
from worqr.link.driver import Waiter, wake_all
from worqr.script_call import Call

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


@dataclass(slots=True)
class Trouble:
    """The failed attempts of one request. Most requests have none.

    Attributes:
        losses: healthy connections that were lost while it was in flight.
        alone: those of them on which it was the only request.
        redirects: by nodes of a cluster.
    """

    losses: int = 0
    alone: int = 0
    redirects: int = 0


class Request(Waiter):
    """A call, and the state that the link keeps for it.

    Attributes:
        patience, deadline: seconds; the deadline on the monotonic clock.
        number: assigned when it is first packed, and kept when it is resent; 0: none.
        written_at: when it was first sent, on the clock of `boottime`; `NEVER`: not yet, so it has no effect.
        trouble: its failed attempts, from the first one on.
        value: the outcome, if the call succeeded.

    Args:
        deliver: called in the loop with the outcome, if no task waits for it.
    """

    __slots__ = ("call", "deadline", "number", "owner", "patience", "trouble", "value", "written_at")

    def __init__(
        self,
        call: Call[Any],
        patience: float,
        now: float,
        owner: WorkerHandle | None = None,
        deliver: Deliver | None = None,
    ) -> None:
        self.settled = False
        self.abandoned = False
        self.wake: Callable[[], object] | None = None if deliver is None else partial(_deliver, self, deliver)
        self.error: Exception | None = None
        self.call: Call[Any] = call
        self.owner: WorkerHandle | None = owner
        self.patience: float = patience
        self.deadline: float = now + patience
        self.number: int = 0
        self.written_at: float = NEVER
        self.trouble: Trouble | None = None
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

    @property
    def losses(self) -> int:
        """Connections that were lost while it was in flight."""
        return 0 if self.trouble is None else self.trouble.losses

    def count_loss(self, *, alone: bool) -> int:
        """Count a healthy connection that was lost; return the number of those on which this was the only request."""
        trouble = self.trouble = self.trouble or Trouble()
        trouble.losses += 1
        trouble.alone += alone
        return trouble.alone

    def may_have_run(self) -> None:
        """An earlier copy may have been executed, though the request did not cause the loss of its connection."""
        trouble = self.trouble = self.trouble or Trouble()
        trouble.losses = trouble.losses or 1

    def count_redirect(self) -> int:
        """Count a redirect; return how many there have been."""
        trouble = self.trouble = self.trouble or Trouble()
        trouble.redirects += 1
        return trouble.redirects


def _deliver(request: Request, deliver: Deliver) -> None:
    """Deliver the outcome. The request forgets the error, because its traceback would keep the request alive."""
    error, request.error = request.error, None
    deliver(request.value, error)


def mark_written(requests: Iterable[Request], now: float) -> None:
    """The requests are being sent, some of them again."""
    for request in requests:
        if request.written_at == NEVER:
            request.written_at = now


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
    """Set the errors of requests that are not sent again, because the server may have forgotten its reply."""
    for request in requests:
        text = (
            f"{request.call.script.name} was first sent over {SEND_AGAIN_WITHIN / 60:.0f} minutes ago, and the server may have "
            "forgotten it; it is not sent again; whether it took effect is unknown"
        )
        request.fail(Unavailable(text, sent=None))


def guilty(requests: Iterable[Request], address: str, cause: str) -> None:
    """Set the errors of requests that have lost several connections, each time alone."""
    for request in requests:
        alone = 0 if request.trouble is None else request.trouble.alone
        text = (
            f"{request.call.script.name} alone lost {alone} connections to the server at {address} ({cause}); "
            "whether it took effect is unknown"
        )
        request.fail(Unavailable(text, sent=None))


class Posted(list[Request]):
    """Requests that are submitted together."""

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
        before = 0
        for part in self.parts:
            merge = part.call.merge
            items = 0 if merge is None else merge.items
            before += items
            if part.settled:  # it has waited too long
                continue
            if error is not None:
                part.error = copy.copy(error)
                part.error.__cause__ = error.__cause__
            if merge is not None and (error is None or isinstance(error, NotReplicated)):
                part.value = merge.shared_result if merge.pick is None else merge.pick(self.value, before - items)
            part.settled = True
        wake_all(self.parts)


class SequenceNumbers:
    """Counts the numbered requests of one producer per base, and returns the lowest number that is still open.

    Replies come nearly in order. A base with open requests has a deque of their numbers; a base without costs one integer. A
    base that has been quiet for one to two periods of `FORGET_AFTER` costs nothing: the server has forgotten its replies by
    then.

    If the server's clock was set back, it may still have old replies. They cannot be confused with new ones: a forgotten base
    continues above all numbers that any forgotten base had.

    The clients of all nodes of a cluster share one instance: a base can move to another node while its requests are in flight.
    """

    __slots__ = ("_early", "_floor", "_last", "_lock", "_older", "_open", "_turn_at")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[str, int] = {}  # of bases that were used since the last turn
        self._older: dict[str, int] = {}  # of those that were used between the last turn and the one before
        self._turn_at = time.monotonic() + FORGET_AFTER
        self._floor = 0
        self._open: dict[str, deque[int]] = {}
        self._early: set[tuple[str, int]] = set()  # answered or given up before a lower number was

    def give(self, request: Request) -> int:
        """Give `request` the next number of its base, and return it. The number is open now."""
        base = request.call.base
        with self._lock:
            if time.monotonic() >= self._turn_at:
                self._turn()
            last = self._last.get(base)
            if last is None:
                last = self._older.pop(base, self._floor)
            number = self._last[base] = last + 1
            waiting = self._open.get(base)
            if waiting is None:
                waiting = self._open[base] = deque()
            waiting.append(number)
        request.number = number
        return number

    def settle(self, requests: Iterable[Request]) -> None:
        """The requests have their outcome, so their numbers are not open any more."""
        for request in requests:
            request.settled = True
            if request.number:
                self.done(request.call.base, request.number)
                request.number = 0

    def drop(self, request: Request) -> None:
        """No caller waits for the request: its number does not hold back the lowest open number any more."""
        if request.number:
            self.done(request.call.base, request.number)
            request.number = 0

    def _turn(self) -> None:
        """Forget the bases that were quiet for a period."""
        self._turn_at = time.monotonic() + FORGET_AFTER
        self._floor = max(self._floor, max(self._older.values(), default=0))
        self._older, self._last = self._last, {}

    def lowest(self, base: str) -> int:
        """Return the lowest open number of `base`. Call it only while a number is open, as when packing."""
        with self._lock:
            return self._open[base][0]

    def done(self, base: str, number: int) -> None:
        """`number` got its reply, or was given up for good."""
        with self._lock:
            waiting = self._open[base]
            if waiting[0] != number:
                self._early.add((base, number))
                return
            waiting.popleft()
            while waiting and (base, waiting[0]) in self._early:
                self._early.discard((base, waiting.popleft()))
            if not waiting:
                del self._open[base]
