"""``worqr failed`` and ``worqr undecodable``: the dead-letter queue, and payloads that could not be decoded."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from cyclopts import App, Parameter

from worqr.cli.errors import CommandFailed, InvalidArguments
from worqr.cli.options import (
    FROM_ENVIRONMENT,
    ConnectOptions,
    QueueName,
    flag,
    parse_time,
    queue_by_name,
    run_connected,
    time_option,
    unknown_queue_hint,
)
from worqr.cli.output import payload_fields, print_error, print_json, show_table
from worqr.escaping import escape, escape_bytes
from worqr.job_states import ENDS
from worqr.views.tables import COUNT, FAILED, Column, error_text
from worqr.views.values import exact_time, shorten

if TYPE_CHECKING:
    from worqr.client.dead_letters import DeadLetters
    from worqr.mesh import Mesh
    from worqr.records import Failed


Kind = Literal["failed", "undecodable"]
Verb = Literal["retry", "drop"]
MOST_HINTS: Final = 20
"""Jobs that were put back of which the failures are listed that they keep."""

Error = Annotated[
    str | None,
    Parameter(metavar="TYPE", help="Only tasks with an error of this type: its full name or its last part."),
]
Before = Annotated[
    str | None,
    time_option("Only tasks that failed before this time, or longer ago than this (2h)."),
]
Since = Annotated[
    str | None,
    time_option("Only tasks that failed since this time, or no longer ago than this (2h)."),
]
Ids = Annotated[str, Parameter(help="Ids, as listed.")]
NAMES: Final = {"failed": "failed", "undecodable": "undecodable"}


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class Selection:
    """The entries to change, when no ids are given."""

    all: Annotated[bool, flag("All tasks, or all that match --error, --before, --since and --limit.")] = False
    error: Error = None
    before: Before = None
    since: Since = None
    limit: Annotated[int | None, Parameter(help="At most N tasks, newest first.", metavar="N")] = None

    def check(self, verb: Verb, ids: tuple[str, ...]) -> None:
        """Raise InvalidArguments if it and `ids` do not select entries in exactly one way."""
        if bool(ids) == self.all:
            raise InvalidArguments(
                f"name the tasks to {verb}: either ids, or --all (with --error, --before, --since or --limit)"
            )
        if ids and self != Selection():
            raise InvalidArguments("--error, --before, --since and --limit need --all, and no ids")


ONLY_IDS: Final = Selection()
ERRORS: Final = (
    Column("count", "count", lambda row: row[2], COUNT),
    Column("queue", "queue", lambda row: row[0], fit="fold"),
    Column("error", "error", lambda row: row[1], style="red", fit="fold"),
)


class _Commands:
    """The subcommands of ``worqr failed`` or of ``worqr undecodable``, which are the same."""

    def __init__(self, kind: Kind) -> None:
        self._kind: Kind = kind

    def list(
        self,
        queue: Annotated[str | None, Parameter(help="Only tasks of this queue. Default: all queues.")] = None,
        /,
        *,
        limit: Annotated[int, Parameter(help="List at most N tasks, newest first.", metavar="N")] = 100,
        error: Error = None,
        before: Before = None,
        since: Since = None,
        traceback: Annotated[bool, flag("Print the traceback of each task.")] = False,
        json: Annotated[bool, flag("Print JSON Lines: one object per task, with all fields.")] = False,
        connect: ConnectOptions = FROM_ENVIRONMENT,
    ) -> None:
        until, start = parse_time(before, "--before", ago=True), parse_time(since, "--since", ago=True)

        async def command(mesh: Mesh) -> tuple[Sequence[Failed], str]:
            names = [queue] if queue else await self._queues(mesh)
            lists = [await self._of(mesh, name).list(limit, error=error, before=until, since=start) for name in names]
            found = [each for entries in lists for each in entries]
            newest = sorted(found, key=lambda record: record.at, reverse=True) if queue is None else found
            return newest[:limit], "" if found or queue is None else await unknown_queue_hint(mesh, queue)

        found, hint = run_connected(connect, command)
        if found:
            self._print(found, named=queue is None, traceback=traceback, json=json)
        elif not json:
            of = "" if queue is None else f" in queue {queue!r}"
            print_error(hint or f"no {NAMES[self._kind]} tasks{of}")

    def errors(
        self,
        queue: Annotated[str | None, Parameter(help="Only tasks of this queue. Default: all queues.")] = None,
        /,
        *,
        json: Annotated[bool, flag("Print JSON Lines: one object per queue and type of error.")] = False,
        connect: ConnectOptions = FROM_ENVIRONMENT,
    ) -> None:
        """Count tasks by the type of their error, the most frequent first."""

        async def command(mesh: Mesh) -> tuple[list[tuple[str, str, int]], str]:
            names = [queue] if queue else await self._queues(mesh)
            found = [
                (name, error, count) for name in names for error, count in (await self._of(mesh, name).errors()).items()
            ]
            found.sort(key=lambda each: -each[2])
            return found, "" if found or queue is None else await unknown_queue_hint(mesh, queue)

        found, hint = run_connected(connect, command)
        if json:
            for name, error, count in found:
                print_json({"queue": name, "error": error, "count": count})
        elif found:
            show_table(ERRORS, found)
        else:
            of = "" if queue is None else f" in queue {queue!r}"
            print_error(hint or f"no {NAMES[self._kind]} tasks{of}")

    def retry(
        self, queue: QueueName, /, *ids: Ids, choice: Selection = ONLY_IDS, connect: ConnectOptions = FROM_ENVIRONMENT
    ) -> None:
        """Move tasks to the back of their queue, with all counters at zero."""
        self._change("retry", queue, ids, choice, connect)

    def drop(
        self, queue: QueueName, /, *ids: Ids, choice: Selection = ONLY_IDS, connect: ConnectOptions = FROM_ENVIRONMENT
    ) -> None:
        """Delete tasks for good."""
        self._change("drop", queue, ids, choice, connect)

    async def _queues(self, mesh: Mesh) -> Iterable[str]:
        """Return the names of the queues that have entries."""
        return [info.name for info in await mesh.queues() if getattr(info, self._kind)]

    def _of(self, mesh: Mesh, queue: str) -> DeadLetters:
        found = queue_by_name(mesh, queue)
        return found.failed if self._kind == "failed" else found.undecodable

    def _print(self, found: Sequence[Failed], *, named: bool, traceback: bool, json: bool) -> None:
        if json:
            for record in found:
                print_json(_fields(record))
        elif traceback:
            for record in found:
                _print_details(record, named=named)
        else:
            show_table(FAILED.columns if named else FAILED.columns[1:], found)

    def _change(self, verb: Verb, queue: str, ids: tuple[str, ...], choice: Selection, connect: ConnectOptions) -> None:
        choice.check(verb, ids)
        before, since = (
            parse_time(choice.before, "--before", ago=True),
            parse_time(choice.since, "--since", ago=True),
        )

        async def command(mesh: Mesh) -> tuple[int, str]:
            dead_letters = self._of(mesh, queue)
            if ids:
                count = await (dead_letters.retry if verb == "retry" else dead_letters.drop)(*ids)
                if verb == "retry" and count:
                    return count, "\n".join(await _kept_failures(mesh, queue, ids[:MOST_HINTS]))
            else:
                act_on_all = dead_letters.retry_all if verb == "retry" else dead_letters.drop_all
                count = await act_on_all(error=choice.error, before=before, since=since, limit=choice.limit)
            return count, "" if count else await unknown_queue_hint(mesh, queue)

        count, hint = run_connected(connect, command)
        print(f"{count:,} {'requeued' if verb == 'retry' else 'deleted'}")
        if hint:
            print_error(hint)
        if ids and count < len(ids):
            raise CommandFailed(self._missing(queue, ids, len(ids) - count))

    def _missing(self, queue: str, ids: tuple[str, ...], missing: int) -> str:
        what = f"{NAMES[self._kind]} task"
        if len(ids) == 1:
            text = f"no {what} with id {ids[0]!r} in queue {queue!r}"
        else:
            text = f"{missing:,} of {len(ids):,} ids match no {what} in queue {queue!r}"
        return f"{text} (it may have been retried or deleted already); list them with `worqr {self._kind} {queue!r}`"


async def _kept_failures(mesh: Mesh, queue: str, ids: Sequence[str]) -> list[str]:
    """Return how to go on with workflows that were put back and keep failures, because they have stored something later."""
    hints: list[str] = []
    for each in ids:
        record = await queue_by_name(mesh, queue).read(each)
        if not record.life or record.status.state in ENDS:
            continue
        hints += [
            f"job {each!r} keeps the failure of {entry.key!r}, because it has stored something later. To drop it and all later "
            f"entries: worqr rewind {shlex.quote(queue)} {shlex.quote(each)} {shlex.quote(entry.key)}"
            for entry in record.time_line
            if entry.state in ("failed", "cancelled", "gone")
        ]
    return hints


def _fields(record: Failed) -> dict[str, Any]:
    fields = asdict(record)
    del fields["task"]
    return {**fields, **payload_fields(record.task), "meta": dict(record.meta)}


def _print_details(record: Failed, *, named: bool) -> None:
    queue = f"{escape(record.queue)}  " if named else ""
    print(f"{queue}{escape(record.id)}  {exact_time(record.at)}  {record.reason}  worker {escape(record.worker)}")
    print(f"    task: {shorten(escape_bytes(record.task))}")
    for line in (record.error.traceback or error_text(record.error)).split("\n"):
        if line:
            print(f"    {escape(line)}")


def _app(kind: Kind, help: str) -> App:
    app = App(name=kind, help=help)
    commands = _Commands(kind)
    app.default(commands.list)
    app.command(commands.list, name="list", help="List tasks, newest first. This is the default.")
    app.command(commands.errors)
    app.command(commands.retry)
    app.command(commands.drop)
    return app


failed: App = _app(
    "failed",
    "List, retry or delete the dead-letter queue: tasks that failed, crashed their worker, timed out or expired.",
)
undecodable: App = _app("undecodable", "List, retry or delete tasks whose payload could not be decoded.")
