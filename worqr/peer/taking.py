"""`Claims`: the iterator of the tasks that an application takes by hand. `Claim` itself is in `worqr.peer.claims`."""

# The private fields of Claim are hidden from users, not from its neighbours.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

import trio

from worqr.errors import UsageError
from worqr.peer.claims import Claim
from worqr.peer.desk import Desk, station_of
from worqr.validation import Seconds, check_count, seconds


class Claims(AsyncIterator[Claim]):
    """The claims of one queue, as an async iterator; ``peer.work(queue)`` makes it. It ends when the peer leaves.

    A claim counts against the peer's `concurrency` until it is settled. Iteration and `take` pause when the limit is reached.
    """

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._open = True

    def _check_open(self) -> None:
        if not self._open:
            raise UsageError(f"these claims of queue {self._desk.queue!r} ended with their block: use them inside it")

    async def __anext__(self) -> Claim:
        self._check_open()
        claims = await self._desk.collect(1)
        if not claims:
            raise StopAsyncIteration
        return claims[0]

    async def take(self, n: int, *, within: Seconds = 0) -> list[Claim]:
        """Take up to n tasks in one request, oldest first. Wait for the first one.

        If you cancel the call, nothing is taken; tasks on their way are kept for the next call. With several shards, the
        tasks come from one of them if it has enough.

        Args:
            n: At least 1. No more than the peer's `concurrency` can be held at once.
            within: Seconds to wait, after the first task, for the batch to fill.

        Returns:
            1 to n claims; an empty list once the peer leaves.

        Raises:
            UsageError: `n` or `within` is not valid, or the block of the claims has ended.
        """
        self._check_open()
        check_count(n, "n of take")
        wait = seconds(within, "within")
        taken = await self._desk.collect(n)
        if taken and wait > 0:
            try:
                with trio.move_on_after(wait):
                    while len(taken) < n and (more := await self._desk.collect(n - len(taken))):
                        taken += more
            except trio.Cancelled:
                self._desk.put_back(taken)
                raise
        return taken

    async def finish(self, claims: Iterable[Claim]) -> list[Claim]:
        """Finish claims in one round trip; with several shards, in one each, at the same time.

        Args:
            claims: Claims of this queue.

        Returns:
            The claims that were lost: their tasks run, or ran, elsewhere.

        Raises:
            UsageError: A claim is of another queue, or is in the list twice. Nothing was sent.
            ClaimSettled: A claim was settled before. Nothing was sent.
            Unavailable: The server did not reply within `patience`. The request may have taken effect.
        """
        batch = list(claims)
        for claim in batch:
            if station_of(claim).desk is not self._desk:
                raise UsageError(f"{claim!r} is not a claim of these claims of queue {self._desk.queue!r}")
            if claim._settled and claim.cancel_reason != "lost":
                raise claim._settled_error()
        if len(set(batch)) != len(batch):
            raise UsageError("the same claim stands twice among those to finish")
        if not batch:
            await trio.lowlevel.checkpoint()
            return []
        return await self._desk.finish(batch)

    def _close(self) -> None:
        """The block has ended."""
        self._open = False
