"""``worqr info``: the mesh as a whole."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Final

from worqr.cli import formatting
from worqr.cli.connect_options import FROM_ENVIRONMENT, ConnectOptions, run_connected
from worqr.cli.option_types import flag
from worqr.cli.output import print_json
from worqr.cli.terminal import Column, number, show_facts, show_table

if TYPE_CHECKING:
    from worqr.mesh import Mesh
    from worqr.records import MeshInfo

APPS: Final = (
    Column("app", plain=lambda app: app or "-", fit="fold"),
    number("workers", always=True),
    number("running", always=True),
    number("room", always=True),
)


def info(
    *, json: Annotated[bool, flag("Print one JSON object.")] = False, connect: ConnectOptions = FROM_ENVIRONMENT
) -> None:
    """Show the mesh as a whole: its leader, the sums of all queues, and the workers of each application."""

    async def command(mesh: Mesh) -> MeshInfo:
        return await mesh.info()

    found = run_connected(connect, command)
    if json:
        print_json(asdict(found))
        return
    facts = _facts(found)
    show_facts(facts, {"leader": "" if found.leader else "bold red"})
    if found.apps:
        print()
        show_table(APPS, [(name, app.workers, app.running, app.room) for name, app in found.apps.items()])


def _facts(found: MeshInfo) -> dict[str, str]:
    queues = [*found.queues, *([] if found.others is None else [found.others])]
    sums = {
        "waiting": sum(queue.waiting for queue in queues),
        "scheduled": sum(queue.scheduled for queue in queues),
        "blocked": sum(queue.blocked for queue in queues),
        "running": sum(queue.running for queue in queues),
        "failed": sum(queue.failed for queue in queues),
        "broken": sum(queue.broken for queue in queues),
    }
    read = "read by the leader" if found.source == "leader" else "read directly"
    return {
        "leader": formatting.short_worker_id(found.leader) if found.leader else "none: no worker leads the mesh",
        "read": f"{formatting.short_time(found.at)}, {read}",
        "queues": f"{len(found.queues) + found.queues_left_out:,}",
        "paused": f"{sum(queue.paused is not None for queue in found.queues):,}",
        **{name: f"{total:,}" for name, total in sums.items()},
        "workers": f"{sum(app.workers for app in found.apps.values()):,}",
    }
