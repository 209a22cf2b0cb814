"""The page of schedules, and its forms: pause, resume, run now, other times, and back to the times of the code."""

from __future__ import annotations

from datetime import datetime
from functools import partial
from typing import Final

from starlette.responses import Response

from worqr.client.queue import queue_named
from worqr.cron import Schedule
from worqr.dashboard.acts import done
from worqr.dashboard.batches import unless_refused
from worqr.dashboard.guard import Refused
from worqr.dashboard.reading import all_schedules, with_state
from worqr.dashboard.visit import Visit
from worqr.errors import UsageError
from worqr.records import MOST_RECENT, EndedRun

NEXT: Final = 5
"""Times that the page of one schedule lists."""
LAST: Final = 20
"""Runs that it lists."""


async def page(visit: Visit) -> Response:
    """All schedules; or one with its next times, if the address names it."""
    _check(visit)
    found, _ = await with_state(visit, partial(all_schedules, visit))
    name = visit.text("name")
    if not name:
        return visit.page("schedules.html", live="", found=found)
    one = next((each for each in found if each.name == name), None)
    if one is None:
        raise Refused(404, "There is no schedule of this name.")
    upcoming, why = _next_runs(one)
    ended, refused = await _last_runs(visit, one)
    return visit.page(
        "schedule.html",
        live="",
        schedule=one,
        upcoming=upcoming,
        why=why,
        info={"name": one.queue},
        ended=ended,
        ended_refused=refused,
    )


async def _last_runs(visit: Visit, schedule: Schedule) -> tuple[list[EndedRun], str]:
    """Return the last runs of a schedule that workers have kept; or the words of a server that refuses them."""
    if not schedule.queue:
        return [], ""
    read = partial(queue_named(visit.mesh.queue, schedule.queue).recent, MOST_RECENT)
    runs, refused = await unless_refused(read, list[EndedRun]())
    return [run for run in runs if run.id == f"cron:{schedule.name}"][:LAST], refused


def _next_runs(schedule: Schedule) -> tuple[list[datetime], str]:
    """Return the next times; or why they are not known."""
    if schedule.paused:
        return [], "The schedule is paused."
    if schedule.problem:
        return [], "They are not known, because of the problem above."
    try:
        return schedule.next_runs(NEXT), ""
    except UsageError as error:  # the extra is missing
        return [], str(error)


async def pause(visit: Visit) -> Response:
    """Pause or resume a schedule."""
    _check(visit)
    name, paused = visit.text("name"), visit.choice("paused", ("yes", "no")) == "yes"

    async def act() -> str:
        await visit.mesh.pause_schedule(name, paused=paused)
        return "schedule-pause" if paused else "schedule-resume"

    return await done(visit, act)


async def run(visit: Visit) -> Response:
    """Enqueue the task of a schedule now."""
    _check(visit)
    name = visit.text("name")

    async def act() -> str:
        job = await visit.mesh.run_schedule(name)
        return "schedule-busy" if job.outcome == "unchanged" else "schedule-run"

    return await done(visit, act)


async def override(visit: Visit) -> Response:
    """Give a schedule other times, or those of its code."""
    _check(visit)
    name, reset = visit.text("name"), visit.choice("reset", ("no", "yes")) == "yes"
    cron, timezone = visit.text("cron").strip(), visit.text("timezone").strip()

    async def act() -> str:
        if reset:
            await visit.mesh.override_schedule(name, None)
            return "schedule-reset"
        await visit.mesh.override_schedule(name, cron, timezone=timezone or None)
        return "schedule-override"

    return await done(visit, act)


def _check(visit: Visit) -> None:
    if not visit.viewer.sees_all:
        raise Refused(403, "Schedules are for viewers who see all queues only.")
