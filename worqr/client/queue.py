"""`Queue`: enqueue and dispatch tasks, inspect, cancel, pause and delete a queue, and follow its events.

Nothing here consumes: that is the peer's. Every method is one request or a few to each shard of the queue, which mostly has
one; none holds a lock, none polls unless it says so.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, Unpack, cast

from worqr import ops
from worqr.batches import BatchInfo
from worqr.client.batch import Batch, batch_of_id, cancel_batches, list_batches
from worqr.client.dead_letters import DeadLetters
from worqr.client.events import Event, events_of
from worqr.client.finished import (
    END_STATES,
    cancel_jobs_of,
    count_by_state,
    dispatch_again,
    forget_jobs_of,
    list_found,
    retry_jobs_of,
)
from worqr.client.inspection import (
    LISTED_STATES,
    Listed,
    NotRunning,
    ask_each,
    claim_name,
    claim_of,
    info_at,
    interleave,
    list_active,
    list_jobs,
    longest_running,
    merge_queue_info,
    read_history,
)
from worqr.client.job import Job, job_record, opened_infos, opened_record
from worqr.client.notifications import cancel_and_wait, sleep
from worqr.client.producer import Call
from worqr.client.sync import sent_by
from worqr.command import Command
from worqr.errors import UsageError
from worqr.foreign import QUEUE, no_such_attribute
from worqr.history_records import History
from worqr.inside import options_of
from worqr.job_options import (
    PLAIN,
    EnqueueOptions,
    JobOptions,
    check_bounded,
    check_choice,
    check_id,
    check_tag,
    checked_raw_options,
    encode_options,
)
from worqr.keys import QueueKeys, shard_of
from worqr.limits import (
    DECLARES_NOTHING,
    Limit,
    check_lane,
    check_limits,
    check_weight,
    describe_limits,
    limits_text,
    parse_limits,
)
from worqr.mesh_records import LaneInfo, QueueInfo
from worqr.ops import MAX_ITEMS, CancelReply, LaneRow
from worqr.records import MOST_RECENT, CancelCount, EndedRun, Forgotten, JobRecord, Matches, TaskInfo, decode_run
from worqr.stored_values import readable
from worqr.validation import (
    Seconds,
    check_count,
    check_task,
    check_tasks,
    check_text,
    from_ms,
    returns_coroutine,
    seconds,
    to_ms,
)

if TYPE_CHECKING:
    from worqr.client.client import Client

T = TypeVar("T")

MOST_LANES: Final = 10_000
"""Lanes that one call looks at."""
MAX_LISTED: Final = 10_000
"""Tasks that one call lists."""


class Queue:
    """A raw queue of a mesh: bytes in, bytes out. ``mesh.queue(name)`` makes it; its calls need ``mesh.connect()`` or
    ``join()``.

    A queue of several shards (``mesh.queue(name, shards=8)``) consists of several lists. Each call puts its tasks into the
    next list; a job with an id always goes to the same list. All calls span all shards, but they do not read them at one
    moment. The order of tasks is kept within a shard only.
    """

    __slots__ = ("_client", "_keys")

    def __init__(self, client: Client, keys: QueueKeys) -> None:
        self._client = client
        self._keys = keys

    @property
    def name(self) -> str:
        """The queue's name."""
        return self._keys.display_name

    @property
    def failed(self) -> DeadLetters:
        """The dead-letter queue: tasks that failed, timed out or stalled too often, or expired. It keeps the last `keep_failed`
        (1000).
        """
        return DeadLetters(self._client, self._keys, "failed")

    @property
    def undecodable(self) -> DeadLetters:
        """The tasks whose payload could not be decoded (`Undecodable`). All are kept until you retry or drop them."""
        return DeadLetters(self._client, self._keys, "undecodable")

    @property
    def failures(self) -> Queue:
        """The failure queue, in which the jobs of `on_failure` handlers wait.

        Raises:
            UsageError: This is a failure queue; it has none itself.
        """
        if self._keys.failures:
            raise UsageError(f"{self.name!r} is a failure queue; those have no failure queue themselves")
        return Queue(self._client, QueueKeys(self._keys.prefix, self._keys.queue, failures=True))

    if not TYPE_CHECKING:  # a type checker reports missing attributes

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError with a hint. Python calls it only for a missing attribute."""
            raise AttributeError(no_such_attribute("Queue", name, QUEUE))

    def __repr__(self) -> str:
        return f"<Queue {self.name!r}>"

    @returns_coroutine
    def enqueue(
        self, *tasks: bytes | bytearray | memoryview, **options: Unpack[EnqueueOptions]
    ) -> Coroutine[Any, Any, int]:
        """Enqueue raw tasks in this order, and wake as many idle workers as there are tasks.

        One call is one atomic request. More than 1,000 tasks or 8 MiB are sent as several requests, in order. With several
        shards, each request goes to the next shard. If you cancel the call before the request is written, nothing is stored;
        later it may be.

        Args:
            *tasks: The payloads. They are delivered unchanged.
            **options: See `EnqueueOptions`: `unique`, `front`, `max_length`, `wait` and `replicas`.

        Returns:
            The number of tasks stored, which is all of them.

        Raises:
            UsageError: A task is not bytes-like; an option does not exist or is not valid; `wait` has no `max_length`; a call
                with `unique` or `max_length` does not fit one request; or several unique tasks go to a queue with several
                shards. Also outside `connect` and `join`.
            PayloadTooLarge: A task is larger than the mesh's `max_payload`.
            Duplicate: With `unique`: one of the tasks waits or runs already. Nothing was stored.
            QueueFull: The queue is at `max_length`, after `wait`, or the server is out of memory. Nothing of the request was
                stored.
            NotReplicated: All tasks were stored, but fewer `replicas` than requested had them within 2 s.
            Unavailable: The server did not reply within `patience`. If its `sent` is None, the tasks may have been stored.
        """
        given = checked_raw_options(options) if options else PLAIN
        checked = check_tasks(tasks, self._client.settings.max_payload)
        producer = self._client.producer
        send = producer.enqueue_raw if self._client.settings.send_middleware else producer.enqueue_tasks
        return sent_by("queue.enqueue", send(self._keys, checked, given))

    @returns_coroutine
    def dispatch(
        self, task: bytes | bytearray | memoryview, **options: Unpack[JobOptions]
    ) -> Coroutine[Any, Any, Job[bytes]]:
        """Put a job into the queue: a task with an id and options of its own, which you can follow and cancel.

        If a job with this id waits, it is updated (see `Update`). If it runs, the new job is blocked until that run has
        ended: an id never runs twice at once.

        Args:
            task: The payload. It is delivered unchanged.
            **options: See `JobOptions`.

        Returns:
            A handle of this dispatch, with its `outcome`.

        Raises:
            UsageError: The task is not bytes-like, or an option does not exist or is not valid; or outside `connect` and
                `join`.
            PayloadTooLarge: The task is larger than the mesh's `max_payload`.
            Duplicate: The id is taken, and ``if_exists="raise"``. Nothing was stored.
            QueueFull: The queue is at `max_length`, after `wait`, or the server is out of memory. Nothing was stored.
            NotReplicated: The job was stored, but fewer `replicas` than requested had it within 2 s. The error has the
                handle.
            Unavailable: The server did not reply within `patience`. If its `sent` is None, the job may have been stored.
        """
        checked = check_task(task, self._client.settings.max_payload)
        given = encode_options(options)
        check_bounded(given, "a dispatch")
        producer = self._client.producer
        call: Call[bytes] = producer.prepared(Call(self._keys.queue, (), {}, checked, given))
        return sent_by("queue.dispatch", producer.dispatch_task(self._keys, checked, options_of(call)))

    def job(self, id: str) -> Job[bytes]:
        """Return a handle of the job with this id. This does no I/O; the job does not have to exist.

        Args:
            id: The job's id.

        Raises:
            UsageError: The id is not valid.
        """
        return Job(self._client, self._keys, check_id(id, generated=True))

    # Inspecting

    async def count(self) -> int:
        """Return the number of tasks that wait."""
        return sum([waiting for waiting, _ in await self._ask_all(lambda keys: ops.list_tasks(keys, 0))])

    async def peek(self) -> bytes | None:
        """Return the payload of the task that will be taken next, without removing it; None if none waits.

        With several shards, it is the next task of one of them.
        """
        replies = await self._ask_all(lambda keys: ops.list_tasks(keys, 1, from_front=True))
        return next((self._opened(tasks[0]) for _, tasks in replies if tasks), None)

    async def tasks(self, limit: int = 100) -> list[bytes]:
        """Return the payloads of waiting tasks, newest first, but no more than about 8 MiB.

        Args:
            limit: At most this many, up to 10,000. With several shards, one of each in turn.

        Raises:
            UsageError: `limit` is less than 1.
        """
        most = min(check_count(limit, "limit"), MAX_LISTED)
        found = interleave([tasks for _, tasks in await self._ask_all(lambda keys: ops.list_tasks(keys, most))], most)
        values = self._client.values
        return found if values is None else [values.readable(task) for task in found]

    async def running(self, limit: int = MAX_ITEMS, *, worker: str = "") -> list[TaskInfo]:
        """Return the tasks that run now, the longest-running first.

        Each has its job id, or the first 100 bytes of the payload of a plain task; the worker that runs it; the time at which
        the run began, by the server's clock; and its `claim`, for `cancel_claims`.

        Args:
            limit: At most this many, up to 10,000.
            worker: Only tasks of the worker with this id. Empty: of all workers.

        Raises:
            UsageError: `limit` is less than 1, or `worker` is not a str.
        """
        most, shards = min(check_count(limit, "limit"), MAX_LISTED), await self._client.sharding.shards(self._keys)
        found = await longest_running(self._client, shards, most, worker=check_text(worker, "worker"))
        return opened_infos(self._client, [info for _, info in found])

    async def jobs(
        self,
        *,
        state: Listed | None = None,
        limit: int = 100,
        after: str = "",
        newest: bool = False,
        tag: str = "",
        since: datetime | None = None,
    ) -> list[TaskInfo]:
        """Return one page of the tasks in a state, or of the jobs with a tag, with their job ids.

        ``waiting`` and ``active`` list plain tasks too, which have no id. The queue changes while you read its pages: a task
        that moves meanwhile may be listed twice, or not at all.

        Args:
            state: ``waiting``: in the order in which they will be taken. ``scheduled``: jobs that wait for their time, the
                next one first. ``suspended``: workflows that wait for an event, a time or other jobs, the one with the earliest
                deadline first. ``blocked``: jobs that wait until the run of their id has ended, by id. ``active``: tasks that
                run, the longest-running first. ``finished``, ``failed``, ``cancelled``, or ``ended`` for all three: jobs that
                are kept after their end, the one that ended last first. Shards are listed one after the other, except for
                ``active``. Default: ``waiting``, or with a `tag` any state.
            limit: The size of the page, at most 10,000.
            after: The `cursor` of the last entry of the page before; empty: the first page.
            newest: List ``waiting`` tasks from the end, those that will be taken last first; in lanes, lane by lane.
            tag: Only jobs with this tag, the one that was dispatched last first; also dead letters, and jobs with a stored
                result.
            since: Only jobs that have ended since this timezone-aware time.

        Returns:
            The tasks of the page; an empty list after the last page.

        Raises:
            UsageError: `state` is not one of these, `after` is not a cursor of it, or it has no `newest`, `tag` or `since`; or
                the tag has more than 100,000 jobs that have not ended.
        """
        if state is None:
            state = None if tag else "waiting"
        else:
            check_choice(state, "state", LISTED_STATES)
        if since is not None and state not in END_STATES:
            raise UsageError("since= is for jobs that have ended: jobs(state='finished', since=...)")
        most = min(check_count(limit, "limit"), MAX_LISTED)
        shards = await self._client.sharding.shards(self._keys)
        if newest and state != "waiting":
            raise UsageError(f"newest=True lists waiting tasks only, not state={state!r}")
        if tag or state in END_STATES:
            since_ms, name = None if since is None else to_ms(since, "since"), check_tag(tag) if tag else ""
            found = await list_found(self._client, shards, state or "", most, after, tag=name, since_ms=since_ms)
        elif state == "active":
            found = await list_active(self._client, shards, most, after)
        else:
            found = await list_jobs(self._client, shards, cast("NotRunning", state), most, after, newest=newest)
        return opened_infos(self._client, found)

    def _opened(self, task: bytes | None) -> bytes | None:
        """Return a payload for people, decoded if the codec of the mesh can do that."""
        values = self._client.values
        return task if values is None or task is None else values.readable(task)

    def _stored_as(self, task: bytes, what: str) -> bytes:
        """Return the bytes as which a payload is stored. Raises UsageError if they are others each time."""
        values = self._client.values
        return task if values is None else values.encode_alike(task, what)

    async def info(self) -> QueueInfo:
        """Return the queue's counters.

        With several shards, counts are summed, `oldest_job` is the largest, and the shards are not read at one moment.
        """
        return await info_at(self._client, self._keys)

    async def _ask_all(self, make: Callable[[QueueKeys], Command[T]]) -> list[T]:
        """Send one request to each shard, all at once, and return the replies."""
        return await ask_each(self._client, await self._client.sharding.shards(self._keys), make)

    # Cancelling

    async def cancel(self, task: bytes | bytearray | memoryview, *, reason: str = "", wait: Seconds = 0) -> CancelCount:
        """Cancel all tasks of this queue with this payload: remove those that wait, cancel those that run.

        A task that is cancelled while it runs is settled when its handler has ended, and never runs again, even if its worker
        dies. Waiting tasks are found by a search through the queue, which takes 16 ms for a million. To cancel a job, use
        ``queue.job(id).cancel()``.

        Args:
            task: The payload.
            reason: A text for people; `JobCancelled` has it.
            wait: Seconds to wait until the running tasks have ended. A slow handler raises nothing.

        Returns:
            The number of tasks that waited, that ran, and that ended within `wait`.

        Raises:
            UsageError: The task is not bytes-like, or `wait` is not valid; or the codec of the mesh encodes equal payloads
                differently.
            Unavailable: The server did not reply within `patience`.
        """
        checked = self._stored_as(check_task(task, self._client.settings.max_payload), "queue.cancel()")
        check_text(reason, "reason")

        async def step(keys: QueueKeys, last: CancelReply | None) -> CancelReply:
            cursor, after = ("0", "-") if last is None else (last.cursor, last.after)
            return await self._client.ask(ops.cancel_task(keys, checked, cursor, after, reason=reason))

        patience, shards = seconds(wait, "wait"), await self._client.sharding.shards(self._keys)
        return await cancel_and_wait(self._client.link, shards, step, patience)

    async def cancel_tagged(self, tag: str, *, reason: str = "", wait: Seconds = 0) -> CancelCount:
        """Cancel all jobs with a tag that have not ended.

        From the first reply on, no job with the tag starts that was dispatched before, in this shard; the others follow. Jobs
        that are dispatched later are not cancelled. If it is interrupted, call it again.

        Args:
            tag: The tag.
            reason: A text for people; `JobCancelled` has it.
            wait: Seconds to wait until the running jobs have ended. A slow handler raises nothing.

        Returns:
            The number of jobs that did not run, that ran, and that ended within `wait`.

        Raises:
            UsageError: An argument is not valid, or the tag has more than 100,000 jobs.
            Unavailable: The server did not reply within `patience`.
        """
        shards, name = await self._client.sharding.shards(self._keys), check_tag(tag)
        count = await cancel_jobs_of(self._client, shards, name, check_text(reason, "reason"), seconds(wait, "wait"))
        text = f"{name}: {reason}" if reason else name
        await self._client.note("tag_cancelled", queue=self.name, count=count.waiting + count.running, text=text)
        return count

    async def count_tagged(self, tag: str) -> dict[str, int]:
        """Return the number of jobs with a tag in each state. 100,000 jobs take 100 requests.

        Args:
            tag: The tag.

        Raises:
            UsageError: The tag is not valid, or has more than 100,000 jobs.
        """
        shards = await self._client.sharding.shards(self._keys)
        return await count_by_state(self._client, shards, check_tag(tag))

    async def retry_tagged(self, tag: str) -> int:
        """Put the dead letters with a tag back into the queue, as ``queue.failed.retry()`` does.

        Args:
            tag: The tag.

        Returns:
            The number of jobs put back.

        Raises:
            UsageError: The tag is not valid, or has more than 100,000 jobs.
        """
        shards, name = await self._client.sharding.shards(self._keys), check_tag(tag)
        retried = await retry_jobs_of(self._client, shards, name)
        await self._client.note("tag_retried", queue=self.name, count=retried, text=name)
        return retried

    async def forget_tagged(self, tag: str, *, reason: str = "") -> Forgotten:
        """Delete all that is stored in this queue of the jobs with a tag: see ``mesh.forget_tagged()``.

        Args:
            tag: The tag.
            reason: A text for people, for callers that wait for a job that is cancelled.

        Raises:
            UsageError: An argument is not valid, or the tag has more than 100,000 jobs.
        """
        shards, name = await self._client.sharding.shards(self._keys), check_tag(tag)
        found = await forget_jobs_of(self._client, shards, name, check_text(reason, "reason"))
        await self._client.note("tag_forgotten", queue=self.name, count=found.waiting + found.kept, text=name)
        return found

    async def forget(self, *kept: str) -> int:
        """Delete what is kept of jobs that have ended.

        Args:
            *kept: The `kept` of jobs in ``queue.jobs(state="ended")``.

        Returns:
            The number of jobs that were kept.

        Raises:
            UsageError: A name is not valid; or outside `connect` and `join`.
        """
        named: dict[QueueKeys, list[int]] = {}
        for keys, number in [claim_of(self._keys, each) for each in kept]:
            named.setdefault(keys, []).append(number)
        forgotten = 0
        for keys, numbers in named.items():
            for start in range(0, len(numbers), MAX_ITEMS):
                forgotten += await self._client.ask(ops.drop_kept_jobs(keys, numbers[start : start + MAX_ITEMS]))
        return forgotten

    async def run_again(self, kept: str) -> Job[bytes]:
        """Dispatch a job that has ended once more: the same payload, meta, lane and tags, under a new id.

        Args:
            kept: The `kept` of a job in ``queue.jobs(state="ended")``.

        Returns:
            A handle of the new job.

        Raises:
            UsageError: The name is not valid; the job is kept no more, or was too large to be kept with its payload.
        """
        keys, number = claim_of(self._keys, kept)
        again = await dispatch_again(self._client, keys, number)
        return Job(self._client, self._keys, again.id, again.number, "created", at=keys)

    async def cancel_all(self, *, reason: str = "", wait: Seconds = 0) -> CancelCount:
        """Cancel all tasks and jobs of this queue, waiting or running.

        Args:
            reason: A text for people; `JobCancelled` has it.
            wait: Seconds to wait until the running tasks have ended. A slow handler raises nothing.

        Returns:
            The number of tasks that waited, that ran, and that ended within `wait`.

        Raises:
            UsageError: `wait` is not valid.
            Unavailable: The server did not reply within `patience`.
        """
        check_text(reason, "reason")

        async def step(keys: QueueKeys, last: CancelReply | None) -> CancelReply:
            after = last.after if last else "-"
            while (found := await self._client.ask(ops.cancel_all(keys, after, reason=reason))) is None:
                await self._purge(keys)
            return found

        patience, shards = seconds(wait, "wait"), await self._client.sharding.shards(self._keys)
        count = await cancel_and_wait(self._client.link, shards, step, patience)
        for keys in shards:
            await self._purge(keys)
        await self._client.note("cancelled_all", queue=self.name, count=count.waiting + count.running, text=reason)
        return count

    # Operations

    async def delete(self) -> None:
        """Delete all tasks and jobs that wait, are scheduled, suspended or blocked.

        Running tasks may finish; tasks that are given back afterwards are dropped. The next enqueue creates the queue again.
        Several shards are deleted one after the other. Their number is forgotten if the queue is then empty, keeps no ended
        jobs, and has no worker. It stays while an operator has paused or limited the queue or a lane. Batches whose home queue
        this is are cancelled.
        """
        shards = await self._client.sharding.shards(self._keys)
        for keys in shards:
            while not await self._client.ask(ops.delete_queue(keys)):
                await self._purge(keys)
            await self._purge(keys)
            await cancel_batches(self._client, keys, "its home queue was deleted")
        if len(shards) > 1 and not self._keys.failures:
            await self._forget_shards(shards)
        await self._client.note("deleted", queue=self.name)

    async def _forget_shards(self, shards: tuple[QueueKeys, ...]) -> None:
        keys_of_all = [*shards, *(replace(keys, failures=True) for keys in shards)]
        found = await ask_each(self._client, keys_of_all, ops.inspect)
        info = merge_queue_info(self.name, found)
        if not (
            info.workers
            or info.running
            or info.waiting
            or info.scheduled
            or info.suspended
            or info.failed
            or info.undecodable
            or info.paused is not None
            or info.limits_overridden
            or any(shard.lane_rules for shard in found)
            or any(
                page.jobs or page.more
                for page in await ask_each(self._client, shards, lambda keys: ops.list_kept(keys, limit=1))
            )
        ):
            await self._client.sharding.forget(self.name)

    async def _purge(self, keys: QueueKeys) -> None:
        """Delete the trash in batches, each followed by a pause of the same length: the server serves others meanwhile."""
        began = time.monotonic()
        while await self._client.ask(ops.purge_queue(keys)):
            await sleep(self._client.link, time.monotonic() - began)
            began = time.monotonic()

    def events(self, *, ends: bool = False) -> AbstractAsyncContextManager[AsyncIterator[Event]]:
        """Return a block in which you receive the events of this queue, as an iterator of `Event`.

        Events are not guaranteed: they are lost while the connection is lost, and the oldest when you are more than 1,000
        behind. They are published only while a program listens. The iterator ends with the block. If several tasks share it,
        each event goes to one of them.

        Args:
            ends: Also fill `Event.ends`, which says how runs ended: the worker, and the result or the error. The server then
                publishes up to 1 KiB more for each of them.

        Returns:
            An async context manager, which gives the iterator.
        """
        return events_of(self._client, self._keys, ends=ends)

    # What may start: of the queue, or of one of its lanes

    async def pause(self, reason: str = "", *, duration: Seconds | None = None, lane: str | None = None) -> None:
        """Stop all workers from taking tasks of this queue, or of one lane. Running tasks go on, and you can enqueue more.

        Several shards do not stop at one moment.

        Args:
            reason: A text for people; ``info().paused`` has it.
            duration: Seconds, more than 0, or a timedelta, after which the queue resumes by itself. None: when `resume` is
                called.
            lane: Pause this lane only; ``lanes()`` has the reason.

        Raises:
            UsageError: `duration` or `lane` is not valid.
        """
        check_text(reason, "reason")
        for_ms = None if duration is None else max(1, round(seconds(duration, "duration", positive=True) * 1000))
        if lane is not None:
            text = f"{lane}: {reason}" if reason else lane
            await self._set_lane(lane, "pause", reason, for_ms, note=("lane_paused", text))
            return
        shards = await self._client.sharding.shards(self._keys)
        for keys in shards:
            self._client.link_to(keys.name)  # `link_to` stores the name, so that operators find and resume the queue
        await ask_each(self._client, shards, lambda keys: ops.pause(keys, reason, for_ms))
        await self._client.note("paused", queue=self.name, text=reason)

    async def resume(self, *, lane: str | None = None) -> None:
        """Let workers take tasks of this queue again.

        Args:
            lane: Resume this lane only.

        Raises:
            UsageError: `lane` is not valid.
        """
        if lane is not None:
            await self._set_lane(lane, "resume", note=("lane_resumed", lane))
            return
        await ask_each(self._client, await self._client.sharding.shards(self._keys), ops.resume)
        await self._client.note("resumed", queue=self.name)

    async def set_limit(self, *limits: Limit, lane: str | None = None) -> None:
        """Limit what may start of this queue in the whole mesh, in place of what its handler declares, until `clear_limit`.

        A lower limit does not stop tasks that run. Several shards each have a part of it.

        Args:
            limits: At most four; all of them hold. None: the queue has no limit.
            lane: Limit this lane only.

        Raises:
            UsageError: There are too many, one is no `Limit`, or it is smaller than the number of shards; or `lane` is not valid.
        """
        checked = check_limits(limits, "limits of set_limit")
        if lane is not None:
            note = "lane_limited", f"{lane}: {describe_limits(checked)}"
            await self._set_lane(lane, "limit", limits_text(checked, self.name), note=note)
            return
        shards = await self._client.sharding.shards(self._keys)
        texts = [limits_text(checked, self.name, len(shards), n) for n in range(len(shards))]
        for keys in shards:
            self._client.link_to(keys.name)
        await self._client.link.call_all([ops.set_limits(keys, text) for keys, text in zip(shards, texts, strict=True)])
        await self._client.note("limited", queue=self.name, text=describe_limits(checked))

    async def clear_limit(self, *, lane: str | None = None) -> None:
        """Remove what `set_limit` has set: what the queue's handler declares holds again.

        Args:
            lane: Remove the limit of this lane only.

        Raises:
            UsageError: `lane` is not valid.
        """
        if lane is not None:
            await self._set_lane(lane, "limit", DECLARES_NOTHING, note=("lane_limit_cleared", lane))
            return
        shards = await self._client.sharding.shards(self._keys)
        await ask_each(self._client, shards, lambda keys: ops.set_limits(keys, DECLARES_NOTHING))
        await self._client.note("limit_cleared", queue=self.name)

    async def lanes(self, *, limit: int = 100, lane: str | None = None) -> list[LaneInfo]:
        """Return the lanes that have tasks, or are paused or set by an operator; those with the most tasks first.

        Args:
            limit: At most this many. They are the first of up to 10,000 lanes by name.
            lane: Only the lane of this name, of any number of lanes.

        Raises:
            UsageError: `limit` is not a whole number, at least 1; or `lane` is not valid.
        """
        check_count(limit, "limit")
        found: list[LaneInfo] = []
        if lane is not None:
            keys = await self._lane_keys(lane)
            return [*map(_lane_info, (await self._client.ask(ops.list_lanes(keys, only=lane)))[0])]
        for keys in await self._client.sharding.shards(self._keys):
            after, more = "", True
            while more and len(found) < MOST_LANES:
                rows, more = await self._client.ask(ops.list_lanes(keys, after))
                after = rows[-1].name if rows else ""
                found += map(_lane_info, rows)
        return heapq.nlargest(limit, found, key=lambda lane: (lane.waiting, lane.running))

    async def set_weight(self, lane: str, weight: int | None) -> None:
        """Set how many tasks of a lane start for each task of a lane of weight 1.

        Args:
            lane: The lane's name.
            weight: 1 to 1,000, until the next call. None: what the queue's handler declares, else 1.

        Raises:
            UsageError: `lane` or `weight` is not valid.
        """
        value = DECLARES_NOTHING if weight is None else str(check_weight(weight, "weight"))
        text = f"{lane}: {'as declared' if weight is None else weight}"
        await self._set_lane(lane, "weight", value, note=("lane_weighted", text))

    async def cancel_lane(self, lane: str, *, reason: str = "", wait: Seconds = 0) -> CancelCount:
        """Cancel all jobs of a lane: scheduled ones, those that a run of their id blocks, waiting ones and running ones.

        Jobs that are dispatched meanwhile may stay.

        Args:
            lane: The lane's name.
            reason: A text for people; `JobCancelled` has it.
            wait: Seconds to wait until the running jobs have ended. A slow handler raises nothing.

        Returns:
            The number of jobs that did not run yet, that ran, and that ended within `wait`.

        Raises:
            UsageError: `lane`, `reason` or `wait` is not valid.
        """
        check_text(reason, "reason")

        async def step(keys: QueueKeys, last: CancelReply | None) -> CancelReply:
            after = last.after if last else ops.FIRST_CANCEL_STEP
            return await self._client.ask(ops.cancel_lane(keys, lane, after, reason=reason))

        patience, keys = seconds(wait, "wait"), await self._lane_keys(lane)
        count = await cancel_and_wait(self._client.link, (keys,), step, patience)
        text = f"{lane}: {reason}" if reason else lane
        await self._client.note("lane_cancelled", queue=self.name, count=count.waiting + count.running, text=text)
        return count

    async def _set_lane(
        self,
        lane: str,
        setting: Literal["weight", "limit", "pause", "resume"],
        value: str = "",
        duration_ms: int | None = None,
        *,
        note: tuple[str, str],
    ) -> None:
        """Set something of a lane. `note`: the kind and the text of the entry in the log of the mesh."""
        keys = await self._lane_keys(lane)
        self._client.link_to(keys.name)
        await self._client.ask(ops.set_lane(keys, lane, setting, value, duration_ms))
        await self._client.note(note[0], queue=self.name, text=note[1])

    async def _lane_keys(self, lane: str) -> QueueKeys:
        """Return the keys of the shard of a lane."""
        return shard_of(await self._client.sharding.shards(self._keys), check_lane(lane))

    # Single tasks

    async def history(self, minutes: int = 60) -> History:
        """Return what has happened in the queue lately: a point for each minute, with counters, run times and waiting times.

        The leader of the mesh stores a record of each queue in use once a minute. ``Mesh(history_queues=...)`` says for how many
        queues. The last point ends now. Of several shards, the points are summed.

        Args:
            minutes: How many minutes, 1 to 4,320 (3 days). Above 480 (8 hours), there is one point for ten minutes.

        Returns:
            The history. Points of a time without a record are gaps: their numbers are None.

        Raises:
            UsageError: `minutes` is not valid; or outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`.
        """
        return await read_history(self._client, self._keys, minutes)

    def batch(self, id: str) -> Batch:
        """Return a handle of the batch with this id whose home queue is this one. This does no I/O.

        Args:
            id: The id of the batch.

        Raises:
            UsageError: The id is not valid.
        """
        return batch_of_id(self._client, self._keys, check_id(id, generated=True))

    async def batches(self, limit: int = 100) -> list[BatchInfo]:
        """Return batches whose home queue is this one: those that have not ended first, then the newest.

        Args:
            limit: At most this many, up to 1,000. With more batches than that, it returns those that end or expire next.

        Raises:
            UsageError: `limit` is less than 1; or outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`.
        """
        return await list_batches(self._client, self._keys, min(check_count(limit, "limit"), MAX_ITEMS))

    async def recent(self, limit: int = 100) -> list[EndedRun]:
        """Return the runs that ended last, the last one first: how each ended, how long it took, and where it ran.

        Workers that serve the queue with ``recent=N`` store the last N runs for a day, once a second. A worker that dies loses
        those of its last second. Other queues have none.

        Args:
            limit: At most this many, up to 1,000.

        Raises:
            UsageError: `limit` is less than 1; or outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`.
        """
        most = min(check_count(limit, "limit"), MOST_RECENT)
        shards = await self._client.sharding.shards(self._keys)
        replies = await ask_each(self._client, shards, lambda keys: ops.list_ended(keys, most))
        found = [ended_run(keys, raw) for keys, runs in zip(shards, replies, strict=True) for raw in runs]
        return sorted(filter(None, found), key=lambda run: run.started.timestamp() + run.seconds, reverse=True)[:most]

    async def find(self, task: bytes | bytearray | memoryview, limit: int = 100) -> Matches:
        """Return where the plain tasks with this payload are, and the jobs that were such tasks. One request to each shard.

        It compares the 100,000 tasks at each end of the queue, and 1,000 running tasks; see ``Matches.complete``. A job that was
        dispatched is found by its id: ``mesh.find(id)``.

        Args:
            task: The payload.
            limit: At most this many tasks of each kind, up to 1,000.

        Raises:
            UsageError: The task is not bytes-like, or `limit` is less than 1; the codec of the mesh encodes equal payloads
                differently; or outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`.
        """
        checked = self._stored_as(check_task(task, self._client.settings.max_payload), "queue.find()")
        most = min(check_count(limit, "limit"), MAX_ITEMS)
        shards = await self._client.sharding.shards(self._keys)
        found = await ask_each(self._client, shards, lambda keys: ops.find_task(keys, checked, most))
        named = [claim_name(keys, claim) for keys, each in zip(shards, found, strict=True) for claim in each.claims]
        places = sorted(place for each in found for place in each.places)
        ids = [name for each in found for name in each.ids]
        whole = all(each.complete for each in found) and max(len(places), len(ids), len(named)) <= most
        return Matches(tuple(places[:most]), tuple(ids[:most]), tuple(named[:most]), whole)

    async def read(self, id: str, *, payload: bool = False) -> JobRecord:
        """Return everything that is stored about one job: its state, options and tries with their errors, the payload, its last
        results, and its dead-letter records.

        Args:
            id: The job's id.
            payload: Read the whole payload, not only its first 4,096 bytes.

        Returns:
            The record. If the id is unknown, its ``status.state`` is ``gone``.

        Raises:
            UsageError: The id is not valid; or outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`.
        """
        keys = await self._client.sharding.shard_of_id(self._keys, check_id(id, generated=True))
        values = self._client.values
        whole = await self._client.ask(ops.read_payload(keys, id)) if payload else None
        found = job_record(keys, id, await self._client.ask(ops.read_job(keys, id)), whole, values)
        return found if values is None else opened_record(found, values)

    async def payload(self, id: str | None = None, *, claim: str | None = None) -> bytes | None:
        """Return the whole payload of a job, of a running task, or of a dead-letter record.

        Args:
            id: The job's id. A running job comes first, then one that waits, then the newest dead-letter record.
            claim: The `claim` of a task in ``queue.running()``, which a plain task has, too.

        Returns:
            The payload, or None if there is no such task.

        Raises:
            UsageError: Neither or both are given, or one is not valid; or outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`.
        """
        if (id is None) == (claim is None):
            raise UsageError("name the task by its id or by its claim: payload('mail-7') or payload(claim=task.claim)")
        if claim is not None:
            keys, number = claim_of(self._keys, claim)
            return self._opened(await self._client.ask(ops.read_payload(keys, claim=number)))
        checked = check_id(id, generated=True)
        keys = await self._client.sharding.shard_of_id(self._keys, checked)
        return self._opened(await self._client.ask(ops.read_payload(keys, checked)))

    async def cancel_claims(self, *claims: str, reason: str = "", wait: Seconds = 0) -> CancelCount:
        """Cancel running tasks by their claims. A plain task has a claim, too, while it has no id.

        Each run is cancelled as by ``job.cancel()``: the task never runs again, even if its worker dies. A claim that has ended
        is left out, so that you never cancel a later run of the same task.

        Args:
            *claims: The `claim` of tasks in ``queue.running()``.
            reason: A text for people; `JobCancelled` has it.
            wait: Seconds to wait until the runs have ended. A slow handler raises nothing.

        Returns:
            The number of tasks that ran, and that ended within `wait`.

        Raises:
            UsageError: A claim or `wait` is not valid; or outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`.
        """
        check_text(reason, "reason")
        named: dict[QueueKeys, list[int]] = {}
        for keys, claim in dict.fromkeys(claim_of(self._keys, each) for each in claims):
            named.setdefault(keys, []).append(claim)

        async def step(keys: QueueKeys, last: CancelReply | None) -> CancelReply:
            start = int(last.cursor) if last else 0
            some, end = named[keys][start : start + MAX_ITEMS], start + MAX_ITEMS
            found = await self._client.ask(ops.cancel_claims(keys, some, reason=reason))
            return CancelReply(end < len(named[keys]), 0, found, str(end), "-")

        return await cancel_and_wait(self._client.link, named, step, seconds(wait, "wait"))

    async def run_now(self, *ids: str) -> int:
        """Make scheduled jobs due now. They go to the back of the queue, also jobs that wait for their next try.

        A job that is not scheduled stays as it is.

        Args:
            *ids: The ids of the jobs.

        Returns:
            The number of jobs that were scheduled and now wait.

        Raises:
            UsageError: An id is not valid; or outside `connect` and `join`.
            Unavailable: The server did not reply within `patience`.
        """
        named: dict[QueueKeys, list[str]] = {}
        for each in [check_id(each, generated=True) for each in ids]:
            named.setdefault(await self._client.sharding.shard_of_id(self._keys, each), []).append(each)
        return sum(
            await self._client.link.call_all(
                [
                    ops.promote_jobs(keys, each[start : start + MAX_ITEMS])
                    for keys, each in named.items()
                    for start in range(0, len(each), MAX_ITEMS)
                ]
            )
        )


def _lane_info(row: LaneRow) -> LaneInfo:
    held_for = None if row.opens_in_ms is None else row.opens_in_ms / 1000
    limits = parse_limits(row.limits)
    return LaneInfo(readable(row.name), row.waiting, row.running, row.weight, limits, row.paused, row.held, held_for)


def ended_run(keys: QueueKeys, raw: bytes) -> EndedRun | None:
    """Return a stored run; None if another application has written something else."""
    run = decode_run(raw)
    if run is None:
        return None
    started, name = from_ms(run.claim / 1000), claim_name(keys, run.claim)
    return EndedRun(run.id, name, run.outcome, started, run.ms / 1000, run.worker, run.error or None)


def queue_named(make: Callable[[str], Queue], name: str) -> Queue:
    """Return the queue that has this name in lists: ``{Q1}-fail`` is the failure queue of Q1. `make` is ``mesh.queue``."""
    keys = QueueKeys.of("", name)
    return make(keys.queue).failures if keys.failures else make(name)
