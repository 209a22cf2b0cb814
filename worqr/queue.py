"""A queue as producers and operators see it: put tasks in, look, cancel, pause, delete, listen.

Nothing here consumes: that is the peer's. Every method is one request or a few; none holds a lock, none polls unless it says
so.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import trio

from worqr import ops
from worqr.errors import Unavailable, UsageError, WorqrError
from worqr.keys import QueueKeys
from worqr.ops import MAX_BYTES, MAX_ITEMS, Cancelled
from worqr.peer.options import check_count
from worqr.task import CancelCount, Event, QueueInfo, Seconds, Status, check_task, check_text, seconds

if TYPE_CHECKING:
    from worqr.mesh import Mesh

logger: logging.Logger = logging.getLogger(__name__)

EVENTS_BUFFERED = 1000
MARKS_AGAIN = 1.0
MAX_LISTED = 10_000


class Queue:
    """One queue of a mesh, by name. Made by ``mesh.queue(name)``; its calls need ``mesh.connect()`` or ``join()`` around."""

    __slots__ = ("_keys", "_mesh")

    def __init__(self, mesh: Mesh, keys: QueueKeys) -> None:
        self._mesh = mesh
        self._keys = keys

    @property
    def name(self) -> str:
        """The queue's name."""
        return self._keys.queue

    def __repr__(self) -> str:
        return f"<Queue {self.name!r}>"

    async def enqueue(
        self, *tasks: bytes | bytearray | memoryview, front: bool = False, max_length: int | None = None
    ) -> int:
        """Put tasks into the queue, to be taken in this order, and wake as many idle workers as there are tasks.

        One call is one atomic request; one of over 1,000 tasks or 8 MiB is sent as several, in order.

        Args:
            tasks: bytes of any kind; delivered as they are.
            front: put them before all that waits.
            max_length: refuse if more than so many tasks would wait.

        Returns:
            How many were stored: all of them.

        Raises:
            UsageError: not bytes, or a bounded call too large for one request; PayloadTooLarge: over `max_payload` bytes.
            QueueFull: over `max_length`, or the server is out of memory; nothing of the request was stored.
            Unavailable: no answer within `patience`; with ``sent=None`` it may have been stored.

        A call that is cancelled before it was written stores nothing; afterwards it may. From Worqr's enqueue.
        """
        checked = [check_task(task, self._mesh.max_payload) for task in tasks]
        if max_length is not None:
            check_count(max_length, "max_length")
        chunks = [checked] if len(checked) == 1 else list(_chunks(checked))
        if len(chunks) > 1 and max_length is not None:
            raise UsageError(
                f"a bounded enqueue must fit one request: at most {MAX_ITEMS} tasks and {MAX_BYTES:,} bytes, "
                f"not {len(checked):,} tasks and {sum(map(len, checked)):,} bytes"
            )
        if not chunks:
            self._mesh.check_connected()
            await trio.lowlevel.checkpoint()
            return 0
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

    # Looking

    async def count(self) -> int:
        """How many tasks wait."""
        return (await self._mesh.call(ops.list_tasks(self._keys, 0)))[0]

    async def peek(self) -> bytes | None:
        """The task that will be taken next, which stays where it is; None if none waits."""
        tasks = (await self._mesh.call(ops.list_tasks(self._keys, 1, from_front=True)))[1]
        return tasks[0] if tasks else None

    async def tasks(self, limit: int = 100) -> list[bytes]:
        """Up to `limit` waiting tasks, newest first, and no more than about 8 MiB of them."""
        check_count(limit, "limit")
        return (await self._mesh.call(ops.list_tasks(self._keys, min(limit, MAX_LISTED))))[1]

    async def running(self) -> list[Status]:
        """The first 1,000 tasks that run now: by which worker, and since when by the server's clock."""
        claims = await self._mesh.call(ops.list_claims(self._keys))
        return [
            Status("active", worker=worker, since=datetime.fromtimestamp(claim / 1e6, UTC), failures=failures)
            for claim, worker, failures in claims
        ]

    async def info(self) -> QueueInfo:
        """All there is to know of the queue at one moment. `oldest` and `blocked` are not known of raw tasks."""
        seen = await self._mesh.call(ops.inspect(self._keys))
        return QueueInfo(
            name=self.name,
            waiting=seen.waiting,
            due=seen.due,
            blocked=0,
            running=seen.running,
            failed=seen.failed,
            broken=seen.broken,
            paused=seen.paused,
            oldest=None,
            workers=len(seen.workers),
            counts=seen.counts,
        )

    # Cancelling

    async def cancel(self, task: bytes | bytearray | memoryview, *, wait: Seconds = 0) -> CancelCount:
        """Cancel every task of this queue with this payload: waiting ones are removed, running ones cancelled wherever they run.

        A task cancelled while it runs is settled as cancelled when its handler has unwound, and never comes back, also if its
        worker dies meanwhile. Finds waiting tasks by a search through the queue (16 ms for a million).

        Args:
            wait: seconds to wait until the running ones have really ended.

        Returns:
            How many waited, ran, and, of the latter, had ended before `wait` was over. Never raises because of a slow handler.
        """
        checked = check_task(task, self._mesh.max_payload)

        async def step(last: Cancelled | None) -> Cancelled:
            cursor, after = ("0", "-") if last is None else (last.cursor, last.after)
            return await self._mesh.call(ops.cancel_task(self._keys, checked, cursor, after))

        return await self._cancel(step, seconds(wait, "wait"))

    async def cancel_all(self, *, wait: Seconds = 0) -> CancelCount:
        """Cancel every task of this queue, waiting or running. Arguments and answer as `cancel`."""

        async def step(last: Cancelled | None) -> Cancelled:
            while (found := await self._mesh.call(ops.cancel_all(self._keys, last.after if last else "-"))) is None:
                await self._purge()
            return found

        count = await self._cancel(step, seconds(wait, "wait"))
        await self._purge()
        return count

    async def _cancel(self, step: Callable[[Cancelled | None], Awaitable[Cancelled]], wait: float) -> CancelCount:
        if wait == 0:
            waiting, claims = await _all_steps(step)
            return CancelCount(waiting, len(claims), 0)
        settled: set[int] = set()
        news = trio.Event()

        def hear(message: bytes) -> None:
            if message.isdigit():
                settled.add(int(message))
                news.set()

        async with self._listening(self._keys.cancelled_channel, hear):
            waiting, claims = await _all_steps(step)
            with trio.move_on_after(wait):
                while not claims <= settled:
                    news = trio.Event()
                    with trio.move_on_after(MARKS_AGAIN):
                        await news.wait()
                        continue
                    settled |= claims - await self._marked(claims - settled)
            return CancelCount(waiting, len(claims), len(claims & settled))

    @asynccontextmanager
    async def _listening(self, channel: str, hear: Callable[[bytes], None]) -> AsyncGenerator[None]:
        """Hear a channel for the length of a block, which begins when the server has confirmed it."""
        link = self._mesh.link
        subscription = link.subscriptions.open([channel], lambda _channel, message: hear(message), lambda: None)
        try:
            patience = link.settings.patience
            with trio.move_on_after(patience) as waiting:
                await subscription.wait_confirmed()
            if waiting.cancelled_caught:
                raise Unavailable(
                    f"queue {self.name!r}: the server confirmed no subscription within {patience:g} s", sent=False
                )
            yield
        finally:
            subscription.close()

    async def _marked(self, claims: set[int]) -> set[int]:
        """Those of `claims` whose cancellation is still under way."""
        ordered = sorted(claims)
        marked: set[int] = set()
        for start in range(0, len(ordered), MAX_ITEMS):
            marked.update(await self._mesh.call(ops.list_marks(self._keys, ordered[start : start + MAX_ITEMS])))
        return marked

    # Operating

    async def pause(self, reason: str = "") -> None:
        """Stop claims on this queue, everywhere; what runs goes on, and so does enqueueing. `reason` is for people."""
        check_text(reason, "reason")
        link = self._mesh.link_to(self.name)  # noted, so that it can be found, and resumed, by those who list queues
        await link.call(ops.pause(self._keys, reason))

    async def resume(self) -> None:
        """Let claims go on."""
        await self._mesh.call(ops.resume(self._keys))

    async def delete(self) -> None:
        """Delete all that waits, at once. What runs may finish; what is given back afterwards is dropped. A new enqueue makes
        the queue anew.
        """
        while not await self._mesh.call(ops.delete_queue(self._keys)):
            await self._purge()
        await self._purge()

    async def _purge(self) -> None:
        while await self._mesh.call(ops.purge_queue(self._keys)):
            pass

    @asynccontextmanager
    async def events(self) -> AsyncGenerator[AsyncIterator[Event]]:
        """What happens to this queue, as it happens: an iterator of `Event`. Published only while somebody listens.

        Never a promise: events are lost while the connection is, and the oldest when you are over 1,000 behind.
        """
        send, receive = trio.open_memory_channel[Event](EVENTS_BUFFERED)

        def hear(message: bytes) -> None:
            kind, _, count = message.decode("utf-8", "replace").partition(" ")
            try:
                send.send_nowait(Event(self.name, kind, int(count)))
            except trio.WouldBlock:
                receive.receive_nowait()
                send.send_nowait(Event(self.name, kind, int(count)))
            except ValueError:
                logger.warning("events: queue %r: a message nobody of us sent: %r", self.name, message[:100])

        with send, receive:
            async with self._listening(self._keys.events_channel, hear):
                yield receive


async def _all_steps(step: Callable[[Cancelled | None], Awaitable[Cancelled]]) -> tuple[int, set[int]]:
    """Cancel until there is no more: how many waited, and which claims were marked."""
    waiting, claims, last = 0, set[int](), None
    while last is None or last.more:
        last = await step(last)
        waiting += last.waiting
        claims.update(last.claims)
    return waiting, claims


def _chunks(tasks: Sequence[bytes]) -> Iterator[list[bytes]]:
    """`tasks` in pieces that fit one request each."""
    chunk: list[bytes] = []
    size = 0
    for task in tasks:
        if chunk and (len(chunk) == MAX_ITEMS or size + len(task) > MAX_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(task)
        size += len(task)
    if chunk:
        yield chunk
