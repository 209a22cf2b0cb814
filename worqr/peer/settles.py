"""`Settles`: the requests that end claims (settles), until the server has accepted them.

Every settle of a peer is sent from here. The link repeats a request when a connection is lost. This module repeats it when the
server *refused* it: a permission is missing, or a key has another type. It waits 1 s before the second try, and up to 30 s before
later ones. A batch that was refused is tried again claim by claim, so that one bad record does not delay the others. Each claim
keeps its outcome: a finish stays a finish, with its result.

Invariant: from `send` until the server accepts the settle, the claim is in `claims_of(name)`, or its registration is dead, or its
queue was left (`drop`). So if the server lists a claim for this worker that is neither running nor in `claims_of`, no worker
holds it. Settles are fenced by the claim, so sending one again is safe.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import trio
from trio_util import RepeatedEvent

from worqr import ops
from worqr.errors import ClaimLost
from worqr.keys import QueueKeys
from worqr.link import Link, WorkerHandle
from worqr.log_events import emit
from worqr.ops import MAX_ITEMS
from worqr.peer.error_throttle import ErrorThrottle
from worqr.script_call import Call

if TYPE_CHECKING:
    from worqr.peer.session import Registration

logger: logging.Logger = logging.getLogger(__name__)

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 30.0
"""Seconds before a refused request is sent again: each pause is twice the one before it."""
CROWDED = 1000
"""Number of refused settles of one queue above which this peer requests no more tasks there, because it could not settle them."""

Make = Callable[[Sequence[int]], Call[Any]]
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

    `before_end` is called before each request with the claims that it ends, and may send what these runs have reported.

    Attributes:
        crowded: names of queues where so many settles are refused that no more tasks are taken there.
    """

    def __init__(
        self, link: Link, before_end: Callable[[QueueKeys, Registration, Sequence[int]], None] | None = None
    ) -> None:
        self.crowded: set[str] = set()
        self._link = link
        self._before_end = before_end
        self._sent: dict[str, set[Settle]] = {}
        self._refused: dict[str, set[Settle]] = {}
        self._throttle = ErrorThrottle(logger)
        self._earlier = RepeatedEvent()
        self._some_answered = trio.Event()

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
            if self._some_answered.is_set():
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
        if self._before_end is not None:
            self._before_end(settle.keys, settle.registration, settle.claims)
        self._link.post(settle.make(settle.claims), partial(self._replied, settle), owner=settle.registration)

    def _replied(self, settle: Settle, value: Any, failure: Exception | None) -> None:
        name = settle.keys.name
        sent = self._sent[name]
        sent.discard(settle)
        lost = settle.registration.dead or isinstance(failure, ClaimLost)
        if failure is not None and not lost:
            self._refuse(settle, failure)
        elif settle.pause and failure is None:
            self._accepted(settle)
        if not sent:
            del self._sent[name]
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
