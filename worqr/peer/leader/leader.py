"""`Leader`: the chores of the mesh, while this peer holds the lease. Here: the checks of workers.

Every half second the leader reads the keepalive keys. A worker is dead when its key is missing at two checks at least 1.25 s
apart. It is also dead when its heartbeat has not changed for nine keepalives, because the server's clock may have jumped. After a
reconnect of the leader, or a change of the server, no worker is declared dead for a keepalive. In that time every worker can send
a heartbeat. If the connection of a leader keeps breaking, its checks prove nothing. After some time it gives up the lease, so
that another peer can lead.

Not here: `Lease`; `FailureDetector`, which evaluates a check; `Sweeper`, which gives back the claims of dead workers; `Scanner`,
which reads the queues; `HistorySampler`, which stores their history; `DueJobPromoter`, which enqueues due jobs. Each of these has
a task of its own, so no chore delays a check.
"""

from __future__ import annotations

import logging
import time

import trio

from worqr import ops
from worqr.errors import Unavailable, WorqrError
from worqr.keys import RegistryKeys
from worqr.link import Link
from worqr.log_events import emit
from worqr.peer.aligned_sleep import next_aligned_time, sleep_aligned
from worqr.peer.error_throttle import ErrorThrottle
from worqr.peer.leader.due_jobs import DueJobPromoter
from worqr.peer.leader.failure_detector import CHECK_EVERY, MISSING_FOR, FailureDetector
from worqr.peer.leader.lease import Lease
from worqr.peer.leader.scanner import SCAN_EVERY, Scanner
from worqr.peer.leader.sweeper import Sweeper
from worqr.peer.registration import LEASE, ignore_outcome
from worqr.peer.settings import HISTORY_QUEUES

__all__ = ["CHECK_EVERY", "MISSING_FOR", "SCAN_EVERY", "Leader"]

logger: logging.Logger = logging.getLogger(__name__)

ROUND = 2 * LEASE
"""Seconds that a round of a working leader takes at most. A check waits for its reply no longer than a lease."""
FOLLOW_EVERY = 1.0
"""Seconds between two rounds of a peer that does not lead. A blocked loop has no rounds, and its peer must not become leader."""
UNABLE_FOR = 1.5
"""Seconds beyond a keepalive after which a leader whose checks prove nothing gives up the lease. One reconnect takes a keepalive
at most.
"""
DECLINE_LEASE_FOR = 2 * LEASE
"""Seconds for which it does not request the lease after that. It still holds the lease for 2 s, and another peer can take it in
the 2 s that follow.
"""


class Leader:
    """Runs the leader's chores while this peer holds the lease.

    The heartbeat thread calls `may_request_lease` and `stale_lease`. Everything else runs in the loop.
    """

    def __init__(
        self, link: Link, keys: RegistryKeys, *, keepalive: float, history_queues: int = HISTORY_QUEUES
    ) -> None:
        self._link = link
        self._keys = keys
        self._lease = Lease()
        self._detector = FailureDetector(keepalive)
        self.due_jobs: DueJobPromoter = DueJobPromoter(link, keys, leads=lambda: self.leads, missed=self._missed_hints)
        self.scanner: Scanner = Scanner(
            *(link, keys), leads=lambda: self.leads, expect=self.due_jobs.expect, history_queues=history_queues
        )
        self.sweeper: Sweeper = Sweeper(link, keys, leads=lambda: self.leads)
        self._round_ended = time.monotonic()
        self._unable_since: float | None = None
        self._throttle = ErrorThrottle(logger)
        self._stopping = False
        self._idle = trio.Event()
        self._idle.set()

    # The lease

    def on_lease_granted(self, *, until: float, worker: str = "") -> None:
        """Hold the lease until `until`, by CLOCK_BOOTTIME."""
        if not self._lease.may_request:
            return  # the heartbeat was sent before this peer gave up the lease
        if self._lease.take(until):
            emit(logger, "leader", "this worker is the leader of the mesh now")
            self._detector.remember_lease(*self._lease.seen)
            self._unable_since = None
            self.due_jobs.begin()
            self.scanner.begin()
            self._link.post(ops.note_event(self._keys, "leader", worker=worker), ignore_outcome, patience=LEASE)

    def on_lease_seen(self, lease: str) -> None:
        """Store the lease that the reply to a heartbeat named. It may belong to any peer."""
        self._lease.observe(lease)

    def stale_lease(self) -> str:
        """Return the lease to take from its holder, which does not renew it; '' if there is none. From any thread."""
        return self._lease.stale()

    @property
    def leads(self) -> bool:
        return self._lease.held

    async def wait_leading(self) -> None:
        """Wait until this peer leads."""
        await self._lease.wait_held()

    def may_request_lease(self) -> bool:
        """Return True if this peer may request the lease: its rounds end, and its checks work. From any thread."""
        return self._lease.may_request and time.monotonic() - self._round_ended < ROUND

    def _missed_hints(self) -> None:
        """Scan again, because hints about due jobs may have been missed."""
        self.scanner.rescan()

    # The rounds

    async def lead_forever(self) -> None:
        """Check the workers while this peer leads. Otherwise only record that the loop runs, for `may_request_lease`."""
        while not self._stopping:
            if self.leads:
                self._idle = trio.Event()
                wait = await self._try_check()
                self._idle.set()
                self._round_ended = time.monotonic()
                if wait < CHECK_EVERY:
                    await trio.sleep(wait)
                else:
                    await sleep_aligned(CHECK_EVERY)
            else:
                self.due_jobs.end()
                self._round_ended = time.monotonic()
                with trio.move_on_at(next_aligned_time(FOLLOW_EVERY)):
                    await self.wait_leading()

    async def _try_check(self) -> float:
        conclusive = False
        try:
            await self.check_once()
            conclusive = not self._detector.inconclusive
        except Unavailable as error:  # the link has logged it
            text = "the workers were not looked at: %(error)s"
            emit(logger, "leader", text, level=logging.DEBUG, error=str(error))
        except WorqrError as error:
            self._throttle.error("look", "leader", "the workers cannot be looked at: %(error)s", error=str(error))
        else:
            if self._throttle.resolve("look"):
                emit(logger, "leader", "the workers are looked at again")
        self._give_up_lease_unless(conclusive)
        return self._detector.next_check_in(time.monotonic())

    def _give_up_lease_unless(self, conclusive: bool) -> None:
        """Give up the lease if checks were inconclusive for longer than one reconnect explains."""
        now = time.monotonic()
        if conclusive:
            self._unable_since = None
        elif self._unable_since is None:
            self._unable_since = now
        elif now - self._unable_since > self._detector.keepalive + UNABLE_FOR:
            text = "this worker cannot tell which workers are dead, because its connection keeps breaking; another may lead"
            emit(logger, "leader", text)
            self._lease.give_up(DECLINE_LEASE_FOR)
            self._unable_since = None

    async def check_once(self) -> None:
        """Check the workers. Start the recovery of dead ones, and of those whose recovery another leader did not finish."""
        look = await self._link.call(ops.look_at_workers(self._keys), patience=LEASE)
        self.sweeper.recover(self._detector.find_dead(look, time.monotonic(), self._link.connected_at), look.dying)

    async def stop(self) -> None:
        """Start no more chores, and return when those under way have ended. Another leader finishes incomplete recoveries."""
        self._stopping = True
        await self._idle.wait()
        await self.sweeper.stop()
