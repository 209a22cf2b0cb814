"""Wait for room: repeat an enqueue or a dispatch that a full queue has refused, until the queue has room for it.

A refused request notes on the server what it waits for. A script that takes tasks out of the queue publishes on the channel of
the program which of its calls has room now (`worqr/lua/queue.lua`). Messages may get lost, so each call also asks once a second.
A call that is woken asks again under a new number, and may find that another producer was faster. No order is promised.

A connection keeps its channel of a queue for the next time, because a queue that was full once is soon full again.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from itertools import count
from typing import Final, TypeVar

from worqr.client.notifications import POLL_EVERY, Notification
from worqr.command import MAX_ITEMS
from worqr.errors import QueueFull, RefusedByServer, UsageError, is_at_max_length
from worqr.keys import QueueKeys, RoomKeys
from worqr.link import Link
from worqr.stored_values import whole

T = TypeVar("T")

MAX_CHANNELS: Final = 100
"""Queues whose channels a connection keeps. Beyond that it closes one on which no call waits."""
PART: Final = 10
"""Of many calls, parts of this fraction of the max_length wait together, so that they need not wait for an empty queue."""


class RoomChannel:
    """The channel on which a connection receives that one of its calls has room in one queue, and the calls that wait."""

    def __init__(self, link: Link, keys: QueueKeys) -> None:
        self._link = link
        self._name = secrets.token_hex(8)
        self._waiting: dict[int, Notification] = {}
        channel = RoomKeys(keys).channel(self._name)
        self._subscription = link.subscriptions.open([channel], self._deliver, self._wake_all)

    @property
    def is_idle(self) -> bool:
        """True if no call waits."""
        return not self._waiting

    @contextmanager
    def waiting(self) -> Generator[tuple[str, Notification]]:
        """Register a call that waits, for the length of a block.

        Yields:
            tuple[str, Notification]: Its name for the server. The number in it is the lowest free one, so that calls that gave up
                leave few entries there. Those up to the next `MAX_ITEMS` are its own, too: one for each of its lanes. And the
                flag that is set when the queue may have room for it.
        """
        notification = Notification(self._link)
        with self._link.driver.entered:
            number = next(n for n in count(step=MAX_ITEMS) if n not in self._waiting)
            self._waiting[number] = notification
        try:
            yield f"{self._name}-{number}", notification
        finally:
            with self._link.driver.entered:
                del self._waiting[number]

    async def confirm(self, within: float) -> None:
        """Wait until the server has confirmed the channel, but no longer than until a call would ask again anyway.

        Raises:
            RefusedByServer: The user has no permission for the channel.
        """
        with self._link.driver.move_on_after(min(within, POLL_EVERY)):
            await self._subscription.wait_confirmed()

    def close(self) -> None:
        """Receive no more messages."""
        self._subscription.close()

    def _deliver(self, _channel: str, message: bytes) -> None:
        """Wake the call with this number. If it has given up, wake another one: the room is free."""
        number = whole(message, -1)
        notification = self._waiting.get(number - number % MAX_ITEMS) or next(iter(self._waiting.values()), None)
        if notification is not None:
            notification.set()

    def _wake_all(self) -> None:
        """Let all calls ask again: the channel was confirmed anew, and messages may have been lost before."""
        for notification in self._waiting.values():
            notification.set()


class RoomChannels:
    """The channels of one connection, by queue or shard."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._channels: dict[str, RoomChannel] = {}

    async def when_room(self, keys: QueueKeys, wait: float, attempt: Callable[[str], Awaitable[T]]) -> T:
        """Repeat `attempt` until the queue has room, and return what it returned.

        The time limit ends the waiting between two attempts, never an attempt: a request that is given up may still be stored.

        Args:
            keys: those of the queue, or of the shard.
            wait: seconds, may be infinite. 0: one attempt.
            attempt: sends the request, with the name of this call for the server; without one, it is not noted there.

        Raises:
            QueueFull: the queue had no room for `wait` seconds, or the server is out of memory.
            RefusedByServer: the user has no permission for the channel.
            WorqrError: as `attempt`.
        """
        until = time.monotonic() + wait
        if wait <= 0 or keys.base not in self._channels:
            try:
                return await attempt("")
            except QueueFull as full:
                if wait <= 0 or not is_at_max_length(full):
                    raise
        channel = self._open(keys)
        with channel.waiting() as (waiter, notification):
            await self._confirm(keys, channel, wait)
            while True:
                left = until - time.monotonic()
                try:
                    return await attempt(waiter if left > 0 else "")
                except QueueFull as full:
                    if left <= 0 or not is_at_max_length(full):
                        full.add_note(f"waited {wait:g} s for room")
                        raise
                await notification.wait(left)

    def _open(self, keys: QueueKeys) -> RoomChannel:
        """Return the channel of the queue. It is opened at the first use."""
        with self._link.driver.entered:
            channel = self._channels.get(keys.base)
            if channel is None:
                idle = [base for base, each in self._channels.items() if each.is_idle]
                if idle and len(self._channels) >= MAX_CHANNELS:
                    self._channels.pop(idle[0]).close()
                channel = self._channels[keys.base] = RoomChannel(self._link, keys)
        return channel

    async def _confirm(self, keys: QueueKeys, channel: RoomChannel, wait: float) -> None:
        try:
            await channel.confirm(wait)
        except RefusedByServer:
            with self._link.driver.entered:
                self._channels.pop(keys.base, None)
            channel.close()
            raise


def check_fits(keys: QueueKeys, tasks: int, bound: object, wait: float) -> None:
    """Raise UsageError if so many tasks wait for room together that a queue with this bound never has it."""
    if wait and isinstance(bound, int) and tasks > bound:
        raise UsageError(
            f"{tasks:,} tasks in one call never fit into queue {keys.display_name!r}, of which at most {bound:,} may wait: "
            "enqueue fewer in each call"
        )
