"""`infos_of`: makes the `BatchInfo` of batches from their records, and from what the queues of their jobs have counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, cast

from worqr import ops
from worqr.batch_keys import keys_at
from worqr.batches import BatchInfo, BatchState, sum_counts
from worqr.client.client import Client
from worqr.keys import QueueKeys
from worqr.ops import MAX_ITEMS, BatchRow
from worqr.remote_error import meta_of
from worqr.stored_values import readable, whole
from worqr.validation import moment

_COUNTS: Final = ("added", "finished", "failed", "cancelled", "lost")
"""Fields of a part, in the order of `PartRow.counts`."""


async def infos_of(client: Client, rows: Sequence[tuple[QueueKeys, BatchRow]]) -> list[BatchInfo]:
    """Return what is known of batches, each with its home. Open parts in other queues are asked for their counters."""
    prefix = client.settings.prefix
    away = [(row, part) for home, row in rows for part in row.parts if part.open and part.base != home.base]
    replies: list[tuple[int, Mapping[str, str]]] = []
    for start in range(0, len(away), MAX_ITEMS):
        some = away[start : start + MAX_ITEMS]
        asked = [ops.read_part(keys_at(prefix, part.base), _token(row)) for row, part in some]
        replies += await client.link.call_all(asked)
    newest = {
        (_token(row), part.base): tuple(whole(fields.get(name), 0) for name in _COUNTS)
        for (row, part), (_, fields) in zip(away, replies, strict=True)
        if fields
    }
    return [_info_of(prefix, home, row, newest) for home, row in rows]


def _info_of(
    prefix: str, home: QueueKeys, row: BatchRow, newest: Mapping[tuple[str, str], tuple[int, ...]]
) -> BatchInfo:
    facts = row.facts
    counts = [newest.get((_token(row), part.base), part.counts) for part in row.parts]
    queues = {readable(keys_at(prefix, part.base).display_name) for part in row.parts}
    base, newline, job = facts.get("follow_up", "").partition("\n")
    return BatchInfo(
        *(
            readable(row.id),
            home.display_name,
            cast("BatchState", readable(facts.get("state", ""))),
            *sum_counts(counts),
        ),
        endings=whole(facts.get("endings"), 0),
        meta=meta_of(readable(facts.get("meta", ""))),
        created=moment(whole(facts.get("made_at"))),
        ended=moment(whole(facts.get("ended_at"))),
        cancel_reason=None if "cancel_reason" not in facts else readable(facts["cancel_reason"]),
        queues=tuple(sorted(queues)),
        follow_up=(readable(keys_at(prefix, base).display_name), readable(job)) if newline else None,
    )


def _token(row: BatchRow) -> str:
    return row.facts.get("token", "")
