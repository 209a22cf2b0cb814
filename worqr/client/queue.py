"""`Queue`: enqueue and dispatch tasks, inspect, cancel, pause and delete a queue, and follow its events.

Nothing here consumes: that is the peer's. Every method is one request or a few to each shard of the queue, which mostly has
one; none holds a lock, none polls unless it says so.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Literal, TypeVar, Unpack

from worqr import ops
from worqr.client.batch_handles import cancel_batches
from worqr.client.cancellation import cancel_and_wait
from worqr.client.dead_letters import Aside
from worqr.client.dispatcher import enqueue_at, send_dispatch, send_tasks, waiting_as
from worqr.client.events import Event, events_of
from worqr.client.inspection import LISTED_STATES, ask_each, info_at, list_jobs
from worqr.client.job import Job
from worqr.client.notifications import sleep
from worqr.client.queue_operations import QueueOperations
from worqr.client.raw_options import PLAIN, EnqueueOptions, checked_options
from worqr.client.running import list_active, longest_running
from worqr.client.stats import interleave, merge_queue_info
from worqr.errors import UsageError
from worqr.ids import with_random_ids
from worqr.job_options import (
    JobOptions,
    check_bounded,
    check_choice,
    check_id,
    encode_options,
    wait_in,
    without_replicas,
)
from worqr.keys import QueueKeys
from worqr.mesh_records import QueueInfo
from worqr.ops import MAX_ITEMS, CancelReply, Dispatched
from worqr.records import CancelCount, TaskInfo
from worqr.script_call import Call
from worqr.validation import Seconds, check_count, check_task, check_tasks, check_text, seconds

T = TypeVar("T")

MAX_LISTED = 10_000


class Queue(QueueOperations):
    """A raw queue of a mesh: bytes in, bytes out. ``mesh.queue(name)`` makes it; its calls need ``mesh.connect()`` or
    ``join()``.

    A queue of several shards (``mesh.queue(name, shards=8)``) consists of several lists. Each call puts its tasks into the
    next list; a job with an id always goes to the same list. All calls span all shards, but they do not read them at one
    moment. The order of tasks is kept within a shard only.
    """

    __slots__ = ()

    @property
    def name(self) -> str:
        """The queue's name."""
        return self._keys.display_name

    @property
    def failed(self) -> Aside:
        """The dead-letter queue: tasks that failed, timed out or stalled too often, or expired. It keeps the last `keep_failed`
        (1000).
        """
        return Aside(self._client, self._keys, "failed")

    @property
    def broken(self) -> Aside:
        """The tasks whose payload could not be decoded (`Broken`). All are kept until you retry or drop them."""
        return Aside(self._client, self._keys, "broken")

    @property
    def failures(self) -> Queue:
        """The failure queue, in which the jobs of `on_failure` handlers wait.

        Raises:
            UsageError: This is a failure queue; it has none itself.
        """
        if self._keys.failures:
            raise UsageError(f"{self.name!r} is a failure queue; those have no failure queue themselves")
        return type(self)(self._client, QueueKeys(self._keys.prefix, self._keys.queue, failures=True))

    def __repr__(self) -> str:
        return f"<Queue {self.name!r}>"

    async def enqueue(self, *tasks: bytes | bytearray | memoryview, **options: Unpack[EnqueueOptions]) -> int:
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
        client = self._client
        given = checked_options(options) if options else PLAIN
        checked = check_tasks(tasks, client.settings.max_payload)
        if len(checked) == 1 and given is PLAIN:  # as most calls are: they take the shortest way
            keys = await client.sharding.next_shard(self._keys)
            call = enqueue_at(client, keys, checked, replicas=client.settings.replicas)
            return await client.link_to(keys.name).call(call)
        return await send_tasks(client, self._keys, checked, given)

    async def dispatch(self, task: bytes | bytearray | memoryview, **options: Unpack[JobOptions]) -> Job[bytes]:
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
        encoded, replicas = without_replicas(given, self._client.settings.replicas)
        keys = await self._client.sharding.shard_for_job(self._keys, encoded)
        encoded = await self._client.sharding.options_for(keys, encoded)
        jobs = with_random_ids([(encoded, checked)])

        def make(waiter: str) -> Call[list[Dispatched]]:
            return ops.dispatch_jobs(keys, waiting_as(jobs, waiter), replicas=replicas)

        return await send_dispatch(self._client, self._keys, make, keys, wait=wait_in(given))

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
        return next((tasks[0] for _, tasks in replies if tasks), None)

    async def tasks(self, limit: int = 100) -> list[bytes]:
        """Return the payloads of waiting tasks, newest first, but no more than about 8 MiB.

        Args:
            limit: At most this many, up to 10,000. With several shards, one of each in turn.

        Raises:
            UsageError: `limit` is less than 1.
        """
        most = min(check_count(limit, "limit"), MAX_LISTED)
        return interleave([tasks for _, tasks in await self._ask_all(lambda keys: ops.list_tasks(keys, most))], most)

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
        return [info for _, info in found]

    async def jobs(
        self,
        *,
        state: Literal["waiting", "scheduled", "blocked", "active"] = "waiting",
        limit: int = 100,
        after: str = "",
        newest: bool = False,
    ) -> list[TaskInfo]:
        """Return one page of the tasks in a state, with their job ids.

        ``waiting`` and ``active`` list plain tasks too, which have no id. The queue changes while you read its pages: a task
        that moves meanwhile may be listed twice, or not at all.

        Args:
            state: ``waiting``: in the order in which they will be taken. ``scheduled``: jobs that wait for their time, the
                next one first. ``blocked``: jobs that wait until the run of their id has ended, by id. ``active``: tasks that
                run, the longest-running first. Shards are listed one after the other, except for ``active``.
            limit: The size of the page, at most 10,000.
            after: The `cursor` of the last entry of the page before; empty: the first page.
            newest: List ``waiting`` tasks from the end, those that will be taken last first; in lanes, lane by lane.

        Returns:
            The tasks of the page; an empty list after the last page.

        Raises:
            UsageError: `state` is not one of these, `after` is not a cursor of it, or it has no `newest`.
        """
        check_choice(state, "state", LISTED_STATES)
        most = min(check_count(limit, "limit"), MAX_LISTED)
        shards = await self._client.sharding.shards(self._keys)
        if newest and state != "waiting":
            raise UsageError(f"newest=True lists waiting tasks only, not state={state!r}")
        if state == "active":
            return await list_active(self._client, shards, most, after)
        return await list_jobs(self._client, shards, state, most, after, newest=newest)

    async def info(self) -> QueueInfo:
        """Return the queue's counters.

        With several shards, counts are summed, `oldest_job` is the largest, and the shards are not read at one moment.
        """
        return await info_at(self._client, self._keys)

    async def _ask_all(self, make: Callable[[QueueKeys], Call[T]]) -> list[T]:
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
            UsageError: The task is not bytes-like, or `wait` is not valid.
            Unavailable: The server did not reply within `patience`.
        """
        checked = check_task(task, self._client.settings.max_payload)
        check_text(reason, "reason")

        async def step(keys: QueueKeys, last: CancelReply | None) -> CancelReply:
            cursor, after = ("0", "-") if last is None else (last.cursor, last.after)
            return await self._client.ask(ops.cancel_task(keys, checked, cursor, after, reason=reason))

        patience, shards = seconds(wait, "wait"), await self._client.sharding.shards(self._keys)
        return await cancel_and_wait(self._client.link, shards, step, patience)

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
        """Delete all tasks and jobs that wait, are scheduled or are blocked.

        Running tasks may finish; tasks that are given back afterwards are dropped. The next enqueue creates the queue again.
        Several shards are deleted one after the other. The number of shards is forgotten if the queue is then empty and no
        worker serves it. Batches whose home queue this is are cancelled.
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
        info = merge_queue_info(self.name, await ask_each(self._client, keys_of_all, ops.inspect))
        if not (info.workers or info.running or info.waiting or info.scheduled or info.failed or info.broken):
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
