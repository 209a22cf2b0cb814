"""The pages of batches: those of a queue, and one. Acts on a batch are in `worqr.dashboard.forms`, like those on many tasks.

A batch has jobs in several queues. A viewer who does not see all of these may look at it, without the names of the others, but
may not act on it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from starlette.responses import Response

from worqr.dashboard.access import Refused
from worqr.dashboard.pages import with_state
from worqr.dashboard.state import batch_numbers
from worqr.errors import NoResult

if TYPE_CHECKING:
    from worqr.batches import BatchInfo
    from worqr.dashboard.request import Visit


SHOWN: Final = 100
"""Batches on the page of a queue."""


async def listed(visit: Visit) -> Response:
    """The batches whose home is a queue."""
    queue = visit.queue(visit.text("queue"))
    found, _ = await with_state(visit, lambda: queue.batches(SHOWN + 1))
    rows, more = found[:SHOWN], len(found) > SHOWN
    return visit.page("batches.html", live="", queue=queue.name, rows=rows, shown=SHOWN, more=more)


async def page(visit: Visit) -> Response:
    """One batch."""
    info, _ = await with_state(visit, partial(read, visit))
    return visit.page(
        "batch.html",
        live=visit.link("/live", view="batch", queue=info.queue, id=info.id),
        info=info,
        numbers=batch_numbers(info),
        queues=seen_queues(visit, info),
        follow_up=seen_follow_up(visit, info),
        may_act=sees_all_of(visit, info),
    )


async def read(visit: Visit) -> BatchInfo:
    """Return the batch that the address names. Raises Refused if it is unknown."""
    batch = visit.queue(visit.text("queue")).batch(visit.text("id"))
    try:
        return await batch.info()
    except NoResult:
        raise Refused(
            404, "This queue has no batch with this id: it never existed, or its record was deleted after its end."
        ) from None


async def batch_to_change(visit: Visit) -> BatchInfo:
    """Return the batch that the field `batch` names, for an act on it. Raises Refused if the viewer may not change it."""
    queue = visit.queue(visit.text("queue"))
    try:
        info = await queue.batch(visit.text("batch")).info()
    except NoResult:
        raise Refused(404, "Nothing was changed: this queue has no batch with this id.") from None
    if not sees_all_of(visit, info):
        raise Refused(403, "Nothing was changed: acts on this batch are for viewers who see all its queues.")
    return info


def sees_all_of(visit: Visit, info: BatchInfo) -> bool:
    """Return True if the viewer sees all queues of a batch."""
    return all(map(visit.viewer.sees, info.queues))


def seen_queues(visit: Visit, info: BatchInfo) -> list[str]:
    """Return the queues of a batch that the viewer sees."""
    return list(filter(visit.viewer.sees, info.queues))


def seen_follow_up(visit: Visit, info: BatchInfo) -> tuple[str, str] | None:
    """Return the queue and the id of the follow-up of a batch; None if there is none, or the viewer does not see its queue."""
    return info.follow_up if info.follow_up is not None and visit.viewer.sees(info.follow_up[0]) else None
