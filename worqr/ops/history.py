"""The history of a queue: the leader stores records of it in the server, and callers read them (`worqr.history_records`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from worqr.command import Command
from worqr.errors import WorqrBug
from worqr.history_records import Record, decode_record, decode_records
from worqr.keys import QueueKeys, RegistryKeys
from worqr.ops.replies import Reply, expect_ok, new_call, pairs, status_word
from worqr.stored_values import exact, whole

HISTORY_EXPIRE_S: Final = 8 * 86400
"""How long a history is kept after its last record."""

Step = Literal[1, 10]
"""Minutes of a record: there are two rings."""


@dataclass(frozen=True, slots=True)
class StoredHistory:
    """Reply of read_history: the queue at this moment, and the stored records: those asked for and the newest one before them."""

    now: Record
    records: list[Record]


def _record(stored: bytes) -> Record:
    record = decode_record(stored)
    if record is None:
        raise WorqrBug("the server returned an empty record of the history")
    return record


def sample_queue(
    keys: QueueKeys, *, create: bool = False, since: int = 0, age_ms: int | None = None
) -> Command[Record | None]:
    """Store a record in the history of a queue, and return it; None if the queue has no history.

    Args:
        keys: the keys of the queue.
        create: begin a history if there is none.
        since: as in a record.
        age_ms: for how long the oldest task has waited, for a plain task.
    """

    def read(reply: Reply) -> Record | None:
        return None if status_word(reply) == "missing" else _record(reply[1])

    args = (HISTORY_EXPIRE_S, 1 if create else 0, since, -1 if age_ms is None else age_ms)
    return new_call("sample_queue", keys.base, args, read)


def read_history(keys: QueueKeys, step: Step, number: int) -> Command[StoredHistory]:
    """Return the last records of a queue: those of this many minutes, or of ten times as many."""

    def read(reply: Reply) -> StoredHistory:
        parts = [part for part in reply[2:] if part is not None]
        return StoredHistory(_record(reply[1]), [record for part in parts for record in decode_records(part)])

    return new_call("read_history", keys.base, (step, number), read)


def drop_history(keys: QueueKeys) -> Command[str]:
    """Delete the history of a queue."""
    return new_call("drop_history", keys.base, (), expect_ok)


def note_histories(keys: RegistryKeys, names: Sequence[str] = (), *, dropped: str = "") -> Command[dict[str, int]]:
    """Note that these queues have a history, and that one has none any more. Return all that have one, with the minute of the
    last note of each.
    """

    def read(reply: Reply) -> dict[str, int]:
        status_word(reply)
        return {exact(name): whole(minute, 0) for name, minute in pairs(reply[1:])}

    return new_call("note_histories", keys.base, (HISTORY_EXPIRE_S, dropped, *names), read)
