"""``worqr cancel``, ``pause``, ``resume`` and ``delete``: commands that change a queue."""

from __future__ import annotations

import os
from dataclasses import asdict, astuple, dataclass
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import Parameter

from worqr.cli.connect_options import FROM_ENVIRONMENT, ConnectOptions, run_connected
from worqr.cli.errors import CommandFailed, InvalidArguments
from worqr.cli.output import escape, print_error, print_json
from worqr.cli.parsing import QueueName, duration_option, flag, parse_duration, queue_by_name, unknown_queue_hint
from worqr.records import CancelCount

if TYPE_CHECKING:
    from worqr.client.queue import Queue
    from worqr.mesh import Mesh
    from worqr.mesh_records import QueueInfo

WAIT: Final = 30.0
"""Seconds that ``--wait`` waits for handlers to end, without ``--within``."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class Target:
    """What to cancel."""

    id: Annotated[tuple[str, ...], Parameter(show_default=False, help="Cancel the job with this id. Repeatable.")] = ()
    task: Annotated[
        tuple[str, ...], Parameter(show_default=False, help="Cancel every task with this payload. Repeatable.")
    ] = ()
    claim: Annotated[
        tuple[str, ...],
        Parameter(show_default=False, help="Cancel this run, whose claim `worqr running --json` shows. Repeatable."),
    ] = ()
    all: Annotated[bool, flag("Cancel every task and job of the queue.")] = False

    def check(self) -> None:
        """Raise InvalidArguments unless exactly one option is given."""
        if (bool(self.id) + bool(self.task) + bool(self.claim) + self.all) != 1:
            raise InvalidArguments("name what to cancel by exactly one of --id, --task, --claim and --all")

    async def cancel(self, queue: Queue, reason: str, wait: float) -> CancelCount:
        """Cancel the target, and return the counts."""
        if self.all:
            return await queue.cancel_all(reason=reason, wait=wait)
        if self.claim:
            return await queue.cancel_claims(*self.claim, reason=reason, wait=wait)
        counts = [await queue.job(each).cancel(reason=reason, wait=wait) for each in self.id]
        counts += [await queue.cancel(os.fsencode(each), reason=reason, wait=wait) for each in self.task]
        return CancelCount(*map(sum, zip(*map(astuple, counts), strict=True)))


NO_TARGET: Final = Target()


def cancel(
    queue: QueueName,
    /,
    *,
    target: Target = NO_TARGET,
    reason: Annotated[
        str,
        Parameter(show_default=False, help="Reason, which JobCancelled.reason has for those who wait for the result."),
    ] = "",
    wait: Annotated[bool, flag("Wait up to 30s until the cancelled runs have ended.")] = False,
    within: Annotated[str | None, duration_option("Wait up to this long. Implies --wait.")] = None,
    json: Annotated[bool, flag("Print one JSON object.")] = False,
    connect: ConnectOptions = FROM_ENVIRONMENT,
) -> None:
    """Cancel tasks: remove waiting ones, and stop running ones on whichever worker they run.

    With --wait, exit code 1 if a run has not ended in time.
    """
    target.check()
    limit = parse_duration(within, "--within")
    patience = limit if limit is not None else WAIT if wait else 0.0

    async def command(mesh: Mesh) -> tuple[CancelCount, str]:
        count = await target.cancel(queue_by_name(mesh, queue), reason, patience)
        return count, "" if count.waiting or count.running else await unknown_queue_hint(mesh, queue)

    count, hint = run_connected(connect, command)
    if json:
        print_json({"queue": queue, **asdict(count)})
    else:
        ended = f" ({count.acknowledged:,} ended)" if patience and count.running else ""
        print(f"{count.waiting:,} removed, {count.running:,} running cancelled{ended}")
    if hint:
        print_error(hint)
    if patience and count.acknowledged < count.running:
        left = count.running - count.acknowledged
        raise CommandFailed(
            f"{left:,} cancelled runs have not ended within {patience:g} s; they will not be retried. "
            f"`worqr running {queue!r}` shows their workers"
        )


def pause(
    queue: QueueName,
    reason: Annotated[str, Parameter(show_default=False, help="Reason, as `worqr queues` shows it.")] = "",
    /,
    *,
    duration: Annotated[
        str | None,
        Parameter(
            name="--for", show_default=False, help="Resume after this long, such as 10m. Default: when you resume it."
        ),
    ] = None,
    lane: Annotated[str | None, Parameter(show_default=False, help="Pause only this lane of the queue.")] = None,
    connect: ConnectOptions = FROM_ENVIRONMENT,
) -> None:
    """Pause a queue: no worker takes its tasks until you resume it.

    Running tasks continue, and producers can still enqueue.
    """
    seconds = parse_duration(duration, "--for")

    async def command(mesh: Mesh) -> str:
        hint = await unknown_queue_hint(mesh, queue)  # before the pause, which registers the queue
        await queue_by_name(mesh, queue).pause(reason, duration=seconds, lane=lane)
        return hint

    hint = run_connected(connect, command)
    print(f"Paused {_named(queue, lane)}")
    if hint:
        print_error(hint)


def resume(
    queue: QueueName,
    /,
    *,
    lane: Annotated[str | None, Parameter(show_default=False, help="Resume only this lane of the queue.")] = None,
    connect: ConnectOptions = FROM_ENVIRONMENT,
) -> None:
    """Resume a paused queue."""

    async def command(mesh: Mesh) -> str:
        hint = await unknown_queue_hint(mesh, queue)  # before the change, which registers the queue
        await queue_by_name(mesh, queue).resume(lane=lane)
        return hint

    hint = run_connected(connect, command)
    print(f"Resumed {_named(queue, lane)}")
    if hint:
        print_error(hint)


def _named(queue: str, lane: str | None) -> str:
    return f"queue {escape(queue)}" if lane is None else f"lane {escape(lane)} of queue {escape(queue)}"


def delete(
    queue: QueueName,
    /,
    *,
    yes: Annotated[bool, flag("Confirm. Without it, nothing is deleted.")] = False,
    connect: ConnectOptions = FROM_ENVIRONMENT,
) -> None:
    """Delete all waiting, scheduled and blocked tasks of a queue.

    Running tasks continue; those that would be retried are deleted, too. Dead-letter entries stay: see `worqr failed drop`.
    """

    async def command(mesh: Mesh) -> tuple[QueueInfo, str]:
        target = queue_by_name(mesh, queue)
        found = await target.info()
        if yes:
            await target.delete()
        return found, "" if _tasks_of(found) else await unknown_queue_hint(mesh, queue)

    found, hint = run_connected(connect, command)
    what = f"{found.waiting:,} waiting, {found.scheduled:,} scheduled and {found.blocked:,} blocked tasks"
    if not yes:
        raise InvalidArguments(hint or f"queue {queue!r} has {what}: add --yes to delete them")
    print(f"Deleted {what} of queue {escape(queue)}")
    if hint:
        print_error(hint)


def _tasks_of(info: QueueInfo) -> int:
    return info.waiting + info.scheduled + info.blocked
