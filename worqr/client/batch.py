"""`Batch`: a handle of jobs that are counted together, with one follow-up at the end.

A batch has a home queue, which keeps its record, and a part in each queue of its jobs. Before a job is added, its part is opened
at the home; after that, dispatches go to the queue of the job only. `worqr/lua/_part.lua` and ``_batch.lua`` have the protocol.
Not here: how a batch is made (`batch_block`), and how queues tell each other (`outbox_relay`).
"""

# Call hides its private fields from users, not from the sender.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import wraps
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar, cast

from worqr import ops
from worqr.batch_keys import BatchKeys, keys_at
from worqr.batches import BatchInfo
from worqr.client.batch_reader import infos_of
from worqr.client.call import Call
from worqr.client.client import Client
from worqr.client.dead_letters import retry_members
from worqr.client.dispatcher import handle_of
from worqr.client.job import Job
from worqr.client.notifications import Notification, sleep, subscribed
from worqr.client.outbox_relay import relay_messages
from worqr.client.producer import Producer
from worqr.errors import (
    BatchEnded,
    BatchFailed,
    NoResult,
    NotReplicated,
    ResultTimeout,
    UsageError,
    WorqrError,
    set_job,
)
from worqr.foreign import BATCH, explain_arguments
from worqr.keys import QueueKeys
from worqr.ops import MAX_ITEMS
from worqr.validation import Seconds, check_text, seconds

R = TypeVar("R")

ASK_AGAIN = 0.05
"""Seconds before a part that was closed meanwhile is opened again, if the home had not heard of it."""


class Batch:
    """A batch of jobs. ``mesh.batch(...)`` makes one; ``mesh.queue(name).batch(id)`` is a handle of one that exists."""

    def __init__(
        self,
        client: Client,
        producer: Producer,
        home: QueueKeys | None,
        id: str | None,
        token: str = "",
        *,
        inside: bool = False,
    ) -> None:
        """`inside`: it is the handle of a running job of the batch, which may add jobs after the seal."""
        self._client = client
        self._producer = producer
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

    async def dispatch(self, call: Call[R]) -> Job[R]:
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
        jobs, late = await self._add_all([call])
        if late is not None:
            set_job(late, jobs[0])
            raise late
        return jobs[0]

    async def dispatch_many(self, calls: Iterable[Call[R]]) -> list[Job[R]]:
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
            outcomes, late = await self._producer.dispatch_members(list(left.values()), self._entry, late)
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
    async def watch(self) -> AsyncGenerator[AsyncIterator[BatchInfo]]:
        """Follow the batch for the length of a block, as an iterator of its `BatchInfo`.

        The iterator begins with the present state. It yields each change that it sees, about once a second, and ends when the
        batch has ended.

        Yields:
            AsyncIterator[BatchInfo]: The iterator.
        """
        link = self._client.link
        notification = Notification(link)
        async with subscribed(link, await self._channel(), lambda _message: notification.set()):
            yield _InfoIterator(self, notification)

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


class _InfoIterator(AsyncIterator[BatchInfo]):
    """An iterator over the states of one batch, without repetitions."""

    def __init__(self, batch: Batch, notification: Notification) -> None:
        self._batch = batch
        self._notification = notification
        self._last: BatchInfo | None = None

    async def __anext__(self) -> BatchInfo:
        if self._last is not None and self._last.state == "ended":
            raise StopAsyncIteration
        while (info := await self._batch.info()) == self._last:
            await self._notification.wait()
        self._last = info
        return info


def _thousands(calls: Iterable[Call[R]]) -> Iterator[list[Call[R]]]:
    waiting = iter(calls)
    while some := list(islice(waiting, MAX_ITEMS)):
        yield some


def _explained(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    call = explain_arguments("dispatch() of a batch", BATCH)(dispatch)

    @wraps(dispatch)
    async def explained(self: object, *args: Any, **kwargs: Any) -> Any:
        return await call(self, *args, **kwargs)

    return explained


if not TYPE_CHECKING:  # a type checker knows the signature
    Batch.dispatch = _explained(Batch.dispatch)
