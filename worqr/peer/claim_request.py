"""`ClaimRequest`: whether a consumer should request tasks, whether a request is under way, and for how many tasks.

Pure: no I/O and no clock. `consumer` sends the requests and reads the replies. `scheduler` decides which consumer may send one.
"""

from __future__ import annotations

from enum import Enum
from typing import Final


class RequestState(Enum):
    """The states of a `ClaimRequest`; its docstring has the table."""

    IDLE = "idle"
    WANTED = "wanted"
    IN_FLIGHT = "in flight"
    IN_FLIGHT_AGAIN = "in flight, again afterwards"


_IDLE: Final = RequestState.IDLE
_WANTED: Final = RequestState.WANTED
_IN_FLIGHT: Final = RequestState.IN_FLIGHT
_IN_FLIGHT_AGAIN: Final = RequestState.IN_FLIGHT_AGAIN


class ClaimRequest:
    """At most one start request at a time. A request for 0 tasks forwards a wake-up to another worker.

    ================  ================  =======================  ==============  ==================  ===============
    state             `want`            `send(n)`, `send(0)`     `replied`       `refused`           `discarded`
    ================  ================  =======================  ==============  ==================  ===============
    IDLE              WANTED            -, IN_FLIGHT             -               -                   -
    WANTED            WANTED            IN_FLIGHT, ..._AGAIN     -               -                   -
    IN_FLIGHT (n)     IN_FLIGHT_AGAIN   -                        WANTED if more  IDLE                WANTED
    IN_FLIGHT (0)     IN_FLIGHT_AGAIN   -                        IDLE            IDLE                IDLE
    IN_FLIGHT_AGAIN   IN_FLIGHT_AGAIN   -                        WANTED          IDLE                WANTED
    ================  ================  =======================  ==============  ==================  ===============

    "more": the reply left tasks behind, or the server did not say so. If not, the same script has registered the worker as
    waiting, and a wake-up will come. A wake-up is pending from `wake` until the next `send`, in every state.

    Attributes:
        state: see the table.
        reserved: how many tasks the request that is under way is for.
        wakeup_pending: a wake-up arrived for tasks that were not requested yet.
        recheck_on_reply: check for cancelled and stray claims when the reply has arrived.
        workers_waiting: how many workers waited for tasks of this queue when the last reply was made; infinity: it is paused.
    """

    __slots__ = ("recheck_on_reply", "reserved", "state", "wakeup_pending", "workers_waiting")

    def __init__(self) -> None:
        self.state: RequestState = _IDLE
        self.reserved: int = 0
        self.wakeup_pending: bool = False
        self.recheck_on_reply: bool = False
        self.workers_waiting: float = 0

    @property
    def in_flight(self) -> bool:
        """A request is under way."""
        return self.state is _IN_FLIGHT or self.state is _IN_FLIGHT_AGAIN

    @property
    def is_wanted(self) -> bool:
        """There is a reason to request tasks, or tasks are being requested."""
        return self.reserved > 0 or self.state is _WANTED or self.state is _IN_FLIGHT_AGAIN

    def want(self) -> bool:
        """Note that there may be tasks. Return True if there was no reason to request any before."""
        if self.state is _IDLE:
            self.state = _WANTED
            return True
        if self.state is _IN_FLIGHT:
            self.state = _IN_FLIGHT_AGAIN
            return not self.reserved
        return False

    def wake(self) -> None:
        """Note a wake-up. It is pending until a request has been sent."""
        self.wakeup_pending = True

    def send(self, wanted: int) -> None:
        """Note that a request for `wanted` tasks is sent now. 0 only forwards a wake-up, and does not end the reason to request
        tasks.
        """
        self.state = _IN_FLIGHT_AGAIN if not wanted and self.state is _WANTED else _IN_FLIGHT
        self.reserved = wanted
        self.wakeup_pending = False

    def replied(self, more: bool, workers_waiting: float) -> None:
        """Note that the reply is used. With `more`, request again, because the reply left tasks behind."""
        again = self.state is _IN_FLIGHT_AGAIN or (more and self.reserved > 0)
        self.state = _WANTED if again else _IDLE
        self.reserved = 0
        self.workers_waiting = workers_waiting

    def refused(self) -> None:
        """Note that the server refused the request. The next scan of the leader is a new reason to request tasks."""
        self.state = _IDLE
        self.reserved = 0

    def discarded(self) -> None:
        """Note that the reply is not used, because the registration is over or the queue is being left. The reason to request
        tasks stays.
        """
        self.state = _WANTED if self.is_wanted else _IDLE
        self.reserved = 0

    def recheck(self) -> None:
        """Check the claims again when the reply under way has arrived: some of them may be cancelled or strays."""
        self.recheck_on_reply = True

    def take_recheck(self) -> bool:
        """Return True, once, if `recheck` was called."""
        recheck, self.recheck_on_reply = self.recheck_on_reply, False
        return recheck
