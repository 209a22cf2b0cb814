"""Leading: the chores of the mesh, done by whichever peer holds the lease.

Here: the lease, and the leader's looks. Every half second it looks at the keepalive keys: a worker whose key is missing at two
looks at least 1.25 s apart is dead (likewise one whose beat has stood still for nine keepalives, for the server's clock may have
jumped). Nobody is declared dead within a keepalive of the leader's own reconnect or of a change of the server: first
everybody gets time to beat. A leader that cannot judge for longer than that, because its own connection keeps breaking, lets
another peer lead.

Not here: `Looks`, the judgement alone; `Sweeper`, which gives back what the dead held; `Scanner`, which looks at the queues;
`Promoter`, which puts jobs in line when they are due. Each of these has a task of its own: no chore keeps a look waiting.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import trio

from worqr import ops
from worqr.errors import Unavailable, WorqrError
from worqr.keys import RegistryKeys
from worqr.link import Link, boottime
from worqr.log_events import emit
from worqr.peer.complaints import Complaints
from worqr.peer.in_step import next_step
from worqr.peer.looks import LOOK_EVERY, TWO_LOOKS, LeaseWatch, Looks
from worqr.peer.membership import LEASE
from worqr.peer.promoting import Promoter
from worqr.peer.scanning import SCAN_EVERY, Scanner
from worqr.peer.sweeping import Sweeper

if TYPE_CHECKING:
    from worqr.peer.engine import Engine

__all__ = ["LOOK_EVERY", "SCAN_EVERY", "TWO_LOOKS", "Leader"]

logger: logging.Logger = logging.getLogger(__name__)

ROUND = 2 * LEASE
"""Seconds that a round of a leader that works takes at most: a look waits for its answer no longer than a lease."""
UNABLE = 1.5
"""Seconds beyond a keepalive for which a leader that cannot judge keeps the lease: one reconnect costs a keepalive, not more."""
STAND_ASIDE = 2 * LEASE
"""Seconds for which it does not ask for the lease then: for one lease it is still held, for another it is free."""


class Leader:
    """Does the chores while it holds the lease. The heart's thread calls `is_fresh` and `standing_lease`; all else is changed in
    the loop.
    """

    def __init__(self, engine: Engine, link: Link, keys: RegistryKeys, *, keepalive: float) -> None:
        self._link = link
        self._keys = keys
        self._looks = Looks(keepalive)
        self._watch = LeaseWatch()
        self.promoter: Promoter = Promoter(engine, link, keys, self._missed_hints)
        self.scanner: Scanner = Scanner(engine, link, keys, leads=lambda: self.leads, expect=self.promoter.expect)
        self.sweeper: Sweeper = Sweeper(engine, link, keys, leads=lambda: self.leads)
        self._until = 0.0
        self._round_ended = time.monotonic()
        self._unable_since: float | None = None
        self._aside_until = 0.0
        self._complaints = Complaints(logger)
        self._resting = False
        self._idle = trio.Event()
        self._idle.set()

    # The lease

    def lease(self, *, until: float) -> None:
        """The lease is ours until then, by CLOCK_BOOTTIME."""
        if time.monotonic() < self._aside_until:
            return  # the beat was sent before we stood aside
        if not self.leads:
            emit(logger, "leader", "this worker is the leader of the mesh now")
            lease, since, _ = self._watch.seen
            self._looks.knew(lease, since)
            self._unable_since = None
            self.promoter.begin()
            self._until = until
            self.scanner.begin()
        self._until = until

    def saw_lease(self, lease: str) -> None:
        """A beat was answered with this lease, ours or another's."""
        self._watch.saw(lease, time.monotonic())

    def standing_lease(self) -> str:
        """Return the lease to take from its holder, which does not renew it; '' for none. From any thread."""
        return self._watch.standing(time.monotonic())

    @property
    def leads(self) -> bool:
        return boottime() < self._until

    def is_fresh(self) -> bool:
        """Return True if this peer may ask for the lease: its rounds of chores end, and it can judge. From any thread."""
        now = time.monotonic()
        return now >= self._aside_until and now - self._round_ended < ROUND

    def _missed_hints(self) -> None:
        """What became due was perhaps not told."""
        self.scanner.look_again()

    # The rounds

    async def lead_forever(self) -> None:
        """Round after round, also while another leads: then a round is nothing."""
        while not self._resting:
            wait = LOOK_EVERY
            if self.leads:
                self._idle = trio.Event()
                wait = await self._look_or_not()
                self._idle.set()
            else:
                self.promoter.end()
            self._round_ended = time.monotonic()
            if wait < LOOK_EVERY:
                await trio.sleep(wait)
            else:
                await next_step(LOOK_EVERY)

    async def _look_or_not(self) -> float:
        judged = False
        try:
            await self.look_once()
            judged = not self._looks.calm
        except Unavailable as error:  # the link has logged it
            text = "the workers were not looked at: %(error)s"
            emit(logger, "leader", text, level=logging.DEBUG, error=str(error))
        except WorqrError as error:
            self._complaints.error("look", "leader", "the workers cannot be looked at: %(error)s", error=str(error))
        else:
            if self._complaints.resolve("look"):
                emit(logger, "leader", "the workers are looked at again")
        self._stand_aside_unless(judged)
        return self._looks.next_look(time.monotonic())

    def _stand_aside_unless(self, judged: bool) -> None:
        """Let another peer lead if this one could not judge for longer than one reconnect explains."""
        now = time.monotonic()
        if judged:
            self._unable_since = None
        elif self._unable_since is None:
            self._unable_since = now
        elif now - self._unable_since > self._looks.keepalive + UNABLE:
            text = "this worker cannot tell which workers are dead, because its connection keeps breaking; another may lead"
            emit(logger, "leader", text)
            self._until, self._aside_until, self._unable_since = 0.0, now + STAND_ASIDE, None

    async def look_once(self) -> None:
        """Look at the workers, and let those that are dead be swept, and those whose sweep another leader did not finish."""
        look = await self._link.call(ops.look_at_workers(self._keys), patience=LEASE)
        self.sweeper.take(self._looks.judge(look, time.monotonic(), self._link.connected_at), look.dying)

    async def rest(self) -> None:
        """Begin nothing more, and return when what is under way has ended: a sweep half done waits for another leader."""
        self._resting = True
        await self._idle.wait()
        await self.sweeper.rest()
