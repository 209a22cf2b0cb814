"""`Lease`: the leader's lease, held by this peer or by another one.

The heartbeat requests the lease. The peer that holds it leads until it expires, by CLOCK_BOOTTIME. Not here: the chores of the
leader (`leader`).
"""

from __future__ import annotations

import time

from trio_util import RepeatedEvent

from worqr.link import boottime
from worqr.peer.leader.failure_detector import LeaseWatch


class Lease:
    """The heartbeat thread calls `may_request` and `stale`; everything else runs in the loop."""

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
        """Store the lease that the reply to a heartbeat named. It may belong to any peer."""
        self._watch.observe(lease, time.monotonic())

    def stale(self) -> str:
        """Return the lease to take from its holder, which does not renew it; '' if there is none."""
        return self._watch.stale(time.monotonic())

    @property
    def may_request(self) -> bool:
        """False for some time after this peer has given up the lease."""
        return time.monotonic() >= self._declined_until

    def take(self, until: float) -> bool:
        """Hold the lease until `until`. Return True if this peer did not hold it before."""
        new, self._until = not self.held, until
        if new:
            self._taken.set()
        return new

    def give_up(self, seconds: float) -> None:
        """Give up the lease, and do not request it for `seconds`."""
        self._until, self._declined_until = 0.0, time.monotonic() + seconds
