"""Subscribe to channels for the length of a block, and hand the messages to a task.

`Notification` wakes a task that then checks the state; `EventStream` keeps messages for a reader. Messages may get lost, so a
task that waits also checks every `POLL_EVERY` seconds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Generic, Self, TypeVar

from worqr.errors import Unavailable
from worqr.link import Link, Signal, Waiter
from worqr.link.driver import wake_all

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
            raise Unavailable(f"{channels[0]}: the server confirmed no subscription within {patience:g} s", sent=False)
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
            waiter = Waiter()
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
