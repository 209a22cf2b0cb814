"""What a connection knows about queues of several shards: how many each has, by the first declaration in the mesh.

The registry is the only place of the number. A connection reads it when it is made, at each join, and every hour. A number that
this program declares is compared with it before the queue is used for the first time. `worqr.shard_layout` says which task is in
which shard.
"""

from __future__ import annotations

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
from worqr.shard_layout import MAX_SHARDS, shard_of, shards_of

REFRESH_EVERY: Final = 3600.0
"""Seconds after which a connection reads again what other programs have declared."""


class ShardDirectory:
    """How many shards the queues of a mesh have, as one connection knows it. `declared`: the declarations of this program, to
    which more may be added.
    """

    def __init__(self, link: Link, prefix: str, declared: Mapping[str, int]) -> None:
        self._link = link
        self._keys = RegistryKeys(prefix)
        self._declared = declared
        self._known: dict[str, int] = {}
        self._counters: dict[str, count[int]] = {}
        self._refreshed_at = 0.0

    def copy_for(self, link: Link) -> ShardDirectory:
        """Return a `ShardDirectory` of another link to the same mesh, with the same initial numbers."""
        copy = ShardDirectory(link, self._keys.prefix, self._declared)
        copy._known, copy._refreshed_at = self._known, self._refreshed_at
        return copy

    # Reading

    async def initialize(self) -> None:
        """After connecting: read the declarations of other programs, and send those of this program. May be called twice.

        A conflicting number is not reported here: the first use of the queue raises it, or the join of a peer.
        """
        if self._refreshed_at > 0:
            return
        await self.refresh()
        with suppress(UsageError):
            await self.declare()

    async def refresh(self) -> None:
        """Read the numbers of all queues.

        Raises:
            WrongVersion: the mesh has another wire version. It is the first request of a connection: nothing was written.
            RefusedByServer, Unavailable: as any request.
        """
        self._store(await self._link.call(ops.list_shards(self._keys)))

    def refresh_if_stale(self) -> None:
        """Read again if that was long ago, without waiting for the reply."""
        if self._refreshed_at + REFRESH_EVERY <= time.monotonic():
            self._refreshed_at = time.monotonic()

            def answered(known: dict[str, int] | None, _failure: Exception | None) -> None:
                if known is not None:
                    self._store(known)

            self._link.post(ops.list_shards(self._keys), answered, patience=REFRESH_EVERY)

    def _store(self, known: Mapping[str, int]) -> None:
        self._refreshed_at = time.monotonic()
        self._known = {name: number for name, number in known.items() if 1 < number <= MAX_SHARDS}

    async def declare(self) -> None:
        """Send this program's declarations that are not known yet; the first declaration of a queue decides.

        Raises:
            UsageError: the first declaration had another number.
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
        if declared != known:
            raise UsageError(
                f"queue {queue!r} has {known} shards in the mesh {self._keys.prefix!r}, and {declared} were declared here: "
                f"declare {known}; or let it run empty, stop its peers, and `await mesh.queue({queue!r}).delete()` where no "
                "number is declared, which forgets it"
            )

    async def forget(self, queue: str) -> bool:
        """Let the next declaration decide; return False if another program has declared it meanwhile."""
        number = self._known.get(queue, 1)
        dropped = number == 1 or await self._link.call(ops.drop_shards(self._keys, queue, number)) == "ok"
        self._known = {name: each for name, each in self._known.items() if name != queue}
        return dropped

    # Choosing shards

    async def shards(self, keys: QueueKeys, *, declare: bool = True) -> tuple[QueueKeys, ...]:
        """Return all shards of a queue; for a shard, only that one. `declare`: the number that this program declares, if it
        does.

        Raises:
            UsageError: this program declares another number than the mesh knows.
        """
        number = self._known.get(keys.queue, 1)
        if declare and self._declared.get(keys.queue, number) != number:
            try:
                await self.declare()
            except UsageError:
                self._check(keys.queue)  # an error about another queue does not matter here
            number = self._known[keys.queue]
        return (keys,) if number == 1 or keys.tag else shards_of(keys, number)

    async def shard_of_id(self, keys: QueueKeys, id: str) -> QueueKeys:
        """The shard of the job of this id."""
        return shard_of(await self.shards(keys), id)

    async def shard_for_job(self, keys: QueueKeys, options: Mapping[str, object]) -> QueueKeys:
        """The shard for a job with these options, as `worqr.job_options` encodes them."""
        given = options.get("id")
        return await self.shard_of_id(keys, given) if isinstance(given, str) else await self.next_shard(keys)

    async def max_length_per_shard(self, keys: QueueKeys, max_length: int) -> int:
        """The part of a queue's limit that applies to one shard."""
        return ceil(max_length / len(await self.shards(replace(keys, tag=""))))

    async def options_for(self, keys: QueueKeys, options: Mapping[str, object]) -> Mapping[str, object]:
        """The encoded options of a job, with this shard's part of the queue's limit."""
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
        turns = self._counters.get(keys.name) or self._counters.setdefault(
            keys.name, count(random.randrange(len(shards)))
        )
        return shards[next(turns) % len(shards)]
