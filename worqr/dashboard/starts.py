"""What may start: the page of the lanes of a queue, and the forms that change limits and weights."""

from __future__ import annotations

from typing import Final

from starlette.responses import Response

from worqr.dashboard.acts import done
from worqr.dashboard.guard import Refused
from worqr.dashboard.numbers import lane_rows, signature
from worqr.dashboard.reading import with_state
from worqr.dashboard.visit import Visit
from worqr.limits import Limit
from worqr.mesh_records import LaneInfo

SHOWN: Final = 100
"""Lanes on the page: those with the most tasks."""


async def lanes_of(visit: Visit) -> list[LaneInfo]:
    """Return the lanes of the queue that the address names, one more than the page shows if there are more."""
    return await visit.queue(visit.text("queue")).lanes(limit=SHOWN + 1)


async def page(visit: Visit) -> Response:
    """The lanes of a queue."""
    queue = visit.queue(visit.text("queue"))
    found, state = await with_state(visit, lambda: lanes_of(visit))
    shown, more = found[:SHOWN], len(found) > SHOWN
    live = visit.link("/live", view="lanes", queue=queue.name, seen=signature(lane_rows(shown)))
    return visit.page("lanes.html", live=live, state=state, queue=queue.name, found=shown, shown=SHOWN, more=more)


async def limit(visit: Visit) -> Response:
    """Set the limits of a queue or of a lane, or return to those of the code."""
    queue, lane = visit.queue(visit.text("queue")), visit.text("lane") or None
    clears, limits = visit.text("clear") == "yes", _limits(visit)
    if clears == bool(limits):
        raise Refused(
            400, "Fill in how many may run at once, or how many may start in how many seconds; or clear the limit."
        )

    async def act() -> str:
        if clears:
            await queue.clear_limit(lane=lane)
            return "limit-cleared"
        await queue.set_limit(*limits, lane=lane)
        return "limit"

    return await done(visit, act)


def _limits(visit: Visit) -> list[Limit]:
    """Return the limits of the form. Raises Refused, and UsageError for numbers that a limit cannot have."""
    concurrency, rate, per = (_number(visit, name) for name in ("concurrency", "rate", "per"))
    if (rate is None) != (per is None):
        raise Refused(400, "A rate needs both: how many tasks may start, and in how many seconds.")
    found = [] if concurrency is None else [Limit(concurrency)]
    return found if rate is None or per is None else [*found, Limit(rate=rate, per=per)]


def _number(visit: Visit, name: str) -> int | None:
    value = visit.text(name).strip()
    if value and not (value.isascii() and value.isdecimal() and len(value) <= 9):
        raise Refused(400, f"{name!r} must be a whole number.")
    return int(value) if value else None


async def weigh(visit: Visit) -> Response:
    """Set the weight of a lane; without a number, return to that of the code."""
    queue, lane, weight = visit.queue(visit.text("queue")), visit.text("lane"), _number(visit, "weight")

    async def act() -> str:
        await queue.set_weight(lane, weight)
        return "weight"

    return await done(visit, act)
