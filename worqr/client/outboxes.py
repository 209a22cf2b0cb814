"""What the workers that look after outboxes in databases say of their tables, for people, metrics and each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from worqr import ops
from worqr.keys import RegistryKeys

if TYPE_CHECKING:
    from worqr.client.client import Client


@dataclass(frozen=True, slots=True)
class Facts:
    """What is stored of a table. Times are in ms, by the clock of the database.

    Attributes:
        covered: since when each sweep has reached the end of the table.
        seen: the last sweep.
        rows, failed, held: how many rows there are.
        oldest: age of the oldest that waits.
        table: its name.
    """

    covered: int = 0
    seen: int = 0
    rows: int = 0
    oldest: int = 0
    failed: int = 0
    held: int = 0
    table: str = ""


_facts_of = msgspec.json.Decoder(Facts).decode


def read_facts(stored: str) -> Facts:
    """Return what is stored of an outbox; nothing if another program wrote it."""
    try:
        return _facts_of(stored)
    except msgspec.MsgspecError:
        return Facts()


@dataclass(frozen=True, slots=True)
class OutboxInfo:
    """An outbox for people, as the worker sees it that looks after it. Times are in seconds.

    Attributes:
        id: the random id that its table has.
        table: the name of the table.
        rows: how many wait.
        oldest: the age of the oldest of them.
        failed, held: how many were given up, or are held.
        age: seconds since a worker has looked after it; 0: one does.
    """

    id: str
    table: str
    rows: int
    oldest: float
    failed: int
    held: int
    age: float


async def outboxes_of(client: Client) -> list[OutboxInfo]:
    """Return the outboxes of a mesh, by the names of their tables.

    Raises:
        RefusedByServer, Unavailable: as any request.
    """
    stored = await client.ask(ops.list_outboxes(RegistryKeys(client.settings.prefix)))
    found = [
        OutboxInfo(each.id, told.table, told.rows, told.oldest / 1000, told.failed, told.held, each.idle_ms / 1000)
        for each, told in ((each, read_facts(each.facts)) for each in stored)
    ]
    return sorted(found, key=lambda info: (info.table, info.id))
