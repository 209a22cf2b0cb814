"""`StartControls`: what may start of a queue, or of one of its lanes: pause it, resume it, and limit it. `Queue` inherits it."""

from __future__ import annotations

import heapq
from typing import Final, Literal

from worqr import ops
from worqr.client.cancellation import cancel_and_wait
from worqr.client.client import Client
from worqr.client.inspection import ask_each
from worqr.keys import QueueKeys
from worqr.lanes import check_lane, check_weight
from worqr.limits import DECLARES_NOTHING, Limit, check_limits, describe_limits, limits_text, parse_limits
from worqr.mesh_records import LaneInfo
from worqr.ops import CancelReply, LaneRow
from worqr.records import CancelCount
from worqr.shard_layout import shard_of
from worqr.stored_values import readable
from worqr.validation import Seconds, check_count, check_text, seconds

MOST_LANES: Final = 10_000
"""Lanes that one call looks at."""


class StartControls:
    """The part of `Queue` by which operators decide what may start. Its calls need ``mesh.connect()`` or ``join()``."""

    __slots__ = ("_client", "_keys")

    def __init__(self, client: Client, keys: QueueKeys) -> None:
        self._client = client
        self._keys = keys

    async def pause(self, reason: str = "", *, duration: Seconds | None = None, lane: str | None = None) -> None:
        """Stop all workers from taking tasks of this queue, or of one lane. Running tasks go on, and you can enqueue more.

        Several shards do not stop at one moment.

        Args:
            reason: A text for people; ``info().paused`` has it.
            duration: Seconds, more than 0, or a timedelta, after which the queue resumes by itself. None: when `resume` is
                called.
            lane: Pause this lane only; ``lanes()`` has the reason.

        Raises:
            UsageError: `duration` or `lane` is not valid.
        """
        check_text(reason, "reason")
        for_ms = None if duration is None else max(1, round(seconds(duration, "duration", positive=True) * 1000))
        if lane is not None:
            await self._set_lane(lane, "pause", reason, for_ms)
            await self._client.note(
                "lane_paused", queue=self._keys.display_name, text=f"{lane}: {reason}" if reason else lane
            )
            return
        shards = await self._client.sharding.shards(self._keys)
        for keys in shards:
            self._client.link_to(keys.name)  # `link_to` stores the name, so that operators find and resume the queue
        await ask_each(self._client, shards, lambda keys: ops.pause(keys, reason, for_ms))
        await self._client.note("paused", queue=self._keys.display_name, text=reason)

    async def resume(self, *, lane: str | None = None) -> None:
        """Let workers take tasks of this queue again.

        Args:
            lane: Resume this lane only.

        Raises:
            UsageError: `lane` is not valid.
        """
        if lane is not None:
            await self._set_lane(lane, "resume")
            await self._client.note("lane_resumed", queue=self._keys.display_name, text=lane)
            return
        await ask_each(self._client, await self._client.sharding.shards(self._keys), ops.resume)
        await self._client.note("resumed", queue=self._keys.display_name)

    async def set_limit(self, *limits: Limit, lane: str | None = None) -> None:
        """Limit what may start of this queue in the whole mesh, in place of what its handler declares, until `clear_limit`.

        A lower limit does not stop tasks that run. Several shards each have a part of it.

        Args:
            limits: At most four; all of them hold. None: the queue has no limit.
            lane: Limit this lane only.

        Raises:
            UsageError: There are too many, one is no `Limit`, or it is smaller than the number of shards; or `lane` is not valid.
        """
        checked = check_limits(limits, "limits of set_limit")
        if lane is not None:
            await self._set_lane(lane, "limit", limits_text(checked, self._keys.display_name))
            text = f"{lane}: {describe_limits(checked)}"
            await self._client.note("lane_limited", queue=self._keys.display_name, text=text)
            return
        shards = await self._client.sharding.shards(self._keys)
        texts = [limits_text(checked, self._keys.display_name, len(shards), n) for n in range(len(shards))]
        for keys, text in zip(shards, texts, strict=True):
            self._client.link_to(keys.name)
            await self._client.ask(ops.set_limits(keys, text))
        await self._client.note("limited", queue=self._keys.display_name, text=describe_limits(checked))

    async def clear_limit(self, *, lane: str | None = None) -> None:
        """Remove what `set_limit` has set: what the queue's handler declares holds again.

        Args:
            lane: Remove the limit of this lane only.

        Raises:
            UsageError: `lane` is not valid.
        """
        if lane is not None:
            await self._set_lane(lane, "limit", DECLARES_NOTHING)
            await self._client.note("lane_limit_cleared", queue=self._keys.display_name, text=lane)
            return
        shards = await self._client.sharding.shards(self._keys)
        await ask_each(self._client, shards, lambda keys: ops.set_limits(keys, DECLARES_NOTHING))
        await self._client.note("limit_cleared", queue=self._keys.display_name)

    async def lanes(self, *, limit: int = 100) -> list[LaneInfo]:
        """Return the lanes that have tasks, or are paused or set by an operator; those with the most tasks first.

        Args:
            limit: At most this many. They are the first of up to 10,000 lanes by name.

        Raises:
            UsageError: `limit` is not a whole number, at least 1.
        """
        check_count(limit, "limit")
        found: list[LaneInfo] = []
        for keys in await self._client.sharding.shards(self._keys):
            after, more = "", True
            while more and len(found) < MOST_LANES:
                rows, more = await self._client.ask(ops.list_lanes(keys, after))
                after = rows[-1].name if rows else ""
                found += map(_lane_info, rows)
        return heapq.nlargest(limit, found, key=lambda lane: (lane.waiting, lane.running))

    async def set_weight(self, lane: str, weight: int | None) -> None:
        """Set how many tasks of a lane start for each task of a lane of weight 1.

        Args:
            lane: The lane's name.
            weight: 1 to 1,000, until the next call. None: what the queue's handler declares, else 1.

        Raises:
            UsageError: `lane` or `weight` is not valid.
        """
        value = DECLARES_NOTHING if weight is None else str(check_weight(weight, "weight"))
        await self._set_lane(lane, "weight", value)
        text = f"{lane}: {'as declared' if weight is None else weight}"
        await self._client.note("lane_weighted", queue=self._keys.display_name, text=text)

    async def cancel_lane(self, lane: str, *, reason: str = "", wait: Seconds = 0) -> CancelCount:
        """Cancel all jobs of a lane: scheduled ones, those that a run of their id blocks, waiting ones and running ones.

        Jobs that are dispatched meanwhile may stay.

        Args:
            lane: The lane's name.
            reason: A text for people; `JobCancelled` has it.
            wait: Seconds to wait until the running jobs have ended. A slow handler raises nothing.

        Returns:
            The number of jobs that did not run yet, that ran, and that ended within `wait`.

        Raises:
            UsageError: `lane`, `reason` or `wait` is not valid.
        """
        check_text(reason, "reason")

        async def step(keys: QueueKeys, last: CancelReply | None) -> CancelReply:
            after = last.after if last else ops.FIRST_CANCEL_STEP
            return await self._client.ask(ops.cancel_lane(keys, lane, after, reason=reason))

        patience, keys = seconds(wait, "wait"), await self._lane_keys(lane)
        count = await cancel_and_wait(self._client.link, (keys,), step, patience)
        text = f"{lane}: {reason}" if reason else lane
        await self._client.note(
            "lane_cancelled", queue=self._keys.display_name, count=count.waiting + count.running, text=text
        )
        return count

    async def _set_lane(
        self,
        lane: str,
        setting: Literal["weight", "limit", "pause", "resume"],
        value: str = "",
        duration_ms: int | None = None,
    ) -> None:
        keys = await self._lane_keys(lane)
        self._client.link_to(keys.name)
        await self._client.ask(ops.set_lane(keys, lane, setting, value, duration_ms))

    async def _lane_keys(self, lane: str) -> QueueKeys:
        """Return the keys of the shard of a lane."""
        return shard_of(await self._client.sharding.shards(self._keys), check_lane(lane))


def _lane_info(row: LaneRow) -> LaneInfo:
    held_for = None if row.opens_in_ms is None else row.opens_in_ms / 1000
    limits = parse_limits(row.limits)
    return LaneInfo(readable(row.name), row.waiting, row.running, row.weight, limits, row.paused, row.held, held_for)
