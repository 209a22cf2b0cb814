"""``worqr running``, ``worqr jobs`` and ``worqr recent``: commands that list single tasks, not counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from cyclopts import Parameter

from worqr.cli import output
from worqr.cli.connect_options import FROM_ENVIRONMENT, ConnectOptions, run_connected
from worqr.cli.errors import InvalidArguments
from worqr.cli.output import escape_bytes, format_time, payload_fields, print_error, print_json, shorten
from worqr.cli.parsing import JsonLines, QueueName, flag, queue_by_name, unknown_queue_hint
from worqr.cli.terminal import Column, show_table

if TYPE_CHECKING:
    from worqr.mesh import Mesh
    from worqr.records import EndedRun, RemoteError, Status, TaskInfo

State = Literal["waiting", "scheduled", "blocked", "active"]


def _or_dash(text: str | None) -> str:
    return text or "-"


TASK: Final = Column("task", style="dim", fit="cut", least=16, spare=True)


RUNNING: Final = (
    Column("queue", fit="fold", least=11),
    Column("id", plain=_or_dash, fit="fold", least=11),
    Column("claim", plain=_or_dash, hidden=True),
    Column("worker", plain=_or_dash, shown=output.short_worker_id, fit="fold", least=13),
    Column("since", plain=format_time, shown=output.short_time),
    Column("attempt", "try", style=lambda attempt: "yellow" if attempt > 1 else "", right=True),
    Column(
        "progress",
        "done",
        plain=lambda progress: "-" if progress is None else f"{progress:g}",
        shown=output.percent,
        right=True,
    ),
    Column("message", fit="cut", spare=True),
    TASK,
)
MOST: Final = 1_000
"""Running tasks of one queue that are listed."""


def running(
    queue: Annotated[str | None, Parameter(help="Only tasks of this queue. Default: all queues.")] = None,
    /,
    *,
    json: JsonLines = False,
    connect: ConnectOptions = FROM_ENVIRONMENT,
) -> None:
    """List running tasks, the longest-running first: their worker, start time, attempt and progress.

    At most 1,000 per queue. The claim, which `worqr cancel --claim` takes, is shown in pipes and with --json.
    """

    async def command(mesh: Mesh) -> tuple[list[tuple[str, TaskInfo]], str]:
        names = [queue] if queue else [info.name for info in await mesh.queues() if info.running]
        found = [(name, task) for name in names for task in await queue_by_name(mesh, name).running(MOST)]
        found.sort(key=lambda each: each[1].since or datetime.max.replace(tzinfo=UTC))
        return found, "" if found or queue is None else await unknown_queue_hint(mesh, queue)

    found, hint = run_connected(connect, command)
    if json:
        for name, task in found:
            print_json({"queue": name, **_json_fields(task)})
    elif found:
        show_table(RUNNING, [_running_row(name, task) for name, task in found])
    else:
        print_error(hint or ("no task is running" if queue is None else f"no task of queue {queue!r} is running"))


JOBS: Final = (
    Column("id", plain=_or_dash, fit="fold", always=True),
    Column("run at", plain=format_time, shown=output.short_time),
    Column("attempts", "tries", right=True),
    Column("error", style="red", fit="cut", least=24, spare=True),
    TASK,
)


def jobs(
    queue: QueueName,
    /,
    *,
    state: Annotated[State, Parameter(help="List tasks in this state.")] = "waiting",
    limit: Annotated[int, Parameter(help="List at most N tasks.", metavar="N")] = 100,
    after: Annotated[
        str,
        Parameter(show_default=False, metavar="CURSOR", help="List the next page: the tasks after this cursor."),
    ] = "",
    newest: Annotated[bool, flag("List waiting tasks from the end: those that run last come first.")] = False,
    json: JsonLines = False,
    connect: ConnectOptions = FROM_ENVIRONMENT,
) -> None:
    """List the waiting, scheduled, blocked or running tasks of a queue, in the order in which they run."""
    if newest and state != "waiting":
        raise InvalidArguments(f"--newest lists waiting tasks only, not --state {state}")

    async def command(mesh: Mesh) -> tuple[list[TaskInfo], str]:
        found = await queue_by_name(mesh, queue).jobs(state=state, limit=limit, after=after, newest=newest)
        return found, "" if found or after else await unknown_queue_hint(mesh, queue)

    found, hint = run_connected(connect, command)
    if json:
        for task in found:
            print_json({"queue": queue, **_json_fields(task)})
        return
    if found:
        show_table(JOBS, map(_job_row, found))
    if len(found) == limit:
        print_error(f"there may be more; for the next page add --after {found[-1].cursor!r}")
    elif not found:
        print_error(hint or f"no task of queue {queue!r} is {state}")


RECENT: Final = (
    Column("id", plain=_or_dash, fit="fold", least=11, always=True),
    Column("claim", hidden=True),
    Column("outcome", style=lambda outcome: "" if outcome == "ok" else "red"),
    Column("started", plain=format_time, shown=output.short_time),
    Column("took", plain=lambda seconds: f"{seconds:.3f} s", shown=output.millis, right=True),
    Column("worker", shown=output.short_worker_id, fit="fold", least=13),
    Column("error", plain=_or_dash, style="red", fit="cut", spare=True),
)


def recent(
    queue: QueueName,
    /,
    *,
    limit: Annotated[int, Parameter(help="List at most N runs.", metavar="N")] = 100,
    json: JsonLines = False,
    connect: ConnectOptions = FROM_ENVIRONMENT,
) -> None:
    """List the runs of a queue that ended last: how each ended, how long it took, and where it ran.

    For queues that are served with recent=N.
    """

    async def command(mesh: Mesh) -> tuple[list[EndedRun], str]:
        found = await queue_by_name(mesh, queue).recent(limit)
        return found, "" if found else await unknown_queue_hint(mesh, queue)

    found, hint = run_connected(connect, command)
    if json:
        for run in found:
            print_json({"queue": queue, **asdict(run)})
    elif found:
        show_table(RECENT, map(_ended_row, found))
    else:
        why = "none has ended for a day, or its workers keep none; recent=100 in @mesh.task or peer.serve keeps the last 100"
        print_error(hint or f"queue {queue!r} has no ended runs: {why}")


def _ended_row(run: EndedRun) -> Sequence[object]:
    return (run.id, run.claim, run.outcome, run.started, run.seconds, run.worker, run.error)


def _running_row(queue: str, task: TaskInfo) -> Sequence[object]:
    at = (task.worker, task.since, task.attempts, task.progress, shorten(task.message))
    return (queue, task.id, task.claim, *at, escape_bytes(task.task))


def _job_row(task: TaskInfo) -> Sequence[object]:
    return (task.id, task.run_at, task.attempts, shorten(error_text(task.error)), escape_bytes(task.task))


def error_text(error: RemoteError | None) -> str:
    """Return an error as tables show it: its type and its message."""
    if error is None:
        return "-"
    return f"{error.type}: {error.message}" if error.message else error.type


def status_fields(found: Status) -> dict[str, Any]:
    """Return a status for JSON."""
    fields = asdict(found)
    error = None if found.error is None else {"type": found.error.type, "message": found.error.message}
    return {**fields, "error": error}


def _json_fields(task: TaskInfo) -> dict[str, Any]:
    fields = status_fields(task)
    del fields["task"]
    if not task.cursor:
        del fields["cursor"]
    return {"id": fields.pop("id"), **fields, **payload_fields(whole_characters(task.task))}


def whole_characters(task: bytes) -> bytes:
    """Return the beginning of a payload, without an incomplete character at its end."""
    for cut in range(4):
        shorter = task[: len(task) - cut]
        try:
            shorter.decode()
        except UnicodeDecodeError:
            continue
        return shorter
    return task
