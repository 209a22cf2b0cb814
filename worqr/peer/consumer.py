"""Claiming: a `Station` connects a peer with one queue. It requests tasks when units are free, and hands them to handlers.

Each queue has one start request at a time; its units are reserved while it is under way. A station *wants* (should request as
soon as units are free) from the moment something indicates tasks: it joined, was woken, scanned or resubscribed, or the last
reply left tasks behind. It stops wanting when a reply comes back short: the same script has then registered the worker as
waiting. A wake-up during a request is remembered; a wake-up without a free unit is passed on to another worker.

A reply is used only while our last acknowledged heartbeat is younger than the keepalive. A process that was frozen may wake up
with claims that were reassigned meanwhile.
"""

# The private fields of Context are hidden from users, not from its neighbours.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextvars import Context as Variables
from contextvars import copy_context
from math import inf
from time import monotonic
from typing import TYPE_CHECKING

import trio

from worqr import ops
from worqr.errors import ClaimLost
from worqr.keys import QueueKeys
from worqr.log_events import emit
from worqr.ops import MAX_ITEMS, Started
from worqr.peer.context import Context
from worqr.peer.running import Handler
from worqr.peer.scheduler import BRIEF, Capacity, Pool
from worqr.peer.task_log import Began, note_started
from worqr.peer.task_log import logger as task_log
from worqr.policy import Policy
from worqr.records import CancelReason

if TYPE_CHECKING:
    from worqr.link import Subscription
    from worqr.peer.session import Membership, Registration

logger: logging.Logger = logging.getLogger(__name__)

PolicyFields = tuple[tuple[bytes, bytes], ...]
REFUSED = "queue %(queue)r: the server refuses to hand out tasks; the next scan tries again: %(error)s"
MANY_POLICIES = 100
"""Policies of jobs that are cached. If all jobs of a queue have different fields, no cached policy is used twice."""


def policies_over(policy: Policy) -> Callable[[PolicyFields], Policy]:
    """Return a factory of policies for jobs with policy fields of their own. Most jobs of a queue have the same fields, so each
    policy is made once.
    """
    made: dict[PolicyFields, Policy] = {}

    def with_own(own: PolicyFields) -> Policy:
        if (known := made.get(own)) is None:
            if len(made) >= MANY_POLICIES:
                made.clear()
            known = made[own] = policy.over({name.decode(): value.decode() for name, value in own})
        return known

    return with_own


class Station:
    """One queue that this peer serves, or one shard of it. Subclasses define how many claims they want, and handle the claims.

    Set once: `keys`, `policy`, `variables`, `handler`, and the values that `Capacity` shares units out by: `size`, `priority`,
    `pool`; `limit`, which is the handler's own, and which all shards of its queue share.
    Changed by `Capacity`: `turn`, `overtaken`. Changed only in the loop: everything else. `workers_waiting` is how many workers
    waited for tasks of this queue when this one began to wait; infinity: the queue is paused.
    """

    handler: Handler
    begun: dict[int, Began]
    state: object = None
    turn: float = 0.0
    overtaken: int = 0
    brief: bool = False
    looks_for_strays: bool = False
    compared_at: int = 0
    mapped_at: int = 0
    workers_waiting: float = 0

    def __init__(
        self,
        keys: QueueKeys,
        membership: Membership,
        capacity: Capacity,
        policy: Policy,
        *,
        size: int = 1,
        priority: float = 100,
        pool: Pool | None = None,
        limit: Pool | None = None,
    ) -> None:
        """Raise UsageError if a run of `size` units would never fit."""
        capacity.check_fits(keys.shown, size)
        self.size: int = size
        self.priority: float = priority
        self.pool: Pool | None = pool
        self.limit: Pool | None = limit
        self.keys: QueueKeys = keys
        self.policy: Policy = policy
        self.variables: Variables = copy_context()
        self.registration: Registration | None = None
        self.subscription: Subscription | None = None
        self.running: dict[int, Context] = {}
        self.turned_away: list[int] = []
        self.entered = self.in_fence = self.quiet = False
        self.hinted: bool = False
        self.listening = False
        self.unwinding = False
        self.entering: trio.CancelScope = trio.CancelScope()
        self.left: trio.Event = trio.Event()
        self.idle: trio.Event = trio.Event()
        self.hurry: trio.Event = trio.Event()
        self._membership = membership
        self._capacity = capacity
        self.policy_with: Callable[[PolicyFields], Policy] = policies_over(policy)
        self._wants = self._again = self._in_flight = False
        self.owes: bool = False
        self._reserved = 0
        self._busy_since = 0.0
        self._given_away: dict[int, bool] = {}

    @property
    def name(self) -> str:
        """The name of the queue, or of this shard of it, in the registry."""
        return self.keys.name

    @property
    def queue(self) -> str:
        """The queue's name."""
        return self.keys.shown

    @property
    def mark(self) -> str:
        """The suffix of the ids that are generated there."""
        return self.keys.mark

    @property
    def asking(self) -> bool:
        """A start request is under way."""
        return self._in_flight

    @property
    def held(self) -> int:
        """How many claims hold or reserve units; a stuck run whose slot was given away does not count."""
        return len(self.running) - len(self._given_away) + self._reserved

    def demand(self) -> int:
        """How many claims the consumer could take now, regardless of free units."""
        raise NotImplementedError

    def more(self) -> int:
        """How many more claims it would take if units were free, beyond those requested; 0: it has no reason to request."""
        if not self._wants or self.quiet or not self._live() or self.name in self._membership.settles.crowded:
            return 0
        return min(self.demand(), MAX_ITEMS) - self._reserved

    def take_in(self, contexts: Sequence[Context]) -> None:
        """Accept new claims: run them, or pass them to a call that waits."""
        raise NotImplementedError

    # Reasons to request tasks

    def look(self) -> None:
        """There may be tasks: joined, woken up, resubscribed, or found by a scan."""
        if self.quiet:
            return
        if not self._wants:
            self._wants = True
            self._capacity.begin_wanting(self)
        if self._in_flight:
            self._again = True
        else:
            self.claim()

    def wake(self) -> None:
        """Handle a wake-up. It counts as pending until a start request has been sent: the free units may be gone by then, because
        another queue took them, or because the peer is leaving. Then it is passed on to the next waiting worker.
        """
        self.owes = True
        self.look()
        self.pass_on()

    def pass_on(self) -> None:
        """Pass on a wake-up for which no unit is free: the free units were offered just now."""
        if self.owes and not self._in_flight and self._live():
            self.ask(0)

    # Requesting tasks

    def _live(self) -> bool:
        return self.in_fence and self.registration is not None and not self.registration.dead

    def claim(self) -> None:
        """Request as many tasks as fit, if there is a reason to, and if it is our turn."""
        self._capacity.offer()

    def ask(self, wanted: int) -> None:
        """Request `wanted` tasks, and reserve their units from now on; 0: request none, which passes a wake-up on."""
        registration = self.registration
        assert registration is not None
        self._in_flight = True
        self._again = self.owes = False
        self._reserve(wanted)
        call = ops.start_tasks(self.keys, registration.worker, registration.next_number(), wanted)

        def answered(started: Started | None, failure: Exception | None) -> None:
            self._answered(registration, started, failure)

        self._membership.link.post(call, answered, owner=registration)

    def _reserve(self, wanted: int) -> None:
        """`n` claims are being requested now; 0: none any more."""
        more, self._reserved = wanted - self._reserved, wanted
        self._capacity.reserve(more * self.size)
        if self.pool is not None:
            self.pool.taken += more
        if self.limit is not None:
            self.limit.taken += more

    def _take(self, n: int) -> None:
        """`n` claims are held from now on."""
        if not self.running:
            self._busy_since = monotonic()
        self.brief = False
        units = n * self.size
        self.turn += units / self.priority
        self._capacity.take(units)
        if self.pool is not None:
            self.pool.taken += n
        if self.limit is not None:
            self.limit.taken += n

    def _answered(self, registration: Registration, started: Started | None, failure: Exception | None) -> None:
        """Use the reply now, or when the next heartbeat confirms that we are registered."""
        if started is not None and started.entries and not self._membership.beat_is_fresh():
            self._membership.after_beat(registration, lambda: self._started(registration, started, failure))
        else:
            self._started(registration, started, failure)

    def _started(self, registration: Registration, started: Started | None, failure: Exception | None) -> None:
        self._in_flight = False
        wanted = self._reserved
        self._reserve(0)
        self.idle.set()
        if registration.dead or registration is not self.registration or self.hurry.is_set():
            if started is not None and not registration.dead:  # it returns with the queue, or alone if that was left
                came = range(started.first, started.first + len(started.entries))
                if self.left.is_set():
                    self._membership.settles.give_back(self.keys, registration, came)
                else:
                    self.turned_away += came
            self._capacity.offer()
            return
        if started is None:
            self._refused(failure)
            return
        if started.word == "not_serving":
            self._membership.lost(registration, f"it was removed from the workers of queue {self.queue!r}")
            return
        self.workers_waiting = inf if started.word == "paused" else started.hungry
        if wanted:
            self._wants = self._again or started.word in {"ok", "late"}
        contexts = [
            self.new_context(registration, started.first + i, entry)
            for i, entry in enumerate(started.entries)
            if entry is not None
        ]
        if contexts:
            self._take(len(contexts))
            for context in contexts:
                self.running[context.fence] = context
            self.take_in(contexts)
        if self.hinted:
            self.hinted = False
            self._membership.check_marks(self)
        self._capacity.offer()

    def new_context(self, registration: Registration, fence: int, entry: object) -> Context:
        """One claim in the form that its consumer takes."""
        return Context(self, registration, fence, entry)

    def _refused(self, failure: Exception | None) -> None:
        """The server refused the request (for a key of a wrong type, for example); the next scan tries again."""
        self._wants = False
        if not isinstance(failure, ClaimLost):
            emit(logger, "start_tasks", REFUSED, queue=self.queue, error=str(failure))
        self._capacity.offer()

    # Running tasks

    def says(self, context: Context) -> None:
        """A run reported its progress; from any thread."""
        self._membership.says(context)

    def extends(self, context: Context, seconds: float) -> None:
        """A run asks for a deadline `seconds` from now; from any thread."""
        self._membership.extends(context, seconds)

    # Ending

    def ended(self, context: Context) -> None:
        """The claim was settled or lost: its units are free, unless they were given away before."""
        if self.running.pop(context.fence, None) is None:
            return
        place_given = self._given_away.pop(context.fence, None) if self._given_away else None
        if place_given is None:
            self._capacity.used -= self.size
            if self.limit is not None:
                self.limit.taken -= 1
        if self.pool is not None and not place_given:
            self.pool.taken -= 1
        if not self.running:
            self.brief = monotonic() - self._busy_since < BRIEF
            self.idle.set()

    def give_slot_away(self, context: Context, *, place: bool = False) -> None:
        """Give the units of a stuck run, and its place under the handler's limit, to other runs. May be called twice.

        The claim stays. `ended` must still be called for it, and then frees only what is left.

        Args:
            context: a run of this station; a run that has ended is ignored.
            place: free its place in the pool too; only if the thread or process of that place is really free again.
        """
        fence = context.fence
        if fence not in self.running:
            return
        if fence not in self._given_away:
            self._given_away[fence] = False
            self._capacity.used -= self.size
            if self.limit is not None:
                self.limit.taken -= 1
        if place and not self._given_away[fence]:
            self._given_away[fence] = True
            if self.pool is not None:
                self.pool.taken -= 1
        self._capacity.offer_soon()

    def cancel_running(self, reason: CancelReason) -> None:
        """Cancel all runs of this station."""
        for context in tuple(self.running.values()):
            context._cancel(reason)

    async def wait_idle(self) -> None:
        """Wait until nothing runs here, nor will: a reply that arrives while we hurry is not used."""
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
        limit: Pool | None,
        run: Callable[[Context], None],
        *,
        size: int = 1,
        priority: float = 100,
        pool: Pool | None = None,
    ) -> None:
        super().__init__(keys, membership, capacity, policy, size=size, priority=priority, pool=pool, limit=limit)
        self.handler = handler
        self.begun: dict[int, Began] = {}  # filled while DEBUG is logged
        self._run = run

    def demand(self) -> int:
        return MAX_ITEMS if self.limit is None else self.limit.room + self._reserved

    def take_in(self, contexts: Sequence[Context]) -> None:
        if task_log.isEnabledFor(logging.DEBUG):
            note_started(contexts)
        for context in contexts:
            self._run(context)
