"""The operations of an operator on a queue: cancel, delete, pause, lanes, dead letters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec

from worqr.command import (
    MAX_BYTES,
    MAX_ITEMS,
    Command,
    Reply,
    expect_ok,
    new_call,
    pairs,
    read_changed,
    status_word,
    text,
    wholes,
)
from worqr.keys import QueueKeys
from worqr.stored_values import exact, stored_word, whole

CANCEL_PAGE: Final = 1_000
"""Running tasks that one script cancels at most, so that it does not block the server for long."""
SCAN_LIMIT: Final = 10_000
"""Claims that one script inspects at most when it cancels by payload."""


class CancelReply(msgspec.Struct, frozen=True):
    """Reply of a cancel: tasks removed while waiting, claims marked while running, and the cursor if there is more."""

    more: bool
    waiting: int
    claims: list[int]
    cursor: str
    after: str


def cancel_task(
    keys: QueueKeys, task: bytes, cursor: str = "0", after: str = "-", *, reason: str = ""
) -> Command[CancelReply]:
    """Cancel every task with this payload; call again with cursor and after while there is more."""

    def read(reply: Reply) -> CancelReply:
        more = status_word(reply) == "more"
        return CancelReply(more, int(reply[1]), wholes(reply[5:]), text(reply[3]), exact(reply[4]))

    args = (task, cursor, after, CANCEL_PAGE, SCAN_LIMIT, reason)
    return new_call("cancel_task", keys.base, args, read, numbered=True, size=len(task))


def cancel_all(keys: QueueKeys, after: str = "-", *, reason: str = "") -> Command[CancelReply | None]:
    """Cancel every task; call again with `after` while there is more. Returns None if purge_queue must be called first."""

    def read(reply: Reply) -> CancelReply | None:
        word = status_word(reply)
        if word == "busy":
            return None
        return CancelReply(word == "more", int(reply[1]), wholes(reply[4:]), "-", exact(reply[3]))

    return new_call("cancel_all", keys.base, (after, CANCEL_PAGE, reason), read, numbered=True)


def cancel_claims(keys: QueueKeys, claims: Sequence[int], *, reason: str = "") -> Command[list[int]]:
    """Cancel up to MAX_ITEMS running tasks by their claims; return those that run still."""

    def read(reply: Reply) -> list[int]:
        status_word(reply)
        return wholes(reply[1:])

    return new_call("cancel_claims", keys.base, (reason, *claims), read, numbered=True)


def delete_queue(keys: QueueKeys) -> Command[bool]:
    """Move everything that waits to the trash; return False if purge_queue must be called first."""

    def read(reply: Reply) -> bool:
        return status_word(reply) != "busy"

    return new_call("delete_queue", keys.base, (), read, numbered=True)


def purge_queue(keys: QueueKeys, limit: int | None = None) -> Command[bool]:
    """Delete one batch of the trash that delete_queue and cancel_all filled; return True if there is more.

    A batch has `limit` plain tasks (None: MAX_ITEMS), or a tenth as many jobs. The server deletes 1,000 plain tasks, or 100 jobs,
    in 1 to 2 ms.
    """

    def read(reply: Reply) -> bool:
        return status_word(reply) == "more"

    return new_call("purge_queue", keys.base, (MAX_ITEMS if limit is None else limit,), read)


def pause(keys: QueueKeys, reason: str, duration_ms: int | None = None) -> Command[str]:
    """Stop claims of the queue's tasks, for some time or until it is resumed."""
    args = (reason, "-" if duration_ms is None else duration_ms)
    return new_call("pause", keys.base, args, expect_ok, numbered=True)


def set_limits(keys: QueueKeys, limits: str) -> Command[bool]:
    """Set the limits that come before those that the workers declare; return True if that changed what holds.

    `limits`: see `worqr.limits`; `DECLARES_NOTHING` removes them, so that those of the workers hold again.
    """
    return new_call("set_limits", keys.base, (limits,), read_changed, numbered=True)


def resume(keys: QueueKeys) -> Command[str]:
    """Allow claims of the queue's tasks again."""
    return new_call("resume", keys.base, (), expect_ok, numbered=True)


# The lanes of a queue: list them, set how one starts its tasks, cancel one.

FIRST_CANCEL_STEP: Final = "suspended 0"


class LaneRow(msgspec.Struct, frozen=True):
    """One lane, as list_lanes returns it.

    Attributes:
        limits: text of `worqr.limits`.
        opens_in_ms: ms until time lets it start a task, None if that is not known.
        held: none of its tasks may start now.
    """

    name: str
    waiting: int
    running: int
    weight: int
    limits: str
    paused: str | None
    opens_in_ms: int | None
    held: bool


def list_lanes(
    keys: QueueKeys, after: str = "", limit: int = MAX_ITEMS, *, only: str = ""
) -> Command[tuple[list[LaneRow], bool]]:
    """Return one page of the lanes that come after the name `after`, and whether there are more; or `only` one lane.

    The first page also has lanes without tasks that run some, are paused, or have rules of an operator.
    """

    def read(reply: Reply) -> tuple[list[LaneRow], bool]:
        more = status_word(reply) == "more"
        rows: list[LaneRow] = []
        for name, waiting, running, weight, limits, paused, opens_in, held in reply[1:]:
            opens = whole(opens_in)
            why = None if paused is None else text(paused)
            counted = whole(waiting, 0), whole(running, 0), whole(weight, 1)
            rows.append(LaneRow(exact(name), *counted, text(limits), why, opens, bool(held)))
        return rows, more

    return new_call("list_lanes", keys.base, (after, limit, only), read)


def set_lane(
    keys: QueueKeys,
    lane: str,
    setting: Literal["weight", "limit", "pause", "resume"],
    value: str = "",
    duration_ms: int | None = None,
) -> Command[str]:
    """Set the weight or the limit (``*``: what workers declare) of a lane, or pause it with a reason, or resume it."""
    args = (lane, setting, value, "-" if duration_ms is None else duration_ms)
    return new_call("set_lane", keys.base, args, expect_ok, numbered=True)


def cancel_lane(
    keys: QueueKeys, lane: str, after: str = FIRST_CANCEL_STEP, *, reason: str = "", budget: int = CANCEL_PAGE
) -> Command[CancelReply]:
    """Cancel tasks of a lane; call again with `after` while there is more."""

    def read(reply: Reply) -> CancelReply:
        more = status_word(reply) == "more"
        return CancelReply(more, int(reply[1]), wholes(reply[4:]), "-", exact(reply[3]))

    return new_call("cancel_lane", keys.base, (lane, after, budget, reason), read, numbered=True)


# The dead-letter queue (failed and undecodable tasks): list, retry and drop its records.

MAX_HEADS: Final = 1024 * 1024
"""Bytes of payloads that one request reads to list the beginning of each. A hash field can only be read whole."""
DeadLetterList = Literal["failed", "undecodable"]
"""One of the two dead-letter lists of a queue."""
DeadLetterClaim = int | bytes
"""A claim under which a task failed; as bytes if another program has written something else there."""


class DeadLetterPage(msgspec.Struct, frozen=True):
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
