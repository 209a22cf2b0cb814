"""``worqr schedules``: list schedules, pause or resume one, or run its task now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import App, Parameter

from worqr.cli import formatting
from worqr.cli.connect_options import FROM_ENVIRONMENT, ConnectOptions, run_connected
from worqr.cli.errors import CommandFailed
from worqr.cli.named_queue import queue_by_name, warn_if_unserved
from worqr.cli.option_types import JsonLines
from worqr.cli.output import escape, format_time, print_error, print_json
from worqr.cli.terminal import Column, show_table
from worqr.cron import Definition
from worqr.errors import did_you_mean
from worqr.inside import client_of
from worqr.keys import RegistryKeys
from worqr.peer.leader.schedule_ticker import all_schedules

if TYPE_CHECKING:
    from worqr.cron import Schedule
    from worqr.mesh import Mesh

ScheduleName = Annotated[str, Parameter(help="Name of the schedule.")]
COLUMNS: Final = (
    Column("schedule", fit="fold"),
    Column("next run", plain=format_time, shown=formatting.short_time),
    Column("last run", plain=format_time, shown=formatting.short_time, always=True),
    Column(
        "paused",
        plain=lambda paused: "yes" if paused else "",
        shown=lambda paused: "paused" if paused else "",
        note=True,
    ),
)

schedules: App = App(name="schedules", help="List schedules, pause or resume one, or run its task now.")


@schedules.default
@schedules.command(name="list", help="List schedules. This is the default.")
def list_schedules(*, json: JsonLines = False, connect: ConnectOptions = FROM_ENVIRONMENT) -> None:
    """List the schedules of the mesh."""

    async def command(mesh: Mesh) -> list[Schedule]:
        return await mesh.schedules()

    found = run_connected(connect, command)
    if json:
        for schedule in found:
            print_json(asdict(schedule))
    elif not found:
        print_error("no worker has declared a schedule")
    else:
        show_table(COLUMNS, map(_row, found))


def _row(schedule: Schedule) -> Sequence[object]:
    return (schedule.name, schedule.next_run, schedule.last_run, schedule.paused)


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
def run_schedule(name: ScheduleName, /, *, connect: ConnectOptions = FROM_ENVIRONMENT) -> None:
    """Enqueue the task of a schedule now, even if the schedule is paused.

    The schedule itself does not change. Exit code 1 if the previous run is still waiting or running.
    """

    async def command(mesh: Mesh) -> str:
        definition = await _definition(mesh, name)
        queue = queue_by_name(mesh, definition.queue)
        job = await queue.dispatch(definition.task, id=definition.job, if_exists="skip")
        if job.outcome == "unchanged":
            raise CommandFailed(
                f"the previous run of schedule {name!r} has not ended; see `worqr status {job.id!r} --queue {queue.name!r}`"
            )
        await warn_if_unserved(mesh, queue.name)
        return queue.name

    queue = run_connected(connect, command)
    print(f"Enqueued schedule {escape(name)} on queue {escape(queue)}")


async def _definition(mesh: Mesh, name: str) -> Definition:
    """Return the definition of a schedule: its queue, its task, and the id of its job.

    Raises:
        CommandFailed: there is no schedule of this name.
        UsageError: a newer version of worqr declared it.
    """
    rows, _now = await all_schedules(client_of(mesh).ask, RegistryKeys(mesh.prefix))
    known = {row.name: row.definition for row in rows}
    if name not in known:
        raise CommandFailed(
            f"there is no schedule {name!r} in this mesh; {did_you_mean(name, known, '`worqr schedules` lists them')}"
        )
    return Definition.decode(known[name])
