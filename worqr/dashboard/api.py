"""JSON for other programs, behind the same gate as the pages: what a program that scales workers needs."""

from __future__ import annotations

import math
from typing import Any, Final

from starlette.responses import JSONResponse, Response

from worqr.dashboard.holds import may_run
from worqr.dashboard.reading import look
from worqr.dashboard.visit import Visit

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
