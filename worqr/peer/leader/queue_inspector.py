"""`QueueInspector`: reads the queues of the mesh for a scan, many at a time, and removes their deleted tasks.

On a cluster, the node of some queues may be unavailable. Their names are kept, so that they do not delay the other queues again.
Not here: which queues a scan reads, and what follows from it (`scanner`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import trio

from worqr import ops
from worqr.errors import Unavailable, WorqrError
from worqr.keys import QueueKeys
from worqr.link import Link
from worqr.log_events import emit
from worqr.ops import Inspected
from worqr.peer.error_throttle import ErrorThrottle
from worqr.peer.known_queues import KnownQueues
from worqr.peer.leader.sweeper import NODE_PATIENCE
from worqr.peer.registration import LEASE

logger: logging.Logger = logging.getLogger(__name__)

AT_ONCE = 100
"""Queues per round trip."""
PURGES = 10
"""Batches of the deleted tasks of a queue that one scan removes, if the program that deleted them does not: it may have ended."""


class QueueInspector:
    """Reads queues. Changed only in the loop.

    Attributes:
        unreachable: names of queues whose node did not reply.
        refused: names of queues that the server refuses to read, and its words.
    """

    def __init__(self, link: Link, prefix: str, known: KnownQueues) -> None:
        self.unreachable: set[str] = set()
        self.refused: dict[str, str] = {}
        self._link = link
        self._prefix = prefix
        self._known = known
        self._patience = NODE_PATIENCE if link.settings.clustered else LEASE
        self._throttle = ErrorThrottle(logger)

    def begin(self) -> None:
        """This peer leads now: forget what the server refused when it led before."""
        self.refused.clear()

    async def inspect_all(self, names: Sequence[str]) -> dict[str, Inspected]:
        """Inspect these queues. The result lacks queues that cannot be read."""
        away = frozenset(self.unreachable)
        found = await self._inspect_some([name for name in names if name not in away])
        if away:  # try some unreachable queues; if one replies, try all of them in the next scan
            again = await self._inspect_some([name for name in names if name in away][:AT_ONCE])
            found |= again
            if again:
                self.unreachable -= away
        return found

    async def _inspect_some(self, names: Sequence[str]) -> dict[str, Inspected]:
        found: dict[str, Inspected] = {}
        for start in range(0, len(names), AT_ONCE):
            some = names[start : start + AT_ONCE]
            async with trio.open_nursery() as nursery:
                for name in some:
                    nursery.start_soon(self._inspect, name, found)
            if self.unreachable.issuperset(some):
                break  # the server does not reply, or a node of many queues
        return found

    async def _inspect(self, name: str, found: dict[str, Inspected]) -> None:
        try:
            found[name] = await self.inspect(name)
        except Unavailable as error:
            self.unreachable.add(name)
            emit(logger, "leader", "queue %(queue)r was not scanned: %(error)s", queue=name, error=str(error))
        except WorqrError as error:
            self._known.mark_read(name)
            self.refused[name] = str(error)
            text = "queue %(queue)r cannot be scanned: %(error)s"
            self._throttle.error(name, "leader", text, queue=name, error=str(error))
        else:
            self._known.mark_read(name)
            self._throttle.resolve(name)
            self.refused.pop(name, None)

    async def inspect(self, name: str) -> Inspected:
        """Inspect one queue."""
        return await self._link.call(ops.inspect(QueueKeys.of(self._prefix, name)), patience=self._patience)

    async def purge(self, name: str) -> None:
        """Remove some of the deleted tasks of a queue, or log why that failed."""
        try:
            for _ in range(PURGES):
                if not await self._link.call(
                    ops.purge_queue(QueueKeys.of(self._prefix, name)), patience=self._patience
                ):
                    return
        except Unavailable as error:
            emit(logger, "purge_queue", "queue %(queue)r: trying again: %(error)s", queue=name, error=str(error))
        except WorqrError as error:
            text = "queue %(queue)r: the server refuses to remove it, trying again: %(error)s"
            self._throttle.error(("purge", name), "purge_queue", text, queue=name, error=str(error))
