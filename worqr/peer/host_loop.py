"""The application's own asyncio loop, on which the handlers of its peer run: for ``async with mesh.join():`` under asyncio.

The peer's Trio loop runs in a thread of its own, so a handler or a route that blocks the asyncio loop does not delay the
heartbeat. Here: `HostLoop`, what the peer does on that loop, and how the peer watches it. A loop that does not turn is named in
the log, and the peer takes no more tasks for it meanwhile. If the loop ends inside the block, the peer leaves.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar, Final

import trio

from worqr.errors import UsageError
from worqr.log_events import emit
from worqr.peer.aio import AsyncioLoop
from worqr.peer.interpreter_exit import is_exiting
from worqr.peer.scheduler import Pool

if TYPE_CHECKING:
    from worqr.peer.aio import Run
    from worqr.peer.engine import Engine

logger: logging.Logger = logging.getLogger(__name__)

LOOK_EVERY: Final = 0.5
"""Seconds between two looks at the loop."""
BLOCKED_AFTER: Final = 1.0
"""Seconds without a turn after which the loop counts as blocked."""
UNLIMITED: Final = 1_000_000
"""Places for runs on a loop that turns; a peer has fewer units."""


class HostLoop(AsyncioLoop):
    """The asyncio loop that runs where this is made.

    Set once, by `attach`: `_token`. Changed in the asyncio loop: `_asked_at`, to None. Changed in the Trio loop: the rest.
    """

    applications: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self._loop = self._host = asyncio.get_running_loop()
        self._thread = threading.current_thread()
        self._places = Pool(UNLIMITED)
        self.pool: Pool | None = self._places
        self._asked_at: float | None = None
        self._looked_at = time.monotonic()
        self._blocked_since: float | None = None
        self._reported = False
        self._ended_inside = False

    @property
    def blocked(self) -> bool:
        """The loop has not turned for a while."""
        return self._blocked_since is not None

    @property
    def lag(self) -> float:
        """Seconds for which the loop has not turned. From any thread."""
        asked_at = self._asked_at
        if asked_at is None or threading.current_thread() is self._thread:
            return 0.0
        return time.monotonic() - asked_at

    # In the Trio loop

    def attach(self) -> None:
        """Let runs of this Trio loop begin on the asyncio loop."""
        self._token = trio.lowlevel.current_trio_token()

    def start(self, run: Run) -> None:
        """Let `run` begin. On a closed loop it never does; the peer then cancels it, and its task returns to the queue."""
        with suppress(RuntimeError):
            super().start(run)

    async def end(self) -> None:
        """The loop is the application's: nothing on it ends with the peer."""
        await trio.lowlevel.checkpoint()

    def tell(self, callback: Callable[[], None]) -> bool:
        """Run `callback` on the asyncio loop; return False if the loop has ended."""
        return not self._has_ended() and super().tell(callback)

    async def watch_forever(self, engine: Engine) -> None:
        """Look at the loop again and again, until it has ended; then end the block of `join`."""
        while not self._has_ended():
            self._look(engine)
            await trio.sleep(LOOK_EVERY)
        self._ended_inside = True
        engine.body.cancel()

    def raise_if_ended(self) -> None:
        """Raise UsageError if the loop ended while the peer was there."""
        if self._ended_inside:
            raise UsageError(
                "the asyncio loop ended inside `async with mesh.join():`; leave the block before the loop ends"
            )

    def _has_ended(self) -> bool:
        """Return True if nothing runs on the loop any more. One that is only stopped may go on, unless the interpreter exits."""
        return self._host.is_closed() or (is_exiting() and not self._host.is_running())

    def _look(self, engine: Engine) -> None:
        """Judge the last tick, and post the next one if the loop has answered that."""
        now = time.monotonic()
        overslept, self._looked_at = now - self._looked_at - LOOK_EVERY, now
        asked_at = self._asked_at
        if asked_at is None:
            if self._blocked_since is not None:
                self._turns(engine, now - self._blocked_since)
            self._asked_at = now
            self.tell(self._answer)
        elif overslept > BLOCKED_AFTER:
            self._asked_at = asked_at + overslept  # this thread could not run, so the loop perhaps could not either
        elif now - asked_at > BLOCKED_AFTER:
            self._is_blocked(now - asked_at, engine.block_limit)

    def _is_blocked(self, seconds: float, limit: float) -> None:
        if self._blocked_since is None:
            self._blocked_since = time.monotonic() - seconds
            self._places.limit = 0
            text = (
                "the application's asyncio loop has not turned for %(duration).1f s, and this worker takes no tasks for it "
                "until it does; let blocking code run in a thread; it is at\n%(where)s"
            )
            emit(logger, "asyncio.blocked", text, duration=seconds, where=self.where())
        elif seconds > limit and not self._reported:
            self._reported = True
            text = (
                "the application's asyncio loop has not turned for %(duration).1f s, and the tasks on it stay with this worker; "
                "restart the process if it does not end; it is at\n%(where)s"
            )
            emit(logger, "asyncio.blocked", text, level=logging.ERROR, duration=seconds, where=self.where())

    def _turns(self, engine: Engine, seconds: float) -> None:
        self._blocked_since, self._reported = None, False
        text = "the application's asyncio loop turns again, after %(duration).1f s"
        emit(logger, "asyncio.turns", text, duration=seconds)
        self._places.limit = UNLIMITED
        engine.scheduler.dispatch_soon()

    # In the asyncio loop

    def _answer(self) -> None:
        self._asked_at = None
