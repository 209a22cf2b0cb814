"""`StartControls`: what may start of a queue: pause it, resume it, and limit it. `Queue` inherits it."""

from __future__ import annotations

from worqr import ops
from worqr.client.client import Client
from worqr.client.inspection import ask_each
from worqr.keys import QueueKeys
from worqr.limits import DECLARES_NOTHING, Limit, check_limits, describe_limits, limits_text
from worqr.validation import Seconds, check_text, seconds


class StartControls:
    """The part of `Queue` by which operators decide what may start. Its calls need ``mesh.connect()`` or ``join()``."""

    __slots__ = ("_client", "_keys")

    def __init__(self, client: Client, keys: QueueKeys) -> None:
        self._client = client
        self._keys = keys

    async def pause(self, reason: str = "", *, duration: Seconds | None = None) -> None:
        """Stop all workers from taking tasks of this queue. Running tasks go on, and you can enqueue more.

        Several shards do not stop at one moment.

        Args:
            reason: A text for people; ``info().paused`` has it.
            duration: Seconds, more than 0, or a timedelta, after which the queue resumes by itself. None: when `resume` is
                called.

        Raises:
            UsageError: `duration` is not valid.
        """
        check_text(reason, "reason")
        for_ms = None if duration is None else max(1, round(seconds(duration, "duration", positive=True) * 1000))
        shards = await self._client.sharding.shards(self._keys)
        for keys in shards:
            self._client.link_to(keys.name)  # `link_to` stores the name, so that operators find and resume the queue
        await ask_each(self._client, shards, lambda keys: ops.pause(keys, reason, for_ms))
        await self._client.note("paused", queue=self._keys.display_name, text=reason)

    async def resume(self) -> None:
        """Let workers take tasks of this queue again."""
        await ask_each(self._client, await self._client.sharding.shards(self._keys), ops.resume)
        await self._client.note("resumed", queue=self._keys.display_name)

    async def set_limit(self, *limits: Limit) -> None:
        """Limit what may start of this queue in the whole mesh, in place of what its handler declares, until `clear_limit`.

        A lower limit does not stop tasks that run. Several shards each have a part of it.

        Args:
            limits: At most four; all of them hold. None: the queue has no limit.

        Raises:
            UsageError: There are too many, one is no `Limit`, or it is smaller than the number of shards.
        """
        checked = check_limits(limits, "limits of set_limit")
        shards = await self._client.sharding.shards(self._keys)
        texts = [limits_text(checked, self._keys.display_name, len(shards), n) for n in range(len(shards))]
        for keys, text in zip(shards, texts, strict=True):
            self._client.link_to(keys.name)
            await self._client.ask(ops.set_limits(keys, text))
        await self._client.note("limited", queue=self._keys.display_name, text=describe_limits(checked))

    async def clear_limit(self) -> None:
        """Remove what `set_limit` has set: what the queue's handler declares holds again."""
        shards = await self._client.sharding.shards(self._keys)
        await ask_each(self._client, shards, lambda keys: ops.set_limits(keys, DECLARES_NOTHING))
        await self._client.note("limit_cleared", queue=self._keys.display_name)
