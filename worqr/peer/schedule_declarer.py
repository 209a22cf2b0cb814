"""`ScheduleDeclarer`: stores the schedules of an application when its peer joins, and renews them every ten minutes.

Definitions are sent at the join, in pages. Later only names are sent; a definition follows if the registry has lost it. So a peer
that joined before a deployment does not undo the changes of that deployment. Not here: firing schedules
(`leader.schedule_ticker`).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

import trio

from worqr import ops
from worqr.cron import Definition
from worqr.errors import Unavailable, WorqrError
from worqr.keys import QueueKeys, RegistryKeys
from worqr.link import Link
from worqr.log_events import emit
from worqr.ops.replies import in_chunks
from worqr.peer.aligned_sleep import sleep_aligned
from worqr.peer.error_throttle import ErrorThrottle

logger: logging.Logger = logging.getLogger(__name__)

CHECK_EVERY = 2.0
"""Seconds between two checks for schedules that were declared after the join."""
REDECLARE = 600.0
RETRY_AFTER = 3.0
"""Seconds until the next try after the server has refused."""
PAGES_AT_ONCE = 4


class ScheduleDeclarer:
    """Keeps the schedules of one peer declared. Changed only in the loop."""

    def __init__(
        self,
        link: Link,
        keys: RegistryKeys,
        declared: Mapping[str, Definition],
        shards_of: Callable[[str], Awaitable[Sequence[QueueKeys]]],
        registration: Callable[[], object],
    ) -> None:
        """`registration`: returns the present registration. After a new registration, all schedules are declared again."""
        self._shards_of = shards_of
        self._registration = registration
        self._link = link
        self._keys = keys
        self._declared = declared
        self._stored: set[str] = set()
        self._declared_as: object = None
        self._renew_at = 0.0
        self._throttle = ErrorThrottle(logger)

    async def declare(self) -> None:
        """Store the schedules that were not declared yet. They replace schedules of the same names."""
        new = [definition for name, definition in self._declared.items() if name not in self._stored]
        self._renew_at = trio.current_time() + REDECLARE
        self._declared_as = self._registration()
        if new:
            await self._store(new, replace=True)
            self._stored.update(definition.name for definition in new)
            await self._note_queues(new)

    async def declare_forever(self) -> None:
        """Declare new schedules, and renew the others before the registry drops them."""
        while True:
            wait = CHECK_EVERY
            try:
                await self.keep_declared()
            except Unavailable as error:
                emit(logger, "declare_schedules", "the server is away, trying again: %(error)s", error=str(error))
            except WorqrError as error:
                self._throttle.error(
                    "",
                    "declare_schedules",
                    "the server refuses the schedules, trying again: %(error)s",
                    error=str(error),
                )
                wait = RETRY_AFTER
            await sleep_aligned(wait)

    async def keep_declared(self) -> None:
        """Declare new schedules. Renew the others if it is time, or if the registry may have lost them."""
        if len(self._declared) > len(self._stored):
            await self.declare()
        if not self._stored:
            return
        lost = self._declared_as is not self._registration()
        if lost or trio.current_time() >= self._renew_at:
            await self._renew()
            self._renew_at = trio.current_time() + REDECLARE
            self._declared_as = self._registration()

    async def _store(self, definitions: list[Definition], *, replace: bool) -> None:
        pages = in_chunks(
            [(definition.name, definition.encode()) for definition in definitions],
            lambda pair: len(pair[1]),
            most=ops.SCHEDULES_AT_ONCE,
            most_bytes=ops.SCHEDULES_BYTES,
        )
        calls = [ops.declare_schedules(self._keys, page, replace=replace) for page in pages]
        for start in range(0, len(calls), PAGES_AT_ONCE):
            await self._link.call_all(calls[start : start + PAGES_AT_ONCE])

    async def _renew(self) -> None:
        names = [name for name in self._declared if name in self._stored]
        missing: list[str] = []
        for start in range(0, len(names), ops.SCHEDULES_AT_ONCE):
            call = ops.renew_schedules(self._keys, names[start : start + ops.SCHEDULES_AT_ONCE])
            missing += await self._link.call(call)
        if missing:
            await self._store([self._declared[name] for name in missing], replace=False)
        await self._note_queues([self._declared[name] for name in names])

    async def _note_queues(self, definitions: list[Definition]) -> None:
        queues = sorted({definition.queue for definition in definitions})
        names = [keys.name for queue in queues for keys in await self._shards_of(queue)]
        for start in range(0, len(names), ops.MAX_ITEMS):
            call = ops.note_queues(self._keys, names[start : start + ops.MAX_ITEMS])
            self._link.post(call, lambda _word, _failure: None, patience=REDECLARE)
