"""``worqr queues`` and ``worqr workers``: list queues and workers as tables or as JSON, and evict a worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Final, Literal

from cyclopts import App, Parameter

from worqr.cli import output
from worqr.cli.connect_options import FROM_ENVIRONMENT, ConnectOptions, run_connected
from worqr.cli.errors import CommandFailed, InvalidArguments
from worqr.cli.output import escape, format_time, print_error, print_json, worker_fields
from worqr.cli.parsing import JsonLines, flag
from worqr.cli.queue_table import QUEUES, is_unserved, queue_row
from worqr.cli.terminal import Column, is_terminal, number, show_table
from worqr.client.inspection import queues_of
from worqr.inside import client_of

if TYPE_CHECKING:
    from worqr.mesh import Mesh
    from worqr.mesh_records import QueueInfo, WorkerInfo

LATE_LOOP: Final = 1.0
"""Seconds by which an event loop is late from which on it is marked: the log has a `loop.blocked` from then on, too."""
LATE_AFTER: Final = 3.0
"""Seconds without a heartbeat after which a worker is marked: the default of ``keepalive``."""


def queues(
    *,
    watch: Annotated[bool, flag("Watch the queues, as `worqr top` does.")] = False,
    json: JsonLines = False,
    connect: ConnectOptions = FROM_ENVIRONMENT,
) -> None:
    """List the queues that hold tasks or have workers."""
    if watch:
        if json:
            raise InvalidArguments("--watch draws a table: omit --json, or call `worqr queues --json` repeatedly")
        if not is_terminal():
            raise InvalidArguments("--watch needs a terminal; in a pipe, call `worqr queues --json` repeatedly")
        from worqr.cli.top.command import top

        top(connect=connect)
        return

    async def command(mesh: Mesh) -> tuple[list[QueueInfo], dict[str, str]]:
        return await queues_of(client_of(mesh))

    found, unreadable = run_connected(connect, command)
    for name, why in unreadable.items():
        print_error(f"queue {name!r} is left out: {why}")
    if json:
        for info in found:
            print_json({**asdict(info), "unserved": is_unserved(info)})
    elif not found:
        print_error("no queue holds tasks or has workers")
    else:
        show_table(QUEUES, map(queue_row, found))


MARKED: Final = {
    "quiet": "quiet, takes no new tasks",
    "leaving": "leaving",
    "missing": "sends no heartbeat",
    "dead": "dead, its tasks are being given back",
}
"""What a terminal shows of a worker that is not ready."""

WORKERS: Final = (
    Column("worker", shown=output.short_worker_id, fit="fold"),
    Column("host", fit="fold", least=8, spare=True),
    Column("pid", right=True),
    Column("app", plain=lambda app: app or "-", hidden=True),  # the id begins with it
    number("running", "run", always=True),
    number("room", always=True),
    Column(
        "last beat",
        "beat",
        plain=output.exact_seconds,
        shown=output.short_duration,
        style=lambda age: "bold red" if age > LATE_AFTER else "",
        right=True,
        always=True,
    ),
    Column(
        "lag",
        plain=output.exact_seconds,
        shown=output.short_duration,
        style=lambda lag: "bold red" if lag > LATE_LOOP else "",
        right=True,
    ),
    Column("since", plain=format_time, shown=output.short_time),
    Column("state", shown=lambda state: MARKED.get(state, ""), note=True),
    Column("request", note=True),
    Column(
        "leads",
        plain=lambda leads: "yes" if leads else "-",
        shown=lambda leads: "leader" if leads else "",
        style="",
        note=True,
    ),
    Column("version", plain=lambda version: version or "-", hidden=True),
    Column("python", plain=lambda version: version or "-", hidden=True),
    Column("threads", plain=lambda number: "-" if number is None else str(number), hidden=True),
    Column("processes", plain=lambda number: "-" if number is None else str(number), hidden=True),
    Column("queues", fit="fold", least=16, words=True, spare=True),
)

workers: App = App(name="workers", help="List workers, make them quiet, drain or evict them.")


@workers.default
@workers.command(name="list", help="List workers. This is the default.")
def list_workers(*, json: JsonLines = False, connect: ConnectOptions = FROM_ENVIRONMENT) -> None:
    """List the registered workers."""

    async def command(mesh: Mesh) -> list[WorkerInfo]:
        return await mesh.workers()

    found = run_connected(connect, command)
    if json:
        for info in found:
            print_json(worker_fields(info))
    elif not found:
        print_error("no worker is registered; start one with `worqr run package.module:mesh`")
    else:
        show_table(_worker_columns(found), map(_worker_row, found))


def _worker_columns(found: Sequence[WorkerInfo]) -> Sequence[Column]:
    """Return the columns: a terminal shows the version of each worker only if there are several."""
    mixed = len({info.version for info in found}) > 1
    shown = Column("version", plain=lambda version: f"version {version}" if version else "version unknown", note=True)
    return [shown if mixed and is_terminal() and column.title == "version" else column for column in WORKERS]


def _worker_row(info: WorkerInfo) -> Sequence[object]:
    lag = None if info.lag is None else round(info.lag, 1)
    return (
        *(info.id, info.host, info.pid, info.app, info.running, info.room, info.beat_age, lag, info.started),
        *(info.state, _request(info), info.leads, info.version, info.python, info.threads, info.processes),
        ", ".join(sorted(info.queues)),
    )


def _request(info: WorkerInfo) -> str:
    """Return what was asked of a worker and is not done."""
    if info.request:
        return f"has not answered yet: {info.request}"
    return "" if info.answer in ("", "done") else f"has {info.answer}"


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
            name = output.short_worker_id(worker) if is_terminal() else worker
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
            name = output.short_worker_id(worker) if is_terminal() else worker
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
