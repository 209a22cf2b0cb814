"""Stuck handlers: runs that were cancelled, whatever for, and do not end.

Nobody can end one: a coroutine that swallows Trio's cancellation, a thread that does not ask, a task that blocks its asyncio
loop. After a while it is reported, once, with the name of its handler and where it is, and its slot is given to another
task, so that a peer does not come to a halt by and by. Its claim stays with it, so that its task does not run a second time
beside it; when it ends at last, the claim is settled as any other that was cancelled.
"""

# The private fields of Context are hidden from users, not from its neighbours.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import trio
from trio_util import periodic

from worqr.peer.claiming import HandlerStation
from worqr.peer.context import Context
from worqr.peer.running import name_of
from worqr.peer.stacks import describe

if TYPE_CHECKING:
    from worqr.peer.claiming import Station
    from worqr.peer.running import Slots

logger: logging.Logger = logging.getLogger(__name__)

LOOK_EVERY = 1.0
"""Seconds, at most, between two looks at what was cancelled."""


class Stuck:
    """Watches the cancelled runs of one peer; `after`: seconds until one counts as stuck. Changed only in the loop."""

    def __init__(self, stations: Callable[[], Iterable[Station]], slots: Slots, *, after: float) -> None:
        self.after: float = after
        self._stations = stations
        self._slots = slots
        self._since: dict[Context, float] = {}
        self._reported: set[Context] = set()

    async def watch_forever(self) -> None:
        """Look again and again."""
        async for _ in periodic(min(LOOK_EVERY, self.after / 4)):
            self.look_once()

    def look_once(self) -> None:
        """Note which runs have been cancelled, report those that were long ago, forget those that ended.

        A run is known by its station's `running`, also after the queue was left without it.
        """
        now = trio.current_time()
        for station in self._stations():
            if isinstance(station, HandlerStation):
                for context in station.running.values():
                    if context.cancel_reason is not None:
                        self._since.setdefault(context, now)
        for context, since in tuple(self._since.items()):
            if context._station.running.get(context.fence) is not context:
                self._forget(context, now - since)
            elif now - since >= self.after and context not in self._reported:
                self._report(context, now - since)

    def _report(self, context: Context, seconds: float) -> None:
        self._reported.add(context)
        logger.error(
            "handler.stuck: %s: still runs %.1f s after it was cancelled (%s); another task gets its slot; it is at\n%s",
            *(self.name(context), seconds, context.cancel_reason, self.where(context)),
        )
        elsewhere = context._elsewhere
        context._station.give_slot_away(context, place=elsewhere is not None and elsewhere.replace())

    def _forget(self, context: Context, seconds: float) -> None:
        del self._since[context]
        if context in self._reported:
            self._reported.discard(context)
            logger.info("handler.unstuck: %s: ended %.1f s after it was cancelled", self.name(context), seconds)

    def name(self, context: Context) -> str:
        """Which run it is, for people."""
        handler = name_of(context._station.handler)
        return f"queue {context.queue!r}, claim {context.fence}, handler {handler}"

    def where(self, context: Context) -> str:
        """Where its handler is at this moment, as in a traceback."""
        elsewhere = context._elsewhere
        where = "" if elsewhere is None else elsewhere.where()
        return where or describe(self._slots.frames_of(context))
