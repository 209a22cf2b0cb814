"""Read the log of the mesh. `Client.note` writes its entries about actions, and scripts of the registry those about workers."""

from __future__ import annotations

import re
from typing import Final

from worqr import ops
from worqr.client.client import Client
from worqr.errors import UsageError
from worqr.keys import RegistryKeys
from worqr.mesh_records import LogEntry
from worqr.ops import MAX_ITEMS
from worqr.validation import check_count, check_text

ENTRY_ID: Final = re.compile(r"[0-9]{1,19}(-[0-9]{1,19})?")


async def read_log(client: Client, limit: int, after: str) -> list[LogEntry]:
    """Return the newest entries, or those after the entry `after`, the oldest first. Raises UsageError for wrong arguments."""
    if check_count(limit, "limit") > MAX_ITEMS:
        raise UsageError(f"limit must be at most {MAX_ITEMS}, not {limit}; pass the last id as after= to read on")
    if check_text(after, "after") and not ENTRY_ID.fullmatch(after):
        raise UsageError(
            f"after= must be the id of an entry of mesh.log(), such as '1763689200000-0', not {after[:100]!r}"
        )
    return await client.ask(ops.list_events(RegistryKeys(client.settings.prefix), limit, after))
