"""A queue as producers and operators see it: put tasks and jobs in, look, cancel, pause, delete, listen.

Nothing here consumes: that is the peer's. Every method is one request or a few to each shard of the queue, which mostly has
one; none holds a lock, none polls unless it says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, cast

from worqr import ops
from worqr.aside import Aside
from worqr.call import Call
from worqr.cancelling import cancel_and_wait
from worqr.dispatching import dispatched
from worqr.errors import NotReplicated, UsageError, WorqrError
from worqr.events import Event, events_of
from worqr.ids import with_random_ids
from worqr.job import Job
from worqr.keys import QueueKeys
from worqr.looking import LISTED, ask_each, info_at, list_jobs
from worqr.ops import MAX_BYTES, MAX_ITEMS, Cancelled
from worqr.ops.replies import in_pieces
from worqr.options import JobOptions, check_choice, check_id, check_replicas, encode_options, without_replicas
from worqr.records import CancelCount, QueueInfo, TaskInfo
from worqr.summing import in_turn, info_of, running_of
from worqr.task import Seconds, check_count, check_task, check_text, seconds

if TYPE_CHECKING:
    from worqr.client import Client

T = TypeVar("T")

MAX_LISTED = 10_000


class Queue:
    """One queue of a mesh, by name. Made by ``mesh.queue(name)``; its calls need ``mesh.connect()`` or ``join()`` around.

    A queue of several shards (``mesh.queue(name, shards=8)``) is several lists. What is enqueued in one call, or a thousand of
    it, goes to the next list in turn; a job with an id always to the same one. All calls span all shards, but not at one
    moment; the order of tasks is kept within a shard only.
    """

    __slots__ = ("_client", "_keys")

    def __init__(self, client: Client, keys: QueueKeys) -> None:
        self._client = client
        self._keys = keys

    @property
    def name(self) -> str:
        """The queue's name."""
        return self._keys.shown

    @property
    def failed(self) -> Aside:
        """What failed, timed out or stalled for the last time, or expired: the last `keep_failed` (default 1000)."""
        return Aside(self._client, self._keys, "failed")

    @property
    def broken(self) -> Aside:
        """What a handler could not make sense of (`Broken`): all of it, until somebody deals with it."""
        return Aside(self._client, self._keys, "broken")

    @property
    def failures(self) -> Queue:
        """The failure queue, in which the jobs of `on_failure` handlers wait. It has none itself.

        Raises:
            UsageError: this is a failure queue.
        """
        if self._keys.failures:
            raise UsageError(f"{self.name!r} is a failure queue; those have no failure queue themselves")
        return Queue(self._client, QueueKeys(self._keys.prefix, self._keys.queue, failures=True))

    def __repr__(self) -> str:
        return f"<Queue {self.name!r}>"

    async def enqueue(
        self,
        *tasks: bytes | bytearray | memoryview,
        unique: bool = False,
        front: bool = False,
        max_length: int | None = None,
        replicas: int | None = None,
    ) -> int:
        """Put tasks into the queue, to be taken in this order, and wake as many idle workers as there are tasks.

        One call is one atomic request; one of over 1,000 tasks or 8 MiB is sent as several, in order. Of several shards each
        request goes to the next.

        Args:
            tasks: bytes of any kind; delivered as they are.
            unique: dispatch them as jobs whose ids are made from the payloads: while one waits or runs, another is refused. All
                or none; of several shards one at a time. From Worqr's unique tasks.
            front: put them before all that waits.
            max_length: refuse if more than so many tasks would wait, those due later among them. Of several shards each refuses
                what is over its share.
            replicas: wait until so many replicas have them. None: as many as the mesh says.

        Returns:
            How many were stored: all of them.

        Raises:
            UsageError: not bytes, or a bounded call too large for one request; several unique ones for several shards.
            PayloadTooLarge: over `max_payload` bytes.
            Duplicate: with `unique`, one of them waits or runs already; nothing was stored.
            QueueFull: over `max_length`, or the server is out of memory; nothing of the request was stored.
            NotReplicated: all were stored, but fewer `replicas` had them within 2 s.
            Unavailable: no answer within `patience`; with ``sent=None`` it may have been stored.

        A call that is cancelled before it was written stores nothing; afterwards it may. From Worqr's enqueue.
        """
        checked = [check_task(task, self._client.settings.max_payload) for task in tasks]
        if max_length is not None:
            check_count(max_length, "max_length")
        wanted = self._client.settings.replicas if replicas is None else check_replicas(replicas)
        chunks = [checked] if len(checked) == 1 else list(in_pieces(checked, len))
        if len(chunks) > 1 and (unique or max_length is not None):
            raise UsageError(
                f"a {'unique' if unique else 'bounded'} enqueue must fit one request: at most {MAX_ITEMS} tasks and "
                f"{MAX_BYTES:,} bytes, not {len(checked):,} tasks and {sum(map(len, checked)):,} bytes"
            )
        if not chunks:
            await self._client.link.mailbox.checkpoint()
            return 0
        if unique:
            return await self._enqueue_unique(checked, wanted, front=front, max_length=max_length)
        if len(chunks) == 1:
            return await self._enqueue(checked, front, max_length, wanted)
        stored, late = 0, None
        for chunk in reversed(chunks) if front else chunks:
            try:
                stored += await self._enqueue(chunk, front, None, 0 if late else wanted)
            except NotReplicated as error:  # what it says must be true of all of them
                stored, late = stored + len(chunk), error
            except WorqrError as error:
                place = "last" if front else "first"
                error.add_note(
                    f"of {len(checked):,} tasks in several requests the {place} {stored:,} were stored before"
                )
                raise
        if late is not None:
            raise late
        return stored

    async def _enqueue(self, tasks: list[bytes], front: bool, max_length: int | None, replicas: int) -> int:
        sharding = self._client.sharding
        keys = await sharding.next_of(self._keys)
        if max_length is not None:
            max_length = await sharding.share_of(keys, max_length)
        call = ops.enqueue(keys, tasks, front=front, max_length=max_length, replicas=replicas)
        return await self._client.link_to(keys.name).call(call)

    async def _enqueue_unique(self, tasks: list[bytes], replicas: int, **options: Any) -> int:
        if len(tasks) > 1 and len(await self._client.sharding.of(self._keys)) > 1:
            raise UsageError(
                f"queue {self.name!r} has several shards, and nothing can be all or none in several of them: enqueue "
                "unique tasks one by one"
            )
        given = {name: value for name, value in options.items() if value is not None}
        jobs = [
            ({**given, "id": f"sha256:{hashlib.sha256(task).hexdigest()}", "exists": "raise"}, task) for task in tasks
        ]
        keys = await self._client.sharding.by_id(self._keys, cast("str", jobs[0][0]["id"]))
        there = [(await self._client.sharding.options_for(keys, options), task) for options, task in jobs]
        call = ops.dispatch_jobs(keys, there, whole=True, replicas=replicas)
        await dispatched(self._client, self._keys, call, keys)
        return len(jobs)

    async def dispatch(self, task: bytes | bytearray | memoryview, **options: Unpack[JobOptions]) -> Job[bytes]:
        """Put a job into the queue: a task with a record, which can have an id, a due time, and options of its own.

        A job whose id is there already is updated (see `Update`), one whose id runs is blocked until that run ends, whatever way
        it ends: no id ever runs twice at once.

        Args:
            task: bytes of any kind; delivered as they are.
            options: see `JobOptions`.

        Returns:
            A handle of this very dispatch, with its `outcome`.

        Raises:
            UsageError: an option that does not exist or cannot be; PayloadTooLarge.
            Duplicate: ``if_exists="raise"``, and the id is taken.
            QueueFull: over `max_length`, or the server is out of memory. Nothing was stored.
            NotReplicated: it was stored, but fewer `replicas` had it within 2 s; has the handle.
            Unavailable: no answer within `patience`; with ``sent=None`` it may have been stored.
        """
        checked = check_task(task, self._client.settings.max_payload)
        encoded, replicas = without_replicas(encode_options(options), self._client.settings.replicas)
        keys = await self._client.sharding.place_of(self._keys, encoded)
        encoded = await self._client.sharding.options_for(keys, encoded)
        jobs = with_random_ids([(encoded, checked)])
        call = ops.dispatch_jobs(keys, jobs, replicas=replicas)
        return await dispatched(self._client, self._keys, call, keys)

    def job(self, id: str) -> Job[bytes]:
        """A handle of the job of this id, which need not exist; no I/O."""
        return Job(self._client, self._keys, check_id(id, generated=True))

    # Looking

    async def count(self) -> int:
        """How many tasks wait."""
        return sum([waiting for waiting, _ in await self._ask_all(lambda keys: ops.list_tasks(keys, 0))])

    async def peek(self) -> bytes | None:
        """The task that will be taken next, which stays where it is; None if none waits. Of several shards the next of one."""
        seen = await self._ask_all(lambda keys: ops.list_tasks(keys, 1, from_front=True))
        return next((tasks[0] for _, tasks in seen if tasks), None)

    async def tasks(self, limit: int = 100) -> list[bytes]:
        """Up to `limit` waiting tasks, newest first, and no more than about 8 MiB of them. Of several shards one each in turn,
        those of each newest first.
        """
        most = min(check_count(limit, "limit"), MAX_LISTED)
        return in_turn([tasks for _, tasks in await self._ask_all(lambda keys: ops.list_tasks(keys, most))], most)

    async def running(self) -> list[TaskInfo]:
        """Return up to 1,000 tasks that run now: each with its job id or, of a plain task, the first 100 bytes of its payload;
        the worker that runs it; and since when, by the server's clock.
        """
        return running_of(await self._ask_all(ops.list_claims), MAX_ITEMS)

    async def jobs(
        self,
        *,
        state: Literal["waiting", "scheduled", "blocked", "active"] = "waiting",
        limit: int = 100,
        after: str = "",
    ) -> list[TaskInfo]:
        """Return one page of the tasks in this state, with their job ids.

        ``waiting`` and ``active`` list plain tasks too, which have no id. The queue goes on while you page through it: a task
        that moves meanwhile may be listed twice, or not at all.

        Args:
            state: ``waiting``: in the order in which they will be taken. ``scheduled``: those whose time is still to come, the
                next one first. ``blocked``: those that wait until the run of their id ends, by id. ``active``: those that run,
                by worker. Of several shards one after the other.
            limit: the size of the page, at most 10,000.
            after: the `cursor` of the last entry of the page before; empty: the first page.

        Raises:
            UsageError: another state, or an `after` that is no cursor of this state.
        """
        check_choice(state, "state", LISTED)
        most = min(check_count(limit, "limit"), MAX_LISTED)
        return await list_jobs(self._client, await self._client.sharding.of(self._keys), state, most, after)

    async def info(self) -> QueueInfo:
        """Return a snapshot of the queue's counters; see `QueueInfo`. Of several shards the sum, the oldest job, and the reason
        of one that is paused; not at one moment.
        """
        return await info_at(self._client, self._keys)

    async def _ask_all(self, make: Callable[[QueueKeys], Call[T]]) -> list[T]:
        """One request to each shard, all together."""
        return await ask_each(self._client, await self._client.sharding.of(self._keys), make)

    # Cancelling

    async def cancel(self, task: bytes | bytearray | memoryview, *, reason: str = "", wait: Seconds = 0) -> CancelCount:
        """Cancel every task of this queue with this payload: waiting ones are removed, running ones cancelled wherever they run.

        A task cancelled while it runs is settled as cancelled when its handler has unwound, and never comes back, also if its
        worker dies meanwhile. Finds waiting tasks by a search through the queue (16 ms for a million). Jobs that were dispatched
        are cancelled by their id: ``queue.job(id).cancel()``.

        Args:
            reason: for people, and for whoever waits for a result.
            wait: seconds to wait until the running ones have really ended.

        Returns:
            How many waited, ran, and, of the latter, had ended before `wait` was over. Never raises because of a slow handler.
        """
        checked = check_task(task, self._client.settings.max_payload)
        check_text(reason, "reason")

        async def step(keys: QueueKeys, last: Cancelled | None) -> Cancelled:
            cursor, after = ("0", "-") if last is None else (last.cursor, last.after)
            return await self._client.ask(ops.cancel_task(keys, checked, cursor, after, reason=reason))

        patience, shards = seconds(wait, "wait"), await self._client.sharding.of(self._keys)
        return await cancel_and_wait(self._client.link, shards, step, patience)

    async def cancel_all(self, *, reason: str = "", wait: Seconds = 0) -> CancelCount:
        """Cancel every task and job of this queue, waiting or running. Arguments and answer as `cancel`."""
        check_text(reason, "reason")

        async def step(keys: QueueKeys, last: Cancelled | None) -> Cancelled:
            after = last.after if last else "-"
            while (found := await self._client.ask(ops.cancel_all(keys, after, reason=reason))) is None:
                await self._purge(keys)
            return found

        patience, shards = seconds(wait, "wait"), await self._client.sharding.of(self._keys)
        count = await cancel_and_wait(self._client.link, shards, step, patience)
        for keys in shards:
            await self._purge(keys)
        return count

    # Operating

    async def pause(self, reason: str = "") -> None:
        """Stop claims on this queue, everywhere; what runs goes on, and so does enqueueing. `reason` is for people. Several
        shards do not stop at one moment.
        """
        check_text(reason, "reason")
        for keys in await self._client.sharding.of(self._keys):
            self._client.link_to(keys.name)  # noted, so that it can be found, and resumed, by those who list queues
        await self._ask_all(lambda keys: ops.pause(keys, reason))

    async def resume(self) -> None:
        """Let claims go on."""
        await self._ask_all(ops.resume)

    async def delete(self) -> None:
        """Delete all that waits, is due or is blocked, at once. What runs may finish; what is given back afterwards is dropped. A
        new enqueue makes the queue anew.

        Of several shards one after the other. Their number is forgotten, so that the next one who declares it decides, if nothing
        more is in the queue, neither running nor set aside, and no peer serves it.
        """
        shards = await self._client.sharding.of(self._keys)
        for keys in shards:
            while not await self._client.ask(ops.delete_queue(keys)):
                await self._purge(keys)
            await self._purge(keys)
        if len(shards) > 1 and not self._keys.failures:
            await self._forget_shards(shards)

    async def _forget_shards(self, shards: tuple[QueueKeys, ...]) -> None:
        every = [*shards, *(replace(keys, failures=True) for keys in shards)]
        seen = info_of(self.name, await ask_each(self._client, every, ops.inspect))
        if not (seen.workers or seen.running or seen.waiting or seen.scheduled or seen.failed or seen.broken):
            await self._client.sharding.forget(self.name)

    async def _purge(self, keys: QueueKeys) -> None:
        while await self._client.ask(ops.purge_queue(keys)):
            pass

    def events(self) -> AbstractAsyncContextManager[AsyncIterator[Event]]:
        """Return a block in which you hear what happens to this queue: an iterator of `Event`. Published only while somebody
        listens.

        Never a promise: events are lost while the connection is, and the oldest when you are over 1,000 behind. The iterator ends
        with the block; of several tasks that share it each event goes to one.
        """
        return events_of(self._client, self._keys)
