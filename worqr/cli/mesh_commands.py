"""The commands about the mesh: ``worqr info``, its ``workers``, and its ``log``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Final, Literal

import trio
from cyclopts import App, Parameter

from worqr.cli.errors import CommandFailed, InvalidArguments
from worqr.cli.options import FROM_ENVIRONMENT, ConnectOptions, JsonLines, flag, run_connected
from worqr.cli.output import is_terminal, print_json, print_list, printable, show_facts, show_table
from worqr.escaping import escape
from worqr.mesh_records import MAX_UNHEALTHY
from worqr.views.tables import APPS, LOG, fields_of, workers_table
from worqr.views.values import short_time
from worqr.views.values import worker as short_worker

if TYPE_CHECKING:
    from worqr.mesh import Mesh
    from worqr.mesh_records import LogEntry, MeshInfo, WorkerInfo


workers: App = App(name="workers", help="List workers, make them quiet, drain or evict them.")


@workers.default
@workers.command(name="list", help="List workers. This is the default.")
def list_workers(*, json: JsonLines = False, connect: ConnectOptions = FROM_ENVIRONMENT) -> None:
    """List the registered workers."""

    async def command(mesh: Mesh) -> list[WorkerInfo]:
        return await mesh.workers()

    found = run_connected(connect, command)
    nothing = "no worker is registered; start one with `worqr run package.module:mesh`"
    print_list(workers_table(found), found, fields_of, json=json, nothing=nothing)


WorkerIds = Annotated[
    tuple[str, ...], Parameter(name="ID", help="Worker id, or the first characters of it or of its hex digits.")
]


@workers.command(name="quiet")
def quiet_workers(ids: WorkerIds, /, *, json: JsonLines = False, connect: ConnectOptions = FROM_ENVIRONMENT) -> None:
    """Ask workers to take no new tasks. Running tasks continue, and the workers stay."""
    _ask_workers(ids, connect, "quiet", None, json=json)


@workers.command(name="resume")
def resume_workers(ids: WorkerIds, /, *, json: JsonLines = False, connect: ConnectOptions = FROM_ENVIRONMENT) -> None:
    """Ask quiet workers to take tasks again."""
    _ask_workers(ids, connect, "resume", None, json=json)


@workers.command(name="drain")
def drain_workers(ids: WorkerIds, /, *, json: JsonLines = False, connect: ConnectOptions = FROM_ENVIRONMENT) -> None:
    """Ask workers to end their running tasks and leave, as on SIGTERM.

    A supervisor of the process may start it again.
    """
    _ask_workers(ids, connect, "drain", None, json=json)


@workers.command(name="concurrency")
def set_workers_concurrency(
    ids: Annotated[str, Parameter(name="ID", help="Worker id, or the first characters of it or of its hex digits.")],
    n: Annotated[str, Parameter(name="N", help="Tasks at once, or 'auto'.")],
    /,
    *,
    json: JsonLines = False,
    connect: ConnectOptions = FROM_ENVIRONMENT,
) -> None:
    """Ask a worker to run more or fewer tasks at once, until its process ends."""
    if n != "auto" and not (n.isascii() and n.isdecimal() and len(n) < 10 and int(n)):
        raise InvalidArguments(f"N must be a whole number, at least 1, or 'auto', not {n!r}")
    _ask_workers((ids,), connect, None, "auto" if n == "auto" else int(n), json=json)


def _ask_workers(
    ids: Sequence[str],
    connect: ConnectOptions,
    what: Literal["quiet", "resume", "drain"] | None,
    concurrency: int | Literal["auto"] | None,
    *,
    json: bool,
) -> None:
    async def command(mesh: Mesh) -> None:
        known = [info.id for info in await mesh.workers()]
        found = {match_worker_id(each, known) for each in ids}
        for worker in sorted(found, key=lambda worker: (worker in known, worker)):  # unknown ids first: they raise
            await mesh.ask_worker(worker, what, concurrency=concurrency)
            if json:
                print_json({"worker": worker, "what": what, "concurrency": concurrency})
                continue
            name = short_worker(worker) if is_terminal() else worker
            request = what or f"concurrency {concurrency}"
            print(f"Asked worker {escape(name)}: {request}; `worqr workers` shows whether it has answered")

    run_connected(connect, command)


@workers.command(name="evict")
def evict_workers(ids: WorkerIds, /, *, connect: ConnectOptions = FROM_ENVIRONMENT) -> None:
    """Declare workers dead, and return their tasks to the queues now.

    A worker that is alive joins again with a new id. To stop a worker, stop its process.
    """

    async def command(mesh: Mesh) -> None:
        known = [info.id for info in await mesh.workers()]
        found = {match_worker_id(each, known) for each in ids}
        for worker in sorted(found, key=lambda worker: (worker in known, worker)):  # unknown ids first: they raise
            await mesh.evict(worker)
            name = short_worker(worker) if is_terminal() else worker
            print(f"Evicted worker {escape(name)}; its tasks are back in their queues")

    run_connected(connect, command)


def match_worker_id(word: str, known: Sequence[str]) -> str:
    """Return the worker id in `known` that is `word`, begins with it, or has hex digits that begin with it.

    If there is none, return `word` itself, so that the mesh raises its usual error.

    Raises:
        CommandFailed: several ids match.
    """
    if word in known or not word:
        return word
    found = [each for each in known if each.startswith(word) or each.rpartition(":")[2].startswith(word)]
    if len(found) > 1:
        more = ", ..." if len(found) > 5 else ""
        raise CommandFailed(
            f"{word!r} is ambiguous: {len(found)} worker ids begin with it ({', '.join(found[:5])}{more}); "
            "type more characters. No worker was evicted"
        )
    return found[0] if found else word


def info(
    *, json: Annotated[bool, flag("Print one JSON object.")] = False, connect: ConnectOptions = FROM_ENVIRONMENT
) -> None:
    """Show the mesh as a whole: its leader, the sums of all queues, and the workers of each application."""

    async def command(mesh: Mesh) -> MeshInfo:
        return await mesh.info()

    found = run_connected(connect, command)
    if json:
        print_json({**asdict(found), "unhealthy": [fields_of(worker) for worker in found.unhealthy]})
        return
    facts = _facts(found)
    show_facts(facts, {"leader": "" if found.leader else "bold red"})
    if found.apps:
        print()
        show_table(APPS.columns, list(found.apps.items()))


MOST_ENTRIES: Final = 1000
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
    if not 1 <= limit <= MOST_ENTRIES:
        raise InvalidArguments(f"--limit must be 1 to {MOST_ENTRIES:,}, not {limit}")

    def wanted(entry: LogEntry) -> bool:
        return (not kind or entry.kind in kind) and (not queue or entry.queue == queue)

    async def command(mesh: Mesh) -> None:
        found = await mesh.log(MOST_ENTRIES if kind or queue or follow else limit)
        last = found[-1].id if found else "0"
        _print_log([entry for entry in found if wanted(entry)][-limit:], json=json, header=True)
        while follow:
            sys.stdout.flush()
            await trio.sleep(FOLLOW_EVERY)
            if new := await mesh.log(MOST_ENTRIES, after=last):
                last = new[-1].id
                _print_log(list(filter(wanted, new)), json=json, header=False)

    try:
        run_connected(connect, command)
    except KeyboardInterrupt:
        if not follow:
            raise


def _print_log(entries: Sequence[LogEntry], *, json: bool, header: bool) -> None:
    if json or header:
        print_list(LOG.columns, entries, asdict, json=json, nothing="the log of the mesh has no such entry")
    else:
        for entry in entries:
            cells = [printable(column.shown(entry)) for column in LOG.columns]
            print("  ".join(cell for cell in cells if cell not in ("", "-")))


def _facts(found: MeshInfo) -> dict[str, str]:
    queues = [*found.queues, *([] if found.others is None else [found.others])]
    sums = {
        "waiting": sum(queue.waiting for queue in queues),
        "scheduled": sum(queue.scheduled for queue in queues),
        "suspended": sum(queue.suspended for queue in queues),
        "blocked": sum(queue.blocked for queue in queues),
        "running": sum(queue.running for queue in queues),
        "failed": sum(queue.failed for queue in queues),
        "undecodable": sum(queue.undecodable for queue in queues),
    }
    read = "read by the leader" if found.source == "leader" else "read directly"
    return {
        "leader": short_worker(found.leader) if found.leader else "none: no worker leads the mesh",
        "read": f"{short_time(found.at)}, {read}",
        "queues": f"{len(found.queues) + found.queues_left_out:,}",
        "paused": f"{sum(queue.paused is not None for queue in found.queues):,}",
        **{name: f"{total:,}" for name, total in sums.items()},
        **({"unreadable": ", ".join(found.unreadable)} if found.unreadable else {}),
        **({"memory": f"{found.memory:.0%} of the limit"} if found.memory is not None else {}),
        "workers": f"{sum(app.workers for app in found.apps.values()):,}",
        "unhealthy": f"{len(found.unhealthy)}{'' if len(found.unhealthy) < MAX_UNHEALTHY else ' or more'}",
    }
