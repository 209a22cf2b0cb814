"""`Scanner`: the leader reads the queues every 3 s, in a task of its own.

It announces queues with tasks to the heartbeats, because a wake-up may have been lost. It reports due times to the promoter, and
purges deleted tasks. It starts the recovery of workers that serve a queue but are not registered, and removes unused names.
`KnownQueues` decides which queues it reads. `ScanPoster` and `HistorySampler` store what it has found. `UnservedQueueReporter`
logs queues that have tasks and no worker. A long scan delays neither checks nor recoveries.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import trio

from worqr import ops
from worqr.errors import Unavailable, WorqrError
from worqr.keys import RegistryKeys
from worqr.link import Link
from worqr.log_events import emit
from worqr.ops import FORGET_AT_ONCE
from worqr.peer.error_throttle import ErrorThrottle
from worqr.peer.known_queues import KnownQueues
from worqr.peer.leader.history_sampler import HistorySampler
from worqr.peer.leader.queue_inspector import QueueInspector
from worqr.peer.leader.scan_poster import ScanPoster
from worqr.peer.leader.sweeper import ClaimFinder
from worqr.peer.registration import LEASE
from worqr.peer.unserved_queue_reporter import UnservedQueueReporter

logger: logging.Logger = logging.getLogger(__name__)

SCAN_EVERY = 3.0
FORGET_AFTER = 60.0
"""Seconds of leading before names are forgotten: by then, workers that died long ago have been recovered."""
PAGES_AT_ONCE = 10
"""Pages of names that one scan reads."""


class Scanner:
    """Scans while this peer leads. Its data about queues is kept when the lease expires. Changed only in the loop."""

    def __init__(
        self,
        link: Link,
        keys: RegistryKeys,
        *,
        leads: Callable[[], bool],
        expect: Callable[[str, float], None],
        history_queues: int,
    ) -> None:
        self._link = link
        self._keys = keys
        self._leads = leads
        self._expect = expect
        self._known = KnownQueues()
        self._inspector = QueueInspector(link, keys.prefix, self._known)
        self._names = _QueueNameReader(link, keys, self._known)
        self._unserved = UnservedQueueReporter()
        self._throttle = ErrorThrottle(logger)
        self._poster = ScanPoster(link, keys, HistorySampler(link, keys, limit=history_queues, leads=leads))
        self._claims = ClaimFinder(link, keys)
        self._began = time.monotonic()
        self._soon = trio.Event()

    @property
    def history(self) -> HistorySampler:
        """What stores the history of queues. It has a task of its own."""
        return self._poster.history

    def begin(self) -> None:
        """Scan at once, because this peer leads now."""
        self._began = time.monotonic()
        self._unserved.begin(self._began)
        self._inspector.begin()
        self._poster.begin()
        self._claims.begin()
        self._soon.set()

    def rescan(self) -> None:
        """Scan at once, because hints about due jobs may have been missed."""
        self._known.rescan(self._names.server_ms)
        self._soon.set()

    async def scan_forever(self) -> None:
        """Scan periodically while this peer leads. Many new names are read in several scans in quick succession."""
        while True:
            self._soon = trio.Event()
            began = time.monotonic()
            if self._leads():
                await self._try_scan()
            took = time.monotonic() - began
            with trio.move_on_after(max(took, 0.05) if self._unfinished else max(SCAN_EVERY - took, 0.5)):
                await self._soon.wait()

    @property
    def _unfinished(self) -> bool:
        return self._leads() and (self._names.reading or self._known.unseen > len(self._inspector.unreachable))

    async def _try_scan(self) -> None:
        try:
            await self.scan_once()
        except Unavailable as error:  # the link has logged it
            emit(logger, "leader", "the queues were not scanned: %(error)s", level=logging.DEBUG, error=str(error))
        except WorqrError as error:
            self._throttle.error("scan", "leader", "the queues cannot be scanned: %(error)s", error=str(error))
        else:
            if self._throttle.resolve("scan"):
                emit(logger, "leader", "the queues are scanned again")

    async def scan_once(self) -> None:
        """Read new names, read the queues whose turn it is, and act on them."""
        await self._names.read(PAGES_AT_ONCE)
        if self._poster.watch(self._names.watched):
            self._known.reread()
        found = await self._inspector.inspect_all(self._known.next_scan(time.monotonic()))
        for name, queue in found.items():
            self._known.record(name, queue)
            if queue.needs_relay or queue.next_in_ms is not None:
                self._expect(name, 0 if queue.needs_relay else (queue.next_in_ms or 0) / 1000)
        self._unserved.report(found, time.monotonic())
        self._poster.record(found, self._names.server_ms)
        waiting = self._known.waiting(found)
        server_ms, refused = self._names.server_ms, self._inspector.refused
        await self._poster.post(waiting, complete=not self._unfinished, server_ms=server_ms, refused=refused)
        for name in [name for name, queue in found.items() if queue.trash]:
            await self._inspector.purge(name)
        await self._claims.look(list(found))
        await self._audit({(name, worker) for name, queue in found.items() for worker in queue.workers})
        if time.monotonic() - self._began >= FORGET_AFTER:
            await self._forget(self._known.unused(found, self._names.server_ms))

    async def _audit(self, admitted: set[tuple[str, str]]) -> None:
        """Find workers that a queue has admitted and that are not registered. An id is registered once, before a queue admits it.

        So the queue is read twice: before the registry, for a worker that was just entering, and after it, for one that was just
        leaving. The leader's next check finds the adopted worker among the dead ones, and recovers it.
        """
        if not admitted:
            return
        look = await self._link.call(ops.look_at_workers(self._keys), patience=LEASE)
        for queue, worker in admitted:
            if worker in look.beats or worker in look.dying:
                continue
            again = await self._inspector.inspect(queue)
            if worker in again.workers:
                text = "worker %(worker)s serves queue %(queue)r but is not registered; its tasks are given back"
                emit(logger, "adopt_worker", text, worker=worker, queue=queue)
                await self._link.call(ops.adopt_worker(self._keys, worker, queue), patience=LEASE)

    async def _forget(self, names: Sequence[str]) -> None:
        for start in range(0, len(names), FORGET_AT_ONCE):
            some = names[start : start + FORGET_AT_ONCE]
            gone = await self._link.call(ops.forget_queues(self._keys, some), patience=LEASE)
            self._known.forget(gone)
            self._unserved.forget(gone)
            self._poster.forget(gone)


class _QueueNameReader:
    """Reads the names of queues: first all of them, then those that were noted since.

    Attributes:
        server_ms: the server's time when names were last read.
        watched: a program read snapshots of the mesh at that time.
    """

    def __init__(self, link: Link, keys: RegistryKeys, known: KnownQueues) -> None:
        self.server_ms: int = 0
        self.watched: bool = False
        self._link = link
        self._keys = keys
        self._known = known
        self._since = 0
        self._began = 0
        self._next: tuple[bytes, bytes] | None = None

    @property
    def reading(self) -> bool:
        """The last read ended before the end of the list."""
        return self._next is not None

    async def read(self, pages: int) -> None:
        """Read the next pages, at most `pages` of them.

        The most recently noted names come first. So a read is complete when it reaches names from before the previous read began.
        """
        for _ in range(pages):
            page = await self._link.call(ops.list_queues(self._keys, self._next), patience=LEASE)
            if (
                page.now_ms < self.server_ms
            ):  # the server's clock was set back, so names noted now are further down the list
                self._since = 0
            if self._next is None:
                self._began = page.now_ms
            self.server_ms, self.watched, now = page.now_ms, page.watched, time.monotonic()
            for name, noted_ms in page.names.items():
                self._known.note(name, min(noted_ms, page.now_ms), page.now_ms, now)
            ahead = [name for name, noted_ms in page.names.items() if noted_ms > page.now_ms]
            if ahead:
                await self._link.call(ops.note_queues(self._keys, ahead), patience=LEASE)
            self._next = page.next
            if self._next is None or min(page.names.values()) < self._since:
                self._next, self._since = None, self._began
                return
