"""`FleetReader`: looks at the whole mesh for its metrics, again and again."""

from __future__ import annotations

from typing import Final

import trio

from worqr.client.fleet import Fleet
from worqr.client.mesh_client import MeshClient
from worqr.client.run_totals import RunTotalsReader
from worqr.client.schedules import all_schedules, schedule_of
from worqr.inside import client_of
from worqr.keys import RegistryKeys
from worqr.link import Link, ServerStats, loop_name_here
from worqr.metrics.fleet import FleetSnapshot
from worqr.ops import look_at_workers

GIVE_UP_AFTER: Final = 1.5
"""Seconds until a server that does not reply counts as away, so that a scrape ends within two."""


class FleetReader:
    """Looks at one mesh for one caller, on Trio or in a plain thread.

    Args:
        mesh: The mesh, which is connected when it is read.
    """

    def __init__(self, mesh: Fleet) -> None:
        self._mesh = mesh
        self._client: MeshClient = client_of(mesh)
        self._runs = RunTotalsReader(self._client)

    async def read(self) -> FleetSnapshot:
        """Look at the mesh once.

        Raises:
            RefusedByServer: The user lacks a permission of an operator.
            Unavailable: The server did not reply.
        """
        client, keys = self._client, RegistryKeys(self._client.settings.prefix)
        info = await self._mesh.info()
        rows, now = await all_schedules(client.ask, keys)
        workers = await client.link.call(look_at_workers(keys))
        return FleetSnapshot(
            mesh=info,
            dying=len(workers.dying),
            schedules=[schedule_of(row, now) for row in rows],
            pending={row.name: len(row.pending) for row in rows},
            runs=await self._runs.read(info.queues),
            server=await _server_stats(client.link),
        )


async def _server_stats(link: Link) -> ServerStats:
    if loop_name_here():
        return await trio.to_thread.run_sync(link.server_stats, GIVE_UP_AFTER, abandon_on_cancel=True)
    return link.server_stats(GIVE_UP_AFTER)
