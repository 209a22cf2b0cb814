"""`JobFinder`: the queues that know a job id, for an operator who has an id and nothing else. `Mesh` inherits it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from worqr import ops
from worqr.client.mesh_client import MeshClient
from worqr.client.stats import queue_names, status_of
from worqr.job_options import check_id
from worqr.keys import QueueKeys, RegistryKeys
from worqr.records import Status
from worqr.shard_layout import shard_of

AT_ONCE: Final = 1_000
"""Requests in one round trip."""


class JobFinder:
    """The part of `Mesh` that finds jobs by their ids. Its calls need ``mesh.connect()`` or ``join()``."""

    _client: MeshClient

    async def find(self, id: str) -> dict[str, Status]:
        """Return the queues that know a job of this id, with its status there.

        It asks every queue of the mesh, up to 1,000 at once. If you know the queue, use ``queue.read(id)``.

        Args:
            id: The job's id.

        Returns:
            The status in each queue that knows the id, by the queue's name. Empty if none does.

        Raises:
            UsageError: The id is not valid; or outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`.
        """
        checked, prefix = check_id(id, generated=True), self._client.settings.prefix
        names = await queue_names(self._client.ask, RegistryKeys(prefix))
        queues = sorted({replace(QueueKeys.of(prefix, name), tag="") for name in names}, key=lambda keys: keys.name)
        found: dict[str, Status] = {}
        for start in range(0, len(queues), AT_ONCE):
            some = queues[start : start + AT_ONCE]
            places = [shard_of(await self._client.sharding.shards(keys, declare=False), checked) for keys in some]
            seen = await self._client.link.call_all([ops.job_status(keys, checked, 0) for keys in places])
            found |= {
                keys.display_name: status_of(state)
                for keys, state in zip(some, seen, strict=True)
                if state.state != "gone"
            }
        return found
