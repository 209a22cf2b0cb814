"""Hearing a channel for the length of a block, and waiting for news with a look now and then, since messages get lost."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from worqr.errors import Unavailable
from worqr.link import Link, Signal

LOOK_AGAIN = 1.0
"""Seconds after which whoever waits for a message looks by itself."""


@asynccontextmanager
async def listening(link: Link, channel: str, hear: Callable[[bytes], None]) -> AsyncGenerator[None]:
    """Hear a channel for the length of a block, which begins when the server has confirmed it.

    Raises:
        Unavailable: no confirmation within the link's patience.
    """
    subscription = link.subscriptions.open([channel], lambda _channel, message: hear(message), lambda: None)
    try:
        patience = link.settings.patience
        with link.mailbox.move_on_after(patience) as waiting:
            await subscription.wait_confirmed()
        if waiting.cancelled_caught:
            raise Unavailable(f"{channel}: the server confirmed no subscription within {patience:g} s", sent=False)
        yield
    finally:
        subscription.close()


class News:
    """That something was heard since the last look. For one who waits and looks."""

    def __init__(self, link: Link) -> None:
        self._mailbox = link.mailbox
        self._heard = Signal(link.mailbox)

    def tell(self) -> None:
        """Something was heard; called in the loop."""
        self._heard.set()

    async def wait(self) -> None:
        """Until something was heard since the last wait, at most `LOOK_AGAIN` seconds; then look."""
        with self._mailbox.move_on_after(LOOK_AGAIN):
            await self._heard.wait()
        self._heard = Signal(self._mailbox)
