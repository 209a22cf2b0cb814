"""`HistorySampler`: lets the server store the history of the busiest queues, while this peer leads.

It has a task of its own, so that no other chore of the leader waits for it. While no queue changes, it sends nothing.
`ChangedQueues` decides which queues get a record, and `worqr.history_records` documents what a record is. Here: which queues have
a history. Two leaders at once do no harm: what a record holds is read in the server.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import trio

from worqr import ops
from worqr.errors import QueueFull, Unavailable, WorqrError
from worqr.keys import QueueKeys, RegistryKeys
from worqr.link import Link
from worqr.log_events import emit
from worqr.ops import Inspected
from worqr.peer.error_throttle import ErrorThrottle
from worqr.peer.leader.changed_queues import ChangedQueues
from worqr.peer.registration import LEASE

logger: logging.Logger = logging.getLogger(__name__)

NOTE_EVERY: Final = 5
"""Minutes between two notes that a queue has a history."""
AT_REST: Final = 2 * NOTE_EVERY
"""Minutes without a note after which a busier queue may take the place of a queue."""
BUSIER: Final = 2.0
"""How much busier a queue must be to take the place of one that is not at rest."""


class HistorySampler:
    """Stores records of queues that have changed. Changed only in the loop.

    Args:
        link: the link of the peer.
        keys: the keys of the registry.
        limit: how many queues have a history; 0: none.
        leads: returns True if this peer is the leader of the mesh.
    """

    def __init__(self, link: Link, keys: RegistryKeys, *, limit: int, leads: Callable[[], bool]) -> None:
        self._link = link
        self._keys = keys
        self._limit = limit
        self._leads = leads
        self._changed = ChangedQueues()
        self._noted: dict[str, int] | None = None
        self._throttle = ErrorThrottle(logger)
        self._soon = trio.Event()

    def begin(self) -> None:
        """This peer leads now: forget what it knew when it led before."""
        self._changed.clear()
        self._noted = None

    def forget(self, names: Sequence[str]) -> None:
        """Forget queues of which the mesh has forgotten the names."""
        self._changed.forget(names)

    def record(
        self, found: Mapping[str, Inspected], server_ms: int, age: Callable[[str, Inspected], float | None]
    ) -> None:
        """Take over what a scan has found; see `ChangedQueues.record`."""
        if self._limit:
            self._changed.record(found, server_ms, age)
            if self._changed or (self._noted is None and any(queue.counts for queue in found.values())):
                self._soon.set()

    async def sample_forever(self) -> None:
        """Store records whenever some are due."""
        while True:
            await self._soon.wait()
            self._soon = trio.Event()
            await self._try_sample()

    async def _try_sample(self) -> None:
        try:
            await self.sample_once()
        except (Unavailable, QueueFull) as error:  # the link has logged it, or the server is out of memory
            self._log(error)
        except WorqrError as error:
            self._throttle.error("note", "leader", "the history cannot be stored: %(error)s", error=str(error))

    def _log(self, error: WorqrError) -> None:
        text = "the history was not stored: %(error)s"
        emit(logger, "leader", text, level=logging.DEBUG, error=str(error))

    async def sample_once(self) -> None:
        """Store the records that are due."""
        due = self._changed.take_due()
        if self._noted is None:
            self._noted = await self._note()
            self._changed.begin(self._noted)
        created = await self._admit([name for name in due if name not in self._noted])
        for name, age in due.items():
            if name in (self._noted or {}) and self._leads():  # `begin` may run between two requests
                await self._sample(name, age, create=name in created)

    async def _sample(self, name: str, age: float | None, *, create: bool) -> None:
        keys, since = QueueKeys.of(self._keys.prefix, name), self._changed.since(name)
        age_ms = None if age is None else round(age * 1000)
        try:
            record = await self._link.call(
                ops.sample_queue(keys, create=create, since=since, age_ms=age_ms), patience=LEASE
            )
        except Unavailable as error:
            self._log(error)
        except QueueFull:
            raise
        except WorqrError as error:
            text = "the history of queue %(queue)r cannot be stored: %(error)s"
            self._throttle.error(name, "leader", text, queue=name, error=str(error))
        else:
            if record is None:  # it was deleted, or a leader before did not come to begin it
                self._noted = await self._note(dropped=name)
            else:
                self._changed.store(name, record)

    # Which queues have a history

    async def _note(self, *names: str, dropped: str = "") -> dict[str, int]:
        return await self._link.call(ops.note_histories(self._keys, names, dropped=dropped), patience=LEASE)

    async def _admit(self, new: list[str]) -> set[str]:
        """Give queues a history, the most active first. Return their names."""
        noted = self._noted or {}
        if len(noted) > self._limit or (len(noted) == self._limit and new and self._may_replace(new[0], noted)):
            noted = await self._drop(self._least_needed(noted))
        admitted = new[: max(0, self._limit - len(noted))]
        again = [name for name, minute in noted.items() if minute <= self._changed.minute - NOTE_EVERY]
        again = [name for name in again if self._changed.written(name) > noted[name]]
        if admitted or again:
            noted = await self._note(*admitted, *again)
        self._noted = noted
        return set(admitted)

    def _least_needed(self, noted: Mapping[str, int]) -> str:
        """Return the queue that was noted longest ago if it is at rest, else the least active one."""
        oldest = min(noted, key=lambda name: noted[name])
        return oldest if self._at_rest(noted[oldest]) else min(noted, key=self._changed.activity)

    def _at_rest(self, minute: int) -> bool:
        return minute < self._changed.minute - AT_REST

    def _may_replace(self, name: str, noted: Mapping[str, int]) -> bool:
        """Return True if the queue may take the place of another one."""
        other = self._least_needed(noted)
        return self._at_rest(noted[other]) or self._changed.activity(name) > BUSIER * self._changed.activity(other)

    async def _drop(self, name: str) -> dict[str, int]:
        """Delete the history of a queue before it is noted, so that none is left over."""
        await self._link.call(ops.drop_history(QueueKeys.of(self._keys.prefix, name)), patience=LEASE)
        return await self._note(dropped=name)
