"""``worqr schedules``: list, pause, run and override schedules; store, change and delete those that programs have stored."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, cast

from cyclopts import App, Parameter

from worqr.cli.errors import CommandFailed, InvalidArguments
from worqr.cli.options import (
    FROM_ENVIRONMENT,
    ConnectOptions,
    JsonLines,
    duration_option,
    flag,
    parse_duration,
    parse_pairs,
    parse_time,
    run_connected,
    time_option,
    warn_if_unserved,
)
from worqr.cli.output import print_json, print_list, printable_json
from worqr.cli.produce_commands import Json, arguments_of, read_stdin
from worqr.client.stored_schedules import call_with
from worqr.cron import next_times
from worqr.escaping import escape
from worqr.views.tables import SCHEDULES, schedule_times
from worqr.views.values import exact_time, in_zone

if TYPE_CHECKING:
    from worqr.client.job import Job
    from worqr.client.stored_schedules import AppliedSchedules, StoredScheduleOptions
    from worqr.cron import Schedule
    from worqr.job_options import JobOptions
    from worqr.mesh import Mesh


ScheduleName = Annotated[str, Parameter(help="Name of the schedule.")]
StoredPrefix = Annotated[
    str | None, Parameter(metavar="PREFIX", help="Only stored schedules whose names begin with this.")
]
NamePrefix = Annotated[str, Parameter(metavar="PREFIX", help="Only names that begin with this.")]
NEVER: Final = "never"


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class StoredTimes:
    """The options of a stored schedule, as they are typed."""

    cron: Annotated[str | None, Parameter(help="Five fields; or --every.")] = None
    every: Annotated[str | None, duration_option("The period; or --cron.")] = None
    timezone: Annotated[str | None, Parameter(help="An IANA name. Default: UTC.")] = None
    misfire: Annotated[
        str | None, Parameter(metavar="skip|once|N", help="What to do about missed firings. Default: once.")
    ] = None
    overlap: Annotated[
        Literal["skip", "queue", "cancel"] | None,
        Parameter(help="What to do if the last run has not ended. Default: skip."),
    ] = None
    until: Annotated[str | None, time_option("The last time at which it may fire.")] = None
    max_runs: Annotated[str | None, Parameter(metavar="N", help="How many firings are enqueued in all.")] = None
    jitter: Annotated[str | None, duration_option("Delay each job by a random time up to this long.")] = None

    def options(self) -> StoredScheduleOptions:
        """Return those that were typed."""
        found: dict[str, Any] = {"cron": self.cron, "timezone": self.timezone, "overlap": self.overlap}
        found["every"] = parse_duration(self.every, "--every")
        found["jitter"] = parse_duration(self.jitter, "--jitter")
        if self.misfire is not None:
            found["misfire"] = int(self.misfire) if self.misfire.isdecimal() else self.misfire
        found = {option: value for option, value in found.items() if value is not None}
        if self.until is not None:
            found["until"] = None if self.until == NEVER else parse_time(self.until, "--until")
        if self.max_runs is not None:
            found["times"] = None if self.max_runs == NEVER else _whole(self.max_runs, "--max-runs")
        return cast("StoredScheduleOptions", found)


def _whole(text: str, what: str) -> int:
    if not text.isdecimal():
        raise InvalidArguments(f"{what} must be a number, or never, got {text!r}")
    return int(text)


NO_TIMES: Final = StoredTimes()
schedules: App = App(
    name="schedules", help="List schedules; pause, resume, run or override one; add, change or delete stored ones."
)


@schedules.default
@schedules.command(name="list", help="List schedules. This is the default.")
def list_schedules(
    *, stored: StoredPrefix = None, json: JsonLines = False, connect: ConnectOptions = FROM_ENVIRONMENT
) -> None:
    """List the schedules of the mesh."""

    async def command(mesh: Mesh) -> list[Schedule]:
        return await mesh.schedules(stored or "")

    found = run_connected(connect, command)
    nothing = "no worker has declared a schedule" if stored is None else "no schedule is stored with this prefix"
    print_list(SCHEDULES, found, asdict, json=json, nothing=nothing)


@schedules.command(name="add")
def add_schedule(
    name: ScheduleName,
    function: Annotated[str, Parameter(help="Name of the function.")],
    /,
    *given: Annotated[str, Parameter(metavar="NAME=TEXT|NAME:=JSON", help="Arguments of the function.")],
    args: Annotated[str | None, Parameter(metavar="JSON", help="All arguments as one JSON object.")] = None,
    lane: Annotated[str | None, Parameter(help="Lane of the jobs.")] = None,
    meta: Annotated[tuple[str, ...], Parameter(metavar="NAME=TEXT", help="Meta of the jobs. Repeatable.")] = (),
    times: StoredTimes = NO_TIMES,
    json: Json = False,
    connect: ConnectOptions = FROM_ENVIRONMENT,
) -> None:
    """Store a schedule, which workers fire until you delete it. Exit code 1 if it exists."""
    (whole, kwargs), options = arguments_of(given, args), times.options()
    job: JobOptions = {"meta": parse_pairs(meta, "--meta")} if meta else {}
    if lane is not None:
        job["lane"] = lane

    async def command(mesh: Mesh) -> Schedule:
        call = call_with(mesh.call(function, *whole, **kwargs), **job)
        if await mesh.schedule_handle(name).info() is not None:
            raise CommandFailed(f"there is a schedule {name!r} already; to change it, run `worqr schedules set`")
        await mesh.schedule(name, call, **options)
        await warn_if_unserved(mesh, call.queue)
        return await _schedule(mesh, name)

    _print_stored("Added", run_connected(connect, command), json=json)


@schedules.command(name="set")
def change_schedule(
    name: ScheduleName,
    /,
    *,
    times: StoredTimes = NO_TIMES,
    json: Json = False,
    connect: ConnectOptions = FROM_ENVIRONMENT,
) -> None:
    """Change the times and options of a stored schedule. What you do not name stays; `never` removes a bound."""
    options = times.options()
    if not options:
        raise InvalidArguments("what shall be changed? Use --cron, --every or another option")

    async def command(mesh: Mesh) -> Schedule:
        await mesh.schedule_handle(name).change(**options)
        return await _schedule(mesh, name)

    _print_stored("Changed", run_connected(connect, command), json=json)


@schedules.command(name="delete")
def delete_schedule(
    name: ScheduleName,
    /,
    *,
    cancel_job: Annotated[bool, flag("Cancel a job that it has enqueued already.")] = False,
    connect: ConnectOptions = FROM_ENVIRONMENT,
) -> None:
    """Delete a stored schedule. Exit code 1 if there is none."""

    async def command(mesh: Mesh) -> bool:
        return await mesh.schedule_handle(name).delete(job="cancel" if cancel_job else "keep")

    if not run_connected(connect, command):
        raise CommandFailed(f"there is no schedule {name!r} in this mesh")
    print(f"Deleted schedule {escape(name)}")


@schedules.command(name="next")
def show_next(
    cron: Annotated[str, Parameter(help="Five fields, such as '30 3 * * 1-5'.")],
    /,
    *,
    timezone: Annotated[str, Parameter(help="An IANA name, such as Europe/Berlin.")] = "UTC",
    count: Annotated[int, Parameter(help="How many times, 1 to 100.")] = 5,
    json: JsonLines = False,
) -> None:
    """Check a cron expression, and print its next times in its zone, without a server."""
    for each in next_times(cron, timezone, count):
        if json:
            print_json({"at": each, "local": in_zone(each, timezone)})
        else:
            print(in_zone(each, timezone))


@schedules.command(name="export")
def export_schedules(prefix: NamePrefix = "", /, *, connect: ConnectOptions = FROM_ENVIRONMENT) -> None:
    """Print the stored schedules as JSON Lines, for `worqr schedules import`."""

    async def command(mesh: Mesh) -> list[str]:
        return await mesh.export_schedules(prefix)

    for line in run_connected(connect, command):
        print(printable_json(line))


@schedules.command(name="import")
def import_schedules(*, json: Json = False, connect: ConnectOptions = FROM_ENVIRONMENT) -> None:
    """Store the schedules that `worqr schedules export` has printed, from the standard input. Nothing is deleted."""

    async def command(mesh: Mesh) -> AppliedSchedules:
        try:
            text = (await read_stdin()).decode()
        except UnicodeDecodeError as error:
            raise CommandFailed(f"the standard input is not UTF-8, at byte {error.start}: nothing was stored") from None
        return await mesh.import_schedules(text.split("\n"))  # texts have other separators

    done = run_connected(connect, command)
    if json:
        print_json({"created": done.created, "updated": done.updated, "unchanged": done.unchanged})
    else:
        print(f"{done.created} created, {done.updated} updated, {done.unchanged} unchanged")


def _print_stored(what: str, found: Schedule, *, json: bool) -> None:
    if json:
        print_json(asdict(found))
    else:
        times = escape(schedule_times(found))
        print(f"{what} schedule {escape(found.name)}, which runs at {times}; next run {exact_time(found.next_run)}")


@schedules.command(name="pause")
def pause_schedule(name: ScheduleName, /, *, connect: ConnectOptions = FROM_ENVIRONMENT) -> None:
    """Pause a schedule: skip its runs until you resume it."""
    _pause(name, connect, paused=True)
    print(f"Paused schedule {escape(name)}")


@schedules.command(name="resume")
def resume_schedule(name: ScheduleName, /, *, connect: ConnectOptions = FROM_ENVIRONMENT) -> None:
    """Resume a schedule. Skipped runs are not made up for."""
    _pause(name, connect, paused=False)
    print(f"Resumed schedule {escape(name)}")


def _pause(name: str, connect: ConnectOptions, *, paused: bool) -> None:
    async def command(mesh: Mesh) -> None:
        await mesh.pause_schedule(name, paused=paused)

    run_connected(connect, command)


@schedules.command(name="run")
def run_schedule(name: ScheduleName, /, *, json: JsonLines = False, connect: ConnectOptions = FROM_ENVIRONMENT) -> None:
    """Enqueue the task of a schedule now, even if the schedule is paused. Exit code 1 if the previous run still waits or runs."""

    async def command(mesh: Mesh) -> Job[bytes]:
        job = await mesh.run_schedule(name)
        if job.outcome == "unchanged":
            raise CommandFailed(
                f"the previous run of schedule {name!r} has not ended; see `worqr status {job.id!r} --queue {job.queue!r}`"
            )
        await warn_if_unserved(mesh, job.queue)
        return job

    job = run_connected(connect, command)
    if json:
        print_json({"schedule": name, "queue": job.queue, "id": job.id, "outcome": job.outcome})
    else:
        print(f"Enqueued schedule {escape(name)} on queue {escape(job.queue)}")


@schedules.command(name="override")
def override_schedule(
    name: ScheduleName,
    cron: Annotated[str, Parameter(help="Five fields, such as '30 3 * * 1-5'.")],
    /,
    *,
    timezone: Annotated[str | None, Parameter(help="An IANA name. Default: the time zone of the code.")] = None,
    json: JsonLines = False,
    connect: ConnectOptions = FROM_ENVIRONMENT,
) -> None:
    """Give a schedule other times than its code, until you reset it."""

    async def command(mesh: Mesh) -> Schedule:
        await mesh.override_schedule(name, cron, timezone=timezone)
        return await _schedule(mesh, name)

    found = run_connected(connect, command)
    if json:
        print_json(asdict(found))
    else:
        print(
            f"Schedule {escape(name)} now runs at {escape(schedule_times(found))}; next run {exact_time(found.next_run)}"
        )


@schedules.command(name="reset")
def reset_schedule(
    name: ScheduleName, /, *, json: JsonLines = False, connect: ConnectOptions = FROM_ENVIRONMENT
) -> None:
    """Return to the times of the code."""

    async def command(mesh: Mesh) -> Schedule:
        await mesh.override_schedule(name, None)
        return await _schedule(mesh, name)

    found = run_connected(connect, command)
    if json:
        print_json(asdict(found))
    else:
        print(f"Schedule {escape(name)} runs at the times of its code")


async def _schedule(mesh: Mesh, name: str) -> Schedule:
    found = await mesh.schedule_handle(name).info()
    if found is None:
        raise CommandFailed(f"schedule {name!r} was removed meanwhile")
    return found
