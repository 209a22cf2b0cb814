"""A queue as producers and operators see it: put tasks and jobs in, look, cancel, pause, delete, listen.

Nothing here consumes: that is the peer's. Every method is one request or a few; none holds a lock, none polls unless it says
so.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Unpack, cast

from worqr import ops
from worqr.aside import Aside
from worqr.cancelling import cancel_and_wait
from worqr.errors import Duplicate, QueueFull, UsageError, WorqrError
from worqr.job import Job, Outcome, Results
from worqr.keys import QueueKeys
from worqr.listening import Latest, listening
from worqr.ops import MAX_BYTES, MAX_ITEMS, Cancelled, Dispatched
from worqr.ops.replies import in_pieces
from worqr.options import JobOptions, check_id, encode_options
from worqr.task import (
    CancelCount,
    Event,
    QueueInfo,
    Seconds,
    Status,
    check_count,
    check_task,
    check_text,
    from_ms,
    seconds,
)

if TYPE_CHECKING:
    from worqr.mesh import Mesh

logger: logging.Logger = logging.getLogger(__name__)

EVENTS_BUFFERED = 1000
MAX_LISTED = 10_000


class Queue:
    """One queue of a mesh, by name. Made by ``mesh.queue(name)``; its calls need ``mesh.connect()`` or ``join()`` around."""

    __slots__ = ("_keys", "_mesh")

    def __init__(self, mesh: Mesh[Any], keys: QueueKeys) -> None:
        self._mesh = mesh
        self._keys = keys

    @property
    def name(self) -> str:
        """The queue's name."""
        return self._keys.name

    @property
    def failed(self) -> Aside:
        """What failed, timed out or stalled for the last time, or expired: the last `keep_failed` (default 1000)."""
        return Aside(self._mesh, self._keys, "failed")

    @property
    def broken(self) -> Aside:
        """What a handler could not make sense of (`Broken`): all of it, until somebody deals with it."""
        return Aside(self._mesh, self._keys, "broken")

    @property
    def failures(self) -> Queue:
        """The failure queue, in which the jobs of `on_failure` handlers wait. It has none itself.

        Raises:
            UsageError: this is a failure queue.
        """
        if self._keys.failures:
            raise UsageError(f"{self.name!r} is a failure queue; those have no failure queue themselves")
        return Queue(self._mesh, QueueKeys(self._keys.prefix, self._keys.queue, failures=True))

    def __repr__(self) -> str:
        return f"<Queue {self.name!r}>"

    async def enqueue(
        self,
        *tasks: bytes | bytearray | memoryview,
        unique: bool = False,
        front: bool = False,
        max_length: int | None = None,
    ) -> int:
        """Put tasks into the queue, to be taken in this order, and wake as many idle workers as there are tasks.

        One call is one atomic request; one of over 1,000 tasks or 8 MiB is sent as several, in order.

        Args:
            tasks: bytes of any kind; delivered as they are.
            unique: dispatch them as jobs whose ids are made from the payloads: while one waits or runs, another is refused. All
                or none; from Worqr's unique tasks.
            front: put them before all that waits.
            max_length: refuse if more than so many tasks would wait, those due later among them.

        Returns:
            How many were stored: all of them.

        Raises:
            UsageError: not bytes, or a bounded call too large for one request; PayloadTooLarge: over `max_payload` bytes.
            Duplicate: with `unique`, one of them waits or runs already; nothing was stored.
            QueueFull: over `max_length`, or the server is out of memory; nothing of the request was stored.
            Unavailable: no answer within `patience`; with ``sent=None`` it may have been stored.

        A call that is cancelled before it was written stores nothing; afterwards it may. From Worqr's enqueue.
        """
        checked = [check_task(task, self._mesh.max_payload) for task in tasks]
        if max_length is not None:
            check_count(max_length, "max_length")
        chunks = [checked] if len(checked) == 1 else list(in_pieces(checked, len))
        if len(chunks) > 1 and max_length is not None:
            raise UsageError(
                f"a bounded enqueue must fit one request: at most {MAX_ITEMS} tasks and {MAX_BYTES:,} bytes, "
                f"not {len(checked):,} tasks and {sum(map(len, checked)):,} bytes"
            )
        if not chunks:
            await self._mesh.link.mailbox.checkpoint()
            return 0
        if unique:
            return await self._enqueue_unique(chunks, front=front, max_length=max_length)
        link = self._mesh.link_to(self.name)
        if len(chunks) == 1:
            return await link.call(ops.enqueue(self._keys, checked, front=front, max_length=max_length))
        stored = 0
        for chunk in reversed(chunks) if front else chunks:
            try:
                stored += await link.call(ops.enqueue(self._keys, chunk, front=front))
            except WorqrError as error:
                place = "last" if front else "first"
                error.add_note(
                    f"of {len(checked):,} tasks in several requests the {place} {stored:,} were stored before"
                )
                raise
        return stored

    async def _enqueue_unique(self, chunks: list[list[bytes]], **options: Any) -> int:
        if len(chunks) > 1:
            raise UsageError(
                f"a unique enqueue must fit one request: at most {MAX_ITEMS} tasks and {MAX_BYTES:,} bytes"
            )
        given = {name: value for name, value in options.items() if value is not None}
        jobs = [
            ({**given, "id": f"sha256:{hashlib.sha256(task).hexdigest()}", "exists": "raise"}, task)
            for task in chunks[0]
        ]
        done = await self._mesh.link_to(self.name).call(ops.dispatch_jobs(self._keys, jobs, whole=True))
        self.handle_of(done[-1])  # the last is the one that was refused, if one was
        return len(done)

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
            Unavailable: no answer within `patience`; with ``sent=None`` it may have been stored.

        From Queasy's dispatch.
        """
        checked = check_task(task, self._mesh.max_payload)
        call = ops.dispatch_jobs(self._keys, [(encode_options(options), checked)])
        return self.handle_of((await self._mesh.link_to(self.name).call(call))[0])

    def handle_of(self, done: Dispatched, results: Results | None = None) -> Job[Any]:
        """The handle of a dispatch that was not refused.

        Raises:
            QueueFull, Duplicate: it was.
        """
        if done.outcome == "full":
            raise QueueFull(f"queue {self.name!r} is at its max_length: nothing was stored")
        if done.outcome == "duplicate":
            job = Job[Any](self._mesh, self._keys, done.id, done.number, None, results)
            raise Duplicate(f"the id {done.id!r} is taken on queue {self.name!r}: nothing was stored", job)
        return Job(self._mesh, self._keys, done.id, done.number, cast("Outcome", done.outcome), results)

    def job_of(self, id: str, results: Results) -> Job[Any]:
        """`job`, of a function whose results are known."""
        return Job(self._mesh, self._keys, id, results=results)

    def job(self, id: str) -> Job[bytes]:
        """A handle of the job of this id, which need not exist; no I/O."""
        return Job(self._mesh, self._keys, check_id(id, generated=True))

    # Looking

    async def count(self) -> int:
        """How many tasks wait."""
        return (await self._mesh.ask(ops.list_tasks(self._keys, 0)))[0]

    async def peek(self) -> bytes | None:
        """The task that will be taken next, which stays where it is; None if none waits."""
        tasks = (await self._mesh.ask(ops.list_tasks(self._keys, 1, from_front=True)))[1]
        return tasks[0] if tasks else None

    async def tasks(self, limit: int = 100) -> list[bytes]:
        """Up to `limit` waiting tasks, newest first, and no more than about 8 MiB of them."""
        check_count(limit, "limit")
        return (await self._mesh.ask(ops.list_tasks(self._keys, min(limit, MAX_LISTED))))[1]

    async def running(self) -> list[Status]:
        """The first 1,000 tasks that run now: by which worker, and since when by the server's clock."""
        claims = await self._mesh.ask(ops.list_claims(self._keys))
        return [
            Status(
                state="active",
                worker=held.worker,
                since=from_ms(held.claim / 1000),
                run_at=None if held.run_at_ms is None else from_ms(held.run_at_ms),
                progress=held.progress,
                message=held.message,
                failures=held.failures,
            )
            for held in claims
        ]

    async def info(self) -> QueueInfo:
        """All there is to know of the queue at one moment. `oldest`: seconds since the job in front was due; None: it is none."""
        seen = await self._mesh.ask(ops.inspect(self._keys))
        return QueueInfo(
            name=self.name,
            waiting=seen.waiting,
            due=seen.due,
            blocked=seen.blocked,
            running=seen.running,
            failed=seen.failed,
            broken=seen.broken,
            paused=seen.paused,
            oldest=None if seen.oldest_ms is None else seen.oldest_ms / 1000,
            workers=len(seen.workers),
            counts=seen.counts,
        )

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
        checked = check_task(task, self._mesh.max_payload)
        check_text(reason, "reason")

        async def step(last: Cancelled | None) -> Cancelled:
            cursor, after = ("0", "-") if last is None else (last.cursor, last.after)
            return await self._mesh.ask(ops.cancel_task(self._keys, checked, cursor, after, reason=reason))

        return await cancel_and_wait(self._mesh.link, self._keys, step, seconds(wait, "wait"))

    async def cancel_all(self, *, reason: str = "", wait: Seconds = 0) -> CancelCount:
        """Cancel every task and job of this queue, waiting or running. Arguments and answer as `cancel`."""
        check_text(reason, "reason")

        async def step(last: Cancelled | None) -> Cancelled:
            after = last.after if last else "-"
            while (found := await self._mesh.ask(ops.cancel_all(self._keys, after, reason=reason))) is None:
                await self._purge()
            return found

        count = await cancel_and_wait(self._mesh.link, self._keys, step, seconds(wait, "wait"))
        await self._purge()
        return count

    # Operating

    async def pause(self, reason: str = "") -> None:
        """Stop claims on this queue, everywhere; what runs goes on, and so does enqueueing. `reason` is for people."""
        check_text(reason, "reason")
        link = self._mesh.link_to(self.name)  # noted, so that it can be found, and resumed, by those who list queues
        await link.call(ops.pause(self._keys, reason))

    async def resume(self) -> None:
        """Let claims go on."""
        await self._mesh.ask(ops.resume(self._keys))

    async def delete(self) -> None:
        """Delete all that waits, is due or is blocked, at once. What runs may finish; what is given back afterwards is dropped. A
        new enqueue makes the queue anew.
        """
        while not await self._mesh.ask(ops.delete_queue(self._keys)):
            await self._purge()
        await self._purge()

    async def _purge(self) -> None:
        while await self._mesh.ask(ops.purge_queue(self._keys)):
            pass

    @asynccontextmanager
    async def events(self) -> AsyncGenerator[AsyncIterator[Event]]:
        """What happens to this queue, as it happens: an iterator of `Event`. Published only while somebody listens.

        Never a promise: events are lost while the connection is, and the oldest when you are over 1,000 behind. The iterator ends
        with the block; of several tasks that share it each event goes to one.
        """
        link = self._mesh.link
        latest = Latest[Event](link, EVENTS_BUFFERED)

        def hear(message: bytes) -> None:
            kind, _, count = message.decode("utf-8", "replace").partition(" ")
            try:
                latest.put(Event(self.name, kind, int(count)))
            except ValueError:
                logger.warning("events: queue %r: a message nobody of us sent: %r", self.name, message[:100])

        with latest:
            async with listening(link, self._keys.events_channel, hear):
                yield latest
