"""Leading: the chores of the mesh, done by whichever peer holds the lease.

Every half second a look at the keepalive keys: a worker whose key is missing at two looks at least 1.25 s apart is dead
(likewise one whose beat has stood still for ten keepalives, for the server's clock may have jumped); its claims go back,
queue by queue, and whatever sweep another leader left unfinished is finished. Every 3 s a scan of all queues: says which
of them wait, finishes purges, and audits the fences. Nobody is declared dead within a keepalive of our own reconnect or of
a change of the server: first everybody gets time to beat.

`Looks` is the judgement alone, without any I/O.
"""

from __future__ import annotations

import logging
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from worqr import ops
from worqr.errors import Unavailable, WorqrError
from worqr.keys import RegistryKeys
from worqr.link import Link, boottime
from worqr.ops import Inspected, Look
from worqr.peer.membership import LEASE
from worqr.peer.promoting import Promoter

if TYPE_CHECKING:
    from worqr.peer.peer import Peer

logger: logging.Logger = logging.getLogger(__name__)

LOOK_EVERY = 0.5
TWO_LOOKS = 1.25
SCAN_EVERY = 3.0
STANDING_KEEPALIVES = 10
AT_ONCE = 100
"""Queues that are asked about together."""
NODE_PATIENCE = 0.5
"""Seconds that a round waits for a queue of a cluster: one whose node is away must not cost the leader its lease."""
MAX_WAITING = 100


@dataclass
class Looks:
    """What the leader remembers from look to look; times are of one monotonic clock, in seconds."""

    keepalive: float
    calm_until: float = 0.0
    run_id: str | None = None
    missing: dict[str, float] = field(default_factory=dict[str, float])
    beats: dict[str, tuple[bytes, float]] = field(default_factory=dict[str, tuple[bytes, float]])

    def judge(self, look: Look, now: float, connected_at: float) -> list[tuple[str, bytes | None]]:
        """The workers this look proves dead, each with the beat it was seen with (None: missing)."""
        if self.run_id is not None and look.run_id != self.run_id:
            self.calm_until = now + self.keepalive
        self.run_id = look.run_id
        self.calm_until = max(self.calm_until, connected_at + self.keepalive)
        calm = now < self.calm_until
        dead: list[tuple[str, bytes | None]] = []
        for worker, beat in look.beats.items():
            if beat is None:
                since = self.missing.setdefault(worker, now)
                if not calm and now - since >= TWO_LOOKS:
                    dead.append((worker, None))
                continue
            self.missing.pop(worker, None)
            last = self.beats.get(worker)
            if last is None or last[0] != beat:
                self.beats[worker] = (beat, now)
            elif beat.startswith(b"RUN") and not calm and now - last[1] >= STANDING_KEEPALIVES * self.keepalive:
                dead.append((worker, beat))
        for kept in (self.missing, self.beats):
            for worker in kept.keys() - look.beats.keys():
                del kept[worker]
        return dead

    def next_look(self, now: float) -> float:
        """Seconds until the next look: the usual rhythm, or earlier when one is about to be proven dead."""
        due = [since + TWO_LOOKS - now for since in self.missing.values()]
        return max(0.0, min([LOOK_EVERY, *(d for d in due if d > 0)]))


class Leader:
    """Does the chores while it holds the lease. `round_ended` is read by the heart's thread, all else changed in the loop."""

    def __init__(self, peer: Peer, link: Link, keys: RegistryKeys, *, keepalive: float) -> None:
        self._peer = peer
        self._link = link
        self._keys = keys
        self._keepalive = keepalive
        self._patience = NODE_PATIENCE if link.settings.clustered else LEASE
        self._away: set[str] = set()  # queues that could not be reached in this round
        self._looks = Looks(keepalive)
        self.promoter: Promoter = Promoter(peer, link, keys, self._scan_soon)
        self._until = 0.0
        self._round_ended = time.monotonic()
        self._complaint = ""
        self._next_scan = 0.0
        self._resting = False
        self._idle = trio.Event()
        self._idle.set()

    # The lease

    def lease(self, *, until: float) -> None:
        """The lease is ours until then, by CLOCK_BOOTTIME."""
        if not self.leads:
            logger.info("leader: this peer does the chores of the mesh now")
            self._looks = Looks(self._keepalive)
            self._next_scan = 0.0
            self.promoter.begin()
        self._until = until

    def _scan_soon(self) -> None:
        """Hints of what is due may have been missed."""
        self._next_scan = 0.0

    @property
    def leads(self) -> bool:
        return boottime() < self._until

    def is_fresh(self) -> bool:
        """True if our last round of chores ended so lately that we may ask for the lease. From any thread."""
        return time.monotonic() - self._round_ended < LEASE

    # The rounds

    async def lead_forever(self) -> None:
        """Round after round, also while another leads: then a round is nothing."""
        while not self._resting:
            wait = LOOK_EVERY
            if self.leads:
                self._idle = trio.Event()
                wait = await self._round_or_not()
                self._idle.set()
            else:
                self.promoter.end()
            self._round_ended = time.monotonic()
            await trio.sleep(wait)

    async def _round_or_not(self) -> float:
        try:
            wait = await self.round_once()
        except Unavailable as error:  # the link has said so
            logger.debug("leader: a round of chores was not done: %s", error)
        except WorqrError as error:
            if self._complaint != str(error):  # once, not twice a second
                self._complaint = str(error)
                logger.error("leader: a round of chores failed: %s", error)
        else:
            if self._complaint:
                self._complaint = ""
                logger.info("leader: the chores are done again")
            return wait
        return LOOK_EVERY

    async def rest(self) -> None:
        """Begin no further round, and return when the present one has ended: a sweep half done waits for another leader."""
        self._resting = True
        await self._idle.wait()

    async def round_once(self) -> float:
        """One look, with the sweeps it asks for, and a scan if it is time; answers when to look again."""
        self._away.clear()
        look = await self._link.call(ops.look_at_workers(self._keys), patience=LEASE)
        now = time.monotonic()
        for worker, seen in self._looks.judge(look, now, self._link.connected_at):
            if await self._link.call(ops.condemn_worker(self._keys, worker, seen), patience=LEASE) == "ok":
                logger.warning(
                    "condemn_worker: %s is dead (%s)", worker, "no beat" if seen is None else "its beat stands still"
                )
                look.dying.append(worker)
        for worker in dict.fromkeys(look.dying):
            await self._sweep(worker)
        if now >= self._next_scan:
            await self.scan_once()
            self._next_scan = now + SCAN_EVERY
        return self._looks.next_look(time.monotonic())

    # Sweeping

    async def _sweep(self, worker: str) -> None:
        """Give back all that a dead worker held, then forget it. What cannot be done now is left to the next round."""
        seen: set[str] = set()
        while mapped := await self._link.call(ops.forget_worker(self._keys, worker), patience=LEASE):
            todo = [queue for queue in mapped if queue not in seen]
            if not todo:
                return
            seen.update(todo)
            for start in range(0, len(todo), AT_ONCE):
                async with trio.open_nursery() as nursery:
                    for queue in todo[start : start + AT_ONCE]:
                        nursery.start_soon(self._fail_on, worker, queue)
        logger.info("forget_worker: %s", worker)

    async def _fail_on(self, worker: str, queue: str) -> None:
        """One queue of a dead worker. That one of them cannot be reached, its node being away, keeps no other waiting."""
        if queue in self._away:
            return
        keys, given, aside = self._peer.queue_keys(queue), 0, 0
        try:
            while True:
                step = await self._link.call(ops.fail_worker(keys, worker), patience=self._patience)
                given, aside = given + step.given, aside + step.aside
                if not step.more:
                    break
            logger.info("fail_worker: %s on queue %r: %d given back, %d set aside", worker, queue, given, aside)
            await self._link.call(ops.unmap_work(self._keys, worker, queue), patience=LEASE)
        except Unavailable as error:
            self._away.add(queue)
            logger.info("fail_worker: %s on queue %r: %s; trying again", worker, queue, error)
        except WorqrError as error:
            logger.error("fail_worker: %s on queue %r: %s; trying again", worker, queue, error)

    # Scanning

    async def scan_once(self) -> None:
        """Look at every queue: which wait, which are still to be purged, whose fence holds somebody nobody knows."""
        names = await self._link.call(ops.list_queues(self._keys), patience=LEASE)
        found: dict[str, Inspected] = {}
        for start in range(0, len(names), AT_ONCE):
            async with trio.open_nursery() as nursery:
                for name in names[start : start + AT_ONCE]:
                    nursery.start_soon(self._inspect, name, found)
        waiting = [name for name, queue in found.items() if queue.waiting and queue.paused is None]
        if len(waiting) > MAX_WAITING:  # by chance, so that none of them is left out for ever
            waiting = random.sample(waiting, MAX_WAITING)
        await self._link.call(ops.post_waiting(self._keys, waiting), patience=LEASE)
        for name, queue in found.items():
            if queue.next_in_ms is not None:
                self.promoter.expect(name, queue.next_in_ms / 1000)
            if queue.trash:
                await self._link.call(ops.purge_queue(self._peer.queue_keys(name)), patience=self._patience)
        await self._audit({(name, worker) for name, queue in found.items() for worker in queue.workers})

    async def _inspect(self, name: str, found: dict[str, Inspected]) -> None:
        if name in self._away:
            return
        try:
            found[name] = await self._link.call(ops.inspect(self._peer.queue_keys(name)), patience=self._patience)
        except Unavailable as error:
            logger.info("leader: queue %r was not scanned: %s", name, error)
        except WorqrError as error:
            logger.error("leader: queue %r cannot be scanned: %s", name, error)

    async def _audit(self, fences: set[tuple[str, str]]) -> None:
        """Whoever stands in a fence and in no registry is nobody's. Ids are registered before they enter a fence, and only once.

        So the fence is read before the registry, for one that was just coming, and once more after it, for one that
        was just leaving.
        """
        if not fences:
            return
        look = await self._link.call(ops.look_at_workers(self._keys), patience=LEASE)
        for queue, worker in fences:
            if worker in look.beats or worker in look.dying:
                continue
            again = await self._link.call(ops.inspect(self._peer.queue_keys(queue)), patience=self._patience)
            if worker in again.workers:
                logger.warning("adopt_worker: %s stands in the fence of queue %r and in no registry", worker, queue)
                await self._link.call(ops.adopt_worker(self._keys, worker, queue), patience=LEASE)
                await self._sweep(worker)
