"""The snapshot of the mesh: the leader's scan stores it, and programs that look at the mesh read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from worqr.keys import RegistryKeys
from worqr.ops.replies import Reply, expect_ok, new_call, status_word
from worqr.script_call import Call

WAITING_EXPIRE_S: Final = 10
SNAPSHOT_EXPIRE_S: Final = 15
WATCHED_EXPIRE_S: Final = 30
"""How long the leader goes on writing snapshots after the last read."""


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """Reply of read_snapshot: the server's time, and the snapshot as it is stored; None if there is none. `memory`: the used part
    of the limit of the server's memory; None if there is none, or the user may not ask.
    """

    now_ms: int
    stored: bytes | None
    memory: float | None = None


def post_scan(keys: RegistryKeys, waiting: Sequence[str], snapshot: bytes = b"") -> Call[str]:
    """Announce the queues with waiting tasks to every heartbeat, and store the snapshot, if there is one."""
    args: tuple[bytes | str | int, ...] = (WAITING_EXPIRE_S, SNAPSHOT_EXPIRE_S, snapshot, keys.prefix, *waiting)
    return new_call("post_scan", keys.base, (keys.waiting, keys.snapshot), args, expect_ok, size=len(snapshot))


def read_snapshot(keys: RegistryKeys) -> Call[StoredSnapshot]:
    """Return the newest snapshot, and let the leader go on writing snapshots."""

    def read(reply: Reply) -> StoredSnapshot:
        status_word(reply)
        used, limit = int(reply[3]), int(reply[4])
        return StoredSnapshot(int(reply[1]), reply[2], used / limit if limit else None)

    return new_call("read_snapshot", keys.base, (keys.snapshot, keys.watched), (WATCHED_EXPIRE_S,), read)
