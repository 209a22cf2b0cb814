"""``worqr schedules``: list schedules, pause or resume one, run its task now, or override its times."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from worqr.cli.errors import CommandFailed
from worqr.cli.options import FROM_ENVIRONMENT, ConnectOptions, JsonLines, run_connected, warn_if_unserved
from worqr.cli.output import print_json, print_list
from worqr.escaping import escape
from worqr.views.tables import SCHEDULES, schedule_times
from worqr.views.values import exact_time

if TYPE_CHECKING:
    from worqr.client.job import Job
    from worqr.cron import Schedule
    from worqr.mesh import Mesh


ScheduleName = Annotated[str, Parameter(help="Name of the schedule.")]
schedules: App = App(name="schedules", help="List schedules, pause, resume or override one, or run its task now.")


@schedules.default
@schedules.command(name="list", help="List schedules. This is the default.")
def list_schedules(*, json: JsonLines = False, connect: ConnectOptions = FROM_ENVIRONMENT) -> None:
    """List the schedules of the mesh."""

    async def command(mesh: Mesh) -> list[Schedule]:
        return await mesh.schedules()

    found = run_connected(connect, command)
    print_list(SCHEDULES, found, asdict, json=json, nothing="no worker has declared a schedule")


@schedules.command(name="pause")
def pause_schedule(name: ScheduleName, /, *, connect: ConnectOptions = FROM_ENVIRONMENT) -> None:
    """Pause a schedule: skip its runs until you resume it."""
    _pause(name, connect, paused=True)
    print(f"Paused schedule {escape(name)}")


@schedules.command(name="resume")
def resume_schedule(name: ScheduleName, /, *, connect: ConnectOptions = FROM_ENVIRONMENT) -> None:
    """Resume a schedule. Runs that were skipped are not made up for."""
    _pause(name, connect, paused=False)
    print(f"Resumed schedule {escape(name)}")


def _pause(name: str, connect: ConnectOptions, *, paused: bool) -> None:
    async def command(mesh: Mesh) -> None:
        await mesh.pause_schedule(name, paused=paused)

    run_connected(connect, command)


@schedules.command(name="run")
def run_schedule(name: ScheduleName, /, *, json: JsonLines = False, connect: ConnectOptions = FROM_ENVIRONMENT) -> None:
    """Enqueue the task of a schedule now, even if the schedule is paused.

    The schedule itself does not change. Exit code 1 if the previous run is still waiting or running.
    """

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
    cron: Annotated[str, Parameter(help="A cron expression of five fields, such as '30 3 * * 1-5'.")],
    /,
    *,
    timezone: Annotated[str | None, Parameter(help="An IANA name. Default: the time zone of the code.")] = None,
    json: JsonLines = False,
    connect: ConnectOptions = FROM_ENVIRONMENT,
) -> None:
    """Give a schedule other times than its code, until you reset it.

    The override survives restarts and changes of the code.
    """

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
    """Remove the override of a schedule, so that it runs at the times of its code again."""

    async def command(mesh: Mesh) -> Schedule:
        await mesh.override_schedule(name, None)
        return await _schedule(mesh, name)

    found = run_connected(connect, command)
    if json:
        print_json(asdict(found))
    else:
        print(f"Schedule {escape(name)} runs at the times of its code")


async def _schedule(mesh: Mesh, name: str) -> Schedule:
    found = next((each for each in await mesh.schedules() if each.name == name), None)
    if found is None:
        raise CommandFailed(f"schedule {name!r} was removed meanwhile")
    return found
