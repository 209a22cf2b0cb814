"""`SubscriptionDeclarer`: stores what the handlers of an application are subscribed to, at the join and every ten minutes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

import msgspec
import trio

from worqr import ops
from worqr.client.topics import Subscribed
from worqr.errors import Unavailable, WorqrError
from worqr.keys import RegistryKeys
from worqr.link import Link
from worqr.log_events import emit
from worqr.peer.error_throttle import ErrorThrottle, sleep_aligned
from worqr.peer.options import PeerSettings
from worqr.peer.session import Session

logger: logging.Logger = logging.getLogger(__name__)

CHECK_EVERY: Final = 2.0
"""Seconds between two checks for handlers that were declared after the join."""
REDECLARE: Final = 600.0
"""Seconds between two declarations of what has not changed."""


class SubscriptionDeclarer:
    """Keeps the subscriptions of one peer declared. After a new registration of `session`, all are declared again."""

    def __init__(self, link: Link, settings: PeerSettings, session: Session) -> None:
        self._link = link
        self._keys = RegistryKeys(settings.prefix)
        self._declared: Mapping[str, Subscribed] = settings.subscriptions
        self._owner = settings.owner
        self._session = session
        self._stored: dict[str, Subscribed] = {}
        self._stored_as: object = None
        self._renew_at = 0.0
        self._throttle = ErrorThrottle(logger)

    async def declare(self) -> None:
        """Store the subscriptions that are new, or all if it is time, or if the registry may have lost them."""
        registration, now, wanted = self._session.registration, trio.current_time(), dict(self._declared)
        if registration is not self._stored_as or now >= self._renew_at:
            self._stored = {}
        new = {queue: each for queue, each in wanted.items() if self._stored.get(queue) != each}
        if new:
            await self._link.call_all(
                [
                    ops.declare_topics(self._keys, queue, msgspec.json.encode(each.facts), each.patterns, self._owner)
                    for queue, each in new.items()
                ]
            )
        if not self._stored:
            self._stored_as, self._renew_at = registration, now + REDECLARE
        self._stored = wanted

    async def declare_forever(self) -> None:
        """Declare what is new, and all again before the registry drops it."""
        while True:
            await sleep_aligned(CHECK_EVERY)
            try:
                await self.declare()
            except Unavailable as error:
                emit(logger, "declare_topics", "the server is away, trying again: %(error)s", error=str(error))
            except WorqrError as error:
                text = "the server refuses the subscriptions, trying again: %(error)s"
                self._throttle.error("", "declare_topics", text, error=str(error))
