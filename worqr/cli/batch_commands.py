"""``worqr batches`` and ``worqr batch``: list batches, show one, cancel it, put its failed jobs back, or wait for its end."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import Parameter

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
from worqr.cli.output import is_terminal, print_json, print_list, show_facts
from worqr.errors import NoResult, did_you_mean
from worqr.escaping import escape
from worqr.inside import client_of
from worqr.views.tables import BATCH_STYLES, BATCHES, batch_state
from worqr.views.values import exact_time, shorten

if TYPE_CHECKING:
    from worqr.batches import BatchInfo
    from worqr.client.batch import Batch
    from worqr.mesh import Mesh


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
    """Show a batch: its state, how many of its jobs have ended, and its follow-up. Or cancel it, or retry its failed jobs.

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
        _show(info, done, facts=waited or not done)
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


def _show(info: BatchInfo, done: str, *, facts: bool) -> None:
    if done:
        print(done)
    if facts:
        show_facts(
            _facts(info), {"state": BATCH_STYLES.get(batch_state(info), ""), "failed": "red" if info.failed else ""}
        )


def _facts(info: BatchInfo) -> dict[str, str]:
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
