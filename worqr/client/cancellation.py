"""Cancelling as producers and operators do it: request it, and wait until the running tasks have acknowledged it.

How a peer learns of it is in `peer.control_channel`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from functools import partial

from worqr import ops
from worqr.client.notifications import Notification, subscribed
from worqr.keys import QueueKeys
from worqr.link import Link
from worqr.ops import MAX_ITEMS, CancelReply
from worqr.records import CancelCount

Step = Callable[[QueueKeys, CancelReply | None], Awaitable[CancelReply]]
"""One request of a cancel to one shard, from the end of the previous request on."""


class _ShardCancellation:
    """The claims that were cancelled in one shard while they ran, and those of them that have ended."""

    def __init__(self, keys: QueueKeys, notification: Notification) -> None:
        self.keys = keys
        self.claims: set[int] = set()
        self.settled: set[int] = set()
        self._notification = notification

    def on_message(self, message: bytes) -> None:
        if message.isdigit():
            self.settled.add(int(message))
            self._notification.set()

    async def refresh(self, link: Link) -> None:
        """Check the marks, because messages may get lost: a claim without its mark has ended."""
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
    places = [_ShardCancellation(keys, notification) for keys in shards]
    async with AsyncExitStack() as stack:
        if wait > 0:
            for place in places:
                await stack.enter_async_context(subscribed(link, place.keys.cancelled_channel, place.on_message))
        waiting = sum([await _all_steps(partial(step, place.keys), place.claims) for place in places])
        if wait > 0:
            with link.driver.move_on_after(wait):
                while not all(place.claims <= place.settled for place in places):
                    await notification.wait()
                    for place in places:
                        await place.refresh(link)
        running = sum(len(place.claims) for place in places)
        return CancelCount(waiting, running, sum(len(place.claims & place.settled) for place in places) if wait else 0)


async def _all_steps(step: Callable[[CancelReply | None], Awaitable[CancelReply]], claims: set[int]) -> int:
    """Repeat the cancel until there is no more; return how many waited. `claims` gets those that were marked."""
    waiting, last = 0, None
    while last is None or last.more:
        last = await step(last)
        waiting += last.waiting
        claims.update(last.claims)
    return waiting
