"""The keys of the lanes of a queue: name, type, lifetime. `worqr.keys` has all other keys.

`worqr/lua/_lanes.lua` and ``_turns.lua`` say what is in them. All but the rules are deleted when no lane has a task or a claim.
"""

from __future__ import annotations

from dataclasses import dataclass

from worqr.keys import QueueKeys


@dataclass(frozen=True, slots=True)
class LaneKeys:
    """The keys of the lanes of `queue`."""

    queue: QueueKeys

    @property
    def base(self) -> str:
        """HASH: the epoch, the number of references in lanes, and the state of the turns."""
        return f"{self.queue.base}:lanes"

    @property
    def ring(self) -> str:
        """ZSET of the lanes of which a task may start, by turn."""
        return f"{self.base}:ring"

    @property
    def held(self) -> str:
        """ZSET of the lanes with tasks of which none may start, by turn."""
        return f"{self.base}:held"

    @property
    def idle(self) -> str:
        """ZSET of lanes without tasks, by the turn that is remembered of them."""
        return f"{self.base}:idle"

    @property
    def names(self) -> str:
        """ZSET of the lanes with tasks, all with the score 0, so by name."""
        return f"{self.base}:names"

    @property
    def opens(self) -> str:
        """ZSET of lanes by the time in ms at which they may start tasks again, if time alone decides it."""
        return f"{self.base}:opens"

    @property
    def claims(self) -> str:
        """HASH: claim -> its lane; also a colon and the id of each suspect that waits: it has its place in the lane already."""
        return f"{self.base}:claims"

    @property
    def running(self) -> str:
        """HASH: lane -> how many of `claims` are of it."""
        return f"{self.base}:running"

    @property
    def rules(self) -> str:
        """HASH: what workers declare, and what an operator has set; the latter stays until it is cleared."""
        return f"{self.base}:rules"

    @property
    def trash(self) -> str:
        """ZSET of the lanes of a deleted queue that are still to be purged."""
        return f"{self.queue.trash}:lanes"

    def tasks(self, lane: str, epoch: int = 0) -> str:
        """LIST: the references of a lane. Each clearing of the queue begins a new epoch."""
        return f"{self.queue.base}:lane:{epoch}:{lane}"

    def starts(self, period: str, lane: str) -> str:
        """LIST: the starts of a lane in the last `period` ms, as `QueueKeys.starts`."""
        return f"{self.queue.starts(period)}:{lane}"
