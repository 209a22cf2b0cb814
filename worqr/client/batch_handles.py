"""Batches that exist: a handle of one by its id or of the batch that a run belongs to, and the list of those of a queue."""

# A Batch hides its private methods from users.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final, Protocol, cast

from worqr import ops
from worqr.batch_keys import keys_at
from worqr.batches import BatchInfo, BatchRef
from worqr.client.batch import Batch
from worqr.client.batch_block import OpenBatch, Plan
from worqr.client.batch_reader import infos_of
from worqr.client.client import Client
from worqr.client.producer import Producer
from worqr.keys import QueueKeys
from worqr.ops import MAX_ITEMS, BatchRow

_LONG_AGO: Final = datetime.fromtimestamp(0, UTC)


class _HasProducer(Protocol):
    """A client with the producer of its mesh, as each mesh has one."""

    @property
    def producer(self) -> Producer: ...


def batch_of_id(client: Client, keys: QueueKeys, id: str) -> Batch:
    """Return a handle of the batch with this id in a queue."""
    return IdentifiedBatch(client, cast("_HasProducer", client).producer, keys, id)


class BatchMaker:
    """Makes the batches of one mesh. A recording replaces it."""

    def open(self, client: Client, producer: Producer, plan: Plan, parent: Batch | None) -> OpenBatch:
        """Return a new batch, which is stored nowhere yet."""
        return OpenBatch(client, producer, plan, parent)

    def of_ref(self, client: Client, producer: Producer, ref: BatchRef) -> Batch:
        """Return a handle of the batch that the record of a job names."""
        prefix = client.settings.prefix
        home = keys_at(prefix, f"{prefix}:{ref._home}")
        return Batch(client, producer, home, ref.id, ref._token, inside=True)


class IdentifiedBatch(Batch):
    """A batch that is known by the name of its queue and its id."""

    async def _home(self) -> QueueKeys:
        return await self._client.sharding.shard_of_id(*self._located())


async def list_batches(client: Client, keys: QueueKeys, limit: int) -> list[BatchInfo]:
    """Return batches at home in a queue: those that have not ended first, then the newest."""
    shards = await client.sharding.shards(keys)
    replies = await client.link.call_all([ops.list_batches(shard, 0, limit) for shard in shards])
    rows = [(shard, row) for shard, (_, rows) in zip(shards, replies, strict=True) for row in rows if row.facts]
    found = await infos_of(client, rows)
    found.sort(key=lambda info: info.created or _LONG_AGO, reverse=True)
    found.sort(key=lambda info: info.state == "ended")
    return found[:limit]


async def cancel_batches(client: Client, keys: QueueKeys, reason: str) -> None:
    """Cancel the batches at home in one queue or shard that have not ended."""
    found: list[BatchRow] = []
    number = 1
    while len(found) < number:
        number, rows = await client.ask(ops.list_batches(keys, len(found), MAX_ITEMS))
        if not rows:
            break
        found += rows
    for row in found:
        if row.facts.get("state") in {"open", "sealed"} and "cancel_reason" not in row.facts:
            await Batch(client, cast("_HasProducer", client).producer, keys, row.id, row.facts.get("token", "")).cancel(
                reason=reason
            )
