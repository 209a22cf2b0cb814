"""The requests that are not answered yet, in the order in which they will be sent. Pure; used by the I/O thread alone.

Here: what goes into the next batch, who has waited too long, who is put back after a loss. Not here: sockets,
threads, logs.

The life of a request: `add` -> `take` (into `in_flight`) -> `close`, with `put_back` after a loss or a refusal that
asks for another try. Put back means to the front, in the old order, so that the server sees requests in the order in
which they were made. Guilt: a request that was in flight when two healthy connections were lost travels alone from
then on, so that the next loss names it. One that loses three alone fails, or, if it has an owner, becomes an outcast
that is tried now and then, behind the others.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable

from worqr.link.replication import Replication
from worqr.link.request import Merged, Numbers, Request

MAX_CALLS = 512  # a batch: more would not make it cheaper, and all its callers wait for its end
MAX_BYTES = 8 * 1024 * 1024
MAX_ITEMS = 1000  # in one merged request
SUSPECT_AFTER = 2  # connections lost in company
GUILTY_AFTER = 3  # connections lost alone
_OUTCAST_PAUSE = 1.0  # seconds; doubles with each further loss
_OUTCAST_PAUSE_MAX = 30.0
_SCAN_PAUSE = 0.05  # seconds: how late an expiry may be noticed; keeps thousands of deadlines from costing a scan each


class Backlog:
    """Every unanswered request is in exactly one of `pending`, `in_flight` and `outcasts`; `replication` has those who were
    answered, and wait for replicas.
    """

    __slots__ = ("_next_scan", "in_flight", "numbers", "outcasts", "pending", "replication")

    def __init__(self, numbers: Numbers | None = None) -> None:
        self.pending: deque[Request] = deque()
        self.in_flight: list[Request] = []
        self.outcasts: list[Request] = []
        self.replication: Replication = Replication()
        self.numbers: Numbers = numbers or Numbers()
        self._next_scan = math.inf

    def add(self, request: Request) -> None:
        self.pending.append(request)
        if request.deadline < self._next_scan:
            self._next_scan = request.deadline

    def take(self) -> list[Request]:
        """The next batch, now in flight: 512 calls, 8 MiB, or one call that is larger or under suspicion."""
        batch: list[Request] = []
        size = 0
        pending = self.pending
        while pending and len(batch) < MAX_CALLS:
            request = pending[0]
            if request.settled or request.abandoned or (type(request) is Merged and request.is_unwanted()):
                self.close(pending.popleft())
                continue
            size += request.call.size
            alone = request.losses >= SUSPECT_AFTER
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
        """Nobody waits."""
        return not (self.pending or self.in_flight or self.outcasts or self.replication.waiting)

    def is_usual(self) -> bool:
        """Nobody is to be tried again, or asked for, at some moment."""
        return not (self.outcasts or self.replication.waiting)

    def is_busy(self) -> bool:
        """Somebody reads replies at this moment."""
        return bool(self.in_flight) or self.replication.asking

    def close(self, request: Request) -> None:
        """It needs no answer any more: its number is free to fall below the lowest one."""
        if request.number:
            self.numbers.done(request.call.base, request.number)
            request.number = 0

    def put_back(self, requests: Iterable[Request]) -> None:
        """The batch is over: these go to the front, in their order. `take` will drop those that nobody waits for."""
        self.in_flight = []
        self.pending.extendleft(reversed(list(requests)))

    def blame(self, unanswered: list[Request], now: float) -> list[Request]:
        """A healthy connection was lost with these on their way. Put them back; answers the guilty ones, which fail."""
        alone = len(self.in_flight) == 1
        failed: list[Request] = []
        for request in unanswered:
            request.losses += 1
            request.lost_alone += alone
            if request.lost_alone >= GUILTY_AFTER and not request.is_unwanted():
                if request.owner is None and not isinstance(request, Merged):
                    request.settled = True
                    failed.append(request)
                else:
                    pause = _OUTCAST_PAUSE * 2 ** min(request.lost_alone - GUILTY_AFTER, 10)
                    request.not_before = now + min(pause, _OUTCAST_PAUSE_MAX)
                    self.outcasts.append(request)
        self.put_back(r for r in unanswered if r not in self.outcasts)
        return failed

    def set_aside(self, requests: Iterable[Request], until: float) -> None:
        """Of the present batch: they shall not be tried again before."""
        for request in requests:
            request.not_before = until
            self.outcasts.append(request)

    def take_out(self, belongs: Callable[[Request], bool]) -> list[Request]:
        """Give up those that wait and do not belong here, in their order; what is in flight stays, and the guilty until their
        pause is over.
        """
        answered = self.replication.withdraw(lambda request: not belongs(request))
        aside = [request for request in self.outcasts if request.lost_alone < GUILTY_AFTER and not belongs(request)]
        strangers = [*answered, *aside, *(request for request in self.pending if not belongs(request))]
        if strangers:
            gone = set(map(id, strangers))
            self.pending = deque(request for request in self.pending if id(request) not in gone)
            self.outcasts = [request for request in self.outcasts if id(request) not in gone]
        return strangers

    def readmit(self, now: float) -> float:
        """Outcasts whose pause is over go behind the others; answers when the next one's is."""
        if not self.outcasts:
            return math.inf
        self.pending.extend(r for r in self.outcasts if r.not_before <= now)
        self.outcasts = [r for r in self.outcasts if r.not_before > now]
        return min((r.not_before for r in self.outcasts), default=math.inf)

    def next_scan(self) -> float:
        """When somebody may have waited too long, or WAIT is to be asked again."""
        replication = self.replication
        return min(self._next_scan, replication.not_before) if replication.waiting else self._next_scan

    def overdue(self, now: float, *, owners: bool = False) -> tuple[list[Request], list[Request]]:
        """Those whose patience ended, and those whose owner is dead; looks only when one may be due, or when told to.

        They are settled, and taken out of what waits. In flight they stay, to be skipped when their reply comes.

        Args:
            now: on the monotonic clock.
            owners: look in any case; an owner may have died meanwhile.
        """
        if now < self._next_scan and not owners:
            return [], []
        late: list[Request] = []
        orphans: list[Request] = []
        next_deadline, dropped = math.inf, False
        for request in (*self.in_flight, *self.pending, *self.outcasts):
            if request.settled:
                continue
            if request.abandoned:
                request.settled = dropped = True
            elif request.owner is not None and request.owner.dead:
                orphans.append(request)
            elif request.deadline <= now:
                late.append(request)
            elif request.deadline < next_deadline:
                next_deadline = request.deadline
        self._next_scan = max(next_deadline, now + _SCAN_PAUSE)
        for request in (*late, *orphans):
            request.settled = dropped = True
        if dropped:
            self._forget_settled()
        return late, orphans

    def _forget_settled(self) -> None:
        for request in (*self.pending, *self.outcasts):
            if request.settled:
                self.close(request)
        self.pending = deque(r for r in self.pending if not r.settled)
        self.outcasts = [r for r in self.outcasts if not r.settled]

    def clear(self) -> list[Request]:
        """Everything that is still unanswered, for the end of the link."""
        answered = self.replication.withdraw()
        everything = [r for r in (*answered, *self.in_flight, *self.pending, *self.outcasts) if not r.settled]
        self.pending.clear()
        self.in_flight, self.outcasts = [], []
        for request in everything:
            request.settled = True
        return everything


def _merged(batch: list[Request]) -> list[Request]:
    """The batch with those that may be joined made one: a script per task is most of what a small task costs.

    Those of one base keep their order; between queues there is none to keep.
    """
    groups: list[list[Request]] = []
    last: dict[str, list[Request]] = {}  # of each base, while it may grow
    items: dict[str, int] = {}
    for request in batch:
        base = request.call.base
        merge = None if request.written else request.call.merge
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
    return [Merged(group) if len(group) > 1 else group[0] for group in groups]


def _alike(one: Request, other: Request) -> bool:
    a, b = one.call, other.call
    if one.patience != other.patience or a.replicas != b.replicas:
        return False
    return a.merge is not None and b.merge is not None and a.merge.join is b.merge.join
