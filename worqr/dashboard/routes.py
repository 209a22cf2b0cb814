"""All addresses of the dashboard: the method, the right and the handler of each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

from worqr.dashboard import (
    acts,
    api,
    batch_pages,
    bulk_pages,
    failures,
    live,
    log_page,
    metrics,
    new_task,
    reading,
    schedules,
    server_page,
    starts,
    tables,
    workers,
)
from worqr.dashboard.access import Right
from worqr.dashboard.visit import Answer, Visit


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
    "/api/v1/scale": Route(api.scale),
    "/api/v1/job": Route(tables.job),
    "/api/v1/batch": Route(tables.batch),
    **{path: Route(partial(tables.serve, read)) for path, read in tables.READERS.items()},
    "/metrics": Route(metrics.scrape, connects=True),
    "/live": Route(live.stream, connects=True),
    "/new": Route(new_task.page),
    "/enqueue": Route(new_task.create, "POST", "enqueue"),
    "/cancel": Route(acts.cancel, "POST", "cancel"),
    "/retry": Route(acts.retry, "POST", "retry"),
    "/run-now": Route(acts.run_now, "POST", "retry"),
    "/drop": Route(acts.drop, "POST", "drop"),
    "/confirm": Route(bulk_pages.confirm),
    "/bulk": Route(bulk_pages.bulk),
    "/retry-all": Route(bulk_pages.START["retry"], "POST", "retry"),
    "/drop-all": Route(bulk_pages.START["drop"], "POST", "drop"),
    "/run-all": Route(bulk_pages.START["run"], "POST", "retry"),
    "/cancel-all": Route(bulk_pages.START["cancel"], "POST", "cancel"),
    "/cancel-batch": Route(bulk_pages.START["cancel-batch"], "POST", "cancel"),
    "/retry-batch": Route(bulk_pages.START["retry-batch"], "POST", "retry"),
    "/delete": Route(bulk_pages.START["delete"], "POST", "delete"),
    "/stop-retry": Route(partial(bulk_pages.stop, "retry"), "POST", "retry"),
    "/stop-drop": Route(partial(bulk_pages.stop, "drop"), "POST", "drop"),
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
