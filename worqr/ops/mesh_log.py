"""The log of the mesh: what has happened in it, for people."""

from __future__ import annotations

from typing import Final

from worqr.command import Command
from worqr.keys import RegistryKeys
from worqr.mesh_records import LogEntry
from worqr.ops.replies import Reply, expect_ok, new_call, pairs, status_word, text
from worqr.stored_values import whole
from worqr.validation import from_ms

MAX_LOG_TEXT: Final = 300
"""Characters of a text in the log."""


def note_event(
    keys: RegistryKeys,
    kind: str,
    *,
    who: str = "",
    queue: str = "",
    worker: str = "",
    job: str = "",
    count: int | None = None,
    text: str = "",
) -> Command[str]:
    """Append an entry."""
    args = (kind, who, queue, worker, job, "" if count is None else count, text[:MAX_LOG_TEXT])
    return new_call("note_event", keys.base, args, expect_ok, numbered=True)


def list_events(keys: RegistryKeys, limit: int, after: str = "") -> Command[list[LogEntry]]:
    """Return the newest entries, or those after the entry with the id `after`; the oldest first."""

    def read(reply: Reply) -> list[LogEntry]:
        status_word(reply)
        found = [
            _entry(text(entry), {text(name): text(value) for name, value in pairs(fields)})
            for entry, fields in reply[1:]
        ]
        return found if after else found[::-1]

    return new_call("list_events", keys.base, (limit, after), read)


def _entry(id: str, fields: dict[str, str]) -> LogEntry:
    return LogEntry(
        id=id,
        at=from_ms(whole(id.partition("-")[0], 0)),
        kind=fields.get("kind", ""),
        who=fields.get("who", ""),
        queue=fields.get("queue", ""),
        worker=fields.get("worker", ""),
        job=fields.get("job", ""),
        count=whole(fields.get("n")),
        text=fields.get("text", ""),
    )
