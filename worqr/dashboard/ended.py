"""The jobs of a queue that have ended: dead letters that a viewer chooses, counts by type of error, and kept results."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, cast

from worqr import ops
from worqr.client.batch import failed_members
from worqr.dashboard.access import Refused
from worqr.dashboard.reads import gathered, unless_refused
from worqr.dashboard.request import Visit
from worqr.errors import NoResult, UsageError
from worqr.inside import client_of
from worqr.keys import QueueKeys
from worqr.ops import MAX_ITEMS
from worqr.records import Failed, TaskInfo

if TYPE_CHECKING:
    from worqr.client.dead_letters import DeadLetters
    from worqr.client.queue import Queue
    from worqr.dashboard.state import MeshState


# Counts the records of dead-letter queues by the type of their error: some thousands in one look, and the rest in the next
# ones.
#
# Nothing is counted in the background. An open page looks once a second, and a reload looks, too. All viewers share one count.


AT_ONCE: Final = 4
"""Requests of one look, for 1,000 records each. The server takes about 1.4 ms for one."""
COUNT_LASTS: Final = 30.0
"""Seconds after which records are counted anew."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the next records of a shard are."""

    queue: str
    keys: QueueKeys
    rank: int


@dataclass(frozen=True, slots=True)
class ErrorCounts:
    """How many records of which type of error were counted so far, by queue. `left` is empty when all were."""

    counts: Mapping[str, Mapping[str, int]]
    left: Sequence[_Place]
    began: float

    @property
    def read(self) -> int:
        """The number of records that were counted."""
        return sum(sum(each.values()) for each in self.counts.values())

    def of_queue(self, queue: str) -> dict[str, int]:
        """Return the counts of one queue, the most frequent type first."""
        return dict(sorted(self.counts.get(queue, {}).items(), key=lambda each: (-each[1], each[0])))

    def text(self, total: int) -> str:
        """Return how many of the records were counted."""
        return f"{self.read:,} of {max(total, self.read):,}"


async def read_counts(visit: Visit, queues: Sequence[str], which: Literal["failed", "undecodable"]) -> ErrorCounts:
    """Count some more records of these queues. Return what is known so far."""

    async def read(before: ErrorCounts | None) -> ErrorCounts:
        now = time.monotonic()
        if before is None or (not before.left and now - before.began > COUNT_LASTS):
            before = ErrorCounts({}, await _first_places(visit, queues), now)
        return await _counted_on(visit, before, which) if before.left else before

    return await visit.looks.get(("errors", which, tuple(sorted(queues))), read)


async def _first_places(visit: Visit, queues: Sequence[str]) -> list[_Place]:
    sharding, prefix = client_of(visit.mesh).sharding, visit.mesh.prefix
    shards = {name: await sharding.shards(QueueKeys.of(prefix, name), declare=False) for name in queues}
    return [_Place(name, keys, 0) for name, found in shards.items() for keys in found]


async def _counted_on(visit: Visit, before: ErrorCounts, which: Literal["failed", "undecodable"]) -> ErrorCounts:
    """Send the next requests, in one batch."""
    first = before.left[:AT_ONCE]
    steps = -(-AT_ONCE // len(first))
    pages = [(place, place.rank + step * MAX_ITEMS) for step in range(steps) for place in first][:AT_ONCE]
    link = client_of(visit.mesh).link
    replies = await link.call_all([ops.count_errors(place.keys, which, rank) for place, rank in pages])
    counts = {name: Counter(each) for name, each in before.counts.items()}
    ends, done = {place: place.rank for place in first}, set[_Place]()
    for (place, rank), (more, numbers) in zip(pages, replies, strict=True):
        counts.setdefault(place.queue, Counter()).update(numbers)
        ends[place] = max(ends[place], rank + MAX_ITEMS)
        if not more:
            done.add(place)
    left = [_Place(place.queue, place.keys, end) for place, end in ends.items() if place not in done]
    return ErrorCounts(counts, [*left, *before.left[AT_ONCE:]], before.began)


RECORDS: Final = 25
"""Records of a page."""
MS: Final = timedelta(milliseconds=1)
LATEST: Final = datetime.max.replace(tzinfo=UTC) - MS
Which = Literal["failed", "undecodable"]


@dataclass(frozen=True, slots=True)
class Chosen:
    """The records that a viewer chooses. Empty or None: any."""

    which: Which
    error: str = ""
    before: datetime | None = None
    since: datetime | None = None

    @classmethod
    def of(cls, visit: Visit, which: str) -> Chosen:
        """Return what a query or a form chooses. Raise Refused if a time is not valid."""
        error = visit.text("error").strip()
        list_: Which = "failed" if which == "failed" else "undecodable"
        return cls(list_, error, time_of(visit, "before"), time_of(visit, "since"))

    def aside(self, queue: Queue) -> DeadLetters:
        """Return the list in which the records are."""
        return queue.failed if self.which == "failed" else queue.undecodable

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of the calls of `DeadLetters`."""
        return {"error": self.error or None, "before": self.before, "since": self.since}

    @property
    def fields(self) -> dict[str, str]:
        """The fields of a form or of a link that choose the same records."""
        times = {"before": self.before, "since": self.since}
        texts = {name: when.astimezone(UTC).isoformat() for name, when in times.items() if when is not None}
        return ({"error": self.error} if self.error else {}) | texts

    @property
    def inputs(self) -> dict[str, str]:
        """The times as inputs of a page take them: in UTC, to the second."""
        times = {"since": self.since, "before": self.before}
        return {
            name: "" if when is None else f"{when.astimezone(UTC):%Y-%m-%d %H:%M:%S}" for name, when in times.items()
        }


def time_of(visit: Visit, name: str) -> datetime | None:
    """Return a time in ISO 8601; in UTC, unless it names another offset."""
    text = visit.text(name).strip()
    if not text:
        return None
    try:
        when = datetime.fromisoformat(text)
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        raise Refused(400, f"{name!r} must be a time in ISO 8601, such as 2026-01-31T12:00:00+00:00.") from None


async def read_records(visit: Visit, queue: Queue, tab: str, size: int = RECORDS) -> dict[str, Any]:
    """Return one page of records, as its template needs it. Of each payload, only the beginning is read."""
    chosen, older, job = Chosen.of(visit, tab), time_of(visit, "older"), visit.text("job").strip()
    batch = {"queue": visit.text("home"), "id": visit.text("batch")} if visit.text("batch") else None
    calls: list[Callable[[], Awaitable[Any]]] = [partial(_one_page, visit, queue, chosen, older, job, size)]
    if visit.text("count") == "errors":
        calls.append(partial(read_counts, visit, [queue.name], chosen.which))
    records, *counted = await gathered(calls)
    return {
        "records": records[:size],
        "more": len(records) > size and not job,
        "chosen": chosen,
        "older": older,
        "job": job,
        "batch": batch,
        "errors": counted[0].of_queue(queue.name) if counted else None,
        "counted": counted[0] if counted else None,
    }


async def _one_page(
    visit: Visit, queue: Queue, chosen: Chosen, older: datetime | None, job: str, size: int
) -> Sequence[Failed]:
    past = visit.text("past")
    end = older + MS if past and older is not None and older < LATEST else older
    before = min((when for when in (chosen.before, end) if when is not None), default=None)
    if job:
        records = (await queue.read(job)).dead_letters
        return [each for each in records if _matches(each, chosen, before)][:size]
    options, aside = replace(chosen, before=before).options, chosen.aside(queue)

    async def read(limit: int) -> Sequence[Failed]:
        if visit.text("batch"):
            return await _of_batch(visit, aside, limit, options)
        return await aside.list(limit, payload=False, **options)

    return await _behind(read, older, past, size + 1) if older is not None and past else await read(size + 1)


async def _behind(
    read: Callable[[int], Awaitable[Sequence[Failed]]], older: datetime, past: str, number: int
) -> Sequence[Failed]:
    """Return the records behind the one with the id `past`, which failed at `older`; all of that time if it is gone.

    Many may have failed in the same millisecond. So what is read grows until the place is found.
    """
    limit = number
    while True:
        found = await read(limit)
        start = next((n for n, each in enumerate(found, 1) if (each.at, each.id) == (older, past)), 0)
        passed = start or (found and found[-1].at < older)
        if len(found) < limit or (passed and len(found) - start >= number):
            return found[start : start + number]
        limit *= 2


async def _of_batch(visit: Visit, aside: DeadLetters, limit: int, options: dict[str, Any]) -> Sequence[Failed]:
    """Return the records that belong to the batch that the address names. Raises Refused if it is unknown."""
    home, batch = visit.queue(visit.text("home")).name, visit.text("batch")
    try:
        return await failed_members(client_of(visit.mesh), home, batch, aside, limit, **options)
    except NoResult:
        raise Refused(
            404, "There is no such batch: it never existed, or its record was deleted after its end."
        ) from None


def _matches(record: Failed, chosen: Chosen, before: datetime | None) -> bool:
    kind, error = record.error.type, chosen.error
    return (
        (record.reason == "undecodable") == (chosen.which == "undecodable")
        and (not error or kind == error or kind.rpartition(".")[2] == error)
        and (before is None or record.at < before)
        and (chosen.since is None or record.at >= chosen.since)
    )


# Jobs with a kept outcome, or with a tag. What is done to them is in `worqr.dashboard.forms`.


OUTCOMES: Final = ("ended", "finished", "failed", "cancelled", "any")
"""What the list shows; ``any``: jobs with a tag in any state."""
MOST_QUEUES: Final = 50
"""Queues that are searched for a tag, the most active first."""
OF_ONE_QUEUE: Final = 10
"""Jobs of one queue that the search shows."""

Outcome = Literal["ended", "finished", "failed", "cancelled"]


async def jobs_of(visit: Visit, queue: Queue, limit: int) -> list[TaskInfo]:
    """Return up to `limit` jobs that the address asks for: an outcome, a tag, and the cursor of the page before."""
    outcome, tag = visit.choice("outcome", OUTCOMES), visit.text("tag").strip()
    if outcome == "any" and not tag:
        outcome = "ended"
    state = None if outcome == "any" else cast("Outcome", outcome)
    try:
        return await queue.jobs(state=state, tag=tag, limit=limit, after=visit.text("after"))
    except UsageError as error:
        raise Refused(400, str(error)) from None


async def tagged(visit: Visit, state: MeshState, tag: str) -> list[tuple[str, TaskInfo]]:
    """Return some jobs with a tag of each of the queues, in any state."""
    names = [info.name for info in state.queues][:MOST_QUEUES]

    async def read(name: str) -> list[TaskInfo]:
        try:
            found, _ = await unless_refused(
                partial(visit.queue(name).jobs, tag=tag, limit=OF_ONE_QUEUE), list[TaskInfo]()
            )
        except UsageError:  # no tag, or too many jobs have it
            return []
        return found

    if not names or len(tag.encode()) > 100:
        return []
    lists = await gathered([partial(read, name) for name in names])
    return [(name, task) for name, found in zip(names, lists, strict=False) for task in found]


async def result_of(visit: Visit, queue: Queue, id: str) -> bytes | None:
    """Return the stored result of a job that has finished, for viewers who may read payloads; None if there is none."""
    if "payloads" not in visit.viewer.may:
        return None
    client = client_of(visit.mesh)
    keys = await client.sharding.shard_of_id(queue._keys, id)  # pyright: ignore[reportPrivateUsage]
    reply = await client.ask(ops.read_result(keys, id, 0))
    kind, value = reply.values[:2] if reply.status == "finished" else (b"none", b"")
    if kind == b"none" or value is None:
        return None
    values = client.values
    return value if values is None else values.readable(value)
