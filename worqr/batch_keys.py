"""The keys of batches: name, type, lifetime. `worqr.keys` has all other keys.

`worqr/lua/_batch.lua` and ``_part.lua`` say what is in them.
"""

from __future__ import annotations

from dataclasses import dataclass

from worqr.keys import QueueKeys


@dataclass(frozen=True, slots=True)
class BatchKeys:
    """The keys of the batches whose home is `queue`, of its parts of batches, and its outbox."""

    queue: QueueKeys

    @property
    def batches(self) -> str:
        """ZSET of the ids of batches by the time in ms at which the leader looks at them next, and of ended ones by that at which
        they are forgotten.
        """
        return f"{self.queue.base}:batches"

    @property
    def outbox(self) -> str:
        """HASH: topic -> a message for another queue, as msgpack, until it is delivered."""
        return f"{self.queue.base}:outbox"

    def batch(self, id: str) -> str:
        """HASH: the record of a batch, until its `keep` after its end. Also the channel for its changes."""
        return f"{self.queue.base}:batch:{id}"

    def parts(self, id: str) -> str:
        """HASH: the base of a queue -> version, state and counters of its part of a batch, as the home knows them."""
        return f"{self.batch(id)}:parts"

    def part(self, token: str) -> str:
        """HASH: what this queue knows of a batch; expires a day after the `keep` of the batch, counted from its last member."""
        return f"{self.queue.base}:part:{token}"

    def members(self, token: str) -> str:
        """SET of the ids of the members in this queue that have not ended for good."""
        return f"{self.part(token)}:members"

    def follow_ups(self, token: str) -> str:
        """HASH: the follow-ups that this queue holds for a batch of another home. Expires after a week if that is not opened,
        and a day after the home has forgotten it.
        """
        return f"{self.part(token)}:follow_ups"


def keys_at(prefix: str, base: str) -> QueueKeys:
    """Return the keys of the queue or shard whose base this is."""
    name = base[len(prefix) + 1 :]
    return QueueKeys.of(prefix, name[1:-1] if name.endswith("}") else name)
