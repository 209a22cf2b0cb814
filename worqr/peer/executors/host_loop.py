"""`HostLoop`: the application's own asyncio loop, on which the handlers of its peer run: for ``async with mesh.join():`` under
asyncio.

The peer's Trio loop runs in a thread of its own. So a handler or a route that blocks the asyncio loop does not delay the
heartbeat. If the loop ends inside the block, the peer leaves.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar

import trio

from worqr.errors import UsageError
from worqr.peer.executors.asyncio_loop import AsyncioLoop

if TYPE_CHECKING:
    from worqr.peer.executors.asyncio_loop import AsyncioRun


class HostLoop(AsyncioLoop):
    """The asyncio loop in which this object is made.

    Set once, by `attach`: `_token`. Changed in the Trio loop: `_ended_inside`.
    """

    owned_by_application: ClassVar[bool] = True
    whose: ClassVar[str] = "the application's"

    def __init__(self, is_exiting: Callable[[], bool]) -> None:
        """`is_exiting` returns True after the interpreter has begun to exit: then no loop of the main thread runs again."""
        super().__init__()
        self._is_exiting = is_exiting
        self._loop = asyncio.get_running_loop()
        self._thread = threading.current_thread()
        self._ended_inside = False

    # In the Trio loop

    def attach(self) -> None:
        """Connect this Trio loop, so that its runs can begin on the asyncio loop."""
        self._token = trio.lowlevel.current_trio_token()

    def start(self, run: AsyncioRun) -> None:
        """Begin `run` on the loop.

        On a closed loop it never begins. The peer then cancels it, and its task returns to the queue.
        """
        with suppress(RuntimeError):
            super().start(run)

    async def end(self) -> None:
        """Do nothing: the loop is the application's, and does not end with the peer."""
        await trio.lowlevel.checkpoint()

    def call_if_open(self, callback: Callable[[], None]) -> bool:
        """Run `callback` on the asyncio loop; return False if the loop has ended."""
        return not self._has_ended() and super().call_if_open(callback)

    async def watch_until_ended(
        self, block_limit: float, ended: Callable[[], object], turns: Callable[[], object]
    ) -> None:
        """Check the loop periodically, and call `ended` when it has ended; otherwise as `watch_forever`."""
        await self.watch_forever(block_limit, turns)
        self._ended_inside = True
        ended()

    def raise_if_ended(self) -> None:
        """Raise UsageError if the loop ended while the peer was there."""
        if self._ended_inside:
            raise UsageError(
                "the asyncio loop ended inside `async with mesh.join():`; leave the block before the loop ends"
            )

    def _has_ended(self) -> bool:
        """Return True if nothing runs on the loop any more.

        A loop that is only stopped may run again, unless the interpreter exits.
        """
        loop = self._loop
        return loop is None or loop.is_closed() or (self._is_exiting() and not loop.is_running())
