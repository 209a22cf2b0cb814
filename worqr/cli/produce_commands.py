"""``worqr enqueue``, ``dispatch`` and ``call``: put tasks into queues, and wait for their results."""

from __future__ import annotations

import math
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, cast

import trio
from cyclopts import Parameter

from worqr.cli import STDIN
from worqr.cli.errors import InvalidArguments
from worqr.cli.options import (
    FROM_ENVIRONMENT,
    ConnectOptions,
    QueueName,
    duration_option,
    flag,
    parse_arguments,
    parse_duration,
    parse_pairs,
    parse_time,
    queue_by_name,
    run_connected,
    text_like_json,
    time_option,
    warn_if_unserved,
)
from worqr.cli.output import payload_fields, print_error, print_json
from worqr.client.room import PART
from worqr.command import in_chunks
from worqr.errors import Duplicate, WorqrError
from worqr.escaping import escape, escape_bytes
from worqr.ops import MAX_ITEMS
from worqr.validation import encode_json

if TYPE_CHECKING:
    from worqr.client.job import Job
    from worqr.client.queue import Queue
    from worqr.mesh import Mesh


READ_SIZE: Final = 1024 * 1024
KEEP_RESULT: Final = 300.0
"""Seconds for which the result of a job is stored if ``--wait`` waits for it."""

Json = Annotated[bool, flag("Print one JSON object.")]
Wait = Annotated[bool, flag("Wait for the end of the job, and print its result.")]
WaitForRoom = Annotated[str | None, duration_option("Wait this long for room. Needs --max-length.")]
Within = Annotated[str | None, duration_option("Wait this long at most. Implies --wait.")]


def enqueue(
    queue: QueueName,
    /,
    *payloads: Annotated[str, Parameter(help="Payloads, one task each. -: one payload from the standard input.")],
    lines: Annotated[bool, flag("Enqueue each line of the standard input as soon as it is read.")] = False,
    unique: Annotated[bool, flag("Refuse payloads that are already waiting or running.")] = False,
    front: Annotated[bool, flag("Enqueue at the front of the queue.")] = False,
    max_length: Annotated[
        int | None, Parameter(metavar="N", help="Refuse the tasks if more than N would wait.")
    ] = None,
    wait_for_room: WaitForRoom = None,
    json: Json = False,
    connect: ConnectOptions = FROM_ENVIRONMENT,
) -> None:
    """Enqueue tasks."""
    _check_payloads(payloads, lines=lines)
    wait = _room(wait_for_room, max_length) or 0
    options: dict[str, Any] = {"front": front, "max_length": max_length, "wait": wait}

    async def command(mesh: Mesh) -> None:
        target = queue_by_name(mesh, queue)
        if lines:
            stored, refused = await _enqueue_lines(mesh, target, unique=unique, options=options)
        else:
            tasks = [await read_stdin()] if payloads == (STDIN,) else list(map(os.fsencode, payloads))
            stored, refused = await target.enqueue(*tasks, unique=unique, **options), 0
        if json:
            print_json({"queue": queue, "enqueued": stored, "refused": refused})
        else:
            print(f"{stored:,} enqueued" + (f", {refused:,} refused as duplicates" if refused else ""))
        if not lines:
            await warn_if_unserved(mesh, queue)

    run_connected(connect, command)


def _room(text: str | None, max_length: int | None) -> float | None:
    """Return the seconds of --wait-for-room; None if it was not given."""
    wait = parse_duration(text, "--wait-for-room")
    if wait is not None and max_length is None:
        raise InvalidArguments("--wait-for-room needs --max-length: add --max-length 1000")
    return wait


def _check_payloads(payloads: tuple[str, ...], *, lines: bool) -> None:
    if lines and (set(payloads) - {STDIN}):
        raise InvalidArguments("--lines reads tasks from the standard input: omit the payloads")
    if not lines and not payloads:
        raise InvalidArguments("no payload: add payloads, or - to read one from the standard input, or --lines")
    if STDIN in payloads and len(payloads) > 1:
        raise InvalidArguments("- reads one payload from the standard input: omit the other payloads")


async def _enqueue_lines(mesh: Mesh, queue: Queue, *, unique: bool, options: dict[str, Any]) -> tuple[int, int]:
    """Enqueue the lines of the standard input as they are read. Return how many were stored, and how many refused."""
    stored = refused = 0
    warned = False
    try:
        async for tasks in _stdin_lines(all_at_once=options["front"]):
            if not unique:
                for part in _parts(tasks, options):
                    stored += await queue.enqueue(*part, **options)
            for task in tasks if unique else ():
                try:
                    stored += await queue.enqueue(task, unique=True, **options)
                except Duplicate:
                    refused += 1
            if not warned:  # now, not at the end: the input of `tail -f` never ends
                warned = True
                await warn_if_unserved(mesh, queue.name)
    except WorqrError as error:
        if stored:
            error.add_note(f"the first {stored:,} lines were enqueued")
        raise
    return stored, refused


def _parts(tasks: list[bytes], options: Mapping[str, Any]) -> list[list[bytes]]:
    """Return the tasks in parts that wait for room together; in one part if they do not wait. With ``front``, the last first."""
    if not options["wait"]:
        return [tasks]
    parts = list(in_chunks(tasks, len, most=max(1, min(MAX_ITEMS, options["max_length"] // PART))))
    return parts[::-1] if options["front"] else parts


async def read_stdin() -> bytes:
    """Return all of the standard input."""
    return b"".join([chunk async for chunk in _stdin_chunks()])


async def _stdin_lines(*, all_at_once: bool) -> AsyncIterator[list[bytes]]:
    """Yield the lines of each read, without their line ends; with `all_at_once`, all lines at once."""
    rest = await read_stdin() if all_at_once else b""
    if not all_at_once:
        async for chunk in _stdin_chunks():
            *tasks, rest = (rest + chunk).split(b"\n")
            if tasks:
                yield tasks
    if rest:
        yield rest.removesuffix(b"\n").split(b"\n")


async def _stdin_chunks() -> AsyncIterator[bytes]:
    """Yield the input as it is read, because the writer of a pipe, or the user of a terminal, may be slow."""
    while chunk := await trio.to_thread.run_sync(os.read, 0, READ_SIZE, abandon_on_cancel=True):
        yield chunk


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class DispatchOptions:
    """The options of a dispatch, as the user types them."""

    id: Annotated[str | None, Parameter(help="Id of the job. Default: a new one.")] = None
    delay: Annotated[str | None, duration_option("Run the job this much later.")] = None
    run_at: Annotated[str | None, time_option("Run the job at this time.")] = None
    expires: Annotated[
        str | None,
        duration_option("Fail the job if it has not started this long after its time."),
    ] = None
    timeout: Annotated[str | None, duration_option("Stop a run after this long.")] = None
    result_ttl: Annotated[str | None, duration_option("Store the result for this long.")] = None
    meta: Annotated[
        tuple[str, ...], Parameter(show_default=False, metavar="NAME=TEXT", help="Metadata of the job. Repeatable.")
    ] = ()
    if_exists: Annotated[
        Literal["update", "skip", "raise", "cancel"] | None,
        Parameter(help="What to do if the id is in use. cancel: stop the run. Default: update."),
    ] = None
    unique_for: Annotated[str | None, duration_option("Reserve the id for this long.")] = None
    max_length: Annotated[int | None, Parameter(metavar="N", help="Refuse the job if N tasks are already waiting.")] = (
        None
    )
    wait_for_room: WaitForRoom = None
    front: Annotated[bool, flag("Enqueue at the front of the queue.")] = False

    def as_job_options(self) -> dict[str, Any]:
        """Return the options of ``queue.dispatch``; raise InvalidArguments if one is invalid."""
        found: dict[str, Any] = {
            "id": self.id,
            "run_at": parse_time(self.run_at, "--run-at"),
            "meta": parse_pairs(self.meta, "--meta") or None,
            "if_exists": self.if_exists,
            "max_length": self.max_length,
            "wait": _room(self.wait_for_room, self.max_length),
            "front": self.front or None,
        }
        for name in ("delay", "expires", "timeout", "result_ttl", "unique_for"):
            found[name] = parse_duration(getattr(self, name), f"--{name.replace('_', '-')}")
        return {name: value for name, value in found.items() if value is not None}


DEFAULTS: Final = DispatchOptions()


def dispatch(
    queue: QueueName,
    payload: Annotated[str, Parameter(help="Payload of the job. -: from the standard input.")],
    /,
    *,
    options: DispatchOptions = DEFAULTS,
    wait: Wait = False,
    within: Within = None,
    json: Json = False,
    connect: ConnectOptions = FROM_ENVIRONMENT,
) -> None:
    """Dispatch a job: a task with an id, a start time and other options.

    Prints the outcome (created, updated, unchanged or blocked) and the id; with --wait the result.
    """
    given = options.as_job_options()
    patience = _wait_limit(wait=wait, within=within)

    async def command(mesh: Mesh) -> None:
        task = await read_stdin() if payload == STDIN else os.fsencode(payload)
        await _dispatch(mesh, queue_by_name(mesh, queue), task, given, patience, json=json)

    run_connected(connect, command)


def call(
    name: Annotated[str, Parameter(help="Name of the function.")],
    /,
    *given: Annotated[str, Parameter(metavar="NAME=TEXT|NAME:=JSON", help="Arguments of the function.")],
    args: Annotated[str | None, Parameter(metavar="JSON", help="All arguments as one JSON object.")] = None,
    wait: Wait = False,
    within: Within = None,
    json: Json = False,
    connect: ConnectOptions = FROM_ENVIRONMENT,
) -> None:
    """Enqueue a call of a function, with named arguments: to=ada@example.org times:=3."""
    whole, kwargs = arguments_of(given, args)
    patience = _wait_limit(wait=wait, within=within)

    async def command(mesh: Mesh) -> None:
        made = mesh.call(name, *whole, **kwargs)
        queue = mesh.queue(made.name)
        if patience is not None:
            await _dispatch(mesh, queue, made.task, {}, patience, json=json)
            return
        stored = await queue.enqueue(made.task)
        if json:
            print_json({"queue": queue.name, "enqueued": stored, "refused": 0})
        else:
            print(f"{stored} enqueued")
        await warn_if_unserved(mesh, queue.name)

    run_connected(connect, command)


def arguments_of(given: Sequence[str], args: str | None) -> tuple[tuple[bytes, ...], dict[str, Any]]:
    """Return the arguments of ``mesh.call`` that were typed: the whole payload, or named ones."""
    if args is not None and given:
        raise InvalidArguments("use either name=text arguments or --args, not both")
    kwargs = parse_arguments(given)
    for each in given:
        if (name_of_it := text_like_json(each)) is not None:
            print_error(f"{each} is sent as a text; for a number or another value of JSON, type {name_of_it}:=...")
    if args is None:
        return (), kwargs
    _check_json(args)
    return (os.fsencode(args),), {}


def _check_json(args: str) -> None:
    import json

    try:
        json.loads(args)
    except ValueError as error:
        raise InvalidArguments(f"--args must be JSON: {error}") from None


def _wait_limit(*, wait: bool, within: str | None) -> float | None:
    """Return the seconds to wait for a result; None: do not wait."""
    limit = parse_duration(within, "--within")
    return limit if limit is not None else math.inf if wait else None


async def _dispatch(
    mesh: Mesh, queue: Queue, task: bytes, options: dict[str, Any], patience: float | None, *, json: bool
) -> None:
    if patience is not None:
        options = {"result_ttl": KEEP_RESULT, **options}
    job = await queue.dispatch(task, **cast("Any", options))
    summary = {"queue": job.queue, "id": job.id, "outcome": job.outcome}
    if patience is None:
        print_json(summary) if json else print(f"{job.outcome} {escape(job.id)}")
    elif not json:
        print_error(f"{job.outcome} {job.id}")
    await warn_if_unserved(mesh, queue.name)
    if patience is None:
        return
    result = await _result(job, patience)
    if json:
        print_json({**summary, "result": _result_fields(result)})
    elif result is not None:
        print(escape_bytes(result if isinstance(result, bytes) else encode_json(result)))


async def _result(job: Job[bytes], patience: float) -> object:
    return cast("object", await job.result(None if patience == math.inf else patience))


def _result_fields(result: object) -> object:
    """Show bytes as a payload, every other value unchanged."""
    return payload_fields(result) if isinstance(result, bytes) else result
