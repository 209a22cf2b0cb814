"""``worqr enqueue``, ``dispatch`` and ``call``: work put into queues, and waited for."""

from __future__ import annotations

import math
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, cast

import trio
from cyclopts import Parameter

from worqr.cli import STDIN
from worqr.cli.failing import WrongUse
from worqr.cli.text import complain, escape, escape_bytes, payload_fields, print_json
from worqr.cli.where import HERE, Where, ask, flag, queue_of, time
from worqr.cli.words import arguments, duration, moment, pairs
from worqr.errors import Duplicate, WorqrError
from worqr.inside import client_of
from worqr.looking import nearest_served
from worqr.task import encode_json

if TYPE_CHECKING:
    from worqr.job import Job
    from worqr.mesh import Mesh
    from worqr.queue import Queue

READ_SIZE: Final = 1024 * 1024
KEEP_RESULT: Final = 300.0
"""Seconds that a result is kept that somebody waits for at the command line."""

Json = Annotated[bool, flag("Print JSON, one object on a line.")]
Wait = Annotated[bool, flag("Wait until it has ended, and print its result.")]
Within = Annotated[str | None, time("Wait no longer than this; implies --wait.")]


def enqueue(
    queue: str,
    /,
    *payloads: Annotated[str, Parameter(help="The tasks; a single - is the whole standard input as one.")],
    lines: Annotated[bool, flag("Each line of the standard input is a task, sent as it comes.")] = False,
    unique: Annotated[bool, flag("Refuse a payload that waits or runs already.")] = False,
    front: Annotated[bool, flag("Put them before all that waits.")] = False,
    max_length: Annotated[int | None, Parameter(help="Refuse them if more than so many tasks would wait.")] = None,
    json: Json = False,
    where: Where = HERE,
) -> None:
    """Put tasks into a queue."""
    _check_payloads(payloads, lines=lines)
    options: dict[str, Any] = {"front": front, "max_length": max_length}

    async def command(mesh: Mesh) -> None:
        there = queue_of(mesh, queue)
        if lines:
            stored, refused = await _enqueue_lines(mesh, there, unique=unique, options=options)
        else:
            tasks = [await _stdin()] if payloads == (STDIN,) else list(map(os.fsencode, payloads))
            stored, refused = await there.enqueue(*tasks, unique=unique, **options), 0
        if json:
            print_json({"queue": queue, "enqueued": stored, "refused": refused})
        else:
            print(f"{stored:,} enqueued" + (f", {refused:,} waited or ran already" if refused else ""))
        if not lines:
            await _warn_if_unserved(mesh, queue)

    ask(where, command)


def _check_payloads(payloads: tuple[str, ...], *, lines: bool) -> None:
    if lines and (set(payloads) - {STDIN}):
        raise WrongUse("--lines takes the tasks from the standard input: give no payloads")
    if not lines and not payloads:
        raise WrongUse("there is no payload: give some, or - for the standard input, or --lines")
    if STDIN in payloads and len(payloads) > 1:
        raise WrongUse("the standard input (-) is one payload: give no others beside it")


async def _enqueue_lines(mesh: Mesh, queue: Queue, *, unique: bool, options: dict[str, Any]) -> tuple[int, int]:
    """Enqueue the lines of the standard input as they come; how many were stored, and how many were there already."""
    stored = refused = 0
    looked = False
    try:
        async for tasks in _stdin_lines(whole=options["front"]):
            if not unique:
                stored += await queue.enqueue(*tasks, **options)
            for task in tasks if unique else ():
                try:
                    stored += await queue.enqueue(task, unique=True, **options)
                except Duplicate:
                    refused += 1
            if not looked:  # now, not at the end: the input of `tail -f` has none
                looked = True
                await _warn_if_unserved(mesh, queue.name)
    except WorqrError as error:
        if stored:
            error.add_note(f"{stored:,} lines were enqueued before")
        raise
    return stored, refused


async def _stdin() -> bytes:
    """All of the standard input."""
    return b"".join([chunk async for chunk in _stdin_chunks()])


async def _stdin_lines(*, whole: bool) -> AsyncIterator[list[bytes]]:
    """The lines that have come since the last look, without their ends; with `whole` all of them at once."""
    rest = await _stdin() if whole else b""
    if not whole:
        async for chunk in _stdin_chunks():
            *tasks, rest = (rest + chunk).split(b"\n")
            if tasks:
                yield tasks
    if rest:
        yield rest.removesuffix(b"\n").split(b"\n")


async def _stdin_chunks() -> AsyncIterator[bytes]:
    """What there is, as it comes: a terminal's or a pipe's writer may take its time."""
    while chunk := await trio.to_thread.run_sync(os.read, 0, READ_SIZE, abandon_on_cancel=True):
        yield chunk


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class Options:
    """What a dispatch says of a job, in words."""

    id: Annotated[str | None, Parameter(help="The job's id; else a new one.")] = None
    delay: Annotated[str | None, time("Run it so much later: 90, 10m, 1h30m.")] = None
    run_at: Annotated[str | None, time("Run it at this time: 2031-05-01T12:00, 2031-05-01T12:00Z.", metavar="TIME")] = (
        None
    )
    expires: Annotated[str | None, time("Set it aside if it has not begun so long after it was due.")] = None
    timeout: Annotated[str | None, time("How long a run may take.")] = None
    result_ttl: Annotated[str | None, time("How long its result is kept.")] = None
    meta: Annotated[
        tuple[str, ...], Parameter(show_default=False, help="name=text that travels with it; may be repeated.")
    ] = ()
    if_exists: Annotated[
        Literal["update", "skip", "raise"] | None, Parameter(help="What to do if the id is taken; else update.")
    ] = None
    unique_for: Annotated[str | None, time("The id stays taken for so long.")] = None
    max_length: Annotated[int | None, Parameter(help="Refuse it if so many tasks wait.")] = None
    front: Annotated[bool, flag("Put it before all that waits.")] = False

    def as_job_options(self) -> dict[str, Any]:
        """As ``queue.dispatch`` takes them; WrongUse if they make no sense."""
        found: dict[str, Any] = {
            "id": self.id,
            "run_at": moment(self.run_at, "--run-at"),
            "meta": pairs(self.meta, "--meta") or None,
            "if_exists": self.if_exists,
            "max_length": self.max_length,
            "front": self.front or None,
        }
        for name in ("delay", "expires", "timeout", "result_ttl", "unique_for"):
            found[name] = duration(getattr(self, name), f"--{name.replace('_', '-')}")
        return {name: value for name, value in found.items() if value is not None}


NONE: Final = Options()


def dispatch(
    queue: str,
    payload: Annotated[str, Parameter(help="The task; - is the whole standard input.")],
    /,
    *,
    options: Options = NONE,
    wait: Wait = False,
    within: Within = None,
    json: Json = False,
    where: Where = HERE,
) -> None:
    """Put a job into a queue: a task with an id, a time, and options of its own.

    Prints what became of it and its id; with --wait its result.
    """
    given = options.as_job_options()
    patience = _patience(wait=wait, within=within)

    async def command(mesh: Mesh) -> None:
        task = await _stdin() if payload == STDIN else os.fsencode(payload)
        await _dispatch(mesh, queue_of(mesh, queue), task, given, patience, json=json)

    ask(where, command)


def call(
    name: str,
    /,
    *given: Annotated[str, Parameter(help="The arguments: name=text, or name:=JSON.")],
    args: Annotated[
        str | None, Parameter(help="All arguments as one JSON object, or what a function takes whole.")
    ] = None,
    wait: Wait = False,
    within: Within = None,
    json: Json = False,
    where: Where = HERE,
) -> None:
    """Call a function of the mesh by its name, with arguments by theirs: to=ada@example.org times:=3."""
    if args is not None and given:
        raise WrongUse("give the arguments one by one or with --args, not both")
    kwargs = arguments(given)
    patience = _patience(wait=wait, within=within)

    async def command(mesh: Mesh) -> None:
        made = mesh.call(name, **kwargs) if args is None else mesh.call(name, os.fsencode(args))
        queue = mesh.queue(made.name)
        if patience is not None:
            await _dispatch(mesh, queue, made.task, {}, patience, json=json)
            return
        stored = await queue.enqueue(made.task)
        if json:
            print_json({"queue": queue.name, "enqueued": stored, "refused": 0})
        else:
            print(f"{stored} enqueued")
        await _warn_if_unserved(mesh, queue.name)

    if args is not None:
        _check_json(args)
    ask(where, command)


def _check_json(args: str) -> None:
    import json

    try:
        json.loads(args)
    except ValueError as error:
        raise WrongUse(f"--args must be JSON: {error}") from None


def _patience(*, wait: bool, within: str | None) -> float | None:
    """Seconds to wait for a result; None: it is not waited for."""
    limit = duration(within, "--within")
    return limit if limit is not None else math.inf if wait else None


async def _dispatch(
    mesh: Mesh, queue: Queue, task: bytes, options: dict[str, Any], patience: float | None, *, json: bool
) -> None:
    if patience is not None:
        options = {"result_ttl": KEEP_RESULT, **options}
    job = await queue.dispatch(task, **cast("Any", options))
    told = {"queue": job.queue, "id": job.id, "outcome": job.outcome}
    if patience is None:
        print_json(told) if json else print(f"{job.outcome} {escape(job.id)}")
    elif not json:
        complain(f"{job.outcome} {job.id}")
    await _warn_if_unserved(mesh, queue.name)
    if patience is None:
        return
    result = await _result(job, patience)
    if json:
        print_json({**told, "result": _result_fields(result)})
    elif result is not None:
        print(escape_bytes(result if isinstance(result, bytes) else encode_json(result)))


async def _warn_if_unserved(mesh: Mesh, name: str) -> None:
    """Say on the standard error that no worker serves the queue. Says nothing if this user may not look."""
    with suppress(WorqrError):
        if not (await queue_of(mesh, name).info()).workers:
            hint = await nearest_served(client_of(mesh), name)
            complain(f"no worker serves queue {name!r} now; {hint or 'what waits there runs when one does'}")


async def _result(job: Job[bytes], patience: float) -> object:
    return cast("object", await job.result(None if patience == math.inf else patience))


def _result_fields(result: object) -> object:
    """Bytes as a payload is shown, all else as it is."""
    return payload_fields(result) if isinstance(result, bytes) else result
