"""`FleetReader`: looks at the whole mesh for its metrics, again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final

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
from worqr.stored_values import readable

Together = Callable[[Sequence[Callable[[], Awaitable[Any]]]], Awaitable[list[Any]]]
GIVE_UP_AFTER: Final = 1.5
"""Seconds until a server that does not reply counts as away, so that a scrape ends within two."""


class FleetReader:
    """Looks at one mesh for one caller, on Trio, on asyncio or in a plain thread.

    Args:
        mesh: The mesh, which is connected when it is read.
        together: Makes calls, and returns what they return. It may make them side by side, so that they are one batch.
    """

    def __init__(self, mesh: Fleet, together: Together | None = None) -> None:
        self._mesh = mesh
        self._together: Together = _one_by_one if together is None else together
        self._client: MeshClient = client_of(mesh)
        self._runs = RunTotalsReader(self._client)

    async def read(self) -> FleetSnapshot:
        """Look at the mesh once.

        Raises:
            RefusedByServer: The user lacks a permission of an operator.
            Unavailable: The server did not reply.
        """
        client, keys = self._client, RegistryKeys(self._client.settings.prefix)
        calls: list[Callable[[], Awaitable[Any]]] = [
            self._mesh.info,
            partial(all_schedules, client.ask, keys),
            partial(client.link.call, look_at_workers(keys)),
            partial(_server_stats, client.link),
        ]
        info, (rows, now), workers, server = await self._together(calls)
        return FleetSnapshot(
            mesh=info,
            dying=len(workers.dying),
            schedules=[schedule_of(row, now) for row in rows],
            pending={readable(row.name): len(row.pending) for row in rows},
            runs=await self._runs.read(info.queues),
            server=server,
        )


async def _one_by_one(calls: Sequence[Callable[[], Awaitable[Any]]]) -> list[Any]:
    return [await call() for call in calls]


async def _server_stats(link: Link) -> ServerStats:
    match loop_name_here():
        case "Trio":
            return await trio.to_thread.run_sync(link.server_stats, GIVE_UP_AFTER, abandon_on_cancel=True)
        case "asyncio":
            return await asyncio.to_thread(link.server_stats, GIVE_UP_AFTER)
        case _:
            return link.server_stats(GIVE_UP_AFTER)
