"""Subscribe to channels for the length of a block, and hand the messages to a task.

`Notification` wakes a task that then checks the state; `EventStream` keeps messages for a reader. Messages may get lost, so a
task that waits also checks every `POLL_EVERY` seconds.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from functools import partial
from types import TracebackType
from typing import Generic, Self, TypeVar

from worqr import ops
from worqr.errors import ResultTimeout, Unavailable
from worqr.keys import QueueKeys
from worqr.link import Link, Signal, Waiter
from worqr.link.driver import SignalWaiter, wake_all
from worqr.ops import MAX_ITEMS, CancelReply
from worqr.records import CancelCount
from worqr.stored_values import whole
from worqr.validation import Seconds, seconds

# Cancel tasks: request it, and wait until the running tasks have acknowledged it.
#
# `worqr.peer.consumer` receives the requests in a peer.


Step = Callable[[QueueKeys, CancelReply | None], Awaitable[CancelReply]]
"""Sends one request of a cancel to one shard. It continues where the previous request ended."""


class _ShardCancellation:
    """The running claims that were cancelled in one shard, and those of them that have ended."""

    def __init__(self, keys: QueueKeys, notification: Notification) -> None:
        self.keys = keys
        self.claims: set[int] = set()
        self.settled: set[int] = set()
        self._notification = notification

    def on_message(self, message: bytes) -> None:
        if (claim := whole(message)) is not None:
            self.settled.add(claim)
            self._notification.set()

    async def refresh(self, link: Link) -> None:
        """Read the cancel marks, because messages may get lost: a claim without a mark has ended."""
        if self.claims <= self.settled:
            return
        ordered = sorted(self.claims - self.settled)
        marked: set[int] = set()
        for start in range(0, len(ordered), MAX_ITEMS):
            marked.update(await link.call(ops.list_marks(self.keys, ordered[start : start + MAX_ITEMS])))
        self.settled |= set(ordered) - marked


async def cancel_and_wait(link: Link, shards: Iterable[QueueKeys], step: Step, wait: float) -> CancelCount:
    """Cancel in all of these shards, and wait up to `wait` seconds until the running tasks have ended."""
    notification = Notification(link)
    cancellations = [_ShardCancellation(keys, notification) for keys in shards]
    async with AsyncExitStack() as stack:
        if wait > 0:
            for each in cancellations:
                await stack.enter_async_context(subscribed(link, each.keys.cancelled_channel, each.on_message))
        waiting = 0
        for n, each in enumerate(cancellations):
            waiting += await _cancel_all_pages(partial(step, each.keys), each.claims, begun=n > 0)
        if wait > 0:
            with _had_effect(sent=True), link.driver.move_on_after(wait):
                while not all(each.claims <= each.settled for each in cancellations):
                    await notification.wait()
                    for each in cancellations:
                        await each.refresh(link)
        running = sum(len(each.claims) for each in cancellations)
        return CancelCount(
            waiting, running, sum(len(each.claims & each.settled) for each in cancellations) if wait else 0
        )


@contextmanager
def _had_effect(*, sent: bool | None) -> Generator[None]:
    """Let `Unavailable.sent` tell of the whole cancel: requests before the one that failed have taken effect."""
    try:
        yield
    except Unavailable as error:
        raise Unavailable(*error.args, sent=sent) from error


async def _cancel_all_pages(
    step: Callable[[CancelReply | None], Awaitable[CancelReply]], claims: set[int], *, begun: bool
) -> int:
    """Repeat the request until there is no more; return how many tasks waited. The marked claims are added to `claims`. `begun`:
    tasks of another shard have been cancelled.
    """
    waiting, last = 0, None
    while last is None or last.more:
        with _had_effect(sent=None) if begun or last else nullcontext():
            last = await step(last)
        waiting += last.waiting
        claims.update(last.claims)
    return waiting


T = TypeVar("T")

POLL_EVERY = 1.0
"""Seconds between checks without a message, because messages may get lost."""


@asynccontextmanager
async def subscribed(link: Link, channel: str, on_message: Callable[[bytes], None]) -> AsyncGenerator[None]:
    """Subscribe to a channel for the length of a block, which begins when the server has confirmed it.

    Raises:
        Unavailable: no confirmation within the link's patience.
    """
    async with subscribed_to(link, [channel], lambda _channel, message: on_message(message), lambda: None):
        yield


@asynccontextmanager
async def subscribed_to(
    link: Link, channels: Sequence[str], on_message: Callable[[str, bytes], None], confirmed: Callable[[], None]
) -> AsyncGenerator[None]:
    """Subscribe to several channels of one slot, in the order in which the server publishes. `confirmed` is called after each
    subscription: the first one, and one after each reconnect.

    Raises: as `subscribed`.
    """
    subscription = link.subscriptions.open(channels, on_message, confirmed)
    try:
        patience = link.settings.patience
        with link.driver.move_on_after(patience) as waiting:
            await subscription.wait_confirmed()
        if waiting.cancelled_caught:
            text = f"{channels[0]}: the server confirmed no subscription within {patience:g} s{subscription.problem}"
            raise Unavailable(text, sent=False)
        yield
    finally:
        subscription.close()


async def sleep(link: Link, seconds: float) -> None:
    """Wait this long, on whatever loop or thread the caller is."""
    with link.driver.move_on_after(seconds):
        await Signal(link.driver).wait()


class Notification:
    """A flag for a task that waits: a message has arrived since its last check."""

    def __init__(self, link: Link) -> None:
        self._driver = link.driver
        self._signal = Signal(link.driver)

    def set(self) -> None:
        """Set the flag. Called in the loop."""
        self._signal.set()

    async def wait(self, within: float = math.inf) -> None:
        """Wait for a message since the last wait, at most `POLL_EVERY` seconds and at most `within`; then the caller checks."""
        with self._driver.move_on_after(min(within, POLL_EVERY)):
            await self._signal.wait()
        self._signal = Signal(self._driver)


class Watch(AsyncIterator[T]):
    """An iterator over the states of something until its last one, without repetitions.

    The present state comes first, however late it is asked for. After it, `ResultTimeout` is raised once `timeout` seconds have
    passed since the iterator was made.

    Args:
        what: what is watched, for the message.
        read: reads its state.
        is_last: returns True for a state after which there is no other.
    """

    def __init__(
        self,
        link: Link,
        timeout: Seconds | None,
        what: object,
        read: Callable[[], Awaitable[T]],
        is_last: Callable[[T], bool],
    ) -> None:
        self._patience = math.inf if timeout is None else seconds(timeout, "timeout")
        self._until = time.monotonic() + self._patience
        self._link = link
        self._what = what
        self._read = read
        self._is_last = is_last
        self._notification = Notification(link)
        self._last: T | None = None

    @asynccontextmanager
    async def on(self, channel: str) -> AsyncGenerator[Self]:
        """Read the state after each message of this channel, for the length of a block."""
        async with subscribed(self._link, channel, lambda _message: self._notification.set()):
            yield self

    async def __anext__(self) -> T:
        if self._last is None:
            self._last = await self._read()
            return self._last
        if self._is_last(self._last):
            raise StopAsyncIteration
        with self._link.driver.move_on_after(self._until - time.monotonic()):
            while (state := await self._read()) == self._last:
                await self._notification.wait()
            self._last = state
            return state
        raise ResultTimeout(f"{self._what!r} had not ended after {self._patience:g} s")


class EventStream(AsyncIterator[T], Generic[T]):
    """An iterator of the items that are put in; it ends with its block. It keeps at most `most` items, and drops the oldest."""

    def __init__(self, link: Link, most: int) -> None:
        self._driver = link.driver
        self._items: deque[T] = deque(maxlen=most)
        self._waiters: list[Waiter] = []
        self._closed = False

    def put(self, item: T) -> None:
        """Add an item; called in the loop."""
        self._items.append(item)
        self._wake_waiters()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closed = True
        self._items.clear()
        self._wake_waiters()

    async def __anext__(self) -> T:
        await self._driver.checkpoint()  # other tasks may run, even if there are always items
        while True:
            waiter = SignalWaiter()
            await self._driver.prepare(waiter)
            if self._items:
                return self._items.popleft()
            if self._closed:
                raise StopAsyncIteration
            self._waiters.append(waiter)
            try:
                await self._driver.wait(waiter)
            finally:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)

    def _wake_waiters(self) -> None:
        waiters, self._waiters = self._waiters, []
        wake_all(waiters)
