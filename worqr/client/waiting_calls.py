"""Send many calls of functions to queues that may be full, in parts that wait for room. For `worqr.client.producer`."""

# Call hides its private fields from users; the producer reads them.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, cast

from worqr.client.call import Call
from worqr.client.room import PART, RoomChannels
from worqr.errors import NotReplicated, at_max_length, reply_in
from worqr.job_options import wait_in
from worqr.keys import QueueKeys
from worqr.ops import MAX_ITEMS, Dispatched
from worqr.ops.replies import in_chunks

Positioned = tuple[int, Call[Any]]
"""A call, with its position among those of its caller."""


def part_of(options: Mapping[str, object], shards: int) -> int:
    """Return how many calls with these options wait for room together in one of so many shards."""
    bounds = (options.get("max_length"), options.get("max_lane_length"))
    bound = min(cast("int", each) for each in bounds if each is not None)
    return max(1, min(MAX_ITEMS, bound // PART // shards))


def by_wait(calls: Sequence[Positioned]) -> dict[float, list[Positioned]]:
    """Return the calls by the seconds for which they wait for room."""
    found: dict[float, list[Positioned]] = {}
    for position, call in calls:
        found.setdefault(wait_in(call._options), []).append((position, call))
    return found


class WaitingDispatch:
    """Jobs for one shard that wait for room. Those that were refused are sent again.

    Attributes:
        done: the outcomes, by position.
        late: the error of a request that too few replicas had in time; its jobs are stored.
    """

    def __init__(
        self,
        keys: QueueKeys,
        calls: Sequence[Positioned],
        send: Callable[[Sequence[Call[Any]], str, bool], Awaitable[list[Dispatched]]],
    ) -> None:
        """Prepare it. `send` sends calls under the name of a waiting call, and waits for replicas or not."""
        self.done: dict[int, Dispatched] = {}
        self.late: NotReplicated | None = None
        self._keys = keys
        self._calls = calls
        self._send = send

    async def run(self, rooms: RoomChannels, wait: float, shards: int) -> None:
        """Send the jobs, part by part.

        Raises:
            QueueFull: the queue had no room for a part within `wait` seconds. Earlier jobs are stored.
        """
        part = part_of(self._calls[0][1]._options, shards)
        for chunk in in_chunks(self._calls, lambda each: len(each[1].task), most=part):
            left = list(chunk)

            async def attempt(waiter: str, left: list[Positioned] = left) -> None:
                await self._attempt(left, waiter)

            await rooms.when_room(self._keys, wait, attempt)

    async def _attempt(self, left: list[Positioned], waiter: str) -> None:
        """Send the remaining jobs of a part, and keep the refused ones in `left`."""
        try:
            answers = await self._send([call for _, call in left], waiter, self.late is None)
        except NotReplicated as late:
            answers, self.late = cast("list[Dispatched]", reply_in(late)), late
        refused: list[Positioned] = []
        for (position, call), answer in zip(left, answers, strict=True):
            if answer.outcome == "full":
                refused.append((position, call))
            else:
                self.done[position] = answer
        left[:] = refused
        if left:
            raise at_max_length(
                f"queue {self._keys.display_name!r} is at its max_length: {len(left):,} jobs were not stored"
            )
