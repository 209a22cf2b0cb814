"""JSON for other programs, behind the same gate as the pages: what a program that scales workers needs."""

from __future__ import annotations

import math
from datetime import timedelta
from functools import partial
from typing import Any, Final

from starlette.responses import JSONResponse, Response

from worqr.client.queue import Queue
from worqr.dashboard.batches import gathered
from worqr.dashboard.holds import may_run
from worqr.dashboard.reading import look
from worqr.dashboard.visit import Visit
from worqr.records import TaskInfo

SOON: Final = 10.0
"""Seconds before its time from which a scheduled job counts as load. A worker takes about that long to start."""
MOST_SOON: Final = 200
"""Scheduled jobs that are counted at most."""
MOST_PLACES: Final = 100_000


async def scale(visit: Visit) -> Response:
    """Return how much there is to do on one queue, also while no worker runs. Tasks that a pause or a limit holds do not count.

    With `places`, the number of tasks that one worker runs at the same time, also return how many workers are wanted.
    """
    queue, places = visit.queue(visit.text("queue")), visit.number("places", 0, 1, MOST_PLACES)
    state = await look(visit)
    calls: list[Any] = [queue.info, partial(_soonest, queue)]
    info, soonest = await gathered(calls)
    info = state.age_in(info)
    until = state.info.at + timedelta(seconds=SOON)
    soon = sum(1 for task in soonest if task.run_at is not None and task.run_at <= until)
    load = may_run(info, soon)
    found: dict[str, Any] = {"queue": queue.name, "load": load, "age": info.age or 0.0, "workers": info.workers}
    found |= {"held_back": info.held_back, "held_for": info.held_for}
    if places:
        found["wanted"] = math.ceil(load / places)
    return JSONResponse(found)


async def _soonest(queue: Queue) -> list[TaskInfo]:
    return await queue.jobs(state="scheduled", limit=MOST_SOON)
