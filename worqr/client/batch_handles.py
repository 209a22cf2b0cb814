"""Batches that exist: a handle of one by its id or of the batch that a run belongs to, and the list of those of a queue."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from worqr import ops
from worqr.batch_keys import keys_at
from worqr.batches import BatchInfo, BatchRef
from worqr.client.batch import Batch, info_of
from worqr.client.client import Client
from worqr.client.producer import Producer
from worqr.keys import QueueKeys
from worqr.ops import MAX_ITEMS, BatchRow
from worqr.shard_layout import shard_of

_LONG_AGO: Final = datetime.fromtimestamp(0, UTC)


def batch_of_id(client: Client, keys: QueueKeys, id: str) -> Batch:
    """Return a handle of the batch with this id in a queue."""
    return IdentifiedBatch(client, Producer(client), keys, id)


def batch_of_ref(client: Client, producer: Producer, ref: BatchRef) -> Batch:
    """Return a handle of the batch that the record of a job names."""
    home = keys_at(client.settings.prefix, ref._home)  # pyright: ignore[reportPrivateUsage]
    return Batch(client, producer, home, ref.id, ref._token)  # pyright: ignore[reportPrivateUsage]


class IdentifiedBatch(Batch):
    """A batch that is known by the name of its queue and its id: its shard is computed when it is used."""

    @property
    def _home(self) -> QueueKeys:
        keys = super()._home
        shards = self._client.sharding.known_shards(keys)
        return shard_of(shards, self.id)


async def list_batches(client: Client, keys: QueueKeys, limit: int) -> list[BatchInfo]:
    """Return batches at home in a queue: those that have not ended first, then the newest."""
    found: list[BatchInfo] = []
    for shard in await client.sharding.shards(keys):
        _, rows = await client.ask(ops.list_batches(shard, 0, limit))
        found += [await info_of(client, shard, row) for row in rows if row.facts]
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
            await Batch(client, Producer(client), keys, row.id, row.facts["token"]).cancel(reason=reason)
