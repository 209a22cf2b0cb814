"""The dead-letter queue (failed and undecodable tasks): list, retry and drop its records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from worqr.command import Command
from worqr.keys import QueueKeys
from worqr.ops.replies import MAX_BYTES, MAX_ITEMS, Reply, new_call, pairs, status_word, text
from worqr.stored_values import exact, stored_word, whole

MAX_HEADS: Final = 1024 * 1024
"""Bytes of payloads that one request reads to list the beginning of each. A hash field can only be read whole."""
DeadLetterList = Literal["failed", "undecodable"]
"""One of the two dead-letter lists of a queue."""
DeadLetterClaim = int | bytes
"""A claim under which a task failed; as bytes if another program has written something else there."""


@dataclass(frozen=True, slots=True)
class DeadLetterPage:
    """Reply of list_aside: the claim and record fields of each entry, and the cursor of the next page if there is one.

    `number`: the records of these times on this page and behind it, whatever their error is.
    """

    more: bool
    after: str
    after_ms: str
    number: int
    records: list[tuple[DeadLetterClaim, dict[str, bytes]]]


def _claim(stored: bytes) -> DeadLetterClaim:
    found = whole(stored)
    return stored if found is None or b"%d" % found != stored else found


def list_aside(
    keys: QueueKeys,
    which: DeadLetterList,
    limit: int,
    *,
    after: str = "-",
    after_ms: str = "0",
    before_ms: int | None = None,
    error: str = "",
    bare: bool = False,
    since_ms: int | None = None,
    head: int | None = None,
    batch: str = "",
) -> Command[DeadLetterPage]:
    """Return one page of records, newest first.

    With a `limit` of 0, only their number; with `bare`, only their claims. `head`: only so many bytes of larger payloads; None:
    whole payloads. `batch`: only members of the batch with this token. The field ``size`` of a record is that of its payload.
    """

    def read(reply: Reply) -> DeadLetterPage:
        records = [(_claim(entry[0]), _record(entry)) for entry in reply[4:]]
        return DeadLetterPage(status_word(reply) == "more", exact(reply[1]), text(reply[2]), int(reply[3]), records)

    before = "+inf" if before_ms is None else before_ms
    since = "-inf" if since_ms is None else since_ms
    budget = MAX_BYTES if head is None else MAX_HEADS
    times = (after, after_ms, before)
    args = (
        stored_word(which),
        min(limit, MAX_ITEMS),
        MAX_ITEMS,
        budget,
        *times,
        error,
        int(bare),
        since,
        -1 if head is None else head,
        batch,
    )
    return new_call("list_aside", keys.base, args, read)


def _record(entry: Sequence[Any]) -> dict[str, bytes]:
    return _fields(entry[1]) | {"size": b"%d" % int(entry[2])} if len(entry) > 1 and entry[1] else {}


def _fields(flat: Sequence[Any]) -> dict[str, bytes]:
    return {text(name): value for name, value in pairs(flat)}


def find_aside(keys: QueueKeys, which: DeadLetterList, ids: Sequence[str]) -> Command[list[DeadLetterClaim]]:
    """Return the claims under which up to MAX_ITEMS jobs failed, newest first. An id that is given twice yields two claims."""

    def read(reply: Reply) -> list[DeadLetterClaim]:
        return [_claim(claim) for claim in reply[1:]]

    return new_call("find_aside", keys.base, (stored_word(which), *ids), read)


def _count(reply: Reply) -> int:
    status_word(reply)
    return int(reply[1])


def retry_aside(keys: QueueKeys, which: DeadLetterList, claims: Sequence[DeadLetterClaim]) -> Command[int]:
    """Turn up to MAX_ITEMS records into jobs; return how many."""
    return new_call("retry_aside", keys.base, (stored_word(which), *claims), _count, numbered=True)


def drop_aside(keys: QueueKeys, which: DeadLetterList, claims: Sequence[DeadLetterClaim]) -> Command[int]:
    """Drop up to MAX_ITEMS records; return how many."""
    return new_call("drop_aside", keys.base, (stored_word(which), *claims), _count, numbered=True)


def count_errors(
    keys: QueueKeys, which: DeadLetterList, rank: int, limit: int = MAX_ITEMS
) -> Command[tuple[bool, dict[str, int]]]:
    """Count `limit` records by the type of their error, from a rank on; and return whether there are more behind them."""

    def read(reply: Reply) -> tuple[bool, dict[str, int]]:
        return status_word(reply) == "more", {text(name): int(number) for name, number in pairs(reply[1:])}

    return new_call("count_errors", keys.base, (stored_word(which), rank, limit), read)
