"""``worqr limit``: show, set or clear the limits of a queue."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from worqr.cli.connect_options import FROM_ENVIRONMENT, ConnectOptions, run_connected
from worqr.cli.errors import InvalidArguments
from worqr.cli.output import escape, print_error, print_json
from worqr.cli.parsing import QueueName, flag, parse_rate, queue_by_name, unknown_queue_hint
from worqr.cli.queue_table import what_may_start
from worqr.limits import Limit, describe_limits

if TYPE_CHECKING:
    from worqr.mesh import Mesh
    from worqr.mesh_records import LaneInfo, QueueInfo


def limit(
    queue: QueueName,
    /,
    *,
    concurrency: Annotated[int | None, Parameter(help="Tasks that may run at once in the whole mesh.")] = None,
    rate: Annotated[
        tuple[str, ...],
        Parameter(show_default=False, help="Tasks that may start in any period, such as 100/1m. Repeatable."),
    ] = (),
    none: Annotated[bool, flag("Remove all limits, also those that the code declares.")] = False,
    clear: Annotated[bool, flag("Return to the limits that the code declares.")] = False,
    lane: Annotated[str | None, Parameter(show_default=False, help="The limits of this lane of the queue.")] = None,
    json: Annotated[bool, flag("Print one JSON object.")] = False,
    connect: ConnectOptions = FROM_ENVIRONMENT,
) -> None:
    """Show the limits of a queue, or set others in place of those that the code declares.

    A lower limit does not stop tasks that run. Limits that you set stay until --clear.
    """
    limits = (*(() if concurrency is None else (Limit(concurrency),)), *(parse_rate(each, "--rate") for each in rate))
    if bool(limits) + none + clear > 1:
        raise InvalidArguments("give --concurrency and --rate, or --none, or --clear")

    async def command(mesh: Mesh) -> tuple[QueueInfo, list[LaneInfo], str]:
        target = queue_by_name(mesh, queue)
        hint = await unknown_queue_hint(mesh, queue)  # before the change, which registers the queue
        if limits or none:
            await target.set_limit(*limits, lane=lane)
        elif clear:
            await target.clear_limit(lane=lane)
        return await target.info(), [] if lane is None else await target.lanes(limit=10_000), hint

    info, lanes, hint = run_connected(connect, command)
    facts, text = _facts(info), what_may_start(info)
    if lane is not None:
        found = next((each for each in lanes if each.name == lane), None)
        facts = {"lane": lane, "limits": [] if found is None else [asdict(each) for each in found.limits]}
        text = "the lane has no tasks" if found is None else describe_limits(found.limits)
    if json:
        print_json({"queue": queue, **facts})
    else:
        print(f"{escape(queue)}{'' if lane is None else f', lane {escape(lane)}'}: {text}")
    if hint:
        print_error(hint)


def _facts(info: QueueInfo) -> dict[str, object]:
    return {
        "limits": [asdict(each) for each in info.limits],
        "limits_overridden": info.limits_overridden,
        "held_back": info.held_back,
        "held_for": info.held_for,
    }
