"""``/metrics``: the metrics of the mesh for Prometheus, behind the same gate as the pages."""

from __future__ import annotations

from functools import partial
from typing import Final

import anyio
from starlette.responses import Response

from worqr.dashboard.batches import gathered
from worqr.dashboard.guard import Refused
from worqr.dashboard.visit import Visit
from worqr.errors import Unavailable
from worqr.metrics.fleet import FleetMetrics, FleetSnapshot
from worqr.metrics.fleet_reader import GIVE_UP_AFTER, FleetReader

MAX_QUEUES: Final = 300
"""Queues that are shown by name; the others are summed up."""


class FleetSource:
    """Reads the mesh for scrapes, and remembers which queues it has shown by name."""

    def __init__(self, visit: Visit) -> None:
        self._mesh = visit.mesh
        self._reader = FleetReader(visit.mesh, gathered)
        self.metrics: FleetMetrics = FleetMetrics(MAX_QUEUES)

    async def read(self, _before: object) -> FleetSnapshot | None:
        """Look at the mesh; None if its server does not reply."""
        with anyio.move_on_after(GIVE_UP_AFTER):
            try:
                async with self._mesh.connect():
                    return await self._reader.read()
            except Unavailable:
                return None
        return None


async def scrape(visit: Visit) -> Response:
    """Return the metrics of the mesh. If its server is away, ``worqr_up`` is 0, and no other metric is there."""
    if not visit.viewer.sees_all:
        raise Refused(403, "Metrics are for viewers who see all queues only.")
    try:
        from worqr.metrics.prometheus import exposition, fleet_collector
    except ImportError as error:
        raise Refused(501, f"{error}.") from None
    source = visit.looks.kept("metrics", partial(FleetSource, visit))
    snapshot: FleetSnapshot | None = await visit.looks.get("metrics", source.read)
    body, content_type = exposition(fleet_collector(source.metrics.samples(snapshot)), "")
    return Response(body, media_type=None, headers={"content-type": content_type})
