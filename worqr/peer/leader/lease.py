"""`Lease`: the leader's lease, as this peer holds it, or sees it in the hands of another.

The heartbeat asks for the lease. The peer with the lease leads until it expires, by CLOCK_BOOTTIME. What is done while it lasts
is in `leader`.
"""

from __future__ import annotations

import time

from trio_util import RepeatedEvent

from worqr.link import boottime
from worqr.peer.leader.failure_detector import LeaseWatch


class Lease:
    """`may_request` and `stale` are called in the heartbeat thread; all else is changed in the loop."""

    def __init__(self) -> None:
        self._until = 0.0
        self._declined_until = 0.0
        self._watch = LeaseWatch()
        self._taken = RepeatedEvent()

    @property
    def held(self) -> bool:
        """This peer leads."""
        return boottime() < self._until

    @property
    def seen(self) -> tuple[str, float]:
        """The lease that the last heartbeat showed, and since when it is unchanged, by ``time.monotonic()``."""
        lease, since, _ = self._watch.seen
        return lease, since

    async def wait_held(self) -> None:
        """Wait until this peer leads."""
        while not self.held:
            await self._taken.wait()

    def observe(self, lease: str) -> None:
        """A heartbeat's reply named this lease, ours or another's."""
        self._watch.observe(lease, time.monotonic())

    def stale(self) -> str:
        """Return the lease to take from its holder, which does not renew it; '' for none."""
        return self._watch.stale(time.monotonic())

    @property
    def may_request(self) -> bool:
        """False for a while after this peer has given it up."""
        return time.monotonic() >= self._declined_until

    def take(self, until: float) -> bool:
        """The lease is ours until then. Return True if it was not before."""
        new, self._until = not self.held, until
        if new:
            self._taken.set()
        return new

    def give_up(self, seconds: float) -> None:
        """Let another peer lead, and do not ask for the lease for that many seconds."""
        self._until, self._declined_until = 0.0, time.monotonic() + seconds
