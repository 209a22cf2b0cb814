"""What operators do with batches, and see of them. Acts also write an entry into the log of the mesh. For `cli` and `dashboard`.

A program that cancels its own batches calls `Batch.cancel`, which writes no entry, so that it does not flood the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from worqr import ops
from worqr.client.batch import Batch
from worqr.client.client import Client
from worqr.client.dead_letters import Aside, list_members
from worqr.errors import NoResult
from worqr.job_options import check_id
from worqr.keys import QueueKeys, check_name
from worqr.records import Failed


async def cancel_and_note(client: Client, batch: Batch, reason: str) -> int | None:
    """Cancel a batch. Return how many of its jobs had not ended; None if the batch had. Raises what `Batch.cancel` raises."""
    pending = (await batch.info()).pending
    if not await batch.cancel(reason=reason):
        return None
    text = f"{batch.id}: {reason}" if reason else batch.id
    await client.note("batch_cancelled", queue=batch.queue, count=pending, text=text)
    return pending


async def retry_and_note(client: Client, batch: Batch) -> int:
    """Put the failed jobs of a batch back. Return their number. Raises what `Batch.retry_failed` raises."""
    count = await batch.retry_failed()
    await client.note("batch_retried", queue=batch.queue, count=count, text=batch.id)
    return count


async def failed_members(
    client: Client, home: str, id: str, aside: Aside, limit: int, **options: Any
) -> Sequence[Failed]:
    """Return the entries of a dead-letter queue that belong to a batch; see `list_members`.

    Raises:
        NoResult: The queue `home` has no batch with this id.
    """
    keys = await client.sharding.shard_of_id(
        QueueKeys(client.settings.prefix, check_name(home)), check_id(id, generated=True)
    )
    row = await client.ask(ops.read_batch(keys, id))
    if row is None:
        raise NoResult(f"queue {home!r} has no batch {id!r}: it never existed, or its record was deleted after its end")
    return await list_members(aside, row.facts.get("token", ""), limit, **options)
