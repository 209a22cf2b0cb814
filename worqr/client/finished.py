"""Kept jobs and tags: pages of them, and what is done to all jobs of a tag. For `worqr.client.queue` and `worqr.client.fleet`."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Final, NoReturn

from worqr import ops
from worqr.client.inspection import claim_name, parse_cursor, status_of
from worqr.client.notifications import cancel_and_wait
from worqr.errors import UsageError
from worqr.keys import QueueKeys
from worqr.ops import AnyState, CancelReply, EndState, FoundJob, FoundPage
from worqr.records import CancelCount, Forgotten, TaskInfo
from worqr.stored_values import public_name
from worqr.validation import end_moment

if TYPE_CHECKING:
    from worqr.client.client import Client

END_STATES: Final[dict[str, EndState]] = {
    "finished": "finished",
    "failed": "failed",
    "cancelled": "cancelled",
    "ended": "ended",
}
"""The states whose jobs are kept jobs."""
_WIRE: Final[dict[str, AnyState]] = {
    "": "",
    "waiting": "waiting",
    "scheduled": "due",
    "suspended": "suspended",
    "blocked": "blocked",
    "active": "active",
    **END_STATES,
}
ANY: Final = "any"
"""Stands for all states in cursors."""
UNREACHED: Final = (
    "logs of workers, traces and metrics systems",
    "append-only files, snapshots, replicas and backups of the server, until they are rewritten",
    "rows of outboxes that were not sent yet, and other tables of your databases",
    "`queue.recent()`: ids and errors of the last runs, for a day",
    "schedules with the tag in their call, which fire again, and their last outcomes: delete the schedules",
    "results in queues that had no worker and no other job for an hour, until they expire; `queue.forget_tagged` reaches them",
    "jobs, results and dead letters of a tag with which nothing was dispatched for 30 days, or for the `days` of `keep` if that "
    "is more: drop dead letters earlier",
    "plain tasks, and jobs that were dispatched without the tag",
)
"""Where data of a tag may still be after ``forget_tagged``."""


def no_tag(tag: str, queue: str) -> NoReturn:
    """Raise UsageError for a tag with too many jobs."""
    raise UsageError(
        f"tag {tag!r} has more than 100,000 jobs in queue {queue!r}, which is too many to act on: list those that have ended by "
        f"jobs(tag={tag!r}, state='ended'), and choose tags that fewer jobs share"
    )


async def list_found(
    client: Client, shards: Sequence[QueueKeys], state: str, limit: int, after: str, *, tag: str, since_ms: int | None
) -> list[TaskInfo]:
    """Return up to `limit` jobs that have ended in this state, or that have this tag, one shard after the other."""
    n, cursor = parse_cursor(after, state or ANY, len(shards))
    found: list[TaskInfo] = []
    while n < len(shards) and len(found) < limit:
        page = await _page(client, shards[n], state, min(limit - len(found), ops.MAX_ITEMS), cursor, tag, since_ms)
        found += [replace(_info(shards[n], each), cursor=f"{state or ANY} {n} {each.cursor}") for each in page.jobs]
        n, cursor = (n, page.after) if page.more else (n + 1, "")
    return found


async def _page(
    client: Client, keys: QueueKeys, state: str, limit: int, after: str, tag: str, since_ms: int | None
) -> FoundPage:
    """Return one page. The jobs of a tag that is too large are found among those that have ended."""
    in_order = " " in after  # a cursor of list_kept
    if tag and not in_order:
        page = await client.ask(ops.list_tagged(keys, tag, _WIRE[state], limit, after=after, since_ms=since_ms))
        if not page.too_large:
            return page
    if state not in END_STATES:
        no_tag(tag, keys.display_name)
    ended = END_STATES[state]
    return await client.ask(
        ops.list_kept(keys, ended, limit, after=after if in_order else "", since_ms=since_ms, tag=tag)
    )


def _info(keys: QueueKeys, found: FoundJob) -> TaskInfo:
    """Return one job of a list. `state.claim` is that of its last run, also when it has ended."""
    status, began, ended = status_of(found.state), found.state.claim, found.ended_ms
    facts = {each.name: getattr(status, each.name) for each in fields(status)}
    return TaskInfo(
        **facts,
        id=found.id,
        task=found.task,
        size=found.size,
        lane=found.lane,
        tags=found.tags,
        ended=end_moment(ended, began),
        seconds=None if ended is None or began is None else max(0.0, (ended - began / 1000) / 1000),
        kept=claim_name(keys, found.number) if found.kept else None,
    )


async def count_by_state(client: Client, shards: Sequence[QueueKeys], tag: str) -> dict[str, int]:
    """Return how many jobs of a tag are in each state."""
    found: Counter[str] = Counter()
    for keys in shards:
        after, more = "", True
        while more:
            page = await client.ask(ops.list_tagged(keys, tag, after=after))
            if page.too_large:
                no_tag(tag, keys.display_name)
            found.update(public_name(each.state.state) for each in page.jobs)
            after, more = page.after, page.more
    return dict(found)


async def cancel_jobs_of(
    client: Client, shards: Sequence[QueueKeys], tag: str, reason: str, wait: float
) -> CancelCount:
    """Cancel all jobs of a tag."""

    async def step(keys: QueueKeys, last: CancelReply | None) -> CancelReply:
        reply = await client.ask(ops.cancel_tagged(keys, tag, last.after if last else "-", reason=reason))
        return no_tag(tag, keys.display_name) if reply is None else reply

    return await cancel_and_wait(client.link, shards, step, wait)


async def forget_jobs_of(client: Client, shards: Sequence[QueueKeys], tag: str, reason: str) -> Forgotten:
    """Delete what is stored of the jobs of a tag."""
    total: list[int] = [0, 0, 0, 0, 0]
    for keys in shards:
        last, more = "0", True
        while more:
            reply = await client.ask(ops.forget_tagged(keys, tag, last, reason=reason))
            if reply is None:
                no_tag(tag, keys.display_name)
            found = reply.waiting, reply.running, reply.kept, reply.results, reply.dead_letters
            total, last, more = [one + other for one, other in zip(total, found, strict=True)], reply.last, reply.more
    return _forgotten(total)


def _forgotten(counts: Sequence[int]) -> Forgotten:
    waiting, running, kept, results, dead_letters = counts
    return Forgotten(waiting, running, kept, results, dead_letters, UNREACHED)


def forgotten_in_all(found: Sequence[Forgotten]) -> Forgotten:
    """Return the sum over several queues."""
    names = ("waiting", "running", "kept", "results", "dead_letters")
    sums = [sum(getattr(each, name) for each in found) for name in names]
    return _forgotten(sums)


async def retry_jobs_of(client: Client, shards: Sequence[QueueKeys], tag: str) -> int:
    """Put the failed jobs of a tag back; return how many there were."""
    retried = 0
    for keys in shards:
        after, more = "", True
        while more:
            page = await client.ask(ops.list_tagged(keys, tag, "failed", after=after))
            if page.too_large:
                no_tag(tag, keys.display_name)
            after, more = page.after, page.more
            if claims := [each.dead_letter for each in page.jobs if each.dead_letter is not None]:
                retried += await client.ask(ops.retry_aside(keys, "failed", claims))
    return retried


async def dispatch_again(client: Client, keys: QueueKeys, number: int) -> ops.RunAgain:
    """Dispatch a kept job once more. Raises UsageError if it is gone, or has no payload."""
    again = await client.ask(ops.run_again(keys, number, secrets.token_hex(11)))
    if again.word == "cut":
        raise UsageError("the payload of this job was too large to be kept: dispatch it again with its arguments")
    if again.word != "ok":
        raise UsageError(f"queue {keys.display_name!r} keeps no such job any more")
    return again
