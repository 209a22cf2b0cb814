"""``worqr info`` and ``worqr log``: the mesh as a whole, and what has happened in it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Final

import trio
from cyclopts import Parameter

from worqr.cli import output
from worqr.cli.connect_options import FROM_ENVIRONMENT, ConnectOptions, run_connected
from worqr.cli.errors import InvalidArguments
from worqr.cli.output import format_time, print_error, print_json, worker_fields
from worqr.cli.parsing import JsonLines, flag
from worqr.cli.terminal import Column, number, show_facts, show_table
from worqr.mesh_records import MAX_UNHEALTHY

if TYPE_CHECKING:
    from worqr.mesh import Mesh
    from worqr.mesh_records import LogEntry, MeshInfo

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
        print_json({**asdict(found), "unhealthy": [worker_fields(worker) for worker in found.unhealthy]})
        return
    facts = _facts(found)
    show_facts(facts, {"leader": "" if found.leader else "bold red"})
    if found.apps:
        print()
        show_table(APPS, [(name, app.workers, app.running, app.room) for name, app in found.apps.items()])


LOG: Final = (
    Column("time", plain=format_time, shown=output.short_time),
    Column("kind", style=lambda kind: "bold red" if kind == "dead" else ""),
    Column("who"),
    Column("queue", fit="fold"),
    Column("worker", shown=output.short_worker_id, fit="fold"),
    Column("n", plain=lambda count: "-" if count is None else str(count), right=True),
    Column("details", fit="cut", least=16, words=True, spare=True),
)
MOST: Final = 1000
"""Entries that one request reads."""
FOLLOW_EVERY: Final = 1.0
"""Seconds between two requests of ``--follow``."""


def log(
    *,
    kind: Annotated[tuple[str, ...], Parameter(show_default=False, help="Only entries of this kind. Repeatable.")] = (),
    queue: Annotated[str, Parameter(show_default=False, help="Only entries about this queue.")] = "",
    limit: Annotated[int, Parameter(metavar="N", help="At most this many entries, the newest.")] = 100,
    follow: Annotated[bool, flag("Print new entries as they are written, until Ctrl-C.")] = False,
    json: JsonLines = False,
    connect: ConnectOptions = FROM_ENVIRONMENT,
) -> None:
    """Show what has happened in the mesh: workers that joined, left or died, and what operators did.

    The oldest entry is the first. The server keeps about the last 2,000 entries.
    """
    if not 1 <= limit <= MOST:
        raise InvalidArguments(f"--limit must be 1 to {MOST:,}, not {limit}")

    def wanted(entry: LogEntry) -> bool:
        return (not kind or entry.kind in kind) and (not queue or entry.queue == queue)

    async def command(mesh: Mesh) -> None:
        found = await mesh.log(MOST if kind or queue or follow else limit)
        last = found[-1].id if found else "0"
        _print_log([entry for entry in found if wanted(entry)][-limit:], json=json, header=True)
        while follow:
            sys.stdout.flush()
            await trio.sleep(FOLLOW_EVERY)
            if new := await mesh.log(MOST, after=last):
                last = new[-1].id
                _print_log(list(filter(wanted, new)), json=json, header=False)

    try:
        run_connected(connect, command)
    except KeyboardInterrupt:
        if not follow:
            raise


def _print_log(entries: Sequence[LogEntry], *, json: bool, header: bool) -> None:
    if json:
        for entry in entries:
            print_json(asdict(entry))
    elif header:
        if entries:
            show_table(LOG, map(_row, entries))
        else:
            print_error("the log of the mesh has no such entry")
    else:
        for entry in entries:
            cells = [column.text(value) for column, value in zip(LOG, _row(entry), strict=True)]
            print("  ".join(cell for cell in cells if cell not in ("", "-")))


def _row(entry: LogEntry) -> Sequence[object]:
    details = f"{entry.text} (job {entry.job})" if entry.job else entry.text
    return (entry.at, entry.kind, entry.who, entry.queue, entry.worker, entry.count, details)


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
        "leader": output.short_worker_id(found.leader) if found.leader else "none: no worker leads the mesh",
        "read": f"{output.short_time(found.at)}, {read}",
        "queues": f"{len(found.queues) + found.queues_left_out:,}",
        "paused": f"{sum(queue.paused is not None for queue in found.queues):,}",
        **{name: f"{total:,}" for name, total in sums.items()},
        **({"unreadable": ", ".join(found.unreadable)} if found.unreadable else {}),
        **({"memory": f"{found.memory:.0%} of the limit"} if found.memory is not None else {}),
        "workers": f"{sum(app.workers for app in found.apps.values()):,}",
        "unhealthy": f"{len(found.unhealthy)}{'' if len(found.unhealthy) < MAX_UNHEALTHY else ' or more'}",
    }
