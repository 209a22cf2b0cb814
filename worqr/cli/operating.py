"""``worqr cancel``, ``pause`` and ``resume``: what operators do to a queue."""

from __future__ import annotations

import os
from dataclasses import asdict, astuple, dataclass
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import Parameter

from worqr.cli.failing import Unhappy, WrongUse
from worqr.cli.text import complain, escape, print_json
from worqr.cli.where import HERE, Where, ask, flag, hint_at, queue_of, time
from worqr.cli.words import duration
from worqr.records import CancelCount

if TYPE_CHECKING:
    from worqr.mesh import Mesh
    from worqr.queue import Queue

WAIT: Final = 30.0
"""Seconds that ``--wait`` waits for handlers to unwind, if not told otherwise."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class Target:
    """What to cancel."""

    id: Annotated[tuple[str, ...], Parameter(show_default=False, help="The job of this id; may be repeated.")] = ()
    task: Annotated[
        tuple[str, ...], Parameter(show_default=False, help="Every task with this payload; may be repeated.")
    ] = ()
    all: Annotated[bool, flag("Every task and job of the queue.")] = False

    def check(self) -> None:
        """WrongUse if it is not exactly one of them."""
        if (bool(self.id) + bool(self.task) + self.all) != 1:
            raise WrongUse("say what to cancel: --id, --task or --all, and only one of them")

    async def cancel(self, queue: Queue, reason: str, wait: float) -> CancelCount:
        """Cancel it."""
        if self.all:
            return await queue.cancel_all(reason=reason, wait=wait)
        counts = [await queue.job(each).cancel(reason=reason, wait=wait) for each in self.id]
        counts += [await queue.cancel(os.fsencode(each), reason=reason, wait=wait) for each in self.task]
        return CancelCount(*map(sum, zip(*map(astuple, counts), strict=True)))


NOTHING: Final = Target()


def cancel(
    queue: str,
    /,
    *,
    target: Target = NOTHING,
    reason: Annotated[
        str, Parameter(show_default=False, help="Why: for people, and for who waits for the result.")
    ] = "",
    wait: Annotated[bool, flag("Wait until those that run have really ended; at most 30s.")] = False,
    within: Annotated[str | None, time("Wait no longer than this; implies --wait.")] = None,
    json: Annotated[bool, flag("Print JSON.")] = False,
    where: Where = HERE,
) -> None:
    """Cancel tasks: those that wait are removed, those that run are cancelled wherever they run."""
    target.check()
    limit = duration(within, "--within")
    patience = limit if limit is not None else WAIT if wait else 0.0

    async def command(mesh: Mesh) -> tuple[CancelCount, str]:
        count = await target.cancel(queue_of(mesh, queue), reason, patience)
        return count, "" if count.waiting or count.running else await hint_at(mesh, queue)

    count, hint = ask(where, command)
    if json:
        print_json({"queue": queue, **asdict(count)})
    else:
        ended = f" ({count.acknowledged:,} have ended)" if patience and count.running else ""
        print(f"{count.waiting:,} removed, {count.running:,} running cancelled{ended}")
    if hint:
        complain(hint)
    if patience and count.acknowledged < count.running:
        left = count.running - count.acknowledged
        raise Unhappy(f"{left:,} had not ended within {patience:g} s; they will not come back")


def pause(
    queue: str,
    reason: Annotated[str, Parameter(show_default=False, help="Why: for people.")] = "",
    /,
    *,
    where: Where = HERE,
) -> None:
    """Stop claims on a queue, everywhere. What runs goes on, and so does enqueueing."""

    async def command(mesh: Mesh) -> str:
        hint = await hint_at(mesh, queue)  # before: a queue that is paused is noted
        await queue_of(mesh, queue).pause(reason)
        return hint

    hint = ask(where, command)
    print(f"{escape(queue)} is paused")
    if hint:
        complain(hint)


def resume(queue: str, /, *, where: Where = HERE) -> None:
    """Let claims on a queue go on."""

    async def command(mesh: Mesh) -> str:
        await queue_of(mesh, queue).resume()
        return await hint_at(mesh, queue)

    hint = ask(where, command)
    print(f"{escape(queue)} goes on")
    if hint:
        complain(hint)
