"""`ScanPoster`: tells the mesh what the leader's scan has found.

Queues with waiting tasks are announced to every heartbeat. While a program reads snapshots of the mesh, the leader also stores
them. Then it keeps what the last scans have found, because a scan reads only a part of the queues at rest. `scanner` decides
which queues a scan reads, and `worqr.snapshots` how a snapshot is stored.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Final

import trio

from worqr import ops
from worqr.client.stats import merge_queue_info, worker_info
from worqr.keys import QueueKeys, RegistryKeys
from worqr.link import Link
from worqr.mesh_records import MeshInfo, QueueInfo, WorkerInfo
from worqr.ops import Inspected
from worqr.peer.known_queues import is_empty
from worqr.peer.leader.history_sampler import HistorySampler
from worqr.peer.registration import LEASE
from worqr.queue_age import QueuePlaces
from worqr.snapshots import apps_of, encode_snapshot, is_in_use, most_active, unhealthy_of, unreadable_of
from worqr.validation import from_ms

WORKERS_EVERY: Final = 15.0
"""Seconds between two reads of all workers, if they take several requests."""
AT_ONCE: Final = 200
"""Queues that are added up before other tasks of the loop have their turn."""


class ScanPoster:
    """Posts scans while this peer leads. Changed only in the loop.

    Attributes:
        watched: a program read a snapshot less than 30 s before the last scan.
        history: stores the history of queues.
    """

    def __init__(self, link: Link, keys: RegistryKeys, history: HistorySampler) -> None:
        self.watched: bool = False
        self.history: HistorySampler = history
        self._link = link
        self._keys = keys
        self._posted = False
        self._queues: dict[str, Inspected] = {}
        self._places: dict[str, QueuePlaces] = {}
        self._workers: list[WorkerInfo] = []
        self._leader = ""
        self._read_workers_at = 0.0

    def begin(self) -> None:
        """This peer leads now: forget what it found when it led before."""
        self.watch(False)
        self._places.clear()
        self.history.begin()

    def watch(self, watched: bool) -> bool:
        """Store whether a program reads snapshots. Return True if that is new: then all queues have to be read."""
        begins = watched and not self.watched
        if not watched:
            self._queues.clear()
            self._workers.clear()
        self.watched = watched
        return begins

    def record(self, found: Mapping[str, Inspected], server_ms: int) -> None:
        """Keep what a scan has found, for snapshots and for the history. The samples for ages are kept always."""
        now = time.monotonic()
        for name, queue in found.items():
            if queue.waiting or queue.workers:
                if (places := self._places.get(name)) is None:
                    places = self._places[name] = QueuePlaces()
                places.record(now, queue.waiting, queue.running, queue.counts)
            else:
                self._places.pop(name, None)
        self.history.record(found, server_ms, lambda name, queue: self._estimate(name, queue, now))
        if self.watched:
            self._queues.update(found)
            for name in [name for name, queue in found.items() if is_empty(queue)]:
                del self._queues[name]

    def forget(self, names: Sequence[str]) -> None:
        """Forget queues of which the mesh has forgotten the names."""
        self.history.forget(names)
        for name in names:
            self._queues.pop(name, None)
            self._places.pop(name, None)

    async def post(self, waiting: Sequence[str], *, complete: bool, server_ms: int, refused: Mapping[str, str]) -> None:
        """Announce the queues that wait, and store a snapshot if programs read them and all queues were read.

        `refused`: the queues that the server refuses to read, and its words.
        """
        snapshot = await self._snapshot(server_ms, refused) if self.watched and complete else b""
        if waiting or self._posted or snapshot:
            await self._link.call(ops.post_scan(self._keys, waiting, snapshot), patience=LEASE)
            self._posted = bool(waiting)

    async def _snapshot(self, server_ms: int, refused: Mapping[str, str]) -> bytes:
        await self._read_workers()
        named, left_out, others = most_active(await self._infos())
        info = MeshInfo(
            at=from_ms(server_ms),
            source="leader",
            age=0.0,
            leader=self._leader,
            queues=named,
            queues_left_out=left_out,
            others=others,
            apps=apps_of(self._workers),
            unhealthy=unhealthy_of(self._workers),
            unreadable=unreadable_of(refused),
        )
        return encode_snapshot(info)

    async def _infos(self) -> list[QueueInfo]:
        """The queues, all shards of each as one."""
        shards: dict[str, list[tuple[Inspected, float | None]]] = {}
        now = time.monotonic()
        for name, queue in self._queues.items():
            estimate = self._estimate(name, queue, now)
            shards.setdefault(QueueKeys.of("", name).display_name, []).append((queue, estimate))
        found: list[QueueInfo] = []
        for n, (name, parts) in enumerate(shards.items(), 1):
            info = merge_queue_info(name, [queue for queue, _ in parts], [estimate for _, estimate in parts])
            if is_in_use(info):  # a queue may hold deleted tasks only
                found.append(info)
            if n % AT_ONCE == 0:
                await trio.lowlevel.checkpoint()
        return found

    def _estimate(self, name: str, queue: Inspected, now: float) -> float | None:
        """Estimate the age of the oldest task, unless the server knows it."""
        places = self._places.get(name)
        return None if places is None or queue.oldest_ms is not None else places.age(now)

    async def _read_workers(self) -> None:
        """Read the workers: all that one request returns each time, and larger numbers at intervals."""
        if len(self._workers) >= ops.WORKERS_AT_ONCE and time.monotonic() - self._read_workers_at < WORKERS_EVERY:
            return
        found: dict[str, WorkerInfo] = {}
        cursors = [""]
        while cursors:  # one page after the other: no caller waits
            page = await self._link.call(ops.list_workers(self._keys, cursors[0]), patience=LEASE)
            found.update((row.worker, worker_info(row, page.leader)) for row in page.rows)
            self._leader, cursors = page.leader, page.cursors
        self._workers, self._read_workers_at = list(found.values()), time.monotonic()
