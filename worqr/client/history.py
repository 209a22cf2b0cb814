"""``queue.history()``: reads the stored records of a queue, and turns them into points. For `worqr.client.queue_operations`."""

from __future__ import annotations

from typing import Final

from worqr import ops
from worqr.client.client import Client
from worqr.client.inspection import ask_each
from worqr.errors import UsageError
from worqr.history import History, add_points
from worqr.history_records import MINUTE_RECORDS, TEN_MINUTE_RECORDS, history_points
from worqr.keys import QueueKeys
from worqr.ops import Step

MAX_MINUTES: Final = 10 * TEN_MINUTE_RECORDS


async def read_history(client: Client, keys: QueueKeys, minutes: object) -> History:
    """Return the last minutes of a queue, all its shards as one."""
    if isinstance(minutes, bool) or not isinstance(minutes, int) or not 1 <= minutes <= MAX_MINUTES:
        raise UsageError(f"minutes must be a whole number from 1 to {MAX_MINUTES} (3 days), not {minutes!r}")
    step: Step = 1 if minutes <= MINUTE_RECORDS else 10
    number = -(-minutes // step)
    shards = await client.sharding.shards(keys)
    replies = await ask_each(client, shards, lambda each: ops.read_history(each, step, number))
    points = [history_points(reply.records, reply.now, number, step) for reply in replies]
    return History(keys.display_name, 60 * step, tuple(add_points(points)))
