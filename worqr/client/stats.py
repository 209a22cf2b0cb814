"""Convert replies of the server into the values that users read, with all shards of a queue combined."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Final, Literal, TypeVar

from worqr.job_states import DISPLAY_NAMES
from worqr.keys import QueueKeys, RegistryKeys
from worqr.limits import add_limits
from worqr.mesh_records import QueueInfo, WorkerInfo
from worqr.ops import Inspected, JobState, QueuesPage, TaskSummary, WorkerRow, list_queues
from worqr.records import Status, TaskInfo
from worqr.script_call import Call
from worqr.stored_values import readable, whole
from worqr.validation import from_ms, moment

T = TypeVar("T")

COUNTED_ONCE: Final = frozenset({"paused", "resumed"})
"""Totals of operations that each shard counts. For a queue of several shards they count once."""


async def queue_names(ask: Callable[[Call[QueuesPage]], Awaitable[QueuesPage]], keys: RegistryKeys) -> list[str]:
    """Return the names of all queues that are served, hold something, or were used lately.

    A page begins with the most recently noted names. A name that is noted again between two pages is missing in the later page.
    So the function reads the list again from the top, down to the names that were noted meanwhile.
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


def merge_queue_info(name: str, shards: Sequence[Inspected], estimates: Sequence[float | None] = ()) -> QueueInfo:
    """Return the sum of the shards. It is paused if a shard is, and a worker that serves several shards counts once.

    Args:
        name: the queue's name.
        shards: what the server returned of each shard.
        estimates: the ages of the oldest tasks, for shards with a plain task at the front.
    """
    counts: Counter[str] = Counter()
    for each in shards:
        counts.update(each.counts)
    if len(shards) > 1:
        for kind in COUNTED_ONCE & counts.keys():
            counts[kind] = max(each.counts.get(kind, 0) for each in shards)
    oldest = max((each.oldest_ms for each in shards if each.oldest_ms is not None), default=None)
    estimated = max((age for age in estimates if age is not None), default=None)
    age_estimated = estimated is not None and (oldest is None or estimated > oldest / 1000)
    return QueueInfo(
        name=readable(name),
        waiting=sum(each.waiting for each in shards),
        scheduled=sum(each.due for each in shards),
        blocked=sum(each.blocked for each in shards),
        running=sum(each.running for each in shards),
        failed=sum(each.failed for each in shards),
        broken=sum(each.broken for each in shards),
        paused=next((each.paused for each in shards if each.paused is not None), None),
        oldest_job=None if oldest is None else oldest / 1000,
        workers=len({worker for each in shards for worker in each.workers}),
        counts=dict(counts),
        age=estimated if age_estimated else None if oldest is None else oldest / 1000,
        age_estimated=age_estimated,
        limits=add_limits(each.limits for each in shards),
        limits_overridden=any(each.overridden for each in shards),
        held_back=_held_back(shards),
        held_for=min((each.opens_in_ms / 1000 for each in shards if each.opens_in_ms is not None), default=None),
        lanes=sum(each.lanes for each in shards),
        held_lanes=sum(each.held_lanes for each in shards),
        batches=sum(each.batches for each in shards),
        relay_pending=any(each.needs_relay for each in shards),
        open_batches=sum(each.open_batches for each in shards),
        due_soon=sum(each.due_soon for each in shards),
    )


def _held_back(shards: Sequence[Inspected]) -> Literal["", "paused", "concurrency", "rate", "lanes"]:
    """Return why no task may start: a shard is paused, or all of them are at a limit."""
    if any(each.paused is not None for each in shards):
        return "paused"
    if any(each.room != 0 for each in shards):
        return ""
    if any(each.only_held for each in shards):
        return "lanes"
    return "concurrency" if any(each.opens_in_ms is None for each in shards) else "rate"


def _facts(state: JobState) -> dict[str, Any]:
    """Return the fields of a `Status`."""
    run_at = moment(state.run_at_ms)
    return {
        "state": DISPLAY_NAMES.get(state.state, state.state),
        "worker": state.worker,
        "since": None if state.claim is None else from_ms(state.claim / 1000),
        "run_at": run_at,
        "progress": state.progress,
        "message": state.message,
        "failures": state.failures,
        "attempts": state.attempts,
        "error": state.error,
        "waits_for": state.waits_for if state.state in {"waiting", "due", "blocked"} else "",
        "next_run": run_at if state.state == "due" else None,
    }


def status_of(state: JobState) -> Status:
    """Return the status of a job."""
    return Status(**_facts(state))


def task_info_of(summary: TaskSummary) -> TaskInfo:
    """Return one task of a list."""
    found = TaskInfo(**_facts(summary.state), id=summary.id, task=summary.task, size=summary.size)
    return replace(found, place=summary.place, lane=summary.lane) if summary.place is not None else found


def interleave(lists: Sequence[list[T]], limit: int) -> list[T]:
    """Return up to `limit` items, one of each list in turn, because their order across shards is not known."""
    if len(lists) == 1:
        return lists[0]
    rounds = range(max(map(len, lists)))
    return [items[n] for n in rounds for items in lists if n < len(items)][:limit]


def worker_info(row: WorkerRow, leader: str) -> WorkerInfo:
    """Return a worker. `leader`: the worker id of the leader."""
    facts, ttl_ms = row.facts, row.ttl_ms
    request, requested_at = _request(facts.get("request", ""))
    keepalive_ms = whole(facts.get("keepalive_ms"), 0)
    age = 0.0 if ttl_ms == -1 else max(0, keepalive_ms - ttl_ms) / 1000 if ttl_ms >= 0 else float("inf")
    return WorkerInfo(
        id=readable(row.worker),
        host=facts.get("host", ""),
        pid=whole(facts.get("pid"), 0),
        app=facts.get("app", ""),
        version=facts.get("version", ""),
        queues=frozenset([readable(QueueKeys.of("", queue).display_name) for queue in row.queues]),
        running=whole(facts.get("running"), 0),
        room=whole(facts.get("room"), 0),
        beat_age=age,
        state=_state(row),
        leads=row.worker == leader,
        started=moment(whole(facts.get("started"))),
        full_since=moment(whole(facts.get("full_since"))),
        lag=None if (lag_ms := whole(facts.get("lag_ms"))) is None else lag_ms / 1000,
        python=facts.get("python", ""),
        threads=whole(facts.get("threads")),
        processes=whole(facts.get("processes")),
        request=request,
        requested_at=requested_at,
        answer=facts.get("answer", "").partition(" ")[2],
    )


def _request(stored: str) -> tuple[str, datetime | None]:
    """Return what an operator asked of a worker, and when. The first word is its id: the time in ms, or later."""
    number, _, wanted = stored.partition(" ")
    requested_at = whole(number)
    if requested_at is None:
        return "", None
    mode, _, concurrency = wanted.partition(" ")
    parts = ["" if mode == "-" else mode, "" if concurrency == "-" else f"concurrency {concurrency}"]
    return ", ".join(filter(None, parts)), from_ms(requested_at)


def _state(row: WorkerRow) -> Literal["ready", "quiet", "leaving", "missing", "dead"]:
    if row.dead:
        return "dead"
    if row.ttl_ms == -2:
        return "missing"
    states: dict[str, Literal["leaving", "quiet"]] = {"1": "leaving", "2": "quiet"}
    return states.get(row.facts.get("leaving", ""), "ready")
