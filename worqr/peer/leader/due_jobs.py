"""`DueJobPromoter`: the leading peer enqueues jobs when they are due, and has the messages of queues about batches delivered.

It sleeps until the earliest known due time. Due times come from scans, from each promotion, and from hints: a script publishes a
hint when a job becomes the earliest of its queue. The server's clock decides whether a job is due. If the leader asks too early,
the job stays where it is, and the reply has the remaining time.
"""

from __future__ import annotations

import logging
import math
from functools import partial
from typing import TYPE_CHECKING

import trio
from trio_util import RepeatedEvent

from worqr import ops
from worqr.batch_keys import keys_at
from worqr.errors import Unavailable, WorqrError
from worqr.keys import QueueKeys, RegistryKeys
from worqr.link import Link, Subscription
from worqr.log_events import emit
from worqr.peer.error_throttle import ErrorThrottle
from worqr.peer.leader.outbox_relay import OutboxRelay
from worqr.peer.registration import LEASE
from worqr.stored_values import exact, whole

if TYPE_CHECKING:
    from collections.abc import Callable


logger: logging.Logger = logging.getLogger(__name__)

AT_MOST_EVERY = 0.005
"""Seconds between two promotions of one queue. Jobs that become due in that time are promoted together."""
RETRY_AFTER = 1.0
"""Seconds after which a promotion that failed is tried again."""


class DueJobPromoter:
    """Promotes jobs at the due times that this peer has learned while it leads. Changed only in the loop."""

    def __init__(
        self, link: Link, keys: RegistryKeys, *, leads: Callable[[], bool], missed: Callable[[], None]
    ) -> None:
        self._link = link
        self._keys = keys
        self._leads = leads
        self._missed = missed
        self._due: dict[str, float] = {}
        self._earlier = RepeatedEvent()
        self._throttle = ErrorThrottle(logger)
        self._subscription: Subscription | None = None
        self.relay: OutboxRelay = OutboxRelay(link, keys, leads=leads, expect=self.expect)

    def begin(self) -> None:
        """Listen for hints, because this peer leads now. Earlier hints do not matter, because `missed` requests a scan."""
        if self._subscription is None:
            self._subscription = self._link.subscriptions.open([self._keys.due_channel], self._on_hint, self._missed)

    def end(self) -> None:
        """Stop listening, because another peer leads."""
        if self._subscription is not None:
            self._subscription.close()
            self._subscription = None
        self._due.clear()

    def _on_hint(self, _channel: str, message: bytes) -> None:
        ms, _, base = exact(message).partition(" ")
        within = whole(ms)
        if within is not None and base.startswith(f"{self._keys.prefix}:{{"):
            self.expect(keys_at(self._keys.prefix, base).name, within / 1000)

    def expect(self, queue: str, within: float) -> None:
        """Note that a job of `queue` is due in `within` seconds."""
        when = trio.current_time() + within
        if when < self._due.get(queue, math.inf):
            self._due[queue] = when
            self._earlier.set()

    async def promote_forever(self) -> None:
        """Promote the jobs of a queue when one of them is due."""
        while True:
            with trio.move_on_at(min(self._due.values(), default=math.inf)):
                await self._earlier.wait()
                continue
            if self._leads():
                await self.promote_once()
            else:
                self._due.clear()

    async def promote_once(self) -> None:
        """Promote the jobs that are due by now, all queues at once."""
        now = trio.current_time()
        async with trio.open_nursery() as nursery:
            for queue, when in tuple(self._due.items()):
                if when <= now:
                    del self._due[queue]
                    nursery.start_soon(partial(self._promote, queue))

    async def _promote(self, queue: str) -> None:
        try:
            found = await self._link.call(ops.promote_due(QueueKeys.of(self._keys.prefix, queue)), patience=LEASE)
        except Unavailable as error:
            emit(logger, "promote_due", "queue %(queue)r: trying again: %(error)s", queue=queue, error=str(error))
            self.expect(queue, RETRY_AFTER)
        except WorqrError as error:
            text = "queue %(queue)r: the server refuses to put scheduled jobs in line, trying again: %(error)s"
            self._throttle.error(queue, "promote_due", text, queue=queue, error=str(error))
            self.expect(queue, RETRY_AFTER)
        else:
            self._throttle.resolve(queue)
            if found.needs_relay:
                self.relay.request(queue)
            if found.next_in_ms is not None:
                self.expect(queue, max(found.next_in_ms / 1000, AT_MOST_EVERY))
