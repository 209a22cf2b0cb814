"""The commands about tasks and jobs: ``running``, ``jobs``, ``recent``, ``status``, ``send``, ``end-wait``, ``rewind``,
``run-now``, and ``batches`` of jobs.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple

from cyclopts import Parameter

from worqr.cli import STDIN
from worqr.cli.errors import CommandFailed, InvalidArguments
from worqr.cli.options import (
    FROM_ENVIRONMENT,
    ConnectOptions,
    JsonLines,
    QueueName,
    duration_option,
    flag,
    parse_duration,
    queue_by_name,
    run_connected,
    unknown_queue_hint,
)
from worqr.cli.output import (
    is_terminal,
    payload_fields,
    print_error,
    print_json,
    print_list,
    show_facts,
    show_table,
)
from worqr.cli.produce_commands import read_stdin
from worqr.client.inspection import value_bytes
from worqr.errors import NoJob, NoResult, RefusedByServer, UsageError, did_you_mean
from worqr.escaping import escape, escape_bytes
from worqr.inside import client_of
from worqr.views.schemas import mismatch, read_json
from worqr.views.tables import (
    BATCH_STYLES,
    BATCHES,
    ENDED,
    JOBS,
    KEPT,
    RUNNING,
    SUSPENDED,
    TIME_LINE,
    TRIES,
    batch_state,
    entry_fields,
    error_text,
    open_waits,
)
from worqr.views.values import exact_time, percent, shorten
from worqr.views.values import worker as short_worker

if TYPE_CHECKING:
    from worqr.batches import BatchInfo
    from worqr.client.batch import Batch
    from worqr.client.queue import Queue
    from worqr.mesh import Mesh
    from worqr.records import Ended, EndedRun, Failed, JobRecord, Status, TaskInfo, Try
    from worqr.views.tables import Column


State = Literal["waiting", "scheduled", "suspended", "blocked", "active", "finished", "failed", "cancelled", "ended"]


MOST_RUNNING: Final = 1_000
"""Running tasks of one queue that are listed."""


def running(
    queue: Annotated[str | None, Parameter(help="Only tasks of this queue. Default: all queues.")] = None,
    /,
    *,
    json: JsonLines = False,
    connect: ConnectOptions = FROM_ENVIRONMENT,
) -> None:
    """List running tasks, the longest-running first.

    At most 1,000 per queue. The claim, which `worqr cancel --claim` takes, is shown in pipes and with --json.
    """

    async def command(mesh: Mesh) -> tuple[list[tuple[str, TaskInfo]], str]:
        names = [queue] if queue else [info.name for info in await mesh.queues() if info.running]
        found = [(name, task) for name in names for task in await queue_by_name(mesh, name).running(MOST_RUNNING)]
        found.sort(key=lambda each: each[1].since or datetime.max.replace(tzinfo=UTC))
        return found, "" if found or queue is None else await unknown_queue_hint(mesh, queue)

    found, hint = run_connected(connect, command)
    nothing = hint or ("no task is running" if queue is None else f"no task of queue {queue!r} is running")
    print_list(RUNNING, found, lambda row: {"queue": row[0], **_json_fields(row[1])}, json=json, nothing=nothing)


def jobs(
    queue: QueueName,
    /,
    *,
    state: Annotated[
        State | None,
        Parameter(
            show_default=False,
            help="State of the tasks; ended: all jobs that are kept. Default: waiting; with --tag, any state.",
        ),
    ] = None,
    tag: Annotated[str, Parameter(show_default=False, help="List jobs with this tag.")] = "",
    limit: Annotated[int, Parameter(help="List at most N tasks.", metavar="N")] = 100,
    after: Annotated[
        str,
        Parameter(show_default=False, metavar="CURSOR", help="List the next page: the tasks after this cursor."),
    ] = "",
    newest: Annotated[bool, flag("List waiting tasks from the end: those that run last come first.")] = False,
    json: JsonLines = False,
    connect: ConnectOptions = FROM_ENVIRONMENT,
) -> None:
    """List the tasks of a queue, in the order in which they run.

    Jobs that have ended are listed if their function keeps them, the last one first.
    """
    if newest and (state or "waiting") != "waiting":
        raise InvalidArguments(f"--newest lists waiting tasks only, not --state {state}")
    state = state or (None if tag else "waiting")

    async def command(mesh: Mesh) -> tuple[list[TaskInfo], str]:
        found = await queue_by_name(mesh, queue).jobs(state=state, limit=limit, after=after, newest=newest, tag=tag)
        return found, "" if found or after else await unknown_queue_hint(mesh, queue)

    found, hint = run_connected(connect, command)
    if json:
        for task in found:
            print_json({"queue": queue, **_json_fields(task)})
        return
    if found:
        show_table(_table_of(state, tag), found)
    if len(found) == limit:
        print_error(f"there may be more; for the next page add --after {found[-1].cursor!r}")
    elif not found:
        print_error(hint or _nothing(queue, state, tag))


def _table_of(state: State | None, tag: str) -> tuple[Column, ...]:
    if state == "suspended":
        return SUSPENDED
    return KEPT if tag or state in ("finished", "failed", "cancelled", "ended") else JOBS


def _nothing(queue: str, state: State | None, tag: str) -> str:
    if tag:
        return f"no job of queue {queue!r} has the tag {tag!r}" + (f" and is {state}" if state else "")
    if state in ("finished", "failed", "cancelled", "ended"):
        return f"no job of queue {queue!r} that is {state} is kept; keep=worqr.Keep(...) in @mesh.task keeps them"
    return f"no task of queue {queue!r} is {state}"


def recent(
    queue: QueueName,
    /,
    *,
    limit: Annotated[int, Parameter(help="List at most N runs.", metavar="N")] = 100,
    json: JsonLines = False,
    connect: ConnectOptions = FROM_ENVIRONMENT,
) -> None:
    """List the runs of a queue that ended last.

    For queues that are served with recent=N.
    """

    async def command(mesh: Mesh) -> tuple[list[EndedRun], str]:
        found = await queue_by_name(mesh, queue).recent(limit)
        return found, "" if found else await unknown_queue_hint(mesh, queue)

    found, hint = run_connected(connect, command)
    why = (
        "none has ended for a day, or its workers keep none; recent=100 in @mesh.task or peer.serve keeps the last 100"
    )
    nothing = hint or f"queue {queue!r} has no ended runs: {why}"
    print_list(ENDED.columns, found, lambda run: {"queue": queue, **asdict(run)}, json=json, nothing=nothing)


def status_fields(found: Status) -> dict[str, Any]:
    """Return a status for JSON."""
    fields = asdict(found)
    error = None if found.error is None else {"type": found.error.type, "message": found.error.message}
    value = found.value.decode("utf-8", "replace") if isinstance(found.value, bytes) else found.value
    return {**fields, "error": error, "value": value}


def _json_fields(task: TaskInfo) -> dict[str, Any]:
    fields = status_fields(task)
    del fields["task"], fields["value"]  # a list does not read it
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


STATE_STYLES: Final = {"failed": "bold red", "cancelled": "yellow", "active": "green", "finished": "green"}


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
    """Show one job: its state, last tries and next run, and the time line of a workflow.

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


def send(
    queue: Annotated[str, Parameter(help="Queue of the job. With --address: the name of the event.")],
    id: Annotated[str | None, Parameter(show_default=False, help="Id of the job. With --address: the value.")] = None,
    name: Annotated[str | None, Parameter(show_default=False, help="Name of the event.")] = None,
    value: Annotated[
        str | None,
        Parameter(
            metavar="JSON",
            show_default=False,
            help="The value; - reads it from the standard input. Default: no value.",
        ),
    ] = None,
    /,
    *,
    again: Annotated[bool, flag("Send it although one of this name was not taken yet.")] = False,
    address: Annotated[
        str | None,
        Parameter(
            show_default=False,
            help="Address of the workflow, of one dispatch, in place of queue and id.",
        ),
    ] = None,
    json: Annotated[bool, flag("Print one JSON object.")] = False,
    connect: ConnectOptions = FROM_ENVIRONMENT,
) -> None:
    """Send a value to a workflow, which waits for it or will find it.

    Prints woke (the workflow waited for it, and runs again) or stored. An awaited value must have the awaited type. Exit code 1
    if nothing was sent.
    """
    target = _target(queue, id, name, value) if address is None else _target_at(address, queue, id, name, value)

    async def command(mesh: Mesh) -> str:
        given = target.value
        if given == STDIN:
            given = (await read_stdin()).decode("utf-8", "surrogateescape")
        return await _send(mesh, target, None if given is None else _value(given), again=again)

    _print_outcome(target, run_connected(connect, command), json=json)


def end_wait(
    queue: Annotated[str, Parameter(help="Queue of the job.")],
    id: Annotated[str, Parameter(help="Id of the job.")],
    key: Annotated[
        str, Parameter(help="Key of the wait, as `worqr status ID --json` shows it: 'wait for approved', 'sleep #2'.")
    ],
    /,
    *,
    json: Annotated[bool, flag("Print one JSON object.")] = False,
    connect: ConnectOptions = FROM_ENVIRONMENT,
) -> None:
    """End a wait of a workflow now. Exit code 1 if it does not wait for that."""

    async def command(mesh: Mesh) -> bool:
        from worqr.client.job import note_ended

        try:
            ended = await queue_by_name(mesh, queue).job(id).end_wait(key)
        except (NoJob, UsageError) as error:
            raise CommandFailed(str(error)) from None
        if ended:
            await note_ended(client_of(mesh), queue, id, key)
        return ended

    ended = run_connected(connect, command)
    if json:
        print_json({"queue": queue, "id": id, "key": key, "ended": ended})
    elif ended:
        print(f"ended {escape(key)}")
    if not ended:
        where = f"`worqr status {id!r} --json` has the keys of its waits"
        raise CommandFailed(f"job {id!r} of queue {queue!r} does not wait for {key!r}: {where}")


def rewind(
    queue: Annotated[str, Parameter(help="Queue of the job.")],
    id: Annotated[str, Parameter(help="Id of the job.")],
    key: Annotated[str, Parameter(help="Key of a step, a wait or a job, as `worqr status ID --json` shows it.")],
    /,
    *,
    json: Annotated[bool, flag("Print one JSON object.")] = False,
    connect: ConnectOptions = FROM_ENVIRONMENT,
) -> None:
    """Let a workflow run again from an entry of its time line: drop this entry and all later ones.

    Not while it runs. Jobs that were dropped and have not ended are cancelled. Exit code 1 if nothing was dropped.
    """

    async def command(mesh: Mesh) -> int:
        from worqr.client.job import note_rewound

        try:
            dropped = await queue_by_name(mesh, queue).job(id).rewind(key)
        except (NoJob, UsageError) as error:
            raise CommandFailed(str(error)) from None
        await note_rewound(client_of(mesh), queue, id, key, dropped)
        return dropped

    dropped = run_connected(connect, command)
    if json:
        print_json({"queue": queue, "id": id, "key": key, "dropped": dropped})
    else:
        print(f"dropped {dropped:,}, runs again from {escape(key)}")


def _print_outcome(target: _Target, outcome: str, *, json: bool) -> None:
    if json:
        print_json({"queue": target.queue, "id": target.id, "event": target.name, "outcome": outcome})
    elif outcome not in NOT_SENT:
        print(f"{outcome} {escape(target.id)}")
    if outcome in NOT_SENT:
        what = NOT_SENT[outcome].format(repr(target.name))
        raise CommandFailed(f"nothing was sent to job {target.id!r} of queue {target.queue!r}: {what}")


class _Target(NamedTuple):
    """What is sent, and where. `life`: that of an address; 0: any. `value`: as it was typed."""

    queue: str
    id: str
    name: str
    value: str | None
    life: int = 0
    address: str = ""


def _target(queue: str, id: str | None, name: str | None, value: str | None) -> _Target:
    if id is None or name is None:
        raise InvalidArguments("name the queue, the id of the job and the event: worqr send QUEUE ID NAME [JSON]")
    return _Target(queue, id, name, value)


def _target_at(address: str, name: str, value: str | None, *more: str | None) -> _Target:
    from worqr.client.job import read_address

    if more != (None, None):
        raise InvalidArguments("--address names the queue and the job: worqr send --address ADDRESS NAME [JSON]")
    try:
        queue, life, job = read_address(address)
    except UsageError as error:
        raise InvalidArguments(f"--address: {error}") from None
    return _Target(queue, job, name, value, life, address)


async def _send(mesh: Mesh, target: _Target, value: object, *, again: bool) -> str:
    from worqr.client.job import note_sent

    queue = queue_by_name(mesh, target.queue)
    await _check_value(queue, target, value)
    try:
        if target.address:
            outcome = await mesh.send(target.address, target.name, value, again=again)
        else:
            outcome = await queue.job(target.id).send(target.name, value, again=again)
    except NoJob as error:
        raise CommandFailed(f"{error}; {await _where_to_look(mesh, target, error.state)}") from None
    if outcome not in NOT_SENT:
        await note_sent(client_of(mesh), target.queue, target.id, target.name, value)
    return outcome


NOT_SENT: Final = {
    "already": "a value of {} lies there that it has not taken; to send one more, add --again",
    "full": "1,000 values of {} lie there that it has not taken, or the job has no room for more",
}


def _value(text: str) -> object:
    try:
        return read_json(text)
    except ValueError as error:
        remedy = "quote a text twice, as in '\"yes\"'"
        raise InvalidArguments(f"the value must be JSON, such as 42, true or {{}} ({error}); {remedy}") from None


async def _check_value(queue: Queue, target: _Target, value: object) -> None:
    """Raise CommandFailed if the workflow waits for this event, and the value is not of the type that it waits for."""
    try:
        record = await queue.read(target.id)
    except RefusedByServer:  # this user may send, and not read
        return
    waits = open_waits(record, target.name) if target.life in (0, record.life) else []
    if waits and (why := mismatch(waits[0].schema, value)) and all(mismatch(each.schema, value) for each in waits):
        raise CommandFailed(
            f"nothing was sent: the value is not of the type that the workflow waits for: {why}",
            f"its schema: {escape(waits[0].schema)}",
        )


async def _where_to_look(mesh: Mesh, target: _Target, state: str) -> str:
    if state == "gone":
        hint = await unknown_queue_hint(mesh, target.queue)
        return hint or f"`worqr jobs {target.queue!r} --state suspended` lists workflows that wait"
    return f"`worqr status {target.id!r} --queue {target.queue!r}` shows it"


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
        show_table(TRIES.columns, record.tries)
    if record.time_line:
        print()
        show_table(TIME_LINE.columns, record.time_line)


def _facts(record: JobRecord) -> dict[str, str]:
    found = record.status
    terminal = is_terminal()
    worker = short_worker(found.worker) if terminal else found.worker or "-"
    return {
        "state": found.state,
        "attempts": str(found.attempts),
        "failures": str(found.failures),
        "error": shorten(error_text(found.error)),
        "waits": shorten(escape(found.waits_for)),
        "next run": exact_time(found.next_run),
        "run at": "-" if found.next_run else exact_time(found.run_at),
        "worker": worker,
        "since": exact_time(found.since),
        "deadline": exact_time(record.deadline),
        "cancelled": record.cancel_reason or "yes" if record.cancelling else "-",
        "progress": "-" if found.progress is None else (percent if terminal else "{:g}".format)(found.progress),
        "message": shorten(found.message),
        "value": "-" if found.value is None else shorten(escape_bytes(value_bytes(found.value))),
        "dispatched": exact_time(record.dispatched),
        "expires": exact_time(record.expires_at),
        "blocked run": "-" if record.blocked is None else exact_time(record.blocked.run_at),
        "lane": shorten(escape(record.lane)),
        "tags": shorten(escape(" ".join(record.tags))),
        "ended": exact_time(record.ended[0].at if record.ended else None),
        "batch": "-" if record.batch is None else f"{record.batch.id} of queue {record.batch.queue}",
        "then": record.then or "-",
        "otherwise": record.otherwise or "-",
        "follows": "-"
        if record.follows is None
        else f"{escape(record.follows[1])} of queue {escape(record.follows[0])}",
        "saved": f"{record.saved_size:,} bytes" if record.saved_size else "-",
        "options": shorten(" ".join(f"{name}={value}" for name, value in record.options.items())),
        "meta": shorten(" ".join(f"{name}={value}" for name, value in record.meta.items())),
        "task": "-" if record.size is None else shorten(escape_bytes(record.task)),
    }


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
        "time_line": [entry_fields(each) for each in record.time_line],
        "ended": [_ended_fields(each) for each in record.ended],
        "blocked": None if record.blocked is None else _blocked_fields(record.blocked),
        "dead_letters": [_failed_fields(each) for each in record.dead_letters],
        **_beginning(record.task, record.size),
    }


def _beginning(task: bytes, size: int | None) -> dict[str, str]:
    """Return the beginning of a payload, of which `size` bytes are stored, without an incomplete character at its end."""
    is_whole = size is None or len(task) == size
    return payload_fields(task if is_whole else whole_characters(task))


def _try_fields(tried: Try) -> dict[str, Any]:
    return {**asdict(tried), "error": {"type": tried.error.type, "message": tried.error.message}}


def _ended_fields(ended: Ended) -> dict[str, Any]:
    return {**asdict(ended), "error": None if ended.error is None else asdict(ended.error)}


def _blocked_fields(blocked: TaskInfo) -> dict[str, Any]:
    return {"run_at": blocked.run_at, "size": blocked.size, **_beginning(blocked.task, blocked.size)}


def _failed_fields(failed: Failed) -> dict[str, Any]:
    fields = asdict(failed)
    del fields["task"]
    return {**fields, "meta": dict(failed.meta), **_beginning(failed.task, None)}


# ``worqr batches`` and ``worqr batch``: list batches, show one, cancel it, put its failed jobs back, or wait for its end.


MOST_COMPARED: Final = 200
"""Batches whose ids are compared with an id that is unknown."""


def batches(
    queue: Annotated[
        str | None, Parameter(show_default=False, help="Home queue of the batches. Default: all queues.")
    ] = None,
    /,
    *,
    limit: Annotated[int, Parameter(help="List at most N batches of each queue.")] = 100,
    json: JsonLines = False,
    connect: ConnectOptions = FROM_ENVIRONMENT,
) -> None:
    """List batches: those that have not ended first, then the newest.

    An ended batch is listed until its `keep` has passed, which is a day if you do not set it.
    """

    async def command(mesh: Mesh) -> tuple[list[BatchInfo], str]:
        names = [info.name for info in await mesh.queues() if info.batches] if queue is None else [queue]
        found = [each for name in sorted(names) for each in await queue_by_name(mesh, name).batches(limit)]
        return found, "" if found or queue is None else await unknown_queue_hint(mesh, queue)

    found, hint = run_connected(connect, command)
    nothing = hint or f"no batch has its home in {'any queue' if queue is None else f'queue {queue!r}'}"
    print_list(BATCHES, found, batch_fields, json=json, nothing=nothing)


def batch(
    queue: QueueName,
    id: Annotated[str, Parameter(name="ID", help="Id of the batch.")],
    /,
    *,
    cancel: Annotated[bool, flag("Cancel the batch and its jobs, waiting and running.")] = False,
    reason: Annotated[str, Parameter(show_default=False, help="Why you cancel it, for handlers and for people.")] = "",
    retry_failed: Annotated[bool, flag("Put its failed jobs back. The batch ends once more.")] = False,
    wait: Annotated[bool, flag("Wait until the batch has ended.")] = False,
    within: Annotated[str | None, duration_option("Wait this long at most. Implies --wait.")] = None,
    json: Annotated[bool, flag("Print one JSON object.")] = False,
    connect: ConnectOptions = FROM_ENVIRONMENT,
) -> None:
    """Show a batch, cancel it, or retry its failed jobs.

    Exit code 1 if the queue has no batch with this id. With --wait, also if the batch ends without all jobs finished.
    """
    if cancel and retry_failed:
        raise InvalidArguments("give --cancel or --retry-failed, not both")
    if reason and not cancel:
        raise InvalidArguments("--reason needs --cancel")
    limit = parse_duration(within, "--within")
    waited = wait or limit is not None

    async def command(mesh: Mesh) -> tuple[BatchInfo, str]:
        handle, done = queue_by_name(mesh, queue).batch(id), ""
        try:
            if cancel or retry_failed:
                done = await _change(mesh, handle, None if retry_failed else reason)
            if waited:
                return await _wait(handle, limit, shows_progress=is_terminal() and not json), done
            return await handle.info(), done
        except NoResult:
            raise CommandFailed(await _unknown(mesh, queue, id)) from None

    info, done = run_connected(connect, command)
    if json:
        print_json(batch_fields(info))
    else:
        _show_batch(info, done, facts=waited or not done)
    if waited and not cancel and not info.succeeded:
        raise CommandFailed(_unfinished(info))


async def _change(mesh: Mesh, handle: Batch, reason: str | None) -> str:
    """Cancel the batch, or without a reason put its failed jobs back. Return what was done."""
    from worqr.client.batch import cancel_and_note, retry_and_note

    if reason is None:
        count = await retry_and_note(client_of(mesh), handle)
        return f"{count:,} failed jobs put back"
    pending = await cancel_and_note(client_of(mesh), handle, reason)
    if pending is None:
        return f"Batch {escape(handle.id)} had ended: nothing was cancelled"
    return f"Cancelled batch {escape(handle.id)}, of which {pending:,} jobs had not ended"


async def _wait(handle: Batch, limit: float | None, *, shows_progress: bool) -> BatchInfo:
    """Wait until the batch has ended. Raises CommandFailed if it does not within `limit`."""
    import trio

    last = await handle.info()
    with trio.move_on_after(math.inf if limit is None else limit):
        async with handle.watch() as states:
            async for last in states:
                if shows_progress:
                    print(f"\r{last.jobs - last.pending:,} of {last.jobs:,} jobs have ended\x1b[K", end="", flush=True)
    if shows_progress:
        print("\r\x1b[K", end="", flush=True)
    if last.state != "ended":
        raise CommandFailed(
            f"batch {handle.id!r} has not ended within {limit:g} s: {last.pending:,} of {last.jobs:,} jobs wait or run"
        )
    return last


def _unfinished(info: BatchInfo) -> str:
    """Return the error about a batch that has ended without all its jobs finished."""
    lists = [f"`worqr failed list {name!r}`" for name in info.queues[:3]] if info.failed else []
    hint = f"; {' and '.join(lists)} show failed jobs" if lists else ""
    return f"batch {info.id!r} ended with {info.finished:,} of {info.jobs:,} jobs finished{hint}"


async def _unknown(mesh: Mesh, queue: str, id: str) -> str:
    """Return the message about a batch that the queue does not have."""
    found = await queue_by_name(mesh, queue).batches(MOST_COMPARED)
    listed = f"`worqr batches {queue!r}` lists its batches"
    hint = did_you_mean(id, [each.id for each in found], listed) if found else await unknown_queue_hint(mesh, queue)
    return (
        f"no batch {id!r} in queue {queue!r}: it never existed, another queue is its home, or its record was deleted "
        f"after its end; {hint or listed}"
    )


# Tables


def _show_batch(info: BatchInfo, done: str, *, facts: bool) -> None:
    if done:
        print(done)
    if facts:
        show_facts(
            _batch_facts(info),
            {"state": BATCH_STYLES.get(batch_state(info), ""), "failed": "red" if info.failed else ""},
        )


def _batch_facts(info: BatchInfo) -> dict[str, str]:
    share = f" ({info.finished / info.jobs:.0%})" if info.jobs else ""
    facts = {
        "state": batch_state(info),
        "why": shorten(escape(info.cancel_reason or "")),
        "jobs": f"{info.jobs:,}",
        "finished": f"{info.finished:,}{share}",
        "failed": f"{info.failed:,}",
        "cancelled": f"{info.cancelled:,}",
        "pending": f"{info.pending:,}",
        "queues": ", ".join(info.queues),
        "follow-up": "" if info.follow_up is None else f"job {info.follow_up[1]} in queue {info.follow_up[0]}",
        "made": exact_time(info.created),
        "ended": exact_time(info.ended),
        "endings": f"{info.endings}" if info.endings > 1 else "",
        "meta": shorten(" ".join(f"{name}={value}" for name, value in info.meta.items())),
    }
    return {name: text for name, text in facts.items() if text not in ("", "-")}


# JSON


def batch_fields(info: BatchInfo) -> dict[str, Any]:
    """Return a batch for JSON."""
    follow_up = None if info.follow_up is None else dict(zip(("queue", "id"), info.follow_up, strict=True))
    fields = {**asdict(info), "queues": list(info.queues), "follow_up": follow_up}
    return {**fields, "pending": info.pending, "succeeded": info.succeeded}
