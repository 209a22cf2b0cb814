"""The commands that show the mesh: ``worqr info``, ``workers``, ``limits``, ``log``, ``history`` as curves, ``topics``,
``metrics`` for Prometheus, and ``outbox``.
"""

from __future__ import annotations

import importlib
import logging
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import trio
from cyclopts import App, Parameter

from worqr.cli.errors import CommandFailed, InvalidArguments
from worqr.cli.options import (
    FROM_ENVIRONMENT,
    ConnectOptions,
    JsonLines,
    QueueName,
    flag,
    mesh_at,
    prefix_read,
    queue_by_name,
    run_connected,
    unknown_queue_hint,
)
from worqr.cli.output import is_terminal, print_error, print_json, print_list, printable, show_facts, show_table
from worqr.client.inspection import MAX_MINUTES
from worqr.errors import Unavailable, UsageError, WorqrError
from worqr.escaping import escape
from worqr.history_records import COUNTERS, History, HistoryPoint, RunTimes, sum_of_times
from worqr.http_server import BindAddress, HttpReply, HttpRequest, HttpServer
from worqr.inside import client_of
from worqr.mesh_records import MAX_UNHEALTHY
from worqr.metrics.fleet import GIVE_UP_AFTER, FleetMetrics, FleetReader, FleetSnapshot
from worqr.views.tables import APPS, HISTORY, LIMITS, LOG, OUTBOX_ROWS, OUTBOXES, TOPICS, fields_of, workers_table
from worqr.views.values import short_time, span
from worqr.views.values import worker as short_worker

if TYPE_CHECKING:
    from worqr.client.topics import Subscription
    from worqr.limits import LimitInfo
    from worqr.mesh import Mesh
    from worqr.mesh_records import LogEntry, MeshInfo, WorkerInfo
    from worqr.sql import Outbox
    from worqr.sql.statements import Statement, Statements


workers: App = App(name="workers", help="List workers, make them quiet, drain or evict them.")


@workers.default
@workers.command(name="list", help="List workers. This is the default.")
def list_workers(*, json: JsonLines = False, connect: ConnectOptions = FROM_ENVIRONMENT) -> None:
    """List the registered workers."""

    async def command(mesh: Mesh) -> list[WorkerInfo]:
        return await mesh.workers()

    found = run_connected(connect, command)
    nothing = "no worker is registered; start one with `worqr run package.module:mesh`" + prefix_read(connect)
    print_list(workers_table(found), found, fields_of, json=json, nothing=nothing)


WorkerIds = Annotated[
    tuple[str, ...], Parameter(name="ID", help="Worker id, or the beginning of it or of its hex digits.")
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
    ids: Annotated[str, Parameter(name="ID", help="Worker id, or the beginning of it or of its hex digits.")],
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
    """Declare workers dead, and return their tasks to the queues now. To stop a worker, stop its process."""

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
            "type more characters. Nothing was done"
        )
    return found[0] if found else word


def info(
    *, json: Annotated[bool, flag("Print one JSON object.")] = False, connect: ConnectOptions = FROM_ENVIRONMENT
) -> None:
    """Show the mesh as a whole: leader, sums of all queues, workers of each application."""

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


def limits(*, json: JsonLines = False, connect: ConnectOptions = FROM_ENVIRONMENT) -> None:
    """List the limits that functions share by a name, and how much of each is in use.

    A limit that no program has used for 30 days is left out. `worqr limit` shows the limits of one queue.
    """

    async def command(mesh: Mesh) -> list[LimitInfo]:
        return await mesh.limits()

    found = run_connected(connect, command)
    nothing = "no program has used a limit with a name: write worqr.Limit(20, name='openai')"
    print_list(LIMITS, found, asdict, json=json, nothing=nothing)


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
        if follow:
            await _follow(mesh, last, lambda new: _print_log(list(filter(wanted, new)), json=json, header=False))

    try:
        run_connected(connect, command)
    except KeyboardInterrupt:
        if not follow:
            raise


async def _follow(mesh: Mesh, last: str, show: Callable[[Sequence[LogEntry]], None]) -> None:
    """Show new entries for ever, also after an outage of the server."""
    away = False
    while True:
        sys.stdout.flush()
        await trio.sleep(FOLLOW_EVERY)
        try:
            new = await mesh.log(MOST_ENTRIES, after=last)
        except Unavailable as error:
            if not away:
                print_error(f"{error}; trying again")
            away = True
            continue
        away = False
        if new:
            last = new[-1].id
            show(new)


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


_BARS: Final = "▁▂▃▄▅▆▇█"

_NO_RECORD: Final = "·"

ROWS: Final = 12

"""Rows of the table on a terminal, at most: each is the sum of several points. In a pipe, each point is a row."""

WIDEST: Final = 60

"""Characters of a curve, at most."""


@dataclass(frozen=True, slots=True)
class _Curve:
    """One curve above the table: a value of each point, how several points become one character, and how it is written."""

    title: str
    values: list[float | None]
    total: str

    def line(self, width: int) -> str:
        """Return the curve in at most this many characters, with its largest value."""
        size = -(-len(self.values) // width)
        groups = [self.values[start : start + size] for start in range(0, len(self.values), size)]
        heights = [max((value for value in group if value is not None), default=None) for group in groups]
        most = max((height for height in heights if height is not None), default=0.0)
        return "".join(_NO_RECORD if height is None else _bar(height, most) for height in heights)


def _bar(height: float, most: float) -> str:
    return _BARS[min(7, -(-int(height * 7_000_000 / most) // 1_000_000))] if most else _BARS[0]


def history(
    queue: QueueName,
    /,
    *,
    minutes: Annotated[
        int, Parameter(metavar="N", help="How many minutes, up to 4320. Above 480, each point has ten minutes.")
    ] = 60,
    json: JsonLines = False,
    connect: ConnectOptions = FROM_ENVIRONMENT,
) -> None:
    """Show what has happened in a queue lately: tasks, failures, run times and waiting times.

    A terminal shows curves, and sums of several minutes. In a pipe, each minute is a row.
    """
    if not 1 <= minutes <= MAX_MINUTES:
        raise InvalidArguments(f"--minutes must be 1 to {MAX_MINUTES}, not {minutes}")

    async def command(mesh: Mesh) -> tuple[History, str]:
        found = await queue_by_name(mesh, queue).history(minutes)
        used = any(found.total(name) for name in COUNTERS) or (found.points[-1].waiting or 0) > 0
        return found, "" if used else await unknown_queue_hint(mesh, queue)

    found, hint = run_connected(connect, command)
    if json:
        for point in found.points:
            print_json(_as_json(point))
    elif not hint:
        _show(found, minutes)
    if hint:
        print_error(hint)
    elif found.points[0].is_gap and all(point.is_gap for point in found.points[:-1]):
        print_error(f"queue {queue!r} has no records yet; the leader stores one a minute while tasks come and go")


def _as_json(point: HistoryPoint) -> dict[str, Any]:
    return {**asdict(point), "gap": point.is_gap, "runs": _times(point.runs), "waits": _times(point.waits)}


def _times(times: RunTimes) -> dict[str, float | int | None]:
    quantiles = {f"p{share}": times.quantile(share / 100) for share in (50, 95, 99)}
    return {"count": times.count, "mean": times.mean, **quantiles}


def _show(found: History, minutes: int) -> None:
    points: Sequence[HistoryPoint] = found.points
    if is_terminal():
        print(f"{escape(found.queue)}, the last {_span(minutes)}")
        for line in _curves(found, min(WIDEST, shutil.get_terminal_size().columns - 24)):
            print(line)
        print()
        points = _merged(points)
    show_table(HISTORY, points)


def _span(minutes: int) -> str:
    hours, rest = divmod(minutes, 60)
    return f"{hours} h" if hours > 1 and not rest else f"{minutes} min"


def _curves(found: History, width: int) -> list[str]:
    """Return the curves of what happens in the queue, each with its highest value and what it adds up to."""
    points = found.points
    finished, failed = found.total("finished"), found.total("failed")
    curves = [_Curve("finished", [_rate(point, point.finished) for point in points], f"{finished:,}")]
    if failed:
        curves.append(_Curve("failed", [_rate(point, point.failed) for point in points], f"{failed:,}"))
    waiting = [None if point.is_gap else float(point.waiting or 0) for point in points]
    curves.append(_Curve("waiting", waiting, f"{points[-1].waiting or 0:,} now"))
    if (p95 := found.runs.quantile(0.95)) is not None:
        slow = [None if point.is_gap else point.runs.quantile(0.95) or 0.0 for point in points]
        curves.append(_Curve("run p95", slow, span(p95)))
    return [f"  {curve.title:9}{curve.line(max(10, width))}  {curve.total}" for curve in curves]


def _rate(point: HistoryPoint, counter: int | None) -> float | None:
    return None if counter is None else counter / max(point.seconds, 1.0)


def _merged(points: Sequence[HistoryPoint]) -> list[HistoryPoint]:
    """Return at most ROWS points, each the sum of as many of these."""
    size = -(-len(points) // ROWS)
    first = len(points) % size or size
    starts = [0, *range(first, len(points), size)]
    return [_sum(points[start:end]) for start, end in zip(starts, [*starts[1:], len(points)], strict=True)]


def _sum(points: Sequence[HistoryPoint]) -> HistoryPoint:
    """Return what happened in all of these points, and the state at the end of the last one with a record."""
    known = [point for point in points if not point.is_gap]
    if not known:
        return HistoryPoint(points[-1].at, sum(point.seconds for point in points))
    last, counters = known[-1], {name: sum(getattr(point, name) for point in known) for name in COUNTERS}
    return HistoryPoint(
        at=points[-1].at,
        seconds=sum(point.seconds for point in known),
        **counters,
        waiting=last.waiting,
        scheduled=last.scheduled,
        running=last.running,
        failed_now=last.failed_now,
        workers=last.workers,
        age=last.age,
        runs=sum_of_times([point.runs for point in known]),
        waits=sum_of_times([point.waits for point in known]),
    )


def topics(
    *,
    drop: Annotated[
        tuple[str, ...],
        Parameter(
            show_default=False, metavar="QUEUE", help="End the subscription of this queue. Its handler left the code."
        ),
    ] = (),
    json: JsonLines = False,
    connect: ConnectOptions = FROM_ENVIRONMENT,
) -> None:
    """List the topics to which queues are subscribed, and when a worker last declared them. Or end subscriptions."""

    async def command(mesh: Mesh) -> list[Subscription]:
        missing = [queue for queue in drop if not await mesh.unsubscribe(queue)]
        if missing:
            raise CommandFailed(f"not subscribed to any topic: {', '.join(map(repr, missing))}; see `worqr topics`")
        return await mesh.topics()

    found = run_connected(connect, command)
    if not drop:
        print_list(TOPICS, found, asdict, json=json, nothing="no queue is subscribed: declare a handler with @mesh.on")
    for queue in drop:
        print(f"{printable(queue)} is no longer subscribed")


# ``worqr metrics``: the metrics of a whole mesh, for Prometheus. Each scrape reads one snapshot of the mesh.


RETRY_AFTER: Final = 1.0
"""Seconds between two attempts to connect at the start."""
PATHS: Final = ("/metrics", "/live")


def metrics(
    *,
    bind: Annotated[str, Parameter(metavar="ADDRESS", help="Serve at [HOST:]PORT or unix:PATH.")] = "127.0.0.1:9464",
    max_queues: Annotated[
        int, Parameter(metavar="N", help='Queues that are shown by name. The others are summed up as "(other)".')
    ] = 300,
    connect: ConnectOptions = FROM_ENVIRONMENT,
) -> None:
    """Serve the metrics of the mesh for Prometheus, until SIGTERM or Ctrl-C.

    Each scrape reads one snapshot. While the server is away, worqr_up is 0.
    """
    try:
        importlib.import_module("worqr.metrics.prometheus")  # a scrape needs it: tell now if it is missing
    except ImportError as error:
        raise CommandFailed(str(error)) from None

    try:
        address = BindAddress.parse(bind, "--bind")
    except UsageError as error:
        raise InvalidArguments(str(error)) from None
    if max_queues < 0:
        raise InvalidArguments(f"--max-queues must be at least 0, got {max_queues}")
    if not (log := logging.getLogger("worqr")).handlers:
        log.addHandler(logging.NullHandler())
    mesh = mesh_at(connect, "metrics")
    trio.run(_Exporter(mesh, FleetMetrics(max_queues)).run, address)


class _Exporter:
    """Replies to scrapes in the thread of the HTTP server; looks at the mesh in the loop."""

    def __init__(self, mesh: Mesh, fleet: FleetMetrics) -> None:
        self._mesh = mesh
        self._fleet = fleet
        self._reader = FleetReader(mesh)
        self._token: trio.lowlevel.TrioToken | None = None
        self._connected = trio.Event()

    async def run(self, address: BindAddress) -> None:
        """Serve until a signal comes."""
        self._token = trio.lowlevel.current_trio_token()
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            server = HttpServer(address, self.respond)
            try:
                print(f"worqr: serving metrics at {escape(str(server.address))}", file=sys.stderr, flush=True)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._stay_connected)
                    async for _ in signals:
                        nursery.cancel_scope.cancel()
            except* WorqrError as group:
                raise group.exceptions[0] from None
            finally:
                await trio.to_thread.run_sync(server.close)

    async def _stay_connected(self) -> None:
        """Connect, and wait for a server that is away at the start. The connection outlives later outages."""
        while True:
            try:
                async with self._mesh.connect():
                    self._connected.set()
                    await trio.sleep_forever()
            except Unavailable:
                await trio.sleep(RETRY_AFTER)

    def respond(self, request: HttpRequest) -> HttpReply:
        """Return the reply to a scrape; called in the thread of the server."""
        from worqr.metrics.prometheus import exposition, fleet_collector

        if request.path == "/live":
            return HttpReply.of(HTTPStatus.OK, "ok")
        if request.path != "/metrics":
            return HttpReply.of(HTTPStatus.NOT_FOUND, f"there are {', '.join(PATHS)}")
        try:
            snapshot = trio.from_thread.run(self._look, trio_token=self._token)
        except WorqrError as error:
            return HttpReply.of(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))
        body, content_type = exposition(fleet_collector(self._fleet.samples(snapshot)), request.accept)
        return HttpReply(HTTPStatus.OK, body, content_type)

    async def _look(self) -> FleetSnapshot | None:
        """Look at the mesh; return None if the server does not reply."""
        with trio.move_on_after(GIVE_UP_AFTER):
            try:
                await self._connected.wait()
                return await self._reader.read()
            except Unavailable:
                return None
        return None


# ``worqr outbox``: the outboxes of a mesh, as its workers see them; the rows of one; and rows that are not sent.


MOST_LISTED: Final = 100


@dataclass(frozen=True, slots=True)
class OutboxRow:
    """A row for people. `age` in seconds."""

    id: str
    queue: str
    age: float
    tries: int
    error: str | None


def outbox(
    target: Annotated[
        str | None,
        Parameter(
            show_default=False,
            help="package.module:name. Default: list the outboxes of the mesh.",
        ),
    ] = None,
    /,
    *,
    state: Annotated[
        Literal["waiting", "failed", "held"], Parameter(help="List the rows in this state; the first 100.")
    ] = "waiting",
    retry: Annotated[
        tuple[str, ...],
        Parameter(show_default=False, metavar="ROW", help="Send this failed row again; all: every one."),
    ] = (),
    delete: Annotated[
        tuple[str, ...], Parameter(show_default=False, metavar="ROW", help="Delete this row, which failed or is held.")
    ] = (),
    release: Annotated[bool, flag("Send the rows that are held.")] = False,
    json: JsonLines = False,
    connect: ConnectOptions = FROM_ENVIRONMENT,
) -> None:
    """List the outboxes of a mesh, or the rows of one. Retry or delete rows that failed, or release rows that are held.

    With a TARGET, the command imports your module, and asks the database.
    """
    if target is None:
        if retry or delete or release:
            raise InvalidArguments("name the outbox, as in worqr outbox shop:outbox")
        found = run_connected(connect, _outboxes)
        print_list(OUTBOXES, found, asdict, json=json, nothing="no worker looks after an outbox")
        return
    box = load_outbox(target)
    changed = _change(box, retry, delete, release=release)
    for line in changed:
        print(line)
    if not changed:
        rows = [
            OutboxRow(row, queue, age / 1000, tries, error) for row, queue, age, tries, error in _listed(box, state)
        ]
        print_list(OUTBOX_ROWS, rows, asdict, json=json, nothing=f"no row is {state}")


async def _outboxes(mesh: Mesh) -> list[Any]:
    from worqr.client.inspection import outboxes_of

    return await outboxes_of(client_of(mesh))


def load_outbox(target: str) -> Outbox:
    """Return the outbox that ``package.module:name`` names.

    Raises:
        CommandFailed: there is none of that name.
    """
    from worqr.cli.run import load_module  # it has the errors of a name that is wrong
    from worqr.sql import Outbox

    module, name = load_module(target)
    found = getattr(module, name, None) if name else None
    if isinstance(found, Outbox):
        return found
    known = [each for each, value in vars(module).items() if isinstance(value, Outbox)]
    hint = f"; there is {' and '.join(f'{module.__name__}:{each}' for each in known)}" if known else ""
    raise CommandFailed(f"{target} is no worqr.sql.Outbox{hint}")


def _ask(box: Outbox, make: Callable[[Statements], Statement]) -> list[Any]:
    from worqr.sql.sender import cause_of

    try:
        return box.sender.ask(make)
    except Exception as error:
        raise CommandFailed(f"the database refuses: {cause_of(error)}") from error


def _listed(box: Outbox, state: str) -> list[Any]:
    return _ask(box, lambda sql: sql.listed(state, MOST_LISTED))


def _change(box: Outbox, retry: Sequence[str], delete: Sequence[str], *, release: bool) -> list[str]:
    """Do what the options say, and return what was done, in words."""
    done: list[str] = []
    if retry:
        rows = None if "all" in retry else retry
        done.append(f"{len(_ask(box, lambda sql: sql.again('failed', rows))):,} rows will be sent again")
    if delete:
        done.append(f"{len(_ask(box, lambda sql: sql.drop(delete))):,} rows deleted")
    if release:
        done.append(f"{len(_ask(box, lambda sql: sql.again('held', None))):,} rows released")
    return done
