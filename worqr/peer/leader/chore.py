"""`Chore`: what the chores of the leader have in common: the lease, and how long they wait for the server.

The heartbeat requests the lease. The peer that holds it leads until it expires, by CLOCK_BOOTTIME. `LeaseWatch` sees whether the
lease of another leader no longer changes. Not here: the chores (`leader`, `sweeper`, `scanner`, `schedule_ticker`).
"""

from __future__ import annotations

import logging
import time
from typing import TypeVar

from trio_util import RepeatedEvent

from worqr.command import Command
from worqr.keys import QueueKeys, RegistryKeys
from worqr.link import Link, boottime
from worqr.peer.error_throttle import ErrorThrottle
from worqr.peer.session import LEASE

NODE_PATIENCE = 0.5
"""Seconds that a chore waits for a queue of a cluster. Its node may be unavailable while the registry is not."""
STALE_AFTER = 5.0
"""Seconds for which a lease must not have changed before another peer takes it. It should have expired after 2 s."""
STALE_BEATS = 4
"""Heartbeats whose replies must have shown the same lease."""


T = TypeVar("T")


class LeaseWatch:
    """The leader's lease, as the heartbeats of a peer have shown it.

    A lease that is not renewed expires within 2 s by the server's clock. If that clock is set back, the lease of a leader that
    died stays, and no other peer can lead. A peer that has seen it unchanged for longer takes it.

    Attributes:
        seen: the lease, since when it is unchanged, and how many heartbeats have shown it. It is one value, because the
            heartbeat's thread reads it while the loop changes it.
    """

    def __init__(self) -> None:
        self.seen: tuple[str, float, int] = ("", 0.0, 0)

    def observe(self, lease: str, now: float) -> None:
        """Store the lease from a heartbeat's reply; '' for none."""
        before, since, beats = self.seen
        self.seen = (lease, since, beats + 1) if lease == before else (lease, now, 1)

    def stale(self, now: float) -> str:
        """Return the lease if it no longer changes, else ''."""
        lease, since, beats = self.seen
        return lease if beats >= STALE_BEATS and now - since >= STALE_AFTER else ""


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


class Chore:
    """A chore of the leader."""

    def __init__(self, link: Link, keys: RegistryKeys, lease: Lease, logger: logging.Logger) -> None:
        self._link = link
        self._keys = keys
        self._lease = lease
        self._throttle = ErrorThrottle(logger)
        self._patience = NODE_PATIENCE if link.settings.clustered else LEASE

    def _queue(self, name: str) -> QueueKeys:
        """Return the keys of a queue of this mesh."""
        return QueueKeys.of(self._keys.prefix, name)

    async def _ask(self, call: Command[T]) -> T:
        """Send a request, and return the reply. Raise Unavailable after the time in which another peer could lead."""
        return await self._link.call(call, patience=LEASE)

    async def _ask_queue(self, call: Command[T]) -> T:
        """Send a request about a queue, whose node may be unavailable while the registry is not."""
        return await self._link.call(call, patience=self._patience)
