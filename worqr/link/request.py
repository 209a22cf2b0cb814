"""One call to the server: its deadline, its number and its outcome. No I/O; the driver's loop uses it.

Here: `Request`, `MergedRequest`, `WorkerHandle`, and `SequenceNumbers`, by which the server recognises a resent request. Not
here: the order of requests (`request_queue`) and sending (`pipeline`, `session`).
"""

from __future__ import annotations

import copy
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from worqr.errors import NotReplicated, Unavailable, WorqrError
from worqr.link.driver import Waiter, wake_all
from worqr.script_call import Call

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


class Request(Waiter):
    """A call, and the state that the link keeps for it.

    Attributes:
        patience, deadline: seconds; the deadline on the monotonic clock.
        number: assigned when it is first packed, and kept when it is resent; 0: none.
        written: it was sent at least once, so it may have taken effect.
        written_at: when it was first sent, on the clock of `boottime`.
        losses: healthy connections that were lost while it was in flight.
        lost_alone: those of them on which it was the only request.
        not_before: when it may be tried again, after too many losses, or while its keys are being moved.
        hops: the number of redirects by nodes of a cluster.
        value: the outcome, if the call succeeded.
    """

    __slots__ = (
        "call",
        "deadline",
        "hops",
        "losses",
        "lost_alone",
        "not_before",
        "number",
        "owner",
        "patience",
        "value",
        "written",
        "written_at",
    )

    def __init__(self, call: Call[Any], patience: float, now: float, owner: WorkerHandle | None = None) -> None:
        self.settled = False
        self.abandoned = False
        self.wake: Callable[[], object] | None = None
        self.error: Exception | None = None
        self.call: Call[Any] = call
        self.owner: WorkerHandle | None = owner
        self.patience: float = patience
        self.deadline: float = now + patience
        self.number: int = 0
        self.written: bool = False
        self.written_at: float = math.inf
        self.losses: int = 0
        self.lost_alone: int = 0
        self.not_before: float = -math.inf
        self.hops: int = 0
        self.value: Any = None

    def is_unwanted(self) -> bool:
        """Return True if no caller waits for its outcome any more."""
        return self.settled or self.abandoned


class Posted(list[Request]):
    """Requests that are submitted together."""


def fail_all(waiters: Iterable[Waiter], error: WorqrError) -> None:
    """Settle the waiters, each with its own copy of the error: a traceback belongs to one task."""
    for waiter in waiters:
        waiter.error = type(error)(*error.args)
        waiter.error.__cause__ = error.__cause__
        if isinstance(waiter.error, Unavailable) and isinstance(waiter, Request):
            waiter.error.sent = None if waiter.written else False
        waiter.settled = True


class MergedRequest(Request):
    """Requests that are sent as one and share its outcome. MergedRequest when they are first written: until then each can be
    withdrawn.
    """

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Request]) -> None:
        merge = parts[0].call.merge
        assert merge is not None, "only calls that say how are merged"
        super().__init__(merge.join([part.call for part in parts]), parts[0].patience, 0)
        self.call.replicas = parts[0].call.replicas
        self.deadline: float = max([part.deadline for part in parts])
        self.parts: Sequence[Request] = parts
        self.wake: Callable[[], object] | None = self._share

    def is_unwanted(self) -> bool:
        return self.settled or all(part.is_unwanted() for part in self.parts)

    def expire(self, now: float) -> list[Request]:
        """Give up the parts that have waited too long, and return them; the others wait on."""
        late = [part for part in self.parts if part.deadline <= now and not part.is_unwanted()]
        for part in late:
            part.settled, part.written = True, self.written
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
                part.value = merge.share if merge.pick is None else merge.pick(self.value, before - items)
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

    def give(self, base: str) -> int:
        """Return the next number of `base`, which is now open."""
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
            return number

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
