"""Claiming: a `Station` is where a peer meets one queue. It asks for tasks when it has room and reason, and hands them on.

One start request at a time per queue; its room is reserved while it is under way. A station *wants* (should ask as soon as
there is room) from the moment something says that there may be work (joined, woken, scanned, resubscribed, or the last
reply left tasks behind) until a reply comes back short, when the same script has put the worker among the hungry. A wake-up
that comes while a request is under way is remembered; one that there is no room for is passed on.

A reply is believed only while our last acknowledged beat is younger than the keepalive: a process that was frozen wakes
up with claims in its hands that may be somebody else's by now.
"""

# The private fields of Context are hidden from users, not from its neighbours.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextvars import Context as Variables
from contextvars import copy_context
from typing import TYPE_CHECKING

import trio

from worqr import ops
from worqr.errors import ClaimLost
from worqr.keys import QueueKeys
from worqr.ops import MAX_ITEMS, Started
from worqr.peer.context import Context
from worqr.peer.running import Handler
from worqr.policy import Policy
from worqr.task import CancelReason

if TYPE_CHECKING:
    from worqr.link import Subscription
    from worqr.peer.capacity import Capacity
    from worqr.peer.membership import Membership, Registration

logger: logging.Logger = logging.getLogger(__name__)

PolicyFields = tuple[tuple[bytes, bytes], ...]
MANY_POLICIES = 100
"""Policies of jobs that are remembered; of a queue whose jobs all bring others, none is needed twice."""


class Station:
    """One queue that this peer serves. Subclasses say how many claims they want and what becomes of them.

    Set once: `keys`, `policy`, `variables`, `handler`. Changed only in the loop: everything else.
    """

    handler: Handler
    state: object = None

    def __init__(self, keys: QueueKeys, membership: Membership, capacity: Capacity, policy: Policy) -> None:
        self.keys = keys
        self.policy = policy
        self.variables: Variables = copy_context()
        self.registration: Registration | None = None
        self.subscription: Subscription | None = None
        self.running: dict[int, Context] = {}
        self.entered = False
        self.in_fence = False
        self.quiet = False
        self.hinted: bool = False
        self.listening = False
        self.unwinding = False
        self.entering: trio.CancelScope = trio.CancelScope()
        self.left: trio.Event = trio.Event()
        self.idle: trio.Event = trio.Event()
        self.hurry: trio.Event = trio.Event()
        self._membership = membership
        self._capacity = capacity
        self._policies: dict[PolicyFields, Policy] = {}
        self._wants = False
        self._again = False
        self._owes = False
        self._in_flight = False
        self._reserved = 0

    @property
    def name(self) -> str:
        """The queue's name."""
        return self.keys.name

    def policy_with(self, own: PolicyFields) -> Policy:
        """The policy of a job that brings fields of its own. Most jobs of a queue bring the same ones: each is made once."""
        policy = self._policies.get(own)
        if policy is None:
            if len(self._policies) >= MANY_POLICIES:
                self._policies.clear()
            policy = self._policies[own] = self.policy.over({name.decode(): value.decode() for name, value in own})
        return policy

    @property
    def asking(self) -> bool:
        """A start request is under way."""
        return self._in_flight

    def demand(self) -> int:
        """How many claims the consumer could take now, whatever room the peer has."""
        raise NotImplementedError

    def take_in(self, contexts: Sequence[Context]) -> None:
        """Claims have come: run them, or hand them to whoever waits."""
        raise NotImplementedError

    # What gives it reason to ask

    def look(self) -> None:
        """There may be work: joined, woken up, resubscribed, seen by a scan."""
        if self.quiet:
            return
        self._wants = True
        if self._in_flight:
            self._again = True
        else:
            self.claim()

    def wake(self) -> None:
        """A message says that there is work. It is owed until a start request has been sent: there may be no room for it any
        more, because another queue took it, or we are on the way out. Then it goes on to the next hungry worker.
        """
        self._owes = True
        self.look()
        self.pass_on()

    def pass_on(self) -> None:
        """Hand on a wake-up that there is no room for."""
        if self._owes and not self._in_flight and self._live() and (self.quiet or self._room() <= 0):
            self._ask(0)

    # Asking

    def _live(self) -> bool:
        return self.in_fence and self.registration is not None and not self.registration.dead

    def _room(self) -> int:
        return min(self._capacity.room, self.demand(), MAX_ITEMS)

    def claim(self) -> None:
        """Ask for as many tasks as there is room for, if there is reason to."""
        if self._wants and not self._in_flight and not self.quiet and self._live():
            room = self._room()
            if room > 0:
                self._ask(room)

    def _ask(self, wanted: int) -> None:
        registration = self.registration
        assert registration is not None
        self._in_flight = True
        self._again = self._owes = False
        self._reserved = wanted
        self._capacity.reserve(wanted)
        call = ops.start_tasks(self.keys, registration.worker, registration.next_number(), wanted)

        def answered(started: Started | None, failure: Exception | None) -> None:
            self._answered(registration, started, failure)

        self._membership.link.post(call, answered, owner=registration)

    def _answered(self, registration: Registration, started: Started | None, failure: Exception | None) -> None:
        """The reply is here; believe it now, or when the next beat says that we live."""
        if started is not None and started.entries and not self._membership.beat_is_fresh():
            self._membership.after_beat(registration, lambda: self._started(registration, started, failure))
        else:
            self._started(registration, started, failure)

    def _started(self, registration: Registration, started: Started | None, failure: Exception | None) -> None:
        self._in_flight = False
        self._capacity.reserve(-self._reserved)
        wanted, self._reserved = self._reserved, 0
        self.idle.set()
        if registration.dead or registration is not self.registration or self.hurry.is_set():
            self._capacity.offer()  # not ours, or on the way out: what was claimed goes back with stop_work
            return
        if started is None:
            self._refused(failure)
            return
        if started.word == "not_serving":
            self._membership.lost(registration, f"it stands no longer in the fence of queue {self.name!r}")
            return
        if wanted:
            self._wants = self._again or started.word in {"ok", "late"}
        contexts = [
            self.new_context(registration, started.first + i, entry)
            for i, entry in enumerate(started.entries)
            if entry is not None
        ]
        if contexts:
            self._capacity.take(len(contexts))
            for context in contexts:
                self.running[context.fence] = context
            self.take_in(contexts)
        if self.hinted:
            self.hinted = False
            self._membership.check_marks(self)
        self._capacity.offer()

    def new_context(self, registration: Registration, fence: int, entry: object) -> Context:
        """One claim as its consumer sees it."""
        return Context(self, registration, fence, entry)

    def _refused(self, failure: Exception | None) -> None:
        """The server will not do it (a key of a wrong type, say); the next scan tries again."""
        self._wants = False
        if not isinstance(failure, ClaimLost):
            logger.error("start_tasks: queue %r: %s", self.name, failure)
        self._capacity.offer()

    # What runs

    def says(self, context: Context) -> None:
        """A run said how far it is; from any thread."""
        self._membership.says(context)

    def extends(self, context: Context, seconds: float) -> None:
        """A run asks for `seconds` from now on; from any thread."""
        self._membership.extends(context, seconds)

    # Ending

    def ended(self, context: Context) -> None:
        """The claim is out of our hands (settled or lost): its room is free."""
        if self.running.pop(context.fence, None) is not None:
            self._capacity.take(-1)
            if not self.running:
                self.idle.set()

    def cancel_running(self, reason: CancelReason) -> None:
        """Cancel all that runs here."""
        for context in tuple(self.running.values()):
            context._cancel(reason)

    async def wait_idle(self) -> None:
        """Until nothing runs here, nor will: an answer that comes when we are in a hurry is not taken in."""
        while self.running or (self._in_flight and not self.hurry.is_set()):
            self.idle = trio.Event()
            await self.idle.wait()


class HandlerStation(Station):
    """A queue whose tasks run in slots."""

    def __init__(
        self,
        keys: QueueKeys,
        membership: Membership,
        capacity: Capacity,
        policy: Policy,
        handler: Handler,
        concurrency: int | None,
        run: Callable[[Context], None],
    ) -> None:
        super().__init__(keys, membership, capacity, policy)
        self.handler = handler
        self._limit = concurrency
        self._run = run

    def demand(self) -> int:
        return MAX_ITEMS if self._limit is None else self._limit - len(self.running)

    def take_in(self, contexts: Sequence[Context]) -> None:
        for context in contexts:
            self._run(context)
