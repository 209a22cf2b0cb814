"""``worqr queues``, ``worqr workers`` and ``worqr schedules``: what there is, as a table or as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from worqr.cli.failing import Unhappy
from worqr.cli.text import complain, escape, moment, print_json, print_table
from worqr.cli.where import HERE, Where, ask, flag

if TYPE_CHECKING:
    from worqr.cron import Schedule
    from worqr.mesh import Mesh
    from worqr.records import QueueInfo, WorkerInfo

Json = Annotated[bool, flag("Print JSON, one object on a line.")]


def queues(*, json: Json = False, where: Where = HERE) -> None:
    """List the queues that hold something or are served."""

    async def command(mesh: Mesh) -> list[QueueInfo]:
        return await mesh.queues()

    found = ask(where, command)
    if json:
        for info in found:
            print_json({**asdict(info), "unserved": _is_unserved(info)})
    elif not found:
        complain("no queue holds anything or is served")
    else:
        header = (
            "queue",
            "waiting",
            "scheduled",
            "blocked",
            "running",
            "failed",
            "broken",
            "workers",
            "unserved",
            "oldest job",
            "paused",
        )
        print_table(header, map(_queue_row, found))


def _queue_row(info: QueueInfo) -> tuple[object, ...]:
    counts = (info.waiting, info.scheduled, info.blocked, info.running, info.failed, info.broken, info.workers)
    oldest = "-" if info.oldest_job is None else f"{info.oldest_job:.1f} s"
    return (
        info.name,
        *counts,
        "yes" if _is_unserved(info) else "-",
        oldest,
        "" if info.paused is None else info.paused or "yes",
    )


def _is_unserved(info: QueueInfo) -> bool:
    """Return True if tasks wait and no worker serves the queue: they wait until one does."""
    return info.waiting > 0 and not info.workers


workers: App = App(name="workers", help="List the workers of the mesh, or evict one that hangs or is gone.")


@workers.default
@workers.command(name="list", help="List them: the same as without a word.")
def list_workers(*, json: Json = False, where: Where = HERE) -> None:
    """List the workers: one registration of a peer each."""

    async def command(mesh: Mesh) -> list[WorkerInfo]:
        return await mesh.workers()

    found = ask(where, command)
    if json:
        for info in found:
            print_json({**asdict(info), "beat_age": None if math.isinf(info.beat_age) else info.beat_age})
    elif not found:
        complain("no worker is registered")
    else:
        print_table(("worker", "host", "pid", "app", "running", "room", "last beat", "queues"), map(_worker_row, found))


def _worker_row(info: WorkerInfo) -> tuple[object, ...]:
    beat = "never" if math.isinf(info.beat_age) else f"{info.beat_age:.1f} s"
    queues = ", ".join(sorted(info.queues))
    return (info.id, info.host, info.pid, info.app or "-", info.running, info.room, beat, queues)


@workers.command(name="evict")
def evict_workers(
    ids: Annotated[tuple[str, ...], Parameter(name="ID", help="A worker's id, or the beginning of it.")],
    /,
    *,
    where: Where = HERE,
) -> None:
    """Declare workers dead, and give their tasks back at once.

    A worker that is alive joins again, with a new id: to stop it for good, stop its process.
    """

    async def command(mesh: Mesh) -> None:
        known = [info.id for info in await mesh.workers()]
        found = {_worker_called(each, known) for each in ids}
        for worker in [
            *sorted(found.difference(known)),
            *sorted(found.intersection(known)),
        ]:  # an unknown one fails first
            await mesh.evict(worker)
            print(f"{escape(worker)} is evicted; its tasks are back in their queues")

    ask(where, command)


def _worker_called(word: str, known: Sequence[str]) -> str:
    """The one of `known` that begins with `word`; `word` itself if there is none, so that the error is that of the mesh."""
    found = [word] if word in known else [each for each in known if each.startswith(word)]
    if len(found) > 1:
        raise Unhappy(
            f"{len(found)} workers have an id that begins with {word!r}: {', '.join(found[:5])}; evicted none"
        )
    return found[0] if found else word


schedules: App = App(name="schedules", help="List the schedules of the mesh, or let the firings of one pass.")


@schedules.default
@schedules.command(name="list", help="List them: the same as without a word.")
def list_schedules(*, json: Json = False, where: Where = HERE) -> None:
    """List the schedules of the mesh."""

    async def command(mesh: Mesh) -> list[Schedule]:
        return await mesh.schedules()

    found = ask(where, command)
    if json:
        for schedule in found:
            print_json(asdict(schedule))
    elif not found:
        complain("no peer has declared a schedule")
    else:
        rows = [(s.name, moment(s.next_run), moment(s.last_run), "yes" if s.paused else "") for s in found]
        print_table(("schedule", "next run", "last run", "paused"), rows)


@schedules.command(name="pause")
def pause_schedule(name: str, /, *, where: Where = HERE) -> None:
    """Let the firings of a schedule pass, until it is resumed."""
    _pause(name, where, paused=True)
    print(f"{escape(name)} is paused")


@schedules.command(name="resume")
def resume_schedule(name: str, /, *, where: Where = HERE) -> None:
    """Let a schedule fire again; what it has missed is not made up for."""
    _pause(name, where, paused=False)
    print(f"{escape(name)} fires again")


def _pause(name: str, where: Where, *, paused: bool) -> None:
    async def command(mesh: Mesh) -> None:
        await mesh.pause_schedule(name, paused=paused)

    ask(where, command)
