"""`ShardDirectory`: the number of shards of each queue, as one connection knows it. The first declaration in a mesh decides it.

The registry stores the numbers. A connection reads them when it is made, at each join, and every hour. Before a queue is used for
the first time, the number that this program declares is compared with the stored one. `worqr.shard_layout` computes the shard of
a task.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import count
from math import ceil
from typing import Final

from worqr import ops
from worqr.errors import UsageError
from worqr.keys import QueueKeys, RegistryKeys
from worqr.link import Link
from worqr.log_events import emit
from worqr.shard_layout import MAX_SHARDS, shard_of, shards_of
from worqr.stored_values import readable

logger: logging.Logger = logging.getLogger(__name__)

REFRESH_EVERY: Final = 3600.0
"""Seconds after which a connection reads the declarations of other programs again."""


class ShardDirectory:
    """The numbers of shards that one connection knows.

    `declared` has the declarations of this program. The program may add more.
    """

    def __init__(self, link: Link, prefix: str, declared: Mapping[str, int]) -> None:
        self._link = link
        self._keys = RegistryKeys(prefix)
        self._declared = declared
        self._known: dict[str, int] = {}
        self._counters: dict[str, count[int]] = {}
        self._wrong: set[str] = set()
        self._refreshed_at = 0.0

    def copy_for(self, link: Link) -> ShardDirectory:
        """Return a `ShardDirectory` of another link to the same mesh, with the same initial numbers."""
        copy = ShardDirectory(link, self._keys.prefix, self._declared)
        copy._known, copy._wrong, copy._refreshed_at = self._known, self._wrong, self._refreshed_at
        return copy

    # Reading

    async def initialize(self) -> None:
        """Read the declarations of other programs, and send those of this program. A second call does nothing.

        It ignores a conflicting number. The first use of the queue raises the error, or the join of a peer.
        """
        if self._refreshed_at > 0:
            return
        await self.refresh()
        with suppress(UsageError):
            await self.declare()

    async def refresh(self) -> None:
        """Read the numbers of all queues.

        Raises:
            WrongVersion: the mesh has another wire version. This is the first request of a connection, so nothing was written.
            RefusedByServer, Unavailable: as any request.
        """
        self._store(await self._link.call(ops.list_shards(self._keys)))

    def refresh_if_stale(self) -> None:
        """Read the numbers again if they are older than `REFRESH_EVERY`, without waiting for the reply."""
        if self._refreshed_at + REFRESH_EVERY <= time.monotonic():
            self._refreshed_at = time.monotonic()

            def answered(known: dict[str, int | None] | None, _failure: Exception | None) -> None:
                if known is not None:
                    self._store(known)

            self._link.post(ops.list_shards(self._keys), answered, patience=REFRESH_EVERY)

    def _store(self, known: Mapping[str, int | None]) -> None:
        self._refreshed_at = time.monotonic()
        self._known = {name: number for name, number in known.items() if number and 1 < number <= MAX_SHARDS}
        wrong = {name for name, number in known.items() if not number or number > MAX_SHARDS}
        if wrong - self._wrong:
            self._wrong |= wrong
            text = "%(key)s has no valid number for queue %(queue)r (%(count)d such queues), which counts as 1; remove it: HDEL"
            emit(logger, "shards", text, key=self._keys.shards, queue=readable(min(wrong)), count=len(wrong))

    async def declare(self) -> None:
        """Send the declarations of this program that the server does not have yet.

        Raises:
            UsageError: another program declared another number first.
        """
        new = {queue: number for queue, number in self._declared.items() if self._known.get(queue) != number}
        if not new:
            return
        stored = await self._link.call(ops.declare_shards(self._keys, new))
        self._known = {**self._known, **stored}
        for queue in new:
            self._check(queue)

    def _check(self, queue: str) -> None:
        declared, known = self._declared[queue], self._known.get(queue, 1)
        if declared != known and queue in self._wrong:
            raise UsageError(
                f"the number of shards of queue {queue!r} in the hash {self._keys.shards} is not valid, and {declared} were "
                f"declared here: remove it with `HDEL {self._keys.shards} {queue}`, and connect again"
            )
        if declared != known:
            raise UsageError(
                f"queue {queue!r} has {known} shards in the mesh {self._keys.prefix!r}, and {declared} were declared here: "
                f"declare {known}; or let it run empty, stop its peers, and `await mesh.queue({queue!r}).delete()` where no "
                "number is declared, which forgets it"
            )

    async def forget(self, queue: str) -> bool:
        """Delete the number of a queue, so that the next declaration decides. Returns False if another program changed it
        meanwhile.
        """
        number = self._known.get(queue, 1)
        dropped = number == 1 or await self._link.call(ops.drop_shards(self._keys, queue, number)) == "ok"
        self._known = {name: each for name, each in self._known.items() if name != queue}
        return dropped

    # Choosing shards

    async def shards(self, keys: QueueKeys, *, declare: bool = True) -> tuple[QueueKeys, ...]:
        """Return all shards of a queue; for the keys of a shard, only that one.

        With `declare`, first declare the number of this program if it is not the stored one.

        Raises:
            UsageError: this program declares another number than the mesh knows.
        """
        number = self._known.get(keys.queue, 1)
        if declare and self._declared.get(keys.queue, number) != number:
            try:
                await self.declare()
            except UsageError:
                self._check(keys.queue)  # raises if this queue conflicts; a conflict of another queue is no reason
            number = self._known[keys.queue]
        return (keys,) if number == 1 or keys.tag else shards_of(keys, number)

    def only_shard(self, keys: QueueKeys) -> QueueKeys | None:
        """Return the shard of a queue that has no other, and about which nothing is to be declared; else None."""
        name, known, declared = keys.queue, self._known, self._declared
        alone = (name not in known or known[name] == 1) and (name not in declared or declared[name] == 1)
        return keys if alone else None

    def known_shards(self, keys: QueueKeys) -> tuple[QueueKeys, ...]:
        """Return the shards of a queue as this connection knows them, without a request."""
        number = self._known.get(keys.queue, 1)
        return (keys,) if number == 1 or keys.tag else shards_of(keys, number)

    async def shard_of_id(self, keys: QueueKeys, id: str) -> QueueKeys:
        """Return the shard of the job with this id."""
        return shard_of(await self.shards(keys), id)

    async def shard_for_job(self, keys: QueueKeys, options: Mapping[str, object]) -> QueueKeys:
        """Return the shard for a job with these options, as `worqr.job_options` encodes them: that of its lane, or of its id.

        Raises:
            UsageError: the queue has several shards, and the job has a lane and an id, each of which may lie in another one.
        """
        given, lane = options.get("id"), options.get("lane")
        if isinstance(lane, str):
            shards = await self.shards(keys)
            if given is not None and len(shards) > 1:
                raise UsageError(
                    f"queue {keys.display_name!r} has several shards: a job has an id or a lane there, not both, because each "
                    "decides about its shard"
                )
            return shard_of(shards, lane)
        return await self.shard_of_id(keys, given) if isinstance(given, str) else await self.next_shard(keys)

    async def max_length_per_shard(self, keys: QueueKeys, max_length: int) -> int:
        """Return the part of a queue's limit that applies to one shard."""
        return ceil(max_length / len(await self.shards(replace(keys, tag=""))))

    async def options_for(self, keys: QueueKeys, options: Mapping[str, object]) -> Mapping[str, object]:
        """Return the encoded options of a job, with the part of the queue's limit that applies to this shard."""
        bound = options.get("max_length")
        return (
            {**options, "max_length": await self.max_length_per_shard(keys, bound)}
            if isinstance(bound, int)
            else options
        )

    async def next_shard(self, keys: QueueKeys) -> QueueKeys:
        """Return the next shard for tasks without an id. The first is random, because many programs enqueue only once."""
        shards = await self.shards(keys)
        if len(shards) == 1:
            return shards[0]
        counter = self._counters.get(keys.name) or self._counters.setdefault(
            keys.name, count(random.randrange(len(shards)))
        )
        return shards[next(counter) % len(shards)]
