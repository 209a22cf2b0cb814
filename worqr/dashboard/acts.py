"""The handlers of forms: each is one kind of call of the public API, and returns to its page with the exact outcome.

Clicking twice changes nothing more: a job that was cancelled, retried or dropped is not found the second time.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from starlette.responses import Response

from worqr.dashboard.guard import Refused
from worqr.dashboard.notices import UNKNOWN, UNSENT
from worqr.dashboard.reading import gathered
from worqr.dashboard.visit import LONGEST_VALUE, Visit
from worqr.errors import Unavailable
from worqr.inside import client_of

if TYPE_CHECKING:
    from worqr.client.dead_letters import Aside
    from worqr.records import CancelCount

ACKNOWLEDGED_WITHIN: Final = 5.0
"""Seconds for which a cancel waits for the runs to end."""
LONGEST_PAUSE: Final = 366 * 86400
"""Seconds."""
MOST: Final = 100
"""Tasks of one act, so that it never holds up the server."""


def _ids(visit: Visit) -> list[str]:
    ids = _values(visit, "id")
    if not ids:
        raise Refused(400, "No task was chosen. Tick the box of at least one, then try again.")
    return ids


def _values(visit: Visit, name: str) -> list[str]:
    """Return the values of a field that a form may have several times."""
    found = [value for field, value in visit.form if field == name and value]
    if max(map(len, found), default=0) > LONGEST_VALUE:
        raise Refused(400, f"{name!r} is longer than {LONGEST_VALUE} characters.")
    if len(found) > MOST:
        raise Refused(400, f"At most {MOST} tasks at a time. For more, act on all tasks that a list shows.")
    return found


async def done(visit: Visit, act: Callable[[], Awaitable[str]]) -> Response:
    """Return to the page of the form, also if the server has not answered."""
    try:
        done = await act()
    except Unavailable as error:
        done = UNSENT if error.sent is False else UNKNOWN
    return visit.see_other(done)


async def note(visit: Visit, kind: str, queue: str, ids: Sequence[str] = (), count: int = 0, text: str = "") -> None:
    """Write an act into the log of the mesh, unless the call of the API does so."""
    job = ids[0] if len(ids) == 1 else ""
    await client_of(visit.mesh).note(kind, queue=queue, job=job, count=count, text=text)


def reason_of(visit: Visit) -> str:
    """Return the name of the viewer, with the reason in the form."""
    words = visit.text("reason").strip()
    return f"{visit.viewer.name}: {words}" if words else visit.viewer.name


async def cancel(visit: Visit) -> Response:
    """Cancel jobs, and wait until their runs have ended."""
    queue, reason, claims = visit.queue(visit.text("queue")), reason_of(visit), _values(visit, "claim")
    ids = [] if claims else _ids(visit)

    async def one(job: str) -> CancelCount:
        return await queue.job(job).cancel(reason=reason, wait=ACKNOWLEDGED_WITHIN)

    async def plain() -> CancelCount:
        return await queue.cancel_claims(*claims, reason=reason, wait=ACKNOWLEDGED_WITHIN)

    async def act() -> str:
        began = time.monotonic()
        counts = await gathered([partial(one, job) for job in ids] + ([plain] if claims else []))
        ms = round((time.monotonic() - began) * 1000)
        sums = [sum(getattr(each, name) for each in counts) for name in ("waiting", "running", "acknowledged")]
        await note(visit, "cancelled", queue.name, ids, sums[0] + sums[1], visit.text("reason").strip())
        return ":".join(map(str, ("cancel", *sums, ms)))

    return await done(visit, act)


def _aside(visit: Visit) -> Aside:
    queue = visit.queue(visit.text("queue"))
    return queue.failed if visit.choice("list", ("failed", "broken")) == "failed" else queue.broken


async def retry(visit: Visit) -> Response:
    """Put dead-letter records back into their queue."""
    aside, ids = _aside(visit), _ids(visit)

    async def act() -> str:
        count = await aside.retry(*ids)
        if not count:
            await note(visit, "retried", visit.text("queue"), ids)
        return f"retry:{count}:{len(ids)}"

    return await done(visit, act)


async def run_now(visit: Visit) -> Response:
    """Make scheduled jobs due now."""
    queue, ids = visit.queue(visit.text("queue")), _ids(visit)

    async def act() -> str:
        count = await queue.run_now(*ids)
        await note(visit, "run_now", queue.name, ids, count)
        return f"run:{count}:{len(ids)}"

    return await done(visit, act)


async def drop(visit: Visit) -> Response:
    """Delete dead-letter records."""
    aside, ids = _aside(visit), _ids(visit)

    async def act() -> str:
        count = await aside.drop(*ids)
        if not count:
            await note(visit, "dropped", visit.text("queue"), ids)
        return f"drop:{count}:{len(ids)}"

    return await done(visit, act)


async def pause(visit: Visit) -> Response:
    """Pause a queue or a lane, until it is resumed or for some seconds."""
    queue, lane, reason = visit.queue(visit.text("queue")), visit.text("lane") or None, reason_of(visit)
    seconds = visit.number("duration", -1, 0, LONGEST_PAUSE)

    async def act() -> str:
        await queue.pause(reason, duration=None if seconds < 0 else seconds, lane=lane)
        return "pause" if lane is None else "lane-pause"

    return await done(visit, act)


async def resume(visit: Visit) -> Response:
    """Resume a queue or a lane."""
    queue, lane = visit.queue(visit.text("queue")), visit.text("lane") or None

    async def act() -> str:
        await queue.resume(lane=lane)
        return "resume" if lane is None else "lane-resume"

    return await done(visit, act)
