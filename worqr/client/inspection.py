"""Read-only views of queues and outboxes: one request to each shard, with the replies combined."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import chain, islice
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar, get_args

import msgspec

from worqr import ops
from worqr.command import Command
from worqr.errors import RefusedByServer, UsageError, did_you_mean, has_foreign_type
from worqr.history_records import MINUTE_RECORDS, TEN_MINUTE_RECORDS, History, add_points, history_points
from worqr.keys import QueueKeys, RegistryKeys
from worqr.limits import add_limits
from worqr.mesh_records import (
    LogEntry,
    MeshInfo,
    QueueInfo,
    WorkerInfo,
    apps_of,
    decode_snapshot,
    is_in_use,
    most_active,
    unhealthy_of,
    unreadable_of,
)
from worqr.ops import (
    MAX_ITEMS,
    RUNNING_AT_ONCE,
    Inspected,
    JobPage,
    JobState,
    QueuesPage,
    RunningTask,
    Step,
    StoredHistory,
    TaskSummary,
    Unstarted,
    WorkerRow,
    list_queues,
)
from worqr.records import Status, TaskInfo
from worqr.stored_values import MOST_DIGITS, as_bytes, exact, public_name, readable, whole
from worqr.validation import check_between, check_count, check_text, encode_json, from_ms, moment

if TYPE_CHECKING:
    from worqr.client.client import Client


# The running tasks of a queue, the longest-running first: pages of many workers and of all shards, merged. And the names of
# claims, which operators pass back.


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
) -> ops.Command[ops.RunningPage]:
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


# Convert replies of the server into the values that users read, with all shards of a queue combined.


T = TypeVar("T")

COUNTED_ONCE: Final = frozenset({"paused", "resumed"})
"""Totals of operations that each shard counts. For a queue of several shards they count once."""


async def queue_names(ask: Callable[[Command[QueuesPage]], Awaitable[QueuesPage]], keys: RegistryKeys) -> list[str]:
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
        suspended=sum(each.suspended for each in shards),
        running=sum(each.running for each in shards),
        failed=sum(each.failed for each in shards),
        undecodable=sum(each.undecodable for each in shards),
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
        kept=sum(each.kept for each in shards),
        kept_bytes=sum(each.kept_bytes for each in shards),
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
        "state": public_name(state.state),
        "worker": state.worker,
        "since": None if state.claim is None else from_ms(state.claim / 1000),
        "run_at": run_at,
        "progress": state.progress,
        "message": state.message,
        "failures": state.failures,
        "attempts": state.attempts,
        "error": state.error,
        "waits_for": _waits_for(state, run_at),
        "next_run": run_at if state.state in {"due", "suspended"} else None,
    }


def _waits_for(state: JobState, run_at: datetime | None) -> str:
    """Return what a job waits for; of a suspended one, until when at the latest."""
    if state.state == "suspended" and run_at is not None:
        return f"{state.waits_for} until {run_at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC".lstrip()
    return state.waits_for if state.state in {"waiting", "due", "suspended", "blocked"} else ""


def status_of(state: JobState, opened: Callable[[bytes], bytes] | None = None) -> Status:
    """Return the status of a job. `opened`: decodes its value by the codec of the mesh; None: there is no codec."""
    return Status(**_facts(state), value=shown_value(state.value, opened))


def value_bytes(value: object) -> bytes:
    """Return the value of a `Status` as it is shown to people: bytes as they are, all else as JSON."""
    return value if isinstance(value, bytes) else encode_json(value)


def shown_value(stored: bytes, opened: Callable[[bytes], bytes] | None = None) -> Any:
    """Return the value that a run shows. Bytes that should be JSON, and are not, are returned as they are."""
    kind, _, value = stored.partition(b" ")
    if kind in {b"", b"none"}:
        return None
    value = value if opened is None else opened(value)
    try:
        return msgspec.json.decode(value) if kind == b"json" else value
    except (
        msgspec.MsgspecError,
        UnicodeDecodeError,
        RecursionError,
    ):  # of another program, or of a codec that this one lacks
        return value


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
        deploy=whole(facts.get("deploy"), 0),
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


# `RunTotalsReader`: reads the totals of the runs of many queues, again and again. Queues that rest are not read again.


SETTLED_AFTER: Final = 15.0
"""Seconds after which all runs of a queue that rests have been counted. A worker sends the counts of 100 queues each second."""


@dataclass(frozen=True, slots=True)
class _Known:
    """The totals of one queue. `changed_at`: when its counters were first seen to be `counts`, by this process's clock."""

    counts: Mapping[str, int]
    changed_at: float
    read_at: float
    totals: Mapping[str, int]


class RunTotalsReader:
    """Reads the totals of runs for one caller, who calls it again and again."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._known: dict[str, _Known] = {}

    async def read(self, queues: Iterable[QueueInfo]) -> dict[str, Mapping[str, int]]:
        """Return the totals of these queues by field, without the queues that have none. All shards of a queue are one."""
        now = monotonic()
        wanted = {info.name: self._as_of(info, now) for info in queues if info.counts}
        moved = [name for name, known in wanted.items() if known.read_at < known.changed_at + SETTLED_AFTER]
        prefix = self._client.settings.prefix
        shards = await all_shards(self._client, [QueueKeys.of(prefix, name) for name in moved])
        replies = iter(await self._client.link.call_all([ops.read_runs(keys) for _, each in shards for keys in each]))
        for name, each in shards:
            totals: Counter[str] = Counter()
            for reply in islice(replies, len(each)):
                totals.update(reply)
            wanted[name] = _Known(wanted[name].counts, wanted[name].changed_at, now, totals)
        self._known = wanted
        return {name: known.totals for name, known in wanted.items() if known.totals}

    def _as_of(self, info: QueueInfo, now: float) -> _Known:
        known = self._known.get(info.name)
        if known is not None and known.counts == info.counts:
            return known
        return _Known(info.counts, now, float("-inf"), {})


# Reads the stored records of queues, and turns them into points: ``queue.history()``, and many queues in one round trip.


MAX_MINUTES: Final = 10 * TEN_MINUTE_RECORDS


async def read_history(client: Client, keys: QueueKeys, minutes: object) -> History:
    """Return the last minutes of a queue, all its shards as one."""
    span = _Span.of(check_between(minutes, "minutes", 1, MAX_MINUTES))
    shards = await client.sharding.shards(keys)
    return span.history(keys.display_name, await ask_each(client, shards, span.request))


async def read_histories(client: Client, queues: Sequence[QueueKeys], minutes: int) -> list[History | None]:
    """Return the last minutes of these queues, in their order; None for a queue that the server refuses to read."""
    span = _Span.of(minutes)
    shards = [await client.sharding.shards(keys, declare=False) for keys in queues]
    try:
        found, _ = await ask_readable(client, list(chain(*shards)), span.request)
    except RefusedByServer:
        return [None] * len(queues)
    return [
        span.history(keys.display_name, [found[shard] for shard in every]) if found.keys() >= {*every} else None
        for keys, every in zip(queues, shards, strict=True)
    ]


class _Span(msgspec.Struct, frozen=True):
    """The records of some minutes: how many there are, and the minutes between two of them."""

    step: Step
    number: int

    @classmethod
    def of(cls, minutes: int) -> _Span:
        step: Step = 1 if minutes <= MINUTE_RECORDS else 10
        return cls(step, -(-minutes // step))

    def request(self, keys: QueueKeys) -> Command[StoredHistory]:
        return ops.read_history(keys, self.step, self.number)

    def history(self, name: str, replies: Sequence[StoredHistory]) -> History:
        """Add up the shards of a queue."""
        points = [history_points(reply.records, reply.now, self.number, self.step) for reply in replies]
        return History(name, 60 * self.step, tuple(add_points(points)))


# Read the log of the mesh. `Client.note` writes its entries about actions, and scripts of the registry those about workers.


ENTRY_ID: Final = re.compile(r"[0-9]{1,19}(-[0-9]{1,19})?")


async def read_log(client: Client, limit: int, after: str) -> list[LogEntry]:
    """Return the newest entries, or those after the entry `after`, the oldest first. Raises UsageError for wrong arguments."""
    if check_count(limit, "limit") > MAX_ITEMS:
        raise UsageError(f"limit must be at most {MAX_ITEMS}, not {limit}; pass the last id as after= to read on")
    if check_text(after, "after") and not ENTRY_ID.fullmatch(after):
        raise UsageError(
            f"after= must be the id of an entry of mesh.log(), such as '1763689200000-0', not {after[:100]!r}"
        )
    return await client.ask(ops.list_events(RegistryKeys(client.settings.prefix), limit, after))


Listed = Literal["waiting", "scheduled", "suspended", "blocked", "active", "finished", "failed", "cancelled", "ended"]
"""The states whose jobs can be listed."""
NotRunning = Literal["waiting", "scheduled", "suspended", "blocked"]
LISTED_STATES: Final[tuple[str, ...]] = get_args(Listed)
MIN_POSITIONS: Final = 100
"""Positions that a request reads at least, because some positions have no job any more."""
AT_ONCE: Final = 10_000
"""Positions of several shards that one batch of requests reads at most."""
_HEX: Final = "hex "
MAX_COMPARED: Final = 1000
"""Names that are compared at most with the name of a queue without a worker. Each takes about 20 us."""


async def ask_each(client: Client, shards: Sequence[QueueKeys], make: Callable[[QueueKeys], Command[T]]) -> list[T]:
    """Send one request to each of these shards, all at once, and return the replies."""
    if len(shards) == 1:
        return [await client.ask(make(shards[0]))]
    return await client.link.call_all([make(keys) for keys in shards])


async def list_jobs(
    client: Client, shards: Sequence[QueueKeys], state: NotRunning, limit: int, after: str, *, newest: bool = False
) -> list[TaskInfo]:
    """Return up to `limit` tasks in this state, one shard after the other, after the cursor `after`. `newest`: waiting tasks from
    the end of each list. `worqr.client.inspection` has those that run.
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


def parse_cursor(after: str, state: str, shards: int) -> tuple[int, str]:
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
) -> Command[JobPage]:
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
    client: Client, shards: Sequence[QueueKeys], make: Callable[[QueueKeys], Command[T]]
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


# The whole mesh at one moment: from the leader's snapshot, or read by this process if there is none.
#
# So many programs that look at the mesh cost the server what one costs. Without a worker there is no leader, and no snapshot:
# programs that start the first worker depend on the direct way.


FRESH_FOR: Final = 6.0
"""Seconds for which a snapshot is used: the leader writes one every 3 s."""
DIRECT_EVERY: Final = 5.0
"""Seconds between two direct reads of all queues by one process."""


class MeshInfoReader:
    """Reads the mesh of one client. Any number of loops and threads may use it at once."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._began = float("-inf")
        self._direct: tuple[MeshInfo, float] | None = None

    async def read(self) -> MeshInfo:
        """Return the leader's snapshot if it is fresh, else what this process reads, or has read in the last seconds."""
        found = await self._client.ask(ops.read_snapshot(RegistryKeys(self._client.settings.prefix)))
        if found.stored is not None:
            info = decode_snapshot(found.stored, found.now_ms)
            if info is not None and info.age < FRESH_FOR:
                return replace(info, memory=found.memory)
        known = self._direct
        if known is not None and monotonic() - self._began < DIRECT_EVERY:
            info, read_at = known
            return replace(info, age=monotonic() - read_at, memory=found.memory)
        self._began = monotonic()
        info = replace(await self._read_directly(found.now_ms), memory=found.memory)
        self._direct = info, monotonic()
        return info

    async def _read_directly(self, now_ms: int) -> MeshInfo:
        keys = RegistryKeys(self._client.settings.prefix)
        names = await queue_names(self._client.ask, keys)
        infos, refused = await readable_infos(self._client, [QueueKeys.of(keys.prefix, name) for name in names])
        workers = await all_workers(self._client)
        named, left_out, others = most_active(filter(is_in_use, infos))
        return MeshInfo(
            at=from_ms(now_ms),
            source="direct",
            age=0.0,
            leader=next((worker.id for worker in workers if worker.leads), None),
            queues=named,
            queues_left_out=left_out,
            others=others,
            apps=apps_of(workers),
            unhealthy=unhealthy_of(workers),
            unreadable=unreadable_of(refused),
        )


# What the workers that look after outboxes in databases say of their tables, for people, metrics and each other.


_Number = Annotated[int, msgspec.Meta(ge=-(10**MOST_DIGITS), le=10**MOST_DIGITS)]


@dataclass(frozen=True, slots=True)
class OutboxFacts:
    """What is stored of a table. Times are in ms, by the clock of the database.

    Attributes:
        covered: since when each sweep has reached the end of the table.
        seen: the last sweep.
        rows, failed, held: how many rows there are.
        oldest: age of the oldest that waits.
        table: its name.
        gone: True if the table has another id now, because it was emptied.
    """

    covered: _Number = 0
    seen: _Number = 0
    rows: _Number = 0
    oldest: _Number = 0
    failed: _Number = 0
    held: _Number = 0
    table: str = ""
    gone: bool = False


_outbox_facts_of = msgspec.json.Decoder(OutboxFacts).decode


def read_outbox_facts(stored: str) -> OutboxFacts:
    """Return what is stored of an outbox; nothing if another program wrote it."""
    try:
        return _outbox_facts_of(stored)
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
        return OutboxFacts()


@dataclass(frozen=True, slots=True)
class OutboxInfo:
    """An outbox for people, as the worker sees it that looks after it. Times are in seconds.

    Attributes:
        id: the random id that its table has.
        table: the name of the table.
        rows: how many wait.
        oldest: the age of the oldest of them.
        failed, held: how many were given up, or are held.
        age: seconds since a worker has looked after it; 0: one does.
    """

    id: str
    table: str
    rows: int
    oldest: float
    failed: int
    held: int
    age: float


async def outboxes_of(client: Client) -> list[OutboxInfo]:
    """Return the outboxes of a mesh, by the names of their tables.

    Raises:
        RefusedByServer, Unavailable: as any request.
    """
    stored = await client.ask(ops.list_outboxes(RegistryKeys(client.settings.prefix)))
    told = [(each, facts) for each in stored if not (facts := read_outbox_facts(each.facts)).gone]
    newest: dict[str, OutboxInfo] = {}
    for each, facts in sorted(told, key=lambda pair: (-pair[0].idle_ms, pair[1].seen)):
        own = each.id.partition(":")[0]  # behind it are the queues of those who share the table
        rest = facts.oldest / 1000, facts.failed, facts.held, each.idle_ms / 1000
        newest[own] = OutboxInfo(own, facts.table, facts.rows, *rest)
    return sorted(newest.values(), key=lambda info: (info.table, info.id))
