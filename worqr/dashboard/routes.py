"""All addresses of the dashboard: the method, the right and the handler of each."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import anyio
from starlette.responses import JSONResponse, Response

from worqr.dashboard import (
    acts,
    batch_pages,
    failures,
    live,
    log_page,
    new_task,
    reading,
    schedules,
    server_page,
    starts,
    tables,
    workers,
)
from worqr.dashboard.access import Right
from worqr.dashboard.batches import gathered
from worqr.dashboard.guard import Refused
from worqr.dashboard.reading import look
from worqr.dashboard.state import may_run
from worqr.dashboard.visit import Answer, Visit
from worqr.errors import Unavailable
from worqr.metrics.fleet import GIVE_UP_AFTER, FleetMetrics, FleetReader, FleetSnapshot

# JSON for other programs, behind the same gate as the pages: what a program that scales workers needs.


MOST_PLACES: Final = 100_000


async def scale(visit: Visit) -> Response:
    """Return how much there is to do on one queue, also while no worker runs. Tasks that a pause or a limit holds do not count.

    With `places`, the number of tasks that one worker runs at the same time, also return how many workers are wanted.
    """
    queue, places = visit.queue(visit.text("queue")), visit.number("places", 0, 1, MOST_PLACES)
    state = await look(visit)
    info = state.age_in(await queue.info())
    load = may_run(info)
    found: dict[str, Any] = {"queue": queue.name, "load": load, "age": info.age or 0.0, "workers": info.workers}
    found |= {"held_back": info.held_back, "held_for": info.held_for}
    if places:
        found["wanted"] = math.ceil(load / places)
    return JSONResponse(found)


# ``/metrics``: the metrics of the mesh for Prometheus, behind the same gate as the pages.


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


@dataclass(frozen=True, slots=True)
class Route:
    """One address.

    Attributes:
        handler: makes the response.
        method: the method that it accepts; with GET, also HEAD.
        right: the right that a viewer needs.
        connects: the handler connects to the server by itself: a stream while its client listens, a scrape because it reports a
            server that is away.
    """

    handler: Callable[[Visit], Awaitable[Answer]]
    method: Literal["GET", "POST"] = "GET"
    right: Right = "look"
    connects: bool = False


ROUTES: Final[dict[str, Route]] = {
    "/": Route(reading.overview),
    "/queues": Route(reading.queues),
    "/queue": Route(reading.queue),
    "/lanes": Route(starts.page),
    "/batches": Route(batch_pages.listed),
    "/batch": Route(batch_pages.page),
    "/job": Route(reading.job),
    "/running": Route(reading.running),
    "/failed": Route(failures.failed),
    "/workers": Route(reading.workers),
    "/worker": Route(reading.worker),
    "/schedules": Route(schedules.page),
    "/log": Route(log_page.page),
    "/server": Route(server_page.page),
    "/search": Route(reading.search),
    "/payload": Route(reading.payload, right="payloads"),
    "/api/v1/scale": Route(scale),
    "/api/v1/job": Route(tables.job),
    "/api/v1/batch": Route(tables.batch),
    **{path: Route(partial(tables.serve, read)) for path, read in tables.READERS.items()},
    "/metrics": Route(scrape, connects=True),
    "/live": Route(live.stream, connects=True),
    "/new": Route(new_task.page),
    "/enqueue": Route(new_task.create, "POST", "enqueue"),
    "/cancel": Route(acts.cancel, "POST", "cancel"),
    "/retry": Route(acts.retry, "POST", "retry"),
    "/run-now": Route(acts.run_now, "POST", "retry"),
    "/drop": Route(acts.drop, "POST", "drop"),
    "/confirm": Route(acts.confirm),
    "/bulk": Route(acts.bulk),
    "/retry-all": Route(acts.START["retry"], "POST", "retry"),
    "/drop-all": Route(acts.START["drop"], "POST", "drop"),
    "/run-all": Route(acts.START["run"], "POST", "retry"),
    "/cancel-all": Route(acts.START["cancel"], "POST", "cancel"),
    "/cancel-batch": Route(acts.START["cancel-batch"], "POST", "cancel"),
    "/retry-batch": Route(acts.START["retry-batch"], "POST", "retry"),
    "/delete": Route(acts.START["delete"], "POST", "delete"),
    "/stop-retry": Route(partial(acts.stop, "retry"), "POST", "retry"),
    "/stop-drop": Route(partial(acts.stop, "drop"), "POST", "drop"),
    "/pause": Route(acts.pause, "POST", "pause"),
    "/resume": Route(acts.resume, "POST", "pause"),
    "/limit": Route(starts.limit, "POST", "pause"),
    "/lane-weight": Route(starts.weigh, "POST", "pause"),
    "/schedule": Route(schedules.pause, "POST", "schedules"),
    "/worker-ask": Route(workers.ask, "POST", "workers"),
    "/worker-evict": Route(workers.evict, "POST", "workers"),
    "/schedule-run": Route(schedules.run, "POST", "schedules"),
    "/schedule-times": Route(schedules.override, "POST", "schedules"),
}
"""The handlers of POST are in `worqr.dashboard.acts`, or beside their page."""
