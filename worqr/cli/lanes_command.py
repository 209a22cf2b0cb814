"""``worqr lanes``: list the lanes of a queue, set the weight of one, or cancel the jobs of one."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import Parameter

from worqr.cli import output
from worqr.cli.connect_options import FROM_ENVIRONMENT, ConnectOptions, run_connected
from worqr.cli.errors import InvalidArguments
from worqr.cli.output import escape, print_error, print_json
from worqr.cli.parsing import QueueName, flag, queue_by_name, unknown_queue_hint
from worqr.cli.terminal import Column, number, show_table
from worqr.limits import describe_limits

if TYPE_CHECKING:
    from worqr.mesh import Mesh
    from worqr.mesh_records import LaneInfo

LANES: Final = (
    Column("lane"),
    number("waiting"),
    number("running"),
    number("weight"),
    Column("limits"),
    Column("held"),
)


def lanes(
    queue: QueueName,
    /,
    *,
    lane: Annotated[str | None, Parameter(show_default=False, help="Only this lane.")] = None,
    weight: Annotated[
        int | None, Parameter(show_default=False, help="Set the weight of --lane: 1 to 1000; 0: as the code declares.")
    ] = None,
    cancel: Annotated[bool, flag("Cancel all jobs of --lane: waiting, running and scheduled.")] = False,
    limit: Annotated[int, Parameter(help="List at most N lanes, those with the most tasks.")] = 100,
    json: Annotated[bool, flag("Print one JSON object per lane.")] = False,
    connect: ConnectOptions = FROM_ENVIRONMENT,
) -> None:
    """List the lanes of a queue: how many tasks wait and run in each, and why none starts.

    A lane that has no tasks is listed if it is paused, or if an operator has set its weight or limit.
    """
    if lane is None and (weight is not None or cancel):
        raise InvalidArguments("--weight and --cancel need --lane, the lane that they are about")

    async def command(mesh: Mesh) -> tuple[list[LaneInfo], str, str]:
        target, done = queue_by_name(mesh, queue), ""
        hint = await unknown_queue_hint(mesh, queue)  # before a change, which registers the queue
        if lane is not None and weight is not None:
            await target.set_weight(lane, weight or None)
        if lane is not None and cancel:
            count = await target.cancel_lane(lane)
            done = f"Cancelled {count.waiting + count.running:,} jobs of lane {escape(lane)}"
        found = await target.lanes(limit=10_000 if lane is not None else limit)
        return [each for each in found if lane in {None, each.name}], done, hint

    found, done, hint = run_connected(connect, command)
    if json:
        for each in found:
            print_json({"queue": queue, **asdict(each)})
    elif done:
        print(done)
    else:
        show_table(LANES, map(_row, found))
    if hint:
        print_error(hint)


def _row(lane: LaneInfo) -> tuple[object, ...]:
    limits = describe_limits(lane.limits) if lane.limits else ""
    return (lane.name, lane.waiting, lane.running, lane.weight, limits, why_held(lane))


def why_held(lane: LaneInfo) -> str:
    """Return why no task of the lane may start now, and for how long; empty if one may."""
    if lane.paused is not None:
        reason = f"paused: {lane.paused}" if lane.paused else "paused"
    elif lane.held:
        reason = "limit reached" if lane.held_for is None else "rate reached"
    else:
        return ""
    return reason if lane.held_for is None else f"{reason}, for {output.short_duration(lane.held_for)}"
