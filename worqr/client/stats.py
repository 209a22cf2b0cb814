"""The server's data in the form for people: all shards of a queue combined into one queue, and workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Final, TypeVar

from worqr.job_states import SHOWN
from worqr.keys import QueueKeys, RegistryKeys
from worqr.ops import ActiveClaim, Inspected, JobState, QueuesPage, TaskSummary, list_queues
from worqr.records import QueueInfo, Status, TaskInfo, WorkerInfo
from worqr.script_call import Call
from worqr.validation import from_ms

T = TypeVar("T")

DONE_TO_ALL: Final = frozenset({"paused", "resumed"})
"""Totals of operations on all shards at once, which count once."""


async def queue_names(ask: Callable[[Call[QueuesPage]], Awaitable[QueuesPage]], keys: RegistryKeys) -> list[str]:
    """Return the names of all queues that are served, hold something, or were used lately.

    A page begins with the most recently noted names. A name that is noted again between two pages is missing in the later one. So
    the list is read again from the top, down to the names that were noted meanwhile.
    """
    found: dict[str, None] = {}
    since = 0.0
    while True:
        page = await ask(list_queues(keys))
        found.update(dict.fromkeys(page.names))
        began, pages = page.now_ms, 1
        while page.next is not None and min(page.names.values()) >= since:
            page = await ask(list_queues(keys, page.next))
            found.update(dict.fromkeys(page.names))
            pages += 1
        if pages == 1:
            return list(found)
        since = float(began)


def merge_queue_info(name: str, seen: Sequence[Inspected]) -> QueueInfo:
    """The sum. Paused if a shard is; as old as the oldest of its jobs in front; a worker counts once."""
    counts: Counter[str] = Counter()
    for each in seen:
        counts.update(each.counts)
    if len(seen) > 1:
        for kind in DONE_TO_ALL & counts.keys():
            counts[kind] = max(each.counts.get(kind, 0) for each in seen)
    oldest = max((each.oldest_ms for each in seen if each.oldest_ms is not None), default=None)
    return QueueInfo(
        name=name,
        waiting=sum(each.waiting for each in seen),
        scheduled=sum(each.due for each in seen),
        blocked=sum(each.blocked for each in seen),
        running=sum(each.running for each in seen),
        failed=sum(each.failed for each in seen),
        broken=sum(each.broken for each in seen),
        paused=next((each.paused for each in seen if each.paused is not None), None),
        oldest_job=None if oldest is None else oldest / 1000,
        workers=len({worker for each in seen for worker in each.workers}),
        counts=dict(counts),
    )


def _facts(seen: JobState) -> dict[str, Any]:
    """The fields of a `Status`."""
    run_at = None if seen.run_at_ms is None else from_ms(seen.run_at_ms)
    return {
        "state": SHOWN.get(seen.state, seen.state),
        "worker": seen.worker,
        "since": None if seen.claim is None else from_ms(seen.claim / 1000),
        "run_at": run_at,
        "progress": seen.progress,
        "message": seen.message,
        "failures": seen.failures,
        "attempts": seen.attempts,
        "error": seen.error,
        "next_run": run_at if seen.state == "due" else None,
    }


def status_of(seen: JobState) -> Status:
    """The state of a job."""
    return Status(**_facts(seen))


def task_info_of(seen: TaskSummary) -> TaskInfo:
    """One task of a list."""
    return TaskInfo(**_facts(seen.state), id=seen.id, task=seen.task)


def merge_running(held: Sequence[Sequence[ActiveClaim]], limit: int) -> list[TaskInfo]:
    """Up to `limit` running tasks; of several shards the longest-running first."""
    claims = held[0] if len(held) == 1 else sorted(chain(*held), key=lambda each: each.claim)
    return [
        replace(task_info_of(each.summary), worker=each.worker, since=from_ms(each.claim / 1000))
        for each in claims[:limit]
    ]


def interleave(lists: Sequence[list[T]], limit: int) -> list[T]:
    """Up to `limit` items, one of each list in turn; their order across lists is not known."""
    if len(lists) == 1:
        return lists[0]
    rounds = range(max(map(len, lists)))
    return [items[n] for n in rounds for items in lists if n < len(items)][:limit]


def worker_info(worker: str, ttl_ms: int, facts: Mapping[str, str], queues: Sequence[str]) -> WorkerInfo:
    """A registered worker. `ttl_ms`: until its key expires; -1: never, -2: there is none."""
    keepalive_ms = int(facts.get("keepalive_ms", "0"))
    age = 0.0 if ttl_ms == -1 else max(0, keepalive_ms - ttl_ms) / 1000 if ttl_ms >= 0 else float("inf")
    return WorkerInfo(
        id=worker,
        host=facts.get("host", ""),
        pid=int(facts.get("pid", "0")),
        app=facts.get("app", ""),
        version=facts.get("version", ""),
        queues=frozenset([QueueKeys.of("", queue).display_name for queue in queues]),
        running=int(facts.get("running", "0")),
        room=int(facts.get("room", "0")),
        beat_age=age,
    )
