"""The key and the channel of producers that wait for room in a queue. `worqr.keys` has all other keys.

`worqr/lua/_room.lua` says what is in them.
"""

from __future__ import annotations

from dataclasses import dataclass

from worqr.keys import QueueKeys


@dataclass(frozen=True, slots=True)
class RoomKeys:
    """The key and the channel of the producers that wait for room in `queue`."""

    queue: QueueKeys

    @property
    def waiters(self) -> str:
        """HASH: the name of a call that waits -> what it waits for; expires 10 s after the last of them."""
        return f"{self.queue.base}:waiters"

    def channel(self, name: str) -> str:
        """Channel: the number of a call of one program that has room now."""
        return f"{self.queue.base}:room:{name}"
