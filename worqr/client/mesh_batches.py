"""`Batches`: makes batches. `Mesh` inherits it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Final, Unpack

from worqr.client.async_context import async_block
from worqr.client.batch import Batch
from worqr.client.batch_block import BatchOptions, batch_block, plan_of
from worqr.client.mesh_client import MeshClient

BATCH: Final = (
    "write `async with mesh.batch(...) as batch:`, or without an event loop `with mesh.blocking.batch(...) as batch:`"
)


class Batches:
    """The part of `Mesh` that makes batches. Its calls need ``mesh.connect()`` or ``join()``."""

    _client: MeshClient

    @async_block(BATCH)
    async def batch(self, *, parent: Batch | None = None, **options: Unpack[BatchOptions]) -> AsyncGenerator[Batch]:
        """Make a batch: jobs of any functions and queues that are counted, watched and cancelled together.

        Add jobs in the block with ``batch.dispatch(call)``; they may run at once. The end of the block seals the batch, and an
        error in it cancels the batch. When all jobs have ended for good, one follow-up is enqueued: `then` if all have finished,
        else `otherwise`. A batch without jobs ends at once, with `then`.

        Args:
            parent: A batch that this one is a job of: it does not end before. The batch of a running job is
                ``mesh.current_batch()``.
            **options: See `BatchOptions`.

        Yields:
            Batch: The batch.

        Raises:
            UsageError: An option does not exist or is not valid; or outside `connect` and `join`.
            Duplicate: The home queue has a batch with this id, which has not ended, or ended less than its `keep` ago.
            BatchEnded: `parent` has ended, or was cancelled.
            Unavailable: The server did not reply within `patience`.
        """
        async with batch_block(self._client.new_batch(plan_of(options), parent)) as batch:
            yield batch
