"""Requests that are answered, and wait until enough replicas have what they wrote. Pure; used by the I/O thread alone.

Here: when WAIT is asked and how long it may take, whom its answer satisfies, who has waited too long. Not here: sockets.

WAIT counts the replicas that have everything its own connection wrote before it, so it goes behind a batch on the same
connection, once for all requests of it; inside a script it does not work. While it waits, everybody else on that connection
waits with it. So it is given a short slice of time: as a rule the replicas answer within one round trip. If they do not, it
is asked again after a pause in which the others have their way, with a longer slice, because in a steady stream of writes an
answer must come within one slice. A replica that is up to 0.1 s behind is found to be there, and one that is gone holds the
others up for 0.1 s at a time at most.

An answered request keeps its number, and the server its reply: when the connection is lost it is sent again, and the stored
reply comes back with a fresh write, or, from a replica that was promoted without it, it is stored there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from worqr.errors import NotReplicated
from worqr.link.request import Request

REPLICAS_WAIT = 2.0
"""Seconds from the answer on that a request waits for its replicas, if its caller's patience lasts."""
FIRST_SLICE = 0.02
LONGEST_SLICE = 0.1
_PAUSE = 2.0  # slices that the others have the connection for themselves between two tries
_STORED = "what was sent is stored on the primary all the same, and only a failover can lose it"


class Replication:
    """Who waits for replicas.

    Attributes:
        waiting: answered requests, each with the monotonic time at which it gives up.
        not_before: when WAIT may be asked again; -inf: at once.
        asking: its answer is being read, and nothing else.
    """

    __slots__ = ("_reached", "_slice", "asking", "not_before", "waiting")

    def __init__(self) -> None:
        self.waiting: list[tuple[Request, float]] = []
        self.not_before: float = -math.inf
        self.asking: bool = False
        self._slice = FIRST_SLICE
        self._reached = 0

    def add(self, requests: Iterable[Request], now: float) -> None:
        """These were answered."""
        self.waiting += [(request, min(now + REPLICAS_WAIT, request.deadline)) for request in requests]

    def question(self, wanted: int, now: float) -> tuple[str, int, int] | None:
        """The command that asks for those who wait, and for a batch in which `wanted` is the most; None: not now."""
        if now < self.not_before:
            return None
        most = max((request.call.replicas for request, _ in self.waiting), default=0)
        most = max(most, wanted)
        return ("WAIT", most, round(self._slice * 1000)) if most else None

    def answered(self, reached: int, took: float, now: float) -> list[Request]:
        """So many replicas have everything, as was found out within `took` seconds; who has what it wants."""
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
        """The server will not tell: nobody needs to wait. They get their error here."""
        failed = [request for request, _ in self.waiting]
        text = f"the server refused to say which replicas have it: {why} (its user needs +wait); {_STORED}"
        for request in failed:
            request.error = NotReplicated(text, wanted=request.call.replicas)
            request.error.__cause__ = why
        self._forget()
        return failed

    def overdue(self, now: float) -> list[Request]:
        """Those who have waited too long, with their error, and those for whom nobody waits any more."""
        late = [request for request, end in self.waiting if end <= now or request.is_unwanted()]
        if late:
            self.waiting = [each for each in self.waiting if each[1] > now and not each[0].is_unwanted()]
            for request in late:
                wanted = request.call.replicas
                text = f"{self._reached} of {wanted} replicas had it in time; {_STORED}"
                request.error = NotReplicated(text, wanted=wanted, reached=self._reached)
            if not self.waiting:
                self._forget()
        return late

    def withdraw(self, leaves: Callable[[Request], bool] | None = None) -> list[Request]:
        """Those who cannot wait here any more, by default all because the connection is lost; to be sent again, in this order."""
        again = [request for request, _ in self.waiting if leaves is None or leaves(request)]
        self.waiting = [each for each in self.waiting if leaves is not None and not leaves(each[0])]
        for request in again:
            request.losses = request.losses or 1  # an earlier copy of it was executed
        if not self.waiting:
            self._forget()
        return again

    def _forget(self) -> None:
        """Nobody waits any more."""
        self.waiting = []
        self.not_before = -math.inf
        self._slice = FIRST_SLICE
        self._reached = 0
