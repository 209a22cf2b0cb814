"""The unanswered requests of one server, in the order in which they will be sent. No I/O; the driver's loop uses it.

Here: the choice of the next batch, the requests that have waited too long, and the requests to resend. Not here: sockets,
waiting, logs.

`put_back` moves requests to the front in their old order. So the server sees requests in the order in which they were made.

Blame: a request that was in flight when two healthy connections were lost is then sent alone, so that the next loss
identifies it. A request that loses three connections alone fails. If it has an owner, it is quarantined instead: it is
tried now and then, behind the others.

Requests of one base (a queue, or the registry) are sent in the order in which they were added. While the slot of a base is
being moved, `set_aside` holds all requests of this base, including later ones; other bases continue. A worker's shutdown
depends on this order: its `stop_work` must not overtake the `finish_tasks` that was sent before. Quarantined requests are the
exception: later requests of their base overtake them. Otherwise a request that breaks every connection would block its queue
for ever.

A numbered request is not resent 50 minutes after it was first sent. The server may have forgotten the reply by then, and
would execute the request again. The clock also counts the time in which the machine sleeps. Settles and starts have no
numbers: they name claims and start requests, which the server keeps for as long as they matter.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable

from worqr.link.clocks import boottime
from worqr.link.driver import settle_all
from worqr.link.replication import Replication
from worqr.link.request import NEVER, SEND_AGAIN_WITHIN, MergedRequest, Request, SequenceNumbers

MAX_CALLS = 512  # a batch: more would not make it cheaper, and all its callers wait for its end
MAX_BYTES = 8 * 1024 * 1024
MAX_ITEMS = 1000  # in one merged request
SUSPECT_AFTER = 2  # connections lost together with other requests
GUILTY_AFTER = 3  # connections lost alone
_QUARANTINE_PAUSE = 1.0  # seconds; doubles with each further loss
_QUARANTINE_PAUSE_MAX = 30.0
_SCAN_PAUSE = 0.05  # seconds: how late an expiry may be noticed; keeps thousands of deadlines from costing a scan each


class Held:
    """The requests of one base, in their order. None of them is sent before `until`."""

    __slots__ = ("requests", "until")

    def __init__(self) -> None:
        self.requests: deque[Request] = deque()
        self.until: float = -math.inf


class RequestQueue:
    """The requests of one server.

    Every unsettled request is in exactly one state. The state is the collection that has the request:

    =============  ======================================  ==============================================================
    state          collection                              leads to
    =============  ======================================  ==============================================================
    QUEUED         `pending`                               IN_FLIGHT by `take`
    IN_FLIGHT      `in_flight`                             SETTLED; WAITING when it requires replicas; after a loss, or a
                                                           refusal that permits another try, QUEUED, HELD or QUARANTINED
    HELD           `held`, by base                         QUEUED by `release_due`, with all requests of the base
    QUARANTINED    `quarantined`                           QUEUED by `release_due`, behind the others
    WAITING        `replication.waiting`                   SETTLED; QUEUED when the connection is lost
    SETTLED        none: `Request.settled`                 -
    =============  ======================================  ==============================================================

    From every state, requests that have waited too long are settled. In flight they also stay in the batch, for their replies.
    """

    __slots__ = ("held", "in_flight", "next_deadline", "numbers", "pending", "quarantined", "replication", "too_old")

    def __init__(self, numbers: SequenceNumbers | None = None) -> None:
        self.pending: deque[Request] = deque()
        self.in_flight: list[Request] = []
        self.held: dict[str, Held] = {}  # by base
        self.quarantined: list[tuple[Request, float]] = []  # with the time of the next try
        self.too_old: list[Request] = []  # `take` does not send them again: they fail
        self.replication: Replication = Replication()
        self.numbers: SequenceNumbers = numbers or SequenceNumbers()
        self.next_deadline: float = math.inf  # when a request may have waited too long

    def add(self, request: Request) -> None:
        line = self._line(request) if self.held else self.pending
        line.append(request)
        if request.deadline < self.next_deadline:
            self.next_deadline = request.deadline

    def _line(self, request: Request) -> deque[Request]:
        """Return the queue for `request`: the held requests of its base, if there are any."""
        held = self.held.get(request.call.base)
        return self.pending if held is None else held.requests

    def take(self) -> list[Request]:
        """Return the next batch, now in flight: up to 512 calls or 8 MiB, or one call that is larger or under suspicion."""
        batch: list[Request] = []
        size = 0
        pending = self.pending
        while pending and len(batch) < MAX_CALLS:
            request = pending[0]
            if request.settled or request.abandoned or (type(request) is MergedRequest and request.is_unwanted()):
                self.numbers.drop(pending.popleft())
                continue
            if request.number and boottime() - request.written_at > SEND_AGAIN_WITHIN:
                self.too_old.append(pending.popleft())
                continue
            size += request.call.size
            alone = request.trouble is not None and request.trouble.losses >= SUSPECT_AFTER
            if batch and (size > MAX_BYTES or alone):
                break
            batch.append(pending.popleft())
            if alone:
                break
        if len(batch) > 1:
            batch = _merged(batch)
        self.in_flight = batch
        return batch

    def is_empty(self) -> bool:
        """Return True if there are no requests."""
        return not (self.pending or self.in_flight or self.held or self.quarantined or self.replication.waiting)

    def has_nothing_held(self) -> bool:
        """Return True if no request is held back, quarantined, or waiting for replicas."""
        return not (self.held or self.quarantined or self.replication.waiting)

    def bases(self) -> set[str]:
        """Return the bases of the requests that wait here or are in flight. Later requests may overtake those in quarantine."""
        return {request.call.base for request in (*self.in_flight, *self.pending)} | self.held.keys()

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
        alone = len(self.in_flight) == 1
        failed: list[Request] = []
        again: list[Request] = []
        for request in unanswered:
            lost_alone = request.count_loss(alone=alone)
            if lost_alone < GUILTY_AFTER or request.is_unwanted():
                again.append(request)
            elif request.owner is None and not isinstance(request, MergedRequest):
                request.settle()
                failed.append(request)
            else:
                pause = _QUARANTINE_PAUSE * 2 ** min(lost_alone - GUILTY_AFTER, 10)
                self.quarantined.append((request, now + min(pause, _QUARANTINE_PAUSE_MAX)))
        self.put_back(again)
        return failed

    def set_aside(self, bases: Iterable[str], until: float) -> None:
        """Send no requests of these bases before `until`. Call `put_back` first for requests of the present batch."""
        chosen = {base: self.held.setdefault(base, Held()) for base in bases}
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

        Requests in flight stay, and so do all later requests of the same base. Quarantined requests stay until their pause is
        over.
        """
        flying = {request.call.base for request in self.in_flight}

        def leaves(request: Request) -> bool:
            return request.call.base not in flying and not belongs(request)

        answered = self.replication.withdraw(lambda request: not belongs(request))
        waiting = [request for held in self.held.values() for request in held.requests]
        strangers = [*answered, *(request for request in (*waiting, *self.pending) if leaves(request))]
        if strangers:
            gone = set(map(id, strangers))
            self._keep(lambda request: id(request) not in gone)
        return strangers

    def _keep(self, wanted: Callable[[Request], bool]) -> None:
        """Keep only these requests among those that wait."""
        self.pending = deque(request for request in self.pending if wanted(request))
        self.quarantined = [each for each in self.quarantined if wanted(each[0])]
        for base, held in list(self.held.items()):
            held.requests = deque(request for request in held.requests if wanted(request))
            if not held.requests:
                del self.held[base]

    def release_due(self, now: float) -> None:
        """Move the requests whose pause is over behind the others."""
        for base, held in list(self.held.items()):
            if held.until <= now:
                self.pending.extend(held.requests)
                del self.held[base]
        for request, until in self.quarantined:
            if until <= now:
                self._line(request).append(request)
        self.quarantined = [each for each in self.quarantined if each[1] > now]

    def next_pause(self) -> float:
        """Return when the next pause ends: of a base that is held, of a request that is tried now and then, or of WAIT."""
        ends = (*(held.until for held in self.held.values()), *(until for _, until in self.quarantined))
        replication = self.replication.not_before if self.replication.waiting else math.inf
        return min(*ends, replication, math.inf)

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
        return [*held, *self.pending, *(request for request, _ in self.quarantined)]

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
        self.in_flight, self.quarantined = [], []
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
        base = request.call.base
        merge = request.call.merge if request.written_at == NEVER else None
        if merge is None:
            last.pop(base, None)
            groups.append([request])
            continue
        group = last.get(base)
        if group is not None and _alike(group[0], request) and items[base] + merge.items <= MAX_ITEMS:
            group.append(request)
            items[base] += merge.items
        else:
            group = last[base] = [request]
            items[base] = merge.items
            groups.append(group)
    return [MergedRequest(group) if len(group) > 1 else group[0] for group in groups]


def _alike(one: Request, other: Request) -> bool:
    a, b = one.call, other.call
    if one.patience != other.patience or a.replicas != b.replicas:
        return False
    return a.merge is not None and b.merge is not None and a.merge.join is b.merge.join
