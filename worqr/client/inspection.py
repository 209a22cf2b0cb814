"""Read-only views of queues: one request to each shard, with the replies combined. For `worqr.client.queue` and `worqr.mesh`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, Literal, TypeVar

from worqr import ops
from worqr.client.client import Client
from worqr.client.stats import merge_queue_info, queue_names, task_info_of, worker_info
from worqr.errors import RefusedByServer, UsageError, did_you_mean, has_foreign_type
from worqr.keys import QueueKeys, RegistryKeys
from worqr.mesh_records import QueueInfo, WorkerInfo
from worqr.ops import MAX_ITEMS, JobPage, Unstarted
from worqr.records import TaskInfo
from worqr.script_call import Call
from worqr.snapshots import is_in_use, unreadable_of
from worqr.stored_values import as_bytes, exact, readable

T = TypeVar("T")

Listed = Literal["waiting", "scheduled", "blocked", "active"]
"""The states whose jobs can be listed."""
NotRunning = Literal["waiting", "scheduled", "blocked"]
LISTED_STATES: Final[tuple[str, ...]] = ("waiting", "scheduled", "blocked", "active")
MIN_POSITIONS: Final = 100
"""Positions that a request reads at least, because some positions have no job any more."""
AT_ONCE: Final = 10_000
"""Positions of several shards that one batch of requests reads at most."""
_HEX: Final = "hex "
MAX_COMPARED: Final = 1000
"""Names that are compared at most with the name of a queue without a worker. Each takes about 20 us."""


async def ask_each(client: Client, shards: Sequence[QueueKeys], make: Callable[[QueueKeys], Call[T]]) -> list[T]:
    """Send one request to each of these shards, all at once, and return the replies."""
    if len(shards) == 1:
        return [await client.ask(make(shards[0]))]
    return await client.link.call_all([make(keys) for keys in shards])


async def list_jobs(
    client: Client, shards: Sequence[QueueKeys], state: NotRunning, limit: int, after: str, *, newest: bool = False
) -> list[TaskInfo]:
    """Return up to `limit` tasks in this state, one shard after the other, after the cursor `after`. `newest`: waiting tasks from
    the end of each list. `worqr.client.running` has those that run.
    """
    n, cursor = parse_cursor(after, state, len(shards))
    found: list[TaskInfo] = []
    at_once = 1  # the first shard fills most pages; many further shards may be empty, so they are read together
    while n < len(shards) and len(found) < limit:
        most = min(max(limit - len(found), MIN_POSITIONS), MAX_ITEMS)
        starts = {shards[n]: cursor}
        make = partial(_list_call, state=state, most=most, starts=starts, newest=newest)
        pages = await ask_each(client, shards[n : n + at_once], make)
        for each, page in enumerate(pages, n):
            found += [
                replace(task_info_of(summary), cursor=f"{state} {each} {_as_text(position)}")
                for position, summary in page.positions
                if summary is not None
            ]
            n, cursor = (each, page.positions[-1][0]) if page.more else (each + 1, "")
            if page.more:
                break
        at_once = max(1, AT_ONCE // most)
    return found[:limit]


def parse_cursor(after: str, state: Listed, shards: int) -> tuple[int, str]:
    """Split a cursor into the shard and the cursor in it."""
    if not after:
        return 0, ""
    known, _, rest = after.partition(" ")
    shard, _, cursor = rest.partition(" ")
    if known != state or not shard.isdecimal() or int(shard) >= shards or not cursor:
        raise UsageError(
            f"after= must be the cursor of an entry of jobs(state={state!r}) on this queue, not {repr(after)[:100]}"
        )
    return int(shard), _as_position(cursor)


def _as_text(position: str) -> str:
    """Return a position in a list as text that JSON and URLs can contain: an id in it may be no UTF-8."""
    return position if readable(position) == position else f"{_HEX}{as_bytes(position).hex()}"


def _as_position(cursor: str) -> str:
    if not cursor.startswith(_HEX):
        return cursor
    try:
        return exact(bytes.fromhex(cursor.removeprefix(_HEX)))
    except ValueError:
        return cursor


def _list_call(
    keys: QueueKeys, *, state: NotRunning, most: int, starts: Mapping[QueueKeys, str], newest: bool
) -> Call[JobPage]:
    """Return the request for one page of a shard, after its cursor in `starts`. Some positions have no such task any more."""
    unstarted: Unstarted = "due" if state == "scheduled" else state
    return ops.list_jobs(keys, unstarted, most, after=starts.get(keys, ""), from_end=newest)


async def info_at(client: Client, keys: QueueKeys) -> QueueInfo:
    """Return a snapshot of the queue, all its shards as one."""
    return merge_queue_info(keys.display_name, await ask_each(client, await client.sharding.shards(keys), ops.inspect))


async def all_workers(client: Client) -> list[WorkerInfo]:
    """Return all workers, in no particular order. The pages after the first are read together."""
    keys, found = RegistryKeys(client.settings.prefix), dict[str, WorkerInfo]()
    spans = [("", "")]
    while spans:
        pages = await client.link.call_all([ops.list_workers(keys, after, last) for after, last in spans])
        further: list[tuple[str, str]] = []
        for page, (_, last) in zip(pages, spans, strict=True):
            found.update((row.worker, worker_info(row, page.leader)) for row in page.rows)
            further += zip(page.cursors, [*page.cursors[1:], last], strict=False)
        spans = further
    return list(found.values())


async def nearest_served(client: Client, queue: str) -> str:
    """Return "did you mean ...?" with the nearest name that a worker serves; empty if none is close to `queue`."""
    served = {name for worker in await all_workers(client) if worker.state != "dead" for name in worker.queues}
    return did_you_mean(queue, sorted(served - {queue})[:MAX_COMPARED])


async def queues_of(client: Client) -> tuple[list[QueueInfo], dict[str, str]]:
    """Return the queues of the mesh that are in use, by name; and those that the server refuses to read, with its words.

    Raises: as `readable_infos`.
    """
    keys = RegistryKeys(client.settings.prefix)
    names = await queue_names(client.ask, keys)
    infos, refused = await readable_infos(client, [QueueKeys.of(keys.prefix, name) for name in names])
    return [info for info in infos if is_in_use(info)], unreadable_of(refused)


async def readable_infos(client: Client, known: Iterable[QueueKeys]) -> tuple[list[QueueInfo], dict[str, str]]:
    """Return snapshots of the queues that the registry knows as `known`, by name; all shards of one combined. Queues that the
    server refuses to read are left out; its words for each of those are the second value.

    All shards of all queues are read together, so that hundreds of queues take few round trips.

    Raises:
        RefusedByServer: The server refuses all of them, and not only because their keys have a foreign type.
    """
    queues = await all_shards(client, known)
    found, refused = await ask_readable(client, [keys for _, shards in queues for keys in shards], ops.inspect)
    merged, why = list[QueueInfo](), dict[str, str]()
    for name, shards in queues:
        if errors := [str(refused[keys]) for keys in shards if keys in refused]:
            why[name] = errors[0]
        else:
            merged.append(merge_queue_info(name, [found[keys] for keys in shards]))
    return merged, why


async def ask_readable(
    client: Client, shards: Sequence[QueueKeys], make: Callable[[QueueKeys], Call[T]]
) -> tuple[dict[QueueKeys, T], dict[QueueKeys, RefusedByServer]]:
    """Send one request to each of these shards, all at once. Return the replies, and the errors of those that the server refuses.

    If it refuses one, each half is asked on its own, until the rest has replied.

    Raises:
        RefusedByServer: The server refuses all of them, and not only because their keys have a foreign type.
    """
    try:
        return dict(zip(shards, await client.link.call_all([make(keys) for keys in shards]), strict=True)), {}
    except RefusedByServer as error:
        if len(shards) == 1 and not has_foreign_type(error):
            raise
        if len(shards) == 1:
            return {}, {shards[0]: error}
        last = error
    found, refused = dict[QueueKeys, T](), dict[QueueKeys, RefusedByServer]()
    middle = len(shards) // 2
    for half in (shards[:middle], shards[middle:]):
        try:
            replies, errors = await ask_readable(client, half, make)
        except RefusedByServer as error:
            replies, errors = {}, dict.fromkeys(half, error)
        found |= replies
        refused |= errors
    if not found and not all(map(has_foreign_type, refused.values())):
        raise last
    return found, refused


async def all_shards(client: Client, known: Iterable[QueueKeys]) -> list[tuple[str, list[QueueKeys]]]:
    """Return the names of these queues, in order, with all shards of each."""
    found: dict[str, set[QueueKeys]] = {}
    for keys in known:
        every = await client.sharding.shards(replace(keys, tag=""), declare=False)
        found.setdefault(keys.display_name, set(every)).add(keys)
    return [(name, sorted(shards, key=lambda keys: keys.name)) for name, shards in sorted(found.items())]
