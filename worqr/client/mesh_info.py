"""The whole mesh at one moment: from the leader's snapshot, or read by this process if there is none.

So many programs that look at the mesh cost the server what one costs. Without a worker there is no leader, and no snapshot:
programs that start the first worker depend on the direct way.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Final

from worqr import ops
from worqr.client.client import Client
from worqr.client.inspection import all_workers, readable_infos
from worqr.client.stats import queue_names
from worqr.keys import QueueKeys, RegistryKeys
from worqr.mesh_records import MeshInfo
from worqr.snapshots import apps_of, decode_snapshot, is_in_use, most_active, unhealthy_of, unreadable_of
from worqr.validation import from_ms

FRESH_FOR: Final = 6.0
"""Seconds for which a snapshot is used: the leader writes one every 3 s."""
DIRECT_EVERY: Final = 5.0
"""Seconds between two direct reads of all queues by one process."""


class MeshInfoReader:
    """Reads the mesh of one client. Any number of loops and threads may use it at once."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._began = float("-inf")
        self._direct: tuple[MeshInfo, float] | None = None

    async def read(self) -> MeshInfo:
        """Return the leader's snapshot if it is fresh, else what this process reads, or has read in the last seconds."""
        found = await self._client.ask(ops.read_snapshot(RegistryKeys(self._client.settings.prefix)))
        if found.stored is not None:
            info = decode_snapshot(found.stored, found.now_ms)
            if info is not None and info.age < FRESH_FOR:
                return replace(info, memory=found.memory)
        known = self._direct
        if known is not None and time.monotonic() - self._began < DIRECT_EVERY:
            info, read_at = known
            return replace(info, age=time.monotonic() - read_at, memory=found.memory)
        self._began = time.monotonic()
        info = replace(await self._read_directly(found.now_ms), memory=found.memory)
        self._direct = info, time.monotonic()
        return info

    async def _read_directly(self, now_ms: int) -> MeshInfo:
        keys = RegistryKeys(self._client.settings.prefix)
        names = await queue_names(self._client.ask, keys)
        infos, refused = await readable_infos(self._client, [QueueKeys.of(keys.prefix, name) for name in names])
        workers = await all_workers(self._client)
        named, left_out, others = most_active(filter(is_in_use, infos))
        return MeshInfo(
            at=from_ms(now_ms),
            source="direct",
            age=0.0,
            leader=next((worker.id for worker in workers if worker.leads), None),
            queues=named,
            queues_left_out=left_out,
            others=others,
            apps=apps_of(workers),
            unhealthy=unhealthy_of(workers),
            unreadable=unreadable_of(refused),
        )
