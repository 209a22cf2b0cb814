"""Cancelling as producers and operators do it: ask, and wait for the acknowledgement of what ran.

How a peer learns of it is in `peer.cancelling`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from worqr import ops
from worqr.keys import QueueKeys
from worqr.link import Link
from worqr.listening import News, listening
from worqr.ops import MAX_ITEMS, Cancelled
from worqr.task import CancelCount

Step = Callable[[Cancelled | None], Awaitable[Cancelled]]
"""One request of a cancel, from where the last one ended."""


async def cancel_and_wait(link: Link, keys: QueueKeys, step: Step, wait: float) -> CancelCount:
    """Cancel, and wait up to `wait` seconds until those that ran have ended."""
    if wait == 0:
        waiting, claims = await _all_steps(step)
        return CancelCount(waiting, len(claims), 0)
    settled: set[int] = set()
    news = News(link)

    def hear(message: bytes) -> None:
        if message.isdigit():
            settled.add(int(message))
            news.tell()

    async with listening(link, keys.cancelled_channel, hear):
        waiting, claims = await _all_steps(step)
        with link.mailbox.move_on_after(wait):
            while not claims <= settled:
                await news.wait()
                if not claims <= settled:
                    settled |= claims - await _marked(link, keys, claims - settled)
        return CancelCount(waiting, len(claims), len(claims & settled))


async def _marked(link: Link, keys: QueueKeys, claims: set[int]) -> set[int]:
    """Those of `claims` whose cancellation is still under way."""
    ordered = sorted(claims)
    marked: set[int] = set()
    for start in range(0, len(ordered), MAX_ITEMS):
        marked.update(await link.call(ops.list_marks(keys, ordered[start : start + MAX_ITEMS])))
    return marked


async def _all_steps(step: Step) -> tuple[int, set[int]]:
    """Cancel until there is no more: how many waited, and which claims were marked."""
    waiting, claims, last = 0, set[int](), None
    while last is None or last.more:
        last = await step(last)
        waiting += last.waiting
        claims.update(last.claims)
    return waiting, claims
