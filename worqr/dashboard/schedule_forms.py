"""Schedules that people store: the form, with a check that lists the next times; and the deletion of one.

Only functions with ``schedulable=True`` can be chosen: those of the application's mesh, or those whose workers say so. A form
that changes a schedule keeps its function and its arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any, Final, cast
from zoneinfo import ZoneInfo

from starlette.responses import JSONResponse, RedirectResponse, Response

from worqr import ops
from worqr.client.stored_schedules import StoredScheduleOptions, call_with, next_times_of
from worqr.dashboard.access import Refused
from worqr.dashboard.forms import PAYLOAD, done, fields_of_function, note, payload_of, typed_text
from worqr.dashboard.pages import check_sees_all, look
from worqr.dashboard.request import UNKNOWN, UNSENT, Visit, notice
from worqr.errors import Unavailable, UsageError, WorqrError
from worqr.escaping import escape
from worqr.inside import client_of, definition_of
from worqr.keys import QueueKeys
from worqr.policy import SCHEDULABLE

STORED, DELETED, ABSENT = "schedule-stored", "schedule-deleted", "schedule-none"
NEXT: Final = 5
"""Times that the check lists."""
TYPED: Final = ("name", "queue", "cron", "every", "timezone", "misfire", "overlap", "until", "times", "lane")
NEW_ONE: Final[Mapping[str, str]] = {"timezone": "UTC", "misfire": "once", "overlap": "skip"}


async def page(visit: Visit) -> Response:
    """The form: of a new schedule, or of one that is stored."""
    check_sees_all(visit)
    if "schedules" not in visit.viewer.may:
        raise Refused(403, "You may not change schedules. It needs the right 'schedules'.")
    await look(visit)  # for the header
    found = await _stored(visit) if visit.text("edit") else None
    given = {name: visit.text(name) for name in TYPED}
    return _form(visit, {**NEW_ONE, **{name: text for name, text in given.items() if text}} if found is None else found)


async def _stored(visit: Visit) -> dict[str, str]:
    """Return what the form shows of the schedule that it changes."""
    found = await visit.mesh.schedule_handle(visit.text("name")).info()
    if found is None or not found.stored:
        raise Refused(404, "No schedule of this name is stored.")
    if found.override is not None:
        raise Refused(400, "The times of the schedule are overridden. Remove the override, then change the schedule.")
    return {
        "name": found.name,
        "queue": found.queue,
        "cron": found.cron,
        "every": "" if found.every is None else str(found.every).removesuffix(".0"),
        "timezone": found.timezone,
        "until": "" if found.until is None else _local(found.until, found.timezone),
        "times": "" if found.times is None else str(found.times),
    }


def _local(when: datetime, zone: str) -> str:
    with suppress(ValueError, OSError, LookupError):  # any program may have stored the name of a zone
        when = when.astimezone(ZoneInfo(zone)).replace(tzinfo=None)
    return when.isoformat(timespec="milliseconds" if when.second or when.microsecond else "minutes")


def _form(visit: Visit, given: Mapping[str, str], why: str = "", status: int = 200, **more: Any) -> Response:
    """Return the form with what was typed, what is wrong with it, and its next times."""
    if why and visit.by_token:
        return JSONResponse({"error": why}, status)
    fields = {name: given.get(name, "") for name in TYPED}
    editing = bool(visit.text("edit"))
    arguments = () if editing else fields_of_function(visit, fields["queue"])
    functions = sorted(name for name, each in visit.functions.items() if definition_of(each).options.schedulable)
    context: dict[str, Any] = {"fields": arguments, "payload": typed_text(visit, PAYLOAD), "functions": functions}
    context |= {"upcoming": (), "checked": False} | more
    return visit.page("schedule_form.html", status, live="", given=fields, editing=editing, why=why, **context)


async def store(visit: Visit) -> Response:
    """Store the schedule of the form, or only list its next times."""
    check_sees_all(visit)
    given = {name: visit.text(name).strip() for name in TYPED}
    try:
        options = _options(given, editing=bool(visit.text("edit")))
        if visit.text("check"):
            await look(visit)
            upcoming = next_times_of(given["name"], options, NEXT)
            return _form(visit, given, upcoming=upcoming, checked=True)
        queue = (
            await _changed(visit, given["name"], options) if visit.text("edit") else await _added(visit, given, options)
        )
    except Unavailable as error:
        return _form(visit, given, notice(UNSENT if error.sent is False else UNKNOWN), 503)
    except WorqrError as error:
        return _form(visit, given, escape(str(error)), 400)
    await note(visit, "schedule_stored", queue, text=given["name"])
    if visit.by_token:
        return JSONResponse({"outcome": notice(STORED), "name": given["name"]})
    return RedirectResponse(visit.link("/schedules", name=given["name"], done=STORED), 303)


async def _added(visit: Visit, given: Mapping[str, str], options: StoredScheduleOptions) -> str:
    """Store a new schedule. Return its queue."""
    queue = visit.queue(given["queue"]).name
    if not await _is_schedulable(visit, queue):
        raise UsageError(
            f"{queue!r} cannot be scheduled here: its function needs schedulable=True in @mesh.task, and a worker that serves it"
        )
    call = visit.mesh.call(queue, payload_of(visit, queue))
    if given["lane"]:
        call = call_with(call, lane=given["lane"])
    if await visit.mesh.schedule_handle(given["name"]).info() is not None:
        raise UsageError(f"there is a schedule {given['name']!r} already")
    await visit.mesh.schedule(given["name"], call, **options)
    return queue


async def _changed(visit: Visit, name: str, options: StoredScheduleOptions) -> str:
    """Change the times of a stored schedule. Return its queue."""
    handle = visit.mesh.schedule_handle(name)
    await handle.change(**options)
    found = await handle.info()
    return "" if found is None else found.queue


async def _is_schedulable(visit: Visit, queue: str) -> bool:
    """Return True if the application's function, or the workers of the queue, say so."""
    if queue in visit.functions:
        return bool(definition_of(visit.functions[queue]).options.schedulable)
    client = client_of(visit.mesh)
    shards = await client.sharding.shards(QueueKeys.of(visit.mesh.prefix, queue))
    served, _ = await client.ask(ops.list_policies(shards[0]))
    return any(SCHEDULABLE in each.fields for each in served)


def _options(given: Mapping[str, str], *, editing: bool) -> StoredScheduleOptions:
    """Return the options that were typed. An empty bound of a schedule that is changed removes it."""
    cron, every, zone = given["cron"], given["every"], given["timezone"] or "UTC"
    if bool(cron) == bool(every):
        raise UsageError("Fill in a cron expression or a period, and not both.")
    found: dict[str, Any] = {"cron": cron, "timezone": zone} if cron else {"every": _number(every, "The period")}
    if editing:
        found |= {"until": None, "times": None}
    for name in ("misfire", "overlap"):
        if given[name]:
            found[name] = int(given[name]) if given[name].isdecimal() else given[name]
    if given["times"]:
        found["times"] = _times(given["times"])
    if given["until"]:
        found["until"] = _until(given["until"], zone if cron else "UTC")
    return cast("StoredScheduleOptions", found)


def _number(text: str, what: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{what} must be a number, such as 3600, not {text!r}.") from None


def _times(text: str) -> int:
    found = _number(text, "The number of runs")
    if not found.is_integer():
        raise UsageError(f"The number of runs must be whole, such as 12, not {text!r}.")
    return int(found)


def _until(text: str, zone: str) -> datetime:
    try:
        found = datetime.fromisoformat(text)
        return found if found.tzinfo else found.replace(tzinfo=ZoneInfo(zone))
    except (ValueError, OSError, LookupError):
        raise UsageError(f"The last time must be as in 2031-05-01T12:00, not {text!r}.") from None


async def delete(visit: Visit) -> Response:
    """Delete a stored schedule, and cancel its job if the form says so."""
    check_sees_all(visit)
    name, job = visit.text("name"), "cancel" if visit.text("cancel") == "yes" else "keep"

    async def act() -> str:
        if not await visit.mesh.schedule_handle(name).delete(job=cast("Any", job)):
            return ABSENT
        await note(visit, "schedule_deleted", "", text=name)
        return DELETED

    return await done(visit, act)
