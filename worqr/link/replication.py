"""Answered requests that wait until enough replicas have their writes. No I/O; the driver's loop uses it.

Here: the time of each WAIT, the requests that its reply satisfies, and the requests that have waited too long. Not here: sockets.

WAIT counts the replicas that have all writes of its own connection. So it is sent behind a batch on the same connection, once
for all requests of the batch; it does not work inside a script. While WAIT runs, all other requests on that connection wait.
So its timeout is one short slice of time: usually the replicas confirm within one round trip.

If they do not, the next WAIT is sent after a pause in which other requests are sent, with a longer slice. In a steady stream
of writes, the confirmation must come within one slice. A replica that is up to 0.1 s behind is still counted. A missing
replica delays other requests by at most 0.1 s at a time.

An answered request keeps its number, and the server its reply. After a lost connection the request is sent again: the stored
reply comes back with a fresh write. If the new server is a replica that was promoted without the reply, it executes the
request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from worqr.errors import NotReplicated
from worqr.link.request import Request

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

    __slots__ = ("_reached", "_slice", "not_before", "waiting")

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
