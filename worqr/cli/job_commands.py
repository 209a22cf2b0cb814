"""``worqr status`` and ``worqr run-now``: commands about jobs that are named by their ids."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import Parameter

from worqr.cli import output
from worqr.cli.connect_options import FROM_ENVIRONMENT, ConnectOptions, run_connected
from worqr.cli.errors import CommandFailed
from worqr.cli.output import escape, escape_bytes, format_time, payload_fields, print_error, print_json, shorten
from worqr.cli.parsing import QueueName, flag, queue_by_name, unknown_queue_hint
from worqr.cli.task_commands import error_text, status_fields, whole_characters
from worqr.cli.terminal import Column, is_terminal, show_facts, show_table

if TYPE_CHECKING:
    from worqr.mesh import Mesh
    from worqr.records import Ended, Failed, JobRecord, TaskInfo, Try

STATE_STYLES: Final = {"failed": "bold red", "cancelled": "yellow", "active": "green", "finished": "green"}
TRIES: Final = (
    Column("ended at", "ended", plain=format_time, shown=output.short_time),
    Column("took", plain=output.exact_seconds, shown=output.short_duration, right=True),
    Column("worker", shown=output.short_worker_id, fit="fold", least=13),
    Column("reason"),
    Column("error", style="red", fit="cut", least=30, spare=True),
)


def status(
    id: Annotated[str, Parameter(help="Id of the job.")],
    /,
    *,
    queue: Annotated[
        str | None, Parameter(show_default=False, help="Queue of the job. Default: all queues are searched.")
    ] = None,
    json: Annotated[
        bool, flag("Print JSON Lines: one object for each queue that knows the id, with all fields.")
    ] = False,
    connect: ConnectOptions = FROM_ENVIRONMENT,
) -> None:
    """Show one job: its state, its last tries with their errors, and its next run.

    Exit code 1 if the mesh does not know the id.
    """

    async def command(mesh: Mesh) -> tuple[list[JobRecord], str]:
        names = await mesh.find(id) if queue is None else [queue]
        found = [await queue_by_name(mesh, name).read(id) for name in names]
        known = [record for record in found if record.status.state != "gone"]
        return found, "" if known or queue is None else await unknown_queue_hint(mesh, queue)

    found, hint = run_connected(connect, command)
    if json:
        for record in found:
            print_json(_record_fields(record))
    known = [record for record in found if record.status.state != "gone"]
    for place, record in enumerate([] if json else known):
        if place:
            print()
        _show(record, named=queue is None)
    if not known:
        where = "any queue" if queue is None else f"queue {queue!r}"
        why = "the id is unknown, or its result was not stored or has expired"
        raise CommandFailed(f"no job {id!r} in {where}: {why}" + (f"; {hint}" if hint else ""))


def run_now(
    queue: QueueName,
    ids: Annotated[tuple[str, ...], Parameter(name="ID", help="Ids of scheduled jobs.")],
    /,
    *,
    json: Annotated[bool, flag("Print one JSON object.")] = False,
    connect: ConnectOptions = FROM_ENVIRONMENT,
) -> None:
    """Make scheduled jobs due now, also those that wait for their next try.

    Exit code 1 if one of them is not scheduled.
    """

    async def command(mesh: Mesh) -> tuple[int, str]:
        count = await queue_by_name(mesh, queue).run_now(*ids)
        return count, "" if count else await unknown_queue_hint(mesh, queue)

    count, hint = run_connected(connect, command)
    if json:
        print_json({"queue": queue, "due": count})
    else:
        print(f"{count:,} due now")
    if hint:
        print_error(hint)
    if count < len(set(ids)):
        what = f"job {ids[0]!r}" if len(ids) == 1 else f"{len(set(ids)) - count:,} of {len(set(ids)):,} jobs"
        raise CommandFailed(
            f"{what} of queue {queue!r} not scheduled; list scheduled jobs with `worqr jobs {queue!r} --state scheduled`"
        )


# Tables


def _show(record: JobRecord, *, named: bool) -> None:
    facts = {"queue": record.queue} if named else {}
    facts |= {name: value for name, value in _facts(record).items() if value not in ("", "-")}
    show_facts(facts, {"state": STATE_STYLES.get(record.status.state, ""), "error": "red"})
    if record.tries:
        print()
        show_table(TRIES, [_try_row(each) for each in record.tries])


def _facts(record: JobRecord) -> dict[str, str]:
    found = record.status
    terminal = is_terminal()
    worker = output.short_worker_id(found.worker) if terminal else found.worker or "-"
    return {
        "state": found.state,
        "attempts": str(found.attempts),
        "failures": str(found.failures),
        "error": shorten(error_text(found.error)),
        "waits": shorten(escape(found.waits_for)),
        "next run": format_time(found.next_run),
        "run at": "-" if found.next_run else format_time(found.run_at),
        "worker": worker,
        "since": format_time(found.since),
        "deadline": format_time(record.deadline),
        "cancelled": record.cancel_reason or "yes" if record.cancelling else "-",
        "progress": "-" if found.progress is None else (output.percent if terminal else "{:g}".format)(found.progress),
        "message": shorten(found.message),
        "dispatched": format_time(record.dispatched),
        "expires": format_time(record.expires_at),
        "blocked run": "-" if record.blocked is None else format_time(record.blocked.run_at),
        "lane": shorten(escape(record.lane)),
        "batch": "-" if record.batch is None else f"{record.batch.id} of queue {record.batch.queue}",
        "saved": f"{record.saved_size:,} bytes" if record.saved_size else "-",
        "options": shorten(" ".join(f"{name}={value}" for name, value in record.options.items())),
        "meta": shorten(" ".join(f"{name}={value}" for name, value in record.meta.items())),
        "task": "-" if record.size is None else shorten(escape_bytes(record.task)),
    }


def _try_row(tried: Try) -> tuple[object, ...]:
    why = escape(tried.error.message) if tried.reason == "retry" else error_text(tried.error)
    return (tried.at, tried.seconds, tried.worker, tried.reason, shorten(why))


# JSON


def _record_fields(record: JobRecord) -> dict[str, Any]:
    fields = {**status_fields(record.status), **asdict(record)}
    del fields["status"], fields["task"]
    return {
        "queue": fields.pop("queue"),
        "id": fields.pop("id"),
        **fields,
        "batch": None if record.batch is None else {"queue": record.batch.queue, "id": record.batch.id},
        "tries": [_try_fields(each) for each in record.tries],
        "ended": [_ended_fields(each) for each in record.ended],
        "blocked": None if record.blocked is None else _blocked_fields(record.blocked),
        "dead_letters": [_failed_fields(each) for each in record.dead_letters],
        **_payload(record.task, record.size),
    }


def _payload(task: bytes, size: int | None) -> dict[str, str]:
    """Return the beginning of a payload, of which `size` bytes are stored, without an incomplete character at its end."""
    is_whole = size is None or len(task) == size
    return payload_fields(task if is_whole else whole_characters(task))


def _try_fields(tried: Try) -> dict[str, Any]:
    return {**asdict(tried), "error": {"type": tried.error.type, "message": tried.error.message}}


def _ended_fields(ended: Ended) -> dict[str, Any]:
    return {**asdict(ended), "error": None if ended.error is None else asdict(ended.error)}


def _blocked_fields(blocked: TaskInfo) -> dict[str, Any]:
    return {"run_at": blocked.run_at, "size": blocked.size, **_payload(blocked.task, blocked.size)}


def _failed_fields(failed: Failed) -> dict[str, Any]:
    fields = asdict(failed)
    del fields["task"]
    return {**fields, "meta": dict(failed.meta), **_payload(failed.task, None)}
