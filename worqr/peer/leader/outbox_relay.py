"""`OutboxRelay`: the leader delivers what queues have to tell each other about batches, and checks batches.

The promotion of a queue says that it has messages, or batches whose check is due. A script that writes a message tells the
leader, and each scan finds what was missed. Queues are served side by side, each by one task. What a leader does not finish, the
next one does. How a message is delivered is in `worqr.client.outbox_relay`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import trio

from worqr.client.outbox_relay import relay_and_check
from worqr.errors import Unavailable, WorqrError
from worqr.keys import QueueKeys, RegistryKeys
from worqr.link import Link
from worqr.log_events import emit
from worqr.peer.error_throttle import ErrorThrottle
from worqr.peer.leader.sweeper import NODE_PATIENCE
from worqr.peer.registration import LEASE

logger: logging.Logger = logging.getLogger(__name__)

RETRY_AFTER = 1.0
"""Seconds after which messages that could not be delivered are tried again."""
QUEUES_AT_ONCE = 20


class OutboxRelay:
    """Relays messages while this peer leads. Changed only in the loop."""

    def __init__(
        self, link: Link, keys: RegistryKeys, *, leads: Callable[[], bool], expect: Callable[[str, float], None]
    ) -> None:
        self._link = link
        self._keys = keys
        self._leads = leads
        self._expect = expect
        self._todo: set[str] = set()
        self._under_way: set[str] = set()
        self._throttle = ErrorThrottle(logger)
        self._more = trio.Event()

    def request(self, queue: str) -> None:
        """Relay the messages of `queue`, and check its batches, soon."""
        self._todo.add(queue)
        self._more.set()

    async def relay_forever(self) -> None:
        """Relay the messages of the requested queues."""
        async with trio.open_nursery() as nursery:
            while True:
                await self._more.wait()
                self._more = trio.Event()
                free = QUEUES_AT_ONCE - len(self._under_way)
                for queue in sorted(self._todo - self._under_way)[: max(0, free)]:
                    self._todo.discard(queue)
                    self._under_way.add(queue)
                    nursery.start_soon(self._relay, queue)

    async def _relay(self, queue: str) -> None:
        try:
            if self._leads():
                patience = NODE_PATIENCE if self._link.settings.clustered else LEASE
                ask = partial(self._link.call, patience=patience)
                self._tell_old(
                    queue, await relay_and_check(ask, self._keys.prefix, QueueKeys.of(self._keys.prefix, queue))
                )
        except Unavailable as error:
            text = "messages of queue %(queue)r are to be delivered again: %(error)s"
            emit(logger, "relay", text, queue=queue, error=str(error))
            self._expect(queue, RETRY_AFTER)
        except WorqrError as error:
            text = "messages of queue %(queue)r about batches cannot be delivered, trying again: %(error)s"
            self._throttle.error(queue, "relay", text, queue=queue, error=str(error))
            self._expect(queue, RETRY_AFTER)
        finally:
            self._under_way.discard(queue)
            self._more.set()

    def _tell_old(self, queue: str, topics: set[str]) -> None:
        """Log that messages of an earlier form are in the outbox; else, that the queue has no error any more."""
        if not topics:
            self._throttle.resolve(queue)
            return
        text = (
            "messages in the outbox of queue %(queue)r have the form of an earlier version of worqr, which carries a task of "
            "another queue. Nothing delivers them (%(count)d): enqueue the tasks yourself if you trust them, then HDEL %(error)s"
        )
        some = ", ".join(sorted(topics)[:3])
        self._throttle.error(queue, "relay", text, count=len(topics), queue=queue, error=some)
