"""Reads the stored records of queues, and turns them into points: ``queue.history()``, and many queues in one round trip."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

from worqr import ops
from worqr.client.client import Client
from worqr.client.inspection import ask_each, ask_readable
from worqr.errors import RefusedByServer, UsageError
from worqr.history import History, add_points
from worqr.history_records import MINUTE_RECORDS, TEN_MINUTE_RECORDS, history_points
from worqr.keys import QueueKeys
from worqr.ops import Step, StoredHistory
from worqr.script_call import Call

MAX_MINUTES: Final = 10 * TEN_MINUTE_RECORDS


async def read_history(client: Client, keys: QueueKeys, minutes: object) -> History:
    """Return the last minutes of a queue, all its shards as one."""
    if isinstance(minutes, bool) or not isinstance(minutes, int) or not 1 <= minutes <= MAX_MINUTES:
        raise UsageError(f"minutes must be a whole number from 1 to {MAX_MINUTES} (3 days), not {minutes!r}")
    span = _Span.of(minutes)
    shards = await client.sharding.shards(keys)
    return span.history(keys.display_name, await ask_each(client, shards, span.request))


async def read_histories(client: Client, queues: Sequence[QueueKeys], minutes: int) -> list[History | None]:
    """Return the last minutes of these queues, in their order; None for a queue that the server refuses to read."""
    span = _Span.of(minutes)
    shards = [await client.sharding.shards(keys, declare=False) for keys in queues]
    try:
        found, _ = await ask_readable(client, list(chain(*shards)), span.request)
    except RefusedByServer:
        return [None] * len(queues)
    return [
        span.history(keys.display_name, [found[shard] for shard in every]) if found.keys() >= {*every} else None
        for keys, every in zip(queues, shards, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _Span:
    """The records of some minutes: how many there are, and the minutes between two of them."""

    step: Step
    number: int

    @classmethod
    def of(cls, minutes: int) -> _Span:
        step: Step = 1 if minutes <= MINUTE_RECORDS else 10
        return cls(step, -(-minutes // step))

    def request(self, keys: QueueKeys) -> Call[StoredHistory]:
        return ops.read_history(keys, self.step, self.number)

    def history(self, name: str, replies: Sequence[StoredHistory]) -> History:
        """Add up the shards of a queue."""
        points = [history_points(reply.records, reply.now, self.number, self.step) for reply in replies]
        return History(name, 60 * self.step, tuple(add_points(points)))
