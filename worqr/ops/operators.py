"""The operations of an operator on a queue: cancel, delete, pause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from worqr.command import Command
from worqr.keys import QueueKeys
from worqr.ops.replies import MAX_ITEMS, Reply, expect_ok, new_call, read_changed, status_word, text, wholes
from worqr.stored_values import exact

CANCEL_PAGE: Final = 1_000
"""Running tasks that one script cancels at most, so that it does not block the server for long."""
SCAN_LIMIT: Final = 10_000
"""Claims that one script inspects at most when it cancels by payload."""


@dataclass(frozen=True, slots=True)
class CancelReply:
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
