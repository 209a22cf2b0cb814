"""`Batch`: a handle of jobs that are counted together, with one follow-up at the end.

A batch has a home queue, which keeps its record, and a part in each queue of its jobs. Before a job is added, its part is opened
at the home; after that, dispatches go to the queue of the job only. `worqr/lua/batches.lua` has the protocol.
Not here: how queues tell each other (`outbox_relay`).
"""

# Call hides its private fields from users, not from the sender.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import math
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict, TypeVar, cast

import msgspec

from worqr import ops
from worqr.batches import KEEP, OPEN_FOR, BatchInfo, BatchRef, BatchState, follow_up_options, milliseconds, sum_counts
from worqr.client.dead_letters import DeadLetters, list_members, retry_members
from worqr.client.job import Job
from worqr.client.notifications import Notification, Watch, sleep, subscribed
from worqr.client.outbox_relay import Relay, relay_messages
from worqr.client.producer import Call, batch_token, handle_of
from worqr.client.sync import sent_by
from worqr.command import Command
from worqr.errors import (
    BatchEnded,
    BatchFailed,
    Duplicate,
    NoResult,
    NotReplicated,
    ResultTimeout,
    UsageError,
    WorqrError,
    set_job,
)
from worqr.foreign import BATCH, explain_arguments
from worqr.job_options import check_choice, check_id, encode_options
from worqr.keys import BatchKeys, QueueKeys, check_name, keys_at
from worqr.ops import MAX_ITEMS, BatchRow
from worqr.records import Failed
from worqr.remote_error import meta_of
from worqr.stored_values import readable, whole
from worqr.validation import Seconds, check_text, moment, returns_coroutine, seconds

if TYPE_CHECKING:
    from worqr.client.client import Client

# `infos_of`: makes the `BatchInfo` of batches from their records, and from what the queues of their jobs have counted.


_COUNTS: Final = ("added", "finished", "failed", "cancelled", "lost")
"""Fields of a part, in the order of `PartRow.counts`."""


async def infos_of(client: Client, rows: Sequence[tuple[QueueKeys, BatchRow]]) -> list[BatchInfo]:
    """Return what is known of batches, each with its home. Open parts in other queues are asked for their counters."""
    prefix = client.settings.prefix
    away = [(row, part) for home, row in rows for part in row.parts if part.open and part.base != home.base]
    replies: list[tuple[int, Mapping[str, str]]] = []
    for start in range(0, len(away), MAX_ITEMS):
        some = away[start : start + MAX_ITEMS]
        asked = [ops.read_part(keys_at(prefix, part.base), _token(row)) for row, part in some]
        replies += await client.link.call_all(asked)
    newest = {
        (_token(row), part.base): tuple(whole(fields.get(name), 0) for name in _COUNTS)
        for (row, part), (_, fields) in zip(away, replies, strict=True)
        if fields
    }
    return [_info_of(prefix, home, row, newest) for home, row in rows]


def _info_of(
    prefix: str, home: QueueKeys, row: BatchRow, newest: Mapping[tuple[str, str], tuple[int, ...]]
) -> BatchInfo:
    facts = row.facts
    counts = [newest.get((_token(row), part.base), part.counts) for part in row.parts]
    queues = {readable(keys_at(prefix, part.base).display_name) for part in row.parts}
    base, newline, job = facts.get("follow_up", "").partition("\n")
    return BatchInfo(
        *(
            readable(row.id),
            home.display_name,
            cast("BatchState", readable(facts.get("state", ""))),
            *sum_counts(counts),
        ),
        endings=whole(facts.get("endings"), 0),
        meta=meta_of(readable(facts.get("meta", ""))),
        created=moment(whole(facts.get("made_at"))),
        ended=moment(whole(facts.get("ended_at"))),
        cancel_reason=None if "cancel_reason" not in facts else readable(facts["cancel_reason"]),
        queues=tuple(sorted(queues)),
        follow_up=(readable(keys_at(prefix, base).display_name), readable(job)) if newline else None,
    )


def _token(row: BatchRow) -> str:
    return row.facts.get("token", "")


# What operators do with batches, and see of them. Acts also write an entry into the log of the mesh. For `cli` and `dashboard`.
#
# A program that cancels its own batches calls `Batch.cancel`, which writes no entry, so that it does not flood the log.


async def cancel_and_note(client: Client, batch: Batch, reason: str) -> int | None:
    """Cancel a batch. Return how many of its jobs had not ended; None if the batch had. Raises what `Batch.cancel` raises."""
    pending = (await batch.info()).pending
    if not await batch.cancel(reason=reason):
        return None
    text = f"{batch.id}: {reason}" if reason else batch.id
    await client.note("batch_cancelled", queue=batch.queue, count=pending, text=text)
    return pending


async def retry_and_note(client: Client, batch: Batch) -> int:
    """Put the failed jobs of a batch back. Return their number. Raises what `Batch.retry_failed` raises."""
    count = await batch.retry_failed()
    await client.note("batch_retried", queue=batch.queue, count=count, text=batch.id)
    return count


async def failed_members(
    client: Client, home: str, id: str, aside: DeadLetters, limit: int, **options: Any
) -> Sequence[Failed]:
    """Return the entries of a dead-letter queue that belong to a batch; see `list_members`.

    Raises:
        NoResult: The queue `home` has no batch with this id.
    """
    keys = await client.sharding.shard_of_id(
        QueueKeys(client.settings.prefix, check_name(home)), check_id(id, generated=True)
    )
    row = await client.ask(ops.read_batch(keys, id))
    if row is None:
        raise NoResult(f"queue {home!r} has no batch {id!r}: it never existed, or its record was deleted after its end")
    return await list_members(aside, row.facts.get("token", ""), limit, **options)


R = TypeVar("R")

ASK_AGAIN = 0.05
"""Seconds before a part that was closed meanwhile is opened again, if the home had not heard of it."""


class Batch:
    """A batch of jobs. ``mesh.batch(...)`` makes one; ``mesh.queue(name).batch(id)`` is a handle of one that exists."""

    def __init__(
        self,
        client: Client,
        home: QueueKeys | None,
        id: str | None,
        token: str = "",
        *,
        inside: bool = False,
    ) -> None:
        """`inside`: it is the handle of a running job of the batch, which may add jobs after the seal."""
        self._client = client
        self._known: tuple[QueueKeys, str] | None = None if home is None or id is None else (home, id)
        self._token = token
        self._inside = inside
        self._opened: dict[str, Mapping[str, object]] = {}

    def __repr__(self) -> str:
        return "<Batch>" if self._known is None else f"<Batch {self.id!r} of {self.queue!r}>"

    @property
    def id(self) -> str:
        """Its id, unique in its home queue.

        Raises:
            UsageError: Its home queue is that of its first job, and none was added yet.
        """
        return self._located()[1]

    @property
    def queue(self) -> str:
        """The name of its home queue, which keeps its record.

        Raises:
            UsageError: That is the queue of its first job, and none was added yet.
        """
        return self._located()[0].display_name

    def _located(self) -> tuple[QueueKeys, str]:
        if self._known is None:
            raise UsageError(
                "this batch has no home queue yet, because that is the queue of its first job: add a job first, or name a queue "
                "with mesh.batch(queue=...)"
            )
        return self._known

    async def _home(self) -> QueueKeys:
        """Return the shard that keeps its record."""
        return self._located()[0]

    async def _locate_at(self, queue: str) -> None:
        """Store its record in this queue, if it is stored nowhere yet."""

    # Adding jobs

    @returns_coroutine
    def dispatch(self, call: Call[R]) -> Coroutine[Any, Any, Job[R]]:
        """Add a job. It may run at once, while others are still added.

        Args:
            call: Made by ``function.call(...)``, ``function.options(...).call(...)`` or ``mesh.call(...)``.

        Returns:
            A handle of the job.

        Raises:
            BatchEnded: The batch was sealed by the end of its block, has ended, or was cancelled. Nothing was stored. After
                the seal, only ``mesh.current_batch()`` of its running jobs takes more.
            Duplicate: The id of the call is taken. Nothing was stored: a job of a batch is always a new one.
            QueueFull: The queue is at its `max_length`, or the server is out of memory.
            NotReplicated: The job was stored, but fewer `replicas` than requested had it in time. The error has the handle.
            UsageError: It is no call; or outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`.
        """
        return sent_by("batch.dispatch", self._add_one(call))

    async def _add_one(self, call: Call[R]) -> Job[R]:
        jobs, late = await self._add_all([call])
        if late is not None:
            set_job(late, jobs[0])
            raise late
        return jobs[0]

    @returns_coroutine
    def dispatch_many(self, calls: Iterable[Call[R]]) -> Coroutine[Any, Any, list[Job[R]]]:
        """Add jobs, a thousand in one round trip.

        Args:
            calls: As for `dispatch`. An iterator is read as the calls are sent.

        Returns:
            The handle of each job, in the order of the calls.

        Raises:
            BatchEnded: As `dispatch`. Jobs before that are stored.
            Duplicate: The id of a call is taken. Other calls of its thousand may be stored.
            QueueFull: A queue is at its `max_length`. Other calls of its thousand may be stored.
            NotReplicated: All were stored, but fewer `replicas` than requested had them in time.
            UsageError: One is no call; or outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`. A note says how many jobs were added.
        """
        return sent_by("batch.dispatch_many", self._add_many(calls))

    async def _add_many(self, calls: Iterable[Call[R]]) -> list[Job[R]]:
        jobs, late = await self._add_all(calls)
        if late is not None:
            raise late
        return jobs

    async def _add_all(self, calls: Iterable[Call[R]]) -> tuple[list[Job[R]], NotReplicated | None]:
        """Add jobs. Also return the error that too few replicas had some of them in time: all were stored."""
        jobs: list[Job[R]] = []
        late: NotReplicated | None = None
        for some in _thousands(calls):
            try:
                added, late = await self._add(some, late)
            except WorqrError as error:
                if jobs:
                    error.add_note(f"the first {len(jobs):,} jobs were added")
                raise
            jobs += added
        return jobs, late

    async def _add(self, calls: list[Call[R]], late: NotReplicated | None) -> tuple[list[Job[R]], NotReplicated | None]:
        """Add up to a thousand jobs. Those whose part has closed meanwhile are sent again when the part is open again."""
        found: dict[int, Job[R]] = {}
        left, until = dict(enumerate(calls)), time.monotonic() + self._client.settings.patience
        while left:
            positions = list(left)
            outcomes, late = await self._client.producer.dispatch_members(list(left.values()), self._entry, late)
            closed: set[QueueKeys] = set()
            for position, (done, at) in zip(positions, outcomes, strict=True):
                if done.outcome == "closed":
                    closed.add(at)
                    continue
                call = left.pop(position)
                keys = QueueKeys(self._client.settings.prefix, call.queue)
                found[position] = handle_of(self._client, keys, done, call._results, at=at)
            if closed and time.monotonic() >= until:
                names = ", ".join(sorted({part.display_name for part in closed}))
                raise BatchEnded(
                    f"{self!r} takes no more jobs in {names}: its home queue and this one disagree about it"
                )
            for part in closed:
                await self._reopen(part)
        return [found[position] for position in range(len(calls))], late

    async def _reopen(self, part: QueueKeys) -> None:
        """Open a part again at the next addition, because it has closed meanwhile. First tell the home that it has."""
        opened = self._opened.pop(part.base, None)
        if opened is not None:
            entry = cast("Mapping[str, Any]", opened["batch"])
            if "sealed" in entry:  # the part repeats its report, which may have been lost
                facts = (entry["token"], entry["number"], entry["home"], entry["id"], entry["keep"])
                await self._client.ask(ops.close_part(part, *facts))
        await self._relay(part)
        await sleep(self._client.link, ASK_AGAIN)

    async def _entry(self, part: QueueKeys) -> Mapping[str, object]:
        """Return the options of a job that is added in this shard, which is opened at the home if it is not."""
        entry = self._opened.get(part.base)
        if entry is None:
            entry = self._opened[part.base] = {"batch": await self._open_part(part)}
        return entry

    async def _open_part(self, part: QueueKeys) -> Mapping[str, object]:
        for told in (False, True):
            reply = await self._client.ask(
                ops.open_part(await self._home(), self.id, self._token, part.base, inside=self._inside)
            )
            if reply.options is not None:
                return reply.options
            if reply.status == "full":
                raise UsageError(f"{self!r} has jobs in {ops.MAX_PARTS:,} queues already: use fewer queues")
            if reply.status == "sealed":
                raise BatchEnded(self._sealed_text())
            if not told:  # the home may not have heard yet that a failed job was put back
                await self._tell_home()
        if reply.status == "unknown":
            raise BatchEnded(self._unknown())
        if reply.status == "cancelled":
            raise BatchEnded(f"{self!r} was cancelled" + (f": {reply.reason}" if reply.reason else ""))
        raise BatchEnded(f"{self!r} has ended, and takes no more jobs")

    async def _relay(self, keys: QueueKeys) -> None:
        await relay_messages(self._client.ask, self._client.settings.prefix, keys)

    async def _tell_home(self) -> None:
        """Deliver what the queues of its jobs have to tell the home, and what the home has to tell them."""
        home = await self._home()
        row = await self._client.ask(ops.read_batch(home, self.id))
        parts = [keys_at(self._client.settings.prefix, part.base) for part in row.parts] if row is not None else []
        posted = await self._client.link.call_all([ops.take_outbox(part) for part in parts])
        for part in [part for part, messages in zip(parts, posted, strict=True) if messages]:
            await self._relay(part)
        await self._relay(home)

    def _sealed_text(self) -> str:
        return (
            f"{self!r} takes no more jobs from outside: it was sealed by the end of its block. Add jobs inside the block, or "
            "from a running job of the batch with mesh.current_batch()"
        )

    def _unknown(self) -> str:
        return f"{self!r} is unknown: it never existed, or its record was deleted after its end"

    # Reading

    async def info(self) -> BatchInfo:
        """Return the state of the batch, and how many of its jobs have ended.

        Raises:
            NoResult: It is unknown: it never existed, or its record was deleted after its end.
            UsageError: Outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`.
        """
        home = await self._home()
        row = await self._client.ask(ops.read_batch(home, self.id))
        if row is None:
            raise NoResult(self._unknown())
        return (await infos_of(self._client, [(home, row)]))[0]

    async def wait(self, timeout: Seconds | None = None) -> BatchInfo:
        """Wait until the batch has ended, whether its jobs finished or not.

        Args:
            timeout: Seconds to wait, or a timedelta. None: no limit; 0: do not wait.

        Returns:
            The batch.

        Raises:
            NoResult: It is unknown: it never existed, or its record was deleted after its end.
            ResultTimeout: It has not ended within `timeout`.
            UsageError: Outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`.
        """
        patience = math.inf if timeout is None else seconds(timeout, "timeout")
        link = self._client.link
        notification = Notification(link)
        if (info := await self.info()).state == "ended":
            return info
        with link.driver.move_on_after(patience):
            async with subscribed(link, await self._channel(), lambda _message: notification.set()):
                while (info := await self.info()).state != "ended":
                    if info.state == "sealed" and not info.pending:
                        await self._tell_home()  # as the leader does; this mesh may have no worker at the moment
                    await notification.wait()
            return info
        raise ResultTimeout(
            f"{self!r} had not ended after {patience:g} s: {info.pending:,} of {info.jobs:,} jobs run or wait"
        )

    async def result(self, timeout: Seconds | None = None) -> Any:
        """Wait until all jobs have finished and the follow-up `then` has ended, and return what that returned.

        Args:
            timeout: Seconds to wait, or a timedelta. None: no limit.

        Returns:
            The result of the follow-up; None if the batch has none.

        Raises:
            BatchFailed: A job failed or was cancelled, or the batch was cancelled. The error has the `BatchInfo`.
            NoResult: The batch is unknown, or the follow-up keeps no result.
            ResultTimeout: It has not ended within `timeout`.
            JobFailed: The follow-up failed.
        """
        until = math.inf if timeout is None else time.monotonic() + seconds(timeout, "timeout")
        info = await self.wait(timeout)
        if not info.succeeded:
            raise BatchFailed(
                f"{self!r} ended with {info.finished:,} of {info.jobs:,} jobs finished, {info.failed:,} failed and "
                f"{info.cancelled:,} cancelled",
                info,
            )
        if info.follow_up is None:
            return None
        await self._relay(await self._home())  # the follow-up may still be on its way to another queue
        queue, name = info.follow_up
        keys = QueueKeys(self._client.settings.prefix, queue)
        job: Job[Any] = Job(self._client, keys, name)
        return await job.result(None if until == math.inf else max(0.0, until - time.monotonic()))

    @asynccontextmanager
    async def watch(self, timeout: Seconds | None = None) -> AsyncGenerator[AsyncIterator[BatchInfo]]:
        """Follow the batch for the length of a block, as an iterator of its `BatchInfo`.

        The iterator begins with the present state. It yields each change that it sees, about once a second, and ends when the
        batch has ended.

        Args:
            timeout: Seconds for the whole block, or a timedelta. None: no limit; 0: the present state only.

        Yields:
            AsyncIterator[BatchInfo]: The iterator. It raises `ResultTimeout` if the batch has not ended within `timeout`.
        """
        watch = Watch(self._client.link, timeout, self, self.info, lambda info: info.state == "ended")
        async with watch.on(await self._channel()) as infos:
            yield infos

    async def _channel(self) -> str:
        return BatchKeys(await self._home()).batch(self.id)

    # Changing

    async def cancel(self, *, reason: str = "") -> bool:
        """Cancel the batch: it takes no more jobs, and its jobs are cancelled, waiting or running. Then it ends.

        Returns when all jobs that waited are cancelled, and all running ones are asked to stop.

        Args:
            reason: A text for people.

        Returns:
            False if the batch had ended already.

        Raises:
            NoResult: It is unknown.
            UsageError: Outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`.
        """
        check_text(reason, "reason")
        await self._tell_home()
        home = await self._home()
        status = await self._client.ask(ops.cancel_batch(home, self.id, self._token, reason))
        if status == "unknown":
            raise NoResult(self._unknown())
        await self._relay(home)
        await self._tell_home()
        return status == "ok"

    async def retry_failed(self) -> int:
        """Put its failed jobs back from the dead-letter queues. The batch is open again for them, and ends once more.

        Returns:
            The number of jobs put back.

        Raises:
            NoResult: It is unknown.
            UsageError: Outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`.
        """
        row = await self._client.ask(ops.read_batch(await self._home(), self.id))
        if row is None:
            raise NoResult(self._unknown())
        prefix, put_back = self._client.settings.prefix, 0
        for part in row.parts:
            keys = keys_at(prefix, part.base)
            put_back += await retry_members(self._client, keys, row.facts.get("token", ""))
            await self._relay(keys)
        return put_back


def _thousands(calls: Iterable[Call[R]]) -> Iterator[list[Call[R]]]:
    waiting = iter(calls)
    while some := list(islice(waiting, MAX_ITEMS)):
        yield some


if not TYPE_CHECKING:  # a type checker knows the signature
    Batch.dispatch = returns_coroutine(explain_arguments("dispatch() of a batch", BATCH)(Batch.dispatch))


# Make a batch for the length of a block. Its end seals the batch; an error cancels it.
#
# The home queue of a batch is that of its follow-up, so that the last of its jobs ends and the follow-up is enqueued in one
# step of the server.


RENEWALS: Final = 4
"""How often an addition tells the server within `open_for` that the producer is alive. The server waits that much longer."""
CANCEL_WITHIN: Final = 1.0
"""Seconds that a block which was itself cancelled waits until the server has cancelled the batch."""


class BatchOptions(TypedDict, total=False):
    """The options of a batch."""

    then: Call[Any]
    """A call that is enqueued when all jobs have finished. Default: none."""
    otherwise: Call[Any]
    """A call that is enqueued instead when a job failed for good or was cancelled, or when the batch was cancelled.
    Default: none.
    """
    on_failed: Literal["continue", "cancel"]
    """"cancel": the first job that fails for good cancels the others. Default: "continue"."""
    queue: str
    """The home queue, which keeps the record of the batch. Default: that of `then`, else that of `otherwise`, else that of the
    first job.
    """
    id: str
    """1 to 200 bytes of UTF-8 without control characters, not beginning with ``@``. Default: a new one."""
    keep: Seconds
    """Seconds for which its record is kept after its end. Default: a day."""
    open_for: Seconds
    """Seconds without an addition after which a batch that its producer has left open is cancelled. Default: an hour."""
    meta: Mapping[str, str]
    """Names and texts that the follow-up can read, at most 4 KiB as JSON. Default: none."""


class Plan(msgspec.Struct, frozen=True):
    """The checked options of a batch. `facts`: fields of its record."""

    then: Call[Any] | None
    otherwise: Call[Any] | None
    queue: str | None
    id: str | None
    keep_ms: int
    open_for_ms: int
    facts: Mapping[str, str]


_KNOWN = frozenset(BatchOptions.__annotations__)


def plan_of(options: Mapping[str, Any]) -> Plan:
    """Return the checked options of a batch.

    Raises:
        UsageError: one does not exist, or is not valid.
    """
    for name in options:
        if name not in _KNOWN:
            raise UsageError(f"mesh.batch() has no option {name!r}; it takes {', '.join(sorted(_KNOWN))}")
    for what in ("then", "otherwise"):
        call = options.get(what)
        if call is not None and not isinstance(call, Call):
            raise UsageError(f"{what} of a batch must be a call: write {what}=function.call(...), not {call!r}")
        if call is not None:
            follow_up_options(call._options, what)
    facts: dict[str, str] = {}
    if check_choice(options.get("on_failed", "continue"), "on_failed", ("continue", "cancel")) == "cancel":
        facts["on_failed"] = "cancel"
    if "meta" in options:
        facts["meta"] = str(encode_options({"meta": options["meta"]})["meta"])
    then: Call[Any] | None = options.get("then")
    otherwise: Call[Any] | None = options.get("otherwise")
    queues = [call.queue for call in (then, otherwise) if call is not None]
    given = check_name(options["queue"]) if "queue" in options else None
    return Plan(
        then=then,
        otherwise=otherwise,
        queue=given or next(iter(queues), None),
        id=check_id(options["id"]) if "id" in options else None,
        keep_ms=milliseconds(options.get("keep", KEEP), "keep"),
        open_for_ms=milliseconds(options.get("open_for", OPEN_FOR), "open_for"),
        facts=facts,
    )


class OpenBatch(Batch):
    """A batch in the block of its producer."""

    def __init__(self, client: Client, plan: Plan, parent: Batch | None = None) -> None:
        super().__init__(client, None, None, batch_token())
        self._plan = plan
        self._parent = parent
        self._tried: tuple[QueueKeys, str] | None = None
        self._renew_at = 0.0
        self._sealed = False
        self._storing = threading.Lock()

    async def begin(self) -> None:
        """Store the record, if the home queue is known."""
        self._client.check_connected()
        if self._plan.queue is not None:
            await self._locate_at(self._plan.queue)

    async def _locate_at(self, queue: str) -> None:
        """Store the record in this queue, if it is stored nowhere yet. Of several tasks or threads, one does it."""
        while self._known is None:
            if self._storing.acquire(blocking=False):
                try:
                    self._known = self._known or await self._store(queue)
                finally:
                    self._storing.release()
            else:
                await sleep(self._client.link, ASK_AGAIN)

    async def _store(self, queue: str) -> tuple[QueueKeys, str]:
        keys, sharding, plan = QueueKeys(self._client.settings.prefix, queue), self._client.sharding, self._plan
        home = await (sharding.next_shard(keys) if plan.id is None else sharding.shard_of_id(keys, plan.id))
        name = plan.id or f"@{self._token}{home.id_suffix}"
        facts: dict[str, bytes | str] = dict(plan.facts)
        held: dict[QueueKeys, dict[str, bytes | str]] = {}
        shown = {fact: value for fact, value in facts.items() if fact == "meta"}
        requests: list[tuple[str, Command[str]]] = []
        for what, call in (("then", plan.then), ("otherwise", plan.otherwise)):
            if call is not None:
                target, follow_up = await self._client.producer.plan_follow_up(home, what, call, requests)
                facts[what] = target.base
                (facts if target == home else held.setdefault(target, dict(shown))).update(follow_up)
        requests += [
            (target.name, ops.hold_follow_ups(target, self._token, home.base, name, stored))
            for target, stored in held.items()
        ]
        await self._client.link.call_all([request for _, request in requests])  # comes first: an open batch has them
        while True:
            outer = None if self._parent is None else await self._entry_of_parent(self._parent, home)
            self._tried = home, name
            reply = await self._client.link_to(home.name).call(
                ops.open_batch(
                    *(home, name, self._token),
                    open_for_ms=plan.open_for_ms + plan.open_for_ms // RENEWALS,
                    keep_ms=plan.keep_ms,
                    parent=outer,
                    facts=facts,
                )
            )
            if reply != "closed" or self._parent is None:
                break
            await self._parent._reopen(home)
        self._tried = None
        if reply == "exists":
            for target in held:
                await self._client.ask(ops.keep_follow_ups(target, self._token, 1))
            raise Duplicate(f"queue {queue!r} has a batch with the id {name!r} already: nothing was stored")
        self._renew_at = self._next_renewal()
        return home, name

    async def _entry_of_parent(self, parent: Batch, home: QueueKeys) -> Mapping[str, object]:
        await parent._locate_at(home.display_name)
        return cast("Mapping[str, object]", (await parent._entry(home))["batch"])

    def _next_renewal(self) -> float:
        return time.monotonic() + self._plan.open_for_ms / 1000 / RENEWALS

    async def _entry(self, part: QueueKeys) -> Mapping[str, object]:
        """As `Batch._entry`. Now and then, open all parts again, which tells the server that the producer is alive."""
        if time.monotonic() >= self._renew_at:
            self._renew_at = self._next_renewal()
            self._opened.clear()
        return await super()._entry(part)

    async def _add(self, calls: list[Call[R]], late: NotReplicated | None) -> tuple[list[Job[R]], NotReplicated | None]:
        """As `Batch._add`. The first job decides the home queue, if no option does."""
        if self._known is None and self._sealed:
            raise BatchEnded(self._sealed_text())
        if self._known is None and isinstance(calls[0], Call):  # pyright: ignore[reportUnnecessaryIsInstance]
            await self._locate_at(calls[0].queue)
        return await super()._add(calls, late)

    async def info(self) -> BatchInfo:
        """Return the state of the batch, and how many of its jobs have ended; see `Batch.info`."""
        if self._known is not None:
            return await super().info()
        return BatchInfo("", "", "ended" if self._sealed else "open", 0, 0, 0, 0, int(self._sealed))

    async def seal(self) -> None:
        """Add nothing more. The batch ends when its jobs have ended.

        Raises:
            BatchEnded: its record is gone.
            WorqrError: the server did not note it. The batch is cancelled when `open_for` has passed.
        """
        self._sealed = True
        self._opened.clear()
        self._known = self._known or self._tried
        if self._known is None:
            return
        home, prefix = await self._home(), self._client.settings.prefix
        try:
            sealed = await self._client.ask(ops.seal_batch(home, self.id, self._token))
        except WorqrError as error:
            error.add_note(f"{self!r} may be open: if so, it is cancelled when `open_for` has passed")
            raise
        if sealed is None and self._tried is not None:
            return  # the addition that was to store its record was given up
        if sealed is None:
            raise BatchEnded(
                f"the record of {self!r} was deleted, so its follow-up will not run: dispatch the jobs again in a new batch"
            )
        relay = Relay(self._client.ask, prefix)
        await relay.close_parts(self._token, (home.base, self.id, sealed.keep), sealed.parts)
        await relay.messages(home)  # an error is no harm: the leader does the same, in 10 s at the latest

    async def abandon(self, error: BaseException) -> None:
        """Cancel the batch, because its block ended with an error. A block that was itself cancelled waits a second for it, and
        so does one that has got no reply to the request that stores its record.
        """
        self._sealed = True
        self._opened.clear()
        is_stored = self._known is not None
        self._known = self._known or self._tried
        if self._known is None:
            return
        reason = f"its block ended with {type(error).__name__}"
        try:
            if is_stored and isinstance(error, Exception):
                await self.cancel(reason=reason)
            elif not isinstance(error, GeneratorExit):  # in a generator that is not finished, nothing can wait
                with self._client.link.driver.move_on_after(CANCEL_WITHIN, shield=True):
                    await self._client.ask(ops.cancel_batch(await self._home(), self.id, self._token, reason))
        except WorqrError as failed:
            if is_stored:
                error.add_note(
                    f"{self!r} could not be cancelled ({failed}): it is cancelled when `open_for` has passed"
                )


@asynccontextmanager
async def batch_block(batch: OpenBatch) -> AsyncGenerator[OpenBatch]:
    """Use a batch for the length of a block, as its producer."""
    try:
        await batch.begin()
        yield batch
    except BaseException as error:
        await batch.abandon(error)
        raise
    try:
        await batch.seal()
    except BaseException as error:
        if not isinstance(error, Exception):  # a cancellation: the seal may not have been sent
            await batch.abandon(error)
        raise


# Batches that exist: a handle of one by its id or of the batch that a run belongs to, and the list of those of a queue.


_LONG_AGO: Final = datetime.fromtimestamp(0, UTC)


def batch_of_id(client: Client, keys: QueueKeys, id: str) -> Batch:
    """Return a handle of the batch with this id in a queue."""
    return IdentifiedBatch(client, keys, id)


class BatchMaker:
    """Makes the batches of one mesh. A recording replaces it."""

    def open(self, client: Client, plan: Plan, parent: Batch | None) -> OpenBatch:
        """Return a new batch, which is stored nowhere yet."""
        return OpenBatch(client, plan, parent)

    def of_ref(self, client: Client, ref: BatchRef) -> Batch:
        """Return a handle of the batch that the record of a job names."""
        prefix = client.settings.prefix
        home = keys_at(prefix, f"{prefix}:{ref._home}")
        return Batch(client, home, ref.id, ref._token, inside=True)


class IdentifiedBatch(Batch):
    """A batch that is known by the name of its queue and its id."""

    async def _home(self) -> QueueKeys:
        return await self._client.sharding.shard_of_id(*self._located())


async def list_batches(client: Client, keys: QueueKeys, limit: int) -> list[BatchInfo]:
    """Return batches at home in a queue: those that have not ended first, then the newest."""
    shards = await client.sharding.shards(keys)
    replies = await client.link.call_all([ops.list_batches(shard, 0, limit) for shard in shards])
    rows = [(shard, row) for shard, (_, rows) in zip(shards, replies, strict=True) for row in rows if row.facts]
    found = await infos_of(client, rows)
    found.sort(key=lambda info: info.created or _LONG_AGO, reverse=True)
    found.sort(key=lambda info: info.state == "ended")
    return found[:limit]


async def cancel_batches(client: Client, keys: QueueKeys, reason: str) -> None:
    """Cancel the batches at home in one queue or shard that have not ended."""
    found: list[BatchRow] = []
    number = 1
    while len(found) < number:
        number, rows = await client.ask(ops.list_batches(keys, len(found), MAX_ITEMS))
        if not rows:
            break
        found += rows
    for row in found:
        if row.facts.get("state") in {"open", "sealed"} and "cancel_reason" not in row.facts:
            await Batch(client, keys, row.id, row.facts.get("token", "")).cancel(reason=reason)
