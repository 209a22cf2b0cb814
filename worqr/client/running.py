"""The running tasks of a queue, the longest-running first: pages of many workers and of all shards, merged. And the names of
claims, which operators pass back.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Final

from worqr import ops
from worqr.client.client import Client
from worqr.client.inspection import ask_each, parse_cursor
from worqr.client.stats import task_info_of
from worqr.errors import UsageError
from worqr.keys import QueueKeys
from worqr.ops import RUNNING_AT_ONCE, RunningTask
from worqr.records import TaskInfo
from worqr.validation import from_ms

_CLAIM: Final = re.compile(r"(\d{1,16})(?:~([0-9A-Za-z]+))?", re.ASCII)

Place = tuple[int, int]
"""A claim and the place of its shard among the shards: the order in which tasks of all shards are listed."""
START: Final[Place] = (0, -1)


async def longest_running(
    client: Client, shards: Sequence[QueueKeys], limit: int, after: Place = START, worker: str = ""
) -> list[tuple[Place, TaskInfo]]:
    """Return up to `limit` running tasks, the longest-running first, after a place in this order; of one worker, or of all."""
    found: list[tuple[Place, TaskInfo]] = []
    while True:
        most = min(limit - len(found), RUNNING_AT_ONCE)
        page = await _page(client, shards, most, after, worker)
        found += page
        if len(page) < most or len(found) == limit:
            return found
        after = page[-1][0]


async def list_active(client: Client, shards: Sequence[QueueKeys], limit: int, cursor: str) -> list[TaskInfo]:
    """Return a page of the running tasks, the longest-running first, after a cursor; each with its cursor."""
    shard, claim = parse_cursor(cursor, "active", len(shards))
    if claim and not claim.isdecimal():
        raise UsageError(f"after= must be the cursor of an entry of jobs(state='active'), not {cursor!r}")
    after = (int(claim), shard) if claim else START
    found = await longest_running(client, shards, limit, after)
    return [replace(info, cursor=f"active {n} {claim}") for (claim, n), info in found]


async def _page(
    client: Client, shards: Sequence[QueueKeys], limit: int, after: Place, only: str
) -> list[tuple[Place, TaskInfo]]:
    claim, last = after
    after_claim = {keys: claim if n <= last else claim - 1 for n, keys in enumerate(shards)}
    first = await ask_each(client, shards, lambda keys: _ask(keys, limit, after_claim[keys], only=only))
    found: list[tuple[Place, TaskInfo]] = []
    for n, keys in enumerate(shards):
        page = first[n]
        tasks = page.tasks
        while page.more:
            before = tasks[-1].claim if len(tasks) == limit else 0
            page = await client.ask(_ask(keys, limit, after_claim[keys], page.worker, before, only))
            tasks = sorted([*tasks, *page.tasks], key=_claim_of)[:limit]
        found += [((each.claim, n), running_task(keys, each)) for each in tasks]
    return sorted(found, key=lambda each: each[0])[:limit]


def _ask(
    keys: QueueKeys, limit: int, after_claim: int, worker: str = "", before_claim: int = 0, only: str = ""
) -> ops.Call[ops.RunningPage]:
    return ops.list_running(
        keys, limit, after_worker=worker, after_claim=max(0, after_claim), before_claim=before_claim, only=only
    )


def _claim_of(task: RunningTask) -> int:
    return task.claim


def running_task(keys: QueueKeys, seen: RunningTask) -> TaskInfo:
    """Return a running task in the form for people."""
    return replace(
        task_info_of(seen.summary),
        worker=seen.worker,
        since=from_ms(seen.claim / 1000),
        claim=claim_name(keys, seen.claim),
        cancelling=seen.cancelling,
        deadline=deadline_of(seen.claim, seen.summary.timeout_ms),
    )


def deadline_of(claim: int, timeout_ms: int | None) -> datetime | None:
    """Return when a run takes too long that has `timeout_ms`."""
    return from_ms(claim / 1000 + timeout_ms) if timeout_ms else None


def claim_name(keys: QueueKeys, claim: int) -> str:
    """Return the name of a claim, which is unique in its queue: shards count their claims apart."""
    return f"{claim}~{keys.tag}" if keys.tag else str(claim)


def claim_of(keys: QueueKeys, name: str) -> tuple[QueueKeys, int]:
    """Return the shard and the number of the claim of this name.

    Raises:
        UsageError: It is not the name of a claim.
    """
    match = _CLAIM.fullmatch(name) if isinstance(name, str) else None  # pyright: ignore[reportUnnecessaryIsInstance]
    if match is None:
        raise UsageError(f"a claim is the `claim` of a task in queue.running(), not {repr(name)[:100]}")
    return replace(keys, tag=match[2] or ""), int(match[1])
