"""Cancel tasks: request it, and wait until the running tasks have acknowledged it.

`worqr.peer.control_channel` receives the requests in a peer.
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
from worqr.stored_values import whole

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
        waiting = sum([await _cancel_all_pages(partial(step, each.keys), each.claims) for each in cancellations])
        if wait > 0:
            with link.driver.move_on_after(wait):
                while not all(each.claims <= each.settled for each in cancellations):
                    await notification.wait()
                    for each in cancellations:
                        await each.refresh(link)
        running = sum(len(each.claims) for each in cancellations)
        return CancelCount(
            waiting, running, sum(len(each.claims & each.settled) for each in cancellations) if wait else 0
        )


async def _cancel_all_pages(step: Callable[[CancelReply | None], Awaitable[CancelReply]], claims: set[int]) -> int:
    """Repeat the request until there is no more; return how many tasks waited. The marked claims are added to `claims`."""
    waiting, last = 0, None
    while last is None or last.more:
        last = await step(last)
        waiting += last.waiting
        claims.update(last.claims)
    return waiting
