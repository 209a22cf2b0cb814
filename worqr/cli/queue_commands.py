"""The commands about queues and lanes: ``worqr queues``, ``cancel``, ``pause``, ``resume``, ``limit``, ``lanes``, ``delete``."""

from __future__ import annotations

import os
from dataclasses import asdict, astuple, dataclass
from typing import TYPE_CHECKING, Annotated, Final

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
    parse_rate,
    prefix_read,
    queue_by_name,
    run_connected,
    unknown_queue_hint,
)
from worqr.cli.output import is_terminal, print_error, print_json, print_list
from worqr.client.inspection import queues_of
from worqr.escaping import escape
from worqr.inside import client_of
from worqr.limits import HELD_BACK, Limit, describe_limits
from worqr.records import CancelCount
from worqr.views.tables import LANES, QUEUES, Note, is_unserved

if TYPE_CHECKING:
    from worqr.client.queue import Queue
    from worqr.mesh import Mesh
    from worqr.mesh_records import LaneInfo, QueueInfo


def what_may_start(info: QueueInfo) -> str:
    """Return the limits of a queue in words, and why no task may start now."""
    by = ", set by an operator" if info.limits_overridden else ""
    held = Note("held", HELD_BACK[info.held_back], until=info.held_for).text if info.held_back else ""
    return "; ".join(filter(None, (describe_limits(info.limits) + by, held)))


def queues(
    *,
    watch: Annotated[bool, flag("Watch the queues, as `worqr top` does.")] = False,
    json: JsonLines = False,
    connect: ConnectOptions = FROM_ENVIRONMENT,
) -> None:
    """List the queues that hold tasks or have workers."""
    if watch:
        if json:
            raise InvalidArguments("--watch draws a table: omit --json, or call `worqr queues --json` repeatedly")
        if not is_terminal():
            raise InvalidArguments("--watch needs a terminal; in a pipe, call `worqr queues --json` repeatedly")
        from worqr.cli.top import top

        top(connect=connect)
        return

    async def command(mesh: Mesh) -> tuple[list[QueueInfo], dict[str, str]]:
        return await queues_of(client_of(mesh))

    found, unreadable = run_connected(connect, command)
    for name, why in unreadable.items():
        print_error(f"queue {name!r} is left out: {why}")
    print_list(
        QUEUES,
        found,
        lambda info: {**asdict(info), "unserved": is_unserved(info)},
        json=json,
        nothing="no queue holds tasks or has workers" + prefix_read(connect),
    )


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
        Parameter(
            show_default=False, help="Cancel the run of this claim, as `worqr running --json` shows it. Repeatable."
        ),
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
        Parameter(show_default=False, help="Reason, for JobCancelled.reason."),
    ] = "",
    wait: Annotated[bool, flag("Wait up to 30s until the cancelled runs have ended.")] = False,
    within: Annotated[str | None, duration_option("Wait this long at most. Implies --wait.")] = None,
    json: Annotated[bool, flag("Print one JSON object.")] = False,
    connect: ConnectOptions = FROM_ENVIRONMENT,
) -> None:
    """Cancel tasks: remove waiting ones, and stop running ones.

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
    """Delete all waiting, scheduled, suspended and blocked tasks of a queue.

    Running tasks continue; those that would be retried are deleted, too. Dead-letter entries stay: see `worqr failed drop`.
    """

    async def command(mesh: Mesh) -> tuple[QueueInfo, str]:
        target = queue_by_name(mesh, queue)
        found = await target.info()
        if yes:
            await target.delete()
        return found, "" if _tasks_of(found) else await unknown_queue_hint(mesh, queue)

    found, hint = run_connected(connect, command)
    what = (
        f"{found.waiting:,} waiting, {found.scheduled:,} scheduled, {found.suspended:,} suspended and {found.blocked:,} "
        "blocked tasks"
    )
    if not yes:
        raise InvalidArguments(hint or f"queue {queue!r} has {what}: add --yes to delete them")
    print(f"Deleted {what} of queue {escape(queue)}")
    if hint:
        print_error(hint)


def _tasks_of(info: QueueInfo) -> int:
    return info.waiting + info.scheduled + info.suspended + info.blocked


def lanes(
    queue: QueueName,
    /,
    *,
    lane: Annotated[str | None, Parameter(show_default=False, help="Only this lane.")] = None,
    weight: Annotated[
        int | None, Parameter(show_default=False, help="Set the weight of --lane: 1 to 1000; 0: as the code declares.")
    ] = None,
    cancel: Annotated[bool, flag("Cancel all jobs of --lane.")] = False,
    limit: Annotated[int, Parameter(help="List at most N lanes, those with the most tasks.")] = 100,
    json: Annotated[bool, flag("Print one JSON object per lane.")] = False,
    connect: ConnectOptions = FROM_ENVIRONMENT,
) -> None:
    """List the lanes of a queue: how many tasks wait and run in each, and why none starts.

    A lane that has no tasks is listed if it is paused, or if an operator has set its weight or limit.
    """
    if lane is None and (weight is not None or cancel):
        raise InvalidArguments("--weight and --cancel need --lane, the lane that they are about")

    async def command(mesh: Mesh) -> tuple[list[LaneInfo], str, str]:
        target, done = queue_by_name(mesh, queue), ""
        hint = await unknown_queue_hint(mesh, queue)  # before a change, which registers the queue
        if lane is not None and weight is not None:
            await target.set_weight(lane, weight or None)
        if lane is not None and cancel:
            count = await target.cancel_lane(lane)
            done = f"Cancelled {count.waiting + count.running:,} jobs of lane {escape(lane)}"
        return await target.lanes(limit=limit, lane=lane), done, hint

    found, done, hint = run_connected(connect, command)
    if done and not json:
        print(done)
    else:
        nothing = f"no lane of queue {queue!r} has tasks, is paused, or was set by an operator"
        print_list(LANES, found, lambda each: {"queue": queue, **asdict(each)}, json=json, nothing=nothing)
    if hint:
        print_error(hint)


def limit(
    queue: QueueName,
    /,
    *,
    concurrency: Annotated[int | None, Parameter(help="Tasks that may run at once in the whole mesh.")] = None,
    rate: Annotated[
        tuple[str, ...],
        Parameter(show_default=False, help="Tasks that may start in any period, such as 100/1m. Repeatable."),
    ] = (),
    none: Annotated[bool, flag("Remove all limits, also those that the code declares.")] = False,
    clear: Annotated[bool, flag("Return to the limits that the code declares.")] = False,
    lane: Annotated[str | None, Parameter(show_default=False, help="The limits of this lane of the queue.")] = None,
    json: Annotated[bool, flag("Print one JSON object.")] = False,
    connect: ConnectOptions = FROM_ENVIRONMENT,
) -> None:
    """Show the limits of a queue, or set others in place of those that the code declares.

    A lower limit does not stop tasks that run. Limits that you set stay until --clear.
    """
    limits = (*(() if concurrency is None else (Limit(concurrency),)), *(parse_rate(each, "--rate") for each in rate))
    if bool(limits) + none + clear > 1:
        raise InvalidArguments("give --concurrency and --rate, or --none, or --clear")

    async def command(mesh: Mesh) -> tuple[QueueInfo, list[LaneInfo], str]:
        target = queue_by_name(mesh, queue)
        hint = await unknown_queue_hint(mesh, queue)  # before the change, which registers the queue
        if limits or none:
            await target.set_limit(*limits, lane=lane)
        elif clear:
            await target.clear_limit(lane=lane)
        return await target.info(), [] if lane is None else await target.lanes(lane=lane), hint

    info, lanes, hint = run_connected(connect, command)
    facts, text = _limit_facts(info), what_may_start(info)
    if lane is not None:
        found = next(iter(lanes), None)
        facts = {"lane": lane, "limits": [] if found is None else [asdict(each) for each in found.limits]}
        text = "the lane has no tasks" if found is None else describe_limits(found.limits)
    if json:
        print_json({"queue": queue, **facts})
    else:
        print(f"{escape(queue)}{'' if lane is None else f', lane {escape(lane)}'}: {text}")
    if hint:
        print_error(hint)


def _limit_facts(info: QueueInfo) -> dict[str, object]:
    return {
        "limits": [asdict(each) for each in info.limits],
        "limits_overridden": info.limits_overridden,
        "held_back": info.held_back,
        "held_for": info.held_for,
    }
