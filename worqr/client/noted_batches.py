"""What operators do with batches: each act also writes an entry into the log of the mesh. For the command line and the dashboard.

A program that cancels its own batches calls `Batch.cancel`, which writes no entry, so that it does not flood the log.
"""

from __future__ import annotations

from worqr.client.batch import Batch
from worqr.client.client import Client


async def cancel_and_note(client: Client, batch: Batch, reason: str) -> int | None:
    """Cancel a batch. Return how many of its jobs had not ended; None if the batch had ended. Raises what `Batch.cancel` raises."""
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
