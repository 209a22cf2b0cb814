"""Receive the messages of a channel for the length of a block; wait for messages with a check now and then, because they may get
lost; keep the latest messages for a reader that comes later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Generic, Self, TypeVar

from worqr.errors import Unavailable
from worqr.link import Link, Signal, Waiter
from worqr.link.driver import wake_all

T = TypeVar("T")

LOOK_AGAIN = 1.0
"""Seconds between checks without a message, because messages may get lost."""


@asynccontextmanager
async def listening(link: Link, channel: str, hear: Callable[[bytes], None]) -> AsyncGenerator[None]:
    """Subscribe to a channel for the length of a block, which begins when the server has confirmed it.

    Raises:
        Unavailable: no confirmation within the link's patience.
    """
    async with listening_to(link, [channel], lambda _channel, message: hear(message), lambda: None):
        yield


@asynccontextmanager
async def listening_to(
    link: Link, channels: Sequence[str], hear: Callable[[str, bytes], None], confirmed: Callable[[], None]
) -> AsyncGenerator[None]:
    """Subscribe to several channels of one slot, in the order in which the server publishes. `confirmed` is called each time that
    they have been subscribed: at first, and after each reconnect.

    Raises: as `listening`.
    """
    subscription = link.subscriptions.open(channels, hear, confirmed)
    try:
        patience = link.settings.patience
        with link.driver.move_on_after(patience) as waiting:
            await subscription.wait_confirmed()
        if waiting.cancelled_caught:
            raise Unavailable(f"{channels[0]}: the server confirmed no subscription within {patience:g} s", sent=False)
        yield
    finally:
        subscription.close()


class News:
    """A flag that a message arrived since the last check, for a task that waits and checks."""

    def __init__(self, link: Link) -> None:
        self._driver = link.driver
        self._heard = Signal(link.driver)

    def tell(self) -> None:
        """Set the flag; called in the loop."""
        self._heard.set()

    async def wait(self) -> None:
        """Wait for a message since the last wait, at most `LOOK_AGAIN` seconds; then the caller checks."""
        with self._driver.move_on_after(LOOK_AGAIN):
            await self._heard.wait()
        self._heard = Signal(self._driver)


class Latest(AsyncIterator[T], Generic[T]):
    """An iterator of the items that are put in; it ends with its block. Of more than `most` the oldest are dropped."""

    def __init__(self, link: Link, most: int) -> None:
        self._driver = link.driver
        self._items: deque[T] = deque(maxlen=most)
        self._waiters: list[Waiter] = []
        self._closed = False

    def put(self, item: T) -> None:
        """Add an item; called in the loop."""
        self._items.append(item)
        self._tell()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closed = True
        self._items.clear()
        self._tell()

    async def __anext__(self) -> T:
        await self._driver.checkpoint()  # let other tasks run, however many items there are
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

    def _tell(self) -> None:
        waiters, self._waiters = self._waiters, []
        wake_all(waiters)
